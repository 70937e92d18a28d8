"""One name for one thing: words that were given up do not come back, and the public names of each
room are those listed here.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.paths import ROOT

ROOMS = ("coordination", "multihost", "checkpoint", "launch", "compat", "web", "testing", "cli")

# Names of classes, functions and parameters that had to be learnt; CONTRIBUTING.md says what stands
# for them.
_GIVEN_UP = """
    How Own Desk Save Flight Preparer Decider Restorer Shelf Cleaner Want Target Piece Stored
    Place Layout Source Filler Facts Report
    lanes part sub cells tag Coming Leaving Looks Roster Refusal Reply Link Broken Wire Channel
    Turn epoch needs Found Seat News
    left used knob _Stream _left _late _gone _await
"""
_MODULES_GIVEN_UP = (
    "keeping explaining bundle spread stores own cleaner become guard call looks coming leaving"
)
GIVEN_UP = frozenset(_GIVEN_UP.split())
MODULES_GIVEN_UP = frozenset(_MODULES_GIVEN_UP.split())
KEPT = {
    ("multihost/preemption/sources.py", "Source"),  # public: a source of notices
    ("multihost/errors.py", "knob"),  # a field of a public error
    ("checkpoint/manager_parts.py", "lanes"),  # each is a SaveLane
    # A Part: what a host has of a local step.
    ("checkpoint/local_tier/step_reading.py", "part"),
    ("checkpoint/local_tier/part_copier.py", "part"),
}

PUBLIC = {
    "coordination": (
        """
        BarrierTimeout CoordinationClient CoordinationError CoordinationService
        CoordinatorLost Credentials Endpoint Fenced HoldfastError JobIdentity
        ProcessInfo ProcessLost Relay ServiceTimeouts StatusClient Timeouts
    """
    ),
    "multihost": (
        """
        HANG_EXIT_CODE AttemptOver BarrierSyncFn ClusterGroup Fatal GceMetadata Group Hang Health
        HealthListener JobError Notice Polled
        Preempted ProcessHealth ProcessSpec RayTrain Signals SlurmEnd Solo Source
        StartupFailed StartupTimeout SyncPoint Watchdog
        WatchedFile WorkerFailed add_preemption_source agree_on_step
        broadcast_one_replica_to_all broadcast_one_to_all
        coordination_timeout current_client current_spec default_group
        distributed_to_device_ids get_available_memory
        get_barrier_sync_fn get_device_memory get_jax_distributed_client
        get_leaf_memory_per_device global_max health in_replica
        initialize initialize_distributed_to_device_ids initialize_runtime_to_distributed_ids
        is_distributed_to_device_ids_initialized is_initialized
        is_jax_distributed_client_initialized is_native_pathways_backend
        is_pathways_backend is_pathways_colocated_runtime_active is_pathways_controller
        is_primary_host
        is_proxy_pathways_backend is_runtime_to_distributed_ids_initialized keep_compiled
        live_devices
        live_processes local_replica_devices
        mark_pathways_colocated_runtime_active notify_preemption preempted_processes
        preemption_notice
        primary_process_in_replica process_count process_index process_index_from_device
        process_replica_id reached_preemption
        replica_count replica_devices run_restartable runtime_to_distributed_ids
        runtime_to_distributed_process_id should_skip_process_sync
        shutdown slice_count sync_global_processes tree_memory_per_device unique_barrier_key
        unique_processes_from_devices
        use_experimental_distributed_process_id watchdog
    """
    ),
    "checkpoint": (
        """
        SAVED Add AnyOf AtSteps Cast CheckpointError CheckpointManager CommitUnknown Corrupt Drop
        EveryNSeconds EveryNSteps Files FirstSave Fuse
        HostileCheckpoint ItemStructure Json KeepAll KeepAnyOf KeepBest KeepClosestTo
        KeepEvery KeepEverySeconds KeepLast
        KeepLatestFor KeepPolicy Local Node NotEnoughMemory OnPreemption Options
        PolicyContext Progress
        ProgressBar Rename Repeat ReplicasDiffer Reshape SaveCancelled SaveCosts SaveFailed
        SaveForGoodput SaveHandle
        SavePolicy Split Stack StepExists StepFacts StepGone StepNotFound StepOutOfOrder
        Storage Structure Swept
        Transpose TreeMismatch Unstack UnsupportedLeaf VerifyReport
        convert iterate_steps load load_async register_leaf_type register_storage save
        save_async structure sweep verify wait_for_new_step
    """
    ),
    "launch": (
        """
        DONE DO_NOT_RESTART HANG PREEMPTED Fatal Hang JobError JobResult KubernetesJob
        LiveView MetricsSettings
        Preempted RestartPolicy RunSettings SlurmSettings StandbySettings StartupFailed
        StartupTimeout
        TaskSettings WorkerFailed ray
        render_kubernetes run_local run_slurm run_task
    """
    ),
    "compat": (
        """
        orbax
    """
    ),
    "web": (
        """
        serve_page write_report
    """
    ),
    "testing": (
        """
        StorageContract
    """
    ),
    "cli": (
        """
        main
    """
    ),
}


def _names(tree: ast.AST) -> Iterator[str]:
    """Yields the names of classes, functions, parameters and fields."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield node.name
            yield from (
                line.target.id
                for line in node.body
                if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
            )
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
            arguments = node.args
            yield from (
                argument.arg
                for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
            )


@pytest.mark.parametrize("room", ROOMS)
def test_names_given_up_do_not_come_back(room: str) -> None:
    """No module, class, function, parameter or field has a name that the field does not know."""
    for path in sorted((ROOT / room).rglob("*.py")):
        where = str(path.relative_to(ROOT))
        assert path.stem not in MODULES_GIVEN_UP, where
        found = {
            name
            for name in _names(ast.parse(path.read_text()))
            if name in GIVEN_UP and (where, name) not in KEPT
        }
        assert not found, f"{where} has {sorted(found)}"


@pytest.mark.parametrize("room", ROOMS)
def test_no_docstring_begins_with_is(room: str) -> None:
    """A docstring says what a thing does."""
    for path in sorted((ROOT / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node) or ""
                assert not text.startswith("Is "), (
                    f"{path.relative_to(ROOT)}: {text.splitlines()[0]}"
                )


@pytest.mark.parametrize(
    "page", sorted({ROOT / "README.md", *(ROOT / "docs").rglob("*.md")}), ids=lambda page: page.name
)
def test_pages_use_todays_names(page: Path) -> None:
    """No page names a class that was given up, nor a private module."""
    classes = "|".join(
        name
        for name in GIVEN_UP
        if name[0].isupper() and name not in ("Source", "Save", "Own", "How")
    )
    text = page.read_text()
    assert not re.findall(rf"`(?:{classes})[`(.]", text)
    assert not re.findall(r"(?:coordination|multihost|checkpoint|launch|cli)/_\w+\.py", text)


@pytest.fixture(scope="module")
def faces() -> dict[str, list[str]]:
    """What each room's `__all__` says in a real interpreter."""
    code = (
        "import importlib, json, sys; rooms = sys.argv[1:]; print(json.dumps({room:"
        " importlib.import_module('holdfast.' + room).__all__ for room in rooms}))"
    )
    command = [sys.executable, "-W", "ignore", "-c", code, *ROOMS]
    ran = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, list[str]] = json.loads(ran.stdout)
    return found


@pytest.mark.parametrize("room", ROOMS)
def test_the_face_of_a_room_is_pinned(room: str, faces: dict[str, list[str]]) -> None:
    """What a room offers changes only together with this list."""
    assert faces[room] == PUBLIC[room].split()
