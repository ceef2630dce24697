"""Choose which parameters share a group, before any value is read; groups never change afterwards.

Parameters come in the order in which modules register them, which is nearly always the order of use. A group holds
whole tensors of one sort. It ends where a block (an entry of a ModuleList) ends, if the block fits.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias
from weakref import WeakSet

import torch
from torch import nn

from ps_core._errors import UnsupportedParameter
from ps_core._extents import Kind, Precision
from ps_core._options import Options
from ps_core._units import parse_bytes
from ps_core.engine._parameters.managed_parameter import ManagedParameter
from ps_core.engine._parameters.param_state import ParamGroup, ParamState, aligned

DTYPES = {Precision.BF16: torch.bfloat16, Precision.FP16: torch.float16, Precision.FP32: torch.float32}
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""The types of parameters that can be managed, and of a root module's inputs that are cast."""
_SMALLEST_GROUP_NUMEL = 2**16
_Tied: TypeAlias = list[tuple[str, nn.Parameter]]
"""Parameters that stay equal, with their names; usually there is one."""
REMOVED = " (removed)"
"""The end of the name of a parameter that is not in the model any more, where another one has its name."""
_PARTS_OF_DEVICE = 16
"""A group is at most one part in so many of the accelerator's budget: larger moves are too coarse."""


class _GroupKey(NamedTuple):
    """The properties that the parameters of a group share."""

    trainable: bool
    dtype: torch.dtype
    fixed_tier: int | None
    """The tier where the parameters always stay."""


@dataclass(frozen=True, slots=True)
class Grouping:
    """List all groups, and the record of every parameter in them."""

    groups: list[ParamGroup]
    records: dict[str, ParamState]


def named(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the name of every parameter that can be managed and is not, and the parameter; tied ones once."""
    for name, parameter in model.named_parameters():
        if isinstance(parameter, ManagedParameter):
            continue
        if parameter.layout is not torch.strided:
            raise UnsupportedParameter(f"{name!r} is {parameter.layout}: only dense parameters can live in chunks")
        if parameter.is_floating_point() and parameter.dtype not in FLOATS:
            raise UnsupportedParameter(
                f"{name!r} is {parameter.dtype}: expected one of float32, bfloat16, float16; convert it with "
                f".float() before chunked(...)"
            )
        if parameter.is_complex():
            raise UnsupportedParameter(f"{name!r} is complex: keep its real and imaginary part as two parameters")
        if parameter.is_inference():
            raise UnsupportedParameter(
                f"{name!r} was made inside torch.inference_mode() and cannot be trained: build the model outside of it"
            )
        if parameter.is_floating_point():
            yield name, parameter


def all_names(model: nn.Module) -> dict[int, list[str]]:
    """Map each parameter's id to its names; a tied parameter has several."""
    found: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), []).append(name)
    return found


def name_as_in(model: nn.Module, records: Collection[ParamState], *, taken: Collection[str] = ()) -> None:
    """Rename records to their parameters' present names in a model, whose modules may have been moved or removed.

    A parameter that is not in the model any more keeps its name, unless another managed one has that name now.
    ``taken``: names of parameters that are about to be managed.
    """
    present = {id(parameter): name for name, parameter in model.named_parameters()}
    inside = [record for record in records if id(record.parameter) in present]
    if all(record.name == present[id(record.parameter)] for record in inside) and len(inside) == len(records):
        return
    for record in inside:
        record.rename(present[id(record.parameter)])
    used = {record.name for record in inside}.union(taken)
    for record in records:
        if id(record.parameter) not in present:
            while record.name in used:
                record.rename(record.name + REMOVED)
            used.add(record.name)


