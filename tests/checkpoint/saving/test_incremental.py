"""Incremental saves: what has not changed is linked, every step is whole by itself, and no pattern
of changes and deletions breaks one.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xxhash
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.checkpoint import (
    CheckpointError,
    CheckpointManager,
    Corrupt,
    KeepAll,
    KeepLast,
    Options,
    Progress,
    SaveFailed,
    UnsupportedLeaf,
    load,
    save,
    verify,
)
from holdfast.checkpoint.format.item_report import FileReport
from holdfast.checkpoint.format.record import read_record
from holdfast.checkpoint.manager_parts import _history_of
from holdfast.checkpoint.saving import incremental
from holdfast.checkpoint.saving.incremental import (
    HEAD_BYTES,
    MAX_LINKS,
    ChunkDigest,
    ChunkFate,
    SaveHistory,
    WrittenFile,
    WrittenPack,
    choose_links,
)
from holdfast.checkpoint.storage.local import LocalStorage
from holdfast.checkpoint.storage.path import open_storage
from holdfast.cli.entry import main
from holdfast.multihost import ClusterGroup
from tests.checkpoint.golden.read import read_chunks
from tests.support.checkpointing import at_once, groups, run_together
from tests.support.failed_arrays import failed_array, forget_failures
from tests.support.libraries import need
from tests.support.object_servers import s3_server
from tests.support.paths import program

_numbers = itertools.count()
FAST = Options(incremental=True, check_free_space=False)


def file(number: int, nbytes: int) -> WrittenFile:
    return WrittenFile(f"1/state/{number}", FileReport(str(number), nbytes + 64, 64, 0), nbytes)


def history(sizes: list[int], where: list[int]) -> WrittenPack:
    files = tuple(file(number, size) for number, size in enumerate(sizes))
    chunks = [
        ChunkFate(file, 0, ChunkDigest(bytes([index]), bytes([index])))
        for index, file in enumerate(where)
    ]
    return WrittenPack(files, tuple(chunks))


def test_files_that_are_half_alive_are_linked() -> None:
    """Half of a file's bytes is enough, less is not, and a file without a living chunk is none of
    it.
    """
    known = history([100, 100, 100], [0, 0, 1, 1, 2])
    assert choose_links(known, [True, False, True, False, False], [50, 50, 49, 51, 100]) == [0]
    assert choose_links(known, [True] * 5, [50, 50, 49, 51, 100]) == [0, 1, 2]
    assert choose_links(known, [False] * 5, [50, 50, 49, 51, 100]) == []


def test_at_most_so_many_files_are_linked() -> None:
    """Of more, those with the most living bytes, from oldest to newest."""
    sizes = [10 + number for number in range(MAX_LINKS + 3)]
    chosen = choose_links(history(sizes, list(range(len(sizes)))), [True] * len(sizes), sizes)
    assert chosen == list(range(3, MAX_LINKS + 3))


def test_a_failure_or_another_plan_begins_anew() -> None:
    """The files of the last committed save of one plan are known; a failed save, or `forget`, ends
    that.
    """

    class Plan:
        hash = "a"

    known = SaveHistory()
    plan = Plan()
    packs = {0: history([1], [0])}
    known.begin("state", plan, packs, {}, linked=False)  # type: ignore[arg-type]
    assert known.of("state", plan).packs == {}  # type: ignore[arg-type]
    known.end(committed=True)
    assert known.of("state", plan).packs == packs and known.is_known  # type: ignore[arg-type]
    plan.hash = "b"
    assert known.of("state", plan).packs == {}  # type: ignore[arg-type]
    plan.hash = "a"
    known.begin("state", plan, packs, {}, linked=True)  # type: ignore[arg-type]
    known.end(committed=False)
    assert known.of("state", plan).packs == {} and not known.is_known  # type: ignore[arg-type]


def state(frozen: int = 0, moving: int = 0) -> dict[str, Any]:
    """Returns 4 MiB that do not change and 64 KiB that do."""
    return {
        "base": jnp.full((1 << 20,), frozen, jnp.float32),
        "lora": jnp.full((1 << 14,), moving, jnp.float32),
        "n": moving,
        "name": "x",
    }


def assert_is(got: Mapping[str, Any], want: Mapping[str, Any]) -> None:
    assert set(got) == set(want)
    for name in want:
        assert np.array_equal(np.asarray(got[name]), np.asarray(want[name])), name


def bytes_in(root: Path) -> int:
    """Returns the bytes that a folder takes, each inode once."""
    found = {
        (path.stat().st_ino, path.stat().st_size) for path in root.rglob("*") if path.is_file()
    }
    return sum(size for _, size in found)


def test_what_has_not_changed_is_linked(tmp_path: Path) -> None:
    """A save writes its 64 KiB and not the 4 MiB beside them; each step restores bit-exact, also
    when the older ones are gone.
    """
    with CheckpointManager(tmp_path, keep_policy=KeepLast(3), options=FAST) as manager:
        for step in range(8):
            manager.save(step, state(7, step))
            manager.wait_until_finished()
            written, linked = (
                manager.statistics()[name] for name in ("save_written_bytes", "save_linked_bytes")
            )
        assert 4.2e6 < written < 5.2e6 and linked == 7 * (4 << 20)
        assert manager.all_steps() == [5, 6, 7]
        for step in (5, 6, 7):
            assert_is(manager.restore(step), state(7, step))
            verify(tmp_path / str(step))
    assert bytes_in(tmp_path) < (4 << 20) + 4 * (64 << 10) + 100_000
    shutil.rmtree(tmp_path / "5")
    shutil.rmtree(tmp_path / "6")
    assert_is(load(tmp_path), state(7, 7))


@pytest.mark.parametrize("size", [1000, HEAD_BYTES, HEAD_BYTES + 1, 3 * HEAD_BYTES + 5])
@pytest.mark.parametrize("changed", [0, -1], ids=["first byte", "last byte"])
def test_a_change_anywhere_in_a_chunk_is_seen(size: int, changed: int, tmp_path: Path) -> None:
    """A byte at either end of a chunk is written anew; the digests made while writing are those
    that the next save compares.
    """
    values = np.random.default_rng(0).integers(0, 255, size, np.uint8)
    written = list[int]()
    with CheckpointManager(tmp_path, options=FAST) as manager:
        for step in range(4):
            values[changed] += step == 2
            manager.save(step, {"w": values})
            manager.wait_until_finished()
            written.append(manager.statistics()["save_written_bytes"])
    assert written[0] == written[1] and written[2] > size + written[1] and written[3] == written[2]
    assert np.array_equal(load(tmp_path / "3")["w"], values) and load(tmp_path / "1")["w"][
        changed
    ] == np.uint8(values[changed] - 1)


def test_names_are_in_the_order_of_age(tmp_path: Path) -> None:
    """Whoever loads all packs of a step in the order of their names, by safetensors alone, gets the
    living values: the last one wins.
    """
    safetensors = need("safetensors.numpy", "make setup")
    with CheckpointManager(tmp_path, options=FAST) as manager:
        for step in range(4):
            manager.save(
                step,
                {
                    "a": np.full(1 << 16, 1.0),
                    "b": np.full(1 << 16, float(step > 1)),
                    "c": np.full(100, float(step)),
                },
            )
            manager.wait_until_finished()
    for step in range(4):
        values: dict[str, Any] = {}
        packs = sorted((tmp_path / str(step) / "state").iterdir())
        for pack in packs:
            values |= safetensors.load_file(pack)
        assert {name: value.reshape(-1)[0] for name, value in values.items()} == {
            "a": 1.0,
            "b": float(step > 1),
            "c": float(step),
        }
    assert len(packs) > 1


def test_every_nth_save_is_whole(tmp_path: Path) -> None:
    """`full_every=3`: no file is shared by more than three steps."""
    with CheckpointManager(tmp_path, options=Options(incremental=True, full_every=3)) as manager:
        for step in range(7):
            manager.save(step, state(1, step))
            manager.wait_until_finished()
    links = [
        max(path.stat().st_nlink for path in (tmp_path / str(step) / "state").iterdir())
        for step in range(7)
    ]
    assert links == [3, 3, 3, 3, 3, 3, 1]


@pytest.mark.parametrize(
    "number", [errno.EMLINK, errno.ENOENT, errno.EXDEV, errno.EPERM, errno.EDQUOT, errno.EIO]
)
def test_what_cannot_be_linked_is_written(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any error of a link, while the bytes are held: the step is whole all the same."""
    with CheckpointManager(tmp_path, options=FAST) as manager:
        manager.save(1, state(7, 1))
        manager.wait_until_finished()

        def link(storage: LocalStorage, source: str, name: str, size: int) -> None:
            raise OSError(number, os.strerror(number))

        with monkeypatch.context() as patch:
            patch.setattr(LocalStorage, "link", link)
            manager.save(2, state(7, 2))
            manager.wait_until_finished()
        assert manager.statistics()["save_linked_bytes"] == 0
        # The sweep of the opening, where it is late, may remove a folder that is empty already.
        shutil.rmtree(tmp_path / "1", ignore_errors=True)
        assert_is(manager.restore(2), state(7, 2))
        manager.save(3, state(7, 3))
        manager.wait_until_finished()
        assert manager.statistics()["save_linked_bytes"] == 4 << 20
    verify(tmp_path)


