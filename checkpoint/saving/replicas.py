"""Sums replicas on their devices at a save, to find those that have drifted apart.

The bits of every leaf are summed, as unsigned integers that wrap around: one flipped bit always
changes the sum, and NaN and -0.0 are bits like any. One program for each set of devices does it,
dispatched before `save` returns and read when the save reports: the caller waits for nothing. It
has no collective, so a process that does not take part holds up no other. Where devices are the
host's cores numpy sums the arrays where they lie, after `save` has returned: at several times the
speed of the compiled sum there, and nothing is to be compiled.

To look at a small array takes longer than to sum it, and a large one as long as to save it. So one
save in TURNS compares a small leaf, and the host sums that part of a large one's memory.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import socket
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias, cast

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
from ..agreement.save_protocol import SaveReport, Told
from ..arrays.dtypes import Dtype, HostArray
from ..arrays.jax_settings import outside_of_meshes, own_settings
from ..errors import ReplicasDiffer, error_text
from ..steps.claims import writer_of
from ..storage.threads import run_side_by_side
from .plan import Plan, ShardPlacement
from .snapshot import ArrayWaits

_log = logging.getLogger(__name__)
Devices: TypeAlias = tuple[Any, ...]
Slots: TypeAlias = tuple[int, ...]
# Waits for the sums of some leaves, or makes them: [devices, leaves] of uint32.
Sums: TypeAlias = Callable[[], HostArray]
MOST_LOCAL = 64  # shards that differ on one process, and are named
PROGRAMS = 8  # by devices
_spec: Any = PartitionSpec  # its call has no types
SUM_THREADS = 4
ANSWER_S = 20.0  # for all to answer: they have just reported, and wait
TURNS = 16  # in so many saves of a manager each leaf is compared, whole
LARGE_BYTES = 1 << 20  # of a shard
TOGETHER_BYTES = 64 << 10  # of shards that one sum is made of
# So few small leaves are compared at each save.
FEW_LEAVES = 32
FEW_BYTES = 4 << 20


def turn_of(save_id: str, counter: int) -> int:
    """Returns whose turn it is at a save, which is alike on all processes. Pure.

    A job that starts again and again does not compare the same leaves each time.
    """
    return (zlib.crc32(writer_of(save_id).encode()) + counter) % TURNS


@dataclass(frozen=True)
class ReplicatedLeaves:
    """The leaves of a tree that somebody has replicas of: alike on all ranks."""

    large: tuple[int, ...]
    small: tuple[int, ...]
    few: bool  # the small ones, so that each save compares them all

    @classmethod
    def of(cls, plan: Plan) -> ReplicatedLeaves:
        """Finds them. Pure."""
        large = []
        small = []
        small_bytes = 0
        for index, leaf in enumerate(plan.leaves):
            placement = leaf.placement
            if placement is None or leaf.per_process or not placement.has_replicas:
                continue
            nbytes = leaf.nbytes
            if nbytes >= LARGE_BYTES * len(placement.ranks):
                large.append(index)
            elif nbytes:
                small.append(index)
                small_bytes += nbytes
        few = len(small) <= FEW_LEAVES and small_bytes <= FEW_BYTES
        return cls(tuple(large), tuple(small), few)

    def at(self, turn: int | None) -> tuple[int, ...]:
        """Returns the leaves that a save compares, wholly or in part, in their order; all without a
        turn.
        """
        small = self.small if self.few or turn is None else self.small[turn::TURNS]
        return tuple(sorted((*self.large, *small)))


@dataclass(frozen=True)
class ReplicaPlan:
    """Which shards of a tree a process compares.

    `slots` are its addressable shards that are replicas of one. `sets` are the shards by the number
    of the set of processes that hold them, in an order that is alike on all.
    """

    slots: Mapping[SharedShard, Slots]
    sets: Mapping[int, tuple[SharedShard, ...]]

    @property
    def leaves(self) -> Iterable[int]:
        """The leaves that it compares, in their order."""
        return dict.fromkeys(shard.leaf for shard in self.slots)

    def digest(self, number: int, sums: Mapping[int, HostArray]) -> str:
        """Returns the digest of a set, as hex."""
        own = np.array(self.sums_of(number, sums), "<u4")
        return hashlib.blake2b(own.tobytes(), digest_size=8).hexdigest()

    def sums_of(self, number: int, sums: Mapping[int, HostArray]) -> tuple[int, ...]:
        """Returns the sums of a set's shards, each of its first replica here."""
        return tuple(
            int(sums[shard.leaf][self.slots[shard][0]]) for shard in self.sets.get(number, ())
        )


