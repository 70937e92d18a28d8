"""The command group. Each command has a module of its own, imported only when it is run."""

from __future__ import annotations

import importlib
from typing import Any

import click

from .interrupts import EXIT_INTERRUPTED, raise_at_interrupts

# command: (module, attribute). A command is imported when it is used, so that `holdfast
# coordinator` never imports jax.
_COMMANDS = {
    "convert": ("holdfast.cli.convert", "convert"),
    "coordinator": ("holdfast.cli.coordinator", "coordinator"),
    "cp": ("holdfast.cli.cp", "cp"),
    "diff": ("holdfast.cli.diff", "diff"),
    "kubernetes": ("holdfast.cli.kubernetes", "kubernetes"),
    "ls": ("holdfast.cli.ls", "ls"),
    "prune": ("holdfast.cli.prune", "prune"),
    "run": ("holdfast.cli.run", "run"),
    "show": ("holdfast.cli.show", "show"),
    "status": ("holdfast.cli.status", "status"),
    "slurm": ("holdfast.cli.slurm", "slurm"),
    "sweep": ("holdfast.cli.sweep", "sweep"),
    "task": ("holdfast.cli.task", "task"),
    "web": ("holdfast.cli.web", "web"),
    "verify": ("holdfast.cli.verify", "verify"),
}


# They import for a second longer, and mind interrupts after that.
_IMPORTING = ("run", "slurm")


class _Lazy(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, attribute = _COMMANDS[cmd_name]
        command: Any = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        if cmd_name not in _IMPORTING:
            raise_at_interrupts()
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            ctx.exit(EXIT_INTERRUPTED)


@click.group(
    cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120}
)
@click.version_option(package_name="holdfast-jax")
def main() -> None:
    """Checkpointing and multihost coordination for JAX."""
