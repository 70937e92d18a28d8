"""Who this process is, and its environment before the backend comes up."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import math
import mmap
import os
import re
import ssl
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax._src import clusters

from ..ray_train import RayTrainWorker, current_worker
from ..spec import ProcessSpec

GIVEN = ("coordinator", "num_processes", "process_id")
_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)
_URI = re.compile(
    rb"\x86\x81?(.)", re.DOTALL
)  # among alternative names in DER: the tag, and the length of what follows
_SCONTROL_S = 30.0
_COLLECTIVE_TIMEOUT_FLAG = "xla_cpu_collective_timeout_seconds"


@dataclasses.dataclass(frozen=True)
class DiscoveredProcess:
    """Who this process is, whether a launcher of ours says so, and which devices it has (None: all
    of this machine's).

    A worker of Ray Train has no spec yet: its job has no coordinator before its workers have met
    (`gather_workers`).
    """

    spec: ProcessSpec | None
    launched: bool = False
    devices: Sequence[int] | None = None
    worker: RayTrainWorker | None = None


def discover_process(
    spec: ProcessSpec | None, given: dict[str, Any], devices: Sequence[int] | None, timeout_s: float
) -> DiscoveredProcess:
    """Returns who this process is: from a spec, what was given, our launcher's environment, Ray
    Train, or what jax detects.
    """
    if spec is not None:
        if given:
            raise ValueError(f"initialize() takes a spec or {', '.join(given)}, not both")
        return DiscoveredProcess(spec, True, devices)
    if len(given) < len(GIVEN) and (launched := ProcessSpec.from_env(os.environ)) is not None:
        return DiscoveredProcess(dataclasses.replace(launched, **given), True, devices)
    if not given and (worker := current_worker()) is not None:
        return DiscoveredProcess(None, True, devices, worker)
    if len(given) < len(GIVEN):
        detect: Any = clusters.ClusterEnv.auto_detect_unset_distributed_params
        *detected, devices = detect(
            *(given.get(field) for field in GIVEN), devices, None, math.ceil(timeout_s)
        )
        if "coordinator" not in given and detected[0] is not None:
            detected[0] = _with_first_node(detected[0], os.environ.get("SLURM_STEP_NODELIST", ""))
        given = {
            field: value for field, value in zip(GIVEN, detected, strict=True) if value is not None
        }
    if not given:
        return DiscoveredProcess(None)
    if missing := [field for field in GIVEN if field not in given]:
        raise ValueError(
            f"initialize() knows {given} but not {', '.join(missing)}: give them, or start with"
            " `holdfast run`"
        )
    return DiscoveredProcess(ProcessSpec(**given), False, devices)


def _with_first_node(address: str, nodes: str) -> str:
    """Returns the address with the name of Slurm's first node, where jax has taken a part of it: it
    reads no more than one [...].
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
            f"scontrol show hostnames {nodes!r} failed: {error}; give coordinator=, the address of"
            " process 0"
        ) from error
    return f"{first}:{port}"


def own_tls(spec: ProcessSpec) -> dict[str, str]:
    """Returns the options by which jaxlib's agent shows this process's certificate itself (since
    jaxlib 0.12); none where it cannot.

    It shows no token, and no key of the process, for which a certificate stands that names the
    process (docs/coordinator.md).
    """
    files = {
        "mtls_cert_file": spec.tls_cert,
        "mtls_key_file": spec.tls_key,
        "mtls_ca_file": spec.tls_ca,
    }
    known = files.keys() <= inspect.signature(jax.distributed.initialize).parameters.keys()
    if (
        not known
        or spec.token_file is not None
        or not spec.tls_cert
        or not _names_process(spec.tls_cert, spec.process_id)
    ):
        return {}
    return {option: str(file) for option, file in files.items()}


def _names_process(certificate: str, process_id: int) -> bool:
    """Returns whether the first certificate of a PEM file has a URI that gives it this process; the
    coordinator decides about it.
    """
    pem = _CERTIFICATE.search(Path(certificate).read_text())
    der = ssl.PEM_cert_to_DER_cert(pem[0]) if pem else b""
    wanted = re.compile(rb"(?:holdfast:|spiffe://[^/]+/(?:.+/)?holdfast/)process/%d" % process_id)
    return any(
        wanted.fullmatch(der[found.end() : found.end() + found[1][0]])
        for found in _URI.finditer(der)
    )


def set_collective_timeout(timeout_s: float) -> None:
    """Sets XLA's flag, where this jaxlib knows it (an unknown flag would end the process) and the
    user has not.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if _COLLECTIVE_TIMEOUT_FLAG not in flags and _jaxlib_knows(_COLLECTIVE_TIMEOUT_FLAG):
        os.environ["XLA_FLAGS"] = (
            f"{flags} --{_COLLECTIVE_TIMEOUT_FLAG}={math.ceil(timeout_s)}".strip()
        )


def _jaxlib_knows(flag: str) -> bool:
    package = importlib.util.find_spec("jaxlib")
    for folder in package.submodule_search_locations or () if package else ():
        for library in sorted(Path(folder).glob("*.so"), key=lambda path: -path.stat().st_size):
            with (
                library.open("rb") as file,
                mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text,
            ):
                if text.find(flag.encode()) >= 0:
                    return True
    return False
