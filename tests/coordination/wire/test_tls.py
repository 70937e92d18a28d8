"""TLS between bytes: two sides talk over nothing but what they return."""

from __future__ import annotations

import os
import ssl
from pathlib import Path

import pytest

from holdfast.coordination import Credentials
from holdfast.coordination.server.listening import Tls
from holdfast.coordination.wire.tls import STEP_BYTES, TlsBytes
from tests.support.tls import Authority, Pems


def _server(pems: Pems) -> TlsBytes:
    tls = Tls(Path(pems.key), Path(pems.cert), Path(pems.ca))
    return TlsBytes(tls.for_sockets())


def _client(pems: Pems) -> TlsBytes:
    context = Credentials(None, pems.cert, pems.key, pems.ca).tls_context()
    assert context is not None
    return TlsBytes(context, server_name="127.0.0.1")


def _shake(client: TlsBytes, server: TlsBytes) -> None:
    for _ in range(5):
        assert server.receive(client.output()) == b""
        assert client.receive(server.output()) == b""
    assert client.open and server.open


def test_bytes_come_through(tmp_path: Path) -> None:
    """Both ways, in pieces, and the server knows the names in the client's certificate."""
    authority = Authority(tmp_path, "job")
    client = _client(authority.issue("client", uris=["holdfast:process/3"]))
    server = _server(authority.issue("server"))
    _shake(client, server)
    assert b"holdfast:process/3" in server.names()
    sent = os.urandom(3 * STEP_BYTES + 5)
    for one, other in ((client, server), (server, client)):
        one.write(sent)
        encrypted = one.output()
        found = b""
        while encrypted:
            found += other.receive(encrypted[:1_000])
            encrypted = encrypted[1_000:]
        assert found == sent


def test_the_end_of_one_side_follows_what_it_has_sent(tmp_path: Path) -> None:
    """As a relay ends its side of a Session."""
    authority = Authority(tmp_path, "job")
    client = _client(authority.issue("client"))
    server = _server(authority.issue("server"))
    _shake(client, server)
    client.write(b"the last")
    with pytest.raises(ssl.SSLWantReadError):
        client._tls.unwrap()
    assert not server.ended
    assert server.receive(client.output()) == b"the last" and server.ended


@pytest.mark.parametrize("whose", ["the client's", "the server's"])
def test_another_authority_is_refused(tmp_path: Path, whose: str) -> None:
    """On either side, by an SSLError of the one that finds it."""
    (tmp_path / "other").mkdir()
    ours = Authority(tmp_path, "ours")
    other = Authority(tmp_path / "other", "other").issue("stranger")
    mine = ours.issue("peer")
    stranger = Pems(other.cert, other.key, mine.ca)
    client = _client(stranger if whose == "the client's" else mine)
    server = _server(mine if whose == "the client's" else stranger)
    with pytest.raises(ssl.SSLError, match="CERTIFICATE_VERIFY_FAILED"):
        _shake(client, server)


def test_garbage_is_an_error(tmp_path: Path) -> None:
    """So is plaintext."""
    server = _server(Authority(tmp_path, "job").issue("server"))
    with pytest.raises(ssl.SSLError):
        server.receive(b"HFS1 and no TLS after it, which would begin otherwise")
