"""Checkpoints that earlier versions wrote, of one process (version 1) and of two (version 2), load to the bit.

``old_checkpoints.json`` has their files, compressed, and a digest of what the runs had that saved them: two steps of
AdamW with a learning rate of 0.1.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ps_core import AdamW, Budget, CheckpointDamaged
from ps_core.engine import check_checkpoint, chunked, load_checkpoint, load_weights, release, save_checkpoint
from ps_core.engine._checkpoint import manifest as _manifest
from ps_core.engine._checkpoint.atomic_folder import MANIFEST, SUMS

OLD: dict[str, Any] = json.loads(Path(__file__).with_name("old_checkpoints.json").read_text("utf-8"))


@pytest.fixture(params=OLD)
def old(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str]:
    """A checkpoint's folder, and the digest."""
    found = OLD[request.param]
    path = tmp_path / "old"
    path.mkdir()
    for name, data in found["files"].items():
        (path / name).write_bytes(gzip.decompress(base64.b64decode(data)))
    return path, found["sha256"]


def other_run() -> Any:
    """A model with other values, and its optimizer."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(24, 16), nn.BatchNorm1d(16), nn.Linear(16, 3))
    return chunked(model, AdamW(lr=0.5), precision="fp32", budget=Budget(host="4MiB"))


def digest_of(model: Any, optimizer: Any) -> str:
    """Of weights, buffers and moments."""
    found = hashlib.sha256()
    for name, value in model.state_dict().items():
        found.update(name.encode() + value.contiguous().numpy().tobytes())
    for _, parameter in model.named_parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            found.update(key.encode() + optimizer.state[parameter][key].contiguous().numpy().tobytes())
    return found.hexdigest()


def test_it_loads_and_is_saved_anew_as_version_2(old: tuple[Path, str], tmp_path: Path) -> None:
    path, digest = old
    check_checkpoint(path)
    model, optimizer = other_run()
    drawn = torch.get_rng_state()
    extra = load_checkpoint(path, model, optimizer)
    assert extra["step"] == 2
    assert extra["order"].tolist() == [2, 0, 1]
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert digest_of(model, optimizer) == digest
    assert not torch.equal(drawn, torch.get_rng_state()), "the generators go on where they were, too"
    drawn = torch.get_rng_state()
    save_checkpoint(tmp_path / "new", model, optimizer)
    release(model)
    assert json.loads((tmp_path / "new" / MANIFEST).read_text())["version"] == 2
    model, optimizer = other_run()
    load_checkpoint(tmp_path / "new", model, optimizer)
    assert digest_of(model, optimizer) == digest
    assert torch.equal(drawn, torch.get_rng_state())
    release(model)


def test_its_weights_load(old: tuple[Path, str]) -> None:
    path, _ = old
    model, optimizer = other_run()
    load_checkpoint(path, model, optimizer)
    wanted = {name: value.clone() for name, value in model.state_dict().items()}
    release(model)
    model, _ = other_run()
    assert load_weights(model, path) == ([], [])
    assert all(torch.equal(value, wanted[name]) for name, value in model.state_dict().items())
    release(model)


@pytest.mark.parametrize("key", ["random", "optimizer", "extra"])
def test_what_version_1_lacks_is_named(tmp_path: Path, key: str) -> None:
    path = tmp_path / "old"
    path.mkdir()
    for name, data in OLD["one process, version 1"]["files"].items():
        (path / name).write_bytes(gzip.decompress(base64.b64decode(data)))
    manifest = json.loads((path / MANIFEST).read_text())
    del manifest[key]
    text = json.dumps(manifest).encode()
    (path / MANIFEST).write_bytes(text)
    rows = dict(line.split(" ") for line in (path / SUMS).read_text().splitlines())
    (path / SUMS).write_bytes(_manifest._sums(rows | {MANIFEST: _manifest._checksum(text)}))
    model, optimizer = other_run()
    with pytest.raises(CheckpointDamaged, match=f"has no '{key}'"):
        load_checkpoint(path, model, optimizer)
    release(model)


@pytest.mark.parametrize("name", ["masters", "random"])
def test_a_changed_byte_of_any_file_is_found_without_loading(tmp_path: Path, name: str) -> None:
    path = tmp_path / "new"
    model, optimizer = other_run()
    save_checkpoint(path, model, optimizer)
    release(model)
    check_checkpoint(path)
    changed = next(path.glob(f"{name}*"))
    data = bytearray(changed.read_bytes())
    data[-20] ^= 1
    changed.write_bytes(data)
    with pytest.raises(CheckpointDamaged, match=changed.name):
        check_checkpoint(path)
