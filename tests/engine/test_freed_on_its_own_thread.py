"""The garbage collector may free a model on any thread, also on one that does the model's own work."""

from __future__ import annotations

import gc
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import _models as models
from _cases import finish, rows, square
from ps_core import AdamW, Budget, Options
from ps_core.engine import chunked
from ps_core.engine._devices.disk.file import DiskFile
from ps_core.engine._execution.find_hooks import hooks_of

SOON_S = 20.0


def test_a_thread_of_the_disk_frees_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread reads for the model, and collects garbage meanwhile: it must not wait for itself."""
    failed: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda each: failed.append(each.exc_value))
    torch.manual_seed(0)
    budget = Budget(host=120_000, disk="4MiB", disk_dir=str(tmp_path))
    model, optimizer = chunked(models.stack(), AdamW(lr=1e-3), budget=budget, options=Options(group_bytes=4096))
    square(model, *rows(0)).backward()
    finish(optimizer)
    store = hooks_of(model).engine.store
    device: Any = store.device
    threads = device._disk.streams._threads
    slot = next(
        chunk.home
        for group in hooks_of(model).engine.groups
        for chunk in group.chunks.values()
        if chunk.home.place is not None
    )
    alone, collected, read = threading.Event(), threading.Event(), DiskFile.read_piece

    def read_late(file: DiskFile, piece: Any) -> None:
        read(file, piece)
        assert alone.wait(SOON_S)
        gc.collect()
        collected.set()

    monkeypatch.setattr(DiskFile, "read_piece", read_late)
    device.synchronize()
    device.read(torch.empty(slot.bytes, dtype=torch.uint8), slot.place, 0, lambda: None)
    model.itself = [model]  # a cycle, which only the garbage collector ends
    gc.disable()
    try:
        del model, slot
        alone.set()
        assert collected.wait(SOON_S), "the thread waits for itself"
    finally:
        gc.enable()
    for thread in threads:
        thread.join(SOON_S)
    assert not any(thread.is_alive() for thread in threads)
    assert not failed
    assert not any(store.ledger.used_bytes)
    assert optimizer is not None
