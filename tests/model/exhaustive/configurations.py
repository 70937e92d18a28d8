"""What is searched: for each configuration what has come before, who runs, and what may fail."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.checkpoint import Json, KeepLast, save
from holdfast.checkpoint.layouts.base import CheckpointReader
from holdfast.checkpoint.layouts.detect import open_checkpoint
from holdfast.checkpoint.steps import file_lock, object_claims
from holdfast.checkpoint.steps.holds import take_hold
from holdfast.checkpoint.storage.base import Storage
from holdfast.checkpoint.storage.local import LocalStorage
from tests.model.promise import Broken
from tests.support.garbage import freeze

from .bucket import REFUSED_AFTER, ModelBucket, Objects
from .disk import AFTER, BEFORE, LATE, NOT_FOUND, Disk, memory_folder, observed_calls
from .hosts import HostSaver, check_hosts, modelled_peers
from .messages import TIMES_OUT, ModelGroup, Post
from .programs import Manager, convert_into, read_held, read_newest, read_step, sweep
from .rules import BOUNDED, FAILED, HELD, LIVES, ONE_MEANING, SAVED, Began
from .scheduler import Chooser, Run
from .search import Choice, Replay, Search
from .story import tell
from .world import Faults, World, letters, repeatable


class Scene:
    """One execution before it begins: its world, and its store."""

    def __init__(self, world: World, kind: str, folder: str, source: CheckpointReader) -> None:
        self.world = world
        self.source = source
        self._kind = kind
        self._folder = folder
        self._objects = Objects()
        self._kept: list[Manager] = []  # a manager that nobody holds lets its lock go, unscheduled
        if kind == "folder":
            os.makedirs(f"{folder}/root")
            world.run.disk = Disk(world, folder)

    def storage(self) -> Storage:
        """Returns the store as one more process opens it."""
        if self._kind == "folder":
            return LocalStorage(f"{self._folder}/root")
        return ModelBucket(self.world, self._objects)

    def manager(self, process: str, **more: Any) -> Manager:
        """Returns a manager that was opened before all else."""
        made: Manager = self.world.serially(
            process, lambda: Manager(self.world, self.storage(), **more)
        )
        return self.keep(made)

    def keep(self, manager: Manager) -> Manager:
        """Keeps a manager until the execution has ended."""
        self._kept.append(manager)
        return manager

    def serially(self, process: str, work: Callable[[], Any]) -> Any:
        """Does what a process has done before all else."""
        return self.world.serially(process, work)

    def group_managers(self, names: str, **more: Any) -> dict[str, Manager]:
        """Returns the managers of a group, one a process, that were opened before all else."""
        post = Post(self.world, names)
        groups = [ModelGroup(post, index) for index in range(len(names))]
        made: dict[str, Manager] = self.world.together(
            {
                name: lambda group=group: Manager(  # type: ignore[misc]
                    self.world, self.storage(), group=group, **more
                )
                for name, group in zip(names, groups, strict=True)
            }
        )
        self._kept.extend(made.values())
        return made

    def host_savers(self, names: str) -> dict[str, HostSaver]:
        """Returns who saves on hosts, each on one of its own; local step 1 is there."""
        managers = self.group_managers(names, has_hosts=True)
        folders = [Path(self._folder) / name for name in names]
        savers = {
            name: HostSaver(self.world, folder, managers[name], names)
            for name, folder in zip(names, folders, strict=True)
        }
        for name, folder in zip(names, folders, strict=True):
            folder.mkdir()
            self.world.losses[name] = functools.partial(shutil.rmtree, folder)
        self.world.last_checks.append(
            lambda: check_hosts(self.world, list(savers.values()), folders, self.storage())
        )
        works = {name: functools.partial(saver.save, 1) for name, saver in savers.items()}
        self.world.together(works)
        return savers

    def add(self, process: str, work: Callable[[], object]) -> None:
        """Adds a process."""
        self.world.add(process, work)


@dataclass(frozen=True)
class Configuration:
    """A search that comes to an end. `prepare` sets a scene."""

    name: str
    store: str
    prepare: Callable[[Scene], None]
    faults: Mapping[str, Faults] = field(default_factory=dict)
    # Who has come to a step of this label already.
    first: tuple[str, str] = ("", "")
    # Who leaves the files of a save that failed to a sweep.
    leaves_files: frozenset[str] = frozenset()
    is_large: bool = False
    most_executions: int = 200_000
    most_s: float = 600.0

    @property
    def bounds(self) -> str:
        """What is searched of all that could be, in words."""
        told = [f"`{who}`: {faults}" for who, faults in self.faults.items()]
        if self.first[0]:
            told.insert(0, f"from where `{self.first[0]}` comes to `{self.first[1].strip()}`")
        told += [f"`{who}` leaves its files to the sweep" for who in sorted(self.leaves_files)]
        return "; ".join(told) or "no faults"


class Searcher:
    """Searches configurations, one after the other, in a folder of its own."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._numbers = itertools.count()
        # What a conversion reads: its value has the id that the first save of `c` has.
        items = {"state": Json([letters("c", 8, 1), 0]), "weights": np.arange(3.0)}
        save(f"{folder}/source", items=items, step=5)
        self._source = open_checkpoint(f"{folder}/source")

    def world(self, configuration: Configuration, chooser: Chooser) -> World:
        """Returns a fresh execution."""
        folder = f"{self._folder}/{next(self._numbers)}"
        world = World(chooser, configuration.faults)
        world.run.folder = folder  # type: ignore[attr-defined]
        scene = Scene(world, configuration.store, folder, self._source)
        world.run.scene = scene  # type: ignore[attr-defined]
        try:
            configuration.prepare(scene)
            world.first = configuration.first
            world.leaves_files.update(configuration.leaves_files)
        except Broken as error:
            world.run.violate(error)
        return world

    def story(
        self, configuration: Configuration, choices: Sequence[Choice], violation: Exception
    ) -> str:
        """Returns an execution as a story, which ends with what is wrong."""
        world = self.world(configuration, Replay(choices))
        if not world.run.is_over:
            world.run.execute()
        self.end(world.run)
        return f"{configuration.name}\n{tell(world.story)}\n{violation}"

    def search(
        self, configuration: Configuration, *, shortest_within_s: float = 0.0
    ) -> tuple[Search, Exception | None]:
        """Returns the search once it has finished, and its first violation. Raises TooLarge."""
        counts: dict[str, int] = {}
        search = Search(
            lambda chooser: self.world(configuration, chooser).run,
            lambda run: self.end(run, counts),
            most_executions=configuration.most_executions,
            most_s=configuration.most_s,
        )
        search.counts = counts
        return search, search.run(shortest_within_s=shortest_within_s)

    def end(self, run: Run, counts: dict[str, int] | None = None) -> None:
        """Judges an execution that is over, and forgets its files."""
        world: World = run.world  # type: ignore[attr-defined]
        counts = {} if counts is None else counts
        for what, count in world.counts.items():
            counts[what] = counts.get(what, 0) + count
        try:
            if run.violation is not None:
                return
            waiting = [task.name for task in run.unfinished()]
            if waiting:
                raise Broken(BOUNDED, f"{', '.join(waiting)} waits, and nothing will come")
            self._look_again(world)
            world.serially("later", lambda: [check() for check in world.last_checks])
            world.judge.finish()
        except Broken as error:
            run.violate(error)
        finally:
            self._clear(run)

    @staticmethod
    def _clear(run: Run) -> None:
        for lock in list(file_lock._open_locks):
            lock.close()
        folder: str = run.folder  # type: ignore[attr-defined]
        shutil.rmtree(folder, ignore_errors=True)

    def _look_again(self, world: World) -> None:
        """Restores each step that is there, once all has ended."""
        scene: Scene = world.run.scene  # type: ignore[attr-defined]

        def read_all() -> None:
            world.effect(Began("later"))
            storage = scene.storage()
            for folder in list(world.judge.records):
                read_step(world, storage, int(folder))

        # What an execution was cut off in is over; the reader comes after it.
        world.run.is_over = False
        world.serially("later", read_all)


