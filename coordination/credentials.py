"""What a client shows to a secured coordinator: a certificate, a token (both optional), and the key
of its process.
"""

from __future__ import annotations

import secrets
import ssl
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from .errors import CoordinationError
from .limits import silence_options
from .names import KEY_HEADER, TOKEN_HEADER


@dataclass(frozen=True)
class Credentials:
    """The files that hold a client's proof of identity. All None: plaintext, no token.

    `tls_cert`, `tls_key` and `tls_ca` go together: a coordinator with TLS lets in nobody without a
    certificate. Files are read when a channel is made, so a token may be renewed between a job's
    attempts. An empty or unreadable file is a CoordinationError.

    Each object draws a `key`, a secret that goes with every call to a secured coordinator: a
    process id belongs to the first process that came with it, and this key proves it. A process's
    client and its relay share one object.
    """

    token_file: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_ca: str | None = None
    key: str = field(default_factory=lambda: secrets.token_hex(16), repr=False, compare=False)

    def __post_init__(self) -> None:
        require_together(tls_cert=self.tls_cert, tls_key=self.tls_key, tls_ca=self.tls_ca)
        # Read again at each connection, whatever the current folder is by then.
        for name in ("token_file", "tls_cert", "tls_key", "tls_ca"):
            file = getattr(self, name)
            if file is not None:
                object.__setattr__(self, name, str(Path(file).expanduser().absolute()))

    @property
    def empty(self) -> bool:
        """Returns whether there is nothing to show."""
        return self.token_file is None and self.tls_ca is None

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Returns the call metadata that carries key and token; nothing where there is nobody to
        show them to.
        """
        if self.empty:
            return ()
        key = (KEY_HEADER, self.key)
        if self.token_file is None:
            return (key,)
        return ((TOKEN_HEADER, f"Bearer {read_token(self.token_file)}"), key)

    def tls(self) -> grpc.ChannelCredentials | None:
        """Returns the credentials of a channel, None for plaintext."""
        # gRPC takes any files, and only its connections fail, with words about handshakes.
        if self.tls_context() is None:
            return None
        return grpc.ssl_channel_credentials(*self._pems())

    def tls_context(self) -> ssl.SSLContext | None:
        """Returns what a Session is opened with, None for plaintext."""
        if self.tls_ca is None or self.tls_cert is None or self.tls_key is None:
            return None
        self._pems()  # names a file that cannot be read
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        load_pem(context, self.tls_cert, self.tls_key, self.tls_ca)
        return context

    def _pems(self) -> list[bytes]:
        files = {"TLS CA": self.tls_ca, "TLS key": self.tls_key, "TLS certificate": self.tls_cert}
        return [_read(path, what) for what, path in files.items() if path]

    def channel(self, address: str, silence_s: float = 20.0) -> grpc.Channel:
        """Opens a channel: TLS where a CA is named, plaintext otherwise.

        A connection ends after so much silence. Whoever only asks has no heartbeat, and its next
        question should find a connection.
        """
        tls = self.tls()
        options = channel_options(silence_s)
        if tls is None:
            return grpc.insecure_channel(address, options)
        return grpc.secure_channel(address, tls, options)


def channel_options(silence_s: float) -> tuple[tuple[str, int], ...]:
    """Returns gRPC's settings for a client whose connection ends after a silence."""
    return (
        ("grpc.max_receive_message_length", -1),
        ("grpc.max_send_message_length", -1),
        # A proxy between the processes of one job is always a mistake of the environment.
        ("grpc.enable_http_proxy", 0),
        ("grpc.initial_reconnect_backoff_ms", 50),
        # The time-out of one attempt to connect: a busy coordinator still finishes what it began.
        ("grpc.min_reconnect_backoff_ms", 20_000),
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.use_local_subchannel_pool", 1),  # two clients in one process share no connection
        *silence_options(silence_s),
    )


def read_token(path: str | Path) -> str:
    """Returns the token in a file. Raises CoordinationError for one that no header of a call can
    hold.
    """
    token = _read(path, "token").decode("latin-1").strip()
    if not (token.isascii() and token.isprintable()):
        raise CoordinationError(
            f"the token file {path} holds no token: expected one line of ASCII characters, as of"
            " `openssl rand -hex 32`",
            code="UNAUTHENTICATED",
        )
    return token


def load_pem(
    context: ssl.SSLContext, certificate: str | Path, key: str | Path, authority: str | Path
) -> None:
    """Gives a context its files. Raises CoordinationError where they do not pass for that."""
    try:
        # Without a password, OpenSSL asks for an encrypted key's at the terminal, and waits.
        context.load_cert_chain(certificate, key, password="")
        context.load_verify_locations(authority)
    except OSError as error:
        raise CoordinationError(
            f"{certificate}, {key} and {authority} are no certificate, its key (without a"
            f" passphrase) and an authority in PEM: {error}",
            code="UNAUTHENTICATED",
        ) from error


def require_together(**files: object) -> None:
    """Raises ValueError unless all three files of mutual TLS are given, or none."""
    given = [name for name, file in files.items() if file is not None]
    if 0 < len(given) < len(files):
        why = "each side shows a certificate, and checks the other's"
        raise ValueError(
            f"{', '.join(files)} belong together: {why}; expected all three, found"
            f" {', '.join(given)}"
        )


def _read(path: str | Path, what: str) -> bytes:
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise CoordinationError(
            f"cannot read the {what} file {path}: {error.strerror}", code="UNAUTHENTICATED"
        ) from error
    if not content.strip():
        raise CoordinationError(f"the {what} file {path} is empty", code="UNAUTHENTICATED")
    return content
