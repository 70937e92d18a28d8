"""What `holdfast status` prints of a status."""

from __future__ import annotations

import io

from rich.console import Console

from holdfast.cli.status_tables import status_tables
from holdfast.proto import coordination_pb2, session_pb2

COUNT = 4_096
ODD = 3_000


def printed(status: session_pb2.StatusResponse) -> str:
    out = io.StringIO()
    Console(file=out, width=220).print(status_tables(status, []))
    return out.getvalue()


def a_job(count: int) -> session_pb2.StatusResponse:
    """Returns the status of a job in which half wait at a barrier for the others."""
    status = session_pb2.StatusResponse(num_processes=count, heartbeat_interval_s=25)
    for task_id in range(count):
        status.tasks.add(
            task_id=task_id,
            state=coordination_pb2.CONNECTED,
            host=f"host-{task_id // 8}",
            step_age_s=-1,
        )
    barrier = status.barriers.add(barrier_id="step", left_s=5, missing=range(count // 2, count))
    for task_id in range(count // 2):
        barrier.waiting.add(task_id=task_id, since_s=1)
    return status


def test_a_job_of_thousands_fits_the_screen() -> None:
    """It has rows for those that are not as they should be, and for some others; the rest is
    counted by their states.
    """
    status = a_job(COUNT)
    status.tasks[ODD].state = coordination_pb2.ERROR
    status.tasks[ODD].error = "process 3000 is lost"
    status.tasks[ODD + 1].progress.trouble = "a save has failed"
    lines = printed(status).splitlines()
    assert len(lines) < 100
    assert any(line.split()[:2] == [str(ODD), "ERROR"] for line in lines)
    assert any("a save has failed" in line for line in lines)
    (others,) = [line for line in lines if "--json has them all" in line]
    assert others.startswith("4,030 more: 4,030 CONNECTED; --json")


def test_a_job_of_64_has_all_its_rows() -> None:
    """And nothing is said of others."""
    lines = printed(a_job(64)).splitlines()
    rows = [line for line in lines if line.split()[1:2] == ["CONNECTED"]]
    assert len(rows) == 64 and not any("more:" in line for line in lines)


def test_the_newest_attempts_say_who_stayed() -> None:
    """Where there were several; the last five, each with its reason."""
    status = a_job(4)
    status.launcher.attempts.add(number=1, num_processes=4, why="start")
    assert "stayed" not in printed(status)
    for number in range(2, 9):
        status.launcher.attempts.add(
            number=number, num_processes=4, stayed=3, replaced=[1], why=f"death {number}"
        )
    lines = [line for line in printed(status).splitlines() if "3 stayed, replaced 1" in line]
    assert [line.split()[0] for line in lines] == ["4", "5", "6", "7", "8"]
    assert "death 8" in lines[-1]