def plan_replicas(plan: Plan, rank: int, chosen: Iterable[int]) -> ReplicaPlan:
    """Returns what a rank compares of the leaves `chosen` of a plan's tree. Pure.

    The slots are known of the plan's own process alone.
    """
    numbers: dict[tuple[int, ...], int] = {}
    # A placement is one object for all leaves of one sharding and shape.
    of_rank = functools.cache(lambda placement: _replicas_of(placement, rank, numbers))
    slots = {}
    sets: dict[int, list[SharedShard]] = {}
    for index in chosen:
        for shard, number, of_shard in of_rank(plan.leaves[index].placement):
            shared = SharedShard(index, shard)
            slots[shared] = of_shard
            if number >= 0:
                sets.setdefault(number, []).append(shared)
    return ReplicaPlan(slots, {number: tuple(shards) for number, shards in sets.items()})


def _replicas_of(
    placement: ShardPlacement, rank: int, numbers: dict[tuple[int, ...], int]
) -> list[tuple[int, int, Slots]]:
    """Returns the shards that a rank compares: shard, set (-1: no other rank's), slots.

    All sets get their numbers, the rank's or not, so that all ranks number alike.
    """
    held = []
    holders, counts = placement.holders
    here = placement.ranks == rank
    for shard in np.flatnonzero((counts > 1) | (here.sum(axis=1) > 1)).tolist():
        members = tuple(holders[shard, : counts[shard]].tolist())
        number = numbers.setdefault(members, len(numbers)) if len(members) > 1 else -1
        of_shard = tuple(placement.slots[shard][here[shard]].tolist())
        if of_shard:
            held.append((shard, number, of_shard))
    return held


@dataclass(frozen=True)
class _Group:
    """Leaves on one set of devices, large ones or small ones, all keys or none."""

    devices: Devices
    large: bool
    keys: bool
    leaves: tuple[int, ...]

    def data(self, leaf: Any) -> jax.Array:
        """Returns the numbers of a leaf."""
        data: jax.Array = jax.random.key_data(leaf) if self.keys else leaf
        return data

    def parts(self, array: jax.Array) -> list[jax.Array]:
        """Returns the shards of this process, one for each of its devices."""
        if len(self.devices) == 1:
            return [array.addressable_data(0)]
        # Of a replicated array `addressable_data` returns the same one for each number. jax's own
        # list costs a third less than its `addressable_shards`, which are made of that.
        own: Any = getattr(array, "_arrays", None)
        if own is None:
            return [shard.data for shard in array.addressable_shards]
        return list(own)


class ReplicaSums:
    """The sums of one tree's replicas, as far as a turn compares them.

    `views` are the shards in the host's memory, by leaf: what is donated from now on is not written
    to. Sums of the devices are made once `dispatch` has been called.
    """

    def __init__(
        self, comparison: _Comparison, turn: int | None, leaves: Sequence[Any], waits: ArrayWaits
    ) -> None:
        self._plan, groups = comparison.at(turn, leaves)
        self._plan_of = partial(comparison.plan_of, turn)
        self.paths = comparison.paths
        self.views: dict[int, list[Any]] = {}
        self._sums: dict[int, HostArray] = {}
        self._devices = {leaf: group.devices for group in groups for leaf in group.leaves}
        self._viewed = {
            group: self._view(group, leaves, turn if group.large else None, waits)
            for group in groups
            if _is_host(group.devices)
        }
        self._later = [group for group in groups if group not in self._viewed]
        self._dispatched: dict[_Group, Sums] = {}

    def _view(
        self, group: _Group, leaves: Sequence[Any], turn: int | None, waits: ArrayWaits
    ) -> Sums:
        views: list[Any] = []
        for index in group.leaves:
            array: Any = group.data(leaves[index])
            if not array.is_ready():
                waits.wait(array)
            of_leaf = _views(group.parts(array))
            self.views[index] = of_leaf
            views += of_leaf

        def sums() -> HostArray:
            made = np.array(sums_of_words(list(map(np.asarray, views)), turn), np.uint32)
            return made.reshape(len(group.leaves), len(group.devices)).T

        return sums

    def dispatch(self, leaves: Sequence[Any], waits: ArrayWaits) -> bool:
        """Begins the sums that the devices make, and says whether they do.

        Blocks while a program is compiled. What a device cannot sum is no error of the save: it
        goes to the log.
        """
        try:
            for group in self._later:
                arrays = [group.data(leaves[index]) for index in group.leaves]
                with waits.dispatching(arrays):
                    self._dispatched[group] = _program_on(group, arrays)
        except Exception as error:
            _log.warning("replicas are not compared at this save: %s", error_text(error))
            return False
        return True

    def sum_on_host(self) -> None:
        """Makes the sums of arrays that lie in the host's memory, and lets go of them."""
        self._take(self._viewed)
        self.views.clear()

    @property
    def compares(self) -> bool:
        """Whether anything is compared."""
        return bool(self._plan.slots)

    def report(self) -> ReplicaReport:
        """Returns what this process reports. Blocks until the devices have summed."""
        self._take(self._dispatched)
        digests = {number: self._plan.digest(number, self._sums) for number in self._plan.sets}
        return ReplicaReport(digests, bool(self._differing_here()))

    def _take(self, made: dict[_Group, Sums]) -> None:
        for group, sums in made.items():
            table = sums()
            self._sums |= {leaf: table[:, column] for column, leaf in enumerate(group.leaves)}
        made.clear()

    def answer(self, sets: Sequence[int]) -> ReplicaAnswer:
        """Returns the sums of sets, after the report."""
        sums = {number: self._plan.sums_of(number, self._sums) for number in sets}
        here = tuple(
            LocalDifference(shard, self._by_device(shard)) for shard in self._differing_here()
        )
        return ReplicaAnswer(socket.gethostname(), sums, here)

    def shards_of(self, number: int, rank: int) -> tuple[SharedShard, ...]:
        """Returns the shards of a set that a rank is in."""
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
    """What this process compares at one turn, by the groups of its leaves."""

    own: ReplicaPlan
    groups: tuple[_Group, ...]


