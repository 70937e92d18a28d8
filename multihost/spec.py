"""ProcessSpec: who a process is, where its coordinator stands, and the environment's names for it.

No other module knows those names. The MEGASCALE_* keys, by which TPU runtimes find the slices of a
job, are decided here too.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, fields
from typing import Any, Self

from holdfast.coordination import Credentials
from holdfast.coordination.address import UNIX, split_address

# Where libtpu's slices meet unless the launcher says otherwise; not the coordinator's port.
_MEGASCALE_PORT = 8081

_IDLE_SERVICE = "127.0.0.1:0"
COMPILE_CACHE = "HOLDFAST_COMPILE_CACHE"
"""Names the folder in which each host keeps compiled programs, or is OFF."""
OFF = "off"
_SLICE_KEYS = (
    "MEGASCALE_NUM_SLICES",
    "MEGASCALE_SLICE_ID",
    "MEGASCALE_COORDINATOR_ADDRESS",
    "MEGASCALE_PORT",
)


@dataclass(frozen=True, kw_only=True)
class ProcessSpec:
    """Who a process of a job is. A value: immutable, comparable, without I/O.

    `coordinator` is HOST:PORT, or unix:PATH on one machine, of the coordination service of this
    (job_id, attempt); `slice_address` is HOST or HOST:PORT where the slices of a TPU job meet: the
    host of rank 0, port 8081 unless given. Ranks are contiguous in a slice, and all slices are of
    one size. `local_rank` counts the job's processes on this machine, from 0, and `local_count` is
    their number, where the launcher knows it. `host_address` is this machine's for the others of
    the job, where a relay stands between it and the coordinator. `launched_ms` is the Unix time at
    which a launcher began that counts its attempts from 1 each time.

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
    local_rank: int | None = None
    local_count: int | None = None
    host_address: str | None = None
    launched_ms: int | None = None
    token_file: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_ca: str | None = None

    def __post_init__(self) -> None:
        _check_range("process_id", self.process_id, self.num_processes, "num_processes")
        _check_range("slice_id", self.slice_id, self.num_slices, "num_slices")
        if self.attempt < 0:
            raise ValueError(f"attempt={self.attempt}: expected 0 or more")
        if self.local_count is not None:
            _check_range("local_rank", self.local_rank or 0, self.local_count, "local_count")
        _check_address(self.coordinator)
        self._check_slices()

    def _check_slices(self) -> None:
        on_one_machine = self.slice_address is None and self.coordinator.startswith(UNIX)
        if self.num_slices > 1 and on_one_machine:
            raise ValueError(
                f"coordinator={self.coordinator!r} with num_slices={self.num_slices}: slices need a"
                " slice_address to meet at"
            )
        per_slice, rest = divmod(self.num_processes, self.num_slices)
        if rest:
            raise ValueError(
                f"num_processes={self.num_processes} in num_slices={self.num_slices}: a slice is"
                " incomplete, or they differ in size"
            )
        if self.process_id // per_slice != self.slice_id:
            raise ValueError(
                f"process_id={self.process_id} reports slice_id={self.slice_id}, expected"
                f" {self.process_id // per_slice}: sort the processes by slice and worker,"
                f" {per_slice} a slice"
            )

    def new_credentials(self) -> Credentials:
        """Returns what the process shows to its coordinator, with a key of its own.

        Its client and its relay share one: see Credentials.
        """
        return Credentials(self.token_file, self.tls_cert, self.tls_key, self.tls_ca)

    def to_env(self) -> dict[str, str]:
        """Returns the variables that carry all of this to a process.

        With them unmodified jax joins the same coordinator, too.
        """
        values = {key: getattr(self, field.name) for key, field in _KEYS.items()}
        return {key: str(value) for key, value in values.items() if value is not None} | {
            "JAX_COORDINATOR_ADDRESS": self.coordinator,
            # jax's process 0 always starts a service of its own: it idles on a spare port.
            "JAX_COORDINATOR_BIND_ADDRESS": _IDLE_SERVICE,
        }

    def set_in(self, environment: MutableMapping[str, str]) -> None:
        """Sets the variables of `to_env`, and removes those of an outer job, whose process has
        started this launcher. Credentials that no job has set are the user's, and stay.
        """
        if any(map(environment.get, _REQUIRED)):
            for key in _KEYS:
                environment.pop(key, None)
        environment.update(self.to_env())

    @classmethod
    def from_env(cls, environment: Mapping[str, str]) -> Self | None:
        """Reads what `to_env` wrote; None where no launcher of ours has written.

        Raises ValueError naming the variable.
        """
        texts = {key: environment[key] for key in _KEYS if environment.get(key, "") != ""}
        missing = [key for key in _REQUIRED if key not in texts]
        if len(missing) == len(_REQUIRED):
            return None
        if missing:
            raise ValueError(
                f"{missing[0]} is not set, but {', '.join(sorted(texts))} is: start the process"
                " with `holdfast run`, or unset all"
            )
        return cls(**_parsed(texts))

    @staticmethod
    def job_in_env(environment: Mapping[str, str]) -> dict[str, Any]:
        """Reads job and attempt where they are set without the rest, as for a program that others
        start.
        """
        if any(environment.get(key) for key in _REQUIRED):
            return {}
        keys = [key for key in ("HOLDFAST_JOB_ID", "HOLDFAST_ATTEMPT") if environment.get(key)]
        return _parsed({key: environment[key] for key in keys})

    def bypass_proxies(
        self, environment: MutableMapping[str, str], address: str | None = None
    ) -> None:
        """Puts the coordinator, or a relay at `address`, past the proxies that gRPC reads from
        `environment`, and with it jax. For others than gRPC nothing changes.
        """
        address = address or self.coordinator
        if address.startswith(UNIX) or not any(map(environment.get, _PROXIES)):
            return
        host, _ = split_address(address)
        past = next(filter(None, map(environment.get, _PAST_PROXIES)), "")
        if host not in past.split(","):
            environment[_PAST_PROXIES[0]] = f"{past},{host}".removeprefix(",")

    def set_slices(self, environment: MutableMapping[str, str]) -> list[str]:
        """Sets the four MEGASCALE_* variables of `environment`, or removes them.

        Returns one line for each value that it replaced. The launcher's view of the live group is
        the only source. With one slice all four are removed; with more, all four are set, because a
        host that was preempted may carry the values of an earlier group. What is already right
        stays.
        """
        wanted: dict[str, str | None] = dict.fromkeys(_SLICE_KEYS)
        if self.num_slices > 1:
            host, port = _host_and_port(self.slice_address or self.coordinator.rpartition(":")[0])
            values = (self.num_slices, self.slice_id, host, port or _MEGASCALE_PORT)
            wanted = dict(zip(_SLICE_KEYS, map(str, values), strict=True))
        lines = []
        for key, value in wanted.items():
            before = environment.pop(key, None)
            if value is not None:
                environment[key] = value
            if before not in (None, value):
                after = "removed, the job has one slice" if value is None else repr(value)
                lines.append(f"{key}: {before!r} -> {after}")
        return lines


