"""Fetch parameters before a function reads them, and store the gradients that autograd makes of them.

Every use of a managed parameter in forward and backward comes through here; see `_parameters.managed_parameter`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from ps_core._errors import UnsupportedParameter
from ps_core.engine._devices.hide_from_modes import (
    dispatch_modes,
    function_modes,
    hidden_from_modes,
    modes_are_off,
    modes_off,
)
from ps_core.engine._execution.build_components import Components
from ps_core.engine._execution.host_embedding_tables import HostTables
from ps_core.engine._execution.instruction_executor import Diverged
from ps_core.engine._execution.pass_tracker import PassTracker
from ps_core.engine._execution.refuse_use import Usability
from ps_core.engine._memory.chunk import SlotView
from ps_core.engine._optim.group_step import StepDecisions
from ps_core.engine._parameters.errors import changed_in_place, graph_of_gradient, whole_table
from ps_core.engine._parameters.function_kinds import OPENING, Function
from ps_core.engine._parameters.managed_parameter import ManagedParameter, aliased, version_of
from ps_core.engine._parameters.param_state import HOST, ParamState
from ps_core.engine._parameters.saved_tensors import CHECKPOINT, HookPair, SavedTensors, active_pair
from ps_core.engine._parameters.state_transitions import SlotContents
from ps_core.engine._support.interrupts import defer_interrupts
from ps_core.engine._support.not_compiled import not_compiled
from ps_core.engine._support.precision_note import note_precision


class ParameterAccess:
    """Handle the uses of one engine's parameters, and the arrival of their gradients."""

    def __init__(
        self,
        parts: Components,
        passes: PassTracker,
        records: list[ParamState],
        deciding: StepDecisions,
        usability: Usability,
        train_unfrozen: Callable[[], None],
    ) -> None:
        """Make the access; ``train_unfrozen`` begins to train what was unfrozen since `chunked`."""
        self._passes, self._records, self._deciding, self._usability = passes, records, deciding, usability
        self._residency, self._gradients, self._stepping = parts.residency, parts.gradients, parts.stepping
        self._train_unfrozen = train_unfrozen
        self._resident = parts.residency.store.resident
        """True if nothing ever moves."""
        self.mapped_over: list[torch.Tensor] = []
        """Aliases of the parameters that ``torch.vmap`` maps over: memory with aliases stays where it is."""
        self.saved = SavedTensors(self, self._residency.owners, passes.count)
        self.tables = HostTables(
            passes,
            self._gradients,
            self._residency.store,
            parts.residency.transfers.watcher,
            check_usable=usability.check,
            accept=self.arrive,
        )

    # Functions that read parameters.

    def call(self, records: list[ParamState], function: Function, args: Any, kwargs: Any) -> Any:
        """Fetch these parameters, and call the function."""
        # The model's own call looks at its parameters at its begin and end, and backward uses those of forward.
        by_part = self._passes.outside and torch._C._current_graph_task_id() == -1
        if by_part and torch.is_grad_enabled() and function not in OPENING:
            self._look_for_unfrozen(records)
        self.touch(records)
        if self._stepping.groups:
            self._stepping.check_use(records, opening=function in OPENING)
        try:
            with torch._C.DisableTorchFunctionSubclass():
                if torch.is_grad_enabled():
                    pair = active_pair(True)
                    if pair is None:
                        result = self._call_with_hooks(function, args, kwargs)
                    else:
                        if pair[0] != self.saved.pack:
                            args, kwargs = _safe_to_save(pair, records, args, kwargs)
                        result = function(*args, **kwargs)
                else:
                    result = function(*args, **kwargs)
                if by_part or function in OPENING:
                    self._expose(records, always=function in OPENING)
                # `check_unchanged`, inlined: this runs in every call, and `_version` is cheap within the block.
                for record in records:
                    if record.parameter._version != record.counted_version:
                        break
                else:
                    return result
        except RuntimeError as error:
            note_precision(error, [record.dtype for record in records])
            raise
        self.check_unchanged(records)
        return result

    def _look_for_unfrozen(self, records: list[ParamState]) -> None:
        """Train what was unfrozen, where parts of the model are called and not the model, which looks by itself."""
        for record in records:
            if not record.trainable and record.parameter.requires_grad:
                self._train_unfrozen()
                return

    def _call_with_hooks(self, function: Function, args: Any, kwargs: Any) -> Any:
        """Call a function under the engine's saved-tensor hooks."""
        depth = self.saved.depth
        try:
            self.saved.push()
            return function(*args, **kwargs)
        finally:
            self.saved.pop_to(depth)

    def _expose(self, records: list[ParamState], *, always: bool) -> None:
        """Note whose memory a call exposed: if it has aliases, or ``always`` for calls that return memory itself."""
        with self._passes.nonmodel.paused():
            for record in records:
                if record.bound is not None and (always or record.bound.aliased):
                    self._residency.exposed.add(record)

    # Changes in place.

    def check_unchanged(self, records: Iterable[ParamState]) -> None:
        """Refuse changes in place that the engine did not make, and undo them."""
        with torch._C.DisableTorchFunctionSubclass():
            changed = [r for r in records if r.bound is not None and r.parameter._version != r.counted_version]
        for record in changed:
            self.undo_change(record)
            raise changed_in_place(record)

    @hidden_from_modes
    def undo_change(self, record: ParamState) -> None:
        """Undo a change in place that the engine did not make, if there is one."""
        if record.bound is not None and version_of(record.parameter) != record.counted_version:
            record.counted_version = version_of(record.parameter)
            self._residency.undo_changes(record, record.bound.slot)
            record.group.forget_moment()

    # Backward (`_parameters.saved_tensors.Fetcher`).

    def fetch(self, record: ParamState) -> SlotView:
        """Return the record's view on the compute tier, fetching its group if need be."""
        wanted = [record]
        if record.compiled_block:
            wanted += [each for each in record.compiled_block if each.contents is SlotContents.WEIGHT]
        self.touch(wanted)
        assert record.bound is not None, "touching binds"
        return record.bound

    def check_placeholder(self, storage: torch.UntypedStorage) -> None:
        """Raise if a storage is a placeholder of a parameter that is on another tier."""
        for record in self._records:
            if record.placeholder.untyped_storage().data_ptr() == storage.data_ptr():
                raise UnsupportedParameter(
                    f"{record.name!r} was read by code that parameters do not see (compiled or C++): its memory is "
                    "elsewhere, and it read not-a-number; release(model), or keep that part out of chunked(...)"
                )

    # Moments.

    @defer_interrupts
    def touch(self, records: list[ParamState]) -> None:
        """Fetch these parameters to the compute tier and pin them until the next moment begins."""
        if self._usability.refuses:
            self._usability.check()
        passes = self._passes
        passes.attach()
        if self._resident:
            self._touch_resident(records)
            return
        if passes.outside and (passes.current is None or not passes.current.backward):
            passes.before_part()
        moment = passes.moment
        for record in records:
            group, bound = record.group, record.bound
            if (
                (group.last_read_moment != moment and group.fixed_tier is None)
                or record.contents is not SlotContents.WEIGHT
                or bound is None
                or bound.slot.version != group.weight_chunk.version
            ):
                if dispatch_modes() or function_modes():
                    with modes_off():
                        self._bind(records)
                else:
                    self._bind(records)
                break
        if passes.nonmodel.counting and passes.current is not None:
            for record in records:
                passes.current.touched[record.index] = None

    def hold_for_vmap(self, records: list[ParamState]) -> None:
        """Fetch parameters together, and keep them where they are until ``torch.vmap`` has returned.

        What the mapped function does with their elements calls no function of the parameters' class.
        """
        self.touch(records)
        if not self._resident:
            with self._passes.nonmodel.paused(), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                self.mapped_over += [record.parameter.detach() for record in records]

    def end_vmap(self) -> None:
        """Forget the aliases if no function that ``torch.vmap`` maps is running any more."""
        if torch._C._functorch.peek_interpreter_stack() is None:
            self.mapped_over.clear()

    def _bind(self, records: list[ParamState]) -> None:
        """Bind parameters to the newest copies of their groups; begin a new moment if the present one is for others."""
        if self.mapped_over:
            self.end_vmap()
        moment = self._passes.moment
        for record in records:
            group = record.group
            if (
                (group.last_read_moment != moment and group.fixed_tier is None)
                or record.contents is not SlotContents.WEIGHT
                or group.weight_chunk.newest(0) is None  # a second gradient rebuilt the weight in the home slot
            ):
                self._passes.begin_moment(_moving(records), [])
                break
        self._residency.bind_all(records)

    def _touch_resident(self, records: list[ParamState]) -> None:
        for record in records:
            if record.contents is not SlotContents.WEIGHT or record.bound is None:
                self._bind_resident(record)

    @hidden_from_modes
    def _bind_resident(self, record: ParamState) -> None:
        if record.contents is not SlotContents.WEIGHT:
            with torch.no_grad():
                self._gradients.restore_weights(record.group)
        self._residency.bind(record)

    # Gradients.

    @defer_interrupts
    def arrive(self, record: ParamState, gradient: torch.Tensor) -> None:
        """Store a gradient that autograd just made."""
        if self._deciding.begun is not None:
            self._deciding.forget()
        if self._usability.refuses:
            self._usability.check()
        if gradient.is_neg() or gradient._is_zerotensor():
            gradient = gradient.clone()  # kernels read memory, which has other signs here, or is missing
        record.assigned = False
        if record.source is not None:
            record.source.overtake(record.name)
        if self._stepping.groups:
            self._stepping.check_gradient(record)
        passes, group = self._passes, record.group
        passes.attach()  # which asks whether gradients are made
        if torch.is_grad_enabled():
            with torch.no_grad():
                self.arrive(record, gradient)
            return
        if (dispatch_modes() or function_modes()) and not modes_are_off():
            with modes_off():
                self.arrive(record, gradient)
            return
        in_moment = passes.moment in (group.last_read_moment, group.last_grad_moment)
        if not (self._resident or group.fixed_tier is not None or in_moment):
            passes.begin_moment([], [group])
        group.last_grad_moment = passes.moment
        try:
            placed = passes.driver.place_gradient(record, gradient)
        except Diverged as why:
            passes.diverge(why)
            placed = passes.driver.place_gradient(record, gradient)
        if not placed:
            self._gradients.accept(record, gradient)
        moment = passes.current
        if moment is not None and not record.overwrite_pending and group.fixed_tier != HOST:
            moment.grads[record.index] = None


