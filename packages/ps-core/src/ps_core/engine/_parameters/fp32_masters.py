"""Track loads of fp32 masters: a 16-bit model's state dict rounds them, the optimizer's holds them exactly.

[Note: which is loaded first]
Weights and masters that were saved together are the same numbers at two precisions. Whichever is loaded first, the
second is compared with it. Each master, rounded to the type of the loaded weight, should be that weight. Where they
agree, the master stays. Where they do not, the weights were changed on purpose, and stay as they were loaded, as in
plain PyTorch. If no weights were loaded since the last step, the parameters become the masters. A line is logged where
they differed. The next step ends all this: masters that were stepped belong to no state dict.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from ps_core.engine._parameters.param_state import ParamState
from ps_core.engine._support.log import log_line, warn


class Masters:
    """The masters that were loaded into one model since its last step."""

    def __init__(
        self,
        records: Iterable[ParamState],
        read: Callable[[ParamState], torch.Tensor],
        name: Callable[[], str],
        *,
        speaks: bool,
    ) -> None:
        """Start to track; ``read`` copies a master to CPU memory, ``name`` is the model's, ``speaks``: this process
        warns.
        """
        self._read, self._name = read, name
        self._weights: dict[ParamState, torch.dtype] = {}
        """Parameters whose weights were loaded, and the type they were loaded in."""
        self._given: dict[ParamState, None] = {}
        """Parameters whose masters an optimizer's state gave."""
        self._rounded = {record: None for record in records if _lossy(record, record.given[1])}
        """Parameters whose masters are weights of 16 bits."""
        self._exchanged: dict[ParamState, None] = {}
        """Parameters whose weights an optimizer's state changed."""
        self._states_loaded = False
        self.changed = True
        """True if there is something to report, or to forget, before the next step."""
        self._told = self._exchange_told = not speaks

    def weight(self, record: ParamState, value: torch.Tensor) -> torch.Tensor | None:
        """Choose the master that follows from a loaded weight; None: keep the present one."""
        self.changed = True
        dtype, value = value.dtype, value.detach()
        self._weights[record] = dtype
        if record.trainable and (record in self._given or record.steps):
            value = value.to("cpu")
            master = self._read(record)
            agreed = _agreed(master, value, dtype)
            if bool(agreed.all()):
                return None
            if record in self._given:
                value = torch.where(agreed, master, value.float())
        self.replaced(record, dtype)
        return value

    def replaced(self, record: ParamState, dtype: torch.dtype) -> None:
        """Note that weights of this type replaced a master."""
        self.changed = True
        self._weights[record] = dtype
        self._given.pop(record, None)
        self._rounded.pop(record, None)
        if _lossy(record, dtype):
            self._rounded[record] = None

    def master(self, record: ParamState, value: torch.Tensor) -> torch.Tensor:
        """Choose the master that follows from one in an optimizer's loaded state."""
        self.changed = True
        present = self._read(record)
        agreed = _agreed(present, value, self._weights.get(record, record.dtype))
        if bool(agreed.all()):
            self._rounded.pop(record, None)
        elif record in self._weights:
            value = torch.where(agreed, value, present)
        else:
            self._rounded.pop(record, None)
            self._exchanged[record] = None
        self._given[record] = None
        return value

    def weights_loaded(self) -> None:
        """End a load of weights; if the optimizer's state was loaded before, warn of masters that were not."""
        if self._states_loaded:
            self._tell()

    def states_loaded(self) -> None:
        """End a load of the optimizer's state, and log masters that differ from the weights."""
        self.changed = True
        self._states_loaded = True
        self._tell()
        names, told = _names(self._exchanged), self._exchange_told
        if names and not told:
            self._exchange_told = True
            log_line(
                f"{self._name()}: the optimizer's state that was loaded holds fp32 masters that are not the model's "
                f"weights rounded less ({len(names)} parameters, {names[0]!r} first): the parameters are those masters "
                "now. Should the weights stay, call model.load_state_dict with them: weights that were loaded do"
            )
        self._exchanged.clear()

    def before_step(self) -> None:
        """Log what was lost by loading, and stop comparing: the step changes the masters."""
        self._tell()
        self.forget()
        self.changed = False

    def forget(self) -> None:
        """Forget what was loaded: masters are whole again, or were replaced."""
        self._weights.clear()
        self._given.clear()
        self._rounded.clear()
        self._states_loaded = False

    def _tell(self) -> None:
        rounded = _names(record for record in self._rounded if record.steps)
        if not rounded or self._told:
            return
        self._told = True
        warn(
            f"{self._name()}: training goes on from weights of 16 bits, without the fp32 masters of {len(rounded)} "
            f"parameters ({rounded[0]!r} first): what steps had added below 16 bits is lost. Load an optimizer state "
            "that holds masters (optimizer.state_dict(), unless they were left out), or use save_checkpoint and "
            "load_checkpoint"
        )


def _names(records: Iterable[ParamState]) -> list[str]:
    return [record.name for record in sorted(records, key=lambda each: each.index)]


def _lossy(record: ParamState, dtype: torch.dtype) -> bool:
    """Return True if weights of this type are less precise than the parameter's master."""
    return record.trainable and record.dtype.itemsize < 4 and dtype.itemsize < 4


def _agreed(one: torch.Tensor, other: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Compare element by element after rounding to a type; not-a-number equals itself."""
    if dtype.itemsize < 4 and dtype.is_floating_point:
        one, other = one.to(dtype), other.to(dtype)
    one, other = one.float(), other.float()
    return (one == other) | (one.isnan() & other.isnan())
