"""Define ``chunked``, which puts a model under management."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ps_core._errors import AlreadyManaged, InvalidInput, UnsupportedParameter
from ps_core._extents import Precision
from ps_core._options import AFTER_BACKWARD, SPECULATIVE, Budget, Options, TorchOptimizer, check_unused, mark_used
from ps_core._plan import Tier
from ps_core._planner.eviction_policy import Policy
from ps_core._planner.search import Setup
from ps_core._program import MOST_MICRO_BATCHES
from ps_core.engine._devices.device import Device
from ps_core.engine._devices.select import disk_file, largest_transient_group_bytes, resolve_device, tier_budgets
from ps_core.engine._execution.build_components import Components, single_process_components
from ps_core.engine._execution.compiled_blocks import refuse_compiled
from ps_core.engine._execution.driver_protocols import Scheduler
from ps_core.engine._execution.engine import Engine
from ps_core.engine._execution.find_hooks import hooks_around
from ps_core.engine._execution.hooks import ModelHooks
from ps_core.engine._execution.host_embedding import HostEmbedding, host_tables
from ps_core.engine._execution.plan_scheduler import PlanScheduler
from ps_core.engine._gradients.loss_scale import LossScale
from ps_core.engine._materialized import roll_back_chunked
from ps_core.engine._memory.budget_suggestions import UserLimits
from ps_core.engine._memory.tier_store import TierStore
from ps_core.engine._optim.kernel_rule import FIXED
from ps_core.engine._optim.optimizer import ChunkedOptimizer
from ps_core.engine._optim.rules import OptimizerRule, Spec, rule_of
from ps_core.engine._optim.speculative_steps import SpeculativeSteps
from ps_core.engine._optim.step_in_backward import check_step_option
from ps_core.engine._optim.torch_rule import TorchRule
from ps_core.engine._parameters.aliased_storage import find_ties, tied_by_memory
from ps_core.engine._parameters.first_home_slots import copy_in_values, reserve_homes
from ps_core.engine._parameters.grouping import DTYPES, Grouping, all_names, group_parameters
from ps_core.engine._parameters.managed_parameter import ManagedParameter, find_shared_versions, is_ordinary_for_a_block
from ps_core.engine._parameters.meta_init.initial_values import initial_values
from ps_core.engine._parameters.meta_init.rebuild import refuse_lazy
from ps_core.engine._parameters.unmanaged import move_unmanaged
from ps_core.engine._sharding.collectives_protocol import AsyncCollectives
from ps_core.engine._sharding.join_ranks import GroupJoin, SingleProcess
from ps_core.engine._sharding.planned_scheduler import RanksScheduler
from ps_core.engine._sharding.several_models import for_next_model
from ps_core.engine._sharding.sharded_residency import ShardedResidency
from ps_core.engine._sharding.sharded_step import sharded_components
from ps_core.engine._support.counters import Counters
from ps_core.engine._support.refuse_programs import refuse_script
from ps_core.engine._unmatched_patterns import log_lowered, log_unmatched_patterns, warn_of_gradients


def chunked(  # noqa: PLR0913 - one name for each thing a user may want to say
    model: nn.Module,
    optimizer: Spec | None,
    *,
    device: str | torch.device | Device = "cpu",
    budget: Budget | None = None,
    precision: str | Precision = Precision.BF16,
    max_grad_norm: float | None = None,
    accumulation_steps: int = 1,
    collectives: AsyncCollectives | None = None,
    options: Options | None = None,
) -> tuple[nn.Module, ChunkedOptimizer | None]:
    """Put a model's parameters under management; train it afterwards by a plain PyTorch loop.

    The model is changed in place and returned with the optimizer (None without one). Parameters on ``meta`` are
    initialised group by group. The memory of other parameters is freed as they are packed. ``device`` is ``"cpu"``,
    ``"cuda"`` (or ``"cuda:1"``), or ``"emulated"``: the CPU stands in for an accelerator of ``budget.device`` bytes.
    With ``collectives`` (``ps_dist.connect()``) several processes share the model, each on its part of the batch.
    """
    _check_kinds(optimizer, budget, options, collectives)
    options, budget = options or Options(), budget or Budget()
    if collectives is not None and collectives.processes == 1:
        collectives = None  # there are no others
    _check(model, accumulation_steps)
    rule = None if optimizer is None else rule_of(optimizer, model.named_parameters())
    if rule is not None and rule.whole and collectives is not None:
        raise InvalidInput(
            f"{rule.name} steps whole matrices, and several processes each have a part of a matrix's elements: use one "
            "process (collectives=None), or an optimizer that treats each element alone, as AdamW does"
        )
    if collectives is not None:
        collectives = for_next_model(collectives)
    wishes = _Wishes(model, rule, _precision(precision), max_grad_norm, accumulation_steps, collectives, options)
    ties = find_ties(model)
    if ties and collectives is not None:
        raise tied_by_memory(ties[0], "which processes that share a model cannot keep equal")
    check_unused(budget, type(model).__name__)
    if wishes.training:
        warn_of_gradients(model)
    where = resolve_device(device, pin=options.pin)
    joining = SingleProcess() if collectives is None else GroupJoin(collectives)
    joining.check(where, options.machine)
    tiers = tier_budgets(where, budget, joining.sharers)
    with torch.inference_mode(False):  # or backward could not use what is made here
        packing = wishes.pack(tiers, ties)
        places = " and ".join(tier.name for tier in tiers)
        joining.share(packing, rule, f"{wishes.mode.value} in {places}, {accumulation_steps=}, {max_grad_norm=}")
        given = UserLimits(budget, options, joining.sharers)
        shared = collectives is not None
        if options.cap_allocator:
            where.cap_allocator(None)
        store = TierStore(where, tiers, poison=options.poison, file=disk_file(budget), given=given, shared=shared)
        joining.place_weights(store, packing)
        engine, chunked_optimizer = wishes.engine(store, packing)
        try:
            copy_in_values(packing.records, joining.values(initial_values(model)), engine)
            find_shared_versions(engine.records)
            move_unmanaged(model, where.torch_device)
            engine.management.install()
        except BaseException:
            roll_back_chunked(engine)
            raise
    mark_used(budget, type(model).__name__, _is_managed(engine))
    if collectives is None or collectives.process == 0:
        names = [name for tied in all_names(model).values() for name in tied]
        log_unmatched_patterns(type(model).__name__, names, options, chunked_optimizer)
        log_lowered(type(model).__name__, engine.records, options.keep_fp32)
    return model, chunked_optimizer


@dataclass(frozen=True, slots=True)
class _Wishes:
    """The arguments of one `chunked` call, and the objects made from them."""

    model: nn.Module
    rule: OptimizerRule | None
    mode: Precision
    max_grad_norm: float | None
    accumulation_steps: int
    collectives: AsyncCollectives | None
    options: Options

    @property
    def training(self) -> bool:
        """Return True if the model has an optimizer."""
        return self.rule is not None

    @property
    def overwrites(self) -> bool:
        """Return True if gradients are written over the parameters."""
        return self.mode is not Precision.FP32 and self.accumulation_steps == 1

    @property
    def cast(self) -> torch.dtype | None:
        """Return the type that the model's inputs are cast to."""
        return DTYPES[self.mode] if self.options.cast_inputs else None

    def pack(self, tiers: tuple[Tier, ...], ties: list[list[str]]) -> Grouping:
        """Return the model's parameters in groups."""
        tables = host_tables(self.model, tiers, alone=self.collectives is None)
        for tie in ties:
            if not tables.isdisjoint(tie):
                raise tied_by_memory(tie, "and a HostEmbedding's table stays on the host")
        return self._packing(tiers)(self.model, tables=tables, ties=ties)

    def _packing(self, tiers: tuple[Tier, ...]) -> Callable[..., Grouping]:
        """Return a function that packs a model's parameters; it holds no reference to the model."""
        return partial(
            group_parameters,
            options=self.options,
            precision=self.mode,
            states=None if self.rule is None else self.rule.kinds,
            device_bytes=largest_transient_group_bytes(tiers) if len(tiers) > 1 else None,
        )

    def engine(self, store: TierStore, packing: Grouping) -> tuple[Engine, ChunkedOptimizer | None]:
        """Reserve home slots, and make the engine and its optimizer."""
        if self.training:
            check_step_option(
                self.options,
                self.mode,
                max_grad_norm=self.max_grad_norm,
                accumulation_steps=self.accumulation_steps,
                alone=self.collectives is None,
            )
        sums = self.training and not self.overwrites and not store.resident
        reserve_homes(store, packing.groups, accumulates=sums)
        loss_scale = LossScale() if self.mode is Precision.FP16 and self.training else None
        counters = Counters(by_torch=isinstance(self.rule, TorchRule))
        parts = self._parts(store, packing, counters)
        if self.options.step == SPECULATIVE and self.training:
            parts = replace(parts, speculation=SpeculativeSteps(parts.residency, counters, loss_scale))
        engine = Engine(
            parts,
            counters,
            loss_scale=loss_scale,
            constant_bytes=_constant_bytes(self.model, store.device),
            together=self.collectives,
            scheduler=partial(self._scheduler, parts),
            management=partial(
                ModelHooks, self.model, group=self._packing(store.tiers), cast=self.cast, accumulates=sums
            ),
        )
        if self.rule is None:
            return engine, None
        made = ChunkedOptimizer(
            engine, engine.records, self.rule, loss_scale=loss_scale, max_grad_norm=self.max_grad_norm
        )
        engine.use(made.awaits)
        engine.stepping.use(made.settings)
        if engine.speculation is not None:
            engine.speculation.use(made.settings)
        return engine, made

    def _parts(self, store: TierStore, packing: Grouping, counters: Counters) -> Components:
        """Return the engine's components: for whole groups in one process, or for one rank's shards."""
        if self.collectives is None:
            return single_process_components(store, packing.groups, counters, overwrites=self.overwrites)
        return sharded_components(store, packing.groups, counters, self.collectives, overwrites=self.overwrites)

    def _scheduler(self, parts: Components, engine: Engine) -> Scheduler:
        """Return the scheduler that chooses the driver of each pass."""
        ranks = processes = here = 1
        if self.collectives is not None:
            ranks, processes = self.collectives.ranks, self.collectives.processes
            here = min(processes, self.collectives.local_ranks)
        setup = Setup(
            ranks=ranks,
            copies=processes // ranks,
            ranks_per_node=here if ranks % here == 0 or here % ranks == 0 else None,
            precision=self.mode,
            accumulate=self.accumulation_steps,
            training=self.training,
            states=0 if self.rule is None else self.rule.kinds,
            policy=Policy(self.options.policy),
            step_in_backward=self.options.step != AFTER_BACKWARD,
            speculative=self.options.step == SPECULATIVE,
        )
        name, options, cast = type(self.model).__name__, self.options, self.cast
        if isinstance(parts.residency, ShardedResidency):
            return RanksScheduler(engine, setup, model_name=name, options=options, cast=cast)
        return PlanScheduler(engine, setup, model_name=name, options=options, cast=cast)