class _Comparison:
    """What is known of a plan's replicas, and of each turn that has come."""

    def __init__(
        self, plan: Plan, leaves: Sequence[Any], may_differ: Callable[[str], bool] | None
    ) -> None:
        self._plan = plan
        self._replicated = ReplicatedLeaves.of(plan)
        self._turns: dict[int | None, _Compared] = {}
        self._devices: dict[jax.sharding.Sharding, Devices] = {}
        self.paths = [leaf.path for leaf in plan.leaves]
        # Shardings are shared by many leaves, and slow to ask.
        is_elsewhere = functools.cache(_is_elsewhere)
        self._left_out = {
            index
            for index in self._replicated.at(None)
            if is_elsewhere(leaves[index].sharding)
            or (may_differ is not None and may_differ(self.paths[index]))
        }

    def at(self, turn: int | None, leaves: Sequence[Any]) -> _Compared:
        """Returns what a turn compares. `leaves` are any of this plan's."""
        if turn not in self._turns:
            own = self.plan_of(turn, self._plan.process)
            self._turns[turn] = _Compared(own, self._grouped(own, leaves))
        return self._turns[turn]

    def plan_of(self, turn: int | None, rank: int) -> ReplicaPlan:
        """Returns what a rank compares at a turn. Arithmetic, over the whole tree."""
        chosen = [index for index in self._replicated.at(turn) if index not in self._left_out]
        return plan_replicas(self._plan, rank, chosen)

    def _grouped(self, own: ReplicaPlan, leaves: Sequence[Any]) -> tuple[_Group, ...]:
        # Large leaves have a program of their own: it is the same at each turn.
        large = frozenset(self._replicated.large)
        grouped: dict[tuple[Devices, bool, bool], list[int]] = {}
        for index in own.leaves:
            is_key = self._plan.leaves[index].kind == "key"
            key = (self._devices_of(leaves[index]), index in large, is_key)
            grouped.setdefault(key, []).append(index)
        return tuple(_Group(*key, tuple(indices)) for key, indices in grouped.items())

    def _devices_of(self, array: jax.Array) -> Devices:
        """Returns the devices of this process's shards, in their order."""
        sharding = array.sharding
        if sharding not in self._devices:
            self._devices[sharding] = tuple(shard.device for shard in array.addressable_shards)
        return self._devices[sharding]


def view_replicas(
    plan: Plan,
    leaves: Sequence[Any],
    turn: int | None,
    may_differ: Callable[[str], bool] | None,
    waits: ArrayWaits,
) -> ReplicaSums | None:
    """Returns the sums that a turn makes, as of now where they are the host's; None for none.

    `leaves` are those of the tree, before a cast; without a `turn` all are summed.
    """
    comparison = plan.once("replicas", lambda: _Comparison(plan, leaves, may_differ))
    sums = ReplicaSums(comparison, turn, leaves, waits)
    return sums if sums.compares else None


def _is_elsewhere(sharding: jax.sharding.Sharding) -> bool:
    """Says whether arrays are in memory that is not their devices' own: programs do not read it."""
    kind = sharding.memory_kind
    device: Any = next(iter(sharding.device_set))
    return kind is not None and kind != device.default_memory().kind


def _is_host(devices: Devices) -> bool:
    return all(device.platform == "cpu" for device in devices)


