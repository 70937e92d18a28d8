"""Runs programs in their endings: `make programs NAME=plain_jax`, or with options
`python -m tests.programs --name plain_jax --ending killed --at-once 2`.

Ends with 1 where a story is not one. `--table FILE` keeps the runs as a table.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from .drawing import ENDINGS, PROGRAMS, Run, draw
from .endings import Part, Runner
from .environments import interpreter
from .story import Story


@dataclass
class Seen:
    """A run that is over."""

    run: Run
    took_s: float
    parts: list[Part]
    wrong: list[str]
    skipped: str = ""


def see(run: Run, python: Path | None = None, keep: Path | None = None) -> Seen:
    """Runs a program in its ending, and returns what was wrong with its story. With `python` in
    place of the run's own environment. The folder of a run stays in `keep` if its story is not one.
    """
    began_s = time.monotonic()
    try:
        python = python or interpreter(run.python, run.jax)
    except pytest.skip.Exception as skipped:
        return Seen(run, 0.0, [], [], str(skipped))
    # Short: sockets lie in it.
    with tempfile.TemporaryDirectory(prefix="p", dir="/tmp", ignore_cleanup_errors=True) as folder:
        runner = Runner(run, python, Path(folder))
        story = Story(runner)
        wrong = []
        for part in runner.parts_as_they_end():
            found = story.contradictions(part, story.listen(part))
            wrong += [f"start {len(runner.parts)}: {each}" for each in found]
        wrong += story.end()
        if wrong and keep is not None:
            place = keep / f"{run.program}-{run.ending}-{run.seed}"
            shutil.rmtree(place, ignore_errors=True)
            shutil.copytree(folder, place, symlinks=True, ignore=shutil.ignore_patterns("t"))
            for number, part in enumerate(runner.parts, 1):
                (place / f"output-{number}").write_text(f"{part.sent}\n{part.log}")
    return Seen(run, time.monotonic() - began_s, runner.parts, wrong)


def shown(seen: Seen) -> str:
    """Returns what was wrong, with what each part printed."""
    lines = [f"--- {seen.run}"]
    for part in seen.parts:
        lines.append(f"$ {' '.join(part.command)}\n  exit code {part.code}, sent {part.sent}")
        lines += [f"    {line[:200]}" for line in part.log.splitlines()[-25:]]
    return "\n".join([*lines, *(f"NOT ONE STORY: {each}" for each in seen.wrong)])


def main() -> int:
    """Runs what the command line asks for; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.programs", description=__doc__)
    add = parser.add_argument
    add("--name", action="append", choices=PROGRAMS, help="of these programs alone")
    add("--ending", action="append", choices=ENDINGS, help="of these endings alone")
    add("--seed", type=int, default=0, help="of the drawing")
    add("--at-once", type=int, default=1, help="how many runs at a time")
    add("--here", action="store_true", help="under this Python and jax, whatever was drawn")
    add("--seconds", type=float, default=1e9, help="begins no run after so many")
    add("--keep", type=Path, help="folder for the folders of runs whose story is not one")
    add("--table", type=Path, help="file for the table of the runs")
    arguments = parser.parse_args()
    # What is started in the background ignores Ctrl-C, and so would all that it starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    began_s = time.monotonic()
    runs = [
        run
        for run in draw(arguments.seed)
        if run.program in (arguments.name or PROGRAMS)
        and run.ending in (arguments.ending or ENDINGS)
    ]

    def one(run: Run) -> Seen | None:
        if time.monotonic() - began_s > arguments.seconds:
            return None
        seen = see(run, Path(sys.executable) if arguments.here else None, arguments.keep)
        word = seen.skipped or ("not one story" if seen.wrong else "one story")
        print(f"{run}: {word}, {seen.took_s:.1f} s", flush=True)
        if seen.wrong:
            print(shown(seen), flush=True)
        return seen

    with ThreadPoolExecutor(arguments.at_once) as pool:
        every = [seen for seen in pool.map(one, runs) if seen is not None]
    wrong = sum(bool(seen.wrong) for seen in every)
    print(f"{len(every)} runs in {time.monotonic() - began_s:.0f} s, {wrong} not one story")
    if arguments.table:
        arguments.table.write_text(_table(every))
    return 1 if wrong else 0


def _table(every: list[Seen]) -> str:
    """Returns the runs as a table: a row a program, a column an ending."""
    cells: dict[tuple[str, str], list[str]] = {}
    for seen in every:
        run = seen.run
        how = f"{run.python} {run.jax[:3]} {'1' if run.shape == 'alone' else 'n2'}"
        codes = ">".join(str(part.code) for part in seen.parts)
        word = seen.skipped or codes
        if seen.wrong:
            word += " **not one**"
        cells.setdefault((run.program, run.ending), []).append(
            f"{how}: {word}, {seen.took_s:.0f} s"
        )
    programs = sorted({program for program, _ in cells})
    lines = [f"| program | {' | '.join(ENDINGS)} |", "|---" * (len(ENDINGS) + 1) + "|"]
    for program in programs:
        row = ["; ".join(cells.get((program, ending), [])) for ending in ENDINGS]
        lines.append(f"| {program} | {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
