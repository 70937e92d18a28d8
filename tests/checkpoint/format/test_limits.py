"""What a reader refuses is refused before a byte is written, in the caller's thread: nothing is
acknowledged that no reader takes.
"""

from __future__ import annotations

import json
import math
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jax import numpy as jnp

from holdfast.checkpoint import (
    CheckpointManager,
    EveryNSteps,
    Json,
    KeepLast,
    StepExists,
    UnsupportedLeaf,
    load,
    save,
    structure,
)
from holdfast.checkpoint.format.limits import JSON_DEPTH

STATE = {"x": np.arange(3.0)}


def _files(folder: Path) -> list[str]:
    return sorted(
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and ".holdfast" not in path.parts
    )


@pytest.mark.parametrize(
    "name", ["a/b", "../../evil", "", ".hidden", "a" * 101, "naïve", 3, "checkpoint.json"]
)
def test_a_name_that_no_reader_takes_is_refused(name: Any, tmp_path: Path) -> None:
    """An item's name is held against the reader's rule before anything is written: the step before
    it is not deleted for it.
    """
    root = tmp_path / "deep" / "root"
    with CheckpointManager(root, keep_policy=KeepLast(1)) as manager:
        manager.save(1, STATE)
        manager.wait_until_finished()
        before = _files(tmp_path)
        with pytest.raises((ValueError, TypeError), match="item"):
            manager.save(2, items={"state": STATE, name: STATE})
        manager.save(3, STATE)  # a refusal is no failure: the next save goes on
        manager.wait_until_finished()
        assert manager.all_steps() == [3]
    assert [file.split("-")[0] for file in before] == [
        "deep/root/1/checkpoint.json",
        "deep/root/1/state/00000",
    ]
    with pytest.raises((ValueError, TypeError), match="item"):
        save(tmp_path / "one", STATE, item=name)
    assert not _files(tmp_path / "one")


def _save_by_manager(path: Path, step: Any) -> None:
    with CheckpointManager(path) as manager:
        manager.save(step, STATE)


@pytest.mark.parametrize("step", [-1, 10**18, 1.5, "3", True, None])
@pytest.mark.parametrize(
    "call", [lambda path, step: save(path, STATE, step=step), _save_by_manager]
)
def test_a_step_that_no_reader_takes_is_refused(
    call: Callable[[Path, Any], object], step: Any, tmp_path: Path
) -> None:
    """A step is a whole number from 0 to 10**18 - 1, for one-shot saves as for managers."""
    with pytest.raises((ValueError, TypeError), match="step"):
        call(tmp_path / "root", step)
    assert not _files(tmp_path / "root")


@pytest.mark.parametrize("step", [np.int64(3), jnp.int32(3), np.array(3)], ids=repr)
def test_a_step_may_be_the_number_of_a_train_state(step: Any, tmp_path: Path) -> None:
    """Which is an array without dimensions, of jax or NumPy, in every call that takes a step."""
    with CheckpointManager(tmp_path / "root", save_policy=EveryNSteps(3)) as manager:
        assert manager.should_save(step) and not manager.reached_preemption(step)
        assert manager.save(step, STATE, metrics={"loss": step})
        manager.wait_until_finished()
        assert manager.all_steps() == [3] and manager.metrics(step) == {"loss": 3}
        assert manager.restore(step).keys() == STATE.keys()
        with pytest.raises(StepExists):
            manager.save(step, STATE, force=True)
        manager.delete(step)
    save(tmp_path / "one", STATE, step=step)
    assert json.loads((tmp_path / "one/checkpoint.json").read_bytes())["step"] == 3


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ({"a": {1, 2}}, "JSON"),
        ({"a": float("nan")}, "JSON"),
        ({"a": "\ud800"}, "UTF-8"),
        ("x" * 101_000_000, "100,000,000"),
    ],
    ids=["a set", "NaN", "half a character", "too long"],
)
def test_json_that_no_reader_takes_is_refused(value: Any, sentence: str, tmp_path: Path) -> None:
    """A Json item is encoded in the caller's thread, and held against the reader's limit there."""
    with CheckpointManager(tmp_path / "root") as manager:
        with pytest.raises((ValueError, TypeError), match=sentence):
            manager.save(1, items={"state": STATE, "facts": Json(value)})
        assert not _files(tmp_path / "root")
        with pytest.raises((ValueError, TypeError), match="metadata"):
            manager.save(1, STATE, metadata={"a": {1, 2}})
        assert not _files(tmp_path / "root")


@pytest.mark.parametrize("key", [1, 1.5, None, True, (1, 2), b"k"], ids=repr)
def test_a_key_of_json_is_text(key: Any, tmp_path: Path) -> None:
    """As text it could be another's, and two entries become one: it is refused, never changed."""
    for value in ({key: "a", str(key): "b"}, {"inner": [{key: 1}]}):
        with pytest.raises(TypeError, match=r"item 'facts' .*the key .* keys are text"):
            save(tmp_path / "one", items={"facts": Json(value)})
        with pytest.raises(TypeError, match=r"the metadata .*the key .* keys are text"):
            save(tmp_path / "one", STATE, metadata=value)
    assert not _files(tmp_path / "one")


