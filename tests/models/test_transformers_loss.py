"""`use_chunked_loss`: losses and gradients of transformers' own, without all logits."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from ps_core import SGD, AdamW, Budget, DoesNotFit, InvalidInput
from ps_core.engine import chunked, release, save_weights, statistics
from ps_models import use_chunked_loss

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
load_file: Any = pytest.importorskip("safetensors.torch", reason="safetensors is not installed").load_file
WORDS, WIDTH = 211, 32
SIZES: dict[str, Any] = {"vocab_size": WORDS, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"intermediate_size": 64, "num_key_value_heads": 2, "max_position_embeddings": 64, "use_cache": False}
OWN: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"tie_word_embeddings": True, "head_dim": 16},
    "granite": {"logits_scaling": 4.0},
    "cohere": {"logit_scale": 0.25},
    "mixtral": {"num_local_experts": 4, "output_router_logits": True},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": WIDTH, "dropout": 0.0},
    "phi": {"resid_pdrop": 0.0, "embd_pdrop": 0.0},  # its head has a bias
    "mamba": {"state_size": 4},
}


def made(kind: str, **more: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **(SIZES | OWN.get(kind, {}) | more))
    return transformers.AutoModelForCausalLM.from_config(config)


def batch(seed: int = 0, rows: int = 3) -> dict[str, Tensor]:
    ids = torch.randint(3, WORDS, (rows, 16), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[:, :3] = -100
    return {"input_ids": ids, "labels": labels}


def outcome(model: Any, **more: Any) -> tuple[Any, list[Any]]:
    model.zero_grad()
    found = model(**batch(), **more)
    found.loss.backward()
    return found, [each.grad for each in model.parameters()]


@pytest.mark.parametrize("kind", OWN)
@pytest.mark.parametrize("more", [{}, {"num_items_in_batch": 17}, {"return_dict": False}], ids=str)
def test_loss_and_gradients_are_those_of_transformers(kind: str, more: dict[str, Any]) -> None:
    if kind == "mamba" and "num_items_in_batch" in more:
        more = {}  # which it does not take
    whole, chunks = made(kind).train(), made(kind).train()
    use_chunked_loss(chunks, tokens=7)
    if "return_dict" in more:
        loss, *others = chunks(**batch(), **more)
        assert all(WORDS not in getattr(each, "shape", ()) for each in others)
        torch.testing.assert_close(loss, whole(**batch(), **more)[0], rtol=1e-6, atol=0)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # that logits are made
        found, gradients = outcome(chunks, **more)
    right, wanted = outcome(whole, **more)
    assert "logits" not in found
    assert type(found) is type(right)
    torch.testing.assert_close(found.loss, right.loss, rtol=1e-6, atol=0)
    assert sum(each is not None for each in wanted) > 10
    for each, other in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(each, other, rtol=1e-4, atol=1e-7)


def test_other_arguments_of_the_loss() -> None:
    whole, chunks = made("llama"), made("llama")
    use_chunked_loss(chunks, tokens=5)
    ids, labels = batch().values()
    for more in ({"ignore_index": 7}, {"shift_labels": labels.roll(3, 1)}):
        if "ignore_index" in more:
            labels = labels.where(labels != -100, 7)
        right, found = (model(input_ids=ids, labels=labels, **more) for model in (whole, chunks))
        assert "logits" not in found
        torch.testing.assert_close(found.loss, right.loss, rtol=1e-6, atol=0)


def test_logits_without_labels_and_after_an_error() -> None:
    whole, chunks = made("llama"), made("llama")
    use_chunked_loss(chunks)
    ids = batch()["input_ids"]
    with pytest.raises(ValueError, match="labels: expected one for each of 48 tokens, found 45"):
        chunks(input_ids=ids, labels=ids[:, 1:])
    assert torch.equal(chunks(input_ids=ids).logits, whole(input_ids=ids).logits)
    assert torch.equal(chunks.generate(ids, max_new_tokens=4), whole.generate(ids, max_new_tokens=4))


def test_a_model_that_caps_its_logits_has_them_whole() -> None:
    config = {"head_dim": 16, "final_logit_softcapping": 5.0}
    whole, chunks = made("gemma2", **config).train(), made("gemma2", **config).train()
    use_chunked_loss(chunks, tokens=7)
    with pytest.warns(UserWarning, match="computes with its logits before the loss"):
        found, gradients = outcome(chunks)
    right, wanted = outcome(whole)
    assert found.logits.shape == right.logits.shape
    torch.testing.assert_close(found.loss, right.loss, rtol=1e-6, atol=0)
    for each, other in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(each, other, rtol=1e-4, atol=1e-7)


def forbid_token(logits: Any) -> None:
    logits[..., 3] = -9.0


def add_in_place(logits: Any) -> Any:
    logits += 0.5 * logits[..., :1]
    return 2.0 * logits


CHANGES = [
    forbid_token,
    add_in_place,
    lambda logits: 3.0 * -(1.0 - logits),
    lambda logits: (logits - 1) ** 2 @ torch.eye(WORDS, dtype=logits.dtype),
    lambda logits: torch.cat([logits[..., :5], logits[..., 5:] * (logits > 0)[..., 5:]], -1),
    lambda logits: torch.stack([logits, logits]).sum(0),
    lambda logits: torch.stack(list(logits)).where(logits != 0, len(logits)),
    lambda logits: logits.float().sigmoid(),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.filterwarnings("ignore:use_chunked_loss")
def test_logits_that_are_changed(change: Any, dtype: torch.dtype) -> None:
    whole, chunks = made("llama").to(dtype), made("llama").to(dtype)
    use_chunked_loss(chunks, tokens=7)
    for model in (whole, chunks):
        model.lm_head.register_forward_hook(lambda head, inputs, logits: change(logits))
    right, wanted = outcome(whole)
    found, gradients = outcome(chunks)
    assert torch.equal(found.logits, right.logits)
    assert torch.equal(found.loss, right.loss)
    for each, other in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(each, other)


@pytest.mark.parametrize("kind", ["llama", "phi", "granite"])
def test_autocast_by_accelerate(kind: str) -> None:
    accelerate: Any = pytest.importorskip("accelerate", reason="accelerate is not installed")
    whole, chunks = made(kind), made(kind)
    use_chunked_loss(chunks, tokens=7)
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    try:
        whole, chunks = accelerator.prepare(whole, chunks)
        right, wanted = outcome(whole)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # that logits are made
            found, gradients = outcome(chunks)
    finally:
        accelerate.state.AcceleratorState._reset_state(True)
    assert "logits" not in found
    torch.testing.assert_close(found.loss, right.loss, rtol=1e-6, atol=0)
    found_n, right_n = (torch.cat([each.flatten() for each in grads]) for grads in (gradients, wanted))
    assert (found_n - right_n).norm() < 0.01 * right_n.norm()


@pytest.mark.parametrize("before", [False, True])
def test_weights_that_a_hook_takes_away(before: bool) -> None:
    accelerate: Any = pytest.importorskip("accelerate", reason="accelerate is not installed")
    whole, chunks = made("llama").eval(), made("llama").eval()
    if before:
        use_chunked_loss(chunks)
    accelerate.cpu_offload(chunks, torch.device("cpu"))
    if not before:
        use_chunked_loss(chunks)
    with torch.no_grad():
        assert torch.equal(chunks(**batch()).loss, whole(**batch()).loss)


def test_more_tokens_and_a_second_call() -> None:
    model = made("llama")
    use_chunked_loss(model, tokens=9)
    model.resize_token_embeddings(WORDS + 5, mean_resizing=False)
    right, wanted = outcome(model)
    assert right.logits.shape[-1] == WORDS + 5
    use_chunked_loss(model, tokens=9)
    found, gradients = outcome(model)
    assert "logits" not in found
    assert len(model._forward_hooks) == len(model._forward_pre_hooks) == 1
    torch.testing.assert_close(found.loss, right.loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(gradients[0], wanted[0], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("shape", [(48,), (1, 3, 16)])
def test_labels_of_another_shape(shape: tuple[int, ...]) -> None:
    whole, chunks = made("llama"), made("llama")
    use_chunked_loss(chunks, tokens=7)
    ids, labels = batch().values()
    right, found = (model(input_ids=ids, labels=labels.view(shape)).loss for model in (whole, chunks))
    torch.testing.assert_close(found, right, rtol=1e-6, atol=0)


def test_a_model_without_a_head_beside_it() -> None:
    config = transformers.AutoConfig.for_model("llama", **SIZES, pad_token_id=0)
    reward = transformers.LlamaForSequenceClassification(config)
    with pytest.raises(InvalidInput, match="LlamaForSequenceClassification has no part with transformers' loss"):
        use_chunked_loss(reward)
    policy = made("llama")
    use_chunked_loss(torch.nn.ModuleList([reward, policy]))
    assert "logits" not in policy(**batch())


def test_gradients_of_gradients_are_refused() -> None:
    model = made("llama")
    use_chunked_loss(model)
    with pytest.raises(InvalidInput, match="leave use_chunked_loss out"):
        torch.autograd.grad(model(**batch()).loss, model.lm_head.weight, create_graph=True)


def test_copies_files_and_a_second_call() -> None:
    model = made("llama")
    names = list(model.state_dict())
    use_chunked_loss(model, tokens=9)
    use_chunked_loss(model, tokens=5)
    assert model.loss_function.tokens == 5
    assert list(model.state_dict()) == names
    right, _ = outcome(model)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            copied.lm_head.weight.zero_()
        found, _ = outcome(copied)
        assert found.loss.item() == pytest.approx(torch.tensor(float(WORDS)).log().item())
        assert "logits" not in found
    again, _ = outcome(model)
    assert torch.equal(again.loss, right.loss)


def train(model: Any, budget: Budget | None, precision: str, steps: int = 5) -> tuple[list[float], dict[str, Tensor]]:
    device = "cpu" if budget is None else "emulated"
    model, optimizer = chunked(
        model, AdamW(lr=1e-2), device=device, budget=budget, precision=precision, max_grad_norm=1.0
    )
    losses = []
    for step in range(steps):
        loss = model(**batch(step, rows=24)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        losses.append(model.eval()(**batch(9, rows=24)).loss.item())
    seen, values = statistics(model), {name: each.clone() for name, each in model.state_dict().items()}
    release(model)
    if budget is not None:
        assert seen.planned_passes == seen.passes
        assert seen.tiers["device"].peak_bytes <= seen.tiers["device"].budget_bytes
    return losses, values


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_budget_that_whole_logits_do_not_fit(precision: str, tied: bool) -> None:
    def model(tokens: int | None) -> Any:
        found = made("llama", vocab_size=4096, tie_word_embeddings=tied)
        if tokens is not None:
            use_chunked_loss(found, tokens)
        return found

    budget = Budget(device="5MiB" if precision == "fp32" else "4MiB", host="64MiB")
    losses, values = train(model(48), None, precision)
    found, others = train(model(48), budget, precision)
    assert found == losses
    assert all(torch.equal(values[name], others[name]) for name in values)
    with pytest.raises(DoesNotFit):
        train(model(None), budget, precision)


def test_adapters(recwarn: pytest.WarningsRecorder) -> None:
    peft: Any = pytest.importorskip("peft", reason="peft is not installed")

    def adapted(tokens: int | None) -> Any:
        model = made("llama")
        found = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
        if tokens is not None:
            use_chunked_loss(found, tokens)
        return found.train()

    right, wanted = outcome(adapted(None))
    found, gradients = outcome(adapted(7))
    assert "logits" not in found
    torch.testing.assert_close(found.loss, right.loss, rtol=1e-6, atol=0)
    assert any(each is not None and each.abs().sum() > 0 for each in gradients)
    for each, other in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(each, other, rtol=1e-4, atol=1e-7)
    head = peft.LoraConfig(r=4, target_modules=["q_proj", "lm_head"])
    with pytest.raises(InvalidInput, match=r"LlamaForCausalLM is a peft\.tuners\.lora\.\S*Linear, expected torch"):
        use_chunked_loss(peft.get_peft_model(made("llama"), head))


def test_a_copy_of_the_head_that_peft_trains(recwarn: pytest.WarningsRecorder) -> None:
    peft: Any = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"])
    whole, chunks = made("llama"), made("llama")
    use_chunked_loss(chunks, tokens=7)
    chunks = peft.get_peft_model(chunks, config)
    chunks.load_state_dict((whole := peft.get_peft_model(whole, config)).state_dict())
    right, wanted = outcome(whole)
    found, gradients = outcome(chunks)
    assert "logits" not in found
    torch.testing.assert_close(found.loss, right.loss, rtol=1e-6, atol=0)
    for each, other in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(each, other, rtol=1e-4, atol=1e-7)
    with pytest.raises(InvalidInput, match=r"ModulesToSaveWrapper, expected.*before the head gets an adapter"):
        use_chunked_loss(peft.get_peft_model(made("llama"), config))


def test_managed_before_or_after(tmp_path: Any) -> None:
    found = []
    for before in (True, False):
        model = made("llama")
        if before:
            use_chunked_loss(model, 11)
        model, optimizer = chunked(
            model, SGD(lr=0.1), precision="fp32", device="emulated", budget=Budget(device="1MiB")
        )
        if not before:
            use_chunked_loss(model, 11)
        for step in range(3):
            model(**batch(step)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        save_weights(tmp_path / f"{before}.safetensors", model)
        found.append({name: each.clone() for name, each in model.state_dict().items()})
        release(model)
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    plain = made("llama")
    plain.load_state_dict(load_file(tmp_path / "True.safetensors"))
    assert all(torch.equal(found[0][name], each) for name, each in plain.state_dict().items())
