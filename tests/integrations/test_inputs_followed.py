"""Every `InvalidInput` of the integrations that names what to do: it is provoked, followed, and that works."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from _followed import Followed, refused
from _hugging_face import batch, llama, row
from ps_core import AdamW, Budget
from ps_core.engine import chunked, release

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
pl = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")

from ps_core.integrations import accelerate as of_accelerate
from ps_core.integrations import transformers as of_transformers
from ps_core.integrations.accelerate import ChunkedAccelerator
from ps_core.integrations.lightning import ChunkedStrategy
from ps_core.integrations.transformers import ChunkedTrainer, ChunkedTrainingArguments

pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries' own dependencies
TABLE = Followed()
case, provoked = TABLE.case, TABLE.row
MODEL_BUDGET = Budget(device=400_000, host="64MiB")
Parts = tuple[Any, Any, Any]


def joined(**more: Any) -> ChunkedAccelerator:
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()
    return ChunkedAccelerator(cpu=True, budget=MODEL_BUDGET, **more)


def adam(model: Any, **more: Any) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=0.01, **more)


def prepared(*given: Any) -> None:
    """Hand these to Accelerate, and make a step."""
    accelerator = joined()
    model, optimizer, *_ = accelerator.prepare(*given)
    accelerator.backward(model(**batch(0)).loss)
    optimizer.step()
    release(model)


def fresh(make: Callable[[Any], Any] = adam) -> None:
    model = llama()
    prepared(model, make(model))


# Optimizers that are handed over.


@case("a scheduler was made for this {}, which is replaced, but is not handed over with it")
def a_scheduler_apart() -> None:
    model = llama()
    optimizer = adam(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    with refused("give both in one call (accelerator.prepare(model, optimizer, scheduler))"):
        prepared(model, optimizer)
    prepared(model, optimizer, scheduler)


@case("this {} has stepped already, and its states would be lost")
def stepped_already() -> None:
    model = llama()
    stepped = adam(model)
    model(**batch(0)).loss.backward()
    stepped.step()
    with refused("hand over a new one, and load its state_dict() into the optimizer that replaces it"):
        prepared(model, stepped)
    found, optimizer = joined().prepare(model, adam(model))
    optimizer.load_state_dict(stepped.state_dict())
    first = next(iter(stepped.state.values()))["exp_avg"]
    assert torch.equal(next(iter(optimizer.state.values()))["exp_avg"], first)
    release(found)


provoked(
    "['differentiable'] is True: no gradient passes through a step",
    lambda: fresh(lambda model: torch.optim.RMSprop(model.parameters(), differentiable=True)),
    lambda: fresh(lambda model: torch.optim.RMSprop(model.parameters())),
)


@case("requires a gradient, but the optimizer does not have it")
def a_parameter_apart() -> None:
    model = llama()
    with refused("add it to the optimizer, or set requires_grad_(False)"):
        prepared(model, torch.optim.AdamW(model.lm_head.parameters()))
    optimizer = torch.optim.AdamW(model.lm_head.parameters())
    known = {id(each) for each in model.lm_head.parameters()}
    optimizer.add_param_group({"params": [each for each in model.parameters() if id(each) not in known]})
    prepared(model, optimizer)
    other = llama().requires_grad_(False)
    other.lm_head.requires_grad_(True)
    prepared(other, torch.optim.AdamW(other.lm_head.parameters()))


provoked(
    "parameters that {} does not have: make it for model.parameters()",
    lambda: fresh(lambda model: torch.optim.AdamW([*model.parameters(), torch.nn.Parameter(torch.zeros(2))])),
    fresh,
)


# Accelerate.

provoked(
    "does not go with a memory budget: leave it out; precision= says what is computed in",
    lambda: joined(mixed_precision="bf16"),
    lambda: joined(precision="bf16"),
)


@case("processes run this program, and each would train a model of its own: pass collectives=ps_dist.connect()")
def several_processes() -> None:
    """`test_several_processes` follows it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(of_accelerate.Accelerator, "num_processes", 2)
        with refused("2 processes run this program"):
            joined()
    fresh()


