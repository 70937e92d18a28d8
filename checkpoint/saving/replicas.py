"""Sums replicas on their devices at a save, to find those that have drifted apart.

The bits of every leaf are summed, as unsigned integers that wrap around: one flipped bit always
changes the sum, and NaN and -0.0 are bits like any. One program for each set of devices does it,
dispatched before `save` returns and read when the save reports: the caller waits for nothing. It
has no collective, so a process that does not take part holds up no other. Where devices are the
host's cores numpy sums the arrays where they lie, after `save` has returned: at several times the
speed of the compiled sum there, and nothing is to be compiled.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from holdfast.coordination import HoldfastError
from holdfast.multihost import Group
from holdfast.multihost.group.group import clear_with_attempt

from ..agreement.replica_sums import (
    DeviceSum,
    LocalDifference,
    ReplicaAnswer,
    ReplicaQuestion,
    ReplicaReport,
    SharedShard,
    difference_of,
    differing_sets,
)
from ..agreement.save_protocol import SaveReport
from ..arrays.jax_settings import outside_of_meshes, own_settings
from ..errors import ReplicasDiffer, error_text
from ..format.tree import is_key
from ..storage.threads import run_side_by_side
from .plan import Plan, ShardPlacement
from .snapshot import ArrayWaits

_log = logging.getLogger(__name__)
Devices: TypeAlias = tuple[Any, ...]
MOST_LOCAL = 64  # shards that differ on one process, and are named
PROGRAMS = 8  # by devices
_spec: Any = PartitionSpec  # its call has no types
SUM_THREADS = 4
ANSWER_S = 20.0  # for all to answer: they have just reported, and wait


@dataclass(frozen=True)
class ReplicaPlan:
    """Which shards of a tree a process compares.

    `slots` are its addressable shards that are replicas of one. `sets` are the shards by the number
    of the set of processes that hold them, in an order that is alike on all.
    """

    leaves: tuple[int, ...]
    slots: Mapping[SharedShard, tuple[int, ...]]
    sets: Mapping[int, tuple[SharedShard, ...]]

    def digest(self, number: int, sums: Mapping[int, np.ndarray[Any, Any]]) -> str:
        """Returns the digest of a set, as hex."""
        own = np.array(self.sums_of(number, sums), "<u4")
        return hashlib.blake2b(own.tobytes(), digest_size=8).hexdigest()

    def sums_of(self, number: int, sums: Mapping[int, np.ndarray[Any, Any]]) -> tuple[int, ...]:
        """Returns the sums of a set's shards, each of its first replica here."""
        return tuple(
            int(sums[shard.leaf][self.slots[shard][0]]) for shard in self.sets.get(number, ())
        )


def plan_replicas(plan: Plan, rank: int, left_out: Collection[int] = ()) -> ReplicaPlan:
    """Returns what a rank compares of a plan's tree, without the leaves `left_out`. Pure.

    The slots are known of the plan's own process alone.
    """
    numbers: dict[tuple[int, ...], int] = {}
    known: dict[int, list[tuple[int, int, tuple[int, ...]]]] = {}
    leaves: list[int] = []
    slots: dict[SharedShard, tuple[int, ...]] = {}
    sets: dict[int, list[SharedShard]] = {}
    for index, leaf in enumerate(plan.leaves):
        placement = leaf.placement
        if placement is None or leaf.per_process or not leaf.nbytes:
            continue
        # One object for all leaves of one sharding and shape.
        if id(placement) not in known:
            known[id(placement)] = _replicas_of(placement, rank, numbers)
        of_rank = known[id(placement)]
        if not of_rank or index in left_out:
            continue
        leaves.append(index)
        for shard, number, of_shard in of_rank:
            shared = SharedShard(index, shard)
            slots[shared] = of_shard
            if number >= 0:
                sets.setdefault(number, []).append(shared)
    return ReplicaPlan(
        tuple(leaves), slots, {number: tuple(shards) for number, shards in sets.items()}
    )


