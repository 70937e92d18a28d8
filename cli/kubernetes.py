"""`holdfast kubernetes`: writes the manifest of a job for Kubernetes."""

from __future__ import annotations

from typing import Any

import click

from holdfast.coordination.limits import Limits

from .common import command_argument


def _pairs(
    context: click.Context, parameter: click.Parameter, values: tuple[str, ...]
) -> dict[str, str]:
    for value in values:
        if "=" not in value:
            raise click.BadParameter(f"{value!r}: expected NAME=VALUE")
    return dict(value.split("=", 1) for value in values)


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("--name", required=True, help="Of the job.")
@click.option("--image", required=True, help="Holds Python, holdfast and the program.")
@click.option(
    "-n",
    "--num-processes",
    type=click.IntRange(1, Limits().tasks),
    required=True,
    help="Processes in all.",
)
@click.option(
    "--slices",
    "num_slices",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="TPU slices; above 1 it becomes a JobSet.",
)
@click.option("--namespace", default="default", show_default=True)
@click.option(
    "--resource",
    "resources",
    multiple=True,
    callback=_pairs,
    metavar="NAME=VALUE",
    help="Limit of each pod, e.g. google.com/tpu=4.",
)
@click.option(
    "--node-selector",
    multiple=True,
    callback=_pairs,
    metavar="NAME=VALUE",
    help="Label that nodes must have.",
)
@click.option(
    "--insecure",
    is_flag=True,
    help=(
        "No Secret with a token and certificates: any pod that reaches the coordinator can disturb"
        " the job."
    ),
)
@command_argument
def kubernetes(**options: Any) -> None:
    """Write the manifest of COMMAND as an Indexed Job (or a JobSet, with --slices) to stdout, for
    `kubectl apply -f -`.

    The manifest holds a Secret that was made for this job: run the command again for another.

    \b
    holdfast kubernetes --name train -n 4 --image registry.example/train:1 -- python train.py
    """
    from holdfast.launch import KubernetesJob, render_kubernetes

    try:
        manifest = render_kubernetes(KubernetesJob(**options))  # each option is one of its fields
    except (ValueError, ImportError) as error:
        raise click.UsageError(str(error)) from error
    click.echo(manifest, nl=False)
