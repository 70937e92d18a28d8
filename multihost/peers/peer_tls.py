"""TLS between part servers and their peers, with the files by which the processes of a job reach
their coordinator.

Both sides show a certificate of the job's authority; which names it bears does not matter. The
proof of the secret that follows covers the server's certificate, so that who has another
certificate of that authority cannot stand in the middle and pass it on.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path

_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)


def first_certificate(file: str) -> bytes:
    """Returns the first certificate of a PEM file as DER, b"" where it has none."""
    found = _CERTIFICATE.search(Path(file).read_text())
    return ssl.PEM_cert_to_DER_cert(found[0]) if found else b""


class BadTlsFiles(OSError):
    """Says which files of TLS cannot be used, and why."""


@dataclass(frozen=True)
class PeerTls:
    """Certificate, key and authority, PEM files. They are read at each connection: certificates may
    be renewed while a job runs.

    What is returned takes the place of the plain connection. Raises BadTlsFiles.
    """

    cert: str
    key: str
    ca: str

    def check(self) -> None:
        """Shows the certificate to itself, in both roles: peers would refuse what does not pass."""
        to_server = ssl.MemoryBIO()
        to_client = ssl.MemoryBIO()
        server = self._context(ssl.PROTOCOL_TLS_SERVER).wrap_bio(
            to_server, to_client, server_side=True
        )
        client = self._context(ssl.PROTOCOL_TLS_CLIENT).wrap_bio(to_client, to_server)
        try:
            for side in (client, server, client, server):
                with contextlib.suppress(ssl.SSLWantReadError):
                    side.do_handshake()
        except OSError as error:
            raise self._error(error) from error

    def accepted(self, connection: socket.socket) -> tuple[ssl.SSLSocket, bytes]:
        """Returns a connection that came in, before its handshake, and the fingerprint of the
        certificate that it shows.
        """
        context = self._context(ssl.PROTOCOL_TLS_SERVER)
        try:
            fingerprint = hashlib.sha256(first_certificate(self.cert)).digest()
        except (OSError, ValueError) as error:  # it is being renewed
            raise self._error(error) from error
        return (
            context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False),
            fingerprint,
        )

    def connected(self, connection: socket.socket) -> tuple[ssl.SSLSocket, bytes]:
        """Returns a connection to a server, after its handshake, and the fingerprint of the
        server's certificate.

        The connection's timeout holds for the whole handshake. Raises OSError where it fails.
        """
        secured = self._context(ssl.PROTOCOL_TLS_CLIENT).wrap_socket(connection)
        return secured, hashlib.sha256(secured.getpeercert(binary_form=True) or b"").digest()

    def _context(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        context.verify_flags |= (
            ssl.VERIFY_X509_PARTIAL_CHAIN
        )  # an intermediate authority may be the root of trust, as for the coordinator
        try:
            context.load_verify_locations(self.ca)
            context.load_cert_chain(
                self.cert, self.key, password=""
            )  # an encrypted key is an error, and no question at a terminal
        except OSError as error:
            raise self._error(error) from error
        return context

    def _error(self, error: Exception) -> BadTlsFiles:
        files = (
            f"the certificate {self.cert} with the key {self.key} does not pass for one of"
            f" {self.ca}"
        )
        return BadTlsFiles(
            f"{files}: {type(error).__name__}: {error}; expected one that is valid now, for servers"
            " and for clients"
        )
