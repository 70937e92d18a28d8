"""What people get wrong first, and what they read then: the first line says what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.checkpoint import (
    CheckpointManager,
    KeepLast,
    StepNotFound,
    TreeMismatch,
)


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[CheckpointManager]:
    """One of a root with steps 4 and 8."""
    with CheckpointManager(tmp_path / "run") as manager:
        for step in (4, 8):
            manager.save(step, _params()).wait()
        yield manager


def _params(name: str = "w", shape: tuple[int, ...] = (4, 4), kind: str = "float32") -> Any:
    return {"params": {name: np.ones(shape, kind), "b": np.zeros(shape[:1], kind)}}


MISTAKES: dict[str, tuple[Callable[[CheckpointManager], object], type[Exception], str]] = {
    "the tree first": (
        lambda manager: manager.restore(_params()),  # type: ignore[arg-type]
        TypeError,
        "restore: expected a step first, found a dict; to restore what is like a tree, write"
        " restore(like=tree)",
    ),
    "another shape": (
        lambda manager: manager.restore(like=_params(shape=(4, 5))),
        TreeMismatch,
        "the leaf 'params.w' was expected as float32[4, 5], the checkpoint has float32[4, 4];"
        " change the shape, or keep the leaf of `like` with partial=lambda path: path !="
        " 'params.w'",
    ),
    "another dtype": (
        lambda manager: manager.restore(like=_params(kind="float16")),
        TreeMismatch,
        "the leaf 'params.b' was expected as float16[4], the checkpoint has float32[4]; cast=True"
        " converts it; 1 more of 2 leaves does not fit",
    ),
    "another name": (
        lambda manager: manager.restore(like=_params("weight")),
        TreeMismatch,
        "item 'state': 1 leaf of `like` not in the checkpoint: 'params.weight'; 1 leaf of the"
        " checkpoint not in `like`: 'params.w' (partial=True leaves them out); for what was renamed"
        " pass rename={'params.w': 'params.weight'}",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_answered_with_its_remedy(mistake: str, manager: CheckpointManager) -> None:
    """By these words."""
    make, kind, expected = MISTAKES[mistake]
    with pytest.raises(kind) as caught:
        make(manager)
    assert str(caught.value) == expected


def test_the_remedies_work(manager: CheckpointManager) -> None:
    """Each does what its message says."""
    assert (
        manager.restore(like=_params(kind="float16"), cast=True)["params"]["b"].dtype == "float16"
    )
    renamed = manager.restore(like=_params("weight"), rename={"params.w": "params.weight"})
    assert renamed["params"]["weight"].tolist() == np.ones((4, 4)).tolist()
    kept = manager.restore(like=_params(shape=(4, 5)), partial=lambda path: path != "params.w")
    assert kept["params"]["w"].shape == (4, 5)


@pytest.mark.parametrize("verb", ["restore", "structure", "metrics", "metadata", "delete"])
def test_a_step_that_is_not_there_lists_those_that_are(
    verb: str, manager: CheckpointManager
) -> None:
    """Of many it tells the nearest."""
    with pytest.raises(StepNotFound, match=r"no step 5 in \S+/run, which has \[4, 8\]$") as caught:
        getattr(manager, verb)(5)
    assert caught.value.step == 5
    for step in range(10, 100):
        manager.save(step, {"w": np.zeros(1)})
    manager.wait_until_finished()
    with pytest.raises(StepNotFound, match=r"has 92 steps, the nearest \[4, 8, 10, 11, .*, 23\]$"):
        getattr(manager, verb)(9)


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({"keep_policy": 3}, "keep_policy=3 is no policy: write keep_policy=KeepLast(3), or"),
        ({"save_policy": 100}, "save_policy=100 is no policy: write save_policy=EveryNSteps(100)"),
        ({"keep_policy": KeepLast}, "is no policy: write keep_policy=KeepLast(3)"),
    ],
)
def test_what_is_no_policy_is_refused(wrong: Any, expected: str, tmp_path: Path) -> None:
    """Where it is given, with the right spelling; nothing is made."""
    with pytest.raises(TypeError) as caught:
        CheckpointManager(tmp_path / "run", **wrong)
    assert expected in str(caught.value)
    assert not (tmp_path / "run").exists()
