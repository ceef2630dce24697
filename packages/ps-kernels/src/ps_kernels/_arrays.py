"""Describe arrays of every library alike, and check them before every call."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from operator import attrgetter, index
from typing import Any, NoReturn, TypeAlias

from ps_kernels._errors import InvalidArgument

Array: TypeAlias = Any  # a numpy.ndarray or a torch.Tensor; neither library need be installed
FLOATS = ("float32", "float16", "bfloat16")
_ARRAY = attrgetter("array")
_LARGEST = sys.float_info.max
"""The largest number that a float can hold; whole numbers may be larger."""


@dataclass(slots=True, kw_only=True)
class View:
    """One argument: the array, and its properties for the checks. (A frozen class takes twice as long to make.)"""

    name: str
    array: Array
    library: str
    device: str
    dtype: str
    shape: tuple[int, ...]
    contiguous: bool
    writeable: bool
    address: int
    nbytes: int

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Return the bytes of an element."""
        return int(self.array.itemsize)

    def is_same_as(self, other: View) -> bool:
        """Return True if both are one array, so that writing an element after reading it is safe."""
        return (self.address, self.nbytes, self.dtype) == (other.address, other.nbytes, other.dtype)


@cache
def _text(of: object) -> str:
    """Return the name of a device or an element type; results are cached, as there are few."""
    return str(of).removeprefix("torch.")


def view(name: str, array: Array) -> View:
    """Return the view of an argument; raise if it is not an array of a known library."""
    # An array's library is loaded already, so looking it up never loads one.
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(array, torch.Tensor):
        return _view_numpy(name, array)
    if array.layout is not torch.strided or array.is_nested:
        kind = "nested" if array.is_nested else _text(array.layout)
        raise InvalidArgument(f"{name}: expected a dense tensor, found one of layout {kind}; pass tensor.to_dense()")
    plain = type(array) is torch.Tensor and not array.requires_grad
    size = array.element_size()
    address, nbytes = array.data_ptr(), array.numel() * size
    if nbytes and not address and array.device.type != "meta":  # which is refused by name elsewhere
        raise InvalidArgument(f"{name}: this {type(array).__name__} has no memory; expected a tensor with values")
    if array.is_neg():
        raise InvalidArgument(f"{name}: a view that negates its memory (is_neg()); pass tensor.resolve_neg()")
    if array.is_conj():
        raise InvalidArgument(f"{name}: a view that conjugates its memory (is_conj()); pass tensor.resolve_conj()")
    return View(
        name=name,
        array=array if plain else array.detach(),
        library="torch",
        device=_text(array.device),
        dtype=_text(array.dtype),
        shape=tuple(array.shape),
        contiguous=array.is_contiguous() and not address % size,
        writeable=True,
        address=address,
        nbytes=nbytes,
    )


def _view_numpy(name: str, array: Array) -> View:
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(array, numpy.ndarray):
        raise InvalidArgument(f"{name}: expected a torch tensor or a numpy array, found {type(array).__name__}")
    native = "<" if sys.byteorder == "little" else ">"
    names = {f"{native}f4": "float32", f"{native}f2": "float16", f"{native}u2": "bfloat16"}
    names[f"{native}i8"] = "int64"
    return View(
        name=name,
        array=array,
        library="numpy",
        device="cpu",
        dtype=names.get(array.dtype.str, array.dtype.str),
        shape=array.shape,
        contiguous=array.flags.c_contiguous and array.flags.aligned,
        writeable=array.flags.writeable,
        address=array.ctypes.data,
        nbytes=array.nbytes,
    )


def check_dtype(items: Sequence[View], allowed: Sequence[str]) -> None:
    """Raise unless the element types are among those allowed."""
    for item in items:
        if item.dtype not in allowed:
            hint = " (numpy holds bfloat16 as uint16)" if "bfloat16" in allowed and item.library == "numpy" else ""
            raise InvalidArgument(f"{item.name}: expected {' or '.join(allowed)}, found {item.dtype}{hint}")


def check_flat(items: Sequence[View], numel: int) -> None:
    """Raise unless each is one-dimensional, contiguous, and of the given length."""
    for item in items:
        if item.shape != (numel,):
            raise InvalidArgument(f"{item.name}: expected shape ({numel},), found {item.shape}")
        if not item.contiguous:
            check_contiguous(item)


def check_rows(item: View, rows: int, columns: int) -> None:
    """Raise unless the array is contiguous with so many rows and columns."""
    if item.shape != (rows, columns):
        raise InvalidArgument(f"{item.name}: expected shape ({rows}, {columns}), found {item.shape}")
    if not item.contiguous:
        check_contiguous(item)


