"""A call that cannot be done says what was expected and found, and has written nothing."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import ps_kernels
from ps_kernels import BackendMissing, InvalidArgument


def floats(numel: int = 4, kind: Any = np.float32) -> np.ndarray:
    return np.ones(numel, kind)


def adam(**changes: Any) -> None:
    """A sound call, apart from the changes; what it would write must be as it was afterwards."""
    arrays: dict[str, Any] = {name: floats() for name in ("param", "momentum", "variance", "grad")}
    arrays["out"] = np.zeros(4, np.uint16)
    numbers: dict[str, Any] = {"step": 1, "lr": 0.1}
    for name, value in changes.items():
        (arrays if name in arrays else numbers)[name] = value
    before = {name: array.copy() for name, array in arrays.items() if isinstance(array, np.ndarray)}
    try:
        ps_kernels.adam_step(*arrays.values(), **numbers)
    finally:
        for name, array in before.items():
            np.testing.assert_array_equal(arrays[name], array)


def between_elements() -> np.ndarray:
    """A contiguous array of four numbers that begins a byte after one would."""
    return np.zeros(17, np.uint8)[1:].view(np.float32)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"param": [1.0]}, "param: expected a torch tensor or a numpy array, found list"),
    ({"momentum": floats(3)}, "momentum: expected shape (4,), found (3,)"),
    ({"param": np.ones((2, 2), np.float32)}, "param: expected shape (4,), found (2, 2)"),
    ({"variance": floats(kind=np.float64)}, "variance: expected float32, found <f8"),
    ({"grad": floats(kind=np.float64)}, "grad: expected float32 or float16 or bfloat16, found <f8 (numpy holds"),
    ({"out": floats(kind=np.int64)}, "out: expected float32 or float16 or bfloat16, found int64"),
    ({"grad": floats(8)[::2]}, "grad: not contiguous"),
    ({"grad": between_elements()}, "grad: begins at an address that is no multiple of its elements' 4 bytes"),
    ({"grad": torch.ones(4)}, "grad: expected a numpy array on cpu like param, found a torch array on cpu"),
    ({"step": 0}, "step: expected a whole number from 1, found 0"),
    ({"step": 1.0}, "step: expected a whole number from 1, found 1.0"),
    ({"step": True}, "step: expected a whole number from 1, found True"),
    ({"lr": -1.0}, "lr: expected a number in [0, inf), found -1.0"),
    ({"lr": float("nan")}, "lr: expected a number in [0, inf), found nan"),
    ({"lr": True}, "lr: expected a number"),
    ({"lr": "fast"}, "lr: expected a number"),
    ({"lr": 10**5000}, "lr: expected a number in [0, inf), found a whole number of 16610 bits"),
    ({"step": 10**400}, "step: expected at most 9223372036854775807, found a whole number of 1329 bits"),
    ({"decoupled": "no"}, "decoupled: expected True or False, found 'no'"),
    ({"beta1": 1.0}, "beta1: expected a number in [0, 1), found 1.0"),
    ({"grad_scale": float("inf")}, "grad_scale: expected a finite number, found inf"),
    ({"grad_scale": 10**400}, "grad_scale: expected a finite number, found a whole number of 1329 bits"),
    ({"grad_scale": True}, "grad_scale: expected a finite number, found True"),
    ({"backend": "magic"}, "backend: expected one of cuda, "),
    (
        {"backend": ["numpy"]},
        "backend: expected one of cuda, avx512, avx2, neon, scalar, torch, numpy, or None; found ['n",
    ),
    ({"backend": {}}, "or None; found {}"),
    ({"backend": 5}, "or None; found 5"),
    ({"backend": "torch"}, "backend 'torch': cannot work on param, which is a numpy array"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=[message for _, message in WRONG])
def test_adam_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(message)):
        adam(**changes)


@pytest.mark.skipif(find_spec("cupy") is not None, reason="cupy is there")
def test_a_backend_that_is_not_there() -> None:
    with pytest.raises(BackendMissing, match=r"backend 'cuda': .* is not installed: pip install (cupy-cuda13x|torch)"):
        adam(backend="cuda")


def test_the_backend_may_be_named() -> None:
    param = floats()
    ps_kernels.sgd_step(param, None, floats(), lr=0.5, backend="numpy")
    assert param.tolist() == [0.5] * 4


def test_shared_memory_is_refused() -> None:
    block = floats(8)
    with pytest.raises(InvalidArgument, match="param and momentum share memory"):
        adam(param=block[:4], momentum=block[3:7])
    with pytest.raises(InvalidArgument, match="variance and grad share memory"):
        adam(variance=block[:4], grad=block[:4])
    halves = floats(8, np.float16)
    with pytest.raises(InvalidArgument, match="out and grad share memory"):
        adam(out=halves[:4], grad=halves[1:5])


def test_what_cannot_be_written_is_refused() -> None:
    frozen = floats()
    frozen.flags.writeable = False
    with pytest.raises(InvalidArgument, match="param: read-only"):
        adam(param=frozen)
    adam_grad = floats()
    adam_grad.flags.writeable = False
    ps_kernels.sgd_step(floats(), None, adam_grad, lr=0.1)


def test_momentum_is_needed_where_it_decays() -> None:
    with pytest.raises(InvalidArgument, match="momentum: expected an array, because momentum_decay"):
        ps_kernels.sgd_step(floats(), None, floats(), lr=0.1, momentum_decay=0.9)


def spans(rows: Any) -> None:
    ps_kernels.sumsq_finite(floats(), np.zeros((1, 2), np.float32), spans=rows)


CALLS: list[tuple[Callable[[], None], str]] = [
    (lambda: ps_kernels.sumsq_finite(floats(), floats(3)), "out: expected shape (2,), found (3,)"),
    (lambda: ps_kernels.sumsq_finite(np.ones((2, 2), np.float32), floats(2)), "x: expected shape (4,), found (2, 2)"),
    (lambda: ps_kernels.sumsq_finite(floats(), floats(2), spans=[(0, 4)]), "out: expected shape (1, 2), found (2,)"),
    (
        lambda: ps_kernels.sumsq_finite(floats(), np.zeros((1, 2), np.float32), spans=[(2, 5)]),
        "spans: expected runs within 4 elements, found 2 to 5",
    ),
    (
        lambda: ps_kernels.sumsq_finite(floats(), np.zeros((1, 2), np.float32), spans=[(3, 2)]),
        "spans: expected runs within 4 elements, found 3 to 2",
    ),
    (lambda: spans([(0,)]), "spans: expected pairs of whole numbers, found (0,)"),
    (lambda: spans([3]), "spans: expected pairs of whole numbers, found 3"),
    (lambda: spans([(0.0, 4.0)]), "spans: expected pairs of whole numbers, found (0.0, 4.0)"),
    (lambda: spans([(0, 10**5000)]), "spans: expected runs within 4 elements, found 0 to a whole number of 16610 bits"),
    (lambda: spans(5), "spans: expected a list, found int"),
    (lambda: ps_kernels.accumulate(floats(), floats(5)), "grad: expected shape (4,), found (5,)"),
    (lambda: ps_kernels.accumulate(floats(), floats(), scale=-1), "scale: expected a number"),
    (lambda: ps_kernels.accumulate(floats(), floats(), backend=[]), "backend: expected one of cuda, "),  # type: ignore[arg-type]
    (lambda: ps_kernels.sum_in_order([floats()], floats(), backend=[]), "backend: expected one of cuda, "),  # type: ignore[arg-type]
    (lambda: ps_kernels.Pieces([floats()], floats(), [0], backend=[]), "backend: expected one of cuda, "),  # type: ignore[arg-type]
    (lambda: ps_kernels.gather([floats()], floats(6), [3]), "tensors[0]: 4 elements from offset 3 do not lie in"),
    (lambda: ps_kernels.gather([floats()], floats(6), [-1]), "tensors[0]: 4 elements from offset -1 do not lie in"),
    (lambda: ps_kernels.gather([floats()], floats(6), [10**5000]), "tensors[0]: 4 elements from offset a whole number"),
    (lambda: ps_kernels.gather([floats()], floats(6), None), "offsets: expected a list, found NoneType"),  # type: ignore[arg-type]
    (lambda: ps_kernels.gather(None, floats(6), [0]), "tensors: expected a list, found NoneType"),  # type: ignore[arg-type]
    (lambda: ps_kernels.gather([floats()], floats(6), []), "offsets: expected one for each of 1 tensors, found 0"),
    (lambda: ps_kernels.gather([floats(2), floats(2)], floats(6), [0, 1]), "offsets: pieces (0, 2) and (1, 3)"),
    (lambda: ps_kernels.gather([floats(2, np.float64)], floats(6), [0]), "tensors[0]: expected float32 or float16 or"),
    (lambda: ps_kernels.gather([floats(2)], floats(6, np.int64), [0]), "tensors[0]: expected int64, found float32"),
    (lambda: ps_kernels.scatter(floats(6), [0], [torch.ones(2)]), "tensors[0]: expected a numpy array on cpu"),
    (lambda: ps_kernels.scatter(floats(6), [0], [np.ones((4, 4), np.float32)[:, :1]]), "tensors[0]: not contiguous"),
    (lambda: ps_kernels.sum_in_order(5, floats()), "parts: expected a list, found int"),  # type: ignore[arg-type]
    (lambda: ps_kernels.set_threads(0), "n: expected a whole number from 1, found 0"),
    (lambda: ps_kernels.set_threads(2**31), "n: expected at most 4096, found 2147483648"),
    (lambda: ps_kernels.set_threads(1, cores=5), "cores: expected a list, found int"),  # type: ignore[arg-type]
    (lambda: ps_kernels.set_threads(1, cores=[0.0]), "cores: expected 1 different ones of"),  # type: ignore[list-item]
]


@pytest.mark.parametrize(("call", "message"), CALLS, ids=[message for _, message in CALLS])
def test_other_calls_refuse(call: Callable[[], None], message: str) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(message)):
        call()


def test_pieces_out_of_the_chunk_itself_are_refused() -> None:
    chunk = floats(6)
    with pytest.raises(InvalidArgument, match=re.escape("chunk and tensors[0] share memory")):
        ps_kernels.gather([chunk[:2]], chunk, [4])
    twice = floats(2)
    with pytest.raises(InvalidArgument, match=re.escape("tensors[0] and tensors[1] share memory")):
        ps_kernels.scatter(chunk, [0, 2], [twice, twice])


@pytest.mark.parametrize("make", [torch.Tensor.to_sparse, torch.Tensor.to_mkldnn], ids=["sparse", "mkldnn"])
def test_a_tensor_that_is_not_dense(make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def dense() -> torch.Tensor:
        return torch.ones(4)

    calls: dict[str, Callable[[torch.Tensor], None]] = {
        "grad": lambda wrong: ps_kernels.adam_step(dense(), dense(), dense(), wrong, step=1, lr=0.1),
        "x": lambda wrong: ps_kernels.sumsq_finite(wrong, torch.zeros(2)),
        "tensors[0]": lambda wrong: ps_kernels.gather([wrong], dense(), [0]),
        "chunk": lambda wrong: ps_kernels.scatter(wrong, [0], [dense()]),
        "parts[0]": lambda wrong: ps_kernels.sum_in_order([wrong], dense()),
    }
    for name, call in calls.items():
        with pytest.raises(InvalidArgument, match=re.escape(f"{name}: expected a dense tensor, found one of layout")):
            call(make(dense()))


def test_a_flag_of_the_cross_entropy() -> None:
    with pytest.raises(InvalidArgument, match="gradient: expected True or False, found 'no'"):
        ps_kernels.cross_entropy(torch.ones(4, 16), torch.zeros(4, dtype=torch.int64), torch.empty(4), gradient="no")  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_a_tensor_without_memory() -> None:
    mode = FakeTensorMode()
    with pytest.raises(InvalidArgument, match="logits: this FakeTensor has no memory"):
        ps_kernels.cross_entropy(mode.from_tensor(torch.ones(4, 16)), torch.zeros(4, dtype=torch.int64), torch.empty(4))
    with pytest.raises(InvalidArgument, match="grad: this FakeTensor has no memory"):
        ps_kernels.accumulate(torch.zeros(64), mode.from_tensor(torch.ones(64)))


def test_pieces_keep_the_memory_that_they_copy() -> None:
    chunk, part = torch.zeros(1 << 20), torch.arange(1 << 20, dtype=torch.float32)
    memory = chunk.untyped_storage()
    pieces = ps_kernels.Pieces([part], chunk, [0])
    chunk.data = torch.zeros(1)
    pieces.gather()
    assert torch.equal(torch.empty(0).set_(memory), part)


def test_a_tensor_between_elements_is_refused_and_a_clone_of_it_is_not() -> None:
    """Reading it would be undefined in C; ``np.ascontiguousarray`` and ``contiguous()`` would return it as it is."""
    for place in range(4):
        arrays = [torch.ones(4) for _ in range(4)]
        whole = torch.from_numpy(between_elements())
        arrays[place] = whole.fill_(1)
        with pytest.raises(InvalidArgument, match="begins at an address that is no multiple"):
            ps_kernels.adam_step(*arrays, step=1, lr=0.1)
        assert all(bool((array == 1).all()) for array in arrays)
        arrays[place] = whole.clone()
        ps_kernels.adam_step(*arrays, step=1, lr=0.1)
