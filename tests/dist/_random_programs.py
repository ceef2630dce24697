"""Run random programs on several ranks, and compare with one process that sums the gradients of the same batches."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from _one_process import adds_like, check_weights
from _threads import Together, going_by, run
from _zero_cases import states
from ps_core import SGD, AdamW, Budget, Options
from ps_core.engine import chunked, load_checkpoint, materialized, release, save_checkpoint
from ps_core.engine._execution.find_hooks import hooks_of

WIDTH = 24
OPERATIONS = {
    "steps": 6,
    "evaluates": 3,
    "evaluates_alone": 2,
    "evaluates_as_part": 1,
    "flips": 3,
    "adds": 2,
    "removes": 1,
    "saves_and_loads": 2,
    "begins_anew": 1,
    "manages_again": 1,
    "forgets": 1,
    "fails": 2,
    "writes": 1,
    "assigns": 1,
    "loads_state_dicts": 1,
    "scales": 1,
    "clips": 1,
}
"""Names of methods that a program calls, each with its weight in the draw."""


CALLS = ("once", "twice", "layers", "and a layer")


class Net(nn.Module):
    """Layers by name, of which each part of a batch uses some."""

    def __init__(self, layers: dict[str, int]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: linear(seed) for name, seed in layers.items()})

    def forward(self, x: torch.Tensor, names: tuple[str, ...], fails: bool = False) -> torch.Tensor:
        for name in names:
            x = x + torch.tanh(self.layers[name](x))
        if fails:
            raise ArithmeticError("drawn to fail")
        return x.float().square().mean()


def linear(seed: int) -> nn.Linear:
    layer, generator = nn.Linear(WIDTH, WIDTH), torch.Generator().manual_seed(seed)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=WIDTH**-0.5, generator=generator)
    return layer


@dataclass(frozen=True)
class Part:
    """One part of a batch."""

    seed: int
    rows: int
    names: tuple[str, ...]
    fails: bool = False
    calls: str = "once"
    """One of `CALLS`: the model once, the model twice, its layers alone, or the model and then one layer."""

    def run(self, model: Any) -> torch.Tensor:
        x = torch.randn(self.rows, WIDTH, generator=torch.Generator().manual_seed(self.seed))
        if self.calls in ("layers", "and a layer"):
            x = x.to(model.layers[self.names[0]].weight.dtype)
        if self.calls == "layers":
            for name in self.names:  # one that was added is in fp32 until the model is called
                x = x + torch.tanh(model.layers[name](x.to(model.layers[name].weight.dtype)))
            return x.float().square().mean()
        x.requires_grad_(self.calls != "once")  # so that a call of one layer needs its weight in backward, too
        found: torch.Tensor = model(x, self.names, self.fails)
        if self.calls == "twice":
            found = found + model(x.flip(0), self.names)
        if self.calls == "and a layer":
            found = found + model.layers[self.names[0]](x).float().square().mean()
        return found


@dataclass(frozen=True)
class Settings:
    ranks: int
    precision: str
    device: str
    room_kib: int
    accumulate: int
    plan: bool
    adam: bool
    common: bool
    frozen: tuple[str, ...]
    options: str = "after_backward"
    calls: bool = False
    """Loops also call the model several times, or its layers."""


def drawn_settings(draw: random.Random) -> Settings:
    ranks = draw.choice((1, 2, 2, 3))
    option = draw.choice(("in_backward", "speculative")) if ranks == 1 else "after_backward"
    return Settings(
        ranks=ranks,
        precision=draw.choice(("fp32", "bf16")),
        device="emulated" if ranks == 1 else draw.choice(("cpu", "emulated")),
        room_kib=draw.choice((30, 60, 300)),
        accumulate=1 if ranks == 1 else draw.choice((1, 1, 2)),
        plan=draw.random() < 0.7,
        adam=draw.random() < 0.6,
        common=draw.random() < 0.7,
        frozen=tuple(draw.sample(("a", "b", "c"), draw.choice((0, 0, 1, 2)))),
        options=option,
    )


class Program:
    """One rank's run of a program, drawn from the same numbers on all ranks."""

    def __init__(self, settings: Settings, seed: int, folder: Path, each: Together | None) -> None:
        self.settings, self.each, self.folder = settings, each, folder
        self.draw = random.Random(seed)
        self.rank, self.ranks = (0, 1) if each is None else (each.rank, each.ranks)
        self.layers = {"a": 0, "b": 1, "c": 2, "d": 3}
        """Every layer that there ever was since the model was made, with its seed."""
        self.here = list(self.layers)
        self.trained = {name for name in self.layers if name not in settings.frozen}
        """Layers whose parameters require gradients."""
        self.ever = set(self.trained)
        """Layers that the optimizer has states for, or will have."""
        self.serial = 100 * seed
        self.done: list[str] = []
        if each is not None and not settings.common:
            each.common_file = None
        self.model, self.optimizer = self.made(mine=True)
        self.single, self.reference = self.made(mine=False)

    def made(self, *, mine: bool, model: nn.Module | None = None) -> tuple[Any, Any]:
        settings = self.settings
        model = model or Net(self.layers)
        for name, layer in model.layers.items():
            layer.requires_grad_(name in self.ever)
        cpu = not mine or settings.device == "cpu"
        size = WIDTH * (WIDTH + 2) * (4 if settings.precision == "fp32" else 2)
        rule: Any = AdamW(lr=0.01) if settings.adam else SGD(lr=0.1, momentum=0.5)
        found = chunked(
            model,
            rule,
            device="cpu" if cpu else settings.device,
            budget=Budget(device=None if cpu else settings.room_kib * 1024, host="16MiB"),
            precision=settings.precision,
            accumulation_steps=settings.accumulate if mine else max(2, self.ranks * settings.accumulate),
            collectives=self.each if mine else None,
            options=Options(group_bytes=size, poison=not cpu, step=settings.options if mine else "after_backward"),
        )
        for name, layer in model.layers.items():
            layer.requires_grad_(name in self.trained)
        return found

    @property
    def both(self) -> list[tuple[Any, Any]]:
        return [(self.model, self.optimizer), (self.single, self.reference)]

    def run(self, count: int) -> None:
        names, weights = list(OPERATIONS), list(OPERATIONS.values())
        for _ in range(count):
            what = self.draw.choices(names, weights)[0]
            self.done.append(what)
            getattr(self, what)()
        for name in ("steps", "steps"):
            self.done.append(name)
            self.steps()
        release(self.model)
        release(self.single)

    # What it does.

    def part(self, *, fails: bool = False, calls: str = CALLS[0]) -> Part:
        self.serial += 1
        usable = [name for name in self.here if name in self.trained]
        if not usable:
            self.flip(self.here[0])
            usable = self.here[:1]
        first = self.draw.choice(usable)
        others = [name for name in self.here if name != first and self.draw.random() < 0.85]
        names = sorted([first, *others])
        return Part(self.serial, self.draw.choice((3, 3, 3, 5, 2)), tuple(names), fails, calls)

    def train(self, parts: list[Part]) -> None:
        """Leave the gradients of all parts in both models."""

        def passed(model: nn.Module, number: int) -> float:
            loss = parts[number].run(model) / len(parts)
            loss.backward()
            return float(loss.detach())

        mine = [passed(self.model, number) for number in range(self.rank, len(parts), self.ranks)]
        if self.each is None:
            theirs = [passed(self.single, number) for number in range(len(parts))]
        else:
            rounds = self.settings.precision != "fp32" and self.settings.accumulate == 1
            theirs = adds_like(
                self.each.mesh, self.single, self.reference, partial(passed, self.single), len(parts), rounds=rounds
            )[self.rank :: self.ranks]
        assert mine == theirs, "losses"

    def parts(self, passes: int) -> list[Part]:
        calls = random.Random(self.serial).choice(CALLS) if self.settings.calls else CALLS[0]
        if calls == "layers" and (set(self.here) - self._managed() or self.ever != self._trained_now()):
            calls = (
                "once"  # a call of the model takes in what was added or unfrozen on all ranks; one of a part does not
            )
        return [self.part(calls=calls) for _ in range(passes * self.ranks)]

    def passes(self) -> int:
        return 1 if self.ranks == 1 else self.draw.choice((self.settings.accumulate, 1, 2, 3))

    def update(self) -> None:
        for _, optimizer in self.both:
            optimizer.step()
            optimizer.zero_grad()
        self.check()

    def check(self) -> None:
        found, wanted = states(self.optimizer), states(self.reference)
        assert found.keys() == wanted.keys(), sorted(found.keys() ^ wanted.keys())
        for name, value in wanted.items():
            assert torch.equal(found[name], value), name
        wanted = self.single.state_dict()
        for name, value in self.model.state_dict().items():
            assert torch.equal(value, wanted[name]), name
        check_weights(self.model)

    def steps(self) -> None:
        for _ in range(self.draw.choice((1, 2, 3))):
            self.train(self.parts(self.passes()))
            self.update()

    def evaluates(self) -> None:
        parts = self.parts(1)
        training = self.draw.random() < 0.3 and self.ranks > 1
        if training:  # between the passes of a step
            self.train(self.parts(1))
        with torch.no_grad():
            assert torch.equal(parts[self.rank].run(self.model), parts[self.rank].run(self.single))
        if training:
            self.update()

    def evaluates_alone(self) -> None:
        chosen, part = self.draw.randrange(self.ranks), self.part()
        if not self.settings.plan and chosen == self.rank:
            with torch.no_grad():
                assert torch.equal(part.run(self.model), part.run(self.single))

    def evaluates_as_part(self) -> None:
        name, x = self.draw.choice([name for name in self.here if name in self._managed()]), torch.ones(2, WIDTH)
        if self.settings.precision == "bf16":
            x = x.bfloat16()
        with torch.no_grad():
            assert torch.equal(self.model.layers[name](x), self.single.layers[name](x))

    def flip(self, name: str) -> None:
        on = name not in self.trained
        self.trained ^= {name}
        if on:
            self.ever.add(name)
        for model, _ in self.both:
            model.layers[name].requires_grad_(on)

    def flips(self) -> None:
        name = self.draw.choice(self.here)
        if name in self._managed():  # an evaluation takes in what was added in one process only
            self.flip(name)

    def adds(self) -> None:
        self.serial += 1
        name, learns = f"n{self.serial}", self.draw.random() < 0.8
        for model, _ in self.both:
            model.layers[name] = linear(self.serial).requires_grad_(learns)
        self.layers[name] = self.serial
        self.here.append(name)
        if learns:
            self.trained.add(name)
            self.ever.add(name)

    def removes(self) -> None:
        if len(self.here) > 2:
            name = self.here.pop(self.draw.randrange(len(self.here)))
            for model, _ in self.both:
                del model.layers[name]

    def saved(self) -> list[Path]:
        self.serial += 1
        places = [self.folder / f"{self.serial}", self.folder / f"{self.serial} alone {self.rank}"]
        for (model, optimizer), place in zip(self.both, places, strict=True):
            save_checkpoint(place, model, optimizer)
        return places

    def saves_and_loads(self) -> None:
        places = self.saved()
        if self.draw.random() < 0.5 and self.ever == self._trained_now():  # else more is trained than was saved
            self.train(self.parts(1))
            self.update()
        for (model, optimizer), place in zip(self.both, places, strict=True):
            load_checkpoint(place, model, optimizer)
        self.check()

    def _switch(self, make: Callable[[nn.Module], nn.Module | None]) -> None:
        """Go on from a checkpoint with other models, unless these lack modules, or others are trained."""
        if len(self.here) < len(self.layers) or self.ever != self._trained_now():
            return
        places = self.saved()
        models = [make(self.model), make(self.single)]
        self.model, self.optimizer = self.made(mine=True, model=models[0])
        self.single, self.reference = self.made(mine=False, model=models[1])
        for (model, optimizer), place in zip(self.both, places, strict=True):
            load_checkpoint(place, model, optimizer)
        self.check()

    def _managed(self) -> set[str]:
        """Name the layers that are under management; what was added is from the next call on."""
        return {record.name.split(".")[1] for record in hooks_of(self.model).engine.records}

    def _trained_now(self) -> set[str]:
        """Name the layers that have states; what was unfrozen has some from its next pass on."""
        return {record.name.split(".")[1] for record in hooks_of(self.model).engine.records if record.trainable}

    def begins_anew(self) -> None:
        def anew(model: nn.Module) -> None:
            release(model)

        self._switch(anew)

    def manages_again(self) -> None:
        def same(model: nn.Module) -> nn.Module:
            release(model)
            return model

        self._switch(same)

    def forgets(self) -> None:
        if self.ranks > 1:
            self.train(self.parts(self.draw.choice((1, 2))))
            for _, optimizer in self.both:
                optimizer.zero_grad()

    def fails(self) -> None:
        """A rank's forward raises, after which all forget their gradients."""
        if self.ranks == 1:
            return
        chosen = self.draw.randrange(self.ranks)
        parts = [self.part(fails=rank == chosen) for rank in range(self.ranks)]
        for model in (self.model, self.single):
            try:
                parts[self.rank].run(model).backward()
            except ArithmeticError:
                assert parts[self.rank].fails
        for _, optimizer in self.both:
            optimizer.zero_grad()

    def writes(self) -> None:
        name = self.draw.choice(self.here)
        for model, _ in self.both:
            with materialized(model, write=True):
                model.layers[name].weight.data.mul_(0.5)

    def assigns(self) -> None:
        listed = [name for name in self.here if name in self._trained_now() and name in self.trained]
        if not listed:
            return
        name, key = self.draw.choice(listed), "exp_avg" if self.settings.adam else "momentum_buffer"
        for model, optimizer in self.both:
            entry = optimizer.state[model.layers[name].weight]
            if key in entry:
                entry[key] = torch.full((WIDTH, WIDTH), 0.01)

    def loads_state_dicts(self) -> None:
        for model, optimizer in self.both:
            model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})
            optimizer.load_state_dict(optimizer.state_dict())

    def scales(self) -> None:
        if self.ranks > 1:
            self.train(self.parts(self.passes()))
            for model, _ in self.both:
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter.grad.mul_(0.5)
            self.update()

    def clips(self) -> None:
        """Norms are added in another order, so the results are only nearly those of one process."""
        if self.ranks == 1 and self.settings.options == "in_backward":
            return
        self.train(self.parts(self.passes()))
        for _, optimizer in self.both:
            optimizer.max_grad_norm = 1e-3
            optimizer.step()
            optimizer.zero_grad()
            optimizer.max_grad_norm = None
        found, wanted = states(self.optimizer), states(self.reference)
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)
        self.reference.load_state_dict(self.optimizer.state_dict(masters=True))
        self.check()


def execute(seed: int, folder: Path, count: int = 12, *, calls: bool = False) -> Settings:
    """Run the program of a seed; an error names it, with what was done."""
    settings = replace(drawn_settings(random.Random(seed)), calls=calls)

    def case(each: Together | None) -> None:
        program = Program(settings, seed, folder, each)
        try:
            program.run(count)
        except BaseException as error:
            error.add_note(f"seed {seed}, rank {program.rank}, {settings}: {program.done}")
            raise

    with going_by(plan=settings.plan):
        case(None) if settings.ranks == 1 else run(settings.ranks, case)
    return settings
