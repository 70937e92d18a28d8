"""The events that the reports of an attempt's processes become."""

from __future__ import annotations

import json
import queue
import re
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial

import pytest

from holdfast.coordination import CoordinationClient, JobIdentity, StatusClient, Timeouts
from holdfast.coordination.client.followed_status import add_events
from holdfast.coordination.diagnosis.findings import Evidence
from holdfast.coordination.process.diagnose import gather
from holdfast.coordination.vitals import ENDS_WITH
from holdfast.launch.supervisor.goodput import Goodput
from holdfast.launch.supervisor.job import (
    NO_SAVE,
    Event,
    Noticed,
    Progressed,
    RestartPolicy,
    SavePosition,
    Stalled,
    Stuck,
    Withdrawn,
)
from holdfast.launch.workers import progress_watch
from holdfast.launch.workers.coordinator import Coordinator
from holdfast.launch.workers.progress_watch import (
    ProgressWatch,
    newest,
)
from holdfast.multihost.group.group import SaveStage
from holdfast.proto import session_pb2
from tests.support.in_process import serving
from tests.support.processes import wait_until

new_watch = partial(
    ProgressWatch, account=lambda: (session_pb2.Launcher(), Goodput()), replaces=False
)
NOTICE = "holdfast/sync/preemption/0/notices/1"
JOINED = {0: NO_SAVE, 1: NO_SAVE}


class Watched:
    """A coordinator of two processes with a client each, and the events of its watch."""

    def __init__(self, stack: ExitStack, policy: RestartPolicy) -> None:
        self.said: list[str] = []
        self.coordinator = Coordinator("j", 3, 2)
        stack.callback(self.coordinator.close)
        self.events: queue.Queue[Event | Stuck] = queue.Queue()
        self.watch = new_watch(
            self.coordinator.address,
            3,
            self.events.put,
            policy=policy,
            say=self.said.append,
        )
        stack.callback(self.watch.close)
        self.clients = [
            CoordinationClient(
                self.coordinator.address,
                process,
                job=JobIdentity(num_processes=2, name="j", attempt=3),
                timeouts=Timeouts(shutdown_s=2),
            )
            for process in range(2)
        ]
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda client: client.connect(), self.clients))
        for client in self.clients:
            stack.callback(client.close)
        self.watch.refresh()
        while self.events.get(timeout=30) != Progressed(3, saves=JOINED):
            pass

    def next_stuck(self) -> Stuck:
        """Waits for the word of a process that does not end."""
        while not isinstance(event := self.events.get(timeout=30), Stuck):
            pass
        return event

    def seen(self) -> list[session_pb2.Event]:
        """Polls, and returns the events that have come so far."""
        self.watch.refresh()
        return list(self.watch.events)

    def report(self, process: int, step: int, **progress: float) -> None:
        """Reports, and waits until the coordinator has it."""
        self.clients[process].report(step=step, **progress)
        while (process, step) not in self.steps():
            self.watch.refresh()
            time.sleep(0.01)

    def steps(self) -> list[tuple[int, int]]:
        """Returns the processes that have told a step, with it."""
        tasks = self.watch.status.tasks
        return [(task.task_id, task.progress.step) for task in tasks if task.progress.step]


@pytest.fixture
def watched() -> Iterator[Watched]:
    with ExitStack() as stack:
        yield Watched(stack, RestartPolicy())


def test_the_best_progress_is_reported_once(watched: Watched) -> None:
    """Steps are the highest of all, with the attempt; the same progress is not reported again."""
    watched.report(0, 5)
    watched.report(1, 4, saved_step=2)
    found = [watched.events.get(timeout=30) for _ in range(2)]
    assert found == [Progressed(3, 5, -1, saves=JOINED), Progressed(3, 5, 2, saves=JOINED)]
    watched.watch.refresh()
    assert watched.events.empty()
    assert watched.steps() == [(0, 5), (1, 4)]


def test_a_new_coordinator_knows_what_was_before(watched: Watched) -> None:
    """The launcher tells it the losses and saves of earlier attempts, as what they are, and takes
    none of them for this attempt's.
    """
    began = time.time() - 100
    texts = [("saved", "step 7 is saved"), ("lost", "process 1 is lost"), ("launcher", "again")]
    for number, (kind, text) in enumerate(texts):
        told = session_pb2.Event(unix_s=began + number, kind=kind, text=text)
        watched.watch.note(told)
    watched.clients[0].report(step=8, saved_step=8)
    wait_until(lambda: any(event.text == "step 8 is saved" for event in watched.seen()))
    seen = {(event.kind, event.text): event.unix_s for event in watched.seen()}
    assert [round(seen[each] - began) for each in texts] == [0, 1, 2]
    own = [event.text for event in watched.watch.own_events()]
    assert own == ["2 processes joined", "step 8 is saved"]


