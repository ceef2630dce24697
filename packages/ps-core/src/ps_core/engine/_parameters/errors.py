"""Make the errors of parameters: model data that does not fit, with ways to make it fit, and unsupported uses."""

from __future__ import annotations

import sys
from copy import copy
from types import FrameType
from typing import NamedTuple

from torch import nn
from torch.utils import checkpoint

from ps_core._errors import DoesNotFit, UnsupportedParameter
from ps_core._extents import Kind
from ps_core._units import align_up
from ps_core.engine._memory.budget_suggestions import options_as, size, suggest_budget
from ps_core.engine._memory.tier_store import TierStore
from ps_core.engine._parameters.param_state import ParamGroup, ParamState

_ACTIVATIONS = ", and what activations take"
_PARTS = {2: "half", 4: "a quarter of", 8: "an eighth of", 16: "a sixteenth of"}
_SO_FAR = ", as far as this pass has come"


def compute_tier_too_small(
    store: TierStore,
    groups: list[ParamGroup],
    moment: str,
    needed_bytes: int,
    nonmodel_bytes: int,
    *,
    proven: bool,
    whole: bool = False,
) -> DoesNotFit:
    """Return the error for a moment that the compute tier cannot hold. ``whole``: no moment of the pass needs more.

    Where a pass would fit without activations that the host had no room for, the error is the host's.
    """
    capacity, not_offloaded_why = store.tiers[0].capacity_bytes, store.ledger.not_offloaded_why
    if not whole and not_offloaded_why is not None and needed_bytes - store.ledger.not_offloaded_bytes <= capacity:
        return copy(not_offloaded_why)  # without its frames, which would keep the pass's tensors alive
    needed_bytes = align_up(max(needed_bytes, store.ledger.foreseen_bytes))
    group = max(groups, key=lambda group: (not group.pinned, group.chunk_numel))
    weight, largest = group.chunk_numel * group.dtype.itemsize, _largest(group).numel * group.dtype.itemsize
    unknown = "" if whole or store.ledger.foreseen_bytes else _SO_FAR
    asked, missing = needed_bytes, needed_bytes - capacity
    batch = _smaller_batch(missing, max(nonmodel_bytes, store.ledger.foreseen_bytes - 2 * weight))
    if not nonmodel_bytes:
        asked, unknown = asked + largest * group.trainable, _ACTIVATIONS  # and its gradient
        batch = "a smaller batch or sequence: less non-model data, of which nothing is known yet"
    if missing <= weight - largest:
        parts = (
            f"{options_as(store.given, group_bytes=largest)}: "
            f"a moment holds {size(largest)} of weights, not {size(weight)}"
        )
    elif 4 * weight > max(capacity, nonmodel_bytes):  # the weight, its gradient, and that as it is summed
        parts = _in_parts(store, groups, weight)
    elif not store.ledger.checkpointing_helps:
        parts = ""
    else:
        parts = (
            "x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False): for each block, in forward "
            "(activation checkpointing): then only one block's activations are there at a time"
        )
    kept = size(store.ledger.left_over_bytes)
    held = f"drop the exception that ended the pass before (or sys.last_value): its frames may hold up to {kept}"
    return DoesNotFit(
        tier=store.tiers[0].name,
        moment=moment,
        needed_bytes=max(needed_bytes, capacity + 1),
        available_bytes=capacity,
        proven=proven,
        remedies=(
            suggest_budget(store.limits, 0, asked) + unknown,
            *([parts] if parts else []),
            batch,
            *([held] if store.ledger.left_over_bytes else []),
        ),
        depends_on_batch=bool(nonmodel_bytes or store.ledger.foreseen_bytes),
    )


def _smaller_batch(missing_bytes: int, nonmodel_bytes: int) -> str:
    """Return the least reduction of the batch that frees as many non-model bytes as are missing."""
    for part, words in _PARTS.items():
        left_out = nonmodel_bytes - nonmodel_bytes // part
        if left_out >= missing_bytes:
            return f"{words} the batch or sequence: about {size(left_out)} less non-model data"
    return f"a smaller batch or sequence: at most {size(nonmodel_bytes)} less non-model data, not enough by itself"


def _largest(group: ParamGroup) -> ParamState:
    return max(group.tensors, key=lambda record: record.numel)


