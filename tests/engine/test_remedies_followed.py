"""Every refusal of a use says what to do instead, and that works: it does not end in another refusal.

A case provokes one refusal, and then follows each of the ways that its message names. The last test reads the sources:
a refusal without a case fails it. (`test_does_not_fit.py` follows the remedies of `DoesNotFit`.)
"""

from __future__ import annotations

import ast
import copy
import io
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import _refusals_programs  # noqa: F401 - its cases
import _refusals_values  # noqa: F401 - its cases
import ps_core.engine
from _refusals import CASES, IDS, X, case, manage_and_train, managed, net, refused, train
from ps_core.engine import HostEmbedding, WeightAverage, materialized, release

ELSEWHERE = {
    "was read by code that parameters do not see": "C++ that reads parameters; see test_regressions.py",
    "cannot be read or multiplied during backward": "several ranks; see tests/dist/test_norms.py",
    "is compiled to CUDA graphs": "a compiler mode; see test_with_compile.py",
    "share memory, {}: before chunked(...)": "several ranks and tables; see tests/dist and test_aliases.py",
}


@case("is TorchScript")
def script() -> None:
    with refused("is TorchScript"):
        managed(torch.jit.script(net()))
    manage_and_train(net())


@case("is compiled as a whole")
def compiled_before() -> None:
    with refused("is compiled as a whole"):
        managed(torch.compile(net(), backend="eager"))
    compiled_blocks()


def compiled_blocks() -> None:
    before, after = net(), net()
    for block in before:
        block.compile(backend="eager")
    manage_and_train(before)
    model, optimizer = managed(after)
    for block in model:
        block.compile(backend="eager")
    train(model, optimizer)
    release(model)


@case("a compiled model or function read a parameter")
def compiled_later() -> None:
    model, _ = managed()
    with refused("a compiled model or function read a parameter"):
        torch.compile(model, backend="eager")(X)
    release(model)
    compiled_blocks()


@case("so it has nothing to be stepped with")
def gradient_of_a_frozen_parameter() -> None:
    model = net()
    model[0].weight.requires_grad_(False)
    managed(model)
    with refused("so it has nothing to be stepped with"):
        model[0].weight.grad = torch.ones(4, 4)
    release(model).requires_grad_(True)
    model, optimizer = managed(model)
    model[0].weight.grad = torch.ones(4, 4)
    optimizer.step()
    release(model)


@case("has shape {}, expected {}")
def gradient_of_another_shape() -> None:
    model, optimizer = managed()
    with refused("has shape (2,), expected (4, 4)"):
        model[0].weight.grad = torch.ones(2)
    model[0].weight.grad = torch.ones(4, 4)
    optimizer.step()
    release(model)


@case("cannot be copied or pickled")
def hooks_copied() -> None:
    model, _ = managed()
    model.hooks = [next(iter(model._state_dict_pre_hooks.values()))]
    with refused("cannot be copied or pickled"):
        copy.deepcopy(model.hooks)
    del model.hooks
    copies_of(model)


def copies_of(model: nn.Module) -> None:
    """Each way that messages about copies name."""
    torch.save(model.state_dict(), io.BytesIO())
    with materialized(model):
        pickle.loads(pickle.dumps(copy.deepcopy(model)))
    WeightAverage(model).update()
    release(model)
    pickle.loads(pickle.dumps(copy.deepcopy(model)))


@case("is under management and cannot be {}: {}")
def parameters_copied_and_moved() -> None:
    model, optimizer = managed()
    with refused("cannot be copied"):
        copy.deepcopy(model[0].weight)
    with refused("cannot be pickled"):
        pickle.dumps(model[0].weight)
    with refused("cannot be given other data"):
        model.double()
    with refused("cannot be given other data"):
        model[0].weight.data = torch.ones(4, 4)
    with materialized(model, write=True), torch.no_grad():
        model[0].weight.fill_(1.0)
    assert model.state_dict()["0.weight"].eq(1).all()
    with refused("cannot be made into another parameter"):
        nn.utils.parametrizations.weight_norm(model[0])
    train(model, optimizer)
    release(model)
    nn.utils.parametrizations.weight_norm(model[0])
    manage_and_train(model)
    copies_of(managed()[0])


@case("is under management and cannot be pickled: save")
def parameters_pickled_in_the_block() -> None:
    model, _ = managed()
    with materialized(model), refused("cannot be pickled: save"):
        pickle.dumps(model)
    copies_of(model)


@case("cannot run inside torch.func transforms")
def transforms() -> None:
    def call(model: nn.Module) -> Any:
        return torch.func.grad(lambda x: model(x).sum())(X)

    model, _ = managed()
    with refused("cannot run inside torch.func transforms"):
        call(model)
    call(release(model))


@case("cannot run on fake tensors")
def fake_tensors() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    model, _ = managed()
    with refused("cannot run on fake tensors"), FakeTensorMode():
        model(torch.ones(2, 4))
    release(model)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model(torch.ones(2, 4))


