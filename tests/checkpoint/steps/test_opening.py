"""Opening a root together: one process acts, all know the same, or raise the same."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.checkpoint import CheckpointError, CheckpointManager, Options, save
from holdfast.checkpoint.format.step_folders import parse_step_format
from holdfast.checkpoint.steps.claims import Writer, this_writer
from holdfast.checkpoint.steps.holds import add_hold, list_marks
from holdfast.checkpoint.steps.local_claims import LocalClaims
from holdfast.checkpoint.steps.opening import OpenRoot, OtherLayouts, open_root
from holdfast.checkpoint.storage.local import LocalStorage
from holdfast.coordination import Fenced, HoldfastError
from holdfast.multihost import Group, ProcessSpec, Solo
from holdfast.multihost.job import current_job
from tests.support.checkpointing import at_once, groups

JOB = {
    "HOLDFAST_JOB_ID": "j",
    "HOLDFAST_PROCESS_ID": "0",
    "HOLDFAST_NUM_PROCESSES": "1",
    "HOLDFAST_COORDINATOR": "127.0.0.1:1",
}

ANY_SPACE = Options(check_free_space=False)  # which would ask for a megabyte


def opened(
    root: Path, group: Group | None = None, options: Options | None = None
) -> tuple[OpenRoot, LocalClaims]:
    storage = LocalStorage(root)
    claims = LocalClaims(storage)
    found = open_root(
        storage,
        claims,
        group or Solo(),
        options or Options(),
        layouts=OtherLayouts(lambda _, listing, names: {1: "1", 7: "step_7"}),
    )
    return found, claims


def test_all_processes_know_what_the_primary_found(tmp_path: Path) -> None:
    """One claim is taken, by the primary; writer, steps and other libraries' steps are alike on
    all; our step hides theirs.
    """
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"w": np.ones(3)})
    with groups(3) as all_three:
        found = at_once([lambda group=group: opened(tmp_path, group) for group in all_three])
    primary, claims = found[0]
    facts = {(repr(other.writer), repr(other.listing.told())) for other, _ in found}
    assert len(facts) == 1
    assert (
        primary.listing.steps == (1,)
        and primary.listing.foreign == {7: "step_7"}
        and primary.writer.pid == os.getpid()
    )
    assert claims.standing() == {primary.writer.id}
    claims.fence(primary.writer.id)


def test_read_only_takes_no_claim(tmp_path: Path) -> None:
    """A reader has a writer's id for its messages, and leaves nothing in the root."""
    found, claims = opened(tmp_path, options=Options(read_only=True))
    assert (
        len(found.writer.id) == 8 and claims.standing() == set() and list(tmp_path.iterdir()) == []
    )


def test_the_primarys_error_is_everybodys(tmp_path: Path) -> None:
    """A root that cannot be written is one CheckpointError with its path on all processes; so is an
    error that is not ours.
    """
    (tmp_path / "file").write_text("")

    def failure(group: Group, *, broken: bool = False) -> HoldfastError:
        storage = LocalStorage(tmp_path if broken else tmp_path / "file")
        claims = LocalClaims(storage)

        def find_foreign(_: object, listing: object, names: object) -> dict[int, str]:
            raise ZeroDivisionError("mine")

        layouts = OtherLayouts(find_foreign)
        with pytest.raises(HoldfastError) as caught:
            open_root(storage, claims, group, Options(read_only=broken), layouts=layouts)
        return caught.value

    with groups(2) as both:
        errors = at_once([lambda group=group: failure(group) for group in both])
        assert {type(error) for error in errors} == {CheckpointError} and len(
            {str(error) for error in errors}
        ) == 1
        assert "cannot write a checkpoint in" in str(errors[1]) and errors[1].path == errors[
            0
        ].path == str(tmp_path / "file")  # type: ignore[attr-defined]
        errors = at_once([lambda group=group: failure(group, broken=True) for group in both])
        assert {str(error) for error in errors} == {
            f"cannot open {tmp_path}: ZeroDivisionError: mine"
        }


