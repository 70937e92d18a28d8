"""Options as one value, the statistics of a manager, and how its progress is shown."""

from __future__ import annotations

import itertools
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint import (
    CheckpointManager,
    EveryNSteps,
    KeepLast,
    Local,
    Options,
    Progress,
    ProgressBar,
)
from holdfast.checkpoint import options as options_module
from holdfast.checkpoint.options import PROGRESS_S, ProgressMeter, Statistics


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"on_busy": "queue"}, 'on_busy is "wait" or "skip", not \'queue\''),
        ({"on_save_error": "log"}, 'on_save_error is "raise" or "warn", not \'log\''),
        ({"max_missed_saves": 0}, "max_missed_saves must be a whole number above 0, found 0"),
        ({"full_every": 1.5, "incremental": True}, "full_every must be a whole number above 0"),
        ({"full_every": "3", "incremental": True}, "full_every must be a whole number above 0"),
        ({"full_every": 3}, "full_every=3 expects incremental=True"),
        ({"save_timeout_s": 0}, "save_timeout_s must be above 0, found 0"),
        ({"exit_timeout_s": -1.5}, r"exit_timeout_s must be above 0, found -1\.5"),
        ({"claim_age_s": float("nan")}, "claim_age_s must be above 0, found nan"),
        ({"save_timeout_s": "60"}, "save_timeout_s must be above 0, found '60'"),
        ({"hang_timeout_s": 0}, "hang_timeout_s must be above 0, found 0"),
        ({"hang_exit": True}, "hang_exit=True expects hang_timeout_s"),
        ({"host_memory_bytes": -5}, "host_memory_bytes must be above 0, found -5"),
        ({"host_memory_bytes": "8G"}, "host_memory_bytes must be above 0, found '8G'"),
    ],
)
def test_nonsense_is_refused_by_field(wrong: dict[str, object], message: str) -> None:
    """Each setting that cannot be is a ValueError when the value is made."""
    with pytest.raises(ValueError, match=f"Options: {message}"):
        Options(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["may_differ", "per_process", "progress"])
def test_what_is_no_function_is_refused(name: str) -> None:
    """At once, and not by each save, or not at all."""
    with pytest.raises(TypeError, match=rf"Options: {name} expects a function, found \['rng'\]"):
        Options(**{name: ["rng"]})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "settings",
    [
        {"replicas": -1},
        {"replicas": 0.5},
        {"replicas": "1"},
        {"keep": 0},
        {"keep": 1.5},
        {"keep": None},
        {"timeout_s": 0},
        {"timeout_s": None},
        {"max_bytes": 0},
        {"max_bytes": "8G"},
        {"rate_bytes_s": 0},
    ],
    ids=str,
)
def test_settings_of_the_local_tier_are_checked(
    settings: dict[str, object], tmp_path: Path
) -> None:
    """The error says what was found, and what is expected: such a tier would save nothing, or keep
    all that it saves.
    """
    ((name, value),) = settings.items()
    expected = rf"Local: {name} must be (a whole number )?(of 0 or more|above 0), found {value!r}"
    with pytest.raises(ValueError, match=expected):
        Local(tmp_path, save_policy=EveryNSteps(1), **settings)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expects a save_policy besides"):
        CheckpointManager(tmp_path, local=Local(tmp_path, save_policy=EveryNSteps(1)))


