"""Data: deterministic, split by document, packed, exactly resumable."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from ps_core import InvalidInput
from ps_models.train import TrainOptions
from ps_models.train._data import FEW, PackedTokens, corpus, pack, split
from ps_models.train._tokenizers import Bytes, tokenizer

TEXTS = st.lists(st.binary(max_size=30), max_size=60)


def options(*paths: Path, **others: object) -> TrainOptions:
    return TrainOptions(data=tuple(map(str, paths)), **{"seq": 4, **others})  # type: ignore[arg-type]


# ---------------------------------------------------------------- split


@given(every=st.lists(st.binary(min_size=1, max_size=30), min_size=FEW, unique=True), part=st.floats(0.1, 0.5))
def test_a_document_is_on_one_side_and_stays_there(every: list[bytes], part: float) -> None:
    train, held = split(every, part)
    assert split(every, part) == (train, held)
    assume(sorted(train + held) == sorted(every))  # else one side would have been empty
    assert not set(train) & set(held)
    again, apart = split([*every[::-1], b"x" * 31], part)
    assert set(train) <= set(again)
    assert set(held) <= set(apart)


def test_the_part_is_about_what_was_asked_for() -> None:
    every = [str(number).encode() for number in range(4000)]
    for part in (0.05, 0.3):
        train, held = split(every, part)
        assert abs(len(held) / len(every) - part) < 0.02
        assert sorted(train + held) == sorted(every)


@given(every=st.lists(st.binary(max_size=50), max_size=FEW - 1), part=st.floats(0.01, 0.5))
def test_of_few_documents_the_ends_are_held_back(every: list[bytes], part: float) -> None:
    train, held = split(every, part)
    assert [a + b for a, b in zip(train, held, strict=True)] == every
    assert all(len(b) == int(len(whole) * part) for b, whole in zip(held, every, strict=True))


# ---------------------------------------------------------------- packing


@given(every=TEXTS)
def test_packing_keeps_every_byte_and_every_boundary(every: list[bytes]) -> None:
    run = pack(every, Bytes()).tolist()
    found: list[list[int]] = [[]]
    for token in run:
        if token == Bytes.end:
            found.append([])
        else:
            found[-1].append(token)
    assert found.pop() == []
    assert [bytes(each) for each in found] == [each for each in every if each]


RUNS = st.lists(st.integers(0, 60), min_size=1, max_size=4)


def packed(sizes: list[int], length: int, seed: int = 0) -> PackedTokens:
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    runs = [
        torch.arange(start, start + size) + 1000 * index
        for index, (start, size) in enumerate(zip(starts, sizes, strict=True))
    ]
    return PackedTokens(runs, length, seed=seed)


@given(sizes=RUNS, length=st.integers(2, 9), seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 3))
def test_an_epoch_takes_everything_once_and_never_across_runs(
    sizes: list[int], length: int, seed: int, epoch: int
) -> None:
    data = packed(sizes, length, seed)
    assert all(0 <= size // length - count <= 1 for size, count in zip(sizes, data.counts, strict=True))
    assert all(count for size, count in zip(sizes, data.counts, strict=True) if size >= length)
    if not data.sequences:
        return
    taken = data.batch(epoch * data.sequences, data.sequences)
    assert taken.dtype == torch.int64
    assert taken.shape == (data.sequences, length)
    assert (taken[:, 1:] - taken[:, :-1] == 1).all(), "each sequence is one piece of one run"
    assert len(set(taken.flatten().tolist())) == taken.numel(), "no token twice"


@given(length=st.integers(2, 9), seed=st.integers(0, 99), cuts=st.lists(st.integers(1, 7), min_size=1, max_size=12))
def test_the_position_is_all_there_is_to_resume(length: int, seed: int, cuts: list[int]) -> None:
    """Whatever was asked before, in whatever portions, the sequences from a position on are the same."""
    sizes = [31, 54]
    whole = packed(sizes, length, seed).batch(0, sum(cuts))
    reader, position = packed(sizes, length, seed), 0
    for count in cuts:
        assert torch.equal(reader.batch(position, count), whole[position : position + count])
        fresh = packed(sizes, length, seed)
        assert torch.equal(fresh.batch(position, count), whole[position : position + count])
        position += count


def test_epochs_and_seeds_differ() -> None:
    data = packed([400], 4)
    count = data.sequences
    first, second, other = data.batch(0, count), data.batch(count, count), packed([400], 4, seed=1).batch(0, count)
    rising = packed([400], 4).spread(count)
    for a, b in ((first, second), (first, other), (second, other), (first, rising)):
        assert not torch.equal(a, b)
    offsets = {int(data.batch(epoch * count, count).min()) % 4 for epoch in range(20)}
    assert offsets == {0, 1, 2, 3}, "cuts fall elsewhere in each epoch"


def test_validation_is_spread_and_the_same_each_time() -> None:
    data = packed([400], 4)
    assert data.spread(5)[:, 0].tolist() == [0, 76, 156, 236, 316]
    assert len(data.spread(10**6)) == data.sequences


# ---------------------------------------------------------------- sources


def test_the_standard_library_is_the_default() -> None:
    found = corpus(TrainOptions())
    again = corpus(TrainOptions())
    assert found.digest == again.digest
    assert torch.equal(found.train[0], again.train[0])
    train, held = found.train[0], found.validation[0]
    assert len(train) > 4_000_000
    assert 0.01 < len(held) / (len(train) + len(held)) < 0.15
    text = Bytes().decode(torch.cat([train, held]).tolist())
    assert "class ArgumentParser" in text
    assert "class JSONDecoder" in text
    assert found.told.startswith("the standard library's source: ")


def test_json_lines_text_and_folders(tmp_path: Path) -> None:
    lines = ["\n", json.dumps("first"), "\n", json.dumps({"text": "sécond", "other": 1}), "\n"]
    (tmp_path / "a.jsonl").write_text("".join(lines), "utf-8")
    (tmp_path / "b.txt").write_text("third", "utf-8")
    (tmp_path / "c.png").write_bytes(b"\0\1\2")
    found = corpus(options(tmp_path, seq=2, validation=0.4))
    run = found.train[0].tolist()
    assert Bytes().decode(run) == "firsécothi"
    assert run.count(Bytes.end) == 3
    others = "; 1 file not read, for their endings (.png 1)"
    assert found.told == f"{tmp_path}: 3 documents, 14 tokens to train on, 9 held back{others}"
    one_by_one = corpus(options(tmp_path / "a.jsonl", tmp_path / "b.txt", seq=2, validation=0.4))
    assert one_by_one.digest == found.digest
    assert corpus(options(tmp_path / "b.txt", tmp_path / "a.jsonl", seq=2, validation=0.4)).digest != found.digest


def test_files_of_other_endings_are_counted(tmp_path: Path) -> None:
    for number, ending in enumerate([".js", ".js", ".js", ".ts", ".ts", ".rs", "", ".go"]):
        (tmp_path / f"{number}{ending}").write_text("not read")
    told = "8 files not read, for their endings (.js 3, .ts 2, no ending 1, .go 1, ...)"
    with pytest.raises(InvalidInput, match=re.escape(told)):
        corpus(options(tmp_path, seq=2))
    (tmp_path / "read.md").write_text("read " * 9)
    assert told in corpus(options(tmp_path, seq=2)).told
    (tmp_path / "read.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 9)
    assert told in corpus(options(tmp_path, seq=2)).told
    assert "not read" not in corpus(options(tmp_path / "read.md", seq=2)).told
    (tmp_path / "held").mkdir()
    (tmp_path / "held" / "a.rs").touch()
    for name in ("read.md", "read.jsonl"):
        with pytest.raises(InvalidInput, match=r"--eval-data: .*; 1 file not read, for their endings \(\.rs 1\)"):
            corpus(options(tmp_path / name, seq=2, eval_data=(str(tmp_path / "held"),)))


def test_hidden_files_are_no_data(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    for name in (".git/a.md", ".hidden.md", ".git/b.rs", ".c.rs"):
        (tmp_path / name).write_text("hidden " * 9)
    with pytest.raises(
        InvalidInput, match=rf"^--data: 0 tokens .*; {re.escape(repr(str(tmp_path)))} has no files, hidden ones aside$"
    ):
        corpus(options(tmp_path))
    (tmp_path / "read.md").write_text("read " * 9)
    found = corpus(options(tmp_path, seq=2))
    assert "hidden" not in Bytes().decode(found.train[0].tolist())
    assert "not read" not in found.told
    (tmp_path / ".named.md").write_text("named " * 9)
    assert "named" in Bytes().decode(corpus(options(tmp_path / ".named.md", seq=2)).train[0].tolist())


def test_a_folder_is_read_whatever_its_folders_are_called(tmp_path: Path) -> None:
    for name in ("train", "test", "tests"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text(f"of {name}", "utf-8")
    assert ": 3 documents, " in corpus(options(tmp_path, seq=2, validation=0.4)).told


@pytest.mark.parametrize("line", ["{", "3", '{"txt": "a"}', '{"text": 3}', "[]", "null"])
def test_a_line_that_is_no_text_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f'"good"\n{line}\n', "utf-8")
    with pytest.raises(InvalidInput, match=r"line 2 of .*a\.jsonl.* allowed is a JSON text, or an object"):
        corpus(options(path))


@pytest.mark.parametrize("kind", ["u1", "<u2", "<i2", "<u4", "<i4", "<i8"])
def test_token_files_are_read(kind: str, tmp_path: Path) -> None:
    numbers = np.arange(100).astype(kind)
    np.save(tmp_path / "a.npy", numbers)
    found = corpus(options(tmp_path / "a.npy", validation=0.1))
    assert PackedTokens(found.train, 4).spread(99).flatten().tolist() == list(range(84))
    assert found.validation[0][:].tolist() == list(range(90, 100))
    assert found.tokenizer is None


def test_a_bin_file_is_numbers_of_16_bits(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(np.arange(65000, 65100, dtype="<u2").tobytes())
    found = corpus(options(tmp_path / "a.bin"))
    assert found.train[0].dtype == torch.uint16
    assert PackedTokens(found.train, 5).spread(1).tolist() == [[65000, 65001, 65002, 65003, 65004]]


@pytest.mark.parametrize("left", [0, 100, 199])
def test_a_token_file_cut_short_during_the_run_is_named(left: int, tmp_path: Path) -> None:
    """Within the last page it would read as zeros, were it mapped; before that the process would end."""
    path = tmp_path / "a.bin"
    path.write_bytes(np.arange(1, 101, dtype="<u2").tobytes())
    found = PackedTokens(corpus(options(path)).train, 5)
    assert found.batch(0, 3).min() > 0
    os.truncate(path, left)
    with pytest.raises(InvalidInput, match=rf"--data: .*a\.bin' has {left} bytes, expected 200: it was cut short"):
        found.batch(0, 3)


def test_a_file_that_lacks_tokens_of_its_header(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    np.save(path, np.arange(100, dtype="<u2"))
    os.truncate(path, path.stat().st_size - 20)
    with pytest.raises(InvalidInput, match="has 90 tokens, its header says 100; allowed is a whole file"):
        corpus(options(path))


def test_another_file_is_another_digest(tmp_path: Path) -> None:
    path, digests = tmp_path / "a.bin", set()
    for end in (0, 1):
        path.write_bytes(np.array([*range(99), end], dtype="<u2").tobytes())
        digests.add(corpus(options(path)).digest)
        digests.add(corpus(options(path, validation=0.2)).digest)
    assert len(digests) == 4


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.bin", b"", "has 0 bytes of tokens; allowed is a multiple of 2"),
        ("a.bin", b"123", "has 3 bytes of tokens; allowed is a multiple of 2"),
        ("a.bin", b"12", "tokens for train are no sequence of 4"),
        ("a.npy", b"\x93NUMPY\x01\x00\x02\x00{", "is not a .npy file of tokens; allowed is one dimension of |u1, <u2"),
        ("a.npy", b"words", "is not a .npy file of tokens"),
        ("a.txt", b"", "0 tokens for train are no sequence of 4; allowed is more data, a smaller --seq"),
        ("a.txt", b"1234567890", "tokens for validation are no sequence of 4; allowed is more data, a smaller --seq"),
    ],
)
def test_data_that_cannot_be_used(name: str, content: bytes, told: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidInput) as raised:
        corpus(options(tmp_path / name))
    assert told in str(raised.value)
    assert str(raised.value).startswith("--data: ")


def test_two_dimensions_and_mixtures_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((9, 9), "u1"))
    with pytest.raises(InvalidInput, match="allowed is one dimension"):
        corpus(options(tmp_path / "a.npy"))
    (tmp_path / "b.txt").write_text("words")
    with pytest.raises(InvalidInput, match=r"b\.txt' beside token files; allowed is one kind or the other"):
        corpus(options(tmp_path / "a.npy", tmp_path / "b.txt"))
    np.save(tmp_path / "c.npy", np.zeros(99, "u1"))
    with pytest.raises(InvalidInput, match="with token files; allowed is to leave it out"):
        corpus(options(tmp_path / "c.npy", tokenizer="a.json"))


# ---------------------------------------------------------------- tokenizers


@given(text=st.text(max_size=40))
def test_bytes_come_back(text: str) -> None:
    encoded = text.encode("utf-8", "surrogatepass")
    tokens = Bytes().encode(encoded).tolist()
    assert bytes(tokens) == encoded
    assert Bytes().decode([*tokens, Bytes.end]) == encoded.decode("utf-8", "backslashreplace")


def test_a_hugging_face_tokenizer(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {"<|endoftext|>": 0, "[UNK]": 1, "moves": 2, "chunks": 3, "memory": 4}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    found = tokenizer(str(tmp_path / "tokenizer.json"))
    assert (found.end, found.vocabulary) == (0, 5)
    assert found.encode(b"moves memory chunks never").tolist() == [2, 4, 3, 1]
    assert found.decode([2, 4, 0, 3]) == "moves memory chunks"
    (tmp_path / "a.txt").write_text("moves memory chunks " * 40, "utf-8")
    data = corpus(options(tmp_path / "a.txt", tokenizer=str(tmp_path / "tokenizer.json")))
    assert data.train[0][:4].tolist() == [2, 4, 3, 2]
    assert data.train[0][-1] == 0
    assert data.digest != corpus(options(tmp_path / "a.txt")).digest
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InvalidInput, match=r"--tokenizer: cannot read .*allowed is bytes, or a Hugging Face"):
        tokenizer(str(tmp_path / "tokenizer.json"))
