"""Errors of checkpoints: what is on disk, and why it cannot be had."""

from __future__ import annotations

import contextlib
import errno
import sys
import traceback
from collections.abc import Iterator
from typing import Self

from holdfast.coordination import BarrierTimeout, Fenced, HoldfastError, ProcessLost

# The path of a tree that is one leaf.
ONE_LEAF = "\\r"


def leaf_at(path: str) -> str:
    """Returns what a message calls the leaf of a path."""
    return "the tree itself" if path == ONE_LEAF else f"the leaf {path!r}"


class CheckpointError(HoldfastError):
    """The root of all that can go wrong with a checkpoint. `path` is the root, step folder or file
    that it is about.

    `process`: the one that ran into it, where all processes of a group raise it.
    """

    path: str = ""
    step: int | None = None
    process: int | None = None


class StepExists(CheckpointError):
    """Says that the step is already there, and stays as it is."""

    _may_follow_death = False


class StepOutOfOrder(CheckpointError):
    """Says that a save would come at or below the `newest` step, though its manager has not gone
    back to a lower one; nothing was written.
    """

    _may_follow_death = False
    newest: int | None = None


class StepNotFound(CheckpointError):
    """Says that no such step (or item) is there."""

    _may_follow_death = False


class StepGone(CheckpointError):
    """Says that the step was deleted, or overwritten, while it was being read."""

    _may_follow_death = False


class SaveFailed(CheckpointError):
    """Says that a save did not commit, on which process it failed and, where a leaf is to blame,
    the leaf. `passes`: a store or a time-out is to blame, so the next save may succeed.
    """

    leaf: str = ""
    passes: bool = False


class SaveCancelled(SaveFailed):
    """Says that a process called a save off before it was committed."""


class ReplicasDiffer(CheckpointError):
    """Says that replicas that should be equal differ: the first leaf, and the first process whose
    replica is not that of most; all of them in the message.
    """

    _may_follow_death = False
    leaf: str = ""


class CommitUnknown(CheckpointError):
    """Says that this process does not know whether the save was committed: it may yet appear, whole
    or not at all.
    """


class Corrupt(CheckpointError):
    """Says that stored bytes are not what was written: the file and, where known, the leaf."""

    _may_follow_death = False
    file: str = ""
    leaf: str = ""

    @classmethod
    def at(cls, file: str, text: str) -> Self:
        """Returns the error of one file: `text` says what is wrong with it."""
        return cls(f"{file}: {text}", path=file, file=file)


class TreeMismatch(CheckpointError):
    """Says that the checkpoint and what was asked for differ in structure, shape or dtype."""

    _may_follow_death = False
    leaf: str = ""
    expected: str = ""
    found: str = ""


class UnsupportedLeaf(CheckpointError):
    """Says that a leaf of the tree is of a type that cannot be saved."""

    _may_follow_death = False
    leaf: str = ""
    found: str = ""


class NotEnoughMemory(CheckpointError):
    """Says that a restore needs more of the host's memory than its machine or cgroup has left:
    `needed_bytes` of all processes that share it, `free_bytes`, and the leaf that needs the most.
    """

    _may_follow_death = False
    leaf: str = ""
    needed_bytes: int = 0
    free_bytes: int = 0


class HostileCheckpoint(CheckpointError):
    """Says that a checkpoint asks for something no writer of ours writes: it is damaged on purpose
    or not ours.
    """

    _may_follow_death = False
    file: str = ""

    @classmethod
    def at(cls, file: str, text: str) -> Self:
        """Returns the error of one file: `text` says what is wrong with it."""
        return cls(f"{file}: {text}", path=file, file=file)


class LeafFailed(Exception):
    """Says that a computation of jax's failed whose result was to be saved: on its way to what all
    processes raise.
    """

    def __init__(self, leaf: str, error: Exception) -> None:
        lines = str(error).strip().splitlines() or [""]
        # The first says what kind it is, and after a callback's trace the last why.
        text = lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1]}"
        super().__init__(f"the computation of {leaf!r} failed: {text}")
        self.leaf = leaf


