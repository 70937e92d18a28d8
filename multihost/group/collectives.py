"""Values that all processes compute together on the devices, where a dead peer is an error.

They are computed on a helper thread, so that a dead peer is never a hang.
"""

from __future__ import annotations

import functools
import operator
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from typing import Any, TypeAlias, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from holdfast.coordination import BarrierTimeout, CoordinationError

from ..job import clear_with_attempt
from ..threads import on_thread
from .barriers import deadline_of
from .group_client import Deadline
from .matching import check_match
from .runtime import current_group_client, is_jax_distributed_client_initialized, process_index

T = TypeVar("T")
Array: TypeAlias = np.ndarray[Any, Any]

PartitionSpec: Any = jax.sharding.PartitionSpec  # jax does not type it

_BROADCAST = "broadcast_one_to_all"


def global_max(values: Sequence[int], *, timeout_s: float | None = None) -> list[int]:
    """Returns the largest of each of the integers over all processes.

    `values` has the same length everywhere, within 32 bits. Every process calls it. Blocks for at
    most `timeout_s` (default 300). Raises ProcessLost when a peer is dead, BarrierTimeout naming
    who did not call it, TypeError for what is no integer, and ValueError for what does not fit into
    int32, or where the processes do not call it alike: on all of them, before the devices compute.
    """
    deadline = deadline_of(timeout_s)
    try:
        own = [_int32(value) for value in values]
    except (TypeError, ValueError) as error:
        _tell_others("global_max", error, deadline)
        raise
    row = np.array([own], dtype=np.int32)
    check_match("global_max", [f"{len(own)} integers"], deadline)
    if jax.process_count() == 1 or not own:
        return own
    return bounded("global_max", lambda: [int(value) for value in _reduced(row, "max")], deadline)


def _int32(value: Any) -> int:
    limits = np.iinfo(np.int32)
    expected = f"global_max of {value}: expected integers from {limits.min} to {limits.max}"
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(expected) from None
    if not limits.min <= number <= limits.max:
        raise ValueError(expected)
    return number


def broadcast_one_to_all(
    in_tree: Any, is_source: bool | None = None, *, timeout_s: float | None = None
) -> Any:
    """Returns the source's tree, as numpy arrays, in every process.

    The source is process 0 unless `is_source` says otherwise. Leaves are arrays, numpy arrays,
    Python numbers or typed PRNG keys, of the same shapes and dtypes everywhere; bits are kept
    exactly, 64-bit ones too. Every process calls it: one computation on the devices for the whole
    tree. Blocks for at most `timeout_s` (default 300). Raises ProcessLost when a peer is dead,
    BarrierTimeout naming who did not call it, TypeError naming a leaf of another kind, and
    ValueError where the processes do not call it alike, or there is not one source: on all of them,
    before the devices compute. (Over jax.distributed's own client the calls are not compared.)
    """
    deadline = deadline_of(timeout_s)
    is_source = process_index() == 0 if is_source is None else bool(is_source)
    paths, treedef = jax.tree_util.tree_flatten_with_path(in_tree)
    try:
        leaves = [_to_numpy(jax.tree_util.keystr(path), leaf) for path, leaf in paths]
    except TypeError as error:
        _tell_others(_BROADCAST, error, deadline)
        raise
    lines = [
        _described(jax.tree_util.keystr(path), leaf, original)
        for (path, original), leaf in zip(paths, leaves, strict=True)
    ]
    source = f"process {process_index()}" if is_source else ""
    check_match(_BROADCAST, lines, deadline, source=source)
    if jax.process_count() > 1 and leaves:
        leaves = _from_source(leaves, is_source, deadline)
    results = [_like(leaf, original) for leaf, (_, original) in zip(leaves, paths, strict=True)]
    return jax.tree_util.tree_unflatten(treedef, results)


def _tell_others(call: str, error: Exception, deadline: Deadline) -> None:
    """Tells the other processes why this one does not compute: they would wait for it."""
    with suppress(ValueError):  # which they raise; this process raises its own
        check_match(call, [f"an error ({error})"], deadline)


def _described(path: str, leaf: Array, original: Any) -> str:
    kind = f"keys of {jax.random.key_impl(original)}" if _is_key(original) else str(leaf.dtype)
    return f"{kind}{list(leaf.shape)} at {path or 'the root'}"


