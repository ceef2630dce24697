"""Blocks that ``torch.compile`` made one piece, before or after ``chunked``; and a whole model, which is refused."""

from __future__ import annotations

import gc
import shutil
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import _models as models
from _cases import ADAMW, finish, next_token, rows, square, tokens
from _fake_cuda import FakeRuntime
from _reference import Make, Settings
from _runs import check_under_the_tightest_budget, chunked_model
from ps_core import Budget, UnsupportedParameter
from ps_core.engine import chunked, materialized, release, statistics
from ps_core.engine._devices.cuda.device import CudaDevice
from ps_core.engine._parameters.managed_parameter import ManagedParameter

pytestmark = [  # of PyTorch's own making
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]
GRAPHS = {"triton.cudagraphs": True}
HAS_COMPILER = shutil.which("g++") is not None or shutil.which("clang++") is not None


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Backend:
    """One of PyTorch's, and how often it was asked to compile."""

    def __init__(self, name: str) -> None:
        self._backend, self.calls = torch._dynamo.lookup_backend(name), 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.calls += 1
        return self._backend(graph, inputs)


def compiled(model: models.Language, how: str, backend: Any) -> None:
    for index, block in enumerate(model.blocks):
        if how == "in place":
            block.compile(backend=backend, fullgraph=True)
        else:
            model.blocks[index] = torch.compile(block, backend=backend, fullgraph=True)


def loop(how: str, name: str, *, late: bool = False, checkpointing: bool = False) -> Any:
    """Train; ``late``: compiled once three steps were taken without."""

    def train(make: Make) -> list[Tensor]:
        torch._dynamo.reset()
        backend, model, logs = Backend(name), models.Language(checkpointing=checkpointing), []
        if not late:
            compiled(model, how, backend)
        _, optimizer = make(model, ADAMW)
        for index in range(6):
            if late and index == 3:
                compiled(model, how, backend)
            loss = next_token(model, *tokens(index))
            optimizer.scale(loss).backward()
            finish(optimizer)
            logs.append(loss.detach())
        assert backend.calls == 1, "the blocks are alike, so they are compiled once, for good"
        return logs

    return train


@pytest.mark.parametrize(
    ("backend", "how", "precision"),
    [("eager", "in place", "fp32"), ("aot_eager", "wrapped", "bf16"), ("aot_eager", "in place", "fp32")],
)
def test_compiled_blocks_train_to_the_same_bits(backend: str, how: str, precision: str) -> None:
    check_under_the_tightest_budget(loop(how, backend), Settings(precision=precision))


@pytest.mark.skipif(not HAS_COMPILER, reason="inductor needs a C++ compiler")
def test_inductor() -> None:
    check_under_the_tightest_budget(loop("in place", "inductor"), Settings(precision="fp32"))


class PartlyCompiled(nn.Linear):
    """Calls a part that is not compiled, whose result is freed while the compiler listens."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) + self.part(x)

    @torch.compiler.disable
    def part(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight)


def frames_compiled(layers: type[nn.Linear], train: Callable[[nn.Module], object]) -> int:
    """Count the functions compiled where layers of PyTorch are told to be; some releases leave those as they are."""
    from torch._dynamo.utils import counters  # it takes seconds to import

    torch._dynamo.reset()
    counters.clear()
    model = nn.Sequential(layers(32, 32), layers(32, 32))
    for layer in model:
        layer.compile(backend="eager")
    train(model)
    return counters["frames"]["total"]


@pytest.mark.parametrize("layers", [nn.Linear, PartlyCompiled])
def test_no_function_of_the_engine_is_compiled(layers: type[nn.Linear]) -> None:
    """In PyTorch 2.11 and 2.13 the engine's hooks were, at each kind of tensor: 21 functions where plain has none."""

    def plain(model: nn.Module) -> None:
        square(model, *rows(0)).backward()

    def managed(model: nn.Module) -> None:
        with chunked_model(model) as (chunks, optimizer):
            for index in range(3):
                square(chunks, *rows(index)).backward()
                finish(optimizer)

    assert frames_compiled(layers, managed) == frames_compiled(layers, plain)


