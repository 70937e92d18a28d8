"""Whole programs end as they should, and all that is told of them is one story."""

from __future__ import annotations

import copy
import random
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.model.checkpoint.covering import all_pairs, pairs_of

from .__main__ import see, shown
from .drawing import ENDINGS, ONE_SHAPE, PROGRAMS, SHAPES, Run, draw
from .endings import Part, Runner
from .environments import JAXES, PYTHONS
from .story import Story

HERE = Path(sys.executable)
SEED = 0


def test_each_program_meets_each_ending_and_every_two_values_meet() -> None:
    """The drawing leaves nothing out, and gives the same runs again."""
    runs = draw(SEED)
    assert {(run.program, run.ending) for run in runs} == {
        (program, ending) for program in PROGRAMS for ending in ENDINGS
    }
    kinds = {"ending": ENDINGS, "python": PYTHONS, "jax": tuple(JAXES), "shape": SHAPES}
    rows = [{name: getattr(run, name) for name in kinds} for run in runs]
    met = {pair for row in rows for pair in pairs_of(row)}
    assert all_pairs(kinds, lambda one, other: True) <= met
    assert all(run.shape == ONE_SHAPE.get(run.program, run.shape) for run in runs)
    assert draw(SEED) == runs


def _lies() -> dict[str, Callable[[Part], Part]]:
    """What a run could say that is not so."""

    def in_log(old: str, new: str) -> Callable[[Part], Part]:
        def change(part: Part) -> Part:
            changed, count = re.subn(old, new, part.log)
            assert count
            return replace(part, log=changed)

        return change

    return {
        "expected one of": lambda part: replace(part, code=1),
        "the log says loss": in_log(r"step 40 loss \S+", "step 40 loss 7.5"),
        "the last step printed is 39": in_log(r"step 40 .*\n", ""),
        "statistics say 9 saved": in_log('"saves": 8', '"saves": 9'),
        "has a traceback": lambda part: replace(
            part, log=f"{part.log}Traceback (most recent call last):\n  File x\nOSError\n"
        ),
    }


def test_a_story_that_is_not_one_is_seen(tmp_path: Path) -> None:
    """Each lie about a run that went well is found."""
    run = replace(draw(SEED)[0], program="plain_jax", ending="finished", shape="alone")
    runner = Runner(run, HERE, tmp_path)
    (part,) = runner.parts_as_they_end()
    listed = Story(runner).listen(part)

    def told_of(part: Part) -> str:
        return "\n".join(Story(runner).contradictions(part, copy.deepcopy(listed)))

    assert told_of(part) == ""
    for found, lie in _lies().items():
        assert found in told_of(lie(part)), found
    listed.roots["run"].pop()
    assert "ls lists 2" in told_of(part)


def test_a_ctrl_c_before_a_calls_first_line_is_the_programs_own(tmp_path: Path) -> None:
    """Until Python 3.13 its traceback has an empty line."""
    run = replace(draw(SEED)[0], program="plain_jax", ending="interrupted", shape="alone")
    story = Story(Runner(run, HERE, tmp_path))
    trace = "\n".join(
        [
            "Traceback (most recent call last):",
            '  File "/corpus/plain_jax.py", line 7, in <module>',
            '  File "/lib/python3.11/json/encoder.py", line 105, in __init__',
            "    def __init__(self, *, skipkeys=False, ensure_ascii=True,",
            "",
            "KeyboardInterrupt",
        ]
    )
    part = Part([], tmp_path, 40, False, code=-2, log=trace, sent=["SIGINT to the program"])
    told = list(story.contradictions(part, story.listen(part)))
    assert not [each for each in told if "traceback" in each]
    part.log = trace.replace("KeyboardInterrupt", "OSError")
    told = list(story.contradictions(part, story.listen(part)))
    assert [each for each in told if each.endswith("OSError")]


def test_a_ctrl_c_before_a_programs_first_line_is_the_interpreters(tmp_path: Path) -> None:
    """It may import its site still. What else is fatal to it is told."""
    run = replace(draw(SEED)[0], program="plain_jax", ending="interrupted", shape="together")
    story = Story(Runner(run, HERE, tmp_path))
    trace = "\n".join(
        [
            "holdfast: attempt 1, coordinator at unix:c",
            "[1] Fatal Python error: init_import_site: Failed to import the site module",
            "[1] Python runtime state: initialized",
            "[1] Traceback (most recent call last):",
            '[1]   File "<frozen site>", line 609, in main',
            '[1]   File "/lib/python3.11/enum.py", line 184, in <module>',
            "[1]     class property(DynamicClassAttribute):",
            "[1] KeyboardInterrupt",
        ]
    )

    def told(log: str) -> str:
        part = Part([], tmp_path, 40, True, code=130, log=log, sent=["SIGINT to the program"])
        return "\n".join(story.contradictions(part, story.listen(part)))

    assert "traceback" not in told(trace) and "Fatal" not in told(trace)
    for lie in (trace.replace("KeyboardInterrupt", "OSError"), trace.replace("init_", "Bus ")):
        assert "traceback" in told(lie) and "Fatal" in told(lie)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_in_a_third_of_the_endings(program: str, drawn: random.Random) -> None:
    """Another third each day, under this Python and jax."""
    runs = [run for run in draw(SEED) if run.program == program]
    _see_all(runs[drawn.randrange(3) :: 3], HERE)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_goes_on_where_it_was(program: str) -> None:
    """Half of the steps, then all of them on another number of processes. `.ci/run` has all."""
    _see_all([run for run in draw(SEED) if (run.program, run.ending) == (program, "resumed")], HERE)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("jax", JAXES)
@pytest.mark.parametrize("python", PYTHONS)
def test_programs_under_other_pythons(python: str, jax: str) -> None:
    """Some of the runs that were drawn for this environment."""
    runs = [run for run in draw(SEED) if (run.python, run.jax) == (python, jax)]
    _see_all(runs[::8])


def _see_all(runs: list[Run], python: Path | None = None) -> None:
    """Runs all, and fails with every story that is not one."""
    seen = [see(run, python) for run in runs]
    skipped = {each.skipped for each in seen} - {""}
    if skipped:
        pytest.skip(skipped.pop())
    wrong = [shown(each) for each in seen if each.wrong]
    assert not wrong, "\n".join(wrong)
