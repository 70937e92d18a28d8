"""The house holds: floors, packaging, names and generated code are as docs/concepts.md and
docs/adr/0001-packaging.md say.
"""

from __future__ import annotations

import ast
import html
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

ROOMS = (
    "proto",
    "coordination",
    "multihost",
    "checkpoint",
    "launch",
    "compat",
    "web",
    "testing",
    "cli",
)


# What is put into a file, and the contract that has to notice it.
UPWARD = {
    "a room above": (
        "multihost/spec.py",
        "import holdfast.checkpoint.manager",
        "A room imports only the rooms below it",
    ),
    "a room beside": (
        "launch/view.py",
        "from holdfast.checkpoint import save",
        "A room imports only the rooms below it",
    ),
    "a wing above": (
        "checkpoint/storage/local.py",
        "from ..saving.plan import Plan",
        "Inside checkpoint imports point downwards",
    ),
    "a wing above, as a module": (
        "checkpoint/storage/local.py",
        "from .. import saving",
        "Inside checkpoint imports point downwards",
    ),
    "a wing above, inside a function": (
        "coordination/core/keys.py",
        "def late():\n    from ..client import client as client\n",
        "Inside coordination imports point downwards",
    ),
    "a wing beside": (
        "checkpoint/restoring/match.py",
        "import holdfast.checkpoint.saving.plan as plan",
        "Inside checkpoint imports point downwards",
    ),
    "a file beside wings": (
        "checkpoint/policy.py",
        "from .options import Options",
        "Inside checkpoint imports point downwards",
    ),
    "the face, from inside": (
        "multihost/group/ids.py",
        "from holdfast.multihost import Solo",
        "Inside multihost imports point downwards",
    ),
    "the face, from below, in compat": (
        "compat/orbax/args.py",
        "from . import options",
        "Inside compat imports point downwards",
    ),
    "a cycle in a wing": (
        "launch/supervisor/job.py",
        "from .decide import decide",
        "No cycles, at any depth",
    ),
    "jax in coordination": (
        "coordination/core/keys.py",
        "import jax",
        "coordination starts without jax",
    ),
    "past the doors of proto": (
        "launch/view.py",
        "from holdfast.proto import coordination_b_pb2",
        "Other rooms come to proto by its doors",
    ),
    "past the doors of coordination": (
        "multihost/spec.py",
        "from holdfast.coordination.core.keys import Keys",
        "Other rooms come to coordination by its doors",
    ),
    "past the doors of multihost": (
        "launch/view.py",
        "from holdfast.multihost.spec import ProcessSpec",
        "Other rooms come to multihost by its doors",
    ),
    "past the doors of checkpoint": (
        "cli/ls.py",
        "def late():\n    from holdfast.checkpoint.saving import plan as plan\n",
        "Other rooms come to checkpoint by its doors",
    ),
    "past the doors of a wing of checkpoint": (
        "cli/ls.py",
        "from holdfast.checkpoint.storage.local import LocalStorage",
        "Other rooms come to checkpoint by its doors",
    ),
    "past the doors of launch": (
        "cli/run.py",
        "from holdfast.launch.engines.local import LocalEngine",
        "Other rooms come to launch by its doors",
    ),
    "past the doors of compat": (
        "cli/run.py",
        "from holdfast.compat.orbax.args import PyTreeSave",
        "Other rooms come to compat by its doors",
    ),
    "past the doors of web": (
        "cli/web.py",
        "from holdfast.web.snapshot import take",
        "Other rooms come to web by its doors",
    ),
    "a bare folder name": ("checkpoint/manager.py", "import multihost", "No bare folder names"),
    "a file that no floor names": (
        "multihost/news.py",
        "",
        "Inside multihost imports point downwards",
    ),
}


