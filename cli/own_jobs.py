"""The jobs of this user on this machine, and what a coordinator wants to see of its callers."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from google.protobuf.json_format import ParseDict

from holdfast.coordination import Credentials
from holdfast.coordination.diagnosis.summary import counted
from holdfast.coordination.diagnosis.verdict import judge
from holdfast.coordination.process.job_folder import (
    LaunchedJob,
    RunningJob,
    job_folders,
    launched_jobs,
    user_folder,
)
from holdfast.proto.session_pb2 import StatusResponse

from .common import EXIT_NOTHING, EXIT_USAGE, Failure, print_json, say, several_options, shown_time
from .tables import Table, console

_MOST_ENDED = 5  # jobs that are listed, the last that ended
_FILE = click.Path(exists=True, dir_okay=False)
OF_NAMED = dict.fromkeys(
    ("--token-file", "--tls-cert", "--tls-key", "--tls-ca"),
    "is for a coordinator: give its address. A job that is found here brings its own",
)
"""Why an option of credentials does nothing without an address."""
# They bear the names of the fields of Credentials.
credential_options = several_options(
    click.option("--token-file", type=_FILE, help="File with the token of a secured coordinator."),
    click.option("--tls-cert", type=_FILE, help="PEM certificate for a secured coordinator."),
    click.option("--tls-key", type=_FILE, help="PEM key of --tls-cert."),
    click.option(
        "--tls-ca",
        type=_FILE,
        help="PEM certificate of the authority of the coordinator's certificate.",
    ),
)


def running_jobs() -> list[tuple[RunningJob, Credentials]]:
    """Returns this user's jobs whose coordinators run on this machine, oldest first. A job is there
    twice while processes outlive an attempt of it.
    """
    found = []
    for folder in job_folders():
        job = folder.job()
        if job is not None and job.runs and not job.waiting:
            with contextlib.suppress(ValueError):  # half of its files are gone: it is removed
                found.append((job, folder.credentials()))
    return found


def newest_attempts() -> Mapping[str | None, tuple[RunningJob, Credentials]]:
    """Returns what `running_jobs` does by job id, and of each job the newest attempt."""
    return {job.job_id: (job, credentials) for job, credentials in running_jobs()}


def only_job(*, as_json: bool) -> tuple[RunningJob, Credentials]:
    """Returns this user's job on this machine. Where there is none, or several, lists the jobs,
    those that ended within an hour too, and raises Failure.
    """
    running = newest_attempts()
    launched = launched_jobs()
    ended = [job for job in launched if job.ended_unix_s is not None]
    # no coordinator runs for them now: they wait for machines, or begin another attempt
    between = [job for job in launched[len(ended) :] if job.job_id not in running]
    if running and len(running) + len(between) == 1:
        return next(iter(running.values()))
    failure = _no_single_job(len(running), between, ended)
    here: list[RunningJob | LaunchedJob] = [*(job for job, _ in running.values()), *between]
    if as_json:
        jobs = [_facts(job) for job in (*here, *ended)]
        shown = {"error": failure.message, "exit_code": failure.exit_code, "jobs": jobs}
        print_json(shown, failure.indent)
        raise failure
    failure.show()
    if here or ended:
        console().print(_table([*here, *ended[: -_MOST_ENDED - 1 : -1]]))
    if len(ended) > _MOST_ENDED:
        more = counted(len(ended) - _MOST_ENDED, "more job")
        say(f"and {more} that ended within the hour: --json lists all")
    sys.exit(failure.exit_code)


def _no_single_job(
    running: int, between: Sequence[LaunchedJob], ended: Sequence[LaunchedJob]
) -> Failure:
    """Returns why no job can be meant, for who prints the JSON himself."""
    code = EXIT_NOTHING
    if running:
        jobs = running + len(between)
        message = f"{jobs} jobs of this user run on this machine: give the address of one"
        code = EXIT_USAGE
    elif between:
        message = "; ".join(map(_between, between))
    else:
        last = f"; the last {ended[-1]}" if ended else ""
        message = (
            f"no job of this user runs on this machine ({user_folder()} has none): give the address"
            f" that the launcher printed{last}"
        )
    return Failure(message, code, printed=True)


def _between(job: LaunchedJob) -> str:
    """Returns how a job is that has no coordinator now."""
    status = StatusResponse()
    ParseDict(job.launcher, status.launcher, ignore_unknown_fields=True)  # of a later version
    verdict = judge(status, gone="its next attempt begins")
    return f"job {job.job_id} has no coordinator now: {verdict.state.value.lower()}: {verdict.text}"


def job_of_logs(folder: str) -> tuple[RunningJob, Credentials]:
    """Returns the job whose launcher writes into `folder`, its --log-dir. Raises Failure, which
    says how the job is where it does not run.
    """
    launched = [job for job in launched_jobs() if _is_same_folder(job.log_dir, folder)]
    last = launched[-1] if launched else None
    if last is None or last.ended_unix_s is not None:
        last = how_it_ended(folder) or last
        message = f"{folder}: no job of this user writes its lines there"
        raise Failure(message if last is None else str(last), EXIT_NOTHING)
    running = newest_attempts().get(last.job_id)
    if running is None:
        raise Failure(_between(last), EXIT_NOTHING)
    return running


def _is_same_folder(log_dir: str, folder: str) -> bool:
    return bool(log_dir) and Path(log_dir).resolve() == Path(folder).resolve()


def _facts(job: RunningJob | LaunchedJob) -> dict[str, Any]:
    if isinstance(job, RunningJob):
        now = {"attempt": job.attempt, "state": "running", "began_s": job.unix_s, "ended_s": None}
    else:
        now = {
            "attempt": job.launcher["attempt"],
            "state": job.launcher["state"] if job.ended_unix_s is None else job.how,
            "began_s": None,
            "ended_s": job.ended_unix_s,
        }
    return {
        "job": job.job_id,
        **now,
        "command": job.command,
        "folder": job.folder,
        "address": job.address,
    }


def _table(jobs: Iterable[RunningJob | LaunchedJob]) -> Table:
    titles = ("job", "attempt", "state", "began", "ended", "command", "folder", "address")
    table = Table(
        titles,
        folds=("folder", "command", "address", "ended", "began", "attempt", "state"),
        numbers=("attempt",),
    )
    for job in jobs:
        facts = _facts(job)
        cells = facts | {
            "attempt": str(facts["attempt"]),
            "began": shown_time(facts["began_s"]),
            "ended": shown_time(facts["ended_s"]),
        }
        table.add(*(cells[title] for title in titles))
    return table


def how_it_ended(address: str) -> LaunchedJob | None:
    """Returns how the job ended whose last coordinator was at `address`, or whose `--log-dir` that
    is; None where that is not known.
    """
    file = Path(address) / "status.json"
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        return LaunchedJob(**json.loads(file.read_text())["ended"])
    ended = [job for job in launched_jobs() if job.ended_unix_s is not None]
    return next((job for job in reversed(ended) if job.address == address), None)


def credentials_of(address: str, given: Credentials) -> Credentials:
    """Returns what was given, else what the launcher of a job on this machine left."""
    if not given.empty:
        return given
    for job, credentials in running_jobs():
        if job.address == address:
            return credentials
    return given
