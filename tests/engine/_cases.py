"""The table of cases: what a model does, how a step is shaped, and whether training must match or be refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

import _models as models
from _models import VOCABULARY, WIDTH
from _reference import GROUP_BYTES, Make, Spec
from ps_core import SGD, AdamW, Options

STEPS = 5
"""The first is recorded, the second replayed, the third is where cases do something else, two come after."""
BOTH, FP32 = ("fp32", "bf16"), ("fp32",)
ADAMW = AdamW(lr=1e-2, weight_decay=0.1)
Batch = tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row. ``step`` does all of a training step and gives what is to be compared."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int], Batch]
    step: Callable[[Case, nn.Module, Any, int], list[Tensor]]
    loss: Callable[..., Tensor]
    precisions: tuple[str, ...] = BOTH
    spec: Spec = ADAMW
    max_grad_norm: float | None = 1.0
    options: Options = field(default_factory=lambda: Options(poison=True, group_bytes=GROUP_BYTES))

    def run(self, make: Make) -> list[Tensor]:
        """Train."""
        model, optimizer = make(self.build(), self.spec)
        logs: list[Tensor] = []
        for index in range(STEPS):
            logs += self.step(self, model, optimizer, index)
        return logs


def generator(index: int) -> torch.Generator:
    """The same numbers for the same step, whatever else has drawn some."""
    return torch.Generator().manual_seed(1000 + index)


def rows(index: int, *shape: int) -> Batch:
    """Normal numbers, ``shape`` or 4 x 6 x width."""
    return (torch.randn(shape or (4, 6, WIDTH), generator=generator(index)),)


def tokens(index: int, batch: int = 4, length: int = 8) -> Batch:
    """Token numbers."""
    return (torch.randint(VOCABULARY, (batch, length), generator=generator(index)),)


def square(model: nn.Module, *batch: Any) -> Tensor:
    """Mean square of what the model makes of the batch."""
    return model(*batch).float().square().mean()


def next_token(model: nn.Module, batch: Tensor) -> Tensor:
    """Cross entropy of the next token, from logits."""
    logits = model(batch).float()
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())


def hugging_face(model: nn.Module, batch: Tensor) -> Tensor:
    """The loss that a transformers language model gives."""
    return model(input_ids=batch, labels=batch).loss.float()


def finish(optimizer: Any) -> None:
    """End a step."""
    optimizer.step()
    optimizer.zero_grad()


def evaluate(case: Case, model: nn.Module, batch: Batch) -> Tensor:
    """The loss in evaluation mode, without gradients."""
    model.eval()
    with torch.no_grad():
        loss = case.loss(model, *batch)
    model.train()
    return loss


# Shapes of a step


def once(case: Case, model: nn.Module, optimizer: Any, index: int) -> list[Tensor]:
    loss = case.loss(model, *case.inputs(index))
    optimizer.scale(loss).backward()
    finish(optimizer)
    return [loss.detach()]


def backward_twice(case: Case, model: nn.Module, optimizer: Any, index: int) -> list[Tensor]:
    loss = case.loss(model, *case.inputs(index))
    optimizer.scale(loss).backward(retain_graph=True)
    optimizer.scale(loss).backward()
    finish(optimizer)
    return [loss.detach()]


def two_losses(case: Case, model: nn.Module, optimizer: Any, index: int) -> list[Tensor]:
    left, right = (out.float().square().mean() for out in model(*case.inputs(index)))
    optimizer.scale(left).backward(retain_graph=True)
    optimizer.scale(right).backward()
    finish(optimizer)
    return [left.detach(), right.detach()]


def two_forwards(case: Case, model: nn.Module, optimizer: Any, index: int) -> list[Tensor]:
    losses = [case.loss(model, *case.inputs(index + offset)) for offset in (0, 50)]
    for loss in losses:
        optimizer.scale(loss).backward()
    finish(optimizer)
    return [loss.detach() for loss in losses]


def forward_backward_twice(case: Case, model: nn.Module, optimizer: Any, index: int) -> list[Tensor]:
    losses = []
    for offset in (0, 50):
        losses.append(case.loss(model, *case.inputs(index + offset)))
        optimizer.scale(losses[-1]).backward()
    finish(optimizer)
    return [loss.detach() for loss in losses]


def evaluation_before_step(case: Case, model: nn.Module, optimizer: Any, index: int) -> list[Tensor]:
    loss = case.loss(model, *case.inputs(index))
    optimizer.scale(loss).backward()
    seen = evaluate(case, model, case.inputs(index + 50))
    finish(optimizer)
    return [loss.detach(), seen]


def evaluation_between_steps(case: Case, model: nn.Module, optimizer: Any, index: int) -> list[Tensor]:
    logs = once(case, model, optimizer, index)
    return [*logs, evaluate(case, model, case.inputs(index + 50))] if index % 2 else logs


def input_penalty(case: Case, model: nn.Module, optimizer: Any, index: int) -> list[Tensor]:
    (x,) = case.inputs(index)
    x.requires_grad_()
    out = model(x).float().square().mean()
    (slope,) = torch.autograd.grad(out, x, create_graph=True)
    loss = out + (slope.float().flatten(1).norm(dim=1) - 1).square().mean()
    optimizer.scale(loss).backward()
    finish(optimizer)
    return [loss.detach()]


def weight_penalty(case: Case, model: nn.Module, optimizer: Any, index: int) -> list[Tensor]:
    loss = case.loss(model, *case.inputs(index))
    slopes = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    total = loss + sum(slope.float().square().sum() for slope in slopes)
    optimizer.scale(total).backward()
    finish(optimizer)
    return [loss.detach(), total.detach()]


def norm_term(case: Case, model: nn.Module, optimizer: Any, index: int) -> list[Tensor]:
    squares = [parameter.float().square().sum() for parameter in model.parameters()]
    loss = case.loss(model, *case.inputs(index)) + 1e-2 * torch.stack(squares).sum()
    optimizer.scale(loss).backward()
    with torch.no_grad():
        norm = torch.stack([parameter.float().norm() for parameter in model.parameters()]).sum()
    finish(optimizer)
    return [loss.detach(), norm]


def with_other_weights(case: Case, model: nn.Module, optimizer: Any, index: int) -> list[Tensor]:
    own = dict(model.named_parameters())
    replaced = {"1.wide.weight": own["1.wide.weight"] * 0.5, "3.norm.bias": own["2.norm.bias"]}
    first = functional_call(model, own, case.inputs(index))
    second = functional_call(model, replaced, case.inputs(index + 50))
    loss = first.float().square().mean() + second.float().square().mean()
    optimizer.scale(loss).backward()
    finish(optimizer)
    return [loss.detach()]


def parts_directly(case: Case, model: nn.Module, optimizer: Any, index: int) -> list[Tensor]:
    (x,) = case.inputs(index)
    x = x.to(model.left.weight.dtype)
    hidden = model.trunk[0](x)
    loss = model.right(model.trunk[2](hidden)).float().square().mean() + model.left(hidden).float().mean().square()
    optimizer.scale(loss).backward()
    finish(optimizer)
    return [loss.detach()]


def other_rate(case: Case, model: nn.Module, optimizer: Any, index: int) -> list[Tensor]:
    for group in optimizer.param_groups:
        group["lr"] *= 0.5
    return once(case, model, optimizer, index)


def at_the_third(
    change: Callable[[nn.Module], Any], case: Case, model: nn.Module, optimizer: Any, index: int
) -> list[Tensor]:
    """Something happens to the model once the plan of the first two steps is in use."""
    if index == 2:
        change(model)
    return once(case, model, optimizer, index)


# What cases do to a model


def freeze(model: nn.Module) -> None:
    model[1].requires_grad_(False)


def remove(model: nn.Module) -> None:
    model[1].narrow.bias = None


class Halved(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight / 2


def parametrize(model: nn.Module) -> None:
    nn.utils.parametrize.register_parametrization(model[1].wide, "weight", Halved())


def start_checkpointing(model: nn.Module) -> None:
    model.checkpointing = True


def partly_frozen() -> nn.Module:
    model = models.stack()
    model[0].requires_grad_(False)
    model[2].wide.requires_grad_(False)
    return model


def channels_last() -> nn.Module:
    return models.convolutional("group").to(memory_format=torch.channels_last)


def images(index: int) -> Batch:
    return rows(index, 4, 3, 8, 8)


def images_last(index: int) -> Batch:
    return tuple(each.contiguous(memory_format=torch.channels_last) for each in images(index))


def other_shape(index: int) -> Batch:
    return tokens(index, 6, 13) if index == 2 else tokens(index)


def some_blocks(index: int) -> Batch:
    return (*rows(index), ((0, 1, 2, 3), (0, 1, 2, 3), (0, 2), (3, 1), (0, 1, 2, 3))[index])


def two_towards(index: int) -> Batch:
    """Rows that a router sends to few of its experts, other ones each time."""
    (x,) = rows(index, 12, WIDTH)
    return (0.02 * x + x[:1] * (1 + index),)


def deberta() -> nn.Module:
    from transformers import DebertaV2Config, DebertaV2ForMaskedLM

    return DebertaV2ForMaskedLM(
        DebertaV2Config(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=2 * WIDTH,
            max_position_embeddings=32,
            relative_attention=True,
            position_buckets=8,
            pos_att_type=["p2c", "c2p"],
            type_vocab_size=0,
            pad_token_id=0,
        )
    )


def mamba() -> nn.Module:
    from transformers import MambaConfig, MambaForCausalLM

    return MambaForCausalLM(
        MambaConfig(vocab_size=VOCABULARY, hidden_size=WIDTH, state_size=4, num_hidden_layers=2, time_step_rank=4)
    )


class Adversaries(Case):
    """Two models, two optimizers: each step trains the one that tells apart and the one that imitates."""

    def run(self, make: Make) -> list[Tensor]:
        """Train both."""
        imitator, imitator_optimizer = make(models.stack(3), self.spec)
        judge, judge_optimizer = make(nn.Sequential(models.stack(3), nn.Linear(WIDTH, 1)), SGD(lr=1e-2, momentum=0.9))
        logs = []
        for index in range(STEPS):
            (real,), (noise,) = rows(index, 8, WIDTH), rows(index + 50, 8, WIDTH)
            imitated = imitator(noise)
            right = functional.softplus(-judge(real).float()) + functional.softplus(judge(imitated.detach()).float())
            judge_optimizer.scale(right.mean()).backward()
            finish(judge_optimizer)
            fooled = functional.softplus(-judge(imitated).float()).mean()
            imitator_optimizer.scale(fooled).backward()
            finish(imitator_optimizer)
            judge_optimizer.zero_grad()
            logs += [right.mean().detach(), fooled.detach()]
        return logs


class Taught(Case):
    """A teacher under management without an optimizer, and its student."""

    def run(self, make: Make) -> list[Tensor]:
        """Train the student."""
        teacher, none = make(models.Language(layers=4), None)
        assert none is None
        student, optimizer = make(models.Language(layers=2), self.spec)
        logs = []
        for index in range(STEPS):
            (batch,) = tokens(index)
            with torch.no_grad():
                target = teacher(batch).float().softmax(-1)
            loss = functional.cross_entropy(student(batch).float().flatten(0, 1), target.flatten(0, 1))
            optimizer.scale(loss).backward()
            finish(optimizer)
            logs.append(loss.detach())
        return logs


def case(name: str, build: Callable[[], nn.Module], **more: Any) -> Case:
    """A row of the table: plain steps on normal numbers, unless it says otherwise."""
    return Case(name=name, build=build, **({"inputs": rows, "step": once, "loss": square} | more))


LANGUAGE = {"inputs": tokens, "loss": next_token}


def keep(*patterns: str) -> Options:
    return Options(poison=True, group_bytes=GROUP_BYTES, keep_fp32=patterns)


CASES: tuple[Case, ...] = (
    # what torch has
    case("linear", models.stack),
    case("lstm", partial(models.Recurrent, nn.LSTM)),
    case("gru", partial(models.Recurrent, nn.GRU)),
    case("conv", partial(models.convolutional, "group"), inputs=images),
    case("channels_last", channels_last, inputs=images_last, max_grad_norm=None),
    case(
        "batch_norm",
        partial(models.convolutional, "batch"),
        inputs=images,
        step=evaluation_between_steps,
        options=keep("[147].*"),
    ),
    case("multihead_attention", models.Attention),
    case("transformer", models.Seq2Seq),
    case("transformer_encoder", models.encoder, step=evaluation_between_steps),
    case("parameter_list", models.Listed),
    case("weight_norm_old", partial(models.weight_normed, "old")),
    case("weight_norm_new", partial(models.weight_normed, "new")),
    case("orthogonal", partial(models.parametrized, "orthogonal"), precisions=FP32),
    case("spectral_norm", partial(models.parametrized, "spectral"), step=evaluation_between_steps, precisions=FP32),
    # whose parameter it is
    case("tied", partial(models.Language, tied=True), **LANGUAGE),
    case("foreign_use", models.ForeignUse, **LANGUAGE),
    case("detached_weight", models.Detached),
    case("norm_term", models.stack, step=norm_term),
    case("functional_call", models.stack, step=with_other_weights),
    case("parts_directly", models.Pair, step=parts_directly),
    case("frozen", partly_frozen),
    case("mixed_dtypes", models.stack, options=keep("*norm*")),
    case("unused", models.Skipping),
    case("empty", models.Empty),
    case("skipped_blocks", models.Skipping, inputs=some_blocks),
    case("experts", models.Experts, inputs=two_towards),
    # custom functions
    case("function_saves", partial(models.Custom, "saved")),
    case("function_keeps", partial(models.Custom, "kept")),
    case("function_detaches", partial(models.Custom, "detached")),
    # the shape of a step
    case("backward_twice", models.stack, step=backward_twice),
    case("two_losses", models.Pair, step=two_losses),
    case("two_forwards", models.stack, step=two_forwards),
    case("forward_backward_twice", models.stack, step=forward_backward_twice),
    case("evaluation_before_step", models.stack, step=evaluation_before_step),
    case("evaluation_between_steps", models.stack, step=evaluation_between_steps),
    case("input_penalty", models.stack, step=input_penalty),
    case("weight_penalty", models.stack, step=weight_penalty),
    case("other_rate", models.stack, step=other_rate),
    case("early_stop", models.EarlyStop),
    case("dataclass_outputs", models.WithDataclass, loss=lambda model, x: model(x).loss),
    # what changes on the way
    case("other_shape", models.Language, inputs=other_shape, loss=next_token),
    case("frozen_later", models.stack, step=partial(at_the_third, freeze)),
    case("removed_later", models.stack, step=partial(at_the_third, remove)),
    case("parametrized_later", models.stack, step=partial(at_the_third, parametrize)),
    case("checkpointing_later", models.Language, step=partial(at_the_third, start_checkpointing), **LANGUAGE),
    # whole models
    case("deberta", deberta, inputs=tokens, loss=hugging_face),
    case("mamba", mamba, inputs=tokens, loss=hugging_face),
    Adversaries(name="adversaries", build=models.stack, inputs=rows, step=once, loss=square),
    Taught(name="taught", build=models.Language, inputs=tokens, step=once, loss=next_token),
)
