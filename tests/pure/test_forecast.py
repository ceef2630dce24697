"""Forecasts, advice and the largest model, on models small enough to plan in a moment."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from _trainings import MIB, MODEL, timed, training
from ps_core._command import forecast as forecasting
from ps_core._command import largest_model as scaling
from ps_core._command.advice import advice
from ps_core._command.forecast import Forecast, Subject, Training, Way, bounds, forecast, surely_fits, trace_of
from ps_core._command.largest_model import TooFast, largest
from ps_core._errors import DoesNotFit, InvalidInput
from ps_core._extents import Precision
from ps_core._planner import search as searching
from ps_core._planner.search import TooSlow
from ps_core._simulate.machine import MACHINES
from ps_core._trace import Phase, Trace
from ps_core._verify import verify
from ps_core._workloads.named_shapes import gpt, shape

# ---------------------------------------------------------------- forecasts


def test_a_forecast_counts_by_its_two_formulas() -> None:
    found = forecast(MODEL, training(gpus=2, accumulate=3))
    verify(found.planned.program, found.planned.plan)
    step, tokens = found.planned.prediction.step_time_s, 2 * 128
    assert found.step_time_s == step
    assert found.tokens_per_s == pytest.approx(tokens * 3 * 2 / step)
    assert found.tflops_per_gpu == pytest.approx(8 * MODEL.parameters * tokens * 3 / step / 1e12)
    forward = sum(moment.flops for moment in found.trace.moments if moment.phase is Phase.FORWARD)
    assert found.model_tflops_per_gpu == pytest.approx(3 * forward * 3 / step / 1e12)


def test_nothing_to_do_takes_no_time() -> None:
    trace = Trace(model="nothing", tensors=(), moments=(), tokens=5)
    told = forecast(MODEL, training())
    planned = replace(told.planned, prediction=replace(told.planned.prediction, step_time_s=0.0))
    nothing = Forecast(training=training(), trace=trace, planned=planned, offloads=False)
    assert nothing.tokens_per_s == 0
    assert advice(MODEL, nothing) == ()


def test_precision_reaches_the_planner() -> None:
    found = forecast(MODEL, training(precision=Precision.FP32, group_bytes=4 * 500_000))
    assert found.planned.program.precision is Precision.FP32
    assert found.training.peak_flops == MACHINES["t4"].matmul_flops_fp32
    assert training().peak_flops == MACHINES["t4"].matmul_flops
    assert {group.numel <= 500_000 for group in found.planned.program.layout.groups} == {True}


@pytest.mark.parametrize("states", range(5))
def test_states_of_the_optimizer_reach_the_planner(states: int) -> None:
    found = forecast(MODEL, training(optimizer_states=states))
    assert found.planned.program.states == states


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"batch": 0}, "batch must be at least 1"),
        ({"seq": 0}, "seq must be at least 1"),
        ({"accumulate": 0}, "accumulate must be at least 1"),
        ({"group_bytes": 1}, "cannot hold one parameter"),
        ({"checkpointing": False, "offload_checkpoints": True}, "needs --checkpointing"),
    ],
)
def test_impossible_trainings_are_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        training(**change)


class Scripted:
    """Stands in for planning: what each way of offloading leads to, and what was asked for."""

    def __init__(self, plain: Forecast | None, offloaded: Forecast | None, *, roomy: bool = True) -> None:
        self.answers = {False: plain, True: offloaded}
        self.roomy = roomy
        self.asked: list[tuple[str, bool]] = []

    def __call__(self, subject: Subject, asked: Training, *, offload: bool) -> Any:
        def roomy() -> Forecast | None:
            self.asked.append(("roomy", offload))
            return self.answers[offload] if self.roomy else None

        def tight() -> Forecast:
            self.asked.append(("tight", offload))
            answer = self.answers[offload]
            if answer is None or self.roomy:
                raise DoesNotFit(tier="device", moment="m", needed_bytes=2, available_bytes=1, proven=True)
            return answer

        def beats(_other: object) -> bool:
            own, other = self.answers[True], self.answers[False]
            assert other is not None
            return own is not None and self.roomy and own.step_time_s < other.step_time_s

        return SimpleNamespace(roomy=roomy, tight=tight, beats=beats)


@pytest.mark.parametrize(
    ("plain", "offloaded", "roomy", "asked", "best"),
    [
        ((10.0, 0.1), None, True, "k", 10.0),
        ((10.0, 5.0), (8.0, 3.0), True, "ko", 8.0),
        ((10.0, 5.0), (12.0, 3.0), True, "k", 10.0),
        ((10.0, 5.0), None, True, "k", 10.0),
        (None, (8.0, 3.0), True, "ko", 8.0),
        (None, None, True, "koKO", None),
        ((10.0, 5.0), (8.0, 3.0), False, "koKO", 8.0),
        ((10.0, 5.0), None, False, "koKO", 10.0),
        (None, (8.0, 3.0), False, "koKO", 8.0),
    ],
)
def test_offloading_is_tried_where_it_could_help(
    monkeypatch: pytest.MonkeyPatch,
    plain: tuple[float, float] | None,
    offloaded: tuple[float, float] | None,
    roomy: bool,
    asked: str,
    best: float | None,
) -> None:
    """Letters are plans that were made: k keeps the inputs of recomputed blocks, and o offloads them. In K and O
    extents move one at a time; those take longer, and are made only where no other plan fits. Offloading that is no
    faster by a rough estimate is not planned."""
    script = Scripted(plain and timed(*plain), offloaded and timed(*offloaded), roomy=roomy)
    monkeypatch.setattr(forecasting, "Way", script)
    if best is None:
        with pytest.raises(DoesNotFit):
            forecast(MODEL, training(offload_checkpoints=None))
    else:
        assert forecast(MODEL, training(offload_checkpoints=None)).step_time_s == best
    letters = {("roomy", False): "k", ("roomy", True): "o", ("tight", False): "K", ("tight", True): "O"}
    assert "".join(letters[each] for each in script.asked) == asked


def test_what_cannot_offload_is_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Scripted(timed(10.0, 9.0), timed(1.0, 0.0))
    monkeypatch.setattr(forecasting, "Way", script)
    for asked in (
        training(offload_checkpoints=None, checkpointing=False),
        training(offload_checkpoints=None, host=0),
        training(offload_checkpoints=False),
    ):
        forecast(MODEL, asked)
    forecast(trace_of(MODEL, training(), offload=False), training(offload_checkpoints=None))
    assert script.asked == [("roomy", False)] * 4


def test_a_plan_too_slow_is_not_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither planned to its end nor verified; both kinds of plan."""
    for asked, tight in ((training(), False), (training(device=24 * MIB, host=40 * MIB), True)):
        told = Way(MODEL, asked, offload=False)
        step = (told.tight() if tight else told.roomy() or told.tight()).step_time_s
        checked: list[object] = []
        monkeypatch.setattr(searching, "verify", lambda *args, checked=checked: checked.append(args))
        for slowest, fits in ((1.01 * step, True), (0.99 * step, False)):
            way = Way(MODEL, asked, offload=False, slowest_s=slowest)
            plan = way.tight if tight else way.roomy
            if fits:
                assert plan() is not None
            else:
                with pytest.raises(TooSlow) as caught:
                    plan()
                assert caught.value.step_time_s == pytest.approx(step)
            assert len(checked) == 1
        monkeypatch.undo()


