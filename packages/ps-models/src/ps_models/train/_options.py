"""Define every option of ``pstar-train`` in one dataclass, for command line, TOML file and documentation.

[Note: what a run is]
Options marked ``identity`` say which training a run is. With another value its numbers would be those of another run.
So a run is resumed only if they are the same. The other options say where it runs, how long, and what is reported.
"""

from __future__ import annotations

import json
from dataclasses import Field, dataclass, field, fields
from typing import Any

from ps_core._errors import InvalidInput
from ps_core._name_suggestions import did_you_mean
from ps_models.train import _option_rules as rules
from ps_models.train._option_conflicts import check_together

COMMAND = "pstar-train"


def _option(default: Any, rule: rules.OptionRule, section: str, what: str, *, identity: bool = False) -> Any:
    """Make a field of `TrainOptions`; `Any`, as `dataclasses.field` itself is for a type checker."""
    return field(default=default, metadata={"rule": rule, "section": section, "what": what, "identity": identity})


MODEL, PLACE, DATA, TRAINING, WATCHING, SAVING = "Model", "Hardware", "Data", "Training", "Watching", "Saving"


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """All options of ``pstar-train``."""

    model: str = _option(
        "gpt-10m",
        rules.text("NAME"),
        MODEL,
        "a named size, or gpt-LAYERSxHIDDEN or bert-LAYERSxHIDDEN, as for `pstar plan`",
        identity=True,
    )
    hf: str | None = _option(
        None,
        rules.text("DIR"),
        MODEL,
        "in place of `--model`: a folder with a causal language model of transformers (`config.json`, safetensors, "
        "tokenizer), which is trained further",
        identity=True,
    )
    lora: int | None = _option(
        None, rules.whole(1, 2**16), MODEL, "train adapters of this rank (LoRA) in place of the weights", identity=True
    )
    lora_targets: tuple[str, ...] = _option(
        (),
        rules.texts("NAME"),
        MODEL,
        "modules that get adapters, or `all-linear` (default: PEFT's choice for the model)",
        identity=True,
    )
    lora_alpha: float | None = _option(
        None,
        rules.number(0, above=True),
        MODEL,
        "scale adapters by this, divided by their rank (default: twice the rank)",
        identity=True,
    )
    chunked_loss: bool = _option(
        False,
        rules.flag(),
        MODEL,
        "with `--hf`: compute the logits of 1,024 tokens at a time, not all at once",
        identity=True,
    )
    vocab: int | None = _option(
        None,
        rules.whole(2, 2**31),
        MODEL,
        "tokens the model knows (default: the tokenizer's; with token files the model's own)",
        identity=True,
    )
    precision: str = _option(
        "bf16", rules.one_of("bf16", "fp16", "fp32"), MODEL, "of the computation; masters are fp32", identity=True
    )
    keep_fp32: tuple[str, ...] = _option(
        (),
        rules.texts("PATTERN"),
        MODEL,
        "patterns of names of parameters (`'*lora_*'`) to keep in fp32; the model must be able to compute with them "
        "(default: none)",
        identity=True,
    )
    checkpointing: bool = _option(True, rules.flag(), MODEL, "activation checkpointing: keep only each block's input")
    offload_checkpoints: bool = _option(
        False, rules.flag(), MODEL, "keep these inputs in host memory between forward and backward"
    )
    untied_head: bool = _option(False, rules.flag(), MODEL, "give the model a head of its own", identity=True)
    cpu_embedding: bool = _option(
        False, rules.flag(), MODEL, "keep the token table in host memory and look tokens up there"
    )
    head_tiles: int = _option(
        1, rules.whole(1, 2**16), MODEL, "pieces of an untied head, each moved by itself", identity=True
    )

    device: str = _option(
        "auto",
        rules.one_of("auto", "cpu", "emulated", "cuda"),
        PLACE,
        "`auto`: a CUDA device if there is one, else `emulated` if `--device-memory` is given, else `cpu`",
    )
    device_memory: str | int | None = _option(
        None, rules.size(), PLACE, "the accelerator's budget (default: what is free on it, less a tenth)"
    )
    host_memory: str | int | None = _option(
        None, rules.size(), PLACE, "the host's budget (default: what is available, less a tenth)"
    )
    disk: str | int | None = _option(None, rules.size(), PLACE, "disk space for a third tier (default: none)")
    disk_dir: str | None = _option(None, rules.text("DIR"), PLACE, "folder of that disk space (default: `OUT/disk`)")
    threads: int | None = _option(None, rules.whole(1, 1024), PLACE, "CPU threads (default: PyTorch's choice)")

    data: tuple[str, ...] = _option(
        (),
        rules.texts("PATH"),
        DATA,
        "text, JSON lines (`.jsonl`), tables (`.parquet`, `.arrow`), token files (`.bin`, `.npy`), or folders of these "
        "but token files (default: the source of Python's standard library here)",
    )
    eval_data: tuple[str, ...] = _option(
        (), rules.texts("PATH"), DATA, "likewise, for validation only (default: the part `--validation` of the data)"
    )
    tokenizer: str = _option(
        "bytes",
        rules.text("FILE"),
        DATA,
        "`bytes`, a Hugging Face `tokenizer.json`, or a folder with a tokenizer of transformers (default with `--hf`: "
        "the model's)",
        identity=True,
    )
    pack: bool = _option(
        False,
        rules.flag(),
        DATA,
        "put several short samples into a sequence; none attends to another",
        identity=True,
    )
    mask_token: int | None = _option(
        None,
        rules.whole(0),
        DATA,
        "number of a BERT's mask token (default: the tokenizer's; needed with token files)",
        identity=True,
    )
    validation: float = _option(
        0.05, rules.number(0, 0.5, above=True), DATA, "the part of the data that is never trained on", identity=True
    )
    seq: int = _option(256, rules.whole(2), DATA, "tokens of a sequence", identity=True)
    batch: int = _option(8, rules.whole(1, 2**20), DATA, "sequences per micro-batch, of all processes", identity=True)
    accumulate: int = _option(1, rules.whole(1), DATA, "micro-batches per step", identity=True)
    seed: int = _option(0, rules.SEED, DATA, "of the weights, the order of the data, and the sample", identity=True)

    steps: int = _option(200, rules.whole(1), TRAINING, "optimizer steps in all, those of earlier calls included")
    lr: float = _option(1e-3, rules.number(0), TRAINING, "AdamW's learning rate after the warm-up")
    schedule: str = _option(
        "cosine", rules.one_of("cosine", "constant", "linear"), TRAINING, "how the rate falls after the warm-up"
    )
    warmup: int | None = _option(
        None, rules.whole(0), TRAINING, "steps of linear warm-up (default: a tenth of all, at most 100)"
    )
    final_lr: float = _option(0.1, rules.number(0, 1), TRAINING, "the part of `--lr` that `--schedule` ends at")
    weight_decay: float = _option(0.1, rules.number(0), TRAINING, "decoupled weight decay")
    decay: str = _option("matrices", rules.one_of("matrices", "all"), TRAINING, "which parameters decay")
    beta1: float = _option(0.9, rules.number(0, 1, below=True), TRAINING, "of AdamW")
    beta2: float = _option(0.95, rules.number(0, 1, below=True), TRAINING, "of AdamW")
    eps: float = _option(1e-8, rules.number(0, above=True), TRAINING, "of AdamW")
    clip: float = _option(1.0, rules.number(0), TRAINING, "largest global gradient norm; 0: not clipped")
    step_speculative: bool = _option(
        False,
        rules.flag(),
        TRAINING,
        "step parameters while backward goes on, and undo that where gradients must be clipped: faster on a GPU if "
        "few steps are undone, with the same results",
    )
    on_nan: str = _option(
        "stop", rules.one_of("stop", "continue"), TRAINING, "what to do when a loss is NaN or infinite"
    )

    patience: int | None = _option(
        None,
        rules.whole(1),
        TRAINING,
        "stop after this many validations in a row without a new least loss (default: train all steps)",
    )

    eval_every: int = _option(100, rules.whole(0), WATCHING, "steps between validations; 0: only at the end")
    eval_batches: int = _option(8, rules.whole(1), WATCHING, "batches of a validation")
    log_every: int = _option(10, rules.whole(1), WATCHING, "steps between printed lines")
    log: str | None = _option(
        None, rules.one_of("tensorboard", "wandb"), WATCHING, "also log there; must be installed (default: neither)"
    )
    peak_tflops: float | None = _option(
        None, rules.number(0, above=True), WATCHING, "peak of the device, for MFU (default: known for some GPUs)"
    )
    sample: int = _option(200, rules.whole(0), WATCHING, "tokens of sample text at the end; 0: none")
    prompt: str = _option("def ", rules.text("TEXT", empty=True), WATCHING, "what the sample starts with")
    temperature: float = _option(0.8, rules.number(0), WATCHING, "of the sample; 0: the likeliest token each time")

    out: str = _option("pstar-run", rules.text("DIR"), SAVING, "the run's folder; a run in it is resumed")
    checkpoint_every: int = _option(100, rules.whole(0), SAVING, "steps between checkpoints; 0: only at the end")
    keep: int = _option(2, rules.whole(1), SAVING, "how many checkpoints to keep")
    keep_best: bool = _option(
        False, rules.flag(), SAVING, "also save and keep the checkpoint with the least validation loss"
    )
    lora_merge: bool = _option(
        False, rules.flag(), SAVING, "export the whole model with the adapters merged, not the adapters"
    )

    def __post_init__(self) -> None:
        for row in fields(self):
            value, rule = getattr(self, row.name), rule_for(row)
            if not (value is None and row.default is None) and not rule.good(value):
                raise InvalidInput(refusal(row, value))
        check_together(self)

    @property
    def warmup_steps(self) -> int:
        """Return the number of warm-up steps, even if ``--warmup`` is not given."""
        return min(100, self.steps // 10) if self.warmup is None else self.warmup

    @property
    def tokens_per_step(self) -> int:
        """Return the tokens of all micro-batches of a step."""
        return self.batch * self.seq * self.accumulate

    @property
    def identity(self) -> dict[str, Any]:
        """Return the options that cannot change within a run, for JSON; see [Note: what a run is]."""
        values = {row.name: getattr(self, row.name) for row in fields(self) if row.metadata["identity"]}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    def to_toml(self) -> str:
        """Return the text of a file for ``--config`` with these options."""
        rows = ((row.name, getattr(self, row.name)) for row in fields(self))
        return "".join(f"{name} = {_toml(value)}\n" for name, value in rows if value is not None)


def _toml(value: object) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml(each) for each in value) + "]"
    # JSON writes texts, numbers and truth as TOML does, but for this one control character.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def rule_for(row: Field[Any]) -> rules.OptionRule:
    """Return which values an option may have."""
    rule: rules.OptionRule = row.metadata["rule"]
    return rule


def flag_of(row: Field[Any] | str) -> str:
    """Return an option's name on the command line."""
    return "--" + (row if isinstance(row, str) else row.name).replace("_", "-")


def refusal(row: Field[Any], value: object) -> str:
    """Return one line with the option, the value and what is allowed."""
    shown = list(value) if isinstance(value, tuple) else value
    return f"{flag_of(row)}: found {shown!r}, allowed is {rule_for(row).allowed}"


def read(row: Field[Any], words: str | list[str]) -> Any:
    """Return an option's value from the texts of the command line."""
    rule = rule_for(row)
    try:
        return tuple(map(rule.read, words)) if isinstance(words, list) else rule.read(words)
    except ValueError:
        raise InvalidInput(refusal(row, words)) from None


def nearest(name: str) -> str:
    """Return a hint at the option with the most similar name."""
    known = [row.name.replace("_", "-") for row in fields(TrainOptions)]
    return did_you_mean(name.lstrip("-").replace("_", "-"), known, f"{COMMAND} --help lists the options", most=1)
