"""Step groups during backward, where no decision needs all gradients: ``Options(step="in_backward")``.

A plan has steps on the device in its last pass. It also says behind which of its instructions the processor's steps may
begin; see `_simulate.steps_in_backward`. The driver of the pass then steps the group, with the settings that the
optimizer has at that moment. ``optimizer.step()`` steps what is left, and everything of a pass without a plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from weakref import WeakMethod

import torch

from ps_core._errors import InvalidInput
from ps_core._extents import Kind, Precision
from ps_core._options import AFTER_BACKWARD, SPECULATIVE, Options
from ps_core.engine._gradients.gradient_sums import Launch
from ps_core.engine._memory.chunk import Slot
from ps_core.engine._optim.group_step import SettingsOf, step_group
from ps_core.engine._parameters.param_state import ParamGroup, ParamState
from ps_core.engine._parameters.state_transitions import GradientPlace


class StepInBackward:
    """Track the groups of one model that were stepped since the optimizer's last step; none without that option."""

    def __init__(self) -> None:
        self._settings: Callable[[], Callable[[], SettingsOf] | None] | None = None
        self.groups: dict[ParamGroup, SettingsOf] = {}
        """Groups that were stepped within backward, until ``optimizer.step()``, and the settings of that step."""

    def use(self, settings: Callable[[], SettingsOf]) -> None:
        """Use this method of the optimizer for settings. The optimizer is made after the engine, and may be freed."""
        self._settings = WeakMethod(settings)

    def settings(self) -> SettingsOf:
        """Return the present settings."""
        method = None if self._settings is None else self._settings()
        if method is None:
            raise InvalidInput(
                "Options(step='in_backward'), but the optimizer that chunked() returned is gone: keep it"
            )
        return method()

    def step(self, group: ParamGroup, slots: Mapping[Kind, Slot], launch: Launch) -> None:
        """Step a group whose gradient is complete; its work raises before it changes anything if that is not finite."""
        settings_of = self.settings()
        used = any(record.gradient is not GradientPlace.NONE for record in group.tensors)
        step_group(group, slots, settings_of, 1.0, launch, finite=True)
        if used:  # `torch.autograd.grad` makes no gradients of parameters
            self.groups[group] = settings_of

    def check_pass(self) -> None:
        """Raise before a second pass of a step, which would compute with partly stepped weights."""
        if self.groups:
            raise InvalidInput(
                "a pass with gradients begins before optimizer.step() was called, and Options(step='in_backward') "
                "has stepped some groups already: call optimizer.step() after each backward pass, or leave that "
                "option out (for several backward passes a step)"
            )

    def check_use(self, records: Iterable[ParamState], *, opening: bool) -> None:
        """Raise if a pass with gradients uses parameters that were stepped; ``opening``: it only reads them."""
        if torch._C._current_graph_task_id() == -1 and (opening or not torch.is_grad_enabled()):
            return
        for record in records:
            if record.group in self.groups:
                raise InvalidInput(
                    f"{record.name!r} is used after its group was stepped within backward, and before "
                    "optimizer.step(): call optimizer.step() first; where backward itself does other than the "
                    "recorded pass, leave out Options(step='in_backward')"
                )

    def check_step(self, settings: SettingsOf, max_norm: float | None) -> None:
        """Raise if gradients are to be clipped after some were used, or if param groups were changed since then."""
        if max_norm is not None:
            raise InvalidInput(
                "max_grad_norm was set, but Options(step='in_backward') has stepped groups already: set "
                "optimizer.max_grad_norm = None to go on; to clip, use Options(step='speculative')"
            )
        for group, used in self.groups.items():
            for record in group.tensors:
                if settings(record) != used(record):
                    raise InvalidInput(
                        f"the settings of {record.name!r} were changed between backward and optimizer.step(), but "
                        "Options(step='in_backward') has stepped its group with the old ones: set them back to go on; "
                        "change settings before backward, or leave that option out"
                    )

    def check_gradient(self, record: ParamState) -> None:
        """Raise if a gradient arrives for a group that was stepped."""
        if record.group in self.groups:
            raise InvalidInput(
                f"a gradient of {record.name!r} came after its group was stepped within backward: this backward pass "
                "does other than the recorded one; leave out Options(step='in_backward') for such a model"
            )

    def check_read(self, record: ParamState) -> None:
        """Raise if ``grad`` of any parameter is used when some groups were stepped.

        Clipping would miss those. `zero_grad` would forget other gradients before it came to them.
        """
        if self.groups:
            raise InvalidInput(
                f"the gradient of {record.name!r} is asked for, but groups were stepped within backward already: call "
                "optimizer.step() first; to read, clip or change gradients, use Options(step='speculative')"
            )

    def check_saved(self, what: str) -> None:
        """Raise if a checkpoint is made when some groups were stepped and others not."""
        if self.groups:
            raise InvalidInput(
                f"Options(step='in_backward') has stepped some groups, and nothing can be {what} before the others: "
                "call optimizer.step() first"
            )

    def check_discard(self) -> None:
        """Raise if gradients are forgotten when some groups were stepped and others not."""
        if self.groups:
            raise InvalidInput(
                "zero_grad() before optimizer.step(): Options(step='in_backward') has stepped some groups already; "
                "call optimizer.step() first, which steps the others, or load a checkpoint"
            )

    def check_skip(self) -> None:
        """Raise if a step is to be skipped after a part of it was made."""
        if self.groups:
            raise FloatingPointError(
                "a gradient is not finite, and some groups were stepped within backward already, so no step can be "
                "skipped: load a checkpoint, and train with Options(step='after_backward') to skip such steps"
            )

    def end(self) -> None:
        """Note that the optimizer's step was called, or that all values will be replaced."""
        self.groups.clear()


def check_step_option(
    options: Options, precision: Precision, *, max_grad_norm: float | None, accumulation_steps: int, alone: bool
) -> None:
    """Raise if steps within backward are requested where they are not possible."""
    if options.step == AFTER_BACKWARD:
        return
    never = {f"accumulation_steps={accumulation_steps}": accumulation_steps > 1, "several processes": not alone}
    unless_undone = {
        "max_grad_norm": max_grad_norm is not None,
        "precision='fp16', whose loss scale may skip a step": precision is Precision.FP16,
    }
    against = [(what, AFTER_BACKWARD) for what, given in never.items() if given]
    if options.step != SPECULATIVE:
        against += [(what, SPECULATIVE) for what, given in unless_undone.items() if given]
    for what, instead in against:
        raise InvalidInput(
            f"Options(step={options.step!r}) with {what}: a group is stepped before all gradients are known; use "
            f"step={instead!r}"
        )
