"""How a run is asked to stop: signals in their order, and a second Ctrl-C that cannot be lost."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys

import pytest

from amp_core.run.stop import SIGNALS, Stop

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")


def told_at_once(stop: Stop, numbers: list[int]) -> bool:
    """Signals that come while Python runs no handler. Returns whether a KeyboardInterrupt was raised."""
    kill = ctypes.PyDLL(None).kill
    before = {number: signal.signal(number, stop.on_signal) for number in SIGNALS}
    try:
        with stop.in_order():
            try:
                list(map(kill, [os.getpid()] * len(numbers), numbers))  # one operation for the interpreter
            except KeyboardInterrupt:
                return True
        return False
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


INT, TERM, USR1 = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1


@pytest.mark.parametrize(
    "numbers, code, at_once",
    [
        ([TERM], 143, False),
        ([TERM, INT], 143, True),
        ([USR1, INT], 138, True),
        ([INT, INT], 130, True),
        ([INT, TERM], 130, False),  # as torchrun passes a Ctrl-C on
        ([TERM, USR1], 143, False),
        ([TERM, USR1, INT], 143, True),
    ],
)
def test_signals_count_in_the_order_in_which_they_came(numbers, code, at_once):
    stop = Stop(None, None)
    assert told_at_once(stop, numbers) == at_once and stop.code == code


def test_a_second_interrupt_that_was_swallowed_is_raised_again():
    """Exceptions in a callback of the interpreter, such as a destructor, go nowhere."""
    stop = Stop(None, None)
    before = signal.getsignal(INT)
    try:
        stop.on_signal(TERM, None)
        assert stop.poll() == 143
        with contextlib.suppress(KeyboardInterrupt):
            stop.on_signal(INT, None)
    finally:
        signal.signal(INT, before)
    with pytest.raises(KeyboardInterrupt):
        stop.poll()
    with pytest.raises(KeyboardInterrupt):  # once a second in a wait for data
        stop.is_asked()


def test_nothing_of_it_is_left():
    before = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(before)
    descriptors = len(os.listdir("/proc/self/fd"))
    assert told_at_once(Stop(None, None), [TERM, INT]) and signal.set_wakeup_fd(-1) == before == -1
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_signals_to_a_forked_process_are_not_those_of_the_run():
    stop = Stop(None, None)
    with stop.in_order():
        child = os.fork()
        if child == 0:
            signal.signal(INT, lambda *_: None)
            os.kill(os.getpid(), INT)
            os._exit(0)
        os.waitpid(child, 0)
        stop.on_signal(TERM, None)
    assert stop.code == 143


def test_a_signal_counts_beside_those_of_other_handlers():
    before = signal.signal(signal.SIGUSR2, lambda *_: None)
    stop = Stop(None, None)
    try:
        with stop.in_order():
            os.kill(os.getpid(), signal.SIGUSR2)
            stop.on_signal(TERM, None)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert stop.code == 143
