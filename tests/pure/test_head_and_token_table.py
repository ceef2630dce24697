"""What need not be on the accelerator as a whole: a token table on the host, a head in tiles; formulas and plans."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from ps_core import cli
from ps_core._command import advice as advising
from ps_core._command import largest_model as scaling
from ps_core._command.advice import advice, remedies
from ps_core._command.forecast import Training, bounds, forecast, model_of, surely_fits, table_of, trace_of
from ps_core._command.largest_model import largest
from ps_core._command.tables import HostTable
from ps_core._errors import DoesNotFit, InvalidInput
from ps_core._extents import Precision
from ps_core._simulate.cluster import Cluster
from ps_core._simulate.machine import MACHINES
from ps_core._trace import Phase
from ps_core._verify import verify
from ps_core._workloads.named_shapes import bert, gpt, shape
from ps_core._workloads.shapes import tensors
from ps_core._workloads.traces_from_shapes import analytic_trace
from ps_core._workloads.workload import Workload

MIB, GIB = 2**20, 2**30
TOKENS, WIDTH, WORDS = 64, 64, 98
TINY = replace(gpt(2, WIDTH, heads=4, vocabulary=WORDS, positions=64), tied_head=False)
LLAMA = replace(shape("llama-10m"), layers=2, vocabulary=1000, tied_head=False)
WORK = Workload(batch=2, seq=32, chunked_loss=True, loss_chunk_tokens=16, head_tiles=4)


# ---------------------------------------------------------------- moments


def test_a_head_in_tiles_is_read_and_differentiated_tile_by_tile() -> None:
    trace = analytic_trace(TINY, WORK)
    head = [(m.name, m.phase, m.reads, m.grads) for m in trace.moments if m.name.startswith("head")]
    names = {index: tensor.name for index, tensor in enumerate(trace.tensors)}
    norm = tuple(index for index, name in names.items() if "ln_f" in name)
    tiles = [next(index for index, name in names.items() if name == f"lm_head.tiles.{n}.weight") for n in range(4)]
    rows = [(f"head tile {n}", (*norm, tile) if n == 0 else (tile,)) for n, tile in enumerate(tiles)]
    assert head == [
        *((name, Phase.FORWARD, reads, ()) for name, reads in rows),
        *((f"{name} backward", Phase.BACKWARD, reads, reads) for name, reads in reversed(rows)),
    ]
    assert [trace.tensors[tile].numel for tile in tiles] == [WIDTH * words for words in (25, 25, 24, 24)]
    assert trace.parameters == TINY.parameters
    whole = analytic_trace(TINY, replace(WORK, head_tiles=1))
    for phase in Phase:
        done, other = (sum(m.flops for m in each.moments if m.phase is phase) for each in (trace, whole))
        assert done == pytest.approx(other)


@pytest.mark.parametrize(
    ("changes", "forward", "backward"),
    [
        ({}, 10 * 16 * 25, 4 * 25 * 64 + 2 * 16 * 25 + max(2 * 2 * 16 * 64, 2 * 25 * 64)),
        ({"loss_chunk_tokens": 60}, 10 * 60 * 25, 4 * 25 * 64 + 2 * 60 * 25 + 2 * 2 * 60 * 64),
        ({"precision_bytes": 4}, 8 * 16 * 25, 4 * 25 * 64 + 4 * 16 * 25 + 2 * 4 * 16 * 64),
        ({"loss_chunk_tokens": 64}, 8 * 64 * 25, 2 * 64 * 25 + 2 * 2 * 64 * 64),
        ({"loss_chunk_tokens": 64, "precision_bytes": 4}, 8 * 64 * 25, 4 * 64 * 25 + 2 * 4 * 64 * 64),
        ({"gradient_buffers": False}, 10 * 16 * 25, 2 * 16 * 25 + 2 * 2 * 16 * 64),
    ],
)
def test_bytes_of_a_head_in_tiles(changes: dict[str, Any], forward: int, backward: int) -> None:
    work = replace(WORK, **changes)
    x, of_tiles = work.precision_bytes * TOKENS * WIDTH, TOKENS * (4 + 1)
    # Inputs, two checkpoints, the norm's input and output; in backward also the gradient, and the newest tile's.
    kept = 16 * TOKENS + 2 * x + 2 * x
    found = {m.name: m.nonmodel_bytes for m in analytic_trace(TINY, work).moments}
    assert {found[f"head tile {n}"] for n in range(4)} == {kept + forward + 16 * of_tiles}
    assert {found[f"head tile {n} backward"] for n in range(4)} == {kept + 2 * x + backward + 20 * of_tiles}


def test_logits_and_gradients_of_wide_tiles() -> None:
    """Logits beyond everything else, and a matrix beyond everything else."""
    wide, tall = replace(TINY, vocabulary=WORDS * 64), replace(WORK, loss_chunk_tokens=63)
    words, x = WORDS * 16, 2 * TOKENS * WIDTH
    fixed = 16 * TOKENS + 6 * x + 20 * TOKENS * 5
    found = {m.name: m.nonmodel_bytes for m in analytic_trace(wide, tall).moments}
    assert found["head tile 0 backward"] == fixed + (4 * 64 + 8 * 63) * words
    found = {m.name: m.nonmodel_bytes for m in analytic_trace(wide, replace(tall, loss_chunk_tokens=1)).moments}
    assert found["head tile 0 backward"] == fixed + (2 + 6 * 64) * words
    for each, logits in ((2, 6), (4, 4)):
        one = replace(tall, loss_chunk_tokens=99, precision_bytes=each)
        found = {m.name: m.nonmodel_bytes for m in analytic_trace(wide, one).moments}
        fixed = 16 * TOKENS + 6 * each * TOKENS * WIDTH + 20 * TOKENS * 5
        assert found["head tile 0 backward"] == fixed + max(logits * 64, each * (64 + 64)) * words


def test_tiles_do_not_divide_logits_that_are_made_at_once() -> None:
    whole, tiled = (
        {
            m.name: m.nonmodel_bytes
            for m in analytic_trace(TINY, replace(WORK, chunked_loss=False, head_tiles=n)).moments
        }
        for n in (1, 4)
    )
    assert tiled["head tile 2"] == whole["head"]
    assert tiled["head tile 2 backward"] == whole["head backward"], "12 bytes a logit, beyond any gradient"


@pytest.mark.parametrize("found", [TINY, LLAMA])
def test_a_table_on_the_host_is_in_no_moment(found: Any) -> None:
    work = replace(WORK, head_tiles=1)
    plain, away = analytic_trace(found, work), analytic_trace(found, replace(work, cpu_embedding=True))
    assert away.tensors == plain.tensors[1:]
    assert len(away.moments) == len(plain.moments)
    for one, other in zip(plain.moments, away.moments, strict=True):
        assert tuple(index - 1 for index in one.reads if index) == other.reads
        assert tuple(index - 1 for index in one.grads if index) == other.grads
        assert one.name == "embedding backward" or one.nonmodel_bytes == other.nonmodel_bytes
    positions = found.positions * found.hidden * (found is TINY)
    missing = 2 * (max(found.vocabulary * found.hidden, positions) - positions)
    assert plain.moments[-1].nonmodel_bytes - away.moments[-1].nonmodel_bytes == missing


@pytest.mark.parametrize(
    ("found", "changes", "says"),
    [
        (replace(TINY, tied_head=True), {"cpu_embedding": True}, r"is its token table .* as with --untied-head"),
        (replace(TINY, tied_head=True), {"head_tiles": 2}, "is its token table"),
        (replace(bert(2, 64, 4, name="b"), tied_head=False), {"head_tiles": 2}, "head of their own$"),
        (TINY, {"head_tiles": 99}, "found 99, allowed is at most 98"),
        (TINY, {"head_tiles": 0}, "head_tiles must be a whole number of at least 1"),
    ],
)
def test_what_no_model_can_be_is_refused(found: Any, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        analytic_trace(found, Workload(**{"batch": 1, "seq": 8, **changes}))


# ---------------------------------------------------------------- the table


@pytest.mark.parametrize(
    ("each", "micro", "held", "traffic", "step"),
    [
        (2, 1, 16, 2 + 6, 28),
        (2, 3, 20, 3 * 2 + 3 * (2 + 4) + 2 * 4 + 4, 30),
        (4, 1, 20, 4 + (4 + 4) + 4, 28),
    ],
)
def test_a_table_s_bytes_and_seconds(each: int, micro: int, held: int, traffic: int, step: int) -> None:
    table = HostTable(numel=1000, width=10, tokens=7, element_bytes=each, accumulate=micro)
    machine = replace(MACHINES["t4"], latency_s=0.0, host_bandwidth=1e3, h2d_bandwidth=100.0, d2h_bandwidth=10.0)
    rows = 7 * 10 * each
    assert table.held_bytes == 1024 * held
    assert table.moved_bytes == {"host->device": micro * rows, "device->host": micro * (rows + 56)}
    lookups, gradients, update = table.seconds(machine)
    assert lookups == pytest.approx(micro * (56 / 10 + 4 * rows / 1e3 + rows / 100))
    assert gradients == pytest.approx(micro * (rows / 10 + 5 * rows / 1e3) + 1000 * traffic / 1e3)
    assert update == pytest.approx(1000 * step / 1e3)
    many, fast = 2**25, replace(machine, host_bandwidth=1e12)
    for large, rate in ((many // each, 1e12), (many // each + 64, 4e9)):
        dense = replace(table, numel=large).seconds(fast)[1] - table.seconds(fast)[1]
        new, old = large - 1000, micro * each
        assert dense == pytest.approx(large * old / rate + new * (traffic - old) / 1e12, rel=1e-3)
    assert replace(table, states=3).held_bytes == 1024 * (held + 4)
    assert replace(table, states=3).seconds(machine)[2] == pytest.approx(update + 8)
    late = table.seconds(replace(machine, latency_s=1.0))
    assert [b - a for a, b in zip(table.seconds(machine), late, strict=True)] == pytest.approx([2 * micro, micro, 1])


# ---------------------------------------------------------------- forecasts

MODEL = replace(gpt(4, 256, vocabulary=4096, name="small"), tied_head=False)
HELD = 16 * 4096 * 256


def training(device: int = 64 * MIB, host: int = 256 * MIB, *, gpus: int = 1, **more: Any) -> Training:
    cluster = Cluster(
        gpus=gpus, device_memory=device, host_memory=host, device_reserve=0, host_reserve=0, host_reserve_per_rank=0
    )
    how = {"batch": 2, "seq": 128, "quick": True, "chunked_loss": True, "cpu_embedding": True}
    return Training(cluster=cluster, machine=MACHINES["t4"], **{**how, **more})


def test_a_forecast_adds_the_table_to_what_the_plan_promises() -> None:
    asked = training(accumulate=3)
    found = forecast(MODEL, asked)
    verify(found.planned.program, found.planned.plan)
    table, told, both = found.table, found.planned.prediction, found.prediction
    assert table is not None
    assert table == table_of(MODEL, asked)
    assert table.held_bytes == 20 * 4096 * 256
    assert found.planned.plan.tiers[1].capacity_bytes == 256 * MIB - table.held_bytes
    assert found.tiers[1].capacity_bytes == 256 * MIB
    assert both.peak_bytes == {**told.peak_bytes, "host": told.peak_bytes["host"] + table.held_bytes}
    assert both.moved_bytes["host->device"] - told.moved_bytes["host->device"] == 3 * 2 * 128 * 256 * 2
    assert both.moved_bytes["device->host"] - told.moved_bytes["device->host"] == 3 * 2 * 128 * (256 * 2 + 8)
    lookups, gradients, update = table.seconds(asked.machine)
    assert both.forward_s - told.forward_s == pytest.approx(lookups)
    assert both.backward_s - told.backward_s == pytest.approx(gradients)
    assert both.update_s - told.update_s == pytest.approx(update)
    waited = lookups + gradients + update
    assert both.step_time_s - told.step_time_s == pytest.approx(waited)
    assert both.stalled_s - told.stalled_s == pytest.approx(waited)
    assert sum(both.busy_s.values()) - sum(told.busy_s.values()) == pytest.approx(waited)
    assert found.step_time_s == both.step_time_s
    assert found.parameters == MODEL.parameters == found.trace.parameters + 4096 * 256
    assert found.tflops_per_gpu == pytest.approx(8 * MODEL.parameters * 3 * 256 / both.step_time_s / 1e12)


def test_it_saves_room_on_the_device() -> None:
    """Tiles and table: budgets in which neither alone, nor a whole model, has a plan."""

    model = replace(MODEL, vocabulary=16384)

    def needed(**how: Any) -> int:
        return bounds(model, training(**how))[0].needed_bytes

    both, least = needed(head_tiles=16), needed(head_tiles=16, cpu_embedding=False)
    assert both < 0.7 * least < 0.7 * needed()
    fits = training(int(1.05 * both), head_tiles=16)
    assert forecast(model, fits).prediction.peak_bytes["device"] <= fits.cluster.device_memory
    with pytest.raises(DoesNotFit):
        forecast(model, replace(fits, cpu_embedding=False))


@pytest.mark.parametrize("host", [0, HELD - 128])
def test_a_host_without_room_for_the_table(host: int) -> None:
    asked = training(host=host)
    with pytest.raises(DoesNotFit, match="with the token table") as refused:
        forecast(MODEL, asked)
    refusal = refused.value
    found = refusal.tier, refusal.needed_bytes, refusal.available_bytes, refusal.proven
    assert found == ("host", HELD, host, True)
    assert surely_fits(MODEL, asked) is False
    (need,) = bounds(MODEL, asked)
    assert (need.where, need.needed_bytes, need.available_bytes) == ("host", HELD, host)


def test_what_is_lacking_beside_the_table_is_told_of_everything() -> None:
    asked = training(8 * MIB, HELD + 4 * MIB, head_tiles=16)
    with pytest.raises(DoesNotFit) as refused:
        forecast(MODEL, asked)
    assert refused.value.tier == "all tiers together"
    assert refused.value.available_bytes == HELD + 12 * MIB
    whole = bounds(MODEL, asked)[1]
    assert (whole.needed_bytes, whole.available_bytes) == (refused.value.needed_bytes, HELD + 12 * MIB)
    with pytest.raises(DoesNotFit) as refused:
        forecast(MODEL, training(2 * MIB))
    assert (refused.value.tier, refused.value.available_bytes) == ("device", 2 * MIB)


@pytest.mark.parametrize(("where", "why"), [({"gpus": 2}, "several processes"), ({"device": 0}, "the CPU computes")])
def test_where_it_changes_nothing_that_is_said(where: dict[str, int], why: str) -> None:
    asked = training(**where)
    found = forecast(MODEL, asked)
    assert found.table is None
    assert (
        found.prediction == found.planned.prediction == forecast(MODEL, replace(asked, cpu_embedding=False)).prediction
    )
    assert any(line.startswith("--cpu-embedding changes nothing here") and why in line for line in advice(MODEL, found))
    assert not any("--cpu-embedding" in line for line in advice(MODEL, forecast(MODEL, training())))
    with pytest.raises(InvalidInput, match="is its token table"):
        forecast(replace(MODEL, tied_head=True), asked)


def test_a_head_of_its_own_is_another_model() -> None:
    tied = replace(MODEL, tied_head=True)
    model = model_of(tied, training(untied_head=True))
    assert model == MODEL
    assert trace_of(tied, training(untied_head=True), offload=False) == trace_of(MODEL, training(), offload=False)
    assert model_of(tied, training(cpu_embedding=False)) == tied
    with pytest.raises(InvalidInput, match="--untied-head: the head of bert-base is its token table"):
        model_of(shape("bert-base"), training(untied_head=True))
    recorded = trace_of(MODEL, training(cpu_embedding=False), offload=False)
    assert table_of(recorded, training()) is None
    for how in ({"untied_head": True}, {"head_tiles": 2}, {"cpu_embedding": True}):
        with pytest.raises(InvalidInput, match="a trace is of the model it was recorded of"):
            forecast(recorded, training(**{"cpu_embedding": False, **how}))
    with pytest.raises(InvalidInput, match="head_tiles must be at least 1"):
        training(head_tiles=0)


# ---------------------------------------------------------------- advice


def labels(model: Any, asked: Training) -> list[str]:
    return [label for label, _ in advising._apart(model, asked)]


def test_what_is_suggested_where_nothing_is_as_large_as_table_or_head() -> None:
    plain, tied = training(cpu_embedding=False), replace(MODEL, tied_head=True)
    assert labels(MODEL, plain) == ["--cpu-embedding", "--head-tiles 16", "--cpu-embedding --head-tiles 16"]
    assert labels(MODEL, training()) == ["--head-tiles 16"]
    assert labels(MODEL, training(head_tiles=2)) == ["--head-tiles 16"]
    assert labels(MODEL, replace(plain, head_tiles=12)) == [
        "--cpu-embedding",
        "--head-tiles 24",
        "--cpu-embedding --head-tiles 24",
    ]
    assert labels(MODEL, replace(plain, cluster=training(gpus=2).cluster)) == ["--head-tiles 16"]
    untied = "--untied-head --chunked-loss"
    assert labels(tied, replace(plain, chunked_loss=False)) == [
        f"{untied} --head-tiles 16",
        f"{untied} --cpu-embedding --head-tiles 16",
    ]
    assert labels(MODEL, training(head_tiles=64)) == [], "a block's matrices are larger"
    assert labels(replace(MODEL, vocabulary=512), plain) == []
    assert labels(shape("bert-base"), plain) == []
    assert labels(trace_of(MODEL, plain, offload=False), plain) == []
    assert labels(MODEL, replace(plain, cluster=training(device=0).cluster)) == []


def test_a_remedy_names_them_and_works() -> None:
    asked = training(7 * MIB, cpu_embedding=False)
    tied = replace(MODEL, tied_head=True)
    with pytest.raises(DoesNotFit):
        forecast(tied, asked)
    words = "--untied-head --cpu-embedding --head-tiles 16 (predicted: fits, as another model; "
    assert any(remedy.startswith(words) for remedy in remedies(tied, asked))
    found = forecast(tied, replace(asked, untied_head=True, cpu_embedding=True, head_tiles=16))
    assert found.parameters == MODEL.parameters


# ---------------------------------------------------------------- the command


def test_the_largest_model_with_a_head_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "HIDDEN", (128,))
    monkeypatch.setattr(scaling, "names", lambda: ("gpt-10m", "bert-base", "bert-large"))
    asked = training(6 * MIB, 40 * MIB, untied_head=True, head_tiles=8)
    found = largest(asked, min_tflops=0, vocabulary=2048)
    assert found is not None
    assert found.shape.tied_head is False
    assert found.shape.parameters == sum(tensor.numel for tensor in tensors(found.shape)) == found.forecast.parameters
    assert found.forecast.table is not None
    with pytest.raises(InvalidInput, match="is its token table"):
        largest(replace(asked, untied_head=False), min_tflops=0)


@pytest.fixture
def no_gpu_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "accelerators", lambda: ())


@pytest.mark.usefixtures("no_gpu_here")
def test_the_options_reach_the_plan(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    def run(*words: str) -> tuple[int, str, str]:
        how = ("--device-memory", "2GiB", "--host-memory", "16GiB", "--gpus", "1", "--seq", "128", "--chunked-loss")
        status = cli.main((*words, *how))
        out, err = capsys.readouterr()
        return status, out, err

    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config |= {"intermediate_size": 128, "vocab_size": 512, "max_position_embeddings": 256}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for model, table in ((("gpt-10m", "--untied-head"), 8192 * 256), (("--hf", str(tmp_path)), 512 * 64)):
        words = ("plan", *model, "--cpu-embedding", "--head-tiles", "3")
        status, out, err = run(*words, "--json")
        assert (status, err) == (0, "")
        found = json.loads(out)
        assert (found["cpu_embedding"], found["head_tiles"]) == (True, 3)
        assert found["host_table_bytes"] == 16 * table
        assert found["tiers"]["host"]["peak_bytes"] >= 16 * table
        assert "of host memory in every moment" in run(*words)[1]
    assert found["parameters"] > 2 * table
    status, out, _ = run("plan", "gpt-10m", "--json")
    told = json.loads(out)
    assert (told["untied_head"], told["cpu_embedding"], told["head_tiles"], told["host_table_bytes"]) == (
        False,
        False,
        1,
        0,
    )
    for states in range(5):
        words = ("plan", "gpt-10m", "--untied-head", "--cpu-embedding", "--optimizer-states", str(states), "--json")
        told = json.loads(run(*words)[1])
        assert (told["optimizer_states"], told["host_table_bytes"]) == (states, (8 + 4 * states) * 8192 * 256)
    status, out, err = run("plan", "gpt-10m", "--cpu-embedding")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "--untied-head" in err
    status, out, _ = run("plan", "gpt-10m", "--untied-head", "--cpu-embedding", "--precision", Precision.FP32, "--json")
    assert json.loads(out)["host_table_bytes"] == 20 * 8192 * 256