def test_a_link_reported_as_failed_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a file was linked and its answer lost, the step has no file that its record does not
    name.
    """
    with CheckpointManager(tmp_path, options=FAST) as manager:
        manager.save(1, state(7, 1)).wait()
        real = LocalStorage.link

        def link(storage: LocalStorage, source: str, name: str, size: int) -> None:
            real(storage, source, name, size)
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        with monkeypatch.context() as patch:
            patch.setattr(LocalStorage, "link", link)
            manager.save(2, state(7, 2)).wait()
        assert_is(manager.restore(2), state(7, 2))
    named = read_record(LocalStorage(tmp_path), "2").file_names()
    assert [f"state/{path.name}" for path in (tmp_path / "2/state").iterdir()] == named


def test_a_leaf_that_fails_leaves_no_links(tmp_path: Path) -> None:
    """What was linked for a save that does not begin goes, and the next save is whole."""
    with CheckpointManager(tmp_path, options=FAST) as manager:
        manager.save(1, state(7, 1)).wait()
        failing = state(7, 2) | {"lora": failed_array((1 << 14,))}
        with pytest.raises(SaveFailed, match="'lora' failed"):
            manager.save(2, failing).wait()
        forget_failures()
        assert not (tmp_path / "2").exists()
        manager.save(3, state(7, 3)).wait()
    verify(tmp_path)


def test_the_older_step_may_go_at_any_time(tmp_path: Path) -> None:
    """A step that somebody deleted by hand is no loss: what it had is written again."""
    with CheckpointManager(tmp_path, options=FAST) as manager:
        for step in range(4):
            manager.save(step, state(7, step))
            manager.wait_until_finished()
            shutil.rmtree(tmp_path / str(step - 1), ignore_errors=True)
            if step == 2:
                shutil.rmtree(tmp_path / "2/state")
        assert_is(manager.restore(3), state(7, 3))
    verify(tmp_path)


def test_a_damaged_file_is_not_called_whole(tmp_path: Path) -> None:
    """A shared file that was cut short meanwhile is not linked; one that rotted is Corrupt in every
    step that has it.
    """
    with CheckpointManager(tmp_path, options=FAST) as manager:
        manager.save(1, state(7, 1))
        manager.wait_until_finished()
        for pack in (tmp_path / "1/state").iterdir():
            os.truncate(pack, pack.stat().st_size - 1)
        manager.save(2, state(7, 2))
        manager.wait_until_finished()
        assert_is(manager.restore(2), state(7, 2))


def flip(folder: Path) -> None:
    """Changes one byte of the largest pack of a step."""
    pack = max((folder / "state").iterdir(), key=lambda path: path.stat().st_size)
    data = bytearray(pack.read_bytes())
    data[len(data) // 2] ^= 1
    with pack.open("r+b") as file:  # also under its other names
        file.write(data)


@pytest.mark.parametrize("fallback", [False, True])
def test_what_a_restore_finds_damaged_is_not_linked(fallback: bool, tmp_path: Path) -> None:
    """The next save writes everything, whether the restore raised or passed over the step."""
    with CheckpointManager(tmp_path, options=FAST) as manager:
        for step in (1, 2):
            manager.save(step, state(step, step))
            manager.wait_until_finished()
        flip(tmp_path / "2")
        if fallback:
            assert_is(manager.restore(fallback=True), state(1, 1))
        else:
            with pytest.raises(Corrupt):
                manager.restore()
        step = 2 if fallback else 3
        manager.save(step, state(2, step))
        manager.wait_until_finished()
        assert_is(manager.restore(step), state(2, step))


def test_damage_that_a_restore_finds_while_a_save_links(tmp_path: Path) -> None:
    """The save in flight has what it linked; the next one writes everything."""
    begun = threading.Event()
    found = threading.Event()

    def pause(progress: Progress) -> None:
        if progress.step == 3:
            begun.set()
            assert found.wait(60)

    options = Options(incremental=True, check_free_space=False, progress=pause)
    with CheckpointManager(tmp_path, options=options) as manager:
        for step in (1, 2):
            manager.save(step, state(7, step))
            manager.wait_until_finished()
        flip(tmp_path / "1")
        manager.save(3, state(7, 3))
        assert begun.wait(60)
        with pytest.raises(Corrupt):
            manager.restore(1)
        found.set()
        manager.save(4, state(7, 4))
        manager.wait_until_finished()
        assert_is(manager.restore(4), state(7, 4))


def test_a_store_without_links_is_refused(tmp_path: Path) -> None:
    """Buckets that do not say when a copy is done, and folders with the promise of a single writer:
    said at the opening.
    """
    for url in ("gs://bucket/run", "az://bucket/run?use_emulator=true"):
        with pytest.raises(CheckpointError, match="it has neither hard links nor copies"):
            _history_of(open_storage(url), FAST)
    with pytest.raises(CheckpointError, match="it has neither hard links nor copies"):
        CheckpointManager(tmp_path, options=Options(incremental=True, single_writer=True))
    with pytest.raises(ValueError, match="full_every"):
        Options(full_every=3)


class _Network:
    """What goes over the network to a server: a WSGI application before it."""

    def __init__(self) -> None:
        self.sent_bytes = 0
        self.copies = 0
        self.refuses_copies = False

    def around(self, application: Any) -> Any:
        def counted(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
            self.sent_bytes += int(environ.get("CONTENT_LENGTH") or 0)
            if "HTTP_X_AMZ_COPY_SOURCE" in environ:
                self.copies += 1
                if self.refuses_copies:
                    start_response("403 Forbidden", [("Content-Type", "application/xml")])
                    return [b"<Error><Code>AccessDenied</Code></Error>"]
            answer: Iterable[bytes] = application(environ, start_response)
            return answer

        return counted


def test_on_a_bucket_what_has_not_changed_is_copied_there() -> None:
    """Over the network go the 64 KiB that changed, and at most 1 MiB more; each step is whole by
    itself, also when those before it are gone.
    """
    network = _Network()
    with s3_server(around=network.around) as query:
        url = f"s3://bucket/incremental{query}"
        with CheckpointManager(url, keep_policy=KeepLast(1), options=FAST) as manager:
            for step in range(4):
                network.sent_bytes = 0
                manager.save(step, state(moving=step)).wait()
                assert (network.sent_bytes > 4 << 20) == (step == 0)
                if step:
                    assert network.sent_bytes < (64 << 10) + (1 << 20)
                    assert network.copies >= step
                assert_is(manager.restore(step), state(moving=step))
            manager.wait_until_finished()
            assert manager.all_steps() == [3]
            counted = manager.statistics()
            assert counted["save_linked_bytes"] >= 3 * (4 << 20)
        verify(f"s3://bucket/incremental/3{query}")


@pytest.mark.parametrize("why", ["gone", "refused"])
def test_what_cannot_be_copied_is_written(why: str) -> None:
    """A pack that somebody has deleted, and a key that may not copy: the step is whole all the
    same.
    """
    network = _Network()
    with s3_server(around=network.around) as query:
        url = f"s3://bucket/not-copied/{why}{query}"
        with CheckpointManager(url, keep_policy=KeepAll(), options=FAST) as manager:
            manager.save(0, state()).wait()
            if why == "gone":
                storage = open_storage(url)
                storage.delete([entry.name for entry in storage.list("0", recursive=True)])
            else:
                network.refuses_copies = True
            manager.save(1, state(moving=1)).wait()
            assert network.copies
            assert manager.statistics()["save_linked_bytes"] == 0
            assert_is(manager.restore(1), state(moving=1))
        verify(f"s3://bucket/not-copied/{why}/1{query}")


@settings(max_examples=12, deadline=None)
@given(
    st.lists(
        st.tuples(st.sets(st.integers(0, 5)), st.sampled_from(["", "older", "all"])),
        min_size=2,
        max_size=6,
    )
)
def test_any_pattern_of_changes_and_deletions_in_a_bucket(
    saves: list[tuple[set[int], str]],
) -> None:
    """Leaves change, steps are deleted behind the manager's back: every step that is there
    restores bit-exact.
    """
    url = f"memory://incremental/{next(_numbers)}"
    storage = open_storage(url)
    values = [0] * 6
    expected: dict[int, list[int]] = {}
    with CheckpointManager(url, keep_policy=KeepAll(), options=FAST) as manager:
        for step, (changed, deleted) in enumerate(saves):
            for leaf in changed:
                values[leaf] += 1
            tree = {str(leaf): np.full(300_000, values[leaf], np.float32) for leaf in range(6)}
            manager.save(step, tree).wait()
            expected[step] = list(values)
            for gone in [known for known in expected if deleted == "all" or known < step]:
                if deleted:
                    files = storage.list(str(gone), recursive=True)
                    storage.delete([entry.name for entry in files])
                    del expected[gone]
        assert manager.all_steps() == sorted(expected)
        for step, numbers in expected.items():
            got = manager.restore(step)
            assert [set(got[str(leaf)]) for leaf in range(6)] == [{number} for number in numbers]


def test_a_file_is_never_written_over(tmp_path: Path) -> None:
    """Writing to a name that is there gives it another file: whoever has the first one under
    another name keeps it.
    """
    storage = LocalStorage(tmp_path)
    storage.write("1/a", 3, [(0, [memoryview(b"one")])])
    storage.link("1/a", "2/a", 3)
    storage.write("1/a", 3, [(0, [memoryview(b"two")])])
    assert ((tmp_path / "1/a").read_bytes(), (tmp_path / "2/a").read_bytes()) == (b"two", b"one")


LEAVES = 12
Change = tuple[frozenset[int], int]


@settings(max_examples=12, deadline=None)
@given(
    changes=st.lists(st.frozensets(st.integers(0, LEAVES - 1)), min_size=2, max_size=12),
    keep=st.sampled_from([KeepAll(), KeepLast(1), KeepLast(3)]),
    doomed=st.frozensets(st.integers(0, 11), max_size=4),
    full_every=st.sampled_from([None, 2, 5]),
)
def test_any_pattern_of_changes_and_deletions(
    changes: list[frozenset[int]],
    keep: Any,
    doomed: frozenset[int],
    full_every: int | None,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Every step that is listed restores bit-exact, and the folder has at most twice what lives and
    what came last.
    """
    root = tmp_path_factory.mktemp("root")
    values = {f"l{leaf}": np.arange(100.0 * (leaf + 1)) for leaf in range(LEAVES)}
    states = {}
    with CheckpointManager(
        root, keep_policy=keep, options=Options(incremental=True, full_every=full_every)
    ) as manager:
        for step, changed in enumerate(changes):
            values = {
                name: value + 1 if int(name[1:]) in changed else value
                for name, value in values.items()
            }
            states[step] = values
            manager.save(step, values)
            manager.wait_until_finished()
            if step in doomed and len(manager.all_steps()) > 1:
                manager.delete(manager.all_steps()[0])
        steps = manager.all_steps()
        for step in steps:
            assert_is(manager.restore(step), states[step])
    size = sum(value.nbytes for value in values.values())
    for step in steps:
        verify(root / str(step))
        assert (
            sum(path.stat().st_size for path in (root / str(step) / "state").iterdir())
            <= 2 * size + 100_000
        )
    shutil.rmtree(root)


