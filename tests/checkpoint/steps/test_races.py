"""Two writers commit one step at the same time, while a sweep may fence one of them."""

from __future__ import annotations

import itertools
import random
import tempfile
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint import CheckpointError
from holdfast.checkpoint.steps.claims import Writer, this_writer
from holdfast.checkpoint.steps.object_claims import ObjectClaims
from holdfast.checkpoint.storage.base import NotCommitted
from holdfast.checkpoint.storage.bucket import BucketStorage
from holdfast.checkpoint.storage.tombstone import sealed
from holdfast.coordination import Fenced
from tests.support.object_servers import BUCKET, s3_server, small_s3_server


class _LatePuts(BucketStorage):
    """A store where the write of a record comes only after a time."""

    is_time = threading.Event()

    def put(self, name: str, data: bytes | bytearray, generation: bytes | None = None) -> bool:
        if name.endswith("/checkpoint.json"):
            self.is_time.wait(60)
        return super().put(name, data, generation)


def _race(
    storage: BucketStorage, step: int, *, fences: bool, late: _LatePuts | None = None
) -> None:
    """Lets one race happen. What stands afterwards is what its writer was told.

    The first writer writes through `late`, where it is given: after the sweep that fences it.
    """
    if late is not None:
        late.is_time = threading.Event()
    claims = ObjectClaims(storage)
    writers = [this_writer(), this_writer()]
    told: dict[str, bool] = {}
    start = threading.Barrier(3 if fences else 2)

    def record_of(writer: Writer) -> bytes:
        return sealed(b'{"writer":"%s"' % writer.id.encode())

    def commit(writer: Writer) -> None:
        place = late if late is not None and writer is writers[0] else storage
        start.wait(60)
        try:
            place.commit(f"{step}/checkpoint.json", record_of(writer), f".holdfast/{writer.id}")
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
        if late is not None:
            late.is_time.set()

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
    assert late is None or told[writers[0].id] is False


def _races(url: str, count: int) -> None:
    """Lets a third of them be of two writers, a third with a fence, a third with a late write."""
    storage = BucketStorage(url)
    late = _LatePuts(url)
    chance = random.Random(7)
    for step in range(count):
        kind = chance.randrange(3)
        _race(storage, step, fences=kind > 0, late=late if kind == 2 else None)


def _on_memory(count: int) -> None:
    _races("memory://races", count)


def _on_s3(count: int) -> None:
    with s3_server() as query:
        _races(f"s3://{BUCKET}/races{query}", count)


def _on_small_s3(count: int) -> None:
    with tempfile.TemporaryDirectory() as folder, small_s3_server(Path(folder)) as query:
        _races(f"s3://{BUCKET}/races{query}", count)


def _loses_answers(application: Any) -> Any:
    """Returns a WSGI application that does every PUT, and answers every third with 503."""
    numbers = itertools.count(1)

    def lossy(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        answer: Iterable[bytes] = application(environ, start_response)
        if environ["REQUEST_METHOD"] != "PUT" or next(numbers) % 3:
            return answer
        list(answer)
        start_response("503 Slow Down", [("Content-Length", "0")])
        return [b""]

    return lossy


def _on_s3_that_loses_answers(count: int) -> None:
    with s3_server(around=_loses_answers) as query:
        _races(f"s3://{BUCKET}/lost-{count}{query}", count)  # servers share what they hold


@pytest.mark.parametrize(
    ("where", "count"),
    [
        (_on_memory, 50),
        (_on_s3_that_loses_answers, 3),
        pytest.param(_on_small_s3, 1000, marks=[pytest.mark.slow, pytest.mark.timeout(600)]),
        pytest.param(_on_s3, 1000, marks=[pytest.mark.slow, pytest.mark.timeout(600)]),
        pytest.param(
            _on_s3_that_loses_answers, 300, marks=[pytest.mark.slow, pytest.mark.timeout(1200)]
        ),
    ],
)
def test_of_two_commits_at_once_one_stands(where: Callable[[int], None], count: int) -> None:
    """The one that was told so, whoever is fenced meanwhile; without a fence there is one."""
    where(count)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("header", ["If-None-Match", "If-Match"])
def test_a_store_that_ignores_a_condition_is_never_taken(header: str) -> None:
    """Its commits would not be safe: each probe refuses it, by the kind of condition."""
    with s3_server(ignored=[header]) as query:
        for number in range(50):
            claims = ObjectClaims(BucketStorage(f"s3://{BUCKET}/ignored/{number}{query}"))
            with pytest.raises(CheckpointError, match="ignores the condition"):
                claims.take(this_writer())
