"""A running life: processes that are threads, and what each was told."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import holdfast.multihost as multihost
from holdfast.coordination import (
    CoordinationClient,
    CoordinationError,
    StatusClient,
    Timeouts,
)
from holdfast.multihost.group.group_client import group_client_of
from holdfast.multihost.group.ids import ProcessIds, initialize_ids
from holdfast.multihost.instruments import Phase
from holdfast.multihost.preemption import preemption
from holdfast.multihost.start.start import Membership

from .calls import RPC_S, TIME_S, Barrier, Die, Report, Return
from .coordinator import FULL, MOMENTS, Coordinator
from .life import Life, Step
from .network import Cable, Fault
from .process import Place, here
from .rules import SLACK_S, Told

HANG_S = 60.0  # for a whole life
START = -1  # the number of the joining


@dataclass
class Record:
    """What the processes of a life were told. `told[number][process]`; number -1 is the start."""

    told: dict[int, dict[int, Told]] = field(default_factory=lambda: defaultdict(dict))
    broken: list[str] = field(default_factory=list)


class _Listener:
    """A HealthListener that makes a call, on the client's own thread."""

    def __init__(self, client: CoordinationClient, record: Record) -> None:
        self._client = client
        self._record = record

    def update_global_process_info(self, infos: Sequence[multihost.ProcessHealth]) -> None:
        """Sets a key."""
        index = here().index
        began_s = time.monotonic()
        with contextlib.suppress(CoordinationError):
            self._client.key_value_set(f"seen/{index}", str(infos), allow_overwrite=True)
        took_s = time.monotonic() - began_s
        if took_s > SLACK_S:
            self._record.broken.append(f"process {index} waited {took_s:.1f} s as it listened")


