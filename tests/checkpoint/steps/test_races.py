"""Two writers commit one step at the same time, while a sweep may fence one of them."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import pytest

from holdfast.checkpoint.steps.claims import Writer, this_writer
from holdfast.checkpoint.steps.object_claims import ObjectClaims
from holdfast.checkpoint.storage.base import NotCommitted
from holdfast.checkpoint.storage.bucket import BucketStorage
from holdfast.checkpoint.storage.tombstone import sealed
from holdfast.coordination import Fenced
from tests.support.object_servers import BUCKET, s3_server


def _race(storage: BucketStorage, step: int, *, fences: bool) -> None:
    """Lets one race happen. What stands afterwards is what its writer was told."""
    claims = ObjectClaims(storage)
    writers = [this_writer(), this_writer()]
    told: dict[str, bool] = {}
    start = threading.Barrier(3 if fences else 2)

    def record_of(writer: Writer) -> bytes:
        return sealed(b'{"writer":"%s"' % writer.id.encode())

    def commit(writer: Writer) -> None:
        start.wait(60)
        try:
            storage.commit(f"{step}/checkpoint.json", record_of(writer), f".holdfast/{writer.id}")
        except (NotCommitted, Fenced):
            told[writer.id] = False
        except FileExistsError:
            pass  # unclear: a save then looks what stands
        else:
            told[writer.id] = True

    def sweep() -> None:
        start.wait(60)
        fenced = writers[0].id
        claims.fence(fenced)
        claims.bury(str(step), {f"state/00000-00000-{fenced}00000001.safetensors": fenced})

    for writer in writers:
        storage.put(f".holdfast/{writer.id}/claim.json", b"{}")
    threads = [threading.Thread(target=commit, args=(writer,)) for writer in writers]
    threads += [threading.Thread(target=sweep)] if fences else []
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    found = storage.get(f"{step}/checkpoint.json")[0] or b""
    stands = [writer.id for writer in writers if writer.id.encode() in found[:40]]
    for writer in told:
        assert told[writer] == (writer in stands), (step, found)
    assert len(stands) == 1 or fences


def _races(url: str, count: int) -> None:
    storage = BucketStorage(url)
    chance = random.Random(7)
    for step in range(count):
        _race(storage, step, fences=chance.random() < 0.5)


def _on_memory(count: int) -> None:
    _races("memory://races", count)


def _on_s3(count: int) -> None:
    with s3_server() as query:
        _races(f"s3://{BUCKET}/races{query}", count)


@pytest.mark.parametrize(
    ("where", "count"),
    [
        (_on_memory, 50),
        pytest.param(_on_s3, 1000, marks=[pytest.mark.slow, pytest.mark.timeout(600)]),
    ],
)
def test_of_two_commits_at_once_one_stands(where: Callable[[int], None], count: int) -> None:
    """The one that was told so, whoever is fenced meanwhile; without a fence there is one."""
    where(count)
