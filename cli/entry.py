"""The command group. Each command has a module of its own, imported only when it is run."""

from __future__ import annotations

import importlib
from typing import Any

import click
from click.shell_completion import CompletionItem

from .interrupts import EXIT_INTERRUPTED, raise_at_interrupts

# What the help says of each command. A command is the function of its name in the module of its
# name, imported when it is used, so that `holdfast coordinator` never imports jax.
_GROUPS = {
    "Checkpoints": {
        "ls": "List the steps of a root.",
        "show": "Show the tree of a checkpoint, and its totals.",
        "diff": "Compare two checkpoints, bit by bit.",
        "verify": "Read every byte of a checkpoint and check it.",
        "cp": "Copy a checkpoint, or every step of a root.",
        "convert": "Write a checkpoint in another layout.",
        "prune": "Delete the steps that no rule keeps.",
        "sweep": "Delete the unfinished saves of dead writers.",
    },
    "Jobs": {
        "run": "Run a command as N processes of one job.",
        "status": "Show a job: processes, barriers, who is missing.",
        "web": "Serve a live page of a job.",
        "coordinator": "Serve the processes of one job.",
    },
    "Clusters": {
        "ray": "Run a command as N processes of one job on a Ray cluster.",
        "slurm": "Run a command as the tasks of a Slurm allocation.",
        "kubernetes": "Write the manifest of a job for kubectl.",
        "task": "Run a command as one process of a job of srun or mpirun.",
    },
}
_SUMMARIES = {name: said for commands in _GROUPS.values() for name, said in commands.items()}

# They import for a second longer, and mind interrupts after that.
_IMPORTING = ("run", "ray", "slurm")


class _Lazy(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_SUMMARIES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _SUMMARIES:
            return None
        module = importlib.import_module(f"holdfast.cli.{cmd_name}")
        command: Any = getattr(module, cmd_name)
        assert isinstance(command, click.Command)
        if cmd_name not in _IMPORTING:
            raise_at_interrupts()
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        # By the table above: click itself would import every command.
        names = [
            CompletionItem(name, help=summary)
            for name, summary in _SUMMARIES.items()
            if name.startswith(incomplete)
        ]
        return names + click.Command.shell_complete(self, ctx, incomplete)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, _SUMMARIES))
        for title, commands in _GROUPS.items():
            with formatter.section(title):
                formatter.write_dl(
                    [(name.ljust(width), summary) for name, summary in commands.items()]
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
