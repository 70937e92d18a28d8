"""Which machine this is; what mounts are read for has its tests there."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.coordination import mounts


def test_a_machine_has_one_boot_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernel tells none it is made of the host's name."""
    assert mounts.boot_id() == mounts.boot_id()
    monkeypatch.setattr(mounts, "BOOT_ID", tmp_path / "none")
    assert len(mounts.boot_id()) == 32 and mounts.boot_id() == mounts.boot_id()
