"""Write what `pstar` prints: JSON documents and their readable form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ps_core._command.forecast import Forecast, Subject, Training
from ps_core._command.largest_model import Largest
from ps_core._errors import DoesNotFit
from ps_core._simulate.clock import Prediction
from ps_core._simulate.transport import transport
from ps_core._trace import Trace
from ps_core._units import format_bytes, format_count

Document = dict[str, object]
_LINK_NAMES = {"wire": "to other processes", "network": "between nodes"}
"""Names in the text for keys of ``moved_bytes``; the other keys are printed as they are."""
_SHORTEST_S = 1e-9
"""A shorter time is a rounding error: the text says 0."""


@dataclass(frozen=True, slots=True)
class Case:
    """The question that a command was asked."""

    subject: Subject
    training: Training
    assumed: tuple[str, ...] = ()
    """Values that the user did not give, and that were assumed."""

    @property
    def model(self) -> str:
        """Return the model's name."""
        return self.subject.model if isinstance(self.subject, Trace) else self.subject.name


def fits_document(case: Case, found: Forecast, advice: Sequence[str]) -> Document:
    """Return the document of `pstar plan --json` for a model that fits."""
    told = found.prediction
    return {
        "model": case.model,
        "parameters": found.parameters,
        "fits": True,
        "missing_bytes": 0,
        "tiers": {
            tier.name: {"budget_bytes": tier.capacity_bytes, "peak_bytes": told.peak_bytes[tier.name]}
            for tier in found.tiers
        },
        "moved_bytes": dict(told.moved_bytes),
        "step_time_s": told.step_time_s,
        "bound_step_time_s": told.bound_step_time_s,
        "tflops_per_gpu": found.tflops_per_gpu if found.trace.tokens else None,
        "advice": list(advice),
        "model_tflops_per_gpu": found.model_tflops_per_gpu,
        "tokens_per_s": found.tokens_per_s if found.trace.tokens else None,
        "phases_s": {"forward": told.forward_s, "backward": told.backward_s, "update": told.update_s},
        "stalled_s": told.stalled_s,
        "launching_s": told.launching_s,
        "busy_s": dict(told.busy_s),
        "evictions": told.evictions,
        "offload_checkpoints": found.offloads,
        "groups": len(found.planned.program.layout.groups),
        "resident_groups": _resident(found),
        "padding_bytes": _padding_bytes(found),
        "host_table_bytes": found.table.held_bytes if found.table is not None else 0,
        "notes": list(found.planned.plan.notes),
        "predicted": True,
        **_setting(case),
    }


def refusal_document(case: Case, refusal: DoesNotFit, remedies: Sequence[str]) -> Document:
    """Return the document of `pstar plan --json` for a model that does not fit."""
    return {
        "model": case.model,
        "parameters": case.subject.parameters,
        "fits": False,
        "missing_bytes": max(1, refusal.needed_bytes - refusal.available_bytes),
        "tiers": {
            tier.name: {"budget_bytes": tier.capacity_bytes, "peak_bytes": None}
            for tier in case.training.cluster.tiers()
        },
        "moved_bytes": {},
        "step_time_s": None,
        "bound_step_time_s": None,
        "tflops_per_gpu": None,
        "advice": list(remedies),
        "tier": refusal.tier,
        "moment": refusal.moment,
        "needed_bytes": refusal.needed_bytes,
        "available_bytes": refusal.available_bytes,
        "proven": refusal.proven,
        **_setting(case),
    }


def scale_document(found: Largest, plan: Document) -> Document:
    """Return the document of `pstar scale --json`."""
    return {
        "model": found.shape.name,
        "parameters": found.shape.parameters,
        "layers": found.shape.layers,
        "hidden": found.shape.hidden,
        "plan": plan,
        "limit": found.limit,
    }


def nothing_document() -> Document:
    """Return the document of `pstar scale --json` if no model works."""
    return {"model": None, "parameters": 0, "layers": 0, "hidden": 0, "plan": None}


