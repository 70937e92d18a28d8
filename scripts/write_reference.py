"""Writes the pages that are made from the code: the commands' help, the public names by topic, and
the messages of the status.

Run as `python scripts/write_reference.py` after a change of a command or of a public name;
`tests/test_reference.py` says when that is due. A name without a topic fails.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import types
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

import click

from holdfast.cli.entry import main as commands
from holdfast.compat.orbax.refusals import refusal_of

sys.path.insert(0, str(Path(__file__).parent))
from reference_text import entry
from status_tables import status_tables

ROOT = Path(__file__).resolve().parent.parent
REPOSITORY = "https://github.com/holdfast-jax/holdfast/blob/main/"
WIDTH = 100  # columns of a command's help
NOTE = "<!-- Made by scripts/write_reference.py: change it there. -->\n\n"

# The topics of each room, and the names of each in the order of the page.
TOPICS: dict[str, dict[str, str]] = {
    "checkpoint": {
        "Managers": "CheckpointManager Options Local SaveHandle Progress ProgressBar SAVED Swept",
        "One checkpoint, no manager": (
            "save save_async load load_async convert structure verify VerifyReport sweep"
        ),
        "Rules for `convert` and `load`": (
            "Rename Transpose Cast Reshape Repeat Stack Unstack Fuse Split Drop Add"
        ),
        "When to save": (
            "SavePolicy EveryNSteps EveryNSeconds SaveForGoodput AtSteps FirstSave OnPreemption"
            " AnyOf"
        ),
        "What to keep": (
            "KeepPolicy KeepLast KeepEvery KeepEverySeconds KeepLatestFor KeepClosestTo KeepBest"
            " KeepAll KeepAnyOf PolicyContext SaveCosts StepFacts"
        ),
        "What a step holds": "Json Files Node Structure ItemStructure register_leaf_type",
        "Watching a root": "iterate_steps wait_for_new_step",
        "Stores": "Storage register_storage",
        "Errors": (
            "CheckpointError CommitUnknown Corrupt HostileCheckpoint NotEnoughMemory"
            " ReplicasDiffer SaveCancelled SaveFailed StepExists StepGone StepNotFound"
            " StepOutOfOrder TreeMismatch UnsupportedLeaf"
        ),
    },
    "multihost": {
        "Starting and leaving": (
            "initialize run_restartable keep_compiled shutdown is_initialized ProcessSpec RayTrain"
        ),
        "Who is who": (
            "process_index process_count is_primary_host slice_count current_spec current_client"
            " process_index_from_device unique_processes_from_devices"
            " use_experimental_distributed_process_id runtime_to_distributed_ids"
            " runtime_to_distributed_process_id distributed_to_device_ids"
            " initialize_runtime_to_distributed_ids initialize_distributed_to_device_ids"
            " is_runtime_to_distributed_ids_initialized is_distributed_to_device_ids_initialized"
        ),
        "Groups": "Group ClusterGroup Solo default_group",
        "Barriers and values": (
            "sync_global_processes broadcast_one_to_all global_max BarrierSyncFn"
            " get_barrier_sync_fn unique_barrier_key should_skip_process_sync coordination_timeout"
        ),
        "Preemption": (
            "reached_preemption preemption_notice preempted_processes notify_preemption"
            " add_preemption_source agree_on_step SyncPoint Notice Source Polled Signals"
            " WatchedFile GceMetadata SlurmEnd"
        ),
        "Who is alive": (
            "health Health HealthListener ProcessHealth live_processes live_devices watchdog"
            " Watchdog"
        ),
        "Replicas": (
            "replica_count replica_devices local_replica_devices process_replica_id in_replica"
            " primary_process_in_replica broadcast_one_replica_to_all get_available_memory"
            " get_device_memory get_leaf_memory_per_device tree_memory_per_device"
        ),
        "Other runtimes": (
            "get_jax_distributed_client is_jax_distributed_client_initialized is_pathways_backend"
            " is_native_pathways_backend is_proxy_pathways_backend is_pathways_controller"
            " is_pathways_colocated_runtime_active mark_pathways_colocated_runtime_active"
        ),
        "Errors": (
            "JobError StartupFailed StartupTimeout Preempted WorkerFailed Hang Fatal AttemptOver"
            " HANG_EXIT_CODE"
        ),
    },
    "coordination": {
        "The service": "CoordinationService ServiceTimeouts Relay",
        "Clients": "CoordinationClient StatusClient ProcessInfo",
        "Settings": "Endpoint JobIdentity Timeouts Credentials",
        "Errors": (
            "HoldfastError CoordinationError BarrierTimeout CoordinatorLost Fenced ProcessLost"
        ),
    },
    "launch": {
        "Starting a job": "run_local run_slurm run_task ray",
        "Settings": (
            "RunSettings SlurmSettings TaskSettings RestartPolicy StandbySettings MetricsSettings"
        ),
        "Kubernetes": "KubernetesJob render_kubernetes",
        "How it ended": "JobResult DONE PREEMPTED HANG DO_NOT_RESTART",
        "Watching": "LiveView",
        "Errors": "JobError StartupFailed StartupTimeout WorkerFailed Preempted Hang Fatal",
    },
    "web": {"Pages": "serve_page write_report"},
    "testing": {"Contracts": "StorageContract"},
    "cli": {"The command": "main"},
    "compat": {"Orbax": "orbax"},
}
ELSEWHERE = {"compat": "compat-orbax.md"}  # modules among the names, and their pages
# The pages of names that stand for Orbax's: what programs import, and the module with `__all__`.
COMPAT = {
    "compat-orbax": ("holdfast.compat.orbax", "holdfast.compat.orbax.face"),
    "compat-orbax-v1": ("holdfast.compat.orbax.v1", "holdfast.compat.orbax.v1"),
}
PAGES_OF_THEIR_OWN = frozenset({"holdfast.multihost", "holdfast.compat.orbax.v1"})
WITH_FUNCTIONS = frozenset({"holdfast.compat.orbax.checkpoint_utils"})
# The switch: True once the package index has holdfast-jax. README says then how to get it there.
PUBLISHED = False
FROM_THE_INDEX = """```
pip install holdfast-jax
```

