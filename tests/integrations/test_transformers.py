"""`ps_core.integrations.transformers` against the Trainer itself, at the same seeds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from _hugging_face import llama, row
from ps_core import Budget, DoesNotFit, InvalidInput, Options
from ps_core.engine import chunked, release, statistics

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="Trainer needs accelerate")

from ps_core.integrations.transformers import (
    ChunkedTrainer,
    ChunkedTrainingArguments,
    ManagedArguments,
    ManagedTrainerMixin,
)

STEPS = 6
BUDGET = {"managed_device": "emulated", "device_memory": "320000", "host_memory": "64MiB"}
COMMON = {
    "max_steps": STEPS,
    "per_device_train_batch_size": 2,
    "logging_steps": 1,
    "seed": 3,
    "learning_rate": 0.01,
    "report_to": [],
    "use_cpu": True,
    "save_strategy": "no",
    "disable_tqdm": True,
    "warmup_steps": 2,
    "weight_decay": 0.1,
    "max_grad_norm": 0.0,
    "lr_scheduler_type": "cosine",
    "per_device_eval_batch_size": 2,
    "dataloader_pin_memory": False,
}
ROWS = [row(index) for index in range(64)]
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # transformers renames its options


class SmallGroups(ChunkedTrainer):
    """Groups so small that they do not all fit."""

    def engine_options(self) -> Options:
        return Options(group_bytes=8192, poison=True)


def logged(trainer: Any) -> list[tuple[float, ...]]:
    names = ("loss", "eval_loss", "learning_rate")
    return [tuple(each[name] for name in names if name in each) for each in trainer.state.log_history[:-1]]


def plain(folder: Path, model: Any = None, **more: Any) -> Any:
    arguments = transformers.TrainingArguments(output_dir=str(folder), **COMMON | more)
    return transformers.Trainer(
        model=model or llama(), args=arguments, train_dataset=ROWS, eval_dataset=ROWS[:4], processing_class=None
    )


def ours(folder: Path, model: Any = None, **more: Any) -> Any:
    arguments = ChunkedTrainingArguments(output_dir=str(folder), **COMMON | BUDGET | {"precision": "fp32"} | more)
    return SmallGroups(model=model or llama(), args=arguments, train_dataset=ROWS, eval_dataset=ROWS[:4])


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 2},
        {"optim": "sgd", "optim_args": "momentum=0.9", "learning_rate": 0.5},
        {"gradient_checkpointing": True, "lr_scheduler_type": "linear"},
        {"optim": "adagrad", "learning_rate": 0.1},
    ],
    ids=["AdamW", "accumulated and evaluated", "SGD", "checkpointed", "Adagrad"],
)
def test_the_same_bits_as_the_trainer(tmp_path: Path, more: dict[str, Any]) -> None:
    expected, found = plain(tmp_path, **more), ours(tmp_path, **more)
    expected.train()
    found.train()
    assert logged(found) == logged(expected)
    counted = statistics(found.model)
    assert counted.evictions > 0
    assert counted.divergences == 0
    assert counted.tiers["device"].peak_bytes <= 320_000
    release(found.model)
    wanted = expected.model.state_dict()
    for name, value in found.model.state_dict().items():
        assert torch.equal(value, wanted[name]), name


class Unfreezing(transformers.TrainerCallback):
    """Trains the first layer from the third step on."""

    def __init__(self, model: Any) -> None:
        self.layer = model.model.layers[0]

    def on_train_begin(self, *given: Any, **named: Any) -> None:
        self.layer.requires_grad_(False)

    def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        self.layer.requires_grad_(state.global_step >= 3)


def test_parameters_that_are_unfrozen_later_have_the_settings_of_their_names(tmp_path: Path) -> None:
    """Norms without weight decay: as where the Trainer makes its optimizer before the layer is frozen."""
    expected, found = plain(tmp_path), ours(tmp_path)
    found.model.model.layers[0].requires_grad_(False)
    for trained in (expected, found):
        trained.add_callback(Unfreezing(trained.model))
        trained.train()
    assert logged(found) == logged(expected)
    assert [group["weight_decay"] for group in found.optimizer.param_groups] == [0.1, 0.0]
    names = found.optimizer.param_groups[1]["param_names"]
    assert "model.layers.0.input_layernorm.weight" in names
    release(found.model)
    wanted = expected.model.state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in found.model.state_dict().items())


def test_clipped_to_rounding(tmp_path: Path) -> None:
    expected, found = plain(tmp_path, max_grad_norm=0.5), ours(tmp_path, max_grad_norm=0.5)
    expected.train()
    found.train()
    norms = [
        [each["grad_norm"] for each in trained.state.log_history if "grad_norm" in each]
        for trained in (found, expected)
    ]
    assert min(norms[1]) > 0.5, "clipping would not show"
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    release(found.model)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_resumes_exactly(tmp_path: Path, precision: str) -> None:
    more = {"save_strategy": "steps", "save_steps": 3, "precision": precision, "learning_rate": 1e-4}
    whole, rest = ours(tmp_path, **more), ours(tmp_path, llama(1), **more)
    whole.train()
    rest.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert logged(rest) == logged(whole)
    states = [trained.optimizer.state_dict()["state"] for trained in (rest, whole)]
    assert all(torch.equal(entry[name], states[1][index][name]) for index, entry in states[0].items() for name in entry)
    assert ("master" in states[0][0]) == (precision != "fp32")
    for trained in (whole, rest):
        release(trained.model)


def test_trained_twice_in_one_process(tmp_path: Path) -> None:
    """A second `train()` goes on with the same model and optimizer, as the Trainer does."""
    expected, found = plain(tmp_path), ours(tmp_path)
    for trained in (expected, found):
        trained.train()
        trained.train()
    assert logged(found) == logged(expected)
    release(found.model)


def test_tiers_and_moved_bytes_are_logged(tmp_path: Path) -> None:
    found = ours(tmp_path)
    found.train()
    rows = [each for each in found.state.log_history if "loss" in each]
    assert all(each["tiers.device.budget_bytes"] == 320_000 for each in rows)
    assert all(each["tiers.host.current_bytes"] > 0 for each in rows)
    assert rows[-1]["moved_bytes.host->device"] > rows[0]["moved_bytes.host->device"] > 0
    release(found.model)


def test_saved_as_the_trainer_saves(tmp_path: Path) -> None:
    found = ours(tmp_path)
    found.train()
    found.save_model(str(tmp_path / "saved"))
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    release(found.model)
    wanted = found.model.state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in again.state_dict().items())


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("bf16", r"precision= says what is computed in \(SFTConfig needs bf16=False"),
        ("torch_compile", "compile the model's blocks"),
        ("fsdp", "device_memory= says how much of the accelerator is used, and the trainer takes collectives="),
    ],
)
def test_what_the_library_would_do_itself_is_refused(tmp_path: Path, name: str, instead: str) -> None:
    said = rf"^{name}=True does not go with a memory budget: leave {name} out; {instead}"
    with pytest.raises(InvalidInput, match=said):
        ChunkedTrainingArguments(output_dir=str(tmp_path), **COMMON, **{name: True})


def test_a_batch_that_fits_is_found(tmp_path: Path) -> None:
    """`auto_find_batch_size` tries smaller batches; the one that fits trains as if it had been given."""
    more = {"auto_find_batch_size": True, "per_device_train_batch_size": 16, "warmup_steps": 0}
    found = ours(tmp_path, **more)
    found.train()
    size = found._train_batch_size
    assert 2 <= size < 16
    given = ours(tmp_path, **more | {"auto_find_batch_size": False, "per_device_train_batch_size": size})
    given.train()
    assert logged(found) == logged(given)
    states = [trained.optimizer.state_dict()["state"] for trained in (found, given)]
    assert all(torch.equal(entry[name], states[1][index][name]) for index, entry in states[0].items() for name in entry)
    counted = statistics(found.model)
    assert counted.steps == STEPS
    assert counted.planned_passes > 0
    release(found.model), release(given.model)
    with pytest.raises(DoesNotFit, match="all tiers together"):
        ours(tmp_path, **more, device_memory="40000", host_memory="80000").train()


def test_an_optimizer_that_is_handed_over_is_refused(tmp_path: Path) -> None:
    model = llama()
    arguments = ChunkedTrainingArguments(output_dir=str(tmp_path), **COMMON | BUDGET)
    optimizers = (torch.optim.AdamW(model.parameters()), None)
    trained = ChunkedTrainer(model=model, args=arguments, train_dataset=ROWS, optimizers=optimizers)
    with pytest.raises(InvalidInput, match="leave optimizers= out"):
        trained.train()


def test_an_optimizer_that_the_engine_does_not_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        InvalidInput, match=r"optimization.Adafactor cannot be managed: .*single values that depend on gradients"
    ):
        ours(tmp_path, optim="adafactor").train()


def test_arguments_are_read_from_a_command_line(tmp_path: Path) -> None:
    words = ["--output_dir", str(tmp_path), "--device_memory", "20GiB", "--precision", "fp16", "--use_cpu"]
    (found,) = transformers.HfArgumentParser(ChunkedTrainingArguments).parse_args_into_dataclasses(words)
    assert (found.to_budget().device_bytes, found.precision) == (20 * 2**30, "fp16")
    assert found.to_dict()["device_memory"] == "20GiB"


TRL: dict[str, tuple[str, dict[str, Any]]] = {
    "SFT": ("SFT", {"gradient_accumulation_steps": 2}),
    "SFT with LoRA": ("SFT", {"per_device_train_batch_size": 1}),
    "DPO": ("DPO", {}),
    "DPO with LoRA": ("DPO", {}),
    "GRPO": ("GRPO", {"num_generations": 2, "max_completion_length": 6, "beta": 0.1}),
}
"""A trainer each; the reference of DPO and GRPO is TRL's default, but that of our DPO is managed, too."""