def test_compiled_after_chunked() -> None:
    check_under_the_tightest_budget(loop("wrapped", "aot_eager", late=True), Settings(precision="bf16"))


def test_compiled_and_checkpointed() -> None:
    check_under_the_tightest_budget(loop("in place", "aot_eager", checkpointing=True), Settings(precision="bf16"))


class Query(nn.Module):
    """Looks at tokens with a weight that is given, as the decoder of DETR does."""

    def __init__(self) -> None:
        super().__init__()
        self.after = models.Residual()

    def forward(self, x: Tensor, weights: dict[str, Tensor], shift: Tensor) -> Tensor:
        look = torch.softmax(x @ weights["all"].t(), -1) @ weights["all"]
        return self.after(x + look + shift)


class Queries(nn.Module):
    """Gives blocks parameters that are not theirs: trained, frozen, or their own."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Embedding(8, models.WIDTH)
        self.shift = nn.Parameter(torch.ones(models.WIDTH), requires_grad=False)
        self.blocks = nn.ModuleList(Query() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks[:2]:
            x = block(x, {"all": self.queries.weight}, shift=self.shift)
        return self.blocks[2](x, {"all": self.blocks[2].after.narrow.weight.t()}, self.blocks[2].after.norm.weight)


def test_a_block_may_be_given_parameters_that_it_does_not_hold() -> None:
    def train(make: Make) -> list[Tensor]:
        torch._dynamo.reset()
        model, logs = Queries(), []
        for block in model.blocks:
            block.compile(backend="aot_eager", fullgraph=True)
        _, optimizer = make(model, ADAMW)
        for index in range(3):
            loss = square(model, *rows(index))
            loss.backward()
            finish(optimizer)
            with torch.no_grad():
                logs += [loss.detach(), square(model, *rows(index))]
        return logs

    check_under_the_tightest_budget(train, Settings(precision="bf16"))


@pytest.mark.parametrize("how", ["block", "function"])
def test_hidden_parameters_are_refused_with_a_remedy_that_works(how: str) -> None:
    """A compiled block reads a parameter that it does not hold, or a function is given one."""

    class Hidden(nn.Linear):
        def forward(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
            return super().forward(x) @ (others[0].weight if weight is None else weight)

    class Model(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            if how == "block":
                return self[1](self[0](x), self[0].weight if follow else None)
            return function(self[0](x), self[0].weight.clone() if follow else self[0].weight)

    model = Model(nn.Linear(models.WIDTH, models.WIDTH), Hidden(models.WIDTH, models.WIDTH))
    others, follow = (model[0],), False
    function = torch.compile(functional.linear, backend="eager")
    if how == "block":
        model[1].compile(backend="eager")
    said = "a compiled block other modules' parameters as arguments, and a compiled function copies"
    with chunked_model(model) as (model, optimizer):
        with pytest.raises(UnsupportedParameter, match=said):
            square(model, *rows(0))
        follow = True
        square(model, *rows(0)).backward()
        finish(optimizer)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_another_pair_of_saved_tensor_hooks_may_keep_what_a_block_saves(backend: str) -> None:
    """Hooks that keep a tensor must get an alias of a parameter, whose memory is given to others before backward."""

    class Model(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda kept: kept):
                return super().forward(x)

    def train(make: Make) -> list[Tensor]:
        torch._dynamo.reset()
        model, logs = Model(*models.stack(3)), []
        for block in model:
            block.compile(backend=backend, fullgraph=True)
        _, optimizer = make(model, ADAMW)
        for index in range(3):
            logs.append(square(model, *rows(index)))
            logs[-1].backward()
            finish(optimizer)
        return [each.detach() for each in logs]

    got = check_under_the_tightest_budget(train, Settings(precision="fp32"))
    assert got.statistics[0].planned_passes == 2


def test_blocks_around_compiled_blocks_may_be_compiled_later() -> None:
    """First their layers, then the blocks in place, then what ``torch.compile`` returns for them."""

    def train(make: Make) -> list[Tensor]:
        torch._dynamo.reset()
        model, logs = models.stack(3), []
        for block in list(model):
            block.wide.compile(backend="aot_eager")
        _, optimizer = make(model, ADAMW)
        for index in range(6):
            for number, block in enumerate(list(model)):
                if index == 2:
                    block.compile(backend="aot_eager")
                if index == 4:
                    model[number] = torch.compile(block, backend="aot_eager")
            loss = square(model, *rows(index))
            optimizer.scale(loss).backward()
            finish(optimizer)
            logs.append(loss.detach())
        return logs

    check_under_the_tightest_budget(train, Settings(precision="bf16"))


class Watched(nn.Module):
    """Notes which of its parameters are managed while it runs."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.seen: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        self.look()
        return self.block(x)

    @torch._dynamo.disable
    def look(self) -> None:
        self.seen += [type(parameter) is ManagedParameter for parameter in self.parameters()]
        self.seen += [bool(parameter.isnan().any()) for parameter in self.parameters()]


