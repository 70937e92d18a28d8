"""TLS between part servers and peers over real sockets: who gets in, who does not, and that nobody
else waits for them.
"""

from __future__ import annotations

import shutil
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
from cryptography.x509.oid import ExtendedKeyUsageOID

from holdfast.multihost.peers import part_server
from holdfast.multihost.peers.part_server import MAGIC, PartServer
from holdfast.multihost.peers.peer_connection import PeerConnection, PeerFailed
from holdfast.multihost.peers.peer_tls import BadTlsFiles, PeerTls
from tests.multihost.peers.test_part_server import FILE, KEY, SECRET, make_part
from tests.support.tls import STRANGERS, Authority, Pems, Stranger, dial, lock

BYTES = b"0123456789abcdef" * 200_000


def tls_of(pems: Pems) -> PeerTls:
    return PeerTls(pems.cert, pems.key, pems.ca)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "ours")


@pytest.fixture
def own(authority: Authority) -> PeerTls:
    """What another process of the job shows: a certificate of its own, of another address."""
    return tls_of(authority.issue("client", "192.0.2.7"))


@pytest.fixture
def server(authority: Authority, tmp_path: Path) -> Iterator[PartServer]:
    with PartServer("127.0.0.1", SECRET, tls_of(authority.issue("server", "192.0.2.8"))) as server:
        part = make_part(tmp_path, BYTES)
        server.publish(tmp_path, part.name, part.files)
        yield server


def reads(server: PartServer, own: PeerTls) -> bool:
    """Says whether a process of the job is served now."""
    found = bytearray(10)
    with PeerConnection(server.address, SECRET, own) as peer:
        return peer.read(FILE, 16, [memoryview(found)], 5) == 10 and found == BYTES[16:26]


def is_ended(connection: socket.socket) -> bool:
    """Says whether the other side ends the connection without a word of a part server's; a record
    of TLS that says why may come.
    """
    said = b""
    try:
        while piece := connection.recv(4096):
            said += piece
    except (ConnectionResetError, ssl.SSLError):
        pass
    assert MAGIC not in said
    return True


def test_parts_and_ranges_come_over_tls(server: PartServer, own: PeerTls, tmp_path: Path) -> None:
    """Over one connection, in pieces larger than a record; names in certificates need not fit."""
    with PeerConnection(server.address, SECRET, own) as peer:
        assert peer.wait(KEY.part_name(1), 5) == make_part(tmp_path, BYTES).to_bytes()
        first = bytearray(10)
        second = bytearray(len(BYTES))
        assert peer.read(FILE, 100, [memoryview(first), memoryview(second)], 5) == len(BYTES) - 100
        assert (first + second)[: len(BYTES) - 100] == BYTES[100:]
    assert server.statistics()["served_bytes"] == len(BYTES) - 100 + len(
        make_part(tmp_path, BYTES).to_bytes()
    )


class Wire:
    """Forwards a connection to a server, and keeps what went over; with `tls` it stands in the
    middle with a certificate of its own.
    """

    def __init__(self, address: str, tls: PeerTls | None = None) -> None:
        self._address = address
        self._tls = tls
        self.heard = b""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._forward)
        self._thread.start()

    def _forward(self) -> None:
        incoming, _ = self._listener.accept()
        outgoing = dial(self._address)
        if self._tls is not None:
            incoming, _ = self._tls.accepted(incoming)
            incoming.do_handshake()
            outgoing, _ = self._tls.connected(outgoing)
        with closing(incoming), closing(outgoing):
            back = threading.Thread(target=self._pump, args=(outgoing, incoming))
            back.start()
            self._pump(incoming, outgoing)
            back.join()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while piece := source.recv(65536):
                self.heard += piece
                sink.sendall(piece)
        except OSError:
            pass
        for each in (source, sink):
            with suppress(OSError):
                socket.socket.shutdown(each, socket.SHUT_RDWR)

    def close(self) -> None:
        self._thread.join(20)
        self._listener.close()


def test_nothing_goes_in_the_clear(server: PartServer, own: PeerTls) -> None:
    """Neither the names that are asked for nor the bytes that come."""
    with closing(Wire(server.address)) as wire, PeerConnection(wire.address, SECRET, own) as peer:
        assert peer.read(FILE, 0, [memoryview(bytearray(100_000))], 5) == 100_000
    assert len(wire.heard) > 100_000
    assert not any(word in wire.heard for word in (MAGIC, FILE.encode(), BYTES[:64]))


def test_another_certificate_of_the_authority_in_the_middle(
    server: PartServer, own: PeerTls, authority: Authority
) -> None:
    """A process of another job under the same authority passes all on, and learns nothing: the
    proof is over the server's certificate.
    """
    with closing(Wire(server.address, tls_of(authority.issue("middle")))) as wire:
        with pytest.raises(PeerFailed, match="could not prove itself"):
            PeerConnection(wire.address, SECRET, own)
    assert server.statistics()["refused"] == 1
    assert reads(server, own)


