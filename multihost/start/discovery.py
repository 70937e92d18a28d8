"""Who this process is: what was given, what a launcher of ours says, what others say, what jax
detects.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax._src import clusters

from holdfast.coordination.address import UNIX, join_address
from holdfast.coordination.names import LOCAL_DEVICES
from holdfast.coordination.process.job_folder import digest_of, user_folder

from ..ray_train import RayTrainWorker, current_worker
from ..spec import ProcessSpec
from .launchers import (
    ANY_MPI_JOB,
    ClusterEnv,
    counted_by,
    detect_starter,
    first_set,
    number_in,
)

# The fields of a spec that `initialize()` takes alone, with its names for them.
GIVEN = {
    "coordinator": "coordinator_address",
    "num_processes": "num_processes",
    "process_id": "process_id",
}
_SCONTROL_S = 30.0
_NAMES_OF_JAX = {
    "coordinator": ("JAX_COORDINATOR_ADDRESS",),
    "num_processes": ("JAX_NUM_PROCESSES", "JAX_PROCESS_COUNT"),
    "process_id": ("JAX_PROCESS_ID", "JAX_PROCESS_INDEX"),
}


@dataclasses.dataclass(frozen=True)
class DiscoveredProcess:
    """Who this process is, and whether a launcher of ours says so.

    It has all devices of this machine where `devices` is None. A worker of Ray Train has no spec
    yet: its job has no coordinator before its workers have met (`gather_workers`).
    """

    spec: ProcessSpec | None
    launched: bool = False
    devices: Sequence[int] | None = None
    worker: RayTrainWorker | None = None
    # Who says how many processes there are.
    counted_by: str = dataclasses.field(default="initialize(spec)", compare=False)


def discover_process(
    spec: ProcessSpec | None,
    given: Mapping[str, Any],
    devices: Sequence[int] | None,
    timeout_s: float,
) -> DiscoveredProcess:
    """Returns who this process is.

    From a spec, what was given, our launcher's environment, Ray Train, or what other launchers say
    and jax detects. Raises ValueError for a process that is not alone, where that is not enough.
    """
    if spec is not None:
        if given:
            named = ", ".join(GIVEN[field] for field in given)
            raise ValueError(f"initialize() takes a spec or {named}, not both")
        return DiscoveredProcess(spec, True, devices)
    known: Mapping[str, Any] = given
    launcher = ""
    if len(given) < len(GIVEN):
        found = _launched(given, devices)
        if found is not None:
            return found
        known, devices, launcher = _detected(given, devices, timeout_s)
        if not known or (known.get("num_processes") == 1 and not known.get("process_id")):
            return DiscoveredProcess(None)
        missing = [argument for field, argument in GIVEN.items() if field not in known]
        if missing:
            of = f" of {launcher}" if launcher else ""
            raise ValueError(
                f"initialize() knows {known}{of} but not {', '.join(missing)}: give them, or start"
                " with `holdfast run`; initialize(num_processes=1) is one process alone"
            )
    if not launcher and "num_processes" not in given:
        named = first_set(os.environ, _NAMES_OF_JAX["num_processes"])
        launcher = named or "the cluster, as jax detects it"
    spec = ProcessSpec(**known, **_job_of(known))
    return DiscoveredProcess(spec, False, devices, counted_by=launcher or "initialize()")


def _launched(given: Mapping[str, Any], devices: Sequence[int] | None) -> DiscoveredProcess | None:
    """Returns who this process is to a launcher of ours, or to Ray Train, or that it is to be
    alone; None where others have to say.
    """
    spec = ProcessSpec.from_env(os.environ)
    is_alone = given.get("num_processes") == 1
    if spec is not None and (spec.num_processes == 1 or not is_alone):
        says = "initialize()" if "num_processes" in given else "HOLDFAST_NUM_PROCESSES"
        return DiscoveredProcess(dataclasses.replace(spec, **given), True, devices, counted_by=says)
    if is_alone:
        return DiscoveredProcess(None)
    worker = None if given else current_worker()
    return None if worker is None else DiscoveredProcess(None, True, devices, worker)


def _job_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns job and attempt of a process that no launcher of ours has started, so that it is not
    taken for one of another job that comes to the same address: what the environment says, else the
    launcher that has counted its processes in this way.
    """
    named = ProcessSpec.job_in_env(os.environ)
    if named:
        return named
    starter = detect_starter(os.environ)
    counted = (given["process_id"], given["num_processes"])
    if starter is None or (starter.process_id, starter.num_processes) != counted:
        return {}
    job_id, attempt = starter.bare_job
    return {"job_id": job_id, "attempt": attempt}