def place_of(spec: ProcessSpec) -> list[str | int]:
    """Returns what no two processes that live have in common."""
    return [spec.coordinator, spec.job_id, spec.attempt, spec.process_id]


# gRPC's: of the last two it reads the first that is set.
_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
_PAST_PROXIES = ("no_grpc_proxy", "no_proxy")
_REQUIRED = ("HOLDFAST_PROCESS_ID", "HOLDFAST_NUM_PROCESSES", "HOLDFAST_COORDINATOR")
# Each field has a variable of its name.
_KEYS = {f"HOLDFAST_{field.name.upper()}": field for field in fields(ProcessSpec)}


def _check_address(address: str) -> None:
    if address.startswith(UNIX):
        if not address.removeprefix(UNIX).startswith("/"):
            raise ValueError(f"coordinator={address!r}: expected unix: and an absolute path")
        return
    try:
        port = split_address(address)[1]
    except ValueError as error:
        raise ValueError(f"coordinator={error}, or unix:PATH") from None
    if not 0 < port < 65536:
        raise ValueError(f"coordinator={address!r}: expected HOST:PORT or unix:PATH")


def _host_and_port(address: str) -> tuple[str, int | None]:
    host, colon, port = address.rpartition(":")
    # A bare IPv6 address has colons, and no port.
    if colon and port.isdecimal() and (":" not in host or host.startswith("[")):
        return host, int(port)
    return address, None


def _check_range(field: str, value: int, bound: int, of: str) -> None:
    if not 0 <= value < bound:
        raise ValueError(f"{field}={value} with {of}={bound}: expected 0 <= {field} < {of}")


def _parsed(texts: Mapping[str, str]) -> dict[str, Any]:
    """Returns fields by their names, from variables by theirs."""
    found: dict[str, Any] = {}
    for key, text in texts.items():
        field = _KEYS[key]
        is_number = str(field.type).startswith("int")
        try:
            found[field.name] = int(text) if is_number else text
        except ValueError:
            raise ValueError(f"{key}={text!r}: expected a whole number") from None
    return found