def test_nothing_inside_is_managed_while_it_runs() -> None:
    model = models.stack()
    watched = model[1] = Watched(model[1])
    model[1].compile(backend="eager")
    with chunked_model(model) as (model, optimizer):
        for index in range(2):
            square(model, *rows(index)).backward()
            finish(optimizer)
        assert watched.seen
        assert not any(watched.seen)
        assert all(type(parameter) is ManagedParameter for parameter in model.parameters())


class Boom(Exception):
    pass


def test_a_compiled_block_that_raises_leaves_nothing_open() -> None:
    def boom(*_: Any) -> None:
        raise Boom

    model = models.stack()
    model[1].compile(backend="eager")
    with chunked_model(model) as (model, optimizer):
        hook = model[1].register_forward_hook(boom)
        with pytest.raises(Boom):
            square(model, *rows(0))
        hook.remove()
        assert all(type(parameter) is ManagedParameter for parameter in model.parameters())
        square(model, *rows(0)).backward()
        finish(optimizer)


def test_a_compiled_block_runs_on_materialized_parameters() -> None:
    model = models.stack()
    model[1].compile(backend="eager")
    with chunked_model(model, precision="fp32") as (model, _), torch.no_grad():
        expected = square(model, *rows(0))
        with materialized(model):
            assert torch.equal(square(model, *rows(0)), expected)


def test_release_leaves_the_block_compiled() -> None:
    model = models.stack()
    model[1].compile(backend="eager")
    own = model[1]._compiled_call_impl
    chunked(model, ADAMW, device="cpu", budget=Budget(host="64MiB"))
    assert model[1]._compiled_call_impl is not own
    release(model)
    assert model[1]._compiled_call_impl is own
    assert model._compiled_call_impl is None
    square(model.float(), *rows(0)).backward()


def test_a_compiled_block_is_never_traced_with_fake_tensors(caplog: Any) -> None:
    model = models.stack()
    model[1].compile(backend="eager")
    with caplog.at_level("INFO", "ps_core"), chunked_model(model) as (model, optimizer):
        for index in range(3):
            square(model, *rows(index)).backward()
            finish(optimizer)
        assert not [each for each in caplog.messages if "fake" in each]
        found = statistics(model)
    assert (found.planned_passes, found.divergences) == (2, 0)


