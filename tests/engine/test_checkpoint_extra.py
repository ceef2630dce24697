"""Save ``extra`` in a checkpoint: it is loaded equal, or refused by name before anything is written."""

from __future__ import annotations

import math
import re
from collections import Counter, OrderedDict, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from _checkpoints import Run
from ps_core import InvalidInput
from ps_core.engine import load_checkpoint, save_checkpoint

Pair = namedtuple("Pair", "first second")


def nested(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


def circle() -> dict[str, Any]:
    found: dict[str, Any] = {}
    found["self"] = [found]
    return found


KEPT: dict[str, Any] = {
    "numbers": [0, -1, 10**400, 0.1, -0.0, math.inf, True, None],
    "texts": ["", "\0", "\ud800", "\u00e9"],
    "bytes": [b"", b"\xff", bytearray(b"ab")],
    "keys": {1: "a", 1.5: "b", None: "c", (1, "x"): "d", b"y": "e", True + 1: "f", "": "g"},
    "tags": [{"$tuple": [1]}, {"$float": "x", "other": 1}, {"$dict": 3}],
    "nesting": [[(1, [2, (3,)])], {"a": {"b": {}}}, nested(90)],
    "subclasses": [numpy.float64(1.5), OrderedDict(a=1), Counter("aab"), Pair(1, 2)],
}
TENSORS: dict[str, torch.Tensor] = {
    "complex": torch.tensor([1 + 2j]),
    "conjugate": torch.tensor([1 + 2j, 3 - 4j]).conj(),
    "negated": torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
    "expanded": torch.ones(1).expand(3),
    "turned": torch.arange(6).view(2, 3).t(),
    "scalar": torch.tensor(True),
    "empty": torch.ones(0, 3),
    "parameter": torch.nn.Parameter(torch.ones(2)),
}
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "set": (lambda: {1}, "extra['key'] is a set, which a checkpoint cannot hold without pickle"),
    "object": (lambda: [object()], "extra['key'][0] is a object, which"),
    "array": (lambda: {"a": numpy.ones(2)}, "extra['key']['a'] is a ndarray, which"),
    "key": (lambda: {frozenset(): 1}, "a key of extra['key'] is a frozenset, which"),
    "complex": (lambda: 1j, "extra['key'] is a complex, which"),
    "digits": (lambda: 10**5000, "extra['key'] is a whole number of 16610 bits; a checkpoint holds at most 10000"),
    "digits of a key": (lambda: {10**5000: 1}, "a key of extra['key'] is a whole number of 16610 bits"),
    "circle": (circle, "... is more than 100 deep in lists, tuples and dicts, or holds itself"),
    "depth": (lambda: nested(5000), "extra['key'][0][0]"),
    "nested": (
        lambda: torch.nested.nested_tensor([torch.ones(2)]),
        "extra['key'] is a tensor of layout nested on cpu, which a checkpoint cannot hold",
    ),
}


@pytest.mark.filterwarnings("ignore:.*nested tensors")
def test_what_a_checkpoint_keeps_and_what_it_refuses(tmp_path: Path) -> None:
    with Run("cpu") as run:
        for name, (make, words) in REFUSED.items():
            with pytest.raises(InvalidInput, match=re.escape(words)):
                save_checkpoint(
                    tmp_path / name, run.model, run.optimizer, extra={"before": torch.ones(2), "key": make()}
                )
        for wrong in ([1], "x", 5):
            with pytest.raises(
                InvalidInput, match=f"extra must be a dictionary, or None; found a {type(wrong).__name__}"
            ):
                save_checkpoint(tmp_path / "wrong", run.model, run.optimizer, extra=wrong)  # type: ignore[arg-type]
        assert list(tmp_path.iterdir()) == []
        save_checkpoint(tmp_path / "a", run.model, run.optimizer, extra={**KEPT, "tensors": TENSORS, "nan": math.nan})
        found = load_checkpoint(tmp_path / "a", run.model, run.optimizer)
    assert math.isnan(found.pop("nan"))
    tensors = found.pop("tensors")
    for name, tensor in TENSORS.items():
        assert tensors[name].dtype is tensor.dtype
        assert torch.equal(tensors[name], tensor), name
    assert found == KEPT
    assert list(map(type, found["numbers"])) == list(map(type, KEPT["numbers"]))
    assert list(map(type, found["bytes"])) == [bytes, bytes, bytearray]
    assert str(found["numbers"][4]) == "-0.0"
