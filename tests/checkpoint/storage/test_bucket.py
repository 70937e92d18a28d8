"""Buckets through obstore: conditions, ranges, names, streamed files, and errors that say what to
do.

tests/checkpoint/storage/test_storage.py runs the whole contract of stores on each server.
"""

from __future__ import annotations

import base64
import contextlib
import gc
import itertools
import os
import re
import subprocess
import sys
import weakref
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pytest

from holdfast.checkpoint import (
    CheckpointError,
    CheckpointManager,
    Corrupt,
    KeepLast,
    Options,
    SaveFailed,
    StepExists,
    register_storage,
    sweep,
    verify,
)
from holdfast.checkpoint.format.step_folders import list_steps
from holdfast.checkpoint.layouts.orbax.arrays import kvstore_of
from holdfast.checkpoint.steps.claims import this_writer
from holdfast.checkpoint.steps.object_claims import ObjectClaims
from holdfast.checkpoint.storage import bucket
from holdfast.checkpoint.storage.base import Part
from holdfast.checkpoint.storage.bucket import (
    MISSING,
    PART_BYTES,
    PARTS_OF_ONE_FILE,
    BucketStorage,
)
from holdfast.checkpoint.storage.path import StorePath
from holdfast.coordination import Fenced
from tests.checkpoint.storage.test_retries import Clock
from tests.model.checkpoint.faulty import few_descriptors
from tests.support.object_servers import BUCKET, azure_server, rclone_server, s3_server
from tests.support.proxy import Proxy, address_of, through

_numbers = itertools.count()


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with s3_server() as query:
        yield query


@pytest.fixture
def s3_requests_without_ranges() -> Iterator[str]:
    with s3_server(ignored=["Range"]) as query:
        yield query


@pytest.fixture
def storage() -> BucketStorage:
    return BucketStorage(f"memory://bucket/{next(_numbers)}")


def test_conditions_hold(storage: BucketStorage) -> None:
    """A value is made once, and replaced only as it was seen last; of writes at once, one goes
    through.
    """
    assert storage.get("a") == (None, MISSING)
    assert storage.put("a", b"one", MISSING)
    assert not storage.put("a", b"two", MISSING)
    value, generation = storage.get("a")
    assert value == b"one"
    assert storage.put("a", b"three", generation)
    assert not storage.put("a", b"four", generation)
    assert storage.put("a", b"five")
    assert storage.get("a")[0] == b"five"
    assert storage.put_at_once("b", [b"1", b"2", b"3"], MISSING) == 1


def test_ranges_sizes_and_names(storage: BucketStorage) -> None:
    """A range may end behind the object, begin there, or be of an empty one; names are below the
    prefix, of any letters; what is gone is gone.
    """
    strange = "x/a b%20#?é:*'~"
    for name, data in (("x/1", b"hello"), ("x/2", b""), ("xy", b""), (strange, b"s")):
        storage.put(name, data)
    assert storage.size("x/1") == 5
    assert bytes(storage._range("x/1", 2, 100)) == b"llo"
    assert storage._range("x/1", 5, 6) == b"" == storage._range("x/2", 0, 9)
    assert storage.keys("x/") == ["x/1", "x/2", strange]
    assert storage.keys("x") == ["x/1", "x/2", strange, "xy"] == storage.keys("")
    assert storage.fetch(strange, 9) == b"s"
    storage.delete(["x/1", "no", "x/"])
    with pytest.raises(FileNotFoundError, match=r"memory://bucket/.*/x/1"):
        storage._range("x/1", 0, 1)
    with pytest.raises(FileNotFoundError, match=r"memory://bucket/.*/x/1"):
        storage.size("x/1")


def test_what_only_tensorstore_could_do_says_so(storage: BucketStorage) -> None:
    """Other people's arrays are not read in memory, and an unknown setting is refused."""
    with pytest.raises(CheckpointError, match="does not know this store; copy it to a disk first"):
        kvstore_of(StorePath(storage, "1"))
    for url in ("az://bucket/run?no_such_setting=1", "s3://bucket/run?no_such_setting=1"):
        with pytest.raises(CheckpointError, match=r"cannot open .*://bucket/run\?.*'no_such_sett"):
            BucketStorage(url)


