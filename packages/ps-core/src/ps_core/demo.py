"""Train a tiny network on real bytes in a "device" that holds a fraction of its model data.

    python -m ps_core.demo [--brief] [FILE.svg]

It plans, verifies, and executes in a random order that the plan allows. It compares every bit with training in
unlimited memory, and what was moved with what was planned. The picture of memory over a step goes to the file.
``--brief``: in a few lines, if everything is correct.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ps_core._errors import InvalidInput
from ps_core._extents import Extent, Kind, SegmentName
from ps_core._options import AdamW
from ps_core._plan import Copy, Instr, Queue, Run, Tier
from ps_core._planner.search import Planned, Setup, find_plan
from ps_core._reference.execute_plan import Execution, Observed, execute
from ps_core._reference.oracle import train_unconstrained
from ps_core._reference.toy_network import ByteNetwork, Shape
from ps_core._reference.training_rules import Trained, Training
from ps_core._simulate.clock import QUEUE_NAMES
from ps_core._simulate.machine import machine
from ps_core._units import format_bytes, parse_bytes
from ps_core.report import tide, tide_svg, tide_text

SHAPE = Shape(layers=8, width=24, hidden=64, tokens=24, checkpointing=True)
DEVICE, HOST = "72 KiB", "560 KiB"
ITERATIONS = 12


@dataclass(slots=True)
class Counts:
    """Count what instructions move."""

    moved_bytes: dict[str, int] = field(default_factory=dict)
    """Moved bytes by link."""
    evictions: int = 0
    """How often an extent was evicted from the device and needed there again in the same pass."""
    _known: set[Extent] = field(default_factory=set)

    def add(self, instr: Instr) -> None:
        """Count an instruction."""
        op = instr.op
        if isinstance(op, Run):
            self._known = set() if op.visit == 0 else self._known
        elif isinstance(op, Copy):
            name = QUEUE_NAMES[instr.queue]
            self.moved_bytes[name] = self.moved_bytes.get(name, 0) + op.bytes
            if instr.queue is Queue.H2D:
                self.evictions += op.extent in self._known or op.extent.kind is Kind.ACT
                self._known.add(op.extent)


@dataclass(slots=True)
class _Watch:
    """Observe an execution."""

    tiers: tuple[Tier, ...]
    counts: Counts = field(default_factory=Counts)
    peak_bytes: list[int] = field(default_factory=lambda: [0, 0])

    def __call__(self, event: Observed) -> None:
        for tier, used in enumerate(event.used_bytes):
            held = used + (event.nonmodel_bytes if tier == 0 else 0)
            self.peak_bytes[tier] = max(self.peak_bytes[tier], held)
        if event.segment is not SegmentName.PROLOGUE:
            self.counts.add(event.instr)


@dataclass(frozen=True, slots=True)
class _Shown:
    """Hold what is to be shown."""

    found: Planned
    watch: _Watch
    limited: Trained
    free: Trained

    @property
    def planned(self) -> Counts:
        """Return the planned counts of all iterations."""
        counts = Counts()
        for name in self.found.program.iteration():
            for instr in self.found.plan.segment(name).instrs:
                counts.add(instr)
        links = {link: moved for link, moved in self.found.prediction.moved_bytes.items() if moved}
        return Counts({link: moved * ITERATIONS for link, moved in links.items()}, counts.evictions * ITERATIONS)

    @property
    def kept(self) -> bool:
        """Return True if everything was as predicted."""
        counts, planned = self.watch.counts, self.planned
        return (
            self.limited == self.free
            and (counts.moved_bytes, counts.evictions) == (planned.moved_bytes, planned.evictions)
            and all(
                peak <= tier.capacity_bytes for peak, tier in zip(self.watch.peak_bytes, self.watch.tiers, strict=True)
            )
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demonstration; return 0 if everything was as planned, 1 if not, 2 if no picture could be written."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    brief = "--brief" in arguments
    files = [each for each in arguments if each != "--brief"][:1]
    network, found = _planned()
    watch = _Watch(tiers=found.plan.tiers)
    training = Training(batch=network.batch, iterations=ITERATIONS, optimizer=AdamW(lr=0.01), max_grad_norm=1.0)
    free = train_unconstrained(network, found.program, training)
    limited = execute(network, found.program, found.plan, training, Execution(observer=watch))
    shown = _Shown(found, watch, limited, free)
    drawn = tide(found.program, found.plan)
    if brief and shown.kept:
        print("\n".join(_in_brief(shown)))
    else:
        print("\n".join((*_problem(found), *_losses(shown), "", *_moves(shown), "", *_memory(shown), "")))
        print(tide_text(drawn).rstrip())
    try:
        for name in files:
            _write(Path(name), tide_svg(drawn))
    except InvalidInput as error:
        print(error, file=sys.stderr)
        return 2
    return 0 if shown.kept else 1


def _planned() -> tuple[ByteNetwork, Planned]:
    network = ByteNetwork(SHAPE)
    tiers = (
        Tier(name="device", capacity_bytes=parse_bytes(DEVICE)),
        Tier(name="host", capacity_bytes=parse_bytes(HOST)),
    )
    return network, find_plan(network.trace, tiers, machine("v100"), setup=Setup())


def _problem(found: Planned) -> tuple[str, ...]:
    program = found.program
    numel = program.trace.parameters
    highest = max(visit.nonmodel_bytes for visit in program.visits)
    return (
        "A small network learns by heart, in pure Python, with every byte where the plan says it is.",
        "",
        f"  parameters       {numel:,} in {len(program.layout.groups)} groups",
        f"  model data       {format_bytes(14 * numel)}, 14 bytes a parameter",
        f"  non-model data   up to {format_bytes(highest)}",
        f"  device           {format_bytes(found.plan.tiers[0].capacity_bytes)}; the rest stays on the host",
        f"  plan             {sum(len(segment.instrs) for segment in found.plan.segments)} instructions, verified; "
        "carried out in a random order that it allows",
        "",
    )


def _in_brief(shown: _Shown) -> tuple[str, ...]:
    moved = ", ".join(f"{count:,} bytes {link}" for link, count in shown.watch.counts.moved_bytes.items())
    peaks = ", ".join(
        f"{tier.name} {format_bytes(peak)} of {format_bytes(tier.capacity_bytes)}"
        for tier, peak in zip(shown.watch.tiers, shown.watch.peak_bytes, strict=True)
    )
    return (
        f"a small network, trained in pure Python where {DEVICE} are to hold "
        f"{format_bytes(14 * shown.found.program.trace.parameters)} of model data: {ITERATIONS} steps",
        "  losses, weights and optimizer states: equal, bit for bit, to training without a limit",
        f"  moved as planned: {moved}",
        f"  budgets kept: {peaks}",
    )


def _losses(shown: _Shown) -> tuple[str, ...]:
    rows = zip(shown.free.losses, shown.limited.losses, strict=True)
    return (
        f"  step   loss without a limit   loss in {DEVICE}   equal, bit for bit",
        *(
            f"  {step:4}   {free:20.7f}   {limited:{8 + len(DEVICE)}.7f}   {_yes(free.hex() == limited.hex())}"
            for step, (free, limited) in enumerate(rows, 1)
        ),
        "",
        f"  all masters, momenta, variances and weights afterwards: {_equal(shown.limited == shown.free)}",
    )


def _moves(shown: _Shown) -> tuple[str, ...]:
    planned, counts = shown.planned, shown.watch.counts
    rows = [
        (f"bytes {link}", planned.moved_bytes.get(link, 0), counts.moved_bytes.get(link, 0))
        for link in sorted({*planned.moved_bytes, *counts.moved_bytes}, reverse=True)
    ]
    rows.append(("evictions: thrown out, fetched again", planned.evictions, counts.evictions))
    return (
        f"  {f'in {ITERATIONS} steps':38}{'planned':>12}{'counted':>12}",
        *(f"  {name:38}{plan:>12,}{count:>12,}   {_equal(plan == count)}" for name, plan, count in rows),
    )


def _memory(shown: _Shown) -> tuple[str, ...]:
    rows = zip(shown.watch.tiers, shown.watch.peak_bytes, strict=True)
    return (
        f"  {'bytes in use at once':38}{'budget':>12}{'peak':>12}",
        *(
            f"  {tier.name:38}{tier.capacity_bytes:>12,}{peak:>12,}   "
            + ("kept" if peak <= tier.capacity_bytes else "EXCEEDED")
            for tier, peak in rows
        ),
    )


def _yes(same: bool) -> str:
    return "yes" if same else "NO"


def _equal(same: bool) -> str:
    return "equal" if same else "NOT EQUAL"


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidInput(f"cannot write {path}: {error.strerror}") from error
    print(f"\nMemory over a step as a picture: {path}")


if __name__ == "__main__":
    sys.exit(main())
