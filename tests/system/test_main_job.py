"""The main job, end to end: a job trains on real digits, one process is preempted, and the run goes
on as if nothing had been.
"""

from __future__ import annotations

import importlib.util
import json
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest

from holdfast.checkpoint import load, verify
from tests.support.pages import serious_faults
from tests.support.paths import ROOT

STEPS = 70
SAVE_EVERY = 20
pytestmark = pytest.mark.timeout(300)


def load_demo(folder: Path) -> ModuleType:
    """Returns examples/demo.py as a module that works in this folder, with fewer steps."""
    spec = importlib.util.spec_from_file_location("demo", ROOT / "examples" / "demo.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.FOLDER = folder
    module.STEPS = STEPS
    module.SAVE_EVERY = SAVE_EVERY  # type: ignore[attr-defined]
    return module


@pytest.fixture(
    scope="module",
    params=[(2, 1), pytest.param((4, 2), marks=pytest.mark.slow)],
    ids=["2-1", "4-2"],
)
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Any]]:
    """Four runs: uninterrupted; preempted at a random step; and from there resumed on as many
    processes and on fewer. Each step is compiled in haste, and once for all runs.
    """
    many, few = request.param
    folder = tmp_path_factory.mktemp("demo")
    demo = load_demo(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(folder / "compiled"))
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        yield _runs(demo, folder, many, few)


def _runs(demo: ModuleType, folder: Path, many: int, few: int) -> dict[str, Any]:
    reports = {}
    code, reports["whole"] = demo.run("whole", many, "whole")
    assert code == 0
    code, reports["preempted"] = demo.run(
        "preempted", many, "many", preempt_at=random.randrange(5, STEPS - 50)
    )
    assert code == demo.PREEMPTED
    shutil.copytree(folder / "many", folder / "few")
    shutil.copy(folder / "many.jsonl", folder / "few.jsonl")
    for name, processes in (("many", many), ("few", few)):
        code, reports[name] = demo.run(name, processes, name)
        assert code == 0
    return {"folder": folder, "counts": {"preempted": many, "few": few}, **reports}


def _losses(path: Path) -> dict[int, float]:
    return {
        entry["step"]: entry["loss"] for entry in map(json.loads, path.read_text().splitlines())
    }


def test_all_stop_at_one_step_and_save(runs: dict[str, Any]) -> None:
    """The preempted job stopped before its end, at a step from which the resumed ones began."""
    stopped = runs["preempted"]["last"]
    assert 5 <= stopped < STEPS
    assert runs["many"]["first"] == runs["few"]["first"] == stopped + 1


def test_an_interrupted_run_ends_bit_identical(runs: dict[str, Any]) -> None:
    """On the same number of processes, parameters and optimizer state are the uninterrupted run's,
    bit for bit.
    """
    whole = load(runs["folder"] / "whole" / str(STEPS))
    many = load(runs["folder"] / "many" / str(STEPS))
    assert jax.tree.structure(whole) == jax.tree.structure(many)
    for expected, found in zip(jax.tree.leaves(whole), jax.tree.leaves(many), strict=True):
        assert np.asarray(expected).tobytes() == np.asarray(found).tobytes()
    assert _losses(runs["folder"] / "whole.jsonl") == _losses(runs["folder"] / "many.jsonl")


def test_a_resumed_run_follows_the_same_curve(runs: dict[str, Any]) -> None:
    """With another sharding, every later loss is the uninterrupted run's, but for how sums are
    rounded: that grows with each step, and the job stops at another one each time.
    """
    whole = _losses(runs["folder"] / "whole.jsonl")
    few = _losses(runs["folder"] / "few.jsonl")
    steps = sorted(whole)
    assert steps == sorted(few) == list(range(1, STEPS + 1))
    np.testing.assert_allclose(
        [few[s] for s in steps], [whole[s] for s in steps], rtol=1e-3, atol=1e-5
    )
    assert runs["few"]["accuracy"] == pytest.approx(runs["whole"]["accuracy"], abs=0.01)


def test_what_was_saved_verifies(runs: dict[str, Any]) -> None:
    """Every kept step of every run passes its checksums."""
    for name in ("whole", "many", "few"):
        steps = [path for path in (runs["folder"] / name).iterdir() if path.name.isdigit()]
        assert len(steps) == 3, "KeepLast(3)"
        for step in steps:
            verify(step)


@pytest.mark.slow
def test_its_reports_open_from_disk(runs: dict[str, Any], tab: Any) -> None:
    """Each run has left one: how it ended, its processes, the steps that it saved; nothing is
    fetched, and axe finds no serious fault.
    """
    for name, headline in (("preempted", "Preempted"), ("few", "Finished")):
        tab.goto(f"file://{runs['folder'] / 'logs' / name / 'report.html'}")
        assert tab.locator("h1").inner_text() == headline
        assert tab.locator("#row-list tr").count() == runs["counts"][name]
        last = runs[name]["last"]
        saved = re.compile(rf"step {last} is saved|are saved, from .* to step {last}$")
        assert tab.locator("#events").get_by_text(saved).count() == 1
        assert tab.locator("#timeline .steps").first.get_attribute("points"), (
            "how many depends on how fast the machine is"
        )
        share = tab.locator("#share").inner_text()
        assert re.fullmatch(r"\d+ % of \d+\.?\d* s made new steps", share)
        assert serious_faults(tab) == []