On the index the package is called `holdfast-jax`; programs import `holdfast`.
"""
FROM_THE_REPOSITORY = """In a checkout of this repository:

```
pip install .
```

A wheel that `make release` has built does as well: `pip install dist/holdfast_jax-*.whl`. The
package is not on the index yet. It will be called `holdfast-jax` there; programs import `holdfast`.
"""
BEGIN = "<!-- Made by scripts/write_reference.py: begin -->\n"
END = "<!-- Made by scripts/write_reference.py: end -->\n"


def room_page(room: str) -> str:
    """Returns the page of a room; raises ValueError where topics and `__all__` differ."""
    module = importlib.import_module(f"holdfast.{room}")
    topics = {topic: names.split() for topic, names in TOPICS[room].items()}
    listed = {name for names in topics.values() for name in names}
    if listed != set(module.__all__):
        raise ValueError(f"{room}: TOPICS and __all__ differ in {listed ^ set(module.__all__)}")
    texts = [NOTE, f"# holdfast.{room}\n\n{first_line(module)}\n"]
    for topic, names in topics.items():
        texts.append(f"\n## {topic}\n")
        for name in names:
            value = None if room in ELSEWHERE else getattr(module, name)
            texts.append(room_entry(f"holdfast.{room}.{name}", value, room))
    return "".join(texts)


def room_entry(path: str, value: Any, room: str) -> str:
    """Returns the entry of one name of a room."""
    if room in ELSEWHERE:
        return f"\n- [{path}]({ELSEWHERE[room]})\n- [{path}.v1](compat-orbax-v1.md)\n"
    name = path.rpartition(".")[2]
    if isinstance(value, types.ModuleType):
        return f"\n### {name}\n\n`{path}`. {first_line(value)}\n"
    return entry(name, value)


def first_line(module: Any) -> str:
    """Returns the first paragraph of a module's docstring, in one line."""
    return " ".join(str(module.__doc__).split("\n\n")[0].split())


def compat_page(path: str, module_name: str) -> str:
    """Returns a page of names that stand for Orbax's."""
    importlib.import_module("holdfast.compat.orbax.face")
    module = importlib.import_module(module_name)
    shown = importlib.import_module(path)
    texts = [NOTE, f"# {path}\n\n{first_line(shown)}\n\n[From Orbax](../from-orbax.md) says what"]
    texts.append(" differs.\n")
    values = {name: getattr(module, name) for name in sorted(module.__all__)}
    modules = {name: value for name, value in values.items() if inspect.ismodule(value)}
    texts.append("\n## Names\n")
    names = [name for name in values if name not in modules]
    texts += [compat_entry(name, values[name]) for name in names]
    texts.append("\n## Modules\n")
    for name, value in modules.items():
        texts.append(f"\n### {name}\n\n{first_line(value)}\n")
        members = module_members(value, without=set(values))
        covered = [each for each, found in members.items() if refusal_of(found) is None]
        texts += [compat_entry(each, members[each], level=4) for each in covered]
        texts += refused_names(members)
    return "".join(texts)