@case("so it has no optimizer state: to train")
def unfrozen_later() -> None:
    model, _ = managed(net().requires_grad_(False), trained=False)
    model.requires_grad_(True)
    with refused("so it has no optimizer state: to train"):
        model(X)
    release(model).requires_grad_(True)
    manage_and_train(model)


@case("was added after chunked(...), so nothing trains it")
def added_later() -> None:
    model, _ = managed()
    with torch.device("meta"):
        added = nn.Linear(4, 4)
    model.append(added)
    with refused("was added after chunked(...), so nothing trains it"):
        model(X)
    del model[2]
    release(model).append(added)
    manage_and_train(model)


@case("is to be trained, so its group is cut in two")
def unfrozen_while_memory_is_held() -> None:
    model = net()
    model[0].requires_grad_(False)
    model, optimizer = managed(model)
    train(model, optimizer)
    held = model[0].weight.detach()
    model.requires_grad_(True)
    with refused("is to be trained, so its group is cut in two"):
        model(X)
    del held
    train(model, optimizer)
    release(model)


class Tied(nn.Module):
    def __init__(self, table: nn.Embedding, *, own: bool = False) -> None:
        super().__init__()
        self.table, self.head = table, nn.Linear(4, 8, bias=False)
        if not own:
            self.head.weight = table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(ids))


@case("of a module that reads all of it")
def a_tied_table_on_the_host() -> None:
    with refused("of a module that reads all of it"):
        managed(Tied(HostEmbedding(8, 4)))
    manage_and_train(Tied(nn.Embedding(8, 4)), IDS)
    manage_and_train(Tied(HostEmbedding(8, 4), own=True), IDS)


@case("which autograd does not see: use nn.Embedding")
def a_hook_on_a_table() -> None:
    model, optimizer = managed(Tied(HostEmbedding(8, 4), own=True))
    hook = model.table.weight.register_hook(lambda gradient: None)
    with refused("which autograd does not see: use nn.Embedding"):
        model(IDS).sum().backward()
    optimizer.zero_grad()
    hook.remove()
    model.table.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    train(model, optimizer, IDS)
    release(model)
    plain = Tied(nn.Embedding(8, 4), own=True)
    plain.table.weight.register_hook(lambda gradient: None)
    manage_and_train(plain, IDS)


@case("and something else reads all of it")
def a_table_read_whole() -> None:
    model, optimizer = managed(Tied(HostEmbedding(8, 4), own=True))
    with refused("and something else reads all of it"):
        model.table.weight.sum()
    with materialized(model, names=["table.weight"]):
        model.table.weight.sum()
    train(model, optimizer, IDS)
    release(model)
    plain, _ = managed(Tied(nn.Embedding(8, 4), own=True))
    plain.table.weight.sum()
    release(plain)


@case("as reentrant checkpointing does it")
def reentrant() -> None:
    def call(model: nn.Module, reentrant: bool) -> None:
        checkpoint(model[1], model[0](X), use_reentrant=reentrant).sum().backward()

    model, optimizer = managed()
    with refused("as reentrant checkpointing does it"):
        call(model, True)
    optimizer.zero_grad()
    call(model, False)
    optimizer.step()
    release(model)


@case("expected a dense one; use sparse=False")
def sparse_gradients() -> None:
    def looked_up(sparse: bool) -> nn.Module:
        return nn.Sequential(nn.Embedding(8, 4, sparse=sparse), nn.Linear(4, 4))

    model, optimizer = managed(looked_up(True))
    with refused("expected a dense one; use sparse=False"):
        model(IDS).sum().backward()
    optimizer.zero_grad()
    release(model)
    manage_and_train(looked_up(False), IDS)


@case("and would keep old values when training moves")
def memory_that_is_shared() -> None:
    def make(value: Callable[[nn.Module], torch.Tensor]) -> nn.Module:
        model = net()
        model.register_buffer("kept", value(model[0]), persistent=False)
        return model

    with refused("and would keep old values when training moves"):
        managed(make(lambda layer: layer.weight.data[0]))
    manage_and_train(make(lambda layer: layer.weight.data[0].clone()))
    shared = net()
    shared[1].weight = shared[0].weight
    manage_and_train(shared)


class Wide(nn.Module):
    def __init__(self, make: Callable[[torch.Tensor], torch.Tensor], *, late: bool = False) -> None:
        super().__init__()
        self.scale, self.late = nn.Parameter(make(torch.ones(1))), late

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (self.scale.expand(4) if self.late else self.scale)


@case("which no optimizer can step; keep the small parameter")
def expanded() -> None:
    with refused("optimizer can step; keep the small parameter"):
        managed(Wide(lambda one: one.expand(4)))
    manage_and_train(Wide(lambda one: one.expand(4).clone()))
    manage_and_train(Wide(lambda one: one, late=True))


