"""Step groups during backward, and undo that where gradients must be clipped: ``Options(step="speculative")``.

[Note: speculation]
With clipping or a loss scale a step is decided when all gradients are known. Until then a group may be stepped as if
nothing had to be clipped. What the step overwrites is copied first. Nothing is noted of such a step before the
decision: by all records the group still has its gradient. If nothing has to be clipped, the step is noted. Else the old
bytes are copied back, and the group is stepped after backward.

Before any other use of host memory the old bytes are copied back, too (`Transfers.prepare_use`). So a state dict, a
checkpoint, an evaluation and a gradient that is read are as they would be without the option.

A step that is undone takes longer than one behind backward. So after a step that was clipped, none begins early.

The copies are in host memory that nothing else needs (`TierStore.reserve_optional`). Without room a group is stepped
behind backward.

[Note: failures of early steps]
If an early step fails before the decision, no error is raised. The group is stepped behind backward, as without room.
If undoing fails, the error is raised, and the next use of host memory undoes the rest. After a failure of the worker's
thread nothing uses the parameters any more, and `release` copies the old bytes back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from threading import Lock
from typing import TypeAlias
from weakref import WeakMethod

import torch

from ps_core._extents import Kind
from ps_core._plan import Queue
from ps_core.engine._gradients.gradient_sums import Launch, Tensors
from ps_core.engine._gradients.loss_scale import LossScale
from ps_core.engine._memory.chunk import Slot
from ps_core.engine._optim.group_step import SettingsOf, StepWork, launch_step, note_done
from ps_core.engine._optim.step_in_backward import StepInBackward
from ps_core.engine._parameters.param_state import ParamGroup
from ps_core.engine._parameters.residency import Residency
from ps_core.engine._parameters.state_transitions import GradientPlace
from ps_core.engine._support.counters import Counters
from ps_core.engine._support.interrupts import defer_interrupts_installing


@dataclass(slots=True, eq=False)
class _EarlyStep:
    """A group's step that is not decided yet, and what undoes it."""

    slots: Mapping[Kind, Slot]
    launch: Launch
    factor: float
    inputs: list[object]
    """Settings and counts that the step was computed with; see `_inputs`."""
    current: list[torch.Tensor]
    """Memory that the step overwrites."""
    old: list[torch.Tensor]
    """Memory for the bytes before the step, in the same order."""
    work: StepWork | None = None
    """None: the step cannot be noted, as it is not launched yet or is being undone."""
    saved: bool = False
    """True while ``old`` has the bytes from before the step, and ``current`` may have others."""
    failed: bool = False
    """True if saving or the step failed before the decision."""
    decided: bool = False
    """True once the step is noted: if it fails afterwards, the worker's thread reports that."""
    lock: Lock = field(default_factory=Lock)
    """Protects `failed` and `decided`, which different threads write."""

    def save(self) -> None:
        """Copy what the step will overwrite."""
        try:
            _copy_all(self.current, self.old)
            self.saved = True
        except Exception:
            self._fail()

    def launch_step(self, what: str, reads: Tensors, writes: Tensors, work: Callable[[], object]) -> None:
        """Launch the step's work, which does nothing if saving failed."""

        def carry_out() -> None:
            if self.failed:
                return
            try:
                work()
            except Exception:
                self._fail()

        self.launch(what, reads, writes, carry_out)

    def _fail(self) -> None:
        """Note on the thread of the work that it failed; raise its error again if the step is noted already."""
        with self.lock:
            if self.decided:
                raise  # noqa: PLE0704 - called while the error is handled
            self.failed = True

    def decide(self) -> bool:
        """Note on the host thread that the step holds; return False if it has failed, and must be made again."""
        with self.lock:
            self.decided = not self.failed
        return self.decided

    def restore(self) -> None:
        """Copy the old bytes back, unless that was done before; then refer to no memory any more."""
        if self.saved:
            _copy_all(self.old, self.current)
        self.saved, self.old, self.current = False, [], []


