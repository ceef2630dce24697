"""Carry out each instruction on the bytes of one process, or of all."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

from ps_core._errors import PlanMismatch
from ps_core._extents import Extent, Kind, SegmentName, Use
from ps_core._options import for_parameter
from ps_core._plan import (
    Accumulate,
    Cast,
    Copy,
    Gather,
    Norm,
    Op,
    ReduceScatter,
    Release,
    Reserve,
    Run,
    Shift,
    Step,
)
from ps_core._program import Visit
from ps_core._reference.floats import Floats, add, all_finite
from ps_core._reference.optim import step_run
from ps_core._reference.process_memory import POISON, Slot
from ps_core._reference.simulated_process import Leg, Process
from ps_core._reference.training_rules import Call, Decision, Outcome, contribute, measure, overflowed, reduce


def carry_out(process: Process, leg: Leg, op: Op) -> None:
    """Carry out an instruction that concerns one process only."""
    match op:
        case Reserve():
            process.bank.reserve(process.key(leg, op.slot), op)
        case Release():
            _release(process, leg, op)
        case Shift():
            process.bank.shift(process.key(leg, op.slot), op)
        case Copy():
            _copy(process, leg, op)
        case Run():
            _run(process, leg, op)
        case Accumulate():
            _accumulate(process, leg, op)
        case Norm():
            _norm(process, leg, op)
        case Step():
            _step(process, leg, op)
        case Cast():
            _cast(process, leg, op)
        case _:
            raise PlanMismatch(f"{type(op).__name__} is no instruction for one process")
    if process.lifecycle is not None:
        process.lifecycle.after(op)


def _release(process: Process, leg: Leg, op: Release) -> None:
    key = process.key(leg, op.slot)
    tag = process.bank.slot(key).tag
    process.bank.release(key)
    if process.lifecycle is None or tag is None:
        return
    others = (slot.tag for slot in process.bank.slots.values() if slot.tag is not None)
    if all((other.extent, other.serial) != (tag.extent, tag.serial) for other in others):
        process.lifecycle.dropped(tag.extent.kind, tag.extent.index)


def _copy(process: Process, leg: Leg, op: Copy) -> None:
    source = process.holding(leg, op.source, op.extent, op.version)
    target = process.holding(leg, op.target, op.extent, None)
    count = process.program.bytes_of(op.extent)
    if abs(source.tier - target.tier) != 1 or op.bytes != count:
        raise PlanMismatch(f"a copy of {op.bytes} bytes from tier {source.tier} to {target.tier}, expected {count}")
    process.bank.view(target)[:count] = process.bank.view(source)[:count]
    process.write(leg, target, op.extent, op.version)


# Moments.


def _run(process: Process, leg: Leg, op: Run) -> None:
    program = process.program
    visits = program.segment_visits(leg.name)
    visit = next((visit for visit in visits if visit.index == op.visit), None)
    if visit is None or op.nonmodel_bytes < visit.nonmodel_bytes:
        raise PlanMismatch(f"{leg.name.value} runs moment {op.visit} with {op.nonmodel_bytes} non-model bytes")
    if process.running != leg.serial:
        process.begin(leg)
    process.bank.rise(op.nonmodel_bytes)
    uses = program.uses(leg.name, visit)
    if len(uses) != len(op.slots):
        raise PlanMismatch(f"moment {visit.name!r} has {len(op.slots)} slots, expected {len(uses)}")
    slots = {
        use.extent: process.holding(leg, number, use.extent, use.before, 0)
        for use, number in zip(uses, op.slots, strict=True)
    }
    _check_held(process, leg, uses, slots)
    if process.lifecycle is not None:
        process.lifecycle.before_run(visit)
    outcome = process.network.run(_call(process, leg, visit, slots))
    if process.lifecycle is not None:
        process.lifecycle.after_run(visit)
    _absorb(process, leg, visit, outcome, {use: slots[use.extent] for use in uses})
    for use in uses:
        process.write(leg, slots[use.extent], use.extent, use.after)
    following = visits[visits.index(visit) + 1 :]
    process.bank.rise(min(visit.nonmodel_bytes, following[0].nonmodel_bytes) if following else 0)


def _check_held(process: Process, leg: Leg, uses: Sequence[Use], slots: Mapping[Extent, Slot]) -> None:
    """Raise if an extent has moved since the moment before, although its memory is still referenced."""
    for use in uses:
        slot, moves = process.used.get(use.extent, (None, 0))
        here = slots[use.extent]
        if use.held and (slot is not here or moves != here.moves):
            raise PlanMismatch(
                f"{leg.name.value}: {use.extent.kind.value} of {use.extent.index}, still referenced since "
                f"the moment before, was moved to {here.offset}"
            )
    process.used = {extent: (slot, slot.moves) for extent, slot in slots.items()}


def _call(process: Process, leg: Leg, visit: Visit, slots: Mapping[Extent, Slot]) -> Call:
    program = process.program
    moment = program.trace.moments[visit.index]
    weights, decoded = dict[int, Floats](), dict[int, Floats]()
    for tensor in moment.reads:
        index = program.layout.group_of[tensor]
        group = program.layout.groups[index]
        if index not in decoded:
            extent = Extent(program.compute_weight_of(index), index)
            decoded[index] = process.read(slots[extent], extent)
        start = group.offsets[group.tensors.index(tensor)]
        weights[tensor] = decoded[index][start : start + program.trace.tensors[tensor].numel]
    return Call(
        moment=visit.index,
        weights=weights,
        activations={
            name: bytes(process.bank.view(slots[Extent(Kind.ACT, name)])[: program.trace.activations[name].bytes])
            for name in (visit.takes if leg.name.is_micro else ())
        },
        saved=process.saved,
        batch=process.training.batch(leg.iteration, leg.micro, process.rank),
        loss_scale=leg.loss_scale,
        training=leg.name.is_micro,
    )


def _absorb(process: Process, leg: Leg, visit: Visit, outcome: Outcome, slots: Mapping[Use, Slot]) -> None:
    """Store a moment's results."""
    program, training = process.program, process.training
    process.saved = outcome.saved
    if outcome.loss is not None:
        process.losses.setdefault(leg.serial, []).append(outcome.loss)
    if not leg.name.is_micro:
        return
    for name in visit.makes:
        slot = slots[Use(Extent(Kind.ACT, name), None, 0)]
        made = outcome.activations[name]
        process.bank.view(slot)[: len(made)] = made
    moment, arrived = program.trace.moments[visit.index], outcome.grads
    if process.rank == 0 and leg.iteration in training.overflow_at:
        arrived = overflowed(moment, arrived)
    arrived = {tensor: arrived[tensor] for tensor in moment.grads}
    for use, slot in slots.items():
        if use.before == use.after or use.extent.kind is Kind.ACT:
            continue
        if use.before is None:
            process.bank.view(slot)[:] = bytes(slot.bytes)
        for place in range(len(program.layout.groups[use.extent.index].tensors)):
            _gain(process, visit, (slot, use.extent, place), arrived)


