"""`holdfast run`: the processes of a job on this machine."""

from __future__ import annotations

import sys
from pathlib import Path

import click


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("-n", "--num-processes", type=click.IntRange(1, 4096), required=True, help="How many processes.")
@click.option("--max-restarts", type=click.IntRange(0), default=0, show_default=True, help="Restarts after a death; progress refills them.")
@click.option("--max-preemptions", type=click.IntRange(0), help="Restarts after a preemption.  [default: as --max-restarts]")
@click.option("--min-processes", type=click.IntRange(1), help="Go on with that many if the capacity file says so.  [default: -n]")
@click.option("--capacity-file", type=click.Path(path_type=Path), help="Holds how many processes there is room for, read twice a second.")
@click.option("--grace-s", type=float, default=5.0, show_default=True, help="From SIGTERM to SIGKILL for what is left after a failure.")
@click.option("--preemption-grace-s", type=float, default=120.0, show_default=True, help="To save and leave after a notice.")
@click.option("--job-id", help="Of this job, the same in each run of it.  [default: a new one]")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run(
    num_processes: int,
    max_restarts: int,
    max_preemptions: int | None,
    min_processes: int | None,
    capacity_file: Path | None,
    grace_s: float,
    preemption_grace_s: float,
    job_id: str | None,
    command: tuple[str, ...],
) -> None:
    """Run COMMAND as N processes of one job, under a coordinator of their own.

    \b
    Ends with 0 when all are done, 75 when preempted (saved; run it again), 93 when a process said that a restart
    cannot help, 124 when it hangs, 130 after Ctrl-C, else with the code of the
    process that failed first (128 + the signal's number).
    """
    from holdfast.launch import RestartPolicy, run_local

    policy = RestartPolicy(
        max_failures=max_restarts,
        max_preemptions=max_restarts if max_preemptions is None else max_preemptions,
        grace_s=grace_s,
        preemption_grace_s=preemption_grace_s,
    )
    try:
        result = run_local(command, num_processes, min_processes=min_processes, policy=policy, job_id=job_id, capacity_file=capacity_file)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    sys.exit(130 if result.interrupted else result.exit_code)
