"""Deleting the files of a step."""

from __future__ import annotations

from pathlib import Path

from holdfast.checkpoint.steps.step_files import delete_files
from holdfast.checkpoint.storage.local import LocalStorage


def put(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("x")


def names_in(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def test_files_go_with_their_empty_folders(tmp_path: Path) -> None:
    """Named files go, and folders that are then empty; what else is there stays, with its
    folder.
    """
    put(tmp_path, "3/state/a", "3/state/b", "3/ema/c", "4/state/a")
    delete_files(LocalStorage(tmp_path), "3", ["state/a", "ema/c"])
    assert names_in(tmp_path) == ["3/state/b", "4/state/a"] and not (tmp_path / "3/ema").exists()
    delete_files(LocalStorage(tmp_path), "3", ["state/b", "state/missing"])
    assert not (tmp_path / "3").exists()