def _views(parts: Sequence[jax.Array]) -> list[Any]:
    """Returns what numpy makes arrays of without a copy, and what keeps the memory as it is."""
    # A third of what numpy's own view costs: of 4,000 leaves that decides what `save` blocks for.
    if parts[0].dtype.isbuiltin == 1:
        with contextlib.suppress(BufferError):  # a layout of its own
            return [memoryview(part) for part in cast(Any, parts)]
    return [np.asarray(part) for part in parts]


def sum_of_words(array: HostArray, turn: int | None = None) -> int:
    """Returns the sum of an array's memory as words of 32 bits (of 8, where it is no whole number
    of them), modulo 2**32; with a turn, that part of them. Pure.
    """
    word = np.uint8 if array.nbytes % 4 else np.uint32
    words = np.ascontiguousarray(array).reshape(-1).view(word)
    if turn is not None:
        words = words[len(words) * turn // TURNS : len(words) * (turn + 1) // TURNS]
    return int(np.add.reduce(words, dtype=np.uint32))


def sums_of_words(views: Sequence[HostArray], turn: int | None = None) -> list[int]:
    """Returns the sum of each view, as `sum_of_words` does. Small ones are summed together."""
    sums: dict[int, int] = {}
    alone = []
    together: dict[Dtype, list[int]] = {}
    for place, view in enumerate(views):
        nbytes = view.nbytes
        if turn is None and 0 < nbytes <= TOGETHER_BYTES and not nbytes % 4:
            together.setdefault(view.dtype, []).append(place)
        else:
            alone.append(place)
    for places in together.values():
        made = _sums_at_once([views[place] for place in places])
        sums |= zip(places, made, strict=True)
    made = run_side_by_side(lambda place: sum_of_words(views[place], turn), alone, SUM_THREADS)
    sums |= zip(alone, made, strict=True)
    return [sums[place] for place in range(len(views))]


def _sums_at_once(views: Sequence[HostArray]) -> list[int]:
    """Returns the sums of views of one dtype and whole words."""
    words = np.concatenate(views, axis=None).view(np.uint32)
    ends = np.cumsum([view.nbytes // 4 for view in views])
    starts = np.concatenate([[0], ends[:-1]])
    sums: list[int] = np.add.reduceat(words, starts, dtype=np.uint32).tolist()
    return sums


def _program_on(group: _Group, arrays: Sequence[jax.Array]) -> Sums:
    """Returns what waits for the sums that it has dispatched."""
    with outside_of_meshes():
        summed = _program(group.devices)([_here(group, array) for array in arrays])

    def sums() -> HostArray:
        with own_settings():
            return np.asarray(summed)

    return sums


def _here(group: _Group, array: jax.Array) -> jax.Array:
    """Returns the shards of this process as one array, which says that it is replicated.

    So one program is compiled for all its devices, and each sums what it has.
    """
    parts = group.parts(array)
    if len(group.devices) == 1:
        return parts[0]
    sharding = NamedSharding(_mesh(group.devices), _spec())
    return jax.make_array_from_single_device_arrays(parts[0].shape, sharding, parts)


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
        question = ReplicaQuestion(item, sets)
        try:
            told = ask_all(group, name, Told(replicas_of=question), answer_for(replicas, question))
        except HoldfastError as lost:
            return ReplicasDiffer(
                f"step {step}, item {item!r}: replicas have drifted apart (which leaves they are"
                f" of could not be asked: {lost})",
                step=step,
            )
        shards = {number: own.shards_of(number, _a_holder(by_process, number)) for number in sets}
        difference = difference_of(item, step, own.paths, shards, _answers(told))
        if difference is not None:
            return difference
    return None


def _answers(told: Sequence[bytes]) -> dict[int, ReplicaAnswer]:
    """Returns what the processes that have sums of an item answer."""
    return {
        process: ReplicaAnswer.from_bytes(answer) for process, answer in enumerate(told) if answer
    }


def _a_holder(by_process: Mapping[int, ReplicaReport], number: int) -> int:
    return next(process for process, report in by_process.items() if number in report.digests)


def ask_all(group: Group, name: str, question: Told, own: bytes) -> list[bytes]:
    """Returns what all answer to a question before the result, by rank, and `own`. Blocks."""
    group.broadcast(f"{name}/outcome", question.to_bytes(), timeout_s=ANSWER_S)
    answers = group.gather(f"{name}/answers", own, timeout_s=ANSWER_S)
    assert answers is not None
    return answers


def answer_for(replicas: Mapping[str, ReplicaSums], question: ReplicaQuestion) -> bytes:
    """Returns what a process answers; nothing where it has no sums of that item."""
    sums = replicas.get(question.item)
    return b"" if sums is None else sums.answer(question.sets).to_bytes()