def _replicas_of(
    placement: ShardPlacement, rank: int, numbers: dict[tuple[int, ...], int]
) -> list[tuple[int, int, tuple[int, ...]]]:
    """Returns the shards that a rank compares: shard, set (-1: no other rank's), slots.

    All sets get their numbers, the rank's or not, so that all ranks number alike.
    """
    held = []
    holders, counts = placement.holders
    here = placement.ranks == rank
    for shard in np.flatnonzero((counts > 1) | (here.sum(axis=1) > 1)).tolist():
        number = -1
        if counts[shard] > 1:
            members = tuple(holders[shard, : counts[shard]].tolist())
            number = numbers.setdefault(members, len(numbers))
        of_shard = tuple(placement.slots[shard][here[shard]].tolist())
        if of_shard:
            held.append((shard, number, of_shard))
    return held


class _Made(NamedTuple):
    """The sums of the leaves on one set of devices. `sums` waits for them, or makes them, and
    returns [devices, leaves] of uint32.
    """

    leaves: Sequence[int]
    devices: Devices
    sums: Callable[[], np.ndarray[Any, Any]]


class ReplicaSums:
    """The sums of one tree's replicas. Those that its devices make have begun."""

    def __init__(
        self,
        plan: ReplicaPlan,
        made: Sequence[_Made],
        *,
        paths: Sequence[str],
        plan_of: Callable[[int], ReplicaPlan],
    ) -> None:
        self.paths = paths
        self._plan = plan
        self._plan_of = plan_of
        self._made = made
        self._sums: dict[int, np.ndarray[Any, Any]] = {}
        self._devices = {leaf: one.devices for one in made for leaf in one.leaves}

    def sum_on_host(self) -> None:
        """Makes the sums of arrays that lie in the host's memory, and lets go of them."""
        self._take([one for one in self._made if _is_host(one.devices)])
        self._made = [one for one in self._made if not _is_host(one.devices)]

    def report(self) -> ReplicaReport:
        """Returns what this process reports. Blocks until the devices have summed."""
        self._take(self._made)
        self._made = ()
        digests = {number: self._plan.digest(number, self._sums) for number in self._plan.sets}
        return ReplicaReport(digests, bool(self._differing_here()))

    def _take(self, made: Sequence[_Made]) -> None:
        for one in made:
            table = one.sums()
            self._sums |= {leaf: table[:, column] for column, leaf in enumerate(one.leaves)}

    def answer(self, sets: Sequence[int]) -> ReplicaAnswer:
        """Returns the sums of sets, after the report."""
        sums = {number: self._plan.sums_of(number, self._sums) for number in sets}
        here = tuple(
            LocalDifference(shard, self._by_device(shard)) for shard in self._differing_here()
        )
        return ReplicaAnswer(socket.gethostname(), sums, here)

    def shards_of(self, number: int, rank: int) -> tuple[SharedShard, ...]:
        """Returns the shards of a set that a rank is in. Arithmetic, over the whole tree."""
        return self._plan_of(rank).sets.get(number, ())

    def _differing_here(self) -> list[SharedShard]:
        differing = [
            shard
            for shard, slots in self._plan.slots.items()
            if len(slots) > 1 and len(set(self._sums[shard.leaf][list(slots)].tolist())) > 1
        ]
        return differing[:MOST_LOCAL]

    def _by_device(self, shard: SharedShard) -> tuple[DeviceSum, ...]:
        return tuple(
            DeviceSum(str(self._devices[shard.leaf][slot]), int(self._sums[shard.leaf][slot]))
            for slot in self._plan.slots[shard]
        )


class _Compared(NamedTuple):
    """What is known of a plan's replicas: this process's, any rank's, and the leaves by devices."""

    own: ReplicaPlan
    of_rank: Callable[[int], ReplicaPlan]
    by_devices: Mapping[Devices, tuple[int, ...]]


def sum_replicas(
    plan: Plan,
    leaves: Sequence[Any],
    may_differ: Callable[[str], bool] | None,
    waits: ArrayWaits,
) -> ReplicaSums | None:
    """Starts summing the replicas of a tree, and returns; None where nothing is compared.

    `leaves` are those of the tree, before a cast. Blocks while a program is compiled, at the first
    save of such leaves on devices that are not the host's cores. What a device cannot sum is no
    error of the save: it goes to the log.
    """
    if "replicas" not in plan.cache:
        plan.cache["replicas"] = _compared(plan, leaves, may_differ)
    compared: _Compared = plan.cache["replicas"]
    if not compared.own.leaves:
        return None
    try:
        made = _dispatch(compared.by_devices, leaves, waits)
    except Exception as error:
        _log.warning("replicas are not compared at this save: %s", error_text(error))
        return None
    paths = [leaf.path for leaf in plan.leaves]
    return ReplicaSums(compared.own, made, paths=paths, plan_of=compared.of_rank)