def _gain(process: Process, visit: Visit, where: tuple[Slot, Extent, int], arrived: Mapping[int, Floats]) -> None:
    """Add a gradient for the n-th tensor of a group, or keep it apart while the weight is still needed."""
    program, (slot, extent, place) = process.program, where
    group, precision = program.layout.groups[extent.index], program.precision_of(extent.index)
    tensor, offset = group.tensors[place], group.offsets[place]
    if program.overwritten(extent.index) and process.last_reads[tensor] > visit.index:
        if tensor in arrived:
            process.aside[tensor] = contribute(process.aside.get(tensor), arrived[tensor], precision)
        return
    numel = program.trace.tensors[tensor].numel
    total = process.aside.pop(tensor, None)
    if tensor in process.over:
        total = process.read(slot, extent)[offset : offset + numel]
    if tensor in arrived:
        total = contribute(total, arrived[tensor], precision)
    if total is not None:
        watched = process.lifecycle if program.overwritten(extent.index) else None
        if watched is not None and not watched.book.may_overwrite(tensor):
            raise PlanMismatch(f"the gradient of {program.trace.tensors[tensor].name!r} comes before its last use")
        process.over.add(tensor)
        process.put(slot, extent, offset, total)


# Gradients, norms, steps.


def _complete(process: Process, group: int) -> int:
    """Return K, the version of a complete gradient."""
    return len(process.program.gradient_visits[group])


def _accumulate(process: Process, leg: Leg, op: Accumulate) -> None:
    program = process.program
    if op.first != program.accumulates_first(leg.name):
        raise PlanMismatch(f"{leg.name.value}: the accumulator of group {op.group} is started at the wrong time")
    gradient = Extent(program.local_gradient, op.group)
    source = process.holding(leg, op.gradient, gradient, _complete(process, op.group))
    total = Extent(Kind.ACC, op.group)
    target = process.holding(leg, op.accumulator, total, None if op.first else 1, source.tier)
    values = process.read(source, gradient)
    if op.first:
        process.write(leg, target, total, 1, values)
    else:
        process.write(leg, target, total, 2, add(process.read(target, total), values))


def _final_gradient(process: Process, leg: Leg, group: int) -> tuple[Extent, int]:
    program = process.program
    if program.overwritten(group):
        return Extent(program.weight_of(group), group), _complete(process, group)
    return Extent(Kind.ACC, group), 1 if leg.name is SegmentName.STEP or program.accumulates_first(leg.name) else 2


def _norm(process: Process, leg: Leg, op: Norm) -> None:
    extent, version = _final_gradient(process, leg, op.group)
    slot = process.holding(leg, op.slot, extent, version)
    if op.group in process.parts:
        raise PlanMismatch(f"the norm of group {op.group} is taken twice")
    process.parts[op.group] = measure(process.read(slot, extent))


