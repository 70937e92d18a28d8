"""The coordinator as a process: `holdfast coordinator`, its options, and `serve`."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import math
import os
import resource
import secrets
import select
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, TypeVar

import click

from ..address import UNIX, is_loopback, join_address
from ..core.machine import Machine
from ..credentials import read_token, require_together
from ..errors import CoordinationError
from ..limits import Config, Limits, NumberRange
from .journal import JournalError, SqliteJournal
from .listening import Listening, Tls
from .metrics import MetricsServer
from .service import Service
from .transport import OWN_FILES, Transport

log = logging.getLogger("holdfast.coordination")

_SHUT_DOWN_GRACE_S = 1.0
_LOG_BYTES = 16 << 20
_OLD_LOGS = 3
_MIN_TOKEN_CHARACTERS = 16
_FILES_EACH = 4  # a Session, and three of jax's agent
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_Command = TypeVar("_Command", bound=Callable[..., Any])


def _seconds(
    name: str, default: float, help: str, *, least: float = 0, below: float | None = None
) -> Callable[[_Command], _Command]:
    """Returns the option of a time in seconds."""
    kind = NumberRange(least, below, max_open=below is not None)
    return click.option(name, type=kind, default=default, show_default=True, help=help)


@dataclass(frozen=True)
class Options:
    """How a coordinator serves its job, beside the job's `Config`; each field is an option of
    `holdfast coordinator`.
    """

    host: str  # or unix:PATH
    port: int
    advertise: str | None
    linger_s: float
    startup_timeout_s: float
    end_with_input: bool  # when its input ends, its launcher is gone
    log_file: str | None
    journal: str | None
    metrics_port: int | None
    metrics_host: str
    own_folder: Path | None  # which goes when the coordinator ends
    own_file: Path | None  # JSON, whose "coordinator" is the address; goes too


@click.command()
@click.option(
    "--num-processes",
    "-n",
    "num_tasks",
    type=click.IntRange(1, Limits().tasks),
    required=True,
    help="Processes of the job.",
)
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address to listen at, or unix:PATH for a socket.",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=0,
    show_default=True,
    help="Port to listen at; 0 takes a free one.",
)
@click.option(
    "--advertise",
    metavar="HOST",
    help="Host to print, where others reach it by another name than --host.",
)
@click.option("--job", default="", help="Id of the job; Sessions of another are refused.")
@click.option(
    "--attempt",
    default=0,
    show_default=True,
    help="Attempt of the job; Sessions of another are refused.",
)
@click.option(
    "--recoverable", is_flag=True, help="A process may die and come back; the others go on."
)
@click.option(
    "--survivable",
    is_flag=True,
    help="jaxlib's clients live through a restart of this coordinator; they hear of errors later.",
)
@_seconds(
    "--heartbeat-timeout-s",
    100.0,
    "Silence after which a process is lost.",
    least=0.1,
    below=math.inf,
)
@_seconds(
    "--reconnect-grace-s",
    5.0,
    "A process whose side closed its connection without a goodbye is lost after that.",
)
@_seconds("--shutdown-timeout-s", 300.0, "Wait of the first to shut down for the rest.", least=0.1)
@_seconds("--linger-s", 60.0, "Ends when all have been dead so long; 0: never.")
@_seconds("--startup-timeout-s", 3_600.0, "Ends when nobody came; 0: never.")
@click.option(
    "--end-with-input",
    is_flag=True,
    help="Ends when its standard input does: with the process that started it.",
)
@click.option(
    "--log-file",
    type=click.Path(dir_okay=False),
    help="File for what it logs and warns of; rotated at 16 MiB.",
)
@click.option(
    "--journal",
    type=click.Path(dir_okay=False),
    help="File that keeps the state: killed and restarted, it goes on.",
)
@click.option(
    "--tls-cert", type=_FILE, help="PEM certificate; with it, clients need one of --tls-ca."
)
@click.option("--tls-key", type=_FILE, help="PEM key of --tls-cert.")
@click.option(
    "--tls-ca",
    type=_FILE,
    help="PEM certificate of the authority that clients' certificates come from.",
)
@click.option("--token-file", type=_FILE, help="File with the token that every call must hold.")
@click.option(
    "--metrics-port", type=click.IntRange(0, 65535), help="Port for Prometheus; 0 takes a free one."
)
@click.option(
    "--metrics-host", default="127.0.0.1", show_default=True, help="Address to serve metrics at."
)
@click.option("--own-folder", type=click.Path(path_type=Path), hidden=True)
@click.option("--own-file", type=click.Path(path_type=Path), hidden=True)
def coordinator(
    tls_cert: Path | None,
    tls_key: Path | None,
    tls_ca: Path | None,
    token_file: Path | None,
    **settings: Any,
) -> None:
    """Serve the processes of one job: who is alive, keys, barriers.

    Prints `coordinator at HOST:PORT` (or unix:PATH) when it serves, and ends by itself once every
    process has shut down or stayed dead.
    """
    own = {name: settings.pop(name) for name in Options.__dataclass_fields__}
    config = Config(incarnation=secrets.randbits(63) | 1, **settings)
    try:
        serve(config, Options(**own), _tls(tls_cert, tls_key, tls_ca), _token(token_file))
    except (OSError, JournalError, CoordinationError) as error:
        raise click.ClickException(str(error)) from None


def _tls(certificate: Path | None, key: Path | None, authority: Path | None) -> Tls | None:
    try:
        require_together(**{"--tls-cert": certificate, "--tls-key": key, "--tls-ca": authority})
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    if certificate is None or key is None or authority is None:
        return None
    return Tls(key, certificate, authority)


def _token(file: Path | None) -> str | None:
    if file is None:
        return None
    try:
        token = read_token(file)
    except CoordinationError as error:
        raise click.UsageError(error.message) from None
    if len(token) < _MIN_TOKEN_CHARACTERS:
        raise click.UsageError(
            f"--token-file {file}: expected at least {_MIN_TOKEN_CHARACTERS} characters, found"
            f" {len(token)}"
        )
    return token


class _StopCondition:
    """Decides when to stop: at a signal, or when the service is over and the calls that ask for its
    end have been answered.

    A SIGTERM may go to all of a job at once, from systemd or a scheduler: it waits for processes
    that are connected, which need the service for their last save, and for a launcher, which ends
    the service itself. SIGINT does not wait.
    """

    def __init__(self, service: Service, options: Options) -> None:
        self._service = service
        self._options = options
        self.signal: signal.Signals | None = None
        self._over_at: float | None = None
        self._parent = os.getppid()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})

    def _on_signal(self, number: int, frame: Any) -> None:
        self.signal = signal.Signals(number)

    def reason(self) -> str | None:
        """Returns why to stop, None while there is no reason."""
        needed = self._options.end_with_input or self._service.connected
        if self.signal is not None and (self.signal is signal.SIGINT or not needed):
            return self.signal.name
        linger_s = self._options.linger_s
        startup_timeout_s = self._options.startup_timeout_s
        if os.getppid() != self._parent and linger_s:  # nobody is left who would start processes
            startup_timeout_s = min(linger_s, startup_timeout_s or linger_s)
        reason = self._service.over(linger_s, startup_timeout_s)
        if self._options.end_with_input:
            # A launcher that was stopped meanwhile has yet to hear how the processes left.
            return "the process that started it is gone" if _input_has_ended() else None
        if reason is None:
            self._over_at = None
            return None
        self._over_at = self._over_at or time.monotonic()
        return reason if time.monotonic() - self._over_at >= _SHUT_DOWN_GRACE_S else None


def _input_has_ended() -> bool:
    readable, _, _ = select.select([0], [], [], 0)
    return bool(readable) and not os.read(0, 4096)


def serve(
    config: Config, options: Options, tls: Tls | None = None, token: str | None = None
) -> None:
    """Serves until it is over, on this thread. Prints `coordinator at ADDRESS` once it can be
    reached.

    Does not return after SIGTERM or SIGINT: once all is closed, this process ends by that signal,
    so that whoever started it can tell.
    """
    doubt = _allow_connections(config.num_tasks)
    log_file = None if options.log_file is None else _open_log(options.log_file)
    journal = None if options.journal is None else SqliteJournal(options.journal, time.monotonic)
    listening = Listening(join_address(options.host, options.port), tls, token)
    machine = _machine(config, journal)
    if doubt:
        print(f"holdfast coordinator: {doubt}", file=sys.stderr, flush=True)
        machine.events.note("coordinator", doubt, time.monotonic())
    service = Service(machine, listening.clock, journal, secured=listening.secured)
    stop = _StopCondition(service, options)
    _warn_if_open(options.host, listening)
    if options.metrics_port is not None:
        _serve_metrics(service, options.metrics_host, options.metrics_port)
    with contextlib.ExitStack() as at_end:
        transport = Transport(service, listening)
        port = transport.bind()

        def announce() -> None:
            address = _announce(options, journal, at_end, port)
            if log_file is not None:
                _log_to(log_file)
            log.info("serves at %s, process %d", address, os.getpid())
            gc.freeze()  # what stands now stays: the collector need not visit it again
            gc.set_threshold(50_000, 20, 20)

        reason = asyncio.run(transport.serve(stop.reason, announce))
        log.info("ends: %s", reason)
    if stop.signal is not None:
        signal.signal(stop.signal, signal.SIG_DFL)
        os.kill(os.getpid(), stop.signal)


def _serve_metrics(service: Service, host: str, port: int) -> None:
    service.publish_status()
    metrics = MetricsServer(service.published_status, port, host)
    url = f"http://{join_address(host, metrics.port)}/metrics"
    print(f"metrics at {url}", file=sys.stderr, flush=True)


def _machine(config: Config, journal: SqliteJournal | None) -> Machine:
    if journal is None:
        return Machine(config, time.monotonic())
    incarnation = journal.incarnation(config)
    return journal.open(replace(config, incarnation=incarnation or config.incarnation), incarnation)


def _allow_connections(num_tasks: int) -> str:
    """Lifts the soft limit of open files, often 1,024, to the hard one: each client is a
    connection, and jax's agent, which is passed on to gRPC, is three more. Returns what may be too
    few, "" where nothing is.

    Raises OSError where the hard limit is too low for the job; a connection too many would wait for
    ever, unanswered.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard == resource.RLIM_INFINITY:
        return ""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    cure = "raise the hard limit (ulimit -Hn, or LimitNOFILE= of systemd)"
    if allowed < num_tasks + OWN_FILES:
        raise OSError(
            f"a coordinator of {num_tasks} processes opens {num_tasks + OWN_FILES} files, one for"
            f" each process among them; it may open {allowed}: {cure}"
        )
    # A quarter is for guests.
    wanted = (_FILES_EACH * num_tasks + OWN_FILES) * 4 // 3
    if allowed < wanted:
        return (
            f"{num_tasks} processes with jax's agents need {wanted} open files, {_FILES_EACH} for"
            f" each process and some for strangers; the coordinator may open {allowed}: {cure}"
        )
    return ""


