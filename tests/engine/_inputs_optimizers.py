"""Cases of optimizers: settings, gradients, steps within backward."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

import _models as models
from _cases import next_token, rows, tokens
from _followed import refused
from _inputs import ADAMW, IN_BACKWARD, backward, case, folder, goes_on, made, row, works
from _refusals import X, net, train
from _runs import HOST, let_go
from ps_core import AdamW, Budget, Group, Options, TorchOptimizer
from ps_core.engine import chunked, load_checkpoint, release, save_checkpoint
from ps_core.engine._optim.kernel_rule import Settings, StepRule
from test_torch_optimizer import Draws, FiveStates, Reserved


@case("update(new_scale=...)")
def a_scale_is_set() -> None:
    model, optimizer = made(precision="fp16")
    with refused("update(new_scale=...)"):
        optimizer.scaler.update(8.0)
    optimizer.scaler.load_state_dict({**optimizer.scaler.state_dict(), "scale": 8.0})
    assert optimizer.loss_scale == 8
    release(model)


@case("this scaler is that of the optimizer that chunked(...) returned")
def another_losss_scaler() -> None:
    model, optimizer = made(precision="fp16")
    other = nn.Linear(4, 4)
    plain = torch.optim.SGD(other.parameters(), lr=0.1)
    with refused("scale other losses by a scaler of their own"):
        optimizer.scaler.step(plain)
    theirs = torch.amp.GradScaler("cpu")
    theirs.scale(other(X).sum()).backward()
    theirs.step(plain)
    optimizer.scaler.scale(model(X).float().sum()).backward()
    optimizer.scaler.step(optimizer)
    release(model)


@case("precision fp16, but the loss was not scaled")
def not_scaled() -> None:
    model, optimizer = made(precision="fp16")
    backward(model)
    with refused("call optimizer.scale(loss).backward() in place of loss.backward()"):
        optimizer.step()
    optimizer.zero_grad()
    before = model.state_dict()["0.weight"].clone()
    optimizer.scale(model(X).float().sum()).backward()
    optimizer.step()
    assert optimizer.last_skipped or not torch.equal(before, model.state_dict()["0.weight"])
    release(model)


@case("zero_grad(set_to_none=False) asks for gradients of zeros")
def zeros_asked_for() -> None:
    model, optimizer = made()
    backward(model)
    with refused("use zero_grad()"):
        optimizer.zero_grad(set_to_none=False)
    optimizer.zero_grad()
    goes_on(model, optimizer)


@case("param_groups[{}]['params'] was changed")
def members_changed() -> None:
    model, optimizer = made()
    optimizer.param_groups[0]["params"].pop()
    backward(model)
    with refused("release(model) and call it again with other groups"):
        optimizer.step()
    works(release(model), AdamW(groups=(Group(match=lambda name, _: name == "1.bias", lr=0.0),)))


@case("a ChunkedOptimizer cannot be copied or pickled")
def copied() -> None:
    model, optimizer = made()
    with refused("use state_dict()"):
        copy.deepcopy(optimizer)
    again, other = made()
    other.load_state_dict(optimizer.state_dict())
    goes_on(again, other)
    release(model)


def with_setting(key: str, value: Any, optimizer: Any = ADAMW) -> None:
    model, made_optimizer = made(optimizer=optimizer)
    made_optimizer.param_groups[0][key] = value
    goes_on(model, made_optimizer)


row("max_grad_norm must be a number above 0", lambda: made(max_grad_norm=0), lambda: works(max_grad_norm=1.0), works)
AMSGRAD = TorchOptimizer(torch.optim.AdamW, amsgrad=True)
row("the engine's {} has only {}", lambda: with_setting("amsgrad", True), lambda: works(optimizer=AMSGRAD))
row("betas must be two numbers", lambda: with_setting("betas", 0.9), lambda: with_setting("betas", (0.9, 0.99)))
row("{} must be a number when", lambda: with_setting("lr", "fast"), lambda: with_setting("lr", torch.tensor(0.1)))
row("{} must be {} when", lambda: with_setting("lr", -1.0), lambda: with_setting("lr", 0.1))
RMSPROP = TorchOptimizer(torch.optim.RMSprop, lr=0.1)
row(
    "{} must be one number when the optimizer steps",
    lambda: with_setting("lr", torch.ones(2), RMSPROP),
    lambda: with_setting("lr", 0.2, RMSPROP),
)


@case("was changed so that {} keeps {} for each parameter")
def another_state_asked_for() -> None:
    model, optimizer = made(optimizer=RMSPROP)
    optimizer.param_groups[0]["momentum"] = 0.9
    backward(model)
    with refused("give such settings to TorchOptimizer(...), and leave them"):
        optimizer.step()
    works(release(model), TorchOptimizer(torch.optim.RMSprop, lr=0.1, momentum=0.9))


def with_bias() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4))


@case("{} has shape {}: {}. Give such parameters another class")
def muon_and_vectors() -> None:
    muon = TorchOptimizer(torch.optim.Muon, lr=0.1)
    with refused("'0.bias' has shape (4,): {}. Give such parameters another class"):
        made(with_bias(), muon)
    others = Group(match=lambda name, parameter: parameter.dim() != 2, kind=torch.optim.AdamW, lr=1e-3)
    works(with_bias(), TorchOptimizer(torch.optim.Muon, lr=0.1, groups=(others,)))
    frozen = with_bias()
    frozen[0].bias.requires_grad_(False)
    works(frozen, muon)


@case("has no room for its {}: memory was laid out before it was added")
def no_room_for_a_state() -> None:
    model, optimizer = made(nn.Sequential(nn.Linear(16, 16)), adafactor := TorchOptimizer(torch.optim.Adafactor))
    model.append(nn.Linear(16, 1))
    model(torch.ones(2, 16)).sum().backward()
    with refused("release(model) and call chunked again"):
        optimizer.step()
    model, optimizer = made(release(model), adafactor)
    train(model, optimizer, torch.ones(2, 16))
    release(model)


def cube(sides: int) -> nn.Module:
    model = net()
    model.cube = nn.Parameter(torch.ones((2,) * sides))
    return model


adafactor = TorchOptimizer(torch.optim.Adafactor, lr=0.1)
row("is tried with at most {} dimensions, found", lambda: made(cube(7), adafactor), lambda: works(cube(6), adafactor))
row(
    "expects a subclass of torch.optim.Optimizer",
    lambda: made(optimizer=TorchOptimizer(dict)),
    lambda: works(None, RMSPROP),
)
row(
    "{} could not be {}: {}",
    lambda: made(optimizer=TorchOptimizer(torch.optim.RMSprop, rate=1)),
    lambda: works(None, RMSPROP),
)
row(
    "{} has a state {}, a name that checkpoints use otherwise",
    lambda: made(optimizer=TorchOptimizer(Reserved)),
    lambda: works(None, RMSPROP),
)


class Half(torch.optim.Optimizer):
    """Keeps a state in 16 bits."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> Any:
        for each in self.param_groups[0]["params"]:
            self.state[each]["half"] = each.grad.bfloat16()


