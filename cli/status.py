"""`holdfast status`: what a coordinator knows of its job, as tables or as JSON."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import click
from rich.live import Live

from holdfast.coordination import CoordinationError, Credentials, HoldfastError, StatusClient
from holdfast.coordination.address import connect
from holdfast.coordination.diagnosis.findings import Evidence, Finding, at_later, diagnose
from holdfast.coordination.diagnosis.stacks import fold
from holdfast.coordination.diagnosis.status_json import message_json, status_json
from holdfast.coordination.diagnosis.summary import fold_saves, printable
from holdfast.coordination.limits import NumberRange
from holdfast.coordination.process.diagnose import gather
from holdfast.coordination.process.job_folder import launched_jobs
from holdfast.proto import session_pb2

from .common import EXIT_NOTHING, Failure, dump_json, flag, print_json, refuse, say
from .own_jobs import (
    OF_NAMED,
    credential_options,
    credentials_of,
    how_it_ended,
    job_of_logs,
    newest_attempts,
    only_job,
    running_jobs,
)
from .status_tables import status_tables
from .tables import console

_CONNECT_TIMEOUT_S = 2.0
_DIAGNOSIS_INTERVAL_S = 10.0  # with --watch
_NO_ANSWER = ("UNAVAILABLE", "DEADLINE_EXCEEDED")
# what there is to see of a job: its status, and what is wrong with it
_Look = tuple[session_pb2.StatusResponse, list[Finding]]
_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def _seconds(context: click.Context, parameter: click.Parameter, value: str | None) -> float | None:
    """Returns a time such as 90s, 10m or 2h in seconds."""
    if value is None:
        return None
    time_text = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", value)
    if time_text is None:
        raise click.BadParameter(f"expected a time such as 90s, 10m or 2h, found {value!r}")
    return float(time_text[1]) * _UNIT_S[time_text[2]]


@click.command(
    epilog="""\b
Examples:
  holdfast status                                  this user's job here
  holdfast status 10.0.0.5:8476 --watch
  holdfast status --stacks                         where each process is
  holdfast status --events --since 10m

Exit codes: 0 shown, 2 there are several jobs, 3 no job there, or it has ended, 5 refused or
failed."""
)
@click.argument("address", required=False)
@flag("--json", "as_json", help="Print JSON.")
@flag("--watch", help="Stay and show changes, until interrupted.")
@flag(
    "--stacks",
    help="Print where each thread of every process is, and what watchdogs have left.",
)
@flag(
    "--events",
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
    type=NumberRange(0.1),
    default=1.0,
    show_default=True,
    help="Between two polls, with --watch.",
)
@click.option(
    "--timeout-s",
    type=NumberRange(0.1),
    default=5.0,
    show_default=True,
    help="For one answer.",
)
@credential_options
def status(  # each option is a parameter, as click has it
    address: str | None,
    *,
    as_json: bool,
    watch: bool,
    stacks: bool,
    events: bool,
    since: float | None,
    interval_s: float,
    timeout_s: float,
    **files: str | None,
) -> None:
    """Show the job that the coordinator at ADDRESS (host:port or unix:PATH) serves: processes,
    barriers and who is missing, keys; of a job that has ended, how. A --log-dir serves as ADDRESS.

    Without ADDRESS, this user's job on this machine. Where there is none, or several, lists the
    jobs, with those that ended within the last hour.
    """
    if stacks:
        alone = "is not shown with --stacks: leave one of them out"
        refuse({"--events": alone, "--since": alone})
    if watch:
        once = "is shown once: leave --watch out"
        refuse({"--stacks": once, "--events": once, "--since": once})
    else:
        refuse({"--interval-s": "is between two polls: add --watch"})
    try:
        target = _target(address, files, as_json=as_json)
        try:
            if watch:
                target.watch(as_json, interval_s, timeout_s)
            _show_once(target.client(timeout_s), as_json, stacks, events, since)
        except CoordinationError as error:
            raise _failure(target, error) from None
    except (HoldfastError, ValueError) as error:
        raise Failure(str(error)) from None
    except KeyboardInterrupt:
        if not watch:
            raise


def _show_once(
    client: StatusClient, as_json: bool, stacks: bool, events: bool, since_s: float | None
) -> None:
    with client:
        if stacks:
            _print_stacks(client, as_json)
        elif events or since_s is not None:
            _print_events(client, as_json, since_s)
        else:
            now = gather(client)
            _show([(now.status, diagnose(now))], as_json)


@dataclass
class _Target:
    """Where the coordinator is of the job that is looked at. `job_id` is None where no coordinator
    of this user runs here at the address that was given.
    """

    address: str
    credentials: Credentials
    job_id: str | None = None
    asked_s: float = field(default_factory=time.monotonic)  # since when there is no answer
    is_known: bool = False

    def client(self, timeout_s: float) -> StatusClient:
        return StatusClient(
            self.address, self.credentials, timeout_s=timeout_s, wait_for_ready=True
        )

    def watch(self, as_json: bool, interval_s: float, timeout_s: float) -> NoReturn:
        """Shows the job until interrupted, through restarts of its coordinator. Raises
        CoordinationError where there is none at first, and Failure once the job has ended.
        """
        while True:
            try:
                with self.client(timeout_s) as client:
                    _show(self._looks(client, interval_s), as_json, watch=True)
            except CoordinationError as error:
                # What a secured coordinator wants to see goes with it, too.
                is_gone = error.code in (*_NO_ANSWER, "UNAUTHENTICATED")
                if not self.is_known or not is_gone:
                    raise
                self._find_again(error)
                click.echo(printable(f"{self.address} is asked again: {error}"), err=True)
                time.sleep(interval_s)

    def _looks(self, client: StatusClient, interval_s: float) -> Iterator[_Look]:
        """Yields the job as it is, each `interval_s`, until another attempt is its newest; asks its
        processes at most every 10 s.
        """
        address = self.address
        asked = Evidence(session_pb2.StatusResponse())
        due_s = 0.0
        while True:
            self._follow()
            if self.address != address:
                return
            if time.monotonic() < due_s:
                now = at_later(asked, client.status())
            else:
                now = gather(client)
                asked = now
                due_s = time.monotonic() + _DIAGNOSIS_INTERVAL_S
            self.asked_s = time.monotonic()
            self.is_known = True
            yield now.status, diagnose(now)
            time.sleep(interval_s)

    def _find_again(self, error: CoordinationError) -> None:
        """Takes the coordinator of the job's next attempt, or the same again where that runs here.
        Raises Failure where the job has ended, and the error where its launcher is gone.
        """
        if self._follow():
            return
        ended = how_it_ended(self.address)
        if self.job_id is not None:
            launched = next(reversed(launched_jobs(self.job_id)), None)
            if launched is None:
                raise error
            if launched.ended_unix_s is not None:
                ended = launched
        if ended is not None:
            raise Failure(str(ended), EXIT_NOTHING)

    def _follow(self) -> bool:
        """Takes the coordinator of the job's newest attempt; returns whether one runs here."""
        running = newest_attempts().get(self.job_id)
        if running is None:
            return False
        job, self.credentials = running
        self.address = job.address
        return True