_STEPPED = (Kind.P32, Kind.M, Kind.V)
"""The kinds that a step reads and writes: the master and the two moments of this reference's optimizers."""


def _decision(process: Process, leg: Leg) -> Decision:
    """Return the decision to step: all gradients', or within backward the only one possible."""
    if leg.name.is_micro and process.training.max_grad_norm is None:
        return Decision(1.0, False, leg.iteration + 1, 0.0)
    if leg.decision is None or leg.decision.skip:
        raise PlanMismatch("a step without a decision to take one")
    return leg.decision


def _step(process: Process, leg: Leg, op: Step) -> None:
    """Step every element of the chunk by its own tensor's settings; padding stays zero.

    The optimizers here have a momentum and a variance at most. States that the program lacks are zeros before each
    step. Further states of the program stay as they are.
    """
    program, decision = process.program, _decision(process, leg)
    kinds = program.home_kinds(op.group)
    if len(kinds) != len(op.slots):
        raise PlanMismatch(f"the step of group {op.group} has {len(op.slots)} slots, expected {len(kinds)}")
    gradient, version = _final_gradient(process, leg, op.group)
    tier = process.bank.slot(process.key(leg, op.slots[0])).tier
    slots: dict[Kind, Slot] = {}
    for kind, number in zip(kinds, op.slots, strict=True):
        expected = version if kind is gradient.kind else None if kind is Kind.P16 else 0
        slots[kind] = process.holding(leg, number, Extent(kind, op.group), expected, tier)
    kept = (Kind.P32, *program.state_kinds)
    old = {kind: process.read(slots[kind], Extent(kind, op.group)) for kind in (*kept, gradient.kind)}
    if leg.name.is_micro and not all_finite(old[gradient.kind]):
        raise FloatingPointError(f"a gradient of group {op.group} is not finite, so the group was not stepped")
    new = {kind: array("f", old[kind]) for kind in kept}
    zeros = array("f", bytes(4 * len(new[Kind.P32])))
    for tensor, start, end in process.pieces(op.group):
        settings = for_parameter(process.training.optimizer, program.trace.tensors[tensor].name)
        rows = (old.get(kind, zeros)[start:end] for kind in (*_STEPPED, gradient.kind))
        for kind, run in zip(_STEPPED, step_run(settings, decision.step, decision.grad_scale, *rows), strict=True):
            if kind in new:
                new[kind][start:end] = run
    for kind, row in new.items():
        process.write(leg, slots[kind], Extent(kind, op.group), 1, row)
    if Kind.P16 in slots:
        process.write(leg, slots[Kind.P16], Extent(Kind.P16, op.group), program.rebuilt(op.group), new[Kind.P32])


def _cast(process: Process, leg: Leg, op: Cast) -> None:
    if op.group not in process.program.casts(leg.name, process.early):
        raise PlanMismatch(f"{leg.name.value} rebuilds group {op.group}")
    master, weight = Extent(Kind.P32, op.group), Extent(Kind.P16, op.group)
    source = process.holding(leg, op.master, master, 0)
    target = process.holding(leg, op.weight, weight, None, source.tier)
    process.write(leg, target, weight, process.program.rebuilt(op.group), process.read(source, master))


# Collectives.


def gather(processes: Sequence[Process], leg: Leg, op: Gather) -> None:
    """Copy every process's shard to every process."""
    program = processes[0].program
    shard, full = Extent(program.weight_of(op.group), op.group), Extent(Kind.FULL, op.group)
    whole = array("f")
    for process in processes:
        whole.extend(process.read(process.holding(leg, op.shard, shard, 0, 0), shard))
    for process in processes:
        process.write(leg, process.holding(leg, op.full, full, None, 0), full, 0, whole)
        if process.lifecycle is not None:
            process.lifecycle.after(op)


def reduce_scatter(processes: Sequence[Process], leg: Leg, op: ReduceScatter) -> None:
    """Send each process its part in the weights' precision; each sums what it receives in rank order."""
    program = processes[0].program
    version = _complete(processes[0], op.group)
    target = Extent(program.weight_of(op.group) if program.overwritten(op.group) else Kind.RGRAD, op.group)
    source, gradients = Extent(program.gradient_of(op.group), op.group), []
    for process in processes:
        gradients.append(process.read(process.holding(leg, op.source, source, version, 0), source))
        wire = process.holding(leg, op.wire, Extent(Kind.WIRE, op.group), None, 0)
        process.bank.view(wire)[:] = bytes([POISON]) * wire.bytes
        wire.tag = None
    numel = program.layout.groups[op.group].shard_numel
    for process in processes:
        start = process.rank * numel
        mine = reduce([gradient[start : start + numel] for gradient in gradients], process.precision(target))
        process.write(leg, process.holding(leg, op.shard, target, None, 0), target, version, mine)
        if process.lifecycle is not None:
            process.lifecycle.after(op)
