"""The process that has started this one, as the environment knows it."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from holdfast.multihost import ProcessSpec, StartupFailed
from holdfast.multihost.group.runtime import launched_spec, unjoined_spec
from holdfast.multihost.parent import joined_parent, mark_children, refuse_child, unmark_children

SPEC = ProcessSpec(process_id=1, num_processes=2, coordinator="c:1", job_id="j", attempt=3)
OTHERS = [
    dataclasses.replace(SPEC, coordinator="c:2"),
    dataclasses.replace(SPEC, job_id="eval"),
    dataclasses.replace(SPEC, attempt=4),
    dataclasses.replace(SPEC, process_id=0),
]
JOINS = """
import os
from holdfast.multihost.parent import mark_children
from holdfast.multihost import ProcessSpec
mark_children(ProcessSpec.from_env(os.environ))
print(os.environ["HOLDFAST_JOINED"], flush=True)
input()
"""


@pytest.fixture
def parent(monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[str]]:
    """A process that has joined, whose environment this one has."""
    for key, value in SPEC.to_env().items():
        monkeypatch.setenv(key, value)
    command = [sys.executable, "-c", JOINS]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        monkeypatch.setenv("HOLDFAST_JOINED", process.stdout.readline())
        yield process


def test_a_child_does_not_have_its_parents_place(parent: subprocess.Popen[str]) -> None:
    """Neither for initialize() nor for a manager; a place of another job it may have. A parent that
    has ended, or whose number is another process's now, leaves the place to it.
    """
    expected = rf"is a child of process 1 of job j \(pid {parent.pid}\), which has joined it"
    with pytest.raises(StartupFailed, match=expected) as caught:
        refuse_child(SPEC)
    assert (caught.value.processes, caught.value.attempt) == ((1,), 3)
    assert launched_spec() is None and unjoined_spec() is None
    for spec in OTHERS:
        refuse_child(spec)
    parent.kill()
    os.waitid(os.P_PID, parent.pid, os.WEXITED | os.WNOWAIT)  # it is a zombie
    assert joined_parent(SPEC) is None
    parent.wait()
    refuse_child(SPEC)
    assert launched_spec() == unjoined_spec() == SPEC


def test_a_process_is_not_its_own_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither one that replaces itself by another program, nor one of a former life of its pid."""
    monkeypatch.setenv("HOLDFAST_JOINED", "")
    mark_children(SPEC)
    assert joined_parent(SPEC) is None
    monkeypatch.setattr(os, "getpid", lambda: 1)
    assert joined_parent(SPEC) is not None
    monkeypatch.setenv("HOLDFAST_JOINED", os.environ["HOLDFAST_JOINED"].replace(', "', ', "7', 1))
    assert joined_parent(SPEC) is None
    unmark_children()
    assert joined_parent(SPEC) is None


@pytest.mark.parametrize("mark", ["", "x", "[]", "{}", "[1]", '[1, "", []]', '[[], "7", 1]'])
def test_a_mark_of_somebody_else_says_nothing(monkeypatch: pytest.MonkeyPatch, mark: str) -> None:
    """What is not ours is passed over."""
    monkeypatch.setenv("HOLDFAST_JOINED", mark)
    assert joined_parent(SPEC) is None