def _precision(precision: str | Precision) -> Precision:
    try:
        return Precision(precision)
    except ValueError:
        known = ", ".join(mode.value for mode in Precision)
        raise InvalidInput(f"precision must be one of {known}; found {precision!r}") from None


# Any: also wrong arguments.
def _check_kinds(optimizer: Any, budget: Any, options: Any, collectives: Any) -> None:
    expected = [
        (
            "optimizer",
            optimizer,
            type(optimizer) in (*FIXED, TorchOptimizer),
            "AdamW(...), Adam(...), SGD(...) or TorchOptimizer(...) of ps_core",
        ),
        ("budget", budget, isinstance(budget, Budget), "a ps_core.Budget, as in Budget(device='8GiB')"),
        ("options", options, isinstance(options, Options), "a ps_core.Options, as in Options(prefetch=2)"),
        ("collectives", collectives, hasattr(collectives, "local_ranks"), "what ps_dist.connect() gives"),
    ]
    for name, given, right, what in expected:
        if given is not None and not right:
            kind = given if isinstance(given, type) else type(given)
            found = repr(given) if isinstance(given, str) else f"{kind.__module__}.{kind.__qualname__}"
            if given is kind and kind in (*FIXED, TorchOptimizer):
                found = f"the class {kind.__name__}, not yet called: {kind.__name__}()"
            elif name == "optimizer" and issubclass(kind, torch.optim.Optimizer):
                faster = [each.__name__ for each in FIXED if kind is getattr(torch.optim, each.__name__)]
                found += (
                    f"; try: {faster[0]}(lr=...) of ps_core"
                    if faster
                    else f"; try: TorchOptimizer({kind.__module__}.{kind.__qualname__}, lr=...)"
                )
            raise InvalidInput(f"{name} must be {what}, or None; found {found}")


