"""`holdfast slurm`: the processes of a job on a Slurm allocation."""

from __future__ import annotations

import math
import sys
from typing import Any

import click

from .common import (
    command_argument,
    heartbeat_timeout_option,
    insecure_option,
    launch_command,
    launching,
    refuse,
    restart_options,
    take_policy,
)


def without_effect(chosen: dict[str, Any]) -> dict[str, str]:
    """Returns the options that do nothing beside the others, and why."""
    if math.isinf(chosen["stall_timeout_s"]):
        return {"--startup-timeout-s": "is the time to the first step: add --stall-timeout-s"}
    return {}


@launch_command()
@restart_options(
    3,
    0,
    preemptions="Restarts inside the allocation after a preemption, before the job is requeued.",
    startup="With --stall-timeout-s, from the start to the first step.",
)
@click.option(
    "--requeue/--no-requeue",
    default=True,
    show_default=True,
    help="Requeue the Slurm job when it is preempted.",
)
@click.option(
    "--coordinator-host",
    "host",
    help="Where tasks reach the coordinator.  [default: this node's name]",
)
@click.option(
    "--spares",
    default=0,
    show_default=True,
    help="Nodes of the allocation that stand for lost ones; with #SBATCH --no-kill.",
)
@heartbeat_timeout_option
@insecure_option
@command_argument
def slurm(command: tuple[str, ...], **options: Any) -> None:
    """Run COMMAND as the tasks of this Slurm allocation; the last line of an sbatch script, after
    `exec`.

    Restarts all tasks when one dies, and it alone where the others outlive attempts. When the job
    is preempted, or gets SIGUSR1 before its time limit, all save one step and leave, and the Slurm
    job is requeued. The allocation says how many processes there are, and what each has.

    \b
    #SBATCH --nodes=2 --ntasks=4 --requeue --open-mode=append --signal=B:USR1@120
    exec holdfast slurm -- python train.py
    """
    from holdfast.launch import SlurmSettings, run_slurm

    refuse(without_effect(options))
    with launching():
        # The options bear the names of its fields.
        result = run_slurm(command, SlurmSettings(restart=take_policy(options), **options))
    sys.exit(result.exit_code)