def _in_parts(store: TierStore, groups: list[ParamGroup], weight: int) -> str:
    """Return ways to split parameters of more than half ``weight`` bytes; each must be on the compute tier whole."""
    movable = [group for group in groups if not group.pinned and 2 * group.chunk_numel * group.dtype.itemsize > weight]
    if not movable:
        return f"{options_as(store.given, keep_fp32=())}: or fewer of them, for those that it names stay there for good"
    tiles = 2
    while 16 * weight > tiles * store.tiers[0].capacity_bytes and tiles < weight:  # there may be no memory at all
        tiles *= 2
    said = {}
    for group in movable:
        record = _largest(group)
        looked_up = any(issubclass(owner, nn.Embedding) for owner in record.owners)
        read_whole = not all(issubclass(owner, nn.Embedding) for owner in record.owners)
        if looked_up and read_whole:
            most = min(tiles, record.shape[0])
            told = f"a head that is not {record.name}, in tiles (of ps_models: tied_head=False, head_tiles={most})"
            said["head"] = Suggestion("", told)
        if looked_up and not group.gathered and store.tiers[0].name == "device":
            said.setdefault("table", on_the_host(record))
        if read_whole and not looked_up:
            linear = all(issubclass(owner, nn.Linear) for owner in record.owners) and len(record.shape) == 2
            said.setdefault("head", in_tiles(record, tiles) if linear else in_pieces(record))
    return ways(list(said.values()) or [in_pieces(_largest(movable[0]))])


def _frozen(groups: list[ParamGroup]) -> str:
    """Return the line of code that freezes the largest trained parameter."""
    largest = max((group for group in groups if group.trainable), key=lambda group: group.numel, default=groups[0])
    return f"model.get_parameter({_largest(largest).name!r}).requires_grad_(False)"


def everything_too_large(
    store: TierStore, groups: list[ParamGroup], needed_bytes: int, *, so_far: bool = False
) -> DoesNotFit:
    """Return the error for model data that all tiers together cannot hold. ``so_far``: a pass may need more."""
    capacity = sum(tier.capacity_bytes for tier in store.tiers)
    numel = sum(group.shard_numel for group in groups)
    states = sum(group.shard_numel for group in groups if group.trainable)
    less = []
    if any(group.weight is Kind.P32 and not group.pinned for group in groups):
        narrow = f"{size(14 * states + 2 * (numel - states))} of model data instead of {size(needed_bytes)}"
        less.append(f'precision="bf16", accumulation_steps=1: {narrow}')
    elif states:
        less.append(f"{_frozen(groups)}: before chunked, for half of all parameters, {size(6 * states)} less")
    return DoesNotFit(
        tier="all tiers together" if len(store.tiers) > 1 else store.tiers[0].name,
        moment="between steps",
        needed_bytes=max(needed_bytes, capacity + 1),
        available_bytes=capacity,
        proven=needed_bytes > capacity,  # else the bytes suffice in total, but not for whole groups
        remedies=(
            _enough(store, groups, needed_bytes) + (_SO_FAR if so_far else ""),
            *less,
            f"a smaller model: each parameter takes {needed_bytes / max(1, numel):.0f} bytes",
        ),
        depends_on_batch=so_far,
    )


def _enough(store: TierStore, groups: list[ParamGroup], needed_bytes: int) -> str:
    """Return a budget whose lowest tier has room for all model data and for one gradient in transfer."""
    last = len(store.tiers) - 1
    if not last:
        return suggest_budget(store.limits, 0, needed_bytes) + (
            "" if store.ledger.highest_nonmodel_bytes else _ACTIVATIONS
        )
    passing = max(_largest(group).numel for group in groups) * 4
    return suggest_budget(store.limits, last, max(needed_bytes, store.tiers[last].capacity_bytes) + passing)


def group_too_large(
    store: TierStore, groups: list[ParamGroup], tier: int, why: DoesNotFit, needed_bytes: int
) -> DoesNotFit:
    """Return the error for a host tier, above a disk, that cannot hold one group's step or its weight."""
    group = max(groups, key=lambda group: (not group.pinned, group.chunk_numel))
    largest = _largest(group)
    smaller = (
        f"{options_as(store.given, group_bytes=largest.numel * group.dtype.itemsize)}: "
        f"no more than {largest.name} at once"
    )
    if group.numel == largest.numel:
        smaller = in_pieces(largest).text
    return DoesNotFit(
        tier=store.tiers[tier].name,
        moment=f"{why.moment} of {group.name}",
        needed_bytes=needed_bytes,
        available_bytes=store.tiers[tier].capacity_bytes,
        proven=why.proven,
        remedies=(
            suggest_budget(store.limits, tier, needed_bytes),
            smaller,
            f"{_frozen([group])}: before chunked; it has no states then",
        ),
    )


def tables_too_large(store: TierStore, groups: list[ParamGroup], needed_bytes: int) -> DoesNotFit:
    """Return the error for embedding tables that the host cannot hold."""
    tier, largest = store.tiers[1], max(groups, key=lambda group: group.chunk_numel)
    return DoesNotFit(
        tier=tier.name,
        moment=f"between steps, with {largest.name}",
        needed_bytes=needed_bytes,
        available_bytes=tier.capacity_bytes,
        proven=True,
        remedies=(
            suggest_budget(store.limits, 1, needed_bytes),
            f"nn.Embedding in place of HostEmbedding for {largest.name}, whose table may then be on any tier",
            f"{_frozen([largest])}: before chunked; 2 bytes an element (4 in fp32) in place of 16",
        ),
    )


