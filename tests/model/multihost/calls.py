"""The calls of the public face: how a process makes each, and what it may be told."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import holdfast.multihost as multihost
from holdfast.coordination import (
    BarrierTimeout,
    CoordinationClient,
    CoordinationError,
    CoordinatorLost,
)
from holdfast.multihost import ClusterGroup, Notice
from holdfast.multihost.group.group_client import group_client_of

from .process import here
from .rules import (
    Case,
    alike,
    ends_well,
    fails,
    in_time,
    meets_or_fails,
    nobody_is_lost,
    typed,
)

TIME_S = (
    8.0  # of a call that all make: longer than a heartbeat timeout, after which a death is known
)
BRIEF_S = 0.4  # of a call that somebody does not make
RPC_S = 10.0  # of a call without a time of its own


@dataclass(frozen=True)
class Call:
    """One call of all processes, or of `only`; `absent` are those that leave it out."""

    only: tuple[int, ...] | None = None
    absent: tuple[int, ...] = ()

    calls: ClassVar[int] = 1  # bounded ones, that each process makes

    @property
    def timeout_s(self) -> float:
        """The time that each of its calls gets."""
        return BRIEF_S if self.absent else TIME_S

    @property
    def calls_s(self) -> float:
        """The time of all its calls."""
        return self.calls * self.timeout_s

    def members(self, count: int) -> tuple[int, ...]:
        """Returns who is to make it."""
        return tuple(range(count)) if self.only is None else self.only

    def run(self, client: CoordinationClient, number: int) -> Any:
        """Makes the call, the `number`th of the life, in the process of this thread."""
        raise NotImplementedError

    def skip(self, client: CoordinationClient, number: int) -> None:
        """Does what a process does that leaves the call out."""

    def judge(self, case: Case, number: int) -> Iterator[str]:
        """Yields what breaks a rule."""
        yield from in_time(case)
        yield from nobody_is_lost(case)
        yield from self.rules(case, number)

    def rules(self, case: Case, number: int) -> Iterator[str]:
        """Yields what breaks a rule of this kind of call."""
        yield from typed(case)
        yield from meets_or_fails(case)

    def group(self, client: CoordinationClient) -> ClusterGroup:
        """Returns the group that makes the call."""
        process = here()
        if self.only is None:
            return ClusterGroup(client, process.index, process.count)
        rank = self.only.index(process.index)
        return ClusterGroup(client, rank, len(self.only), processes=self.only)

    def named(self, name: str, number: int) -> str:
        """Returns a name: one of its own where somebody is absent, who does not count the call."""
        return f"{name}.{number}" if self.absent else name


@dataclass(frozen=True)
class Sync(Call):
    """`sync_global_processes`."""

    name: str = "a"

    def run(self, client: CoordinationClient, number: int) -> Any:
        name = self.named(self.name, number)
        multihost.sync_global_processes(name, timeout=self.timeout_s, processes=self.only)


@dataclass(frozen=True)
class Barrier(Call):
    """A group's barrier."""

    name: str = "a"

    def run(self, client: CoordinationClient, number: int) -> Any:
        name = self.named(self.name, number)
        self.group(client).barrier(name, timeout_s=self.timeout_s)


@dataclass(frozen=True)
class Gather(Call):
    """A group's gather."""

    name: str = "a"

    def run(self, client: CoordinationClient, number: int) -> Any:
        value = f"{number} of {here().index}".encode()
        name = self.named(self.name, number)
        return self.group(client).gather(name, value, timeout_s=self.timeout_s)

    def rules(self, case: Case, number: int) -> Iterator[str]:
        yield from typed(case)
        yield from meets_or_fails(case)
        whole = [f"{number} of {process}".encode() for process in case.members]
        for process, value in case.values().items():
            expected = whole if process == case.members[0] else None
            if value != expected:
                yield f"process {process} gathered {value}, expected {expected}"


@dataclass(frozen=True)
class Broadcast(Call):
    """A group's broadcast."""

    name: str = "a"

    def run(self, client: CoordinationClient, number: int) -> Any:
        group = self.group(client)
        value = None if group.index else f"value {number}".encode()
        return group.broadcast(self.named(self.name, number), value, timeout_s=self.timeout_s)

    def rules(self, case: Case, number: int) -> Iterator[str]:
        yield from typed(case)
        source = case.members[0]
        if source in case.lacking:
            yield from fails(case)
        elif source not in case.dying and case.meets:
            yield from ends_well(case)
        for process, value in case.values().items():
            if value != f"value {number}".encode():
                yield f"process {process} got {value!r} of call {number}"


