"""Local saves in the simulated world, beside the durable ones: a lane of its own on each process.

Each process has a folder with its own parts of local saves. A save's part needs that of the next
process too, as a copy does. Outcomes are late, lost, told in part, or those of an earlier save;
surveys follow where a process asks for one, and may fail.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from holdfast.checkpoint import CommitUnknown, SaveCancelled, SaveFailed
from holdfast.checkpoint.agreement import save_protocol as p
from holdfast.checkpoint.agreement.exchange import first_failed
from holdfast.checkpoint.agreement.save_protocol import Effect, Event, SaveKey, SaveResult

from .simulated_processes import (
    BOUND_S,
    RESULT_WAIT_S,
    TIMEOUT_S,
    Process,
    Round,
    Violation,
    World,
)

LOCAL_SAVES = 8
SURVEY_S = 30.0


@dataclass
class Host:
    """What one process knows and keeps of local saves, by their counters."""

    process: Process
    parts: set[int] = field(default_factory=set)
    known: list[int] = field(default_factory=list)  # that may come back, newest first
    is_unsure: bool = False


@dataclass
class Survey:
    """One survey: what each process that came to it has, and what the primary made of it."""

    inventories: dict[int, set[int]] = field(default_factory=dict)
    found: list[int] | None = None


class LocalLane:
    """The local lane of a simulation. With `closes` a cancel comes too late after the report."""

    def __init__(self, world: World, *, closes: bool) -> None:
        self.world = world
        self.closes = closes
        self.keep = world.rng.choice([1, 2])
        self.hosts = [Host(Process(process.rank)) for process in world.processes]
        self.rounds = [Round() for _ in range(LOCAL_SAVES + 1)]
        self.surveys = [Survey() for _ in range(LOCAL_SAVES + 1)]
        self.given_up: set[tuple[int, int]] = set()  # rank and counter
        self.decided: dict[int, SaveResult] = {}  # by the primary
        self.acknowledged: set[int] = set()
        self.failed: set[int] = set()  # for some process that was told so
        self.cancelled: set[int] = set()

    def begin(self) -> None:
        """Starts the lane of every process."""
        for host in self.hosts:
            self.at(self.world.rng.random(), lambda host=host: self.next_save(host))  # type: ignore[misc]

    # --- the world

    def at(self, delay_s: float, act: Callable[[], None]) -> None:
        self.world.at(delay_s, act)

    def chance(self, share: float) -> bool:
        return self.world.chance(share)

    def log(self, host: Host, line: str) -> None:
        self.world.log(f"process {host.process.rank}, local: {line}")

    def alive(self, host: Host) -> bool:
        return self.world.processes[host.process.rank].alive

    def is_whole(self, counter: int) -> bool:
        return all(counter in host.parts for host in self.hosts)

    def delete(self, host: Host, counters: list[int]) -> None:
        """Deletes parts. Raises Violation where an acknowledged save that should stay loses one."""
        stay = sorted(self.acknowledged)[-self.keep :]
        gone = host.parts & set(counters)
        if robbed := gone & set(stay):
            raise Violation(f"process {host.process.rank} deletes its parts of {sorted(robbed)}")
        host.parts -= gone
        if gone:
            self.log(host, f"deletes {sorted(gone)}")

    # --- one save

    def next_save(self, host: Host) -> None:
        process = host.process
        if not self.alive(host) or process.counter >= LOCAL_SAVES:
            return
        counter = process.begin(self.world.now)
        process.key = SaveKey(f"l{counter}", counter, 100 + counter)
        how = {"is_local": True, "is_unsure": host.is_unsure}
        if process.rank == 0:
            process.saving = p.lead(process.key, **how)
        else:
            process.saving = p.follow(process.key, process.rank, **how)
        if self.chance(0.05):
            self.at(self.world.rng.uniform(0, 8), lambda: self.cancel(host))
        self.resume(host, process.key, None)

    def cancel(self, host: Host) -> None:
        """The user of a process calls its local save off."""
        process = host.process
        if not self.alive(host) or process.saving is None or process.key is None:
            return
        in_time = process.cancellation.cancel()
        self.log(
            host, f"{process.key.save_id} is called off {'in time' if in_time else 'too late'}"
        )
        if in_time:
            self.cancelled.add(process.key.counter)

    def resume(self, host: Host, key: SaveKey, event: Event) -> None:
        process = host.process
        if not self.alive(host) or process.key is not key or process.saving is None:
            return
        try:
            effect = process.saving.send(event)
        except StopIteration as end:
            self.end(host, key, end.value)
            return
        process.effects += 1
        self.perform(host, key, effect)

    def end(self, host: Host, key: SaveKey, result: SaveResult) -> None:
        """Does what the tier does: takes note, deletes what the rules let go, and surveys."""
        process = host.process
        process.saving = None
        counter = key.counter
        if result.key != key:
            raise Violation(f"process {process.rank} ends {key} with the result of {result.key}")
        if self.world.now - process.began > BOUND_S or process.effects > 8:
            raise Violation(f"process {process.rank} took {process.effects} effects for {key}")
        was_unsure = host.is_unsure
        host.is_unsure = was_unsure or isinstance(result.error, CommitUnknown)
        self.log(host, f"{key.save_id}: {_said(result)}{', unsure' if host.is_unsure else ''}")
        if result.error is None:
            self.acknowledge(process.rank, counter)
        elif result.deletable:
            self.fail(process.rank, counter)
        goes = p.local_saves_to_delete(
            counter,
            result,
            known=host.known,
            written=sorted(host.parts),
            keep=self.keep,
            is_unsure=host.is_unsure,
        )
        told_failed = [counter] if result.deletable else []
        if host.is_unsure and set(goes) - set(told_failed):
            raise Violation(f"process {process.rank} is unsure, and deletes {goes}")
        if result.error is None:
            host.known = [counter, *host.known][: self.keep]
        self.delete(host, goes)
        if result.error is None and not host.is_unsure and len(host.parts) > self.keep:
            raise Violation(f"process {process.rank} keeps the local saves {sorted(host.parts)}")
        if result.survey:
            self.join_survey(host, counter)
        else:
            self.later(host)

    def later(self, host: Host) -> None:
        self.at(self.world.rng.uniform(0, 5), lambda: self.next_save(host))

    def acknowledge(self, rank: int, counter: int) -> None:
        """Notes what a process was told of. Raises Violation unless the save is there, whole."""
        newer = [each for each in self.acknowledged if each > counter]
        if not newer and not self.is_whole(counter):
            raise Violation(f"l{counter} was acknowledged at process {rank}, and is not whole")
        if counter in self.cancelled or counter in self.failed:
            raise Violation(f"l{counter} was called off or failed, and is acknowledged at {rank}")
        self.acknowledged.add(counter)

    def fail(self, rank: int, counter: int) -> None:
        """Notes a failure. Raises Violation unless the primary has told it."""
        if self.rounds[counter].result is None:
            raise Violation(f"process {rank} deletes its part of l{counter}, and nobody told it to")
        if counter in self.acknowledged:
            raise Violation(f"l{counter} failed at process {rank}, and was acknowledged elsewhere")
        self.failed.add(counter)

    # --- effects

    def perform(self, host: Host, key: SaveKey, effect: Effect) -> None:
        delay_s = self.world.rng.expovariate(1.0)
        match effect:
            case p.Prepare():
                self.at(delay_s, lambda: self.write(host, key))
            case p.Gather(report):
                self.gather(host, key, report)
            case p.BuildRecord(_):
                failed = self.chance(0.03)
                event = p.Failed(SaveFailed("plans differ")) if failed else p.Built(b"{}")
                self.answer(host, key, 0.1, event)
            case p.Commit(_):
                error = self.may_go_on(host, key)
                event = p.Committed() if error is None else p.Refused(error)
                self.answer(host, key, 0.1, event)
            case p.DeleteSuperfluous(_):
                self.answer(host, key, 0.1, p.Superfluous())
            case p.Tell(result):
                self.tell(host, key, result)
            case p.Hear():
                self.hear(host, key)
            case _:
                raise Violation(f"a local save asks for {effect}")

    def answer(self, host: Host, key: SaveKey, delay_s: float, event: Event) -> None:
        self.at(delay_s, lambda: self.resume(host, key, event))

    def may_go_on(self, host: Host, key: SaveKey) -> SaveCancelled | None:
        cancellation = host.process.cancellation
        end = cancellation.close if self.closes else cancellation.check
        try:
            end(key.step, host.process.rank)
        except SaveCancelled as error:
            return error
        return None

    def write(self, host: Host, key: SaveKey) -> None:
        if not self.alive(host):
            return
        if self.chance(0.06):
            self.given_up.add((host.process.rank, key.counter))
            self.resume(host, key, p.Failed(OSError(28, "full")))
            return
        host.parts.add(key.counter)
        self.copy(host, key, self.world.now + 20.0)

    def copy(self, host: Host, key: SaveKey, until: float) -> None:
        """Waits for the part of the next process, as a copy does."""
        rank = (host.process.rank + 1) % len(self.hosts)
        error: Exception | None = None
        if (rank, key.counter) in self.given_up:
            error = p.PartGivenUp("a peer has given its part up")
        elif self.world.now >= until:
            error = TimeoutError("a peer is silent")
        elif key.counter not in self.hosts[rank].parts:
            self.at(0.5, lambda: self.copy(host, key, until))
            return
        elif host.process.rank:
            error = self.may_go_on(host, key)
        if error is not None:
            self.given_up.add((host.process.rank, key.counter))
        self.resume(host, key, p.Prepared({}) if error is None else p.Failed(error))

    def gather(self, host: Host, key: SaveKey, report: p.SaveReport) -> None:
        current = self.rounds[key.counter]
        earlier = self.rounds[key.counter - 1].reports.get(host.process.rank)
        if self.chance(0.04) and earlier is not None:
            current.reports.setdefault(report.process, earlier)
        elif self.chance(0.96):
            self.at(self.world.rng.expovariate(0.5), lambda: self.arrive(current, report))
        if host.process.rank:
            lost = self.chance(0.05)
            event = p.Failed(TimeoutError("no answer")) if lost else p.Sent()
            self.answer(host, key, self.world.rng.expovariate(0.5), event)
        else:
            self.wait_for_reports(host, key, host.process.began + TIMEOUT_S)

    def arrive(self, current: Round, report: p.SaveReport) -> None:
        current.reports.setdefault(report.process, report)

    def wait_for_reports(self, host: Host, key: SaveKey, until: float) -> None:
        reports = self.rounds[key.counter].reports
        if len(reports) == len(self.hosts):
            self.resume(host, key, p.Gathered([reports[rank] for rank in sorted(reports)]))
        elif self.world.now >= until:
            self.resume(host, key, p.Failed(TimeoutError("not all came")))
        else:
            self.at(0.5, lambda: self.wait_for_reports(host, key, until))

    def tell(self, host: Host, key: SaveKey, result: SaveResult) -> None:
        """Tells the outcome; where that fails, others may have heard it or not."""
        current = self.rounds[key.counter]
        self.check_cause(current, result)
        failed = self.chance(0.08)
        if not failed or self.chance(0.4):
            current.result = result
        event = p.Failed(TimeoutError("the coordinator is gone")) if failed else None
        self.answer(host, key, 0.1, event)

    def check_cause(self, current: Round, result: SaveResult) -> None:
        """Raises Violation where a part that was given up is named instead of why it was."""
        reports = [current.reports[rank] for rank in sorted(current.reports)]
        if any(report.key != result.key for report in reports):
            return  # a process that is at another save is named first
        causes = [each for each in reports if each.error and each.error.kind != "PartGivenUp"]
        if first_failed(causes) is not None and "PartGivenUp" in str(result.error):
            raise Violation(f"{result.error}, and the cause is {causes[0].error}")

    def hear(self, host: Host, key: SaveKey) -> None:
        earlier = self.rounds[key.counter - 1].result
        until = host.process.began + TIMEOUT_S + RESULT_WAIT_S
        if earlier is not None and self.chance(0.05):
            self.answer(host, key, self.world.rng.random(), p.Heard(earlier))
        elif self.chance(0.08):
            self.answer(host, key, self.world.rng.random(), p.Failed(TimeoutError("not heard")))
        else:
            self.wait_for_result(host, key, until)

    def wait_for_result(self, host: Host, key: SaveKey, until: float) -> None:
        result = self.rounds[key.counter].result
        if result is not None:
            self.resume(host, key, p.Heard(result))
        elif self.world.now >= until:
            self.resume(host, key, p.Failed(TimeoutError("no result came")))
        else:
            self.at(0.5, lambda: self.wait_for_result(host, key, until))

    # --- surveys

    def join_survey(self, host: Host, counter: int) -> None:
        current = self.surveys[counter]
        current.inventories[host.process.rank] = set(host.parts)
        self.wait_for_survey(host, counter, self.world.now + SURVEY_S)

    def wait_for_survey(self, host: Host, counter: int, until: float) -> None:
        current = self.surveys[counter]
        if not self.alive(host):
            return
        if current.found is None and len(current.inventories) == len(self.hosts):
            whole = set.intersection(*current.inventories.values())
            current.found = sorted(whole, reverse=True)
            # What a survey finds may come back, as what was told.
            self.acknowledged |= whole
        if current.found is not None and self.chance(0.95):
            host.known = list(current.found)
            host.is_unsure = False
            self.log(host, f"the survey finds {current.found}")
            self.later(host)
        elif current.found is not None or self.world.now >= until:
            self.log(host, "the survey fails")
            self.later(host)
        else:
            self.at(0.5, lambda: self.wait_for_survey(host, counter, until))

    # --- the end

    def check_end(self) -> None:
        """The newest saves that were acknowledged are whole, and the processes are in step."""
        for counter in sorted(self.acknowledged)[-self.keep :]:
            if not self.is_whole(counter):
                raise Violation(f"l{counter} was acknowledged, and is not whole in the end")
        counters = {host.process.counter for host in self.hosts if self.alive(host)}
        if len(counters) > 1:
            raise Violation(f"the local lanes that went on are at saves {sorted(counters)}")


def _said(result: SaveResult) -> str:
    if result.error is None:
        return "acknowledged"
    return type(result.error).__name__ + (", deletes" if result.deletable else ", keeps")
