"""Whether all processes make the same call, asked before the devices compute anything.

A computation over several processes compares nothing: where one process gives other shapes, or
makes another call, the devices add what does not belong together, or the backend aborts.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Sequence

import jax

from holdfast.coordination import BarrierTimeout

from .group import Group, default_group
from .group_client import Deadline, named
from .runtime import current_group_client, is_jax_distributed_client_initialized

# One for all of them: a process may make another call than the others.
_NAME = "a computation of all processes"
_DIFFER = b"?"


def check_match(
    call: str,
    lines: Sequence[str],
    deadline: Deadline,
    *,
    source: str = "",
    needs_source: bool = False,
) -> None:
    """Raises ValueError, on every process, unless all make the same call: its name and its `lines`
    are equal, and where it `needs_source` all that name a source name the same one.

    Costs one gather and one broadcast of some bytes; nothing over jaxlib's own client. Raises
    BarrierTimeout naming who has not made a call, ProcessLost, CoordinatorLost.
    """
    group = _group()
    if group is None:
        return
    text = "\n".join([call, *lines])
    own = f"{hashlib.sha256(text.encode()).hexdigest()} {source}"
    try:
        sent = group.gather(_NAME, own.encode(), timeout_s=deadline.remaining_s())
        verdict = None
        if sent is not None:
            told = [each.decode().split(" ", 1) for each in sent]
            verdict = b""
            if len({digest for digest, _ in told}) > 1:
                verdict = _DIFFER
            elif needs_source:
                verdict = _wrong_source(call, {source for _, source in told if source}).encode()
        verdict = group.broadcast(_NAME, verdict, timeout_s=deadline.remaining_s())
        if verdict == _DIFFER:
            # Only now: what all are called with may be long.
            texts = group.gather(_NAME, text.encode(), timeout_s=deadline.remaining_s())
            verdict = None if texts is None else _difference(texts).encode()
            verdict = group.broadcast(_NAME, verdict, timeout_s=deadline.remaining_s())
    except BarrierTimeout as error:
        if not error.missing:
            raise
        raise BarrierTimeout(
            f"{call} did not begin in {deadline.timeout_s:g} s: {named(error.missing)} did not call"
            " it, or hangs",
            name=call,
            missing=error.missing,
        ) from error
    if verdict:
        raise ValueError(verdict.decode())


def _group() -> Group | None:
    """Returns the group of all processes, None where they are not asked."""
    if jax.process_count() == 1 or not is_jax_distributed_client_initialized():
        return None
    return default_group() if current_group_client().pushes else None


def _wrong_source(call: str, sources: Collection[str]) -> str:
    if len(sources) == 1:
        return ""
    found = ", ".join(sorted(sources)) or "none"
    return f"{call}: expected one source, found {found}"


def _difference(texts: Sequence[bytes]) -> str:
    """Says which processes differ from most, and the first thing in which one of them does."""
    usual, _ = Counter(texts).most_common(1)[0]
    odd = [rank for rank, text in enumerate(texts) if text != usual]
    other = texts.index(usual)
    theirs, ours = (text.decode().split("\n") for text in (texts[odd[0]], usual))
    at = next(
        (at for at, (one, two) in enumerate(zip(theirs, ours, strict=False)) if one != two),
        min(len(theirs), len(ours)),
    )
    call = ours[0]
    has, expected = ((lines[at:] or ["nothing more"])[0] for lines in (theirs, ours))
    return (
        f"{call}: {named(odd)} and process {other} do not call it alike: process {odd[0]} has"
        f" {has}, process {other} has {expected}; expected the same of every process"
    )
