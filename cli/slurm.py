"""`holdfast slurm`: the processes of a job on a Slurm allocation."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import click

from .common import (
    SECONDS,
    command_argument,
    failure_of,
    grace_options,
    refuse,
    stall_timeout_option,
    straggler_steps_option,
)
from .interrupts import raise_at_interrupts

_NOT_HERE = {
    "--num-processes": "the allocation says how many: #SBATCH --ntasks",
    "-n": "the allocation says how many: #SBATCH --ntasks",
    "--min-processes": "an allocation keeps its size",
    "--capacity-file": "an allocation keeps its size",
    "--job-id": "the job's id is Slurm's, slurm-$SLURM_JOB_ID",
    "--log-dir": "the output of the batch script has the lines of all tasks: #SBATCH --output",
    "--preload": "srun starts the processes of each attempt, and none waits as a standby",
    "--metrics-port": "it is for jobs of one machine",
    "--metrics-host": "it is for jobs of one machine",
    "--web-port": "use `holdfast web ADDRESS` with the address that is printed",
    "--ray": "another engine: `holdfast run --ray`",
    "--resource": "the allocation says what a task has: #SBATCH --cpus-per-task, --gpus-per-task",
    "--slices": "it is for jobs on a Ray cluster",
}
_NO_FLAGS_HERE = {
    "--standby": "srun starts the processes of each attempt, and none waits as a standby",
    "--no-standby": "there are none",
    "--view": "a batch script has no terminal",
    "--no-view": "there is none",
    "--web": "use `holdfast web ADDRESS` with the address that is printed",
    "--json": "how the job ended is in the exit code, and in Slurm's sacct",
    "--orbax": "give the command itself: python -m holdfast.compat.orbax train.py",
}


def _refuse(context: click.Context, parameter: click.Parameter, value: Any) -> None:
    if value:
        option = parameter.opts[0]
        why = _NOT_HERE.get(option) or _NO_FLAGS_HERE[option]
        raise click.UsageError(f"{option} is an option of `holdfast run`, not of this: {why}")


def _refused_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options of `holdfast run` that Slurm has no use for, each of which says why."""
    for name in (*_NOT_HERE, *_NO_FLAGS_HERE):
        option = click.option(
            name,
            f"refused_{name.strip('-').replace('-', '_')}",
            is_flag=name in _NO_FLAGS_HERE,
            hidden=True,
            expose_value=False,
            callback=_refuse,
        )
        command = option(command)
    return command


def without_effect(stall_timeout_s: float) -> dict[str, str]:
    """Returns the options that do nothing beside the others, and why."""
    if math.isinf(stall_timeout_s):
        return {"--startup-timeout-s": "is the time to the first step: add --stall-timeout-s"}
    return {}


@click.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "--max-restarts",
    "max_failures",
    type=click.IntRange(0),
    default=3,
    show_default=True,
    help="Restarts after a death; progress refills them.",
)
@click.option(
    "--max-preemptions",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Restarts inside the allocation after a preemption, before the Slurm job is requeued.",
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
@grace_options
@click.option(
    "--startup-timeout-s",
    type=SECONDS,
    default=600.0,
    show_default=True,
    help="With --stall-timeout-s, from the start to the first step.",
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
@_refused_options
@command_argument
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

    raise_at_interrupts()
    refuse(without_effect(restart["stall_timeout_s"]))
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
    except OSError as error:
        raise failure_of(error) from error
    sys.exit(result.exit_code)
