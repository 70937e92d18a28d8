"""Saves of several processes into one model store, under a seeded schedule of faults: the protocol
itself runs, all around it is a model.

A run is a few saves of one job, one after the other on each process, while messages are late, lost,
or those of an earlier save; commits are applied and fail, fail and are applied later, or are
answered twice; processes die; steps are deleted; another writer saves the same steps; saves are
called off; a sweep follows a death; and in the end the power goes. Each violation of an invariant
is raised with the seed.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from holdfast.checkpoint import SaveCancelled, SaveFailed, StepExists
from holdfast.checkpoint.agreement import save_protocol as p
from holdfast.checkpoint.agreement.save_protocol import (
    Effect,
    Event,
    SaveKey,
    SaveReport,
    SaveResult,
)
from holdfast.coordination import Fenced

from .simulated_local_saves import LocalLane
from .simulated_processes import (
    BOUND_S,
    RESULT_WAIT_S,
    TIMEOUT_S,
    Process,
    Round,
    Violation,
)

SAVES = 5
KEPT_STEPS = 2


@dataclass
class Record:
    """A record in the store."""

    save_id: str
    files: frozenset[str]
    readable: bool = True
    durable: bool = True


class Store:
    """Records by step, packs by name (`<rank>-<save id>`), claims, and what a sweep has buried."""

    def __init__(self, *, objects: bool) -> None:
        self.objects = objects
        self.records: dict[int, Record] = {}
        self.packs: dict[int, set[str]] = {}
        self.claims = {"a", "b"}
        self.buried: set[tuple[int, str]] = set()
        self.by_rule: set[str] = set()  # saves whose step was deleted or replaced as it should be

    def put(self, step: int, name: str) -> None:
        self.packs.setdefault(step, set()).add(name)

    def may_apply(self, step: int, record: Record) -> bool:
        writer = record.save_id[0]
        return (step, writer) not in self.buried if self.objects else writer in self.claims

    def apply(self, step: int, record: Record) -> None:
        """Gives the record its name. Raises Violation where a pack that it names is gone."""
        if missing := record.files - self.packs.get(step, set()):
            raise Violation(
                f"step {step} is committed by {record.save_id}, whose packs {sorted(missing)} are"
                " gone"
            )
        if step in self.records:
            self.by_rule.add(self.records[step].save_id)
        self.records[step] = record

    def delete_step(self, step: int) -> None:
        """Deletes a step as a keep policy does: the record, then what it named."""
        if record := self.records.pop(step, None):
            self.by_rule.add(record.save_id)
            self.packs[step] -= record.files

    def delete_packs(self, step: int, names: Iterable[str], why: str) -> None:
        """Deletes packs. Raises Violation for one that the record in place names."""
        named = self.records[step].files if step in self.records else frozenset()
        if robbed := set(names) & named:
            raise Violation(f"{why} deletes {sorted(robbed)} of step {step}, which is committed")
        self.packs.get(step, set()).difference_update(names)

    def sweep(self, dead: str) -> None:
        """Fences a dead writer and deletes what it left unfinished."""
        self.claims.discard(dead)
        for step, packs in self.packs.items():
            named = self.records[step].files if step in self.records else frozenset()
            leftover = {name for name in packs if name.partition("-")[2][0] == dead} - named
            if leftover:
                self.buried.add((step, dead))
                self.delete_packs(step, leftover, "the sweep")


class SaveSimulation:
    """One seeded run. Mutations switch rules of the shell off, each of which must be missed if it
    goes.

    `parses` and `counts_failures` are two; with `closes` a cancel comes too late once its process
    has reported, or begun to commit.
    """

    def __init__(
        self, seed: int, *, parses: bool = True, counts_failures: bool = True, closes: bool = True
    ) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.parses = parses
        self.counts_failures = counts_failures
        self.closes = closes
        self.store = Store(objects=self.rng.random() < 0.5)
        self.processes = [Process(rank) for rank in range(self.rng.randint(1, 4))]
        self.steps = [self.rng.choice([10, 20, 30, 40, 50]) for _ in range(SAVES)]
        self.overwrites = [self.rng.random() < 0.5 for _ in range(SAVES)]
        self.rounds = [Round() for _ in range(SAVES + 1)]
        self.ends: dict[str, list[tuple[int, SaveResult]]] = {}
        self.cancelled: set[str] = set()  # saves that were called off in time
        self.now = 0.0
        self.order = 0
        self.rivals = 0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.trace: list[str] = []
        self.local = LocalLane(self, closes=closes)

    # --- time

    def at(self, delay_s: float, act: Callable[[], None]) -> None:
        self.order += 1
        heapq.heappush(self.events, (self.now + delay_s, self.order, act))

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    def log(self, line: str) -> None:
        self.trace.append(f"{self.now:8.2f} {line}")

    def run(self) -> list[str]:
        """Runs to the end and checks the invariants; returns the trace. Raises Violation, naming
        the seed.
        """
        try:
            for process in self.processes:
                self.at(self.rng.random(), lambda process=process: self.next_save(process))  # type: ignore[misc]
            self.local.begin()
            for _ in range(self.rng.randint(0, 3)):
                self.at(
                    self.rng.uniform(0, 200),
                    self.rng.choice(
                        [self.rival, self.user_deletes, self.kill, self.sweep, self.cancel]
                    ),
                )
            while self.events:
                self.now, _, act = heapq.heappop(self.events)
                act()
            self.check_end()
            self.local.check_end()
        except Violation as violation:
            raise Violation(
                f"seed {self.seed}: {violation}\n" + "\n".join(self.trace[-40:])
            ) from None
        return self.trace

    # --- the world around

    def rival(self) -> None:
        """Another writer, without faults, saves one of our steps if it is free, or over it."""
        self.rivals += 1
        step = self.rng.choice(self.steps)
        save_id = f"b{self.rivals}"
        if "b" in self.store.claims and (step not in self.store.records or self.chance(0.5)):
            self.store.put(step, f"0-{save_id}")
            old = self.store.records.get(step)
            self.store.apply(step, Record(save_id, frozenset({f"0-{save_id}"})))
            if old is not None:
                self.store.delete_packs(step, old.files, "the rival's overwrite")
            self.log(f"rival commits {step}")

    def user_deletes(self) -> None:
        step = self.rng.choice(self.steps)
        self.store.delete_step(step)
        self.log(f"step {step} is deleted")

    def kill(self) -> None:
        victim = self.rng.choice(self.processes)
        victim.alive = False
        self.log(f"process {victim.rank} dies")
        if victim.rank == 0:
            self.at(self.rng.uniform(1, 100), self.sweep)

    def sweep(self) -> None:
        self.log("the writer is fenced, dead or by force, and swept")
        self.store.sweep("a")

    def cancel(self) -> None:
        """The user of a process calls its save off, which can stop the commit."""
        process = self.rng.choice(self.processes)
        if not process.alive or process.saving is None or process.key is None:
            return
        in_time = process.cancellation.cancel()
        self.log(
            f"process {process.rank} calls {process.key.save_id} off,"
            f" {'in time' if in_time else 'too late'}"
        )
        if in_time:
            self.cancelled.add(process.key.save_id)

    def may_go_on(self, process: Process, key: SaveKey) -> SaveCancelled | None:
        """Closes the time of a cancel; returns the error where it came in time."""
        try:
            (
                process.cancellation.close(key.step, process.rank)
                if self.closes
                else process.cancellation.check(key.step, process.rank)
            )
        except SaveCancelled as error:
            return error
        return None

    # --- the saves of one process

    def next_save(self, process: Process) -> None:
        number = process.counter
        if not process.alive or number >= SAVES:
            return
        step = self.steps[number]
        counter = process.begin(self.now)
        process.key = SaveKey(f"a{counter}", counter, step)
        if self.chance(0.05):
            self.at(self.rng.uniform(0, 8), self.cancel)
        part = p.lead(process.key) if process.rank == 0 else p.follow(process.key, process.rank)
        process.saving = part
        self.resume(process, process.key, None)

    def resume(self, process: Process, key: SaveKey | None, event: Event) -> None:
        if not process.alive or process.key is not key or process.saving is None:
            return
        try:
            effect = process.saving.send(event)
        except StopIteration as end:
            self.end(process, end.value)
            return
        process.effects += 1
        self.perform(process, effect)

    def answer(self, process: Process, delay_s: float, event: Event) -> None:
        key = process.key
        self.at(delay_s, lambda: self.resume(process, key, event))

    def end(self, process: Process, result: SaveResult) -> None:
        key = process.key
        assert key is not None
        if result.key != key:
            raise Violation(
                f"process {process.rank} ends its save {key} with the result of {result.key}"
            )
        if self.now - process.began > BOUND_S or process.effects > 12:
            raise Violation(
                f"process {process.rank} took {self.now - process.began:.0f} s and"
                f" {process.effects} effects for {key}"
            )
        said = (
            "committed"
            if result.error is None
            else type(result.error).__name__ + (", deletes" if result.deletable else ", keeps")
        )
        self.log(f"process {process.rank} ends {key.save_id} of step {key.step}: {said}")
        self.ends.setdefault(key.save_id, []).append((process.rank, result))
        if result.error is None:
            self.acknowledged(key)
        elif result.deletable:
            self.store.delete_packs(
                key.step, {f"{process.rank}-{key.save_id}"}, f"process {process.rank}"
            )
            if not self.counts_failures and process.own is not None and process.own.error:
                process.counter -= 1
        process.saving = None
        self.at(self.rng.uniform(0, 5), lambda: self.next_save(process))

    def acknowledged(self, key: SaveKey) -> None:
        """Raises Violation unless the step is there, or went by rule."""
        if key.save_id in self.store.by_rule:
            return
        record = self.store.records.get(key.step)
        if record is None or record.save_id != key.save_id:
            raise Violation(f"{key.save_id} was acknowledged, and step {key.step} is {record}")
        if not record.readable or record.files - self.store.packs.get(key.step, set()):
            raise Violation(f"{key.save_id} was acknowledged, and no reader takes step {key.step}")

    # --- effects

    def perform(self, process: Process, effect: Effect) -> None:
        key = process.key
        delay_s = self.rng.expovariate(1.0)
        assert key is not None
        match effect:
            case p.Prepare():
                self.prepare(process, key, delay_s)
            case p.Gather(report):
                self.gather(process, key, report)
            case p.BuildRecord(reports):
                failed = self.chance(0.02)
                named = " ".join(f"{report.process}-{key.save_id}" for report in reports)
                is_bad = self.chance(0.03)
                event: Event = p.Built((("bad " if is_bad else "good ") + named).encode())
                if failed:
                    event = p.Failed(SaveFailed("plans differ"))
                elif is_bad and self.parses:
                    event = p.Failed(SaveFailed("too long"))
                self.answer(process, 0.1, event)
            case p.Commit(record):
                self.commit(process, key, record.decode(), delay_s)
            case p.ReadRecord():
                self.at(delay_s, lambda: self.resume(process, key, self.read(process, key)))
            case p.DeleteSuperfluous():
                old = sorted({*self.store.records} - {key.step})[:-KEPT_STEPS]
                old = [step for step in old if self.chance(0.9)]  # what the store deletes
                for step in old:
                    self.store.delete_step(step)
                self.answer(process, 0.1, p.Superfluous(tuple(old)))
            case p.Tell(result):
                self.tell(process, key, result)
            case p.Hear():
                self.hear(process, key)

    def prepare(self, process: Process, key: SaveKey, delay_s: float) -> None:
        def done() -> None:
            if not process.alive:
                return
            self.store.put(key.step, f"{process.rank}-{key.save_id}")
            failed = (
                OSError(28, "full")
                if self.chance(0.08)
                else self.may_go_on(process, key)
                if process.rank
                else None
            )
            self.resume(process, key, p.Failed(failed) if failed is not None else p.Prepared({}))

        self.at(delay_s, done)

    def gather(self, process: Process, key: SaveKey, report: SaveReport) -> None:
        process.own = report
        current = self.rounds[key.counter]
        if self.chance(0.95):
            self.at(self.rng.expovariate(0.5), lambda: self.arrive(current, report))
        stale = [
            each
            for each in self.rounds[key.counter - 1].reports.values()
            if each.process == process.rank
        ]
        if stale and self.chance(0.05):
            self.at(self.rng.random(), lambda: self.arrive(current, stale[0]))
        if process.rank:
            sent = p.Failed(TimeoutError("no answer")) if self.chance(0.05) else p.Sent()
            self.answer(process, self.rng.expovariate(0.5), sent)
        else:
            called_off = self.rng.uniform(1, 10) if self.chance(0.03) else TIMEOUT_S
            self.wait_for_reports(process, key, current, self.now + called_off)

    def arrive(self, current: Round, report: SaveReport) -> None:
        current.reports.setdefault(report.process, report)

    def wait_for_reports(
        self, process: Process, key: SaveKey, current: Round, until: float
    ) -> None:
        if not process.alive or process.key is not key:
            return
        there = set(current.reports)
        if there >= {each.rank for each in self.processes}:
            self.resume(
                process,
                key,
                p.Gathered([current.reports[rank] for rank in sorted(current.reports)]),
            )
        elif self.now >= until:
            self.resume(process, key, p.Failed(TimeoutError("not all came")))
        else:
            self.at(0.5, lambda: self.wait_for_reports(process, key, current, until))

    def commit(self, process: Process, key: SaveKey, text: str, delay_s: float) -> None:
        kind, *files = text.split()
        record = Record(key.save_id, frozenset(files), readable=kind == "good")
        replace = self.overwrites[key.counter - 1]

        if (called_off := self.may_go_on(process, key)) is not None:
            self.answer(process, delay_s, p.Refused(called_off))
            return

        def done() -> None:  # the call was made: it goes on though the process may have died
            event = self.try_commit(key, record, replace)
            process.unclear = isinstance(event, p.Unclear)
            self.log(
                f"process {process.rank} commits {key.save_id} of step {key.step}:"
                f" {type(event).__name__}"
            )
            self.resume(process, key, event)

        self.at(delay_s, done)

    def try_commit(self, key: SaveKey, record: Record, replace: bool) -> Event:
        store = self.store
        step = key.step
        there = store.records.get(step)
        if self.chance(0.05):
            return p.Refused(OSError(28, "full"))
        if not store.may_apply(step, record) or "a" not in store.claims:
            return p.Refused(Fenced("fenced"))
        if there is not None and not replace:
            return (
                p.Refused(StepExists("taken"))
                if self.chance(0.8)
                else p.Unclear(FileExistsError(17, "exists"))
            )
        mode = self.rng.choices(
            ["clean", "applied", "half", "late", "twice", "never"], [60, 10, 8, 12, 6, 4]
        )[0]
        if mode == "half":
            record.durable = False
        if mode == "late":
            self.at(self.rng.uniform(0, 120), lambda: self.land(step, record, there, replace))
        elif mode != "never":
            store.apply(step, record)
        if mode == "clean":
            if there is not None:
                store.delete_packs(step, there.files, "the overwrite")
            return p.Committed()
        return p.Unclear(OSError(5, mode))

    def land(self, step: int, record: Record, there: Record | None, replace: bool) -> None:
        """Applies a commit late, if nothing has changed at its name."""
        if self.store.records.get(step) is there and self.store.may_apply(step, record):
            self.log(f"the late commit {record.save_id} of step {step} lands")
            self.store.apply(step, record)

    def read(self, process: Process, key: SaveKey) -> Event:
        record = self.store.records.get(key.step)
        if self.chance(0.15) or (record is not None and not record.readable):
            return p.RecordUnreadable()
        if record is None:
            return p.RecordAbsent()
        if record.save_id == key.save_id and not record.durable:
            if process.unclear:
                return p.RecordFound(record.save_id, durable=False)
            record.durable = True
        return p.RecordFound(record.save_id)

    def tell(self, process: Process, key: SaveKey, result: SaveResult) -> None:
        current = self.rounds[key.counter]
        if self.chance(0.9):
            current.result = result
        self.answer(process, 0.1, None)

    def hear(self, process: Process, key: SaveKey) -> None:
        earlier = self.rounds[key.counter - 1].result
        until = process.began + TIMEOUT_S + RESULT_WAIT_S
        if earlier is not None and self.chance(0.05):
            self.answer(process, self.rng.random(), p.Heard(earlier))
        elif self.chance(0.05):
            self.answer(
                process,
                self.rng.uniform(0, until - self.now),
                p.Failed(TimeoutError("not heard, or called off")),
            )
        else:
            self.wait_for_result(process, key, until)

    def wait_for_result(self, process: Process, key: SaveKey, until: float) -> None:
        if not process.alive or process.key is not key:
            return
        if (result := self.rounds[key.counter].result) is not None:
            self.resume(process, key, p.Heard(result))
        elif self.now >= until:
            self.resume(process, key, p.Failed(TimeoutError("no result came")))
        else:
            self.at(0.5, lambda: self.wait_for_result(process, key, until))

    # --- the end

    def check_end(self) -> None:
        """The power goes; then everything that was acknowledged must be there, and nobody may have
        been told the opposite.
        """
        self.store.records = {
            step: record for step, record in self.store.records.items() if record.durable
        }
        for save_id, ends in self.ends.items():
            committed = [rank for rank, result in ends if result.error is None]
            failed = [rank for rank, result in ends if result.deletable]
            if committed and failed:
                raise Violation(
                    f"{save_id} is committed for processes {committed}, and failed for {failed}"
                )
            if (
                failed
                and save_id
                in {record.save_id for record in self.store.records.values()} | self.store.by_rule
            ):
                raise Violation(
                    f"{save_id} failed for processes {failed}, and its record came to exist"
                )
            if save_id in self.cancelled and (
                committed or save_id in {record.save_id for record in self.store.records.values()}
            ):
                raise Violation(f"{save_id} was called off in time, and is committed")
            if committed:
                self.acknowledged(ends[0][1].key)
        counters = {process.counter for process in self.processes if process.alive}
        if len(counters) > 1:
            raise Violation(f"the processes that went on are at saves {sorted(counters)}")