def group_parameters(
    model: nn.Module,
    options: Options,
    precision: Precision,
    *,
    states: int | None,
    device_bytes: int | None,
    tables: Collection[str] = (),
    ties: Collection[Collection[str]] = (),
) -> Grouping:
    """Return groups for a model; nothing is moved or allocated yet.

    ``states``: how many the optimizer keeps; None: there is none. ``tables`` stay on the host. Parameters of a tie
    (``ties``, by name) come one after the other, in one group.
    """
    groups: list[ParamGroup] = []
    records: dict[str, ParamState] = {}
    limit = _group_numel(model, options, precision, device_bytes, tables)
    runs: dict[_GroupKey, ParamGroup] = {}
    places = {name: index for index, (name, _) in enumerate(named(model))}
    owners, names = _owners(model), all_names(model)
    for unit in _units(model, ties):
        sorts: dict[_GroupKey, list[_Tied]] = {}
        for tied in unit:
            every = [each for _, parameter in tied for each in names[id(parameter)]]
            kept = any(fnmatch.fnmatchcase(each, pattern) for each in every for pattern in options.keep_fp32)
            dtype = torch.float32 if kept else DTYPES[precision]
            fixed = 1 if tied[0][0] in tables else 0 if kept and precision is not Precision.FP32 else None
            trainable = states is not None and any(parameter.requires_grad for _, parameter in tied)
            sorts.setdefault(_GroupKey(trainable, dtype, fixed), []).append(tied)
        for sort, rows in sorts.items():
            whole = _numel(rows) <= limit
            for part in [rows] if whole else [[row] for row in rows]:
                group = runs.get(sort)
                if group is None or aligned(group.numel) + _numel(part) > limit:
                    group = runs[sort] = _group(len(groups), sort, states or 0)
                    groups.append(group)
                for tied in part:
                    found = [_record(places[name], name, each, sort, owners[id(each)]) for name, each in tied]
                    for record in found:
                        record.tied = found if len(found) > 1 else []
                        records[record.name] = record
                        group.add(record)
    return Grouping(groups, records)


def _numel(rows: list[_Tied]) -> int:
    """Return how many elements the parameters take in a group, with the gap behind each."""
    return sum(aligned(parameter.numel()) for tied in rows for _, parameter in tied)


def _group(index: int, sort: _GroupKey, states: int) -> ParamGroup:
    return ParamGroup(
        index=index,
        weight=Kind.P32 if sort.dtype is torch.float32 else Kind.P16,
        dtype=sort.dtype,
        trainable=sort.trainable,
        fixed_tier=sort.fixed_tier,
        states=states,
    )


def _owners(model: nn.Module) -> dict[int, WeakSet[type[nn.Module]]]:
    """Map each parameter's id to the classes of the modules that have it."""
    found: dict[int, WeakSet[type[nn.Module]]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            found.setdefault(id(parameter), WeakSet()).add(type(module))
    return found


def _record(
    index: int, name: str, parameter: nn.Parameter, sort: _GroupKey, owners: WeakSet[type[nn.Module]]
) -> ParamState:
    stride = parameter.stride()
    if not _dense(parameter):
        stride = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta").stride()
    return ParamState(
        index=index,
        name=name,
        parameter=parameter,
        shape=parameter.shape,
        stride=stride,
        dtype=sort.dtype,
        numel=parameter.numel(),
        trainable=sort.trainable,
        given=(type(parameter), parameter.dtype),
        owners=owners,
    )


def _dense(parameter: nn.Parameter) -> bool:
    """Return True if the elements fill their memory without gaps or overlap; the strides are kept then."""
    rows = sorted(zip(parameter.stride(), parameter.shape, strict=True))
    expected = 1
    for stride, size in rows:
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _units(model: nn.Module, ties: Collection[Collection[str]]) -> list[list[_Tied]]:
    """Return parameters by the block they belong to, in order; a tie belongs to the first block that has it."""
    units: dict[str, list[_Tied]] = {}
    first_of = {name: next(iter(tie)) for tie in ties for name in tie}
    begun: dict[str, _Tied] = {}
    for name, parameter in named(model):
        first = first_of.get(name, name)
        if first == name:
            found = re.match(r"(.*?\.?\d+)\.", name)
            owner = found[1] if found else name.rpartition(".")[0]
            begun[first] = []
            units.setdefault(owner, []).append(begun[first])
        begun[first].append((name, parameter))
    return list(units.values())


def _group_numel(
    model: nn.Module, options: Options, precision: Precision, device_bytes: int | None, tables: Collection[str]
) -> int:
    size = 4 if precision is Precision.FP32 else 2
    if options.group_bytes is not None:
        return max(1, parse_bytes(options.group_bytes) // size)
    units = _units(model, ())
    moving = ([parameter for tied in unit for name, parameter in tied if name not in tables] for unit in units)
    sizes = sorted(sum(aligned(parameter.numel()) for parameter in unit) for unit in moving)
    total, covered = sum(sizes), 0
    typical = _SMALLEST_GROUP_NUMEL
    for numel in sizes:
        covered += numel
        if 2 * covered >= total:
            typical = numel
            break
    if device_bytes is not None:
        typical = min(typical, max(_SMALLEST_GROUP_NUMEL, device_bytes // size // _PARTS_OF_DEVICE))
    return max(typical, 1)