@contextlib.contextmanager
def searcher() -> Iterator[Searcher]:
    """Yields what searches; meanwhile tasks go on one at a time."""
    object_claims._honour_conditions.add("model://bucket?")
    logging.disable(logging.WARNING)  # of saves that fail there are thousands
    freeze()  # what jax has made is many times more than what an execution makes
    try:
        with memory_folder() as folder, repeatable(), observed_calls(), modelled_peers():
            yield Searcher(str(folder))
    finally:
        logging.disable(logging.NOTSET)


# --- the configurations


def _two_writers(scene: Scene) -> None:
    first = scene.manager("a")
    second = scene.manager("b")
    scene.add("a", lambda: first.save(5))
    scene.add("b", lambda: second.save(5))


def _conversion_and_save(scene: Scene) -> None:
    writer = scene.manager("a")
    scene.add("c", lambda: convert_into(scene.world, scene.source, scene.storage()))
    scene.add("a", lambda: writer.save(5))


def _conversion_and_sweep(scene: Scene) -> None:
    told: list[str] = []

    def convert_it() -> None:
        told.append(convert_into(scene.world, scene.source, scene.storage()))

    def check() -> None:
        if told != [SAVED]:
            raise Broken(LIVES, f"a conversion beside a sweep is told as {told}")

    scene.add("c", convert_it)
    scene.add("s", lambda: sweep(scene.storage()))
    scene.world.last_checks.append(check)