@pytest.mark.parametrize("how", ["in place", "wrapped"])
def test_a_dropped_model_leaves_nothing(how: str) -> None:
    """``block.compile()`` stores a call that refers to the block; the engine must not keep both alive."""
    model = models.Language()
    compiled(model, how, "aot_eager")
    model, optimizer = chunked(model, ADAMW, device="emulated", budget=Budget(device="1MiB", host="64MiB"))
    for index in range(3):
        next_token(model, *tokens(index)).backward()
        finish(optimizer)
    left = [weakref.ref(each) for each in (*model.modules(), *model.parameters())]
    del model, optimizer
    gc.collect()  # blocks
    gc.collect()  # the engine, whose memory they gave back as they went
    assert not [each() for each in left if each() is not None]


REMEDY = r"compile (its|the model's) blocks instead[\s\S]*block\.compile\(\)"


@pytest.mark.parametrize("how", ["in place", "wrapped"])
def test_a_compiled_model_is_refused_with_the_remedy(how: str) -> None:
    model = models.stack()
    if how == "in place":
        model.compile(backend="eager")
    else:
        model = torch.compile(model, backend="eager")
    with pytest.raises(UnsupportedParameter, match=f"this Sequential is compiled as a whole[\\s\\S]*{REMEDY}"):
        chunked(model, ADAMW, device="cpu", budget=Budget(host="64MiB"))
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())


@pytest.mark.parametrize("how", ["in place", "wrapped", "function"])
def test_a_model_compiled_later_is_refused_with_the_remedy(how: str) -> None:
    """By our own error, which PyTorch's compiler does not wrap; without it, training goes on."""
    with chunked_model(models.stack()) as (model, optimizer):
        call: Any = model
        if how == "in place":
            model.compile(backend="eager")
        elif how == "wrapped":
            call = torch.compile(model, backend="eager")
        else:
            call = torch.compile(lambda x: model(x) * 1, backend="eager")
        with pytest.raises(UnsupportedParameter, match=f"under management[\\s\\S]*{REMEDY}"):
            call(*rows(0))
        if how != "in place":
            square(model, *rows(0)).backward()
            finish(optimizer)


@pytest.mark.parametrize("device", ["emulated", "played CUDA"])
@pytest.mark.parametrize("how", ["in place", "wrapped"])
@pytest.mark.parametrize("told", [{"mode": "reduce-overhead"}, {"mode": "max-autotune"}, {"options": GRAPHS}])
def test_blocks_compiled_to_cuda_graphs_are_refused_by_name(told: dict[str, Any], how: str, device: str) -> None:
    """Before ``chunked``, which changes nothing, and after it; where nothing ever moves they may stay."""
    made, runtime = [models.Language() for _ in range(3)], FakeRuntime(1)
    told_device: Any = CudaDevice(runtime) if "CUDA" in device else device
    for model in made[:2]:
        graphs(model, how, told)
    said = r"'blocks.1' is compiled to CUDA graphs .* mode='default'"
    with pytest.raises(UnsupportedParameter, match=said):
        chunked(made[0], ADAMW, device=told_device, budget=Budget(device="1MiB", host="64MiB"))
    assert all(type(parameter) is nn.Parameter for parameter in made[0].parameters())
    with chunked_model(made[1], device="cpu", budget=Budget(host="64MiB")) as (model, _):
        assert model is made[1]
    budget = Budget(device="1MiB", host="64MiB")
    with runtime, chunked_model(made[2], device=told_device, budget=budget) as (model, _):
        next_token(model, *tokens(0)).backward()
        graphs(model, how, told)
        with pytest.raises(UnsupportedParameter, match=said):
            model(*tokens(0))


@pytest.mark.parametrize("mode", ["default", "max-autotune-no-cudagraphs"])
def test_other_modes_are_not_refused(mode: str) -> None:
    model = models.Language()
    graphs(model, "in place", {"mode": mode})
    with chunked_model(model) as (managed, _):
        assert managed is model


def graphs(model: Any, how: str, told: dict[str, Any]) -> None:
    """Compile one block, which compiles nothing before it is called."""
    if how == "in place":
        model.blocks[1].compile(**told)
    else:
        model.blocks[1] = torch.compile(model.blocks[1], **told)