def test_one_shot_saves_and_other_managers_write_everything(tmp_path: Path) -> None:
    """A new opening writes everything, and its steps and those before are whole alike."""
    for step in (1, 2):
        with CheckpointManager(tmp_path / "root", options=FAST) as manager:
            manager.save(step, state(7, step))
            manager.wait_until_finished()
            assert manager.statistics()["save_linked_bytes"] == 0
    with CheckpointManager(tmp_path / "root") as manager:
        assert_is(manager.restore(1), state(7, 1))
        manager.save(3, state(7, 3))
    save(tmp_path / "one", state(7, 4))
    assert_is(load(tmp_path / "one"), state(7, 4))


def test_the_tools_take_such_steps(tmp_path: Path) -> None:
    """`ls` tells a step's size from what deleting it frees; `cp`, `convert`, `diff`, `verify`,
    `prune` and `sweep` take it as any other.
    """
    root = str(tmp_path / "root")
    with CheckpointManager(root, options=FAST) as manager:
        for step in range(4):
            manager.save(step, state(7, step))
            manager.wait_until_finished()

    def run(*words: str) -> Any:
        found = CliRunner().invoke(main, list(words))
        assert found.exit_code == 0, found.output
        return found.output

    rows = json.loads(run("ls", root, "--json"))["steps"]
    assert all(row["bytes"] > 4 << 20 > row["frees_bytes"] for row in rows) and "frees" in run(
        "ls", root
    )
    run("verify", root)
    run("cp", f"{root}/3", str(tmp_path / "copy/3"))
    run("convert", f"{root}/3", str(tmp_path / "st"), "--to", "safetensors")
    run("convert", f"{root}/3", str(tmp_path / "again"), "--to", "holdfast")
    run("prune", root, "--keep", "last:1")
    run("sweep", root)
    for path in (root, str(tmp_path / "copy/3"), str(tmp_path / "again")):
        assert_is(load(path), state(7, 3))
        verify(path)
    assert bytes_in(tmp_path / "root") < (4 << 20) + (256 << 10)


