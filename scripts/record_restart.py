"""Records a job whose process is killed, and draws it moving: docs/screens/restart.svg.

Run as `python scripts/record_restart.py`. The program is that of docs/trainer.md, under
`holdfast run -n 2`. Each line appears when it was printed.
"""

from __future__ import annotations

import html
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "screens" / "restart.svg"
COMMAND = "holdfast run -n 2 --max-restarts 5 -- python train.py 60"
KILL_AT = "process 1: step 20"
WIDTH = 104  # columns
INDENT = "          "
ROW = 20  # pixels
STAYS_S = 6.0  # how long the last picture stays before it begins anew


def program() -> str:
    """Returns the tutorial's program; each process prints its number first."""
    page = (ROOT / "docs" / "trainer.md").read_text()
    (found,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    return f"import os\nprint('pid', os.getpid(), flush=True)\n{found}"


def record(folder: Path) -> list[tuple[float, str]]:
    """Runs the job and kills process 1; returns (seconds since the start, line)."""
    (folder / "train.py").write_text(program())
    launcher = Path(sys.executable).parent / "holdfast"
    command = [launcher, *COMMAND.split()[1:-3], sys.executable, "train.py", "60"]
    lines: list[tuple[float, str]] = []
    victim = 0
    start_s = time.monotonic()
    with subprocess.Popen(
        command,
        cwd=folder,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as job:
        assert job.stdout is not None
        for line in job.stdout:
            now_s = time.monotonic() - start_s
            lines.append((now_s, line.rstrip()))
            if pid := re.match(r"\[1\] pid (\d+)", line):
                victim = victim or int(pid[1])
            if KILL_AT in line and not any("kill -9" in text for _, text in lines):
                lines.append((now_s, f"$ kill -9 {victim}      (process 1, from another terminal)"))
                os.kill(victim, signal.SIGKILL)
    if job.returncode:
        raise SystemExit(f"the job ended with exit code {job.returncode}")
    return [(0.0, f"$ {COMMAND}"), *lines]


def chosen(lines: list[tuple[float, str]]) -> list[tuple[float, str]]:
    """Returns the lines that are drawn: of the steps each tenth, of process 1."""
    kept = []
    for at_s, text in lines:
        step = re.search(r"\[(\d)\] process \d+: step (\d+)", text)
        if " pid " in text or (step and (step[1] == "0" or int(step[2]) % 10)):
            continue
        kept += [(at_s, row) for row in textwrap.wrap(text, WIDTH, subsequent_indent=INDENT)]
    return kept


def colour(text: str) -> str:
    """Returns the colour of a line: commands, what the launcher says, what the program says."""
    if text.startswith("$"):
        return "#7ee787"
    return "#ffa657" if text.startswith(("holdfast:", INDENT)) else "#c9d1d9"


def draw(lines: list[tuple[float, str]]) -> str:
    """Returns the moving picture; without animation it shows all lines."""
    whole_s = lines[-1][0] + STAYS_S
    height = ROW * (len(lines) + 1)
    styles = []
    rows = []
    for index, (at_s, text) in enumerate(lines):
        share = 100 * at_s / whole_s
        styles.append(
            f"@keyframes l{index} {{0% {{opacity: 0}} {share:.2f}% {{opacity: 0}}"
            f" {min(share + 0.01, 100):.2f}% {{opacity: 1}} 100% {{opacity: 1}}}}"
        )
        rows.append(
            f'<text x="12" y="{ROW * (index + 1)}" fill="{colour(text)}"'
            f' style="animation: l{index} {whole_s:.1f}s infinite">{html.escape(text)}</text>'
        )
    still = "@media (prefers-reduced-motion: reduce) {text {animation: none !important}}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {8 * WIDTH} {height}"'
            ' font-family="monospace" font-size="13" xml:space="preserve">',
            "<title>A process is killed, holdfast says which, and the job is back</title>",
            "<style>",
            *styles,
            still,
            "</style>",
            '<rect width="100%" height="100%" rx="8" fill="#0d1117"/>',
            *rows,
            "</svg>\n",
        ]
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        lines = record(Path(scratch))
    kept = [(at_s, text.replace(scratch, ".")) for at_s, text in chosen(lines)]
    PICTURE.write_text(draw(kept))
    print(*(f"{at_s:5.1f} s  {text}" for at_s, text in kept), sep="\n")


if __name__ == "__main__":
    main()
