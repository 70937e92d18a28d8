"""Commands that take every step of a root: how often each looks at the store, and what becomes of
them while a job saves and deletes steps.
"""

from __future__ import annotations

import errno
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax.numpy as jnp
import pytest
from click.testing import CliRunner, Result

from holdfast.checkpoint import CheckpointManager, KeepLast, register_storage
from holdfast.checkpoint.storage.base import Entry
from holdfast.checkpoint.storage.counting import CountingStorage
from holdfast.checkpoint.storage.local import LocalStorage
from holdfast.cli.entry import main

COUNT = 12


def run(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exit_code == code, (arguments, result.output, result.exception)
    return result


class Watched(CountingStorage):
    """A folder that counts listings by their folder, and tells `before` which file will be read."""

    def __init__(self, path: str, listings: Counter[str], before: Callable[[str], None]) -> None:
        super().__init__(LocalStorage(path), lambda done_bytes: None)
        self._listings = listings
        self._before = before

    def list(
        self, folder: str, *, recursive: bool = False, names_only: bool = False
    ) -> list[Entry]:
        self._listings[folder] += 1
        return super().list(folder, recursive=recursive, names_only=names_only)

    def read(self, name: str, offset: int, buffers: Sequence[memoryview]) -> int:
        self._before(name)
        return super().read(name, offset, buffers)

    def fetch(self, name: str, limit_bytes: int) -> bytes:
        self._before(name)
        return super().fetch(name, limit_bytes)


class Root:
    """A root of a job that lives: `url` is it as the commands see it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.url = f"watched://{path}"
        self.listings: Counter[str] = Counter()
        self.watch()
        register_storage("watched", self._opened)
        self.manager = CheckpointManager(path)
        for step in range(COUNT):
            self.save(step)

    def _opened(self, url: str, single_writer: bool) -> Watched:
        path = url.removeprefix("watched://")
        return Watched(path, self.listings, lambda name: self._before(name))

    def watch(self, before: Callable[[str], None] = lambda name: None) -> None:
        """Has `before` called with the name of each file that a command will read."""
        self._before = before

    def save(self, step: int) -> None:
        self.manager.save(step, {"w": jnp.arange(8.0) + step}, metrics={"loss": 1.0})
        self.manager.wait_until_finished()

    def delete_while_read(self, step: int) -> None:
        """Has the job delete a step as soon as bytes of one of its packs are read."""

        def before(name: str) -> None:
            if name.startswith(f"{step}/state/"):
                self.watch()
                self.manager.delete(step)

        self.watch(before)

    def delete_when_step_is_read(self, reading: int, step: int) -> None:
        """Has the job delete a step when another one's pack is read."""

        def before(name: str) -> None:
            if name.startswith(f"{reading}/state/"):
                self.watch()
                self.manager.delete(step)

        self.watch(before)


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Root]:
    made = Root(tmp_path / "run")
    yield made
    made.watch()
    made.manager.close()


def test_each_step_is_looked_at_a_few_times(root: Root, tmp_path: Path) -> None:
    """And the root a fixed number of times, however many steps it has."""
    for most_a_step, most_of_root, arguments in (
        (3, 4, ("verify", root.url, "--all")),
        (3, 6, ("ls", root.url)),
        (3, 6, ("convert", root.url, tmp_path / "st", "--to", "safetensors", "--all")),
        (3, 6, ("convert", root.url, tmp_path / "ours", "--to", "holdfast", "--all")),
        (4, 6, ("cp", root.url, tmp_path / "copy")),
        (3, 6, ("prune", root.url, "--keep", "last:3", "--dry-run")),
    ):
        root.listings.clear()
        run(*arguments)
        of_root = root.listings.pop("")
        assert of_root <= most_of_root, (arguments, of_root)
        of_steps = Counter({name: n for name, n in root.listings.items() if name.isdigit()})
        assert max(of_steps.values()) <= most_a_step, (arguments, of_steps)


@pytest.mark.parametrize("command", ["verify", "show"])
def test_one_step_is_found_without_a_look_into_the_others(command: str, root: Root) -> None:
    run(command, root.url, "--step", 3)
    looked_into = {name for name in root.listings if name.isdigit()}
    assert looked_into == {"3"}
    root.listings.clear()
    refused = run(command, root.url, "--step", 333, code=3)
    assert "has no step 333; it has " in refused.output