class Odd(Draws):
    """Keeps a state of a shape that is not the parameter's."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for each in self.param_groups[0]["params"]:
            self.state[each]["odd"] = torch.zeros(each.shape[0] + 1)
            each -= each.grad.mean()


class Many(Draws):
    """Keeps more numbers than fit beside a parameter, and steps whole matrices."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for each in self.param_groups[0]["params"]:
            for name in "abcde":
                self.state[each][name] = torch.zeros_like(each)
            each -= each.grad.mean()


class Gram(Draws):
    """Keeps a square of each matrix, which may be larger than the matrix."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for each in self.param_groups[0]["params"]:
            state = self.state[each]
            state["gram"] = state.get("gram", 0) + each.grad @ each.grad.T
            each -= 0.1 * state["gram"] @ each.grad


row(
    "{} keeps more than {} times a parameter of {}",
    lambda: made(nn.Sequential(nn.Linear(1, 4, bias=False)), TorchOptimizer(Gram)),
    lambda: works(nn.Sequential(nn.Linear(4, 4, bias=False)), TorchOptimizer(Gram)),
)


def cannot(kind: type, said: str) -> Callable[[], None]:
    """Each way that the message names: a class whose state is all, or this one without ``chunked``."""

    def follow() -> None:
        with refused(said):
            made(optimizer=TorchOptimizer(kind))
        works(None, RMSPROP)
        model = net()
        train(model, torch.optim.AdamW(model.parameters()))

    return follow


case("the shape of its state {} does not follow")(cannot(Odd, "the shape of its state 'odd' does not follow"))
case("its state {} is neither one value nor a tensor in fp32")(cannot(Half, "its state 'half' is neither"))
case("so it counts or draws numbers elsewhere")(cannot(Draws, "so it counts or draws numbers elsewhere"))
case("it keeps {}: at most {} states can be managed")(cannot(FiveStates, "it keeps a, b, c, d, e: at most 4 states"))
case("{} cannot be managed: {}. Use a class whose state")(cannot(Draws, "Draws cannot be managed: {}. Use a class"))


# Options(step="in_backward").


AFTER = Options(group_bytes=4096)


def language(step: str = "in_backward") -> Any:
    """A model that was trained until its steps are made within backward."""
    torch.manual_seed(0)
    options, where = replace(AFTER, step=step), {"device": "emulated", "budget": Budget(device="72KiB", host=HOST)}
    model, optimizer = chunked(models.Language(tied=True, checkpointing=True), AdamW(lr=0.01), options=options, **where)
    for index in range(3):
        one_step(model, optimizer, index)
    return model, optimizer


def one_step(model: Any, optimizer: Any, index: int = 9) -> None:
    next_token(model, *tokens(index)).backward()
    optimizer.step()
    optimizer.zero_grad()


Use = Callable[[Any, Any], Any]


def within_backward(part: str, use: Use, *, undo: Use | None = None) -> None:
    """A use between backward and step: refused, well after the step or once it is undone, and well without the option.

    ``undo`` sets back what the use has changed; without it the use itself is made again after the step.
    """

    @case(part)
    def follow() -> None:
        model, optimizer = language()
        next_token(model, *tokens(9)).backward()
        with refused(part):
            use(model, optimizer)
        if undo is not None:
            undo(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        if undo is None:
            use(model, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        one_step(model, optimizer)
        let_go(model)
        model, optimizer = language("after_backward")
        next_token(model, *tokens(9)).backward()
        use(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        let_go(model)


def clipping(_: Any, optimizer: Any) -> None:
    optimizer.max_grad_norm = 1.0
    optimizer.step()


def not_clipping(_: Any, optimizer: Any) -> None:
    optimizer.max_grad_norm = None


def other_rate(_: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] = 0.5
    optimizer.step()


def old_rate(_: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] = 0.01


def save(model: Any, optimizer: Any) -> None:
    save_checkpoint(folder() / "run", model, optimizer)


within_backward(
    "a pass with gradients begins before optimizer.step() was called",
    lambda model, _: next_token(model, *tokens(10)).backward(),
)
within_backward(
    "is used after its group was stepped within backward",
    lambda model, _: model.blocks[2](rows(0, 4, models.WIDTH)[0].to(torch.bfloat16)).sum().backward(),
)
within_backward("max_grad_norm was set, but Options(step='in_backward')", clipping, undo=not_clipping)
within_backward("the settings of {} were changed between backward and optimizer.step()", other_rate, undo=old_rate)
within_backward(
    "the gradient of {} is asked for, but groups were stepped within backward already",
    lambda model, _: model.blocks[0].narrow.weight.grad,
)


@case("has stepped some groups, and nothing can be {} before the others: call optimizer.step() first")
def saved_between() -> None:
    model, optimizer = language()
    next_token(model, *tokens(9)).backward()
    with refused("nothing can be saved before the others: call optimizer.step() first"):
        save(model, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    save(model, optimizer)
    let_go(model)


@case("zero_grad() before optimizer.step(): Options(step='in_backward')")
def forgotten_between() -> None:
    model, optimizer = language()
    save_checkpoint(path := folder() / "run", model, optimizer)
    for end in (optimizer.step, lambda: load_checkpoint(path, model, optimizer)):
        next_token(model, *tokens(9)).backward()
        with refused("which steps the others, or load a checkpoint"):
            optimizer.zero_grad()
        end()
        optimizer.zero_grad()
    one_step(model, optimizer)
    let_go(model)


@case("Options(step='in_backward'), but the optimizer that chunked() returned is gone: keep it")
def the_optimizer_is_gone() -> None:
    model, optimizer = language()
    del optimizer
    gc.collect()
    with refused("is gone: keep it"):
        next_token(model, *tokens(9)).backward()
    works(options=IN_BACKWARD)


row(
    "a group is stepped before all gradients are known; use step={}",
    lambda: made(max_grad_norm=1.0, options=IN_BACKWARD),
    lambda: works(max_grad_norm=1.0, options=Options(step="speculative")),
)


class Choice(Draws):
    """Keeps other states for other settings."""

    def __init__(self, params: Any, names: str = "abc") -> None:
        torch.optim.Optimizer.__init__(self, params, {"names": names})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for each in group["params"]:
                for name in group["names"]:
                    self.state[each][name] = torch.zeros_like(each)
                each -= each.grad


def choice(names: str) -> TorchOptimizer:
    return TorchOptimizer(Choice, groups=(Group(match=lambda name, _: "bias" in name, settings={"names": names}),))


row(
    "{} keeps {}: at most {} states can be managed",
    lambda: made(optimizer=choice("def")),
    lambda: works(None, choice("cd")),
)


class Found(nn.Module):
    """Returns what its table found, too."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(64, 64)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, found = torch.ones(len(ids), 64), None
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if index == 3:
                found = self.table(ids)
                x = x + found
        return x, found


