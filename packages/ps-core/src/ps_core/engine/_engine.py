"""The engine of one model: what parameters, hooks and the optimizer turn to.

It knows where in training the model is (which pass, which moment) and leaves the work to others: moving to a driver
(`_demand`, `_replay`), gradients to `_gradients`, steps to `_stepping`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch.autograd import Variable

from ps_core._errors import DoesNotFit, InvalidInput, UnsupportedParameter
from ps_core._plan import Queue
from ps_core._program import Kind
from ps_core.engine._counters import Counters
from ps_core.engine._demand import Demand
from ps_core.engine._gradients import GradientKeeper
from ps_core.engine._managed_grad import ManagedGrad
from ps_core.engine._moments import Beat, Recording
from ps_core.engine._parameter import Function, changes, clear_grad
from ps_core.engine._records import Bound, Gradient, GroupRecord, Payload, TensorRecord
from ps_core.engine._refusals import compute_tier_too_small, everything_too_large
from ps_core.engine._replay import Diverged, Replay
from ps_core.engine._residency import Residency
from ps_core.engine._saved import SavedTensors
from ps_core.engine._scaler import LossScale
from ps_core.engine._settings import Outcome
from ps_core.engine._stepping import SettingsOf, decide
from ps_core.engine._store import Store
from ps_core.engine._tide import Tide
from ps_core.engine._update import Updater


class Driver(Protocol):
    """What brings groups to the compute tier during a pass."""

    tracked: bool

    def begin(self, reads: list[TensorRecord], gains: list[GroupRecord], name: str) -> None:
        """The next moment needs these parameters, and brings gradients of these groups."""

    def take(self, record: TensorRecord, gradient: torch.Tensor) -> bool:
        """Put a gradient where the driver has room for it; False: it has none."""

    def finish(self) -> None:
        """The pass is over."""


class Engine:
    """One model under management."""

    def __init__(
        self,
        store: Store,
        groups: list[GroupRecord],
        *,
        overwrites: bool,
        loss_scale: LossScale | None,
        constant_bytes: int,
    ) -> None:
        self.store = store
        self.groups = groups
        self.records = sorted((record for group in groups for record in group.tensors), key=lambda record: record.index)
        self.still = len(store.tiers) == 1
        """Nothing ever moves."""
        self.loss_scale = loss_scale
        self.constant_bytes = constant_bytes
        """Non-model data that is always on the compute tier: buffers, parameters outside the chunks."""
        self.counters = Counters()
        self.residency = Residency(store, groups, self.counters)
        self.gradients = GradientKeeper(self.residency, overwrites=overwrites)
        self.updater = Updater(self.residency, self.gradients, groups)
        self.saved = SavedTensors(self)
        self.tide = Tide()
        self.demand = Demand(self.residency, self.gradients)
        self.driver: Driver = self.demand
        self.moment = 0
        self.recording: Recording | None = None
        """Of the pass that is on; None between passes."""
        self.observer: Callable[[Recording], None] | None = None
        """Told of every pass that ran to its end."""
        self.management: Any = None
        """The owner of the hooks (any: it knows this class)."""
        self.choose: Callable[[bool], Driver] = lambda training: self.demand
        """Who drives the pass that begins now."""
        self.before_step: Callable[[], None] = lambda: None
        """Called when a step is asked for, before anything is changed: time to plan."""
        self.replay_step: Callable[[SettingsOf, float], bool] = lambda settings, factor: False
        """Carries out a step by a plan, if there is one for it."""
        self._task = -1
        self.released = False
        """Nobody may use it any more."""
        self.surgery = False
        """Parameters are ordinary ones for a while; nothing may be trained."""
        self.collecting = 0
        """State dicts being made, one within another: parameters answer with copies."""
        self.loading: Callable[[TensorRecord, torch.Tensor], None] | None = None
        """A state dict is being loaded: parameters are written through this."""

    # What parameters ask (`_parameter.Keeper`).

    def call(self, records: list[TensorRecord], function: Function, args: Any, kwargs: Any) -> Any:
        """Call a function once these parameters are where it can read them."""
        self.touch(records)
        pushed = torch.is_grad_enabled() and self.saved.push()
        try:
            with torch._C.DisableTorchFunctionSubclass():
                result = function(*args, **kwargs)
        finally:
            if pushed:
                self.saved.pop()
        for record in records:
            if changes(record.parameter) != record.version:
                self._refuse_change(record)
        return result

    def get_gradient(self, record: TensorRecord) -> torch.Tensor | None:
        """What ``parameter.grad`` is."""
        if record.gradient is Gradient.NONE:
            return None
        if record.face is None:
            record.face = ManagedGrad(record, self, self.loss_scale)
        return record.face

    def set_gradient(self, record: TensorRecord, value: Any) -> None:
        """``parameter.grad = value``: None forgets the gradient, a tensor replaces it."""
        if value is record.face and value is not None:
            return
        self.discard_gradients([record])
        if value is not None:
            if value.shape != record.shape:
                raise UnsupportedParameter(
                    f"the gradient given to {record.name!r} has shape {tuple(value.shape)}, expected "
                    f"{tuple(record.shape)}"
                )
            self.arrive(record, value.detach().clone())

    def overwrite(self, record: TensorRecord, function: Function, args: Any) -> Any:
        """A function that changes the parameter in place: only a state dict being loaded may."""
        if self.loading is not None and function is torch.Tensor.copy_:
            self.loading(record, args[1])
            return record.parameter
        name = getattr(function, "__name__", str(function))
        raise UnsupportedParameter(
            f"{name} would change {record.name!r} in place, but what the optimizer steps is its fp32 master: "
            f"write inside `with materialized(model, names=[{record.name!r}], write=True):`"
        )

    def detached(self, record: TensorRecord) -> torch.Tensor | None:
        """A copy for a state dict that is being collected."""
        return self.read(record) if self.collecting > 0 else None

    def abort(self) -> None:
        """The root module's forward failed: end the pass, and let go of everything."""
        self.finish_pass()
        self.tide.stop()

    def _refuse_change(self, record: TensorRecord) -> None:
        record.version = changes(record.parameter)
        home = record.group.home
        if 0 in home.copies and home.copies[0].stamp == home.stamp and not home.dirty:
            home.copies[0].stamp = -1  # home still has the bytes as they were
        elif record.group.weight is Kind.P16 and record.group.trainable:
            self.residency.rebuild(record.group, [record])
        record.group.reading = -1
        raise self._change_refused(record)

    @staticmethod
    def _change_refused(record: TensorRecord) -> UnsupportedParameter:
        return UnsupportedParameter(
            f"{record.name!r} was changed in place, but what the optimizer steps is its fp32 master: write inside "
            f"`with materialized(model, names=[{record.name!r}], write=True):`"
        )

    def forget_version(self, record: TensorRecord) -> None:
        """Changes in place so far were meant."""
        record.version = changes(record.parameter)
        record.group.reading = -1

    # What saved tensors ask (`_saved.Fetcher`).

    def fetch(self, record: TensorRecord) -> Bound:
        """The record's residency, brought in if need be."""
        self.touch([record])
        assert record.bound is not None, "touching binds"
        return record.bound

    def owner(self, storage: int) -> TensorRecord | None:
        """Whose residency a storage is."""
        return self.residency.owners.get(storage)

    def check_placeholder(self, storage: torch.UntypedStorage) -> None:
        """Raise if a storage is what a parameter has while it is elsewhere."""
        for record in self.records:
            if record.placeholder.untyped_storage().data_ptr() == storage.data_ptr():
                raise UnsupportedParameter(
                    f"{record.name!r} was read by code that parameters do not see (compiled or C++): its memory is "
                    "elsewhere, and it read not-a-number; release(model), or keep that part out of chunked(...)"
                )

    # Moments.

    def touch(self, records: list[TensorRecord]) -> None:
        """Have these parameters in, and keep them in for the moment."""
        self._enter()
        if self.still:
            self._touch_still(records)
            return
        moment = self.moment
        for record in records:
            if (record.group.reading != moment and not record.group.pinned) or record.payload is not Payload.VALID:
                self._next([each for each in records if not each.group.pinned], [])
                break
        beat = self._beat if self.driver.tracked else None
        for record in records:
            if record.bound is None or record.bound.slot.stamp != record.group.home.stamp:
                self.residency.unbind(record)
                self.residency.bind(record)
            if beat is not None:
                beat.touched[record.index] = None

    def _touch_still(self, records: list[TensorRecord]) -> None:
        for record in records:
            if record.payload is not Payload.VALID:
                with torch.no_grad():
                    self.gradients.reclaim(record.group)
            if record.bound is None:
                self.residency.bind(record)

    def arrive(self, record: TensorRecord, gradient: torch.Tensor) -> None:
        """A gradient came."""
        self._enter()
        group = record.group
        if not (self.still or group.pinned or self.moment in (group.reading, group.gaining)):
            self._next([], [group])
        group.gaining = self.moment
        with torch.no_grad():
            if not self._taken(record, gradient):
                self.gradients.arrive(record, gradient)
        if self._beat is not None and not record.waiting:
            self._beat.grads[record.index] = None

    def _taken(self, record: TensorRecord, gradient: torch.Tensor) -> bool:
        """Whether the driver has a place for the gradient."""
        try:
            return self.driver.take(record, gradient)
        except Diverged as why:
            self._diverge(why)
            return False

    @property
    def _beat(self) -> Beat | None:
        """The moment that is on."""
        return self.recording.beats[-1] if self.recording is not None and self.recording.beats else None

    def check_usable(self) -> None:
        """`InvalidInput` where nothing may be trained."""
        if self.released:
            raise InvalidInput("this model was released: call chunked(...) again, and use the optimizer it returns")
        if self.surgery:
            raise InvalidInput("inside materialized(model) parameters are copies: train after the block")

    def _enter(self) -> None:
        self.check_usable()
        task = torch._C._current_graph_task_id()
        if task == -1:
            self._task = -1
        if self.recording is None:
            self._begin_pass(backward=task != -1)
        if task not in (-1, self._task):
            if self._task != -1:
                raise UnsupportedParameter(
                    "a backward pass began inside another one, as reentrant checkpointing does it: use "
                    "checkpoint(..., use_reentrant=False), or "
                    'gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})'
                )
            self._task = task
            self.moment += 1  # no moment is both forward and backward
            Variable._execution_engine.queue_callback(self._backward_done)

    def _next(self, records: list[TensorRecord], gains: list[GroupRecord]) -> None:
        """End the moment, begin another."""
        recording = self.recording
        assert recording is not None, "there is a pass"
        held = self._close_moment()
        backward = torch._C._current_graph_task_id() != -1
        reads = list(dict.fromkeys(record.group for record in records))
        beat = recording.begin(backward=backward, reads=reads, gains=gains, held=held)
        self.moment += 1
        with self.tide.paused(), torch.no_grad():
            try:
                self.driver.begin(records, gains, beat.name)
            except Diverged as why:
                self._diverge(why)
                self.driver.begin(records, gains, beat.name)
        for group in reads:
            group.reading = self.moment
        for group in gains:
            group.gaining = self.moment

    def _diverge(self, why: Diverged) -> None:
        """Leave the plan for the rest of the pass."""
        replay, self.driver = self.driver, self.demand
        assert isinstance(replay, Replay), "only plans are left"
        assert self.recording is not None, "there is a pass"
        self.recording.regular = False
        self.counters.diverged(str(why))
        with torch.no_grad():
            replay.abandon()
        self.demand.adopt(self.groups)
        self.tide.start()

    def _close_moment(self, *, strict: bool = True) -> list[GroupRecord]:
        """Settle what the moment leaves behind; the groups that are held on to. ``strict``: keep to the budget."""
        recording = self.recording
        if recording is None or not recording.beats:
            return []
        beat = recording.beats[-1]
        for record in self.gradients.waiting():
            if self.moment in (record.group.reading, record.group.gaining) and self.gradients.put_over(record):
                beat.grads[record.index] = None
        if self.driver.tracked:
            needed = self._measure_tide(beat)
            if strict and needed > self.store.tiers[0].capacity_bytes:
                if not isinstance(self.driver, Replay):
                    raise self._too_large(beat, needed)
                self._diverge(Diverged(f"{beat.name} takes more than fake tensors said"))
        open_groups = {self.groups[index] for index in (*beat.reads, *beat.held)}
        return [group for group in open_groups if group.aliased]

    def _measure_tide(self, beat: Beat) -> int:
        """The most that the moment took of the compute tier."""
        peak = self.tide.take_peak()
        beat.nonmodel_bytes = max(beat.nonmodel_bytes, peak)
        store = self.store
        store.tide_bytes = peak + self.constant_bytes
        store.note_peak()
        needed = store.used_bytes[0] + store.tide_bytes
        store.tide_bytes = self.tide.current_bytes + self.constant_bytes
        return needed

    def _too_large(self, beat: Beat, needed: int) -> DoesNotFit:
        if self.still:
            return everything_too_large(self.store, self.groups, needed)
        return compute_tier_too_small(self.store, self.groups, beat.name, needed, beat.nonmodel_bytes, proven=True)

    # Passes.

    def enter(self) -> bool:
        """The root module's forward begins; whether saved-tensor hooks were pushed for it."""
        self.collecting, self.loading = 0, None  # whatever became of a state dict
        if torch._C._current_graph_task_id() == -1:
            self._task = -1  # whatever became of an earlier backward pass
        recording = self.recording
        if recording is not None:
            unfinished = recording.beats and recording.beats[-1].backward
            if unfinished or not any(record.handles for record in self.records):
                self.finish_pass()
            else:
                recording.regular = False
        if self.recording is None:
            self._begin_pass(backward=False)
        return torch.is_grad_enabled() and self.saved.push()

    def leave(self, pushed: bool) -> None:
        """The root module's forward is over."""
        if pushed:
            self.saved.pop()
        if not torch.is_grad_enabled() and self.recording is not None and torch._C._current_graph_task_id() == -1:
            self.finish_pass()

    def _check_tampered(self) -> None:
        tampered, self.residency.tampered = self.residency.tampered, []
        for record in tampered:
            raise self._change_refused(record)

    def _begin_pass(self, *, backward: bool) -> None:
        self._check_tampered()
        training = backward or torch.is_grad_enabled()
        self.recording = Recording(regular=not backward, training=training)
        self.driver = self.demand if backward and not self.still else self.choose(training)
        if self.still:
            self.recording.beats.append(Beat(False, (), (), name="a pass"))
        if self.driver.tracked:
            self.tide.start()
            self.tide.take_peak()

    def _backward_done(self) -> None:
        self._task = -1
        if self.recording is None:
            return
        with torch.no_grad():
            for record in self.gradients.waiting():
                if record.busy:
                    continue
                if not self.still and self.moment not in (record.group.reading, record.group.gaining):
                    self._next([], [record.group])
                if self.gradients.put_over(record):
                    self.recording.beats[-1].grads[record.index] = None
            self.gradients.stop_waiting()
        self.finish_pass(strict=True)

    def finish_pass(self, *, strict: bool = False) -> None:
        """Between passes everything is at home, but for what somebody holds on to.

        ``strict``: the pass went well, and its last moment has to keep to the budget too.
        """
        recording = self.recording
        self._task = -1
        if recording is None:
            self.tide.stop()  # within backward it cannot leave the stack
            return
        self._close_moment(strict=strict)
        self.recording = None
        self.moment += 1
        with torch.no_grad():
            try:
                self.driver.finish()
            except Diverged as why:
                self.recording = recording
                self._diverge(why)
                self.recording = None
                self.driver.finish()
        self.counters.replayed += self.driver is not self.demand
        self.tide.stop()
        self.store.tide_bytes = 0
        recording.regular &= not any(record.handles for record in self.records)
        self.counters.passes += 1
        if self.observer is not None:
            self.observer(recording)

    # What the optimizer asks (`_settings.Gradients`).

    def has_gradient(self, record: TensorRecord) -> bool:
        """Whether a gradient waits for the step."""
        return record.gradient is not Gradient.NONE

    def gradient_norm(self, record: TensorRecord) -> float:
        """Of the stored gradient times its factor."""
        self.finish_pass()
        self.residency.await_all(Queue.CPU)
        squares = float(self.gradients.measure(record)[0])
        return math.sqrt(squares) * abs(record.factor)

    def scale_gradient(self, record: TensorRecord, factor: float) -> None:
        """Have the step multiply by this too."""
        record.factor *= factor

    def discard_gradients(self, records: Iterable[TensorRecord] | None = None) -> None:
        """Forget the gradients of these, or of all."""
        chosen = list(records) if records is not None else self.records
        for record in chosen:
            clear_grad(record.parameter)  # autograd's own, if a hook before ours failed
        beat = self._beat
        if beat is None or beat.backward or self.still or any(r.gradient is not Gradient.NONE for r in chosen):
            self.finish_pass()  # else a forward pass is on, whose gradients are still to come
        with torch.no_grad():
            self.gradients.discard([record for record in chosen if record.gradient is not Gradient.NONE])

    def step(self, settings: SettingsOf, max_norm: float | None, loss_scale: float) -> Outcome:
        """Update every parameter that has a gradient, or none if one of them is not finite."""
        self.check_usable()
        self.collecting, self.loading = 0, None
        self.finish_pass()
        self._check_tampered()
        self.before_step()
        for record in self.records:
            if record.bound is not None and changes(record.parameter) != record.version:
                self._refuse_change(record)
        self.residency.await_all(Queue.CPU)
        pending = [record for record in self.records if record.gradient is not Gradient.NONE]
        decision = decide(pending, [self.gradients.measure(record) for record in pending], max_norm, loss_scale)
        if decision.skip:
            self.gradients.discard(pending)
        elif not self.replay_step(settings, decision.factor):
            self.updater.step(settings, decision.factor)
        self.counters.steps += 1
        self.counters.skipped += decision.skip
        return Outcome(norm=decision.norm, skipped=decision.skip)

    def read_state(self, record: TensorRecord, kind: Kind) -> torch.Tensor:
        """A copy in fp32 on the CPU, of the parameter's shape."""
        return self.updater.read(record, kind)

    def write_state(self, record: TensorRecord, kind: Kind, value: torch.Tensor) -> None:
        """Replace it."""
        self.updater.write(record, kind, value)

    def read(self, record: TensorRecord) -> torch.Tensor:
        """A copy of the parameter as it is computed with."""
        return self.updater.weight(record)