@pytest.mark.parametrize("is_read", [True, False])
def test_verify_goes_on_where_a_step_goes(is_read: bool, root: Root) -> None:
    """Whether it goes while it is read, or before its turn has come."""
    if is_read:
        root.delete_while_read(5)
    else:
        root.delete_when_step_is_read(2, 5)
    said = run("verify", root.url, "--all").stdout
    assert said.count(": whole (") == COUNT - 1
    shown = f"{root.path}/5"
    assert f"{shown}: gone" in said
    root.delete_while_read(7)
    steps = json.loads(run("verify", root.url, "--all", "--json").stdout)["steps"]
    assert [step["step"] for step in steps if "gone" in step] == [7]


def test_verify_of_one_step_that_goes_is_nothing_there(root: Root) -> None:
    root.delete_while_read(5)
    assert "deleted while" in run("verify", root.url, "--step", 5, code=3).output


def test_what_was_found_is_shown_where_a_store_fails(root: Root) -> None:
    """An error of the store ends the command, and hides nothing that was found before."""

    def before(name: str) -> None:
        if name.startswith("5/state/"):
            raise OSError(errno.EHOSTDOWN, "Host is down", name)

    root.watch(before)
    failed = run("verify", root.url, "--all", code=5)
    assert failed.stdout.count(": whole (") == 5
    assert "Host is down" in failed.stderr
    assert "steps after that: not looked at" in failed.stderr
    said = json.loads(run("verify", root.url, "--all", "--json", code=5).stdout)
    assert len(said["steps"]) == 6


@pytest.mark.parametrize("is_read", [True, False])
def test_cp_goes_on_where_a_step_goes(is_read: bool, root: Root, tmp_path: Path) -> None:
    """What was begun of its copy is removed: nobody could go on with it."""
    if is_read:
        root.delete_while_read(5)
    else:
        root.delete_when_step_is_read(2, 5)
    said = run("cp", root.url, tmp_path / "copy")
    assert "/run/5" in said.stderr
    assert "was deleted" in said.stderr
    with CheckpointManager(tmp_path / "copy") as manager:
        assert manager.all_steps() == [step for step in range(COUNT) if step != 5]
    assert not (tmp_path / "copy" / "5").exists()
    run("verify", tmp_path / "copy", "--all")


@pytest.mark.parametrize("is_read", [True, False])
@pytest.mark.parametrize("layout", ["holdfast", "safetensors", "orbax"])
def test_convert_goes_on_where_a_step_goes(
    layout: str, is_read: bool, root: Root, tmp_path: Path
) -> None:
    for step in range(6, COUNT):
        shutil.rmtree(root.path / str(step))
    if is_read:
        root.delete_while_read(4)
    else:
        root.delete_when_step_is_read(2, 4)
    said = run("convert", root.url, tmp_path / "to", f"--to={layout}", "--all")
    assert "/run/4" in said.stderr
    assert "was deleted" in said.stderr
    assert said.stdout.count(" is now ") == 5
    assert not (tmp_path / "to" / "4").exists()


def test_prune_counts_no_step_that_goes(root: Root) -> None:
    """Neither as damaged, nor as kept; and one that is gone when its turn comes is no error."""

    def before(name: str) -> None:
        if name == "6/checkpoint.json":
            root.watch()
            root.manager.delete(6)

    root.watch(before)
    said = run("prune", root.url, "--keep=last:3", "--dry-run", "--json")
    found = json.loads(said.output)
    assert found["damaged"] == []
    assert 6 not in found["deleted"] + found["kept"]


def test_prune_beside_a_job_that_prunes(tmp_path: Path) -> None:
    """Steps that the job's own keep policy deletes first do not end it."""
    root = Root(tmp_path / "run")
    keeping = CheckpointManager(root.path, keep_policy=KeepLast(3))

    def before(name: str) -> None:
        if name.startswith(f"{COUNT - 1}/"):
            root.watch()
            keeping.save(COUNT, {"w": jnp.ones(8)}, metrics={"loss": 1.0})
            keeping.wait_until_finished()

    root.watch(before)
    with keeping, root.manager:
        run("prune", root.url, "--keep", "last:2")
        assert keeping.all_steps()[-2:] == [COUNT - 1, COUNT]


def test_ls_shows_a_step_that_goes_as_gone(root: Root) -> None:
    def before(name: str) -> None:
        if name == "6/checkpoint.json" and root.listings["6"]:
            root.watch()
            root.manager.delete(6)

    root.watch(before)
    rows = json.loads(run("ls", root.url, "--json").output)["steps"]
    assert {row["state"] for row in rows if row["step"] != 6} == {"whole"}
    assert [row["state"] for row in rows if row["step"] == 6] == ["gone"]