def _check(model: nn.Module, accumulation_steps: int) -> None:
    if not isinstance(model, nn.Module):
        raise InvalidInput(f"chunked(model, ...) expects an nn.Module, found {type(model).__name__}")
    for name, parameter in model.named_parameters():
        if isinstance(parameter, ManagedParameter):
            raise AlreadyManaged(f"{name!r} is under management already: release(model) first")
        if is_ordinary_for_a_block(parameter):
            raise AlreadyManaged(
                f"{name!r} is under management already, and an ordinary parameter only inside this block of "
                "materialized(...): copy.deepcopy(model) here gives a model that chunked(...) takes"
            )
    if hooks_around(model) is not None:
        raise AlreadyManaged(
            f"this {type(model).__name__} is under management already, although all its parameters were replaced "
            "since: release(model) first"
        )
    if not any(parameter.is_floating_point() or parameter.is_complex() for parameter in model.parameters()):
        raise InvalidInput(f"{type(model).__name__} has no parameters to manage")
    refuse_compiled(model)
    refuse_lazy(model)
    for name, module in model.named_modules():
        refuse_script(name or type(model).__name__, module)
        if isinstance(module, HostEmbedding):
            module.check()
        elif isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise UnsupportedParameter(
                f"{name or type(model).__name__!r} has max_norm={module.max_norm}, by which its forward changes the "
                "table in place: leave max_norm out"
            )
    steps = accumulation_steps
    if not isinstance(steps, int) or isinstance(steps, bool) or not 1 <= steps <= MOST_MICRO_BATCHES:
        raise InvalidInput(f"accumulation_steps must be a whole number from 1 to {MOST_MICRO_BATCHES}, found {steps!r}")


def _is_managed(engine: Engine) -> Callable[[], bool]:
    """Return a function that tells whether the engine's model is still managed, without keeping the model alive."""
    reference = weakref.ref(engine)
    return lambda: (found := reference()) is not None and not found.usability.released


_SPARSE_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    **dict.fromkeys((torch.sparse_csr, torch.sparse_bsr), ("crow_indices", "col_indices", "values")),
    **dict.fromkeys((torch.sparse_csc, torch.sparse_bsc), ("ccol_indices", "row_indices", "values")),
}
"""The methods that return the dense tensors of which a sparse one consists, by layout."""


def _buffer_bytes(buffer: torch.Tensor) -> int:
    """Return the bytes of a buffer; for a sparse one, those of its indices and values."""
    parts = _SPARSE_PARTS.get(buffer.layout)
    return sum(getattr(buffer, part)().nbytes for part in parts) if parts else buffer.nbytes


def _constant_bytes(model: nn.Module, device: Device) -> int:
    """Return the bytes of buffers; 0 where the count of non-model bytes includes them already."""
    return sum(map(_buffer_bytes, model.buffers())) if device.overcommits else 0
