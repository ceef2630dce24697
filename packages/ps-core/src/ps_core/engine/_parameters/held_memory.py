"""Say that a moment does not fit because tensors outside of the engine keep the memory of parameters in use."""

from __future__ import annotations

from collections.abc import Iterable

from ps_core._errors import DoesNotFit
from ps_core.engine._memory.budget_suggestions import size, suggest_budget
from ps_core.engine._memory.tier_store import TierStore
from ps_core.engine._parameters.param_state import ParamGroup


def check_held_memory(store: TierStore, unused: Iterable[ParamGroup], moment: str, needed_bytes: int) -> None:
    """Raise `DoesNotFit` if a moment would fit without such tensors.

    ``unused``: groups on the compute tier that the moment does not use.
    """
    held, tier = [group for group in unused if group.aliased], store.tiers[0]
    kept_bytes = sum(group.weight_chunk.bytes for group in held)
    if not held or needed_bytes - kept_bytes > tier.capacity_bytes:
        return
    names = [record.name for group in held for record in group.tensors if record.bound and record.bound.aliased]
    others = f" and {len(names) - 1} other parameters" if len(names) > 1 else ""
    raise DoesNotFit(
        tier=tier.name,
        moment=moment,
        needed_bytes=needed_bytes,
        available_bytes=tier.capacity_bytes,
        proven=False,
        depends_on_batch=bool(store.ledger.nonmodel_bytes),
        remedies=(
            suggest_budget(store.limits, 0, needed_bytes) + ", and what more tensors of parameters' memory keep",
            f"materialized(model): read many parameters at once within it: tensors with the memory of {names[0]!r}"
            f"{others}, as of p.data or p.detach(), keep {size(kept_bytes)} of {tier.name} in use until they are freed",
        ),
    )
