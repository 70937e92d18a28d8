"""Which machine this is; what mounts are read for has its tests there."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from holdfast.coordination import mounts


def test_a_machine_has_one_boot_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernel tells none it is made of the host's name."""
    assert mounts.boot_id() == mounts.boot_id()
    monkeypatch.setattr(mounts, "BOOT_ID", tmp_path / "none")
    assert len(mounts.boot_id()) == 32 and mounts.boot_id() == mounts.boot_id()


def test_a_mount_is_known_by_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by one with spaces, which the kernel writes in octal, and letters beyond ASCII, which it
    does not.
    """
    point = tmp_path / "a caf\u00e9"
    octal = str(point).replace(" ", "\\040")
    table = tmp_path / "mountinfo"
    table.write_text(
        "21 1 8:1 / / rw - ext4 /dev/sda1 rw\n"
        f"22 21 0:39 / {octal} rw - lustre mgs:/fs rw,localflock\n"
    )
    monkeypatch.setattr(mounts, "MOUNTINFO", table)
    assert mounts.mount_of(point / "checkpoints") == mounts.Mount(
        "lustre", frozenset({"rw", "localflock"})
    )
    assert mounts.mount_of(tmp_path).kind == "ext4"


def test_without_descriptors_a_machine_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a mount that cannot be looked up is not one with locks between hosts."""
    known = mounts.boot_id()

    def refuse(path: Path, **_: object) -> str:
        raise OSError(errno.EMFILE, "Too many open files", str(path))

    monkeypatch.setattr(Path, "read_text", refuse)
    assert mounts.boot_id() == known
    with pytest.raises(OSError, match="Too many open files"):
        mounts.mount_of(Path("/"))
