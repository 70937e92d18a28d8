"""install() and `python -m holdfast.compat.orbax`: programs that import Orbax run on holdfast,
unedited.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from holdfast.cli.entry import main
from tests.support.paths import program


def run(*arguments: object, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment,
        timeout=100,
    )


@pytest.mark.slow
def test_a_script_runs_unedited(tmp_path: Path) -> None:
    """Imports of every form, spawned and started children, a module that is not covered; the script
    sets jax's environment first.
    """
    script = program("orbax_unedited")
    ran = run("-m", "holdfast.compat.orbax", script, "root", folder=tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert (
        "spawned ['holdfast.compat.orbax.checkpoint_manager']" in ran.stdout
        and "started holdfast.compat.orbax" in ran.stdout
    )
    assert (
        "orbax.checkpoint.no_such_module is not covered by holdfast.compat.orbax" in ran.stdout
        and "docs/from-orbax.md" in ran.stdout
    )
    (tmp_path / "helper.py").write_text(
        "import sys, orbax.checkpoint as ocp; print(ocp.CheckpointManager.__module__, sys.argv[1:])"
    )
    ran = run("-m", "holdfast.compat.orbax", "-m", "helper", "a", folder=tmp_path)
    assert ran.stdout.split(maxsplit=1) == [
        "holdfast.compat.orbax.checkpoint_manager",
        "['a']\n",
    ], ran.stderr
    assert run("-m", "holdfast.compat.orbax", folder=tmp_path).returncode == 2


def test_install_is_refused_once_orbax_is_imported(tmp_path: Path) -> None:
    """The error says what to do; twice is once."""
    late = "import orbax.checkpoint\nfrom holdfast.compat.orbax import install\ninstall()"
    ran = run("-W", "ignore", "-c", late, folder=tmp_path)
    refusal = "orbax.checkpoint is imported already; call holdfast.compat.orbax.install() before"
    assert ran.returncode == 1 and f"RuntimeError: {refusal}" in ran.stderr
    twice = (
        "from holdfast.compat.orbax import install; install(), install(); import orbax.checkpoint"
        " as o; print(o.args.Composite.__module__)"
    )
    assert run("-c", twice, folder=tmp_path).stdout.strip() == "holdfast.compat.orbax.args"


def test_the_sites_own_customisation_still_runs(tmp_path: Path) -> None:
    """A sitecustomize that children had before runs after ours."""
    (tmp_path / "sitecustomize.py").write_text("print('the site')")
    child = "subprocess.run([sys.executable, '-c', ''], check=True)"
    code = f"import subprocess, sys; from holdfast.compat.orbax import install; install(); {child}"
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    }
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=100
    )
    assert ran.returncode == 0 and ran.stdout == "the site\nthe site\n", ran.stdout + ran.stderr


def run_orbax(*command: str) -> subprocess.CompletedProcess[str]:
    start = [
        sys.executable,
        "-c",
        "from holdfast.cli import main; main()",
        "run",
        "-n",
        "2",
        "--no-view",
        "--orbax",
        "--",
    ]
    return subprocess.run(
        [*start, *command], capture_output=True, text=True, timeout=100, check=False
    )


@pytest.mark.parametrize(
    "joins",
    [
        "jax.distributed.initialize(None, None, process_id=None, initialization_timeout=60)",
        pytest.param("holdfast.multihost.initialize()", marks=pytest.mark.slow),
    ],
)
def test_a_job_runs_unedited_programs(joins: str, tmp_path: Path) -> None:
    """`holdfast run --orbax` starts each process so: with options of the interpreter, a script or a
    module, and its arguments. They join as with jax's own launchers, or holdfast's way.
    """
    (tmp_path / "train.py").write_text(
        f"import sys\nimport jax\nimport holdfast.multihost\n{joins}\n"
        "import orbax.checkpoint as ocp\nassert jax.process_count() == 2\n"
        "ocp.multihost.sync_global_processes('all')\nprint('runs',"
        " ocp.CheckpointManager.__module__.split('.')[0], *sys.argv[1:])\n"
        "jax.distributed.shutdown()\n"
    )
    ran = run_orbax(sys.executable, "-X", "utf8", "-u", str(tmp_path / "train.py"), "--steps", "3")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("runs holdfast --steps 3") == 2


def test_a_command_without_python_is_refused() -> None:
    """There is nothing to start it through; what is expected is shown."""
    for command in (["bash", "train.sh"], [sys.executable], [sys.executable, "-c", "pass"]):
        ran = CliRunner().invoke(main, ["run", "-n", "2", "--orbax", "--", *command])
        assert (
            ran.exit_code == 2
            and "--orbax: expected a command like `python train.py`" in ran.stderr
        )
