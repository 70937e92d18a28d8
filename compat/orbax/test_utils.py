"""`orbax.checkpoint.test_utils`: of it, what programs that are no tests use too."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from .own_handlers import to_path
from .refusals import TESTING, refusing


def erase_and_create_empty(directory: Any) -> Any:
    """Makes a folder of the file system that is empty: what is in one that is there is deleted."""
    shutil.rmtree(directory, ignore_errors=True)
    Path(directory).mkdir()
    return to_path(directory)


def empty_directory(directory: Any) -> bool:
    """Deletes what is in a folder of the file system; returns whether the folder is there."""
    folder = Path(directory)
    if not folder.exists():
        return False
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    return True


__getattr__ = refusing(__name__, TESTING)