def _detected(
    given: Mapping[str, Any], devices: Sequence[int] | None, timeout_s: float
) -> tuple[dict[str, Any], Sequence[int] | None, str]:
    """Returns what was given with what the environment says besides, the devices, and who says how
    many processes there are: "" where jax knows that launcher.
    """
    named = _in_names_of_jax(os.environ)
    starter = detect_starter(os.environ)
    known = named | dict(given)
    # PMI's is the nearest launcher: what jax detects, such as Slurm, has started its mpiexec.
    if starter is None or starter.launcher != "PMI":
        known, devices = _detected_by_jax(known, devices, timeout_s)
    if starter is not None and "num_processes" not in known:
        devices = _own_device(starter) if devices is None else devices
        return _said_by(starter) | known, devices, starter.launcher
    launcher, counted = counted_by(os.environ)
    if counted and counted["num_processes"] != known.get("num_processes"):
        if "num_processes" in known and "num_processes" not in given:
            raise ValueError(
                f"{launcher} says another number of processes than {known}, which the environment"
                " says besides: give coordinator_address, num_processes and process_id, or unset"
                " the variables of the launcher that has not started this process"
            )
        return counted | known, devices, launcher
    return known, devices, ""


def _in_names_of_jax(environment: Mapping[str, str]) -> dict[str, Any]:
    """Returns what variables of jax's name say; the first of them jax reads itself."""
    said: dict[str, Any] = {}
    for field, names in _NAMES_OF_JAX.items():
        name = first_set(environment, names)
        if name:
            is_address = field == "coordinator"
            said[field] = environment[name] if is_address else number_in(environment, name)
    return said


def _said_by(starter: ClusterEnv) -> dict[str, Any]:
    """Returns what a launcher says: where to meet too, where it can be known."""
    said: dict[str, Any] = {
        "num_processes": starter.num_processes,
        "process_id": starter.process_id,
    }
    if starter.port and starter.first_host:
        said["coordinator"] = join_address(starter.first_host, starter.port)
    elif starter.on_one_machine and starter.num_processes > 1 and starter.job_id != ANY_MPI_JOB:
        said["coordinator"] = f"{UNIX}{user_folder(create=True) / digest_of(starter.bare_job[0])}"
    return said


def _own_device(starter: ClusterEnv) -> list[int] | None:
    """Returns the device of a process as jax has it for the launchers that it detects."""
    if starter.local_rank is None or LOCAL_DEVICES in os.environ:
        return None
    return [starter.local_rank]


def _detected_by_jax(
    given: Mapping[str, Any], devices: Sequence[int] | None, timeout_s: float
) -> tuple[dict[str, Any], Sequence[int] | None]:
    """Returns what was given with what jax detects besides, and the devices."""
    detect: Any = clusters.ClusterEnv.auto_detect_unset_distributed_params
    with _jobs_of_kubernetes_alone():
        *values, devices = detect(
            *(given.get(field) for field in GIVEN), devices, None, math.ceil(timeout_s)
        )
    known = {field: value for field, value in zip(GIVEN, values, strict=True) if value is not None}
    if "coordinator" not in given and "coordinator" in known:
        nodes = os.environ.get("SLURM_STEP_NODELIST", "")
        known["coordinator"] = _with_first_node(known["coordinator"], nodes)
    return known, devices


@contextlib.contextmanager
def _jobs_of_kubernetes_alone() -> Iterator[None]:
    """Hides Kubernetes from jax in a pod of no Indexed Job, such as a notebook's: it asks there for
    the pod's Job, and fails. Raises ValueError where it fails in one that has an index.
    """
    host = os.environ.get("KUBERNETES_SERVICE_HOST")
    indexed = "JOB_COMPLETION_INDEX" in os.environ
    if host is not None and not indexed:
        del os.environ["KUBERNETES_SERVICE_HOST"]
    try:
        yield
    except Exception as error:
        if host is None:
            raise
        raise ValueError(
            f"jax cannot ask Kubernetes who this process is: {type(error).__name__}: {error}; give"
            " coordinator_address, num_processes and process_id, or start with `holdfast task`"
        ) from error
    finally:
        if host is not None:
            os.environ["KUBERNETES_SERVICE_HOST"] = host


def _with_first_node(address: str, nodes: str) -> str:
    """Returns the address with the name of Slurm's first node.

    jax reads no more than one [...] of the list of nodes, and takes a part of a name for the name.
    """
    host, _, port = address.rpartition(":")
    read = re.match(r"([^\[,]*)\[(\w*)[^\]]*\][^,]", nodes)
    if read is None or host != read[1] + read[2]:
        return address
    command = ["scontrol", "show", "hostnames", nodes]
    try:
        first = subprocess.run(
            command, capture_output=True, text=True, timeout=_SCONTROL_S, check=True
        ).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError) as error:
        raise ValueError(
            f"scontrol show hostnames {nodes!r} failed: {error}; give coordinator_address="
            "HOST:PORT, the address of process 0"
        ) from error
    return f"{first}:{port}"