@dataclass(frozen=True)
class Live(Call):
    """`live_processes`. It has no name: who leaves it out would come to it with the next one. So
    they meet after it.
    """

    @property
    def calls_s(self) -> float:
        return self.timeout_s + TIME_S if self.absent else self.timeout_s

    def run(self, client: CoordinationClient, number: int) -> Any:
        try:
            return multihost.live_processes(self.only, timeout_s=self.timeout_s)
        finally:
            self.skip(client, number)

    def skip(self, client: CoordinationClient, number: int) -> None:
        if self.absent:
            self.group(client).barrier(f"after {number}", timeout_s=TIME_S)

    def rules(self, case: Case, number: int) -> Iterator[str]:
        yield from typed(case)
        yield from alike(case)
        if case.absent:
            yield from fails(case)
        elif case.meets:
            yield from ends_well(case)
        living = set(case.members) - case.gone
        for process, value in case.values().items():
            if set(value) != living:
                yield f"process {process} was told that {sorted(value)} live; {living} do"


@dataclass(frozen=True)
class Block(Call):
    """A block of `live_devices`, which raises in one process, or in none."""

    raising: int | None = None

    calls = 2

    def run(self, client: CoordinationClient, number: int) -> Any:
        process = here()
        devices = [SimpleNamespace(process_index=each, id=each) for each in range(process.count)]
        mine = [each for each in devices if each.id in self.members(process.count)]
        with multihost.live_devices(mine, timeout_s=self.timeout_s) as living:  # type: ignore[arg-type]
            if self.raising == process.index:
                raise BlockFailed(f"block {number}")
        return [each.id for each in living]

    def rules(self, case: Case, number: int) -> Iterator[str]:
        yield from typed(case, CoordinationError, BlockFailed)
        yield from alike(case)
        raises = self.raising in set(case.members) - case.lacking
        if raises or case.absent:
            for process, value in case.values().items():
                yield f"the block failed elsewhere, and ended well in process {process}: {value}"
        elif case.meets:
            yield from ends_well(case)
        for process, error in case.errors():
            if (
                raises
                and case.meets
                and process != self.raising
                and "BlockFailed" not in str(error)
            ):
                yield f"process {process} was not told how the block failed: {error}"


class BlockFailed(Exception):
    """What a block raises."""


@dataclass(frozen=True)
class Increment(Call):
    """`key_value_increment`. Its answers are compared over the whole life."""

    key: str = "count"

    def run(self, client: CoordinationClient, number: int) -> Any:
        return client.key_value_increment(self.key, 1)

    def rules(self, case: Case, number: int) -> Iterator[str]:
        yield from ends_well(case, but=CoordinatorLost)


@dataclass(frozen=True)
class Race(Call):
    """All set one key, which nobody may overwrite, and read what is there."""

    calls = 3

    def run(self, client: CoordinationClient, number: int) -> Any:
        key = f"race/{number}"
        mine = f"of process {here().index}"
        won = True
        try:
            client.key_value_set(key, mine)
        except CoordinationError as error:
            if error.code != "ALREADY_EXISTS":
                raise
            won = False
        found = client.blocking_key_value_get(key, int(self.timeout_s * 1000))
        assert won == (found == mine), f"process {here().index}: won {won}, found {found!r}"
        return found

    def rules(self, case: Case, number: int) -> Iterator[str]:
        yield from ends_well(case)
        yield from alike(case)


@dataclass(frozen=True)
class Shelf(Call):
    """Each sets a key below one folder, all list it, one deletes it, and all look again."""

    calls = 8

    def run(self, client: CoordinationClient, number: int) -> Any:
        process = here()
        folder = f"shelf/{number}"
        group = self.group(client)
        client.key_value_set(f"{folder}/{process.index}", "old")
        client.key_value_set(f"{folder}/{process.index}", "new", allow_overwrite=True)
        group.barrier(f"{folder} is full", timeout_s=self.timeout_s)
        full = client.key_value_dir_get(folder)
        group.barrier(f"{folder} is read", timeout_s=self.timeout_s)
        if not group.index:
            client.key_value_delete(folder)
        group.barrier(f"{folder} is empty", timeout_s=self.timeout_s)
        return full, client.key_value_dir_get(folder)

    def rules(self, case: Case, number: int) -> Iterator[str]:
        if case.lacking:
            yield from typed(case)
            yield from fails(case)
            return
        yield from ends_well(case)
        full = [(f"shelf/{number}/{process}", "new") for process in case.members]
        for process, value in case.values().items():
            if value != (full, []):
                yield f"process {process} listed {value}, expected {full}, and nothing at the end"