def test_those_that_join_are_counted_once() -> None:
    """Whatever a poll saw of them in between: "process 1 joined", "2 processes joined" are two. Who
    comes later, after something else or on another day is counted beside them.
    """
    known: deque[session_pb2.Event] = deque()
    for at, kind, text in (
        (1.0, "joined", "process 1 joined"),
        (1.5, "joined", "2 processes joined"),
        (3.0, "joined", "process 2 joined"),
        (3.1, "left", "process 2 left"),
        (3.2, "saved", "step 1 is saved"),
        (3.3, "saved", "step 2 is saved"),
    ):
        add_events(known, [session_pb2.Event(unix_s=at, kind=kind, text=text)])
    texts = [event.text for event in known]
    assert texts[:2] == ["2 processes joined", "process 2 joined"]
    assert texts[2:] == ["process 2 left", "step 1 is saved", "step 2 is saved"]


def test_the_newest_saves_do_not_push_out_the_rest() -> None:
    """Of thousands of saves the last ones are told, and all of the few losses."""
    history = [
        session_pb2.Event(unix_s=at, kind="lost" if at % 100 == 0 else "saved")
        for at in range(1_000)
    ]
    told = newest(history)
    assert [event.unix_s for event in told if event.kind == "lost"] == list(range(0, 1_000, 100))
    assert (
        len(told) == 210
        and told[-1].unix_s == 999
        and told == sorted(told, key=lambda event: event.unix_s)
    )


def test_a_process_says_why_it_ends(watched: Watched) -> None:
    """The first line of it, for the launcher's reason; who said nothing has no words."""
    watched.clients[1].report_error(f"{ENDS_WITH}RuntimeError: the loss is NaN\nin layer 3")
    watched.watch.refresh()
    assert watched.watch.last_words(1) == "RuntimeError: the loss is NaN"
    assert watched.watch.last_words(0) == ""
    # One of the attempt before, which had more, may end while this one runs.
    assert [watched.watch.why_never(process) for process in (1, 2, 7)] == [""] * 3


def test_who_has_raised_may_end_its_save() -> None:
    """An exception that has left the main thread is the process's word, and after `grace_s` it is
    stuck; not while it reports a save in flight, for `commit_grace_s`.
    """
    with ExitStack() as stack:
        watched = Watched(stack, RestartPolicy(grace_s=0.5, commit_grace_s=600))
        for client in watched.clients:
            client.report(save=1, save_stage=SaveStage.WRITING)
            client.report(trouble=f"{ENDS_WITH}ValueError: no\nmore")
        watched.clients[0].report(save_stage=SaveStage.SETTLED)
        assert watched.next_stuck() == Stuck(3, 0, "ValueError: no")
        watched.watch.refresh()
        assert watched.watch.last_words(1) == "ValueError: no"
        assert not any(isinstance(event, Stuck) for event in watched.events.queue)
        watched.clients[1].report(save_stage=SaveStage.SETTLED)
        assert watched.next_stuck() == Stuck(3, 1, "ValueError: no")


def test_where_saves_stand_is_reported(watched: Watched) -> None:
    """A process's latest save and its stage; one that has reported none, but has a client of ours,
    has saved nothing.
    """
    watched.clients[1].report(save=7, save_stage=SaveStage.REPORTED)
    watched.watch.refresh()
    assert watched.events.get(timeout=30) == Progressed(
        3, saves=JOINED | {1: SavePosition(7, SaveStage.REPORTED)}
    )


def test_what_an_early_leaver_said_counts(watched: Watched) -> None:
    """A process that had reported its share, and was gone before anybody saw its Session, holds no
    commit up.
    """
    watched.clients[1].report(save=7, save_stage=SaveStage.REPORTED)
    watched.clients[1].close()
    watched.watch.refresh()
    while watched.watch.status.tasks[1].has_session:
        watched.watch.refresh()
    events: queue.Queue[Event] = queue.Queue()
    late = new_watch(
        watched.coordinator.address, 3, events.put, policy=RestartPolicy(), say=watched.said.append
    )
    try:
        late.refresh()
        found = events.get(timeout=30)
        assert isinstance(found, Progressed) and found.saves[1] == SavePosition(
            7, SaveStage.REPORTED
        )
    finally:
        late.close()