def test_counters_add_up_from_many_threads() -> None:
    """No addition is lost, and what comes out is of JSON types."""
    statistics = Statistics()
    threads = [
        threading.Thread(
            target=lambda: [statistics.add(saves=1, save_s=0.5) for _ in range(1000)] and None
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = statistics.to_dict()
    assert (found["saves"], found["save_s"], found["restores"]) == (
        4000,
        2000.0,
        0,
    ) and "_lock" not in found


class Clock:
    """A clock that the test turns."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@given(st.lists(st.tuples(st.integers(0, 100), st.floats(0, 1)), max_size=30))
def test_progress_is_passed_on_now_and_then(
    written: list[tuple[int, float]],
) -> None:
    """Whatever is written when: calls are PROGRESS_S apart, ascend, and the last one that is due
    says that all is out.
    """
    clock = Clock()
    total = sum(size for size, _ in written)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(options_module, "time", clock)
        calls: list[tuple[float, int]] = []
        meter = ProgressMeter(7, total, lambda seen: calls.append((clock.now, seen.done_bytes)))
        for size, seconds in written:
            clock.now += seconds
            meter.add(size)
    for (before, fewer), (after, more) in itertools.pairwise(calls):
        assert fewer <= more and (after - before >= PROGRESS_S or more == total)
    assert not written or calls[-1][1] == total


def test_a_bar_without_a_terminal_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """Where stderr is no terminal the bar is silent, from the first bytes to the last."""
    bar = ProgressBar()
    for done in (1, 5, 10):
        bar(Progress(3, "save", done, 10))
    assert capsys.readouterr() == ("", "")


def test_the_bar_of_a_save_that_failed_gives_way_to_the_next(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has the next step's name and size, and goes with its last bytes."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    bar = ProgressBar()
    bar(Progress(3, "save", 500, 1000))
    bar(Progress(4, "save", 20, 40))
    assert "save step 4" in capsys.readouterr().err
    bar(Progress(4, "save", 40, 40))
    capsys.readouterr()
    bar(Progress(5, "save", 10, 10))
    assert "save step 5" in capsys.readouterr().err


def test_progress_counts_to_the_end(tmp_path: Path) -> None:
    """The callback hears the step and, at last, all of its bytes."""
    heard: list[Progress] = []
    with CheckpointManager(tmp_path, options=Options(progress=heard.append)) as manager:
        manager.save(1, {"w": jnp.zeros(1 << 20)})
    assert heard[-1].step == 1 and heard[-1].done_bytes == heard[-1].total_bytes >= 4 << 20


def test_what_progress_raises_fails_no_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged."""

    def broken(progress: Progress) -> None:
        raise OSError("no bar")

    with CheckpointManager(tmp_path, options=Options(progress=broken)) as manager:
        manager.save(1, {"w": jnp.zeros(1 << 20)}).wait()
        assert manager.all_steps() == [1]
    assert "what was given to progress= failed at step 1: OSError: no bar" in caplog.messages


@pytest.mark.parametrize("with_metrics", [False, True])
def test_waiting_for_the_program_is_not_being_blocked(tmp_path: Path, with_metrics: bool) -> None:
    """A loop that runs ahead of its devices and saves 3 MB at each step waits for its own
    computations alone: less than a tenth of its time is the saves'. So are the seconds that the
    next save finds, whose predecessor is in flight.
    """

    @jax.jit
    def step(x: jax.Array) -> jax.Array:
        for _ in range(10):
            x = x @ x * (1 / 900)
        return x

    x = jax.block_until_ready(step(jnp.ones((900, 900))))
    with CheckpointManager(tmp_path, keep_policy=KeepLast(1)) as manager:
        began_s = time.perf_counter()
        for number in range(6):
            x = step(x)
            manager.save(number, x, metrics={"loss": x[0, 0]} if with_metrics else None)
        loop_s = time.perf_counter() - began_s
        found = manager.statistics()
    print(f"loop {loop_s:.2f} s, blocked {found['save_blocked_s']:.2f} s")
    assert found["save_blocked_s"] < 0.1 * loop_s
    assert found["save_waited_s"] > 0.5 * loop_s
    assert found["save_blocked_s"] + found["save_waited_s"] <= loop_s


def test_statistics_are_what_the_demo_prints(tmp_path: Path) -> None:
    """Counts, seconds and bytes of saves and restores, in JSON types."""
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"w": jnp.zeros(1000)})
        manager.wait_until_finished()
        manager.restore(1)
        found = manager.statistics()
    assert (found["saves"], found["restores"], found["restore_bytes"]) == (1, 1, 4000) and found[
        "save_bytes"
    ] >= 4000
    assert found["save_s"] > 0 and found["save_blocked_s"] > 0 and found["restore_s"] > 0
