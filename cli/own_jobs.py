"""The jobs of this user on this machine, and what a coordinator wants to see of its callers."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from holdfast.coordination import Credentials
from holdfast.coordination.process.job_folder import (
    EndedJob,
    RunningJob,
    ended_jobs,
    job_folders,
    user_folder,
)

_Command = TypeVar("_Command", bound=Callable[..., None])
_FILE = click.Path(exists=True, dir_okay=False)
_OPTIONS = {
    "--token-file": "File with the token of a secured coordinator.",
    "--tls-cert": "PEM certificate for a secured coordinator.",
    "--tls-key": "PEM key of --tls-cert.",
    "--tls-ca": "PEM certificate of the authority of the coordinator's certificate.",
}


def credential_options(command: _Command) -> _Command:
    """Adds the options that bear the names of the fields of Credentials."""
    for name, help_text in reversed(_OPTIONS.items()):
        command = click.option(name, type=_FILE, help=help_text)(command)
    return command


def running_jobs() -> list[tuple[RunningJob, Credentials]]:
    """Returns this user's jobs whose coordinators run on this machine, oldest first."""
    return [
        (job, folder.credentials())
        for folder in job_folders()
        if (job := folder.job()) is not None and job.runs
    ]


def only_job() -> tuple[RunningJob, Credentials]:
    """Returns this user's job on this machine; ClickException where there is none, or several."""
    running = running_jobs()
    if not running:
        ended = ended_jobs()
        raise click.ClickException(
            f"no job of this user runs on this machine ({user_folder()} has none): give the address"
            f" that the launcher printed{''.join(f'; the last {job}' for job in ended[-1:])}"
        )
    if len(running) > 1:
        lines = [f"{len(running)} jobs of this user run on this machine: choose one"]
        for job, _ in running:
            name = f"{job.job_id}, attempt {job.attempt}"
            lines.append(f"  holdfast status {job.address}    # {name}")
        raise click.ClickException("\n".join(lines))
    return running[0]


def how_it_ended(address: str) -> EndedJob | None:
    """Returns how the job ended whose last coordinator was at `address`, or whose `--log-dir` that
    is; None where that is not known.
    """
    file = Path(address) / "status.json"
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        return EndedJob(**json.loads(file.read_text())["ended"])
    return next((job for job in reversed(ended_jobs()) if job.address == address), None)


def credentials_of(address: str, files: Mapping[str, Any]) -> Credentials:
    """Returns the files that were given, else what the launcher of a job on this machine left."""
    if any(files.values()):
        return Credentials(**files)
    for job, credentials in running_jobs():
        if job.address == address:
            return credentials
    return Credentials()
