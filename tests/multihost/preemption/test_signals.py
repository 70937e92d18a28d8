"""Signals as a source of notices, which a busy main thread cannot hide."""

from __future__ import annotations

import signal

import pytest

from tests.support.cluster import Processes, run_processes
from tests.support.paths import program

PROGRAM = program("signal_notices")


def test_native_code_does_not_hide_the_notice() -> None:
    """The notice comes while the main thread sits in a native call that no signal interrupts, and
    the user's handler runs after it.
    """
    with Processes(PROGRAM, 1, arguments=["native"]) as processes:
        processes.wait_for(0, "busy")
        processes.kill(0, signal.SIGTERM)
        finished = processes.wait()[0]
    assert finished.code == 0
    assert (
        finished.output.index("SIGTERM received")
        < finished.output.index("user's handler True")
        < finished.output.index("back")
    )


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("later handler", ["later handler", "SIGTERM received"]),
        ("asyncio", ["SIGTERM received"]),
        ("asking", []),
        ("again", ["SIGTERM received"]),
        ("ctrl-c", ["SIGINT received"]),
        ("in a handler", ["by the handler", "by the loop"]),
    ],
)
def test_other_handlers_and_repeats(case: str, expected: list[str]) -> None:
    """The notice comes although the program set a handler later, and a wake-up descriptor that
    stood before gets its bytes; it comes when asyncio has the descriptor. A program that goes on
    asking about steps is not stuck, however often SIGTERM comes. A source that was closed and is
    started again takes the next for the first. Ctrl-C is a notice where it is asked for, and
    interrupts nothing. A handler may notify, whatever it has interrupted.
    """
    (output,) = run_processes(PROGRAM, 1, arguments=[case])
    assert all(line in output for line in expected), output


def test_a_second_sigterm_ends_a_stuck_process() -> None:
    """Repeated while the program asks nothing, SIGTERM ends it with exit code 143 and all stacks,
    whatever stands for sys.stderr; at once after the first it does not.
    """
    with Processes(PROGRAM, 1, arguments=["stuck"]) as processes:
        processes.wait_for(0, "stuck")
        for _ in range(600):
            processes.kill(0, signal.SIGTERM)
            if processes.ended(0, 0.1):
                break
        finished = processes.wait()[0]
    assert finished.code == 128 + signal.SIGTERM
    assert "SIGTERM again after" in finished.output and "most recent call first" in finished.output
