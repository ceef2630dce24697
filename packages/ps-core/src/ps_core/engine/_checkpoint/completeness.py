"""Find what a manifest lacks, or says wrongly or twice, before anything is loaded.

Checksums tell what has changed since the save, and not what the writer forgot. A checkpoint that lacks a tensor may
have correct checksums. So a manifest must name every value that training needs, once, with its type and shape.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from reprlib import repr as short
from typing import Any

import torch

from ps_core.engine._checkpoint.checkpoint_tensors import BUFFERS, EXTRA, MASTERS, WEIGHTS
from ps_core.engine._checkpoint.safetensors_format import TYPES, TensorEntry
from ps_core.engine._optim.kernel_rule import FIXED
from ps_core.engine._optim.rules import rule_of

OWN_STATES = {kind.__name__: tuple(rule_of(kind()).states) for kind in FIXED}
"""The sections of the states of ps_core's own optimizers; a checkpoint of a `TorchOptimizer` names its own."""
_FIELDS = {"parameters": dict, "modules": dict, "extra": dict, "files": dict}
_FIELDS_OF_VERSION_2 = {"save": str, "ranks": int, "orders": dict, "random_files": list}
"""Fields needed in addition to those of version 1, see [Note: versions] in `manifest`."""
_OF_OPTIMIZER = {"name": str, "groups": list, "steps": dict}
_OF_TORCH_OPTIMIZER = {"states": list, "scalars": dict}
_MEANT = {dict: "an object", list: "a list", str: "a text", int: "a whole number"}
Wanted = tuple[torch.dtype, tuple[int, ...]]
"""A tensor's type and shape."""


def is_count(value: object, least: int = 0) -> bool:
    """Return True for an integer of at least ``least``; a boolean is none."""
    return type(value) is int and value >= least


