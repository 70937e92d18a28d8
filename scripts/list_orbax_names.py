"""Writes the tables of Orbax's names, and what they are here, into docs/orbax-names.md: of all that
are public, and of those that the programs in orbax_clients.json use.

The names are those of orbax.checkpoint and its v1. python scripts/list_orbax_names.py [FILE]

The names are those of the installed orbax-checkpoint that are its own: what its modules only import
from elsewhere is left out.
"""

from __future__ import annotations

import argparse
import importlib
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BEGIN = "<!-- names: made by scripts/list_orbax_names.py -->"
END = "<!-- names end -->"
CLIENTS_BEGIN = "<!-- clients: made by scripts/list_orbax_names.py of orbax_clients.json -->"
CLIENTS_END = "<!-- clients end -->"
CLIENTS = Path(__file__).with_name("orbax_clients.json")
FACE = "holdfast.compat.orbax"
# Names that are there and do something else than a caller of Orbax's might expect: what.
TRANSLATED = {
    "AsyncCheckpointHandler": (
        "its futures are waited for in `save`; each process writes into a folder of its own"
    ),
    "AsyncOptions": "`timeout_secs` counts; callbacks are refused",
    "AtomicityMode": "no effect: the record is the commit",
    "AtomicityOptions": "no effect: the record is the commit",
    "ArrayOptions": "what would change values is refused",
    "CommitFutureAwaitingContractedSignals": "no signals between handlers; `cancel` does nothing",
    "CheckpointHandler": "each process writes into a folder of its own",
    "CheckpointManager": "saves in holdfast's layout, reads both; the newest step always stays",
    "CheckpointManagerOptions": (
        "names of step folders are a prefix and the number; `todelete_full_path` is refused where"
        " steps are deleted"
    ),
    "CheckpointableHandler": "each process writes into a folder of its own",
    "Checkpointer": "saves in holdfast's layout, reads both",
    "FileOptions": "permissions are CheckpointManager's; v1 refuses them",
    "MemoryLimitOptions": "no effect",
    "MemoryOptions": "no effect",
    "MultiprocessingOptions": "all processes take part, the primary is 0",
    "PyTreeCheckpointer": "saves in holdfast's layout, reads both",
    "PyTreeRestore": "`legacy_transform_fn` is refused",
    "PyTreeRestoreArgs": "`legacy_transform_fn` is refused",
    "SafetensorsOptions": "no effect",
    "SaveArgs": "`dtype` casts; the rest has no effect",
    "JsonHandler": "says that an item is of this kind",
    "PyTreeHandler": "says that an item is of this kind",
    "ArrayHandler": "no effect: its leaves are saved in any case",
    "ParamInfo": "nothing here makes or reads one",
    "NumpyHandler": "no effect: its leaves are saved in any case",
    "ScalarHandler": "no effect: its leaves are saved in any case",
    "StringHandler": "no effect: its leaves are saved in any case",
    "SingleReplicaArrayHandler": "no effect: what is replicated is read once by each host",
    "SingleReplicaArrayRestoreArgs": "`single_replica_sharding` has no effect",
    "TypeHandler": "handlers of one's own are refused",
    "register_type_handler": "takes Orbax's own handlers, to no effect",
    "register_standard_handlers_with_options": "no effect",
    "StatefulCheckpointable": "each process writes into a folder of its own",
    "AsyncCheckpointer": "a save or restore waits for the save in flight",
    "StandardCheckpointer": "a save or restore waits for the save in flight",
    "partial": "parts of one job, on file systems; a job that dies leaves none",
    "PathAwaitingCreation": "the folder is there already",
    "delete_async": "blocks",
    "load_async": "blocks",
    "load_checkpointables_async": "blocks",
    "load_pytree_async": "blocks",
}


def is_orbax(value: Any) -> bool:
    """Returns whether an object is Orbax's own; constants are, by their name alone."""
    module = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    return module is None or str(module).startswith("orbax")


def public_names(module: ModuleType) -> Iterator[str]:
    """Yields the public names of a module of Orbax's that are its own."""
    for name in sorted(vars(module)):
        value = vars(module)[name]
        if not name.startswith("_") and is_orbax(value):
            yield name


