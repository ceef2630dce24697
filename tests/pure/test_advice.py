"""What is suggested: it is simulated, it fits, and it holds when followed."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from _trainings import GIB, MIB, MODEL, timed, training
from ps_core._command import advice as advising
from ps_core._command.advice import advice, remedies
from ps_core._command.forecast import Forecast, Training, forecast, trace_of
from ps_core._errors import DoesNotFit
from ps_core._extents import Precision
from ps_core._simulate.machine import MACHINES
from ps_core._workloads.named_shapes import shape

AT_ONCE = replace(MACHINES["t4"], launch_s=0.0, tensor_overhead_s=0.0)
"""A machine that launches work in no time, or models as small as these would wait for little else."""


@pytest.mark.parametrize(
    ("queue", "words"), [("cpu", "the optimizer step on the CPU (6 s"), ("collectives", "the other GPUs (6 s")]
)
def test_advice_names_what_the_gpu_waits_for(queue: str, words: str) -> None:
    told = timed(10.0, 5.0)
    busy = {**told.planned.prediction.busy_s, "compute": 7.0, "host->device": 2.0, queue: 6.0}
    prediction = replace(told.planned.prediction, busy_s=busy)
    said = advice(MODEL, replace(told, planned=replace(told.planned, prediction=prediction)))
    assert any(line.startswith("compute is idle 50% of the step") and words in line for line in said)


def test_advice_names_the_thread_that_launches() -> None:
    found = forecast(MODEL, training(device=GIB, machine=replace(MACHINES["t4"], launch_s=0.25)))
    prediction = found.prediction
    assert prediction.launching_s == pytest.approx(prediction.step_time_s, rel=0.01)
    words = f"waiting most of all for the thread that launches work ({prediction.launching_s:.3g} s of work)"
    assert any(words in line for line in advice(MODEL, found))


def test_a_good_plan_needs_no_advice() -> None:
    fast = replace(MACHINES["t4"], matmul_flops=1e9)
    assert advice(MODEL, forecast(MODEL, training(device=GIB, machine=fast, checkpointing=False))) == ()


def test_advice_mentions_what_was_chosen_for_the_user() -> None:
    found = forecast(MODEL, training(offload_checkpoints=True))
    assert found.offloads
    assert not any("inputs of recomputed blocks leave" in line for line in advice(MODEL, found))
    chosen = replace(found, training=training(offload_checkpoints=None))
    assert any("inputs of recomputed blocks leave" in line for line in advice(MODEL, chosen))


def test_advice_warns_of_a_full_host() -> None:
    found = forecast(MODEL, training())
    peaks = {**found.planned.prediction.peak_bytes, "host": found.planned.plan.tiers[1].capacity_bytes}
    prediction = replace(found.planned.prediction, peak_bytes=peaks)
    full = replace(found, planned=replace(found.planned, prediction=prediction))
    assert any("host memory is full" in line for line in advice(MODEL, full))


def test_what_the_device_lacks_is_suggested_with_its_reserve() -> None:
    """Twice or four times what is there may still be nothing once the reserve is taken."""
    asked = training(device=4 * MIB, host=2**34)
    asked = replace(asked, cluster=replace(asked.cluster, device_reserve=2 * GIB))
    (told,) = [each for each in remedies(MODEL, asked) if each.startswith("--device-memory")]
    assert told.startswith("--device-memory 3GiB (predicted: fits")
    forecast(MODEL, apply(asked, told))


def levers(said: tuple[str, ...]) -> dict[str, float]:
    """Changes that advice suggests, with the tokens/s that it promises."""
    rows = (
        re.fullmatch(r"(--[^:]*): ([\d,]+) tokens/s, [\d.]+ times as many \(predicted(?:;.*)?\)", line) for line in said
    )
    return {row[1]: float(row[2].replace(",", "")) for row in rows if row}


@pytest.mark.parametrize(
    ("asked", "best"),
    [
        (training(device=28 * MIB, host=64 * MIB, batch=12, chunked_loss=False, machine=AT_ONCE), "--chunked-loss"),
        (training(device=GIB), "--no-checkpointing"),
        (training(device=24 * MIB, batch=1), "--batch 2"),
        (training(batch=8, precision=Precision.FP32, machine=AT_ONCE), "--accumulate 4"),
        (training(device=28 * MIB, batch=12, machine=AT_ONCE), "--step-in-backward"),
        (training(device=28 * MIB, batch=12, precision=Precision.FP16, machine=AT_ONCE), "--step-speculative"),
    ],
)
def test_advice_is_simulated_and_holds_when_followed(asked: Training, best: str) -> None:
    found = forecast(MODEL, asked)
    lines = advice(MODEL, found)
    assert all(("excludes clipping" in line) is line.startswith("--step-in-backward") for line in lines)
    said = levers(lines)
    assert 1 <= len(said) <= 3
    assert best in said
    assert list(said.values()) == sorted(said.values(), reverse=True)
    for label, speed in said.items():
        assert speed > 1.03 * found.tokens_per_s
        assert forecast(MODEL, apply(asked, label)).tokens_per_s == pytest.approx(speed, rel=0.02)


def test_advice_repeats_no_note() -> None:
    found = forecast(MODEL, training(device=9 * MIB, host=44 * MIB, batch=1))
    assert found.planned.plan.notes
    assert not set(found.planned.plan.notes) & set(advice(MODEL, found))


def test_a_trace_is_as_it_was_recorded() -> None:
    trace = trace_of(MODEL, training(), offload=False)
    found = forecast(trace, training(host=512 * MIB, machine=AT_ONCE))
    assert [label for label, _ in advising._levers(trace, found)] == ["--accumulate 4", "--step-in-backward"]


def test_what_steps_within_backward_rule_out_is_not_suggested(monkeypatch: pytest.MonkeyPatch) -> None:
    """They need one micro-batch a step, and one GPU."""
    asked = training(batch=8, precision=Precision.FP32, machine=AT_ONCE)
    monkeypatch.setattr(Forecast, "passes_alone_s", 0.0)  # so that waiting for the optimizer is all that takes time
    assert "--accumulate 4" in dict(advising._levers(MODEL, forecast(MODEL, asked)))
    assert "--accumulate 4" not in dict(advising._levers(MODEL, forecast(MODEL, replace(asked, step_in_backward=True))))
    small = replace(CASES["too little of everything"], step_in_backward=True)
    assert list(advising._clusters(MODEL, small)) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ["--step-in-backward"]),
        ({"precision": Precision.FP16}, ["--step-speculative"]),
        ({"step_in_backward": True}, []),
        ({"accumulate": 2}, []),
        ({"gpus": 2}, []),
    ],
)
def test_steps_within_backward_are_suggested_where_they_are_possible(
    changes: dict[str, Any], said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Forecast, "passes_alone_s", 0.0)  # so that waiting for the optimizer is all that takes time
    found = dict(advising._levers(MODEL, forecast(MODEL, training(**changes))))
    assert [label for label in found if label.startswith("--step")] == said


def test_checkpoints_may_leave_if_they_were_told_to_stay() -> None:
    for kept, said in ((False, True), (None, False)):
        found = forecast(MODEL, training(offload_checkpoints=kept))
        assert ("--offload-checkpoints" in dict(advising._levers(MODEL, found))) is said


def apply(asked: Training, remedy: str) -> Training:
    """Do what a remedy says."""
    words = remedy.split(" (", maxsplit=1)[0].split()
    cluster = asked.cluster
    while words:
        word = words.pop(0)
        if word == "--batch":
            asked = replace(asked, batch=int(words.pop(0)))
        elif word in ("--gpus", "--nodes"):
            cluster = replace(cluster, **{word[2:]: int(words.pop(0))})
        elif word in ("--host-memory", "--device-memory"):
            size = int(words.pop(0).removesuffix("GiB")) * GIB
            cluster = replace(cluster, **{word[2:].replace("-", "_"): size})
        elif word == "--accumulate":
            asked = replace(asked, accumulate=int(words.pop(0)))
        elif word.startswith("--no-"):
            asked = replace(asked, **{word[5:].replace("-", "_"): False})
        elif word == "--head-tiles":
            asked = replace(asked, head_tiles=int(words.pop(0)))
        elif word == "--step-speculative":
            asked = replace(asked, step_in_backward=True, speculative=True)
        elif word == "--disk":
            cluster = replace(cluster, disk=int(words.pop(0).removesuffix("GiB")) * GIB)
        else:
            asked = replace(asked, **{word[2:].replace("-", "_"): True})
    return replace(asked, cluster=cluster)


CASES = {
    "too little of everything": training(device=8 * MIB, host=20 * MIB),
    "no host at all": training(device=8 * MIB, host=0),
    "activations": training(device=24 * MIB, batch=64, checkpointing=False),
    "logits": training(device=24 * MIB, batch=16),
    "no device": training(device=0, host=30 * MIB, disk=16 * MIB, batch=2),
    "many GPUs": training(device=8 * MIB, host=20 * MIB, gpus=8),
}


@pytest.mark.parametrize("name", CASES)
def test_every_remedy_works(name: str) -> None:
    asked = CASES[name]
    with pytest.raises(DoesNotFit):
        forecast(MODEL, asked)
    found = remedies(MODEL, asked)
    assert 1 <= len(found) <= 3
    for remedy in found:
        assert "predicted: fits" in remedy
        forecast(MODEL, apply(asked, remedy))


def test_a_disk_is_suggested_besides_more_memory() -> None:
    """Who cannot add memory to a computer may have a disk in it."""
    asked = training(device=24 * MIB, host=20 * MIB)
    assert [each.split()[0] for each in remedies(MODEL, asked)] == ["--host-memory", "--disk", "--gpus"]
    assert "--disk 128GiB" in remedies(MODEL, asked)[1]


def test_where_no_tier_is_large_enough_both_are_named() -> None:
    """An 8B on a small computer: neither memory is enough alone, and eight computers are not what one has."""
    found = shape("llama-8b")
    asked = training(device=4 * GIB, host=16 * GIB, machine=MACHINES["laptop"])
    said = remedies(found, asked)
    assert [re.findall(r"--[a-z-]+", each.split(" (")[0]) for each in said] == [
        ["--device-memory", "--host-memory"],
        ["--device-memory", "--disk"],
        ["--gpus", "--nodes"],
    ]
    for each in said[:2]:
        forecast(found, replace(apply(asked, each), quick=True))
    assert not list(advising._device_and_host(found, training(device=0)))
    assert len(list(advising._device_and_disk(found, asked))) == 4 * len(list(advising._devices(found, asked))) > 0
    assert not list(advising._device_and_host(found, training(device=GIB, host=10 * 2**40)))


def test_remedies_for_a_trace_change_only_the_machine() -> None:
    asked = CASES["activations"]
    found = remedies(trace_of(MODEL, asked, offload=False), asked)
    assert found
    assert not any("--batch" in remedy or "checkpoint" in remedy for remedy in found)


def test_reserves_can_swallow_a_suggested_machine() -> None:
    """More processes on a node may leave no host memory at all: such a cluster is not suggested."""
    asked = training(device=8 * MIB, host=20 * MIB)
    asked = replace(asked, cluster=replace(asked.cluster, host_reserve_per_rank=10 * MIB))
    for remedy in remedies(MODEL, asked):
        assert "--gpus 2 (" not in remedy
        apply(asked, remedy).cluster.tiers()


def test_only_what_is_not_done_already_is_suggested() -> None:
    lean = training(batch=1, chunked_loss=True, offload_checkpoints=True, disk=GIB)
    assert list(advising._options(MODEL, lean)) == []
    assert list(advising._batches(MODEL, lean)) == []
    said = [label.split()[0] for label, _ in advising._memories(MODEL, lean)]
    assert said == ["--host-memory"] * 4 + ["--device-memory"], "in whole GiB, each size once"
    said = [label.split()[0] for label, _ in advising._memories(MODEL, training(device=0))]
    assert said == ["--host-memory"] * 4
    assert len(list(advising._disks(MODEL, training(device=0)))) == 4
    assert not list(advising._disks(MODEL, lean))
    assert [label for label, _ in advising._clusters(MODEL, replace(lean, cluster=CASES["many GPUs"].cluster))] == [
        f"--gpus {8 * factor} --nodes {factor}" for factor in (2, 4, 8, 16)
    ]


def test_options_that_save_memory_are_suggested_one_after_the_other() -> None:
    asked = training(checkpointing=False, chunked_loss=False, offload_checkpoints=False)
    found = [label for label, _ in advising._options(MODEL, asked)]
    assert found == [
        "--checkpointing",
        "--checkpointing --chunked-loss",
        "--checkpointing --chunked-loss --offload-checkpoints",
    ]


def test_the_bound_is_what_overlapping_segments_would_allow() -> None:
    found = forecast(MODEL, training())
    prediction = found.planned.prediction
    assert found.bound_tokens_per_s >= found.tokens_per_s
    assert found.bound_tokens_per_s * prediction.bound_step_time_s == pytest.approx(
        found.tokens_per_s * prediction.step_time_s
    )
