"""Whether all processes make the same call, asked before the devices compute anything.

A computation over several processes compares nothing: where one process gives other shapes, or
makes another call, the devices add what does not belong together, or the backend aborts.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Sequence

import jax

from holdfast.coordination import BarrierTimeout

from .group import Group, decide_at_first, default_group
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
    source: str | None = None,
) -> None:
    """Raises ValueError, on every process, unless all make the same call: its name and its `lines`
    are equal, and all that are a source name the same one. A process that is none has `source=""`;
    a call that needs none has None.

    Costs one gather and one broadcast of some bytes; nothing over jaxlib's own client. Raises
    BarrierTimeout naming who has not made a call, ProcessLost, CoordinatorLost.
    """
    group = _group()
    if group is None:
        return
    text = "\n".join([call, *lines])
    own = f"{hashlib.sha256(text.encode()).hexdigest()} {source or ''}"

    def judge(said: Sequence[bytes]) -> bytes:
        digests, sources = zip(*(each.decode().split(" ", 1) for each in said), strict=True)
        if len(set(digests)) > 1:
            return _DIFFER
        named_sources = sorted(set(sources) - {""})
        if source is None or len(named_sources) == 1:
            return b""
        found = ", ".join(named_sources) or "none"
        return f"{call}: expected one source, found {found}".encode()

    try:
        verdict = decide_at_first(group, _NAME, own.encode(), judge, deadline)
        if verdict == _DIFFER:
            # Only now: what all are called with may be long.
            verdict = decide_at_first(group, _NAME, text.encode(), _difference, deadline)
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


def _difference(texts: Sequence[bytes]) -> bytes:
    """Says which processes differ from most, and the first thing in which one of them does."""
    usual, _ = Counter(texts).most_common(1)[0]
    odd = [rank for rank, text in enumerate(texts) if text != usual]
    other = texts.index(usual)
    call, _, _ = usual.decode().partition("\n")
    pairs = itertools.zip_longest(
        texts[odd[0]].decode().split("\n"), usual.decode().split("\n"), fillvalue="nothing more"
    )
    has, expected = next((one, two) for one, two in pairs if one != two)
    said = (
        f"{call}: {named(odd)} and process {other} do not call it alike: process {odd[0]} has"
        f" {has}, process {other} has {expected}; expected the same of every process"
    )
    return said.encode()