def test_numbers_of_numpy_are_numbers_of_json(tmp_path: Path) -> None:
    """They come back as Python's, equal; a tuple comes back as a list."""
    value = {"a": np.int64(2**60 + 1), "b": np.float32(0.1), "c": (np.bool_(True), np.float64(0.1))}
    save(tmp_path / "one", items={"facts": Json(value), "state": STATE}, metadata=value)
    expected = {"a": 2**60 + 1, "b": float(np.float32(0.1)), "c": [True, 0.1]}
    assert load(tmp_path / "one", item="facts") == expected
    assert structure(tmp_path / "one").metadata == expected


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"a": [1, {2}]}, r"\['a'\]\[1\]"),
        ({"a": np.float32("nan")}, r"\['a'\]"),
        ({"a": {"\ud800": 1}}, r"\['a'\] \(the key"),
        ([np.zeros(2)], r"\[0\]"),
        ([np.longdouble(1)], r"\[0\]"),
        ([1j], r"\[0\]"),
        ({"a": 10**5000}, r"\['a'\]"),
    ],
    ids=["a set", "NaN", "half a character", "an array", "long double", "complex", "digits"],
)
def test_what_is_no_json_is_named_by_its_path(value: Any, path: str, tmp_path: Path) -> None:
    """The error says which part of a large value it is about."""
    with pytest.raises((TypeError, ValueError), match=rf"^the item 'facts'{path}.*cannot be saved"):
        save(tmp_path / "one", items={"facts": Json(value)})


@pytest.mark.parametrize(
    ("metrics", "sentence"),
    [
        ({5: 1.0}, "the name 5: expected text, found a int"),
        ({None: 1.0}, "the name None: expected text"),
        ({"\ud800": 1.0}, "not valid UTF-8"),
        (0.5, "expected numbers by name"),
        ([("loss", 0.5)], "expected numbers by name"),
        ({"loss": "0.5"}, r"metrics\['loss'\] is '0.5': expected a number"),
        ({"loss": 10**400}, r"metrics\['loss'\] is .* too large"),
        ({"loss": np.ones(1)}, r"metrics\['loss'\] is .*expected a number"),
        ({"loss": 1j}, r"metrics\['loss'\] is 1j .*expected a number"),
        ({"loss": None}, r"metrics\['loss'\] is None .*expected a number"),
    ],
    ids=repr,
)
def test_metrics_are_numbers_by_text(metrics: Any, sentence: str, tmp_path: Path) -> None:
    """What is none is refused at the call: a name that is no text would stop the keep policy."""
    with CheckpointManager(tmp_path / "root", keep_policy=KeepLast(1)) as manager:
        with pytest.raises((TypeError, ValueError), match=sentence):
            manager.save(1, STATE, metrics=metrics)
        assert not _files(tmp_path / "root")
        manager.save(1, STATE, metrics={np.str_("loss"): np.float32(0.5)}).wait()
        assert manager.metrics(1) == {"loss": 0.5}


def test_json_is_nested_only_so_deep(tmp_path: Path) -> None:
    """JSON items and metadata of JSON_DEPTH lists come back; of one more, or of a list that holds
    itself, they are refused before anything is written.
    """
    deep: Any = []
    for _ in range(JSON_DEPTH - 1):
        deep = [deep, {"a": 1}]
    endless: list[Any] = []
    endless += [endless, endless]
    with CheckpointManager(tmp_path / "root") as manager:
        for value in ([deep], endless):
            with pytest.raises(ValueError, match=f"nested deeper than {JSON_DEPTH}"):
                manager.save(1, items={"state": STATE, "facts": Json(value)})
            with pytest.raises(ValueError, match=r"metadata .* nested deeper"):
                manager.save(1, STATE, metadata=value)
        assert not _files(tmp_path / "root")
        manager.save(1, items={"state": STATE, "facts": Json(deep)}, metadata=deep).wait()
        assert manager.restore(1, item="facts") == deep == manager.metadata(1)