@pytest.mark.parametrize("subject", [MODEL, trace_of(MODEL, training(), offload=False)])
def test_the_promise_is_kept(subject: Subject) -> None:
    """`surely_fits`: False is refused, True is planned, and between the two it does not say."""
    said = {}
    for host in range(0, 80, 5):
        case = training(device=24 * MIB, host=host * MIB)
        said[host] = surely_fits(subject, case)
        if said[host] is None:
            continue
        try:
            forecast(subject, case)
            assert said[host]
        except DoesNotFit:
            assert not said[host]
    assert list(dict.fromkeys(said.values())) == [False, None, True]
    assert min(-need.missing_bytes for need in bounds(subject, training(device=24 * MIB, host=0))) < 0


def test_nothing_is_promised_where_a_tier_on_the_way_to_the_disk_is_too_small() -> None:
    """Memory may be enough in all, and yet nothing can pass through a host that has none left."""
    said = {}
    for host in (1, 2, 4, 8, 16, 32):
        case = training(device=40 * MIB, host=host * MIB, disk=1024 * MIB)
        said[host] = surely_fits(MODEL, case)
        if said[host]:
            forecast(MODEL, case)
    assert (said[1], said[32]) == (None, True)


def test_typical_sizes_of_no_tensors() -> None:
    empty = Trace(model="nothing", tensors=(), moments=())
    assert surely_fits(empty, training())


