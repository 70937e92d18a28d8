"""Refuses a root that another process of the job writes to, where `initialize()` was forgotten."""

from __future__ import annotations

from holdfast.multihost.group.runtime import unjoined_spec

from ..errors import CheckpointError
from .opening import OpenRoot


def refuse_without_joining(root: OpenRoot) -> None:
    """Raises CheckpointError where this process of a launched job has not joined it, and another
    that lives has the root open for writing.

    Each of them would save alone, over the other's steps.
    """
    if not root.is_writing_primary or unjoined_spec() is None:
        return
    me = root.writer
    for other, is_dead in root.claims.others(me.id):
        is_of_job = (other.job, other.attempt) == (me.job, me.attempt)
        # The same number is this process's parent or child, or its life before a restart.
        if is_of_job and not is_dead and other.process != me.process:
            raise CheckpointError(
                f"{root.where} is open in process {other.process} of this job (host {other.host},"
                f" pid {other.pid}), and process {me.process} has not joined it: call"
                " holdfast.multihost.initialize() at the start of the program, so that all save as"
                " one, or open another folder in each process",
                path=root.where,
                process=me.process,
            )
