"""Cap what PyTorch's allocator takes from a CUDA device at the budgets of the managed models there.

[Note: the allocator's cap]
A plan keeps the bytes in use within the budget. The allocator also keeps blocks that were freed, and gaps between
blocks, and the driver and other processes count those as used. So the allocator is capped
(`torch.cuda.set_per_process_memory_fraction`): at all budgets, a sixteenth more, and what other code had reserved
before. Gaps need that sixteenth: their places change from step to step. At the cap the allocator gives back the blocks
that it keeps. Memory runs out where that is not enough, and then the next pass is planned with more left free. A pass
without a plan cannot be, so there is no cap while a model there has one.

A cap that other code set stays, and so does a change of ours by other code.
"""

from __future__ import annotations

import weakref
from threading import RLock

from ps_core._units import format_bytes
from ps_core.engine._devices.cuda.memory import EngineAllocations
from ps_core.engine._devices.cuda.runtime import CudaRuntime
from ps_core.engine._support.log import log_line

ROUNDING_BYTES = 2**26
"""Added to the cap: blocks of 2 and 20 MiB are taken however little is in them, and libraries want workspaces of 32."""
GAPS_PART = 16
"""For gaps between blocks, the budgets divided by this are added to the cap."""

_SHARED: weakref.WeakKeyDictionary[CudaRuntime, AllocatorCap] = weakref.WeakKeyDictionary()


class AllocatorCap:
    """The cap of one device, for all managed models there; see [Note: the allocator's cap]."""

    def __init__(self) -> None:
        self._budgets: dict[int, int | None] = {}
        """Bytes by number of a model's device object; None: its next pass has no plan."""
        self._others_bytes = 0
        self._own_bytes: int | None = None
        """The cap that this object set and nobody changed; None: there is none."""
        self._told = False
        """True once a line said that there is a cap of other code."""
        self._lock = RLock()
        """Models come and go on any thread, also while the garbage collector runs within this class."""

    @staticmethod
    def of(runtime: CudaRuntime) -> AllocatorCap:
        """Return the device's."""
        return _SHARED.setdefault(runtime, AllocatorCap())

    def foreign_bytes(self, runtime: CudaRuntime) -> int | None:
        """Return the cap that other code has set; None: there is none."""
        with self._lock:
            found = runtime.cap_bytes
            return None if found == self._own_bytes else found

    def put(self, runtime: CudaRuntime, key: int, budget_bytes: int | None) -> None:
        """Count a model with the budget of its plan; None: its next pass has no plan, so there is no cap."""
        if key in self._budgets and self._budgets[key] == budget_bytes:
            return
        foreign = self.foreign_bytes(runtime)
        if foreign is not None and budget_bytes is not None and not self._told:
            self._told = True
            log_line(
                f"PyTorch's allocator is capped at {format_bytes(foreign)} of {runtime.torch_device} already, and "
                f"stays so: the plan alone keeps the budget of {format_bytes(budget_bytes)}"
            )
        with self._lock:
            self._budgets[key] = budget_bytes
            if budget_bytes is not None:
                runtime.release_cached()
                self._others_bytes = max(0, runtime.allocated().reserved - EngineAllocations.of(runtime).bytes)
            self._apply(runtime)

    def lift(self, runtime: CudaRuntime) -> bool:
        """Lift the cap until each model's next pass by a plan; return whether there was one.

        Call it where memory ran out: other code may allocate before a pass that is planned with more left free.
        """
        with self._lock:
            lifted = self._own_bytes is not None
            self._budgets = dict.fromkeys(self._budgets)
            self._apply(runtime)
            return lifted

    def remove(self, runtime: CudaRuntime, key: int) -> None:
        """Take a model's budget away; behind the last one there is no cap, as before the first."""
        with self._lock:
            if key in self._budgets:
                del self._budgets[key]
                self._apply(runtime)

    def _apply(self, runtime: CudaRuntime) -> None:
        found = runtime.cap_bytes
        if found != self._own_bytes:
            self._own_bytes = None
            return
        budgets = [budget for budget in self._budgets.values() if budget is not None]
        gaps = sum(budgets) // GAPS_PART
        wanted = sum(budgets) + gaps + self._others_bytes + ROUNDING_BYTES if budgets else None
        if wanted is None or len(budgets) < len(self._budgets) or wanted >= runtime.free_bytes()[1]:
            wanted = None
        if wanted != found:
            runtime.set_cap(wanted)
            self._own_bytes = runtime.cap_bytes  # as the allocator has rounded it
