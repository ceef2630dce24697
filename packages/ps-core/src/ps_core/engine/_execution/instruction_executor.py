"""Carry out a plan's instructions on slots and parameters; `_execution.plan_driver` says when each is issued.

[Note: divergence]
A plan is advice. Each instruction checks what it relies on: versions, and that memory it releases has no live aliases.
If a check fails, or the model does something else than planned, `Diverged` is raised before anything is changed. Issued
instructions are then finished, and `OnDemandDriver` continues from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from typing import Any

import torch

from ps_core._errors import PlanMismatch
from ps_core._extents import Kind
from ps_core._plan import (
    Accumulate,
    Cast,
    Copy,
    Decide,
    Instr,
    Norm,
    Queue,
    Release,
    Reserve,
    Shift,
    Step,
)
from ps_core.engine._devices.device import WorkEvent
from ps_core.engine._execution.engine_plan import EnginePlan
from ps_core.engine._execution.lent_home_slots import restore_lent_homes
from ps_core.engine._execution.planned_activations import PlannedActivations
from ps_core.engine._execution.segment_queues import PlannedMoment, SegmentQueues
from ps_core.engine._gradients.gradient_store import GradientStore
from ps_core.engine._memory.chunk import Chunk, Slot
from ps_core.engine._optim.group_step import SettingsOf, launch_step, note_done
from ps_core.engine._optim.speculative_steps import Stepping
from ps_core.engine._parameters.param_state import ParamGroup, ParamState
from ps_core.engine._parameters.residency import Residency
from ps_core.engine._parameters.state_transitions import GradientPlace, SlotContents
from ps_core.engine._support.counters import Counters

UNVERSIONED = (Kind.GRAD, Kind.RGRAD)
"""Kinds that no chunk keeps: gradients on their way."""


def _is_stepped(record: ParamState) -> bool:
    return record.gradient is GradientPlace.NONE and record.contents is SlotContents.WEIGHT


class Diverged(Exception):
    """Say that a pass differs from the plan; the message says how."""


class InstructionExecutor:
    """Carry out the instructions of one segment."""

    def __init__(
        self,
        plan: EnginePlan,
        segment: SegmentQueues,
        residency: Residency,
        gradients: GradientStore,
        counters: Counters,
    ) -> None:
        self._plan, self._segment = plan, segment
        self._residency, self._gradients, self._counters = residency, gradients, counters
        self._store, self._device = residency.store, residency.store.device
        self._worker = None if self._store.synchronous else self._device.worker
        self._slots: dict[int, Slot] = {number: chunk.home for number, chunk in enumerate(plan.chunks)}
        self._places: dict[int, tuple[int, int]] = {}
        """Tier and address of the slots that the plan reserved, by the plan's numbers."""
        self._staged: dict[ParamGroup, tuple[Slot, list[ParamState]]] = {}
        """Gradients in slots of their own, before they are added to the accumulators."""
        self._flat: dict[ParamGroup, torch.Tensor] = {}
        """Those slots as vectors, while the moment lasts: slots do not move meanwhile."""
        self._settings_of: SettingsOf | None = None
        self._factor = 1.0
        self._handlers: dict[type, Callable[[Instr, Any], None]] = {
            Reserve: self._reserve,
            Release: self._release,
            Copy: self._copy,
            Shift: self._shift,
            Accumulate: self._accumulate,
            Norm: self._norm,
            Decide: self._nothing,
            Step: self._step,
            Cast: self._cast,
        }
        self.moment = -1
        """The moment that the model has reached."""

    def reach(self, moment: int) -> None:
        """Note which moment the model has reached."""
        self.moment = moment

    def work_before(self, instr: Instr) -> list[WorkEvent]:
        """Return the worker's events that an instruction of another queue has to wait for."""
        if not isinstance(instr.op, Copy):
            return []  # a release touches no bytes, and the others only the compute tier
        slots = self._slots[instr.op.source], self._slots[instr.op.target]
        return [slot.work for slot in slots if slot.work is not None]

    @property
    def waits_for_ranks(self) -> bool:
        """Return True if instructions of the segment end on another thread, with the other ranks."""
        return False

    def is_blocked(self, instr: Instr) -> bool:
        """Return True if an instruction would have to wait for other ranks now."""
        return False

    def carry_out(self, instr: Instr) -> None:
        """Carry out an instruction other than a moment."""
        self._handlers[type(instr.op)](instr, instr.op)

    def prepare_steps(self, settings_of: SettingsOf, factor: float) -> None:
        """Store the settings and the factor of the steps."""
        self._settings_of, self._factor = settings_of, factor

    # Moments.

    def begin(self, moment: PlannedMoment) -> None:
        """Prepare the slots that a moment uses, and bind its parameters to them."""
        self._flat.clear()
        for group, number, holds_weight, read, _ in moment.uses:
            slot = self._slots[number]
            if not holds_weight:
                if not read:
                    self._staged[group] = (slot, [])
                continue
            chunk = group.weight_chunk
            if not read:
                self._use_for_gradients(group, chunk, slot)
                continue
            if slot.version != chunk.version:
                raise Diverged(f"{moment.name}: the plan brought an older weight of {group.name}")
            if slot is not chunk.home and chunk.copies.get(slot.tier) is not slot:
                chunk.add_copy(slot)
            # The plan may have fetched the group anew for a later moment already, before it gave this slot back.
            self._residency.unbind_elsewhere(group, slot)
        if self._plan.moves_activations:
            self.activations.begin(moment, self._slots)
        if not self._store.synchronous:
            memory = [self._slots[use.slot].memory for use in moment.uses]
            self._device.declare_access(Queue.COMPUTE, moment.name, memory, ())

    def _use_for_gradients(self, group: ParamGroup, chunk: Chunk, slot: Slot) -> None:
        """Use a slot for a group's gradients without fetching its weights; all other copies become stale."""
        if slot.version == chunk.version:
            return
        for record in group.tensors:
            if record.busy or record.contents is SlotContents.GRADIENT:
                raise Diverged(f"{record.name} is still wanted where the plan has only its gradient")
        for record in group.tensors:
            self._residency.unbind(record)
            record.mark_slot_taken()
        chunk.mark_written(slot)
        if slot is not chunk.home:
            chunk.add_copy(slot)

    def place_gradient(self, record: ParamState, gradient: torch.Tensor) -> bool:
        """Put a gradient into memory that the plan reserved for it; return False if there is none."""
        staged = self._staged.get(record.group)
        if staged is None:
            return False
        slot, records = staged
        if record in records:
            raise Diverged(f"a second gradient of {record.name}")
        flat = self._flat.get(record.group)
        if flat is None:
            flat = self._flat[record.group] = slot.flat(record.dtype, record.group.chunk_numel)
        target = record.shaped(flat)
        if not self._store.synchronous:
            self._device.declare_access(Queue.COMPUTE, f"gradient of {record.name}", (), (target,))
        target.copy_(gradient)
        records.append(record)
        record.staged_factor = 1.0
        return True

    # Instructions.

    def _nothing(self, instr: Instr, op: Decide) -> None:
        """Do nothing: the optimizer decides in ``step()``."""

    def _reserve(self, instr: Instr, op: Reserve) -> None:
        store, tier = self._store, op.tier
        if store.arena.overlapping(op.offset, op.bytes) if tier == 0 else store.free_bytes(tier) < op.bytes:
            raise Diverged("the plan's place is taken")
        self._slots[op.slot] = self._store.reserve(op.tier, op.bytes, op.offset)
        self._places[op.slot] = op.tier, op.offset

    def _release(self, instr: Instr, op: Release) -> None:
        slot = self._slots[op.slot]
        self._give_up(slot)
        self._store.release(slot, instr.queue)
        del self._slots[op.slot]

    def _give_up(self, slot: Slot) -> None:
        """Give up the copy that a slot holds; `Diverged` if it is still needed."""
        if self._plan.moves_activations and not self.activations.release(slot):
            raise Diverged("an activation is still wanted where the plan gives it up")
        extent = slot.extent
        if extent is not None and extent.kind not in UNVERSIONED:
            group = self._residency.groups[extent.index]
            chunk = group.chunks.get(extent.kind)
            if chunk is not None:
                self._drop_copy(group, chunk, slot)

    def _drop_copy(self, group: ParamGroup, chunk: Chunk, slot: Slot) -> None:
        """Give up a slot's copy of a chunk; raise `Diverged` if no other copy is current, or for live aliases."""
        dead = self._is_dead(group, chunk)
        if not dead and slot.version == chunk.version and not chunk.has_current_besides(slot):
            raise Diverged(f"the only copy of {chunk.extent.kind.value} of {group.name} would be released")
        if slot.tier == 0 and chunk is group.weight_chunk:
            self._vacate(group, slot)
            self._counters.evicted()
        if chunk.copies.get(slot.tier) is slot:
            chunk.drop_copy(slot.tier, needed=not dead)
        if chunk.extent.kind is Kind.ACC and not chunk.has_current_copy and not chunk.home.released:
            chunk.fill(chunk.home)  # what is in sums without a gradient does not matter, but some slot is current

    def _is_dead(self, group: ParamGroup, chunk: Chunk) -> bool:
        """Return True for fp32 sums without a gradient, and for a gathered copy: either may be dropped."""
        if chunk.gathered:
            return True
        if chunk.extent.kind is not Kind.ACC:
            return False
        return not any(record.gradient is GradientPlace.IN_ACCUMULATOR for record in group.tensors)

    def _vacate(self, group: ParamGroup, slot: Slot) -> None:
        """Unbind the parameters that lie in a slot; raise `Diverged` if one of them has live aliases."""
        if not self._residency.vacate(group, slot):
            raise Diverged(f"memory of {group.name} has live aliases")

    def _copy(self, instr: Instr, op: Copy) -> None:
        source, target = self._slots[op.source], self._slots[op.target]
        if op.extent.kind is Kind.ACT:
            name = self._plan.program.trace.activations[op.extent.index].name
            size = self.activations.copy(instr.queue, name, source, target)
            self._residency.transfers.watcher.moved(source.tier, target.tier, size)
            return
        group, kind = self._plan.order[op.extent.index], op.extent.kind
        if kind not in UNVERSIONED and source.version != group.chunks[kind].version:
            raise Diverged(f"the plan copies an older {kind.value} of {group.name}")
        self._store.copy(instr.queue, target, source, op.bytes)  # where that fails, the target holds nothing new
        if kind in UNVERSIONED:
            if group in self._staged:
                self._staged[group] = (target, self._staged[group][1])
        else:
            group.chunks[kind].fill_copy(target)  # where another copy is registered, it is in use; see `begin`
        self._residency.transfers.watcher.moved(source.tier, target.tier, op.bytes)
        if target.tier == 0 and self._segment.moments and kind is group.weight and not group.gathered:
            self._counters.fetched(early=instr.visit > self.moment)

    def _shift(self, instr: Instr, op: Shift) -> None:
        slot = self._slots[op.slot]
        if slot.offset >= 0 and self._store.arena.overlapping(op.offset, slot.bytes) not in ([], [slot]):
            raise Diverged("the plan's place is taken")
        self._places[op.slot] = slot.tier, op.offset
        if slot.offset < 0:
            return  # on other tiers slots are memory of their own
        if slot.extent is not None:
            self._vacate(self._residency.groups[slot.extent.index], slot)
        self._store.arena.shift(slot, op.offset, instr.queue)

    def _accumulate(self, instr: Instr, op: Accumulate) -> None:
        group = self._plan.order[op.group]
        sums, chunk = self._slots[op.accumulator], group.chunks[Kind.ACC]
        if sums.version != chunk.version and any(
            record.gradient is GradientPlace.IN_ACCUMULATOR for record in group.tensors
        ):
            raise Diverged(f"the plan takes the sums of {group.name} to begin here")  # such as an additional pass
        slot, records = self._staged.pop(group, (self._slots[op.gradient], []))
        flat = slot.flat(torch.float32 if group.gathered else group.dtype, group.shard_numel)
        self._gradients.add_staged(group, records, flat, sums, partial(self._launch, instr.queue, (slot, sums)))
        if records and sums is not chunk.home:
            chunk.add_copy(sums)

    def _norm(self, instr: Instr, op: Norm) -> None:
        group, slot = self._plan.order[op.group], self._slots[op.slot]
        over = group in self._plan.overwritten
        flat = slot.flat(group.dtype if over else torch.float32, group.shard_numel)
        wanted = GradientPlace.IN_WEIGHT_SLOT if over else GradientPlace.IN_ACCUMULATOR
        rows = [record for record in group.tensors if record.gradient is wanted and record.norm_part is None]
        launch = None if self._store.synchronous else partial(self._launch, instr.queue, (slot,))
        self._gradients.measure_all(rows, flat, launch)

    def use_stepping(self, stepping: Stepping) -> None:
        """Use ``stepping`` for the steps that this pass contains."""
        self._handlers[Step] = lambda instr, op: self.step_early(instr, stepping)

    def step_early(self, instr: Instr, stepping: Stepping) -> None:
        """Step a group whose gradient is complete; one that is not where the plan has it is left for the step."""
        assert isinstance(instr.op, Step), "only steps are made early"
        group = self._plan.order[instr.op.group]
        elsewhere = {GradientPlace.OWN_TENSOR}  # while the weight is in use, as after ``backward(retain_graph=True)``
        if group in self._plan.overwritten:
            elsewhere.add(GradientPlace.IN_ACCUMULATOR)
        if any(record.gradient in elsewhere for record in group.tensors):
            return
        self._step(instr, instr.op, stepping)

    def _step(self, instr: Instr, op: Step, early: Stepping | None = None) -> None:
        group, slots = self._plan.order[op.group], dict[Kind, Slot]()
        if early is None and self._plan.in_backward and all(map(_is_stepped, group.tensors)):
            return  # it was stepped within backward
        for kind, number in zip(self._plan.step_kinds[op.group], op.slots, strict=True):
            slot = slots[kind] = self._slots[number]
            if slot.version != group.chunks[kind].version and (
                kind is not group.weight or group in self._plan.overwritten
            ):
                raise PlanMismatch(f"the step of {group.name} finds an older {kind.value}")
        launch = partial(self._launch, instr.queue, slots.values())
        if early is not None:
            early.step(group, slots, launch)
            return
        assert self._settings_of is not None, "`prepare_steps` comes before steps"
        note_done(group, slots, launch_step(group, slots, self._settings_of, self._factor, launch))

    def _launch(
        self,
        queue: Queue,
        slots: Iterable[Slot],
        what: str,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
        work: Callable[[], object],
    ) -> None:
        """Do work on slots: on the worker's thread if there is one and the queue is the CPU's."""
        if self._store.synchronous:
            work()
            return
        if self._worker is None or queue is not Queue.CPU:
            self._device.declare_access(queue, what, reads, writes)
            work()
            return
        event = self._worker.launch(what, reads, writes, work)
        for slot in slots:
            slot.note_work(event)

    def _cast(self, instr: Instr, op: Cast) -> None:
        # Only the prologue and a skipped step rebuild weights, and the engine carries out both without the plan: it
        # starts with both kinds filled, and a skip that must rebuild knows better which tensors need it.
        raise PlanMismatch(f"{self._segment.name.value} is not replayed")

    @cached_property
    def activations(self) -> PlannedActivations:
        """Return what keeps the offloaded activations that the segment moves."""
        return PlannedActivations(self._store)

    # The end.

    def abandon(self) -> None:
        """Keep copies that on-demand passes can use, and release the plan's own slots."""
        staged = [*self.activations.slots, *(slot for slot, _ in self._staged.values())]
        theirs = self.activations.abandon()
        restore_lent_homes(self._plan, self._slots, self._places, staged, broken=self._residency.transfers.broken)
        for slot, records in self._staged.values():
            for record in records:
                self._gradients.sum_staged(record, slot)
        self._staged.clear()
        kept = {id(slot) for group in self._plan.order for slot in group.weight_chunk.copies.values() if slot.tier == 0}
        chunks = {id(chunk.home) for group in self._plan.order for chunk in group.chunks.values()}
        for slot in {id(slot): slot for slot in self._slots.values()}.values():
            if id(slot) in chunks or id(slot) in kept or slot in theirs or slot.memory.numel() == 0:
                continue
            chunk = self._home_of(slot)
            if chunk is not None and chunk.has_current_copy and chunk.source() is slot:
                self._residency.transfers.write_home(chunk)
                if chunk.home_is_stale:
                    continue  # the disk failed: what is here is all there is
            if chunk is not None and chunk.copies.get(slot.tier) is slot:
                chunk.drop_copy(slot.tier)
            self._residency.transfers.release_slot(slot)

    def release_slots(self) -> None:
        """Release the plan's slots that are left: nothing uses the model any more."""
        for slot in self._slots.values():
            if not slot.released:
                self._residency.transfers.release_slot(slot)

    # Slots and home slots.

    def _home_of(self, slot: Slot) -> Chunk | None:
        extent = slot.extent
        if extent is None or extent.kind in UNVERSIONED:
            return None
        return self._residency.groups[extent.index].chunks.get(extent.kind)

    def restore_homes(self) -> None:
        """End the segment: make the slots at the lent home slots' places the home slots."""
        self._flat.clear()  # or the arena would outlive the next plan, until Python collects this object
        if self._segment.lends_homes:
            restore_lent_homes(self._plan, self._slots, self._places)