def test_a_lower_attempt_leaves_no_claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever meets a higher attempt of its job gets Fenced, and its own claim is gone; a higher
    one takes the lower's away.
    """
    for name, value in JOB.items():
        monkeypatch.setenv(name, value)
    claims = LocalClaims(LocalStorage(tmp_path))
    second = replace(this_writer(), job="j", attempt=2)
    claims.take(second)
    monkeypatch.setenv("HOLDFAST_ATTEMPT", "1")
    with pytest.raises(Fenced, match="attempt 2 of job 'j' writes here"):
        opened(tmp_path)
    assert claims.standing() == {second.id}
    monkeypatch.setenv("HOLDFAST_ATTEMPT", "3")
    found, mine = opened(tmp_path)
    assert (found.writer.job, found.writer.attempt) == ("j", 3) and mine.standing() == {
        found.writer.id
    }
    mine.fence(found.writer.id)
    claims.fence(second.id)
    assert isinstance(found.writer, Writer)


def test_the_attempt_is_that_which_was_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that outlived the attempt that it was started for writes as one of a later one."""
    for name, value in JOB.items():
        monkeypatch.setenv(name, value)
    started_for = ProcessSpec.from_env(JOB | {"HOLDFAST_ATTEMPT": "1"})
    assert started_for is not None
    current_job().join(None, replace(started_for, attempt=2))
    try:
        found, mine = opened(tmp_path)
    finally:
        current_job().leave()
    assert (found.writer.job, found.writer.attempt) == ("j", 2)
    mine.fence(found.writer.id)


@pytest.fixture(params=["blocks", "inodes"])
def disk(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[tuple[Path, Callable[[], None]]]:
    """A small file system of its own, and what fills it."""
    folder = tmp_path / "disk"
    folder.mkdir()
    limit = "size=256k" if request.param == "blocks" else "nr_inodes=60"
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", limit, "none", str(folder)], capture_output=True
    ).returncode:
        pytest.skip("to mount a file system is for root")

    def fill() -> None:
        with contextlib.suppress(OSError):
            for number in itertools.count():
                (folder / f"filler{number}").write_bytes(
                    bytes(4096 if request.param == "blocks" else 0)
                )

    yield folder, fill
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_new_root_on_a_full_disk_gets_its_format_later(
    disk: tuple[Path, Callable[[], None]],
) -> None:
    """With the claim, once there is room: its steps are called as was asked for."""
    folder, fill = disk
    fill()
    options = replace(ANY_SPACE, step_format="ck_{:03d}")
    with CheckpointManager(folder / "root", options=options) as manager:
        for filler in folder.glob("filler*"):
            filler.unlink()
        manager.save(7, {"w": np.ones(3)})
    assert (folder / "root" / "ck_007" / "checkpoint.json").is_file()


def test_a_root_on_a_full_disk_opens(
    disk: tuple[Path, Callable[[], None]], caplog: pytest.LogCaptureFixture
) -> None:
    """Steps are restored and deleted there; a save is an error on every process until there is
    room, and then one like any other.
    """
    folder, fill = disk
    with CheckpointManager(folder / "root", options=ANY_SPACE) as manager:
        for step in range(3):
            manager.save(step, {"w": np.full(5000, step)})
    fill()
    with pytest.raises(CheckpointError, match="No space left"):
        save(folder / "root" / "other", {"w": np.ones(3)})
    with groups(2) as both:
        managers = at_once(
            [
                lambda group=group: CheckpointManager(
                    folder / "root", group=group, options=ANY_SPACE
                )
                for group in both
            ]
        )
        assert (
            "opened without a claim" in caplog.text and managers[0]._root.claims.standing() == set()
        )

        def saved(manager: CheckpointManager, step: int) -> str:
            try:
                manager.save(step, {"w": np.ones(3)})
                manager.wait_until_finished()
            except CheckpointError as error:
                return str(error)
            return ""

        errors = at_once([lambda manager=manager: saved(manager, 5) for manager in managers])
        assert errors[0] == errors[1] and "No space left" in errors[0]
        values = at_once(
            [lambda manager=manager: manager.restore(2)["w"][0] for manager in managers]
        )
        assert values == [2, 2]
        for step in (0, 1):
            at_once(
                [lambda manager=manager, step=step: manager.delete(step) for manager in managers]
            )
        assert at_once([lambda manager=manager: saved(manager, 5) for manager in managers]) == [
            "",
            "",
        ]
        assert [manager.all_steps() for manager in managers] == [[2, 5]] * 2
        at_once([manager.close for manager in managers])


