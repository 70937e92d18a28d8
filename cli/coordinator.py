"""`holdfast coordinator`: serves one job until it is over."""

from __future__ import annotations

import os
from pathlib import Path

import click

# By default newer grpcio reads sockets on a pool of threads ("event engine"), each message waking three of them before ours. One thread
# serves here, and is faster when it reads for itself (benchmarks/RESULTS-coordination.md). gRPC looks at this when it is imported.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")

from holdfast.coordination.server.journal import JournalError
from holdfast.coordination.server.main import LINGER_S, STARTUP_TIMEOUT_S, Options, serve
from holdfast.coordination.server.transports import Tls

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_TOKEN_CHARACTERS = 16


@click.command()
@click.option("--num-processes", "-n", type=click.IntRange(1), required=True, help="Processes of the job.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen at.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, show_default=True, help="Port to listen at; 0 takes a free one.")
@click.option("--advertise", metavar="HOST", help="Host to print, where others reach it by another name than --host.")
@click.option("--job", default="", help="Id of the job; Sessions of another are refused.")
@click.option("--attempt", default=0, show_default=True, help="Attempt of the job; Sessions of another are refused.")
@click.option("--recoverable", is_flag=True, help="A process may die and come back; the others go on.")
@click.option("--survivable", is_flag=True, help="jaxlib's clients live through a restart of this coordinator; they hear of errors later.")
@click.option(
    "--heartbeat-timeout-s", type=click.FloatRange(0.1), default=100.0, show_default=True, help="Silence after which a process is lost."
)
@click.option(
    "--shutdown-timeout-s",
    type=click.FloatRange(0.1),
    default=300.0,
    show_default=True,
    help="Wait of the first to shut down for the rest.",
)
@click.option(
    "--linger-s", type=click.FloatRange(0), default=LINGER_S, show_default=True, help="Ends when all have been dead so long; 0: never."
)
@click.option(
    "--startup-timeout-s", type=click.FloatRange(0), default=STARTUP_TIMEOUT_S, show_default=True, help="Ends when nobody came; 0: never."
)
@click.option("--journal", type=click.Path(dir_okay=False), help="File that keeps the state: killed and restarted, it goes on.")
@click.option("--tls-cert", type=_FILE, help="PEM certificate; with it, clients need one of --tls-ca.")
@click.option("--tls-key", type=_FILE, help="PEM key of --tls-cert.")
@click.option("--tls-ca", type=_FILE, help="PEM certificate of the authority that clients' certificates come from.")
@click.option("--token-file", type=_FILE, help="File with the token that every call must hold.")
@click.option("--metrics-port", type=click.IntRange(0, 65535), help="Port for Prometheus; 0 takes a free one.")
@click.option("--metrics-host", default="127.0.0.1", show_default=True, help="Address to serve metrics at.")
@click.option("--public-api", is_flag=True, help="Serve over grpc.aio: slower, and only gRPC's public API.")
def coordinator(
    num_processes: int, tls_cert: Path | None, tls_key: Path | None, tls_ca: Path | None, token_file: Path | None, **options: object
) -> None:
    """Serves the processes of one job: who is alive, keys, barriers.

    Prints `coordinator at HOST:PORT` when it serves, and ends by itself once every process has shut down or stayed dead.
    """
    try:
        tls, token = _tls(tls_cert, tls_key, tls_ca), _token(token_file)
        serve(Options(num_processes, tls=tls, token=token, **options))  # type: ignore[arg-type]
    except (OSError, JournalError) as error:
        raise click.ClickException(str(error)) from None


def _tls(certificate: Path | None, key: Path | None, authority: Path | None) -> Tls | None:
    if certificate is None and key is None and authority is None:
        return None
    if certificate is None or key is None or authority is None:
        raise click.UsageError("--tls-cert, --tls-key and --tls-ca belong together: expected all three")
    return Tls(key.read_bytes(), certificate.read_bytes(), authority.read_bytes())


def _token(file: Path | None) -> str | None:
    if file is None:
        return None
    token = file.read_text().strip()
    if len(token) < _TOKEN_CHARACTERS:
        raise click.UsageError(f"--token-file {file}: expected at least {_TOKEN_CHARACTERS} characters, found {len(token)}")
    return token
