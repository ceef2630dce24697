"""Make one plan of what all ranks recorded, and have every rank verify the same plan.

[Note: one plan]
Each rank records a pass and tells the others its moments. Moment by moment all ranks put together the same trace. It
has the most non-model bytes, every parameter that a rank read or held, and every gradient that a rank got. Rank 0
searches for a plan and sends it with its hash. Each rank verifies it against the trace that it put together itself. So
nothing that the ranks follow was taken on trust, and none of them follows another plan.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import reduce
from hashlib import blake2b
from typing import Any

from ps_core._errors import DoesNotFit
from ps_core._layout import Layout
from ps_core._options import Options
from ps_core._plan import Tier
from ps_core._plan_text import plan_from_text, plan_to_text
from ps_core._planner.search import Planned, Setup, adopted
from ps_core._trace import Amounts, Trace
from ps_core.engine._execution.engine import Engine
from ps_core.engine._execution.plan_request import PlanRequest
from ps_core.engine._sharding.collectives_protocol import AsyncCollectives
from ps_core.engine._sharding.merged_moments import merged
from ps_core.engine._tracing.activation_log import ActivationLog
from ps_core.engine._tracing.batch_shape import BatchShape
from ps_core.engine._tracing.pass_recording import MomentRecord, PassRecording, Recorded


def exchange_texts(together: AsyncCollectives, text: str, what: str) -> list[str]:
    """Return the texts of all ranks, in order of rank."""
    mine = text.encode()
    sizes = [int(row[0]) for row in together.all_values([float(len(mine))], f"the size of {what}")]
    found = together.start(lambda session: session.exchange(mine.ljust(max(sizes), b"\0"), what)).wait()
    return [each[:size].decode() for each, size in zip(found, sizes, strict=True)]


def _row(moment: MomentRecord, constant_bytes: int) -> dict[str, Any]:
    sets = {"touched": list(moment.touched), "grads": list(moment.grads)}
    nonmodel_bytes = moment.nonmodel_bytes + constant_bytes
    return {**asdict(replace(moment, touched={}, grads={})), **sets, "nonmodel_bytes": nonmodel_bytes}


class RanksPlanRequest(PlanRequest):
    """Finds the plan that all ranks follow."""

    def __init__(
        self, engine: Engine, model_name: str, setup: Setup, options: Options, together: AsyncCollectives
    ) -> None:
        super().__init__(engine, model_name, setup, options)
        self._together = together
        self._smallest: tuple[Tier, ...] = ()
        """The tiers to plan for: of each, the smallest that a rank has."""

    def exchange(self, recordings: Sequence[Recorded], what: str) -> list[dict[str, Any]]:
        """Tell the other ranks what this one recorded, and how much room it has; return what each rank told."""
        constant_bytes = self._engine.constant_bytes
        passes = [
            {
                "moments": [_row(moment, constant_bytes) for moment in recording.moments],
                "activations": recording.activations.to_json(),
                "calls": [[each.shapes, each.tokens, each.part] for each in (batch, *batch.later)],
            }
            for recording, batch in recordings
        ]
        mine = json.dumps({"passes": passes, "tiers": [tier.capacity_bytes for tier in super()._tiers()]})
        return list(map(json.loads, exchange_texts(self._together, mine, what)))

    def take_estimate(self, ranks: Sequence[dict[str, Any]]) -> PassRecording | None:
        """Give every rank rank 0's passes, and return rank 0's estimate; None if rank 0 has none."""
        passes = ranks[0]["passes"]
        for rank in ranks:
            rank["passes"] = passes
        if not passes:
            return None
        activations = ActivationLog.from_json(passes[0]["activations"])
        return PassRecording(self._moments(passes[0]), foreseen=True, activations=activations)

    def _moments(self, one_pass: dict[str, Any]) -> list[MomentRecord]:
        """Read the moments of a pass that a rank wrote, and subtract this rank's constant bytes."""
        constant_bytes = self._engine.constant_bytes
        moments = map(_moment, one_pass["moments"])
        return [replace(each, nonmodel_bytes=each.nonmodel_bytes - constant_bytes) for each in moments]

    def combine(self, ranks: Sequence[dict[str, Any]]) -> Recorded | None:
        """Return the pass of all ranks, and a batch as large as any; None: there is none to plan for.

        ``ranks``: what each rank told, see `exchange`.
        """
        passes = [each for rank in ranks for each in rank["passes"]]
        batches = list(map(_batch, passes))
        if not all(rank["passes"] for rank in ranks):
            return None
        longest = max(batches, key=lambda batch: len(batch.later))
        if not all(map(longest.is_like, batches)):
            return None
        store = self._engine.store
        self._smallest = tuple(
            Tier(tier.name, min(rank["tiers"][place] for rank in ranks)) for place, tier in enumerate(store.tiers)
        )
        return PassRecording(merged(list(map(self._moments, passes)))), reduce(BatchShape.joined, batches)

    def _tiers(self) -> tuple[Tier, ...]:
        return self._smallest

    def _find(self, trace: Trace, layout: Layout, tiers: tuple[Tier, ...]) -> Planned:
        """Search on rank 0, and verify on every rank what it found."""
        planned, text, error = None, "", None
        if self._together.process == 0:
            try:
                planned = super()._find(trace, layout, tiers)
                text = plan_to_text(planned.plan)
            except DoesNotFit as why:
                error = why.with_traceback(None)
                text = json.dumps([why.tier, why.moment, why.needed_bytes, why.available_bytes, why.proven])
        text = exchange_texts(self._together, text, "the plan")[0]
        if error is not None:
            raise error
        if text.startswith("["):
            tier, moment, needed, available, proven = json.loads(text)
            raise DoesNotFit(tier=tier, moment=moment, needed_bytes=needed, available_bytes=available, proven=proven)
        if planned is None:
            planned = adopted(plan_from_text(text), trace, layout, self.machine, setup=self._setup)
        trace_hash = blake2b(trace.to_json().encode(), digest_size=8).hexdigest()
        self._together.agree("the plan", f"{planned.plan.fingerprint} for {trace_hash}")
        return planned


def _batch(one_pass: dict[str, Any]) -> BatchShape:
    """Read the batches of a pass that a rank wrote."""
    calls = ((tuple(map(tuple, shapes)), tokens, part) for shapes, tokens, part in one_pass["calls"])
    first, *later = (BatchShape(shapes, tokens, part=part) for shapes, tokens, part in calls)
    return replace(first, later=tuple(later))


def _moment(row: dict[str, Any]) -> MomentRecord:
    work = None if row["work"] is None else Amounts(*row["work"])
    tuples = {name: tuple(row[name]) for name in ("reads", "grad_groups", "held")}
    sets = {name: dict.fromkeys(row[name]) for name in ("touched", "grads")}
    return MomentRecord(**{**row, **tuples, **sets, "work": work})