def test_two_processes_each_know_their_own(tmp_path: Path) -> None:
    """A group saves incrementally: each process links what it wrote, and one whose history is gone
    writes everything.
    """
    run_together(
        program("incremental_two_processes_each_know"),
        2,
        tmp_path,
    )
    verify(tmp_path)


def test_a_tree_without_chunks_is_saved(tmp_path: Path) -> None:
    """Python values alone have no chunk: their item is saved again and again, beside another."""
    with CheckpointManager(tmp_path, options=FAST) as manager:
        for step in range(3):
            manager.save(step, items={"values": {"n": step, "name": "x"}, "state": state(7, step)})
            manager.wait_until_finished()
        assert manager.statistics()["save_linked_bytes"] == 2 * (4 << 20)
    for step in range(3):
        assert load(tmp_path / str(step), item="values") == {"n": step, "name": "x"}
        assert_is(load(tmp_path / str(step), item="state"), state(7, step))


def test_a_process_without_chunks_saves(tmp_path: Path) -> None:
    """The first process writes what all have. The other writes nothing, and the step is saved."""

    def saves(group: ClusterGroup) -> list[int]:
        with CheckpointManager(tmp_path, group=group, options=FAST) as manager:
            for step in range(3):
                manager.save(step, {"base": np.full(1 << 14, 7.0), "n": np.array(step)})
                manager.wait_until_finished()
            return manager.all_steps()

    with groups(2) as both:
        found = at_once([lambda group=group: saves(group) for group in both])  # type: ignore[misc]
    assert found == [[0, 1, 2]] * 2
    for step in range(3):
        assert load(tmp_path / str(step))["n"] == step
        assert len([*(tmp_path / str(step)).glob("state/00001-*")]) == 0


