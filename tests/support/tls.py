"""Makes certificate authorities and certificates for tests."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
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
        self._folder, self._name = folder, name
        self._key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._certificate = self._builder(subject, subject, self._key).add_extension(x509.BasicConstraints(True, None), True)
        self._issuer = subject
        self._ca = self._write("ca.pem", self._certificate.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))

    @staticmethod
    def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        builder = x509.CertificateBuilder(subject_name=subject, issuer_name=issuer, public_key=key.public_key())
        builder = builder.serial_number(x509.random_serial_number())
        return builder.not_valid_before(now - datetime.timedelta(days=1)).not_valid_after(now + datetime.timedelta(days=1))

    def _write(self, name: str, content: bytes) -> str:
        path = self._folder / f"{self._name}-{name}"
        path.write_bytes(content)
        return str(path)

    def issue(self, name: str, address: str = "127.0.0.1", *, uris: Sequence[str] = ()) -> Pems:
        """Returns the files of a new identity."""
        key = ec.generate_private_key(ec.SECP256R1())
        builder = self._builder(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]), self._issuer, key)
        names = x509.SubjectAlternativeName(
            [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address(address)), *map(x509.UniformResourceIdentifier, uris)]
        )
        certificate = builder.add_extension(names, False).sign(self._key, hashes.SHA256())
        private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        cert = self._write(f"{name}.crt", certificate.public_bytes(serialization.Encoding.PEM))
        return Pems(cert, self._write(f"{name}.key", private), self._ca)