def _warn_if_open(host: str, listening: Listening) -> None:
    if listening.tls is not None or host.startswith(UNIX) or is_loopback(host):
        return
    if listening.token is None:
        text = (
            f"listening at {host} without TLS or token: whoever reaches this port can disturb"
            " the job"
        )
    else:
        cure = "add --tls-cert, --tls-key and --tls-ca"
        text = (
            f"listening at {host} with a token, without TLS: whoever reads this network can take"
            f" the token; {cure}"
        )
    print(f"holdfast coordinator: {text}", file=sys.stderr, flush=True)


def _announce(
    options: Options, journal: SqliteJournal | None, at_end: contextlib.ExitStack, port: int
) -> str:
    """Prints the address that others reach the service at, and writes it into the journal's lock.
    `at_end` removes what is the service's own. Returns the address.
    """
    host = options.advertise or options.host
    if host in ("0.0.0.0", "::", "[::]"):
        host = socket.gethostname()
    address = join_address(host, port)
    at_end.callback(_remove_own, options, address)
    if journal is not None:
        journal.announce(address)
    print(f"coordinator at {address}", flush=True)
    return address


def _remove_own(options: Options, address: str) -> None:
    """Removes the folder, and the file unless a later coordinator has taken its name."""
    if options.own_file is not None:
        with contextlib.suppress(OSError, ValueError):
            if json.loads(options.own_file.read_text())["coordinator"] == address:
                options.own_file.unlink()
    if options.own_folder is not None:
        shutil.rmtree(options.own_folder, ignore_errors=True)


def _open_log(path: str) -> RotatingFileHandler:
    """Opens the log, which is rotated. Before anybody is served: OSError where it cannot be."""
    return RotatingFileHandler(path, maxBytes=_LOG_BYTES, backupCount=_OLD_LOGS)


def _log_to(file: RotatingFileHandler) -> None:
    """Logs to a file; what else goes to stderr, such as the last words of a crash, goes there
    too.
    """
    logging.basicConfig(
        handlers=[file],
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(message)s",
        force=True,
    )
    assert file.stream is not None
    os.dup2(file.stream.fileno(), 2)
