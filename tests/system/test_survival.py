"""Jobs that are struck again and again, and end as if nothing had happened: the example of `make
demo`, unchanged, on this machine.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from holdfast.checkpoint import load
from holdfast.launch import JobResult, RestartPolicy, RunSettings, run_local
from tests.support.paths import EXAMPLES, program
from tests.support.running_logs import whole_lines

TRAINER = EXAMPLES / "train_digits.py"
STEPS = 300
KILLS = 10


class Watcher:
    """Collects output, knows the pid of each process from it, and strikes one of them at each of
    the given steps.
    """

    def __init__(
        self, log: Path, strikes: list[int], lots: random.Random, number: int = signal.SIGKILL
    ) -> None:
        self._log = log
        self._strikes = strikes
        self._lots = lots
        self._number = number
        self.text: list[str] = []
        self.pids: dict[int, int] = {}
        self.struck: list[int] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def line(self, process: int, text: str) -> None:
        self.text.append(f"[{process}] {text}")
        if found := re.search(r"process \d+ of \d+, pid (\d+)", text):
            self.pids[process] = int(found[1])

    def say(self, text: str) -> None:
        self.text.append(text)

    def _watch(self) -> None:
        while self._strikes and not self._ended.wait(0.01):
            lines = whole_lines(self._log)
            step = json.loads(lines[-1])["step"] if lines else 0
            if step >= self._strikes[0] and len(self.pids) == 4:
                self._strikes.pop(0)
                self.struck.append(step)
                process = self._lots.choice(sorted(self.pids))
                pid = self.pids[process]
                self.pids = {}
                os.kill(pid, self._number)

    def __enter__(self) -> Watcher:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


NEVER = RestartPolicy()


def train(
    folder: Path,
    strikes: list[int],
    policy: RestartPolicy = NEVER,
    number: int = signal.SIGKILL,
) -> tuple[JobResult, Watcher, Path]:
    log = folder / "log.jsonl"
    command = [
        sys.executable,
        str(TRAINER),
        "--directory",
        str(folder / "ckpt"),
        "--steps",
        str(STEPS),
        "--save-every",
        "10",
        "--log",
        str(log),
    ]
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    with Watcher(log, strikes, random.Random(len(strikes)), number) as watcher:
        result = run_local(command, 4, RunSettings(restart=policy, env=env), output=watcher)
    return result, watcher, log


def arrays(folder: Path) -> dict[str, np.ndarray]:
    import jax

    leaves = jax.tree_util.tree_leaves_with_path(load(folder / "ckpt"))
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


POLITE = program("survival_polite")


@pytest.mark.slow
def test_leaving_with_zero_after_a_notice_is_unfinished() -> None:
    """PRE-1: one process gets SIGTERM, all stop at one step and exit with 0; the job is started
    again, and then it is done.
    """

    class Striker:
        def __init__(self) -> None:
            self.text: list[str] = []
            self.struck = False

        def line(self, process: int, text: str) -> None:
            self.text.append(text)
            if (found := re.search(r"process 1 of 2, pid (\d+)", text)) and not self.struck:
                self.struck = True
                os.kill(int(found[1]), signal.SIGTERM)

        def say(self, text: str) -> None:
            self.text.append(text)

    output = Striker()
    policy = RestartPolicy(max_preemptions=1, backoff_s=0.05)
    command = [sys.executable, str(POLITE)]
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    result = run_local(command, 2, RunSettings(restart=policy, env=env), output=output)
    assert (result.outcome, result.attempts) == ("done", 2), output.text
    assert "process 1 (SIGTERM received)" in "\n".join(result.reasons)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ten_kills_and_the_same_end(tmp_path: Path) -> None:
    """SIGKILL of a random process 10 times over 300 steps: the job finishes by itself, bit-equal to
    one that nobody touched.
    """
    lots = random.Random(6)
    strikes = sorted(lots.sample(range(5, STEPS - 5), KILLS))
    (tmp_path / "whole").mkdir()
    (tmp_path / "struck").mkdir()
    whole, watcher, _ = train(tmp_path / "whole", [])
    assert whole.outcome == "done", "\n".join(watcher.text)
    policy = RestartPolicy(max_failures=3, grace_s=1, backoff_s=0.1)
    result, watcher, log = train(tmp_path / "struck", strikes, policy)
    assert result.outcome == "done", "\n".join(watcher.text)
    assert len(watcher.struck) == KILLS
    assert result.attempts == KILLS + 1
    run = len(log.read_text().splitlines())
    print(
        f"\ngoodput: {STEPS} useful of {run} steps run = {STEPS / run:.3f}; struck at"
        f" {watcher.struck}; {result.elapsed_s:.0f} s"
    )
    expected = arrays(tmp_path / "whole")
    found = arrays(tmp_path / "struck")
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
