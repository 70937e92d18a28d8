"""The part server over real sockets: what peers get, and what strangers and liars do not."""

from __future__ import annotations

import _thread
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint.format.item_report import FileReport, ItemReport, pack_name
from holdfast.checkpoint.local_tier.parts import LocalKey, Part, StepHead
from holdfast.multihost.peers import part_server
from holdfast.multihost.peers.part_server import (
    ABSENT,
    ANSWER,
    MAGIC,
    NONCE_BYTES,
    PROOF_BYTES,
    REQUEST,
    PartServer,
    proof,
    receive_bytes,
)
from holdfast.multihost.peers.peer_connection import PeerConnection, PeerFailed, PeerLate

SECRET = b"s" * 32
KEY = LocalKey(7, 1, "0000000100000001", 2)
BYTES = bytes(range(256)) * 1000
FILE = f"{KEY.folder}/state/{pack_name(1, 0, KEY.save_id)}"


def make_part(folder: Path, data: bytes = BYTES, process: int = 1) -> Part:
    """Writes a pack of a part, and returns the part."""
    name = pack_name(process, 0, KEY.save_id)
    path = folder / KEY.folder / "state" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    report = ItemReport(process, "p", (FileReport(name, len(data), 0, 0),))
    part = Part(
        "0" * 32, KEY, process, {"state": report}, None if process else StepHead({}, 1.0, 2.0)
    )
    (folder / KEY.part_name(process)).write_bytes(part.to_bytes())
    return part


@pytest.fixture
def server(tmp_path: Path) -> Iterator[PartServer]:
    with PartServer("127.0.0.1", SECRET) as server:
        part = make_part(tmp_path)
        server.publish(tmp_path, part.name, part.files)
        (tmp_path / "secret.txt").write_text("not a part")
        yield server


def _raw(server: PartServer) -> socket.socket:
    """Returns a connection that has proved itself, to say anything over."""
    host, port = server.address.split(":")
    connection = socket.create_connection((host, int(port)), timeout=10)
    nonces = (
        receive_bytes(connection, len(MAGIC) + NONCE_BYTES, 10)[len(MAGIC) :] + b"n" * NONCE_BYTES
    )
    connection.sendall(b"n" * NONCE_BYTES + proof(SECRET, b"client", nonces))
    assert receive_bytes(connection, PROOF_BYTES, 10) == proof(SECRET, b"server", nonces)
    return connection


def _is_ended(connection: socket.socket) -> bool:
    connection.settimeout(10)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_a_peer_gets_parts_and_ranges_of_files(server: PartServer, tmp_path: Path) -> None:
    """A part's text, and any range of a file, short at its end, over one connection."""
    with PeerConnection(server.address, SECRET) as peer:
        assert peer.wait(KEY.part_name(1), 5) == make_part(tmp_path).to_bytes()
        first = bytearray(10)
        second = bytearray(300)
        assert peer.read(FILE, 100, [memoryview(first), memoryview(second)], 5) == 310
        assert first + second == BYTES[100:410]
        assert peer.read(FILE, len(BYTES) - 4, [memoryview(first)], 5) == 4
        assert first[:4] == BYTES[-4:]
        assert peer.read(FILE, len(BYTES), [memoryview(first)], 5) == 0
        assert peer.read(FILE, len(BYTES) + 999, [memoryview(first)], 5) == 0
    assert server.statistics()["served_bytes"] == 314 + len(make_part(tmp_path).to_bytes())


def test_memory_is_served_and_what_is_not_there_yet_is_said(server: PartServer) -> None:
    """A range of what `find` returns, late where it raises TimeoutError, absent where it returns
    None: all over one connection.
    """
    asked: list[tuple[str, int, int]] = []

    def find(name: str, offset: int, size: int) -> memoryview | None:
        asked.append((name, offset, size))
        if len(asked) == 1:
            raise TimeoutError
        return memoryview(BYTES)[offset : offset + size] if name == "there" else None

    server.offer_memory(find)
    with PeerConnection(server.address, SECRET) as peer:
        found = bytearray(10)
        with pytest.raises(PeerLate, match="could not give there: it was not published in time"):
            peer.read("there", 7, [memoryview(found)], 5)
        assert peer.read("there", 7, [memoryview(found)], 5) == 10
        assert found == BYTES[7:17]
        with pytest.raises(FileNotFoundError):
            peer.read("absent", 0, [memoryview(found)], 5)
    assert asked == [("there", 7, 10), ("there", 7, 10), ("absent", 0, 10)]