def test_a_metric_without_a_number_is_json(tmp_path: Path) -> None:
    """A loss that is NaN or infinite is saved and comes back, and the record stays JSON for every
    parser.
    """

    def refused(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    with CheckpointManager(tmp_path / "root") as manager:
        manager.save(
            1,
            STATE,
            metrics={
                "loss": float("nan"),
                "least": float("-inf"),
                "most": np.float32("inf"),
                "lr": 0.5,
            },
        )
        manager.wait_until_finished()
        found = manager.metrics(1)
    assert math.isnan(found.pop("loss")) and found == {
        "least": -math.inf,
        "most": math.inf,
        "lr": 0.5,
    }
    json.loads((tmp_path / "root" / "1" / "checkpoint.json").read_bytes(), parse_constant=refused)


def test_changes_after_save_returned_are_not_saved(tmp_path: Path) -> None:
    """Json items and metadata are encoded before `save` returns."""
    facts = {"lr": 1}
    with CheckpointManager(tmp_path / "root") as manager:
        manager.save(
            1, items={"state": {"x": np.ones(1 << 22)}, "facts": Json(facts)}, metadata=facts
        )
        facts["lr"] = 2
        manager.wait_until_finished()
        assert manager.restore(1, item="facts") == {"lr": 1} and manager.metadata(1) == {"lr": 1}


def _child(manager: CheckpointManager, how: str) -> None:
    if how == "closes":
        manager.close()
    elif how == "saves":
        with pytest.raises(ValueError, match="forked"):
            manager.save(7, STATE)


@pytest.mark.parametrize("how", ["ends", "closes", "saves"])
@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_a_forked_child_takes_nothing_away(how: str, tmp_path: Path) -> None:
    """A child that was forked (a DataLoader's worker) has no manager: its end changes nothing for
    the parent, whose saves go on.
    """
    with CheckpointManager(tmp_path / "root") as manager:
        manager.save(1, STATE)
        manager.wait_until_finished()
        manager.save(2, {"x": np.ones(1 << 22)})  # the child is forked in the middle of it
        child = multiprocessing.get_context("fork").Process(target=_child, args=(manager, how))
        child.start()
        child.join(30)
        assert child.exitcode == 0
        manager.wait_until_finished()
        manager.save(3, STATE)
        manager.wait_until_finished()
        assert manager.all_steps() == [1, 2, 3]


TOO_LARGE: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "bytes of 80 MB": (
        lambda: {"state": {"blob": bytes(80_000_000)}},
        "'blob' with 106,666,6.*: put it into an array",
    ),
    "strings of 60 MB": (
        lambda: {"state": {"a": "x" * 60_000_000, "b": "y" * 60_000_000}},
        "the Python values of the item 'state'",
    ),
    "an int of 500,000,000 bits": (
        lambda: {"state": {"n": 1 << 500_000_000}},
        "'n' with 125,000,0.*: put it into an array",
    ),
    "21,000 names of 5,000 characters": (
        lambda: {"state": {f"{i:05d}" + "x" * 4995: np.float32(i) for i in range(21_000)}},
        (
            "the header of a pack would have 1.* bytes, a reader takes 100,000,000, and its 21,000"
            " chunks"
        ),
    ),
    "names without arrays": (
        lambda: {"state": {f"{i:05d}" + "x" * 9_995: True for i in range(14_000)}},
        "no reader would take its record: the tree: its record would have .* shorter names",
    ),
    "three items of 95 MB": (
        lambda: {name: {"blob": "x" * 95_000_000} for name in "abc"},
        "the record would have about 285,.* bytes, a reader takes 268,435,456",
    ),
}


LONG = {  # to make and to measure
    "21,000 names of 5,000 characters",
    "bytes of 80 MB",
    "names without arrays",
    "strings of 60 MB",
}


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.slow) if kind in LONG else kind for kind in TOO_LARGE],
)
def test_a_tree_that_no_reader_takes_is_refused(kind: str, tmp_path: Path) -> None:
    """Values and names beyond what a reader takes are refused in the caller's thread, before a byte
    is written; the next save goes on.
    """
    make, sentence = TOO_LARGE[kind]
    items = make()
    with CheckpointManager(tmp_path / "root") as manager:
        with pytest.raises((UnsupportedLeaf, ValueError), match=sentence):
            manager.save(1, items=items)
        assert not _files(tmp_path / "root")
        manager.save(2, STATE)
        manager.wait_until_finished()
        assert manager.all_steps() == [2]
    if len(items) == 1:
        with pytest.raises((UnsupportedLeaf, ValueError), match=sentence):
            save(tmp_path / "one", items["state"])
        assert not _files(tmp_path / "one")


@pytest.mark.slow
@pytest.mark.parametrize("size", [90_000_000, 45_000_000], ids=["letters", "letters of two bytes"])
def test_what_is_just_below_a_limit_comes_back(size: int, tmp_path: Path) -> None:
    """Metadata of 90 MB is in the record as it was measured, whatever its letters are, beside
    values of 60 MB.
    """
    text = ("x" if size == 90_000_000 else "д") * size
    with CheckpointManager(tmp_path / "root") as manager:
        manager.save(1, {"blob": bytes(45_000_000)}, metadata=text)
        manager.wait_until_finished()
        assert manager.metadata(1) == text and manager.restore(1)["blob"] == bytes(45_000_000)
