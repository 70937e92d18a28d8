"""A model of an object store under the real `ObjectStorage`: each request is a step, which may fail
as requests do.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from holdfast.checkpoint.storage.base import Entry
from holdfast.checkpoint.storage.object import ObjectStorage

from .disk import AFTER, BEFORE, LATE
from .rules import Gone, Named
from .scheduler import CHANGE, OK, READ, WRITE, Access, current_task
from .world import World

T = TypeVar("T")
REFUSED_AFTER = "done, and the second try refused"
MISSING = b""
FAULTS = (BEFORE, AFTER, LATE, REFUSED_AFTER)


def _folders(name: str) -> tuple[Access, ...]:
    parts = name.split("/")
    return tuple(("/".join(parts[:count]) + "/", CHANGE) for count in range(len(parts)))


class Objects:
    """What a bucket holds: values with generations."""

    def __init__(self) -> None:
        self.values: dict[str, tuple[bytes, int]] = {}
        self.generation = 0


class ModelBucket(ObjectStorage):
    """A bucket that several processes have open."""

    max_concurrency = 1

    def __init__(self, world: World, objects: Objects) -> None:
        super().__init__("model://bucket")
        self._world = world
        self._objects = objects

    def _request(
        self,
        verb: str,
        name: str,
        accesses: Sequence[Access],
        do: Callable[[], T],
        faults: Sequence[str] = (BEFORE,),
        refused: T | None = None,
    ) -> T:
        task = current_task()
        assert task is not None, "requests come from tasks"
        variant = self._world.step(task, f"{verb} {name or '/'}", accesses, faults)
        if variant == OK:
            return do()
        where = f"{self.root}/{name}"
        if variant == AFTER:
            do()
        elif variant == REFUSED_AFTER:
            do()
            assert refused is not None
            return refused
        elif variant == LATE:
            world = self._world

            def land() -> None:
                own = current_task()
                assert own is not None
                world.step(own, f"a late {verb} of {name} lands", accesses, ())
                do()

            world.kernel("the store", land)
            world.run.actual = ()
        else:
            self._world.run.actual = ()
        raise OSError(errno.ETIMEDOUT, "the store did not answer in time", where)

    def _set(self, name: str, data: bytes) -> None:
        objects = self._objects
        objects.generation += 1
        objects.values[name] = (data, objects.generation)
        self._world.effect(Named(self._world.who(), name, data))

    # --- the requests of a subclass

    def _range(self, name: str, start: int, stop: int) -> Any:
        def read() -> bytes:
            found = self._objects.values.get(name)
            if found is None:
                raise self._missing(name)
            return found[0][start:stop]

        return self._request("read", name, ((name, READ),), read)

    def _entries(self, folder: str, *, recursive: bool) -> list[Entry]:
        def entries() -> list[Entry]:
            found: dict[str, Entry] = {}
            for name, (data, _) in self._objects.values.items():
                if not name.startswith(folder):
                    continue
                first, slash, _ = name[len(folder) :].partition("/")
                if slash and not recursive:
                    found[folder + first + "/"] = Entry(folder + first + "/", 0)
                else:
                    found[name] = Entry(name, len(data), self._world.now_s)
            return sorted(found.values(), key=lambda entry: entry.name)

        return self._request("list", folder, ((folder if folder else "/", READ),), entries)

    def size(self, name: str) -> int:
        return len(self._range(name, 0, 1 << 30))

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            if not name.endswith("/"):
                self._delete(name)

    def _delete(self, name: str) -> None:
        def delete() -> None:
            if self._objects.values.pop(name, None) is None:
                self._world.run.actual = ((name, READ),)
            else:
                self._world.effect(Gone(self._world.who(), name))

        accesses = ((name, WRITE), *_folders(name))
        self._request("delete", name, accesses, delete, (BEFORE, AFTER))

    def get(self, name: str) -> tuple[bytes | None, bytes]:
        def get() -> tuple[bytes | None, bytes]:
            found = self._objects.values.get(name)
            return (None, MISSING) if found is None else (found[0], b"%d" % found[1])

        return self._request("get", name, ((name, READ),), get)

    def put(self, name: str, data: bytes | bytearray, generation: bytes | None = None) -> bool:
        value = bytes(data)

        def put() -> bool:
            found = self._objects.values.get(name)
            now = MISSING if found is None else b"%d" % found[1]
            if generation is not None and generation != now:
                self._world.run.actual = ((name, READ),)
                return False
            self._set(name, value)
            return True

        accesses = ((name, WRITE), *_folders(name))
        faults: tuple[str, ...] = FAULTS if generation is not None else (BEFORE, AFTER, LATE)
        verb = "put" if generation is None else "put if unchanged"
        return self._request(verb, name, accesses, put, faults, refused=False)
