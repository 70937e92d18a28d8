"""What a job's processes compile is kept, with jobs of real jax programs."""

from __future__ import annotations

import ast
import os
import sys
from pathlib import Path

import pytest

from holdfast.launch import RestartPolicy, RunSettings, StandbySettings, run_local
from holdfast.multihost.compiled.folder import COMPILE_CACHE, JAX_FOLDER, folder_of
from tests.support.cluster import CollectedOutput
from tests.support.paths import program


def environment(**more: str) -> dict[str, str]:
    base = {
        key: value for key, value in os.environ.items() if not key.startswith(("JAX_", "HOLDFAST_"))
    }
    return base | {"JAX_PLATFORMS": "cpu"} | more


@pytest.mark.slow  # tests/multihost/compiled has a second run, and a host that comes new
def test_the_second_attempt_compiles_nothing_anew(tmp_path: Path) -> None:
    """What a process compiled in the first attempt it loads in the second, each program of it,
    however short its compilation was. jax by itself writes what process 0 compiles alone.
    """
    output = CollectedOutput()
    restart = RestartPolicy(max_failures=1, backoff_s=0)
    result = run_local(
        [sys.executable, str(program("compile_and_fail"))],
        2,
        RunSettings(
            env=environment(),
            compile_cache=tmp_path,
            restart=restart,
            standby=StandbySettings(wanted=False),
        ),
        output=output,
    )
    assert result.outcome == "done" and result.attempts == 2, output.text
    assert result.goodput.compiling_s > 0.0
    for number in range(2):
        first, second = (
            ast.literal_eval(text)
            for process, text in output.lines
            if process == number and text.startswith("['")
        )
        requested = first[1]
        assert requested > 1 and first == ["1", requested, 0, requested]
        assert second == ["2", requested, requested, 0]


def _told(settings: RunSettings) -> tuple[str, str]:
    """Returns what a process of a job is told, and what the launcher says."""
    output = CollectedOutput()
    variables = (JAX_FOLDER, COMPILE_CACHE)
    script = f"import os; print(*(os.environ.get(name) for name in {variables}))"
    assert run_local([sys.executable, "-S", "-c", script], 1, settings, output=output).outcome == (
        "done"
    )
    return output.lines[0][1], output.text


def test_programs_that_join_nothing_are_told_too(tmp_path: Path) -> None:
    """By jax's own variable. The option of the run comes before the environment."""
    path = folder_of({COMPILE_CACHE: str(tmp_path)})
    assert path is not None
    for its in (environment(), environment(JAX_COMPILATION_CACHE_DIR="/other")):
        told, _ = _told(RunSettings(env=its, compile_cache=tmp_path))
        assert told == f"{path} {tmp_path}" and path.is_dir()
    assert _told(RunSettings(env=environment(), compile_cache="off"))[0] == "None off"
    told, _ = _told(RunSettings(env=environment(JAX_COMPILATION_CACHE_DIR="/own")))
    assert told == "/own None"


@pytest.mark.parametrize("put", [Path.touch, lambda path: path.symlink_to("/tmp")])
def test_without_a_folder_there_is_no_cache(put: object, tmp_path: Path) -> None:
    """A file in its place, or a link to where others may write: one line names it, and the job runs
    without a cache.
    """
    assert callable(put)
    path = folder_of({COMPILE_CACHE: str(tmp_path)})
    assert path is not None
    put(path)
    told, said = _told(RunSettings(env=environment(), compile_cache=tmp_path))
    assert told == "None off"
    assert said.count(f"not kept, and each start compiles anew: {path}: ") == 1
