"""How a manager is built: what stands where something is off, and what a failure leaves."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.checkpoint import (
    CheckpointError,
    CheckpointManager,
    EveryNSteps,
    KeepAll,
    Local,
    Options,
)
from holdfast.checkpoint import manager_parts as parts_module
from holdfast.checkpoint.manager_parts import ManagerParts, NoWatchdog, open_manager
from holdfast.multihost import Solo, Watchdog


def opened(folder: Path, options: Options, local: Local | None = None) -> ManagerParts:
    return open_manager(
        folder,
        save_policy=EveryNSteps(1),
        keep_policy=KeepAll(),
        group=Solo(),
        options=options,
        local=local,
    )


def test_what_is_off_has_a_stand_in(tmp_path: Path) -> None:
    """A reader begins no branch, keeps no steps on hosts, and is not watched."""
    CheckpointManager(tmp_path).close()
    parts = opened(tmp_path, Options(read_only=True))
    state = parts.catalog.state
    assert state.lineage is None
    assert parts.catalog.tier is None and isinstance(parts.watchdog, NoWatchdog)
    parts.close(1.0)


def test_a_manager_is_watched_on_request(tmp_path: Path) -> None:
    """With a time for hangs there is a watchdog, which ends with the manager."""
    parts = opened(tmp_path, Options(hang_timeout_s=60))
    assert isinstance(parts.watchdog, Watchdog)
    parts.close(1.0)
    assert parts.watchdog._closed.is_set()


def test_a_tier_that_fails_gives_the_claim_up(tmp_path: Path) -> None:
    """The next writer finds a root that nobody has open."""
    (tmp_path / "file").write_text("")
    local = Local(tmp_path / "file" / "host", save_policy=EveryNSteps(1), strict=True)
    with pytest.raises(CheckpointError, match="cannot be used"):
        opened(tmp_path / "root", Options(), local)
    with CheckpointManager(tmp_path / "root") as manager:
        root = manager._root
        assert root.claims.standing() == {root.writer.id}


def test_a_scheduler_that_fails_closes_the_tier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the last part runs into: what was opened before is closed."""

    def fail(*args: object, **options: object) -> None:
        raise RuntimeError("no agreement")

    monkeypatch.setattr(parts_module, "SaveScheduler", fail)
    local = Local(tmp_path / "host", save_policy=EveryNSteps(1), replicas=0)
    with pytest.raises(RuntimeError, match="no agreement"):
        opened(tmp_path / "root", Options(), local)
    assert not [*(tmp_path / "host").glob("mark-*")]
    assert [path.name for path in (tmp_path / "root" / ".holdfast").iterdir()] == []
