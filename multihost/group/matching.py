"""Whether all processes make the same call, asked before the devices compute anything.

A computation over several processes compares nothing: where one process gives other shapes, or
makes another call, the devices add what does not belong together, or the backend aborts.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax

from holdfast.coordination import BarrierTimeout

from .group import Group, decide_at_first, default_group
from .group_client import Deadline, named
from .runtime import current_group_client, is_jax_distributed_client_initialized

# One for all of them: a process may make another call than the others.
_NAME = "a computation of all processes"
_DIFFER = "?"


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
    digest = hashlib.sha256(text.encode()).hexdigest()

    def judge(said: Sequence[Sequence[Any]]) -> str:
        if any(theirs != digest for theirs, _ in said):
            return _DIFFER
        sources = sorted({theirs for _, theirs in said if theirs})
        if source is None or len(sources) == 1:
            return ""
        return f"{call}: expected one source, found {', '.join(sources) or 'none'}"

    try:
        verdict = decide_at_first(group, _NAME, [digest, source], judge, deadline)
        if verdict == _DIFFER:
            # Only now: what all are called with may be long.
            verdict = decide_at_first(group, _NAME, text, _difference, deadline)
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
        raise ValueError(verdict)


def _group() -> Group | None:
    """Returns the group of all processes, None where they are not asked."""
    if jax.process_count() == 1 or not is_jax_distributed_client_initialized():
        return None
    return default_group() if current_group_client().pushes else None


def _difference(texts: Sequence[str]) -> str:
    """Says which processes differ from most, and the first thing in which one of them does."""
    usual, _ = Counter(texts).most_common(1)[0]
    odd = [rank for rank, text in enumerate(texts) if text != usual]
    other = texts.index(usual)
    call, _, _ = usual.partition("\n")
    pairs = itertools.zip_longest(
        texts[odd[0]].split("\n"), usual.split("\n"), fillvalue="nothing more"
    )
    has, expected = next((one, two) for one, two in pairs if one != two)
    return (
        f"{call}: {named(odd)} and process {other} do not call it alike: process {odd[0]} has"
        f" {has}, process {other} has {expected}; expected the same of every process"
    )