def _writer_and_sweep(scene: Scene) -> None:
    writer = scene.manager("a")
    scene.add("a", lambda: writer.save(5))
    scene.add("s", lambda: sweep(scene.storage()))

    def check() -> None:
        if "a" not in scene.world.run.dead and writer.told != [SAVED]:
            raise Broken(LIVES, f"a save beside a sweep is told as {writer.told}")

    scene.world.last_checks.append(check)


def _opening_and_sweep(scene: Scene) -> None:
    told: list[str] = []

    def save() -> None:
        told.append(scene.keep(Manager(scene.world, scene.storage())).save(5))

    def check() -> None:
        if told != [SAVED]:
            raise Broken(LIVES, f"a save beside a sweep is told as {told}")

    scene.add("a", save)
    scene.add("s", lambda: sweep(scene.storage()))
    scene.world.last_checks.append(check)


def _fenced_writer(scene: Scene) -> None:
    writer = scene.manager("a")
    scene.serially("a", lambda: writer.save(4))
    scene.add("a", lambda: writer.save(5))
    scene.add("s", lambda: sweep(scene.storage(), force=True))

    def check() -> None:
        how = writer.save(6)
        if how != FAILED:
            raise Broken(ONE_MEANING, f"the fenced writer's next save is told as {how}")

    scene.world.last_checks.append(check)


def _writer_and_successor(scene: Scene) -> None:
    """A writer that is taken for dead, and one that saves the same step after it."""
    writer = scene.manager("a")
    successor = scene.manager("b")

    def succeed() -> None:
        sweep(scene.storage(), force=True, spares=successor.id)
        successor.save(5)

    scene.add("a", lambda: writer.save(5))
    scene.add("b", succeed)


def _writer_and_reader(scene: Scene) -> None:
    writer = scene.manager("a")
    scene.serially("a", lambda: writer.save(4))
    scene.add("a", lambda: writer.save(5))
    scene.add("r", lambda: read_newest(scene.world, scene.storage()))