def test_a_full_disk_is_pruned(disk: tuple[Path, Callable[[], None]]) -> None:
    """Where no mark can be written, what no reader holds goes all the same."""
    folder, fill = disk
    with CheckpointManager(folder / "root", options=ANY_SPACE) as manager:
        for step in range(3):
            manager.save(step, {"w": np.full(5000, step)})
    add_hold(LocalStorage(folder / "root"), 1, 3600)
    fill()
    with CheckpointManager(folder / "root", options=ANY_SPACE) as manager:
        assert manager.delete_unheld([0, 1]) == [0] and manager.all_steps() == [1, 2]
    assert not list_marks(LocalStorage(folder / "root"))


def test_a_group_deletes_its_newest_step(tmp_path: Path) -> None:
    """The primary begins a branch below it; the others have none to begin."""
    with groups(2) as both:
        managers = at_once(
            [lambda group=group: CheckpointManager(tmp_path, group=group) for group in both]
        )
        for step in (1, 2):
            at_once([lambda m=m, step=step: m.save(step, {"w": np.ones(3)}) for m in managers])
            at_once([m.wait_until_finished for m in managers])
        at_once([lambda m=m: m.delete(2) for m in managers])
        assert [m.all_steps() for m in managers] == [[1]] * 2
        at_once([m.close for m in managers])


def test_what_a_dead_writer_left_makes_room(
    disk: tuple[Path, Callable[[], None]], caplog: pytest.LogCaptureFixture
) -> None:
    """Before the opening does without a claim it sweeps: a save that died fills a disk that would
    do.
    """
    folder, fill = disk
    dead = folder / "root" / ".holdfast" / "0a0b0c0d"
    dead.mkdir(parents=True)
    (dead / "lock").touch()
    (dead / "claim.json").write_text("{}")
    (folder / "root" / "1" / "state").mkdir(parents=True)
    for pack in range(8):
        (folder / "root" / "1" / "state" / f"00000-{pack:05d}-0a0b0c0d.safetensors").write_bytes(
            bytes(4096)
        )
    fill()
    with CheckpointManager(folder / "root", options=ANY_SPACE) as manager:
        assert len(manager._root.claims.standing()) == 1 and "without a claim" not in caplog.text
        manager.save(1, {"w": np.ones(3)})
        manager.wait_until_finished()


def test_reload_shows_readers_of_a_group_what_others_did(tmp_path: Path) -> None:
    """Until they reload, processes know the steps of the opening; then all know those that the
    primary sees, other people's too.
    """
    with CheckpointManager(tmp_path) as writer, groups(2) as both:
        writer.save(1, {"w": np.ones(3)})
        writer.wait_until_finished()
        readers = at_once(
            [
                lambda group=group: CheckpointManager(
                    tmp_path, group=group, options=Options(read_only=True)
                )
                for group in both
            ]
        )
        writer.save(2, {"w": np.ones(3)})
        writer.delete(1)
        writer.wait_until_finished()
        save(tmp_path / "7", {"w": np.ones(3)}, layout="orbax")
        assert [reader.all_steps() for reader in readers] == [[1]] * 2
        at_once([reader.reload for reader in readers])
        assert [reader.all_steps() for reader in readers] == [[2, 7]] * 2
        values = at_once(
            [lambda reader=reader: reader.restore(2)["w"].tolist() for reader in readers]
        )
        assert values == [[1, 1, 1]] * 2
        at_once([reader.close for reader in readers])


def test_a_listing_that_fails_is_everybodys_error(tmp_path: Path) -> None:
    """Where the primary cannot list the store, `reload` raises one error on every process; alone
    `all_steps` does.
    """
    root = tmp_path / "root"
    with groups(2) as both:
        readers = at_once(
            [
                lambda group=group: CheckpointManager(
                    root, group=group, options=Options(read_only=True)
                )
                for group in both
            ]
        )
        root.symlink_to(tmp_path / ("x" * 300))

        def failure(reader: CheckpointManager) -> str:
            with pytest.raises(CheckpointError, match="File name too long") as caught:
                reader.reload()
            return str(caught.value)

        assert len(set(at_once([lambda reader=reader: failure(reader) for reader in readers]))) == 1
        at_once([reader.close for reader in readers])
    root.unlink()
    with CheckpointManager(root, options=Options(read_only=True)) as alone:
        root.symlink_to(tmp_path / ("x" * 300))
        with pytest.raises(CheckpointError, match=r"cannot be read: .*File name too long"):
            alone.latest_step()


