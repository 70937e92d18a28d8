"""What is particular to object stores: conditions that must be honoured, claims that age,
tombstones.
"""

from __future__ import annotations

import contextlib
import http.server
import itertools
import threading
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import numpy as np
import pytest

from holdfast.checkpoint import (
    CheckpointError,
    CheckpointManager,
    CommitUnknown,
    Options,
    SaveFailed,
    StepExists,
    register_storage,
    sweep,
)
from holdfast.checkpoint.format.step_folders import list_steps
from holdfast.checkpoint.steps.claims import parse_writer, this_writer
from holdfast.checkpoint.steps.garbage import sweep_files
from holdfast.checkpoint.steps.object_claims import ObjectClaims
from holdfast.checkpoint.storage import retries
from holdfast.checkpoint.storage.bucket import BucketStorage
from holdfast.checkpoint.storage.threads import run_side_by_side
from holdfast.checkpoint.storage.tombstone import (
    RECORD_NAME,
    fenced_writers,
    marked_record,
    sealed,
)
from holdfast.checkpoint.watch import FULL_EVERY, _WatchedRoot
from holdfast.coordination import Fenced
from tests.support.object_servers import BUCKET, TensorStoreMemory, s3_server

_numbers = itertools.count()


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with s3_server() as query:
        yield query


@pytest.fixture(params=["memory", "s3"])
def url(request: pytest.FixtureRequest) -> str:
    number = next(_numbers)
    return (
        f"memory://object/{number}"
        if request.param == "memory"
        else f"s3://{BUCKET}/object/{number}{request.getfixturevalue('s3')}"
    )


class _Overtaken:
    """A store whose first write of a record comes after `others_save`, which it calls."""

    others_save: Callable[[], object] | None = None

    def put(
        self, name: str, data: bytes | bytearray, generation: bytes | None = None
    ) -> bool | None:
        others_save = type(self).others_save
        if name.endswith(RECORD_NAME) and others_save is not None:
            type(self).others_save = None
            others_save()
        written: bool | None = super().put(name, data, generation)  # type: ignore[misc]
        return written


class _OvertakenBucket(_Overtaken, BucketStorage):
    pass


class _OvertakenMemory(_Overtaken, TensorStoreMemory):
    pass


@pytest.mark.parametrize("overwrites", [False, True])
@pytest.mark.parametrize("store", ["memory", "s3", "tensorstore"])
def test_of_two_saves_of_one_step_the_loser_hears_it(
    store: str, overwrites: bool, request: pytest.FixtureRequest
) -> None:
    """Both have seen no such step. A store that has plainly refused the later record has not
    written it: that is StepExists. With overwrite=True the later one stands.
    """
    number = next(_numbers)
    slow: type[_Overtaken] = _OvertakenMemory if store == "tensorstore" else _OvertakenBucket
    TensorStoreMemory.register()
    register_storage("slow", lambda url, _: slow(url.replace("slow", store)))  # type: ignore[call-arg]
    path = f"{BUCKET}/races/{number}" + (request.getfixturevalue("s3") if store == "s3" else "")
    with (
        CheckpointManager(f"{store}://{path}") as other,
        CheckpointManager(f"slow://{path}") as late,
    ):
        slow.others_save = lambda: other.save(7, {"w": np.zeros(3)}).wait()
        saving = late.save(7, {"w": np.ones(3)}, overwrite=overwrites)
        if overwrites:
            saving.wait()
        else:
            with pytest.raises(StepExists, match="saved meanwhile"):
                saving.wait()
        assert other.restore(7)["w"].tolist() == [float(overwrites)] * 3
        assert slow.others_save is None


class _Unanswered(BucketStorage):
    """A bucket whose answer to the first write of a record is lost; another replaces the record."""

    overtakes: Callable[[], object] | None = None
    puts_record = False

    def put(
        self, name: str, data: bytes | bytearray, generation: bytes | None = None
    ) -> bool | None:
        self.puts_record = name.endswith(RECORD_NAME)
        return super().put(name, data, generation)

    def _once(self, make: Callable[[], Awaitable[Any]], timeout_s: float) -> Any:
        answer = super()._once(make, timeout_s)
        overtakes = type(self).overtakes
        if self.puts_record and overtakes is not None:
            type(self).overtakes = None
            overtakes()
            raise RuntimeError("HTTP error: error sending request")
        return answer


