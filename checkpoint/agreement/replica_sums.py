"""What processes tell each other of their replicas, and which of them differ. Pure.

A shard that several processes hold is summed by each of them. Shards that are held by the same
processes make one set, with one digest: that travels in the report of the save. Only where the
digests of a set differ, the primary asks its members for the sums of all its shards. Replicas on
the devices of one process are compared there.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..errors import ReplicasDiffer
from .messages import Message

NAMED_LEAVES = 5
NAMED_REPLICAS = 8


class SharedShard(NamedTuple):
    """A shard of which there are several replicas: its leaf, and its number in the leaf."""

    leaf: int
    shard: int


class DeviceSum(NamedTuple):
    """The sum of a replica on one device of a process."""

    device: str
    value: int


@dataclass(frozen=True)
class LocalDifference:
    """A shard whose replicas on the devices of one process differ."""

    shard: SharedShard
    sums: tuple[DeviceSum, ...]


@dataclass(frozen=True)
class ReplicaReport:
    """What one process reports of the replicas of one item.

    `digests` is by the number of the set. `differs_here`: replicas on its own devices differ.
    """

    digests: Mapping[int, str] = field(default_factory=dict)
    differs_here: bool = False


@dataclass(frozen=True)
class ReplicaQuestion:
    """Asks all processes for the sums of some sets of an item."""

    item: str
    sets: tuple[int, ...]


@dataclass(frozen=True)
class ReplicaAnswer(Message):
    """The sums of one process: by set, in the order of its shards, and what differs there."""

    host: str
    sums: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    here: tuple[LocalDifference, ...] = ()


def differing_sets(reports: Sequence[ReplicaReport]) -> tuple[int, ...]:
    """Returns the numbers of the sets whose digests differ. A process without one is not asked."""
    digests: dict[int, set[str]] = collections.defaultdict(set)
    for report in reports:
        for number, digest in report.digests.items():
            digests[number].add(digest)
    return tuple(sorted(number for number, found in digests.items() if len(found) > 1))


class _Replica(NamedTuple):
    process: int
    device: str  # "": all of the process are alike

    def text(self, hosts: Mapping[int, str]) -> str:
        device = f", {self.device}" if self.device else ""
        return f"process {self.process} (host {hosts[self.process]}{device})"


def difference_of(
    item: str,
    step: int,
    paths: Sequence[str],
    sets: Mapping[int, Sequence[SharedShard]],
    answers: Mapping[int, ReplicaAnswer],
) -> ReplicasDiffer | None:
    """Returns the error that names leaves, processes and hosts; None where no sums differ.

    `paths` are those of all leaves, `sets` the shards by set, `answers` are by process. The
    replicas that fewer agree on are the ones that differ; of two all are named.
    """
    by_shard = _differing(sets, answers)
    if not by_shard:
        return None
    hosts = {process: answer.host for process, answer in answers.items()}
    sentences: dict[str, str] = {}
    for shard in sorted(by_shard):
        sentences.setdefault(paths[shard.leaf], _sentence(by_shard[shard], hosts))
    named = [f"{path!r}: {sentence}" for path, sentence in list(sentences.items())[:NAMED_LEAVES]]
    more = len(sentences) - len(named)
    message = (
        f"step {step}, item {item!r}: replicas of {len(sentences)} leaves have drifted apart:"
        f" {'; '.join(named)}{f'; and {more} more' if more else ''}. Expected equal bytes. Look at"
        " the memory of the device that is named, and at code that gives processes other values;"
        " what differs on purpose goes into Options(may_differ=...)"
    )
    first = min(by_shard)
    process = _odd_ones(by_shard[first])[0].process
    return ReplicasDiffer(message, step=step, leaf=paths[first.leaf], process=process)


def _differing(
    sets: Mapping[int, Sequence[SharedShard]], answers: Mapping[int, ReplicaAnswer]
) -> dict[SharedShard, dict[_Replica, int]]:
    """Returns the sums of the replicas of each shard whose sums differ."""
    by_shard: dict[SharedShard, dict[_Replica, int]] = {}
    for number, shards in sets.items():
        # Another number of sums is of a process that leaves other leaves out: nothing is compared.
        sums = {
            _Replica(process, ""): found
            for process, answer in answers.items()
            if len(found := answer.sums.get(number, ())) == len(shards)
        }
        for shard, *values in zip(shards, *sums.values(), strict=True):
            if len(set(values)) > 1:
                by_shard[shard] = dict(zip(sums, values, strict=True))
    for process, answer in answers.items():
        for each in answer.here:
            replicas = by_shard.setdefault(each.shard, {})
            # The sum of the process is that of its first device, which is named here.
            replicas.pop(_Replica(process, ""), None)
            replicas |= {_Replica(process, one.device): one.value for one in each.sums}
    return by_shard


def _odd_ones(replicas: Mapping[_Replica, int]) -> list[_Replica]:
    """Returns the replicas that do not have what most have, or all where that is not known."""
    counted = collections.Counter(replicas.values()).most_common(2)
    if len(counted) > 1 and counted[0][1] == counted[1][1]:
        return sorted(replicas)
    return sorted(one for one, value in replicas.items() if value != counted[0][0])


def _sentence(replicas: Mapping[_Replica, int], hosts: Mapping[int, str]) -> str:
    odd = _odd_ones(replicas)
    named = ", ".join(one.text(hosts) for one in odd[:NAMED_REPLICAS])
    if len(odd) > NAMED_REPLICAS:
        named += f" and {len(odd) - NAMED_REPLICAS} more"
    others = len(replicas) - len(odd)
    if not others:
        return f"{named} differ from each other"
    return f"{named} differ{'s' if len(odd) == 1 else ''} from {others} others that agree"
