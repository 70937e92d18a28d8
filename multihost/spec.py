"""ProcessSpec: who a process is and where its coordinator stands, and the environment's names for it. No other module knows those names.

The MEGASCALE_* keys, by which TPU runtimes find the slices of a job, are decided here too: a pure function of environment and spec.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Self

MEGASCALE_PORT = 8081
"""The port that libtpu's slices meet at unless the launcher says otherwise; not the coordinator's."""

_IDLE_SERVICE = "127.0.0.1:0"
_SLICE_KEYS = ("MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID", "MEGASCALE_COORDINATOR_ADDRESS", "MEGASCALE_PORT")


@dataclass(frozen=True, kw_only=True)
class ProcessSpec:
    """Says who a process of a job is. A value: immutable, comparable, without I/O.

    `coordinator` is HOST:PORT of the coordination service of this (job_id, attempt); `slice_address` is HOST or HOST:PORT where the slices
    of a TPU job meet: the host of rank 0, port 8081 unless given. Ranks are contiguous in a slice, and all slices are of one size.
    Raises ValueError, naming field and value, for numbers that do not fit together.
    """

    process_id: int
    num_processes: int
    coordinator: str
    job_id: str = "job"
    attempt: int = 0
    slice_id: int = 0
    num_slices: int = 1
    slice_address: str | None = None
    token_file: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_ca: str | None = None

    def __post_init__(self) -> None:
        _check_range("process_id", self.process_id, self.num_processes, "num_processes")
        _check_range("slice_id", self.slice_id, self.num_slices, "num_slices")
        if self.attempt < 0:
            raise ValueError(f"attempt={self.attempt}: expected 0 or more")
        host, _, port = self.coordinator.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError(f"coordinator={self.coordinator!r}: expected HOST:PORT")
        per_slice, rest = divmod(self.num_processes, self.num_slices)
        if rest:
            raise ValueError(
                f"num_processes={self.num_processes} in num_slices={self.num_slices}: a slice is incomplete, or they differ in size"
            )
        if self.process_id // per_slice != self.slice_id:
            raise ValueError(
                f"process_id={self.process_id} reports slice_id={self.slice_id}, expected {self.process_id // per_slice}: "
                f"sort the processes by slice and worker, {per_slice} a slice"
            )

    def to_env(self) -> dict[str, str]:
        """Returns the variables that tell a process all of this, and what unmodified jax needs to join the same coordinator."""
        values = {key: getattr(self, field) for key, (field, _) in _KEYS.items()}
        return {key: str(value) for key, value in values.items() if value is not None} | {
            "JAX_COORDINATOR_ADDRESS": self.coordinator,
            # jax's process 0 always starts a service of its own: it idles on a spare port.
            "JAX_COORDINATOR_BIND_ADDRESS": _IDLE_SERVICE,
        }

    @classmethod
    def from_env(cls, environment: Mapping[str, str]) -> Self | None:
        """Reads what `to_env` wrote; None where no launcher of ours has written. Raises ValueError naming the variable."""
        found = {key: environment[key] for key in _KEYS if environment.get(key, "") != ""}
        if not found.keys() & {"HOLDFAST_PROCESS_ID", "HOLDFAST_NUM_PROCESSES", "HOLDFAST_COORDINATOR"}:
            return None
        for key in ("HOLDFAST_PROCESS_ID", "HOLDFAST_NUM_PROCESSES", "HOLDFAST_COORDINATOR"):
            if key not in found:
                raise ValueError(
                    f"{key} is not set, but {', '.join(sorted(found))} is: start the process with `holdfast run`, or unset all"
                )
        fields: dict[str, Any] = {_KEYS[key][0]: _parsed(key, text) for key, text in found.items()}
        return cls(**fields)


_KEYS: dict[str, tuple[str, type]] = {
    "HOLDFAST_JOB_ID": ("job_id", str),
    "HOLDFAST_ATTEMPT": ("attempt", int),
    "HOLDFAST_PROCESS_ID": ("process_id", int),
    "HOLDFAST_NUM_PROCESSES": ("num_processes", int),
    "HOLDFAST_COORDINATOR": ("coordinator", str),
    "HOLDFAST_SLICE_ID": ("slice_id", int),
    "HOLDFAST_NUM_SLICES": ("num_slices", int),
    "HOLDFAST_SLICE_ADDRESS": ("slice_address", str),
    "HOLDFAST_TOKEN_FILE": ("token_file", str),
    "HOLDFAST_TLS_CERT": ("tls_cert", str),
    "HOLDFAST_TLS_KEY": ("tls_key", str),
    "HOLDFAST_TLS_CA": ("tls_ca", str),
}


def slice_changes(environment: Mapping[str, str], spec: ProcessSpec) -> tuple[dict[str, str | None], list[str]]:
    """Decides the four MEGASCALE_* variables: returns what to set (None: remove) and one line for each value that was replaced.

    The launcher's view of the live group is the only source. With one slice all four go; with more, all four are set, because a host that
    was preempted may carry the values of an earlier group. Nothing is changed that is already right.
    """
    wanted: dict[str, str | None] = dict.fromkeys(_SLICE_KEYS)
    if spec.num_slices > 1:
        address = spec.slice_address or spec.coordinator.rpartition(":")[0]
        host, port = _host_and_port(address)
        values = (spec.num_slices, spec.slice_id, host, port or MEGASCALE_PORT)
        wanted = {key: str(value) for key, value in zip(_SLICE_KEYS, values, strict=True)}
    changes = {key: value for key, value in wanted.items() if environment.get(key) != value}
    lines = [
        f"{key}: {environment[key]!r} -> {'removed, the job has one slice' if value is None else repr(value)}"
        for key, value in changes.items()
        if key in environment
    ]
    return changes, lines


def apply_changes(environment: MutableMapping[str, str], changes: Mapping[str, str | None]) -> None:
    """Writes what `slice_changes` decided into an environment."""
    for key, value in changes.items():
        if value is None:
            environment.pop(key, None)
        else:
            environment[key] = value


def _host_and_port(address: str) -> tuple[str, int | None]:
    host, colon, port = address.rpartition(":")
    return (host, int(port)) if colon and port.isdecimal() and (":" not in host or host.startswith("[")) else (address, None)


def _check_range(field: str, value: int, bound: int, of: str) -> None:
    if not 0 <= value < bound:
        raise ValueError(f"{field}={value} with {of}={bound}: expected 0 <= {field} < {of}")


def _parsed(key: str, text: str) -> str | int:
    if _KEYS[key][1] is str:
        return text
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{key}={text!r}: expected a whole number") from None
