"""Samples: what of them is trained, how they share sequences, and which side of the data they are on."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("transformers", reason="transformers is not installed")

from _trainer import TINY, numbers, rows
from _transformers_folder import (
    MARKED,
    PAIRS,
    TALKS,
    TEMPLATE,
    save_lines,
    save_model,
    save_tokenizer,
)
from ps_core import InvalidInput
from ps_models.train import TrainOptions, main
from ps_models.train._data import FEW, corpus, split_whole
from ps_models.train._examples import Example, document_of, key_of
from ps_models.train._folder_tokenizer import FolderTokenizer
from ps_models.train._sample_objective import SampleObjective, SampleRows
from ps_models.train._tokenizers import Bytes
from ps_models.train._training_samples import Samples, encoded, packed

Capture = pytest.CaptureFixture[str]


def tokenizer_of(folder: Path, **how: Any) -> FolderTokenizer:
    save_tokenizer(folder, **how)
    return FolderTokenizer(folder, "--tokenizer")


def trained_text(chosen: Any, document: Any) -> list[str]:
    """The text of a document, and the pieces of it that are trained, without what decoding leaves out."""
    ids, trained = encoded(document, chosen)
    pieces: list[list[int]] = []
    for before, token, counts in zip([False, *trained], ids, trained, strict=False):
        if counts and not before:
            pieces.append([])
        if counts:
            pieces[-1].append(token)
    decode = chosen.decode if isinstance(chosen, Bytes) else chosen.tokenizer.decode
    return [decode(ids), *map(decode, pieces)]


# ---------------------------------------------------------------- what is trained


def test_of_a_prompt_and_its_completion_the_completion_and_the_end_are_trained(tmp_path: Path) -> None:
    document = Example(place="here", prompt="2 and 2? ", completion="4!")
    assert trained_text(tokenizer_of(tmp_path), document) == ["2 and 2? 4!</s>", "4!</s>"]
    starting = tokenizer_of(tmp_path, starts=True)
    assert starting.start == (0,)
    assert trained_text(starting, document) == ["<s>2 and 2? 4!</s>", "4!</s>"]
    ids, trained = encoded(document, Bytes())
    assert (bytes(ids[:-1]), ids[-1], trained) == (b"2 and 2? 4!", Bytes.end, [False] * 9 + [True] * 3)


def test_texts_begin_as_the_tokenizer_begins_them(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, starts=True)
    lines = save_lines(tmp_path / "a.jsonl", [{"text": "ab"}, {"text": "c"}])
    options = TrainOptions(data=(str(lines),), eval_data=(str(lines),), seq=2, tokenizer=str(tmp_path))
    run = corpus(options).train[0][:].tolist()
    assert [run[at] for at in (0, 3, 4, 6)] == [0, 1, 0, 1]
    assert FolderTokenizer(tmp_path, "--tokenizer").decode(run) == "abc"


@pytest.mark.parametrize("template", [TEMPLATE, MARKED], ids=["plain", "marked"])
def test_half_a_character_in_a_conversation_is_replaced(tmp_path: Path, template: str) -> None:
    halves = [{"role": "user", "content": "a\ud800"}, {"role": "assistant", "content": "b\udfff"}]
    _, answer = trained_text(tokenizer_of(tmp_path, template=template), Example(place="here", messages=tuple(halves)))
    assert answer.startswith("b\N{REPLACEMENT CHARACTER}")


@pytest.mark.parametrize("template", [TEMPLATE, MARKED], ids=["plain", "marked"])
def test_parts_are_refused_where_the_template_takes_texts(tmp_path: Path, template: str) -> None:
    parts = [{"role": "user", "content": "a"}, {"role": "assistant", "content": [{"type": "text", "text": "b"}]}]
    document = Example(place="line 1", messages=tuple(parts))
    with pytest.raises(InvalidInput, match="line 1: the chat template takes no parts for the content of message 2"):
        encoded(document, tokenizer_of(tmp_path, template=template))
    takes = template.replace("{{ message['content'] }}", "{{ message['content'][0].text or message['content'] }}")
    assert trained_text(tokenizer_of(tmp_path, template=takes), document)[1].startswith("b<end>")


TALK = Example(place="here", messages=tuple(TALKS[7]["messages"]))
WHOLE = "<|user|>say 7<end>\n<|assistant|>7<end>\n<|user|>more<end>\n<|assistant|>7 7<end>\n"


def test_of_a_conversation_the_answers_are_trained(tmp_path: Path) -> None:
    plain = trained_text(tokenizer_of(tmp_path, template=TEMPLATE), TALK)
    assert plain == [WHOLE, "7<end>\n", "7 7<end>\n"]
    marked = trained_text(tokenizer_of(tmp_path, template=MARKED), TALK)
    assert marked == [WHOLE, "7<end>", "7 7<end>"]


TOOLS = "{% if tools %}<tools {{ tools[0].name }} {{ mood }}>{% endif %}"


def test_of_a_prompt_and_a_completion_that_are_messages_all_of_the_completion_is_trained(tmp_path: Path) -> None:
    """As TRL has them: answers within the prompt are not trained, also where the template marks answers."""
    talk = TALKS[7]["messages"]
    line = {"prompt": talk[:3], "completion": talk[3:]}
    for template in (TEMPLATE, MARKED):
        found = trained_text(tokenizer_of(tmp_path, template=template), document_of(line, "here", ""))
        assert found == [WHOLE, "7 7<end>\n"]
    assert key_of(document_of(line, "here", "")) != key_of(TALK)


def test_conversations_by_other_names_are_the_same(tmp_path: Path) -> None:
    named = [{"from": each["role"], "value": each["content"], "weight": None} for each in TALKS[7]["messages"]]
    document = document_of({"conversations": named, "tools": None}, "here", "")
    assert key_of(document) == key_of(TALK)


def test_tools_and_other_values_go_to_the_template(tmp_path: Path) -> None:
    chosen = tokenizer_of(tmp_path, template=TOOLS + TEMPLATE)
    tools = [{"name": "add"}]
    for told in (tools, json.dumps(tools)):
        line = {**TALKS[7], "tools": told, "chat_template_kwargs": {"mood": "calm"}}
        assert trained_text(chosen, document_of(line, "here", "")) == [
            "<tools add calm>" + WHOLE,
            "7<end>\n",
            "7 7<end>\n",
        ]
    with pytest.raises(InvalidInput, match=r'here: allowed are a list under "tools"'):
        document_of({**TALKS[7], "tools": "add"}, "here", "")


REWRITES = (
    "{% for message in messages %}<|{{ message['role'] }}|>"
    "{{ message['content'] if loop.last else message['content'] | upper }}<end>{% endfor %}"
)
WRONG_TALKS = {
    "no template": (None, TALKS[0], "the tokenizer has no chat template; allowed is one with a template"),
    "refused": ("{{ raise_exception('no such role') }}", TALKS[0], "the chat template refuses it: no such role"),
    "rewritten": (REWRITES, TALKS[0], "the chat template writes message 2 otherwise once others follow"),
    "no answer": (TEMPLATE, {"messages": [{"role": "user", "content": "?"}]}, 'has nothing of the role "assistant"'),
    "no role": (TEMPLATE, {"messages": [{"content": "?"}]}, 'message 1 is no object with "role" and "content"'),
    "no list": (TEMPLATE, {"messages": "hello"}, 'has nothing of the role "assistant"'),
    "one of two": (TEMPLATE, {"prompt": "a"}, 'has a "prompt" or a "completion" that is no text, or lacks one'),
    "a number": (TEMPLATE, {"prompt": "a", "completion": 3}, 'has a "prompt" or a "completion" that is no text'),
    "half a list": (TEMPLATE, {"prompt": [], "completion": []}, "allowed are two texts, or two lists of messages"),
    "neither": (TEMPLATE, {"question": "a"}, """is '{"question": "a"}'; allowed is a JSON text, or an object with"""),
}


@pytest.mark.parametrize("case", WRONG_TALKS)
def test_what_cannot_be_used_is_named_with_its_file_and_line(case: str, tmp_path: Path) -> None:
    template, row, told = WRONG_TALKS[case]
    save_tokenizer(tmp_path / "tokenizer", template=template)
    good = {"prompt": "a", "completion": "b"}
    lines = save_lines(tmp_path / "a.jsonl", [good, row])
    for option in ("data", "eval_data"):
        paths = {"data": (str(save_lines(tmp_path / "good.jsonl", [good])),), option: (str(lines),)}
        with pytest.raises(InvalidInput) as raised:
            corpus(TrainOptions(**paths, tokenizer=str(tmp_path / "tokenizer")))  # type: ignore[arg-type]
        said = " ".join(str(raised.value).split())
        assert said.startswith(f"--{option.replace('_', '-')}: line 2 of {str(lines)!r}")
        assert told in said


def test_bytes_have_no_chat_template(tmp_path: Path) -> None:
    lines = save_lines(tmp_path / "a.jsonl", TALKS)
    with pytest.raises(InvalidInput, match=r"line 1 of .*conversations need a chat template, which this tokenizer"):
        corpus(TrainOptions(data=(str(lines),)))


def test_long_samples_are_cut_and_those_without_an_answer_left_out(tmp_path: Path) -> None:
    rows = [
        {"prompt": "12", "completion": "345"},
        {"prompt": "12", "completion": "3"},
        {"prompt": "1234", "completion": "5"},
    ]
    lines = save_lines(tmp_path / "a.jsonl", rows)
    found = corpus(TrainOptions(data=(str(lines),), eval_data=(str(lines),), seq=4))
    assert found.samples is not None
    samples = found.samples[0]
    assert [samples[index][0].tolist() for index in range(len(samples))] == [[49, 50, 51, 52], [49, 50, 51, 256]]
    assert [samples[index][1].tolist() for index in range(len(samples))] == [
        [-100, -100, 51, 52],
        [-100, -100, 51, 256],
    ]
    told = f"{lines}, {lines}: 2 samples of 8 tokens, 4 of which are trained; 2 samples to validate with"
    assert found.told == f"{told}; 2 longer than 4 tokens were cut; 2 left out, with no answer in their first 4 tokens"


# ---------------------------------------------------------------- rows


@given(lengths=st.lists(st.integers(1, 12), max_size=60), room=st.integers(12, 30))
def test_samples_share_rows_that_have_room(lengths: list[int], room: int) -> None:
    found = packed(lengths, room)
    assert sorted(index for row in found for index in row) == list(range(len(lengths)))
    used = sorted(sum(lengths[index] for index in row) for row in found)
    assert all(0 < each <= room for each in used)
    assert all(one + other > room for one, other in pairwise(used)), "no two rows fit into one"


def samples_of(count: int, length: int) -> Samples:
    documents = [Example(place="", prompt="p" * (n % 3), completion=chr(65 + n) * (1 + n % 4)) for n in range(count)]
    return Samples(documents, Bytes(), length)


@pytest.mark.parametrize("pack", [False, True])
def test_an_epoch_takes_every_sample_once_and_positions_are_all_there_is(pack: bool) -> None:
    samples = samples_of(25, 16)
    options = TrainOptions(seq=16, seed=3, pack=False)
    object.__setattr__(options, "pack", pack)  # which the options refuse without --hf
    whole = SampleRows(samples, options, Bytes.end)
    count = len(whole)
    assert (count < 15) is pack
    first, second = whole.batch(0, count), whole.batch(count, count)
    for epoch in (first, second):
        trained = epoch["input_ids"][epoch["labels"] >= 0].tolist()
        assert sorted(trained) == sorted(
            token for index in range(25) for token in samples[index][1].tolist() if token >= 0
        )
        assert len(trained) == whole.counted(0, count)
    assert not torch.equal(first["input_ids"], second["input_ids"])
    fresh = SampleRows(samples, options, Bytes.end)
    for position in (count + 3, 2, count - 1):
        again, expected = fresh.batch(position, 2), SampleRows(samples, options, Bytes.end).batch(position, 2)
        assert all(torch.equal(again[name], expected[name]) for name in expected)
        assert fresh.counted(position, 2) == int((again["labels"] >= 0).sum())
    assert ("position_ids" in first) is pack


def test_positions_begin_anew_with_each_sample_and_with_the_filling(tmp_path: Path) -> None:
    options = TrainOptions(hf=str(tmp_path), seq=16, pack=True)
    row = SampleRows(samples_of(3, 16), options, Bytes.end).rows([0])
    assert row["input_ids"].tolist() == [[112, 112, 67, 67, 67, 256, 112, 66, 66, 256, 65, 256, 256, 256, 256, 256]]
    assert row["position_ids"].tolist() == [[0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 0, 1, 0, 1, 2, 3]]
    assert (row["labels"][0] >= 0).int().tolist() == [0, 0, 1, 1, 1, 1, 0, 1, 1, 1, 0, 1, 0, 0, 0, 0]


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral"])
def test_a_packed_row_is_its_samples_one_by_one(kind: str, tmp_path: Path) -> None:
    """The mean of the losses of samples alone, without any filling, to rounding."""
    model = save_model(tmp_path, kind)
    save_tokenizer(tmp_path)
    lines = save_lines(tmp_path / "a.jsonl", PAIRS[:6])
    options = TrainOptions(hf=str(tmp_path), data=(str(lines),), eval_data=(str(lines),), seq=64, pack=True)
    data = corpus(options)
    assert data.samples is not None
    samples, total, count = data.samples[0], 0.0, 0
    with torch.no_grad():
        for index in range(len(samples)):
            ids, labels = samples[index]
            counted = int((labels >= 0).sum())
            total += model(input_ids=ids[None], labels=labels[None]).loss.item() * counted
            count += counted
        objective = SampleObjective(options, data)
        rows_count = -(-sum(samples.length(index) for index in range(6)) // 64)
        batch = objective.batch(0, rows_count)
        assert objective.counted(0, rows_count) == count
        model.config.use_cache = False  # with a cache, transformers does not look at positions
        found = model(**batch).loss.item()
        spoilt = model(**{name: each for name, each in batch.items() if name != "position_ids"}).loss.item()
    assert found == pytest.approx(total / count, rel=1e-6)
    assert abs(spoilt - found) > 1e-4 * found, "without positions samples see each other"


def test_a_model_that_cannot_tell_samples_apart_is_refused(tmp_path: Path, capsys: Capture) -> None:
    save_model(tmp_path / "mamba", "mamba")
    save_tokenizer(tmp_path / "mamba")
    lines = save_lines(tmp_path / "a.jsonl", PAIRS)
    command = ["--hf", str(tmp_path / "mamba"), "--data", str(lines), "--pack", "--seq", "40", "--steps", "1"]
    assert main([*command, "--out", str(tmp_path / "run"), "--sample", "0"]) == 2
    assert "--pack: found with a model that does not tell the samples of a sequence apart" in capsys.readouterr().err


# ---------------------------------------------------------------- validation


def test_samples_are_held_back_as_a_whole() -> None:
    documents = [Example(place=str(n), prompt=str(n), completion="x") for n in range(400)]
    train, held = split_whole(documents, 0.2)
    assert not set(train) & set(held)
    assert 50 < len(held) < 110
    again, apart = split_whole(documents[::-1][:200], 0.2)
    assert set(again) <= set(train)
    assert set(apart) <= set(held)
    few = documents[: FEW - 1]
    assert split_whole(few, 0.05) == (few[:-1], few[-1:])


def test_data_for_validation_only(tmp_path: Path, capsys: Capture) -> None:
    """All of the data is trained on, and the validation's loss is that of the other file."""
    pairs, talks = save_lines(tmp_path / "a.jsonl", PAIRS), save_lines(tmp_path / "b.jsonl", PAIRS[:3])
    words = [*TINY, "--seq", "32", "--steps", "2", "--data", str(pairs), "--out", str(tmp_path / "run")]
    assert main([*words, "--eval-data", str(talks)]) == 0
    assert "40 samples of " in (told := capsys.readouterr().out)
    assert "; 3 samples to validate with" in told
    assert main([*words, "--out", str(tmp_path / "other"), "--eval-data", str(pairs)]) == 0
    one, other = rows(tmp_path / "run"), rows(tmp_path / "other")
    assert [row["loss"] for row in one] == [row["loss"] for row in other]
    assert one[-1]["val_loss"] != other[-1]["val_loss"]
    assert main([*words, "--steps", "3"]) == 2
    assert "holds another run: --data other there than now" in capsys.readouterr().err


