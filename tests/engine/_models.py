"""Small modules, each with one habit that a memory manager can trip over."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from ps_core.engine import offloaded

WIDTH, VOCABULARY = 32, 48


class Residual(nn.Module):
    """Norm, wide, narrow, add."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 2 * width)
        self.narrow = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(functional.gelu(self.wide(self.norm(x))))


def stack(layers: int = 4) -> nn.Sequential:
    """Residual blocks in a row."""
    return nn.Sequential(*[Residual() for _ in range(layers)])


class Language(nn.Module):
    """Tokens in, logits out; ``tied``: one table at both ends; ``checkpointing``: recompute every block.

    ``offloading``: offload what blocks are recomputed from.
    """

    def __init__(
        self, *, layers: int = 3, tied: bool = False, checkpointing: bool = False, offloading: bool = False
    ) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Residual() for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.checkpointing, self.offloading = checkpointing, offloading
        if tied:
            self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            with offloaded(block, x) if self.offloading else nullcontext():
                x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        return self.head(self.norm(x))


class ForeignUse(Language):
    """The head is the table's weight, used by a function outside of its module; another weight is used in pieces."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            first, second = block.wide.weight.chunk(2)
            x = x + torch.tanh(functional.linear(x, first)) * torch.sigmoid(functional.linear(x, second)) + block(x)
        return functional.linear(self.norm(x), self.table.weight) + self.head(x)


class Detached(nn.Module):
    """A weight that is also used where no gradient flows, after its own layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            frozen = layer.weight.detach()
            x = torch.tanh(layer(x)) + functional.linear(torch.sin(x), frozen)
        return x


class Recurrent(nn.Module):
    """An LSTM or a GRU between two linear layers."""

    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU]) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, WIDTH)
        self.core = kind(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.core(self.into(x))[0])


def convolutional(norm: str) -> nn.Sequential:
    """Convolutions on images of 3 channels; ``norm`` is batch or group."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 16), (16, 24), (24, 16)):
        after = nn.BatchNorm2d(outputs) if norm == "batch" else nn.GroupNorm(4, outputs)
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), after, nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, WIDTH))


class Attention(nn.Module):
    """Two attentions of torch's own, whose projection modules never run."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.MultiheadAttention(WIDTH, 4, batch_first=True) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, x, x, need_weights=False)[0]
        return x


class Seq2Seq(nn.Module):
    """torch's whole transformer, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.core = nn.Transformer(WIDTH, 4, 2, 2, 2 * WIDTH, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.core(x, x.flip(1))


def encoder() -> nn.TransformerEncoder:
    """torch's encoder, which takes another path in evaluation."""
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 3)


class Listed(nn.Module):
    """Parameters in a ParameterList and a ParameterDict; no module of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, WIDTH) / 6) for _ in range(4))
        self.shifts = nn.ParameterDict({str(index): nn.Parameter(torch.zeros(WIDTH)) for index in range(4)})

    def forward(self, x: Tensor) -> Tensor:
        for index, weight in enumerate(self.weights):
            x = torch.tanh(x @ weight + self.shifts[str(index)])
        return x


def weight_normed(kind: str) -> nn.Sequential:
    """Linear layers under the ``old`` (deprecated) or the ``new`` weight_norm."""
    if kind == "new":
        return nn.Sequential(*[parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)) for _ in range(4)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.Sequential(*[nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH)) for _ in range(4)])


def parametrized(kind: str) -> nn.Sequential:
    """Linear layers kept orthogonal or of spectral norm one."""
    wrap = parametrizations.orthogonal if kind == "orthogonal" else parametrizations.spectral_norm
    return nn.Sequential(*[wrap(nn.Linear(WIDTH, WIDTH)) for _ in range(4)])


class SavedProduct(torch.autograd.Function):
    """x @ w.T; the weight is kept by save_for_backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.flatten(0, -2).t() @ x.flatten(0, -2)


class KeptProduct(torch.autograd.Function):
    """x @ w.T; the weight, or what detach() makes of it, is kept as an attribute, unseen by any hook."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, detach: bool) -> Tensor:
        ctx.x, ctx.weight = x, weight.detach() if detach else weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad @ ctx.weight, grad.flatten(0, -2).t() @ ctx.x.flatten(0, -2), None


class Custom(nn.Module):
    """Weights used only through a custom autograd function: ``saved``, ``kept`` or ``detached``."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.how == "saved":
                product = SavedProduct.apply(x, layer.weight)
            else:
                product = KeptProduct.apply(x, layer.weight, self.how == "detached")
            x = torch.tanh(product + layer.bias)
        return x


class Empty(nn.Module):
    """Parameters of no elements, among others and all alone, used and unused."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
        self.prompt = nn.Parameter(torch.empty(0, WIDTH))
        self.none = nn.Parameter(torch.empty(WIDTH, 0))
        self.unused = nn.Parameter(torch.empty(WIDTH, 0))
        self.frozen = nn.Parameter(torch.empty(0), requires_grad=False)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = [torch.tanh(self.first(x)), x @ self.prompt.t(), x @ self.none, self.frozen.expand(*x.shape[:-1], 0)]
        return self.last(torch.cat(parts, -1))


class EarlyStop(nn.Module):
    """Checkpointed blocks whose end saves nothing, so that recomputation ends inside the last linear layer."""

    def __init__(self, *, reentrant: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual() for _ in range(4))
        self.shifts = nn.ParameterList(nn.Parameter(torch.zeros(WIDTH)) for _ in range(4))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block, shift in zip(self.blocks, self.shifts, strict=True):

            def run(x: Tensor, block: nn.Module = block, shift: Tensor = shift) -> Tensor:
                return block(functional.dropout(x, 0.1)) + shift

            x = checkpoint(run, x, use_reentrant=self.reentrant)
        return x


@dataclass
class Output:
    """What torch's own full backward hooks do not look into."""

    loss: Tensor
    hidden: list[Tensor]


class WithDataclass(nn.Module):
    """Every block gives a dataclass."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.core = Residual()

        def forward(self, x: Tensor) -> Output:
            x = self.core(x)
            return Output(x.float().square().mean(), [x])

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(4))

    def forward(self, x: Tensor) -> Output:
        losses = []
        for block in self.blocks:
            out = block(x)
            losses.append(out.loss)
            (x,) = out.hidden
        return Output(torch.stack(losses).sum(), [x])


class Skipping(nn.Module):
    """Four blocks and a spare one; ``use`` says which run, and the spare never does."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual() for _ in range(4))
        self.spare = Residual()

    def forward(self, x: Tensor, use: tuple[int, ...] = (0, 1, 2, 3)) -> Tensor:
        for index in use:
            x = self.blocks[index](x)
        return x


class Experts(nn.Module):
    """A router that sends every row to one of four experts; some get none."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(Residual() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        share, chosen = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * share[rows, None])
        return out


class Pair(nn.Module):
    """An encoder and two heads, which the loop also calls by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = stack(3)
        self.left = nn.Linear(WIDTH, WIDTH)
        self.right = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.trunk(x)
        return self.left(x), self.right(x)