def _target(address: str | None, files: Mapping[str, str | None], *, as_json: bool) -> _Target:
    if address is None or Path(address).is_dir():
        refuse(OF_NAMED)
        job, credentials = only_job(as_json=as_json) if address is None else job_of_logs(address)
        return _Target(job.address, credentials, job.job_id)
    job_id = next((job.job_id for job, _ in running_jobs() if job.address == address), None)
    given = Credentials(**files)  # type: ignore[arg-type]
    return _Target(address, credentials_of(address, given), job_id)


def _failure(target: _Target, error: CoordinationError) -> Failure:
    """Returns what was tried, for how long, and what the kernel says to one more connection."""
    address = target.address
    if error.code not in _NO_ANSWER:
        return Failure(f"{address}: {error}")
    if (ended := how_it_ended(address)) is not None:
        return Failure(str(ended), EXIT_NOTHING)
    tried_s = time.monotonic() - target.asked_s
    why = _try_to_connect(address)
    tried = f"no coordinator answered a status request within {tried_s:.1f} s"
    return Failure(f"{address}: {tried}; connecting: {why}", EXIT_NOTHING)


def _try_to_connect(address: str) -> str:
    try:
        connect(address, _CONNECT_TIMEOUT_S).close()
    except ValueError:
        return "this is no address; expected HOST:PORT or unix:PATH"
    except OSError as error:
        return str(error.strerror or error)
    return (
        "accepted, but whoever listens there speaks another protocol, or wants TLS (--tls-cert,"
        " --tls-key and --tls-ca) or is stopped"
    )


def _print_stacks(client: StatusClient, as_json: bool) -> None:
    """Prints what is wrong, and the stacks of all processes, in order.

    Threads of ours and of the runtime are counted only, but in JSON they are whole.
    """
    findings = diagnose(gather(client, with_stacks=True))
    process_ids = [task.task_id for task in client.status().tasks]
    all_stacks = list(zip(process_ids, client.stacks(process_ids), strict=True))
    if as_json:
        shown = [{"process": process, "text": str(stacks)} for process, stacks in all_stacks]
        print_json({"diagnosis": [found.as_json() for found in findings], "stacks": shown})
        return
    for finding in findings:
        say(finding.text)
    for process_id, stacks in all_stacks:
        left, mark, report = str(stacks).partition("Left by its watchdog: ")
        text = f"--- process {process_id}\n{(fold(left) or left).rstrip()}".rstrip()
        say(text)
        if mark:
            say(mark + report.rstrip())


def _print_events(client: StatusClient, as_json: bool, since_s: float | None) -> None:
    """Prints the job's history, oldest first: one line an event."""
    first = 0.0 if since_s is None else time.time() - since_s
    events = [event for event in client.status(with_events=True).events if event.unix_s >= first]
    if as_json:
        shown = [message_json(event) for event in events]
        print_json({"events": shown})
        return
    for event in fold_saves(events):
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.unix_s))
        click.echo(printable(f"{when} {event.kind:<11} {event.text}"))


def _show(looks: Iterable[_Look], as_json: bool, *, watch: bool = False) -> None:
    if as_json:
        for look in looks:
            click.echo(dump_json(status_json(*look), indent=None if watch else 2))
    elif watch and sys.stdout.isatty():
        with Live(console=console(), refresh_per_second=4, vertical_overflow="visible") as live:
            for look in looks:
                live.update(status_tables(*look))
    else:
        for look in looks:
            console().print(status_tables(*look))
            sys.stdout.flush()
