"""The id maps before they are known."""

from __future__ import annotations

import pytest

import holdfast.multihost as multihost


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
