"""A trace from fake tensors says what a real run does, and leaves the model and the process alone."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from ps_core import InvalidInput, Moment, Phase, Setup, Tier, Trace, find_plan, machine
from ps_core.cli import main
from ps_core.engine._devices.tensor_bytes import TensorBytesTracker
from ps_core.engine._tracing.fake_trace import CannotTrace, NoLoss, trace

FP32 = 4
IDS = torch.arange(2 * 48).reshape(2, 48) % 90
LANGUAGE = {"input_ids": IDS, "labels": IDS}
SIZES = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
WIDE = {"intermediate_size": 96, "max_position_embeddings": 64}

Model = Callable[[], tuple[nn.Module, Mapping[str, Any]]]


def gpt2() -> tuple[nn.Module, Mapping[str, Any]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 100, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)), LANGUAGE


def bert() -> tuple[nn.Module, Mapping[str, Any]]:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(**SIZES, **WIDE)), LANGUAGE


def llama() -> tuple[nn.Module, Mapping[str, Any]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**SIZES, **WIDE, num_key_value_heads=2))
    return model, {**LANGUAGE, "attention_mask": torch.ones_like(IDS)}


def t5() -> tuple[nn.Module, Mapping[str, Any]]:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    return T5ForConditionalGeneration(T5Config(vocab_size=100, decoder_start_token_id=0, **sizes)), LANGUAGE


def vit() -> tuple[nn.Module, Mapping[str, Any]]:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {name: value for name, value in SIZES.items() if name != "vocab_size"}
    config = ViTConfig(**sizes, intermediate_size=96, image_size=8, patch_size=4, num_labels=7)
    return ViTForImageClassification(config), {"pixel_values": torch.randn(2, 3, 8, 8), "labels": torch.tensor([1, 2])}


class Summed(nn.Module):
    """A model that returns the sum of squares of what another returns."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.inner(x)
        total: torch.Tensor = (out[0] if isinstance(out, tuple) else out).square().sum()
        return total


def gru() -> tuple[nn.Module, Mapping[str, Any]]:
    return Summed(nn.GRU(16, 32, 2, batch_first=True)), {"x": torch.randn(4, 10, 16)}


def pictures() -> tuple[nn.Module, Mapping[str, Any]]:
    layers = (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(8 * 36, 5))
    return Summed(nn.Sequential(*layers)), {"x": torch.randn(2, 3, 8, 8)}


MODELS: dict[str, Model] = {
    "gpt2": gpt2,
    "bert": bert,
    "llama": llama,
    "t5": t5,
    "vit": vit,
    "gru": gru,
    "pictures": pictures,
}


# ---- what a real run does, observed with torch's own hooks


QUESTIONS = {"__get__", "size", "dim", "numel", "is_floating_point", "__hash__", "untyped_storage"}


