"""A demonstration: a tiny network, trained on real bytes in a "device" that holds a fraction of its model data.

    python -m ps_core._demo [FILE.svg]

It plans, verifies, executes in a random order that the plan allows, and compares every bit with training in memory
without end. The picture of the tide goes to the file.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ps_core._errors import InvalidInput
from ps_core._learning import Trained, Training
from ps_core._machine import machine
from ps_core._network import ByteNetwork, Shape
from ps_core._options import AdamW
from ps_core._oracle import train_unconstrained
from ps_core._plan import Copy, Tier
from ps_core._reference import Execution, Observed, execute
from ps_core._search import Planned, Setup, find_plan
from ps_core._units import format_bytes, parse_bytes
from ps_core.report import Tide, tide, tide_svg, tide_text

SHAPE = Shape(layers=6, width=24, hidden=64, tokens=24)
DEVICE, HOST = "144 KiB", "600 KiB"
ITERATIONS = 12


@dataclass(slots=True)
class _Watch:
    """Counts what the execution does, as it does it."""

    tiers: tuple[Tier, ...]
    peak_bytes: list[int] = field(default_factory=lambda: [0, 0])
    moved_bytes: dict[str, int] = field(default_factory=dict)

    def __call__(self, event: Observed) -> None:
        for tier, used in enumerate(event.used_bytes):
            held = used + (event.tide_bytes if tier == 0 else 0)
            self.peak_bytes[tier] = max(self.peak_bytes[tier], held)
        if isinstance(event.instr.op, Copy):
            link = event.instr.queue.name.lower()
            self.moved_bytes[link] = self.moved_bytes.get(link, 0) + event.instr.op.bytes


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; 0 if every bit agreed, 2 if the picture could not be written."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    same, drawn = _trained()
    try:
        for name in arguments[:1]:
            _write(Path(name), tide_svg(drawn))
    except InvalidInput as error:
        print(error, file=sys.stderr)
        return 2
    return 0 if same else 1


def _trained() -> tuple[bool, Tide]:
    network, found = _planned()
    watch = _Watch(tiers=found.plan.tiers)
    training = Training(batch=network.batch, iterations=ITERATIONS, optimizer=AdamW(lr=0.01), max_grad_norm=1.0)
    trained = execute(network, found.program, found.plan, training, Execution(observer=watch))
    same = trained == train_unconstrained(network, found.program, training)
    print(_told(found, watch, trained))
    print("\nLosses, masters, momenta and variances are " + ("bitwise equal" if same else "NOT EQUAL") + " to those of")
    print("training with memory without end.\n")
    drawn = tide(found.program, found.plan)
    print(tide_text(drawn).rstrip())
    return same, drawn


def _planned() -> tuple[ByteNetwork, Planned]:
    network = ByteNetwork(SHAPE)
    tiers = (
        Tier(name="device", capacity_bytes=parse_bytes(DEVICE)),
        Tier(name="host", capacity_bytes=parse_bytes(HOST)),
    )
    return network, find_plan(network.trace, tiers, machine("v100"), setup=Setup())


def _told(found: Planned, watch: _Watch, trained: Trained) -> str:
    trace, layout = found.program.trace, found.program.layout
    numel = sum(tensor.numel for tensor in trace.tensors)
    lines = [
        f"{numel:,} parameters in {len(layout.groups)} groups",
        f"14 bytes a parameter make {format_bytes(14 * numel)} of model data",
        *(
            f"{tier.name}: budget {format_bytes(tier.capacity_bytes)}, peak {format_bytes(peak)}"
            for tier, peak in zip(watch.tiers, watch.peak_bytes, strict=True)
        ),
        f"moved in {ITERATIONS} steps: "
        + ", ".join(f"{link} {format_bytes(count)}" for link, count in sorted(watch.moved_bytes.items())),
        "losses: " + " ".join(f"{loss:.2f}" for loss in trained.losses),
    ]
    return "\n".join(lines)


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidInput(f"cannot write {path}: {error.strerror}") from error
    print(f"\nThe same as a picture: {path}")


if __name__ == "__main__":
    sys.exit(main())