@pytest.fixture
def on_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets arrays on the CPU pass for such whose memory is nobody else's; they are made by jit
    here, so that this is true.
    """
    monkeypatch.setattr(incremental, "never_changes", lambda leaf: isinstance(leaf, jax.Array))


@pytest.mark.usefixtures("on_an_accelerator")
def test_a_tree_that_has_lost_leaves_is_saved(tmp_path: Path) -> None:
    """An array of the last save is looked for by its place among the leaves, where there is one."""
    weight, bias = (jax.jit(lambda n=n: jnp.full((1 << 14,), n))() for n in range(2))
    with CheckpointManager(tmp_path, options=FAST) as manager:
        manager.save(0, {"bias": bias, "weight": weight})
        manager.save(1, {"bias": bias})
        manager.wait_until_finished()
        assert manager.restore(1)["bias"].tolist() == bias.tolist()


@pytest.mark.usefixtures("on_an_accelerator")
def test_the_same_array_is_not_even_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves that are the objects of the last save are linked before `save` returns: no chunk of
    theirs is taken or hashed.
    """
    frozen = [jax.jit(lambda n=n: jnp.full((1 << 18,), n, jnp.float32))() for n in range(4)]
    hashed: list[int] = []

    def digest(data: memoryview) -> bytes:
        hashed.append(data.nbytes)
        return xxhash.xxh3_128_digest(data)

    class Running:
        def __init__(self) -> None:
            self._hash = xxhash.xxh3_128()
            self.digest = self._hash.digest

        def update(self, data: memoryview) -> None:
            hashed.append(data.nbytes)
            self._hash.update(data)

    monkeypatch.setattr(
        incremental,
        "load_digest",
        lambda: SimpleNamespace(xxh3_128_digest=digest, xxh3_128=Running),
    )
    with CheckpointManager(tmp_path, keep_policy=KeepLast(2), options=FAST) as manager:
        for step in range(5):
            moving = jax.jit(lambda: jnp.full((1 << 14,), step, jnp.float32))()  # noqa: B023
            hashed.clear()
            manager.save(step, {"frozen": frozen, "moving": moving})
            manager.wait_until_finished()
            assert sum(hashed) == (128 << 10 if step else (4 << 20) + (64 << 10)), (
                "to be compared, and as it is written"
            )
        assert manager.statistics()["save_linked_bytes"] >= 4 * (4 << 20)
        for step in (3, 4):
            got = manager.restore(step)
            assert (
                all((got["frozen"][n] == n).all() for n in range(4))
                and (got["moving"] == step).all()
            )
            verify(tmp_path / str(step))


