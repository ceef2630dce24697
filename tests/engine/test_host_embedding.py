"""Tables that stay in the host's memory: an ``nn.Embedding``'s bits, and nothing of the table on the accelerator."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from _cases import finish
from _fake_cuda import FakeRuntime
from _hugging_face import batch, llama
from _reference import Make, Settings, differences, plain
from _runs import HOST, chunked_model, managed, stand_in, tightest
from _states import masters_of
from ps_core import SGD, AdamW, Budget, DoesNotFit, InvalidInput, Options, UnsupportedParameter
from ps_core._plan import Tier
from ps_core.engine import (
    HostEmbedding,
    chunked,
    load_checkpoint,
    load_weights,
    materialized,
    offloaded,
    release,
    save_checkpoint,
    save_weights,
    statistics,
)
from ps_core.engine._devices.cuda.device import CudaDevice
from ps_core.engine._execution.find_hooks import hooks_of
from ps_core.engine._execution.host_embedding import host_tables
from ps_core.engine._support.log import log_line

ROWS, WIDTH, BATCH, LENGTH = 512, 32, 4, 8
TABLE = ROWS * WIDTH
ROOMY = "4MiB"
"""All but the table fits on the device, so that after the first pass nothing moves but rows."""
Kind = type[nn.Embedding]


class Net(nn.Module):
    """Two tables, one of them looked up three times, also in a recomputed block; the other has a row of padding."""

    def __init__(self, kind: Kind = HostEmbedding, *, away: bool = False) -> None:
        super().__init__()
        self.table = kind(ROWS, WIDTH)
        self.other = kind(16, WIDTH, padding_idx=3)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, 8)
        self.away = away

    def block(self, x: Tensor, ids: Tensor, block: nn.Module) -> Tensor:
        return x + torch.tanh(block(x) + self.table(ids + 1))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids) + self.other(ids % 16)
        for block in self.blocks[:2]:
            if self.away:
                with offloaded(block, x):
                    x = checkpoint(self.block, x, ids, block, use_reentrant=False)
            else:
                x = checkpoint(self.block, x, ids, block, use_reentrant=False)
        return self.out(x + self.blocks[2](x)).float().square().mean()


class Single(nn.Module):
    """One lookup, and little else."""

    def __init__(self, kind: Kind = HostEmbedding) -> None:
        super().__init__()
        self.table = kind(ROWS, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.table(ids).to(self.out.weight.dtype)).float().square().mean()


def ids(index: int) -> Tensor:
    return torch.randint(ROWS - 1, (BATCH, LENGTH), generator=torch.Generator().manual_seed(index))


def loop(make: Make, *, kind: Kind = HostEmbedding, micro_batches: int = 1, steps: int = 3, **how: Any) -> list[Tensor]:
    """Steps, an evaluation before one of them, and one with two backward passes."""
    model, optimizer = make(Net(kind, **how), AdamW(lr=1e-2))
    logs = []
    for index in range(steps):
        for micro in range(micro_batches + (index == 1)):
            loss = model(ids(10 * index + micro))
            optimizer.scale(loss).backward()
            logs.append(loss.detach())
        if index == 2:
            with torch.no_grad():
                logs.append(model(ids(99)))
        finish(optimizer)
    return logs


def three_steps(make: Make, *, net: type[Net | Single], kind: Kind) -> list[Tensor]:
    """Nothing but steps, without a loss scale."""
    model, optimizer = make(net(kind), AdamW(lr=1e-2))
    losses = []
    for index in range(3):
        losses.append(model(ids(index)))
        losses[-1].backward()
        finish(optimizer)
    return [loss.detach() for loss in losses]


CASES = [("fp32", 1), ("bf16", 1), ("fp16", 1), ("bf16", 2), ("fp32", 2)]


@pytest.mark.parametrize(("precision", "micro_batches"), CASES)
def test_the_same_bits_where_the_table_would_not_fit(precision: str, micro_batches: int) -> None:
    options = Options(poison=True, group_bytes=4096)
    settings = Settings(precision=precision, accumulation_steps=micro_batches, options=options)

    def attempt(size: int) -> Any:
        return managed(partial(loop, micro_batches=micro_batches), settings, stand_in, Budget(device=size, host=HOST))

    size, got = tightest(attempt, rounds=1)
    assert not differences(plain(partial(loop, kind=nn.Embedding, micro_batches=micro_batches), settings), got)
    assert size < TABLE * (4 if precision == "fp32" else 2), "the table alone takes as much"
    assert got.evictions > 0
    assert got.statistics[0].tiers["device"].peak_bytes <= size


@pytest.mark.parametrize("how", ["cpu", "cpu and disk", "device and disk"])
def test_the_same_bits_elsewhere(how: str, tmp_path: Any) -> None:
    settings = Settings(precision="bf16", options=Options(group_bytes=4096), max_grad_norm=1.0)
    disk = {"disk": "4MiB", "disk_dir": str(tmp_path)} if "disk" in how else {}
    device, budget = {
        "cpu": ("cpu", Budget(host=HOST)),
        "cpu and disk": ("cpu", Budget(host="1MiB", **disk)),
        "device and disk": ("emulated", Budget(device="64KiB", host=20 * TABLE, **disk)),
    }[how]

    got = managed(partial(three_steps, net=Net, kind=HostEmbedding), settings, device, budget)
    assert not differences(plain(partial(three_steps, net=Net, kind=nn.Embedding), settings), got)


def test_a_table_that_is_kept_in_fp32() -> None:
    run, settings = (
        partial(three_steps, net=Single),
        Settings(precision="bf16", options=Options(keep_fp32=("table.*",))),
    )
    got = managed(partial(run, kind=HostEmbedding), settings, stand_in, Budget(device="32KiB", host=HOST))
    assert not differences(plain(partial(run, kind=nn.Embedding), settings), got)
    assert got.statistics[0].tiers["host"].peak_bytes >= 20 * TABLE


def test_on_a_played_cuda() -> None:
    settings, run = Settings(precision="bf16"), partial(loop, steps=2)
    expected = plain(partial(run, kind=nn.Embedding), settings)
    for seed in (1, 2):
        runtime = FakeRuntime(seed)
        with runtime:
            got = managed(run, settings, partial(CudaDevice, runtime), Budget(device="256KiB", host=HOST))
        assert not differences(expected, got)


def test_from_meta_a_model_begins_with_the_same_numbers() -> None:
    def run(make: Make, *, where: str) -> list[Tensor]:
        with torch.device(where):
            net = Net(HostEmbedding)
        model, optimizer = make(net, AdamW(lr=1e-2))
        loss = model(ids(0))
        loss.backward()
        finish(optimizer)
        return [loss.detach()]

    settings = Settings(precision="bf16")
    got = managed(partial(run, where="meta"), settings, "emulated", Budget(device="64KiB", host=HOST))
    assert not differences(plain(partial(run, where="cpu"), settings), got)


# Bytes


def step(model: Any, optimizer: Any, index: int) -> None:
    optimizer.scale(model(ids(index))).backward()
    finish(optimizer)


def test_only_rows_go_up_and_only_their_gradients_come_down() -> None:
    with chunked_model(Single(), budget=Budget(device=ROOMY, host=HOST), precision="bf16") as (model, optimizer):
        step(model, optimizer, 0)
        before = statistics(model)
        for index in range(1, 4):
            step(model, optimizer, index)
        after = statistics(model)
        planned = hooks_of(model).scheduler.planned
        assert planned is not None
        assert [tensor.name for tensor in planned.program.trace.tensors] == ["out.weight", "out.bias"]
        assert after.planned_passes == after.passes == 4
        assert after.divergences == after.replans == 0, "it went as foreseen"
    rows = BATCH * LENGTH * WIDTH * 2
    moved = {link: count - before.moved_bytes[link] for link, count in after.moved_bytes.items()}
    assert moved == {"host->device": 3 * rows, "device->host": 3 * (rows + BATCH * LENGTH * 8)}


def test_a_step_moves_rows_in_place_of_the_table() -> None:
    moved, rows = {}, BATCH * LENGTH * WIDTH * 2
    for kind in (nn.Embedding, HostEmbedding):
        told: dict[str, Any] = {"budget": Budget(device="96KiB", host=HOST), "precision": "bf16"}
        with chunked_model(Single(kind), options=Options(group_bytes=4096), **told) as (model, optimizer):
            step(model, optimizer, 0)
            before = statistics(model).moved_bytes
            step(model, optimizer, 1)
            moved[kind] = {link: count - before.get(link, 0) for link, count in statistics(model).moved_bytes.items()}
    assert min(moved[nn.Embedding].values()) >= 2 * TABLE, "up for the lookup, and down as a gradient"
    assert moved[HostEmbedding] == {"host->device": rows, "device->host": rows + BATCH * LENGTH * 8}


@pytest.mark.parametrize(
    ("precision", "micro_batches", "trained", "each"),
    [("bf16", 1, True, 16), ("bf16", 2, True, 20), ("fp32", 1, True, 20), ("bf16", 1, False, 2)],
)
def test_the_host_is_charged(precision: str, micro_batches: int, trained: bool, each: int) -> None:
    """Weight, states, sums, and room for the gradient on its way; one byte less is refused."""
    told: dict[str, Any] = {"precision": precision, "accumulation_steps": micro_batches}

    def make(host: Any) -> Any:
        net = Single()
        net.table.weight.requires_grad_(trained)
        return chunked_model(net, budget=Budget(device=ROOMY, host=host), **told)

    with make(HOST) as (model, optimizer):
        for index in range(2):
            step(model, optimizer, index)
        held = statistics(model).tiers["host"]
    assert held.current_bytes == each * TABLE
    with make(held.peak_bytes) as (model, optimizer):
        step(model, optimizer, 0)
        assert statistics(model).tiers["host"].peak_bytes <= held.peak_bytes
    with pytest.raises(DoesNotFit, match=r"table\.weight(.|\n)*nn\.Embedding in place of HostEmbedding") as refused:
        make(each * TABLE - 1).__enter__()
    assert (refused.value.tier, refused.value.needed_bytes, refused.value.proven) == ("host", each * TABLE, True)


def test_beside_activations_that_wait_on_the_host() -> None:
    """Neither takes what the other has."""
    settings = Settings(precision="bf16", options=Options(group_bytes=4096))
    run = partial(loop, away=True)
    got = managed(run, settings, stand_in, Budget(device="64KiB", host=HOST))
    expected = plain(partial(loop, kind=nn.Embedding), settings)
    assert not differences(expected, got)
    host = got.statistics[0].tiers["host"].peak_bytes
    again = managed(run, settings, stand_in, Budget(device="64KiB", host=host + 4096))
    assert not differences(expected, again)
    assert again.statistics[0].tiers["host"].peak_bytes <= host + 4096


# What comes and goes


def test_values_are_read_and_replaced_as_others() -> None:
    with chunked_model(Net(), budget=Budget(device="64KiB", host=HOST), precision="bf16") as (model, optimizer):
        step(model, optimizer, 0)
        state = {name: value.clone() for name, value in model.state_dict().items()}
        seen = model(ids(1)).detach()
        with materialized(model, ["table.weight"], write=True):
            assert torch.equal(model.table.weight, state["table.weight"])
            with torch.no_grad():
                model.table.weight.mul_(2)
        assert not torch.equal(model(ids(1)), seen)
        model.load_state_dict(state)
        assert torch.equal(model(ids(1)), seen)
    assert torch.equal(model.table.weight, state["table.weight"])
    assert torch.equal(model(ids(1)), seen), "and released, an ordinary embedding"


@pytest.mark.parametrize("kinds", [(HostEmbedding, nn.Embedding), (nn.Embedding, HostEmbedding)])
def test_checkpoints_do_not_say_where_a_table_was(kinds: tuple[Kind, Kind], tmp_path: Any) -> None:
    budget, after = {"budget": Budget(device="256KiB", host=HOST), "precision": "bf16"}, []
    with chunked_model(Net(kinds[0]), **budget) as (model, optimizer):
        step(model, optimizer, 0)
        save_checkpoint(tmp_path / "run", model, optimizer)
        save_weights(tmp_path / "weights", model)
        step(model, optimizer, 1)
        after.append(masters_of(optimizer.state_dict(masters=True)))
    with chunked_model(Net(kinds[1]), **budget) as (model, optimizer):
        load_checkpoint(tmp_path / "run", model, optimizer)
        step(model, optimizer, 1)
        after.append(masters_of(optimizer.state_dict(masters=True)))
        load_weights(model, tmp_path / "weights")
        there = model.state_dict()["table.weight"]
    assert all(torch.equal(value, after[1][name]) for name, value in after[0].items())
    model, _ = chunked(Net(kinds[1]), None, device="emulated", **budget)
    load_weights(model, tmp_path / "weights")
    with torch.no_grad():
        model(ids(0))
    assert torch.equal(model.state_dict()["table.weight"], there)
    release(model)


def test_a_step_that_is_skipped_changes_nothing() -> None:
    told: dict[str, Any] = {"budget": Budget(device="64KiB", host=HOST), "precision": "fp16", "spec": SGD(lr=1.0)}
    with chunked_model(Net(), **told) as (model, optimizer):
        before = {name: value.clone() for name, value in model.state_dict().items()}
        optimizer.scale(model(ids(0)) * float("inf")).backward()
        optimizer.step()
        assert optimizer.last_skipped
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        step(model, optimizer, 1)
        assert not torch.equal(model.state_dict()["table.weight"], before["table.weight"])


def test_the_gradient_can_be_asked_for_and_looked_at() -> None:
    norms: list[float] = []
    expected = Single(nn.Embedding)
    net = Single()
    net.load_state_dict(expected.state_dict())
    expected(ids(0)).backward()
    gradient = expected.table.weight.grad
    assert gradient is not None
    net.table.weight.register_post_accumulate_grad_hook(lambda weight: norms.append(float(weight.grad.norm())))
    with chunked_model(net, budget=Budget(device=ROOMY, host=HOST), precision="fp32") as (model, optimizer):
        (found,) = torch.autograd.grad(model(ids(0)), [model.table.weight])
        assert torch.equal(found, gradient)
        assert model.table.weight.grad is None
        model(ids(0)).backward(inputs=[model.out.weight])
        assert model.table.weight.grad is None
        optimizer.zero_grad()
        model(ids(0)).backward()
        assert norms == [pytest.approx(float(gradient.norm()), rel=1e-6)]
        clipped = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert clipped == pytest.approx(
            float(torch.stack([p.grad.norm() for p in expected.parameters() if p.grad is not None]).norm()), rel=1e-6
        )


def test_a_backward_pass_that_broke_off_leaves_nothing() -> None:
    net = Net()

    def fail(*_: Any) -> None:
        raise ArithmeticError

    with chunked_model(net, budget=Budget(device="64KiB", host=HOST), precision="fp32") as (model, optimizer):
        handle = model.table.weight.register_post_accumulate_grad_hook(fail)
        with pytest.raises(ArithmeticError):
            model(ids(0)).backward()
        handle.remove()
        optimizer.zero_grad()
        model(ids(1)).backward()
        norm = float(model.table.weight.grad.norm())
    plain_net = Net(nn.Embedding)
    plain_net.load_state_dict(net.state_dict())
    plain_net(ids(1)).backward()
    assert norm == pytest.approx(float(plain_net.table.weight.grad.norm()), rel=1e-6)


# Refusals


class Tied(Single):
    """A head that is the table: registered, or used by a function."""

    def __init__(self, *, registered: bool) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, ROWS, bias=False) if registered else None
        if self.head is not None:
            self.head.weight = self.table.weight
        self.whole = True

    def forward(self, ids: Tensor) -> Tensor:
        x = self.out(self.table(ids))
        return nn.functional.linear(x, self.table.weight).float().square().mean() if self.whole else x.float().mean()


def test_a_table_that_is_also_a_head_is_refused() -> None:
    budget = Budget(device=ROOMY, host=HOST)
    with pytest.raises(
        UnsupportedParameter, match=r"'table\.weight' is a table .*'head\.weight' is the same parameter"
    ):
        chunked(Tied(registered=True), AdamW(), device="emulated", budget=budget)
    release(chunked(Tied(registered=True), AdamW(), device="cpu")[0])
    with chunked_model(Tied(registered=False), budget=budget, precision="fp32") as (model, optimizer):
        for _ in range(2):
            with pytest.raises(UnsupportedParameter, match=r"'table\.weight' .*materialized\(model, names=\['table"):
                model(ids(0))
            optimizer.zero_grad()
        before = model.state_dict()["table.weight"].clone()
        model.whole = False
        step(model, optimizer, 0)
        assert not torch.equal(model.state_dict()["table.weight"], before)


@pytest.mark.parametrize("told", [{"max_norm": 1.0}, {"sparse": True}, {"scale_grad_by_freq": True}])
def test_what_a_table_cannot_do_is_refused(told: dict[str, Any]) -> None:
    (name,) = told
    with pytest.raises(InvalidInput, match=f"{name}=.*use nn.Embedding"):
        HostEmbedding(4, 4, **told)
    with pytest.raises(InvalidInput, match=name):
        HostEmbedding.from_embedding(nn.Embedding(4, 4, **told))
    late = HostEmbedding(4, 4)
    setattr(late, name, told[name])
    with pytest.raises(InvalidInput, match=name):
        chunked(nn.Sequential(late), AdamW())


def test_what_only_autograd_could_do_is_refused() -> None:
    net = Single()
    net.out.requires_grad_(False)
    with chunked_model(net, budget=Budget(device=ROOMY, host=HOST), precision="fp32") as (model, optimizer):
        with pytest.raises(UnsupportedParameter, match=r"create_graph=True.*'table\.weight'"):
            model(ids(0)).square().backward(create_graph=True)
        optimizer.zero_grad()
        handle = model.table.weight.register_hook(lambda gradient: gradient)
        with pytest.raises(UnsupportedParameter, match=r"register_hook.*'table\.weight'.*register_post_accumulate"):
            model(ids(0)).backward()
        handle.remove()
        optimizer.zero_grad()
        step(model, optimizer, 0)


def test_processes_that_share_a_model_cut_tables_too(caplog: pytest.LogCaptureFixture) -> None:
    tiers, net = (Tier("device", 2**20), Tier("host", 2**20)), Net()
    assert host_tables(net, tiers, alone=True) == {"table.weight", "other.weight"}
    assert host_tables(net, tiers[1:], alone=True) == set()
    log_line("begin")
    with caplog.at_level("INFO", "ps_core"):
        assert host_tables(net, tiers, alone=False) == set()
    assert [row.message for row in caplog.records if "HostEmbedding with collectives" in row.message]


# Without management, and in other models


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_management_it_is_an_embedding(dtype: torch.dtype) -> None:
    plain_one = nn.Embedding(ROWS, WIDTH, padding_idx=5, dtype=dtype)
    table = HostEmbedding.from_embedding(plain_one)
    assert table.weight is plain_one.weight
    assert table.extra_repr() == plain_one.extra_repr()
    gradients = []
    for module in (plain_one, table):
        rows = module(ids(0) % 7)
        (rows.float() * torch.linspace(-1, 1, WIDTH)).square().sum().backward()
        gradients.append((rows.detach(), module.weight.grad))
        module.weight.grad = None
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_on_meta_and_on_fake_tensors() -> None:
    def shapes(make: Callable[[], nn.Module]) -> Tensor:
        return make()(torch.zeros(2, 3, dtype=torch.long))

    with torch.device("meta"):
        assert shapes(lambda: HostEmbedding(5, 4)).shape == (2, 3, 4)
    with FakeTensorMode():
        rows = shapes(lambda: HostEmbedding(5, 4))
        rows.sum().backward()
        assert rows.shape == (2, 3, 4)


def test_a_class_of_its_own_is_not_exchanged_unasked() -> None:
    class Scaled(nn.Embedding):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    with pytest.raises(InvalidInput, match=r"found a Scaled.*among its bases"):
        HostEmbedding.from_embedding(Scaled(3, 4))


def test_a_llama_of_hugging_face_s_with_its_table_exchanged() -> None:
    pytest.importorskip("transformers")

    def run(make: Make, *, exchanged: bool) -> list[Tensor]:
        net: Any = llama()
        if exchanged:
            net.set_input_embeddings(HostEmbedding.from_embedding(net.get_input_embeddings()))
        model, optimizer = make(net, SGD(lr=0.5, momentum=0.9))
        losses = []
        for index in range(3):
            losses.append(model(**batch(index)).loss)
            optimizer.scale(losses[-1]).backward()
            finish(optimizer)
        with torch.inference_mode():
            losses.append(model(**batch(9)).loss)
        return [loss.detach().clone() for loss in losses]

    settings = Settings(precision="bf16", options=Options(poison=True, group_bytes=8192))
    got = managed(partial(run, exchanged=True), settings, stand_in, Budget(device="256KiB", host=HOST))
    assert not differences(plain(partial(run, exchanged=False), settings), got)
    assert got.statistics[0].planned_passes >= 3
