"""``pstar-train --data`` learns of TRL's data what TRL's own SFTTrainer learns: the same tokens, the same labels."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

trl = pytest.importorskip("trl", reason="trl is not installed")
datasets = pytest.importorskip("datasets", reason="datasets is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from _hugging_face import llama
from ps_models.train import TrainOptions
from ps_models.train._data import corpus

pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries' own dependencies
TEMPLATE = (
    "{% if tools %}<tools {{ tools[0].name }} {{ mood }}>{% endif %}{% for message in messages %}"
    "<{{ message['role'] }}>{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}<end>{% endgeneration %}{% else %}{{ message['content'] }}<end>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
TALK = [
    {"role": "user", "content": "add 2 and 2"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "and 3"},
    {"role": "assistant", "content": "7"},
]
TOOLS = {"tools": [{"name": "add"}], "chat_template_kwargs": {"mood": "calm"}}
LINES = {
    "prompt and completion": {"prompt": TALK[:3], "completion": TALK[3:]},
    "a completion of several messages": {"prompt": TALK[:1], "completion": TALK[1:], **TOOLS},
    "messages": {"messages": TALK, **TOOLS},
    "conversations": {"conversations": [{"from": each["role"], "value": each["content"]} for each in TALK]},
}


def tokenizer(folder: Path) -> Any:
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    signs = ["p", "</s>", *"abcdefghijklmnopqrstuvwxyz0123456789 <>/"]
    made = Tokenizer(models.WordLevel({sign: index for index, sign in enumerate(signs)}, unk_token="p"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    found = transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="p", eos_token="</s>")
    found.chat_template = TEMPLATE
    found.save_pretrained(folder)
    return found


@pytest.mark.parametrize("line", LINES)
def test_the_tokens_and_labels_of_trl(line: str, tmp_path: Path) -> None:
    chosen = tokenizer(tmp_path / "tokenizer")
    lines = tmp_path / "a.jsonl"
    lines.write_text(json.dumps(LINES[line]) + "\n", "utf-8")
    converted = tmp_path / "converted.jsonl"
    converted.write_text(json.dumps(trl.maybe_convert_to_chatml(deepcopy(LINES[line]))) + "\n", "utf-8")
    rows = datasets.load_dataset("json", data_files=str(converted), split="train", streaming=True)
    arguments = trl.SFTConfig(
        output_dir=str(tmp_path / "out"), report_to=[], use_cpu=True, bf16=False, max_length=None, max_steps=1,
        assistant_only_loss="prompt" not in LINES[line],
    )  # fmt: skip
    trainer = trl.SFTTrainer(llama(), arguments, train_dataset=rows, processing_class=chosen)
    (expected,) = list(trainer.train_dataset)
    labels = expected["labels"]
    given = (str(lines),)
    found = corpus(TrainOptions(data=given, eval_data=given, seq=512, tokenizer=str(tmp_path / "tokenizer"))).samples
    assert found is not None
    ids, answers = (part.tolist() for part in found[0][0])
    assert ids == expected["input_ids"]
    assert answers == labels
    assert 0 < sum(label != -100 for label in labels) < len(labels)
