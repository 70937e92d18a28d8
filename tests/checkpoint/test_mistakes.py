"""What people get wrong first, and what they read then: the first line says what to do."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from holdfast.checkpoint import (
    AnyOf,
    AtSteps,
    CheckpointError,
    CheckpointManager,
    EveryNSeconds,
    EveryNSteps,
    KeepAnyOf,
    KeepBest,
    KeepLast,
    Local,
    Options,
    StepExists,
    StepNotFound,
    TreeMismatch,
    UnsupportedLeaf,
    load,
    save,
    save_async,
)


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[CheckpointManager]:
    """One of a root with steps 4 and 8."""
    with CheckpointManager(tmp_path / "run") as manager:
        for step in (4, 8):
            manager.save(step, _params()).wait()
        yield manager


def _sharding() -> Any:
    return SingleDeviceSharding(jax.devices()[0])


def _params(name: str = "w", shape: tuple[int, ...] = (4, 4), kind: str = "float32") -> Any:
    return {"params": {name: np.ones(shape, kind), "b": np.zeros(shape[:1], kind)}}


MISTAKES: dict[str, tuple[Callable[[CheckpointManager], object], type[Exception], str]] = {
    "the tree first": (
        lambda manager: manager.restore(_params()),  # type: ignore[arg-type]
        TypeError,
        "restore: expected a step first, found a dict; to restore what is like a tree, write"
        " restore(like=tree)",
    ),
    "a list of items": (
        lambda manager: manager.save(9, items=["state"]),  # type: ignore[arg-type]
        TypeError,
        "save: items=['state']: expected a dict of items by their names, as in"
        " items={'state': ...}",
    ),
    "dtypes in a dict": (
        lambda manager: manager.save(9, _params(), dtype={"params.w": "bfloat16"}),
        TypeError,
        "save: dtype={'params.w': 'bfloat16'}: expected a floating-point dtype, as jnp.bfloat16, or"
        " a function that says one of a leaf's path",
    ),
    "another shape": (
        lambda manager: manager.restore(like=_params(shape=(4, 5))),
        TreeMismatch,
        "step 8: the leaf 'params.w' was expected as float32[4, 5], the checkpoint has"
        " float32[4, 4]; change the shape, or keep the leaf of `like` with partial=lambda path:"
        " path != 'params.w'",
    ),
    "another dtype": (
        lambda manager: manager.restore(like=_params(kind="float16")),
        TreeMismatch,
        "step 8: the leaf 'params.b' was expected as float16[4], the checkpoint has float32[4];"
        " cast=True converts it; 1 more of 2 leaves does not fit",
    ),
    "another name": (
        lambda manager: manager.restore(like=_params("weight")),
        TreeMismatch,
        "step 8: item 'state': 1 leaf of `like` not in the checkpoint: 'params.weight'; 1 leaf of"
        " the checkpoint not in `like`: 'params.w' (partial=True leaves them out); for what was"
        " renamed pass rename={'params.w': 'params.weight'}",
    ),
    "a mistyped rename": (
        lambda manager: manager.restore(4, rename={"params.W": "params.weight"}),
        TreeMismatch,
        "step 4: rename= matches no leaf, perhaps rename={'params.w': 'params.weight'}; it renames"
        " 'params.W', and the checkpoint has 'params.b', 'params.w' (a function may leave all as"
        " they are)",
    ),
    "rules that match nothing": (
        lambda manager: manager.restore(
            like=_params(), rename=[(r"model\.(.*)", r"\1"), ("x", "y")]
        ),
        TreeMismatch,
        "step 8: rename= matches no leaf, write names of the checkpoint on the left; it renames"
        " 'model\\\\.(.*)', 'x', and the checkpoint has 'params.b', 'params.w' (a function may"
        " leave all as they are)",
    ),
}


MISTAKES |= {
    "a name as partial": (
        lambda manager: manager.restore(partial="params.w"),  # type: ignore[arg-type]
        TypeError,
        "restore: partial='params.w': expected True, False, or a function that says of a leaf's"
        " path whether it is read: partial=lambda path: path in ['params.w']",
    ),
    "names as partial": (
        lambda manager: manager.restore(partial=["a", "b"]),  # type: ignore[arg-type]
        TypeError,
        "restore: partial=['a', 'b']: expected True, False, or a function that says of a leaf's"
        " path whether it is read: partial=lambda path: path in ['a', 'b']",
    ),
    "a dtype as cast": (
        lambda manager: manager.restore(cast="float16"),  # type: ignore[arg-type]
        TypeError,
        "restore: cast='float16': expected True or False",
    ),
    "a class as types": (
        lambda manager: manager.restore(types=dict),  # type: ignore[arg-type]
        TypeError,
        "restore: types=dict: expected several, as in types=[dict]",
    ),
    "a predicate that matches nothing": (
        lambda manager: manager.restore(partial=lambda path: path == "w"),
        TreeMismatch,
        "step 8: partial= chooses no leaf, and nothing would be restored; the leaves are"
        " 'params.b', 'params.w'",
    ),
    "a predicate that matches nothing of a like": (
        lambda manager: manager.restore(like=_params(), partial=lambda path: path == "w"),
        TreeMismatch,
        "step 8: partial= chooses no leaf, and nothing would be restored; the leaves are"
        " 'params.b', 'params.w'",
    ),
    "a sharding as the like": (
        lambda manager: manager.restore(like=_sharding()),
        TypeError,
        "restore: like=SingleDeviceSharding(...): expected a tree of arrays or"
        " jax.ShapeDtypeStructs; for one sharding of all leaves write like=jax.tree.map(lambda"
        " leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree), with a"
        " `tree` of structure(...)",
    ),
    "shardings in place of leaves": (
        lambda manager: manager.restore(like={"params": {"w": _sharding()}}, partial=True),
        TreeMismatch,
        "step 8: the leaf 'params.w' was expected as a SingleDeviceSharding, the checkpoint has"
        " float32[4, 4]; write jax.ShapeDtypeStruct((4, 4), 'float32', sharding=...)",
    ),
    "None for numpy": (
        lambda manager: manager.restore(like={"params": {"w": None}}, partial=True),
        TreeMismatch,
        "step 8: item 'state': `like` has None in place of 'params.w', and no leaf: None is no"
        " leaf, as in all of jax, so nothing would be restored. For numpy leave `like` out;"
        " partial=lambda path: path == 'params.w' chooses leaves then",
    ),
}


MISTAKES |= {
    "save without a step": (
        lambda manager: manager.save(_params()),  # type: ignore[arg-type]
        TypeError,
        "step: expected a whole number, found a dict; the step comes first, as in save(step, tree)",
    ),
    "save without a tree": (
        lambda manager: manager.save(9),
        ValueError,
        "save: give either a state or items",
    ),
    "a step that is there": (
        lambda manager: manager.save(8, _params()),
        StepExists,
        "step 8 is already in {root}; nothing was written. To replace it, pass overwrite=True; to"
        " let it stay, save only `if manager.latest_step() != 8`",
    ),
    "a metric that is none": (
        lambda manager: manager.save(9, _params(), metrics={"loss": "low"}),
        ValueError,
        "metrics['loss'] is 'low': expected a number; what is none goes into metadata=",
    ),
    "an item that is not there": (
        lambda manager: manager.restore(item="model"),
        StepNotFound,
        "{root}/8 has no item 'model'; it has: state",
    ),
    "a step's folder as a root": (
        lambda manager: CheckpointManager(f"{manager._root.where}/8"),
        CheckpointError,
        "{root}/8 is the folder of step 8, and no root of steps: open {root} and restore(8), or"
        " load('{root}/8')",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_answered_with_its_remedy(mistake: str, manager: CheckpointManager) -> None:
    """By these words."""
    make, kind, expected = MISTAKES[mistake]
    with pytest.raises(kind) as caught:
        make(manager)
    assert str(caught.value) == expected.replace("{root}", manager._root.where)
    assert "\n" not in expected


SETTINGS: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "a number among policies": (
        lambda: AnyOf(EveryNSteps(2), 3),  # type: ignore[arg-type]
        TypeError,
        "AnyOf: 3 is no policy: write AnyOf(EveryNSteps(3), ...), with a policy for each argument",
    ),
    "a list of policies": (
        lambda: KeepAnyOf([KeepLast(3)]),  # type: ignore[arg-type]
        TypeError,
        "KeepAnyOf: [KeepLast(n=3)] is no policy: write KeepAnyOf(KeepLast(3), ...), with a policy"
        " for each argument",
    ),
    "a number of local steps": (
        lambda: Local("/x", save_policy=10),  # type: ignore[arg-type]
        TypeError,
        "save_policy=10 is no policy: write save_policy=EveryNSteps(10), or pass an object with a"
        " method `wants`",
    ),
    "a text as a count": (
        lambda: KeepLast("3"),  # type: ignore[arg-type]
        TypeError,
        "KeepLast: n is a whole number, as in KeepLast(3), found '3'",
    ),
    "half a step": (
        lambda: EveryNSteps(1.5),  # type: ignore[arg-type]
        TypeError,
        "EveryNSteps: n is a whole number, as in EveryNSteps(3), found 1.5",
    ),
    "a keep policy as a save policy": (
        lambda: CheckpointManager("/x", save_policy=KeepLast(3)),  # type: ignore[arg-type]
        TypeError,
        "save_policy=KeepLast(n=3) says which steps stay, and not when to save: write"
        " keep_policy=KeepLast(n=3), and save_policy=EveryNSteps(100)",
    ),
    "a save policy as a keep policy": (
        lambda: CheckpointManager("/x", keep_policy=EveryNSteps(9)),  # type: ignore[arg-type]
        TypeError,
        "keep_policy=EveryNSteps(n=9) says when to save, and not which steps stay: write"
        " save_policy=EveryNSteps(n=9), and keep_policy=KeepLast(3)",
    ),
    "a class of the other kind": (
        lambda: CheckpointManager("/x", save_policy=KeepLast),  # type: ignore[arg-type]
        TypeError,
        "save_policy=KeepLast(...) says which steps stay, and not when to save: write"
        " keep_policy=KeepLast(...), and save_policy=EveryNSteps(100)",
    ),
    "a keep policy among save policies": (
        lambda: AnyOf(EveryNSteps(2), KeepLast(3)),  # type: ignore[arg-type]
        TypeError,
        "AnyOf(KeepLast(n=3)) says which steps stay, and not when to save: write"
        " keep_policy=KeepLast(n=3), and save_policy=EveryNSteps(100)",
    ),
    "a word of Orbax's": (
        lambda: CheckpointManager("/x", max_to_keep=3),  # type: ignore[call-arg]
        TypeError,
        "CheckpointManager has no max_to_keep=: write keep_policy=KeepLast(3)",
    ),
    "a word of Orbax's among options": (
        lambda: Options(save_interval_steps=100),  # type: ignore[call-arg]
        TypeError,
        "Options has no save_interval_steps=: write save_policy=EveryNSteps(100)",
    ),
    "a metric of Orbax's": (
        lambda: CheckpointManager("/x", best_mode="min"),  # type: ignore[call-arg]
        TypeError,
        'CheckpointManager has no best_mode=: write keep_policy=KeepBest(3, "loss", mode="min"),'
        ' and metrics={"loss": ...} to save',
    ),
    "an option beside the options": (
        lambda: CheckpointManager("/x", read_only=True),  # type: ignore[call-arg]
        TypeError,
        "CheckpointManager has no read_only=: write options=Options(read_only=True)",
    ),
    "a policy among options": (
        lambda: Options(keep_policy=KeepLast(3)),  # type: ignore[call-arg]
        TypeError,
        "Options has no keep_policy=: write CheckpointManager(directory,"
        " keep_policy=KeepLast(n=3))",
    ),
    "one step": (
        lambda: AtSteps(5),  # type: ignore[arg-type]
        TypeError,
        "AtSteps: expected several steps, as in AtSteps([5])",
    ),
    "a text of steps": (
        lambda: AtSteps("10"),  # type: ignore[arg-type]
        TypeError,
        "AtSteps: steps are whole numbers, found '1'",
    ),
    "a text as a time": (
        lambda: EveryNSeconds("1m"),  # type: ignore[arg-type]
        TypeError,
        "EveryNSeconds: seconds is a number, found '1m'",
    ),
    "options as a dict": (
        lambda: CheckpointManager("/x", options={"read_only": True}),  # type: ignore[arg-type]
        TypeError,
        "options={'read_only': True}: write options=Options(...), as in Options(read_only=True)",
    ),
    "a folder as a local tier": (
        lambda: CheckpointManager("/x", save_policy=EveryNSteps(9), local="/y"),  # type: ignore[arg-type]
        TypeError,
        "local='/y': write local=Local(folder, save_policy=EveryNSteps(10)), with the folder of"
        " this host",
    ),
}

for name, call in {
    "a manager": lambda: CheckpointManager("/x", group=3),  # type: ignore[arg-type]
    "save": lambda: save("/x", _params(), group=3),  # type: ignore[arg-type]
    "save_async": lambda: save_async("/x", _params(), group=3),
    "load": lambda: load("/x", group=3),  # type: ignore[arg-type]
}.items():
    SETTINGS[f"a number as the group of {name}"] = (
        call,
        TypeError,
        "group: expected a holdfast.multihost.Group such as default_group(), found 3; leave it out"
        " for all processes of the job",
    )

for name, call in {
    "restore": lambda: load("/x", items=["state"]),  # type: ignore[arg-type]
    "save": lambda: save("/x", items=["state"]),  # type: ignore[arg-type]
    "save_async": lambda: save_async("/x", items=["state"]),
}.items():
    SETTINGS[f"a list as the items of {name}"] = (
        call,
        TypeError,
        f"{name}: items=['state']: expected a dict of items by their names, as in"
        " items={'state': ...}",
    )


@pytest.mark.parametrize("mistake", SETTINGS)
def test_a_setting_is_checked_where_it_is_given(mistake: str) -> None:
    """With the right spelling."""
    make, kind, expected = SETTINGS[mistake]
    with pytest.raises(kind) as caught:
        make()
    assert str(caught.value) == expected


def test_words_of_others_leave_the_signature(tmp_path: Path) -> None:
    """It is what editors show; a word that nobody knows is refused as Python does it."""
    assert "keep_policy" in inspect.signature(CheckpointManager).parameters
    assert "read_only" in inspect.signature(Options).parameters
    with pytest.raises(TypeError, match="unexpected keyword argument 'nonsense'"):
        Options(nonsense=1)  # type: ignore[call-arg]


def test_the_remedies_work(manager: CheckpointManager) -> None:
    """Each does what its message says."""
    assert (
        manager.restore(like=_params(kind="float16"), cast=True)["params"]["b"].dtype == "float16"
    )
    renamed = manager.restore(like=_params("weight"), rename={"params.w": "params.weight"})
    assert renamed["params"]["weight"].tolist() == np.ones((4, 4)).tolist()
    kept = manager.restore(like=_params(shape=(4, 5)), partial=lambda path: path != "params.w")
    assert kept["params"]["w"].shape == (4, 5)


def test_a_save_within_jit_says_so(manager: CheckpointManager) -> None:
    """The leaf is named, or the metric."""
    with pytest.raises(UnsupportedLeaf, match="'w' is a tracer: save outside of jit and grad"):
        jax.jit(lambda x: manager.save(12, {"w": x}))(1.0)
    with pytest.raises(UnsupportedLeaf, match=r"metrics\['loss'\]. is a tracer: save outside of"):
        jax.jit(lambda x: manager.save(12, {"w": 1}, metrics={"loss": x}))(1.0)


def test_a_metric_that_was_donated_says_so(manager: CheckpointManager) -> None:
    """The metric is named, as a leaf is."""
    loss = jax.numpy.ones(())
    jax.jit(lambda x: x + 1, donate_argnums=0)(loss)
    with pytest.raises(UnsupportedLeaf, match=r"metrics\['loss'\]. was deleted or donated"):
        manager.save(12, {"w": 1}, metrics={"loss": loss})


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


def test_a_rename_is_for_all_items_of_a_restore(tmp_path: Path) -> None:
    """One item that it matches is enough, and a function may match none."""
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, items={"model": {"w": np.zeros(1)}, "optimizer": {"m": np.ones(1)}}).wait()
        both = {"model": {"v": np.ones(1)}, "optimizer": {"m": np.zeros(1)}}
        restored = manager.restore(items=both, rename={"w": "v"})
        assert restored["model"]["v"] == 0 and restored["optimizer"]["m"] == 1
        assert manager.restore(item="model", rename=lambda path: path)["w"] == 0
        with pytest.raises(TreeMismatch, match=r"^step 1: rename= matches no leaf, .*has 'm' "):
            manager.restore(item="optimizer", rename={"w": "v"})
    for path in (tmp_path, tmp_path / "1"):
        with pytest.raises(TreeMismatch, match=rf"^{tmp_path}/1: rename= matches no leaf"):
            load(path, item="optimizer", rename={"w": "v"})
        with pytest.raises(TreeMismatch, match=rf"^{tmp_path}/1: the leaf 'm'.* as int8\[1\]"):
            load(path, {"m": np.zeros(1, "int8")}, item="optimizer")


def test_a_predicate_is_for_all_items_of_a_restore(tmp_path: Path) -> None:
    """One item with a leaf of its choice is enough, and an item without leaves needs none."""
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, items={"model": {"w": np.ones(1)}, "optimizer": {"m": np.ones(1)}}).wait()
        manager.save(2, {"nothing": {}}).wait()
        both: dict[str, Any] = {"model": None, "optimizer": None}
        restored = manager.restore(1, items=both, partial=lambda path: path == "w")
        assert restored["model"]["w"] == 1 and restored["optimizer"] == {"m": None}
        with pytest.raises(TreeMismatch, match="chooses no leaf"):
            manager.restore(1, items=both, partial=lambda path: path == "v")
        assert manager.restore(2, partial=lambda path: False) == {"nothing": {}}
        assert manager.restore(2, {"nothing": None}, partial=True) == {"nothing": None}
    with pytest.raises(TreeMismatch, match=rf"^{tmp_path}/1: partial= chooses no leaf"):
        load(tmp_path / "1", items=both, partial=lambda path: path == "v")


def test_a_metric_that_no_step_has_keeps_all(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With one warning, which lists the metrics there are; the first step that has it is judged
    again.
    """
    with CheckpointManager(tmp_path, keep_policy=KeepBest(1, "los")) as manager:
        for step in range(4):
            manager.save(step, _params(), metrics={"loss": step, "accuracy": 1})
        manager.wait_until_finished()
        assert manager.all_steps() == [0, 1, 2, 3]
        [warning] = [
            record.getMessage() for record in caplog.records if "los" in record.msg % record.args
        ]
        assert warning == (
            f"{tmp_path}: KeepBest(n=1, metric='los', mode='min') keeps every step: none of 1 has"
            " the metric 'los', they have 'accuracy', 'loss'; write a metric that they have, or"
            " pass metrics={'los': ...} to `save`"
        )
        manager.save(4, _params(), metrics={"los": 1}).wait()
        manager.save(5, _params(), metrics={"loss": 0}).wait()
        manager.wait_until_finished()
        assert manager.all_steps() == [4, 5]
