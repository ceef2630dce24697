"""``Options.eager_step``: a group is stepped as soon as backward has all its gradients.

[Note: what is given up]
The global norm is not known yet, so nothing can be clipped, and a gradient that is not finite cannot undo the steps
before it: it raises. In return no gradient outlives its group's turn, so that in fp32 a parameter takes 12 bytes, not
16. A group that something may still read (a saved tensor, an alias, a retained graph) waits for ``optimizer.step()``.
What was stepped stays stepped: neither an exception later in backward nor ``zero_grad()`` undoes it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ps_core._errors import InvalidInput
from ps_core.engine._execution.passes import Passes
from ps_core.engine._gradients.store import GradientKeeper
from ps_core.engine._optim.group_step import Decision, SettingsOf, decide
from ps_core.engine._optim.on_demand_step import Updater
from ps_core.engine._parameters.state import Gradient, GroupRecord, TensorRecord


class Eager:
    """The steps of one engine's backward passes."""

    def __init__(
        self, passes: Passes, gradients: GradientKeeper, updater: Updater, ask: Callable[[], SettingsOf]
    ) -> None:
        self._passes, self._gradients, self._updater = passes, gradients, updater
        self._ask = ask
        """The optimizer's numbers as they are now."""
        self._settings_of: SettingsOf | None = None
        self._parts: dict[TensorRecord, torch.Tensor] = {}
        """Of the gradients that were stepped: sum of squares and non-finite flag."""
        self._complete: dict[GroupRecord, None] = {}
        """Groups that have all their gradients and are not stepped yet."""

    def stepped(self, record: TensorRecord) -> bool:
        """Whether its gradient has come and gone since the last step."""
        return record in self._parts

    def check_read(self, records: list[TensorRecord]) -> None:
        """Refuse to read in backward what this backward has stepped."""
        if not self._parts or torch._C._current_graph_task_id() == -1:
            return
        for record in records:
            if record in self._parts:
                raise InvalidInput(
                    f"backward reads {record.name!r} after its step (a second backward before optimizer.step(), or a "
                    "recomputed block that reads it outside of the graph), and with eager_step=True it has changed "
                    "already: leave eager_step out"
                )

    def check(self, record: TensorRecord) -> None:
        """Refuse a second gradient."""
        if record in self._parts:
            raise InvalidInput(
                f"a second gradient of {record.name!r} before optimizer.step(), but with eager_step=True the first has "
                "been stepped already: one backward a step, or leave eager_step out"
            )

    def arrived(self, group: GroupRecord) -> None:
        """A gradient of this group came."""
        if all(record.gradient is not Gradient.NONE for record in group.tensors if record.trainable):
            self._complete[group] = None
        for each in list(self._complete):
            if not any(record.busy for record in each.tensors):
                del self._complete[each]
                self._step(each)

    def _step(self, group: GroupRecord) -> None:
        if self._settings_of is None:
            self._settings_of = self._ask()
        with self._passes.tide.paused(), torch.no_grad():
            for record in group.tensors:
                if record.waiting:
                    self._gradients.put_over(record)
            decision = self._decide([record for record in group.tensors if record.gradient is not Gradient.NONE])
            self._updater.step_one(group, self._settings_of, decision.factor)
            self._updater.free_sums()
        group.reading = -1  # whoever touches it again gets the new one

    def _decide(self, records: list[TensorRecord]) -> Decision:
        """What follows from these gradients alone."""
        parts = {record: self._gradients.measure(record) for record in records}
        decision = decide(parts, parts.values(), None, 1.0)
        if decision.skip:
            bad = next((record for record, part in parts.items() if not torch.isfinite(part[0]) or part[1]), records[0])
            raise InvalidInput(
                f"the gradient of {bad.name!r} is not finite, and with eager_step=True what came before it has been "
                "stepped: go back to a checkpoint, or leave eager_step out, so that such steps are skipped"
            )
        self._parts |= parts
        return decision

    def finish(self, settings_of: SettingsOf, records: list[TensorRecord]) -> Decision:
        """Step whatever is left; the norm is that of all gradients since the last step."""
        left = [record for record in records if record.gradient is not Gradient.NONE]
        factor = self._decide(left).factor
        self._updater.step(settings_of, factor)
        chosen = [record for record in records if record in self._parts]
        decision = decide(chosen, [self._parts[record] for record in chosen], None, 1.0)
        self.forget()
        return decision

    def forget(self) -> None:
        """A new step begins."""
        self._settings_of = None
        self._parts.clear()
        self._complete.clear()
