"""Formats of the names of steps: the same on Orbax and on holdfast."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import orbax.checkpoint as real
import pytest

from holdfast.compat import orbax as ours
from holdfast.compat.orbax.roots import step_names
from tests.support.orbax_programs import outcome, run_both

pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")  # Orbax's own
TREE = {"w": jnp.arange(4.0)}


def _save(ocp: Any, root: Path, **options: Any) -> None:
    options = ocp.CheckpointManagerOptions(**options)
    with ocp.CheckpointManager(root, options=options) as manager:
        for step in (3, 12):
            manager.save(step, args=ocp.args.StandardSave(TREE))


def test_a_manager_takes_a_format(tmp_path: Path) -> None:
    """Its folders are called so, and its functions find them."""

    def program(ocp: Any, root: Path) -> Any:
        step = ocp.path.step
        names = step.standard_name_format(step_prefix="ckpt", step_format_fixed_length=5)
        _save(ocp, root, step_name_format=names)
        (root / "beside").mkdir()
        found = sorted(names.find_all(root), key=lambda each: each.step)
        return [
            [(each.step, each.path.name) for each in found],
            [each.commit_timestamp_nsecs is not None for each in found],
            names.find_step(root, 3).path.name,
            outcome(lambda: names.find_step(root, 4)),
            step.latest_step_metadata(root, names).step,
            step.maybe_find_step_metadata(root, names, step=4),
            step.find_step_path(root, names, step=12).name,
            step.step_metadata_of_checkpoint_path(root / "ckpt_00012", names).step,
            outcome(lambda: step.step_metadata_of_checkpoint_path(root / "beside", names)),
            sorted(path.name for path in ocp.step.checkpoint_steps_paths(root) if "_" in path.name),
            ocp.utils.is_checkpoint_finalized(root / "ckpt_00012"),
            ocp.utils.is_tmp_checkpoint(root / "ckpt_00012"),
        ]

    run_both(program, tmp_path)


def test_several_formats(tmp_path: Path) -> None:
    """One is written, and all are found, the first one first."""

    def program(ocp: Any, root: Path) -> Any:
        step = ocp.path.step
        plain = step.standard_name_format()
        named = step.standard_name_format(step_prefix="a")
        both = step.composite_name_format(named, [named, plain])
        _save(ocp, root, step_name_format=both)
        return [
            sorted(each.path.name for each in both.find_all(root)),
            both.find_step(root, 3).path.name,
            outcome(lambda: both.find_step(root, 4)),
            outcome(lambda: step.composite_name_format(named, [plain])),
            step.is_standard_name_format(plain),
            step.is_standard_name_format(both),
        ]

    run_both(program, tmp_path)


def test_names_without_a_look(tmp_path: Path) -> None:
    """Names of steps, folders of items, and the steps of names."""

    def program(ocp: Any, root: Path) -> Any:
        step = ocp.path.step
        names = step.standard_name_format(step_format_fixed_length=3)
        folders = [
            step.get_save_directory(5, root, name="state", step_prefix="a"),
            step.get_save_directory(5, root, override_directory=root / "b"),
            step.get_save_directory(5, root, step_name_format=names),
            step.build_step_path(root, names, 1234),
        ]
        texts = ["12", "a_12", "12.orbax-checkpoint-tmp-7", "x"]
        return [
            [path.relative_to(root).as_posix() for path in folders],
            [
                outcome(lambda text=text: ocp.utils.step_from_checkpoint_name(text))
                for text in texts
            ],
            outcome(lambda: step.get_save_directory(5, None)),
            list(names.find_all(root / "nothing")),
            step.single_host_load_and_broadcast_name_format(names).build_name(7),
            [ocp.step.TMP_DIR_SUFFIX, ocp.step.ALLOWED_STEP_NAME_PATTERN],
        ]

    run_both(program, tmp_path)


def test_a_format_of_ones_own(tmp_path: Path) -> None:
    """It serves where names are a prefix and the number. Others are refused before anything is
    written, with such a name and what to give.
    """

    class Words(ours.path.step.NameFormat[Any]):  # type: ignore[misc]
        def __init__(self, pattern: str) -> None:
            self.pattern = pattern

        def build_name(self, step: int) -> str:
            return self.pattern.format(step)

    _save(ours, tmp_path / "a", step_name_format=Words("at-{:04d}"))
    assert (tmp_path / "a" / "at-0012").is_dir()
    for pattern in ("{}-step", "{:x}", "step"):
        with pytest.raises(NotImplementedError, match=r"which calls step 7 .*standard_name_format"):
            _save(ours, tmp_path / "b", step_name_format=Words(pattern))
    assert not (tmp_path / "b").exists()


def test_a_reader_finds_steps_by_numbers(tmp_path: Path) -> None:
    """A format does not keep a manager that only reads from a root of Orbax's."""
    _save(real, tmp_path, step_prefix="a")
    options = ours.CheckpointManagerOptions(step_prefix="a", read_only=True)
    with ours.CheckpointManager(tmp_path, options=options) as manager:
        assert manager.all_steps() == [3, 12]
    assert step_names.step_format(step_names.StandardNameFormat("a", 2)) == "a_{:02d}"
