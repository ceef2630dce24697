"""Describe what one iteration touches, moment by moment.

A *moment* is the instant an operator (or a block of them) runs. A trace lists the moments of one micro-batch, forward
then backward, on one process. Each moment lists the parameters that it reads, and those for which a gradient arrives.
It lists the saved activations that it makes or takes. It also says how many other bytes are on the compute tier
meanwhile.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, asdict, dataclass, fields
from enum import StrEnum
from typing import Any, NamedTuple

from ps_core._errors import InvalidInput
from ps_core._units import check_number, check_whole, shown

FORMAT = "patrickstar-trace/1"
_INDICES = frozenset({"reads", "grads", "makes", "takes", "holds"})
_MOST_AMOUNT = 1e30
"""More than any moment computes; times and rates from larger amounts would not be finite."""


class Phase(StrEnum):
    """Say where in an iteration a moment lies. Recomputation inside backward is BACKWARD."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """One parameter tensor. A tied tensor is listed once and touched by several moments."""

    name: str
    numel: int
    trainable: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Activation:
    """A saved activation that the planner may move off the compute tier (such as a checkpointed block's input)."""

    name: str
    bytes: int


class Amounts(NamedTuple):
    """The amounts that a moment computes; each is a figure of `Moment`."""

    flops: float = 0.0
    elements: float = 0.0
    attention_flops: float = 0.0
    queries: float = 0.0
    queries_backward: float = 0.0
    tanhs: float = 0.0
    launches: float = 0.0

    def plus(self, other: Amounts) -> Amounts:
        """Return the sum of both."""
        return Amounts(*(mine + more for mine, more in zip(self, other, strict=True)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """One operator or block that runs. Numbers in the tuples are indices into the trace's lists."""

    name: str
    phase: Phase
    reads: tuple[int, ...] = ()
    """Tensors that must be on the compute tier."""
    grads: tuple[int, ...] = ()
    """Tensors for which a gradient (or a part of one) arrives. Their weight is needed only if also in ``reads``."""
    makes: tuple[int, ...] = ()
    """Activations that the moment makes."""
    takes: tuple[int, ...] = ()
    """Activations that the moment reads. One is not needed after the last moment that takes it."""
    holds: tuple[int, ...] = ()
    """Tensors with live aliases since the moment before (a recomputed block), which must not move in between.

    They are among the ``reads`` of both moments.
    """
    nonmodel_bytes: int = 0
    """Peak bytes on the compute tier during the moment besides model data and listed activations."""
    flops: float = 0.0
    """Operations of matrix products and attention."""
    elements: float = 0.0
    """Elements that all other operators read or write."""
    attention_flops: float = 0.0
    """Operations of attention, a part of ``flops``."""
    queries: float = 0.0
    """Rows of attention, for each head."""
    queries_backward: float = 0.0
    """The same in the backward of attention."""
    tanhs: float = 0.0
    """Hyperbolic tangents, also within other operators (a GELU's tanh form)."""
    launches: float = 0.0
    """Operators that launch work; views launch none."""

    @property
    def amounts(self) -> Amounts:
        """Return the amounts that the moment computes."""
        return Amounts(*(getattr(self, name) for name in Amounts._fields))


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The moments of one micro-batch, all forward moments before all backward ones."""

    model: str
    tensors: tuple[Tensor, ...]
    moments: tuple[Moment, ...]
    activations: tuple[Activation, ...] = ()
    tokens: int = 0
    """Tokens of one micro-batch on one process, for tokens/s."""
    precision: str = ""
    """The type that it was recorded in: bf16, fp16 or fp32. Empty: not known, as in files of earlier versions."""

    def __post_init__(self) -> None:
        _check(self)

    @property
    def parameters(self) -> int:
        """Return the number of elements in all tensors."""
        return sum(tensor.numel for tensor in self.tensors)

    @property
    def peak_nonmodel_bytes(self) -> int:
        """Return the most non-model bytes of any moment."""
        return max((moment.nonmodel_bytes for moment in self.moments), default=0)

    def to_json(self) -> str:
        """Return the trace as one JSON document, which ``from_json`` reads back equal."""
        return json.dumps({"format": FORMAT, **asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> Trace:
        """Return the trace of a JSON document; `InvalidInput` says what is wrong with a damaged one."""
        try:
            data: Any = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InvalidInput(f"not a trace: not JSON: {error}".replace("\n", " ")) from error
        if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
            raise InvalidInput(f"not a trace: expected a JSON object with format {FORMAT!r}")
        entries = _entries(cls, data, "the trace", needed=("activations", "tokens"))
        rows = {
            "tensors": tuple(Tensor(**row) for row in _rows(Tensor, entries, "tensors")),
            "moments": tuple(Moment(**row) for row in _rows(Moment, entries, "moments")),
            "activations": tuple(Activation(**row) for row in _rows(Activation, entries, "activations")),
        }
        return cls(**{**entries, **rows, "model": _text(entries["model"])})


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise InvalidInput(f"not a trace: expected a text, found {value!r}")
    return value


def _entries(kind: type[Any], row: object, where: str, needed: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return an object's entries; raise `InvalidInput` unless they are fields of ``kind``, and all needed are there."""
    if not isinstance(row, dict):
        raise InvalidInput(f"not a trace: {where} must be an object, found {shown(row)}")
    known = {field.name: field.default is MISSING or field.name in needed for field in fields(kind)}
    for name in row:
        if name not in known:
            raise InvalidInput(f"not a trace: {where} has an unknown {name!r}")
    for name, must in known.items():
        if must and name not in row:
            raise InvalidInput(f"not a trace: {where} lacks {name!r}")
    return row


def _rows(kind: type[Any], entries: dict[str, Any], key: str) -> Iterator[dict[str, Any]]:
    for number, row in enumerate(_list(entries[key], key)):
        where = f"{key}[{number}]"
        found = dict(_entries(kind, row, where))
        if kind is Moment:
            for name in _INDICES & found.keys():
                found[name] = tuple(_list(found[name], f"{name} of {where}"))
            if found["phase"] not in list(Phase):
                raise InvalidInput(
                    f"not a trace: phase of {where} must be {' or '.join(Phase)}, found {shown(found['phase'])}"
                )
            found["phase"] = Phase(found["phase"])
        yield found


def _list(value: object, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise InvalidInput(f"not a trace: {where} must be a list, found {shown(value)}")
    return value


def _indices(values: Iterable[object], count: int, what: str) -> None:
    seen: set[object] = set()
    for value in values:
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < count:
            raise InvalidInput(f"trace: {what} names {value!r}, but there are {count} to name")
        if value in seen:
            raise InvalidInput(f"trace: {what} names {value!r} twice")
        seen.add(value)


def _check(trace: Trace) -> None:
    check_whole("trace: tokens", trace.tokens)
    _text(trace.precision)
    for tensor in trace.tensors:
        _text(tensor.name)
        check_whole(f"trace: numel of {tensor.name!r}", tensor.numel)
        if not isinstance(tensor.trainable, bool):
            raise InvalidInput(f"trace: trainable of {tensor.name!r} must be true or false")
    if len({tensor.name for tensor in trace.tensors}) != len(trace.tensors):
        raise InvalidInput("trace: two tensors have the same name")
    for activation in trace.activations:
        check_whole(f"trace: bytes of {_text(activation.name)!r}", activation.bytes, 1)
    backward = False
    before: tuple[int, ...] = ()
    for moment in trace.moments:
        backward = _check_moment(trace, moment, backward)
        _check_holds(trace, moment, before)
        before = moment.reads
    _check_lives(trace)


def _check_moment(trace: Trace, moment: Moment, backward: bool) -> bool:
    name = _text(moment.name)
    check_whole(f"trace: nonmodel_bytes of {name!r}", moment.nonmodel_bytes)
    if not isinstance(moment.phase, Phase):
        raise InvalidInput(f"trace: phase of {name!r} must be a Phase, found {moment.phase!r}")
    for what in Amounts._fields:
        check_number(f"trace: {what} of {name!r}", getattr(moment, what), most=_MOST_AMOUNT)
    if moment.attention_flops > moment.flops:
        raise InvalidInput(
            f"trace: attention_flops of {name!r} must be a part of its {moment.flops:g} flops, found "
            f"{moment.attention_flops:g}"
        )
    _indices(moment.reads, len(trace.tensors), f"reads of {name!r}")
    _indices(moment.grads, len(trace.tensors), f"grads of {name!r}")
    _indices(moment.makes, len(trace.activations), f"makes of {name!r}")
    _indices(moment.takes, len(trace.activations), f"takes of {name!r}")
    if moment.phase is Phase.BACKWARD:
        backward = True
    elif backward:
        raise InvalidInput(f"trace: forward moment {name!r} comes after a backward one")
    elif moment.grads or moment.takes:
        raise InvalidInput(f"trace: forward moment {name!r} has gradients or takes activations")
    if backward and moment.makes:
        raise InvalidInput(f"trace: backward moment {name!r} makes activations that outlive it")
    for index in moment.grads:
        if not trace.tensors[index].trainable:
            raise InvalidInput(f"trace: a gradient arrives for the frozen {trace.tensors[index].name!r} in {name!r}")
    return backward


def _check_holds(trace: Trace, moment: Moment, before: tuple[int, ...]) -> None:
    _indices(moment.holds, len(trace.tensors), f"holds of {moment.name!r}")
    for index in moment.holds:
        if index not in moment.reads or index not in before:
            raise InvalidInput(
                f"trace: {moment.name!r} holds {trace.tensors[index].name!r} from the moment before: both must read it"
            )


def _check_lives(trace: Trace) -> None:
    made = [index for moment in trace.moments for index in moment.makes]
    taken = {index for moment in trace.moments for index in moment.takes}
    if sorted(made) != list(range(len(trace.activations))) or len(taken) != len(made):
        raise InvalidInput("trace: every activation must be made once and taken at least once")
