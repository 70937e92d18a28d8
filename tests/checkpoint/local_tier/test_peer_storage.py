"""Reading from peers: liars, silent ones, and the next copy."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from crc32c import crc32c

from holdfast.checkpoint import Corrupt
from holdfast.checkpoint.format.item_report import FileReport
from holdfast.checkpoint.format.record import ItemRecord
from holdfast.checkpoint.local_tier.peer_storage import PeerStorage
from holdfast.checkpoint.restoring.reader import ItemReader
from holdfast.checkpoint.storage.local import LocalStorage
from holdfast.multihost.peers import part_server
from holdfast.multihost.peers.part_server import (
    ANSWER,
    MAGIC,
    NONCE_BYTES,
    PROOF_BYTES,
    REQUEST,
    PartServer,
    proof,
    receive_bytes,
)
from holdfast.multihost.peers.peer_connection import PeerConnection, PeerFailed, Peers
from tests.multihost.peers.test_part_server import BYTES, FILE, KEY, SECRET, make_part


@contextmanager
def _liar(answer: Callable[[socket.socket], None], *, greets: bool = True) -> Iterator[str]:
    """Yields the address of a server that proves itself like ours, and then does as it likes."""
    listener = socket.create_server(("127.0.0.1", 0))
    ended = threading.Event()

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            if greets:
                connection.sendall(MAGIC + b"n" * NONCE_BYTES)
                found = receive_bytes(connection, NONCE_BYTES + PROOF_BYTES, 10)
                connection.sendall(
                    proof(SECRET, b"server", b"n" * NONCE_BYTES + found[:NONCE_BYTES])
                )
                receive_bytes(connection, REQUEST.size + len(FILE), 10)
            answer(connection)
            ended.wait(20)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        ended.set()
        thread.join(10)
        listener.close()


LIES: dict[str, bytes] = {
    "more than was asked for": ANSWER.pack(0, 11) + b"x" * 11,
    "a size beyond all": ANSWER.pack(0, 2**64 - 1),
    "an answer that there is not": ANSWER.pack(77, 0),
    "absent, with bytes": ANSWER.pack(1, 5) + b"x" * 5,
    "half an answer": ANSWER.pack(0, 10) + b"x" * 5,
    "nothing": b"",
}


@pytest.mark.parametrize("kind", LIES)
def test_a_peer_that_lies_is_an_error_in_time(kind: str) -> None:
    """Nothing is believed beyond what was asked for, and nobody waits longer than allowed."""
    began = time.monotonic()
    with (
        _liar(lambda connection: connection.sendall(LIES[kind])) as address,
        PeerConnection(address, SECRET) as peer,
    ):
        with pytest.raises(PeerFailed, match=f"the part server at {address} could not give"):
            peer.read(FILE, 0, [memoryview(bytearray(10))], 0.3)
    assert time.monotonic() - began < 10


def test_a_peer_that_drips_is_silent_in_the_end() -> None:
    """A byte now and then does not make a call last longer."""
    stopping = threading.Event()

    def drip(connection: socket.socket) -> None:
        connection.sendall(ANSWER.pack(0, 10_000))
        while not stopping.wait(0.05):
            connection.sendall(b"x")

    with _liar(drip) as address, PeerConnection(address, SECRET) as peer:
        with pytest.raises(PeerFailed, match="silent for too long"):
            peer.read(FILE, 0, [memoryview(bytearray(10_000))], 0.4)
        stopping.set()


@pytest.mark.parametrize(
    "greeting",
    [b"SSH-2.0-OpenSSH\r\n" + b"x" * 100, MAGIC + b"n" * NONCE_BYTES + b"x" * PROOF_BYTES, b""],
)
def test_what_is_no_part_server_is_not_asked(greeting: bytes) -> None:
    """Another service at that port, a server without the secret, one that says nothing."""
    with _liar(lambda connection: connection.sendall(greeting), greets=False) as address:
        with pytest.raises(PeerFailed, match=f"{address} could not prove itself"):
            PeerConnection(address, SECRET, timeout_s=0.3)


def test_nobody_at_the_address() -> None:
    """A host that is gone is an error with its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(PeerFailed, match=f"127.0.0.1:{port} could not be reached"):
        PeerConnection(f"127.0.0.1:{port}", SECRET)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[PartServer]]:
    """Yields the servers of ranks 0 to 2, which all hold process 1's part."""
    servers = [PartServer("127.0.0.1", SECRET) for _ in range(3)]
    for rank, server in enumerate(servers):
        part = make_part(tmp_path / str(rank))
        server.publish(tmp_path / str(rank), part.name, part.files)
    yield servers
    for server in servers:
        server.close()


@contextmanager
def _storage(hosts: list[PartServer], tmp_path: Path, own: int = 0) -> Iterator[PeerStorage]:
    with Peers({rank: server.address for rank, server in enumerate(hosts)}, SECRET, 5) as peers:
        yield PeerStorage(
            LocalStorage(tmp_path / str(own)),
            KEY.folder,
            b"{}",
            [[0], [0, 1, 2]],
            own=frozenset({own}),
            peers=peers,
        )


def _read(storage: PeerStorage, offset: int = 0, size: int = 10) -> bytes:
    data = bytearray(size)
    assert storage.read(FILE, offset, [memoryview(data)]) == size
    return bytes(data)


