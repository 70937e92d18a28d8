"""What a client shows: read when it is used, checked where it is given, and never printed."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from holdfast.coordination import CoordinationError, Credentials
from holdfast.coordination.names import KEY_HEADER, TOKEN_HEADER
from tests.support.secured import secure
from tests.support.tls import lock


def test_nothing_to_show() -> None:
    """Plaintext and no headers; each object draws a key of its own all the same."""
    one = Credentials()
    another = Credentials()
    assert one.empty and one.metadata() == () and one.tls() is None
    assert one.key != another.key and one == another


def test_the_token_is_read_when_it_is_shown(tmp_path: Path) -> None:
    """A token may be renewed between attempts; white space around it does not count."""
    file = tmp_path / "token"
    credentials = Credentials(str(file))
    for token in ("first", "second"):
        file.write_text(f" {token}\n")
        assert credentials.metadata() == (
            (TOKEN_HEADER, f"Bearer {token}"),
            (KEY_HEADER, credentials.key),
        )


def test_a_file_is_that_of_the_current_folder_at_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that goes to another folder reads it there still, when it connects again."""
    (tmp_path / "token").write_text("secret")
    monkeypatch.chdir(tmp_path)
    credentials = Credentials("token")
    monkeypatch.chdir("/")
    assert dict(credentials.metadata())[TOKEN_HEADER] == "Bearer secret"


def test_a_certificate_alone_shows_the_key_too(tmp_path: Path) -> None:
    """mTLS without a token: the key says whose the process is."""
    own = secure(tmp_path).own
    credentials = Credentials(tls_cert=own.tls_cert, tls_key=own.tls_key, tls_ca=own.tls_ca)
    assert credentials.metadata() == ((KEY_HEADER, credentials.key),)
    assert isinstance(credentials.tls(), grpc.ChannelCredentials)


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        (
            {"tls_cert": "c", "tls_ca": "a"},
            (
                "tls_cert, tls_key, tls_ca belong together: .* expected all three, found tls_cert,"
                " tls_ca"
            ),
        ),
        ({"tls_key": "k"}, "expected all three, found tls_key"),
        ({"tls_cert": "c", "tls_key": "k"}, "expected all three, found tls_cert, tls_key"),
        ({"tls_ca": "a"}, "expected all three, found tls_ca"),
    ],
)
def test_files_that_do_not_go_together(files: dict[str, str], sentence: str) -> None:
    """ValueError, before anything is read."""
    with pytest.raises(ValueError, match=sentence):
        Credentials(**files)


def test_a_file_without_content_is_an_error(tmp_path: Path) -> None:
    """UNAUTHENTICATED, with what the file is for."""
    (tmp_path / "empty").write_text(" \n")
    with pytest.raises(CoordinationError, match=r"UNAUTHENTICATED: the token file .* is empty"):
        Credentials(str(tmp_path / "empty")).metadata()
    with pytest.raises(
        CoordinationError,
        match=r"UNAUTHENTICATED: cannot read the TLS CA file .*: No such file or directory",
    ):
        Credentials(None, "c", "k", str(tmp_path / "none")).tls()


def test_a_key_with_a_passphrase_is_an_error(tmp_path: Path) -> None:
    """And no question at a terminal, at either end."""
    security = secure(tmp_path)
    assert security.own.tls_key is not None
    for key in (Path(security.own.tls_key), security.server.key):
        lock(key)
    for context in (security.own.tls, security.own.tls_context, security.server.for_sockets):
        with pytest.raises(CoordinationError, match=r"UNAUTHENTICATED: .*without a passphrase"):
            context()


@pytest.mark.parametrize("token", [bytes(range(128, 160)), "a s\u00e9cret".encode(), b"one\ntwo"])
def test_a_token_that_no_call_can_show_is_an_error(token: bytes, tmp_path: Path) -> None:
    """Random bytes, letters beyond ASCII and several lines: gRPC sends none of them."""
    (tmp_path / "token").write_bytes(token)
    with pytest.raises(CoordinationError, match=r"UNAUTHENTICATED: the token file .* ASCII"):
        Credentials(str(tmp_path / "token")).metadata()


def test_a_key_is_not_printed() -> None:
    """Neither by repr nor by str."""
    credentials = Credentials(key="very secret")
    assert "very secret" not in f"{credentials!r} {credentials}"
