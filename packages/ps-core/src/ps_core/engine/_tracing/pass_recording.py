"""Record moments as they happen: the groups that each one touched, its gradients, its non-model bytes.

[Note: moments]
A moment begins when a call touches a group that the moment before did not read. It also begins when a gradient arrives
for a group that the moment before neither read nor brought gradients for. So a moment is a run of work on one group or
a few, about a layer. The same model on the same kind of batch makes the same moments again. Parameters whose memory has
live aliases (a checkpoint's recomputed block) are *held*. They belong to the moment although it does not touch them,
and they are not moved.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from ps_core._trace import Amounts, Moment, Phase, Tensor, Trace
from ps_core.engine._parameters.param_state import ParamGroup, ParamState
from ps_core.engine._tracing.activation_log import ActivationLog, TracedActivations
from ps_core.engine._tracing.batch_shape import BatchShape

ENDED_IN_BACKWARD = (
    "in backward a hook reads gradients or states, calls the model, or runs another backward: do that after backward()"
)
"""Why a pass whose backward goes on is irregular, and the pass that goes on with it."""
LEFT_PLAN = "the pass left its plan"
MOST_CALLS = 16
"""Most calls of the model in a pass that is planned. A later call without gradients ends the pass."""


@dataclass(slots=True)
class MomentRecord:
    """One moment of a recorded pass."""

    backward: bool
    reads: tuple[int, ...]
    """Groups whose weights began the moment."""
    grad_groups: tuple[int, ...]
    """Groups whose gradients began the moment."""
    held: tuple[int, ...] = ()
    """Parameters whose memory has had live aliases since the moment before."""
    name: str = ""
    touched: dict[int, None] = field(default_factory=dict)
    """Tensors in order of use."""
    grads: dict[int, None] = field(default_factory=dict)
    """Tensors whose gradients arrived."""
    nonmodel_bytes: int = 0
    work: Amounts | None = None
    """Operations as a fake pass like this one counted them; None: to be guessed."""


@dataclass(slots=True)
class PassRecording:
    """The moments of one pass."""

    moments: list[MomentRecord] = field(default_factory=list)
    irregular: str = ""
    """Why this is not a forward pass, of one or more calls, and then a backward pass; empty: it is."""
    calls: int = 1
    """Number of calls of the root module in the pass."""
    training: bool = True
    """True if the pass was to have a backward pass."""
    overrun: bool = False
    """A moment took more of the compute tier than its plan had left for it."""
    foreseen: bool = False
    """True for a pass on fake tensors; False: it ran."""
    activations: ActivationLog = field(default_factory=ActivationLog)
    """What was offloaded."""

    @property
    def ends_backward(self) -> bool:
        """Return True if the last moment so far is one of backward."""
        return bool(self.moments) and self.moments[-1].backward

    @property
    def makes_gradients(self) -> bool:
        """Return True if a parameter got a gradient."""
        return any(moment.grads for moment in self.moments)

    @property
    def left_plan(self) -> bool:
        """Return True if the pass left its plan, so that the recording is not whole."""
        return self.irregular == LEFT_PLAN

    def note_offloaded(self, size_bytes: int) -> str:
        """Note an offloaded activation; return its name, which is empty before the first moment."""
        return self.activations.make(size_bytes, len(self.moments) - 1) if self.moments else ""

    def note_taken(self, name: str) -> None:
        """Note that an activation is copied back."""
        self.activations.note_taken(name, len(self.moments) - 1)

    def leave_graph(self) -> None:
        """Note that the pass ended with a graph for backward, which a plan cannot know."""
        if self.ends_backward:
            self.irregular = "backward leaves a graph behind: call it once, for the sum of all losses"
        else:
            self.irregular = (
                "a step, a state dict or materialized(model) comes between forward and backward: move it before "
                "forward or behind backward"
            )

    @property
    def complete(self) -> bool:
        """Return True if a plan can be made from the recording."""
        return not self.why_incomplete

    @property
    def why_incomplete(self) -> str:
        """Return why no plan can be made from the recording; an empty text if one can."""
        if self.irregular:
            return self.irregular
        if not self.moments or self.ends_backward is not self.training:
            return "no backward pass follows a forward pass with gradients" if self.training else "nothing was computed"
        if self.training and not self.makes_gradients:
            return "backward gives no parameter a gradient, as with torch.autograd.grad: call backward()"
        return ""

    @property
    def peak_nonmodel_bytes(self) -> int:
        """Return the most non-model bytes of any moment."""
        return max((moment.nonmodel_bytes for moment in self.moments), default=0)

    @property
    def moved_activations(self) -> TracedActivations:
        """Return the activations that a plan of this pass moves, by moment."""
        return self.activations.in_trace([moment.backward for moment in self.moments])

    def trace(
        self, model: str, records: list[ParamState], groups: list[ParamGroup], constant_bytes: int, tokens: int
    ) -> Trace:
        """Return the trace of this pass; ``constant_bytes`` of non-model data are always there."""
        tensors = tuple(
            Tensor(name=record.name, numel=record.numel, trainable=record.group.trainable) for record in records
        )
        place = {record.index: number for number, record in enumerate(records)}
        moments: list[Moment] = []
        activations, makes, takes = self.moved_activations
        for number, (moment, guess) in enumerate(zip(self.moments, self._work(records, tokens), strict=True)):
            amounts = moment.work or Amounts(guess)
            read = [place[index] for index in dict.fromkeys((*moment.touched, *moment.held)) if index in place]
            for group in moment.reads:
                if not any(place[record.index] in read for record in groups[group].tensors):
                    read.append(place[groups[group].tensors[0].index])
            before = moments[-1].reads if moments else ()
            moments.append(
                Moment(
                    name=moment.name,
                    phase=Phase.BACKWARD if moment.backward else Phase.FORWARD,
                    reads=tuple(read),
                    grads=tuple(place[index] for index in moment.grads if index in place),
                    makes=makes[number],
                    takes=takes[number],
                    holds=tuple(place[index] for index in moment.held if place.get(index) in before),
                    nonmodel_bytes=moment.nonmodel_bytes + constant_bytes,
                    **amounts._asdict(),
                )
            )
        return Trace(model=model, tensors=tensors, moments=tuple(moments), activations=activations, tokens=tokens)

    def _work(self, records: list[ParamState], tokens: int) -> Iterator[float]:
        """Yield the operations of each moment: 2 a token and element in forward, 4 in backward, each counted once.

        Groups that backward holds were recomputed there: 2 more.
        """
        of = {record.index: record for record in records}
        backward = [moment for moment in self.moments if moment.backward]
        held = [(of[index].group.index, moment) for moment in backward for index in moment.held if index in of]
        recomputed = {group for group, moment in held if group not in moment.reads}
        seen: set[tuple[bool, int]] = set()
        for moment in self.moments:
            new = {(moment.backward, index) for index in (*moment.touched, *moment.grads) if index in of} - seen
            seen |= new
            yield tokens * sum(
                of[index].numel * (2.0 + 2.0 * backward + 2.0 * (backward and of[index].group.index in recomputed))
                for backward, index in new
            )


Recorded: TypeAlias = tuple[PassRecording, BatchShape]
"""A recorded or estimated pass, and its batch."""


def held_after(moment: MomentRecord, groups: list[ParamGroup], record_of: dict[int, ParamState]) -> list[ParamState]:
    """Return the parameters with live aliases, of the groups that a moment read or held parameters of."""
    looked_at = dict.fromkeys((*moment.reads, *(record_of[index].group.index for index in moment.held)))
    found = (record for index in looked_at for record in groups[index].tensors)
    return [record for record in found if record.bound is not None and record.bound.aliased]
