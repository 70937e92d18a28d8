"""What the coordinator is told of a job by its launcher."""

from __future__ import annotations

from holdfast.launch import RestartPolicy
from holdfast.launch.supervisor.account import Errand
from holdfast.launch.supervisor.decide import decide
from holdfast.launch.supervisor.job import Decision, Event, Exited, Job, Reserved, Start, Stop

ERRAND = Errand(["python", "my train.py"], "/home/me", 5.0)


def after(*events: Event) -> Decision:
    """Returns the last decision about a job of two processes; a second passes between two."""
    job = Job("j", 2, 2, RestartPolicy(max_failures=1))
    for now, event in enumerate(events):
        decision = decide(job, event, float(now))
        job = decision.job
    return decision


def test_the_command_is_as_a_shell_would_take_it() -> None:
    """With its folder and its beginning, in every state."""
    told = ERRAND.launcher(after(Start()))
    assert (told.command, told.folder) == ("python 'my train.py'", "/home/me")
    assert (told.began_unix_s, told.attempt, told.state) == (5.0, 1, "scheduling")


def test_missing_room_is_told_while_it_is_missing() -> None:
    """And no longer once there is enough."""
    waiting = ERRAND.launcher(after(Start(), Reserved(1, 1)))
    assert waiting.waiting_for == "room for 1 of at least 2 processes"
    assert ERRAND.launcher(after(Start(), Reserved(1, 1), Reserved(1, 2))).waiting_for == ""


def test_an_end_by_preemption_is_no_failure() -> None:
    """Both are final; what is to be done differs."""
    ends = [Exited(1, 0, 75), Exited(1, 1, 75)]
    stopped = ERRAND.launcher(after(Start(), Reserved(1, 2), Stop("SIGTERM"), *ends))
    assert stopped.state == "preempted"
    done = ERRAND.launcher(after(Start(), Reserved(1, 2), Exited(1, 0, 0), Exited(1, 1, 0)))
    assert done.state == "finished"
