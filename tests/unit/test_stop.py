"""How a run is asked to stop: signals, and a second Ctrl-C that cannot be lost."""

from __future__ import annotations

import contextlib
import signal

import pytest

from amp_core.run.stop import Stop

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
def test_the_first_signal_counts_and_a_later_interrupt_stops_at_once(numbers, code, at_once):
    stop, before = Stop(None, None), signal.getsignal(INT)
    try:
        with pytest.raises(KeyboardInterrupt) if at_once else contextlib.nullcontext():
            for number in numbers:
                stop.on_signal(number, None)
    finally:
        signal.signal(INT, before)
    assert stop.code == code


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
