"""``--hf``: models of transformers, trained as a plain loop trains them, exported as transformers reads them."""

from __future__ import annotations

import itertools
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")
peft = pytest.importorskip("peft", reason="peft is not installed")

import transformers  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

import ps_kernels  # noqa: E402
from _trainer import numbers, rows  # noqa: E402
from _transformers_folder import PAIRS, TALKS, plain_losses, save_lines, save_model, save_tokenizer  # noqa: E402
from ps_models import _transformers_loss  # noqa: E402
from ps_models._loss import head_loss  # noqa: E402
from ps_models.train import main  # noqa: E402
from ps_models.train._command_line import parse  # noqa: E402
from ps_models.train._data import corpus  # noqa: E402
from ps_models.train._schedule import learning_rate  # noqa: E402
from ps_models.train._setup import fitted, model_of, objective_for  # noqa: E402
from test_train import at_step, kill_softly  # noqa: E402

Capture = pytest.CaptureFixture[str]
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # transformers renames what switches checkpointing on
TINY = ("--seq", "40", "--batch", "2", "--threads", "1", "--eval-batches", "2", "--sample", "0", "--lr", "1e-2")
FP32 = ("--precision", "fp32", "--clip", "0")
EMULATED = ("--device", "emulated", "--device-memory", "800KB")


@pytest.fixture(autouse=True, scope="module")
def _threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    ps_kernels.set_threads(1)
    yield
    ps_kernels.set_threads(threads)


def folder_of(base: Path, kind: str = "llama", **how: Any) -> Path:
    folder = base / kind.replace(" ", "-")
    save_model(folder, kind, **how)
    save_tokenizer(folder)
    return folder


def words(base: Path, *more: object, kind: str = "llama", data: list[Any] = PAIRS, steps: int = 4) -> list[str]:
    """A command line, with the folder and the data made."""
    folder = base / kind.replace(" ", "-")
    if not folder.exists():
        folder_of(base, kind)
    lines = save_lines(base / "data.jsonl", data)
    fixed = ("--hf", folder, "--data", lines, "--out", base / "run", "--steps", steps, *TINY)
    return [str(each) for each in (*fixed, *more)]


def plain_run(command: list[str], model: Any) -> list[float]:
    """The losses of plain PyTorch, on the trainer's batches in the trainer's order."""
    options = parse(command)
    data = corpus(options)
    objective = objective_for(options, data, fitted(model_of(options), options, data))
    step_rows = options.batch * options.accumulate
    batches = [
        [
            objective.batch(step * step_rows + micro * options.batch, options.batch)
            for micro in range(options.accumulate)
        ]
        for step in range(options.steps)
    ]
    rates = [learning_rate(options, step + 1) for step in range(options.steps)]
    return list(plain_losses(model, batches, rates))


