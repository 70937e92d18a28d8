"""The processes of a job of one, on both libraries."""

from __future__ import annotations

import asyncio
from types import ModuleType

import pytest
from orbax.checkpoint.experimental import v1 as theirs

from holdfast.compat.orbax import v1 as ours


@pytest.mark.parametrize("library", [ours, theirs], ids=["ours", "theirs"])
def test_one_process_waits_for_nobody(library: ModuleType) -> None:
    """`sync_global_processes` is a coroutine there and here."""
    multihost = library.multihost
    waiting = multihost.sync_global_processes("key", operation_id="1", timeout=5)
    assert asyncio.run(waiting) is None
    assert (multihost.process_index(), multihost.process_count()) == (0, 1)
    assert multihost.is_primary_host(0)
