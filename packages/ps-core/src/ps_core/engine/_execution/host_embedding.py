"""Define ``HostEmbedding``, a table in host memory, of which only looked-up rows are copied to the accelerator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional

from ps_core._errors import InvalidInput, UnsupportedParameter
from ps_core._plan import Tier
from ps_core.engine._execution.engine import Engine
from ps_core.engine._parameters.managed_parameter import ManagedParameter
from ps_core.engine._parameters.param_state import ParamState
from ps_core.engine._support.log import log_line
from ps_core.engine._tracing.fake_recorder import FakeParameter

_dense = torch.ops.aten.embedding_dense_backward.default


class HostEmbedding(nn.Embedding):
    """An `nn.Embedding` that looks rows up where its table is, and copies them to the ids' device.

    Under `chunked` on an accelerator the table, its optimizer states and its gradient stay in host memory. Rows are
    copied to the accelerator, their gradients are copied back, and the CPU does the step. Results are an
    ``nn.Embedding``'s to the bit; without management it is one. Under management the weight may be used for lookups
    only. ``max_norm``, ``scale_grad_by_freq`` and ``sparse`` are refused.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Make a table; the arguments are those of ``nn.Embedding``."""
        super().__init__(*args, **kwargs)
        self.check()

    @classmethod
    def from_embedding(cls, embedding: nn.Embedding) -> Self:
        """Convert an embedding, keeping its parameter: ``model.wte = HostEmbedding.from_embedding(model.wte)``."""
        if type(embedding) not in (nn.Embedding, cls):
            raise InvalidInput(
                f"from_embedding: expected an nn.Embedding itself, found a {type(embedding).__name__}, which may do "
                "more than look rows up: make a class that has HostEmbedding among its bases"
            )
        made = cls(
            embedding.num_embeddings,
            embedding.embedding_dim,
            embedding.padding_idx,
            embedding.max_norm,
            embedding.norm_type,
            embedding.scale_grad_by_freq,
            embedding.sparse,
            _weight=embedding.weight,
        )
        made.weight = embedding.weight
        return made.train(embedding.training)

    def check(self) -> None:
        """Raise `InvalidInput` for settings that a table on the host does not support."""
        for name in ("max_norm", "scale_grad_by_freq", "sparse"):
            value = getattr(self, name)
            if value not in (None, False):
                raise InvalidInput(
                    f"HostEmbedding with {name}={value!r}: expected None or False, for its gradient is dense and its "
                    "rows are changed by steps only; use nn.Embedding"
                )

    def forward(self, input: Tensor) -> Tensor:
        """Return the rows of these ids, on the ids' device."""
        self.check()
        weight, table = self.weight, _table_of(self.weight)
        if table is not None:
            apply: Any = _Lookup.apply  # torch does not type it
            found: Tensor = apply(weight, input, table, -1 if self.padding_idx is None else self.padding_idx)
            return found
        if weight.device == input.device or weight.is_meta:
            return super().forward(input)
        return functional.embedding(input.to(weight.device), weight, self.padding_idx).to(input.device)


class _Table(Protocol):
    """Protocol of a table in which rows are looked up."""

    def rows(self, ids: Tensor) -> Tensor:
        """Return the rows of these ids, on the ids' device."""

    def gain(self, ids: Tensor, gradient: Tensor, padding: int) -> None:
        """Add the gradient of these rows; ``ids`` are on the host."""


class _Managed:
    """A table under management."""

    __slots__ = ("_engine", "_record")

    def __init__(self, engine: Engine, record: ParamState) -> None:
        self._engine, self._record = engine, record

    def rows(self, ids: Tensor) -> Tensor:
        """Copy the rows of these ids from the home slot to the ids' device."""
        return self._engine.tables.rows(self._record, ids)

    def gain(self, ids: Tensor, gradient: Tensor, padding: int) -> None:
        """Add the gradient of these rows to the gradient that the engine collects for the table."""
        self._engine.tables.gain(self._record, ids, gradient, padding)


class _TracedTable:
    """A table in a fake pass: there are rows on the accelerator, and no table."""

    __slots__ = ("_dtype", "_width")

    def __init__(self, weight: Tensor) -> None:
        self._dtype, self._width = weight.dtype, weight.shape[1]

    def rows(self, ids: Tensor) -> Tensor:
        """Return a fake tensor of the rows' shape, on the ids' device."""
        return torch.empty((*ids.shape, self._width), dtype=self._dtype, device=ids.device)

    def gain(self, ids: Tensor, gradient: Tensor, padding: int) -> None:
        """Do nothing: a fake pass has no gradients."""


def _table_of(weight: Tensor) -> _Table | None:
    """Return the table of a weight that stays on the host; None if the weight is an ordinary parameter."""
    if type(weight) is ManagedParameter:
        owner = weight._owner
        assert isinstance(owner, Engine), "every owner is an Engine"
        return _Managed(owner, weight._record) if weight._record.group.on_host else None
    kind: type[Any] = type(weight)  # a fake pass changes classes
    return _TracedTable(weight) if kind is FakeParameter and getattr(weight, "_on_host", False) else None


class _Lookup(Function):
    """Look rows up, and add their gradients to the table's without autograd, which would sum on the parameter's device.

    (Any: what PyTorch passes to and takes from a `Function`.)
    """

    @staticmethod
    def forward(ctx: Any, weight: nn.Parameter, ids: Tensor, table: _Table, padding: int) -> Tensor:
        ctx.save_for_backward(ids.to("cpu"))
        ctx.weight, ctx.table, ctx.padding = weight, table, padding
        return table.rows(ids)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (ids,) = ctx.saved_tensors
        if _is_asked_for(ctx.weight):
            rows = ctx.weight.shape[0]
            return _dense(gradient, ids.to(gradient.device), rows, ctx.padding, False), None, None, None
        ctx.table.gain(ids, gradient, ctx.padding)
        return None, None, None, None


def _is_asked_for(weight: nn.Parameter) -> bool:
    """Return True during ``torch.autograd.grad(..., weight)``; the caller then returns the gradient itself."""
    with torch._C.DisableTorchFunctionSubclass():
        node = get_gradient_edge(weight).node
    try:
        torch._C._will_engine_execute_node(node)
    except RuntimeError:  # autograd raises if a leaf's gradient is asked for
        return True
    return False


def host_tables(model: nn.Module, tiers: tuple[Tier, ...], *, alone: bool) -> frozenset[str]:
    """Return names of tables that stay on the host; raise `UnsupportedParameter` if more than lookups may read one.

    Return none where everything is on the host, or where processes have shards (``alone``: there is one process).
    """
    tables: dict[int, str] = {}
    for module in model.modules():
        if isinstance(module, HostEmbedding):
            tables[id(module.weight)] = ""
    if not tables or tiers[0].name == "host":
        return frozenset()
    if not alone:
        log_line(
            "HostEmbedding with collectives: its table is cut into shards, and gathered, like every other parameter"
        )
        return frozenset()
    for name, parameter in model.named_parameters():
        if id(parameter) in tables:
            tables[id(parameter)] = name
    for owner, parameter in _others(model):
        if id(parameter) in tables:
            raise UnsupportedParameter(
                f"{tables[id(parameter)]!r} is a table that stays on the host (HostEmbedding), and {owner!r} is the "
                "same parameter, of a module that reads all of it: leave it an nn.Embedding, or give the other a "
                "weight of its own"
            )
    return frozenset(tables.values())


def _others(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of modules that are no tables, under every name."""
    for prefix, module in model.named_modules():
        if not isinstance(module, HostEmbedding):
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    yield f"{prefix}.{name}" if prefix else name, parameter