@pytest.mark.usefixtures("on_an_accelerator")
def test_what_cannot_be_linked_at_once_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file of an unmoved leaf is gone: its bytes are taken there and then, and the caller may
    donate it afterwards.
    """
    frozen = jax.jit(lambda: jnp.arange(1 << 18, dtype=jnp.float32))()
    with CheckpointManager(tmp_path, options=FAST) as manager:
        manager.save(1, {"frozen": frozen})
        manager.wait_until_finished()
        with pytest.raises(UnsupportedLeaf):  # the links of the first item are taken back
            manager.save(2, items={"state": {"frozen": frozen}, "bad": {"f": object()}})
        assert not (tmp_path / "2").exists()
        shutil.rmtree(tmp_path / "1")
        manager.save(2, {"frozen": frozen})
        frozen = jax.jit(lambda x: x + 1, donate_argnums=0)(frozen)
        manager.wait_until_finished()
        assert (manager.restore(2)["frozen"] == np.arange(1 << 18)).all()


def test_memory_that_numpy_may_change_is_hashed(tmp_path: Path) -> None:
    """A jax.Array on the CPU may be a view of a numpy array: the same object with other values is
    saved as it is then.
    """
    values = np.zeros(1 << 18, np.float32)
    array = jnp.asarray(values)
    with CheckpointManager(tmp_path, options=FAST) as manager:
        for step in (1, 2):
            values[:] = step
            manager.save(step, {"a": array})
            manager.wait_until_finished()
            assert (manager.restore(step)["a"] == np.asarray(array)).all()


def test_the_first_versions_reader_takes_such_steps(tmp_path: Path) -> None:
    """Read by the format's first reader, file after file, each step has the living values."""
    with CheckpointManager(tmp_path, options=FAST) as manager:
        for step in range(4):
            manager.save(
                step,
                {
                    "a": np.full(1 << 16, 1.0),
                    "b": np.full(1 << 15, float(step > 1)),
                    "c": np.full(100, float(step)),
                },
            )
            manager.wait_until_finished()
    for step in range(4):
        chunks = read_chunks(tmp_path / str(step), "state")
        assert {name: np.frombuffer(data)[0] for name, data in chunks.items()} == {
            "a": 1.0,
            "b": float(step > 1),
            "c": float(step),
        }