def _compared(
    plan: Plan, leaves: Sequence[Any], may_differ: Callable[[str], bool] | None
) -> _Compared:
    left_out = {
        index
        for index, leaf in enumerate(plan.leaves)
        if leaf.placement is not None
        and not leaf.per_process
        and (_is_elsewhere(leaves[index]) or (may_differ is not None and may_differ(leaf.path)))
    }

    def of_rank(rank: int) -> ReplicaPlan:
        return plan_replicas(plan, rank, left_out)

    own = of_rank(plan.process)
    by_devices: dict[Devices, list[int]] = {}
    for index in own.leaves:
        devices = tuple(shard.device for shard in leaves[index].addressable_shards)
        by_devices.setdefault(devices, []).append(index)
    return _Compared(
        own, of_rank, {devices: tuple(indices) for devices, indices in by_devices.items()}
    )


def _is_elsewhere(array: jax.Array) -> bool:
    """Says whether an array is in memory that is not its devices' own: programs do not read it."""
    kind = array.sharding.memory_kind
    device: Any = next(iter(array.sharding.device_set))
    return kind is not None and kind != device.default_memory().kind


def _dispatch(
    by_devices: Mapping[Devices, tuple[int, ...]], leaves: Sequence[Any], waits: ArrayWaits
) -> list[_Made]:
    made = []
    for devices, indices in by_devices.items():
        arrays = [_data(leaves[index]) for index in indices]
        if _is_host(devices):
            sums = _summing_views(devices, arrays, waits)
        else:
            with waits.dispatching(arrays):
                sums = _program_on(devices, arrays)
        made.append(_Made(indices, devices, sums))
    return made


def _is_host(devices: Devices) -> bool:
    return all(device.platform == "cpu" for device in devices)


def _summing_views(
    devices: Devices, arrays: Sequence[jax.Array], waits: ArrayWaits
) -> Callable[[], np.ndarray[Any, Any]]:
    """Returns what sums arrays where they lie. What is donated meanwhile is not written to."""
    views = []
    for part in (part for array in arrays for part in _parts(array, devices)):
        waits.wait(part)
        views.append(np.asarray(part))

    def sums() -> np.ndarray[Any, Any]:
        made = run_side_by_side(sum_of_words, views, SUM_THREADS)
        return np.array(made, np.uint32).reshape(len(arrays), len(devices)).T

    return sums


def sum_of_words(array: np.ndarray[Any, Any]) -> int:
    """Returns the sum of an array's memory as words of 32 bits (of 8, where it is no whole number
    of them), modulo 2**32. Pure.
    """
    word = np.uint8 if array.nbytes % 4 else np.uint32
    words = np.ascontiguousarray(array).reshape(-1).view(word)
    return int(np.add.reduce(words, dtype=np.uint32))


def _program_on(
    devices: Devices, arrays: Sequence[jax.Array]
) -> Callable[[], np.ndarray[Any, Any]]:
    """Returns what waits for the sums that it has dispatched."""
    with outside_of_meshes():
        summed = _program(devices)([_here(array, devices) for array in arrays])

    def sums() -> np.ndarray[Any, Any]:
        with own_settings():
            return np.asarray(summed)

    return sums


def _data(leaf: Any) -> jax.Array:
    data: jax.Array = jax.random.key_data(leaf) if is_key(leaf) else leaf
    return data


def _here(array: jax.Array, devices: Devices) -> jax.Array:
    """Returns the shards of this process as one array, which says that it is replicated.

    So one program is compiled for all its devices, and each sums what it has.
    """
    parts = _parts(array, devices)
    if len(devices) == 1:
        return parts[0]
    sharding = NamedSharding(_mesh(devices), _spec())
    return jax.make_array_from_single_device_arrays(parts[0].shape, sharding, parts)


