"""Where in training a model is: which pass, which moment; who drives it, and what happens when a plan does not hold.

A *pass* begins with the first touch and ends with the end of backward, of an evaluation, or when something comes that
cannot belong to it. Between passes everything is at home, but for what somebody holds on to.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable

import torch
from torch.autograd import Variable

from ps_core._errors import DoesNotFit, UnsupportedParameter
from ps_core.engine._execution.components import Components
from ps_core.engine._execution.instructions import Diverged
from ps_core.engine._execution.protocols import PassDriver, Scheduler
from ps_core.engine._execution.replay import PlanDriver
from ps_core.engine._parameters.errors import changed_in_place, compute_tier_too_small, everything_too_large
from ps_core.engine._parameters.state import ParamGroup, ParamState
from ps_core.engine._support.counters import Counters
from ps_core.engine._support.interrupts import defer_interrupts, install, uninstall
from ps_core.engine._tracing.moments import MomentRecord, PassRecording


class PassTracker:
    """The passes of one engine."""

    def __init__(
        self,
        parts: Components,
        records: list[ParamState],
        counters: Counters,
        constant_bytes: int,
        guide: Scheduler,
    ) -> None:
        self._residency, self._gradients = parts.residency, parts.gradients
        self._store, self._groups, self._records = parts.residency.store, parts.residency.groups, records
        self._record_of = {record.index: record for record in records}
        self._counters = counters
        self._clock = counters.clock
        self._constant_bytes = constant_bytes
        self._still = self._store.still
        self._task = -1
        """The backward pass that is on, as autograd numbers them."""
        self.tide = self._store.device.tide()
        self.demand = parts.demand
        self.driver: PassDriver = self.demand
        self.guide = guide
        self.moment = 0
        self.outside = True
        """The root module's forward is not running: memory that a call gives away is somebody else's."""
        self.broke_off = False
        """True if an exception ended the last pass; `finish` sets it."""
        self.recording: PassRecording | None = None
        """Of the pass that is on; None between passes."""
        self.observer: Callable[[MomentRecord, bool], None] | None = None
        """See `observe`."""

    def observe(self, observer: Callable[[MomentRecord, bool], None] | None) -> None:
        """Call ``observer`` as each moment ends, with True for a pass's first; None: call nothing."""
        self.observer = observer

    @property
    def tracked(self) -> bool:
        """Whether non-model bytes are counted in this pass."""
        return self.driver.tracked or self.observer is not None

    @property
    def beat(self) -> MomentRecord | None:
        """The moment that is on."""
        recording = self.recording
        return recording.beats[-1] if recording is not None and recording.beats else None

    def check_writes(self) -> None:
        """Raise if a parameter was changed in place, which is undone; keep what may be written to exposed memory."""
        self._residency.exposed.check()
        for record in self._residency.pop_tampered():
            raise changed_in_place(record.name)

    def count(self, tensor: torch.Tensor) -> None:
        """Count it among non-model bytes, although no operator was seen to make it."""
        watched = self.tracked and self.recording is not None
        if watched and tensor.untyped_storage()._cdata not in self._residency.owners:
            self.tide.count(tensor)

    # The root module's forward.

    def end_open(self, inputs: Iterable[torch.Tensor] = ()) -> None:
        """End a pass that was left open, if a forward that comes now cannot belong to it.

        ``inputs`` of that forward were made while the pass was open, and are counted as little as between passes.
        """
        if torch._C._current_graph_task_id() == -1:
            self._task = -1  # whatever became of an earlier backward pass
        recording = self.recording
        if recording is not None:
            unfinished = recording.beats and recording.beats[-1].backward
            if unfinished or not any(record.handles for record in self._records):
                self.finish()
                for tensor in inputs:
                    self.tide.forget(tensor)

    def enter_forward(self) -> None:
        """It begins."""
        self.end_open()
        if self.recording is None:
            self._begin(backward=False)
        else:
            self.recording.regular = False
        self.outside = False
        self._clock.turn("forward")

    def abort_forward(self) -> None:
        """Note that an exception ended the root module's forward."""
        self.outside = True

    def leave_forward(self) -> None:
        """It is over."""
        self.outside = True
        within_backward = torch._C._current_graph_task_id() != -1
        self._clock.turn("backward" if within_backward else "")
        if not torch.is_grad_enabled() and self.recording is not None and not within_backward:
            self.finish()

    # Moments.

    @property
    def joined(self) -> bool:
        """Whether what is touched now belongs to the pass that is on, without a look at anything else."""
        return self.recording is not None and torch._C._current_graph_task_id() == self._task

    def join(self) -> None:
        """Something is touched: find out which pass it belongs to."""
        task = torch._C._current_graph_task_id()
        if task == -1:
            self._task = -1
        if self.recording is None:
            self._begin(backward=task != -1)
        if task not in (-1, self._task):
            if self._task != -1:
                raise UnsupportedParameter(
                    "a backward pass began inside another one, as reentrant checkpointing does it: use "
                    "checkpoint(..., use_reentrant=False), or "
                    'gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})'
                )
            self._task = task
            self.moment += 1  # no moment is both forward and backward
            self._clock.turn("backward")
            Variable._execution_engine.queue_callback(self._backward_done)

    def next(self, records: list[ParamState], gains: list[ParamGroup]) -> None:
        """End the moment, begin another."""
        recording = self.recording
        assert recording is not None, "there is a pass"
        if self._residency.exposed.bounds:
            self._residency.exposed.check(ended=True)
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
            group.last_read_moment = self.moment
        for group in gains:
            group.last_grad_moment = self.moment

    def take(self, record: ParamState, gradient: torch.Tensor) -> bool:
        """Whether the driver had a place for the gradient."""
        try:
            return self.driver.take(record, gradient)
        except Diverged as why:
            self._diverge(why)
            return False

    def _diverge(self, why: Diverged) -> None:
        """Leave the plan for the rest of the pass."""
        replay, self.driver = self.driver, self.demand
        assert isinstance(replay, PlanDriver), "only plans are left"
        if self.recording is not None:
            self.recording.regular = False
        self._counters.diverged(str(why))
        with torch.no_grad():
            try:
                replay.abandon()
                self.guide.left()
            finally:
                self.demand.adopt(self._groups)
                self.tide.start()

    def _close_moment(self, *, strict: bool = True) -> list[ParamState]:
        """Settle what the moment leaves behind; the parameters that are held on to. ``strict``: keep to the budget."""
        beat = self.beat
        if beat is None:
            return []
        for record in self._gradients.pending_overwrites():
            if self.moment in (
                record.group.last_read_moment,
                record.group.last_grad_moment,
            ) and self._gradients.write_over_weight(record):
                beat.grads[record.index] = None
        if self.tracked:
            needed = self._measure_tide(beat)
            over = needed - self._store.tiers[0].capacity_bytes
            if strict and over > 0 and self.demand.free_optional_bytes(over) < over:
                if not isinstance(self.driver, PlanDriver):
                    raise self._too_large(beat, needed)
                if self.recording is not None:
                    self.recording.overrun = True
                self._diverge(Diverged(f"{beat.name} takes more than was planned"))
        if self.observer is not None and self.recording is not None:
            self.observer(beat, len(self.recording.beats) == 1)
        groups = dict.fromkeys((*beat.reads, *(self._record_of[index].group.index for index in beat.held)))
        return [
            record
            for index in groups
            for record in self._groups[index].tensors
            if record.bound is not None and record.bound.aliased
        ]

    def _measure_tide(self, beat: MomentRecord) -> int:
        """The most that the moment took of the compute tier."""
        peak = self.tide.take_peak()
        beat.nonmodel_bytes = max(beat.nonmodel_bytes, peak)
        store = self._store
        store.ledger.end_moment(peak + self._constant_bytes, backward=beat.backward)
        needed = (
            store.held_bytes if isinstance(self.driver, PlanDriver) else store.ledger.used_bytes[0]
        ) + store.ledger.nonmodel_bytes
        store.ledger.set_nonmodel(self.tide.current_bytes + self._constant_bytes)
        return needed

    def _too_large(self, beat: MomentRecord, needed: int) -> DoesNotFit:
        if self._still:
            return everything_too_large(self._store, self._groups, needed, so_far=True)
        return compute_tier_too_small(self._store, self._groups, beat.name, needed, beat.nonmodel_bytes, proven=True)

    # The beginning and the end of a pass.

    def _begin(self, *, backward: bool) -> None:
        self._residency.exposed.check(ended=True)
        for record in self._residency.pop_tampered():
            raise changed_in_place(record.name)
        install()
        self._store.ledger.note_left_over(0)
        if self.broke_off and self.tide.current_bytes:
            _free_broken_pass()
            self._store.ledger.note_left_over(self.tide.current_bytes)
        training = backward or torch.is_grad_enabled()
        self.recording = PassRecording(regular=not backward, training=training)
        self.driver = self.demand if backward and not self._still else self.guide.choose(training)
        if self._still:
            self.recording.beats.append(MomentRecord(False, (), (), name="a pass"))
        if self.tracked:
            self.tide.start()
            self.tide.take_peak()

    @defer_interrupts
    def _backward_done(self) -> None:
        self._task = -1
        if self.recording is None:
            return
        with torch.no_grad():
            for record in self._gradients.pending_overwrites():
                if record.busy:
                    continue
                if not self._still and self.moment not in (
                    record.group.last_read_moment,
                    record.group.last_grad_moment,
                ):
                    self.next([], [record.group])
                if self._gradients.write_over_weight(record):
                    self.recording.beats[-1].grads[record.index] = None
            self._gradients.end_overwrites()
        self.finish(strict=True)

    def finish(self, *, strict: bool = False) -> None:
        """End the pass, if one is on. ``strict``: it went well, and its last moment has to keep to the budget too."""
        self._task = -1
        self._residency.exposed.check(ended=True)
        recording = self.recording
        if recording is None:
            self.tide.stop()  # within backward it cannot leave the stack
            return
        self._close_moment(strict=strict)  # where that raises, the pass is still to be ended
        self.recording = None
        self.broke_off = not strict and (sys.exc_info()[0] is not None or recording.ends_backward)
        self.moment += 1
        try:
            self._go_home(recording)
        finally:
            self.tide.stop()
            self._clock.turn("")
            uninstall()
        self._store.ledger.set_nonmodel(0)
        recording.regular &= not any(record.handles for record in self._records)
        self._counters.passed(replayed=self.driver is not self.demand)
        self.guide.observe(recording)

    def _go_home(self, recording: PassRecording) -> None:
        with torch.no_grad():
            try:
                self.driver.finish()
            except Diverged as why:
                recording.regular = False
                self._diverge(why)
                self.driver.finish()
            except BaseException as why:  # memory that ran out, say: the plan is left, or its homes stayed lent
                if self.driver is not self.demand:
                    recording.regular = False
                    self._diverge(Diverged(str(why)))
                    self.driver.finish()
                raise


def _free_broken_pass() -> None:
    """Free the activations that an exception left alive, if no object of the user's holds them.

    A backward pass that raised leaves nodes in autograd's queue of this thread, and with them their graph, until the
    thread's next backward pass: so run one. The frames of an exception may hold one another until they are collected.
    """
    if torch._C._current_graph_task_id() == -1:
        with torch.inference_mode(False), torch.enable_grad():
            leaf = torch.zeros((), device="cpu", requires_grad=True)
            torch.autograd.grad(leaf.clone(), leaf)
    gc.collect()