def trl_rows(datasets: Any, kind: str) -> Any:
    """Rows in the form that a trainer of TRL takes, of words that `_tokenizer` knows."""
    texts = [" ".join(f"w{each}" for each in row(index)["input_ids"][:5]) for index in range(3 * 24)]
    columns = {
        "SFT": {"text": texts[:24]},
        "DPO": {"prompt": texts[:24], "chosen": texts[24:48], "rejected": texts[48:]},
        "GRPO": {"prompt": texts[:24]},
    }
    return datasets.Dataset.from_dict(columns[kind])


@pytest.mark.parametrize("name", TRL)
def test_trl_trains_through_it(name: str, tmp_path: Path) -> None:
    """The same losses and weights as TRL's own trainers."""
    trl = pytest.importorskip("trl", reason="trl is not installed")
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    kind, more = TRL[name]
    trainer, config = getattr(trl, f"{kind}Trainer"), getattr(trl, f"{kind}Config")

    @dataclass
    class Arguments(ManagedArguments, config):  # type: ignore[misc, valid-type]
        pass

    class Managed(ManagedTrainerMixin, trainer):  # type: ignore[misc, valid-type]
        def engine_options(self) -> Options:
            return Options(group_bytes=2**18, poison=True)

    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 5}
    wide = transformers.LlamaConfig(**(llama().config.to_diff_dict() | sizes))
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(wide).save_pretrained(tmp_path / "model")  # TRL reads the reference from there
    common = COMMON | {"output_dir": str(tmp_path), "bf16": False, "max_steps": 3} | more
    common["gradient_checkpointing"] = False
    least = {"DPO": "7MiB", "SFT with LoRA": "2500000"}  # in the others TRL computes losses in pieces of 4 MiB
    memory = BUDGET | {"device_memory": least.get(name, "6MiB")}

    def train(trainer: Any, arguments: Any) -> Any:
        given = {"train_dataset": trl_rows(datasets, kind), "processing_class": _tokenizer()}
        if "LoRA" in name:
            peft = pytest.importorskip("peft", reason="peft is not installed")
            given["peft_config"] = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        if name == "GRPO":
            given["reward_funcs"] = lambda completions, **_: [float(len(each) % 7) for each in completions]
        if name == "DPO" and trainer is Managed:
            given["ref_model"] = reference
        found = trainer(read(tmp_path / "model"), args=arguments, **given)
        found.train()
        return found

    read = transformers.AutoModelForCausalLM.from_pretrained
    where = {"device": "emulated", "budget": Budget(device="7MiB", host="64MiB"), "precision": "fp32"}
    reference, _ = chunked(read(tmp_path / "model"), None, options=Options(group_bytes=2**18, poison=True), **where)
    expected = train(trainer, config(**common))
    found = train(Managed, Arguments(**common, **memory, precision="fp32"))
    assert logged(found) == logged(expected)
    assert any(entry["exp_avg"].any() for entry in found.optimizer.state_dict()["state"].values())
    counted = statistics(found.model)
    assert counted.steps == 3
    assert counted.evictions > 0
    assert name != "DPO" or statistics(reference).evictions > 0
    release(found.model), release(reference)
    wanted = expected.model.state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in found.model.state_dict().items())


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"p": 0, "e": 1, "u": 2} | {f"w{index}": index for index in range(3, 64)}
    made = Tokenizer(models.WordLevel(words, unk_token="u"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="p", eos_token="e", unk_token="u")