@dataclass(frozen=True)
class Ask(Call):
    """`reached_preemption` at some steps. Its answers are compared over the whole life."""

    stride: int = 1

    calls = 2

    def run(self, client: CoordinationClient, number: int) -> Any:
        steps = range(10 * number, 10 * number + 10, self.stride)
        return [(step, multihost.reached_preemption(step)) for step in steps]

    def rules(self, case: Case, number: int) -> Iterator[str]:
        yield from ends_well(case)


@dataclass(frozen=True)
class Notify(Call):
    """`notify_preemption` in one process, or in all; a withdrawal, where it is one."""

    withdrawal: bool = False

    def run(self, client: CoordinationClient, number: int) -> Any:
        multihost.notify_preemption(None if self.withdrawal else Notice(f"notice {number}"))

    def rules(self, case: Case, number: int) -> Iterator[str]:
        yield from ends_well(case)


@dataclass(frozen=True)
class Notices(Call):
    """`preempted_processes` and `preemption_notice`."""

    calls = 2

    def run(self, client: CoordinationClient, number: int) -> Any:
        return multihost.preempted_processes(), multihost.preemption_notice()

    def rules(self, case: Case, number: int) -> Iterator[str]:
        yield from ends_well(case)


@dataclass(frozen=True)
class Agree(Call):
    """`agree_on_step`: one proposes, and all ask step after step until it holds."""

    proposer: int = 0

    calls = 2

    def run(self, client: CoordinationClient, number: int) -> Any:
        process = here()
        sync = multihost.agree_on_step(self.group(client), f"agree {number}")
        end_s = time.monotonic() + self.timeout_s
        step = 0
        try:
            while not sync.reached(step):
                if time.monotonic() > end_s:
                    raise BarrierTimeout(f"no step until {step}", missing=(self.proposer,))
                if step == 3 and process.index == self.proposer:
                    sync.propose("now")
                step += 1
                time.sleep(0.005)
            return step
        finally:
            sync.leave()

    def rules(self, case: Case, number: int) -> Iterator[str]:
        yield from typed(case)
        yield from alike(case)
        if self.proposer in case.gone:
            yield from fails(case)
        elif case.meets and self.proposer not in case.dying:
            yield from ends_well(case)


@dataclass(frozen=True)
class Cancel(Call):
    """`cancel_barrier` by one, of a barrier that the others wait at, or come to later."""

    canceller: int = 0

    def run(self, client: CoordinationClient, number: int) -> Any:
        name = f"cancelled {number}"
        # Alone the client names tasks.
        with group_client_of(client).errors(name):
            if here().index == self.canceller:
                client.cancel_barrier(name)
            else:
                client.wait_at_barrier(name, int(self.timeout_s * 1000))

    def rules(self, case: Case, number: int) -> Iterator[str]:
        # Who is lost fails it first, or takes the canceller along.
        if case.lacking:
            yield from typed(case, CoordinationError)
            return
        for process, told in case.told.items():
            code = getattr(told.error, "code", None)
            expected = None if process == self.canceller else "CANCELLED"
            if code != expected:
                yield f"process {process} was told {told}, expected {expected}"


@dataclass(frozen=True)
class Report(Call):
    """`report` of a step: the coordinator has to know the last one at the end of the life."""

    def run(self, client: CoordinationClient, number: int) -> Any:
        client.report(step=number)
        return number

    def rules(self, case: Case, number: int) -> Iterator[str]:
        yield from ends_well(case)


@dataclass(frozen=True)
class Look(Call):
    """`process_info` and `health`: nobody who lives is lost."""

    def run(self, client: CoordinationClient, number: int) -> Any:
        states = {info.process_id: info.state for info in client.process_info()}
        return states, sorted(multihost.health().failed())

    def rules(self, case: Case, number: int) -> Iterator[str]:
        yield from ends_well(case)
        for process, (_, failed) in case.values().items():
            living = set(failed) - case.gone - case.dying
            if living:
                yield f"process {process} refuses work with {sorted(living)}, who live"


@dataclass(frozen=True)
class Die(Call):
    """A process ends: its connection is closed, its launcher reports that too, or it reports an
    error of its own.
    """

    how: str = "closed"


@dataclass(frozen=True)
class Return(Call):
    """A process that has died is started again, and joins. The others wait for that, as they would
    in a launcher's hands.
    """


WAYS = ("closed", "reported", "error")
