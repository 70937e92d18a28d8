"""The house holds: floors, packaging, names and generated code are as docs/concepts.md and docs/adr/0001-packaging.md say."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.support.paths import ROOT

FLOORS = {
    "proto": set(),
    "coordination": {"proto"},
    "multihost": {"coordination", "proto"},
    "checkpoint": {"multihost", "coordination", "proto"},
    "launch": {"multihost", "coordination", "proto"},
    "cli": {"launch", "checkpoint", "multihost", "coordination", "proto"},
}
# The wings and files of a room, from the lowest floor up; what stands on one floor does not import each other. Files that are not
# named are the face, above all.
WINGS = {
    "coordination": [{"errors", "limits", "deadline"}, {"core", "names"}, {"credentials"}, {"client"}, {"server", "process"}],
    "multihost": [{"spec", "errors", "pathways"}, {"group"}, {"liveness"}, {"preemption"}, {"start"}],
    "checkpoint": [{"errors", "policy", "options"}, {"storage"}, {"format"}, {"steps"}, {"restoring", "saving"}, {"layouts"}, {"tools"}],
    "launch": [{"supervisor"}, {"workers"}, {"view"}, {"external"}, {"engines"}],
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
            if not node.level and node.module == "holdfast":
                found += [(0, f"holdfast.{alias.name}") for alias in node.names]
    return found


def _sources(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def _wing_imports(room: str, path: Path) -> set[str]:
    """Returns the wings and files of its room that a file imports."""
    inside = path.relative_to(ROOT / room).parts[:-1]
    found = set()
    for level, module in _imports(path):
        if level:
            parts = [*inside[: len(inside) - level + 1], *filter(None, module.split("."))]
        elif module.startswith(f"holdfast.{room}."):
            parts = module.split(".")[2:]
        else:
            continue
        found |= {parts[0]} if parts else set()
    return found


@pytest.mark.parametrize("room", FLOORS)
def test_a_room_imports_only_the_rooms_below_it(room: str) -> None:
    """No import points upwards, relative ones stay inside the room, and a bare folder name is never imported."""
    for path in _sources(room):
        depth = len(path.relative_to(ROOT / room).parts)
        for level, module in _imports(path):
            assert level <= depth, f"{path}: a relative import may not leave the room"
            if level == 0:
                parts = module.split(".")
                assert parts[0] not in FLOORS, f"{path}: bare import of {module}; write holdfast.{module}"
                if parts[0] == "holdfast" and len(parts) > 1:
                    assert parts[1] in FLOORS[room] | {room}, f"{path}: {room} may not import {module}"


@pytest.mark.parametrize("room", WINGS)
def test_a_wing_imports_only_the_wings_below_it(room: str) -> None:
    """Inside a room no import points upwards either, nor to a neighbour on the same floor."""
    floor_of = {name: floor for floor, names in enumerate(WINGS[room]) for name in names}
    for path in _sources(room):
        wing = path.relative_to(ROOT / room).with_suffix("").parts[0]
        floor = floor_of.get(wing)
        for other in _wing_imports(room, path) - {wing}:
            allowed = floor is None or floor_of.get(other, len(floor_of)) < floor
            assert allowed, f"{path.relative_to(ROOT)}: {wing} may not import {other}"


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
    on_disk = {".".join(path.parent.relative_to(ROOT).parts) for room in FLOORS for path in (ROOT / room).rglob("__init__.py")}
    assert listed == on_disk
    assert {name for name in listed if "." not in name} == set(FLOORS)
    assert all((ROOT / room / "py.typed").exists() for room in FLOORS)


def test_no_wing_is_crowded_and_none_says_more_than_its_purpose() -> None:
    """A room has at most 12 modules beside its wings (cli: a file a command), a wing at most 14 and a docstring for an `__init__`."""
    for room in set(FLOORS) - {"proto"}:
        assert room == "cli" or len([*(ROOT / room).glob("*.py")]) - 1 <= 12
        for init in (ROOT / room).glob("*/**/__init__.py"):
            assert len([*init.parent.glob("*.py")]) - 1 <= 14, f"{init.parent} is crowded"
            (only,) = ast.parse(init.read_text()).body
            assert isinstance(only, ast.Expr) and isinstance(only.value, ast.Constant), f"{init}: a docstring and nothing else"


def test_generated_code_is_fresh(tmp_path: Path) -> None:
    """proto/*_pb2.py and .pyi are what protoc makes of the .proto files."""
    subprocess.run([sys.executable, ROOT / "scripts" / "generate_proto.py", tmp_path], check=True, stdout=subprocess.DEVNULL)
    fresh = {path.name: path.read_text() for path in tmp_path.iterdir()}
    kept = {path.name: path.read_text() for path in (ROOT / "proto").glob("*_pb2.py*")}
    assert fresh == kept, "run `make proto`"


@pytest.mark.parametrize("room", ["coordination", "multihost", "checkpoint", "launch"])
def test_the_face_of_a_room_lists_what_it_offers(room: str) -> None:
    """Every name of `__all__` exists and is public, and no module or wing of the room bears it."""
    code = f"import holdfast.{room} as m; assert all(not n.startswith('_') and hasattr(m, n) for n in m.__all__); print(*m.__all__)"
    ran = subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, capture_output=True, text=True)
    modules = {path.stem for path in (ROOT / room).iterdir() if path.is_dir() or path.suffix == ".py"}
    assert not modules & set(ran.stdout.split()), "importing such a module would put it in the place of the public name"
