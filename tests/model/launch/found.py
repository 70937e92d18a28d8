"""Lives in which the supervisor once broke a rule, each as short as it goes."""

from __future__ import annotations

from holdfast.launch import RestartPolicy

from .happenings import EndCoordinator, Exit, Late, Leave, Notice, Room, Withdraw
from .lives import Life
from .program import Program

FOUND: dict[str, Life] = {
    "an odd exit while others commit, after a notice": Life(
        (Notice(1, 5.0, "a"), Exit(1, 7.0, 2, 1)),
        RestartPolicy(max_preemptions=1),
        Program(commit_s=30.0),
    ),
    "an odd exit while others commit, to come back as more": Life(
        (Room(1, 5.0, 3), Exit(1, 7.0, 1, 1)),
        RestartPolicy(grow_after_s=0.0),
        Program(commit_s=30.0),
        room=2,
    ),
    "93 overtaken by 1": Life(
        (Leave(1, 3.0, 1, 93, 2.0), Exit(1, 4.0, 2, 1)), RestartPolicy(max_failures=1)
    ),
    "93 overtaken by 1, in the job's last attempt": Life(
        (Leave(1, 3.0, 1, 93, 2.0), Exit(1, 4.0, 2, 1))
    ),
    "an end that is reported during the back-off": Life(
        (Late(1, 0.0, 1, 10.8), Exit(1, 3.0, 0, 1)), RestartPolicy(max_failures=1, backoff_s=5.0)
    ),
    "less time to commit than to leave": Life(
        (Notice(1, 5.0, "a"), Exit(1, 7.0, 2, 1)),
        RestartPolicy(max_preemptions=1, commit_grace_s=1.0),
        Program(commit_s=30.0),
    ),
    "the exit code of a coordinator's end": Life(
        (Leave(1, 3.0, 0, 0, 20.0), EndCoordinator(1, 4.0)),
        RestartPolicy(grace_s=0.5),
        processes=1,
    ),
    "93 after the coordinator's end": Life(
        (
            Leave(1, 3.0, 1, 93, 3.0),
            Exit(1, 4.0, 2, 1),
            EndCoordinator(1, 5.0),
        ),
        program=Program(commit_s=30.0),
    ),
    "done in an attempt that was lost": Life(
        (Exit(1, 7.8, 0, 1), Notice(2, 3.0, "a", delivered=True)),
        RestartPolicy(max_failures=1),
        Program(steps=4, save_every=2, commit_s=4.0, leaves_with=0, says_done=True),
        processes=1,
    ),
    "a deadline while growing": Life(
        (Room(1, 6.0, 2), Notice(1, 6.0, "a", 10.0, delivered=True)),
        RestartPolicy(grow_after_s=0.0),
        Program(write_s=15.0),
        processes=2,
        room=1,
    ),
    "a deadline after 93": Life(
        (Notice(1, 5.0, "a", 6.0), Exit(1, 8.0, 2, 93)), program=Program(commit_s=60.0)
    ),
    "a deadline that was withdrawn": Life(
        (Notice(1, 5.0, "a", 6.0), Notice(1, 5.0, "b", 60.0), Withdraw(1, 6.5, "a")),
        RestartPolicy(max_preemptions=1),
        Program(write_s=15.0, echoes=False),
    ),
    "a shutdown that hangs, after the last save": Life(
        (Leave(1, 5.5, 1, 0, 99.0), Exit(1, 7.5, 2, 1)), program=Program(commit_s=8.0)
    ),
    "a coordinator that ends after a notice": Life(
        (Notice(1, 7.0, "a", 40.0), EndCoordinator(1, 9.0)),
        RestartPolicy(grace_s=0.5),
        Program(commit_s=30.0),
    ),
    "an end just before its replacement": Life(
        (Exit(1, 12.5, 0, 1), Exit(1, 13.1, 2, 1)),
        RestartPolicy(max_failures=3, rejoin_timeout_s=0.5),
        Program(commit_s=4.0, outlives=True),
        seed=1530,
    ),
    "in a save of the attempt before, whose successor loses its coordinator": Life(
        (Exit(1, 2.3, 2, 1), EndCoordinator(2, 3.8)),
        RestartPolicy(max_failures=1),
        Program(step_s=0.3, write_s=0.2, commit_s=15.0, outlives=True),
        seed=6441,
    ),
    "a hang while one commits beside others that have no client": Life(
        (),
        RestartPolicy(max_failures=3, startup_timeout_s=10.0, stall_timeout_s=8.0),
        Program(commit_s=15.0, strangers=(0, 1)),
        seed=1780,
    ),
}
