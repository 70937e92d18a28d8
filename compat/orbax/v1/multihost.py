"""`orbax.checkpoint.v1.multihost`: the processes of the job."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from holdfast import multihost
from holdfast.multihost import is_pathways_backend as is_pathways_backend
from holdfast.multihost import is_primary_host as is_primary_host
from holdfast.multihost import process_count as process_count
from holdfast.multihost import process_index as process_index


async def sync_global_processes(
    key: str,
    *,
    operation_id: str,
    timeout: int | None = None,
    processes: Collection[int] | None = None,
    record_event_name: str = "",
) -> None:
    """Waits until all processes have called it with this key, for at most `timeout` seconds."""
    await asyncio.to_thread(
        multihost.sync_global_processes,
        f"{key}/{operation_id}",
        timeout=timeout,
        processes=processes,
    )
