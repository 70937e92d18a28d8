"""What jax sees of a host's folder of compiled programs in a job of several hosts: a folder of its
process, with links to some entries. What jax compiles it writes there, and it is moved over.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from .folder import ENTRIES, VIEW, Entry, merge, note_sealed, sealed


@functools.cache
def own_view(folder: Path) -> Path:
    """Makes this process's view of a folder, which goes with the process.

    It is locked, so that who tends the folder passes over it. Raises OSError.
    """
    view = Path(tempfile.mkdtemp(prefix=VIEW, dir=folder))
    fcntl.flock(os.open(view, os.O_RDONLY), fcntl.LOCK_SH | fcntl.LOCK_NB)
    atexit.register(_end, view, folder, os.getpid())
    return view


def _end(view: Path, folder: Path, pid: int) -> None:
    if os.getpid() == pid:  # and no child
        with contextlib.suppress(OSError):
            merge(view, folder)
        shutil.rmtree(view, ignore_errors=True)


def show(view: Path, folder: Path, visible: Mapping[str, Entry]) -> None:
    """Has a view show these entries of the folder alone. Raises OSError."""
    merge(view, folder)
    before = sealed(view)
    for path in view.glob(ENTRIES):
        if path.name not in visible or before.get(path.name) != visible[path.name]:
            path.unlink()
    missing = [entry for name, entry in visible.items() if not (view / name).exists()]
    for entry in missing:
        os.link(folder / entry.name, view / entry.name)
    note_sealed(view, missing)