class Calls(TorchFunctionMode):
    """Notes which parameters torch's functions are called with, one by one."""

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self.names = names
        self.calls: list[frozenset[str]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = frozenset(self.names[id(arg)] for arg in tree_leaves((args, kwargs)) if id(arg) in self.names)
        if found and getattr(func, "__name__", "") not in QUESTIONS:
            self.calls.append(found)
        return func(*args, **(kwargs or {}))


class RealRun:
    """One real forward and backward: which parameters are used, when gradients arrive, the most non-model bytes."""

    def __init__(self, model: nn.Module, batch: Mapping[str, Any]) -> None:
        self.names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.gradients: list[str] = []
        handles = [
            parameter.register_post_accumulate_grad_hook(self._arrive)
            for parameter in model.parameters()
            if parameter.requires_grad
        ]
        tracker = TensorBytesTracker()
        for tensor in {id(tensor): tensor for tensor in (*model.buffers(), *batch.values())}.values():
            tracker.count(tensor)
        tracker.start()
        try:
            with Calls(self.names) as calls:
                result = model(**batch)
            loss = getattr(result, "loss", result)
            del result
            loss.backward()
        finally:
            tracker.stop()
        self.calls = calls.calls
        self.peak_bytes = tracker.take_peak()
        for handle in handles:
            handle.remove()

    def _arrive(self, parameter: torch.Tensor) -> None:
        self.gradients.append(self.names[id(parameter)])
        parameter.grad = None


def used_in_order(traced: Trace) -> list[frozenset[str]]:
    forward = [moment for moment in traced.moments if moment.phase is Phase.FORWARD]
    return [frozenset(traced.tensors[index].name for index in moment.reads) for moment in forward]


def merged(calls: list[frozenset[str]]) -> list[frozenset[str]]:
    """Calls on the same modules' parameters in a row are one moment."""
    runs: list[list[frozenset[str]]] = []
    for call in calls:
        if runs and owners(call) <= owners(runs[-1][0]):
            runs[-1].append(call)
        else:
            runs.append([call])
    return [frozenset().union(*run) for run in runs]


def owners(names: frozenset[str]) -> set[str]:
    return {name.rpartition(".")[0] for name in names}


def gradients_in_order(traced: Trace) -> list[str]:
    return [traced.tensors[index].name for moment in traced.moments for index in moment.grads]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_order_and_peak_are_those_of_a_real_run(name: str, mode: str) -> None:
    model, batch = MODELS[name]()
    model.train(mode == "train")
    traced = trace(model, batch)
    RealRun(model, batch)  # warm-up
    real = RealRun(model, batch)
    assert used_in_order(traced) == merged(real.calls)
    assert gradients_in_order(traced) == real.gradients
    assert 1.0 <= traced.peak_nonmodel_bytes / real.peak_bytes <= 1.10


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_same_with_16_bits(name: str) -> None:
    model, batch = MODELS[name]()
    traced = trace(model, batch, precision="bf16")
    for parameter in model.parameters():  # not the buffers
        parameter.data = parameter.data.bfloat16()
    assert traced == trace(model, batch)
    RealRun(model, batch)
    real = RealRun(model, batch)
    assert 1.0 <= traced.peak_nonmodel_bytes / real.peak_bytes <= 1.10


# ---- the moments, by hand


class Mlp(nn.Module):
    """Two layers, the loss within."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(self.up(x).exp()).sum()
        return y


def named(traced: Trace, moment: Moment) -> tuple[list[str], list[str]]:
    return [traced.tensors[i].name for i in moment.reads], [traced.tensors[i].name for i in moment.grads]


def test_moments_bytes_and_flops_of_two_layers() -> None:
    rows, width, hidden = 10, 20, 30
    traced = trace(Mlp(width, hidden), torch.zeros(rows, width))
    x, h, w = rows * width * FP32, rows * hidden * FP32, width * hidden * FP32
    scalar, bias = FP32, hidden * FP32
    assert [(moment.name, moment.phase, *named(traced, moment)) for moment in traced.moments] == [
        ("forward of up", Phase.FORWARD, ["up.weight", "up.bias"], []),
        ("forward of down", Phase.FORWARD, ["down.weight"], []),
        ("backward of down", Phase.BACKWARD, ["down.weight"], ["down.weight"]),
        ("backward of up", Phase.BACKWARD, [], ["up.bias", "up.weight"]),
    ]
    by_hand = {
        "forward of up": x + h + h,  # the input, the layer's result, its exponential
        "forward of down": x + h + x + scalar,  # the input, the exponential, the result, the loss
        "backward of down": x + h + w + h + 2 * scalar,  # the weight's gradient and the exponential's
        "backward of up": x + w + bias + 2 * scalar,  # what came just before: it reads nothing
    }
    found = {moment.name: moment.nonmodel_bytes for moment in traced.moments}
    assert found == by_hand
    one = 2.0 * rows * width * hidden
    assert [moment.flops for moment in traced.moments] == [one, one, 3 * one, 0.0]  # as for the bytes
    inside = rows * hidden
    elements = {
        "forward of up": 2 * inside,  # the exponential, from and to
        "forward of down": rows * width + 1 + 2,  # the sum; its gradient of ones, like it
        "backward of down": 3 * inside + inside + hidden,  # the exponential's; the bias's, a sum
        "backward of up": 0,
    }
    assert {moment.name: moment.elements for moment in traced.moments} == elements
    assert [(tensor.name, tensor.numel, tensor.trainable) for tensor in traced.tensors] == [
        ("up.weight", 600, True),
        ("up.bias", 30, True),
        ("down.weight", 600, True),
    ]


def test_units_of_ones_own() -> None:
    model, batch = gpt2()
    block = {name: int(name.split(".")[2]) if ".h." in name else -1 for name, _ in model.named_parameters()}
    traced = trace(model, batch, unit_of=lambda name: block[name])
    units = [{block[traced.tensors[i].name] for i in (*m.reads, *m.grads)} for m in traced.moments]
    assert units == [{-1}, {0}, {1}, {2}, {-1}, {-1}, {2}, {1}, {0}, {-1}]
    everything = trace(model, batch, unit_of=lambda _: 0)
    assert [moment.phase for moment in everything.moments] == [Phase.FORWARD, Phase.BACKWARD]
    assert everything.peak_nonmodel_bytes == traced.peak_nonmodel_bytes
    assert sum(moment.flops for moment in everything.moments) == sum(moment.flops for moment in traced.moments)


def test_recomputation_reads_again_in_backward() -> None:
    class Recomputed(Mlp):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = checkpoint(super().forward, x, use_reentrant=False)
            return y

    traced = trace(Recomputed(20, 30), torch.zeros(10, 20))
    backward = [named(traced, moment) for moment in traced.moments if moment.phase is Phase.BACKWARD]
    assert backward == [
        (["up.weight", "up.bias"], []),
        (["down.weight"], ["down.weight"]),
        ([], ["up.bias", "up.weight"]),
    ]


def test_tied_frozen_and_unused_parameters() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(50, 16)
            self.middle = nn.Linear(16, 16).requires_grad_(False)
            self.unused = nn.Linear(3, 3)
            self.head = nn.Linear(16, 50, bias=False)
            self.head.weight = self.table.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.head(self.middle(self.table(ids))).sum()
            return y

    traced = trace(Tied(), torch.arange(12))
    assert [(tensor.name, tensor.trainable) for tensor in traced.tensors] == [
        ("table.weight", True),
        ("middle.weight", False),
        ("middle.bias", False),
        ("unused.weight", True),
        ("unused.bias", True),
    ]
    assert [named(traced, moment) for moment in traced.moments] == [
        (["table.weight"], []),
        (["middle.weight", "middle.bias"], []),
        (["table.weight"], []),
        (["table.weight"], []),
        (["middle.weight"], []),
        ([], ["table.weight"]),
    ]
    assert traced.tokens == 12


def test_forward_alone_and_a_loss_of_ones_own() -> None:
    model, x = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), torch.ones(3, 4)
    alone = trace(model, (x,), training=False)
    assert [moment.phase for moment in alone.moments] == [Phase.FORWARD] * 2
    assert alone.peak_nonmodel_bytes == x.numel() * FP32 + 3 * 8 * FP32 + 3 * 2 * FP32
    with pytest.raises(InvalidInput, match=r"expected a scalar loss with a gradient, found a tensor of shape \(3, 2\)"):
        trace(model, [x])
    trained = trace(model, x, loss=lambda out: out.square().mean())
    assert [moment.phase for moment in trained.moments] == [Phase.FORWARD] * 2 + [Phase.BACKWARD] * 2
    with pytest.raises(InvalidInput, match="precision must be one of bf16, fp16, fp32, found 'int4'"):
        trace(model, x, precision="int4")


def test_a_trace_says_in_which_precision_it_was_recorded() -> None:
    def recorded(dtype: torch.dtype, norm: torch.dtype = torch.float32, **more: Any) -> str:
        model = nn.Sequential(nn.Linear(4, 8, dtype=dtype), nn.Linear(8, 2, dtype=dtype))
        model.scale = nn.Parameter(torch.ones(2, dtype=norm))  # a few elements of another type
        return trace(model, torch.ones(3, 4, dtype=dtype), training=False, **more).precision

    assert recorded(torch.float32) == "fp32"
    assert recorded(torch.float16, torch.float16) == "fp16"
    assert recorded(torch.bfloat16) == "bf16", "most elements count"
    assert recorded(torch.float32, precision="fp16") == "fp16"
    assert recorded(torch.float64) == "", "no precision of this project's"
    assert trace(nn.Flatten(), torch.ones(3, 4), training=False).precision == ""


# ---- the model is left alone


def test_nothing_of_the_model_changes() -> None:
    class Remembers(Mlp):
        last: torch.Tensor | None = None
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            self.last = super().forward(x)
            return self.last

    model = Remembers(20, 30)
    model.register_buffer("steps", torch.zeros(3))
    x = torch.randn(10, 20)
    model(x).backward()  # what hangs on the parameters stays, too: gradients, a graph
    kept = model.last
    before = {name: (id(p), type(p), p.data_ptr(), p.detach().clone(), p.grad) for name, p in model.named_parameters()}
    random = torch.get_rng_state()
    traced = trace(model, x)
    assert len(traced.moments) == 4
    assert (model.calls, model.last) == (1, kept)
    assert torch.equal(torch.get_rng_state(), random)
    for name, parameter in model.named_parameters():
        identity, kind, address, value, gradient = before[name]
        assert (id(parameter), type(parameter), parameter.data_ptr()) == (identity, kind, address)
        assert torch.equal(parameter, value)
        assert parameter.grad is gradient
    assert not model._forward_hooks
    assert model(x).isfinite()


def test_a_meta_model_traces_the_same() -> None:
    model, batch = gpt2()
    real = trace(model, batch)
    with torch.device("meta"):
        model, _ = gpt2()
    assert trace(model, batch) == real
    assert all(parameter.is_meta for parameter in model.parameters())


# ---- where it cannot be done


class Does(nn.Module):
    """A model that does something."""

    def __init__(self, what: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.what = what

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x)
        self.what(y)
        return y.sum()


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (lambda y: bool(y.sum() > 0), rf"DataDependent\w+: aten\._local_scalar_dense.* \({__file__}, line \d+\)$"),
        (lambda y: y.nonzero(), rf"DynamicOutputShape\w+: aten\.nonzero.* \({__file__}, line \d+\)$"),
        (lambda y: y.numpy(), "RuntimeError: .*numpy"),
        (lambda _: 1 // 0, "ZeroDivisionError: integer division or modulo by zero"),
    ],
)
def test_what_ends_the_pass_is_one_clear_error(
    what: Callable[[torch.Tensor], Any], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(
        CannotTrace, match=r"^Does cannot be traced .* recorded on its first iteration instead: "
    ) as found:
        trace(Does(what), torch.ones(2, 2))
    assert "\n" not in str(found.value)
    assert found.match(message)
    assert capfd.readouterr() == ("", "")


def goes_on_forever(x: torch.Tensor) -> None:
    while True:
        x = x + 1


def test_a_pass_without_a_loss_frees_its_tensors() -> None:
    """Softmax saves its own result, which autograd would hold for ever."""
    with pytest.raises(NoLoss):
        trace(nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1)), torch.ones(2, 4))
    assert [each for each in gc.get_objects() if type(each) is FakeTensor] == []


def test_a_pass_that_takes_too_long_is_ended() -> None:
    with pytest.raises(CannotTrace, match=r"instead: a pass on fake tensors was not done after 0.5 s$"):
        trace(Does(goes_on_forever), torch.ones(2, 2), timeout_s=0.5)


@pytest.mark.parametrize("device", ["cuda", "xpu"])
def test_a_device_that_is_not_there(device: str) -> None:
    """With a gradient, an operator there would end the process: there is no guard for the device."""
    if torch.get_device_module(device).is_available():
        pytest.skip("it is there")
    with pytest.raises(CannotTrace, match=rf"a tensor is made on {device}:0, and this computer has no such device"):
        trace(Does(lambda y: torch.zeros(2, device=device, requires_grad=True).exp()), torch.ones(2, 2))
    with pytest.raises(CannotTrace, match=f"PyTorch is not linked with support for {device}|has no such device"):
        trace(Does(lambda y: y.to(device)), torch.ones(2, 2))


def test_what_a_fake_operator_keeps_quiet_about() -> None:
    model, x = Summed(nn.LSTM(4, 4)), torch.ones(3, 2, 4)
    with pytest.raises(CannotTrace, match=r"what aten\.mkldnn_rnn_layer keeps for backward has no size in a fake pass"):
        trace(model, x)
    assert len(trace(model, x, training=False).moments) == 1


def test_wrapper_subclasses_are_named() -> None:
    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls) -> Wrapper:
            made: Wrapper = torch.Tensor._make_wrapper_subclass(cls, (2, 2), dtype=torch.float32)
            return made

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            assert func is torch.ops.aten.detach.default
            return cls()

    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(Wrapper())
    with pytest.raises(CannotTrace, match="'weight' is a Wrapper, whose operators are its own"):
        trace(model, torch.ones(1, 2))


# ---- what it is for


def test_it_survives_json_and_a_plan_can_be_made_from_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, batch = gpt2()
    traced = trace(model, batch, precision="bf16")
    assert traced.model == "GPT2LMHeadModel"
    assert traced.tokens == IDS.numel()
    assert Trace.from_json(traced.to_json()) == traced
    tiers = (Tier("device", traced.peak_nonmodel_bytes + traced.parameters), Tier("host", 100_000_000))
    planned = find_plan(traced, tiers, machine("v100"), setup=Setup())
    assert {instr.visit for segment in planned.plan.segments for instr in segment.instrs} >= set(
        range(len(traced.moments))
    )
    file = tmp_path / "trace.json"
    file.write_text(traced.to_json(), encoding="utf-8")
    assert main(["plan", "--trace", str(file), "--device-memory", "16GiB", "--host-memory", "64GiB"]) == 0
    assert "GPT2LMHeadModel" in capsys.readouterr().out
