"""Processes that outlive attempts: who dies is replaced, the others stay."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint.format.record import parse_record
from holdfast.checkpoint.steps.claims import writer_of
from holdfast.coordination.names import PROFILE_A
from holdfast.launch import RestartPolicy, RunSettings, StandbySettings, run_local
from holdfast.launch.supervisor.engine import JobResult
from tests.support.cluster import CollectedOutput
from tests.support.coordinator_tap import OPEN, Message, messages, tapped
from tests.support.paths import program
from tests.support.restartable_jobs import Death, Restartable

POLICY = RestartPolicy(max_failures=3)
_WRITER = re.compile(r"/checkpoint%2F([0-9a-f]{8})%2F")  # in names of messages
_USED = ("files", "sockets", "threads", "clients", "memory")
COLD = StandbySettings(wanted=False)


class Trial(Restartable):
    """A job of `restartable.py` in a folder, on this machine."""

    def run(
        self,
        *arguments: object,
        count: int = 3,
        policy: RestartPolicy = POLICY,
        standby: StandbySettings = COLD,
        **changes: Any,
    ) -> JobResult:
        """Runs the job, and sees that it ends and that all orders were kept."""
        command = [sys.executable, str(program("restartable")), str(self.folder)]
        self.output = CollectedOutput()
        with pytest.MonkeyPatch.context() as patched:
            for name, value in tapped(self.folder / "tap").items():
                patched.setenv(name, value)
            result = run_local(
                [*command, *map(str, arguments)],
                count,
                RunSettings(
                    restart=policy, standby=standby, log_dir=self.folder / "logs", **changes
                ),
                output=self.output,
            )
        assert result.outcome == "done", (self.output.text, result.reasons)
        assert not list(self.folder.glob("kill-*")), result.reasons
        return result

    def check_apart(self) -> None:
        """Sees that no attempt hears of another: by the ids in each message at each coordinator,
        and by who wrote each step.
        """
        known = {(note["attempt"], note["coordinator"]) for note in self.notes("train")}
        attempts = {attempt for attempt, _ in known}
        addresses = {address for _, address in known}
        assert len(known) == len(attempts) == len(addresses)
        lives: dict[int, int] = {}  # the attempt of each incarnation
        writers: dict[str, int] = {}  # and of each writer
        for heard in messages(self.folder / "tap"):
            for message in heard:
                _check_ids(message, lives, writers)
            _check_ending(heard)
        assert attempts <= set(lives.values())
        self._check_writers(writers)

    def _check_writers(self, writers: dict[str, int]) -> None:
        """Sees that each step is one writer's, of an attempt that spoke of it, and no save's name
        was used twice.
        """
        attempts: dict[int, int] = {}
        saves: set[str] = set()
        for file in self.folder.glob("root/*/checkpoint.json"):
            record = parse_record(file.read_bytes(), str(file))
            assert all(f"-{record.writer_id}." in name for name in record.file_names())
            assert record.writer_id not in saves
            saves.add(record.writer_id)
            attempts[record.step] = writers[writer_of(record.writer_id)]
        in_order = [attempts[step] for step in sorted(attempts)]
        assert in_order == sorted(in_order)

    def attempts(self) -> list[tuple[int, list[int]]]:
        """Returns of each attempt how many stayed and who was replaced, as the report has it."""
        kept = json.loads((self.folder / "logs" / "status.json").read_text())
        attempts = kept["status"]["launcher"]["attempts"]
        return [(each.get("stayed", 0), each.get("replaced", [])) for each in attempts]


def _check_ids(message: Message, lives: dict[int, int], writers: dict[str, int]) -> None:
    """Sees that a message is of its coordinator's attempt, by the life of the process that sent it
    and by the writer whose message it carries; notes both.
    """
    attempt = message.attempt
    if message.method == OPEN:
        assert message.says[1] == attempt, message
    if message.incarnation:
        assert lives.setdefault(message.incarnation, attempt) == attempt, message
    elif message.method.startswith(PROFILE_A):
        assert message.method.endswith("/GetKeyValueDir"), message  # a look by who is no process
    if writer := _WRITER.search(message.name):
        assert writers.setdefault(writer[1], attempt) == attempt, message


def _check_ending(heard: list[Message]) -> None:
    """Sees that a coordinator takes nobody in whose attempt is over."""
    ended = [number for number, message in enumerate(heard) if message.is_end]
    if not ended:
        return
    for message in heard[ended[0] :]:
        assert not message.method.endswith("RegisterTask") or message.code != 0, message


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> float:
    """What 60 steps come to where nobody dies."""
    trial = Trial(tmp_path_factory.mktemp("undisturbed"))
    trial.run(60)
    (result,) = trial.results()
    return result


DEATHS = {
    "another, then process 0": ([Death(1, "step", 11)], [Death(0, "save", 30)]),
    "two at once": ([Death(0, "step", 11), Death(1, "step", 11)],),
    "the replacement as it joins": ([Death(1, "step", 11)], [Death(1, "join")]),
    "one that stayed, in a restore": ([Death(1, "step", 11)], [Death(0, "restore")]),
}


@pytest.mark.parametrize(
    "who",
    [
        name if number == 0 else pytest.param(name, marks=pytest.mark.slow)
        for number, name in enumerate(DEATHS)
    ],
)
def test_who_dies_is_replaced_and_the_others_stay(
    who: str, tmp_path: Path, undisturbed: float
) -> None:
    """The end is that of a job in which nobody died, and no saved step is lost."""
    trial = Trial(tmp_path / "job")
    trial.order(*DEATHS[who])
    result = trial.run(60)
    assert trial.results() == {undisturbed}
    assert trial.lives()[2] == 1, result.reasons
    trial.check_steps()
    trial.check_apart()
    assert sum(vars(result.goodput).values()) == pytest.approx(result.elapsed_s, rel=0.01)
    attempts = trial.attempts()
    assert attempts[0] == (0, [])
    assert {stayed + len(replaced) for stayed, replaced in attempts[1:]} == {3}
    assert result.outlived == len(attempts) - 1
    assert result.goodput.rejoining_s > 0


@pytest.mark.slow
@pytest.mark.parametrize("process", [1, 0], ids=["another", "process 0"])
def test_a_notice_to_one_process_replaces_it_alone(
    process: int, tmp_path: Path, undisturbed: float
) -> None:
    """All save at one step. It leaves and is replaced; the others stay, and call `train` again.
    Only what leaves comes behind `run_restartable` before the end.
    """
    trial = Trial(tmp_path / "job")
    trial.order([Death(process, "notice", 11)])
    result = trial.run(60, policy=RestartPolicy(max_preemptions=1))
    assert (result.attempts, trial.results()) == (2, {undisturbed}), result.reasons
    assert trial.lives() == [2 if each == process else 1 for each in range(3)], result.reasons
    assert [note["process"] for note in trial.notes("left")] == [process]
    saved = {note["step"] for note in trial.notes("saved") if note["attempt"] == 1}
    begins = {note["step"] for note in trial.notes("begins") if note["attempt"] == 2}
    assert begins == {max(saved)}  # no step is lost
    trial.check_apart()
    assert trial.attempts() == [(0, []), (2, [process])]


RESIZES = {
    "to 4, then 3": (4, 3),
    "to 4, 3, 4, then a signal": (4, 3, 4, "a signal"),
}


@pytest.mark.parametrize("how", [pytest.param(how, marks=pytest.mark.slow) for how in RESIZES])
def test_where_there_is_other_room_those_that_can_stay_do(how: str, tmp_path: Path) -> None:
    """Two processes, then four, and so on. No step is lost, and the end is that of a job of any
    size. Whoever has been asked to grow has no notice left: a signal is its first.
    """
    trial = Trial(tmp_path / "job")
    room = tmp_path / "room"
    room.write_text("2")

    def script() -> None:
        count = 2
        for attempt, what in enumerate(RESIZES[how], 1):
            trial.wait_for_attempt(attempt, count)
            if isinstance(what, int):
                room.write_text(str(what))
                count = what
            else:
                os.kill(trial.pids(attempt)[0], signal.SIGTERM)
        trial.wait_for_attempt(len(RESIZES[how]) + 1, count)
        trial.end_soon()

    policy = RestartPolicy(max_preemptions=1, grow_after_s=0)
    with ThreadPoolExecutor(1) as pool:
        scripted = pool.submit(script)
        result = trial.run(
            10**6,
            "is of any size",
            count=4,
            policy=policy,
            min_processes=2,
            capacity_file=room,
        )
        scripted.result()
    assert result.attempts == len(RESIZES[how]) + 1, result.reasons
    assert trial.results() == {trial.expect_of_any_size()}, result.reasons
    trial.check_no_step_lost()
    trial.check_apart()
    left = []
    count = 2
    for attempt, what in enumerate(RESIZES[how], 1):
        after = what if isinstance(what, int) else count
        gone = set(range(after, count)) if isinstance(what, int) else {0}
        left += sorted(gone)
        before = trial.pids(attempt)
        now = trial.pids(attempt + 1)
        stayed = {process for process in now if before.get(process) == now[process]}
        assert (len(now), stayed) == (after, set(before) - gone), result.reasons
        count = after
    assert [note["process"] for note in trial.notes("left")] == left
    assert len(trial.notes("ended")) == count


@pytest.mark.slow
@pytest.mark.parametrize("habit", ["", "is large"])
def test_a_loop_that_never_waits_comes_back(habit: str, tmp_path: Path) -> None:
    """Whoever dies, the last of the ring too: nobody sits in a collective that does not fail until
    it is late. Where a message was half sent, gloo wakes nobody, and who waits there is replaced.
    """
    trial = Trial(tmp_path / "job")
    trial.order([Death(2, "step", 11)], [Death(1, "step", 25)], [Death(0, "save", 40)])
    result = trial.run(60, habit, policy=RestartPolicy(max_failures=3, rejoin_timeout_s=120.0))
    (end,) = trial.results()
    alone = Trial(tmp_path / "alone")
    alone.run(60, habit)
    assert alone.results() == {end}
    trial.check_steps()
    trial.check_apart()
    assert result.goodput.rejoining_s < 60.0, result.reasons


@pytest.mark.slow
def test_who_stays_waits_for_as_long_as_the_launcher(tmp_path: Path) -> None:
    """A host may come minutes after the one that was lost: longer than `initialize` waits."""
    trial = Trial(tmp_path / "job")
    trial.order([Death(1, "step", 11)])
    result = trial.run(60, "comes late")
    assert (result.attempts, trial.lives()) == (2, [1, 2, 1]), result.reasons


@pytest.mark.slow
def test_one_that_the_dead_reaches_by_way_of_others_stays(tmp_path: Path) -> None:
    """In a ring of four, process 3 waits for 0 and 2, which leave: their sockets have to close."""
    trial = Trial(tmp_path / "job")
    trial.order([Death(1, "step", 11)])
    result = trial.run(60, count=4)
    assert (result.attempts, trial.lives()) == (2, [1, 2, 1]), result.reasons
    assert len({note["pid"] for note in trial.notes("train") if note["process"] == 3}) == 1


@pytest.mark.slow
def test_a_manager_that_is_left_open_keeps_nobody(tmp_path: Path) -> None:
    """It is closed with the attempt: the threads of its local tier would keep the backend alive,
    and process 3 waits at the sockets of that.
    """
    trial = Trial(tmp_path / "job")
    trial.order([Death(1, "step", 11)])
    result = trial.run(60, "leaves it open", count=4)
    assert (result.attempts, trial.lives()) == (2, [1, 2, 1]), result.reasons
    assert not any("did not come back" in reason for reason in result.reasons)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("habit", "limit_s"),
    [("swallows", 8.0), ("sleeps in C", 8.0), ("waits for data", 1.0), ("waits for a worker", 1.0)],
)
def test_one_that_does_not_come_is_replaced(
    habit: str, limit_s: float, tmp_path: Path, undisturbed: float
) -> None:
    """By name and line: after a second where it sits in one call, else within `rejoin_timeout_s`;
    2 s are for the start. The others stay, though gloo keeps process 2 waiting for process 1.
    """
    trial = Trial(tmp_path / "job")
    trial.order([Death(0, "step", 11)])
    result = trial.run(60, habit, policy=RestartPolicy(max_failures=3, rejoin_timeout_s=8.0))
    assert (result.attempts, trial.results()) == (2, {undisturbed})
    assert trial.lives() == [2, 2, 1]
    (death,) = trial.notes("dies")
    replacement_s = max(note["began_s"] for note in trial.notes("train") if note["process"] == 1)
    assert limit_s <= replacement_s - death["time_s"] <= limit_s + 2.0
    if habit.startswith("waits"):
        said = "process 1 could not leave attempt 1"
        line = "[1] this process cannot stay: it is in wait_for_data, restartable.py:"
    else:
        said = "process 1 did not come back in 8 s"
        line = "process 1 did not come to attempt 2: it is in indulge, restartable.py:"
    assert any(said in reason for reason in result.reasons), result.reasons
    assert line in trial.output.text
    for note in trial.notes("worker"):
        assert not Path(f"/proc/{note['worker']}").exists()


@pytest.mark.slow
def test_a_replacement_that_cannot_start_keeps_nobody(tmp_path: Path) -> None:
    """It counts as gone: those that stayed are ended as soon as they have come, and the next
    attempt is not kept for `grace_s` and `commit_grace_s`.
    """
    trial = Trial(tmp_path / "job")
    trial.order([Death(1, "step", 11)])
    here = tmp_path / "here"
    here.mkdir()
    command = [sys.executable, str(program("restartable")), str(trial.folder)]
    policy = RestartPolicy(max_failures=1, max_startup_failures=1, grace_s=60.0)
    settings = RunSettings(restart=policy, standby=COLD, cwd=here)
    output = CollectedOutput()
    result = run_local([*command, "60", "takes its folder along"], 3, settings, output=output)
    assert (result.outcome, result.attempts) == ("failed", 3), result.reasons
    assert any("attempt 2 could not start: FileNotFoundError" in each for each in result.reasons)
    assert result.elapsed_s < 60.0, result.reasons


@pytest.mark.slow
@pytest.mark.parametrize(
    ("habit", "late"), [("its write hangs", "1"), ("its commit hangs", "0, 1")]
)
def test_one_whose_store_does_not_answer_cannot_stay(
    habit: str, late: str, tmp_path: Path, undisturbed: float
) -> None:
    """It is replaced after a second where no save can be committed any more, else after
    `commit_grace_s`, with those that wait for its commit; 2 s are for the start. The link that it
    could have made later is refused.
    """
    trial = Trial(tmp_path / "job")
    trial.order([Death(2, "step", 17)])
    commits = habit == "its commit hangs"
    policy = RestartPolicy(max_failures=3, rejoin_timeout_s=8.0, commit_grace_s=12.0)
    result = trial.run(60, habit, policy=policy)
    assert (result.attempts, trial.results()) == (2, {undisturbed})
    assert trial.lives()[1:] == [2, 2]
    (death,) = trial.notes("dies")
    replacement_s = max(note["began_s"] for note in trial.notes("train") if note["process"] == 1)
    limit_s = 12.0 if commits else 1.0
    assert limit_s <= replacement_s - death["time_s"] <= limit_s + 2.0
    said = [text for text in trial.output.said if "did not come to attempt 2" in text]
    if commits:
        reason = f"processes {late} did not come back in {limit_s:g} s"
        assert any(reason in each for each in result.reasons), result.reasons
        assert late == ", ".join(text.split()[1] for text in said), said
        assert all("restartable.py:" in text for text in said), said
    else:
        assert f"process {late} could not leave attempt 1" in " ".join(result.reasons)
        assert not said
    assert [note["error"] for note in trial.notes("late link")] == ["FileNotFoundError"] * commits
    begins = {note["step"] for note in trial.notes("begins") if note["attempt"] == 2}
    assert begins == {10}
    trial.check_apart()


def _plan(seed: int, count: int, last: int) -> list[list[Death]]:
    """Draws groups of deaths, by seed: of any process, anywhere, sometimes two at once."""
    drawn = random.Random(seed)
    groups: list[list[Death]] = []
    while sum(map(len, groups)) < count:
        step = last * sum(map(len, groups)) // count + 1
        where = drawn.choice(["step", "step", "save", "restore"])
        dying = drawn.sample(range(3), drawn.choice([1, 1, 1, 2]))
        if not groups:
            where = "step"
        earliest = 0 if where == "restore" else step
        groups.append([Death(process, where, earliest) for process in dying])
        if len(dying) == 1 and drawn.random() < 0.2:
            groups.append([Death(dying[0], "join")])
    return groups


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [20261123])
def test_a_hundred_deaths(seed: int, tmp_path: Path) -> None:
    """In one run: it ends as one in which nobody died; what lives on is bounded."""
    alone = Trial(tmp_path / "alone")
    alone.run(1000)
    trial = Trial(tmp_path / "job")
    trial.order(*_plan(seed, 100, 1000))
    result = trial.run(1000, policy=RestartPolicy(max_failures=20, attempts_without_progress=20))
    assert trial.results() == alone.results()
    assert len(trial.notes("dies")) >= 100
    assert sum(vars(result.goodput).values()) == pytest.approx(result.elapsed_s, rel=0.01)
    trial.check_steps()
    trial.check_apart()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_what_outlives_many_attempts_is_bounded(tmp_path: Path) -> None:
    """The same processes, through a hundred deaths of process 0: descriptors, sockets among them,
    threads, memory. Each attempt has an address of its own, and nobody spoke to that of another.
    """
    trial = Trial(tmp_path / "job")
    trial.order(*([Death(0, "step", 10 * each)] for each in range(1, 101)))
    trial.run(1100)
    assert trial.lives() == [101, 1, 1]
    for process in (1, 2):
        usages = [note for note in trial.notes("train") if note["process"] == process]
        assert len(usages) == 101
        # The thread of a save that its attempt's end has stopped may take some seconds to go. What
        # stays behind after each attempt, or after each tenth one, is there in all of the last ten.
        most = {kind: max(each[kind] for each in usages[5:15]) for kind in _USED}
        least = {kind: min(each[kind] for each in usages[-10:]) for kind in _USED}
        for kind in ("files", "sockets", "threads", "clients"):
            assert least[kind] <= most[kind] + 2, (kind, usages)
        assert least["memory"] <= 1.05 * most["memory"]
    trial.check_apart()
