"""Make the optimizer's state dict from its groups and states, and check a given one; see [Note: one format]."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from ps_core._errors import InvalidInput
from ps_core.engine._optim.rules import OptimizerRule
from ps_core.engine._optim.state_format import MASTER, StateEntry, StateFormat

if TYPE_CHECKING:
    from ps_core.engine._parameters.param_state import ParamState

MASTERS, LOSS_SCALE = "masters", "loss_scale"
Groups = Sequence[dict[str, Any]]
"""An optimizer's ``param_groups``, or those of a state dict."""


def pack(
    rule: OptimizerRule,
    groups: Groups,
    members: Sequence[Sequence[ParamState]],
    values_of: Callable[[ParamState], dict[str, Any]],
) -> dict[str, Any]:
    """Return the state dict of ``groups``; ``values_of`` returns a parameter's entry, ``members`` are by group."""
    state, packed, index = {}, [], 0
    for group, records in zip(groups, members, strict=True):
        settings = rule.for_torch({key: value for key, value in group.items() if key != "params"})
        packed.append({**settings, "params": list(range(index, index + len(records)))})
        for record in records:
            if values := values_of(record):
                state[index] = values
            index += 1
    found: dict[str, Any] = {"state": state, "param_groups": packed}
    alone = {index: entry[MASTER] for index, entry in state.items() if [*entry] == [MASTER]}
    if alone and not rule.starts_from_zeros:
        found[MASTERS] = alone
        found["state"] = {index: entry for index, entry in state.items() if index not in alone}
    return found


def unpack(
    given: Mapping[str, Any], groups: Groups, records: Iterable[ParamState], state_format: StateFormat
) -> dict[ParamState, StateEntry]:
    """Return the checked entry of each parameter; ``given`` has groups as large as the optimizer's, ``groups``."""
    pairs = zip(groups, given["param_groups"], strict=True)
    keys = [key for own, theirs in pairs for key in _in_order(own["param_names"], theirs)]
    known = set(keys)
    for key, entry in given["state"].items():
        if key not in known:
            raise InvalidInput(f"the state dict has a state {key!r}, which is in no param group: it would be lost")
        if not isinstance(entry, Mapping):
            raise InvalidInput(f"the state dict's state {key!r} is of type {type(entry).__name__}, not a dict")
    apart = given.get(MASTERS, {})  # an earlier format's
    return {
        record: state_format.check(
            record, {**given["state"].get(key, {}), **({"master": apart[key]} if key in apart else {})}
        )
        for record, key in zip(records, keys, strict=True)
    }


def check_form(given: Any) -> None:
    """Raise `InvalidInput` unless this is an optimizer's state dict."""
    parts = (given.get("state"), given.get("param_groups")) if isinstance(given, Mapping) else (None, None)
    state, groups = parts
    if not (isinstance(state, Mapping) and isinstance(groups, Sequence) and all(map(_is_group, groups))):
        raise InvalidInput(
            "this is no optimizer's state dict, which has 'state', a dict, and 'param_groups', a list of dicts with "
            "'params': pass what optimizer.state_dict() returned"
        )


def _is_group(group: object) -> bool:
    return isinstance(group, Mapping) and isinstance(group.get("params"), Sequence)


def match_groups(rule: OptimizerRule, groups: Groups, sizes: list[int], saved: Groups) -> list[dict[str, Any]]:
    """Return the groups with the saved numbers; raise `InvalidInput` if the saved groups do not match.

    ``sizes``: how many parameters each group has.
    """
    found = [len(group["params"]) for group in saved]
    if sizes != found:
        raise InvalidInput(
            f"this state has groups of {found} parameters, the optimizer has groups of {sizes}: param_groups[0] "
            "is what no Group matches, then one for each Group, frozen parameters included"
        )
    matched = []
    for index, (own, theirs) in enumerate(zip(groups, saved, strict=True)):
        rule.check(f"the state's param_groups[{index}]", theirs)
        wanted = [key for key, value in rule.groups[index].items() if not isinstance(value, bool | None)]
        absent = [key for key in wanted if key not in theirs]
        if absent:
            raise InvalidInput(f"the state's param_groups[{index}] has no {absent[0]!r}: is it {rule.name}'s?")
        names = {key: own[key] for key in ("params", "param_names", LOSS_SCALE) if key in own}
        numbers = {key: value for key, value in theirs.items() if key not in names and key != LOSS_SCALE}
        matched.append({**own, **deepcopy(numbers), **names})
        rule.read(index, matched[-1])
    return matched


def _in_order(names: Sequence[str], saved: Mapping[str, Any]) -> Sequence[Any]:
    """Return the keys of a saved group's parameters in the order of ``names``.

    States belong to names if the group has the same ones, else to places: names may have a wrapper's prefix.
    """
    theirs = saved.get("param_names")
    if theirs is None or sorted(theirs) != sorted(names):
        return list(saved["params"])
    keys = dict(zip(theirs, saved["params"], strict=True))
    return [keys[name] for name in names]