def test_a_loser_that_was_asked_again_does_not_know() -> None:
    """The answer to the first write was lost, another replaced it, and the second write is refused:
    whether the first was there for a while cannot be seen.
    """
    number = next(_numbers)
    storage = BucketStorage(f"memory://lost/{number}")
    register_storage("lost", lambda url, _: _Unanswered(url.replace("lost:", "memory:")))
    with CheckpointManager(f"lost://lost/{number}") as manager:
        _Unanswered.overtakes = lambda: storage.put(f"7/{RECORD_NAME}", sealed(b'{"by":"other"'))
        with pytest.raises(CommitUnknown):
            manager.save(7, {"w": np.ones(3)}).wait()
    assert _Unanswered.overtakes is None


def test_a_claim_that_was_not_renewed_is_fenced(url: str) -> None:
    """A writer silent for longer than the claim's age is fenced at the next opening, and its commit
    is Fenced.
    """
    first = CheckpointManager(url)
    with CheckpointManager(url) as second:
        assert len(second._root.claims.standing()) == 2
    with CheckpointManager(url, options=Options(claim_age_s=1e-6)) as third:
        assert third._root.claims.standing() == {third._root.writer.id}
        first.save(1, {"w": np.ones(3)})
        with pytest.raises(Fenced):
            first.wait_until_finished()
        assert third.all_steps() == []
    first.close()


def test_a_claim_is_renewed_while_it_stands(url: str) -> None:
    """Taking it again shows that the writer lives; one that was taken away stays so."""
    storage = BucketStorage(url)
    claims = ObjectClaims(storage, claim_age_s=1e-6)
    writer = this_writer()
    claims.take(writer)
    first = parse_writer(storage.get(f".holdfast/{writer.id}/claim.json")[0] or b"", writer.id)
    claims.take(writer)
    again = parse_writer(storage.get(f".holdfast/{writer.id}/claim.json")[0] or b"", writer.id)
    assert first.renewed_s < again.renewed_s and claims.standing() == {writer.id}
    ObjectClaims(storage).fence(writer.id)
    claims.take(writer)
    assert claims.standing() == set()


def test_a_commit_under_way_is_stopped_by_the_tombstone(url: str) -> None:
    """A fenced writer that had already looked at its claim loses to the tombstone; the next writer
    of the step replaces it.
    """
    storage = BucketStorage(url)
    claims = ObjectClaims(storage)
    old = this_writer()
    new = this_writer()
    claims.take(old)
    claims.take(new)
    pack = f"5/state/00000-00000-{old.id}.safetensors"
    storage.put(pack, b"pack")
    _, seen = storage.get("5/checkpoint.json")  # what the old writer saw when it was paused
    claims.fence(old.id)
    assert sweep_files(storage, claims) == [pack] and list_steps(storage) == []
    assert not storage.put("5/checkpoint.json", b"late", seen)
    with pytest.raises(FileNotFoundError):
        storage.fetch("5/checkpoint.json", 100)
    storage.put(f".holdfast/{old.id}/claim.json", b"{}")  # even were its claim to come back
    with pytest.raises(Fenced, match="was fenced from"):
        storage.commit("5/checkpoint.json", b"late", f".holdfast/{old.id}")
    storage.commit("5/checkpoint.json", b"good", f".holdfast/{new.id}")
    assert list_steps(storage) == [5] and storage.fetch("5/checkpoint.json", 100) == b"good"


def test_an_overwrite_under_way_is_stopped_by_the_sweep(url: str) -> None:
    """A fenced writer that had already looked at its claim and at the record loses: the record says
    the same, and is another.
    """
    with CheckpointManager(url) as manager:
        manager.save(5, {"w": np.arange(3)})
    storage = BucketStorage(url)
    claims = ObjectClaims(storage)
    for turn in range(2):
        old = this_writer()
        claims.take(old)
        pack = f"5/state/00000-00000-{old.id}.safetensors"
        storage.put(pack, b"pack")
        record, seen = storage.get("5/checkpoint.json")
        claims.fence(old.id)
        assert sweep_files(storage, claims) == [pack]
        assert not storage.put("5/checkpoint.json", b"late", seen), turn
        found, _ = storage.get("5/checkpoint.json")
        assert (
            record is not None
            and found is not None
            and fenced_writers(found) == fenced_writers(record) | {old.id}
        )
        assert sweep_files(storage, claims) == [] and storage.get("5/checkpoint.json")[0] == found
    with CheckpointManager(url) as manager:
        assert (manager.restore(5)["w"] == np.arange(3)).all()


