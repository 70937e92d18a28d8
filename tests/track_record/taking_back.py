"""Takes a mend back in a copy of the code, and runs the test that finds it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.support.paths import ROOT

SOURCE = ROOT / "src" / "holdfast"
A_FAILED_TEST = 1
# Without its mend the code may wait at the interpreter's end for what never comes.
_PYTEST = "import os, pytest, sys; code = pytest.main(); sys.stdout.flush(); os._exit(code)"


@dataclass(frozen=True)
class Mend:
    """A defect of a promise, and the code that mends it: in `file`, `text` in place of `instead`.

    `found_by` is the test that fails where the code is as it was.
    """

    name: str
    promise: int
    mended: str
    wrong: str
    file: str
    text: str
    instead: str
    found_by: str

    def without(self, code: str) -> str:
        """Returns the code with the mend taken back."""
        assert code.count(self.text) == 1, f"{self.name}: {self.file} reads otherwise now"
        return code.replace(self.text, self.instead)


@dataclass(frozen=True)
class Verdict:
    """Whether the test failed, and the lines that say of what."""

    is_found: bool
    says: str


def _what_it_says(output: str) -> str:
    lines = [line[1:].strip() for line in output.splitlines() if line.startswith("E ")]
    return "\n".join(lines[:3]) or "\n".join(output.splitlines()[-3:])


def take_back(mend: Mend, *, timeout_s: float = 300) -> Verdict:
    """Runs the mend's test on a copy of the code without the mend."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "holdfast"
        shutil.copytree(SOURCE, copy)
        file = copy / mend.file
        code = mend.without(file.read_text())
        compile(code, mend.file, "exec")
        file.write_text(code)
        pytest = [
            sys.executable,
            "-c",
            _PYTEST,
            "-x",
            "-q",
            "--tb=short",
            "-p",
            "no:cacheprovider",
        ]
        try:
            done = subprocess.run(
                [*pytest, "-m", "slow or not slow", mend.found_by],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": folder, "PYTEST_ADDOPTS": ""},
                capture_output=True,
                text=True,
                timeout=timeout_s,
            )
        except subprocess.TimeoutExpired:
            return Verdict(False, f"its test had not ended after {timeout_s:g} s")
    is_found = done.returncode == A_FAILED_TEST and "\nFAILED " in done.stdout
    return Verdict(is_found, _what_it_says(done.stdout + done.stderr))
