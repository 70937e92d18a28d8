"""The id maps before they are known, and the table of them as it travels."""

from __future__ import annotations

import random

import pytest

import holdfast.multihost as multihost
from holdfast.multihost.group.group import pack
from holdfast.multihost.group.ids import ProcessIds, columns_of, ids_in


def test_before_they_are_known() -> None:
    """Each map says which function makes it known."""
    assert not multihost.is_runtime_to_distributed_ids_initialized()
    assert not multihost.is_distributed_to_device_ids_initialized()
    for ask in (
        multihost.runtime_to_distributed_ids,
        lambda: multihost.runtime_to_distributed_process_id(0),
    ):
        with pytest.raises(
            ValueError, match=r"call initialize_runtime_to_distributed_ids\(\) in every process"
        ):
            ask()
    with pytest.raises(
        ValueError, match=r"call initialize_distributed_to_device_ids\(\) in every process"
    ):
        multihost.distributed_to_device_ids()


def test_the_table_travels_whole() -> None:
    """In whatever order a runtime counts, and with other numbers of devices, or none."""
    rng = random.Random(7)
    runtime = list(range(500))
    rng.shuffle(runtime)
    ids = [
        ProcessIds(runtime[number], number, tuple(rng.sample(range(4000), rng.randrange(9))))
        for number in range(500)
    ]
    assert ids_in(columns_of(ids)) == ids
    assert ids_in(columns_of([])) == []


def test_the_table_of_thousands_is_small() -> None:
    """What each process is sent grows by less than a byte a process."""
    ids = [ProcessIds(n, n, tuple(range(8 * n, 8 * n + 8))) for n in range(16_384)]
    assert len(pack(columns_of(ids))) < 4_096
