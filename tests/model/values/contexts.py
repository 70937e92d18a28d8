"""Settings of jax under which a caller may save and restore."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

CONTEXTS: Mapping[str, Callable[[], AbstractContextManager[Any]]] = {
    "none": contextlib.nullcontext,
}