def _safe_to_save(pair: HookPair, records: list[ParamState], args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return arguments that another pair of saved-tensor hooks may keep: aliases of parameters, which stay valid."""
    every = getattr(pair[0], "__module__", "") != CHECKPOINT  # `in_checkpoint`, inlined
    if not every:  # a checkpoint's pair, called most often, needs none of parameters that are trained
        for record in records:
            if not record.parameter.requires_grad:
                break
        else:
            return args, kwargs
    return aliased(args, records, every), aliased(kwargs, records, every)


@not_compiled
def accept_gradient(parameter: ManagedParameter) -> None:
    """Give autograd's gradient to the engine; a post-accumulate-grad hook.

    A module-level function, so that the hook holds no reference to the engine, and dropped models are freed.
    """
    with torch._C.DisableTorchFunctionSubclass():
        gradient, parameter.grad = parameter.grad, None
    record, owner = parameter._record, parameter._owner
    if gradient is None:
        owner.deliver(record)
    elif record.trainable:
        if gradient.requires_grad:
            raise graph_of_gradient(record.name)
        owner.arrive(record, gradient)
    else:
        record.dropped = True


def _moving(records: list[ParamState]) -> list[ParamState]:
    """Return the parameters that moments concern: all but tables that stay on the host."""
    found = []
    for record in records:
        if record.group.fixed_tier == HOST:
            raise whole_table(record.name)
        if record.group.fixed_tier is None:
            found.append(record)
    return found