def modules_of(face: ModuleType, prefix: str = "") -> Iterator[tuple[str, ModuleType]]:
    """Yields the public modules: the face, what it offers, and v1 with what that offers."""
    yield prefix, face
    for name in public_names(face):
        value = vars(face)[name]
        if not isinstance(value, ModuleType) or (
            "._src." in value.__name__ and name not in ("multihost", "step")
        ):
            continue
        below = f"{prefix}{name}."
        if name == "v1":
            yield from modules_of(value, below)
        elif name != "experimental":
            yield below, value


def real_modules() -> Iterator[tuple[str, ModuleType]]:
    """Yields Orbax's public modules by their names below `orbax.checkpoint`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield from modules_of(importlib.import_module("orbax.checkpoint"))


def counterpart(path: str) -> Any:
    """Returns what stands for a name of Orbax's; raises AttributeError where nothing does."""
    found: Any = importlib.import_module(FACE)
    for part in path.split("."):
        reason = vars(found).get("__holdfast_refusal__") if isinstance(found, ModuleType) else None
        if reason is not None:  # the whole module is refused
            return found
        found = getattr(found, part)
    return found


def row(path: str) -> tuple[str, str]:
    """Returns what a name is here: "same", "translated" or "refused", and how or why."""
    refusal_of = importlib.import_module(f"{FACE}.refusals").refusal_of
    reason = refusal_of(counterpart(path))
    if reason:
        return "refused", reason
    note = TRANSLATED.get(path.rpartition(".")[2])
    return ("translated", note) if note else ("same", "")


def own_names(prefix: str, module: ModuleType) -> list[str]:
    """Returns the names of a module that the table lists.

    Modules that only other libraries' code uses are left out.
    """
    hidden = ("_lib", "_utils", "_serialization")
    names = list(public_names(module))
    kept = []
    for name in names:
        value = vars(module)[name]
        private = isinstance(value, ModuleType) and (
            "._src." in value.__name__ or name.endswith(hidden) or prefix
        )
        if not private or (prefix in ("", "v1.") and name in _PUBLIC_MODULES):
            kept.append(name)
    return kept


_PUBLIC_MODULES = {
    "multihost",
    "step",
    "checkpoint_utils",
    "msgpack_utils",
    "transform_utils",
    "test_utils",
} | {*("arrays", "errors", "handlers", "partial", "path", "training", "tree", "options")}


def table() -> str:
    """Returns the table in Markdown, a section a module.

    Names that are the same stand together in one row.
    """
    lines = []
    for prefix, module in real_modules():
        rows = [(name, *row(prefix + name)) for name in own_names(prefix, module)]
        if not rows:
            continue
        lines += [
            f"\n### `orbax.checkpoint{'.' + prefix.rstrip('.') if prefix else ''}`\n",
            "| names | here | how, or what to do instead |",
            "|---|---|---|",
        ]
        groups: dict[tuple[str, str], list[str]] = {}
        for name, kind, note in rows:
            groups.setdefault((kind, note), []).append(f"`{name}`")
        order = {"same": 0, "translated": 1, "refused": 2}
        for (kind, note), names in sorted(
            groups.items(), key=lambda group: (order[group[0][0]], group[1])
        ):
            lines.append(f"| {', '.join(names)} | {kind} | {note} |")
    return "\n".join(lines) + "\n"


def clients_table() -> str:
    """Returns the table of the names that well-known programs use, in Markdown."""
    users: dict[str, list[str]] = {}
    for client, about in json.loads(CLIENTS.read_text()).items():
        for name in about["names"]:
            users.setdefault(name, []).append(client)
    lines = ["\n| name | here | used by |", "|---|---|---|"]
    for name in sorted(users):
        kind, note = row(name)
        here = f"{kind}: {note}" if note else kind
        lines.append(f"| `{name}` | {here} | {', '.join(users[name])} |")
    return "\n".join(lines) + "\n"


def page(text: str) -> str:
    """Returns the page with the tables of today."""
    text = _replaced(text, CLIENTS_BEGIN, CLIENTS_END, clients_table())
    return _replaced(text, BEGIN, END, table())


def _replaced(text: str, begin: str, end: str, new: str) -> str:
    before, _, rest = text.partition(begin)
    return f"{before}{begin}\n{new}\n{end}{rest.partition(end)[2]}"


def main() -> None:
    """Writes the page, or another file in its place."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    source = ROOT / "docs" / "orbax-names.md"
    parser.add_argument("file", nargs="?", type=Path, default=source, help="what is written")
    target: Path = parser.parse_args().file
    target.write_text(page(source.read_text()))
    print(target)


if __name__ == "__main__":
    main()
