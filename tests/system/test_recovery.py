"""What deaths cost a job: nothing of its result, and no step that was acknowledged."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest

from holdfast.checkpoint import load
from holdfast.coordination import CoordinationError, StatusClient
from holdfast.launch import JobResult, RestartPolicy, RunSettings, StandbySettings, run_local
from tests.support.cluster import CollectedOutput
from tests.support.paths import ROOT

KILLS = int(os.environ.get("RECOVERY_KILLS", "8"))  # a whole campaign has 20
STEPS = 200 * KILLS
SAVE_EVERY = 25
PROCESSES = 2


class Killer(CollectedOutput):
    """Kills a random process of each attempt: at a random step, or as soon as a save is begun that
    is not acknowledged yet.
    """

    def __init__(self, chance: random.Random, kills: int) -> None:
        super().__init__()
        self._chance = chance
        self._kills = kills
        self._pids: dict[int, int] = {}
        self.resumed: list[int] = []  # where each attempt after a kill began
        self.acknowledged: list[int] = []  # the last step that was, at each kill
        self.in_a_save = 0  # kills with a save in flight

    def say(self, text: str) -> None:
        super().say(text)
        if found := re.match(r"attempt (\d+), coordinator at (\S+)", text):
            self._pids = {}
            if len(self.acknowledged) < self._kills:
                threading.Thread(target=self._kill_one, args=(found[2],), daemon=True).start()

    def line(self, process: int, text: str) -> None:
        super().line(process, text)
        if found := re.match(r"process (\d) of \d, pid (\d+)", text):
            self._pids[int(found[1])] = int(found[2])
        elif process == 0 and (found := re.match(r"resumed from step (\d+)", text)):
            self.resumed.append(int(found[1]))

    def _kill_one(self, address: str) -> None:
        first = None
        after = self._chance.randrange(5, 80)
        in_a_save = not self.acknowledged or self._chance.random() < 0.4
        with StatusClient(address, timeout_s=5) as client:
            while (
                progress := self._look(client)
            ) or first is None:  # nobody answers once the attempt is over
                step, saved = progress or (0, 0)
                first = step if first is None and step > 0 else first
                begun = step // SAVE_EVERY * SAVE_EVERY
                if first is not None and step >= first + after and (begun > saved or not in_a_save):
                    self._kill_now(begun, saved)
                    return
                time.sleep(0.002)

    def _kill_now(self, begun: int, saved: int) -> None:
        self.acknowledged.append(saved)
        self.in_a_save += begun > saved
        os.kill(self._pids[self._chance.randrange(PROCESSES)], signal.SIGKILL)

    def _look(self, client: StatusClient) -> tuple[int, int] | None:
        with contextlib.suppress(CoordinationError):
            progress = [task.progress for task in client.status().tasks]
            return max((each.step for each in progress), default=0), max(
                (each.saved_step for each in progress), default=0
            )
        return None


def train(folder: Path, output: CollectedOutput) -> JobResult:
    program = [
        "-u",
        str(ROOT / "examples" / "train_digits.py"),
        "--directory",
        str(folder),
        "--steps",
        str(STEPS),
    ]
    restart = RestartPolicy(max_failures=KILLS, attempts_without_progress=KILLS, backoff_s=0)
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, *program, "--save-every", str(SAVE_EVERY)]
    standby = StandbySettings(preload=["sklearn.datasets"])
    settings = RunSettings(restart=restart, env=env, standby=standby)
    return run_local(command, PROCESSES, settings, output=output)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_kills_change_nothing_of_the_end(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """The first while a save is in flight: the run ends bit-identical to one that nobody touched,
    and no step that was saved is lost.

    All of its time is accounted for.
    """
    seed = random.randrange(1 << 30)
    record_property("seed", seed)
    print(f"seed {seed}")
    killer = Killer(random.Random(seed), KILLS)
    began = time.monotonic()
    result = train(tmp_path / "killed", killer)
    took_s = time.monotonic() - began
    assert result.outcome == "done", killer.text
    print(
        f"{killer.in_a_save} of {KILLS} kills in a save; {took_s:.1f} s, of which {result.goodput}"
    )
    assert (
        result.goodput.total_s == pytest.approx(took_s, rel=0.01) and result.goodput.stepping_s > 0
    )
    assert train(tmp_path / "whole", output := CollectedOutput()).outcome == "done", output.text
    assert len(killer.acknowledged) == KILLS and killer.in_a_save > 0
    known = [step for step in killer.acknowledged if step > 0]
    for acknowledged, resumed in zip(
        known, killer.resumed[len(killer.resumed) - len(known) :], strict=True
    ):
        assert resumed >= acknowledged, (killer.acknowledged, killer.resumed)
    killed, whole = (load(tmp_path / name / str(STEPS)) for name in ("killed", "whole"))
    assert jax.tree.structure(killed) == jax.tree.structure(whole)
    for found, expected in zip(jax.tree.leaves(killed), jax.tree.leaves(whole), strict=True):
        assert np.asarray(found).tobytes() == np.asarray(expected).tobytes()