def test_the_own_folder_comes_first(hosts: list[PartServer], tmp_path: Path) -> None:
    """Where this host has the file, no peer is asked."""
    with _storage(hosts, tmp_path, own=1) as storage:
        assert _read(storage, 5) == BYTES[5:15]
        assert storage.fetch(f"{KEY.folder}/checkpoint.json", 100) == b"{}"
    assert [server.statistics()["connections"] for server in hosts] == [0, 0, 0]


def test_a_copy_that_is_gone_is_passed_over(hosts: list[PartServer], tmp_path: Path) -> None:
    """The own file deleted, a peer dead: the next has it, and connections are used again."""
    (tmp_path / "0" / FILE).unlink()
    hosts[1].close()
    with _storage(hosts, tmp_path) as storage:
        for _ in range(3):
            assert _read(storage) == BYTES[:10]
    assert hosts[2].statistics()["connections"] == 1


def test_a_damaged_copy_is_passed_over_when_told(hosts: list[PartServer], tmp_path: Path) -> None:
    """Each copy once; then there is none, and reading says so. Other files' copies stay."""
    with _storage(hosts, tmp_path) as storage:
        assert not storage.distrust(FILE), "it was never read"
        for rank in range(3):
            (tmp_path / str(rank) / FILE).write_bytes(bytes([rank]) * len(BYTES))
            assert _read(storage) == bytes([rank]) * 10
            assert storage.distrust(FILE) == (rank < 2)
        with pytest.raises(FileNotFoundError, match="no host that is there has a copy"):
            _read(storage)


def test_a_file_comes_whole_from_the_copy_that_is(hosts: list[PartServer], tmp_path: Path) -> None:
    """No byte of a damaged copy of a file is passed on; where all are damaged, it is Corrupt."""
    for rank in range(2):
        (tmp_path / str(rank) / FILE).write_bytes(bytes(len(BYTES)))
    file = FileReport(FILE.removeprefix(f"{KEY.folder}/"), len(BYTES), 0, crc32c(BYTES))
    item = ItemRecord("state", "files", (file,))
    with _storage(hosts, tmp_path) as storage:
        reader = ItemReader(storage, KEY.folder, item)
        assert b"".join(map(bytes, reader.pieces(file))) == BYTES
        assert reader.read_whole(file) == BYTES
        (tmp_path / "2" / FILE).write_bytes(bytes(len(BYTES)))
        with pytest.raises(Corrupt):
            next(reader.pieces(file))


def test_each_reader_blames_the_copy_that_it_has_read(
    hosts: list[PartServer], tmp_path: Path
) -> None:
    """Threads read ranges of one file from several copies at once; the good one is not blamed."""
    damaged = tmp_path / "0" / FILE
    damaged.write_bytes(bytes(len(BYTES)))
    has_read = threading.Event()
    may_blame = threading.Event()

    def read_damaged(storage: PeerStorage) -> bytes:
        data = _read(storage)
        has_read.set()
        assert may_blame.wait(20)
        assert storage.distrust(FILE)
        return data

    with ThreadPoolExecutor(1) as pool, _storage(hosts[:2], tmp_path) as storage:
        first = pool.submit(read_damaged, storage)
        assert has_read.wait(20)
        damaged.unlink()  # so that this thread reads from the other copy
        assert _read(storage) == BYTES[:10]
        may_blame.set()
        assert first.result(20) == bytes(10)
        damaged.write_bytes(bytes(len(BYTES)))
        assert _read(storage) == BYTES[:10]


def test_more_readers_than_places_all_read(
    hosts: list[PartServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers that keep their connections to the end give way to those that wait, however often."""
    monkeypatch.setattr(part_server, "MOST_CONNECTIONS", 2)
    readers = 12
    have_read = threading.Barrier(readers)

    def read(reader: int) -> bytes:
        with _storage(hosts[1:], tmp_path, own=9) as storage:
            first = _read(storage, reader)
            have_read.wait(60)
            return first + _read(storage, 100 + reader)

    with ThreadPoolExecutor(readers) as pool:
        found = list(pool.map(read, range(readers)))
    assert found == [
        BYTES[reader : reader + 10] + BYTES[100 + reader : 110 + reader]
        for reader in range(readers)
    ]


def test_a_holder_that_failed_serves_again(hosts: list[PartServer], tmp_path: Path) -> None:
    """A peer that could not be reached once is asked again where no other has the file."""
    hosts[1].close()
    addresses = {1: hosts[1].address}
    with Peers(addresses, SECRET, 5) as peers:
        storage = PeerStorage(
            LocalStorage(tmp_path / "0"),
            KEY.folder,
            b"{}",
            [[], [1]],
            own=frozenset(),
            peers=peers,
        )
        with pytest.raises(PeerFailed):
            _read(storage)
        addresses[1] = hosts[2].address
        assert _read(storage) == BYTES[:10]


@pytest.mark.parametrize(
    "name",
    [
        "../x",
        "1/8-0000000100000001/state/00001-x",
        f"{KEY.folder}/state/x",
        f"{KEY.folder}/state/00009-0",
    ],
)
def test_names_of_no_part_are_nowhere(name: str, hosts: list[PartServer], tmp_path: Path) -> None:
    """What belongs to no process of the step is asked of nobody."""
    with _storage(hosts, tmp_path) as storage, pytest.raises(FileNotFoundError):
        storage.read(name, 0, [memoryview(bytearray(1))])


def test_a_local_step_is_only_read(hosts: list[PartServer], tmp_path: Path) -> None:
    """Its record is known, no other file is small, and a listing is empty."""
    with _storage(hosts, tmp_path) as storage:
        with pytest.raises(FileNotFoundError):
            storage.fetch("x", 1)
        assert storage.list("") == []
