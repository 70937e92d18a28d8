"""What a job with mTLS and a token needs, and what strangers show; and members who meet."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tls import Authority

from holdfast.coordination import CoordinationClient, Credentials


@dataclass
class Security:
    """Files of a secured job: what its members show, and what strangers may try with."""

    folder: Path
    own: Credentials
    arguments: tuple[str, ...]

    def member(self) -> Credentials:
        """Returns what one more process of the job shows: certificate and token of the job, and a key of its own."""
        return Credentials(self.own.token_file, self.own.tls_cert, self.own.tls_key, self.own.tls_ca)

    def stranger(self, kind: str) -> Credentials:
        """Returns what a stranger shows."""
        own = self.own
        foreign = Authority(self.folder, "theirs").issue("stranger")
        (self.folder / "old").write_text("a token of the attempt before\n")
        return {
            "plaintext": Credentials(own.token_file),
            "no certificate": Credentials(own.token_file, tls_ca=own.tls_ca),
            "another authority": Credentials(own.token_file, foreign.cert, foreign.key, own.tls_ca),
            "no token": Credentials(None, own.tls_cert, own.tls_key, own.tls_ca),
            "an old token": Credentials(str(self.folder / "old"), own.tls_cert, own.tls_key, own.tls_ca),
        }[kind]


def secure(folder: Path) -> Security:
    """Makes the files of a secured job."""
    authority = Authority(folder, "ours")
    server, client = authority.issue("server"), authority.issue("client")
    token = folder / "token"
    token.write_text("a token of the job, long enough\n")
    arguments = (f"--tls-cert={server.cert}", f"--tls-key={server.key}", f"--tls-ca={server.ca}", f"--token-file={token}")
    return Security(folder, Credentials(str(token), client.cert, client.key, client.ca), arguments)


def at_once(calls: list[Callable[[], object]]) -> None:
    """Runs calls in threads of their own, and fails unless all come back well."""
    failures: list[BaseException] = []

    def run(call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    assert not failures and not any(thread.is_alive() for thread in threads), failures


def together(clients: list[CoordinationClient], name: str) -> None:
    """Fails unless the clients pass a barrier."""
    at_once([lambda client=client: client.wait_at_barrier(name, 30_000) for client in clients])  # type: ignore[misc]


def join(address: str, credentials: list[Credentials]) -> list[CoordinationClient]:
    """Returns connected clients, one for each of `credentials`."""
    clients = [CoordinationClient(address, index, credentials=shown, init_timeout_s=30) for index, shown in enumerate(credentials)]
    at_once([client.connect for client in clients])
    return clients
