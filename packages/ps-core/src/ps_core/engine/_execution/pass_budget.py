"""Compare what each moment took of the compute tier with the tier's budget; raise `DoesNotFit` if that was too much."""

from __future__ import annotations

from enum import Enum, auto

from ps_core._errors import DoesNotFit
from ps_core.engine._execution.driver_protocols import PassDriver
from ps_core.engine._execution.nonmodel_memory import NonModelMemory
from ps_core.engine._memory.tier_store import TierStore
from ps_core.engine._parameters.errors import compute_tier_too_small, everything_too_large
from ps_core.engine._parameters.param_state import ParamGroup
from ps_core.engine._tracing.pass_recording import MomentRecord, PassRecording


class Excess(Enum):
    """When `DoesNotFit` is raised for a moment that took more memory than the budget."""

    RAISE = auto()
    """At once."""
    RAISE_LATER = auto()
    """When the next pass begins. The call that ended this pass (a step, ``state_dict()``) must still succeed."""
    IGNORE = auto()
    """Never: another exception ended the pass, and the user sees that one."""


class PassBudget:
    """Check the moments of one engine's passes against the budget of the compute tier."""

    def __init__(self, store: TierStore, groups: list[ParamGroup], nonmodel: NonModelMemory) -> None:
        self._store, self._groups, self._nonmodel = store, groups, nonmodel
        self._exceeding: MomentRecord | None = None
        """The last moment that took more than the budget, or than its plan left free; None: there was none."""
        self.late: DoesNotFit | None = None
        """The error for the pass before, which the next pass raises as it begins; None: there is none."""

    def is_exceeded(self, moment: MomentRecord, driver: PassDriver, excess: Excess, *, planned: bool) -> bool:
        """Measure what a moment took; return True if the plan has to be left for that.

        Without a plan `DoesNotFit` is raised, or kept for `raise_late`. The driver may free bytes first.
        """
        needed = self._nonmodel.measure(moment, planned=planned)
        over = needed - self._store.tiers[0].capacity_bytes
        if over <= 0 or excess is Excess.IGNORE or driver.free_optional_bytes(over) >= over:
            return False
        self._exceeding = moment
        if not planned:
            if excess is Excess.RAISE:
                raise self._error_for(moment, needed)
            self.late = _of_the_pass_before(self._error_for(moment, needed))
        return planned

    def stayed_within(self, recording: PassRecording) -> bool:
        """Return True if no moment of a measured pass took more than the budget, or than its plan left free."""
        return all(moment is not self._exceeding for moment in recording.moments)

    def check_without_plan(self, moment: MomentRecord, driver: PassDriver) -> None:
        """Raise `DoesNotFit` if a moment that made the pass leave its plan takes too much without a plan, too."""
        ledger = self._store.ledger
        nonmodel_bytes = self._nonmodel.measured(moment)
        over = ledger.used_bytes[0] + nonmodel_bytes - self._store.tiers[0].capacity_bytes
        if over > 0 and driver.free_optional_bytes(over) < over:
            raise self._error_for(moment, ledger.used_bytes[0] + nonmodel_bytes)

    def _error_for(self, moment: MomentRecord, needed: int) -> DoesNotFit:
        if self._store.resident:
            return everything_too_large(self._store, self._groups, needed, so_far=True)
        nonmodel_bytes = moment.nonmodel_bytes
        return compute_tier_too_small(self._store, self._groups, moment.name, needed, nonmodel_bytes, proven=True)

    def raise_late(self) -> None:
        """Raise the error for the pass before, once."""
        assert self.late is not None, "there is one"
        try:
            raise self.late  # no local variable: an exception's frames must not refer to it
        finally:
            self.late = None

    def forget_late(self) -> None:
        """Forget the error for the pass before."""
        self.late = None


def _of_the_pass_before(error: DoesNotFit) -> DoesNotFit:
    """Return the same error for the next pass to raise, with a suggestion for a graph that no backward pass needs."""
    budget, *others = error.remedies
    without_graph = "torch.no_grad(): around a call of the model that no backward pass follows"
    return DoesNotFit(
        tier=error.tier,
        moment=f"{error.moment}, in the pass before",
        needed_bytes=error.needed_bytes,
        available_bytes=error.available_bytes,
        proven=error.proven,
        remedies=(budget, without_graph, *others),
        depends_on_batch=error.depends_on_batch,
    )
