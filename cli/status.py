"""`holdfast status`: what a coordinator knows of its job, as a table that may stay live, or as JSON."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

import click
from google.protobuf.json_format import MessageToDict
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from holdfast.coordination import CoordinationError, Credentials, HoldfastError, StatusClient
from holdfast.coordination.process.job_folder import RunningJob, job_folders, user_folder
from holdfast.proto import coordination_pb2, session_pb2

_FILE = click.Path(exists=True, dir_okay=False)
_COLOURS = {"CONNECTED": "green", "ERROR": "red", "DISCONNECTED": "yellow"}
_MAX_MISSING = 20
_CONNECT_TIMEOUT_S = 2.0


@click.command()
@click.argument("address", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--watch", is_flag=True, help="Stay and show changes, until interrupted.")
@click.option("--stacks", is_flag=True, help="Print where each thread of every process is, and what watchdogs have left.")
@click.option("--interval-s", type=click.FloatRange(0.1), default=1.0, show_default=True, help="Between two polls, with --watch.")
@click.option("--timeout-s", type=click.FloatRange(0.1), default=5.0, show_default=True, help="For one answer.")
@click.option("--token-file", type=_FILE, help="File with the token of a secured coordinator.")
@click.option("--tls-cert", type=_FILE, help="PEM certificate for a secured coordinator.")
@click.option("--tls-key", type=_FILE, help="PEM key of --tls-cert.")
@click.option("--tls-ca", type=_FILE, help="PEM certificate of the authority of the coordinator's certificate.")
def status(address: str | None, as_json: bool, watch: bool, stacks: bool, interval_s: float, timeout_s: float, **files: str | None) -> None:
    """Shows the job that the coordinator at ADDRESS (host:port or unix:PATH) serves: processes, barriers and who is missing, keys.

    Without ADDRESS, this user's job on this machine; where there are several, lists them.
    """
    began = time.monotonic()
    try:
        if address is None:
            job, credentials = _own_job()
            address = job.address
        else:
            credentials = _credentials(address, files)
        with StatusClient(address, credentials, timeout_s=timeout_s, wait_for_ready=True) as client:
            if stacks:
                _print_stacks(client)
            else:
                _show(client, as_json, watch, interval_s)
    except CoordinationError as error:
        raise click.ClickException(_explain(address, error, time.monotonic() - began)) from None
    except (HoldfastError, ValueError) as error:
        raise click.ClickException(str(error)) from None
    except KeyboardInterrupt:
        pass


def _running() -> list[tuple[RunningJob, Credentials]]:
    """Returns this user's jobs whose coordinators run on this machine, oldest first."""
    return [(job, folder.credentials()) for folder in job_folders() if (job := folder.job()) is not None and job.runs]


def _own_job() -> tuple[RunningJob, Credentials]:
    running = _running()
    if not running:
        where = user_folder()
        raise click.ClickException(
            f"no job of this user runs on this machine ({where} has none): give the address that the launcher printed"
        )
    if len(running) > 1:
        lines = [f"  holdfast status {job.address}    # {job.job_id}, attempt {job.attempt}" for job, _ in running]
        raise click.ClickException("\n".join([f"{len(running)} jobs of this user run on this machine: choose one", *lines]))
    return running[0]


def _credentials(address: str, files: dict[str, Any]) -> Credentials:
    """Returns what was given; else, for a job that was started on this machine, what its launcher left there."""
    if any(files.values()):
        return Credentials(**files)
    return next((credentials for job, credentials in _running() if job.address == address), Credentials())


def _explain(address: str | None, error: CoordinationError, tried_s: float) -> str:
    """Returns what was tried, for how long, and what the operating system says to one more connection."""
    if address is None or error.code not in ("UNAVAILABLE", "DEADLINE_EXCEEDED"):
        return f"{address}: {error}" if address else str(error)
    return f"{address}: no coordinator answered a status request within {tried_s:.1f} s; connecting: {_connect(address)}"