@case("this backward pass does other than the recorded one; leave out Options(step='in_backward')")
def another_backward_pass() -> None:
    def trained(options: Options) -> None:
        model, optimizer = made(Found(), budget=Budget(device="72KiB", host=HOST), options=options)
        for index in range(5):
            out, found = model(torch.arange(8))
            out.square().sum().backward(retain_graph=index == 4)
            if index == 4:
                found.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        release(model)

    with refused("a gradient of 'table.weight' came after its group was stepped within backward"):
        trained(Options(step="in_backward", group_bytes=4096))
    trained(Options(group_bytes=4096))


@case("give it parameters that were frozen at chunked() or added since, or release(model)")
def another_param_group() -> None:
    model = net()
    model[0].bias.requires_grad_(False)
    model, optimizer = made(model)
    with refused("add_param_group: '1.bias' is trained with param_groups[0] already; give it parameters that were"):
        optimizer.add_param_group({"params": [model[1].bias], "lr": 0.5})
    model[0].bias.requires_grad_(True)
    model.append(nn.Linear(4, 4))
    optimizer.add_param_group({"params": [model[0].bias, *model[2].parameters()], "lr": 0.5})
    train(model, optimizer)
    assert optimizer.param_groups[1]["param_names"] == ["0.bias", "2.weight", "2.bias"]
    works(release(model), AdamW(groups=(Group(match=lambda name, _: name == "1.bias", lr=0.5),)))


