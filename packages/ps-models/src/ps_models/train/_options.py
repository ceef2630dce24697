"""Every option of ``pstar-train``: one dataclass, from which command line, TOML file and documentation are made.

[Note: what a run is]
Options marked ``identity`` say which training a run is: with another value its numbers would be those of another run,
so a run is resumed only if they are the same. The others say where it runs, how long, and what is told about it.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any

from ps_core._errors import InvalidInput
from ps_core._installing import how_to_install
from ps_core._names import did_you_mean
from ps_models.train import _option_rules as rules

COMMAND = "pstar-train"


def _option(default: Any, rule: rules.OptionRule, section: str, what: str, *, identity: bool = False) -> Any:
    """Make a field of `TrainOptions`; `Any`, as `dataclasses.field` itself is for a type checker."""
    return field(default=default, metadata={"rule": rule, "section": section, "what": what, "identity": identity})


MODEL, PLACE, DATA, TRAINING, WATCHING, SAVING = "Model", "Where", "Data", "Training", "Watching", "Saving"


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Everything that ``pstar-train`` can be told."""

    model: str = _option(
        "gpt-10m",
        rules.text("NAME"),
        MODEL,
        "a named size, or gpt-LAYERSxHIDDEN or bert-LAYERSxHIDDEN, as for `pstar plan`",
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
        "bf16", rules.one_of("bf16", "fp16", "fp32"), MODEL, "what is computed in; masters are fp32", identity=True
    )
    checkpointing: bool = _option(True, rules.flag(), MODEL, "keep only every block's input, recompute the rest")
    offload_checkpoints: bool = _option(
        False, rules.flag(), MODEL, "and keep that in the computer's memory between forward and backward"
    )
    untied_head: bool = _option(
        False, rules.flag(), MODEL, "a head of its own, where the model's is its token table", identity=True
    )
    cpu_embedding: bool = _option(
        False, rules.flag(), MODEL, "look tokens up in the computer's memory, where their table stays"
    )
    head_tiles: int = _option(
        1, rules.whole(1, 2**16), MODEL, "pieces of a head of its own, each moved by itself", identity=True
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
        None, rules.size(), PLACE, "the computer's budget (default: what is available, less a tenth)"
    )
    disk: str | int | None = _option(None, rules.size(), PLACE, "disk space for a third tier (default: none)")
    disk_dir: str | None = _option(None, rules.text("DIR"), PLACE, "where that is (default: `OUT/disk`)")
    threads: int | None = _option(None, rules.whole(1, 1024), PLACE, "of the CPU (default: PyTorch's choice)")

    data: tuple[str, ...] = _option(
        (),
        rules.texts("PATH"),
        DATA,
        "text, JSON lines (`.jsonl`), token files (`.bin`, `.npy`), or folders of text "
        "(default: the source of Python's standard library here)",
    )
    tokenizer: str = _option(
        "bytes", rules.text("FILE"), DATA, "`bytes`, or a Hugging Face `tokenizer.json`", identity=True
    )
    mask_token: int | None = _option(
        None,
        rules.whole(0),
        DATA,
        "what hides a token from a BERT (default: the tokenizer's; needed with token files)",
        identity=True,
    )
    validation: float = _option(
        0.05, rules.number(0, 0.5, above=True), DATA, "the part of the data that is never trained on", identity=True
    )
    seq: int = _option(256, rules.whole(2), DATA, "tokens of a sequence", identity=True)
    batch: int = _option(8, rules.whole(1, 2**20), DATA, "sequences of a micro-batch", identity=True)
    accumulate: int = _option(1, rules.whole(1), DATA, "micro-batches of a step", identity=True)
    seed: int = _option(0, rules.whole(0), DATA, "of the weights, the order of the data, and the sample", identity=True)

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
    on_nan: str = _option(
        "stop", rules.one_of("stop", "continue"), TRAINING, "what to do when a loss is NaN or infinite"
    )

    patience: int | None = _option(
        None,
        rules.whole(1),
        TRAINING,
        "stop after so many validations in a row whose loss is not below the least so far (default: train all steps)",
    )

    eval_every: int = _option(100, rules.whole(0), WATCHING, "steps between validations; 0: only at the end")
    eval_batches: int = _option(8, rules.whole(1), WATCHING, "batches of a validation")
    log_every: int = _option(10, rules.whole(1), WATCHING, "steps between lines")
    log: str | None = _option(
        None, rules.one_of("tensorboard", "wandb"), WATCHING, "tell it too, where installed (default: neither)"
    )
    peak_tflops: float | None = _option(
        None, rules.number(0, above=True), WATCHING, "the device's, for MFU (default: known for some cards)"
    )
    sample: int = _option(200, rules.whole(0), WATCHING, "tokens of sample text at the end; 0: none")
    prompt: str = _option("def ", rules.text("TEXT", empty=True), WATCHING, "what the sample starts with")
    temperature: float = _option(0.8, rules.number(0), WATCHING, "of the sample; 0: the likeliest token each time")

    out: str = _option("pstar-run", rules.text("DIR"), SAVING, "the run's folder; a run that is there is resumed")
    checkpoint_every: int = _option(100, rules.whole(0), SAVING, "steps between checkpoints; 0: only at the end")
    keep: int = _option(2, rules.whole(1), SAVING, "how many checkpoints stay")
    keep_best: bool = _option(
        False, rules.flag(), SAVING, "also save, and keep, the checkpoint of the least validation loss"
    )

    def __post_init__(self) -> None:
        for row in fields(self):
            value, rule = getattr(self, row.name), rule_for(row)
            if not (value is None and row.default is None) and not rule.good(value):
                raise InvalidInput(refusal(row, value))
        self._check_together()

    def _check_together(self) -> None:
        if self.device == "cpu" and self.device_memory is not None:
            raise InvalidInput(
                f"--device-memory: found {self.device_memory!r} with --device cpu, which has --host-memory only; "
                "allowed with --device emulated, cuda or auto"
            )
        if self.device == "emulated" and self.device_memory is None:
            raise InvalidInput(
                "--device: found 'emulated' without --device-memory, which says how large the accelerator is to be"
            )
        if self.offload_checkpoints and not self.checkpointing:
            raise InvalidInput(
                "--offload-checkpoints: found with --no-checkpointing, which makes none; allowed without it"
            )
        if self.offload_checkpoints and self.disk is not None:
            raise InvalidInput(
                f"--offload-checkpoints: found with --disk {self.disk}, where the computer's memory is full already; "
                "allowed is one of them"
            )
        if self.patience is not None and not self.eval_every:
            raise InvalidInput(
                f"--patience: found {self.patience} with --eval-every 0, which validates at the end only; allowed "
                "with --eval-every of at least 1"
            )
        if self.disk_dir is not None and self.disk is None:
            raise InvalidInput(f"--disk-dir: found {self.disk_dir!r} without --disk, which says how much of it")

    @property
    def warmup_steps(self) -> int:
        """The number of warm-up steps, also where ``--warmup`` is not given."""
        return min(100, self.steps // 10) if self.warmup is None else self.warmup

    @property
    def tokens_per_step(self) -> int:
        """The tokens of all micro-batches of a step."""
        return self.batch * self.seq * self.accumulate

    @property
    def identity(self) -> dict[str, Any]:
        """The options that cannot change within a run; see [Note: what a run is]."""
        return {row.name: getattr(self, row.name) for row in fields(self) if row.metadata["identity"]}

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
    """Return an option as the command line has it."""
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


def from_file(path: Path) -> dict[str, Any]:
    """Return the options that a TOML file sets, or a YAML file by its ending; only their names are checked."""
    kind = "YAML" if path.suffix in (".yaml", ".yml") else "TOML"
    try:
        text = path.read_text("utf-8")
        return from_text(text, str(path)) if kind == "TOML" else _from_yaml(text, str(path))
    except InvalidInput:
        raise
    except (OSError, ValueError, RecursionError) as error:
        told = " ".join(str(error).split())
        raise InvalidInput(f"--config: cannot read {str(path)!r}: {told}; allowed is a {kind} file") from error


def _from_yaml(text: str, source: str) -> dict[str, Any]:
    try:
        import yaml
    except ImportError:
        raise InvalidInput(
            f"--config: {source!r} needs the package yaml; allowed without it is a TOML file; to have it: "
            f"{how_to_install('pyyaml')}"
        ) from None
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None
    if found is not None and not (isinstance(found, dict) and all(isinstance(key, str) for key in found)):
        raise InvalidInput(f"--config: {source!r} holds no options by name; allowed are lines like `batch: 8`")
    # YAML 1.1 takes 1e-3, which has no point, for a text.
    return _by_name(
        {key: _number(value) if isinstance(value, str) else value for key, value in (found or {}).items()}, source
    )


def _number(text: str) -> str | float:
    return float(text) if re.fullmatch(r"[-+]?\d+[eE][-+]?\d+", text) else text


def from_text(text: str, source: str) -> dict[str, Any]:
    """Return the options that the text of a TOML file sets; only their names are checked."""
    return _by_name(tomllib.loads(text), source)


def _by_name(given: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return the options under the names of the fields; `InvalidInput` for a name that is none or is there twice."""
    known = {row.name for row in fields(TrainOptions)}
    found = {}
    for key, value in given.items():
        name = key.replace("-", "_")
        if name not in known:
            raise InvalidInput(f"--config: {source!r} sets {key!r}, which is not an option; {nearest(key)}")
        if name in found:
            raise InvalidInput(f"--config: {source!r} sets {name!r} twice; allowed is once")
        found[name] = tuple(value) if isinstance(value, list) else value
    return found


def merged(config: Mapping[str, Any], line: Mapping[str, Any]) -> TrainOptions:
    """Return the file's options, replaced by the command line's."""
    return TrainOptions(**{**config, **line})


def nearest(name: str) -> str:
    """Return a hint at the option with the most similar name."""
    known = [row.name.replace("_", "-") for row in fields(TrainOptions)]
    return did_you_mean(name.lstrip("-").replace("_", "-"), known, f"{COMMAND} --help lists the options", most=1)


def table() -> str:
    """Return every option as Markdown, a table for each section."""
    return "\n".join(_tables())


def _tables() -> Iterator[str]:
    sections = dict.fromkeys(row.metadata["section"] for row in fields(TrainOptions))
    for section in sections:
        yield f"### {section}\n"
        yield "| option | default | what it says |\n|---|---|---|"
        for row in fields(TrainOptions):
            if row.metadata["section"] == section:
                yield f"| `{usage(row)}` | {_default(row)} | {row.metadata['what']} |"
        yield ""


def usage(row: Field[Any]) -> str:
    """Return an option and what follows it on the command line."""
    rule, name = rule_for(row), flag_of(row)
    if isinstance(row.default, bool):
        return f"{name}`, `--no-{name[2:]}"
    return f"{name} {rule.metavar}" + ("..." if rule.several else "")


def _default(row: Field[Any]) -> str:
    if isinstance(row.default, bool):
        return "yes" if row.default else "no"
    if row.default is None or row.default == ():
        return ""
    shown = f"{row.default:g}" if isinstance(row.default, float) else str(row.default)
    return f"`{shown}`"