def whole_table(name: str) -> UnsupportedParameter:
    """Return the error for reading a whole table that stays on the host, other than by its lookup."""
    return UnsupportedParameter(
        f"{name!r} is a table that stays on the host (HostEmbedding), of which only rows that are looked up reach the "
        "accelerator, and something else reads all of it (a tied head, its norm, a compiled block around it): make it "
        f"an nn.Embedding, or read it between steps inside `with materialized(model, names=[{name!r}]):`"
    )


def graph_of_gradient(name: str) -> UnsupportedParameter:
    """Return the error for a gradient that is to be differentiated again."""
    return UnsupportedParameter(
        f"backward(create_graph=True) would need the gradient of {name!r} to stay: use "
        "torch.autograd.grad(loss, parameters, create_graph=True)"
    )


def check_not_reentrant() -> None:
    """Raise if the present backward pass inside another one is reentrant checkpointing's."""
    if _in_reentrant_checkpoint():
        raise UnsupportedParameter(
            "a backward pass began inside another one, as reentrant checkpointing does it: use "
            "checkpoint(..., use_reentrant=False), or "
            'gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})'
        )


def _in_reentrant_checkpoint() -> bool:
    """Return True if reentrant checkpointing's own backward is among the callers; on CUDA another thread may hide
    it.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is checkpoint.CheckpointFunction.backward.__code__:
            return True
        frame = frame.f_back
    return False


def not_trained(name: str) -> UnsupportedParameter:
    """Return the error for reading the gradient of a parameter that is not trained."""
    return UnsupportedParameter(
        f"{name!r} is under management without an optimizer, so its gradient was not kept and nothing would train it: "
        "to train, release(model), call chunked(model, AdamW(...)), and step the optimizer that returns in place of "
        "one of torch.optim; if gradients only pass through this model, call model.requires_grad_(False) before"
    )


def changed_in_place(record: ParamState, *, by: str = "") -> UnsupportedParameter:
    """Return the error for a parameter that was, or would be, changed in place without the optimizer's knowledge."""
    name = record.name
    what = f"{by} would change {name!r} in place" if by else f"{name!r} was changed in place"
    if not record.trainable:
        return UnsupportedParameter(
            f"{what}, but the engine keeps its own copy of this parameter, which is not trained: change it inside "
            f"`with materialized(model, names=[{name!r}], write=True):`, or do not call chunked(...) for a model that "
            "a library changes, as TRL does with sync_ref_model=True"
        )
    return UnsupportedParameter(
        f"{what}, but what is trained is its fp32 master: in place of an optimizer of torch.optim, step the one that "
        "chunked(model, AdamW(...)) returns, with AdamW, Adam, SGD or TorchOptimizer of ps_core; other changes belong "
        f"inside `with materialized(model, names=[{name!r}], write=True):`"
    )


class Suggestion(NamedTuple):
    """Something to change in a model before `chunked`."""

    code: str
    """The code to write; empty: none is right for every model."""
    text: str


def ways(found: list[Suggestion]) -> str:
    """Join suggestions into one text; as code if all of them are code."""
    if not all(way.code for way in found):
        return "; ".join(way.text for way in found)
    return f"{'; '.join(way.code for way in found)}: before chunked; {'; '.join(way.text for way in found)}"


def on_the_host(record: ParamState) -> Suggestion:
    """Suggest an embedding whose table stays on the host, with only rows on the accelerator."""
    module, text = record.name.rpartition(".")[0], f"HostEmbedding in place of nn.Embedding for {record.name}"
    if set(record.owners) == {nn.Embedding} and module:
        made = f"HostEmbedding.from_embedding(model.get_submodule({module!r}))"
        return Suggestion(f"model.set_submodule({module!r}, {made})", text)
    return Suggestion("", text + " (cpu_embedding=True of ps_models)")


def in_tiles(record: ParamState, tiles: int) -> Suggestion:
    """Suggest splitting the matrix of an ``nn.Linear`` into several parameters."""
    module, tiles = record.name.rpartition(".")[0], min(tiles, record.shape[0])
    if set(record.owners) == {nn.Linear} and module:
        made = f"TiledLinear.from_linear(model.get_submodule({module!r}), {tiles})"
        return Suggestion(
            f"model.set_submodule({module!r}, {made})", f"{record.name} in tiles (TiledLinear of ps_models)"
        )
    return Suggestion(
        "", f"{record.name} in tiles, each a parameter (of ps_models: tiles={tiles}, a head's head_tiles={tiles})"
    )


def in_pieces(record: ParamState) -> Suggestion:
    """Suggest splitting a parameter of a module that no other suggestion fits."""
    return Suggestion("", f"{record.name} cut into several parameters, of which one is used at a time")