def test_settings_are_translated_for_tensorstore(monkeypatch: pytest.MonkeyPatch) -> None:
    """Region, endpoint and who pays reach the library that reads other people's arrays."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    query = "?endpoint_url=http://127.0.0.1:9&default_region=eu-west-1&request_payer=true"
    storage = BucketStorage(f"s3://bucket/runs{query}")
    assert kvstore_of(StorePath(storage, "1")) == {
        "driver": "s3",
        "bucket": "bucket",
        "aws_region": "eu-west-1",
        "endpoint": "http://127.0.0.1:9",
        "requester_pays": True,
        "aws_credentials": {"type": "environment"},
        "path": "runs/1/",
    }
    public = BucketStorage("s3://bucket?skip_signature=true&region=us-east-1")
    assert kvstore_of(StorePath(public)) == {
        "driver": "s3",
        "bucket": "bucket",
        "aws_region": "us-east-1",
        "aws_credentials": {"type": "anonymous"},
        "path": "",
    }


class _Pieces:
    """The parts of a file, made one after the other; `most` of them were held at a time."""

    def __init__(self, size: int, piece: int) -> None:
        self.size = size
        self.piece = piece
        self.held = 0
        self.most = 0

    def __iter__(self) -> Iterator[Part]:
        for offset in range(0, self.size, self.piece):
            nbytes = min(self.piece, self.size - offset)
            array = np.full(nbytes, offset // self.piece, np.uint8)
            self.held += 1
            self.most = max(self.most, self.held)
            weakref.finalize(array, self._drop)
            yield offset, [array.data]
            del array

    def _drop(self) -> None:
        self.held -= 1


def test_a_long_file_is_streamed(s3: str) -> None:
    """What comes in order is sent in parts while it is made: few of them are held at a time."""
    storage = BucketStorage(f"s3://{BUCKET}/streamed{s3}")
    size = 8 * PART_BYTES + 17
    pieces = _Pieces(size, PART_BYTES // 2)
    storage.write("1/state/a", size, pieces)
    assert pieces.most <= 2 * (PARTS_OF_ONE_FILE + 2)
    assert storage.size("1/state/a") == size
    for offset, [buffer] in itertools.islice(_Pieces(size, PART_BYTES // 2), 14, None):
        assert storage._range("1/state/a", offset, offset + buffer.nbytes) == buffer


def test_a_long_file_with_its_head_last_is_put_together(storage: BucketStorage) -> None:
    """Parts in another order are joined in memory first."""
    size = 2 * PART_BYTES
    body = memoryview(bytes(size - 4))
    storage.write("1/state/a", size, [(4, [body]), (0, [memoryview(b"head")])])
    assert storage.fetch("1/state/a", size)[:6] == b"head\0\0"


def test_a_server_that_knows_no_ranges(s3_requests_without_ranges: str) -> None:
    """It sends whole objects: the range is cut out of them, and the bytes are right."""
    storage = BucketStorage(f"s3://{BUCKET}/whole{s3_requests_without_ranges}")
    data = bytes(range(256)) * 8
    storage.put("a", data)
    assert storage.fetch("a", 4096) == data
    buffer = bytearray(100)
    assert storage.read("a", 300, [memoryview(buffer)]) == 100
    assert buffer == data[300:400]
    assert storage.read("a", 2000, [memoryview(buffer)]) == 48


def test_a_manager_before_a_proxy_that_knows_no_ranges(s3_requests_without_ranges: str) -> None:
    """What was saved is restored and verified, rows of a large array too."""
    url = f"s3://{BUCKET}/no-ranges{s3_requests_without_ranges}"
    array = np.arange(3 << 18, dtype=np.float32).reshape(3, -1)
    with CheckpointManager(url) as manager:
        manager.save(1, {"w": array}).wait()
        assert np.array_equal(manager.restore(1)["w"], array)
    assert verify(url).leaves == 1


def test_an_upload_that_fails_leaves_nothing() -> None:
    """An error of the parts comes through as it is; the store has neither the file nor parts."""
    requests: list[str] = []
    with s3_server(requests=requests) as query:
        storage = BucketStorage(f"s3://{BUCKET}/cut{query}")

        def parts() -> Iterator[Part]:
            yield from itertools.islice(_Pieces(4 * PART_BYTES, PART_BYTES), 2)
            raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            storage.write("1/state/a", 4 * PART_BYTES, parts())
        assert storage.keys("") == []
        assert requests.count(f"DELETE /{BUCKET}/cut/1/state/a") == 1


# asyncio has half of a loop then, which is not closed in order.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_without_a_descriptor_for_its_loop_a_request_fails() -> None:
    """Nobody waits for a loop that could not be made; with one the next request makes it."""
    another = os.getpid() + 1  # this process may have one
    with few_descriptors(0), pytest.raises(OSError, match="Too many open files"):
        bucket._loop(another)
    gc.collect()
    loop = bucket._loop(another)
    loop.call_soon_threadsafe(loop.stop)


def test_errors_say_what_to_do() -> None:
    """A bucket that is not there, a server that is not there and settings that make no store are
    told with what to change.
    """
    patience = Clock().patience()
    with s3_server() as query:
        nowhere = BucketStorage(f"s3://none/run{query}", patience=patience)
        for call in (
            lambda: nowhere.get("a"),
            lambda: nowhere.put("a", b"1"),
            lambda: nowhere.list(""),
            lambda: nowhere.list("", recursive=True),
        ):
            with pytest.raises(OSError, match="there is no such bucket; create it first") as caught:
                call()
            assert not isinstance(caught.value, FileNotFoundError)
            assert "s3://none/run" in str(caught.value)
        silent = BucketStorage(f"s3://{BUCKET}/run?endpoint=http://127.0.0.1:9", patience=patience)
        with pytest.raises(ConnectionRefusedError, match="check the endpoint"):
            silent.get("a")
        lost = BucketStorage(f"s3://{BUCKET}/r?endpoint=http://none.invalid", patience=patience)
        with pytest.raises(ConnectionRefusedError, match="name of the server is not known"):
            lost.get("a")


class _Throttled(BucketStorage):
    """A store in memory that refuses every tenth request with 503, and applies some before."""

    clock = Clock()
    requests = itertools.count(1)
    refused = 0

    def __init__(self, url: str, *, single_writer: bool = False) -> None:
        memory = url.replace("throttled://", "memory://throttled/")
        super().__init__(memory, single_writer=single_writer, patience=type(self).clock.patience())

    def _once(self, make: Callable[[], Awaitable[Any]], timeout_s: float) -> Any:
        number = next(self.requests)
        if number % 10:
            return super()._once(make, timeout_s)
        type(self).refused += 1
        if number % 100 == 0:
            # The server has done it, and its answer is lost.
            with contextlib.suppress(Exception):
                super()._once(make, timeout_s)
            raise RuntimeError("HTTP error: error sending request")
        raise RuntimeError("Server returned non-2xx status code: 503 Slow Down")


def test_a_week_of_throttling() -> None:
    """A save an hour, in time that passes only in pauses: every tenth request is refused, and of
    every hundredth the answer is lost. No save fails, and each that was acknowledged is there.
    """
    register_storage(
        "throttled", lambda url, single_writer: _Throttled(url, single_writer=single_writer)
    )
    url = f"throttled://week/{next(_numbers)}"
    unthrottled = BucketStorage(url.replace("throttled://", "memory://throttled/"))
    hours = 7 * 24
    with CheckpointManager(url, keep_policy=KeepLast(2)) as manager:
        for step in range(hours):
            manager.save(step, {"w": np.full(3, step)}).wait()
            assert unthrottled.fetch(f"{step}/checkpoint.json", 1 << 20)
        assert manager.restore()["w"].tolist() == [hours - 1] * 3
        assert manager.all_steps() == [hours - 2, hours - 1]
    assert _Throttled.refused > hours
    assert _Throttled.clock.now > 0


@pytest.mark.timeout(40)
@pytest.mark.parametrize(
    "nbytes",
    [
        pytest.param(1000, id="one request", marks=pytest.mark.slow),
        pytest.param(PART_BYTES + 1, id="streamed"),
    ],
)
def test_a_save_ends_at_its_deadline(s3: str, nbytes: int) -> None:
    """Requests without an answer are broken off then, long before their own patience is over; the
    next save goes through.
    """
    with Proxy(address_of(s3)) as proxy:
        url = f"s3://{BUCKET}/deadline/{nbytes}{through(proxy, s3)}"
        with CheckpointManager(url, options=Options(save_timeout_s=2)) as manager:
            proxy.drop("requests")
            # With `overwrite` the call itself asks the store nothing.
            saving = manager.save(1, {"w": np.zeros(nbytes, np.uint8)}, overwrite=True)
            with pytest.raises(SaveFailed, match="did not answer in time"):
                saving.wait()
            proxy.deliver()
            proxy.cut()
        with CheckpointManager(url) as manager:
            manager.save(2, {"w": np.ones(nbytes, np.uint8)}).wait()
            assert manager.all_steps() == [2]
            assert manager.restore()["w"].sum() == nbytes


def _one_in_ten(application: Any) -> Any:
    """Returns a WSGI application that answers every tenth request with 503."""
    numbers = itertools.count(1)

    def throttled(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if next(numbers) % 10:
            answer: Iterable[bytes] = application(environ, start_response)
            return answer
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        start_response("503 Slow Down", [("Content-Type", "application/xml")])
        return [b"<Error><Code>SlowDown</Code></Error>"]

    return throttled


@pytest.mark.parametrize(
    "hours",
    [
        pytest.param(3, id="3 hours"),
        pytest.param(7 * 24, id="a week", marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
    ],
)
def test_streamed_packs_under_throttling(hours: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save an hour whose pack goes in three parts, of which the store refuses every tenth
    request: no save fails, and each that was acknowledged is there, whole.
    """
    part_bytes = 5 << 20  # the least that S3 takes
    monkeypatch.setattr(bucket, "PART_BYTES", part_bytes)
    requests: list[str] = []
    with s3_server(requests=requests, around=_one_in_ten) as query:
        url = f"s3://{BUCKET}/throttled-{hours}{query}"
        with CheckpointManager(url, keep_policy=KeepLast(1)) as manager:
            for step in range(hours):
                manager.save(step, {"w": np.full(2 * part_bytes + 9, step, np.uint8)}).wait()
                assert manager.restore(step)["w"][-1] == step % 256
                assert manager.all_steps() == [step]
    assert len(requests) > 15 * hours


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_process_that_has_saved_ends_in_order(tmp_path: Path) -> None:
    """An exit right after a save is no abort, though an answer is on its way to another thread."""
    program = (
        "import sys, numpy as np\n"
        "from holdfast.checkpoint import CheckpointManager, Options\n"
        "tree = {str(i): np.ones(1 << 21, np.float32) for i in range(8)}\n"
        "manager = CheckpointManager(sys.argv[1], options=Options(single_writer=True))\n"
        "manager.save(0, tree)\n"
        "manager.close()\n"
    )
    with rclone_server(tmp_path) as query:
        for number in range(30):
            url = f"s3://{BUCKET}/exits/{number}{query}"
            subprocess.run([sys.executable, "-c", program, url], check=True, timeout=60)


