"""Count what one engine did, the bytes that it has in use, and where a step's time went."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from ps_core._errors import DoesNotFit
from ps_core.engine._support.work_recorder import WorkRecorder

PHASES = ("forward", "backward", "step", "stalled")


def _no_seconds() -> dict[str, float]:
    return dict.fromkeys(PHASES, 0.0)


@dataclass(slots=True)
class PhaseTimer:
    """Add up seconds by phase, by the host's clock; a step's include its passes'."""

    stalled_s: float = 0.0
    """Seconds in all that the host thread waited for moves."""
    last_step: Mapping[str, float] = field(default_factory=lambda: MappingProxyType(_no_seconds()))
    """Seconds of the last step that was finished; ``stalled`` is part of the others."""
    _spent: dict[str, float] = field(default_factory=_no_seconds)
    _phase: str = ""
    _since: float = 0.0

    def enter_phase(self, phase: str) -> None:
        """Count time for this phase from now on; the empty phase is the user's own code."""
        if phase == self._phase:
            return
        now = time.perf_counter()
        if self._phase:
            self._spent[self._phase] += now - self._since
        self._phase, self._since = phase, now

    def waited(self, seconds: float) -> None:
        """Add seconds that the host thread waited for moves."""
        self.stalled_s += seconds
        self._spent["stalled"] += seconds

    def end_step(self) -> None:
        """End a step: its seconds become `last_step`."""
        self.enter_phase("")
        self.last_step = MappingProxyType(self._spent)
        self._spent = _no_seconds()


