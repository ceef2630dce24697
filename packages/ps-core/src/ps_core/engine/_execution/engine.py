"""Tie the parts of one model's engine together, for parameters, hooks and the optimizer.

The engine delegates the work. Uses of parameters are in `_execution.parameter_access`, passes and their moments in
`_execution.pass_tracker`. Moves are made by a driver (`_execution.on_demand_driver`, `_execution.plan_driver`).
Gradients are in `_gradients.gradient_store`, and steps in `_optim.group_step`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakMethod

import torch

from ps_core._extents import Kind
from ps_core.engine._execution.build_components import Components, Ranks
from ps_core.engine._execution.driver_protocols import Hooks, Scheduler
from ps_core.engine._execution.parameter_access import ParameterAccess
from ps_core.engine._execution.pass_tracker import PassTracker
from ps_core.engine._execution.refuse_use import Usability
from ps_core.engine._execution.state_dict import StateDicts
from ps_core.engine._gradients.loss_scale import LossScale
from ps_core.engine._gradients.managed_grad import ManagedGrad
from ps_core.engine._gradients.user_gradients import UserGradients
from ps_core.engine._memory.activation_slots import ActivationSlots
from ps_core.engine._optim.group_step import SettingsOf, StepDecision, StepDecisions, warn_skipped
from ps_core.engine._optim.settings import Outcome
from ps_core.engine._parameters.errors import changed_in_place, not_trained
from ps_core.engine._parameters.fp32_masters import Masters
from ps_core.engine._parameters.function_kinds import Function
from ps_core.engine._parameters.param_state import ParamState
from ps_core.engine._parameters.state_transitions import GradientPlace
from ps_core.engine._support.counters import Counters
from ps_core.engine._support.interrupts import defer_interrupts


class Engine:
    """The engine of one managed model."""

    def __init__(
        self,
        parts: Components,
        counters: Counters,
        *,
        loss_scale: LossScale | None,
        constant_bytes: int,
        together: Ranks | None,
        scheduler: Callable[[Engine], Scheduler],
        management: Callable[[Engine], Hooks],
    ) -> None:
        """Make an engine of its parts. ``scheduler`` and ``management`` are called with the engine, and may keep it."""
        self.stepping = parts.stepping
        self.speculation = parts.speculation
        self.store = store = parts.residency.store
        self.groups = groups = parts.residency.groups
        self.records = sorted((record for group in groups for record in group.tensors), key=lambda record: record.index)
        self.resident = store.resident
        """True if nothing ever moves."""
        self.loss_scale = loss_scale
        self.constant_bytes = constant_bytes
        """Non-model data that is always on the compute tier: buffers, parameters outside the chunks."""
        self.counters = counters
        self.together = together
        """The processes that share the model; None: there is one."""
        self.processes = 1 if together is None else together.processes
        self.residency, self.gradients, self.updater = parts.residency, parts.gradients, parts.updater
        self.demand = parts.demand
        self.passes = PassTracker(parts, self.records, counters, constant_bytes, scheduler(self))
        self._deciding = StepDecisions(self.gradients)
        self._awaits: WeakMethod[Callable[[torch.Tensor], bool]] | None = None
        self.usability = Usability(store)
        self.access = access = ParameterAccess(
            parts,
            self.passes,
            self.records,
            self._deciding,
            self.usability,
            lambda: self.management.train_unfrozen(),  # noqa: PLW0108 - `management` is made below
        )
        self.saved, self.tables = access.saved, access.tables
        self.hold_for_vmap = access.hold_for_vmap
        self.call, self.arrive, self.deliver = access.call, access.arrive, access.tables.deliver
        """The methods that parameters call most often (`_parameters.managed_parameter.ParameterOwner`)."""
        self.user_gradients = UserGradients(
            self.residency,
            self.gradients,
            loss_scale=loss_scale,
            finish_pass=self.finish_pass,
            read=self.updater.read,
            forget_decision=self._deciding.forget,
            assign=self.set_gradient,
        )
        self.activations = ActivationSlots(parts.residency.transfers, store)
        """Slots of offloaded activations that no plan moves."""
        self.masters = Masters(
            self.records,
            lambda record: self.updater.read_while_loading(record, Kind.P32),
            lambda: str(self.management.name),
            speaks=together is None or together.process == 0,
        )
        self.state_dicts = StateDicts(
            self.masters,
            read=self.read,
            write=lambda record, value: self.write_state(record, Kind.P32, value),
            end_pass=self.finish_pass,
            check_writes=self.check_writes,
            compare=self.updater.compare,
        )
        self.state_dict_value = self.state_dicts.value
        self.management = management(self)
        """The owner of the hooks."""

    def use(self, awaits: Callable[[torch.Tensor], bool]) -> None:
        """Use this method of the optimizer, which is made after the engine and may be freed."""
        self._awaits = WeakMethod(awaits)

    def awaits(self, parameter: torch.Tensor) -> bool:
        """Return True if the optimizer was given a parameter that is not managed yet, so that it will be trained."""
        method = None if self._awaits is None else self._awaits()
        return method is not None and method(parameter)

    # Checks.

    def check_usable(self, *, loading: bool = False) -> None:
        """Raise if the model may not be used; ``loading``: all values are about to be replaced."""
        if self.usability.refuses:
            self.usability.check(loading=loading)

    def check_writes(self) -> None:
        """Raise if something was written to memory that is not kept; called between passes, before values are used."""
        if self.state_dicts.copies.given:
            self.state_dicts.copies.check()
        if self.residency.exposed.bounds or self.residency.tampered:
            self.residency.exposed.check()
            self.residency.check_tampered()

    def _check_unchanged(self) -> None:
        """Refuse changes in place that the engine did not make to any parameter, and undo them."""
        with torch._C.DisableTorchFunctionSubclass():
            for record in self.records:
                if record.bound is not None and record.parameter._version != record.counted_version:
                    break
            else:
                return
        self.access.check_unchanged(self.records)

    # Other methods for parameters.

    def get_gradient(self, record: ParamState) -> torch.Tensor | None:
        """Return the value of ``parameter.grad``: a proxy of the stored gradient, or None."""
        if record.dropped:
            raise not_trained(record.name)
        self.stepping.check_read(record)
        self.user_gradients.take_changes(record)
        if self.together is not None:
            self._end_forward_without_backward()
            if self.passes.recording is None:
                self.updater.before_gradient(self.records)
        return self.user_gradients.proxy(record)

    def set_gradient(self, record: ParamState, value: Any) -> None:
        """Assign ``parameter.grad = value``: None forgets the gradient, a tensor replaces it."""
        if isinstance(value, ManagedGrad) and value.is_whole and value.root is record.grad_proxy:
            value.check_current()
            return
        self.stepping.check_read(record)
        copy = None if value is None else self.user_gradients.to_store(record, value)
        scaled = self.user_gradients.replaces_scaled(record)
        self.discard_gradients([record])
        if copy is not None:
            self.arrive(record, copy)
            record.assigned = not scaled
            self.user_gradients.watch(record, value)

    def overwrite(self, record: ParamState, function: Function, args: Any) -> Any:
        """Load the parameter from a state dict, if one is being loaded; refuse every other change in place."""
        if function is torch.Tensor.copy_:
            with self.passes.nonmodel.paused():
                if self.state_dicts.load(record, args[1]):
                    return record.parameter
        self.access.undo_change(record)
        raise changed_in_place(record, by=getattr(function, "__name__", str(function)))

    def detached(self, record: ParamState) -> torch.Tensor | None:
        """Return a copy for a state dict under construction; None: there is none."""
        return self.state_dicts.copy_of(record)

    @defer_interrupts
    def abort(self) -> None:
        """End the pass after the root module's forward failed, and release everything."""
        self.passes.abort_forward()
        self.finish_pass()
        self.passes.nonmodel.stop()

    # Passes.

    @defer_interrupts
    def await_forward(self, inputs: Any) -> None:
        """End an open pass that cannot go on, before the root module's call with these inputs."""
        if self.store.stays_with_process:
            self.store.check_process()
        if self.state_dicts.copies.given:
            self.state_dicts.copies.check()
        self.passes.end_open(inputs)

    def enter(self, *, evaluates: bool) -> None:
        """Begin the root module's forward; interrupts are deferred meanwhile.

        ``evaluates``: neither a parameter nor an input requires a gradient.
        """
        if self.state_dicts.open:
            self.state_dicts.forget()
        self.passes.enter_forward(evaluates=evaluates)
        if torch.is_grad_enabled():
            self.saved.push()

    def end_root_forward(self) -> None:
        """End the root module's forward; interrupts are deferred meanwhile."""
        if self.access.mapped_over:
            self.access.end_vmap()
        self.passes.end_forward()

    @defer_interrupts
    def finish_pass(self) -> None:
        """End the pass, if one is open: chunks return to their home slots, except copies with live aliases."""
        if self.store.stays_with_process:
            self.store.check_process()
        if self.access.mapped_over:
            self.access.end_vmap()
        passes = self.passes
        if passes.recording is not None or passes.deferred or passes.nonmodel.counting or self.residency.exposed.bounds:
            if passes.threads.inside or passes.threads.backward:
                passes.threads.check("a step, or a use of states or gradients,")
            passes.finish()

    @defer_interrupts
    def _end_forward_without_backward(self) -> None:
        """End a pass that cannot go on, since nothing refers to its graph: the other ranks wait for this one's part."""
        passes = self.passes
        if passes.recording is not None and passes.outside and torch._C._current_graph_task_id() == -1:
            self.store.check_process()
            passes.end_open(())

    # Methods for the optimizer (`_optim.settings.OptimizerBackend`).

    def has_gradient(self, record: ParamState) -> bool:
        """Return True if a gradient of the parameter waits for the step."""
        return record.gradient is not GradientPlace.NONE

    def has_gradients(self) -> bool:
        """Return True if a step has anything to do; ranks end an open pass first, which may be of sums alone."""
        if self.together is not None:
            self.finish_pass()
        return self.holds_gradients()

    def holds_gradients(self) -> bool:
        """Return True if any gradient waits for the step, or was stepped within backward already."""
        if self.stepping.groups or self.gradients.left_over:
            return True
        for record in self.records:  # noqa: SIM110 - `any` of a generator is a call for each parameter
            if record.gradient is not GradientPlace.NONE:
                return True
        return False

    @defer_interrupts
    def discard_gradients(self, records: Iterable[ParamState] | None = None) -> None:
        """Forget the gradients of these, or of all."""
        if records is None and self.stepping.groups:
            self.stepping.check_discard()
        chosen = list(records) if records is not None else self.records
        if self.together is None or records is not None:
            self._end_pass_of(chosen)
        else:
            with self.gradients.forgetting():
                self._end_pass_of(chosen)
        if records is None and self.tables.pending:
            self.tables.forget()
        with torch.no_grad():
            if self.together is not None:
                self.gradients.forget_left_over(chosen)
            found = [record for record in chosen if record.gradient is not GradientPlace.NONE]
            if found:
                self.gradients.discard(found)
            if self.gradients.sums.unplanned:
                self.gradients.sums.free_unused()

    def _end_pass_of(self, chosen: list[ParamState]) -> None:
        """End the pass in which gradients of these parameters may still come, unless that is a forward pass."""
        if self.together is not None:
            self._end_forward_without_backward()
        with torch._C.DisableTorchFunctionSubclass():
            for record in chosen:
                record.parameter.grad = None  # autograd's own, if a hook before ours failed
                record.dropped, record.staged_factor = False, None
                if record.source is not None:
                    record.watch(None)
        moment = self.passes.current
        found = [record for record in chosen if record.gradient is not GradientPlace.NONE]
        if moment is None or moment.backward or self.resident or found:
            self.finish_pass()  # else a forward pass is on, whose gradients are still to come

    @defer_interrupts
    def step(self, settings: SettingsOf, max_norm: float | None, loss_scale: float) -> Outcome:
        """Update every parameter that has a gradient, or none if one of them is not finite."""
        if self.usability.refuses:
            self.usability.check()
        if self.usability.averaged:
            self.usability.check_not_averaged("step")
        if self.masters.changed:
            self.masters.before_step()
        if self.state_dicts.open:
            self.state_dicts.forget()
        if self.user_gradients.watched:
            self.user_gradients.take_all_changes()
        self.finish_pass()
        self.check_writes()
        self.counters.enter_phase("step")
        self.passes.scheduler.maybe_replan()
        self._check_unchanged()
        if not self.store.synchronous:
            self.gradients.wait_until_measured(self.records, bool(self.stepping.groups))
        if self.together is not None:
            self.updater.compare_step(self.records, settings, max_norm, loss_scale)
        if self.stepping.groups:
            self.stepping.check_step(settings, max_norm)
        decision = self._decide_and_step(settings, max_norm, loss_scale)
        if self.gradients.sums.unplanned or self.together is not None:  # other ranks ask for the new weights
            self.updater.free_sums()
        self.counters.stepped(skipped=decision.skip)
        if self.residency.exposed.bounds:
            self.residency.exposed.check()
        norm: float | None = decision.norm
        if self.stepping.groups:
            norm = None  # that of the other groups alone
            self.counters.stepped_in_backward(len(self.stepping.groups))
            self.stepping.end()
        return Outcome(norm=norm, skipped=decision.skip)

    def _decide_and_step(self, settings: SettingsOf, max_norm: float | None, loss_scale: float) -> StepDecision:
        pending = [record for record in self.records if record.gradient is not GradientPlace.NONE]
        with self._deciding.deciding(pending, max_norm, loss_scale) as decision:
            if self.speculation is not None:
                self.speculation.note_decision(settings, None if decision.skip else decision.factor)
            if decision.skip:
                self.stepping.check_skip()
                if loss_scale == 1.0 and (self.together is None or self.together.process == 0):  # else it is the scale
                    warn_skipped(decision, self.counters.steps + 1, self.counters.skipped + 1)
                self.gradients.discard(pending)
            elif not self.passes.scheduler.step(settings, decision.factor):
                self.updater.step(settings, decision.factor)
        return decision

    def read_state(self, record: ParamState, kind: Kind) -> torch.Tensor:
        """Return an fp32 copy on the CPU of a master or moment, in the parameter's shape."""
        self.usability.check_kept()
        self.finish_pass()
        with self.passes.nonmodel.paused():
            return self.updater.read(record, kind)

    def loading(self, what: str) -> AbstractContextManager[None]:
        """Refuse to train after an error within the block, in which ``what`` replaces values."""
        return self.usability.loading(what)

    @defer_interrupts
    def write_state(self, record: ParamState, kind: Kind, value: torch.Tensor) -> None:
        """Replace a master or moment."""
        self.usability.check_kept()
        self.usability.check_not_averaged("load")
        self.state_dicts.copies.drop(record)  # of a state dict that broke off
        with self.passes.nonmodel.paused():
            self.updater.write(record, kind, value)
        self.residency.exposed.check(record)

    def load_master(self, record: ParamState, value: torch.Tensor) -> None:
        """Replace the parameter by a master of a state dict, unless other weights were loaded."""
        self.write_state(record, Kind.P32, self.masters.master(record, value))

    def states_loaded(self) -> None:
        """Note that an optimizer's state dict was loaded whole."""
        self.stepping.end()
        self.masters.states_loaded()
        self.updater.compare()

    def compare_writes(self) -> None:
        """Raise `RanksDiverged` unless all ranks wrote the same; one process compares nothing."""
        self.updater.compare()

    def read(self, record: ParamState) -> torch.Tensor:
        """Return a copy of the parameter in the type that it is computed with."""
        with self.passes.nonmodel.paused():
            return self.updater.weight(record)

    def read_master(self, record: ParamState) -> torch.Tensor:
        """Return the same, rounded from the master where there is one: after a broken step other copies may be none."""
        return self._read_master(record, record.dtype)

    def read_in_first_type(self, record: ParamState) -> torch.Tensor:
        """Return a copy of the master, or of the parameter where there is none, in the type that it came with."""
        return self._read_master(record, record.given[1])

    def _read_master(self, record: ParamState, dtype: torch.dtype) -> torch.Tensor:
        with self.passes.nonmodel.paused():
            return self.updater.read(record, Kind.P32).to(dtype)
