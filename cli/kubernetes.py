"""`holdfast kubernetes`: writes the manifest of a job for Kubernetes."""

from __future__ import annotations

from typing import Any

import click

from .common import (
    command_argument,
    insecure_option,
    launching,
    num_processes_option,
    pairs_option,
    slices_option,
)


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("--name", required=True, help="Of the job.")
@click.option("--image", required=True, help="Holds Python, holdfast and the program.")
@num_processes_option
@slices_option
@click.option("--namespace", default="default", show_default=True)
@pairs_option("--resource", "resources", help="Limit of each pod, e.g. google.com/tpu=4.")
@pairs_option("--node-selector", help="Label that nodes must have.")
@insecure_option
@command_argument
def kubernetes(**options: Any) -> None:
    """Write the manifest of COMMAND as an Indexed Job (or a JobSet, with --slices) to stdout, for
    `kubectl apply -f -`.

    The manifest holds a Secret that was made for this job: run the command again for another.

    \b
    holdfast kubernetes --name train -n 4 --image reg/train:1 -- python train.py
    """
    with launching():
        from holdfast.launch import KubernetesJob, render_kubernetes

        manifest = render_kubernetes(KubernetesJob(**options))  # each option is one of its fields
    click.echo(manifest, nl=False)
