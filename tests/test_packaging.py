"""holdfast imports from a wheel and from an editable install, whatever lies in the current
folder.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.wheel import build_wheel


def _hostile_folder(folder: Path) -> Path:
    """Makes a folder whose names collide with ours: each raises when it is imported."""
    folder.mkdir()
    (folder / "checkpoint.py").write_text("raise SystemExit('the wrong checkpoint')")
    for name in ("checkpoint", "proto", "coordination"):
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text("raise SystemExit('the wrong package')")
    return folder


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


def test_an_editable_install_is_not_shadowed(tmp_path: Path) -> None:
    """`import holdfast.checkpoint` finds ours in a folder with a checkpoint.py, checkpoint/ and
    proto/ of the user's; so does the command, as a module too.
    """
    folder = _hostile_folder(tmp_path / "user")
    code = "import holdfast.checkpoint, holdfast.proto, holdfast.multihost"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=folder, check=True)
    helped = subprocess.check_output(
        [sys.executable, "-m", "holdfast", "--help"], cwd=folder, text=True
    )
    assert helped.startswith("Usage: python -m holdfast [OPTIONS] COMMAND")


@pytest.mark.slow
def test_a_wheel_is_not_shadowed_and_shadows_nothing(wheel: Path, tmp_path: Path) -> None:
    """The wheel holds only `holdfast/`, and imports from there in the same folder."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "site")
    assert {name.split("/")[0] for name in names} == {
        "holdfast",
        next(n.split("/")[0] for n in names if ".dist-info" in n),
    }
    assert "holdfast/__init__.py" not in names, "holdfast is a namespace"
    sources = {
        path.relative_to(ROOT / "src").as_posix()
        for room in (ROOT / "src" / "holdfast").iterdir()
        for path in room.rglob("*")
        if path.suffix in (".py", ".pyi", ".proto", ".typed")
    }
    assert {
        "holdfast/__main__.py",
        "holdfast/checkpoint/py.typed",
        "holdfast/web/page/page.html",
    } <= set(names)
    assert sources <= set(names)
    folder = _hostile_folder(tmp_path / "user")
    code = (
        "import sys, holdfast.checkpoint as c; assert c.__file__.startswith(sys.argv[1]),"
        " c.__file__"
    )
    # The interpreter below the virtual environment reads no .pth file there, so the editable
    # install is out of sight.
    environment = {
        "PYTHONPATH": f"{tmp_path / 'site'}:{sysconfig.get_path('purelib')}",
        "PATH": os.environ["PATH"],
    }
    base = getattr(sys, "_base_executable", sys.executable)
    subprocess.run(
        [base, "-W", "ignore", "-c", code, tmp_path / "site"],
        cwd=folder,
        env=environment,
        check=True,
    )