# What crosses between the processes of a job as itself.
SENT_ERRORS: dict[str, type[HoldfastError]] = {
    kind.__name__: kind
    for kind in (
        CheckpointError,
        CommitUnknown,
        Corrupt,
        Fenced,
        HostileCheckpoint,
        NotEnoughMemory,
        ReplicasDiffer,
        SaveCancelled,
        SaveFailed,
        StepExists,
        StepGone,
        StepNotFound,
        StepOutOfOrder,
        TreeMismatch,
        UnsupportedLeaf,
    )
}


def failure_of(error: Exception, step: int, process: int) -> HoldfastError:
    """Returns an error of a save as all processes raise it: itself where it can be sent, else a
    SaveFailed that names a process.
    """
    if isinstance(error, tuple(SENT_ERRORS.values())):
        assert isinstance(error, HoldfastError)
        return error
    if isinstance(error, BarrierTimeout | ProcessLost):
        missing = error.missing if isinstance(error, BarrierTimeout) else (error.process,)
        return SaveFailed(
            f"step {step} was not saved: {error.message}",
            step=step,
            process=next(iter(missing), None),
            passes=isinstance(error, BarrierTimeout),
        )
    if isinstance(error, LeafFailed):
        return SaveFailed(
            f"step {step} was not saved: process {process}: {error}; look at what makes it",
            step=step,
            process=process,
            leaf=error.leaf,
        )
    return SaveFailed(
        f"step {step} was not saved: process {process} failed: {error_text(error)}",
        step=step,
        process=process,
        passes=isinstance(error, OSError),
        _may_follow_death=not getattr(error, "errno", None),  # PeerFailed has none
    )


_SHORTAGES = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}
_PERMISSION = "this process lacks the permission: see its user and the mode of the folders above"
_LOOK = "look at the disk or the mount, then call it again"
_ADVICE = {
    errno.EACCES: _PERMISSION,
    errno.EPERM: _PERMISSION,
    errno.EMFILE: "this process has too many files open: raise its limit (ulimit -n)",
}


def is_shortage(error: BaseException | None) -> bool:
    """Says whether this process lacked what a look takes: nothing is known of what is there."""
    is_short = isinstance(error, OSError) and error.errno in _SHORTAGES
    return is_short or isinstance(error, MemoryError)


@contextlib.contextmanager
def naming_step(where: str, step: int | None, path: str) -> Iterator[None]:
    """Has a TreeMismatch begin with `where`, which names the step."""
    try:
        yield
    except TreeMismatch as error:
        if path in error.message:
            raise
        raise TreeMismatch(
            f"{where}: {error.message}",
            leaf=error.leaf,
            expected=error.expected,
            found=error.found,
            step=step,
            path=error.path or path,
        ) from error.__cause__


@contextlib.contextmanager
def naming_path(path: str) -> Iterator[None]:
    """Raises a CheckpointError for an error of the store, naming the file, or `path` where the
    error names none.
    """
    try:
        yield
    except OSError as error:
        if isinstance(error, HoldfastError):
            raise
        where = error.filename if isinstance(error.filename, str) else path
        # The error of an object store has said itself what to look at.
        advice = "then call it again" if "://" in path else _ADVICE.get(error.errno or 0, _LOOK)
        raise CheckpointError(
            f"{where} cannot be read: {error.strerror or error}; {advice}", path=where
        ) from error
    except MemoryError as error:
        raise CheckpointError(
            f"{path} cannot be read: there is no memory; free some, then call it again", path=path
        ) from error


def error_text(error: BaseException) -> str:
    """Returns an error's type and sentence, as part of a message."""
    return f"{type(error).__name__}: {error}"


def clear_frames(error: BaseException | None) -> None:
    """Lets go of what the frames of an error hold, and those of its causes: it stays longer than
    the arrays there may. What the caller handles is the caller's, and stays whole.
    """
    seen = {sys.exception()}
    while error is not None and error not in seen:
        seen.add(error)
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