@dataclass(slots=True)
class Counters(PhaseTimer):
    """Count one engine's work, and its times."""

    by_torch: bool = False
    """True if PyTorch's own code steps: the optimizer is a `TorchOptimizer`."""
    moved_bytes: Counter[tuple[int, int]] = field(default_factory=Counter)
    """Moved bytes by source and target tier."""
    evictions: int = 0
    prefetch_hits: int = 0
    fetches: int = 0
    divergences: int = 0
    last_divergence: str = ""
    """Why the last divergent pass left its plan."""
    replans: int = 0
    passes: int = 0
    replayed: int = 0
    """Passes that ran by the plan to their end."""
    steps: int = 0
    skipped: int = 0
    steps_in_backward: int = 0
    """Groups that were stepped within backward, also where that was undone."""
    undone_steps: int = 0
    """Groups that were stepped within backward, and stepped again because that was undone."""
    recorder: WorkRecorder | None = None
    """Records when queues work; None: the model is not profiled."""
    idle_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds a step, by cause, that the device was idle, as last profiled."""

    def record_with(self, recorder: WorkRecorder | None) -> None:
        """Record when queues work from now on; None: no longer."""
        self.recorder = recorder

    def profiled(self, idle_s: Mapping[str, float]) -> None:
        """Store how many seconds a step the device was idle in a profile, by cause."""
        self.idle_s = idle_s

    def moved(self, source: int, target: int, size: int) -> None:
        """Add bytes that were copied from one tier to another."""
        self.moved_bytes[source, target] += size

    def evicted(self) -> None:
        """Count a group that was evicted from the compute tier."""
        self.evictions += 1

    def fetched(self, *, early: bool) -> None:
        """Count a group that was fetched; ``early``: its move began before the group was needed."""
        self.fetches += 1
        self.prefetch_hits += early

    def passed(self, *, replayed: bool) -> None:
        """Count a pass that ended; ``replayed``: it ran by the plan to its end."""
        self.passes += 1
        self.replayed += replayed

    def replanned(self) -> None:
        """Count a plan that replaced one made from a pass that ran."""
        self.replans += 1

    def stepped(self, *, skipped: bool) -> None:
        """Count a step; ``skipped``: a gradient was not finite."""
        self.end_step()
        self.steps += 1
        if self.recorder is not None:
            self.recorder.stepped()
        self.skipped += skipped

    def stepped_in_backward(self, groups: int) -> None:
        """Count groups that were stepped within backward."""
        self.steps_in_backward += groups

    def undone(self, groups: int) -> None:
        """Count groups whose step was undone."""
        self.undone_steps += groups

    def diverged(self, why: str) -> None:
        """Count a pass that left its plan."""
        self.divergences += 1
        self.last_divergence = why


class ByteLedger:
    """Count bytes by tier, slots and non-model bytes apart; only this class writes its attributes."""

    def __init__(self, tiers: int) -> None:
        self.used_bytes = [0] * tiers
        """Bytes of reserved slots, by tier."""
        self.peak_bytes = [0] * tiers
        """The most bytes in use at one time, by tier, with the compute tier's non-model bytes."""
        self.nonmodel_bytes = 0
        """Non-model bytes on the compute tier, as last measured or planned."""
        self.highest_nonmodel_bytes = 0
        """The most non-model bytes so far."""
        self.foreseen_bytes = 0
        """Bytes of the compute tier for a whole pass by its fake trace, if they exceed it; else 0."""
        self.left_over_bytes = 0
        """Non-model bytes alive at the start of this pass, if an exception ended the pass before; else 0."""
        self.not_offloaded_bytes = 0
        """Bytes of this pass's activations that stayed on the compute tier: the host had no room for them."""
        self.not_offloaded_why: DoesNotFit | None = None
        """The refusal of the first of them; None: there are none."""
        self.checkpointing_helps = True
        """False if PyTorch recomputes a part of this pass already, or no backward follows it."""
        self.fixed_host_bytes = 0
        """Bytes of the host tier that embedding tables always keep."""

    def add(self, tier: int, size: int) -> None:
        """Count the bytes of a slot that was reserved."""
        total = self.used_bytes[tier] = self.used_bytes[tier] + size
        if tier == 0:
            total += self.nonmodel_bytes
        self.peak_bytes[tier] = max(self.peak_bytes[tier], total)

    def remove(self, tier: int, size: int) -> None:
        """Stop counting the bytes of a slot that was released."""
        self.used_bytes[tier] -= size

    def fix_on_host(self, home_bytes: int, gradient_bytes: int) -> None:
        """Count embedding tables: home slots, which are reserved already, and gradients, which have no slots."""
        self.fixed_host_bytes = home_bytes + gradient_bytes
        self.add(1, gradient_bytes)

    def set_nonmodel(self, nonmodel_bytes: int) -> None:
        """Store how many non-model bytes are on the compute tier now."""
        self.nonmodel_bytes = nonmodel_bytes

    def begin_moment(self, nonmodel_bytes: int) -> None:
        """Count the non-model bytes that a planned moment may have, as if they existed."""
        self.nonmodel_bytes = nonmodel_bytes
        self.update_peaks()

    def end_moment(self, peak_nonmodel_bytes: int) -> None:
        """Store the most non-model bytes of a moment that has ended."""
        self.nonmodel_bytes = peak_nonmodel_bytes
        self.update_peaks()

    def update_peaks(self) -> None:
        """Compare every peak with what is in use now."""
        nonmodel = self.nonmodel_bytes
        self.highest_nonmodel_bytes = max(self.highest_nonmodel_bytes, nonmodel)
        for tier, used in enumerate(self.used_bytes):
            total = used + (nonmodel if tier == 0 else 0)
            self.peak_bytes[tier] = max(self.peak_bytes[tier], total)

    def note_foreseen(self, needed_bytes: int) -> None:
        """Store a fake trace's bytes for a whole pass, if they are too many; 0: the pass fits."""
        self.foreseen_bytes = needed_bytes

    def begin_pass(self, left_over_bytes: int) -> None:
        """Store how many non-model bytes an exception left alive; no activation has stayed yet."""
        self.left_over_bytes, self.not_offloaded_bytes, self.not_offloaded_why = left_over_bytes, 0, None
        self.checkpointing_helps = True

    def note_checkpointing_saves_nothing(self) -> None:
        """Store that a part of this pass is recomputed already, or that no backward follows."""
        self.checkpointing_helps = False

    def note_not_offloaded(self, size: int, why: DoesNotFit) -> None:
        """Count an activation that was to be offloaded and stayed on the compute tier."""
        self.not_offloaded_bytes += size
        self.not_offloaded_why = self.not_offloaded_why or why.with_traceback(None)