def test_a_commit_that_comes_after_its_tombstone_has_gone_is_taken_back() -> None:
    """A writer stood still between its look and its commit, while the next writer of the step
    replaced the tombstone and deleted the step: the late one gets Fenced, and leaves no step.
    """
    url = f"memory://object/{next(_numbers)}"
    storage = BucketStorage(url)
    still = []

    class StandingStill(BucketStorage):
        def put(self, name: str, data: bytes, generation: bytes | None = None) -> bool:
            while still and name == "5/checkpoint.json":
                still.pop()()
            return super().put(name, data, generation)

    paused = StandingStill(url)
    claims = ObjectClaims(storage, claim_age_s=1e-6)
    old = this_writer()
    new = this_writer()
    claims.take(old)
    claims.take(new)
    storage.put(f"5/state/00000-00000-{old.id}00000001.safetensors", b"pack")
    sweeps: list[list[str]] = []
    still += [
        lambda: storage.delete(["5/checkpoint.json"]),  # as a keep policy deletes the new step
        lambda: storage.commit("5/checkpoint.json", b"{}", f".holdfast/{new.id}"),
        lambda: sweeps.append(sweep_files(storage, claims)),
    ]
    still += [lambda: claims.fence(old.id)]
    with pytest.raises(Fenced, match="its packs were swept"):
        paused.commit("5/checkpoint.json", b'{"late": 1}', f".holdfast/{old.id}")
    assert [len(swept) for swept in sweeps] == [1] and list_steps(storage) == []
    assert fenced_writers(storage.get("5/checkpoint.json")[0] or b"") == {old.id}


def test_sweep_works_on_urls(url: str) -> None:
    """`sweep` leaves the saves of a living manager alone; with `force` it takes its claim."""
    with CheckpointManager(url) as manager:
        manager._state.worker.wait(60)
        put = BucketStorage(url).put
        put(f"9/state/00000-00000-{manager._root.writer.id}.safetensors", b"in flight")
        put("9/state/00000-00000-00c0ffee.safetensors", b"of nobody")
        found = sweep(url)
        assert (
            found.files == ["9/state/00000-00000-00c0ffee.safetensors"]
            and found.standing == [manager._root.writer.id]
            and not found.fenced
        )
        found = sweep(url, force=True)
        assert (
            found.fenced == [f"writer {manager._root.writer.id} was fenced by force"]
            and found.standing == []
        )
        manager.save(1, {"w": np.ones(1)})
        with pytest.raises(Fenced):
            manager.wait_until_finished()


def test_a_bucket_that_is_not_there(s3: str) -> None:
    """One clear error names the URL."""
    with pytest.raises(CheckpointError, match="s3://none/run"):
        CheckpointManager(f"s3://none/run{s3}")
    with pytest.raises(ValueError, match="ftp://x: expected a folder"):
        CheckpointManager("ftp://x")


def test_a_pack_is_streamed_in_parts_and_read_in_ranges() -> None:
    """A pack of 40 MiB goes to the store in parts of 16 MiB while it is made, and comes back in
    ranges of 16 MiB, with its header.
    """
    requests: list[str] = []
    with s3_server(requests=requests) as query:
        url = f"s3://{BUCKET}/streamed/{next(_numbers)}{query}"
        with CheckpointManager(url) as manager:
            manager._state.worker.wait(60)
            tree = {"w": np.arange(10 << 20, dtype=np.float32)}
            requests.clear()
            manager.save(1, tree).wait()
            manager._state.worker.wait(60)
            packs = [request for request in requests if request.endswith(".safetensors")]
            methods = [request.partition(" ")[0] for request in packs]
            assert (methods.count("POST"), methods.count("PUT")) == (2, 3)
            assert len(requests) <= 2 + 3 + 7, requests
            requests.clear()
            assert np.array_equal(manager.restore(1)["w"], tree["w"])
            packs = [request for request in requests if request.endswith(".safetensors")]
            assert packs == [packs[0]] * 4
            assert packs[0].startswith("GET ")


PACKS = 8  # a step