def read_plain(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


WAYS: dict[str, tuple[str, list[Any], tuple[str, ...]]] = {
    "llama": ("llama", PAIRS, ()),
    "tied": ("llama tied", PAIRS, ("--accumulate", "2")),
    "conversations": ("llama", TALKS, ()),
    "packed": ("llama", PAIRS, ("--pack", "--seq", "64")),
    "texts": ("llama", [{"text": f"words and {n} words"} for n in range(60)], ("--validation", "0.3")),
    "texts, packed": ("llama", [{"text": f"{n} words"} for n in range(60)], ("--pack",)),
    "gpt2, packed": ("gpt2", PAIRS, ("--pack", "--seq", "64")),
    "mamba": ("mamba", PAIRS, ()),
    "experts": ("mixtral", PAIRS, ()),
    "not recomputed": ("llama", PAIRS, ("--no-checkpointing",)),
    "emulated": ("llama", PAIRS, EMULATED),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_losses_of_plain_transformers(way: str, tmp_path: Path) -> None:
    kind, data, more = WAYS[way]
    command = words(tmp_path, *FP32, *more, kind=kind, data=data)
    assert main(command) == 0
    found = [row["loss"] for row in rows(tmp_path / "run")]
    assert found == plain_run(command, read_plain(tmp_path / kind.replace(" ", "-")))
    assert len(set(found)) == 4


@pytest.mark.parametrize("more", [(), ("--lora", "2")], ids=str)
def test_a_loss_in_chunks(more: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = []

    def counted(*given: Any, **how: Any) -> Any:
        chunks.append(how["rows"])
        return head_loss(*given, **how)

    monkeypatch.setattr(_transformers_loss, "head_loss", counted)
    assert main(words(tmp_path, *FP32, *more)) == 0
    whole = [row["loss"] for row in rows(tmp_path / "run")]
    assert not chunks
    assert main(words(tmp_path, *FP32, *more, "--chunked-loss", "--out", tmp_path / "chunks")) == 0
    assert [row["loss"] for row in rows(tmp_path / "chunks")] == pytest.approx(whole, rel=1e-6)
    assert len(chunks) >= 4
    assert set(chunks) == {1024}


def test_the_losses_of_plain_peft(tmp_path: Path) -> None:
    command = words(tmp_path, *FP32, "--lora", 4, "--lora-targets", "q_proj", "v_proj", "--seed", 3)
    assert main(command) == 0
    torch.manual_seed(3)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    found = [row["loss"] for row in rows(tmp_path / "run")]
    assert found == plain_run(command, peft.get_peft_model(read_plain(tmp_path / "llama"), config))
    assert len(set(found)) == 4


RESUMED: dict[str, tuple[str, tuple[object, ...]]] = {
    "packed": ("llama", (*EMULATED, "--pack")),
    "adapters": ("llama", (*EMULATED, "--lora", 4, "--lora-targets", "all-linear")),
    "accumulated": ("llama", ("--accumulate", 2, "--batch", 4)),
    "experts": ("mixtral", ()),
}


@pytest.mark.parametrize("way", RESUMED)
def test_a_resumed_run_is_the_uninterrupted_one(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cut").mkdir()
    kind, more = RESUMED[way]
    whole = words(tmp_path, *more, "--eval-every", 3, steps=7, kind=kind)
    cut = [*whole, "--out", str(tmp_path / "cut" / "run")]
    assert main(whole) == 0
    with monkeypatch.context() as patch:
        at_step(patch, 4, kill_softly(signal.SIGTERM))
        assert main(cut) == 0
    assert len(rows(tmp_path / "cut" / "run")) == 4
    assert not (tmp_path / "cut" / "run" / "export").exists()
    assert main(cut) == 0
    assert numbers(tmp_path / "cut" / "run") == numbers(tmp_path / "run")
    exports = [tmp_path / "run" / "export", tmp_path / "cut" / "run" / "export"]
    names = sorted(each.name for each in exports[0].iterdir())
    assert names == sorted(each.name for each in exports[1].iterdir())
    assert all((exports[0] / name).read_bytes() == (exports[1] / name).read_bytes() for name in names)


# ---------------------------------------------------------------- export


def masters(base: Path, step: int = 4) -> dict[str, torch.Tensor]:
    """The fp32 weights of a run's checkpoint."""
    return load_file(base / "run" / "checkpoints" / f"step-{step:08d}" / "masters.safetensors")


@pytest.mark.parametrize(("kind", "precision"), [("llama tied", "fp32"), ("llama", "bf16"), ("gpt2", "bf16")])
def test_transformers_reads_the_export_bit_for_bit(kind: str, precision: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, kind, max_shard_size="30KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    assert main(words(tmp_path, "--precision", precision, kind=kind)) == 0
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    export = tmp_path / "run" / "export"
    again = transformers.AutoModelForCausalLM.from_pretrained(export)
    assert type(again) is type(read_plain(folder))
    trained = masters(tmp_path)
    for name, parameter in again.named_parameters():
        assert parameter.dtype is dtype
        assert torch.equal(parameter, trained[name].to(dtype)), name
    old, new = (json.loads((each / "config.json").read_text()) for each in (folder, export))
    assert {**old, "dtype": str(dtype).removeprefix("torch.")} == new
    first, other = (transformers.AutoTokenizer.from_pretrained(each) for each in (folder, export))
    assert first.chat_template == other.chat_template
    assert first("some words").input_ids == other("some words").input_ids


def test_an_export_is_trained_further(tmp_path: Path) -> None:
    assert main(words(tmp_path, *FP32)) == 0
    more = ["--hf", str(tmp_path / "run" / "export"), "--out", str(tmp_path / "more")]
    assert main([*words(tmp_path, *FP32), *more]) == 0
    first, last = rows(tmp_path / "run")[0]["loss"], rows(tmp_path / "more")[0]["loss"]
    assert last < first - 0.5
    assert (tmp_path / "run" / "export" / "model.safetensors").exists()


def test_more_steps_replace_the_export(tmp_path: Path) -> None:
    command = words(tmp_path, *FP32)
    found = []
    (tmp_path / "run" / ".export").mkdir(parents=True)  # what a killed one leaves
    for steps in (4, 6):
        assert main([*command, "--steps", str(steps)]) == 0
        found.append((tmp_path / "run" / "export" / "model.safetensors").read_bytes())
    assert found[0] != found[1]
    assert not [each for each in (tmp_path / "run").iterdir() if "export" in each.name and each.name != "export"]


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(20)[None]).logits  # type: ignore[no-any-return]


LORA = ("--lora", 4, "--lora-alpha", 4, "--lora-targets", "q_proj", "v_proj", "lm_head")


def test_peft_reads_the_adapters(tmp_path: Path) -> None:
    assert main(words(tmp_path, *FP32, *LORA)) == 0
    export = tmp_path / "run" / "export"
    assert {each.name for each in export.iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
    told = json.loads((export / "adapter_config.json").read_text())
    assert (told["r"], told["lora_alpha"], told["base_model_name_or_path"]) == (4, 4, str(tmp_path / "llama"))
    base = read_plain(tmp_path / "llama")
    before = logits(base)
    again = peft.PeftModel.from_pretrained(base, export)
    trained = masters(tmp_path)
    adapters = {name: each for name, each in again.named_parameters() if "lora_" in name}
    assert len(adapters) == len(trained) == 10
    assert all(torch.equal(each, trained[name]) for name, each in adapters.items())
    assert not torch.equal(logits(again), before)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_merged_adapters_are_what_peft_merges(precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ps_models.train._export.PIECE_BYTES", 20_000)
    command = words(tmp_path, *LORA, "--precision", precision)
    assert main(command) == 0
    export = tmp_path / "run" / "export"
    export.rename(tmp_path / "adapters")
    assert main([*command, "--lora-merge"]) == 0  # nothing is trained again
    assert len(list(export.glob("model-*-of-*.safetensors"))) > 2
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    base = read_plain(tmp_path / "llama", dtype)
    expected = peft.PeftModel.from_pretrained(base, tmp_path / "adapters", autocast_adapter_dtype=False)
    expected = dict(expected.merge_and_unload().named_parameters())
    found = dict(transformers.AutoModelForCausalLM.from_pretrained(export).named_parameters())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    changed = read_plain(tmp_path / "llama", dtype)
    names = {name for name, each in changed.named_parameters() if not torch.equal(each, found[name])}
    assert names == {f"model.layers.{layer}.self_attn.{which}_proj.weight" for layer in (0, 1) for which in "qv"} | {
        "lm_head.weight"
    }


# ---------------------------------------------------------------- reading


def test_a_folder_is_read_a_file_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder_of(tmp_path, max_shard_size="30KB")
    monkeypatch.setattr(transformers.PreTrainedModel, "from_pretrained", forbidden)
    assert main(words(tmp_path)) == 0
    assert main(words(tmp_path, "--out", tmp_path / "other", "--lora", 2)) == 0


def forbidden(*_: object, **__: object) -> None:
    raise AssertionError("the model was read as a whole")


def test_a_model_that_cannot_be_drawn_later_is_read_as_a_whole(tmp_path: Path) -> None:
    """RWKV's constructor draws orthogonal matrices."""
    command = words(tmp_path, *FP32, kind="rwkv")
    assert main([*command, "--steps", "2"]) == 0
    assert main(command) == 0
    losses = [row["loss"] for row in rows(tmp_path / "run")]
    assert len(losses) == 4
    again = read_plain(tmp_path / "run" / "export")
    assert all(torch.equal(each, masters(tmp_path)[name]) for name, each in again.named_parameters())


def test_experts_are_exported_under_the_names_of_the_files(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "mixtral")
    adapted = ("--lora", 2, "--lora-targets", "q_proj", "--lora-merge")
    for more in ((), adapted):
        assert main(words(tmp_path, *FP32, *more, "--out", tmp_path / f"run{len(more)}", kind="mixtral")) == 0
        export = tmp_path / f"run{len(more)}" / "export"
        names = [set(load_file(each / "model.safetensors")) for each in (folder, export)]
        assert names[0] == names[1]
        assert any("experts.3.w1" in name for name in names[0])
        old, new = (dict(read_plain(each).named_parameters()) for each in (folder, export))
        changed = [name for name in old if not torch.equal(old[name], new[name])]
        assert [name for name in changed if "q_proj" in name]
        assert len(changed) == (2 if more else len(old))


def refusals(base: Path) -> Iterator[tuple[list[str], str]]:
    given = words(base)
    lora = [*given, "--lora", "2"]
    yield [*given, "--model", "gpt-2x32"], "--model: found 'gpt-2x32' with --hf, whose folder says"
    yield [*given, "--untied-head"], "--untied-head: found with --hf; allowed for models by name (--model)"
    yield [*given, "--vocab", "300"], "--vocab: found 300 with --hf; allowed for models by name"
    yield [*given, "--lora-merge"], "--lora-merge: found without --lora; allowed with it"
    yield [*given, "--seq", "65"], "--seq: found 65, allowed with"
    yield [*given, "--hf", str(base / "nowhere")], "--hf: found"
    yield [*given, "--hf", str(base)], f"--hf: {str(base)!r} has no causal language model of transformers: "
    yield [*lora, "--lora-targets", "no_such"], "--lora-targets: Target modules {'no_such'} not found"
    routers = words(base, "--lora", 2, "--lora-targets", "all-linear", "--out", base / "routers", kind="mixtral")
    yield routers, "--lora-targets: 'model.layers.0.mlp.gate' is no linear layer, so PEFT would"
    yield ["--model", "gpt-2x32", "--pack"], "--pack: found without --hf; allowed with --hf"
    yield ["--model", "gpt-2x32", "--lora", "2"], "--lora: found 2 without --hf; allowed with --hf"
    yield ["--model", "gpt-2x32", "--chunked-loss"], "--chunked-loss: found without --hf; allowed with --hf"


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")
def test_what_does_not_go_together(tmp_path: Path, capsys: Capture) -> None:
    for command, told in refusals(tmp_path):
        capsys.readouterr()
        assert main(command) == 2, command
        said = capsys.readouterr().err.splitlines()
        assert said[-1].startswith(f"pstar-train: {told}"), said
        assert sum(line.startswith("pstar-train: ") for line in said) == 1


@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings=True:UserWarning")
def test_an_adapter_for_one_use_of_a_tied_weight_is_not_merged(tmp_path: Path, capsys: Capture) -> None:
    given = words(tmp_path, "--lora", 2, "--lora-targets", "lm_head", kind="llama tied")
    assert main([*given, "--lora-merge"]) == 2
    told = (
        "--lora-merge: 'model.embed_tokens.weight' and 'lm_head.weight' are one weight, and one of them has an adapter"
    )
    assert told in capsys.readouterr().err
    assert main(given) == 0


def test_what_a_folder_lacks_is_named(tmp_path: Path, capsys: Capture) -> None:
    folder = folder_of(tmp_path)
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    from safetensors.torch import save_file

    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    assert main(words(tmp_path)) == 2
    assert "lacks 1 tensors of LlamaForCausalLM (model.norm.weight)" in capsys.readouterr().err
    save_file({**weights, "model.norm.weight": torch.ones(31)}, folder / "model.safetensors", {"format": "pt"})
    assert main(words(tmp_path)) == 2
    told = capsys.readouterr().err
    assert "'model.norm.weight': shape (31,) in the files, (32,) in the model" in told
    assert "--hf: " in told
    assert "--out" not in told
    (folder / "model.safetensors").unlink()
    assert main(words(tmp_path)) == 2
    assert "--hf: cannot read the weights in" in capsys.readouterr().err
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    save_model(folder)
    assert main(words(tmp_path)) == 2
    assert "--hf: cannot read the tokenizer in" in capsys.readouterr().err


def test_why_a_folder_has_no_causal_model_is_said_briefly(tmp_path: Path, capsys: Capture) -> None:
    folder = tmp_path / "t5"
    transformers.T5Config(vocab_size=32, d_model=8, d_ff=8, num_layers=1, num_heads=1).save_pretrained(folder)
    assert main(words(tmp_path, kind="t5")) == 2
    told = capsys.readouterr().err
    assert "has no causal language model of transformers: " in told
    assert len(told) < 500, "without all that transformers has"


def test_a_sample_is_made_by_transformers(tmp_path: Path, capsys: Capture) -> None:
    command = words(tmp_path, "--sample", 99, "--prompt", "What", "--temperature", 0)
    said = []
    for _ in range(2):
        assert main(command) == 0
        told = capsys.readouterr().out
        said.append(told[told.index("sample:\n") : told.index("exported the model")])
    assert said[0] == said[1]
    assert said[0].startswith("sample:\nWhat")


def test_options_of_a_run_repeat_it(tmp_path: Path) -> None:
    kinds = itertools.product((("--lora", 4), ("--pack",)), ("toml", "yaml"))
    for number, (more, ending) in enumerate(kinds):
        out, again = tmp_path / f"out{number}", tmp_path / f"again{number}"
        assert main(words(tmp_path, *more, "--out", out, "--seed", 5, "--eval-every", 2)) == 0
        written = out / "options.toml"
        if ending == "yaml":
            yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
            import tomllib

            written = tmp_path / "options.yaml"
            written.write_text(yaml.safe_dump(tomllib.loads((out / "options.toml").read_text("utf-8"))), "utf-8")
        assert main(["--config", str(written), "--out", str(again)]) == 0
        assert numbers(again) == numbers(out)
        assert len(numbers(again)) == 4
