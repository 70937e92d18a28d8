"""Makes certificate authorities, and certificates for 127.0.0.1, for tests."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@dataclass(frozen=True)
class Files:
    """Paths of PEM files."""

    ca: str
    cert: str
    key: str


def make(folder: Path, name: str) -> Files:
    """Makes an authority and one certificate of it, good for servers and clients at 127.0.0.1."""
    authority_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    authority_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{name} authority")])
    now = datetime.datetime.now(datetime.UTC)

    def build(subject: x509.Name, public: ec.EllipticCurvePublicKey, *extensions: x509.ExtensionType) -> bytes:
        builder = x509.CertificateBuilder().subject_name(subject).issuer_name(authority_name).public_key(public)
        builder = builder.serial_number(x509.random_serial_number())
        builder = builder.not_valid_before(now - datetime.timedelta(days=1)).not_valid_after(now + datetime.timedelta(days=1))
        for extension in extensions:
            builder = builder.add_extension(extension, critical=isinstance(extension, x509.BasicConstraints))
        return builder.sign(authority_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName("localhost")])
    contents = {
        "ca": build(authority_name, authority_key.public_key(), x509.BasicConstraints(ca=True, path_length=None)),
        "cert": build(subject, key.public_key(), names),
        "key": key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
    }
    for what, content in contents.items():
        (folder / f"{name}.{what}.pem").write_bytes(content)
    return Files(*(str(folder / f"{name}.{what}.pem") for what in ("ca", "cert", "key")))