def _fill(storage: BucketStorage, steps: int) -> None:
    """Makes steps that are only listed: their records are longer than a tombstone may be."""
    names = [
        f"{step}/state/00000-{pack:05d}-0a0b0c0d00000001.safetensors"
        for step in range(steps)
        for pack in range(PACKS)
    ]
    run_side_by_side(lambda name: storage.put(name, b"pack"), names, 4)
    records = [f"{step}/checkpoint.json" for step in range(steps)]
    run_side_by_side(lambda name: storage.put(name, bytes(5000)), records, 4)


@pytest.mark.parametrize(
    "steps",
    [15, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(600)])],
)
def test_what_a_large_root_asks_of_a_store(steps: int) -> None:
    """An opening, a save, a restore, a poll and a sweep make few requests, however many steps there
    are: the listings are pages of a thousand names.
    """
    pages = -(-(steps * (PACKS + 1) + 2) // 1000)  # of 1,000 names each, with two claims
    folders = -(-(steps + 2) // 1000)  # the same of the root's folders alone
    requests: list[str] = []
    with s3_server(requests=requests) as query:
        url = f"s3://{BUCKET}/count/{next(_numbers)}{query}"
        storage = BucketStorage(url)
        _fill(storage, steps)
        # A process tries a bucket's conditions once.
        CheckpointManager(f"s3://{BUCKET}/count/{next(_numbers)}{query}").close()

        def counted(most: int) -> None:
            assert len(requests) <= most, requests
            requests.clear()

        requests.clear()
        with CheckpointManager(url, options=Options(read_only=True)) as manager:
            counted(pages + 2)
            assert len(manager.all_steps()) == steps
            counted(pages + 1)
        with CheckpointManager(url) as manager:
            manager._state.worker.wait(60)
            # It opens, with a claim. Then it sweeps what it has listed, by the claims.
            counted(pages + 4 + 1)
            # Its record is longer than a tombstone may be, as those of real trees are.
            long = {"why": "x" * 5000}
            items = {f"item{number}": {"w": np.ones(3)} for number in range(PACKS)}
            manager.save(steps, items=items, metadata=long).wait()
            manager._state.worker.wait(60)
            # A pack that is no longer than a part is one request, a longer one two and its parts.
            # One listing shows that the folder is no other library's checkpoint.
            counted(PACKS + 7)
            assert manager.restore(steps, item="item7")["w"].tolist() == [1, 1, 1]
            counted(2 + 1)  # the record, the pack's header, and its chunk
            manager.restore(steps, items=dict.fromkeys(items))
            counted(1 + 2 * PACKS)
            manager._state.worker.wait(60)
            found = _WatchedRoot(storage, steps - 1).newest()
            assert found is not None and found.step == steps
            watched = _WatchedRoot(storage, steps)
            assert watched.newest() is None
            requests.clear()
            assert watched.newest() is None
            counted(1)
            for _ in range(FULL_EVERY - 1):
                assert watched.newest() is None
            counted(FULL_EVERY - 1 + folders + 1)  # the last one asks what was left behind, too
            manager.save(steps + 1, {"w": np.ones(3)}, metadata=long).wait()
            manager._state.worker.wait(60)
            found = watched.newest()
            assert found is not None and found.step == steps + 1
        requests.clear()
        claims = ObjectClaims(storage)
        assert sweep_files(storage, claims) == []
        counted(pages + 2)
        pack = "7/state/00000-00000-00c0ffee00000001.safetensors"
        storage.put(pack, b"of a dead writer")
        storage.delete(["7/checkpoint.json"])
        requests.clear()
        assert pack in "".join(sweep_files(storage, claims))
        counted(pages + 2 + 3)


class _Flaky(http.server.BaseHTTPRequestHandler):
    """Passes requests on to a server, but answers the first ones of each method with an error."""

    upstream = ""
    left: dict[str, int]
    status = 503

    def _pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.left.get(self.command, 0) > 0:
            self.left[self.command] -= 1
            self._answer(self.status, {}, b"")
            return
        headers = {name: value for name, value in self.headers.items() if name.lower() != "host"}
        headers.setdefault("content-type", "application/octet-stream")  # else it is a form
        request = urllib.request.Request(
            self.upstream + self.path, data=body or None, method=self.command, headers=headers
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as reply:
                self._answer(reply.status, dict(reply.headers), reply.read())
        except urllib.error.HTTPError as error:
            with error:
                self._answer(error.code, dict(error.headers), error.read())

    def _answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() not in (
                "content-length",
                "connection",
                "transfer-encoding",
                "server",
                "date",
            ):
                self.send_header(name, value)
        self.send_header(
            "Content-Length",
            headers.get("Content-Length", "0") if self.command == "HEAD" else str(len(body)),
        )
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_PUT = do_DELETE = do_HEAD = do_POST = _pass_on

    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing."""


@pytest.mark.parametrize(
    "status", [429, *(pytest.param(status, marks=pytest.mark.slow) for status in (500, 503))]
)
def test_a_store_under_load_is_asked_again(s3: str, status: int) -> None:
    """Errors that pass are retried: a save and a restore succeed although the first request of each
    kind fails.
    """
    upstream = s3.split("endpoint=")[1].split("&")[0]
    handler = type("Handler", (_Flaky,), {"upstream": upstream, "left": {}, "status": status})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        url = f"s3://{BUCKET}/flaky/{next(_numbers)}?endpoint=http://127.0.0.1:{server.server_address[1]}&aws_region=us-east-1"
        with CheckpointManager(url) as manager:
            manager._state.worker.wait(60)
            handler.left.update(PUT=1, GET=1)  # type: ignore[attr-defined]
            manager.save(1, {"w": np.arange(10)})
            try:
                manager.wait_until_finished()
            except (SaveFailed, CommitUnknown) as error:
                pytest.fail(f"not retried: {error}")
            assert np.array_equal(manager.restore(1)["w"], np.arange(10))
            assert handler.left == {"PUT": 0, "GET": 0}  # type: ignore[attr-defined]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.slow
def test_a_store_that_is_down_is_no_step_that_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    """A save fails with the store's own error, after its own time; with `on_save_error="warn"` it
    is a miss. Calls that have to know raise the store's error too.
    """
    monkeypatch.setattr(retries, "CONNECT_LIMIT_S", 0.5)
    with contextlib.ExitStack() as server:
        query = server.enter_context(s3_server())
        url = f"s3://{BUCKET}/down/{next(_numbers)}{query}"
        raising = CheckpointManager(url, options=Options(save_timeout_s=2))
        warning = CheckpointManager(url, options=Options(save_timeout_s=2, on_save_error="warn"))
        for manager in (raising, warning):
            manager._state.worker.wait(60)
        server.close()
        with pytest.raises(SaveFailed, match=r"step 1 was not saved: .*check the endpoint"):
            raising.save(1, {"w": np.ones(3)}).wait()
        with pytest.raises(CheckpointError, match=r"check the endpoint .*; then call it again$"):
            raising.delete(1)
        warning.save(1, {"w": np.ones(3)})
        warning._join_lanes()
        warning.check_for_errors()
        assert warning.statistics()["saves_missed"] == 1
        for manager in (raising, warning):
            with contextlib.suppress(SaveFailed):
                manager.close()


class _FencedMeanwhile(BucketStorage):
    """A store that does the first commit and loses its answer; its writer is fenced then."""

    is_marked = False
    writer = ""

    def put(self, name: str, data: bytes | bytearray, generation: bytes | None = None) -> bool:
        done = super().put(name, data, generation)
        if name != "5/checkpoint.json" or not self.writer:
            return done
        self.delete([f".holdfast/{self.writer}/claim.json"])
        if self.is_marked:
            super().put(name, marked_record(bytes(data), {self.writer}))
        self.writer = ""
        return False  # what the second try of the same request is told


@pytest.mark.parametrize("is_marked", [False, True])
def test_a_commit_whose_answer_is_lost_is_one_though_its_writer_is_fenced(is_marked: bool) -> None:
    """It is not refused: who is refused deletes the packs, which the record names."""
    storage = _FencedMeanwhile(f"memory://fenced/{next(_numbers)}")
    writer = this_writer()
    storage.put(f".holdfast/{writer.id}/claim.json", b"{}")
    storage.put(f"5/state/00000-00000-{writer.id}00000001.safetensors", b"pack")
    storage.writer = writer.id
    storage.is_marked = is_marked
    record = sealed(b'{"writer":"%s"' % writer.id.encode())
    storage.commit("5/checkpoint.json", record, f".holdfast/{writer.id}")
    assert storage.fetch("5/checkpoint.json", 1 << 10).startswith(record[:20])
    with pytest.raises(Fenced):
        storage.commit("6/checkpoint.json", record, f".holdfast/{writer.id}")