def _refusing(methods: Sequence[str], status: str, code: str) -> Callable[[Any], Any]:
    """Returns what puts a WSGI application before another that refuses requests as S3 does."""

    def around(application: Any) -> Any:
        def refusing(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
            is_ours = environ["PATH_INFO"].startswith(f"/{BUCKET}/") or environ["QUERY_STRING"]
            if environ["REQUEST_METHOD"] not in methods or not is_ours:
                answer: Iterable[bytes] = application(environ, start_response)
                return answer
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            body = f"<Error><Code>{code}</Code><Message/></Error>".encode()
            start_response(status, [("Content-Length", str(len(body)))])
            return [body]

        return refusing

    return around


def test_a_key_that_may_only_read() -> None:
    """A manager that would write says what is missing and what to pass; with that it reads."""
    writes = ["PUT", "POST", "DELETE"]
    with s3_server() as query:
        with CheckpointManager(f"s3://{BUCKET}/readable{query}") as manager:
            manager.save(1, {"w": np.ones(3)})
    with s3_server(around=_refusing(writes, "403 Forbidden", "AccessDenied")) as query:
        url = f"s3://{BUCKET}/readable{query}"
        with pytest.raises(CheckpointError, match=r"may list, read, write .*read_only=True"):
            CheckpointManager(url)
        with CheckpointManager(url, options=Options(read_only=True)) as manager:
            assert manager.restore(1)["w"].sum() == 3


def test_a_bucket_in_another_region() -> None:
    """The error says which setting to pass."""
    refusing = _refusing(["GET", "PUT"], "301 Moved Permanently", "PermanentRedirect")
    with s3_server(around=refusing) as query:
        with pytest.raises(CheckpointError, match=r"in another region; pass its region"):
            CheckpointManager(f"s3://{BUCKET}/elsewhere{query}")


def test_bodies_that_are_cut_short() -> None:
    """What a proxy cuts is asked for again: a restore is right."""
    cut: list[str] = []

    def around(application: Any) -> Any:
        def cutting(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
            answer: Iterable[bytes] = application(environ, start_response)
            path = environ["PATH_INFO"]
            if environ["REQUEST_METHOD"] != "GET" or not path.endswith(".safetensors"):
                return answer
            if len(cut) == 2:
                return answer
            cut.append(path)
            return [b"".join(answer)[:100]]

        return cutting

    with s3_server(around=around) as query:
        with CheckpointManager(f"s3://{BUCKET}/cut-short{query}") as manager:
            manager.save(1, {"w": np.arange(1000)}).wait()
            assert manager.restore(1)["w"].tolist() == list(range(1000))
    assert len(cut) == 2


def test_bodies_that_stay_cut_short() -> None:
    """Where each answer breaks off, the error names the object once the store's time is over. An
    answer that ends early, and says that it is whole, is damage; the step before it comes back.
    """
    told: list[bool] = []

    def around(application: Any) -> Any:
        def cutting(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
            path = environ["PATH_INFO"]
            if not told or environ["REQUEST_METHOD"] != "GET" or "/2/state/" not in path:
                answer: Iterable[bytes] = application(environ, start_response)
                return answer

            def begin(status: str, headers: list[tuple[str, str]], *more: Any) -> Any:
                if told[0]:
                    headers = [pair for pair in headers if pair[0].lower() != "content-length"]
                    headers.append(("Content-Length", "100"))
                return start_response(status, headers, *more)

            return [b"".join(application(environ, begin))[:100]]

        return cutting

    with s3_server(around=around) as query:
        url = f"s3://{BUCKET}/stays-cut{query}"
        with CheckpointManager(url) as manager:
            for step in (1, 2):
                manager.save(step, {"w": np.arange(1000) * step}).wait()
            told.append(False)
            storage = BucketStorage(url, patience=Clock().patience())
            (pack,) = storage.keys("2/state/")
            with pytest.raises(OSError, match="/2/state/00000-"):
                storage.read(pack, 0, [memoryview(bytearray(500))])
            told[0] = True
            with pytest.raises(Corrupt, match=r"/2/state/.* the file ends at 100 of"):
                manager.restore(2)
            assert manager.restore(fallback=True)["w"].tolist() == list(range(1000))


def test_what_azure_refuses() -> None:
    """A container that is not there, and a key that is not the account's (Azurite answers 403),
    are told with what to change.
    """
    with azure_server() as query:
        nowhere = f"az://none/run{query}"
        with pytest.raises(CheckpointError, match="there is no such bucket; create it first"):
            CheckpointManager(nowhere)
        stranger = f"az://{BUCKET}/run{query}&account_key={base64.b64encode(bytes(64)).decode()}"
        both = "may not do this here, or the key is wrong; expected credentials that may list"
        with pytest.raises(CheckpointError, match=both):
            CheckpointManager(stranger)


def test_without_credentials() -> None:
    """The error says which to set, and what to pass for a bucket that needs none."""
    advice = r"no credentials were found; set them in the environment .*\?skip_signature=true"
    with s3_server() as query, pytest.MonkeyPatch.context() as environment:
        environment.delenv("AWS_ACCESS_KEY_ID")
        environment.delenv("AWS_SECRET_ACCESS_KEY")
        url = f"s3://{BUCKET}/nobody{query}"
        for options in (Options(), Options(read_only=True)):
            with pytest.raises(CheckpointError, match=advice):
                CheckpointManager(url, options=options)


class _ListsLate:
    """A WSGI application in front of another, which leaves new keys out of listings: those that
    `is_hidden` holds of, by their names, and that were put since `begin`.
    """

    def __init__(self, application: Any) -> None:
        self._application = application
        self.is_hidden: Callable[[str], bool] = lambda key: False
        self._old: set[str] = set()
        self._new: set[str] = set()

    def begin(self, is_hidden: Callable[[str], bool]) -> None:
        """Hides what is put from now on."""
        self._old |= self._new
        self._new.clear()
        self.is_hidden = is_hidden

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if environ["REQUEST_METHOD"] in ("PUT", "POST") and "delete" not in environ["QUERY_STRING"]:
            key = path.removeprefix(f"/{BUCKET}/")
            if key not in self._old:
                self._new.add(key)
        answer: Iterable[bytes] = self._application(environ, start_response)
        if "list-type=2" not in environ["QUERY_STRING"]:
            return answer
        whole = b"".join(answer)
        files = r"<Contents>.*?<Key>(.*?)</Key>.*?</Contents>"
        folders = r"<CommonPrefixes>\s*<Prefix>(.*?)</Prefix>\s*</CommonPrefixes>"
        shown = re.sub(files, self._shown, whole.decode(), flags=re.DOTALL)
        shown = re.sub(folders, self._shown, shown)
        # The length has been told: what is left out becomes blanks.
        return [shown.encode().ljust(len(whole))]

    def _shown(self, entry: re.Match[str]) -> str:
        name = unquote(entry[1])
        hidden = {key for key in self._new if self.is_hidden(key)}
        if name.endswith("/"):
            keys = {key for key in self._old | self._new if key.startswith(name)}
            is_shown = not keys or bool(keys - hidden)
        else:
            is_shown = name not in hidden
        return entry[0] if is_shown else ""


def test_a_store_that_lists_late() -> None:
    """A step that is not listed yet is there by its name, and cannot be saved a second time. Its
    own manager lists it. Another manager, which does not see it, takes nothing away.
    """
    stores: list[_ListsLate] = []

    def around(application: Any) -> Any:
        stores.append(_ListsLate(application))
        return stores[0]

    with s3_server(around=around) as query:
        url = f"s3://{BUCKET}/late{query}"
        with CheckpointManager(url) as manager:
            manager.save(1, {"w": np.ones(3)}).wait()
            manager._state.worker.wait(60)
            stores[0].begin(lambda key: True)
            manager.save(2, {"w": np.arange(3)}).wait()
            with CheckpointManager(url) as other:
                other._state.worker.wait(60)
                assert other.all_steps() == [1]
                assert other.restore(2)["w"].tolist() == [0, 1, 2]
                with pytest.raises(StepExists):
                    other.save(2, {"w": np.zeros(3)})
            with pytest.raises(StepExists):
                manager.save(2, {"w": np.zeros(3)})
            assert manager.latest_step() == 2
            assert manager.all_steps() == [1, 2]
            assert manager.restore()["w"].tolist() == [0, 1, 2]
            stores[0].begin(lambda key: False)
            assert manager.all_steps() == [1, 2]


def test_a_store_that_lists_a_claim_later_than_packs() -> None:
    """A sweep takes the packs of a writer whose claim is not listed: that save fails as fenced, and
    is never listed.
    """
    stores: list[_ListsLate] = []

    def around(application: Any) -> Any:
        stores.append(_ListsLate(application))
        return stores[0]

    with s3_server(around=around) as query:
        url = f"s3://{BUCKET}/later{query}"
        with CheckpointManager(url) as manager:
            manager.save(1, {"w": np.ones(3)}).wait()
        stores[0].begin(lambda key: key.endswith("/claim.json"))
        storage = BucketStorage(url)
        claims = ObjectClaims(storage)
        writer = this_writer()
        claims.take(writer)
        pack = f"2/state/00000-00000-{writer.id}00000001.safetensors"
        storage.put(pack, b"pack")
        assert sweep(url).files == [pack]
        with pytest.raises(Fenced):
            storage.commit("2/checkpoint.json", b"{}", f".holdfast/{writer.id}")
        assert list_steps(storage) == [1]
