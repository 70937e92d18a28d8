"""The story of `make demo`: four processes train, one is preempted, and two go on.

All four save the same step, and the two go on from it to the same end. Everything happens on this
machine, under demo-run/. What runs is examples/train_digits.py, unchanged, under `holdfast run`.
"""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

HERE = Path(__file__).resolve().parent
FOLDER = Path.cwd() / "demo-run"
STEPS = 300
SAVE_EVERY = 50
PREEMPTED = 75
console = Console()
if not console.is_terminal:
    console = Console(width=120)


def last_step(log):
    """Returns the last step that a run has logged."""
    lines = log.read_text().split("\n")[:-1] if log.exists() else []
    return json.loads(lines[-1])["step"] if lines else 0


def run(name, processes, directory, preempt_at=None):
    """Runs the trainer under `holdfast run`; returns (exit code, report).

    At step `preempt_at`, one of its processes gets SIGTERM.
    """
    log = FOLDER / f"{directory}.jsonl"
    report = FOLDER / f"{name}.json"
    trainer = [sys.executable, HERE / "train_digits.py", "--directory", FOLDER / directory]
    trainer += ["--steps", STEPS, "--save-every", SAVE_EVERY, "--log", log, "--report", report]
    launcher = [Path(sys.executable).parent / "holdfast", "run"]
    launcher += ["-n", processes, "--log-dir", FOLDER / "logs" / name]
    command = [*map(str, [*launcher, "--", *trainer])]
    console.print(f"\n[bold]{name}[/bold]: {processes} processes", highlight=False)
    bar = Progress(
        TextColumn("steps"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    )
    pids = {}
    victim = random.randrange(processes)
    ended = threading.Event()

    def watch():
        task = bar.add_task("steps", total=STEPS)
        struck = False
        while not ended.wait(0.02):
            step = last_step(log)
            bar.update(task, completed=step)
            if preempt_at and not struck and step >= preempt_at and victim in pids:
                struck = True
                console.print(
                    f"step {step}: SIGTERM to process {victim} (pid {pids[victim]})",
                    style="yellow",
                    highlight=False,
                )
                os.kill(pids[victim], signal.SIGTERM)

    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    watcher = threading.Thread(target=watch)
    with (
        bar,
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        ) as job,
    ):
        watcher.start()
        for line in job.stdout:
            console.print(line.rstrip("\n"), markup=False, highlight=False, soft_wrap=True)
            if found := re.search(r"process (\d+) of \d+, pid (\d+)", line):
                pids[int(found[1])] = int(found[2])
        ended.set()
        watcher.join()
    return job.returncode, json.loads(report.read_text()) if report.exists() else {}


def row(name, processes, report):
    """Returns one line of the closing table."""
    statistics = report["statistics"]

    def speed(seconds, size):
        return (f"{seconds:.3f}", f"{size / seconds / 1e9:.2f}") if seconds else ("-", "-")

    save = speed(statistics["save_s"], statistics["save_bytes"])
    restore = speed(statistics["restore_s"], statistics["restore_bytes"])
    steps = f"{report['first']}-{report['last']}"
    return (
        name,
        str(processes),
        steps,
        str(statistics["saves"]),
        *save,
        f"{statistics['save_blocked_s']:.3f}",
        *restore,
        f"{report['accuracy']:.4f}",
    )


def main():
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    when = random.randrange(STEPS // 5, STEPS * 3 // 5)
    story = [
        ("uninterrupted", 4, "whole", None, 0),
        ("preempted", 4, "digits", when, PREEMPTED),
        ("resumed", 2, "digits", None, 0),
    ]
    table = Table(title="Four processes, one preempted; two go on from the step that all had saved")
    for column in (
        "run",
        "processes",
        "steps",
        "saves",
        "save s",
        "GB/s",
        "blocked s",
        "restore s",
        "GB/s",
        "accuracy",
    ):
        table.add_column(column, justify="left" if column == "run" else "right")
    accuracy = {}
    for name, processes, directory, preempt_at, expected in story:
        code, report = run(name, processes, directory, preempt_at)
        if code != expected or not report:
            sys.exit(f"the {name} run ended with exit code {code}; {expected} was expected")
        accuracy[name] = report["accuracy"]
        table.add_row(*row(name, processes, report))
    console.print()
    console.print(table)
    if abs(accuracy["resumed"] - accuracy["uninterrupted"]) > 0.01:
        sys.exit("the resumed run did not reach the accuracy of the uninterrupted one")


if __name__ == "__main__":
    main()
