"""The thread of collectives by itself."""

from __future__ import annotations

import torch

from ps_dist._comm_thread import CommThread
from ps_dist._timeouts import AwakeClock


def test_its_operators_use_the_number_of_threads_of_the_thread_that_submits() -> None:
    """As set last: PyTorch's number is each thread's own, and this thread began with an earlier one."""
    thread, found, before = CommThread(AwakeClock(), hopeless_s=60), list[int](), torch.get_num_threads()
    try:
        for count in (2, 1, 3, 3):
            torch.set_num_threads(count)
            thread.submit(lambda: found.append(torch.get_num_threads())).wait()
        assert found == [2, 1, 3, 3]
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
        assert thread.close()
