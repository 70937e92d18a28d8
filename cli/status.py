"""`holdfast status`: what a coordinator knows of its job, as a table that may stay live, or as
JSON.
"""

from __future__ import annotations

import json
import re
import time
from typing import Any

import click
from google.protobuf.json_format import MessageToDict
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from holdfast.coordination import CoordinationError, Credentials, HoldfastError, StatusClient
from holdfast.coordination.address import connect
from holdfast.coordination.diagnosis.findings import Evidence, Finding, diagnose, expected_s, silent
from holdfast.coordination.diagnosis.stacks import fold
from holdfast.coordination.process.diagnose import gather
from holdfast.coordination.process.job_folder import RunningJob, job_folders, user_folder
from holdfast.proto import coordination_pb2, session_pb2

from .common import describe_goodput

_FILE = click.Path(exists=True, dir_okay=False)
_COLOURS = {"CONNECTED": "green", "ERROR": "red", "DISCONNECTED": "yellow"}
_MAX_MISSING = 20
_CONNECT_TIMEOUT_S = 2.0
_DIAGNOSIS_INTERVAL_S = 10.0  # with --watch


def _seconds(context: click.Context, parameter: click.Parameter, value: str | None) -> float | None:
    """Returns a time such as 90s, 10m or 2h in seconds."""
    if value is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", value)
    if found is None:
        raise click.BadParameter(f"expected a time such as 90s, 10m or 2h, found {value!r}")
    return float(found[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[found[2]]


@click.command()
@click.argument("address", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--watch", is_flag=True, help="Stay and show changes, until interrupted.")
@click.option(
    "--stacks",
    is_flag=True,
    help="Print where each thread of every process is, and what watchdogs have left.",
)
@click.option(
    "--events",
    is_flag=True,
    help="Print the job's history: who came and went, saves, failures, attempts.",
)
@click.option(
    "--since",
    callback=_seconds,
    metavar="TIME",
    help="With --events: only of the last 90s, 10m, 2h.",
)
@click.option(
    "--interval-s",
    type=click.FloatRange(0.1),
    default=1.0,
    show_default=True,
    help="Between two polls, with --watch.",
)
@click.option(
    "--timeout-s",
    type=click.FloatRange(0.1),
    default=5.0,
    show_default=True,
    help="For one answer.",
)
@click.option("--token-file", type=_FILE, help="File with the token of a secured coordinator.")
@click.option("--tls-cert", type=_FILE, help="PEM certificate for a secured coordinator.")
@click.option("--tls-key", type=_FILE, help="PEM key of --tls-cert.")
@click.option(
    "--tls-ca",
    type=_FILE,
    help="PEM certificate of the authority of the coordinator's certificate.",
)
def status(
    address: str | None,
    as_json: bool,
    watch: bool,
    stacks: bool,
    events: bool,
    since: float | None,
    interval_s: float,
    timeout_s: float,
    **files: str | None,
) -> None:
    """Shows the job that the coordinator at ADDRESS (host:port or unix:PATH) serves: processes,
    barriers and who is missing, keys.

    Without ADDRESS, this user's job on this machine; where there are several, lists them.
    """
    began = time.monotonic()
    try:
        if address is None:
            job, credentials = _own_job()
            address = job.address
        else:
            credentials = credentials_of(address, files)
        with StatusClient(address, credentials, timeout_s=timeout_s, wait_for_ready=True) as client:
            if stacks:
                _print_stacks(client)
            elif events or since is not None:
                _print_events(client, as_json, since)
            else:
                _show(client, as_json, watch, interval_s)
    except CoordinationError as error:
        raise click.ClickException(_explain(address, error, time.monotonic() - began)) from None
    except (HoldfastError, ValueError) as error:
        raise click.ClickException(str(error)) from None
    except KeyboardInterrupt:
        pass


def running_jobs() -> list[tuple[RunningJob, Credentials]]:
    """Returns this user's jobs whose coordinators run on this machine, oldest first."""
    return [
        (job, folder.credentials())
        for folder in job_folders()
        if (job := folder.job()) is not None and job.runs
    ]


def _own_job() -> tuple[RunningJob, Credentials]:
    running = running_jobs()
    if not running:
        where = user_folder()
        raise click.ClickException(
            f"no job of this user runs on this machine ({where} has none): give the address that"
            " the launcher printed"
        )
    if len(running) > 1:
        lines = [
            f"  holdfast status {job.address}    # {job.job_id}, attempt {job.attempt}"
            for job, _ in running
        ]
        raise click.ClickException(
            "\n".join([f"{len(running)} jobs of this user run on this machine: choose one", *lines])
        )
    return running[0]


def credentials_of(address: str, files: dict[str, Any]) -> Credentials:
    """Returns what was given; else, for a job that was started on this machine, what its launcher
    left there.
    """
    if any(files.values()):
        return Credentials(**files)
    return next(
        (credentials for job, credentials in running_jobs() if job.address == address),
        Credentials(),
    )


def _explain(address: str | None, error: CoordinationError, tried_s: float) -> str:
    """Returns what was tried, for how long, and what the operating system says to one more
    connection.
    """
    if address is None or error.code not in ("UNAVAILABLE", "DEADLINE_EXCEEDED"):
        return f"{address}: {error}" if address else str(error)
    return (
        f"{address}: no coordinator answered a status request within {tried_s:.1f} s; connecting:"
        f" {_connect(address)}"
    )


def _connect(address: str) -> str:
    try:
        connect(address, _CONNECT_TIMEOUT_S).close()
    except ValueError:
        return "this is no address; expected HOST:PORT or unix:PATH"
    except OSError as error:
        return str(error.strerror or error)
    return (
        "accepted, but whoever listens there speaks another protocol, or wants TLS (--tls-ca) or is"
        " stopped"
    )


def _print_stacks(client: StatusClient) -> None:
    """Prints what is wrong, and the stacks of all processes, in order. Threads of ours and of the
    runtime are counted only.
    """
    for finding in diagnose(gather(client, with_stacks=True)):
        click.echo(finding.text)
    process_ids = [task.task_id for task in client.status().tasks]
    for process_id, stacks in zip(process_ids, client.stacks(process_ids), strict=True):
        left, mark, report = str(stacks).partition("Left by its watchdog: ")
        click.echo(f"--- process {process_id}\n{(fold(left) or left).rstrip()}".rstrip())
        if mark:
            click.echo(mark + report.rstrip())


def _print_events(client: StatusClient, as_json: bool, since_s: float | None) -> None:
    """Prints the job's history, oldest first: one line an event."""
    first = 0.0 if since_s is None else time.time() - since_s
    events = [event for event in client.status(with_events=True).events if event.unix_s >= first]
    if as_json:
        click.echo(
            json.dumps(
                [MessageToDict(event, preserving_proto_field_name=True) for event in events],
                indent=2,
            )
        )
        return
    for event in sorted(events, key=lambda event: event.unix_s):
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.unix_s))
        click.echo(f"{when} {event.kind:<11} {event.text}")


def _show(client: StatusClient, as_json: bool, watch: bool, interval_s: float) -> None:
    findings = _Findings(client)
    if as_json:
        while True:
            shown = MessageToDict(
                findings.status(),
                preserving_proto_field_name=True,
                always_print_fields_with_no_presence=True,
            )
            shown["diagnosis"] = [finding.as_json() for finding in findings.found]
            click.echo(json.dumps(shown, indent=None if watch else 2))
            if not watch:
                return
            time.sleep(interval_s)
    if not watch:
        Console().print(_tables(findings.status(), findings.found))
        return
    with Live(_tables(findings.status(), findings.found), refresh_per_second=4) as live:
        while True:
            time.sleep(interval_s)
            live.update(_tables(findings.status(), findings.found))


class _Findings:
    """The status as it is now, with what was last found to be wrong."""

    def __init__(self, client: StatusClient) -> None:
        self._client = client
        self._due = 0.0
        self.found: list[Finding] = []

    def status(self) -> session_pb2.StatusResponse:
        if time.monotonic() < self._due:
            return self._client.status()
        evidence: Evidence = gather(self._client)
        self.found, self._due = diagnose(evidence), time.monotonic() + _DIAGNOSIS_INTERVAL_S
        return evidence.status


def _tables(status: session_pb2.StatusResponse, findings: list[Finding]) -> Group:
    parts: list[str | Text | Table] = [Text(finding.text, style="bold red") for finding in findings]
    parts.append(Text(_headline(status), style="bold"))
    if status.goodput_s:
        parts.append(describe_goodput(status.goodput_s))
    parts.append(_processes(status))
    if local := [step for root in _roots(status) for step in root.steps if step.local]:
        parts.append(_local_steps(status, local))
    if status.barriers:
        parts.append(_barriers(status))
    return Group(*parts)


def _headline(status: session_pb2.StatusResponse) -> str:
    job = f"job {status.job} attempt {status.attempt}, " if status.job else ""
    flags = [
        name
        for name, on in (
            ("recoverable", status.recoverable),
            ("survivable", status.survivable),
            (status.journal, status.journal),
        )
        if on
    ]
    kept = f"{status.keys} keys, {status.key_bytes / 1024:.1f} KiB"
    passed = f"{status.barriers_passed} barriers passed, {status.barriers_failed} failed"
    return (
        f"{job}{status.num_processes} processes, {status.phase}, up {status.up_s:.0f} s; {kept};"
        f" {passed}" + "".join(f"; {flag}" for flag in flags)
    )


_COLUMNS = (
    "process",
    "state",
    "host",
    "pid",
    "last heard",
    "step",
    "steps/s",
    "saved",
    "blocked",
    "waiting",
    "waits",
    "memory",
    "error",
)
_LEFT = {"state", "host", "error"}


def _processes(status: session_pb2.StatusResponse) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in _COLUMNS:
        table.add_column(title, justify="left" if title in _LEFT else "right")
    for task in status.tasks:
        table.add_row(*_row(status, task))
    return table


def _row(status: session_pb2.StatusResponse, task: session_pb2.TaskStatus) -> list[str]:
    state = coordination_pb2.TaskState.Name(task.state)
    progress, values = task.progress, task.progress.values
    return [
        str(task.task_id),
        f"[{_COLOURS.get(state, 'white')}]{state}[/]",
        escape(task.host),
        str(task.pid or ""),
        _heard(status, task),
        str(progress.step) if progress.HasField("step") else "",
        f"{task.steps_per_second:.2g}" if task.step_age_s >= 0 else "",
        str(progress.saved_step) if progress.HasField("saved_step") else "",
        f"{values['save_blocked_s']:.1f} s" if "save_blocked_s" in values else "",
        f"{values['waiting_share']:.0%}" if "waiting_share" in values else "",
        str(task.waiting_calls or ""),
        f"{values['memory_bytes'] / 2**30:.1f} GiB" if "memory_bytes" in values else "",
        escape(task.error or progress.trouble),
    ]


def _heard(status: session_pb2.StatusResponse, task: session_pb2.TaskStatus) -> str:
    if task.heartbeat_age_s < 0:
        return "never"
    heard = f"{task.heartbeat_age_s:.1f} of {expected_s(status, task):.0f} s"
    return f"[red]{heard}[/]" if silent(status, task) else heard


def _roots(status: session_pb2.StatusResponse) -> list[session_pb2.CheckpointRoot]:
    return [task.progress.root for task in status.tasks if task.progress.HasField("root")]


def _local_steps(
    status: session_pb2.StatusResponse, steps: list[session_pb2.CheckpointStep]
) -> Table:
    """Returns the steps that the hosts have, and the processes (with their hosts) that have each
    process's part.
    """
    hosts = {task.task_id: task.host for task in status.tasks}
    table = Table(box=None, pad_edge=False)
    for title in ("local step", "hosts that may be lost", "whose part is where"):
        table.add_column(title, justify="left" if title.startswith("whose") else "right")
    for step in steps:
        holders = [
            [f"{holder} ({hosts.get(holder) or '?'})" for holder in copies.processes]
            for copies in step.copies[:_MAX_MISSING]
        ]
        where = [f"{process}: {', '.join(found)}" for process, found in enumerate(holders)]
        more = (
            f"; and {len(step.copies) - _MAX_MISSING} more"
            if len(step.copies) > _MAX_MISSING
            else ""
        )
        table.add_row(str(step.step), str(step.survives), escape("; ".join(where) + more))
    return table


def _barriers(status: session_pb2.StatusResponse) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("barrier", "waiting (for)", "missing", "time left"):
        table.add_column(title)
    for barrier in status.barriers:
        waiting = ", ".join(
            f"{each.task_id} ({each.since_s:.1f} s)" for each in barrier.waiting[:_MAX_MISSING]
        )
        missing = ", ".join(map(str, barrier.missing[:_MAX_MISSING]))
        more = (
            f" and {len(barrier.missing) - _MAX_MISSING} more"
            if len(barrier.missing) > _MAX_MISSING
            else ""
        )
        time_left = "" if barrier.left_s < 0 else f"{barrier.left_s:.1f} s"
        table.add_row(escape(barrier.barrier_id), waiting, f"[red]{missing}{more}[/]", time_left)
    return table