def test_a_job_is_done_when_all_are(watched: Watched) -> None:
    """One process that reports its end is not enough."""
    watched.report(0, 9, done=1)
    watched.report(1, 9)
    assert watched.events.get(timeout=30) == Progressed(3, 9, -1, False, JOINED)
    watched.report(1, 10, done=1)
    assert watched.events.get(timeout=30) == Progressed(3, 10, -1, True, JOINED)


def test_a_notice_is_reported_until_withdrawn(watched: Watched) -> None:
    """Its source names the process and the reason, its deadline is on the monotonic clock, and the
    processes know already.
    """
    client = watched.clients[1]
    client.key_value_set_bytes(
        NOTICE, json.dumps({"reason": "spot", "deadline_unix_s": time.time() + 30}).encode()
    )
    notice = watched.events.get(timeout=30)
    assert isinstance(notice, Noticed) and (notice.source, notice.delivered) == (
        "process 1 (spot)",
        True,
    )
    assert notice.deadline is not None and 20 < notice.deadline - time.monotonic() <= 30
    client.key_value_delete(NOTICE)
    assert watched.events.get(timeout=30) == Withdrawn("process 1 (spot)")


def test_who_does_not_ask_and_goes_on_is_named(watched: Watched) -> None:
    """Once, with what it does not ask, when it makes steps after a notice; not one that asks, and
    none as long as there is no notice.
    """
    watched.report(0, 5)
    watched.report(1, 5, asks_preemption=True)
    watched.report(0, 6)
    watched.clients[1].key_value_set(NOTICE, json.dumps({"reason": "SIGTERM"}))
    watched.watch.refresh()
    wait_until(lambda: watched.watch._at_notice is not None)
    assert watched.said == []
    watched.report(1, 7)
    watched.report(0, 7)
    wait_until(lambda: bool(watched.said))
    watched.report(0, 8)
    assert watched.said == [
        "process 0: the loop does not ask reached_preemption(step): it goes on until"
        " --preemption-grace-s"
    ]


def test_devices_that_are_behind_are_told_at_a_notice(watched: Watched) -> None:
    """By the time that a save waits for them, and the steps that the loop made in such a time: from
    two seconds on, and again once the time has doubled. Without a notice a wait is the loop's own.
    """
    for step in range(1, 5):
        watched.report(1, step, for_devices_s=9.0)
        time.sleep(0.2)
    wait_until(lambda: watched.watch.status.tasks[1].steps_per_second > 0)
    watched.report(1, 5, for_devices_s=0.0)
    assert watched.said == []
    watched.clients[1].key_value_set(NOTICE, json.dumps({"reason": "SIGTERM"}))
    watched.watch.refresh()
    for waits_s in (1.5, 3.0, 5.0, 6.0):
        watched.report(1, 6 + int(waits_s), for_devices_s=waits_s, asks_preemption=1)
        time.sleep(0.7)
    said = re.compile(
        r"process 1: a save has waited (\d) s for its devices, which are \d+ steps or more behind;"
        " give save or should_save each step, and the state"
    )
    told = [match[1] for match in map(said.fullmatch, watched.said) if match]
    assert told == ["3", "6"], watched.said


def test_a_job_whose_steps_stop_has_stalled_once() -> None:
    """Without steps of anybody for half a second, it is said who is where, and the event comes
    once.
    """
    with ExitStack() as stack:
        watched = Watched(stack, RestartPolicy(stall_timeout_s=0.5))
        for process in range(2):
            watched.clients[process].report(step=3, report_interval_s=0.1)
        assert watched.events.get(timeout=30) == Progressed(3, 3, saves=JOINED)
        stalled = watched.events.get(timeout=30)
        assert (
            isinstance(stalled, Stalled)
            and stalled.attempt == 3
            and "no process has made a step for " in stalled.why
        )
        assert "since step 3" in stalled.why and any(
            text.startswith("hang: process") for text in watched.said
        ), watched.said
        watched.report(0, 4)
        assert watched.events.get(timeout=30) == Progressed(3, 4, saves=JOINED)
        watched.watch.close()
        assert watched.events.empty()


