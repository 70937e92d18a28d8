"""Claims: the right of one writer to commit into one root, and how it is taken away.

A claim is the folder `.holdfast/<id>/` with `claim.json` (who) and, on POSIX, `lock`: a file lock
held for the writer's life. It is made under another name, complete with its lock, and renamed into
place, so that no claim is ever seen unlocked while its writer lives. No pack exists before its
claim; so a pack whose writer has no claim belongs to nobody who could still commit it.

To fence a writer is to rename its claim away (POSIX) or to delete it (object stores, where a
tombstone in each step that has its packs stops a commit that was already under way). A writer may
be fenced when it is surely dead, when its job has moved on to a higher attempt, or by force.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

from holdfast.coordination import Fenced
from holdfast.multihost.group.runtime import launched_spec

from ..format.limits import MALFORMED
from ..storage.steady_time import PROCESS_CLOCK

FOLDER = ".holdfast"
FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT)
CLAIM_LIMIT_BYTES = 64 << 10  # of claim.json; a longer one is cut, and that of an unknown writer
WRITER_ID = re.compile(r"[0-9a-f]{8}")
_WRITER_DIGITS = 8  # of a save's id, which begins with its writer's


@dataclass(frozen=True)
class Writer:
    """The writer that holds a claim.

    `job` is "" outside of a launched job, and `process` -1; `renewed_s` is Unix time by the
    writer's clock, which does not jump. `launched_ms` is when its job was launched, see
    `ProcessSpec`.
    """

    id: str
    job: str = ""
    attempt: int = 0
    host: str = ""
    pid: int = 0
    renewed_s: float = 0.0
    process: int = -1
    launched_ms: int = 0

    @property
    def claim(self) -> str:
        """The name of its claim in the root."""
        return f"{FOLDER}/{self.id}"


def writer_of(save_id: str) -> str:
    """Returns the id of the writer of a save."""
    return save_id[:_WRITER_DIGITS]


def this_writer() -> Writer:
    """Returns a new writer for this process, with an id of its own."""
    return Writer(
        secrets.token_hex(4),
        host=socket.gethostname(),
        pid=os.getpid(),
        renewed_s=PROCESS_CLOCK.now_s(),
    )


def launched_writer() -> Writer:
    """Returns a new writer for this process, with its place in the job that it was launched in."""
    writer = this_writer()
    spec = launched_spec()
    if spec is None:
        return writer
    return replace(
        writer,
        job=spec.job_id,
        attempt=spec.attempt,
        process=spec.process_id,
        launched_ms=spec.launched_ms or 0,
    )


def may_fence(other: Writer, me: Writer, *, dead: bool) -> str:
    """Returns why `me` may fence `other`, or "".

    Raises Fenced when it is the other way round: `other` is a higher attempt of the same job.
    """
    if dead:
        return f"writer {other.id} (pid {other.pid} on {other.host}) is dead"
    # Outside of a launched job nothing says which of two living writers is the newer one.
    if not me.job or other.job != me.job:
        return ""
    # Each run of a launcher counts its attempts anew, and two hosts' clocks may differ: who looks
    # older is not told to stop, but finds its claim gone.
    if other.launched_ms != me.launched_ms:
        earlier = f"writer {other.id} is of an earlier run of job {me.job!r}"
        return earlier if other.launched_ms < me.launched_ms else ""
    if other.attempt == me.attempt:
        return ""
    if other.attempt > me.attempt:
        raise Fenced(
            f"attempt {other.attempt} of job {me.job!r} writes here (on {other.host}); this is"
            f" attempt {me.attempt}: stop"
        )
    return (
        f"writer {other.id} is attempt {other.attempt} of job {me.job!r}, which is now at attempt"
        f" {me.attempt}"
    )


class Claims(Protocol):
    """All that a manager asks of a root's claims. Blocking; raises the store's OSError."""

    def until(self, end_s: float) -> Claims:
        """Returns the same claims, whose requests of the store end then, by the monotonic clock,
        where it can do that.
        """

    def take(self, writer: Writer) -> None:
        """Makes the claim; called again, shows that the writer lives.

        Raises CheckpointError when the store cannot be written safely.
        """

    def others(self, me: str) -> list[tuple[Writer, bool]]:
        """Returns the other claims, and whether each one's writer is surely dead."""

    def fence(self, writer_id: str) -> None:
        """Takes a claim away, if it is there: no later commit of its writer succeeds."""

    def standing(self) -> set[str]:
        """Returns the ids of all claims that stand."""

    def bury(self, step_dir: str, packs: Mapping[str, str]) -> list[str]:
        """Makes sure that writers without a claim can no longer commit a step.

        `packs` are files of theirs there, with the writer of each. Returns those that may be
        deleted then.
        """

    def forget_fenced(self) -> None:
        """Removes the remains of fenced claims, once their files are swept."""


def parse_writer(data: bytes, writer_id: str) -> Writer:
    """Reads a claim; one that cannot be read is that of an unknown writer."""
    try:
        claim = {"launched_ms": 0} | json.loads(data)  # of an earlier version without it
        usual: Any = fields(Writer)[1:]
        told = {each.name: type(each.default)(claim[each.name]) for each in usual}
        return Writer(writer_id, **told)
    except MALFORMED:
        # Cut off by a crash, perhaps: the claim stands all the same, and its lock says who lives.
        return Writer(writer_id)
