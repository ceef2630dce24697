"""The engine of one model: what parameters, hooks and the optimizer turn to.

It leaves the work to others: passes and their moments to `_execution.pass_tracker`, moves to a driver
(`_execution.on_demand_driver`, `_execution.plan_driver`), gradients to `_gradients.gradient_store`, and steps to
`_optim.group_step`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from ps_core._errors import InvalidInput, UnsupportedParameter
from ps_core._program import Kind
from ps_core.engine._execution.components import Components, Ranks
from ps_core.engine._execution.host_tables import HostTables
from ps_core.engine._execution.pass_tracker import PassTracker, moving
from ps_core.engine._execution.protocols import Hooks, Scheduler
from ps_core.engine._execution.state_dict import StateDicts
from ps_core.engine._execution.user_gradients import UserGradients
from ps_core.engine._gradients.loss_scale import LossScale
from ps_core.engine._gradients.managed_grad import ManagedGrad
from ps_core.engine._memory.activation_slots import ActivationSlots
from ps_core.engine._memory.chunk import SlotView
from ps_core.engine._optim.clip_or_skip import StepDecision, StepDecisions
from ps_core.engine._optim.group_step import SettingsOf
from ps_core.engine._optim.settings import Outcome
from ps_core.engine._parameters.errors import changed_in_place, graph_of_gradient, not_trained
from ps_core.engine._parameters.fp32_masters import Masters
from ps_core.engine._parameters.managed_parameter import OPENING, Function, ManagedParameter, aliased, version_of
from ps_core.engine._parameters.param_state import HOST, ParamState
from ps_core.engine._parameters.saved_tensors import AliasPolicy, SavedTensors
from ps_core.engine._parameters.state_transitions import GradientPlace, SlotContents
from ps_core.engine._support.counters import Counters
from ps_core.engine._support.interrupts import defer_interrupts


class Engine:
    """One model under management."""

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
        """Make an engine of its parts. ``scheduler`` and ``management`` are called with it, and may keep it."""
        self.stepping = parts.stepping
        self.store = store = parts.residency.store
        self.groups = groups = parts.residency.groups
        self.records = sorted((record for group in groups for record in group.tensors), key=lambda record: record.index)
        self.resident = store.resident
        """Nothing ever moves."""
        self.loss_scale = loss_scale
        self.constant_bytes = constant_bytes
        """Non-model data that is always on the compute tier: buffers, parameters outside the chunks."""
        self.counters = counters
        self.together = together
        """The processes that share the model; None: there is one."""
        self.residency, self.gradients, self.updater = parts.residency, parts.gradients, parts.updater
        self.passes = PassTracker(parts, self.records, counters, constant_bytes, scheduler(self))
        self._deciding = StepDecisions(self.gradients)
        self.user_gradients = UserGradients(
            self.residency,
            self.gradients,
            self.updater,
            self._deciding,
            loss_scale=loss_scale,
            finish_pass=self.finish_pass,
        )
        self.saved = SavedTensors(self, self.residency.owners, self.passes.count)
        self.activations = ActivationSlots(store, counters, self.passes.nonmodel)
        """Slots in the host's memory for offloaded activations."""
        self.tables = HostTables(
            self.passes,
            self.gradients,
            store,
            self.counters,
            check_usable=self.check_usable,
            accept=self.arrive,
        )
        self.masters = Masters(
            self.records,
            lambda record: self.updater.read_while_loading(record, Kind.P32),
            lambda: str(self.management.name),
            speaks=together is None or together.process == 0,
        )
        self.management = management(self)
        """The owner of the hooks."""
        self.released = False
        """True after `release`: the engine may not be used any more."""
        self.materializing = False
        """True while parameters are ordinary ones (`materialized`); nothing may be trained."""
        self.averaged = False
        """True while averages are in the weights' place (`WeightAverage.applied`); no step may be taken."""
        self.half_loaded = ""
        """The load that failed after replacing some values; nothing may be trained until a load succeeds."""
        self._refuses = store.file is not None
        """True if `check_usable` may raise; asked at every use of a parameter. (With a disk: in a forked process.)"""
        self.state_dicts = StateDicts(
            self.masters,
            read=self.read,
            write=lambda record, value: self.write_state(record, Kind.P32, value),
            end_pass=self.finish_pass,
            check_writes=self.check_writes,
        )

    # What parameters ask (`_parameters.managed_parameter.ParameterOwner`).

    def call(self, records: list[ParamState], function: Function, args: Any, kwargs: Any) -> Any:
        """Call a function once these parameters are where it can read them."""
        self.touch(records)
        if self.stepping.groups:
            self.stepping.check_use(records, opening=function in OPENING)
        with torch._C.DisableTorchFunctionSubclass():
            if torch.is_grad_enabled() and not self.saved.innermost:
                result = self._call_with_hooks(function, args, kwargs)
            else:
                result = function(*args, **kwargs)
            if self.passes.outside or function in OPENING:
                self._expose(records, function)
            # `check_unchanged`, in line: every call comes by here, and `_version` is cheap within the block.
            for record in records:
                if record.parameter._version != record.counted_version:
                    break
            else:
                return result
        self.check_unchanged(records)
        return result

    def _call_with_hooks(self, function: Function, args: Any, kwargs: Any) -> Any:
        """Call a function under our pair of saved-tensor hooks; another pair finds nothing that may go away."""
        depth = self.saved.depth
        try:
            self.saved.push()
            if whose := self.saved.kept_by_others():
                every = whose is AliasPolicy.ALL
                args, kwargs = aliased(args, every), aliased(kwargs, every)
            return function(*args, **kwargs)
        finally:
            self.saved.pop_to(depth)

    def _expose(self, records: list[ParamState], function: Function) -> None:
        """Note whose memory a call gave away; in backward, only what shows memory as such."""
        always = function in OPENING
        if always or torch._C._current_graph_task_id() == -1:
            with self.passes.nonmodel.paused():
                for record in records:
                    if record.bound is not None and (always or record.bound.aliased):
                        self.residency.exposed.add(record)

    def check_writes(self) -> None:
        """Raise if something was written where it is lost; between passes, before values are used."""
        if self.state_dicts.copies.given:
            self.state_dicts.copies.check()
        if self.residency.exposed.bounds or self.residency.tampered:
            self.passes.check_writes()

    def check_unchanged(self, records: Iterable[ParamState]) -> None:
        """Refuse changes in place that the engine did not make, and undo them."""
        with torch._C.DisableTorchFunctionSubclass():
            changed = [r for r in records if r.bound is not None and r.parameter._version != r.counted_version]
        for record in changed:
            self._refuse_change(record)

    def get_gradient(self, record: ParamState) -> torch.Tensor | None:
        """Return what ``parameter.grad`` reads: a proxy of the stored gradient, or None."""
        if record.dropped:
            raise not_trained(record.name)
        self.stepping.check_read(record)
        return self.user_gradients.proxy(record)

    def set_gradient(self, record: ParamState, value: Any) -> None:
        """Assign ``parameter.grad = value``: None forgets the gradient, a tensor replaces it."""
        if isinstance(value, ManagedGrad) and value.is_whole and value.root is record.grad_proxy:
            return
        self.stepping.check_read(record)
        copy = None if value is None else self.user_gradients.to_store(record, value)
        scaled = self.user_gradients.replaces_scaled(record)
        self.discard_gradients([record])
        if copy is not None:
            self.arrive(record, copy)
            record.assigned = not scaled

    def overwrite(self, record: ParamState, function: Function, args: Any) -> Any:
        """Load the parameter from a state dict, if one is being loaded; refuse every other change in place."""
        if function is torch.Tensor.copy_ and self.state_dicts.load(record, args[1]):
            return record.parameter
        raise changed_in_place(record.name, by=getattr(function, "__name__", str(function)))

    def mark_materialized(self, *, on: bool) -> None:
        """Refuse to train while parameters are ordinary ones, or allow it again."""
        self.materializing = on
        self._note_refusals()

    def check_not_averaged(self, what: str) -> None:
        """Raise inside the block of `WeightAverage.applied`, after which masters and averages change places again."""
        if self.averaged:
            raise InvalidInput(f"inside applied() the model has averages for weights: {what} after the block")

    def mark_averaged(self, *, on: bool) -> None:
        """Refuse steps while averages are in the weights' place, or allow steps again."""
        self.averaged = on

    def mark_half_loaded(self, what: str) -> None:
        """Refuse to train while values are replaced by ``what``, or if that failed; empty: it is done."""
        self.half_loaded = what
        self._note_refusals()

    def mark_released(self) -> None:
        """Refuse every use from now on."""
        self.released = True
        self._note_refusals()

    def _note_refusals(self) -> None:
        self._refuses = self.released or self.materializing or bool(self.half_loaded) or self.store.file is not None

    def detached(self, record: ParamState) -> torch.Tensor | None:
        """Return a copy for a state dict that is being made; None: none is."""
        return self.state_dicts.copy_of(record)

    @defer_interrupts
    def abort(self) -> None:
        """End the pass after the root module's forward failed, and release everything."""
        self.passes.abort_forward()
        self.finish_pass()
        self.passes.stop_counting()

    def _refuse_change(self, record: ParamState) -> None:
        record.counted_version = version_of(record.parameter)
        if record.bound is not None:
            self.residency.undo_changes(record, record.bound.slot)
        record.group.forget_moment()
        raise changed_in_place(record.name)

    def forget_version(self, record: ParamState) -> None:
        """Changes in place so far were meant."""
        record.counted_version = version_of(record.parameter)
        record.group.forget_moment()

    # What saved tensors ask (`_parameters.saved_tensors.Fetcher`).

    def fetch(self, record: ParamState) -> SlotView:
        """Return the record's view on the compute tier, fetching its group if need be."""
        wanted = [record]
        if record.compiled_block:
            wanted += [each for each in record.compiled_block if each.contents is SlotContents.WEIGHT]
        self.touch(wanted)
        assert record.bound is not None, "touching binds"
        return record.bound

    def check_placeholder(self, storage: torch.UntypedStorage) -> None:
        """Raise if a storage is what a parameter has while it is elsewhere."""
        for record in self.records:
            if record.placeholder.untyped_storage().data_ptr() == storage.data_ptr():
                raise UnsupportedParameter(
                    f"{record.name!r} was read by code that parameters do not see (compiled or C++): its memory is "
                    "elsewhere, and it read not-a-number; release(model), or keep that part out of chunked(...)"
                )

    # Moments.

    @defer_interrupts
    def touch(self, records: list[ParamState]) -> None:
        """Fetch these parameters to the compute tier and pin them until the next moment begins."""
        if self._refuses:
            self.check_usable()
        passes = self.passes
        passes.attach()
        if self.resident:
            self._touch_resident(records)
            return
        moment = passes.moment
        for record in records:
            group = record.group
            if (
                (group.last_read_moment != moment and group.fixed_tier is None)
                or record.contents is not SlotContents.WEIGHT
                or group.weight_chunk.newest(0) is None  # a second gradient rebuilt the weight in the home slot
            ):
                passes.begin_moment(moving(records), [])
                break
        self.residency.bind_all(records)
        if passes.tracked and passes.current is not None:
            for record in records:
                passes.current.touched[record.index] = None

    def _touch_resident(self, records: list[ParamState]) -> None:
        for record in records:
            if record.contents is not SlotContents.WEIGHT:
                with torch.no_grad():
                    self.gradients.restore_weights(record.group)
            if record.bound is None:
                self.residency.bind(record)

    @defer_interrupts
    def arrive(self, record: ParamState, gradient: torch.Tensor) -> None:
        """Store a gradient that autograd just made."""
        if self._deciding.begun is not None:
            self._deciding.forget()
        if self._refuses:
            self.check_usable()
        record.assigned = False
        if self.stepping.groups:
            self.stepping.check_gradient(record)
        passes, group = self.passes, record.group
        passes.attach()  # which asks whether gradients are made
        if torch.is_grad_enabled():
            with torch.no_grad():
                self.arrive(record, gradient)
            return
        in_moment = passes.moment in (group.last_read_moment, group.last_grad_moment)
        if not (self.resident or group.fixed_tier is not None or in_moment):
            passes.begin_moment([], [group])
        group.last_grad_moment = passes.moment
        if not passes.place_gradient(record, gradient):
            self.gradients.accept(record, gradient)
        moment = passes.current
        if moment is not None and not record.overwrite_pending and group.fixed_tier != HOST:
            moment.grads[record.index] = None

    def _check_kept(self) -> None:
        if self.released:
            raise InvalidInput("this model was released: call chunked(...) again, and use the optimizer it returns")

    def check_usable(self, *, loading: bool = False) -> None:
        """Raise where nothing may be trained; ``loading``: all values are about to be replaced."""
        if self.store.file is not None:  # asked here and not there: every use of a parameter comes by
            self.store.check_process()
        self._check_kept()
        if self.materializing:
            raise InvalidInput("inside materialized(model) parameters are copies: train after the block")
        if self.half_loaded and not loading:
            raise InvalidInput(
                f"{self.half_loaded} failed half way, so that parameters are a mixture of old and new: load a sound one"
            )

    # Passes.

    @defer_interrupts
    def await_forward(self, inputs: Any) -> None:
        """End what cannot go on, before anything is looked at for the root module's call with these inputs."""
        if self.store.file is not None:
            self.store.check_process()
        if self.state_dicts.copies.given:
            self.state_dicts.copies.check()
        self.passes.end_open(inputs)

    def enter(self) -> None:
        """Begin the root module's forward; interrupts are deferred meanwhile."""
        if self.state_dicts.open:
            self.state_dicts.forget()
        self.passes.enter_forward()
        if torch.is_grad_enabled():
            self.saved.push()

    def end_root_forward(self) -> None:
        """End the root module's forward; interrupts are deferred meanwhile."""
        self.passes.end_forward()

    @defer_interrupts
    def finish_pass(self) -> None:
        """End the pass, if one is open: chunks return to their home slots, except copies with live aliases."""
        if self.store.file is not None:
            self.store.check_process()
        passes = self.passes
        if passes.recording is not None or passes.counting or self.residency.exposed.bounds:
            if passes.threads.inside or passes.threads.reports_end is not None:
                passes.threads.check("a step, or a use of states or gradients,")
            passes.finish()

    # What the optimizer asks (`_optim.settings.OptimizerBackend`).

    def has_gradient(self, record: ParamState) -> bool:
        """Return True if a gradient of the parameter waits for the step."""
        return record.gradient is not GradientPlace.NONE

    def has_gradients(self) -> bool:
        """Return True if any gradient waits for the step, or was stepped within backward already."""
        if self.stepping.groups:
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
        with torch._C.DisableTorchFunctionSubclass():
            for record in chosen:
                record.parameter.grad = None  # autograd's own, if a hook before ours failed
                record.dropped, record.staged_factor = False, None
        if records is None and self.tables.pending:
            self.tables.forget()
        moment = self.passes.current
        found = [record for record in chosen if record.gradient is not GradientPlace.NONE]
        if moment is None or moment.backward or self.resident or found:
            self.finish_pass()  # else a forward pass is on, whose gradients are still to come
        with torch.no_grad():
            found = [record for record in chosen if record.gradient is not GradientPlace.NONE]
            if found:
                self.gradients.discard(found)

    @defer_interrupts
    def step(self, settings: SettingsOf, max_norm: float | None, loss_scale: float) -> Outcome:
        """Update every parameter that has a gradient, or none if one of them is not finite."""
        self.check_usable()
        self.check_not_averaged("step")
        if self.masters.changed:
            self.masters.before_step()
        if self.state_dicts.open:
            self.state_dicts.forget()
        self.finish_pass()
        self.check_writes()
        self.counters.enter_phase("step")
        self.passes.scheduler.maybe_replan()
        self.check_unchanged(self.records)
        if not self.store.synchronous:
            self.gradients.wait_until_measured(self.records, bool(self.stepping.groups))
        if self.together is not None:
            self.updater.compare_step(self.records, settings, max_norm, loss_scale)
        if self.stepping.groups:
            self.stepping.check_step(settings, max_norm)
        decision = self._decide_and_step(settings, max_norm, loss_scale)
        if self.gradients.unplanned_sums or self.together is not None:  # several ranks promote shards into the room
            self.updater.free_sums()
        self.counters.stepped(skipped=decision.skip)
        if self.residency.exposed.bounds:
            self.residency.exposed.check()
        norm = None if self.stepping.groups else decision.norm
        self.stepping.groups.clear()
        return Outcome(norm=norm, skipped=decision.skip)

    def _decide_and_step(self, settings: SettingsOf, max_norm: float | None, loss_scale: float) -> StepDecision:
        pending = [record for record in self.records if record.gradient is not GradientPlace.NONE]
        with self._deciding.deciding(pending, max_norm, loss_scale) as decision:
            if decision.skip:
                self.stepping.check_skip()
                self.gradients.discard(pending)
            elif not self.passes.scheduler.step(settings, decision.factor):
                self.updater.step(settings, decision.factor)
        return decision

    def read_state(self, record: ParamState, kind: Kind) -> torch.Tensor:
        """Return an fp32 copy on the CPU of a master or moment, in the parameter's shape."""
        self._check_kept()
        self.finish_pass()
        return self.updater.read(record, kind)

    @defer_interrupts
    def write_state(self, record: ParamState, kind: Kind, value: torch.Tensor) -> None:
        """Replace it."""
        self._check_kept()
        self.check_not_averaged("load")
        self.state_dicts.copies.drop(record)  # of a state dict that broke off
        self.updater.write(record, kind, value)
        self.residency.exposed.check(record)

    def load_master(self, record: ParamState, value: torch.Tensor) -> None:
        """Replace the parameter by a master of a state dict, unless other weights were loaded."""
        self.write_state(record, Kind.P32, self.masters.master(record, value))

    def states_loaded(self) -> None:
        """Hear that an optimizer's state dict was loaded whole."""
        self.stepping.end()
        self.masters.states_loaded()

    def read(self, record: ParamState) -> torch.Tensor:
        """Return a copy of the parameter in the type that it is computed with."""
        return self.updater.weight(record)


def accept_gradient(parameter: ManagedParameter) -> None:
    """Post-accumulate-grad hook: hand autograd's gradient to the engine.

    A module-level function, so that the hook holds no reference to the engine, and dropped models are freed.
    """
    with torch._C.DisableTorchFunctionSubclass():
        gradient, parameter.grad = parameter.grad, None
    record, owner = parameter._record, parameter._owner
    assert isinstance(owner, Engine), "every owner is an Engine"
    if gradient is None:
        owner.tables.deliver(record)
    elif record.trainable:
        if gradient.requires_grad:
            raise graph_of_gradient(record.name)
        owner.arrive(record, gradient)
    else:
        record.dropped = True
