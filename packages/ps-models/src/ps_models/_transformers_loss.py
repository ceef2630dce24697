"""Make a model of transformers compute its loss in chunks.

[Note: logits that are not made]
A causal language model of transformers computes ``logits = head(x)`` and ``loss_function(logits, labels, ...)``. Where
it is called with labels, `ChunkedHead` returns its input as `NotMade` in place of logits. `LossInChunks` takes the
input out, and computes logits and loss as in [Note: the chunked loss]. The model's own code is not replaced. It may do
something else with its logits, such as capping them. Then `NotMade` makes them whole, once: the result is the same.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ps_core import InvalidInput
from ps_models._loss import IGNORED, head_loss, next_labels

CHUNK_TOKENS = 1024
"""Tokens whose logits are there at a time, unless a program asks for another number."""
_WHOLE_LOSS = "ForCausalLMLoss"
"""The name of transformers' loss of the next token."""
_with_labels: ContextVar[bool] = ContextVar("with_labels", default=False)
"""True while a model computes its own loss."""


def use_chunked_loss(model: nn.Module, tokens: int = CHUNK_TOKENS) -> None:
    """Compute the loss of a model of transformers in chunks of ``tokens`` tokens, not from all logits at once.

    The causal language model is changed in place, and may have adapters of PEFT. If ``model`` has several, the first is
    changed. Called with the keyword ``labels``, it returns no ``logits``; without labels it returns all of them. The
    names of parameters stay. Call it again after ``resize_token_embeddings``, which makes a new head.
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
            f"{type(head).__name__}, expected torch.nn.Linear; call it before the head gets an adapter"
        )
    loss = language_model.loss_function
    again = isinstance(loss, LossInChunks)
    language_model.loss_function = LossInChunks(loss.whole if again else loss, tokens)
    head.__class__ = ChunkedHead
    if not again:
        language_model.register_forward_pre_hook(_before_forward, with_kwargs=True)
        language_model.register_forward_hook(_after_forward, prepend=True, always_call=True)


class ChunkedHead(nn.Linear):
    """A head that makes no logits while the model computes its own loss."""

    def forward(self, input: Tensor) -> Any:
        """Return logits, or the input as `NotMade`."""
        if not _with_labels.get() or "forward" in vars(self):  # accelerate's offload takes the weight away after it
            return super().forward(input)
        device = input.device.type
        if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) is torch.bfloat16:
            input = input.bfloat16()
        return NotMade(self, input, input.dtype)


@dataclass(slots=True, eq=False)
class NotMade:
    """Stand for the logits of a head, which any use but the loss in chunks makes. (Any: as a tensor's.)"""

    head: ChunkedHead
    x: Tensor
    """The head's input."""
    dtype: torch.dtype
    """The type of the logits."""
    made: Tensor | None = None
    """The logits, once they are made."""

    @property
    def device(self) -> torch.device:
        """Return where the logits would be."""
        return self.x.device

    def float(self) -> Any:
        """Return the logits in fp32."""
        if self.made is not None:
            return self.made.float()
        return self if self.dtype == torch.float32 else NotMade(self.head, self.x, torch.float32)

    def contiguous(self) -> NotMade:
        """Return the same."""
        return self

    def __mul__(self, factor: Any) -> Any:
        """Scale the head's input by a number."""
        return NotMade(self.head, self.x * factor, self.dtype) if self._scales(factor) else self._whole() * factor

    __rmul__ = __mul__

    def __truediv__(self, factor: Any) -> Any:
        """Divide the head's input by a number."""
        return NotMade(self.head, self.x / factor, self.dtype) if self._scales(factor) else self._whole() / factor

    def _scales(self, factor: object) -> bool:
        return self.made is None and isinstance(factor, float | int) and self.head.bias is None

    def _whole(self) -> Tensor:
        if self.made is None:
            warnings.warn(
                "use_chunked_loss: this model computes with its logits before the loss, so they are made whole",
                stacklevel=3,
            )
            self.made = nn.functional.linear(self.x, self.head.weight, self.head.bias).to(self.dtype)
        return self.made

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
        made, named = tree_map_only(NotMade, NotMade._whole, (args, kwargs or {}))
        return function(*made, **named)


def _operator(name: str) -> Callable[..., Any]:
    return lambda logits, *others: getattr(logits._whole(), name)(*others)


_OF_ITEMS = ("getitem", "setitem", "len", "iter", "eq", "ne", "lt", "le", "gt", "ge")
_OF_NUMBERS = ("neg", "add", "radd", "iadd", "sub", "rsub", "isub", "pow", "matmul", "rtruediv")
for _name in _OF_ITEMS + _OF_NUMBERS:
    setattr(NotMade, f"__{_name}__", _operator(f"__{_name}__"))


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
        if not _is_missing(logits):
            return self.whole(_made(logits), labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **more)
        head, x_nh = logits.head, logits.x.flatten(0, -2)
        labels_n = (next_labels(labels) if shift_labels is None else shift_labels).flatten().to(x_nh.device)
        labels_n = labels_n.masked_fill(labels_n == ignore_index, IGNORED)
        mean = num_items_in_batch is None
        # Under autocast the input is in 16 bits, and the head's parameters are not.
        weight_vh, bias_v = head.weight.to(x_nh.dtype), None if head.bias is None else head.bias.to(x_nh.dtype)
        loss, _ = head_loss(x_nh, weight_vh, labels_n, bias_v=bias_v, rows=self.tokens, mean=mean)
        if mean:
            return loss
        return loss / torch.as_tensor(num_items_in_batch, device=loss.device)


def _computes_loss(module: nn.Module) -> bool:
    """Return True for a model of transformers that computes the loss of the next token from a head's logits."""
    if not hasattr(type(module), "loss_function") or not hasattr(type(module), "get_output_embeddings"):
        return False
    head: Any = module.get_output_embeddings
    loss = None if head() is None else getattr(module, "loss_function", None)
    return isinstance(loss, LossInChunks) or getattr(loss, "__name__", "") == _WHOLE_LOSS


def _before_forward(model: nn.Module, args: object, kwargs: Mapping[str, Any]) -> None:
    _with_labels.set(kwargs.get("labels") is not None)


def _after_forward(model: nn.Module, args: object, output: Any) -> Any:
    """Leave `NotMade` out of the result, or put the logits that it made in."""
    _with_labels.set(False)
    if isinstance(output, tuple):
        return tuple(_made(each) for each in output if not _is_missing(each))
    if isinstance(output, Mapping) and any(isinstance(each, NotMade) for each in output.values()):
        kind: Any = type(output)
        return kind(**{name: _made(each) for name, each in output.items() if not _is_missing(each)})
    return output


def _is_missing(value: object) -> bool:
    return isinstance(value, NotMade) and value.made is None


def _made(value: Any) -> Any:
    return value.made if isinstance(value, NotMade) else value