@case("collectives: expected what ps_dist.connect() returned, found {}")
def no_collectives() -> None:
    with refused("collectives: expected what ps_dist.connect() returned, found True"):
        joined(collectives=True)
    joined(collectives=SimpleNamespace(processes=1))


@case("the library runs {} processes, but ps_dist.connect() joined {}: start the program by torchrun")
def unequal_numbers() -> None:
    with refused("the library runs 1 processes, but ps_dist.connect() joined 2"):
        joined(collectives=SimpleNamespace(processes=2))
    joined(collectives=SimpleNamespace(processes=1))


@case("processes train this model, and chunked(...) shares it between {}: pass it collectives=ps_dist.connect()")
def managed_by_one() -> None:
    """`test_several_processes` follows it."""
    model, optimizer = chunked(llama(), AdamW(), device="emulated", budget=Budget(device=400_000, host="64MiB"))
    accelerator = joined()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(of_accelerate.Accelerator, "num_processes", 2)
        with refused("2 processes train this model, and chunked(...) shares it between 1"):
            accelerator.prepare(model, optimizer)
    prepared(model, optimizer)


@case("models and {} optimizers of torch.optim: {}; a model that is only evaluated goes through")
def a_model_alone() -> None:
    model, teacher = llama(), llama(1)
    with refused("hand model and optimizer to one prepare(model, optimizer, ...)"):
        joined().prepare(model)
    with refused("a model that is only evaluated goes through chunked(model, None) first"):
        joined().prepare(model, teacher, adam(model))
    chunked(teacher, None, device="emulated", budget=Budget(device=400_000, host="64MiB"))
    prepared(model, adam(model), teacher)
    release(teacher)


def pair() -> tuple[Any, Any]:
    return llama(), llama(1)


def trained(accelerator: ChunkedAccelerator, *pairs: Any) -> None:
    """A step of each of these pairs of a model and its optimizer."""
    for model, optimizer in pairs:
        accelerator.backward(model(**batch(0)).loss)
        optimizer.step()
        optimizer.zero_grad()
    for model, _ in pairs:
        release(model)


def in_parts(accelerator: ChunkedAccelerator, first: Any, second: Any) -> None:
    """What the messages about several models name."""
    one, two = Budget(device=800_000, host="64MiB").split(1, 1)
    prepared_first = accelerator.prepare(first, adam(first), budget=one)
    trained(accelerator, prepared_first, accelerator.prepare(second, adam(second), budget=two))


@case("models with an optimizer each; call it once for each: {}")
def two_models_at_once() -> None:
    first, second = pair()
    with refused(
        "call it once for each: one, two = budget.split(1, 1), then prepare(first, its_optimizer, budget=one)"
    ):
        joined().prepare(first, second, adam(first), adam(second))
    in_parts(joined(), first, second)


@case("{}. For several models of one accelerator: {}")
def two_models_with_one_budget() -> None:
    accelerator, (first, second) = joined(), pair()
    given = accelerator.prepare(first, adam(first))
    with refused("then prepare(first, its_optimizer, budget=one)"):
        accelerator.prepare(second, adam(second))
    trained(accelerator, given)
    trained(accelerator, accelerator.prepare(second, adam(second)))
    in_parts(joined(), *pair())


@case("precision='fp16' has a loss scale for each optimizer, and accelerator.backward(loss) knows only that of {}")
def two_loss_scales() -> None:
    one, two = Budget(device=800_000, host="64MiB").split(1, 1)
    accelerator, (first, second) = joined(precision="fp16"), pair()
    given = accelerator.prepare(first, adam(first), budget=one)
    with refused("or release(model) the other one first"):
        accelerator.prepare(second, adam(second), budget=two)
    trained(accelerator, given)
    trained(accelerator, accelerator.prepare(second, adam(second), budget=two))
    for precision in ("bf16", "fp32"):
        in_parts(joined(precision=precision), *pair())