@case("add_param_group was given parameters that have gradients and are not the model's")
def a_param_group_of_strangers() -> None:
    model, optimizer = made()
    added = nn.Linear(4, 4)
    optimizer.add_param_group({"params": added.parameters(), "lr": 0.5})
    added(model(X)).sum().backward()
    with refused("add their module to the model, and call the model"):
        optimizer.step()
    optimizer.zero_grad()
    added.zero_grad()
    model.append(added)
    train(model, optimizer)
    release(model)


@case("param_groups was assigned {} groups, expected {}: assign as many, and add others by add_param_group")
def groups_assigned() -> None:
    model = net()
    model[0].requires_grad_(False)
    model, optimizer = made(model)
    kept = list(optimizer.param_groups)
    optimizer.param_groups = [*kept, {**kept[0], "params": []}]
    backward(model)
    with refused("param_groups was assigned 2 groups, expected 1"):
        optimizer.step()
    optimizer.zero_grad()
    optimizer.param_groups = kept
    model[0].requires_grad_(True)
    optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.5})
    goes_on(model, optimizer)


row(
    "decoupled must be True or False, found {}",
    lambda: Settings(kind=StepRule.ADAM, lr=0.1, decoupled=1),  # type: ignore[arg-type]
    lambda: Settings(kind=StepRule.ADAM, lr=0.1, decoupled=True),
)