def _retention_and_hold(scene: Scene) -> None:
    writer = scene.manager("a", keep=KeepLast(1))
    scene.serially("a", lambda: writer.save(4))
    scene.add("a", lambda: writer.save(5))
    scene.add("r", lambda: read_held(scene.world, scene.storage(), 4))


def _retention_and_sweep(scene: Scene) -> None:
    """What a writer that died was about to delete can be held once it was swept."""
    writer = scene.manager("a", keep=KeepLast(1))
    scene.serially("a", lambda: writer.save(4))
    scene.add("a", lambda: writer.save(5))
    scene.add("s", lambda: sweep(scene.storage()))

    def check() -> None:
        storage = scene.storage()
        sweep(storage, force=True)
        for folder in scene.world.judge.records:
            if not take_hold(storage, int(folder), folder, 60.0):
                raise Broken(HELD, f"step {folder} is there, and cannot be held")

    scene.world.last_checks.append(check)


def _retention_hold_and_sweep(scene: Scene) -> None:
    _retention_and_sweep(scene)
    scene.add("r", lambda: read_held(scene.world, scene.storage(), 4))


def _overwrite_and_reader(scene: Scene) -> None:
    writer = scene.manager("a")
    scene.serially("a", lambda: writer.save(5))
    scene.add("a", lambda: writer.save(5, overwrite=True))
    scene.add("r", lambda: read_newest(scene.world, scene.storage()))


def back_and_on(scene: Scene) -> None:
    """A writer goes back and saves on, beside an evaluator."""
    writer = scene.manager("a")

    def before() -> None:
        writer.save(4)
        writer.save(6)
        writer.went_back_to(4)

    scene.serially("a", before)
    scene.add("a", lambda: writer.save(5))
    scene.add("r", lambda: read_newest(scene.world, scene.storage()))


def _group(scene: Scene) -> None:
    managers = scene.group_managers("ab")
    for process, manager in managers.items():
        scene.add(process, lambda manager=manager: manager.save(5))  # type: ignore[misc]


def local_saves(scene: Scene) -> None:
    """Two hosts save a local step."""
    savers = scene.host_savers("ab")
    for process, saver in savers.items():
        scene.add(process, lambda saver=saver: saver.save(2))  # type: ignore[misc]


ON_DISK = frozenset({BEFORE, AFTER, LATE, NOT_FOUND})
IN_BUCKET = frozenset({BEFORE, AFTER, LATE, REFUSED_AFTER})
DIES = Faults(crashes=True)


def _in(store: str, name: str, prepare: Callable[[Scene], None], **more: Any) -> Configuration:
    """Returns a configuration in a folder or a bucket."""
    kinds = ON_DISK if store == "folder" else IN_BUCKET
    faults: Mapping[str, Faults] = more.pop("faults", {})
    return Configuration(
        f"{name}, in a {store}",
        store,
        prepare,
        faults={
            who: each if each.kinds else replace(each, kinds=kinds) for who, each in faults.items()
        },
        **more,
    )


def _both(
    name: str, prepare: Callable[[Scene], None], *, large: Sequence[str] = (), **more: Any
) -> list[Configuration]:
    """Returns a configuration in a folder and one in a bucket."""
    return [
        _in(store, name, prepare, is_large=store in large, **more) for store in ("folder", "bucket")
    ]


