"""Save and restore the states of the random number generators that a training loop uses."""

from __future__ import annotations

import importlib.util
import random
import sys
from typing import Any

import torch

from ps_core.engine._checkpoint.safetensors_format import bytes_of


def random_state() -> dict[str, Any]:
    """Return the states of PyTorch and Python, of CUDA if it is in use, and of NumPy if imported."""
    found: dict[str, Any] = {"torch": _bytes(torch.get_rng_state()), "python": random.getstate()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found["cuda"] = [_bytes(each) for each in torch.cuda.get_rng_state_all()]
    if (numpy := sys.modules.get("numpy")) is not None:
        state = numpy.random.get_state(legacy=False)
        if state["bit_generator"] == "MT19937":  # NumPy's generator, unless the user has replaced it
            found["numpy"] = {**state, "state": {**state["state"], "key": state["state"]["key"].tolist()}}
    return found


def restore_random_state(state: dict[str, Any]) -> None:
    """Set the generators to these states; ignore states of generators that this process does not have."""
    torch.set_rng_state(_tensor(state["torch"]))
    random.setstate(state["python"])
    if "cuda" in state and torch.cuda.is_available():
        for index, each in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(_tensor(each), index)
    if "numpy" in state and importlib.util.find_spec("numpy") is not None:
        import numpy

        numpy.random.set_state(_of_numpy(state["numpy"]))


def check_random_state(state: Any) -> None:
    """Raise `ValueError` unless `restore_random_state` accepts it (any: from a file); no generator changes."""
    try:
        torch.Generator().set_state(_tensor(state["torch"]))
        random.Random().setstate(state["python"])
        for each in state.get("cuda", ()):
            _tensor(each)
        if "numpy" in state and importlib.util.find_spec("numpy") is not None:
            import numpy

            numpy.random.RandomState().set_state(_of_numpy(state["numpy"]))
    except (AttributeError, KeyError, OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"{type(error).__name__}: {error}".partition("\n")[0]) from None


def _of_numpy(state: dict[str, Any]) -> dict[str, Any]:
    """Return NumPy's state in its own types."""
    import numpy

    return {**state, "state": {**state["state"], "key": numpy.array(state["state"]["key"], dtype=numpy.uint32)}}


def _bytes(state: torch.Tensor) -> bytes:
    return bytes(bytes_of(state))


def _tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
