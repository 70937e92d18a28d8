"""A user's program is checked against the package as users install it, by mypy and by pyright."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.paths import SUPPORT
from tests.support.wheel import EmptyEnvironment, build_wheel

PROGRAM = SUPPORT / "programs" / "typed_user.py"
# What a stranger gets wrong, each on a line of its own.
WRONG = """from holdfast.checkpoint import CheckpointManager, Options
Options(on_busy="never")
CheckpointManager("root").latest_step() + 1
CheckpointManager("root").save("seven", {})
"""
CHECKERS = {
    "mypy": ["mypy", "--strict", "--no-incremental"],
    "pyright": ["basedpyright", "--level", "error"],
}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_users_program_is_typed(tmp_path: Path) -> None:
    """A right one is right to both, in their strict modes, and each mistake of a wrong one is found
    by both: the package's types reach its users.
    """
    user = EmptyEnvironment(tmp_path)
    user.install(build_wheel(tmp_path), "mypy", "basedpyright")
    folder = tmp_path / "program"
    folder.mkdir()
    shutil.copy(PROGRAM, folder / "right.py")
    (folder / "wrong.py").write_text(WRONG)
    (folder / "pyrightconfig.json").write_text('{"typeCheckingMode": "strict"}')

    def check(checker: str, program: str) -> subprocess.CompletedProcess[str]:
        name, *options = CHECKERS[checker]
        return subprocess.run(
            [user.command(name), *options, program],
            cwd=folder,
            env=user.variables,
            capture_output=True,
            text=True,
            check=False,
        )

    for checker in CHECKERS:
        right = check(checker, "right.py")
        assert right.returncode == 0, right.stdout + right.stderr
        wrong = check(checker, "wrong.py")
        assert wrong.returncode != 0
        found = {line for line in range(1, 5) if f"wrong.py:{line}:" in wrong.stdout}
        assert found == {2, 3, 4}, wrong.stdout
