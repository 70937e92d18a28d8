"""Renders what the commands print into docs/screens/*.svg.

Run as `python scripts/render_screens.py [NAME ...]`.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

SCREENS = Path(__file__).resolve().parent.parent / "docs" / "screens"
WIDTH = 118
HOLDFAST = str(Path(sys.executable).parent / "holdfast")

MAKE = """
import jax, jax.numpy as jnp, numpy as np
from holdfast.checkpoint import CheckpointManager, Json
kernel = jax.random.normal(jax.random.key(0), (512, 256))
with CheckpointManager("run7") as manager:
    for step in (1000, 2000, 3000):
        dense = {"kernel": kernel * step, "bias": jnp.zeros(256, jnp.bfloat16)}
        state = {"params": {"dense": dense}, "opt": {"count": jnp.int32(step)}}
        state |= {"key": jax.random.key(7), "name": "tiny"}
        items = {"state": state, "config": Json({"lr": 1e-3})}
        manager.save(step, items=items, metrics={"loss": 3000 / step})
        manager.wait_until_finished()
"""
TRAIN = """
import os, time
me, count = os.environ["HOLDFAST_PROCESS_ID"], os.environ["HOLDFAST_NUM_PROCESSES"]
print(f"process {me} of {count} says hello", flush=True)
"""
COMMANDS = {
    "ls": ["ls run7"],
    "show": ["show run7 --stats"],
    "diff": ["diff run7/2000 run7/3000"],
    "verify": ["verify run7 --all"],
    "run": ["run -n 4 --no-view -- python train.py"],
}


def output_of(command: str, folder: Path) -> str:
    """Runs a command in `folder`; returns what it printed, in colour."""
    environment = os.environ | {
        "COLUMNS": str(WIDTH),
        "FORCE_COLOR": "1",
        "JAX_PLATFORMS": "cpu",
        "TZ": "UTC",
    }
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment.get('PATH', '')}"
    ran = subprocess.run(
        [HOLDFAST, *command.split()],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    return ran.stdout.replace(str(folder), "/ckpt")


def render(name: str, folder: Path) -> None:
    """Writes one screen."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    for command in COMMANDS[name]:
        console.print(Text(f"$ holdfast {command}", style="bold green"))
        console.print(Text.from_ansi(output_of(command, folder)))
    svg = console.export_svg(title=f"holdfast {name}", unique_id=f"holdfast-{name}")
    svg = re.sub(
        r"@font-face \{.*?\}\n?", "", svg, flags=re.DOTALL
    )  # fonts from afar are nobody's business
    (SCREENS / f"{name}.svg").write_text(svg)
    print(SCREENS / f"{name}.svg")


def main() -> None:
    SCREENS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "train.py").write_text(TRAIN)
        subprocess.run(
            [sys.executable, "-c", MAKE],
            cwd=folder,
            check=True,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
        )
        for name in sys.argv[1:] or COMMANDS:
            render(name, folder)


if __name__ == "__main__":
    main()
