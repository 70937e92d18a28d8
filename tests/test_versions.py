"""Both ends of what is supported: the lowest versions that pyproject.toml admits, and the newest
Python with the newest jax; and which Python `make` takes.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.support.environments import environment, find_python
from tests.support.paths import ROOT

# Those of the Makefile: what the tests reach through an extra.
EXTRAS = "examples,incremental,metrics,safetensors,tls,web"
# The rooms whose fast tests run at each end, folder by folder: so that a share of them is a share.
ROOMS = ["checkpoint", "coordination", "multihost"]
PARTS = sorted(
    {
        str(path.parent.relative_to(ROOT))
        for room in ROOMS
        for path in ROOT.glob(f"tests/{room}/**/test_*.py")
    }
) + ["tests/system/test_main_job.py"]
LOWEST = [
    "jax==0.10.0",
    "jaxlib==0.10.0",
    "numpy==2.0.2",
    "absl-py==2.0.0",
    "grpcio==1.66.2",
    "protobuf==5.27.2",
    "tensorstore==0.1.86",
    "crc32c==2.7.1",
    "obstore==0.12.0",
    "click==8.2.0",
    "rich==13.7.1",
]
ENDS = {
    "lowest": ("3.11", LOWEST),
    "jax-0.11": ("3.13", ["jax==0.11.*"]),
    "newest": ("3.13", ["jax>=0.12"]),
}


def _environment(end: str) -> Path:
    """Returns the interpreter of the environment of one end."""
    version, pins = ENDS[end]
    group = ["--group", f"{ROOT / 'pyproject.toml'}:test"]
    return environment(end, version, ["-e", f"{ROOT}[{EXTRAS}]", *group, *pins])


def test_the_ends_are_those_that_are_promised() -> None:
    """Every lower bound in pyproject.toml is pinned at the lowest end; the Pythons of the ends are
    the first and the last that it names.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    bounds = {
        name: f"=={bound}" for name, bound in (text.split(">=") for text in project["dependencies"])
    }
    pins = dict(re.fullmatch(r"([\w-]+)(==.*)", pin).groups() for pin in LOWEST)  # type: ignore[union-attr]
    assert {
        name for name, bound in bounds.items() if not f"{pins[name]}.".startswith(f"{bound}.")
    } == set()
    named = [
        text.rpartition(" ")[2] for text in project["classifiers"] if re.search(r":: 3\.\d+$", text)
    ]
    assert project["requires-python"] == f">={named[0]}"
    assert (ENDS["lowest"][0], ENDS["newest"][0]) == (named[0], named[-1])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("end", ENDS)
def test_an_end_is_what_its_name_says(end: str) -> None:
    """The environment of an end has that Python and that jax; at the lowest end every version is
    the pinned one.
    """
    version, pins = ENDS[end]
    code = (
        "import sys, importlib.metadata as m; print('%d.%d' % sys.version_info[:2], *map(m.version,"
        " sys.argv[1:]))"
    )
    names = [re.split("[=>]", pin)[0] for pin in pins]
    ran = subprocess.run(
        [_environment(end), "-c", code, *names], capture_output=True, text=True, check=True
    )
    python, *found = ran.stdout.split()
    assert python == version
    if end == "lowest":
        assert [f"{name}=={number}" for name, number in zip(names, found, strict=True)] == pins
    else:
        assert (
            (int(found[0].split(".")[1]) >= 12) if end == "newest" else found[0].startswith("0.11.")
        )


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("end", ENDS)
def test_the_fast_tests_pass_at_both_ends(end: str, part: str, drawn: random.Random) -> None:
    """Those of a third of the files in a folder, another one each day, pass at this end."""
    path = ROOT / part
    tests = [path]
    if path.is_dir():
        files = sorted(path.glob("test_*.py"))
        tests = drawn.sample(files, -(-len(files) // 3))
    command = [
        _environment(end),
        "-m",
        "pytest",
        "-q",
        "-m",
        "not slow",
        "-p",
        "no:cacheprovider",
        *tests,
    ]
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")
    }
    ran = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=850
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.parametrize("end", ["lowest", "newest"])
def test_a_missing_python_is_an_error_in_ci(
    end: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where nobody looks at skips an end that cannot be tested fails; elsewhere it is skipped, and
    the reason says what was looked at.
    """
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("CI", "true")
    with pytest.raises(AssertionError, match=rf"no Python 3\.1\d that runs .* {tmp_path}"):
        find_python(ENDS[end][0])
    monkeypatch.delenv("CI")
    with pytest.raises(pytest.skip.Exception, match=r"no Python 3\.1\d"):
        find_python(ENDS[end][0])


def _make(folder: Path, pythons: dict[str, str], *arguments: str) -> str:
    """Returns what `make` says, with these scripts as all that is on PATH."""
    make = shutil.which("make")
    if make is None:
        pytest.skip("no make")
    (folder / "bin").mkdir()
    for name, script in pythons.items():
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / "bin" / name).chmod(0o755)
    (folder / "pyproject.toml").touch()
    command = [make, "-C", folder, "-f", ROOT / "Makefile", *arguments]
    ran = subprocess.run(
        command, env={"PATH": str(folder / "bin")}, capture_output=True, text=True, check=False
    )
    return ran.stdout + ran.stderr


RUNS = f'exec {sys.executable} "$@"'
SHIM = "echo 'pyenv: command not found' >&2; exit 127"


@pytest.mark.parametrize(
    ("pythons", "chosen"),
    [
        pytest.param(
            {"python3.13": RUNS, "python3.12": RUNS, "python3": SHIM},
            "python3.13",
            marks=pytest.mark.slow,
        ),
        (
            {"python3.13": SHIM, "python3.12": SHIM, "python3.11": RUNS, "python3": RUNS},
            "python3.11",
        ),
        pytest.param(
            {"python3.13": SHIM, "python3.14": RUNS, "python3": RUNS},
            "python3",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_make_takes_the_newest_python_that_runs(
    pythons: dict[str, str], chosen: str, tmp_path: Path
) -> None:
    """A name on PATH that only fails, as pyenv's shims do, is passed over."""
    assert f"\n{chosen} -m venv " in _make(tmp_path, pythons, "-n", "setup")


def test_make_takes_the_python_that_it_is_told(tmp_path: Path) -> None:
    """PYTHON= beats the newest."""
    assert "\nmine -m venv " in _make(
        tmp_path, {"python3.13": RUNS, "mine": RUNS}, "-n", "setup", "PYTHON=mine"
    )


def test_make_says_what_it_looked_for(tmp_path: Path) -> None:
    """Without a Python it stops before it makes anything, and says what it looked for and what to
    do.
    """
    said = _make(tmp_path, {"python3.13": SHIM, "python3": SHIM}, "setup")
    assert (
        "no Python 3.11 to 3.13 that runs" in said
        and "Looked on PATH for python3.13" in said
        and "make PYTHON=" in said
    )
    assert not (tmp_path / ".venv").exists()


def test_make_uses_no_other_python_than_asked_for(tmp_path: Path) -> None:
    """A .venv of another Python than PYTHON= is an error that names both."""
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").write_text("#!/bin/sh\necho 3.10\n")
    (tmp_path / ".venv" / "bin" / "python").chmod(0o755)
    said = _make(tmp_path, {"mine": RUNS}, "setup", "PYTHON=mine")
    assert (
        ".venv is not of PYTHON=mine, but of Python 3.10: leave out PYTHON, or remove .venv" in said
    )
