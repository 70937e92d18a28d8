"""What a forked child may not destroy of its parent's."""

from __future__ import annotations

import ctypes
from typing import Any


def keep_for_ever(thing: Any) -> None:
    """Takes a reference that nobody gives back, so that a child's end does not destroy its copy.

    The destructor of a parent's connection would write to the parent's socket, or wait for threads
    that the child does not have.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
