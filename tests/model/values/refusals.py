"""What a refusal has to be: raised by holdfast, with a sentence, before anything was written."""

from __future__ import annotations

import linecache
import os
import traceback
from pathlib import Path

import holdfast.checkpoint
from holdfast.checkpoint import CheckpointError

from .comparing import Different

_OURS = Path(next(iter(holdfast.checkpoint.__path__))).resolve()


def check_refusal(error: Exception, folder: Path) -> None:
    """Raises Different unless an error is one of ours, or a caller's mistake that we name."""
    left = [Path(where, name) for where, _, names in os.walk(folder) for name in names]
    if left:
        raise Different(f"refused after {left} were written: {error!r}") from error
    check_typed(error)


def check_typed(error: Exception) -> None:
    """Raises Different unless a statement of ours raised it."""
    if isinstance(error, CheckpointError):
        return
    frame = traceback.extract_tb(error.__traceback__)[-1]
    line = linecache.getline(frame.filename, frame.lineno or 0).strip()
    is_ours = Path(frame.filename).resolve().is_relative_to(_OURS)
    if not isinstance(error, ValueError | TypeError) or not is_ours or not line.startswith("raise"):
        raise Different(f"a raw error, of {frame.filename}:{frame.lineno}: {error!r}") from error
