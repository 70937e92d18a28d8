"""A token and certificates that are made for one job alone: its processes prove themselves by them.

The launcher makes them and hands them on by its own channel, never by arguments or logs. On each
host one relay shows them to the coordinator, for all the processes there: they connect to its Unix
socket, with nothing to prove and nothing to hide.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib
import ipaddress
import json
import secrets
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from holdfast.coordination import Credentials, Relay
from holdfast.coordination.distribution import install_command
from holdfast.coordination.process.job_folder import JobFolder

_VARIABLE = "HOLDFAST_JOB_SECRETS"
_VALID_DAYS = 3650  # of the certificates: longer than any job
_CLIENT = {
    "token": "token",
    "ca": "ca.crt",
    "client_cert": "client.crt",
    "client_key": "client.key",
    "key": "key",
}
_SERVER = {
    "token": "token",
    "ca": "ca.crt",
    "server_cert": "server.crt",
    "server_key": "server.key",
}
CLIENT_FILES = tuple(_CLIENT.values())
SERVER_FILES = tuple(_SERVER.values())


@dataclass(frozen=True)
class JobSecrets:
    """A token, the key that speaks for all processes, and PEM certificates. Its repr shows none."""

    token: str = field(repr=False)
    key: str = field(repr=False)
    ca: str = field(repr=False)
    server_cert: str = field(repr=False)
    server_key: str = field(repr=False)
    client_cert: str = field(repr=False)
    client_key: str = field(repr=False)

    @classmethod
    def create(cls, hosts: Sequence[str]) -> Self:
        """Makes new ones, for a coordinator that is reached as `hosts`.

        The authority's own key is kept nowhere. Raises ImportError with the line that installs what
        is missing.
        """
        authority = _Authority()
        server_cert, server_key = authority.issue("coordinator", [*hosts, "localhost", "127.0.0.1"])
        client_cert, client_key = authority.issue("process", [])
        return cls(
            token=secrets.token_urlsafe(32),
            key=secrets.token_hex(16),
            ca=authority.pem,
            server_cert=server_cert,
            server_key=server_key,
            client_cert=client_cert,
            client_key=client_key,
        )

    def files_of_client(self) -> dict[str, str]:
        """Returns names and contents of the files that a relay needs."""
        return {name: str(getattr(self, attribute)) for attribute, name in _CLIENT.items()}

    def files_of_server(self) -> dict[str, str]:
        """Returns names and contents of the files that a coordinator needs."""
        return {name: str(getattr(self, attribute)) for attribute, name in _SERVER.items()}

    @classmethod
    def from_folder(cls, folder: Path) -> Self:
        """Reads what a client needs, from files as `files_of_client` names them. Raises OSError."""
        values = {attribute: (folder / name).read_text() for attribute, name in _CLIENT.items()}
        return cls(**values, server_cert="", server_key="")

    def to_env(self) -> dict[str, str]:
        """Returns a variable with what a client needs; the start of a task takes it out."""
        return {_VARIABLE: json.dumps(asdict(self) | {"server_cert": "", "server_key": ""})}

    @classmethod
    def take_from_env(cls, environment: MutableMapping[str, str]) -> Self | None:
        """Returns what `to_env` wrote, and removes it; None where it is not there."""
        text = environment.pop(_VARIABLE, "")
        return cls(**json.loads(text)) if text else None


def server_arguments(folder: Path) -> tuple[str, ...]:
    """Returns the options of a coordinator whose files are in `folder`."""
    return (
        f"--tls-cert={folder}/server.crt",
        f"--tls-key={folder}/server.key",
        f"--tls-ca={folder}/ca.crt",
        f"--token-file={folder}/token",
    )


def write_files(folder: Path, files: dict[str, str]) -> None:
    """Writes files that only their owner can read."""
    for name, content in files.items():
        path = folder / name
        path.touch(mode=0o600)
        path.write_text(content)


def credentials_in(folder: JobFolder, job: JobSecrets) -> Credentials:
    """Writes what a client needs into `folder`, and returns the credentials that name the files."""
    write_files(folder.path, job.files_of_client())
    return folder.credentials(job.key)


def spawn_relay(
    coordinator: str, job: JobSecrets, process_ids: Sequence[int], *, name: str = "relay"
) -> Relay:
    """Starts the relay of this host, for the processes `process_ids`. CoordinationError.

    Nothing of the secrets stays on the host's disk.
    """
    with shown(job) as credentials:
        return Relay.spawn(coordinator, credentials, process_ids, name=name)


@contextlib.contextmanager
def shown(job: JobSecrets | None) -> Iterator[Credentials]:
    """Has the files of a client be there for a block, in which channels are made with them."""
    if job is None:
        yield Credentials()
        return
    folder = JobFolder.create()
    try:
        yield credentials_in(folder, job)
    finally:
        folder.remove()


def require_cryptography() -> None:
    """Raises ImportError, with the line that installs it, where certificates cannot be made."""
    _module("cryptography.x509")


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            "a job that leaves this machine is closed to others by certificates, which need"
            f" cryptography: {install_command('tls')}, or --insecure"
        ) from error


class _Authority:
    """An authority of one job. Untyped: cryptography is an optional dependency."""

    def __init__(self) -> None:
        self._x509 = _module("cryptography.x509")
        self._key = _module("cryptography.hazmat.primitives.asymmetric.ec")
        self._hashes = _module("cryptography.hazmat.primitives.hashes")
        self._serialization = _module("cryptography.hazmat.primitives.serialization")
        self._private = self._new_key()
        self._subject = self._name("holdfast job")
        builder = self._builder(self._subject, self._private).add_extension(
            self._x509.BasicConstraints(True, 0), True
        )
        self.pem = self._signed(builder)

    def _new_key(self) -> Any:
        return self._key.generate_private_key(self._key.SECP256R1())

    def _name(self, name: str) -> Any:
        return self._x509.Name(
            [self._x509.NameAttribute(_module("cryptography.x509.oid").NameOID.COMMON_NAME, name)]
        )

    def _builder(self, subject: Any, private: Any) -> Any:
        now = datetime.datetime.now(datetime.UTC)
        builder = self._x509.CertificateBuilder(
            subject_name=subject, issuer_name=self._subject, public_key=private.public_key()
        )
        builder = builder.serial_number(self._x509.random_serial_number())
        day = datetime.timedelta(days=1)  # clocks differ
        return builder.not_valid_before(now - day).not_valid_after(now + _VALID_DAYS * day)

    def _signed(self, builder: Any) -> str:
        signed = builder.sign(self._private, self._hashes.SHA256())
        return str(signed.public_bytes(self._serialization.Encoding.PEM).decode())

    def issue(self, name: str, hosts: Sequence[str]) -> tuple[str, str]:
        """Returns certificate and key of a new identity that is reached as `hosts`."""
        private = self._new_key()
        builder = self._builder(self._name(name), private)
        if hosts:
            builder = builder.add_extension(
                self._x509.SubjectAlternativeName([self._general_name(host) for host in hosts]),
                False,
            )
        serialization = self._serialization
        key = private.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        return self._signed(builder), str(key.decode())

    def _general_name(self, host: str) -> Any:
        try:
            return self._x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
        except ValueError:
            return self._x509.DNSName(host)