def check_spans(spans: Sequence[tuple[int, int]], numel: int) -> tuple[tuple[int, int], ...]:
    """Return the spans as pairs of ints; raise unless each is a pair of whole numbers, and within the elements."""
    if not hasattr(spans, "__len__"):
        refuse_uncounted("spans", spans)
    found = []
    for span in spans:
        try:
            start, stop = map(index, span)
        except (TypeError, ValueError):
            raise InvalidArgument(f"spans: expected pairs of whole numbers, found {span!r}") from None
        if not 0 <= start <= stop <= numel:
            raise InvalidArgument(
                f"spans: expected runs within {numel} elements, found {shown(start)} to {shown(stop)}"
            )
        found.append((start, stop))
    return tuple(found)


def check_contiguous(item: View) -> None:
    """Raise unless the array is contiguous and aligned."""
    if item.address % item.itemsize:
        raise InvalidArgument(
            f"{item.name}: begins at an address that is no multiple of its elements' {item.itemsize} bytes; pass a "
            "copy in new memory and write back what it holds"
        )
    if not item.contiguous:
        raise InvalidArgument(f"{item.name}: not contiguous; pass a contiguous copy and write back what it holds")


def check_together(items: Sequence[View]) -> None:
    """Raise unless all arrays are of one library and on one device."""
    first = items[0]
    for item in items:
        if (item.library, item.device) != (first.library, first.device):
            raise InvalidArgument(
                f"{item.name}: expected a {first.library} array on {first.device} like {first.name}, "
                f"found a {item.library} array on {item.device}"
            )


def check_written(written: Sequence[View], read: Sequence[View]) -> None:
    """Raise unless written arrays are writable and share no byte with others; all must be on one device."""
    for item in written:
        if not item.writeable:
            raise InvalidArgument(f"{item.name}: read-only, and the result goes there")
    # By address, each after what reaches furthest of those before: if any two overlap, so do two of these pairs.
    spans = [(item.address, item.address + item.nbytes, place) for place, item in enumerate(written) if item.nbytes]
    furthest, last = 0, -1
    for start, end, place in sorted(spans):
        if last >= 0 and start < furthest:
            _refuse_overlap(written[min(place, last)], written[max(place, last)])
        if end > furthest:
            furthest, last = end, place
    for start, end, place in spans:
        for source in read:
            if start < source.address + source.nbytes and source.address < end and source.nbytes:
                _refuse_overlap(written[place], source)


def _refuse_overlap(one: View, other: View) -> NoReturn:
    raise InvalidArgument(f"{one.name} and {other.name} share memory; expected separate arrays")


def note_written(items: Sequence[View]) -> None:
    """Tell autograd what a kernel writes, which it cannot see, so that backward refuses changed tensors."""
    if items[0].library == "torch":
        sys.modules["torch"].autograd.graph.increment_version(list(map(_ARRAY, items)))


def tell_autograd(tensors: Sequence[Array]) -> None:
    """Tell autograd that these PyTorch tensors were changed in place."""
    sys.modules["torch"].autograd.graph.increment_version(tensors)


def check_number(name: str, value: float, *, least: float = 0.0, below: float = math.inf) -> float:
    """Return the number; raise unless it is at least ``least`` and less than ``below``."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not least <= value < below or value > _LARGEST:
        raise InvalidArgument(f"{name}: expected a number in [{least:g}, {below:g}), found {shown(value)}")
    return float(value)


def check_numbers(*, least: float = 0.0, below: float = math.inf, **values: float) -> None:
    """Raise unless each named number is at least ``least`` and less than ``below``."""
    for name, value in values.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not least <= value < below or value > _LARGEST:
            check_number(name, value, least=least, below=below)


def check_factor(name: str, value: float) -> float:
    """Return a finite number of either sign; raise for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not -_LARGEST <= value <= _LARGEST:
        raise InvalidArgument(f"{name}: expected a finite number, found {shown(value)}")
    return float(value)


def check_label(name: str, value: int) -> int:
    """Return an integer; raise unless it fits into an int64."""
    if isinstance(value, bool) or not isinstance(value, int) or not -(2**63) <= value < 2**63:
        raise InvalidArgument(f"{name}: expected a whole number of 64 bits, found {shown(value)}")
    return value


def check_count(name: str, value: int, most: int = 2**63 - 1) -> int:
    """Return an integer; raise unless it is at least 1 and at most ``most``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidArgument(f"{name}: expected a whole number from 1, found {shown(value)}")
    if value > most:
        raise InvalidArgument(f"{name}: expected at most {most}, found {shown(value)}")
    return value


def refuse_uncounted(name: str, values: object) -> NoReturn:
    """Raise because the values are not counted, as those in a list or a tuple are."""
    raise InvalidArgument(f"{name}: expected a list, found {type(values).__name__}")


def refuse_flag(name: str, value: object) -> NoReturn:
    """Raise because the value is neither True nor False."""
    raise InvalidArgument(f"{name}: expected True or False, found {shown(value)}")


def shown(value: object) -> str:
    """Return the value as text; Python refuses to print a whole number of thousands of digits."""
    if isinstance(value, int) and value.bit_length() > 64:
        return f"a whole number of {value.bit_length()} bits"
    return repr(value)
