"""Define every error that this project raises on purpose.

    PatrickStarError
    ├── InvalidInput (also a ValueError)   a size, name, option or file that cannot be used
    │   └── engine.CannotTrace             a model that fake tensors cannot follow
    ├── DoesNotFit (also a RuntimeError)   no plan exists within the budgets
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
An exception holds its traceback. That holds the frames it came through, their callers, and all their variables: in a
forward pass the user's activations. A stored exception keeps all these alive. One in a variable of its own frames does
so until the garbage collector runs. So exceptions are stored without their traceback. A list of errors is emptied while
one of them is raised.
"""

from __future__ import annotations

_FOR_LIBRARIES = "\n(CUDA out of memory.)"
"""Words that libraries search for in a `RuntimeError`'s argument before they try a smaller batch.

Accelerate and the Trainer of transformers search for `` out of memory.``, Lightning for ``CUDA`` too.
"""


class PatrickStarError(Exception):
    """Base class of every error that is raised on purpose."""

    def __reduce__(self) -> tuple[object, ...]:
        """Copy and pickle the error as it is: errors whose arguments are keywords cannot be made from `args` again."""
        return _restored, (type(self), self.args, vars(self).copy())


class InvalidInput(PatrickStarError, ValueError):
    """Say that a size, name, option or file of the caller's cannot be used; the message is one line."""


class DoesNotFit(PatrickStarError, RuntimeError):
    """Say that no plan exists within the budgets.

    ``needed_bytes`` and ``available_bytes`` are those of one tier (or of all tiers) at one moment. ``proven`` True: no
    plan can exist. ``proven`` False: the planner found none, for a budget within one largest extent of the lower
    bound. Or a pass found no room, where another plan might. ``depends_on_batch`` True: a smaller batch needs fewer
    bytes. Libraries that look for a batch size then take this error for PyTorch's when memory runs out.
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
        depends_on_batch: bool = False,
    ) -> None:
        self.tier = tier
        self.moment = moment
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes
        self.proven = proven
        self.remedies = remedies
        self.depends_on_batch = depends_on_batch
        why = "more than" if proven or needed_bytes > available_bytes else "within one extent of"
        lines = [
            f"does not fit: {tier} needs {needed_bytes:,} bytes at {moment!r}, "
            f"{why} the {available_bytes:,} bytes it has"
        ]
        lines += [f"  try: {remedy}" for remedy in remedies]
        super().__init__("\n".join(lines) + (_FOR_LIBRARIES if depends_on_batch else ""))

    def __str__(self) -> str:
        return super().__str__().removesuffix(_FOR_LIBRARIES)


class DeviceOutOfMemory(PatrickStarError):
    """Say that the accelerator ran out of memory although the plan fitted; parameters are intact."""


class IllegalTransition(PatrickStarError):
    """Say that a tensor was asked to enter a state that cannot follow its present one."""

    def __init__(self, *, subject: str, state: str, event: str, expected: tuple[str, ...]) -> None:
        self.subject = subject
        self.state = state
        self.event = event
        self.expected = expected
        legal = ", ".join(expected) if expected else "nothing"
        super().__init__(f"{subject}: {event!r} cannot happen in state {state}; legal here: {legal}")


class AlreadyManaged(PatrickStarError):
    """Say that the model is under management already; release it first."""


class UnsupportedParameter(PatrickStarError):
    """Say that a parameter cannot be stored in a chunk; the message names it and a remedy."""


class PlanMismatch(PatrickStarError):
    """Say that a plan breaks its own rules, or does not belong to what is being run."""


class CheckpointDamaged(PatrickStarError):
    """Say that a checkpoint's bytes are not those that were written."""


class CheckpointMismatch(PatrickStarError):
    """Say that an intact checkpoint is of a different model or optimizer."""


class RanksDiverged(PatrickStarError):
    """Say that processes that should do the same thing no longer do."""


class TierFailure(PatrickStarError):
    """Say that a memory or disk tier failed; the message names the file and the reason."""


def _restored(
    kind: type[PatrickStarError], args: tuple[object, ...], attributes: dict[str, object]
) -> PatrickStarError:
    """Make an error that was copied or pickled."""
    error = kind.__new__(kind, *args)
    vars(error).update(attributes)
    return error
