"""`holdfast status`: the job as a table and as JSON, stacks, and errors in one sentence."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint import CheckpointManager, EveryNSteps, Local
from holdfast.coordination import CoordinationClient, CoordinationService, JobIdentity, StatusClient
from holdfast.coordination.mounts import boot_id
from holdfast.coordination.process.job_folder import JobFolder, LaunchedJob, RunningJob
from holdfast.launch.workers.coordinator import Coordinator
from holdfast.launch.workers.secrets import JobSecrets
from holdfast.multihost import ClusterGroup
from tests.support.checkpointing import served_groups
from tests.support.local_hosts import job

WIDE = os.environ | {"COLUMNS": "200"}


def holdfast(*arguments: str) -> list[str]:
    return [sys.executable, "-c", "from holdfast.cli import main; main()", *arguments]


def test_status_shows_who_waits_and_who_is_missing() -> None:
    """`holdfast status --json` names a barrier's waiters and the missing, progress, hosts and keys;
    the table holds the same.
    """
    with CoordinationService.spawn(2, job=JobIdentity(name="digits", attempt=3)) as service:
        clients = [CoordinationClient(service.address, process_id) for process_id in range(2)]
        threads = [threading.Thread(target=client.connect) for client in clients]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        clients[0].key_value_set("dir/key", "value")
        waiting = threading.Thread(target=clients[0].wait_at_barrier, args=("save/100", 60_000))
        waiting.start()
        shown: dict[str, object] = {}
        while not shown.get("barriers"):
            output = subprocess.run(
                holdfast("status", service.address, "--json"),
                capture_output=True,
                check=True,
                text=True,
            ).stdout
            shown = json.loads(output)
        (barrier,) = shown["barriers"]  # type: ignore[misc]
        assert (
            barrier["barrier_id"] == "save/100"
            and barrier["missing"] == [1]
            and [each["task_id"] for each in barrier["waiting"]] == [0]
        )
        assert [task["state"] for task in shown["tasks"]] == ["CONNECTED"] * 2 and shown[
            "job"
        ] == "digits"  # type: ignore[union-attr]
        assert shown["prefixes"][0]["prefix"] == "dir"  # type: ignore[index]
        table = subprocess.run(
            holdfast("status", service.address), capture_output=True, check=True, text=True
        ).stdout
        assert "job digits attempt 3, 2 processes, running" in table and "save/100" in table
        clients[1].wait_at_barrier("save/100", 60_000)
        waiting.join(30)
        for thread in [threading.Thread(target=client.shutdown) for client in clients]:
            thread.start()
        assert service.wait(30) == 0


def test_no_process_steers_the_terminal() -> None:
    """What a process is called, what it says of itself, its barriers and its threads come to the
    terminal without control characters.
    """
    hostile = "\x1b]0;owned\x07\x9b31m\u202e"
    stop = threading.Event()
    with (
        CoordinationService.spawn(1, recoverable=True) as service,
        CoordinationClient(service.address, 0, host=f"b{hostile}") as client,
    ):
        threading.Thread(target=stop.wait, name=f"t{hostile}", daemon=True).start()
        client.report(step=1, trouble=f"step 1 was not saved{hostile}")
        for option in ((), ("--events",), ("--stacks",)):
            shown = subprocess.run(
                holdfast("status", service.address, *option),
                capture_output=True,
                check=True,
                text=True,
                env=WIDE,
            ).stdout
            assert r"\x1b]0;owned\x07\x9b31m\u202e" in shown, option
            assert all(each.isprintable() or each == "\n" for each in shown), option
        stop.set()


def test_stacks_as_json() -> None:
    """One object, with the text of each process."""
    with (
        CoordinationService.spawn(1, recoverable=True) as service,
        CoordinationClient(service.address, 0),
    ):
        output = subprocess.run(
            holdfast("status", service.address, "--stacks", "--json"),
            capture_output=True,
            check=True,
            text=True,
        ).stdout
    shown = json.loads(output)
    assert (shown["version"], shown["diagnosis"]) == (1, [])
    (stacks,) = shown["stacks"]
    assert stacks["process"] == 0 and "test_stacks_as_json" in stacks["text"]


def test_status_shows_where_local_steps_are(tmp_path: Path) -> None:
    """Which steps the hosts have, where each process's part has its copies, and how many hosts may
    be lost: now, and after a loss.
    """
    hosts = [tmp_path / f"host{rank}" for rank in range(3)]
    with job(tmp_path / "root", hosts) as first:
        first.save(5)
    for survives in (1, 0):
        parts = [f"part-{process:05d}.json" for process in range(3)]
        holders = [
            [rank for rank, folder in enumerate(hosts) if list(folder.rglob(part))]
            for part in parts
        ]
        with (
            served_groups(3) as members,
            job(tmp_path / "root", hosts, members=members),
        ):
            address = members[0]._group_client.client.address  # type: ignore[attr-defined]
            steps: list[dict[str, Any]] = []
            while not steps:  # a report goes out at once, and is not waited for
                output = subprocess.run(
                    holdfast("status", address, "--json"),
                    capture_output=True,
                    check=True,
                    text=True,
                ).stdout
                steps = json.loads(output)["tasks"][0]["progress"].get("root", {}).get("steps", [])
            assert [(step["step"], step["local"], step["survives"]) for step in steps] == [
                (5, True, survives)
            ]
            assert [sorted(each["processes"]) for each in steps[0]["copies"]] == holders
            table = subprocess.run(
                holdfast("status", address), capture_output=True, check=True, text=True, env=WIDE
            ).stdout
            host = socket.gethostname()
            shown = "; ".join(
                f"{process}: {', '.join(f'{rank} ({host})' for rank in found)}"
                for process, found in enumerate(holders)
            )
            assert "local step  hosts that may be lost  whose part is where" in table
            assert re.search(rf"^ +5 +{survives}  {re.escape(shown)} *$", table, re.MULTILINE), (
                table
            )
        shutil.rmtree(hosts[1])


def test_a_local_save_is_in_the_status(tmp_path: Path) -> None:
    """Not a save later."""
    with (
        CoordinationService.spawn(1) as service,
        CoordinationClient(service.address, 0) as client,
        StatusClient(service.address) as status,
    ):
        local = Local(tmp_path / "host", save_policy=EveryNSteps(1))
        group = ClusterGroup(client, 0, 1)
        with CheckpointManager(
            tmp_path / "root", save_policy=EveryNSteps(100), group=group, local=local
        ) as manager:
            manager.save(3, {"x": 1}).wait()
            while not (steps := status.status().tasks[0].progress.root.steps):
                pass
            assert (
                steps[0].step,
                steps[0].local,
                steps[0].survives,
                list(steps[0].copies[0].processes),
            ) == (3, True, 0, [0])


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("127.0.0.1:1", "Connection refused"),
        ("unix:/nonexistent/socket", "No such file or directory"),
        ("here", "this is no address"),
    ],
)
def test_status_of_nobody_says_what_was_tried(address: str, why: str) -> None:
    """An address where nothing answers is one sentence and exit code 3."""
    ended = subprocess.run(
        holdfast("status", address, "--timeout-s", "0.5"),
        capture_output=True,
        check=False,
        text=True,
    )
    assert ended.returncode == 3 and ended.stderr.startswith(
        f"Error: {address}: no coordinator answered a status request within "
    )
    assert why in ended.stderr and len(ended.stderr.splitlines()) == 1


@pytest.mark.parametrize("address", [["unix:/nonexistent/socket"], []])
def test_a_watch_prints_each_object_in_a_line(address: list[str]) -> None:
    """The last too, which says why it ends: whoever reads lines of JSON can read all of them."""
    with tempfile.TemporaryDirectory(dir="/tmp") as base:
        done = subprocess.run(
            holdfast("status", *address, "--watch", "--json", "--timeout-s=0.1"),
            env=os.environ | {"TMPDIR": base},
            capture_output=True,
            text=True,
            check=False,
        )
    (line,) = done.stdout.splitlines()
    assert json.loads(line)["exit_code"] == done.returncode == 3


def test_how_a_job_ended_is_found(tmp_path: Path) -> None:
    """By the address of its coordinator, by its log folder, and as the last of this user."""
    with tempfile.TemporaryDirectory(dir="/tmp") as base:
        env = os.environ | {"TMPDIR": base}

        def say(*arguments: str) -> str:
            return subprocess.run(
                holdfast(*arguments), env=env, capture_output=True, text=True, check=False
            ).stderr

        ran = say(*f"run -n 1 --log-dir {tmp_path} --job-id j -- false".split())
        address = ran.split()[5]
        assert address.startswith(f"unix:{base}/"), ran
        ended = r"job j, attempt 1, ended \d+ s ago: failed, exit code 1: process 0 of 1 ended with"
        for arguments in ((address,), (str(tmp_path),), ()):
            assert re.search(ended, say("status", *arguments, "--timeout-s", "0.5")), arguments


@pytest.mark.parametrize("by", [pytest.param("log folder", marks=pytest.mark.slow), "address"])
def test_a_watch_goes_on_through_a_restart(tmp_path: Path, by: str) -> None:
    """Where an earlier run of the job has left how it ended. In a pipe each look is written at
    once; it ends when the job does.
    """
    script = f"""
        until [ -e {tmp_path}/go$HOLDFAST_ATTEMPT ]; do sleep 0.1; done
        exit $((2 - HOLDFAST_ATTEMPT))
    """
    with tempfile.TemporaryDirectory(dir="/tmp") as base:
        env = os.environ | {"TMPDIR": base}
        run = holdfast(
            *f"run -n 1 --no-view --max-restarts 1 --log-dir {tmp_path} --job-id j --".split(),
            "sh",
            "-c",
        )
        subprocess.run([*run, "exit 93"], env=env, capture_output=True, check=False)
        with subprocess.Popen(
            [*run, script], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as job_:
            assert job_.stdout is not None
            line = next(line for line in job_.stdout if "attempt 1, coordinator at" in line)
            job_is = line.split()[-1] if by == "address" else tmp_path
            watch = holdfast(*f"status {job_is} --watch --interval-s 0.2 --timeout-s 1".split())
            with subprocess.Popen(
                watch, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            ) as watched:
                assert watched.stdout is not None and watched.stderr is not None
                for attempt in (1, 2):
                    seen = f"job j attempt {attempt}, 1 process"
                    assert any(seen in line for line in watched.stdout), watched.stderr.read()
                    (tmp_path / f"go{attempt}").touch()
                rest = watched.communicate(timeout=60)[1]
                assert watched.returncode == 3
                assert re.search(r"Error: job j, attempt 2, ended \d+ s ago: finished", rest), rest
            job_.communicate(timeout=60)


def _watch(stack: ExitStack, base: str) -> subprocess.Popen[str]:
    """Starts to watch this user's job."""
    watched = stack.enter_context(
        subprocess.Popen(
            holdfast("status", "--watch", "--interval-s=0.1", "--timeout-s=1"),
            env=os.environ | {"TMPDIR": base},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    )
    stack.callback(watched.terminate)
    return watched


def test_a_watch_goes_on_with_the_newest_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the coordinator of the one before still answers."""
    with tempfile.TemporaryDirectory(dir="/tmp") as base, ExitStack() as stack:
        monkeypatch.setattr(tempfile, "tempdir", base)

        def serve(attempt: int) -> None:
            identity = JobIdentity(name="j", attempt=attempt)
            service = stack.enter_context(CoordinationService.spawn(1, job=identity))
            JobFolder.create().publish(RunningJob("j", attempt, service.address, service.pid))

        serve(1)
        watched = _watch(stack, base)
        assert any("job j attempt 1" in line for line in watched.stdout or ())
        serve(2)
        assert any("job j attempt 2" in line for line in watched.stdout or ())


def test_the_watch_of_a_secured_job_waits_for_the_next_attempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it shows to a coordinator goes with that."""
    secrets = JobSecrets.create(["127.0.0.1"])
    with tempfile.TemporaryDirectory(dir="/tmp") as base, ExitStack() as stack:
        monkeypatch.setattr(tempfile, "tempdir", base)
        LaunchedJob("j", os.getpid(), "", {"state": "running", "attempt": 1}, "").leave()
        first = Coordinator("j", 1, 1, host="127.0.0.1", secrets=secrets)
        stack.callback(first.close)
        watched = _watch(stack, base)
        assert any("job j attempt 1" in line for line in watched.stdout or ())
        first.close()
        assert any("cannot read the token file" in line for line in watched.stderr or ())
        stack.callback(Coordinator("j", 2, 1, host="127.0.0.1", secrets=secrets).close)
        assert any("job j attempt 2" in line for line in watched.stdout or ())


def test_a_watch_bears_a_late_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a job that has no launcher here, as those of `holdfast task`; it ends with that."""
    with tempfile.TemporaryDirectory(dir="/tmp") as base, ExitStack() as stack:
        monkeypatch.setattr(tempfile, "tempdir", base)
        service = stack.enter_context(CoordinationService.spawn(1))
        JobFolder.create().publish(RunningJob("j", 1, service.address, service.pid))
        watched = _watch(stack, base)
        assert any("gathering" in line for line in watched.stdout or ())
        os.kill(service.pid, signal.SIGSTOP)
        assert any("is asked again" in line for line in watched.stderr or ())
        os.kill(service.pid, signal.SIGCONT)
        with CoordinationClient(service.address, 0):
            assert any("1 process, running" in line for line in watched.stdout or ())
        assert service.wait(30) == 0
        rest = watched.communicate(timeout=60)[1]
        assert watched.returncode == 3 and "no coordinator answered" in rest, rest


def test_a_look_that_is_interrupted_has_shown_nothing() -> None:
    """It ends with 130: a script would take 0 for an answer."""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        with subprocess.Popen(holdfast("status", address, "--timeout-s", "60")) as asking:
            mute.accept()[0].close()
            asking.send_signal(signal.SIGINT)
            assert asking.wait(30) == 130


@pytest.mark.parametrize("option", [("--events",), ("--since", "1m")])
def test_stacks_come_alone(option: tuple[str, ...]) -> None:
    """Nothing that was asked for is dropped in silence."""
    ended = subprocess.run(
        holdfast("status", "127.0.0.1:1", "--stacks", *option),
        capture_output=True,
        check=False,
        text=True,
    )
    assert ended.returncode == 2 and f"{option[0]} is not shown with --stacks" in ended.stderr


@pytest.mark.slow
def test_status_without_an_address_finds_this_users_jobs() -> None:
    """None: a sentence. One: its table. Two: a list of both. One that is dead counts no more."""
    with tempfile.TemporaryDirectory(dir="/tmp") as base, ExitStack() as stack:
        env = os.environ | {"TMPDIR": base, "COLUMNS": "400"}  # a worker of pytest-xdist has 80

        def status() -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                holdfast("status"), env=env, capture_output=True, text=True, check=False
            )

        def start(job: str) -> subprocess.Popen[str]:
            command = holdfast(
                "run",
                "-n",
                "1",
                "--job-id",
                job,
                "--",
                sys.executable,
                "-S",
                "-c",
                "import time; time.sleep(600)",
            )
            popen = subprocess.Popen(
                command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
            )
            stack.callback(popen.communicate)
            stack.callback(popen.kill)
            assert popen.stderr is not None
            line = popen.stderr.readline()
            assert line.startswith(f"holdfast: attempt 1, coordinator at unix:{base}/"), line
            return popen

        assert "no job of this user runs on this machine" in status().stderr
        folder = Path(base, f"holdfast-{os.getuid()}", boot_id()[:8], "job-half")
        folder.mkdir(parents=True, mode=0o700)
        (folder / "client.crt").write_text("of one that is being made")
        first = start("one")
        assert "job one attempt 1, 1 process, gathering" in status().stdout
        start("two")
        several = status()
        assert several.returncode == 2 and several.stderr.startswith(
            "Error: 2 jobs of this user run on this machine: give the address of one\n"
        )
        assert [line.split()[:3] for line in several.stdout.splitlines()[1:]] == [
            ["one", "1", "running"],
            ["two", "1", "running"],
        ]
        first.kill()
        first.wait(30)
        while (shown := status()).returncode:
            assert "2 jobs" in shown.stderr
        assert "job two attempt 1" in shown.stdout


def test_the_history_of_a_job_survives_its_coordinator(tmp_path: Path) -> None:
    """`--events` prints what happened, before and after a restart of the coordinator; `--since`
    leaves out what is older.
    """
    journal = str(tmp_path / "journal")
    with CoordinationService.spawn(1, job=JobIdentity(name="j"), journal=journal) as service:
        client = CoordinationClient(service.address, 0)
        client.connect()
        client.report(saved_step=30)
        client.close()
        os.kill(service.pid, signal.SIGKILL)
        service.wait(30)
    with CoordinationService.spawn(1, job=JobIdentity(name="j"), journal=journal) as service:
        shown = subprocess.run(
            holdfast("status", service.address, "--events"),
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        texts = [line.split(maxsplit=3)[2:] for line in shown.splitlines()]
        assert texts[0][0] == "joined" and texts[1] == ["saved", "step 30 is saved"], shown
        assert texts[2] == [
            "coordinator",
            "the coordinator was started again, with its journal",
        ], shown
        as_json = subprocess.run(
            holdfast("status", service.address, "--events", "--json"),
            capture_output=True,
            check=True,
            text=True,
        )
        history = json.loads(as_json.stdout)
        kinds = [event["kind"] for event in history["events"]]
        assert history["version"] == 1 and kinds == ["joined", "saved", "coordinator"]
        late = subprocess.run(
            holdfast("status", service.address, "--since", "0s"),
            capture_output=True,
            check=True,
            text=True,
        )
        assert late.stdout == ""
        wrong = subprocess.run(
            holdfast("status", service.address, "--since", "soon"),
            capture_output=True,
            check=False,
            text=True,
        )
        assert (
            wrong.returncode == 2
            and "expected a time such as 90s, 10m or 2h, found 'soon'" in wrong.stderr
        )


def test_the_history_holds_the_attempts_before() -> None:
    """A new attempt has a new coordinator: its launcher tells it what came before."""
    command = f"{sys.executable} -c 'from holdfast.cli import main; main()' status --events"
    script = (
        f'[ "$HOLDFAST_ATTEMPT" = 1 ] && exit 3; until {command} | grep "exit code 3"; do :; done'
    )
    with tempfile.TemporaryDirectory(dir="/tmp") as base:
        ended = subprocess.run(
            holdfast("run", "-n", "1", "--max-restarts", "1", "--", "sh", "-c", script),
            env=os.environ | {"TMPDIR": base},
            capture_output=True,
            text=True,
            check=False,
            timeout=100,
        )
    assert (
        ended.returncode == 0
        and "launcher    attempt 1 is restarting: process 0 of 1 ended with exit code 3"
        in ended.stdout
    ), ended


@pytest.mark.parametrize("command", ["status", "web"])
def test_credentials_are_for_a_coordinator_that_is_named(command: str, tmp_path: Path) -> None:
    """A token that would be passed over, as a job that is found here brings its own, is refused."""
    token = tmp_path / "token"
    token.write_text("t")
    done = subprocess.run(
        holdfast(command, "--token-file", str(token)), capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "--token-file is for a coordinator: give its address" in done.stderr
