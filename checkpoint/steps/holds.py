"""Holds: files under `.holdfast/holds/` by which a reader keeps a step from being deleted.

Keep policies honour holds. A hold's name says all: `<step>-<seconds>-<made>-<id>`. Its time begins
when the file is made, and what its store's clock says counts, now and then, where listings have
times. Elsewhere it is `<made>`, which is Unix seconds of the reader's clock.
"""

from __future__ import annotations

import contextlib
import logging
import re
import secrets
import time
from collections.abc import Iterator

from ..errors import CheckpointError
from ..storage.base import Storage
from .claims import FOLDER

_log = logging.getLogger(__name__)
HOLDS = f"{FOLDER}/holds"
_NAME = re.compile(r"(\d{1,18})-(\d{1,9})-(\d{1,12})-[0-9a-f]{8}")


def add_hold(storage: Storage, step: int, seconds: float) -> str:
    """Holds a step for `seconds` (rounded up) and returns the hold's name.

    Raises CheckpointError where it cannot be written.
    """
    name = f"{HOLDS}/{step}-{int(seconds) + 1}-{int(time.time())}-{secrets.token_hex(4)}"
    try:
        storage.write(name, 1, [(0, [memoryview(b"\n")])])
    except OSError as error:
        raise CheckpointError(
            f"step {step} of {storage.root} cannot be held: {error}; expected a root that this"
            " process may write to. To read without a hold, pass hold_s=0",
            path=storage.root,
            step=step,
        ) from error
    return name


def drop_hold(storage: Storage, name: str) -> None:
    """Ends a hold before its time; where that fails, it ends by itself."""
    try:
        storage.delete([name])
    except OSError as error:
        _log.warning(
            "the hold %s of %s stays until its time is over: %s", name, storage.root, error
        )


@contextlib.contextmanager
def hold(storage: Storage, step: int, seconds: float) -> Iterator[None]:
    """Holds a step while the block runs, for at most `seconds`."""
    name = add_hold(storage, step, seconds)
    try:
        yield
    finally:
        drop_hold(storage, name)


def held_steps(storage: Storage) -> set[int]:
    """Returns the steps that are held now, and forgets holds that are long over."""
    held = set()
    over = []
    now_s = time.time()
    entries = storage.list(HOLDS)
    if any(entry.modified_s for entry in entries):
        now_s = _now_of(storage)
    for entry in entries:
        match = _NAME.fullmatch(entry.name.rpartition("/")[2])
        if match is None:
            continue
        step, seconds, made = map(int, match.groups())
        since_s = now_s if entry.modified_s else time.time()
        if since_s < (entry.modified_s or made) + seconds:
            held.add(step)
        else:
            over.append(entry.name)
    with contextlib.suppress(OSError):  # what cannot be forgotten is over nevertheless
        storage.delete(over)
    return held


def _now_of(storage: Storage) -> float:
    """Returns the time by the store's clock, of a file that is made for it; by this host's where
    that cannot be made.
    """
    name = f"{HOLDS}/now-{secrets.token_hex(4)}"
    with contextlib.suppress(OSError):
        try:
            storage.write(name, 1, [(0, [memoryview(b"\n")])])
            times = [entry.modified_s for entry in storage.list(HOLDS) if entry.name == name]
        finally:
            storage.delete([name])
        if times and times[0]:
            return times[0]
    return time.time()