class SpeculativeSteps:
    """Make, note and undo the early steps of one model; see [Note: speculation]."""

    def __init__(self, residency: Residency, counters: Counters, loss_scale: LossScale | None) -> None:
        self._store, self._transfers, self._counters = residency.store, residency.transfers, counters
        self._loss_scale = loss_scale
        self._settings: Callable[[], Callable[[], SettingsOf] | None] | None = None
        self._rooms: dict[ParamGroup, Slot] = {}
        """Memory for each group's old bytes, kept from step to step."""
        self._exhausted = False
        """True if the system had no memory for old bytes."""
        self._early: dict[ParamGroup, _EarlyStep] = {}
        self._undone: list[tuple[ParamGroup, _EarlyStep]] = []
        """Early steps that the worker's thread may still have to undo."""
        self._clipped = False
        """True if the last step was clipped or skipped: the next one often is, too."""
        residency.store.free_optional_by(self.free)

    def use(self, settings: Callable[[], SettingsOf]) -> None:
        """Use this method of the optimizer for settings. The optimizer is made after the engine, and may be freed."""
        self._settings = WeakMethod(settings)

    def step(self, group: ParamGroup, slots: Mapping[Kind, Slot], launch: Launch) -> None:
        """Step a group whose gradient is complete, if that can be undone."""
        settings = None if self._settings is None else self._settings()
        if self._clipped or settings is None:  # None: the optimizer was freed, so no step will follow
            return
        if any(record.norm_part is None for record in group.tensors if record.gradient is not GradientPlace.NONE):
            return  # it will be measured in memory that would be overwritten
        written = [slot for kind, slot in slots.items() if kind is not Kind.ACC]
        sizes = [slot.bytes for slot in written]
        room = self._room(group, sum(sizes))
        if room is None:
            return
        settings_of, factor, current = settings(), self._unclipped_factor, [slot.memory for slot in written]
        old = list(torch.split(room.memory[: sum(sizes)], sizes))
        early = _EarlyStep(slots, launch, factor, _inputs(group, settings_of), current, old)
        launch(f"a copy within a tier, of {group.name}", current, old, early.save)
        self._early[group] = early
        self._counters.stepped_in_backward(1)
        self._transfers.call_before_use(self.undo)
        early.work = launch_step(group, slots, settings_of, factor, early.launch_step)
        self._follow(group, early)

    @property
    def _unclipped_factor(self) -> float:
        """Return the factor for gradients that are not clipped."""
        return 1.0 if self._loss_scale is None else 1.0 / self._loss_scale.value

    def note_decision(self, settings_of: SettingsOf, factor: float | None) -> None:
        """Note the early steps that are what was decided, and undo the others; ``factor`` None: nothing is stepped."""
        self._clipped = factor != self._unclipped_factor
        for group, early in list(self._early.items()):
            if early.work is None or early.factor != factor or early.inputs != _inputs(group, settings_of):
                continue
            if early.decide():
                note_done(group, early.slots, early.work)
                del self._early[group]
        self.undo()

    @defer_interrupts_installing
    def undo(self) -> None:
        """Copy the old bytes of all undecided steps back."""
        self._undone = [(group, early) for group, early in self._undone if early.saved]
        for early in self._early.values():
            early.work = None  # if an error comes between two of them, none may be noted
        for group, early in list(self._early.items()):
            self._restore(group, early)
            self._undone.append((group, early))
            del self._early[group]
            self._counters.undone(1)
        self._transfers.call_before_use(None)

    def _restore(self, group: ParamGroup, early: _EarlyStep) -> None:
        """Launch the copy of a group's old bytes."""
        early.launch(f"a copy within a tier, of {group.name}", early.old, early.current, early.restore)
        self._follow(group, early)

    def free(self) -> None:
        """Undo what is undecided, and release the memory for old bytes."""
        self.undo()
        undone, self._undone = self._undone, []
        for group, early in undone:  # the worker's thread may have failed before it did so
            self._restore(group, early)
        self._exhausted = False
        while self._rooms:
            _, slot = self._rooms.popitem()
            self._store.release_optional(slot, Queue.CPU)

    def _room(self, group: ParamGroup, size: int) -> Slot | None:
        """Return memory for a group's old bytes; None: there is none."""
        if group in self._rooms or self._exhausted:
            return self._rooms.get(group)
        try:
            room = self._store.reserve_optional(size)
        except (MemoryError, RuntimeError):  # `torch.OutOfMemoryError` is one of the latter
            self._exhausted = True
            return None
        if room is not None:
            self._rooms[group] = room
        return room

    def _follow(self, group: ParamGroup, early: _EarlyStep) -> None:
        """Note that work on the group's slots is also work on the memory for its old bytes."""
        work = early.slots[Kind.P32].work
        if work is not None:
            self._rooms[group].note_work(work)


def _copy_all(sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
    """Copy each source into its target."""
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)


Stepping: TypeAlias = StepInBackward | SpeculativeSteps
"""Steps groups during backward, for good or in a way that can be undone."""


def _inputs(group: ParamGroup, settings_of: SettingsOf) -> list[object]:
    """Return the settings and counts of a group's step: another step is to be made if they change."""
    return [
        (record.index, record.gradient, record.steps, record.scalars, record.factor, settings_of(record))
        for record in group.tensors
        if record.gradient is not GradientPlace.NONE
    ]