def test_closing_waits_for_no_diagnosis(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes up to a minute, in which those that outlive the attempt have to hear of the next.
    What it would have found is of an attempt that is over, and is not told.
    """
    begun = threading.Event()
    closed = threading.Event()
    waited: list[bool] = []
    threads: list[threading.Thread] = []

    def gather_late(client: StatusClient, *, hangs: bool) -> Evidence:
        threads.append(threading.current_thread())
        begun.set()
        waited.append(closed.wait(10))
        return gather(client, hangs=hangs)

    monkeypatch.setattr(progress_watch, "gather", gather_late)
    with ExitStack() as stack:
        watched = Watched(stack, RestartPolicy(stall_timeout_s=0.5))
        for process in range(2):
            watched.clients[process].report(step=3, report_interval_s=0.1)
        assert begun.wait(30)
        watched.watch.close()
        closed.set()
        threads[0].join()
    assert waited == [True] and watched.said == []
    assert not any(isinstance(watched.events.get(), Stalled) for _ in range(watched.events.qsize()))


def test_a_straggler_is_reported_once() -> None:
    """In words, with where it is, and in the job's history; the job goes on."""
    with ExitStack() as stack:
        watched = Watched(stack, RestartPolicy(straggler_steps=5))
        watched.report(0, 100)
        watched.report(1, 50)
        while not watched.said:
            time.sleep(0.05)
        watched.report(0, 101)
        while not any("straggler" in event.text for event in watched.watch.events):
            watched.watch.refresh()
        (said,) = watched.said
        assert (
            said.startswith("straggler: process 1 (host ")
            and "is at step 50, 25 behind the median" in said
        )


def test_a_coordinator_that_is_gone_is_no_event(watched: Watched) -> None:
    """What was reported stands; asking again neither raises nor reports."""
    watched.report(0, 5)
    watched.events.get(timeout=30)
    before = watched.watch.status
    watched.coordinator.close()
    watched.watch.refresh()
    assert watched.events.empty() and watched.watch.status == before


def test_a_coordinator_that_ended_in_order_was_not_needed(watched: Watched) -> None:
    """Its exit code 0 says that nobody is there any more, also where the last poll saw a process
    that was there; of one that was killed those are needed that do not leave by themselves.
    """
    assert not watched.watch.still_needed(ended_well=True)
    assert watched.watch.still_needed(ended_well=False)
    for process in range(2):
        watched.clients[process].report(leaving=1)
    wait_until(lambda: all(task.progress.values for task in watched.watch.status.tasks))
    assert not watched.watch.still_needed(ended_well=False)


def test_a_defect_of_the_coordinator_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the status cannot be told, and when a later status tells of it."""

    def fail(since: float = 0.0) -> session_pb2.StatusResponse:
        raise KeyError("step")

    said: list[str] = []
    with serving(1) as served, monkeypatch.context() as broken:
        broken.setattr(served.service, "status", fail)
        watch = new_watch(
            served.address, 1, lambda event: None, policy=RestartPolicy(), say=said.append
        )
        watch.refresh()
        broken.undo()
        watch.refresh()
        watch.close()
        (defect,) = watch.status.defects
        assert defect == (
            "the coordinator met a defect of its own in GetStatus: KeyError: 'step'; its log has"
            " the traceback: please report it"
        )
        assert said == [defect]


def test_that_nobody_joins_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what to call, after a minute; a job of which one has come says so in its status."""
    monkeypatch.setattr(progress_watch, "NOBODY_S", 0.2)
    said: list[str] = []
    with ExitStack() as stack:
        coordinator = Coordinator("j", 1, 2)
        stack.callback(coordinator.close)
        events: queue.Queue[Event] = queue.Queue()
        watch = new_watch(
            coordinator.address, 1, events.put, policy=RestartPolicy(), say=said.append
        )
        stack.callback(watch.close)
        wait_until(lambda: any("joined" in event.text for event in watch.events))
    assert len(said) == 1, said
    assert re.fullmatch(
        r"none of the 2 processes has joined the job after \d+ s: call"
        r" holdfast\.multihost\.initialize\(\) at the start of the program; without it each of them"
        r" trains alone",
        said[0],
    )


def test_a_coordinator_that_was_ahead_is_no_attempt_that_is_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What an attempt has without a process, or a step, begins with it: its coordinator may have
    waited for it for longer.
    """
    limit_s = 0.6
    monkeypatch.setattr(progress_watch, "NOBODY_S", limit_s)
    said: list[str] = []
    with ExitStack() as stack:
        coordinator = Coordinator("j", 2, 2)
        stack.callback(coordinator.close)
        client = stack.enter_context(StatusClient(coordinator.address))
        wait_until(lambda: client.status().up_s > 3 * limit_s)
        before_s = client.status().up_s
        policy = RestartPolicy(stall_timeout_s=60, startup_timeout_s=limit_s)
        events: queue.Queue[Event] = queue.Queue()
        watch = new_watch(coordinator.address, 2, events.put, policy=policy, say=said.append)
        stack.callback(watch.close)
        while not isinstance(events.get(timeout=30), Stalled):
            pass
        age_s = watch.status.up_s - before_s
    assert age_s > limit_s
    assert (found := re.search(r" after (\d+) s: ", said[0])) and int(found[1]) <= round(age_s), (
        said
    )