def _from_source(leaves: Sequence[Array], is_source: bool, deadline: Deadline) -> list[Array]:
    """Returns the leaves of the source: the sum over all processes, with zeros elsewhere.

    They travel as words of 32 bits, so that no device changes them: jax without x64 has no others.
    """
    sizes = [-(-leaf.nbytes // 4) for leaf in leaves]
    words = np.zeros((1, sum(sizes)), np.uint32)
    if is_source:
        words[0] = np.concatenate([_to_words(leaf) for leaf in leaves])
    result = bounded(_BROADCAST, lambda: _reduced(words, "sum"), deadline)
    parts = np.split(result, np.cumsum(sizes)[:-1])
    return [
        part.view(np.uint8)[: leaf.nbytes].view(leaf.dtype).reshape(leaf.shape)
        for part, leaf in zip(parts, leaves, strict=True)
    ]


def bounded(what: str, compute: Callable[[], T], deadline: Deadline) -> T:
    """Runs `compute` on a helper thread and returns its result, as long as all processes live.

    Raises ProcessLost naming a dead process, also where the backend's
    own error came first, and BarrierTimeout. A computation that the backend cannot end stays behind
    on its thread: make no more collective calls after such an error.
    """
    future = on_thread(what, compute)
    changed = threading.Event()
    future.add_done_callback(lambda done: changed.set())
    group_client = current_group_client() if is_jax_distributed_client_initialized() else None
    with nullcontext() if group_client is None else group_client.peers.on_change(changed.set):

        def is_done(deadline: Deadline, done: Callable[[], bool]) -> bool:
            """Returns whether it is done in time. Raises ProcessLost of whoever is lost before."""
            while not done():
                if group_client is not None:
                    group_client.raise_if_lost(range(jax.process_count()), what)
                if not changed.wait(deadline.remaining_s()):
                    return False
                changed.clear()
            return True

        if not is_done(deadline, future.done):
            raise BarrierTimeout(
                f"{what} did not end in {deadline.timeout_s:g} s: a process has not called it, or"
                " hangs",
                name=what,
            )
        error = future.exception()
        if group_client is not None and isinstance(error, (jax.errors.JaxRuntimeError, ValueError)):
            # Of a loss the backend often knows before the coordinator, which is given the time to.
            try:
                is_done(Deadline(group_client.loss_known_s), lambda: False)
            except CoordinationError as lost:
                raise lost from error
    return future.result()


def _reduced(row: Array, operation: str) -> Array:
    """Reduces one row `[1, n]` of each process over all of them; returns `[n]`."""
    mesh = _host_mesh(tuple(jax.devices()))
    sharding = NamedSharding(mesh, PartitionSpec("host", None))
    make: Any = jax.make_array_from_process_local_data  # jax does not type it
    rows: jax.Array = make(sharding, row, (mesh.shape["host"], row.shape[1]))
    reduced: Array = np.asarray(_reduction(mesh, operation)(rows).addressable_data(0))
    row_of_all: Array = reduced[0]
    return row_of_all


@clear_with_attempt
@functools.cache
def _host_mesh(devices: tuple[jax.Device, ...]) -> Mesh:
    """Returns the (host, device) mesh; one device a host where their numbers differ."""
    by_host: dict[int, list[jax.Device]] = {}
    for device in sorted(devices, key=lambda device: (device.process_index, device.id)):
        by_host.setdefault(device.process_index, []).append(device)
    widths = {len(row) for row in by_host.values()}
    width = widths.pop() if len(widths) == 1 else 1
    grid = np.empty((len(by_host), width), dtype=object)
    for index, row in enumerate(by_host.values()):
        grid[index] = row[:width]
    return Mesh(grid, ("host", "device"))


@clear_with_attempt
@functools.cache
def _reduction(mesh: Mesh, operation: str) -> Callable[[jax.Array], jax.Array]:
    reduce = {"max": jax.lax.pmax, "sum": jax.lax.psum}[operation]
    body = functools.partial(reduce, axis_name="host")
    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=PartitionSpec("host", None), out_specs=PartitionSpec()
    )
    return jax.jit(mapped)


def _to_numpy(path: str, leaf: Any) -> Array:
    if _is_key(leaf):
        leaf = jax.random.key_data(leaf)
    array = np.asarray(leaf)
    if array.dtype.hasobject or array.dtype.kind in "SUMm":
        raise TypeError(
            f"{_BROADCAST}: leaf {path or 'at the root'} is {type(leaf).__name__}"
            f" {array.dtype}, expected an array of numbers"
        )
    return array


def _to_words(leaf: Array) -> Array:
    data = np.ascontiguousarray(leaf).reshape(-1).view(np.uint8)
    return np.pad(data, (0, -data.size % 4)).view(np.uint32)


def _like(leaf: Array, original: Any) -> Any:
    if _is_key(original):
        return jax.random.wrap_key_data(jax.numpy.asarray(leaf), impl=jax.random.key_impl(original))
    return leaf


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)
