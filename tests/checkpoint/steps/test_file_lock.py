"""Locks on files: where they hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.checkpoint.steps.file_lock import locks_are_local

MOUNTS = """\
22 1 259:1 / / rw,relatime - ext4 /dev/root rw,discard
31 22 0:44 / /scratch rw,relatime - lustre 10.0.0.1@tcp:/fs rw,{lustre},user_xattr,lazystatfs
32 22 0:45 / /home\\040dirs rw,relatime - nfs4 server:/home rw,vers=4.2,hard,{nfs},addr=10.0.0.2
33 31 0:46 / /scratch/inner rw - tmpfs none rw
"""


@pytest.mark.parametrize(
    ("folder", "lustre", "nfs", "local"),
    [
        ("/scratch/run", "localflock", "local_lock=none", True),
        ("/scratch/run", "flock", "local_lock=all", False),
        ("/scratch/inner/run", "localflock", "local_lock=all", False),
        ("/scratchy", "localflock", "local_lock=all", False),
        ("/home dirs/me/run", "flock", "local_lock=flock", True),
        ("/home dirs/me/run", "flock", "nolock", True),
        ("/home dirs/me/run", "localflock", "local_lock=none", False),
        ("/home dirs/me/run", "localflock", "local_lock=posix", False),
    ],
)
def test_a_mount_tells_whether_locks_are_local(
    folder: str, lustre: str, nfs: str, local: bool
) -> None:
    """By the options of the innermost mount above the folder."""
    assert locks_are_local(Path(folder), MOUNTS.format(lustre=lustre, nfs=nfs)) is local
    assert not locks_are_local(Path(folder), "")
