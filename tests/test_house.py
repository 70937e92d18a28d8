"""The house holds: floors, packaging, names and generated code are as docs/concepts.md and docs/adr/0001-packaging.md say."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FLOORS = {
    "proto": set(),
    "coordination": {"proto"},
    "multihost": {"coordination", "proto"},
    "checkpoint": {"multihost", "coordination", "proto"},
    "launch": {"multihost", "coordination", "proto"},
    "cli": {"launch", "checkpoint", "multihost", "coordination", "proto"},
}
CONFIG = tomllib.loads((ROOT / "pyproject.toml").read_text())


def _imports(path: Path) -> list[tuple[int, str]]:
    """Returns (level, module) of each import, in functions too."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(0, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [(node.level, node.module or "")]
            if node.module == "holdfast":
                found += [(0, f"holdfast.{alias.name}") for alias in node.names]
    return found


def _sources(folder: str) -> list[Path]:
    return sorted((ROOT / folder).glob("*.py"))


@pytest.mark.parametrize("room", FLOORS)
def test_a_room_imports_only_the_rooms_below_it(room: str) -> None:
    """No import points upwards, relative ones stay inside the folder, and a bare folder name is never imported."""
    for path in _sources(room):
        for level, module in _imports(path):
            assert level <= 1, f"{path}: a relative import may not leave the folder"
            if level == 0:
                parts = module.split(".")
                assert parts[0] not in FLOORS, f"{path}: bare import of {module}; write holdfast.{module}"
                if parts[0] == "holdfast" and len(parts) > 1:
                    assert parts[1] in FLOORS[room] | {room}, f"{path}: {room} may not import {module}"


def test_coordination_never_imports_jax() -> None:
    """The service's room starts without jax, in the text and in a real interpreter."""
    for path in _sources("coordination"):
        for level, module in _imports(path):
            assert level or module.split(".")[0] not in {"jax", "jaxlib"}, f"{path} imports {module}"
    code = "import sys, holdfast.coordination; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_folder_is_a_listed_package() -> None:
    """A folder missing from `packages` would be silently missing from the wheel."""
    listed = {name.removeprefix("holdfast.") for name in CONFIG["tool"]["setuptools"]["packages"]}
    on_disk = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert listed == on_disk == set(FLOORS)
    assert all((ROOT / room / "py.typed").exists() for room in FLOORS)


def test_rooms_are_flat_and_their_modules_private() -> None:
    """A room has no sub-packages, and its public face is its `__init__.py` alone."""
    for room in set(FLOORS) - {"proto"}:
        assert not list((ROOT / room).glob("*/__init__.py"))
        for path in _sources(room):
            assert path.name.startswith("_"), f"{path} is public; the face of a room is its __init__.py"


def test_generated_code_is_fresh(tmp_path: Path) -> None:
    """proto/*_pb2.py and .pyi are what protoc makes of the .proto files."""
    subprocess.run([sys.executable, ROOT / "scripts" / "generate_proto.py", tmp_path], check=True, stdout=subprocess.DEVNULL)
    fresh = {path.name: path.read_text() for path in tmp_path.iterdir()}
    kept = {path.name: path.read_text() for path in (ROOT / "proto").glob("*_pb2.py*")}
    assert fresh == kept, "run `make proto`"


@pytest.mark.parametrize("room", ["coordination", "multihost", "checkpoint", "launch"])
def test_the_face_of_a_room_lists_what_it_offers(room: str) -> None:
    """Every name of `__all__` exists and is public."""
    code = f"import holdfast.{room} as m; assert all(not n.startswith('_') and hasattr(m, n) for n in m.__all__), m.__all__"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)