@pytest.mark.parametrize("ending", ["txt", "bin"])
def test_texts_and_token_files_for_validation_only(ending: str, tmp_path: Path) -> None:
    paths = [tmp_path / f"{name}.{ending}" for name in "ab"]
    for path, number in zip(paths, (1, 2), strict=True):
        path.write_bytes(bytes([number, 0]) * 40)
    found = corpus(TrainOptions(data=(str(paths[0]),), eval_data=(str(paths[1]),), seq=4))
    train, held = (
        {int(token) for run in side for token in run[:]} - {0, 256} for side in (found.train, found.validation)
    )
    assert (train, held) == ({1}, {2})
    assert sum(map(len, found.train)) == sum(map(len, found.validation)) == (81 if ending == "txt" else 40)
    alone = corpus(TrainOptions(data=(str(paths[0]),), seq=4, validation=0.4))
    assert alone.digest != found.digest


def test_named_models_learn_answers_too(tmp_path: Path) -> None:
    """Each trained token counts the same, however a step is cut into micro-batches."""
    lines = save_lines(tmp_path / "a.jsonl", PAIRS)
    words = [*TINY, "--seq", "32", "--steps", "3", "--data", str(lines), "--precision", "fp32", "--lr", "1e-2"]
    assert main([*words, "--batch", "4", "--out", str(tmp_path / "one")]) == 0
    assert main([*words, "--batch", "2", "--accumulate", "2", "--out", str(tmp_path / "two")]) == 0
    for one, other in zip(numbers(tmp_path / "one"), numbers(tmp_path / "two"), strict=True):
        assert one[1] == pytest.approx(other[1], rel=1e-5)
    save_tokenizer(tmp_path / "tokenizer")
    words[words.index(str(lines))] = str(save_lines(tmp_path / "talks.jsonl", TALKS))
    assert main([*words, "--tokenizer", str(tmp_path / "tokenizer"), "--out", str(tmp_path / "talks")]) == 0


def test_a_bert_refuses_samples(tmp_path: Path, capsys: Capture) -> None:
    lines = save_lines(tmp_path / "a.jsonl", PAIRS)
    assert main([*TINY, "--model", "bert-2x32", "--seq", "32", "--data", str(lines), "--out", str(tmp_path / "r")]) == 2
    assert "--data: found prompts with completions, or conversations, with --model bert-2x32" in capsys.readouterr().err


def test_tables_need_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1")
    with pytest.raises(
        InvalidInput, match=r"--data: .*a\.parquet' needs the package datasets; .* pip install datasets"
    ):
        corpus(TrainOptions(data=(str(path),)))


def test_a_line_that_is_not_json_is_named_too(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(PAIRS[0]) + "\n{'prompt': 3}\n", "utf-8")
    with pytest.raises(InvalidInput, match=r"--data: line 2 of .*a\.jsonl' is \"\{'prompt': 3\}"):
        corpus(TrainOptions(data=(str(path),)))
