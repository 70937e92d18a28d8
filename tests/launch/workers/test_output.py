"""The lines of many processes as one stream."""

from __future__ import annotations

import io
import os
import threading
from pathlib import Path

from holdfast.launch.workers.output import BackgroundStream, ConsoleOutput


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_lines_carry_their_process_in_a_column() -> None:
    """Numbers are aligned for the largest one; the launcher's own lines go to stderr."""
    stdout = io.StringIO()
    stderr = io.StringIO()
    output = ConsoleOutput(stdout, stderr, 11)
    output.line(2, "two")
    output.line(10, "ten")
    output.say("restarting")
    assert stdout.getvalue() == "[ 2] two\n[10] ten\n"
    assert stderr.getvalue() == "holdfast: restarting\n"


def test_a_terminal_gets_colours() -> None:
    """Each process has a colour, colours of the line itself stay, and the launcher's lines stand
    between the others.
    """
    terminal = Terminal()
    output = ConsoleOutput(terminal, terminal, 2)
    output.line(0, "\x1b[31mred\x1b[0m")
    output.say("restarting")
    assert "\x1b[36m[0] " in terminal.getvalue() and "\x1b[31mred" in terminal.getvalue()
    assert "\x1b[1mholdfast: restarting" in terminal.getvalue()


def test_stderr_beside_a_terminal_gets_the_launchers_lines(tmp_path: Path) -> None:
    """`holdfast run ... 2> launcher.log` on a terminal: they go where the shell sends them."""
    terminal, tty = os.openpty()
    log = tmp_path / "launcher.log"
    with os.fdopen(terminal, "rb", 0) as screen, os.fdopen(tty, "w") as stdout:
        with log.open("w") as stderr:
            output = ConsoleOutput(stdout, stderr, 1)
            output.say("restarting")
            output.line(0, "red")
            output.close()
        shown = screen.read(100)
        assert b"[0] " in shown and b"restarting" not in shown
    assert log.read_text() == "holdfast: restarting\n"


def test_a_closed_stream_is_no_error() -> None:
    """Whoever reads the output may go: the job goes on."""
    stdout = io.StringIO()
    stderr = io.StringIO()
    output = ConsoleOutput(stdout, stderr, 1)
    stdout.close()
    stderr.close()
    output.line(0, "nobody reads this")
    output.say("nor this")


def test_lines_of_many_threads_stay_whole() -> None:
    """Each line is written at once: none is torn or lost."""
    stdout = io.StringIO()
    output = ConsoleOutput(stdout, io.StringIO(), 8)
    threads = [
        threading.Thread(target=lambda p=p: [output.line(p, f"{p} {n}") for n in range(200)])
        for p in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(stdout.getvalue().splitlines()) == sorted(
        f"[{p}] {p} {n}" for p in range(8) for n in range(200)
    )


def test_an_unread_pipe_holds_up_nobody() -> None:
    """More than the pipe holds is written without waiting, and comes in order once it is read."""
    read, write = os.pipe()
    with os.fdopen(write, "w") as pipe, os.fdopen(read) as reader:
        stream = BackgroundStream(pipe)
        text = "".join(f"{number}\n" for number in range(300_000))
        stream.write(text)
        stream.write("last\n")
        assert not stream.drain(0.1) and not stream.wait_for_room(0)
        assert "".join(reader.readline() for _ in range(300_001)) == f"{text}last\n"
        assert stream.drain(10)
        stream.close()


def test_a_line_waits_for_nobody_who_does_not_read() -> None:
    """More lines than a pipe holds come back at once, and are there once somebody reads."""
    read, write = os.pipe()
    with os.fdopen(write, "w", buffering=1) as pipe, os.fdopen(read) as reader:
        output = ConsoleOutput(pipe, io.StringIO(), 1)

        def print_lines() -> None:
            for number in range(300):
                output.line(0, f"{number} {'x' * 1000}")

        printing = threading.Thread(target=print_lines, daemon=True)
        printing.start()
        printing.join(10)
        is_held_up = printing.is_alive()
        lines = [reader.readline() for _ in range(300)]  # lets it go, where it was held up
        printing.join()
        output.close()
    assert not is_held_up
    assert [line.split()[1] for line in lines] == [str(number) for number in range(300)]
