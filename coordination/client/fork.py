"""A forked child lets go of the connections of its parent, without a byte."""

from __future__ import annotations

import ctypes
import os
from typing import Any, Protocol
from weakref import WeakSet


class Abandonable(Protocol):
    """What a forked child has a copy of, and must not use."""

    def abandon(self) -> None: ...


_open: WeakSet[Abandonable] = WeakSet()


def abandon_in_children(connection: Abandonable) -> None:
    """Has every forked child abandon its copy of a connection."""
    _open.add(connection)


def keep_for_ever(thing: Any) -> None:
    """Takes a reference that nobody gives back, so that a child's end does not destroy its copy.

    The destructor of a parent's connection would write to the parent's socket, or wait for threads
    that the child does not have.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def _abandon_all() -> None:
    for connection in list(_open):
        connection.abandon()


os.register_at_fork(after_in_child=_abandon_all)
