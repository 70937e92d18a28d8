"""The compile cache of a job, with jobs of real jax programs."""

from __future__ import annotations

import ast
import os
import stat
import subprocess
import sys
from pathlib import Path

from holdfast.coordination.process.job_folder import user_folder
from holdfast.launch import RestartPolicy, RunSettings, StandbySettings, run_local
from holdfast.launch.workers.compile_cache import compile_cache
from tests.support.cluster import CollectedOutput
from tests.support.paths import program


def environment(**more: str) -> dict[str, str]:
    base = {
        key: value for key, value in os.environ.items() if not key.startswith(("JAX_", "HOLDFAST_"))
    }
    return base | {"JAX_PLATFORMS": "cpu"} | more


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
            log_dir=tmp_path,
            restart=restart,
            standby=StandbySettings(wanted=False),
        ),
        output=output,
    )
    assert result.outcome == "done" and result.attempts == 2, output.text
    for number in range(2):
        first, second = (
            ast.literal_eval(text)
            for process, text in output.lines
            if process == number and text.startswith("['")
        )
        requested = first[1]
        assert requested > 1 and first == ["1", requested, 0, requested]
        assert second == ["2", requested, requested, 0]


def test_a_job_without_logs_has_one_too() -> None:
    """Its processes are told a folder that is there while they run."""
    output = CollectedOutput()
    script = (
        "import os; path = os.environ['JAX_COMPILATION_CACHE_DIR']; print(path,"
        " os.path.isdir(path))"
    )
    settings = RunSettings(env=environment())
    command = [sys.executable, "-S", "-c", script]
    assert run_local(command, 1, settings, output=output).outcome == "done"
    path, is_there = output.lines[0][1].split()
    assert is_there == "True" and not Path(path).exists()


def test_it_lies_with_the_logs_for_one_user(tmp_path: Path) -> None:
    """The folder is made, or made private where it was not, and stays for the next run."""
    (tmp_path / "compile-cache").mkdir(mode=0o755)
    with compile_cache({}, tmp_path / "logs", print) as variables:
        folder = tmp_path / "logs" / "compile-cache"
        assert variables["JAX_COMPILATION_CACHE_DIR"] == str(folder)
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    with compile_cache({}, tmp_path, print) as variables:
        assert stat.S_IMODE((tmp_path / "compile-cache").stat().st_mode) == 0o700
    assert folder.is_dir()


def test_without_logs_it_is_a_temporary_folder() -> None:
    """It lies where nobody else can enter, and goes with the job."""
    with compile_cache({}, None, print) as variables:
        folder = Path(variables["JAX_COMPILATION_CACHE_DIR"])
        assert folder.parent == user_folder()
        assert (
            stat.S_IMODE(folder.stat().st_mode)
            == stat.S_IMODE(folder.parent.stat().st_mode)
            == 0o700
        )
    assert not folder.exists()


def test_the_next_job_removes_what_was_left() -> None:
    """A folder of a launcher that still runs stays."""
    script = """
import os
from holdfast.launch.workers.compile_cache import compile_cache
with compile_cache({}, None, print) as variables:
    print(variables["JAX_COMPILATION_CACHE_DIR"], flush=True)
    os.kill(os.getpid(), 9)
"""
    left = Path(
        subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=False
        ).stdout.strip()
    )
    assert left.is_dir()
    with compile_cache({}, None, print) as first, compile_cache({}, None, print):
        assert not left.exists()
        assert Path(first["JAX_COMPILATION_CACHE_DIR"]).is_dir()


def test_what_the_user_has_set_stays(tmp_path: Path) -> None:
    """A folder of the user's own, or none (empty): nothing is added. Other thresholds than ours
    stay too.
    """
    with compile_cache({"JAX_COMPILATION_CACHE_DIR": ""}, tmp_path, print) as variables:
        assert variables == {}
    with compile_cache(
        {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "5"}, tmp_path, print
    ) as variables:
        assert sorted(variables) == [
            "JAX_COMPILATION_CACHE_DIR",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES",
        ]


def test_without_a_folder_there_is_no_cache(tmp_path: Path) -> None:
    """A file in its place, or a link to where others may write: the line names it, and the job runs
    without a cache.
    """
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name, put in {"file": Path.touch, "link": lambda path: path.symlink_to(elsewhere)}.items():
        log_dir = tmp_path / name
        lines = list[str]()
        log_dir.mkdir()
        put(log_dir / "compile-cache")
        with compile_cache({}, log_dir, lines.append) as variables:
            assert variables == {}
        (line,) = lines
        assert line.startswith(
            f"no compile cache, each attempt compiles anew: {log_dir}/compile-cache: "
        )
        assert line.endswith("; remove it, or set JAX_COMPILATION_CACHE_DIR")
