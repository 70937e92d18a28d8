"""`holdfast ray`: the processes of a job on a Ray cluster."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import click

from .common import (
    command_argument,
    heartbeat_timeout_option,
    insecure_option,
    job_id_option,
    json_at_end_option,
    launching,
    min_processes_option,
    num_processes_option,
    orbax_option,
    print_json,
    restart_options,
    take_policy,
    with_orbax,
)


def _amounts(
    context: click.Context, parameter: click.Parameter, values: tuple[str, ...]
) -> dict[str, float]:
    try:
        amounts = {name: float(amount) for name, amount in (each.split("=", 1) for each in values)}
    except ValueError:
        raise click.BadParameter(f"{', '.join(values)}: expected NAME=AMOUNT") from None
    return amounts or {"CPU": 1.0}


@click.command(context_settings={"allow_interspersed_args": False})
@num_processes_option
@min_processes_option
@click.option(
    "--address",
    default="auto",
    show_default=True,
    help='Of the cluster; "auto" is the one this machine belongs to.',
)
@click.option(
    "--resource",
    "resources",
    multiple=True,
    callback=_amounts,
    metavar="NAME=AMOUNT",
    help="Of one process.  [default: CPU=1]",
)
@click.option(
    "--slices",
    "num_slices",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="TPU slices of equal size.",
)
@restart_options(0)
@heartbeat_timeout_option
@job_id_option
@insecure_option
@json_at_end_option
@orbax_option
@command_argument
def ray(
    command: tuple[str, ...], *, address: str, as_json: bool, orbax: bool, **options: Any
) -> None:
    """Run COMMAND as N processes of one job on a Ray cluster. Ends as `holdfast run` does.

    For a live page, `holdfast web ADDRESS` with the coordinator's address that is printed.

    \b
    holdfast ray -n 8 --min-processes 4 --resource GPU=1 -- python train.py
    """
    from holdfast.launch import ray as engine
    from holdfast.launch.workers.output import ConsoleOutput

    lines = ConsoleOutput(
        sys.stderr if as_json else sys.stdout, sys.stderr, options["num_processes"]
    )
    with launching(), contextlib.closing(lines):
        restart = take_policy(options)
        result = engine.run_command(
            with_orbax(command) if orbax else command,
            engine.JobSpec(restart=restart, **options),  # the options bear the names of its fields
            output=lines,
            address=address,
        ).job
    if as_json:
        print_json(result.as_json())
    sys.exit(result.exit_code)