# Lightning.


class Module(pl.LightningModule):
    def __init__(self, optimizers: int = 1) -> None:
        super().__init__()
        self.network, self.count = llama(), optimizers
        self.automatic_optimization = optimizers == 1

    def training_step(self, rows: Any, index: int) -> Any:
        return self.network(**rows).loss

    def configure_optimizers(self) -> Any:
        return [adam(self) for _ in range(self.count)]


class Grouped(Module):
    def configure_optimizers(self) -> Any:
        rows = [{"params": [value]} for value in self.parameters()]
        return torch.optim.AdamW([{**rows[0], "lr": 0.5}, *rows[1:]], lr=0.01)


def fit(module: Any, told: Any = None, **more: Any) -> None:
    loader = torch.utils.data.DataLoader([row(index) for index in range(2)], batch_size=2)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "max_steps": 1}
    where = {"accelerator": "cpu", "devices": 1, "enable_checkpointing": False, "default_root_dir": "."}
    chosen = ChunkedStrategy(budget=MODEL_BUDGET) if told is None else told
    pl.Trainer(strategy=chosen, **quiet, **where, **more).fit(module, loader)
    release(module.network)


provoked(
    "does not go with a memory budget: leave it out; {}(precision=...) says what is computed in",
    lambda: fit(Module(), precision="bf16-mixed"),
    lambda: fit(Module()),
    lambda: fit(Module(), ChunkedStrategy(budget=MODEL_BUDGET, precision="bf16")),
)
provoked(
    "a model has one: return one, with a param group for each",
    lambda: fit(Module(2)),
    lambda: fit(Module(1)),
    lambda: fit(Grouped()),
)


@case("processes run this program, and ChunkedStrategy would train a model in each: use ChunkedParallelStrategy")
def the_other_strategy() -> None:
    """`test_several_processes` follows it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORLD_SIZE", "2")
        with refused("use ChunkedParallelStrategy(ps_dist.connect(), ...)"):
            fit(Module())
    fit(Module())


# The Trainer.


def arguments(**more: Any) -> Any:
    where = {"managed_device": "emulated", "device_memory": "400000", "host_memory": "64MiB", "use_cpu": True}
    told = {"max_steps": 1, "per_device_train_batch_size": 2, "report_to": [], "save_strategy": "no"}
    return ChunkedTrainingArguments(output_dir=".", disable_tqdm=True, **where | told | more)


def trainer(model: Any, told: Any, kind: Any = ChunkedTrainer, **more: Any) -> Any:
    found = kind(model=model, args=told, train_dataset=[row(index) for index in range(2)], **more)
    found.train()
    release(model)
    return found


provoked(
    "does not go with a memory budget: leave {} out; {}",
    lambda: arguments(bf16=True),
    lambda: trainer(llama(), arguments(precision="bf16")),
)


@case("the Trainer was given an optimizer of its own: leave optimizers= out, or call chunked(...) yourself")
def an_optimizer_of_its_own() -> None:
    model = llama()
    with refused("pass its model and optimizer to this trainer"):
        trainer(model, arguments(), optimizers=(adam(model), None))
    trainer(model, arguments())
    model, optimizer = chunked(llama(), AdamW(), device="emulated", budget=Budget(device=400_000, host="64MiB"))
    trainer(model, arguments(), optimizers=(optimizer, None))


@case("devices and uses one: set CUDA_VISIBLE_DEVICES to one, or start torchrun")
def several_cards() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(of_transformers.ManagedArguments, "n_gpu", 2, raising=False)
        with refused("set CUDA_VISIBLE_DEVICES to one, or start torchrun --nproc-per-node=2"):
            trainer(llama(), arguments())
    trainer(llama(), arguments())


@pytest.mark.parametrize("part", TABLE.cases)
def test_what_an_error_says_works(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    TABLE.cases[part]()
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def test_every_error_has_a_case() -> None:
    TABLE.check(Path(sys.modules["ps_core.integrations"].__file__ or "").parent)
