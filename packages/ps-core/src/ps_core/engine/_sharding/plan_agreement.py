"""Make one plan of what all ranks recorded, and have every rank verify the same plan.

[Note: one plan]
Each rank records a pass and tells the others its moments. Moment by moment all ranks put together the same trace: the
most non-model bytes, every parameter that any rank read or held, every gradient that any rank got. Rank 0 searches for
a plan and sends it with its hash. Each rank verifies it against the trace that it put together itself. So nothing that
the ranks follow was taken on trust, and none of them follows another plan.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
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
from ps_core.engine._sharding.collectives_protocol import AsyncCollectives, CollectiveSession
from ps_core.engine._tracing.batch_shape import BatchShape
from ps_core.engine._tracing.pass_recording import MomentRecord, PassRecording


def exchange_texts(together: AsyncCollectives, text: str, what: str) -> list[str]:
    """Return the texts of all ranks, in order of rank."""
    mine = text.encode()
    sizes = [int(row[0]) for row in together.all_values([float(len(mine))], f"the size of {what}")]
    found: list[bytes] = []
    together.start(partial(_exchange, mine.ljust(max(sizes), b"\0"), what, found)).wait()
    return [each[:size].decode() for each, size in zip(found, sizes, strict=True)]


def _exchange(mine: bytes, what: str, found: list[bytes], session: CollectiveSession) -> None:
    found.extend(session.exchange(mine, what))


def recording_to_text(recording: PassRecording, batch: BatchShape, engine: Engine) -> str:
    """Write what a rank knows of its pass."""
    constant = engine.constant_bytes
    moments = [
        {
            **asdict(replace(moment, touched={}, grads={})),
            "touched": list(moment.touched),
            "grads": list(moment.grads),
            "nonmodel_bytes": moment.nonmodel_bytes + constant,
        }
        for moment in recording.moments
    ]
    tiers = [tier.capacity_bytes for tier in engine.store.tiers]
    return json.dumps({"moments": moments, "shapes": batch.shapes, "tokens": batch.tokens, "tiers": tiers})


class RanksPlanRequest(PlanRequest):
    """Finds the plan that all ranks follow."""

    def __init__(
        self, engine: Engine, model_name: str, setup: Setup, options: Options, together: AsyncCollectives
    ) -> None:
        super().__init__(engine, model_name, setup, options)
        self._together = together
        self._smallest: tuple[Tier, ...] = ()
        """The tiers to plan for: of each, the smallest that a rank has."""

    def combine(self, texts: Sequence[str]) -> tuple[PassRecording, BatchShape] | None:
        """Return the pass of all ranks, and a batch as large as any; None: their moments are not alike."""
        ranks = [json.loads(text) for text in texts]
        rows = [[_moment(row) for row in each["moments"]] for each in ranks]
        if len({tuple((moment.backward, moment.reads, moment.grad_groups) for moment in row) for row in rows}) > 1:
            return None
        store = self._engine.store
        self._smallest = tuple(
            Tier(tier.name, min(each["tiers"][place] for each in ranks)) for place, tier in enumerate(store.tiers)
        )
        constant = self._engine.constant_bytes  # `question` adds it
        moments = [_together(each, constant) for each in zip(*rows, strict=True)]
        batches = [BatchShape(tuple(map(tuple, each["shapes"])), each["tokens"]) for each in ranks]
        if len({batch.dimensions for batch in batches}) > 1:
            return None
        batch = batches[0]
        for other in batches[1:]:
            batch = batch.joined(other)
        return PassRecording(moments), batch

    def _tiers(self) -> tuple[Tier, ...]:
        return self._smallest

    def _find(self, trace: Trace, layout: Layout) -> Planned:
        """Have rank 0 search, and every rank verify what it found."""
        planned, text, error = None, "", None
        if self._together.process == 0:
            try:
                planned = super()._find(trace, layout)
                text = plan_to_text(planned.plan)
            except DoesNotFit as why:
                error = why.with_traceback(None)
                text = json.dumps([why.tier, why.moment, why.needed_bytes, why.available_bytes, why.proven])
        text = exchange_texts(self._together, text, "the plan")[0]
        if error is not None:
            raise error
        if text.startswith("["):
            tier, moment, needed, available, proven = json.loads(text)
            raise DoesNotFit(
                tier=tier, moment=moment, needed_bytes=needed, available_bytes=available, proven=proven
            )
        if planned is None:
            planned = adopted(plan_from_text(text), trace, layout, self.machine, setup=self._setup)
        self._together.agree("the plan", f"{planned.plan.fingerprint} for {trace_hash(trace)}")
        return planned


def trace_hash(trace: Trace) -> str:
    """Return a short hash of a trace."""
    return blake2b(trace.to_json().encode(), digest_size=8).hexdigest()


def _moment(row: dict[str, Any]) -> MomentRecord:
    work = None if row["work"] is None else Amounts(*row["work"])
    tuples = {name: tuple(row[name]) for name in ("reads", "grad_groups", "held")}
    sets = {name: dict.fromkeys(row[name]) for name in ("touched", "grads")}
    return MomentRecord(**{**row, **tuples, **sets, "work": work})


def _together(moments: Sequence[MomentRecord], constant_bytes: int) -> MomentRecord:
    """Return the moment that has room for those of all ranks."""
    first = moments[0]
    return replace(
        first,
        held=tuple(dict.fromkeys(index for moment in moments for index in moment.held)),
        touched=dict.fromkeys(index for moment in moments for index in moment.touched),
        grads=dict.fromkeys(index for moment in moments for index in moment.grads),
        nonmodel_bytes=max(moment.nonmodel_bytes for moment in moments) - constant_bytes,
    )