# ---------------------------------------------------------------- the largest model


@pytest.fixture(autouse=True)
def few_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "names", lambda: ("gpt-10m", "gpt-50m"))


def hunt(asked: Training, **more: Any) -> scaling.Largest | None:
    return largest(asked, **{"vocabulary": 1024, **more})


def test_the_largest_model_fits_and_one_layer_more_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "HIDDEN", (128, 256))
    asked = training(device=32 * MIB, host=48 * MIB, offload_checkpoints=None, chunked_loss=True)
    found = hunt(asked, min_tflops=0)
    assert found is not None
    verify(found.forecast.planned.program, found.forecast.planned.plan)
    model = found.shape
    assert found.forecast.trace.parameters == model.parameters > 70 * MIB / 14 * 0.8
    more = gpt(model.layers + 1, model.hidden, vocabulary=1024)
    for offload in (False, True):
        with pytest.raises(DoesNotFit):
            forecast(more, replace(asked, offload_checkpoints=offload))
    assert found.limit


def test_speed_limits_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "HIDDEN", (256,))
    slow = replace(MACHINES["t4"], host_bandwidth=2e8, h2d_bandwidth=2e8, matmul_flops=2e11)
    asked = training(device=32 * MIB, host=64 * MIB, machine=slow)
    any_speed, fast = hunt(asked, min_tflops=0), hunt(asked)
    assert any_speed is not None
    assert fast is not None
    assert fast.forecast.tflops_per_gpu >= 0.1 > any_speed.forecast.tflops_per_gpu
    assert fast.shape.parameters < any_speed.shape.parameters
    assert "below 0.1" in fast.limit


def test_no_model_may_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "HIDDEN", (256,))
    assert hunt(training(device=MIB, host=MIB)) is None
    with pytest.raises(TooFast, match=r"--min-tflops 1e\+09 is more than .* TFLOPS per GPU"):
        hunt(training(), min_tflops=1e9)
    for least in (-1.0, float("nan"), float("inf")):
        with pytest.raises(InvalidInput, match="--min-tflops"):
            hunt(training(), min_tflops=least)


def test_named_sizes_compete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "HIDDEN", (12288,))
    found = largest(training(device=64 * MIB, host=300 * MIB), min_tflops=0)
    assert found is not None
    assert found.shape.name == "gpt-10m"
    assert found.limit.startswith("gpt-50m") or "does not fit" in found.limit


def test_very_deep_models_move_several_layers_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "HIDDEN", (64,))
    monkeypatch.setattr(scaling, "_DEEP", 8)
    found = hunt(training(device=8 * MIB, host=12 * MIB), min_tflops=0)
    assert found is not None
    assert found.shape.layers > 16
    assert len(found.forecast.planned.program.layout.groups) < found.shape.layers
    given = hunt(training(device=8 * MIB, host=12 * MIB, group_bytes=50_000), min_tflops=0)
    assert given is not None
    assert len(given.forecast.planned.program.layout.groups) > given.shape.layers


