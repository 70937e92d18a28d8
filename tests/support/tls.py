"""Makes certificate authorities and certificates for tests, and comes as a stranger to servers with
TLS.
"""

from __future__ import annotations

import datetime
import ipaddress
import socket
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@dataclass(frozen=True)
class Pems:
    """Files of one identity."""

    cert: str
    key: str
    ca: str


class Authority:
    """Issues certificates for 127.0.0.1, or another address, into a folder."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._name = name
        self._key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._certificate = self._builder(subject, subject, self._key).add_extension(
            x509.BasicConstraints(True, None), True
        )
        self._issuer = subject
        self._ca = self._write(
            "ca.pem",
            self._certificate.sign(self._key, hashes.SHA256()).public_bytes(
                serialization.Encoding.PEM
            ),
        )

    @staticmethod
    def _builder(
        subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, *, hours: int = 24
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        builder = x509.CertificateBuilder(
            subject_name=subject, issuer_name=issuer, public_key=key.public_key()
        )
        builder = builder.serial_number(x509.random_serial_number())
        return builder.not_valid_before(now - datetime.timedelta(days=1)).not_valid_after(
            now + datetime.timedelta(hours=hours)
        )

    def _write(self, name: str, content: bytes) -> str:
        path = self._folder / f"{self._name}-{name}"
        path.write_bytes(content)
        return str(path)

    def issue(
        self,
        name: str,
        address: str = "127.0.0.1",
        *,
        uris: Sequence[str] = (),
        usages: Sequence[x509.ObjectIdentifier] = (),
        is_over: bool = False,
    ) -> Pems:
        """Returns the files of a new identity, for these extended usages alone if there are any;
        one that `is_over` is valid no more.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = self._builder(subject, self._issuer, key, hours=-1 if is_over else 24)
        names = x509.SubjectAlternativeName(
            [
                x509.DNSName("localhost"),
                x509.IPAddress(ipaddress.ip_address(address)),
                *map(x509.UniformResourceIdentifier, uris),
            ]
        )
        builder = builder.add_extension(names, False)
        if usages:
            builder = builder.add_extension(x509.ExtendedKeyUsage(usages), False)
        certificate = builder.sign(self._key, hashes.SHA256())
        private = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        cert = self._write(f"{name}.crt", certificate.public_bytes(serialization.Encoding.PEM))
        return Pems(cert, self._write(f"{name}.key", private), self._ca)


Stranger = Callable[[str, Path], socket.socket]
"""Connects to a server, HOST:PORT, as one who is not of its job; a folder for files of its own."""


def lock(key: Path) -> None:
    """Encrypts a key's file with a passphrase."""
    known = serialization.load_pem_private_key(key.read_bytes(), None)
    locked = serialization.BestAvailableEncryption(b"word")
    key.write_bytes(
        known.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, locked)
    )


def dial(address: str) -> socket.socket:
    """Connects to HOST:PORT."""
    host, port = address.split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def _believing_anyone() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def of_another_authority(address: str, folder: Path) -> socket.socket:
    """Shows a certificate of its own authority."""
    context = _believing_anyone()
    pems = Authority(folder, "theirs").issue("stranger")
    context.load_cert_chain(pems.cert, pems.key)
    return context.wrap_socket(dial(address))


def without_certificate(address: str, folder: Path) -> socket.socket:
    """Shows none."""
    return _believing_anyone().wrap_socket(dial(address))


def in_the_clear(address: str, folder: Path) -> socket.socket:
    """Speaks no TLS."""
    stranger = dial(address)
    stranger.sendall(b"n" * 64)
    return stranger


STRANGERS: list[Stranger] = [of_another_authority, without_certificate, in_the_clear]
