"""`holdfast ray`: the processes of a job on a Ray cluster."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from typing import Any

import click

from .common import (
    command_argument,
    heartbeat_timeout_option,
    idle_standbys,
    insecure_option,
    job_id_option,
    json_at_end_option,
    launch_command,
    launching,
    min_processes_option,
    num_processes_option,
    orbax_option,
    pairs_option,
    print_json,
    refuse,
    restart_options,
    slices_option,
    standby_options,
    take_policy,
    take_standby,
    with_orbax,
)


def _amounts(resources: dict[str, str]) -> dict[str, float]:
    try:
        return {name: float(amount) for name, amount in resources.items()} or {"CPU": 1.0}
    except ValueError as error:
        raise click.UsageError(f"--resource: expected NAME=AMOUNT: {error}") from None


def without_effect(chosen: Mapping[str, Any]) -> dict[str, str]:
    """Returns the options that do nothing beside the others, and why."""
    idle = idle_standbys(chosen)
    if not (chosen["max_failures"] or chosen["max_preemptions"]):
        idle["--spares"] = "is for processes that are replaced: add --max-restarts"
    return idle


@launch_command()
@num_processes_option
@min_processes_option
@click.option(
    "--address",
    default="auto",
    show_default=True,
    help='Of the cluster; "auto" is the one this machine belongs to.',
)
@pairs_option("--resource", "resources", help="Of one process.  [default: CPU=1]")
@slices_option
@click.option(
    "--spares",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Places held on other machines, each with a standby, for processes that lose theirs.",
)
@restart_options(0)
@heartbeat_timeout_option
@standby_options
@job_id_option
@insecure_option
@json_at_end_option
@orbax_option
@command_argument
def ray(
    command: tuple[str, ...], *, address: str, as_json: bool, orbax: bool, **options: Any
) -> None:
    """Run COMMAND as N processes of one job on a Ray cluster. Ends as `holdfast run` does.

    Each process has the environment of its node's `ray start`, and this command's folder, where
    the node has it. For a live page, `holdfast web ADDRESS` with the coordinator's address that is
    printed.

    \b
    holdfast ray -n 8 --min-processes 4 --resource GPU=1 -- python train.py
    """
    from holdfast.launch import ray as engine
    from holdfast.launch.workers.output import ConsoleOutput

    refuse(without_effect(click.get_current_context().params))
    lines = ConsoleOutput(
        sys.stderr if as_json else sys.stdout, sys.stderr, options["num_processes"]
    )
    with launching(), contextlib.closing(lines):
        options["resources"] = _amounts(options["resources"])
        restart = take_policy(options)
        standby = take_standby(options)
        result = engine.run_command(
            with_orbax(command) if orbax else command,
            # The options bear the names of its fields.
            engine.JobSpec(restart=restart, standby=standby, **options),
            output=lines,
            address=address,
        ).job
    if as_json:
        print_json(result.as_json())
    sys.exit(result.exit_code)