# The one call that makes the step exist, and the reads that settle what became of it.
ONE_ERROR = Faults(most=1, where=("link ", "put if unchanged", "rename "))
ANY_ERROR = Faults(most=1)
COMMITS = ("a", "link ")  # its record waits in its claim
DECIDES = ("a", " .holdfast/holds")  # its step is committed
CONFIGURATIONS = (
    *_both("two writers of one step", _two_writers),
    *_both("two writers of one step, one dies", _two_writers, faults={"a": DIES}, large=["folder"]),
    *_both(
        "two writers of one step, one error",
        _two_writers,
        faults={"a": ONE_ERROR},
        large=["folder"],
    ),
    *_both("a conversion beside a save", _conversion_and_save, large=["folder"]),
    _in(
        "bucket",
        "a conversion beside a save, it dies",
        _conversion_and_save,
        faults={"c": DIES},
        is_large=True,
    ),
    _in(
        "bucket",
        "a conversion beside a save, one error",
        _conversion_and_save,
        faults={"c": ONE_ERROR},
    ),
    _in("bucket", "a conversion beside a sweep", _conversion_and_sweep),
    _in(
        "folder",
        "a conversion as it commits, beside a sweep",
        _conversion_and_sweep,
        first=("c", "link "),
        is_large=True,
    ),
    *_both("a writer and a sweep", _writer_and_sweep),
    *_both(
        "a writer and a sweep, the writer dies",
        _writer_and_sweep,
        faults={"a": DIES},
        large=["folder"],
    ),
    *_both("an opening and a save, beside a sweep", _opening_and_sweep, large=["folder"]),
    _in("bucket", "a writer that is fenced and wakes", _fenced_writer),
    _in(
        "folder",
        "a writer that is fenced as it commits",
        _fenced_writer,
        first=COMMITS,
        is_large=True,
    ),
    _in("bucket", "a writer that is fenced, one error", _fenced_writer, faults={"a": ONE_ERROR}),
    _in(
        "folder",
        "a link that lands late, beside a sweep",
        _fenced_writer,
        first=COMMITS,
        leaves_files=frozenset("a"),
        faults={"a": Faults(frozenset({LATE}), most=1, where=("link ",), always=True)},
        is_large=True,
    ),
    _in("bucket", "a writer and its successor", _writer_and_successor),
    _in(
        "bucket",
        "a writer and its successor, one error",
        _writer_and_successor,
        faults={"a": ONE_ERROR},
    ),
    _in(
        "folder",
        "a writer as it commits, and its successor",
        _writer_and_successor,
        first=COMMITS,
        leaves_files=frozenset("a"),
        is_large=True,
    ),
    *_both(
        "a commit with an unknown answer, and a reader", _writer_and_reader, faults={"a": ONE_ERROR}
    ),
    *_both("retention and a reader's hold", _retention_and_hold, large=["folder"]),
    *_both(
        "a policy as it lets go, and a hold, one error",
        _retention_and_hold,
        first=DECIDES,
        faults={"a": Faults(most=1, where=("holds",))},
        large=["folder"],
    ),
    _in(
        "folder",
        "a policy as it lets go, and a sweep, the writer dies",
        _retention_and_sweep,
        first=DECIDES,
        faults={"a": DIES},
        is_large=True,
    ),
    _in(
        "bucket",
        "a policy as it lets go, a hold and a sweep, the writer dies",
        _retention_hold_and_sweep,
        first=DECIDES,
        faults={"a": DIES},
        is_large=True,
    ),
    *_both("overwrite and a reader", _overwrite_and_reader),
    *_both("overwrite and a reader, one error", _overwrite_and_reader, faults={"a": ONE_ERROR}),
    *_both("going back and saving on, beside an evaluator", back_and_on),
    *_both(
        "going back and saving on, the writer dies",
        back_and_on,
        faults={"a": DIES},
        large=["folder"],
    ),
    *_both("a group of two, one dies", _group, faults={"b": DIES}, large=["folder"]),
    *_both("a group of two, the primary dies", _group, faults={"a": DIES}, large=["folder"]),
    *_both("a group of two, one error", _group, faults={"b": ANY_ERROR}, large=["folder"]),
    _in(
        "folder",
        "a local save of two, a host lost",
        local_saves,
        first=("a", "serves "),
        faults={"b": DIES},
        is_large=True,
    ),
    _in(
        "folder",
        "a local save of two, the primary lost",
        local_saves,
        faults={"a": DIES, "b": Faults(frozenset({TIMES_OUT}), most=1, where=("for outcome",))},
        is_large=True,
    ),
)
