"""Buckets as stores, s3://, az:// and memory://, through obstore.

A request is one try of obstore's: `Patience` asks again. A file that is longer than one part is
streamed instead, in parts that obstore tries again itself, since its bytes pass only once. A save
waits for them until its deadline, and not beyond.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import copy
import errno
import importlib.util
import itertools
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache, partial
from types import FrameType
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import numpy as np

from ..errors import CheckpointError
from ..memory.budget import free_host_bytes
from .base import Buffers, Entry, Part, TensorStoreAccess, Versioned
from .hedged_reads import READ_BYTES, SPARE_BYTES, Begin, HedgedReads, awaited
from .hedges import Hedges
from .kvstore import tensorstore_context
from .object import ObjectStorage, fill, joined, split_url
from .retries import Busy, Patience, fault_of, is_throttled, message_of
from .threads import ByteBudget, Latch, do_beside, run_side_by_side, start_thread

PART_BYTES = 16 << 20  # of a file that is streamed; a shorter one is one request
HELD_BYTES = 2 * PART_BYTES  # of a part: while it is filled, and on its way
PARTS_AT_ONCE = 16  # on their way from one store; each of its files holds one more
PARTS_OF_ONE_FILE = 4
MISSING = b""  # the generation of what is not there
LOOK_S = 60.0  # without a byte of an answer: the request is broken off
PART_S = 300.0  # the same for a part, whose answer comes only after its last byte
LAND_S = 2.0  # for answers on their way to the loop, when the interpreter exits
LOOKS_FOR_CALM = 4
LET_GO_S = 0.5  # for buffers that were sent: obstore lets go of them after the answer
_TRIES_OF_A_PART = 10
_TENSORSTORE_NAMES = (
    ("bucket", "bucket"),
    ("default_region", "aws_region"),
    ("region", "aws_region"),
    ("endpoint", "endpoint"),
)
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class BucketStorage(ObjectStorage):
    """A store below one prefix of a bucket, a container or this process's memory. Thread-safe.

    `url` is s3://bucket/path, az://container/path or memory://name. What follows a `?` are settings
    of obstore's S3Store or AzureStore, such as `endpoint=http://127.0.0.1:9000&region=us-east-1`;
    obstore takes the rest from the environment. All stores in memory of a process are one.

    The bytes on their way are at most 2 x PARTS_AT_ONCE x PART_BYTES for writes, and READ_BYTES for
    reads, all their tries counted.
    """

    def __init__(
        self, url: str, *, single_writer: bool = False, patience: Patience | None = None
    ) -> None:
        super().__init__(url, single_writer=single_writer)
        self._patience = patience or Patience()
        self._scheme, bucket, _, query = split_url(url)
        try:
            self._store, self._streams = _opened(self._scheme, bucket, query)
        except Exception as error:
            raise CheckpointError(f"cannot open {url}: {message_of(error)}", path=url) from error
        self._sent = ByteBudget(PARTS_AT_ONCE * HELD_BYTES, free_bytes=free_host_bytes)
        self._room = ByteBudget(READ_BYTES, SPARE_BYTES, free_host_bytes)
        self._reads = HedgedReads(Hedges(), self._room)

    def until(self, end_s: float) -> BucketStorage:
        """Returns the same store whose requests fail at a time of the monotonic clock.

        It is the same in all else: connections, bounds and counters are shared.
        """
        timed = copy.copy(self)
        timed._end_at(end_s)
        return timed

    def _end_at(self, end_s: float) -> None:
        self._patience = replace(self._patience, end_s=end_s)

    # --- Requests

    def _ask(self, verb: str, name: str, *arguments: Any, **options: Any) -> Any:
        """Returns the answer to one request of obstore's, which is asked again where that helps."""
        import obstore

        request = getattr(obstore, f"{verb}_async")
        return self._tried(name, lambda: request(self._store, *arguments, **options))

    def _tried(self, name: str, make: Begin) -> Any:
        where = f"{self.root}/{name}" if name else self.root
        tries = 0

        def attempt(timeout_s: float) -> Any:
            nonlocal tries
            tries += 1
            try:
                return self._once(make, timeout_s)
            except Exception as error:
                if _is_verdict(error):
                    raise _ConditionFails(tries) from error
                fault = fault_of(error, where)
                if is_throttled(error):
                    self._reads.hedges.note_throttled()
                if fault.passes:
                    raise Busy(fault) from error
                raise fault.error from error

        return self._patience.ask(attempt)

    def _once(self, make: Begin, timeout_s: float) -> Any:
        """Waits for one try. At the deadline, and on Ctrl-C, it is broken off."""
        try:
            loop = _loop(os.getpid())
        except RuntimeError:  # the interpreter ends, and starts no thread for it
            return asyncio.run(asyncio.wait_for(awaited(make), timeout_s))
        answer = _Answer(make)
        try:
            loop.call_soon_threadsafe(answer.begin, loop)
            return answer.wait(timeout_s)
        except BaseException:
            loop.call_soon_threadsafe(answer.cancel)
            raise

    # --- Files

    def write(self, name: str, size: int, parts: Iterable[Part]) -> None:
        """Writes a file: see Storage. Parts that come in order, from offset 0 on, are streamed."""
        # A few files with several parts each end at about the same time. Many with one part each
        # would leave the last of them alone with the network.
        wanted = min(-(-size // PART_BYTES), PARTS_OF_ONE_FILE)
        with self._sent.taken(HELD_BYTES, wanted * HELD_BYTES) as taken:
            coming = iter(parts)
            first = next(coming, (-1, ()))
            parts = itertools.chain([first], coming)
            if size <= PART_BYTES or first[0] != 0:
                self.put(name, joined(name, size, parts))
            else:
                self._stream(_Upload(name, size, parts, max(1, taken // HELD_BYTES)))

    def _stream(self, upload: _Upload) -> None:
        # obstore tries a part again in its own time. At the deadline nobody waits for it: the
        # upload ends with its next part, and no record will name the file.
        ended = Latch()
        try:
            do_beside(self._send, upload, ended)
            in_time = ended.wait(self._patience.end_s - self._patience.clock())
        except BaseException as error:  # Ctrl-C
            upload.failures.append(error)
            raise
        if not in_time:
            late = fault_of(TimeoutError(), f"{self.root}/{upload.name}").error
            upload.failures.append(late)
        if upload.failures:
            raise upload.failures[0]

    def _send(self, upload: _Upload, ended: Latch) -> None:
        try:
            self._put_parts(upload)
        except BaseException as error:
            upload.failures.append(error)
        finally:
            ended.set()

    def _put_parts(self, upload: _Upload) -> None:
        import obstore

        try:
            obstore.put(
                self._streams,
                self._prefix + upload.name,
                upload.buffers(),
                use_multipart=True,
                chunk_size=PART_BYTES,
                max_concurrency=upload.at_once,
            )
        except Exception as error:
            raise fault_of(error, f"{self.root}/{upload.name}").error from error
        finally:
            upload.lent.wait()

    @property
    def can_copy(self) -> bool:
        # Azure may answer before its copy is done, and obstore does not tell.
        return self._scheme != "az"

    def copy(self, source: str, name: str) -> None:
        """Copies a file within the bucket: see CopiesFiles."""
        self._ask("copy", source, self._prefix + source, self._prefix + name)

    def size(self, name: str) -> int:
        return int(self._ask("head", name, self._prefix + name)["size"])

    def read(self, name: str, offset: int, buffers: Buffers) -> int:
        return self.read_sized(name, offset, buffers)[0]

    def read_sized(self, name: str, offset: int, buffers: Buffers) -> tuple[int, int | None]:
        """Fills the buffers as `read` does; returns the size of the file too: see TellsSizes."""
        wanted = sum(buffer.nbytes for buffer in buffers)
        # The bytes are taken until they are copied.
        with self._room.taken(wanted):
            found = self._sized_range(name, offset, offset + wanted, wanted)
            return fill(buffers, found.data), found.size

    def _range(self, name: str, start: int, stop: int) -> Any:
        # A small file is asked for by its limit: for that there is no room for a second try.
        return self._sized_range(name, start, stop, min(stop - start, SPARE_BYTES)).data

    def _sized_range(self, name: str, start: int, stop: int, expected_bytes: int) -> _Found:
        if stop <= start:
            return _Found(b"")
        key = self._prefix + name
        try:
            found: _Found = self._tried(
                name,
                lambda: self._reads.read(
                    lambda: _asked(self._store, key, {"range": (start, stop)}), expected_bytes
                ),
            )
        except OSError as error:
            if error.errno == errno.ENOTSUP:
                return _Found(self._tried(name, lambda: _cut_out(self._store, key, start, stop)))
            # An empty object has no range, nor has one that ends before `start`.
            if error.errno == errno.EIO and (size := self.size(name)) <= start:
                return _Found(b"", size)
            raise
        return found

    def delete(self, names: Sequence[str]) -> None:
        keys = [self._prefix + name for name in names if not name.endswith("/")]
        if self._scheme == "s3" and keys:
            self._ask("delete", "", keys)  # a thousand in one request
        else:
            run_side_by_side(self._delete, keys, self.max_concurrency)

    def _delete(self, key: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._ask("delete", key, key)

    def _entries(self, folder: str, *, recursive: bool) -> list[Entry]:
        prefix = (self._prefix + folder) or None
        found = self._tried(folder, lambda: _listed(self._store, prefix, recursive=recursive))
        skip = len(self._prefix)
        entries = [Entry(f"{path[skip:]}/", 0) for path in found["common_prefixes"]]
        for meta in found["objects"]:
            modified_s = meta["last_modified"].timestamp()
            entries.append(Entry(meta["path"][skip:], meta["size"], modified_s))
        return sorted(entries, key=lambda entry: entry.name)

    def statistics(self) -> dict[str, int]:
        """Returns how many reads there were, and how many of these were asked a second time."""
        hedges = self._reads.hedges
        return {"store_reads": hedges.reads, "store_hedged_reads": hedges.hedged_reads}

    # --- Writes on conditions

    def get(self, name: str) -> Versioned:
        try:
            found = self._tried(name, lambda: _asked(self._store, self._prefix + name))
        except FileNotFoundError:
            return None, MISSING
        return bytes(found.data), str(found.e_tag).encode()

    def put(
        self, name: str, data: bytes | bytearray, generation: bytes | None = None
    ) -> bool | None:
        mode: Any = "overwrite"
        if generation is not None and not self.single_writer:
            mode = {"e_tag": generation.decode()} if generation else "create"
        key = self._prefix + name
        lent = _Lent()
        try:
            self._ask("put", name, key, lent.lend(data), mode=mode, use_multipart=False)
        except _ConditionFails as refusal:
            return False if refusal.tries == 1 else None
        if self._scheme != "memory":  # which keeps them
            lent.wait()
        return True

    # --- What tensorstore opens

    @property
    def tensorstore(self) -> TensorStoreAccess | None:
        """Other libraries' arrays are read on s3:// alone: tensorstore knows no other of these."""
        return self if self._scheme == "s3" else None

    @property
    def context(self) -> Any:
        return tensorstore_context()

    def kvstore(self, folder: str) -> dict[str, Any]:
        """Returns tensorstore's spec of a folder, with those settings that it has too."""
        settings = self._store.config
        spec: dict[str, Any] = {"driver": "s3"}
        for ours, theirs in _TENSORSTORE_NAMES:
            if ours in settings:
                spec[theirs] = settings[ours]
        if settings.get("request_payer") == "true":
            spec["requester_pays"] = True
        if settings.get("skip_signature") == "true":
            spec["aws_credentials"] = {"type": "anonymous"}
        elif "AWS_ACCESS_KEY_ID" in os.environ:
            # It comes first in AWS's own order too, which complains of what it lacks.
            spec["aws_credentials"] = {"type": "environment"}
        path = self._prefix + folder.strip("/")
        return dict(spec, path=f"{path.strip('/')}/" if path else "")


class _ConditionFails(Exception):
    """A store has refused a write by its condition, at the last of so many tries."""

    def __init__(self, tries: int) -> None:
        super().__init__(tries)
        self.tries = tries


class _Lent:
    """Buffers that obstore's threads hold. Thread-safe.

    They let go of a buffer only some time after the answer. If the interpreter ends in between, the
    process is aborted. And whoever wrote the bytes may use their memory for something else.
    """

    def __init__(self) -> None:
        self._given = 0
        self._returned: list[None] = []

    def lend(self, data: Any) -> memoryview:
        """Returns the bytes as a buffer that is counted until it is let go of."""
        array = np.frombuffer(data, np.uint8)
        weakref.finalize(array, self._take_back)
        self._given += 1
        return array.data

    def _take_back(self) -> None:
        self._returned.append(None)

    def wait(self) -> None:
        """Waits until all are let go of, for LET_GO_S at most."""
        end = time.monotonic() + LET_GO_S
        while len(self._returned) < self._given and time.monotonic() < end:
            time.sleep(0.0005)


@dataclass(eq=False)
class _Upload:
    """A file that is streamed, with so many parts at once on their way. `failures` are why it ends,
    the first of them counts.
    """

    name: str
    size: int
    parts: Iterable[Part]
    at_once: int
    failures: list[BaseException] = field(default_factory=list)
    lent: _Lent = field(default_factory=_Lent)

    def buffers(self) -> Iterator[memoryview]:
        """Yields the buffers of parts that come in order. Notes what they raise."""
        at = 0
        try:
            for offset, buffers in self.parts:
                assert offset == at, f"{self.name}: a part for {offset} came where {at} was next"
                for buffer in buffers:
                    if self.failures:
                        raise self.failures[0]
                    if buffer.nbytes:
                        at += buffer.nbytes
                        yield self.lent.lend(buffer.cast("B"))
            assert at == self.size, f"{self.name}: the parts made {at} bytes of {self.size}"
        except GeneratorExit:
            raise
        except BaseException as error:
            self.failures.append(error)
            raise


def _is_verdict(error: Exception) -> bool:
    """Says whether a store has refused a write by its condition."""
    from obstore.exceptions import AlreadyExistsError, PreconditionError

    return isinstance(error, (AlreadyExistsError, PreconditionError))


class _Answer:
    """What a coroutine has come to that runs in a loop, for the thread that waits for it: a Future
    would take locks there that Ctrl-C leaves held, and the loop would wait for them for ever.
    """

    def __init__(self, make: Begin) -> None:
        self._make = make
        self._ended = Latch()
        self._task: asyncio.Task[Any] | None = None

    def begin(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begins it, in the loop."""
        self._task = loop.create_task(awaited(self._make))
        self._task.add_done_callback(lambda task: self._ended.set())

    def cancel(self) -> None:
        """Breaks it off, in the loop."""
        if self._task is not None:
            self._task.cancel()

    def wait(self, timeout_s: float) -> Any:
        """Returns what it returns, or raises what it raises, and TimeoutError."""
        if not self._ended.wait(timeout_s):
            raise TimeoutError
        assert self._task is not None
        return self._task.result()


@dataclass(frozen=True, slots=True)
class _Found:
    """Bytes of an object, and what was told of the whole."""

    data: Any
    size: int | None = None
    e_tag: str | None = None

    def __len__(self) -> int:
        return len(self.data)


async def _asked(store: Any, key: str, options: Any = None) -> _Found:
    import obstore

    answer = await obstore.get_async(store, key, options=options)
    return _Found(await answer.bytes_async(), answer.meta["size"], answer.meta["e_tag"])


async def _listed(store: Any, prefix: str | None, *, recursive: bool) -> Any:
    """Returns what is below a prefix, as obstore's listings with a delimiter have it."""
    import obstore

    if not recursive:
        return await obstore.list_with_delimiter_async(store, prefix)
    objects = await obstore.list(store, prefix=prefix).collect_async()
    return {"objects": objects, "common_prefixes": ()}


async def _cut_out(store: Any, key: str, start: int, stop: int) -> bytes:
    """Returns a range from a server that sends whole objects only; the rest is broken off."""
    import obstore

    answer = await obstore.get_async(store, key)
    wanted = bytearray()
    at = 0
    async for piece in answer.stream(min_chunk_size=1 << 20):
        wanted += memoryview(piece)[max(0, start - at) : max(0, stop - at)]
        at += len(piece)
        if at >= stop:
            break
    return bytes(wanted)


@cache
def _loop(pid: int) -> asyncio.AbstractEventLoop:
    """Returns the loop that this process's requests run in, on a thread of its own. Raises OSError
    where it cannot be made, for instance without descriptors.

    A forked child has none of its parent's threads.
    """
    made: list[asyncio.AbstractEventLoop | Exception] = []
    is_made = Latch()
    start_thread(_run_loop, made, is_made)
    is_made.wait()
    if isinstance(made[0], Exception):
        raise made[0]
    return made[0]


def _run_loop(made: list[asyncio.AbstractEventLoop | Exception], is_made: Latch) -> None:
    """Runs a loop for ever; it is made here, where Ctrl-C does not leave half of one."""
    try:
        made.append(asyncio.new_event_loop())
    except Exception as error:
        made.append(error)
    finally:
        is_made.set()
    if isinstance(made[0], asyncio.AbstractEventLoop):
        made[0].run_forever()


@cache
def _memory() -> Any:
    from obstore.store import MemoryStore

    return MemoryStore()


def _opened(scheme: str, bucket: str, query: str) -> tuple[Any, Any]:
    """Returns obstore's store of a bucket twice: for requests, and for files in parts."""
    if scheme == "memory":
        if query:
            raise ValueError(f"a store in memory has no settings, found ?{query}")
        return _memory(), _memory()
    settings = dict(parse_qsl(query))
    endpoint, make = (_s3 if scheme == "s3" else _azure)(bucket, settings)

    def opened(read_timeout_s: float, tries: int, tries_s: float) -> Any:
        return make(
            client_options={
                "allow_http": endpoint.startswith("http://"),
                "connect_timeout": timedelta(seconds=10),
                "read_timeout": timedelta(seconds=read_timeout_s),
                "timeout": timedelta(days=1),  # its default of 30 s is for a whole request
            },
            retry_config={"max_retries": tries, "retry_timeout": timedelta(seconds=tries_s)},
        )

    return opened(LOOK_S, 0, 0), opened(PART_S, _TRIES_OF_A_PART, PART_S)


def _s3(bucket: str, settings: dict[str, str]) -> tuple[str, Callable[..., Any]]:
    """Returns the endpoint of a bucket, and what makes its store."""
    from obstore.store import S3Store

    endpoint = _endpoint(settings)
    config: Any = dict(settings)
    host = urlsplit(endpoint).hostname
    if not endpoint.startswith("http://") or host in _LOOPBACK:
        # TLS protects the payload already, and to sign it costs more than to send it.
        config = {"unsigned_payload": "true"} | config
    return endpoint, partial(
        S3Store, bucket, config=config, credential_provider=_profile_credentials(settings)
    )


def _endpoint(settings: dict[str, str]) -> str:
    for name in ("endpoint", "aws_endpoint", "endpoint_url", "aws_endpoint_url"):
        if name in settings:
            return settings[name]
    return os.environ.get("AWS_ENDPOINT_URL_S3", os.environ.get("AWS_ENDPOINT_URL", ""))


def _profile_credentials(settings: dict[str, str]) -> Any:
    """Returns what renews the credentials of a profile of AWS's files, by boto3; None without.

    obstore knows all other sources itself, and renews what they give.
    """
    has_key = "AWS_ACCESS_KEY_ID" in os.environ or any("access_key_id" in name for name in settings)
    if has_key or settings.get("skip_signature") == "true":
        return None
    files = [
        os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"),
        os.environ.get("AWS_CONFIG_FILE", "~/.aws/config"),
    ]
    has_file = any(os.path.exists(os.path.expanduser(file)) for file in files)
    if not has_file or importlib.util.find_spec("boto3") is None:
        return None
    from obstore.auth.boto3 import Boto3CredentialProvider

    return Boto3CredentialProvider()


def _azure(bucket: str, settings: dict[str, str]) -> tuple[str, Callable[..., Any]]:
    """Returns the endpoint of a container, and what makes its store."""
    from obstore.store import AzureStore

    config: Any = settings
    # Azurite and its like listen without TLS.
    endpoint = "http://" if settings.get("use_emulator") == "true" else ""
    return endpoint, partial(AzureStore, bucket, config=config)


def _let_answers_land() -> None:
    """Waits, as the interpreter exits, until obstore's threads have come out of Python.

    One of its threads hands each answer to the loop, in Python. A thread that the interpreter's end
    meets there is ended by CPython, which aborts the process: no frame of Rust's may be unwound.
    """
    if not _loop.cache_info().currsize:
        return  # no request was made
    end = time.monotonic() + LAND_S
    calm = 0
    while calm < LOOKS_FOR_CALM and time.monotonic() < end:
        # A sleep gives the interpreter to whoever waits for it, with a Python frame or without.
        time.sleep(0.005)
        calm = 0 if _some_hand_over() else calm + 1


def _some_hand_over() -> bool:
    for frame in sys._current_frames().values():
        caller: FrameType | None = frame
        while caller is not None:
            if caller.f_code.co_name == "call_soon_threadsafe":
                return True
            caller = caller.f_back
    return False


# Registered before the hooks that wait for saves, it runs after them.
atexit.register(_let_answers_land)