def _sources(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def _lint_imports(tree: Path) -> subprocess.CompletedProcess[str]:
    command = [
        Path(sys.executable).parent / "lint-imports",
        "--no-logo",
        "--no-cache",
        "--config",
        ROOT / "pyproject.toml",
    ]
    environment = os.environ | {"PYTHONPATH": str(tree)}
    return subprocess.run(
        command, cwd=tree, env=environment, capture_output=True, text=True, timeout=60
    )


def _laid_out(tree: Path) -> Path:
    """Copies the rooms to where they are imported from."""
    for room in ROOMS:
        shutil.copytree(
            ROOT / room, tree / "holdfast" / room, ignore=shutil.ignore_patterns("__pycache__")
        )
    return tree


def test_imports_point_downwards(tmp_path: Path) -> None:
    """The floors of rooms and wings hold: pyproject.toml names them, import-linter reads every
    import.
    """
    ran = _lint_imports(_laid_out(tmp_path))
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.parametrize("kind", UPWARD)
def test_an_upward_import_is_noticed(kind: str, tmp_path: Path) -> None:
    """Put in by hand, an import of each kind breaks the contract that forbids it."""
    file, line, contract = UPWARD[kind]
    path = _laid_out(tmp_path) / "holdfast" / file
    path.write_text((path.read_text() if path.exists() else "") + f"\n{line}\n")
    ran = _lint_imports(tmp_path)
    assert ran.returncode == 1 and re.search(
        rf"^{re.escape(contract)}.* BROKEN( \(.*\))?$", ran.stdout, re.MULTILINE
    ), ran.stdout + ran.stderr


@pytest.mark.parametrize("room", ROOMS)
def test_relative_imports_stay_in_their_room(room: str) -> None:
    """Between rooms imports are absolute."""
    for path in _sources(room):
        depth = len(path.relative_to(ROOT / room).parts)
        for node in ast.walk(ast.parse(path.read_text())):
            assert not isinstance(node, ast.ImportFrom) or node.level <= depth, (
                f"{path}: a relative import may not leave the room"
            )


def test_src_links_to_every_room() -> None:
    """src/holdfast, where packages are found, is links to the rooms, and the command's module."""
    found = {path.name for path in (ROOT / "src" / "holdfast").iterdir()} - {"__pycache__"}
    assert found == {*ROOMS, "__main__.py"}
    for room in ROOMS:
        assert (ROOT / "src" / "holdfast" / room).readlink() == Path("../..") / room


def test_coordination_never_imports_jax() -> None:
    """The service's room starts without jax in a real interpreter."""
    code = "import sys, holdfast.coordination; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# Source files whose tests are elsewhere, and where.
TESTED_ELSEWHERE = {
    "checkpoint/agreement/absence.py": "tests/system/test_one_saves.py",
    "multihost/group/late.py": "tests/system/test_one_saves.py",
    "checkpoint/local_tier/host_place.py": "tests/checkpoint/local_tier/test_tier.py",
    "checkpoint/local_tier/local_save.py": "tests/checkpoint/local_tier/test_tier.py",
    "checkpoint/local_tier/step_reading.py": "tests/checkpoint/local_tier/test_local_steps.py",
    "multihost/peers/peer_connection.py": "tests/checkpoint/local_tier/test_peer_storage.py",
    "checkpoint/restoring/shared_reader.py": "tests/checkpoint/restoring/test_restore_peers.py",
    "checkpoint/tools/conversion.py": "tests/checkpoint/tools/test_convert.py",
    "checkpoint/tools/to_holdfast.py": "tests/checkpoint/tools/test_convert.py",
    "checkpoint/tools/to_safetensors.py": "tests/checkpoint/tools/test_convert.py",
    "checkpoint/storage/base.py": (
        "tests/checkpoint/storage/test_storage.py"
    ),  # the Protocol's contract
    **{
        f"compat/orbax/{name}.py": "tests/compat/orbax/test_checkpoint_manager.py"
        for name in ("args", "handling/items", "metadata", "options", "roots/policies")
    },
    **{
        f"compat/orbax/{name}.py": "tests/compat/orbax/test_modules.py"
        for name in (
            *("_src", "abstract_checkpoint_manager", "arrays", "checkpoint_managers"),
            *("experimental", "face", "multihost", "path", "step", "tree", "utils", "version"),
            *("v1/arrays", "v1/errors", "v1/handlers", "v1/path", "v1/tree"),
        )
    },
    "compat/orbax/own_handlers.py": "tests/compat/orbax/test_handlers.py",
    "compat/orbax/startup/sitecustomize.py": "tests/compat/orbax/test_installation.py",
    **{
        f"compat/orbax/v1/{name}.py": "tests/compat/orbax/v1/test_checkpoints.py"
        for name in ("checkpointer", "options", "results")
    },
    "compat/orbax/trees/nested.py": "tests/compat/orbax/test_same.py",
    "multihost/compiled/view.py": "tests/multihost/compiled/test_travel.py",
    "multihost/group/peers.py": "tests/multihost/liveness/test_health.py",
    "coordination/client/fork.py": "tests/system/test_forks.py",
    "coordination/names.py": "tests/coordination/client/test_answers.py",
    "coordination/vitals.py": "tests/multihost/liveness/test_vitals.py",
    "coordination/server/main.py": "tests/coordination/process/test_spawn.py",
    "coordination/process/relayed_session.py": "tests/coordination/process/test_relay.py",
    "launch/workers/shims/call_runner.py": "tests/launch/workers/test_shims.py",
    "launch/workers/shims/standby.py": "tests/launch/workers/test_standby.py",
    "launch/workers/shims/subreaper.py": "tests/launch/workers/test_shims.py",
    "launch/workers/shims/title.py": "tests/launch/workers/test_standby.py",
}


def test_tests_mirror_the_tree() -> None:
    """Each source file has its test file in the mirrored place, but for those listed (the command
    line is tested by what people do).
    """
    for room in set(ROOMS) - {"proto", "cli"}:
        for path in _sources(room):
            name = path.relative_to(ROOT)
            if not path.name.startswith("__"):
                mirrored = Path("tests") / name.parent / f"test_{name.name}"
                assert (ROOT / TESTED_ELSEWHERE.get(str(name), mirrored)).exists(), (
                    f"{name} has no {mirrored}"
                )


def test_no_wing_is_crowded_or_talks_too_much() -> None:
    """A room has at most 12 modules beside its wings (cli: a file a command), a wing at most 14 and
    a docstring for an `__init__`.

    But for compat, whose wings and files are faces that stand for other libraries' modules.
    """
    for room in set(ROOMS) - {"proto"}:
        assert room == "cli" or len([*(ROOT / room).glob("*.py")]) - 1 <= 12
        for init in (ROOT / room).glob("*/**/__init__.py"):
            if room == "compat":
                continue
            assert len([*init.parent.glob("*.py")]) - 1 <= 14, f"{init.parent} is crowded"
            (only,) = ast.parse(init.read_text()).body
            assert isinstance(only, ast.Expr) and isinstance(only.value, ast.Constant), (
                f"{init}: a docstring and nothing else"
            )


OF_BACKENDS = re.compile(r"\b(Device|Devices|Mesh|Array|\w*Sharding)\b")
A_CACHE_OF_DEVICES = """
@functools.lru_cache(64)
def _mesh(devices: tuple[jax.Device, ...], name: str = "x") -> Mesh: ...
"""


def _kept_backends(source: str) -> list[str]:
    """Returns the functions with a cache that outlives an attempt, and holds devices or what is
    made of them.
    """
    return [
        node.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and _keeps_backends(node)
    ]


def _keeps_backends(function: ast.FunctionDef) -> bool:
    decorators = [ast.unparse(each) for each in function.decorator_list]
    is_cached = any(re.match(r"(functools\.)?(lru_)?cache\b", each) for each in decorators)
    arguments = function.args
    takes = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    types = [argument.annotation for argument in takes] + [function.returns]
    is_of_backends = any(each and OF_BACKENDS.search(ast.unparse(each)) for each in types)
    return is_cached and is_of_backends and "clear_with_attempt" not in decorators


def test_a_cache_of_devices_goes_with_its_attempt() -> None:
    """Else it keeps the backend of an attempt that is over, and others wait at its sockets."""
    assert _kept_backends(A_CACHE_OF_DEVICES) == ["_mesh"]
    assert _kept_backends(A_CACHE_OF_DEVICES.replace("@f", "@clear_with_attempt\n@f")) == []
    for room in ROOMS:
        for path in _sources(room):
            assert not _kept_backends(path.read_text()), f"{path}: put clear_with_attempt above it"


def test_generated_code_is_fresh(tmp_path: Path) -> None:
    """proto/*_pb2.py and .pyi are what protoc makes of the .proto files."""
    subprocess.run(
        [sys.executable, ROOT / "scripts" / "generate_proto.py", tmp_path],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    fresh = {path.name: path.read_text() for path in tmp_path.iterdir()}
    kept = {path.name: path.read_text() for path in (ROOT / "proto").glob("*_pb2.py*")}
    assert fresh == kept, "run `make proto`"


def test_the_picture_of_the_architecture_is_fresh(tmp_path: Path) -> None:
    """docs/architecture.svg shows today's wings and imports."""
    subprocess.run(
        [sys.executable, ROOT / "scripts" / "draw_architecture.py", tmp_path / "a.svg"],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    assert (tmp_path / "a.svg").read_text() == (ROOT / "docs" / "architecture.svg").read_text(), (
        "run python scripts/draw_architecture.py"
    )


def test_no_caption_of_the_picture_leaves_its_box() -> None:
    """A letter is about 6 px wide: none covers another box, or its caption."""
    text = (ROOT / "docs" / "architecture.svg").read_text()
    number = r'="([\d.]+)"'
    drawn = re.findall(rf"<rect.* x{number} y{number} width{number} height{number}", text)
    boxes = [tuple(map(float, each)) for each in drawn]
    captions = re.findall(rf'<text class="purpose" x{number} y{number}>([^<]+)', text)
    assert len(captions) > 40
    for words, across, down in ((each[2], float(each[0]), float(each[1])) for each in captions):
        ends = [
            x + wide for x, y, wide, high in boxes if x < across < x + wide and y < down < y + high
        ]
        assert across + 6 * len(html.unescape(words)) <= min(ends), words


def test_faces_list_what_a_room_offers() -> None:
    """Every name of `__all__` exists and is public, and no module or wing of the room bears it."""
    rooms = ["coordination", "multihost", "checkpoint", "launch"]
    code = (
        "import importlib, json, sys; faces = {room: importlib.import_module('holdfast.' + room)"
        " for room in sys.argv[1:]}; assert all(not n.startswith('_') and hasattr(m, n) for m in"
        " faces.values() for n in m.__all__); print(json.dumps({room: m.__all__ for room, m in"
        " faces.items()}))"
    )
    command = [sys.executable, "-W", "ignore", "-c", code, *rooms]
    ran = subprocess.run(command, check=True, capture_output=True, text=True)
    for room, names in json.loads(ran.stdout).items():
        modules = {
            path.stem for path in (ROOT / room).iterdir() if path.is_dir() or path.suffix == ".py"
        }
        assert not modules & set(names), (
            f"{room}: importing such a module would put it in the place of the public name"
        )
