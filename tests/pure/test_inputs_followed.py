"""Every `InvalidInput` that users of the pure core meet, and that names what to do: provoked, and followed.

The last test reads the sources, except those of plans, programs and traces: only other code calls them.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import ps_core
from _followed import Followed, refused
from _trainings import training
from ps_core import AdamW, Budget, Group, Options, Precision, Setup, TorchOptimizer, cli, demo
from ps_core._options import check_unused, mark_used
from ps_core._planner import plan_cache
from ps_core._simulate.cluster import Cluster
from ps_core._simulate.machine import MACHINES, machine, machine_from_toml
from ps_core._units import parse_bytes
from ps_core._workloads.hf import shape_from_config
from ps_core._workloads.named_shapes import shape
from ps_core._workloads.traces_from_shapes import analytic_trace
from ps_core._workloads.workload import Workload

TABLE = Followed()
case, row = TABLE.case, TABLE.row
TESTS = Path(__file__).resolve().parents[1]
APART = ("engine/", "integrations/", "_plan.py", "_plan_text.py", "_planner/search.py", "_program.py", "_reference/")
APART += ("_simulate/clock.py", "_simulate/engine_timing.py", "_states.py", "_layout.py", "_trace.py")
ELSEWHERE = {
    "_command/doctor.py:calibrate": "pure/test_doctor.py",
    "cli.py:_calibrate": "pure/test_cli.py",
    "cli.py:_export": "pure/test_export_command.py",
    "_planner/plan_cache.py:_choice": "pure/test_plan_cache.py",
    "_planner/plan_cache.py:_numbers": "pure/test_plan_cache.py",
    "_planner/plan_cache.py:_tiers": "pure/test_plan_cache.py",
    "_workloads/hf.py:_read": "pure/test_hf.py",
}
"""Where PyTorch is needed, or what only damage to files leads to: the test that follows it."""

# Settings.


def first(name: str, parameter: object) -> bool:
    return name == "a"


def grouped(**settings: Any) -> AdamW:
    return AdamW(groups=(Group(match=first, **settings),))


row("takes values by name, as in {}", lambda: Budget("8GB"), lambda: Budget(device="8GB"))
row("{} has no {}; it has {}", lambda: Budget(gpu="8GB"), lambda: Budget(device="8GB"))
row("TorchOptimizer expects an optimizer class", lambda: TorchOptimizer(3), lambda: TorchOptimizer(dict, lr=1e-3))
row("Budget.disk_dir must be", lambda: Budget(disk="1GB", disk_dir=3), lambda: Budget(disk="1GB", disk_dir="/tmp"))
row(
    "Budget.disk and Budget.disk_dir go together: give both or neither",
    lambda: Budget(disk="1GB"),
    lambda: Budget(disk="1GB", disk_dir="/tmp"),
    lambda: Budget(host="1GB"),
)
row("Budget.split expects two parts", lambda: Budget(host="1GB").split(1), lambda: Budget(host="1GB").split(3, 1))


@case("is in use by another model, {}, that is still managed")
def one_budget_for_two() -> None:
    whole, managed = Budget(host="1GB"), [True]
    mark_used(whole, "Teacher", lambda: managed[0])
    with refused("give each a part, as in first, second = budget.split(3, 1), or release(model) the other one first"):
        check_unused(whole, "Student")
    one, other = whole.split(3, 1)
    mark_used(one, "Teacher", lambda: True)
    check_unused(other, "Student")
    managed[0] = False
    check_unused(whole, "Student")


for name, bad, good in (
    ("step must be one of", {"step": "soon"}, {"step": "in_backward"}),
    ("policy must be one of", {"policy": "random"}, {"policy": "lru"}),
    ("keep_fp32 must be a tuple", {"keep_fp32": "norm"}, {"keep_fp32": ("norm*",)}),
    ("plan_cache must be the path", {"plan_cache": 3}, {"plan_cache": "plans"}),
    ("machine must be a machine's name", {"machine": 3}, {"machine": "t4"}),
):
    row(f"Options.{name}", lambda bad=bad: Options(**bad), lambda good=good: Options(**good))
row("{} must be a whole number of at least {}", lambda: Options(prefetch=-1), lambda: Options(prefetch=0))
row("{} must be a whole number of at most {}", lambda: Setup(accumulate=1025), lambda: Setup(accumulate=1024))
row(
    "{} must be a finite number of at least {}{}",
    lambda: Setup(nonmodel_overhead=11),
    lambda: Setup(nonmodel_overhead=10),
)
row("{} must be True or False", lambda: Options(pin=1), lambda: Options(pin=True))
row("{} must be at least {}, found {}", lambda: Options(group_bytes=0), lambda: Options(group_bytes=1))
row("must be a finite number of at least 0", lambda: AdamW(lr=-1), lambda: AdamW(lr=0))
row("Group.kind is for a TorchOptimizer", lambda: grouped(kind=dict), lambda: TorchOptimizer(dict, groups=kinds()))
row("{} has no {} for a Group to set", lambda: grouped(momentum=0.9), lambda: grouped(betas=(0.9, 0.9)))
row("groups must be a tuple of Group", lambda: AdamW(groups=[3]), lambda: grouped(lr=1))
row(
    "Group.match is called with a parameter's name and the parameter",
    lambda: AdamW(groups=(Group(match=lambda name: True),)),
    lambda: AdamW(groups=(Group(match=lambda name, parameter: True),)),
)
row("betas must be a pair of numbers", lambda: AdamW(betas=0.9), lambda: AdamW(betas=(0.9, 0.99)))
row(
    "not a size: {} (write it like 20GiB, 20GB or 4096)",
    lambda: parse_bytes("3 ells"),
    *(lambda text=text: parse_bytes(text) for text in ("20GiB", "20GB", "4096")),
)


def kinds() -> tuple[Group, ...]:
    return (Group(match=first, kind=list),)


@case("Options.plan_cache: cannot write to {}: {}")
def a_cache_that_cannot_be_written() -> None:
    Path("file").write_text("", "utf-8")
    with refused("Options.plan_cache: cannot write to file: "):
        plan_cache._keep(Path("file") / "plan.json", None)
    Path("plans").mkdir()
    plan_cache._keep(Path("plans") / "plan.json", None)


# The command.


def run(words: str) -> None:
    """Run the command as its `main` does, and let errors pass."""
    options = cli.make_parser().parse_args(words.split())
    assert cli._COMMANDS[options.command](options) == 0


def command(part: str, wrong: str, *right: str) -> None:
    row(part, lambda: run(wrong), *(lambda words=words: run(words) for words in right))


PLAN = "plan gpt-2x32 --device-memory 8GiB --host-memory 64GiB --seq 64 --brief"
command("_command/arguments.py:error", f"{PLAN} --btach 2", f"{PLAN} --batch 2")
row("{} must be at least 1, found {}", lambda: training(batch=0), lambda: training(batch=1))
row("a group of {} bytes cannot hold one parameter", lambda: training(group_bytes=1), lambda: training(group_bytes=64))
command(
    "--offload-checkpoints needs", f"{PLAN} --offload-checkpoints --no-checkpointing", f"{PLAN} --offload-checkpoints"
)
command(
    "--untied-head: the head of {} is its token table",
    "plan bert-base --untied-head --device-memory 8GiB --host-memory 64GiB --brief",
    f"{PLAN} --untied-head",
)
command(
    "--cpu-embedding and --head-tiles (cpu_embedding, head_tiles): the head of {} is its token table",
    f"{PLAN} --cpu-embedding",
    f"{PLAN} --cpu-embedding --untied-head",
)
command(
    "--head-tiles (head_tiles): found {}, allowed is at most {}",
    f"{PLAN} --untied-head --vocab 50 --head-tiles 51",
    f"{PLAN} --untied-head --vocab 50 --head-tiles 50",
)
command("--out is where --calibrate writes: give both", "doctor --out a.toml", "doctor")
command("--calibrate measures in place of what --warm does: give one of them", "doctor --calibrate --warm", "doctor")
command("cannot write {}: {}", f"{PLAN} --svg absent/a.svg", f"{PLAN} --svg a.svg")
command(
    "--step-in-backward needs one GPU (--gpus 1)",
    f"{PLAN} --step-in-backward --accumulate 2 --precision fp16",
    f"{PLAN} --step-in-backward --gpus 1 --accumulate 1 --precision bf16",
    f"{PLAN} --step-in-backward --gpus 1 --accumulate 1 --precision fp32",
)
command(
    "--step-speculative needs one GPU (--gpus 1)",
    f"{PLAN} --step-speculative --accumulate 2 --precision fp16",
    f"{PLAN} --step-speculative --gpus 1 --accumulate 1 --precision fp16",
)
EARLY = {"step_in_backward": True}
row(
    "speculative is for steps within backward",
    lambda: Setup(speculative=True),
    lambda: Setup(speculative=True, **EARLY),
)
row(
    "step_in_backward needs one process", lambda: Setup(ranks=2, **EARLY), lambda: Setup(ranks=1, accumulate=1, **EARLY)
)
row(
    "step_in_backward with fp16, whose loss scale may skip a step, needs speculative=True",
    lambda: Setup(precision=Precision.FP16, **EARLY),
    lambda: Setup(precision=Precision.FP16, speculative=True, **EARLY),
)
command("no model is called {}; {}", PLAN.replace("gpt-2x32", "gtp-2x32"), PLAN)
command("unknown machine {} (known: {}; or a .toml file)", f"{PLAN} --machine v1000", f"{PLAN} --machine v100")
SCALE = "scale --device-memory 4GiB --host-memory 8GiB"
command("--min-tflops must be a number of at least 0", f"{SCALE} --min-tflops -1", f"{SCALE} --min-tflops 0")


@case("a trace is of the model it was recorded of: give a NAME or --hf", "cli.py:_subject")
def a_traces_head() -> None:
    where = "--device-memory 8GiB --host-memory 64GiB --brief"
    found = analytic_trace(shape("gpt-2x32"), Workload(batch=1, seq=8))
    Path("trace.json").write_text(found.to_json(), "utf-8")
    with refused("a trace is of the model it was recorded of: give a NAME or --hf"):
        run(f"plan --trace trace.json --untied-head {where}")
    run(f"plan gpt-2x32 --untied-head {where}")
    run(f"plan --trace trace.json {where}")
    with refused("cannot read 'absent.json': No such file or directory"):
        run(f"plan --trace absent.json {where}")


@case("demo.py:_write")
def a_picture() -> None:
    Path("file").write_text("", "utf-8")
    with refused("cannot write file/a.svg"):
        demo._write(Path("file/a.svg"), "")
    demo._write(Path("folder/a.svg"), "")


# Machines and models.

WHOLE = "name = 'mine'\nbase = 't4'\n"
row("{}: unknown base {}", lambda: machine_from_toml("base = 't5'", "a"), lambda: machine_from_toml(WHOLE, "a"))
row(
    "is missing (or name a built-in machine as base)",
    lambda: machine_from_toml("name = 'mine'", "a"),
    *((lambda: machine_from_toml(WHOLE, "a")),),
)
row(
    "{}: name must be a text",
    lambda: machine_from_toml("name = 3\nbase = 't4'", "a"),
    lambda: machine_from_toml(WHOLE, "a"),
)
row(
    "machine: name must be a plain text",
    lambda: replace(MACHINES["t4"], name="a\nb"),
    lambda: replace(MACHINES["t4"], name="a b"),
)
row("cannot read machine file", lambda: machine("absent.toml"), lambda: machine(machine_file()))


def machine_file() -> str:
    Path("mine.toml").write_text(WHOLE, "utf-8")
    return "mine.toml"


def cluster(**more: Any) -> Cluster:
    return Cluster(**{"gpus": 2, "nodes": 1, "device_memory": 2**30, "host_memory": 2**32, **more})


row("GPUs cannot be spread evenly over {} nodes", lambda: cluster(nodes=3), lambda: cluster(nodes=2))
row("a disk is reached through host memory", lambda: cluster(disk=1, host_memory=0), lambda: cluster(disk=1))
row(
    "workload: offload_checkpoints needs checkpointing",
    lambda: Workload(offload_checkpoints=True, checkpointing=False),
    lambda: Workload(offload_checkpoints=True, checkpointing=True),
)
row(
    "positions, too few for a sequence of {}",
    lambda: analytic_trace(replace(shape("gpt-2x32"), positions=4), Workload(batch=1, seq=8)),
    lambda: analytic_trace(replace(shape("gpt-2x32"), positions=8), Workload(batch=1, seq=8)),
)
row(
    "{} heads cannot share {} key-value heads evenly",
    lambda: replace(shape("llama-8b"), kv_heads=3),
    lambda: shape("llama-8b"),
)

CONFIG = {"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 99, "n_positions": 16}


def configured(**more: Any) -> None:
    Path("config.json").write_text(json.dumps({**CONFIG, **more}), "utf-8")
    shape_from_config(Path("config.json"))


row("model_type {} is not one of the known families", lambda: configured(model_type="mamba"), configured)
row("{}: {} must be {}, found {}", lambda: configured(n_layer="two"), configured)
row("{}: the hidden size {} cannot be cut into {} equal heads", lambda: configured(n_head=3), configured)
row("a BERT whose head is not tied", lambda: bert(tie_word_embeddings=False), lambda: bert(tie_word_embeddings=True))


def bert(**more: Any) -> None:
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
    configured(model_type="bert", max_position_embeddings=16, type_vocab_size=2, **sizes, **more)


@pytest.mark.parametrize("part", TABLE.cases)
def test_what_an_error_says_works(part, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    TABLE.cases[part]()


def test_every_error_has_a_case():
    TABLE.check(Path(ps_core.__file__).parent, apart=APART, elsewhere=ELSEWHERE)
    assert all((TESTS / path).is_file() for path in ELSEWHERE.values())