def test_sequences_longer_than_usual_have_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "HIDDEN", (128,))
    found = hunt(training(host=16 * MIB, seq=2048, batch=1), min_tflops=0)
    assert found is not None
    assert found.shape.positions == 2048
    assert shape("gpt-10m").positions < 2048


class Limited:
    """Stands in for planning: shapes up to so many layers have a plan, at a speed that falls with their layers."""

    def __init__(self, layers: dict[int, int], roomy: bool = True) -> None:
        self.told = forecast(MODEL, training())
        self.layers = layers
        self.roomy = roomy
        self.tried: list[tuple[int, int]] = []

    def __call__(self, model: Any, asked: Training, *, offload: bool, slowest_s: float) -> Any:
        most = self.layers[model.hidden]

        def plan() -> Forecast:
            self.tried.append((model.hidden, model.layers))
            if model.layers > 2 * most:
                raise DoesNotFit(tier="device", moment="m", needed_bytes=2, available_bytes=1, proven=False)
            step = 1.0 if model.layers <= most else 100.0
            if slowest_s < step:
                raise TooSlow(step)
            told = self.told.planned.prediction
            planned = replace(self.told.planned, prediction=replace(told, step_time_s=step))
            return replace(self.told, planned=planned)

        def roomy() -> Forecast | None:
            return plan() if self.roomy and model.layers <= 2 * most else None

        return SimpleNamespace(roomy=roomy, tight=plan)


@pytest.mark.parametrize("roomy", [True, False])
@pytest.mark.parametrize("limits", [{64: 10, 128: 9}, {64: 37, 128: 1}])
def test_the_search_finds_the_most_layers_of_the_best_hidden_size(
    monkeypatch: pytest.MonkeyPatch, limits: dict[int, int], roomy: bool
) -> None:
    script = Limited(limits, roomy)
    monkeypatch.setattr(scaling, "HIDDEN", tuple(limits))
    monkeypatch.setattr(scaling, "Way", script)
    monkeypatch.setattr(scaling, "names", tuple)
    slowest = script.told.trace.parameters * 8 * script.told.trace.tokens / 1e12 / 50
    found = hunt(training(device=16 * MIB, host=48 * MIB, seq=32, offload_checkpoints=None), min_tflops=slowest)
    assert found is not None
    every = {
        (hidden, layers): gpt(layers, hidden, vocabulary=1024).parameters
        for hidden, most in limits.items()
        for layers in range(1, most + 1)
    }
    assert found.shape.parameters * 1.02 >= max(every.values())
    assert (found.shape.hidden, found.shape.layers) in every
    assert len(set(script.tried)) <= 20


def test_shapes_that_prove_too_large_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Limited({64: 2})
    monkeypatch.setattr(scaling, "HIDDEN", (64,))
    monkeypatch.setattr(scaling, "Way", script)
    monkeypatch.setattr(scaling, "names", tuple)
    found = hunt(training(device=8 * MIB, host=12 * MIB), min_tflops=0)
    assert found is not None
    assert (found.shape.layers, found.limit) == (4, "gpt-5x64: device is too small")


def test_a_plan_that_turns_out_too_slow_is_not_the_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the host takes for a table, say, is only known once the plan is complete."""
    told = forecast(MODEL, training())
    monkeypatch.setattr(scaling, "HIDDEN", (64,))
    monkeypatch.setattr(scaling, "Way", lambda *_, **__: SimpleNamespace(roomy=lambda: told, tight=lambda: told))
    monkeypatch.setattr(scaling, "names", tuple)
    assert hunt(training(device=8 * MIB, host=12 * MIB), min_tflops=told.tflops_per_gpu * 1.01) is None
    assert hunt(training(device=8 * MIB, host=12 * MIB), min_tflops=told.tflops_per_gpu * 0.99) is not None
