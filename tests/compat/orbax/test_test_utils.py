"""What of Orbax's `test_utils` programs use that are no tests, on both libraries."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import orbax.checkpoint.test_utils as theirs
import pytest

from holdfast.compat.orbax import test_utils as ours


def fill(folder: Path) -> None:
    """Puts a file and a folder with a file into a folder."""
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "file").write_text("old")
    (folder / "file").write_text("old")


@pytest.mark.parametrize("library", [ours, theirs], ids=["ours", "theirs"])
def test_a_folder_is_empty_afterwards(library: ModuleType, tmp_path: Path) -> None:
    """Whether it was there, or not."""
    fill(tmp_path / "a")
    for name in ("a", "b"):
        made = library.erase_and_create_empty(tmp_path / name)
        assert Path(made) == tmp_path / name
        assert list((tmp_path / name).iterdir()) == []
    fill(tmp_path / "c")
    library.empty_directory(tmp_path / "c")
    assert list((tmp_path / "c").iterdir()) == []
