"""What a pass holds besides the model is counted moment by moment, and laid beside what the model's slots take."""

from __future__ import annotations

import pytest
import torch

from _runs import stand_in
from ps_core._plan import Tier
from ps_core.engine._execution.nonmodel_memory import NonModelMemory
from ps_core.engine._memory.tier_store import TierStore
from ps_core.engine._tracing.pass_recording import MomentRecord

CONSTANT = 96


def counted(model_storages: set[int] | None = None) -> tuple[TierStore, NonModelMemory]:
    """A store with one slot of 256 bytes on the compute tier, whose arena covers all of its 4096, and the counter."""
    store = TierStore(stand_in(), (Tier("device", 4096), Tier("host", 4096)), poison=False)
    store.reserve(0, 256)
    return store, NonModelMemory(store, set() if model_storages is None else model_storages, CONSTANT)


@pytest.mark.parametrize("planned", [False, True])
def test_a_moment_takes_its_peak_and_the_slots_and_the_next_begins_with_what_is_left(planned: bool) -> None:
    store, memory = counted()
    moment = MomentRecord(False, (), (), name="a moment")
    memory.start_pass()
    try:
        kept = torch.ones(16)
        del kept
        kept = torch.ones(8)
        slots = store.held_bytes if planned else 256
        assert memory.measure(moment, planned=planned) == 64 + slots + CONSTANT
        assert moment.nonmodel_bytes == 64
        assert store.ledger.nonmodel_bytes == kept.nbytes + CONSTANT
        assert memory.measure(moment, planned=planned) == 32 + slots + CONSTANT
        assert moment.nonmodel_bytes == 64, "of a moment that is measured twice, the most counts"
    finally:
        memory.stop()
    assert not memory.counting


def test_memory_of_the_model_is_not_counted_and_other_tensors_are_once() -> None:
    weight, other = torch.ones(4), torch.ones(8)
    _, memory = counted({weight.untyped_storage()._cdata})
    moment = MomentRecord(False, (), (), name="a moment")
    memory.start_pass()
    try:
        for tensor in (weight, other, other):
            memory.count(tensor)
        with memory.paused():
            unseen = torch.ones(64)
        memory.measure(moment, planned=False)
        assert moment.nonmodel_bytes == other.nbytes < unseen.nbytes
    finally:
        memory.stop()


def test_what_a_broken_pass_left_is_freed_unless_the_user_holds_it() -> None:
    _, memory = counted()
    memory.start_pass()
    held = torch.ones(4)
    circle: list[object] = [torch.ones(1024)]
    circle.append(circle)
    memory.stop()
    del circle
    assert memory.free_broken_pass() == held.nbytes
    del held
    assert memory.free_broken_pass() == 0
