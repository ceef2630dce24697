"""The trainer's masked words: what is hidden, how it resumes, what it shows at the end."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from _trainer import data, numbers, rows, train
from ps_core._workloads.named_shapes import names, shape
from ps_models import build
from ps_models.train import TrainOptions, main
from ps_models.train._data import corpus
from ps_models.train._objectives import MaskedTokenObjective, NextTokenObjective
from ps_models.train._setup import objective_for, shape_of
from ps_models.train._tokenizers import Bytes
from test_train import BUDGET, at_step, kill_softly

Capture = pytest.CaptureFixture[str]
BERT = ("--model", "bert-2x32", "--seq", "24")
FIRST, END, MASK = Bytes.first, Bytes.end, Bytes.mask


def task(folder: Path, **changed: Any) -> MaskedTokenObjective:
    options = TrainOptions(**{"model": "bert-2x32", "seq": 24, "data": (str(data(folder)),), **changed})
    held = corpus(options)
    found = objective_for(options, held, shape_of(options, held))
    assert isinstance(found, MaskedTokenObjective)
    return found


def read(folder: Path, batch: dict[str, torch.Tensor]) -> list[list[int]]:
    """The sequences as they were before tokens were hidden."""
    return batch["input_ids"].where(batch["labels"] < 0, batch["labels"]).tolist()


def test_who_takes_which_sequence_changes_nothing(tmp_path: Path) -> None:
    one, other = task(tmp_path), task(tmp_path)
    whole = one.batch(3, 6)
    parts = [other.batch(at, 2) for at in (7, 3, 5)]
    for name, value in whole.items():
        assert torch.equal(value, torch.cat([parts[1][name], parts[2][name], parts[0][name]]))
    assert not torch.equal(whole["labels"], task(tmp_path, seed=1).batch(3, 6)["labels"])
    for once, again in zip(one.validation, other.validation, strict=True):
        assert all(torch.equal(once[name], again[name]) for name in once)


def test_what_is_hidden_and_how(tmp_path: Path) -> None:
    batch = task(tmp_path).batch(0, 2000)
    asked = batch["labels"] >= 0
    words = 24 - 3
    assert (asked.sum(1) == round(0.15 * words)).all()
    ids, labels = batch["input_ids"][asked], batch["labels"][asked]
    assert not (labels >= 256).any(), "marks are never asked for"
    masked = (ids == MASK).float().mean().item()
    same = (ids == labels).float().mean().item()
    assert masked == pytest.approx(0.8, abs=0.02)
    assert same == pytest.approx(0.1, abs=0.02)
    assert len(ids[(ids != MASK) & (ids != labels)].unique()) > 150, "any token may be in its place"
    assert not (batch["input_ids"][~asked] == MASK).any()
    places = asked.float().mean(0)
    assert (places[[0, 11, 23]] == 0).all(), "where the marks are"
    assert (places[places > 0] > 0.08).all(), "every other place is asked for as often"


def test_pairs_go_on_or_come_from_elsewhere(tmp_path: Path) -> None:
    found = task(tmp_path)
    batch = found.batch(0, 400)
    text = data(tmp_path).read_bytes()
    label, types = batch["next_sentence_label"], batch["token_type_ids"]
    assert 0.4 < label.float().mean() < 0.6
    goes_on = []
    for ids, kind in zip(read(tmp_path, batch), types.tolist(), strict=True):
        assert [at for at, each in enumerate(ids) if each >= 256] == [0, 11, 23]
        assert [ids[at] for at in (0, 11, 23)] == [FIRST, END, END]
        assert kind == [0] * 12 + [1] * 12
        one, two = bytes(ids[1:11]), bytes(ids[12:23])
        assert one in text
        assert two in text
        goes_on.append(one + two in text)
    both = zip(goes_on, label.tolist(), strict=True)
    assert all(each for each, other in both if not other), "0: it does"
    assert sum(each for each, other in zip(goes_on, label.tolist(), strict=True) if other) < 20, "1: hardly ever"


def test_without_that_head_there_are_no_pairs(tmp_path: Path) -> None:
    from dataclasses import replace

    options = TrainOptions(model="bert-2x32", seq=24, data=(str(data(tmp_path)),))
    held = corpus(options)
    found = objective_for(options, held, replace(shape_of(options, held), next_sentence=False))
    batch = found.batch(0, 3)
    assert set(batch) == {"input_ids", "labels"}
    next_token = NextTokenObjective(options, held, shape_of(options, held)).batch(0, 3)
    assert read(tmp_path, batch) == next_token["input_ids"].tolist()


@pytest.mark.parametrize("way", [("--device", "cpu"), BUDGET], ids=["cpu", "emulated"])
def test_a_resumed_run_is_the_uninterrupted_one(
    way: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (*BERT, *way, "--steps", 5, "--eval-every", 2, "--lr", "1e-2")
    assert train(tmp_path / "whole", *words) == 0
    with monkeypatch.context() as patch:
        at_step(patch, 3, kill_softly(signal.SIGTERM))
        assert train(tmp_path / "cut", *words) == 0
    assert [row["step"] for row in rows(tmp_path / "cut")] == [1, 2, 3]
    assert train(tmp_path / "cut", *words) == 0
    assert numbers(tmp_path / "cut") == numbers(tmp_path / "whole")


def test_the_losses_are_those_of_plain_pytorch(tmp_path: Path) -> None:
    words = (*BERT, "--device", "cpu", "--precision", "fp32", "--steps", 4, "--clip", 0, "--warmup", 0)
    assert train(tmp_path / "run", *words, "--schedule", "constant", "--weight-decay", 0, "--no-checkpointing") == 0
    source = task(tmp_path, batch=2)

    def plain() -> list[float]:
        torch.manual_seed(0)
        model = build("bert-2x32", "cpu", vocabulary=Bytes.vocabulary)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
        losses = []
        for index in range(4):
            loss = model(**source.batch(2 * index, 2)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    found = [row["loss"] for row in rows(tmp_path / "run")]
    assert found == plain() or found == plain()  # the first pass of a process may choose other kernels


def test_it_learns_and_fills_gaps(tmp_path: Path, capsys: Capture) -> None:
    words = (*BERT, "--device", "cpu", "--steps", 40, "--lr", "1e-2", "--batch", 16, "--sample", 20)
    assert train(tmp_path / "run", *words) == 0
    losses = [row["loss"] for row in rows(tmp_path / "run")]
    assert sum(losses[-5:]) / 5 < losses[0] - 2.5
    told = capsys.readouterr().out
    assert re.search(r"^validation loss \d\.\d{4} nats a masked byte and next sentence$", told, re.M)
    sample = re.search(
        r"^sample: 3 of 20 tokens that were held back are hidden, [0-3] were guessed\n(.*)\nfilled:\n(.*)$", told, re.M
    )
    assert sample is not None
    gaps, filled = sample[1], sample[2]
    assert gaps.count("[?]") == 3
    pattern = "(.*)".join(map(re.escape, gaps.split("[?]")))
    assert re.fullmatch(pattern, filled), "nothing but the gaps differs"


def test_token_files_need_a_mask(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "tokens.bin"
    path.write_bytes(b"".join((index % 90).to_bytes(2, "little") for index in range(3000)))
    line = ["--data", str(path), *BERT, "--vocab", "100", "--steps", "1", "--threads", "1", "--sample", "8"]
    line += ["--device", "cpu", "--out", str(tmp_path / "run")]
    assert main(line) == 2
    assert capsys.readouterr().err == (
        "pstar-train: --mask-token: found none, and token files name no mask; allowed for bert-2x32 is 0 to 99\n"
    )
    assert main([*line, "--mask-token", "100"]) == 2
    assert "--mask-token: found 100, allowed is 0 to 99 (see --vocab)" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert main([*line, "--mask-token", "99"]) == 0
    told = capsys.readouterr().out
    assert re.search(r"nats a masked token and next sentence\nmaking .*\nsample: 1 of 8 .*\n.*\[\?\]", told)


def test_a_mask_and_a_length_that_cannot_be(tmp_path: Path, capsys: Capture) -> None:
    assert train(tmp_path / "run", "--mask-token", 3) == 2
    assert "--mask-token: found 3 with gpt-2x32; allowed with a BERT only" in capsys.readouterr().err
    assert train(tmp_path / "run", *BERT, "--seq", 7) == 2
    assert "--seq: found 7, allowed with bert-2x32 is at least 8" in capsys.readouterr().err


def test_every_named_model_can_be_trained(tmp_path: Path) -> None:
    kinds = set()
    for name in (*names(), "bert-1x64"):
        options = TrainOptions(model=name, seq=16, data=(str(data(tmp_path)),))
        held = corpus(options)
        kinds.add((shape(name).family.value, type(objective_for(options, held, shape_of(options, held))).__name__))
    assert kinds == {("gpt2", "NextTokenObjective"), ("bert", "MaskedTokenObjective"), ("llama", "NextTokenObjective")}