@pytest.mark.parametrize("stranger", STRANGERS)
def test_strangers_are_refused(
    stranger: Stranger, server: PartServer, own: PeerTls, tmp_path: Path
) -> None:
    """Who shows no certificate of the authority hears not even the greeting, and others are
    served.
    """
    with stranger(server.address, tmp_path) as connection:
        assert is_ended(connection)
    assert reads(server, own)
    assert server.statistics()["refused"] == 1


def test_a_peer_refuses_a_server_that_shows_nothing_or_another_authority(
    own: PeerTls, tmp_path: Path
) -> None:
    """Its bytes are not asked for; the error says which server, and why."""
    foreign = Authority(tmp_path, "theirs").issue("server")
    with (
        PartServer("127.0.0.1", SECRET) as plain,
        pytest.raises(PeerFailed, match=r"the part server at 127\.0\.0\.1:\d+ could not prove"),
    ):
        PeerConnection(plain.address, SECRET, own)
    with (
        PartServer("127.0.0.1", SECRET, tls_of(foreign)) as other,
        pytest.raises(PeerFailed, match="certificate verify failed"),
    ):
        PeerConnection(other.address, SECRET, own)


@pytest.mark.parametrize(
    "said", [b"", b"\x16\x03\x01\x02\x00\x01"], ids=["nothing", "half of a first record"]
)
def test_who_stalls_in_the_handshake_holds_nobody_up(
    said: bytes, server: PartServer, own: PeerTls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others are served meanwhile; its own time is bounded, and the end of the server does not wait
    for it.
    """
    monkeypatch.setattr(part_server, "GREETING_S", 600.0)
    with dial(server.address) as stalled:
        stalled.sendall(said)
        assert reads(server, own)
        monkeypatch.setattr(part_server, "GREETING_S", 0.2)
        with dial(server.address) as bounded:
            bounded.sendall(said)
            assert is_ended(bounded)
        server.close()
        assert is_ended(stalled)


def test_a_server_that_stalls_in_the_handshake_is_given_up(own: PeerTls) -> None:
    """In the time that the caller has."""
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(PeerFailed, match="it was silent for too long"),
    ):
        PeerConnection(f"127.0.0.1:{silent.getsockname()[1]}", SECRET, own, timeout_s=0.3)


def test_certificates_may_be_renewed_while_a_job_runs(
    server: PartServer, own: PeerTls, authority: Authority
) -> None:
    """New connections show the new ones, and those that stand go on."""
    with PeerConnection(server.address, SECRET, own) as peer:
        for role, tls in (("server", server._tls), ("client", own)):
            assert tls is not None
            renewed = authority.issue(f"renewed-{role}")
            shutil.copy(renewed.cert, tls.cert)
            shutil.copy(renewed.key, tls.key)
        assert reads(server, own)
        assert peer.read(FILE, 0, [memoryview(bytearray(10))], 5) == 10


def _encrypted(authority: Authority) -> PeerTls:
    pems = authority.issue("encrypted")
    lock(Path(pems.key))
    return tls_of(pems)


BAD = {
    "no file": lambda authority, other: PeerTls("/missing", "/missing", authority.issue("a").ca),
    "of another authority": lambda authority, other: PeerTls(
        other.cert, other.key, authority.issue("a").ca
    ),
    "another's key": lambda authority, other: PeerTls(
        authority.issue("a").cert, other.key, authority.issue("a").ca
    ),
    "valid no more": lambda authority, other: tls_of(authority.issue("old", is_over=True)),
    "for clients alone": lambda authority, other: tls_of(
        authority.issue("c", usages=[ExtendedKeyUsageOID.CLIENT_AUTH])
    ),
    "a key with a password": lambda authority, other: _encrypted(authority),
}


@pytest.mark.parametrize("kind", BAD)
def test_files_that_peers_would_refuse_are_found_at_the_beginning(
    kind: str, authority: Authority, tmp_path: Path
) -> None:
    """The sentence names them, says why, and what is expected."""
    tls = BAD[kind](authority, Authority(tmp_path, "theirs").issue("b"))
    with pytest.raises(BadTlsFiles) as caught:
        tls.check()
    for part in (
        tls.cert,
        tls.key,
        tls.ca,
        "expected one that is valid now, for servers and for clients",
    ):
        assert part in str(caught.value)


def test_files_that_are_right_pass(authority: Authority) -> None:
    """Also those for servers and clients by name, and a chain that the authority's own certificate
    is in.
    """
    tls_of(authority.issue("a")).check()
    both = authority.issue(
        "b", usages=[ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]
    )
    Path(both.cert).write_text(
        "a comment\n" + Path(both.cert).read_text() + Path(both.ca).read_text()
    )
    tls_of(both).check()