STOPPED = """
import socket, sys
from holdfast.multihost.peers.part_server import receive_bytes
connection = socket.socket(fileno=int(sys.argv[1]))
print("waits", flush=True)
print(receive_bytes(connection, 3, 1.0), flush=True)
"""


def test_a_process_that_was_stopped_blames_nobody() -> None:
    """Stopped for longer than it would wait, it has waited for one slice when it goes on."""
    own, other = socket.socketpair()
    with (
        own,
        other,
        subprocess.Popen(
            [sys.executable, "-c", STOPPED, str(other.fileno())],
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=[other.fileno()],
        ) as process,
    ):
        assert process.stdout is not None
        assert process.stdout.readline() == "waits\n"
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(1.5)  # longer than it waits in all
        os.kill(process.pid, signal.SIGCONT)
        time.sleep(0.3)  # two slices
        own.sendall(b"yes")
        assert process.stdout.read() == "b'yes'\n"


def test_wait_returns_once_the_part_is_published(server: PartServer, tmp_path: Path) -> None:
    """Who asks before it is there gets it the moment it comes; who asks for what was given up is
    told at once.
    """
    found: list[bytes] = []

    def ask() -> None:
        with PeerConnection(server.address, SECRET) as peer:
            found.append(peer.wait(KEY.part_name(0), 30))

    asking = threading.Thread(target=ask)
    asking.start()
    part = make_part(tmp_path, process=0)
    server.publish(tmp_path, part.name, part.files)
    asking.join(20)
    assert found == [part.to_bytes()]
    server.give_up(KEY.part_name(9))
    with PeerConnection(server.address, SECRET) as peer, pytest.raises(FileNotFoundError):
        peer.wait(KEY.part_name(9), 30)


def test_a_part_that_never_comes_is_waited_for_no_longer_than_asked(server: PartServer) -> None:
    """The wait is bounded, and its error says which peer and what."""
    with (
        PeerConnection(server.address, SECRET) as peer,
        pytest.raises(PeerFailed, match=r"127\.0\.0\.1:\d+ could not give .*part-00000"),
    ):
        peer.wait(KEY.part_name(0), 0.2)


NAMES = [
    "secret.txt",
    "../secret.txt",
    f"{KEY.folder}/../../secret.txt",
    "/etc/passwd",
    f"./{FILE}",
    FILE + "/",
    KEY.folder,
    "x" * 512,
    "\0",
]


@pytest.mark.parametrize("name", NAMES, ids=lambda name: repr(name[:20]))
def test_names_that_were_not_published_are_absent(name: str, server: PartServer) -> None:
    """A name is looked up, never joined to a path; the connection goes on."""
    with PeerConnection(server.address, SECRET) as peer:
        with pytest.raises(FileNotFoundError):
            peer.read(name, 0, [memoryview(bytearray(10))], 5)
        assert peer.read(FILE, 0, [memoryview(bytearray(10))], 5) == 10


def test_what_was_withdrawn_is_absent(server: PartServer) -> None:
    """A local step that is let go is served no more."""
    server.withdraw(KEY.folder)
    with PeerConnection(server.address, SECRET) as peer, pytest.raises(FileNotFoundError):
        peer.read(FILE, 0, [memoryview(bytearray(10))], 5)


