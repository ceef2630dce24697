"""Every error this project raises on purpose.

    PatrickStarError
    ├── InvalidInput (also a ValueError)   a size, name, option or file that cannot be used
    │   └── engine.CannotTrace             a model that fake tensors cannot follow
    ├── DoesNotFit                         no plan exists within the budgets
    ├── DeviceOutOfMemory                  the accelerator ran out although the plan fitted
    ├── IllegalTransition                  a tensor was asked to enter a state it cannot reach
    ├── AlreadyManaged                     the model is already under management
    ├── UnsupportedParameter               a parameter that cannot live in a chunk
    ├── PlanMismatch                       a plan that breaks its own rules or does not match what runs
    ├── CheckpointDamaged                  a checkpoint whose bytes are not what was written
    ├── CheckpointMismatch                 a sound checkpoint of something else
    ├── RanksDiverged                      processes that no longer do the same thing
    └── TierFailure                        a memory or disk tier failed underneath us

[Note: what an exception holds]
Its traceback, that the frames it came through, and these the frames that called them, with all their variables: in a
forward pass the user's activations. An exception that is kept, or that lies in a variable of a frame it came through,
keeps all that alive until the garbage collector comes by. So what is kept is kept without its traceback, and a list of
refusals is emptied while one of them is raised.
"""

from __future__ import annotations


class PatrickStarError(Exception):
    """Base of every error raised on purpose."""


class InvalidInput(PatrickStarError, ValueError):
    """A size, name, option or file the caller gave cannot be used; the message is one line."""


class DoesNotFit(PatrickStarError):
    """No plan exists within the budgets.

    ``needed_bytes`` and ``available_bytes`` speak of one tier (or of the whole hierarchy) at one moment; ``proven``
    tells whether no plan at all can exist, or whether this planner merely found none (a budget within one
    largest extent of the lower bound).
    """

    def __init__(
        self,
        *,
        tier: str,
        moment: str,
        needed_bytes: int,
        available_bytes: int,
        proven: bool,
        remedies: tuple[str, ...] = (),
    ) -> None:
        self.tier = tier
        self.moment = moment
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes
        self.proven = proven
        self.remedies = remedies
        why = "more than" if proven else "within one extent of"
        lines = [
            f"does not fit: {tier} needs {needed_bytes:,} bytes at {moment!r}, "
            f"{why} the {available_bytes:,} bytes it has"
        ]
        lines += [f"  try: {remedy}" for remedy in remedies]
        super().__init__("\n".join(lines))


class DeviceOutOfMemory(PatrickStarError):
    """The accelerator ran out of memory although the plan fitted; parameters are intact."""


class IllegalTransition(PatrickStarError):
    """A tensor was asked to enter a state that cannot follow the one it is in."""

    def __init__(self, *, subject: str, state: str, event: str, expected: tuple[str, ...]) -> None:
        self.subject = subject
        self.state = state
        self.event = event
        self.expected = expected
        legal = ", ".join(expected) if expected else "nothing"
        super().__init__(f"{subject}: {event!r} cannot happen in state {state}; legal here: {legal}")


class AlreadyManaged(PatrickStarError):
    """The model is already under management; release it first."""


class UnsupportedParameter(PatrickStarError):
    """A parameter that cannot live in a chunk; the message names it and the remedy."""


class PlanMismatch(PatrickStarError):
    """A plan that breaks its own rules, or that does not belong to what is being run."""


class CheckpointDamaged(PatrickStarError):
    """A checkpoint whose bytes are not the bytes that were written."""


class CheckpointMismatch(PatrickStarError):
    """A sound checkpoint, of a different model or optimizer."""


class RanksDiverged(PatrickStarError):
    """Processes that should do the same thing no longer do."""


class TierFailure(PatrickStarError):
    """A memory or disk tier failed underneath us; names the file and the reason."""
