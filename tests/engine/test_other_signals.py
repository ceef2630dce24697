"""Handlers of other signals than Ctrl-C's wait for the engine too: they may raise."""

from __future__ import annotations

import signal

import pytest

from _reference import Settings
from _runs import HOST, check_same, managed
from ps_core import Budget
from ps_core.engine._support.interrupts import defer_interrupts_installing
from test_interrupts import POINTS, CtrlC, as_python_starts, training

__all__ = ["as_python_starts"]  # it is used by itself, in every test


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGALRM])
def test_a_step_broken_off_by_another_signals_handler(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CtrlC, "number", number)
    before = signal.signal(number, signal.default_int_handler)
    try:
        told = Settings(precision="bf16")
        got = managed(training(POINTS), told, "emulated", Budget(device=64_000, host=HOST))
        check_same(training(0), told, got)
        assert signal.getsignal(number) is signal.default_int_handler
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGUSR1])
def test_two_signals_that_wait_are_both_handled(first: signal.Signals) -> None:
    """Also if the handler of the first raises."""
    handled: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: handled.append(number))

    @defer_interrupts_installing
    def both_come() -> None:
        signal.raise_signal(first)
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGINT)
        assert not handled

    try:
        with pytest.raises(KeyboardInterrupt):
            both_come()
        assert handled == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)