def _setting(case: Case) -> Document:
    training, cluster = case.training, case.training.cluster
    return {
        "machine": training.machine.name,
        "gpus": cluster.gpus,
        "nodes": cluster.nodes,
        "replicate": cluster.copies,
        "batch": training.batch,
        "seq": training.seq,
        "accumulate": training.accumulate,
        "optimizer_states": training.optimizer_states,
        "checkpointing": training.checkpointing,
        "chunked_loss": training.chunked_loss,
        "untied_head": training.untied_head,
        "cpu_embedding": training.cpu_embedding,
        "head_tiles": training.head_tiles,
        "precision": training.precision.value,
        "policy": training.policy.value,
        "step_in_backward": training.step_in_backward,
        "speculative": training.speculative,
        "assumed": list(case.assumed),
    }


def _resident(found: Forecast) -> int:
    """Return the number of groups that stay wholly on the compute tier."""
    lower = {held.extent.index for held in found.planned.plan.home if held.tier}
    return len(found.planned.program.layout.groups) - len(lower)


def _padding_bytes(found: Forecast) -> int:
    """Return the bytes of padding that all processes together store."""
    homes = sum(held.bytes for held in found.planned.plan.home)
    layout = found.planned.program.layout
    return homes * layout.ranks * layout.padding_numel // max(1, layout.padded_numel)


# ---------------------------------------------------------------- for people


def fits_text(case: Case, found: Forecast, advice: Sequence[str], *, ascii_only: bool) -> str:
    """Return the text of `pstar plan` for a model that fits."""
    told = found.prediction
    lines = [*_heading(case), "it fits. Everything below is predicted.", ""]
    lines.append(f"  {'peak, each process':<20}{'used':>12}{'budget':>12}")
    for tier in found.tiers:
        peak = told.peak_bytes[tier.name]
        lines.append(
            f"  {tier.name:<20}{format_bytes(peak):>12}{format_bytes(tier.capacity_bytes):>12}"
            f"  {_bar(peak / max(1, tier.capacity_bytes), ascii_only)}"
        )
    lines += ["", "  moved each step, each process"]
    cluster = found.training.cluster
    moved = {link: count for link, count in told.moved_bytes.items() if link != "wire" or cluster.gpus > 1}
    lines += [f"  {_LINK_NAMES.get(link, link):<20}{format_bytes(count):>12}" for link, count in moved.items()]
    if cluster.gpus > 1 and cluster.device_memory:
        way = transport(found.training.machine, ranks=cluster.gpus, ranks_per_node=cluster.ranks_per_node)
        lines.append(f"  sent by               {way.why}")
    lines += [
        "",
        f"  {'step':<20}{_seconds(told.step_time_s):>12}  forward {_seconds(told.forward_s)}, backward "
        f"{_seconds(told.backward_s)}, update {_seconds(told.update_s)}; compute idle {_seconds(told.stalled_s)}",
        *_overlapped(told),
        *_speed(found),
    ]
    layout = found.planned.program.layout
    lines += [
        "",
        f"  {'packing':<20}{len(layout.groups):>12,}  groups, {_resident(found):,} of them wholly on "
        f"{found.planned.plan.tiers[0].name}; {format_bytes(_padding_bytes(found))} padding in all",
    ]
    if found.table is not None:
        held = format_bytes(found.table.held_bytes)
        lines.append(f"  {'token table':<20}{held:>12}  of host memory in every moment, states and gradient included")
    lines += _bullets("note", found.planned.plan.notes)
    lines += _bullets("advice", advice)
    return "\n".join(lines) + "\n"


def _speed(found: Forecast) -> list[str]:
    """Return the lines about the speed; those that count tokens are left out for a trace that has none."""
    if not found.trace.tokens:
        return [f"  {'speed':<20}{found.model_tflops_per_gpu:>12.4g}  TFLOPS per GPU of model FLOPs"]
    return [
        f"  {'speed':<20}{found.tokens_per_s:>12,.0f}  tokens/s",
        f"  {'':<20}{found.tflops_per_gpu:>12.4g}  TFLOPS per GPU, counting 8 per parameter and token "
        f"({found.model_tflops_per_gpu:.4g} of model FLOPs)",
    ]


