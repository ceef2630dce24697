"""Summarise a run."""

from __future__ import annotations

from collections.abc import Mapping

from ps_core._units import format_bytes, format_count
from ps_core.engine import Statistics
from ps_models.train._loggers import clock
from ps_models.train._options import TrainOptions
from ps_models.train._step_metrics import Rates

_PLAIN_BYTES = 16
"""Bytes a parameter in PyTorch: 2 + 2 + 4 + 4 + 4 with 16-bit weights, 4 times 4 in fp32."""


def summary(
    options: TrainOptions,
    counted: Statistics,
    rates: Rates,
    moved_bytes: Mapping[str, int],
    *,
    steps: int,
    seconds: float,
) -> str:
    """Return which bytes were on which tier, what steps moved, and what plain PyTorch would have needed."""
    tokens = steps * options.tokens_per_step
    rate = f", {tokens / seconds:,.0f} tokens/s" if steps and seconds > 0 else ""
    data = round(counted.bytes_per_parameter * rates.parameters)
    plain = _PLAIN_BYTES * rates.parameters
    activations, about = rates.activation_bytes or 0, "besides activations"
    if rates.activation_bytes is not None:
        about = f"about {format_bytes(activations)} of activations"
    lines = [
        f"trained {steps:,} steps, {tokens:,} tokens in {clock(seconds)}{rate}",
        _line("model data", data, f"{counted.bytes_per_parameter:.1f} bytes each of {format_count(rates.parameters)}"),
    ]
    for name, tier in counted.tiers.items():
        kept = "kept" if tier.peak_bytes <= tier.budget_bytes else "EXCEEDED"
        lines.append(_line(f"{name}, at most", tier.peak_bytes, f"of {format_bytes(tier.budget_bytes)}: {kept}"))
    for link, count in moved_bytes.items():
        lines.append(_line(f"moved {link}", count, f"{format_bytes(count / max(1, steps))} a step"))
    where = next(iter(counted.tiers))
    if options.lora is None:
        told = f"{format_bytes(plain)} of model data, {about}, all on the {where}"
        lines.append(_line("plain PyTorch needs", plain + activations, told))
    return "\n".join(lines)


def _line(what: str, count: int, told: str) -> str:
    return f"  {what:<22}{format_bytes(count):>12}  {told}"