NAMED = Options(step_format="checkpoint_{:08d}")


def test_a_root_calls_its_steps_by_one_format_for_good(tmp_path: Path) -> None:
    """The first opening writes it; later ones need not name it, may, and are refused with another,
    readers too.
    """
    found, claims = opened(tmp_path, options=NAMED)
    claims.fence(found.writer.id)
    fact = tmp_path / ".holdfast" / "steps.json"
    assert found.listing.step_names.name_of(7) == "checkpoint_00000007" and json.loads(
        fact.read_text()
    ) == {"prefix": "checkpoint_", "width": 8}
    made = fact.stat().st_ino
    for options in (Options(), NAMED, Options(read_only=True)):
        again, claims = opened(tmp_path, options=options)
        assert again.listing.step_names == found.listing.step_names and fact.stat().st_ino == made
        claims.fence(again.writer.id)
    for other in ("{:d}", "checkpoint_{:07d}", "step_{:08d}"):
        for read_only in (True, False):
            with pytest.raises(
                CheckpointError,
                match=r"calls its step 7 checkpoint_00000007, and step_format would .*: a root has",
            ):
                opened(tmp_path, options=Options(step_format=other, read_only=read_only))
    assert LocalClaims(LocalStorage(tmp_path)).standing() == set()


def test_a_root_with_steps_gets_no_other_format(tmp_path: Path) -> None:
    """Plain numbers are a format: it may be named, and no other."""
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"w": np.ones(3)})
    found, claims = opened(tmp_path, options=Options(step_format="{:d}"))
    claims.fence(found.writer.id)
    with pytest.raises(
        CheckpointError,
        match="calls its step 7 7, and step_format would call it checkpoint_00000007",
    ):
        opened(tmp_path, options=NAMED)
    assert not (tmp_path / ".holdfast" / "steps.json").exists()


def test_a_new_root_that_another_writer_has_open_gets_no_format(tmp_path: Path) -> None:
    """The other one calls its first step 7; when it has closed, the root may have a format."""
    with CheckpointManager(tmp_path) as manager:
        with pytest.raises(
            CheckpointError,
            match=f"gets no step_format while writer {manager._root.writer.id} has it open",
        ):
            opened(tmp_path, options=NAMED)
    found, claims = opened(tmp_path, options=NAMED)
    claims.fence(found.writer.id)
    assert found.listing.step_names.width == 8


@pytest.mark.parametrize("other", ["checkpoint_{:08d}", "step_{:d}"])
def test_of_two_that_begin_a_root_the_first_decides(
    tmp_path: Path, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose format is written a moment later takes the first one, if it is the same, and is refused
    else; its claim is given up.
    """
    commit = LocalStorage.commit

    def late(storage: LocalStorage, name: str, *given: Any, **more: Any) -> None:
        (tmp_path / name).write_bytes(parse_step_format(other).to_bytes())
        commit(storage, name, *given, **more)

    monkeypatch.setattr(LocalStorage, "commit", late)
    if other == NAMED.step_format:
        found, claims = opened(tmp_path, options=NAMED)
        assert found.listing.step_names.width == 8
        claims.fence(found.writer.id)
    else:
        with pytest.raises(CheckpointError, match="calls its step 7 step_7, and"):
            opened(tmp_path, options=NAMED)
    assert LocalClaims(LocalStorage(tmp_path)).standing() == set()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "step",
        "step_{}{}",
        "{:08d}_step",
        "step5{:d}",
        ".step_{:d}",
        "a/{:d}",
        "../{:d}",
        "{:019d}",
        "{:8d}",
        "{0:d}",
    ],
)
def test_a_format_that_no_reader_takes_is_refused_at_once(tmp_path: Path, text: str) -> None:
    """On every process, before anything is written; the message shows what is expected."""
    with pytest.raises(ValueError, match=r'step_format=.*"checkpoint_\{:08d\}"'):
        CheckpointManager(tmp_path, options=Options(step_format=text))
    assert list(tmp_path.iterdir()) == []