class Run:
    """One running life."""

    def __init__(self, life: Life, coordinator: Coordinator, cables: Sequence[Cable]) -> None:
        self.record = Record()
        self._life = life
        self._coordinator = coordinator
        self._cables = cables
        self._places = [Place(index, life.processes) for index in range(life.processes)]
        self._done = [threading.Event() for _ in self._places]
        self._may_leave = threading.Event()
        self._meetings = {
            number: threading.Barrier(life.processes) for number in set(life.first(Return).values())
        }

    def task(self, process: int) -> int:
        """Returns the task id of a process."""
        return (process + self._life.shift) % self._life.processes

    def live(self) -> None:
        """Has all processes live their lives, and looks at the coordinator before they leave."""
        threads = [place.run(self._process) for place in self._places]
        end_s = time.monotonic() + HANG_S
        for done in self._done:
            done.wait(max(0.0, end_s - time.monotonic()))
        if not any(self._hanging(threads, self._done)):
            self.record.broken.extend(self._at_end())
        self._may_leave.set()
        for thread in threads:
            thread.join(max(1.0, end_s - time.monotonic()))
        self.record.broken.extend(self._hanging(threads, self._done))

    def _hanging(
        self, threads: Sequence[threading.Thread], done: Sequence[threading.Event]
    ) -> Iterator[str]:
        frames = sys._current_frames()
        for index, thread in enumerate(threads):
            waits = self._may_leave.is_set() or not done[index].is_set()
            if thread.is_alive() and waits:
                stack = "".join(traceback.format_stack(frames[thread.ident or 0])[-8:])
                yield f"process {index} hangs:\n{stack}"

    # --- One process

    def _process(self) -> None:
        index = here().index
        try:
            self._live_process(index, START)
        finally:
            self._done[index].set()

    def _live_process(self, index: int, start: int) -> None:
        """Lives a life of a process, from its joining at a step on."""
        client = CoordinationClient(
            self._cables[index].address,
            self.task(index),
            timeouts=Timeouts(init_s=TIME_S, shutdown_s=TIME_S, rpc_s=RPC_S),
        )
        self._tell(start, lambda: self._join(client, exchanges=start == START))
        if start in self._meetings:
            self._meetings[start].wait(HANG_S)
        for number, step in list(enumerate(self._life.steps))[start + 1 :]:
            concerned = index in step.call.members(self._life.processes)
            if isinstance(step.call, Die) and concerned:
                self._die(client, step.call.how)
                self._return(index)
                return
            if isinstance(step.call, Return):
                # First all come, then the one that returns joins.
                self._meetings[number].wait(HANG_S)
                self._meetings[number].wait(HANG_S)
            elif not isinstance(step.call, Die):
                self._make(client, step, number)
        self._end(client)

    def _return(self, index: int) -> None:
        """Begins the next life of a process, where it has one, and waits for its end."""
        number = self._life.first(Return).get(index)
        if number is not None:
            self._meetings[number].wait(HANG_S)
            again = Place(index, self._life.processes)
            again.run(lambda: self._live_process(index, number)).join()

    def _join(self, client: CoordinationClient, *, exchanges: bool) -> None:
        """Does what `initialize()` does with a client. Who comes late knows the ids."""
        process = here()
        client.connect()
        process.job.put(Membership(client, TIME_S, Phase("attempt")))
        process.job.join(client)
        group_client = group_client_of(client)
        preemption.start(
            client,
            client.process_id,
            process.count,
            sources=(),
            timeout_s=TIME_S,
        )
        if exchanges:
            mine = ProcessIds(process.index, client.process_id, (process.index,))
            initialize_ids(mine, client=client, timeout_s=TIME_S)
        else:
            group_client.renumber([self.task(each) for each in range(process.count)])
        if self._life.listens:
            multihost.health().add_listener(_Listener(client, self.record))
        multihost.health()

    def _make(self, client: CoordinationClient, step: Step, number: int) -> None:
        """Makes a call as its step says; faults begin with it, also where it is left out."""
        index = here().index
        if step.late_s:
            time.sleep(step.late_s[index])
        for fault in step.faults:
            if fault.process == index:
                self._strike(fault)
        if index in step.call.absent:
            with contextlib.suppress(CoordinationError):
                step.call.skip(client, number)
        elif index in step.call.members(self._life.processes):
            self._tell(number, lambda: step.call.run(client, number))

    def _strike(self, fault: Fault) -> None:
        if fault.harm in (*MOMENTS, FULL):
            self._coordinator.harm(fault.harm)
        else:
            self._cables[fault.process].strike(fault)

    def _tell(self, number: int, call: Callable[[], Any]) -> None:
        """Makes a call and keeps what this process was told."""
        value = None
        error: BaseException | None = None
        began_s = time.monotonic()
        try:
            value = call()
        except Exception as raised:
            error = raised
        told = Told(value, error, began_s, time.monotonic())
        self.record.told[number][here().index] = told

    def _die(self, client: CoordinationClient, how: str) -> None:
        # Its threads end with it.
        preemption.stop()
        if how == "error":
            with contextlib.suppress(CoordinationError):
                client.report_error("it failed")
        client.close()
        if how == "reported":
            with StatusClient(self._coordinator.address) as launcher:
                with contextlib.suppress(CoordinationError):
                    launcher.report_exit(client.process_id, -9)

    def _end(self, client: CoordinationClient) -> None:
        """Comes to a step at which a notice holds, meets the others, and leaves."""
        end = len(self._life.steps)
        survivors = self._life.survivors
        self._coordinator.spare()
        if self._life.stands:
            self._tell(end, _steps_until_reached)
        self._tell(end + 1, lambda: Barrier(survivors, name="end").run(client, end + 1))
        self._done[here().index].set()
        self._may_leave.wait(HANG_S)
        self._tell(end + 2, lambda: multihost.shutdown(TIME_S))

    # --- The end

    def _at_end(self) -> Iterator[str]:
        """Yields what the coordinator does not know, though it said so."""
        tasks = {process: self.task(process) for process in self._life.survivors}
        reports = self._coordinator.steps()
        for process, task in tasks.items():
            last = self._last_report(process)
            if last is not None and reports[task] != last:
                yield f"process {process} has reported step {last}, known is {reports[task]}"
        lost = set(tasks.values()) - self._coordinator.connected()
        if lost:
            yield f"the coordinator has lost tasks {sorted(lost)}, which live"

        mode = self._coordinator.journal_mode()
        if mode != 0o600:
            yield f"the journal has mode {mode:o}, and is read by others"

        if not self._life.lacks_calls:
            left = [
                key
                for key in self._coordinator.held_keys()
                if key.startswith(self._life.leaves_none)
            ]
            if left:
                yield f"calls have left keys behind: {left}"

    def _last_report(self, process: int) -> int | None:
        """Returns what a process has last reported in its present life."""
        began = self._life.first(Return).get(process, START)
        numbers = [
            number
            for number, step in enumerate(self._life.steps)
            if isinstance(step.call, Report) and number > began
        ]
        told = [self.record.told[number][process] for number in numbers]
        return max((each.value for each in told if each.error is None), default=None)


def _steps_until_reached() -> list[tuple[int, bool]]:
    """Asks at step after step until a notice holds."""
    end_s = time.monotonic() + TIME_S
    answers = []
    for step in range(1000, 100_000):
        answers.append((step, multihost.reached_preemption(step)))
        if answers[-1][1] or time.monotonic() > end_s:
            break
        time.sleep(0.01)
    assert answers[-1][1], f"a notice stands, and no step until {answers[-1][0]} was reached"
    return answers