def _parts(array: jax.Array, devices: Devices) -> list[jax.Array]:
    """Returns the shards of this process, one for each of its devices."""
    if len(devices) == 1:
        return [array.addressable_data(0)]
    # Of a replicated array `addressable_data` returns the same one for each number.
    return [shard.data for shard in array.addressable_shards]


@clear_with_attempt
@functools.lru_cache(PROGRAMS)
def _mesh(devices: Devices) -> Mesh:
    return Mesh(np.array(devices), ("device",))


@clear_with_attempt
@functools.lru_cache(PROGRAMS)
def _program(devices: Devices) -> Callable[[Sequence[jax.Array]], jax.Array]:
    """Returns what sums arrays on each device: [devices, arrays] of uint32."""

    def sums(arrays: Sequence[jax.Array]) -> jax.Array:
        return jnp.stack([_bit_sum(array) for array in arrays])[None]

    if len(devices) == 1:
        return jax.jit(sums)
    summed = jax.shard_map(
        sums,
        mesh=_mesh(devices),
        in_specs=_spec(),
        out_specs=_spec("device"),
        check_vma=False,  # what is called replicated may differ: that is the question
    )
    return jax.jit(summed)


def _bit_sum(array: jax.Array) -> jax.Array:
    """Returns the sum of the bits of all elements, as unsigned integers, modulo 2**32."""
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        return _bit_sum(array.real) + _bit_sum(array.imag)
    if array.dtype == jnp.bool_:
        return jnp.sum(array, dtype=jnp.uint32)
    bits = jax.lax.bitcast_convert_type(array, _unsigned(array.dtype))
    return jnp.sum(bits.astype(jnp.uint32), dtype=jnp.uint32)


def _unsigned(dtype: Any) -> Any:
    kind = jnp.iinfo if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo
    # Of 64 bits each element becomes two of 32.
    return jnp.dtype(f"uint{min(kind(dtype).bits, 32)}")


# --- what the primary asks where reports differ


def find_drift(
    group: Group,
    name: str,
    replicas: Mapping[str, ReplicaSums],
    reports: Sequence[SaveReport],
) -> ReplicasDiffer | None:
    """Returns, at the primary, which replicas differ: of the first item that has such, or None.

    Asks all processes for their sums only where the reports differ.
    """
    for item, own in replicas.items():
        by_process = {
            report.process: report.replicas[item] for report in reports if item in report.replicas
        }
        sets = differing_sets(list(by_process.values()))
        if not sets and not any(report.differs_here for report in by_process.values()):
            continue
        step = reports[0].key.step
        try:
            answers = _ask(group, name, replicas, ReplicaQuestion(item, sets))
        except HoldfastError as lost:
            message = (
                f"step {step}, item {item!r}: replicas have drifted apart (which leaves they are"
                f" of could not be asked: {lost})"
            )
            return ReplicasDiffer(message, step=step)
        shards = {number: own.shards_of(number, _a_holder(by_process, number)) for number in sets}
        difference = difference_of(item, step, own.paths, shards, answers)
        if difference is not None:
            return difference
    return None


def _a_holder(by_process: Mapping[int, ReplicaReport], number: int) -> int:
    return next(process for process, report in by_process.items() if number in report.digests)


def _ask(
    group: Group, name: str, replicas: Mapping[str, ReplicaSums], question: ReplicaQuestion
) -> dict[int, ReplicaAnswer]:
    group.broadcast(f"{name}/outcome", question.to_bytes(), timeout_s=ANSWER_S)
    answers = group.gather(f"{name}/replicas", answer_for(replicas, question), timeout_s=ANSWER_S)
    assert answers is not None
    return {
        process: ReplicaAnswer.from_bytes(answer)
        for process, answer in enumerate(answers)
        if answer
    }


def answer_for(replicas: Mapping[str, ReplicaSums], question: ReplicaQuestion) -> bytes:
    """Returns what a process answers; nothing where it has no sums of that item."""
    sums = replicas.get(question.item)
    return b"" if sums is None else sums.answer(question.sets).to_bytes()
