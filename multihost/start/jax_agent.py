"""jaxlib's agent: jax.distributed on our coordinator, the agent's way to it, and its end."""

from __future__ import annotations

import inspect
import math
import mmap
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import jaxlib
from jax._src import compilation_cache, compiler, distributed, xla_bridge

from holdfast.coordination.client.fork import keep_for_ever

from ..errors import failed_start
from ..group.group_client import Deadline
from ..peers.peer_tls import first_certificate
from ..spec import ProcessSpec

# The agent ends its process when the coordinator is silent for so long. Our client decides about
# that instead, so the agent never gets to it.
_HEARTBEAT_S = 86400
# Among alternative names in DER: the tag, and the length of what follows.
_URI = re.compile(rb"\x86\x81?(.)", re.DOTALL)
_WRITE = "_cache_write"  # of jax's compiler: writes an entry of the compilation cache
_ENTRY = {"cache_key", "compile_time_secs", "module_name", "backend", "executable"}
_jax_writes: Any = getattr(compiler, _WRITE, None)
_COLLECTIVE_TIMEOUT_FLAG = "xla_cpu_collective_timeout_seconds"


def start_jax(
    spec: ProcessSpec,
    address: str,
    devices: Sequence[int] | None,
    deadline: Deadline,
    *,
    shutdown_timeout_s: float,
) -> None:
    """Puts jax.distributed on our coordinator, which is at `address`, or a relay before it. Brings
    the backend up.

    Raises StartupFailed for a job that is smaller than asked for.
    """
    configure: Any = jax.config.update  # jax does not type it
    configure("jax_enable_preemption_service", False)
    spec.bypass_proxies(os.environ, address)
    _keep_what_each_compiles()
    jax.distributed.initialize(
        address,
        spec.num_processes,
        spec.process_id,
        local_device_ids=devices,
        cluster_detection_method="deactivate",
        initialization_timeout=max(1, math.ceil(deadline.remaining_s())),
        heartbeat_timeout_seconds=_HEARTBEAT_S,
        shutdown_timeout_seconds=math.ceil(shutdown_timeout_s),
        coordinator_bind_address="127.0.0.1:0",  # process 0's own service idles on a spare port
        partition_index=spec.slice_id if spec.num_slices > 1 else None,
        **own_tls(spec),  # type: ignore[arg-type]
    )
    # A platform that has not joined sees a job of one process, and each would train alone.
    count = jax.process_count()
    if count != spec.num_processes:
        raise failed_start(
            spec,
            f"{spec.num_processes} processes were asked for, but jax sees {count}: its platform"
            f" {jax.default_backend()!r} has not joined; check JAX_PLATFORMS and, on CPU,"
            " jax_cpu_collectives_implementation",
        )


def show_devices(devices: Sequence[int]) -> None:
    """Has jax see these devices alone (none: all), as `jax.distributed.initialize` does."""
    configure: Any = jax.config.update
    for platform in ("cuda", "rocm", "oneapi") if devices else ():
        with suppress(AttributeError):  # a jax that does not know the platform
            configure(f"jax_{platform}_visible_devices", ",".join(map(str, devices)))


def _keep_what_each_compiles() -> None:
    """Has this process write what it compiles on CPU to jax's compilation cache.

    jax lets process 0 write for all. On CPU the name of an entry differs from process to process,
    so that the others would compile everything again in each attempt.
    """
    if _jax_writes is not None and inspect.signature(_jax_writes).parameters.keys() >= _ENTRY:
        setattr(compiler, _WRITE, _write_compiled)


def _write_compiled(*given: Any, **named: Any) -> None:
    _jax_writes(*given, **named)
    entry = inspect.signature(_jax_writes).bind(*given, **named).arguments
    backend = entry["backend"]
    compile_s = entry["compile_time_secs"]
    config: Any = jax.config  # jax does not type it
    is_short = compile_s < config.jax_persistent_cache_min_compile_time_secs
    is_own = backend.platform == "cpu" and distributed.global_state.process_id != 0
    # Before jax 0.11.2 a program with callbacks holds pointers into its process.
    if is_own and not is_short and not entry.get("host_callbacks"):
        with suppress(Exception):  # a cache that cannot be written costs time alone
            compilation_cache.put_executable_and_time(
                entry["cache_key"],
                entry["module_name"],
                entry["executable"],
                backend,
                int(compile_s),
            )


def end_jax() -> None:
    """Ends the agent and whatever waits in it; whatever the agent says, the process goes on."""
    with suppress(Exception):
        distributed.global_state.shutdown()  # type: ignore[no-untyped-call]
    _clear_jax()


def abandon_jax() -> None:
    """Takes a forked child's copy of the agent and the backends out of use, and destroys nothing.

    Destroying them waits for threads that the child does not have.
    """
    state = distributed.global_state
    services = [state.preemption_sync_manager, state.client, state.service]
    for inherited in (*services, *xla_bridge._backends.values()):
        keep_for_ever(inherited)
    _clear_jax()


def _clear_jax() -> None:
    """Empties jax's state; else jax's own exit would shut the agent down once more."""
    state = distributed.global_state
    state.preemption_sync_manager = None
    state.client = None
    state.service = None


def own_tls(spec: ProcessSpec) -> dict[str, str]:
    """Returns the options by which the agent shows this process's certificate itself.

    There are none where it cannot (before jaxlib 0.12). It shows no token, and no key of the
    process, for which a certificate stands that names the process (docs/coordinator-security.md).
    """
    if spec.token_file is not None or not spec.tls_cert:
        return {}
    files = {
        "mtls_cert_file": spec.tls_cert,
        "mtls_key_file": spec.tls_key,
        "mtls_ca_file": spec.tls_ca,
    }
    known = inspect.signature(jax.distributed.initialize).parameters.keys()
    if not files.keys() <= known or not _names_process(spec.tls_cert, spec.process_id):
        return {}
    return {option: str(file) for option, file in files.items()}


def _names_process(certificate: str, process_id: int) -> bool:
    """Returns whether the first certificate of a PEM file has a URI that names this process.

    The coordinator decides about it.
    """
    der = first_certificate(certificate)
    wanted = re.compile(rb"(?:holdfast:|spiffe://[^/]+/(?:.+/)?holdfast/)process/%d" % process_id)
    uris = (der[tag.end() : tag.end() + tag[1][0]] for tag in _URI.finditer(der))
    return any(wanted.fullmatch(uri) for uri in uris)


def set_collective_timeout(timeout_s: float) -> None:
    """Sets XLA's flag, where this jaxlib knows the flag and the user has not set it.

    A flag that jaxlib does not know ends the process.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if _COLLECTIVE_TIMEOUT_FLAG not in flags and _jaxlib_knows(_COLLECTIVE_TIMEOUT_FLAG):
        flag = f"--{_COLLECTIVE_TIMEOUT_FLAG}={math.ceil(timeout_s)}"
        os.environ["XLA_FLAGS"] = f"{flags} {flag}".strip()


def _jaxlib_knows(flag: str) -> bool:
    libraries = Path(jaxlib.__file__).parent.glob("*.so")
    # The largest library has the flags.
    for library in sorted(libraries, key=lambda path: -path.stat().st_size):
        with (
            library.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text,
        ):
            if text.find(flag.encode()) >= 0:
                return True
    return False