def brief_text(case: Case, found: Forecast) -> str:
    """Return the text of `pstar plan --brief` for a model that fits."""
    peaks = (
        f"{tier.name} {format_bytes(found.prediction.peak_bytes[tier.name])} of {format_bytes(tier.capacity_bytes)}"
        for tier in found.tiers
    )
    speed = f"{found.tokens_per_s:,.0f} tokens/s, {found.tflops_per_gpu:.4g} TFLOPS per GPU"
    if not found.trace.tokens:
        speed = f"{found.model_tflops_per_gpu:.4g} TFLOPS per GPU of model FLOPs"
    lines = (
        *_heading(case),
        f"  it fits, as predicted: at most {', '.join(peaks)} in each process",
        f"  {_seconds(found.prediction.step_time_s)} a step, {speed}",
    )
    return "\n".join(lines) + "\n"


def refusal_text(case: Case, refusal: DoesNotFit, remedies: Sequence[str]) -> str:
    """Return the text of `pstar plan` for a model that does not fit."""
    missing = max(1, refusal.needed_bytes - refusal.available_bytes)
    if refusal.proven:
        why = f"{refusal.tier}: at least {format_bytes(refusal.needed_bytes)} needed at {refusal.moment!r}"
    else:
        why = f"{refusal.tier}: no plan found for {format_bytes(refusal.needed_bytes)} at {refusal.moment!r}"
    lines = [
        *_heading(case),
        "it does not fit.",
        "",
        f"  {why},",
        f"  {format_bytes(refusal.available_bytes)} available, {format_bytes(missing)} missing (each process)",
    ]
    empty = [tier.name for tier in case.training.cluster.tiers() if not tier.capacity_bytes]
    lines += [f"  the reserve takes all {name} memory (--reserve-{name} sets less)" for name in empty]
    lines += _bullets("what would help", remedies or ("no change this command knows of would",))
    return "\n".join(lines) + "\n"


def scale_text(found: Largest, plan: str) -> str:
    """Return the text of `pstar scale`."""
    shape = found.shape
    size = f"{format_count(shape.parameters)} parameters, {shape.layers} layers of {shape.hidden}"
    again = f"with a longer search: pstar plan {shape.name}, other options the same"
    return f"largest: {shape.name}, {size}\nstopped: {found.limit}\n{again}\n\n{plan}"


def doctor_text(found: Mapping[str, str]) -> str:
    """Return the text of `pstar doctor`."""
    width = max(map(len, found))
    return "".join(f"{key:<{width}}  {value}\n" for key, value in found.items())


def _heading(case: Case) -> list[str]:
    training, cluster = case.training, case.training.cluster
    kind = ("GPU", "GPUs") if cluster.device_memory else ("process without GPU", "processes without GPU")
    where = f"{cluster.gpus} {kind[cluster.gpus > 1]}" + (f" in {cluster.nodes} nodes" if cluster.nodes > 1 else "")
    where += f", {cluster.copies} copies" if cluster.copies > 1 else ""
    facts = [f"{format_count(case.subject.parameters)} parameters", f"{where} ({training.machine.name})"]
    each = "each in a micro-batch" if training.accumulate > 1 else "each"
    if not isinstance(case.subject, Trace):
        facts.append(f"batch {training.batch} x {training.seq} {each}")
    elif case.subject.tokens:
        facts.append(f"{case.subject.tokens:,} tokens {each}")
    if training.accumulate > 1:
        facts.append(f"{training.accumulate} micro-batches")
    said = [f"{case.model}: {', '.join(facts)}, {training.precision.value}"]
    return said + ([f"assumed: {', '.join(case.assumed)}"] if case.assumed else [])


def _bullets(title: str, items: Sequence[str]) -> list[str]:
    return ["", f"  {title}", *(f"  - {item}" for item in items)] if items else []


def _bar(part: float, ascii_only: bool, width: int = 24) -> str:
    full, rest = ("#", ".") if ascii_only else ("█", "░")
    count = min(width, round(part * width))
    return full * count + rest * (width - count) + f" {part:.0%}"


def _overlapped(told: Prediction) -> list[str]:
    """Return a line with the plan's own step time, if that is shorter by 1 % or more."""
    if told.bound_step_time_s > 0.99 * told.step_time_s:
        return []
    bound = _seconds(told.bound_step_time_s)
    return [f"  {'bound of the plan':<20}{bound:>12}  if the step overlapped backward too, wherever addresses allow it"]


def _seconds(count: float) -> str:
    return f"{count:.3g} s" if count >= 1 else f"{count * 1e3:.3g} ms" if count >= _SHORTEST_S else "0 s"
