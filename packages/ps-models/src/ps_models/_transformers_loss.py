"""Make a model of transformers compute its loss in chunks.

[Note: logits that are not made]
A causal language model of transformers computes ``logits = head(x)`` and ``loss_function(logits, labels, ...)``. Where
it is called with labels, `ChunkedHead` returns its input as `NotMade` in place of logits. `LossInChunks` takes the
input out, and computes logits and loss as in [Note: the chunked loss]. The model's own code is not replaced. It may do
something else with its logits, such as capping them. Then `NotMade` makes them whole: the result is the same.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ps_core import InvalidInput
from ps_models._loss import IGNORED, head_loss, next_labels

_WHOLE_LOSS = "ForCausalLMLoss"
"""The name of transformers' loss of the next token."""
_with_labels: ContextVar[bool] = ContextVar("with_labels", default=False)
"""True while a model computes its own loss."""


def use_chunked_loss(model: nn.Module, tokens: int = 1024) -> None:
    """Compute the loss of a model of transformers in chunks of ``tokens`` tokens, not from all logits at once.

    The causal language model is changed in place, and may have adapters of PEFT. Called with ``labels``, it returns no
    ``logits`` then; without labels it returns all of them. The names of parameters stay.
    """
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
        raise InvalidInput(f"tokens: expected a whole number of at least 1, found {tokens!r}")
    language_model: Any = next((each for each in model.modules() if _computes_loss(each)), None)
    if language_model is None:
        raise InvalidInput(
            f"use_chunked_loss: {type(model).__name__} has no part with transformers' loss of the next token; expected "
            "a causal language model of transformers, as AutoModelForCausalLM makes"
        )
    head = language_model.get_output_embeddings()
    if type(head) not in (nn.Linear, ChunkedHead):
        raise InvalidInput(
            f"use_chunked_loss: the head of {type(language_model).__name__} is a {type(head).__module__}."
            f"{type(head).__name__}, expected torch.nn.Linear; leave the head out of the modules that get adapters"
        )
    loss = language_model.loss_function
    language_model.loss_function = LossInChunks(loss.whole if isinstance(loss, LossInChunks) else loss, tokens)
    if type(head) is nn.Linear:
        head.__class__ = ChunkedHead
        language_model.register_forward_pre_hook(_before_forward, with_kwargs=True)
        language_model.register_forward_hook(_after_forward, prepend=True, always_call=True)


class ChunkedHead(nn.Linear):
    """A head that makes no logits while the model computes its own loss."""

    def forward(self, input: Tensor) -> Any:
        """Return logits, or the input as `NotMade`."""
        return NotMade(self, input) if _with_labels.get() else super().forward(input)


@dataclass(frozen=True, slots=True, eq=False)
class NotMade:
    """Stand for the logits of a head; whatever is done with them makes them. (Any: as a tensor's.)"""

    head: ChunkedHead
    x: Tensor
    """The head's input."""

    def float(self) -> NotMade:
        """Return the same: the loss is in fp32."""
        return self

    def contiguous(self) -> NotMade:
        """Return the same."""
        return self

    def __mul__(self, factor: Any) -> Any:
        """Scale the head's input by a number."""
        return NotMade(self.head, self.x * factor) if self._scales(factor) else self._whole() * factor

    def __truediv__(self, factor: Any) -> Any:
        """Divide the head's input by a number."""
        return NotMade(self.head, self.x / factor) if self._scales(factor) else self._whole() / factor

    def _scales(self, factor: object) -> bool:
        return isinstance(factor, float | int) and self.head.bias is None

    def _whole(self) -> Tensor:
        warnings.warn(
            "use_chunked_loss: this model computes with its logits before the loss, so they are made whole",
            stacklevel=3,
        )
        return nn.functional.linear(self.x, self.head.weight, self.head.bias)

    def __getitem__(self, index: Any) -> Tensor:
        """Return a part of the logits."""
        return self._whole()[index]

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the logits."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._whole(), name)

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: object, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function of PyTorch with the logits."""
        made = [each._whole() if isinstance(each, NotMade) else each for each in args]
        named = {name: each._whole() if isinstance(each, NotMade) else each for name, each in (kwargs or {}).items()}
        return function(*made, **named)


@dataclass(frozen=True, slots=True)
class LossInChunks:
    """Compute what transformers' ``ForCausalLMLoss`` computes. (Any: its further arguments.)"""

    whole: Callable[..., Tensor]
    """The function of transformers, for logits that are made."""
    tokens: int

    def __call__(
        self,
        logits: Any,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Any = None,
        ignore_index: int = IGNORED,
        shift_labels: Tensor | None = None,
        **more: Any,
    ) -> Tensor:
        """Return the mean over tokens, or the sum divided by ``num_items_in_batch``."""
        if not isinstance(logits, NotMade):
            return self.whole(logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **more)
        head, x_nh = logits.head, logits.x.flatten(0, -2)
        labels_n = (next_labels(labels) if shift_labels is None else shift_labels).flatten().to(x_nh.device)
        labels_n = labels_n.masked_fill(labels_n == ignore_index, IGNORED)
        mean = num_items_in_batch is None
        loss, _ = head_loss(x_nh, head.weight, labels_n, bias_v=head.bias, rows=self.tokens, mean=mean)
        if mean:
            return loss
        return loss / torch.as_tensor(num_items_in_batch, device=loss.device)


def _computes_loss(module: nn.Module) -> bool:
    """Return True for a model of transformers that computes the loss of the next token from a head's logits."""
    if not hasattr(type(module), "loss_function") or not hasattr(type(module), "get_output_embeddings"):
        return False
    loss = getattr(module, "loss_function", None)
    return isinstance(loss, LossInChunks) or getattr(loss, "__name__", "") == _WHOLE_LOSS


def _before_forward(model: nn.Module, args: object, kwargs: Mapping[str, Any]) -> None:
    _with_labels.set(kwargs.get("labels") is not None)


def _after_forward(model: nn.Module, args: object, output: Any) -> Any:
    """Leave `NotMade` out of the result."""
    _with_labels.set(False)
    if isinstance(output, tuple):
        return tuple(each for each in output if not isinstance(each, NotMade))
    if isinstance(output, Mapping) and any(isinstance(each, NotMade) for each in output.values()):
        made: Any = type(output)
        return made(**{name: each for name, each in output.items() if not isinstance(each, NotMade)})
    return output