@case("would need the gradient of {} to stay")
def gradients_of_gradients() -> None:
    model, optimizer = managed()
    with refused("to stay: use torch.autograd.grad(loss, parameters, create_graph=True)"):
        model(X).square().sum().backward(create_graph=True)
    optimizer.zero_grad()
    first = torch.autograd.grad(model(X).square().sum(), list(model.parameters()), create_graph=True)
    sum(each.square().sum() for each in first).backward()
    optimizer.step()
    release(model)


@case("is under management without an optimizer")
def not_trained() -> None:
    model, _ = managed(trained=False)
    model(X).sum().backward()
    with refused("is under management without an optimizer"):
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    release(model)
    manage_and_train(model)
    through, _ = managed(net().requires_grad_(False), trained=False)
    through(X.clone().requires_grad_()).sum().backward()
    torch.optim.SGD(net().parameters(), lr=0.1).step()
    release(through)


@case("but what is trained is its fp32 master")
def changed_in_place() -> None:
    model, optimizer = managed()
    with refused("but what is trained is its fp32 master"), torch.no_grad():
        model[0].weight.add_(1.0)
    before = model.state_dict()["0.weight"]
    with materialized(model, names=["0.weight"], write=True), torch.no_grad():
        model[0].weight.add_(1.0)
    assert torch.equal(model.state_dict()["0.weight"], before + 1)
    train(model, optimizer)
    release(model)


@case("only dense parameters can live in chunks")
def sparse_parameters() -> None:
    model = net()
    model.sparse = nn.Parameter(torch.eye(4).to_sparse())
    with refused("only dense parameters can live in chunks"):
        managed(model)
    model.sparse = nn.Parameter(torch.eye(4))
    manage_and_train(model)


@case("convert it with .float() before chunked(...)")
def double() -> None:
    model = net().double()
    with refused("convert it with .float() before chunked(...)"):
        managed(model)
    manage_and_train(model.float())


@case("build the model outside of it")
def made_in_inference_mode() -> None:
    with torch.inference_mode():
        model = net()
    with refused("build the model outside of it"):
        managed(model)
    manage_and_train(net())


@case("keep its real and imaginary part as two parameters")
def complex_numbers() -> None:
    model = net()
    model.phase = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    only = nn.Module()
    only.phase = model.phase
    for refused_model in (model, only):
        with refused("keep its real and imaginary part as two parameters"):
            managed(refused_model)
    model.phase = nn.Parameter(torch.view_as_real(model.phase.detach()).clone())
    manage_and_train(model)


@case("on meta cannot become real ({}): build its module on the CPU")
def on_meta_and_referred_to() -> None:
    import weakref

    with torch.device("meta"):
        model = net()
    kept = weakref.ref(model[0].weight)
    with refused("build its module on the CPU"):
        managed(model)
    assert kept() is not None
    manage_and_train(net())


class Loose(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class Filled(Loose):
    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)


@case("is on meta and nothing initialises it")
def on_meta_and_not_initialised() -> None:
    with torch.device("meta"):
        model, filled = nn.Sequential(Loose()), nn.Sequential(Filled())
    with refused("is on meta and nothing initialises it"):
        managed(model)
    manage_and_train(filled)
    on_cpu = nn.Sequential(Loose())
    nn.init.ones_(on_cpu[0].scale)
    manage_and_train(on_cpu)


@case("its module is lazy: call the model once before chunked()")
def lazy() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(4))
    with refused("its module is lazy: call the model once before chunked()"):
        managed(model)
    model(X)
    manage_and_train(model)


@case("was changed in place in what state_dict() returned")
def a_state_dict_changed() -> None:
    def changed(model: nn.Module) -> dict[str, torch.Tensor]:
        state = model.state_dict()
        state["0.weight"].zero_()
        return state

    model, optimizer = managed()
    state = changed(model)
    with refused("was changed in place in what state_dict() returned"):
        model(X)
    model.load_state_dict(state)
    model.state_dict()["0.weight"].clone().zero_()
    with materialized(model, write=True), torch.no_grad():
        model[0].weight.zero_()
    train(model, optimizer)
    release(model)


@pytest.mark.filterwarnings("ignore:.*torch.jit", "ignore:Lazy modules:UserWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # of the compiler
@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True:UserWarning")
@pytest.mark.parametrize("text", CASES)
def test_what_a_refusal_says_works(text: str) -> None:
    CASES[text]()


def messages() -> Iterator[str]:
    """The text of every refusal in the engine's sources, with braces for what is filled in."""
    for path in sorted(Path(ps_core.engine.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("UnsupportedParameter", "_CompiledWhole"):
                (given,) = node.args
                parts = given.values if isinstance(given, ast.JoinedStr) else [given]
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in parts)


def test_every_refusal_has_a_case() -> None:
    found = list(messages())
    assert len(found) > 30
    known = [*CASES, *ELSEWHERE]
    assert not [text for text in found if not any(part in text for part in known)]
    unused = [part for part in CASES if not any(part in text for text in found)]
    assert not unused, "these cases are of messages that are no more"