def compat_entry(name: str, value: Any, level: int = 3) -> str:
    """Returns the entry of a name that stands for one of Orbax's."""
    heading = f"\n{'#' * level} {name}\n\n"
    if value is object:
        return f"{heading}`{name}` is any object.\n"
    if value is ...:
        return f"{heading}`{name} = ...`\n"
    qualname = getattr(value, "__qualname__", name)
    if qualname != name:
        return f"{heading}`{name}` is another name of `{qualname}`.\n"
    return entry(name, value, level)


def refused_names(members: Mapping[str, Any]) -> list[str]:
    """Returns the names that are there for imports and annotations alone, by what to do instead."""
    by_reason: dict[str, list[str]] = {}
    for name, value in members.items():
        reason = refusal_of(value)
        if reason is not None:
            by_reason.setdefault(reason, []).append(f"`{name}`")
    return [
        f"\nNot to be called, {', '.join(names)}: {reason}.\n"
        for reason, names in by_reason.items()
    ]


def module_members(module: types.ModuleType, without: Set[str]) -> dict[str, Any]:
    """Returns what is refused, the classes that a module defines, and its functions where all stand
    for Orbax's. Of a module that defines nothing it is what it has from others of compat.
    """
    if module.__name__ in PAGES_OF_THEIR_OWN:
        return {}
    refused = vars(module).get("REFUSED", "").split()
    found = {name: getattr(module, name) for name in refused}
    public = {
        name: value
        for name, value in sorted(vars(module).items())
        if callable(value) and not name.startswith("_")
    }
    own = {name: value for name, value in public.items() if value.__module__ == module.__name__}
    if not own:
        room = module.__name__.partition(".orbax")[0]
        own = {
            name: value
            for name, value in public.items()
            if value.__module__.startswith(room) and not value.__module__.endswith(".refusals")
        }
    elif module.__name__ not in WITH_FUNCTIONS:
        own = {name: value for name, value in own.items() if isinstance(value, type)}
    return {name: value for name, value in (found | own).items() if name not in without}


def commands_text() -> str:
    """Returns the help of every command, as it is printed."""
    texts = []
    context = click.Context(commands, info_name="holdfast", terminal_width=WIDTH)
    for name in commands.list_commands(context):
        command = commands.get_command(context, name)
        assert command is not None
        inner = click.Context(command, parent=context, info_name=name, terminal_width=WIDTH)
        texts.append(f"\n### holdfast {name}\n\n```text\n{command.get_help(inner)}\n```\n")
    return "".join(texts)


def filled(name: str, text: str) -> str:
    """Returns a page with `text` between the two comments in it."""
    before, begin, rest = (ROOT / name).read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    return f"{before}{begin}{text}{end}{after}"


def home_page(readme: str) -> str:
    """Returns the site's first page: README, with links as they are seen from docs; the site has
    nothing from elsewhere, so other files are linked at the repository.
    """

    def moved(link: re.Match[str]) -> str:
        target = link[1]
        inside = target.startswith("docs/")
        return f"]({target[5:]})" if inside else f"]({REPOSITORY}{target})"

    return NOTE + re.sub(r"\]\((?!https?://|#)([^)]+)\)", moved, readme)


def pages() -> dict[str, str]:
    """Returns the text of each page that is made, by its name."""
    made = {
        "docs/cli.md": filled("docs/cli.md", commands_text()),
        "docs/status-json.md": filled("docs/status-json.md", status_tables()),
        "README.md": filled("README.md", FROM_THE_INDEX if PUBLISHED else FROM_THE_REPOSITORY),
    }
    made["docs/index.md"] = home_page(made["README.md"])
    made |= {f"docs/api/{room}.md": room_page(room) for room in TOPICS}
    made |= {f"docs/api/{name}.md": compat_page(*paths) for name, paths in COMPAT.items()}
    return {
        name: "\n".join(row.rstrip() for row in text.split("\n")) for name, text in made.items()
    }


def main(folder: Path) -> None:
    for name, text in pages().items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else ROOT)