def _connect(address: str) -> str:
    try:
        if address.startswith("unix:"):
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(_CONNECT_TIMEOUT_S)
                connection.connect(address.removeprefix("unix:"))
        else:
            host, _, port = address.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_TIMEOUT_S).close()
    except ValueError:
        return "this is no address; expected HOST:PORT or unix:PATH"
    except OSError as error:
        return str(error.strerror or error)
    return "accepted, but whoever listens there speaks another protocol, or wants TLS (--tls-ca) or is stopped"


def _print_stacks(client: StatusClient) -> None:
    """Prints the stacks of all processes, in order."""
    process_ids = [task.task_id for task in client.status().tasks]
    for process_id, stacks in zip(process_ids, client.stacks(process_ids), strict=True):
        click.echo(f"--- process {process_id}\n{str(stacks).rstrip()}")


def _show(client: StatusClient, as_json: bool, watch: bool, interval_s: float) -> None:
    if as_json:
        while True:
            shown = MessageToDict(client.status(), preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
            click.echo(json.dumps(shown, indent=None if watch else 2))
            if not watch:
                return
            time.sleep(interval_s)
    if not watch:
        Console().print(_tables(client.status()))
        return
    with Live(_tables(client.status()), refresh_per_second=4) as live:
        while True:
            time.sleep(interval_s)
            live.update(_tables(client.status()))


def _tables(status: session_pb2.StatusResponse) -> Group:
    parts: list[str | Table] = [f"[bold]{_headline(status)}[/bold]", _processes(status)]
    if status.barriers:
        parts.append(_barriers(status))
    return Group(*parts)


def _headline(status: session_pb2.StatusResponse) -> str:
    job = f"job {status.job} attempt {status.attempt}, " if status.job else ""
    flags = [
        name
        for name, on in (("recoverable", status.recoverable), ("survivable", status.survivable), (status.journal, status.journal))
        if on
    ]
    kept = f"{status.keys} keys, {status.key_bytes / 1024:.1f} KiB"
    passed = f"{status.barriers_passed} barriers passed, {status.barriers_failed} failed"
    return f"{job}{status.num_processes} processes, {status.phase}, up {status.up_s:.0f} s; {kept}; {passed}" + "".join(
        f"; {flag}" for flag in flags
    )


def _processes(status: session_pb2.StatusResponse) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("process", "state", "host", "pid", "last seen", "step", "saved", "waits", "error"):
        table.add_column(title, justify="right" if title in ("process", "pid", "last seen", "step", "saved", "waits") else "left")
    for task in status.tasks:
        state = coordination_pb2.TaskState.Name(task.state)
        seen = "never" if task.heartbeat_age_s < 0 else f"{task.heartbeat_age_s:.1f} s"
        step = str(task.progress.step) if task.progress.HasField("step") else ""
        saved = str(task.progress.saved_step) if task.progress.HasField("saved_step") else ""
        coloured = f"[{_COLOURS.get(state, 'white')}]{state}[/]"
        table.add_row(
            str(task.task_id), coloured, task.host, str(task.pid or ""), seen, step, saved, str(task.waiting_calls or ""), task.error
        )
    return table


def _barriers(status: session_pb2.StatusResponse) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("barrier", "waiting (for)", "missing", "time left"):
        table.add_column(title)
    for barrier in status.barriers:
        waiting = ", ".join(f"{each.task_id} ({each.since_s:.1f} s)" for each in barrier.waiting[:_MAX_MISSING])
        missing = ", ".join(map(str, barrier.missing[:_MAX_MISSING]))
        more = f" and {len(barrier.missing) - _MAX_MISSING} more" if len(barrier.missing) > _MAX_MISSING else ""
        time_left = "" if barrier.left_s < 0 else f"{barrier.left_s:.1f} s"
        table.add_row(barrier.barrier_id, waiting, f"[red]{missing}{more}[/]", time_left)
    return table
