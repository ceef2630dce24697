"""Define ``statistics(model)``, which returns what the engine has done and holds, as frozen data."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

import ps_kernels
from ps_core._extents import Kind
from ps_core.engine._execution.engine import Engine
from ps_core.engine._execution.find_hooks import hooks_of


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStatistics:
    """The bytes of one tier."""

    current_bytes: int
    peak_bytes: int
    """The most bytes at once, counted or planned non-model bytes included."""
    budget_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """Report what one model's engine has done since `chunked`, and holds now."""

    tiers: dict[str, TierStatistics]
    moved_bytes: dict[str, int]
    """Bytes by link, as in ``host->device``."""
    evictions: int
    """How often a group's copy left the compute tier."""
    prefetch_hits: int
    """Fetches that a plan had issued before the moment that needed them."""
    fetches: int
    divergences: int
    """Passes that left their plan, or had none although a plan exists."""
    replans: int
    steps: int
    skipped_steps: int
    group_steps_in_backward: int
    """Groups that were stepped within backward, also where that was undone: by ``Options(step=...)``."""
    undone_group_steps: int
    """Groups whose step within backward was undone, by ``Options(step="speculative")``."""
    planned_passes: int
    passes: int
    groups: int
    moments: int
    """Moments of the planned pass; 0 before there is a plan."""
    bytes_per_parameter: float
    """Bytes of model data with a home slot for each parameter, padding included."""
    adam_backend: str
    """The backends of steps, as in ``cuda and avx512`` if the states are on both tiers."""
    last_divergence: str
    """Why the last of those passes left the plan; empty: none has."""
    stalls_s: float
    """Seconds in all that this process waited for moves."""
    step_time_s: dict[str, float]
    """Seconds of the last step by the host's clock: ``forward, backward, step`` and, as a part of these,
    ``stalled``.
    """
    planned_step_s: float
    """Seconds of a step as the plan predicts for its machine; 0 without a plan."""
    idle_s: dict[str, float]
    """Seconds a step, by cause, that the device waited in the last ``profiled`` block; empty without one."""

    def as_dict(self) -> dict[str, int | float | str]:
        """Return all values in one flat dictionary, for a logger."""
        flat: dict[str, int | float | str] = {}
        for name in self.__slots__:
            value = getattr(self, name)
            if name == "tiers":
                for tier, row in value.items():
                    for key in row.__slots__:
                        flat[f"tiers.{tier}.{key}"] = getattr(row, key)
            elif isinstance(value, dict):
                flat.update({f"{name}.{key}": each for key, each in value.items()})
            else:
                flat[name] = value
        return flat


def statistics(model: nn.Module) -> Statistics:
    """Return what the engine of a managed model has done and holds."""
    management = hooks_of(model)
    engine, scheduler = management.engine, management.scheduler
    store, counters = engine.store, engine.counters
    names = [tier.name for tier in store.tiers]
    tiers = {
        tier.name: TierStatistics(
            current_bytes=store.ledger.used_bytes[index],
            peak_bytes=store.ledger.peak_bytes[index],
            budget_bytes=tier.capacity_bytes,
        )
        for index, tier in enumerate(store.tiers)
    }
    links = [pair for above in range(len(names) - 1) for pair in ((above, above + 1), (above + 1, above))]
    moved = {**dict.fromkeys(links, 0), **counters.moved_bytes}
    homes = sum(chunk.home.bytes for group in engine.groups for chunk in group.chunks.values())
    return Statistics(
        tiers=tiers,
        moved_bytes={f"{names[a]}->{names[b]}": count for (a, b), count in sorted(moved.items())},
        evictions=counters.evictions,
        prefetch_hits=counters.prefetch_hits,
        fetches=counters.fetches,
        divergences=counters.divergences,
        replans=counters.replans,
        steps=counters.steps,
        skipped_steps=counters.skipped,
        group_steps_in_backward=counters.steps_in_backward,
        undone_group_steps=counters.undone_steps,
        planned_passes=counters.replayed,
        passes=counters.passes,
        groups=len(engine.groups),
        moments=scheduler.moments,
        bytes_per_parameter=homes / max(1, sum(record.numel for record in engine.records)),
        adam_backend=_backend(engine),
        last_divergence=counters.last_divergence,
        stalls_s=counters.stalled_s,
        step_time_s=dict(counters.last_step),
        planned_step_s=scheduler.planned_step_s,
        idle_s=dict(counters.idle_s),
    )


def _backend(engine: Engine) -> str:
    """Return the names of the backends of steps; on CUDA there are two if states are on both tiers."""
    states = ps_kernels.backends()
    by_torch = engine.counters.by_torch
    kernels = (name for name, state in states.items() if state == "available" and name != "cuda")
    on_cpu = "torch" if by_torch else next(kernels)
    if engine.store.device.name != "cuda":
        return on_cpu
    on_card = "cuda" if states["cuda"] == "available" and not by_torch else "torch on CUDA"
    tiers = {
        group.chunks[Kind.P32].home.tier for group in engine.groups if Kind.P32 in group.chunks and group.trainable
    }
    return " and ".join([on_card] * (0 in tiers) + [on_cpu] * (tiers != {0}))