def states_of(optimizer: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the sections of an optimizer's states, from its part of the manifest."""
    return OWN_STATES[optimizer["name"]] if optimizer["name"] in OWN_STATES else tuple(optimizer["states"])


# The manifest's own values.


def wrong_values(manifest: dict[str, Any]) -> Iterator[str]:
    """Yield what is missing or of a wrong type. Each check relies on the earlier ones: use only the first answer."""
    first = manifest["version"] == 1
    yield from _missing("it", manifest, {**_FIELDS, **({} if first else _FIELDS_OF_VERSION_2)})
    if "save" in manifest and first:
        yield "it has 'save', which there is from version 2 on"
    for name, row in manifest["parameters"].items():
        yield from _of_parameter(f"parameter {name!r}", row)
    yield from _of_optimizer(manifest)
    for name, row in manifest["files"].items():
        yield from _of_file(name, row)
    if not first:
        yield from _of_ranks(manifest)


def _missing(what: str, found: object, fields: Mapping[str, type]) -> Iterator[str]:
    if not isinstance(found, dict):
        yield f"{what} is {short(found)}, expected an object"
        return
    for key, kind in fields.items():
        if key not in found:
            yield f"{what} has no {key!r}"
        elif type(found[key]) is not kind:
            yield f"{what} has {key!r} = {short(found[key])}, expected {_MEANT[kind]}"


def _of_parameter(what: str, row: object) -> Iterator[str]:
    yield from _missing(what, row, {"shape": list, "dtype": str})
    assert isinstance(row, dict), "or something was missing"
    yield from _of_tensor(what, row["dtype"], row["shape"])
    if not isinstance(row.get("trainable"), bool):
        yield f"{what} has 'trainable' = {short(row.get('trainable'))}, expected true or false"


def _of_tensor(what: str, dtype: object, shape: object) -> Iterator[str]:
    if dtype not in TYPES:
        yield f"{what} has type {short(dtype)}, expected one of {', '.join(TYPES)}"
    if not isinstance(shape, list) or not all(map(is_count, shape)):
        yield f"{what} has shape {short(shape)}, expected a list of sizes"


def _of_optimizer(manifest: dict[str, Any]) -> Iterator[str]:
    trained = [name for name, row in manifest["parameters"].items() if row["trainable"]]
    if "optimizer" not in manifest:
        yield "it has no 'optimizer'"
    optimizer = manifest["optimizer"]
    if optimizer is None:
        if trained:
            yield f"it has no optimizer for {trained[0]!r}, which is trained"
        return
    yield from _missing("the optimizer", optimizer, _OF_OPTIMIZER)
    if optimizer["name"] not in OWN_STATES:
        yield from _of_torch_optimizer(optimizer, trained)
    if "loss_scale" not in optimizer:
        yield "the optimizer has no 'loss_scale'"
    if manifest["version"] == 1 and "random" not in manifest:
        yield "it has no 'random'"
    yield from _names("the optimizer's steps", optimizer["steps"], trained)
    for name, steps in optimizer["steps"].items():
        if not is_count(steps):
            yield f"the optimizer's steps of {name!r} are {short(steps)}, expected a whole number from 0 on"
    for index, group in enumerate(optimizer["groups"]):
        yield from _missing(f"the optimizer's groups[{index}]", group, {"param_names": list})
    members = [name for group in optimizer["groups"] for name in group["param_names"]]
    yield from _names("the optimizer's groups' param_names", members, trained, manifest["parameters"])


def _of_torch_optimizer(optimizer: dict[str, Any], trained: Sequence[str]) -> Iterator[str]:
    if "states" not in optimizer:
        own = ", ".join(OWN_STATES)
        yield f"the optimizer is {optimizer['name']!r} without 'states', expected these, or one of {own}"
    yield from _missing("the optimizer", optimizer, _OF_TORCH_OPTIMIZER)
    states, scalars = optimizer["states"], optimizer["scalars"]
    if not all(isinstance(name, str) for name in states) or len({*states}) < len(states):
        yield f"the optimizer's states are {short(states)}, expected different texts"
    yield from _names("the optimizer's scalars", scalars, trained)
    for name, row in scalars.items():
        if not isinstance(row, dict) or not all(type(value) is float for value in row.values()):
            yield f"the optimizer's scalars of {name!r} are {short(row)}, expected numbers by name"


def _names(what: str, found: Iterable[str], wanted: Iterable[str], known: Iterable[str] = ()) -> Iterator[str]:
    """Yield names that are missing, unknown or there more than once; those of ``known`` may be there or not."""
    rows = list(found)
    if not all(isinstance(name, str) for name in rows):
        yield f"{what} are {short(rows)}, expected texts"
    counts, needed = Counter(rows), dict.fromkeys(wanted)
    for name in needed:
        if not counts[name]:
            yield f"{what} lack {name!r}"
    expected = needed.keys() | set(known)
    for name, count in counts.items():
        if name not in expected:
            yield f"{what} have {name!r}, which is not one of those parameters"
        if count > 1:
            yield f"{what} have {name!r} more than once"


def _of_file(name: str, row: object) -> Iterator[str]:
    yield from _missing(name, row, {"section": str, "tensors": list})
    assert isinstance(row, dict), "or something was missing"
    section = row["section"]
    if not re.fullmatch(rf"{re.escape(section)}(-\d+-of-\d+)?\.safetensors", name):
        yield f"{name} is of section {section!r}, which its name does not begin with"
    if not is_count(row.get("writer", 0)):
        yield f"{name} has 'writer' = {short(row['writer'])}, expected a rank"
    for tensor in row["tensors"]:
        if not isinstance(tensor, list) or len(tensor) not in (3, 5) or not isinstance(tensor[0], str):
            yield f"{name} has the tensor {short(tensor)}, expected name, type and shape, and of a part owner and first"
        else:
            yield from _of_tensor(f"{name}: {tensor[0]!r}", tensor[1], tensor[2])
            if len(tensor) == 5 and not (isinstance(tensor[3], str) and tensor[3] and is_count(tensor[4])):
                yield f"{name}: {tensor[0]!r} is a part of {short(tensor[3])} from {short(tensor[4])} on"


def _of_ranks(manifest: dict[str, Any]) -> Iterator[str]:
    ranks, random = manifest["ranks"], manifest["random_files"]
    if not is_count(ranks, 1):
        yield f"it has 'ranks' = {ranks}, expected at least 1"
    if not manifest["save"]:
        yield "it has an empty 'save', expected the mark of the save"
    if len(random) != (0 if manifest["optimizer"] is None else ranks):
        yield f"it has {len(random)} 'random_files' for {ranks} ranks"
    for name in random:
        if not isinstance(name, str) or not re.fullmatch(r"random(-\d+-of-\d+)?\.json", name):
            yield f"it has {short(name)} among 'random_files', expected names like random-00001-of-00002.json"
    for name, row in manifest["files"].items():
        if row.get("writer", 0) >= ranks:
            yield f"{name} has 'writer' = {row['writer']} of {ranks} ranks"
    for name, order in manifest["orders"].items():
        shape = manifest["parameters"].get(name, {}).get("shape")
        if shape is None or not isinstance(order, list) or len(order) != len(shape) or not all(map(is_count, order)):
            yield f"it has 'orders' = {short(order)} for {name!r} of shape {shape}, expected a stride a dimension"


# Tensors.


def wrong_tensors(manifest: dict[str, Any], files: Sequence[tuple[str, int, Sequence[TensorEntry]]]) -> Iterator[str]:
    """Yield tensors of the sections that are missing, duplicate or wrong.

    ``files``: the section, the writer and the tensors of each.
    """
    trained: dict[str, Wanted] = {}
    frozen: dict[str, Wanted] = {}
    for name, row in manifest["parameters"].items():
        if row["trainable"]:
            trained[name] = torch.float32, tuple(row["shape"])
        else:
            frozen[name] = TYPES[row["dtype"]], tuple(row["shape"])
    optimizer = manifest["optimizer"]
    states = () if optimizer is None else states_of(optimizer)
    wanted = {MASTERS: trained, **dict.fromkeys(states, trained), WEIGHTS: frozen}
    for section, _, _ in files:
        if section not in (*wanted, BUFFERS, EXTRA):
            yield f"it has a section {section!r}, expected {', '.join((*wanted, BUFFERS, EXTRA))} only"
    for section, parameters in wanted.items():
        rows = [entry for name, _, entries in files if name == section for entry in entries]
        yield from _of_section(section, rows, parameters)
    yield from _of_buffers([(writer, entries) for section, writer, entries in files if section == BUFFERS])
    extra = [entry.name for section, _, entries in files if section == EXTRA for entry in entries]
    yield from _of_extra(extra, list(_tensors_in({**manifest, "files": None, "parameters": None})))


def _of_section(section: str, entries: Sequence[TensorEntry], wanted: Mapping[str, Wanted]) -> Iterator[str]:
    found: dict[str, list[TensorEntry]] = {}
    for entry in entries:
        found.setdefault(entry.owner, []).append(entry)
    for name, (dtype, shape) in wanted.items():
        if name not in found:
            yield f"section {section!r} lacks {name!r}"
            continue
        what = f"section {section!r}: {name!r}"
        for entry in found[name]:
            if entry.dtype != dtype:
                yield f"{what} is {entry.dtype}, expected {dtype}"
        yield from _of_parts(what, found[name], shape)
    for name in found:
        if name not in wanted:
            yield f"section {section!r} has {name!r}, which is not one of its parameters"


def _of_parts(what: str, entries: Sequence[TensorEntry], shape: tuple[int, ...]) -> Iterator[str]:
    """Yield what is wrong with a tensor that is stored whole or in parts; parts must adjoin each other."""
    if any(not entry.tensor for entry in entries):
        if len(entries) > 1:
            yield f"{what} is there more than once"
        if entries[0].shape != shape:
            yield f"{what} has shape {entries[0].shape}, expected {shape}"
        return
    end, numel = 0, math.prod(shape)
    for entry in sorted(entries, key=lambda entry: entry.first):
        if len(entry.shape) != 1:
            yield f"{what} has a part of shape {entry.shape}, expected a run of elements"
        if entry.first > end:
            yield f"{what}: elements {end} to {entry.first - 1} are missing"
        if entry.first < end:
            yield f"{what}: elements {entry.first} to {end - 1} are there more than once"
        end = entry.first + entry.numel
    if end < numel:
        yield f"{what}: elements {end} to {numel - 1} are missing"
    if end > numel:
        yield f"{what} has {end} elements, expected {numel}"


def _of_buffers(files: Sequence[tuple[int, Sequence[TensorEntry]]]) -> Iterator[str]:
    """Yield what is wrong with buffers: a process that writes any must write all."""
    found: dict[int, dict[str, TensorEntry]] = {}
    for writer, entries in files:
        for entry in entries:
            rows = found.setdefault(writer, {})
            if entry.name in rows or entry.tensor:
                yield f"section {BUFFERS!r}: {entry.owner!r} is there more than once, or in parts"
            rows[entry.name] = entry
    if found and 0 not in found:
        yield f"section {BUFFERS!r} lacks rank 0's"
    for writer, rows in found.items():
        for name in found[0].keys() | rows.keys():
            if found[0].get(name) != rows.get(name):
                yield f"section {BUFFERS!r}: {name!r} is not the same on rank {writer} as on rank 0"


def _of_extra(found: Sequence[str], named: Sequence[Any]) -> Iterator[str]:
    counts = Counter(found)
    for name in named:
        if not isinstance(name, str) or name not in counts:
            yield f"section {EXTRA!r} lacks {short(name)}, which the manifest refers to"
    for name, count in counts.items():
        if name not in named:
            yield f"section {EXTRA!r} has {name!r}, which nothing in the manifest refers to"
        if count > 1:
            yield f"section {EXTRA!r}: {name!r} is there more than once"


def _tensors_in(value: Any) -> Iterator[Any]:
    """Yield the names of tensors within an encoded value (any: see `json_values`)."""
    if isinstance(value, list):
        for each in value:
            yield from _tensors_in(each)
    elif isinstance(value, dict):
        if value.keys() == {"$tensor"}:
            yield value["$tensor"]
        else:
            yield from _tensors_in(list(value.values()))
