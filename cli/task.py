"""`holdfast task`: one process of a job that srun, mpirun or Kubernetes starts."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click

from .common import (
    command_argument,
    commit_grace_s_option,
    flag,
    grace_s_option,
    insecure_option,
    refuse,
)


@click.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "--coordinator",
    metavar="HOST:PORT",
    help="Where the coordinator is.  [default: process 0 starts one]",
)
@click.option(
    "--host",
    help=(
        "Where the others reach a coordinator that process 0 starts.  [default: its machine's name]"
    ),
)
@click.option(
    "--rendezvous",
    type=click.Path(path_type=Path),
    help=(
        "A folder all see, where process 0 leaves the address and, for this user alone, token and"
        " certificates."
    ),
)
@click.option("--job-id", help="Of this job.  [default: the launcher's]")
@click.option(
    "--attempt",
    type=click.IntRange(1),
    help="Number of this start of the job.  [default: the launcher's]",
)
@click.option(
    "--secrets",
    "secrets_dir",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Folder with a secured job's token and certificates.",
)
@insecure_option
@flag(
    "--report",
    hidden=True,
    help="Stay as the parent and report to `holdfast slurm` how the command ended.",
)
@grace_s_option
@commit_grace_s_option
@command_argument
def task(command: tuple[str, ...], report: bool, **options: Any) -> None:
    """Run COMMAND as the process of a job that srun, mpirun or a Kubernetes Indexed Job says this
    is.

    \b
    mpirun -n 3 holdfast task -- python train.py
    """
    from holdfast.launch import JobError, TaskSettings, run_task

    if options["coordinator"] is not None:
        why = "is for a coordinator that process 0 starts: leave it out, or --coordinator"
        refuse(dict.fromkeys(("--host", "--rendezvous", "--insecure"), why))
    try:
        code = run_task(command, os.environ, TaskSettings(**options), report=report)
    except (ValueError, JobError, OSError, ImportError) as error:
        raise click.ClickException(str(error)) from error
    sys.exit(code)