def test_a_thread_that_cannot_be_started_ends_one_connection(
    server: PartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a limit of processes: the peer hears at once, and the next connection is served."""
    refused = [RuntimeError("can't start new thread")]
    start = _thread.start_new_thread

    def start_one(*arguments: Any) -> int:
        if refused:
            raise refused.pop()
        return start(*arguments)

    monkeypatch.setattr(_thread, "start_new_thread", start_one)
    host, port = server.address.split(":")
    with socket.create_connection((host, int(port)), timeout=10) as first:
        assert _is_ended(first)
    with PeerConnection(server.address, SECRET) as peer:
        assert peer.read(FILE, 0, [memoryview(bytearray(10))], 5) == 10
    assert refused == []


def test_a_link_in_place_of_a_pack_is_not_followed(server: PartServer, tmp_path: Path) -> None:
    """Who can write into the folder cannot make the server read elsewhere."""
    (tmp_path / FILE).unlink()
    (tmp_path / FILE).symlink_to(tmp_path / "secret.txt")
    with PeerConnection(server.address, SECRET) as peer, pytest.raises(FileNotFoundError):
        peer.read(FILE, 0, [memoryview(bytearray(10))], 5)


def test_a_wrong_secret_gets_nothing(server: PartServer) -> None:
    """A process of another attempt is refused; so is a server that does not know the secret, by its
    client.
    """
    with pytest.raises(PeerFailed, match="could not prove itself"):
        PeerConnection(server.address, b"t" * 32)
    assert server.statistics()["refused"] == 1


@pytest.mark.parametrize(
    "garbage",
    [
        b"\0" * 4096,
        b"GET / HTTP/1.1\r\nHost: here\r\n\r\n" + b"x" * 100,
        os.urandom(4096),
    ],
    ids=["zeros", "http", "noise"],
)
def test_strangers_are_refused(garbage: bytes, server: PartServer) -> None:
    """Whatever who has not proved itself says, the connection ends, and others are served."""
    host, port = server.address.split(":")
    with socket.create_connection((host, int(port)), timeout=10) as stranger:
        receive_bytes(stranger, len(MAGIC) + NONCE_BYTES, 10)
        stranger.sendall(garbage)
        assert _is_ended(stranger)
    with PeerConnection(server.address, SECRET) as peer:
        assert peer.read(FILE, 0, [memoryview(bytearray(10))], 5) == 10


@pytest.mark.parametrize(
    "request_bytes",
    [
        REQUEST.pack(0, 0, 0, 1),
        REQUEST.pack(65535, 0, 0, 1),
        REQUEST.pack(513, 1, 0, 0),
    ],
    ids=["no name", "a long name", "a name too long"],
)
def test_requests_that_do_not_fit_end_the_connection(
    request_bytes: bytes, server: PartServer
) -> None:
    """Also of one that has proved itself."""
    with _raw(server) as connection:
        connection.sendall(request_bytes)
        assert _is_ended(connection)


def test_offsets_and_sizes_beyond_the_file_bring_nothing(server: PartServer) -> None:
    """Numbers up to 2^64 - 1 are answered with what there is."""
    name = FILE.encode()
    with _raw(server) as connection:
        connection.sendall(REQUEST.pack(len(name), 0, 2**64 - 1, 2**64 - 1) + name)
        assert ANSWER.unpack(receive_bytes(connection, ANSWER.size, 10)) == (0, 0)
        connection.sendall(REQUEST.pack(4, 0, 0, 1) + b"\xff\xfe\xfd\xfc")
        assert ANSWER.unpack(receive_bytes(connection, ANSWER.size, 10)) == (ABSENT, 0)


def test_there_is_a_most_of_connections(
    server: PartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond it a peer waits to be greeted, until one that was answered is ended, or one goes."""
    monkeypatch.setattr(part_server, "MOST_CONNECTIONS", 1)
    with _raw(server) as first:
        with pytest.raises(PeerFailed, match="could not prove itself: it was silent for too long"):
            PeerConnection(server.address, SECRET, timeout_s=0.2)
        name = FILE.encode()
        first.sendall(REQUEST.pack(len(name), 0, 0, 1) + name)
        receive_bytes(first, ANSWER.size + 1, 10)
        for _ in range(3):
            with PeerConnection(server.address, SECRET) as peer:
                assert peer.read(FILE, 0, [memoryview(bytearray(10))], 5) == 10
        assert _is_ended(first)


def test_who_waits_learns_of_the_end(server: PartServer) -> None:
    """`close` ends all connections at once, those that wait too, and may be called again."""
    with PeerConnection(server.address, SECRET) as peer:
        threading.Timer(0.05, server.close).start()
        with pytest.raises(OSError, match=r"No such|could not give|no such"):
            peer.wait(KEY.part_name(0), 60)
    server.close()


def test_a_server_that_is_forgotten_is_warned_of() -> None:
    """As every object that lives long."""
    server = PartServer("127.0.0.1", SECRET)
    with pytest.warns(ResourceWarning, match="was not closed"):
        server.__del__()
    server.close()
