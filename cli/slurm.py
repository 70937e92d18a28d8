"""`holdfast slurm`: the processes of a job on a Slurm allocation."""

from __future__ import annotations

import sys
from typing import Any

import click

from .common import stall_timeout_option, straggler_steps_option


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option(
    "--max-restarts",
    "max_failures",
    type=click.IntRange(0),
    default=3,
    show_default=True,
    help="Restarts after a death; progress refills them.",
)
@click.option(
    "--requeue/--no-requeue",
    default=True,
    show_default=True,
    help="Requeue the Slurm job when it is preempted.",
)
@click.option(
    "--coordinator-host", help="Where tasks reach the coordinator.  [default: this node's name]"
)
@click.option(
    "--grace-s",
    type=click.FloatRange(0),
    default=5.0,
    show_default=True,
    help="From SIGTERM to SIGKILL for what is left after a failure.",
)
@click.option(
    "--preemption-grace-s",
    type=click.FloatRange(0),
    default=120.0,
    show_default=True,
    help="To save and leave after a notice.",
)
@click.option(
    "--heartbeat-timeout-s",
    type=click.FloatRange(0.1),
    default=60.0,
    show_default=True,
    help="Silence after which a host is lost.",
)
@stall_timeout_option
@straggler_steps_option
@click.option(
    "--insecure",
    is_flag=True,
    help="No token and certificates: whoever reaches the coordinator's port can disturb the job.",
)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def slurm(
    command: tuple[str, ...],
    requeue: bool,
    coordinator_host: str | None,
    heartbeat_timeout_s: float,
    insecure: bool,
    **restart: Any,
) -> None:
    """Run COMMAND as the tasks of this Slurm allocation; the last line of an sbatch script, after
    `exec`.

    Restarts all tasks when one dies. When the job is preempted, or gets SIGUSR1 before its time
    limit, all save one step and leave, and the Slurm job is requeued.

    \b
    #SBATCH --nodes=2 --ntasks=4 --requeue --open-mode=append --signal=B:USR1@120
    exec holdfast slurm -- python train.py
    """
    from holdfast.launch import RestartPolicy, run_slurm

    try:
        result = run_slurm(
            command,
            restart=RestartPolicy(**restart),  # the other options bear the names of its fields
            host=coordinator_host,
            requeue=requeue,
            heartbeat_timeout_s=heartbeat_timeout_s,
            insecure=insecure,
        )
    except (ValueError, ImportError) as error:
        raise click.UsageError(str(error)) from error
    sys.exit(130 if result.interrupted else result.exit_code)
