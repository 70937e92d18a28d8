"""The command group. Each command has a module of its own, imported only when it is run."""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import click

from .interrupts import EXIT_INTERRUPTED, raise_at_interrupts


class _Command(NamedTuple):
    """Where a command is, and what the help says of it.

    A command is imported when it is used, so that `holdfast coordinator` never imports jax.
    """

    module: str
    summary: str


_GROUPS = {
    "Checkpoints": {
        "ls": _Command("ls", "List the steps of a root."),
        "show": _Command("show", "Show the tree of a checkpoint, and its totals."),
        "diff": _Command("diff", "Compare two checkpoints, bit by bit."),
        "verify": _Command("verify", "Read every byte of a checkpoint and check it."),
        "cp": _Command("cp", "Copy a checkpoint, or every step of a root."),
        "convert": _Command("convert", "Write a checkpoint in another layout."),
        "prune": _Command("prune", "Delete the steps that no rule keeps."),
        "sweep": _Command("sweep", "Delete the unfinished saves of dead writers."),
    },
    "Jobs": {
        "run": _Command("run", "Run a command as N processes of one job."),
        "status": _Command("status", "Show a job: processes, barriers, who is missing."),
        "web": _Command("web", "Serve a live page of a job."),
        "coordinator": _Command("coordinator", "Serve the processes of one job."),
    },
    "Clusters": {
        "slurm": _Command("slurm", "Run a command as the tasks of a Slurm allocation."),
        "kubernetes": _Command("kubernetes", "Write the manifest of a job for kubectl."),
        "task": _Command("task", "Run a command as one process of a job of srun or mpirun."),
    },
}
_COMMANDS = {name: command for group in _GROUPS.values() for name, command in group.items()}

# They import for a second longer, and mind interrupts after that.
_IMPORTING = ("run", "slurm")


class _Lazy(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module = importlib.import_module(f"holdfast.cli.{_COMMANDS[cmd_name].module}")
        command: Any = getattr(module, cmd_name)
        assert isinstance(command, click.Command)
        if cmd_name not in _IMPORTING:
            raise_at_interrupts()
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, _COMMANDS))
        for title, commands in _GROUPS.items():
            with formatter.section(title):
                formatter.write_dl(
                    [(name.ljust(width), command.summary) for name, command in commands.items()]
                )

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
