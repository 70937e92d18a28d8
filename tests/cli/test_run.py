"""`holdfast run`: what it says at the end, for programs and for people, and where the job's time
went while it runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from holdfast.cli import ray as ray_module
from holdfast.cli import run as run_module
from holdfast.cli import slurm as slurm_module
from holdfast.cli.common import refuse
from holdfast.cli.entry import main
from holdfast.cli.ray import ray
from holdfast.cli.run import run
from holdfast.cli.slurm import slurm
from holdfast.coordination import StatusClient
from holdfast.coordination.diagnosis.summary import GOODPUT_PARTS
from tests.support.paths import program
from tests.support.processes import wait_until

RUN = [sys.executable, "-c", "from holdfast.cli import main; main()", "run"]
PARTS = GOODPUT_PARTS.keys()


def test_all_time_of_a_job_is_accounted_for(tmp_path: Path) -> None:
    """The status has the parts, which sum to the time so far; so has the JSON at the end, on stdout
    alone, within 1 % of the wall clock.
    """
    command = [
        *RUN,
        "-n",
        "2",
        "--json",
        "--max-restarts",
        "1",
        "--no-standby",
        "--grace-s",
        "1",
        "--",
    ]
    began = time.monotonic()
    with subprocess.Popen(
        [*command, sys.executable, "-u", str(program("steps_reported")), str(tmp_path / "done")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as job:
        assert job.stderr is not None
        started = time.monotonic()
        address = job.stderr.readline().split()[-1]
        with StatusClient(address, wait_for_ready=True) as client:
            while (seconds := dict(client.status().goodput_s)).get("stepping_s", 0.0) < 1.0:
                time.sleep(0.05)
        so_far_s = sum(seconds.values())
        took_so_far_s = time.monotonic() - began
        shown = subprocess.run(
            [*RUN[:-1], "status", address], capture_output=True, text=True, check=True, timeout=60
        ).stdout
        (tmp_path / "done").touch()
        stdout, stderr = job.communicate(timeout=60)
    assert any(
        line.startswith("goodput ") and "starting " in line for line in shown.splitlines()
    ), shown
    assert seconds.keys() == PARTS and 1.0 < so_far_s <= took_so_far_s
    took_s = time.monotonic() - started
    ended = json.loads(stdout)
    assert (job.returncode, ended["outcome"], ended["exit_code"], ended["attempts"]) == (
        0,
        "done",
        0,
        2,
    ) and ended["step"] >= 12, stderr
    assert ended["error"] is None and ended["goodput"].keys() == PARTS
    assert (
        sum(ended["goodput"].values()) == pytest.approx(ended["elapsed_s"], rel=0.01)
        and ended["elapsed_s"] <= took_s
    )
    assert all(
        ended["goodput"][part] > 0 for part in ("starting_s", "stepping_s", "redoing_s", "ending_s")
    )


@pytest.mark.slow
def test_people_read_where_the_time_went(tmp_path: Path) -> None:
    """One line on stderr, of a job that has reported steps; a program's failure is a sentence in
    the JSON.
    """
    (tmp_path / "done").touch()
    job = [sys.executable, str(program("steps_reported")), str(tmp_path / "done")]
    command = [*RUN, "-n", "1", "--max-restarts", "1", "--no-standby", "--", *job]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0 and done.stderr.splitlines()[-2].startswith("holdfast: goodput "), (
        done.stderr
    )
    failed = subprocess.run(
        [*RUN, "-n", "1", "--json", "--", *job],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    ended = json.loads(failed.stdout)
    assert failed.returncode == 1 and ended["outcome"] == "failed"
    assert ended["error"] == "process 0 of 1 ended with exit code 1 in attempt 1"


@pytest.mark.parametrize("module", ["click", "rich.console", "numpy", "jax._src.core"])
def test_control_c_at_the_start_is_130(module: str) -> None:
    """While the command imports: no traceback, and the job does not run on."""
    command = [*RUN, "-n", "1", "--", "sleep", "600"]
    command[1:1] = ["-X", "importtime"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        imported = (line.split("|")[-1].strip() for line in process.stderr)
        assert module in imported
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in said, said


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(24))
def test_control_c_at_any_moment(seed: int) -> None:
    """Of the first two seconds: 130, or before holdfast's first line Python's own death of it. No
    traceback of holdfast's, and nothing runs on.
    """
    after_s = random.Random(seed).uniform(0, 2)
    token = f"{600 + os.getpid()}.{seed:02}"  # the job is found by it
    with subprocess.Popen(
        [*RUN, "-n", "1", "--", "sleep", token],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        time.sleep(after_s)  # the moment is what is tested
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=60)
    if process.returncode == -signal.SIGINT:
        assert "holdfast" not in said.replace("from holdfast.cli import main", ""), said
    else:
        assert process.returncode == 130 and "Traceback" not in said, (after_s, said)
    wait_until(lambda: not _running(token))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(50))
def test_a_stop_while_processes_start(seed: int) -> None:
    """It reaches them all: the job ends within 5 s."""
    token = f"{600 + os.getpid()}.{seed:02}"
    with subprocess.Popen(
        [*RUN, "-n", "4", "--", "sleep", token], stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        first = process.stderr.readline()  # the launcher is there, and starts them
        time.sleep(random.Random(seed).uniform(0, 0.5))  # the moment is what is tested
        process.terminate()
        stopped = time.monotonic()
        _, said = process.communicate(timeout=60)
    assert time.monotonic() - stopped < 5.0, first + said
    assert not _running(token)


def _running(token: str) -> bool:
    """Returns whether a process has this among its arguments."""
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if folder.name.isdigit() and token.encode() in (folder / "cmdline").read_bytes():
                return True
    return False


# What does nothing alone: each option, a value for it, and a part of the sentence that says so.
ALONE = {
    "run -n 1": {
        "--min-processes 1": "add --capacity-file",
        "--standby": "add --max-restarts",
        "--preload flax": "add --max-restarts",
        "--startup-timeout-s 9": "add --stall-timeout-s",
        "--web-port 0": "add --web",
        "--metrics-host 127.0.0.1": "add --metrics-port",
    },
    "ray -n 1": {
        "--standby": "add --max-restarts",
        "--preload flax": "add --max-restarts",
        "--spares 9": "add --max-restarts",
    },
    "slurm": {"--startup-timeout-s 9": "add --stall-timeout-s"},
}
VALUES = {"command": ["true"], "address": ["a"], "preload": ["flax"], "resources": ["CPU=1"]}
COMMANDS = {"run": run, "ray": ray, "slurm": slurm}


@pytest.mark.parametrize("line", ALONE)
def test_an_option_that_does_nothing_is_refused(line: str) -> None:
    """Each option of each launcher is either of use alone, or says what is missing beside it."""
    name, *needed = line.split()
    command = COMMANDS[name]
    refusals = ALONE[line]
    for each in command.params:
        if not isinstance(each, click.Option) or each.hidden or each.required:
            continue
        for option in (*each.opts, *each.secondary_opts):
            value = [] if each.is_flag else VALUES.get(each.name or "", ["9"])
            if option == "--web-port":
                value = ["0"]
            typed = " ".join([option, *value])
            said = refusal(command, [*needed, option, *value, "--", "true"])
            expected = [text for known, text in refusals.items() if known.split()[0] == option]
            assert bool(said) is bool(expected), (typed, said)
            assert all(option in said and text in said for text in expected), said


def refusal(command: click.Command, typed: list[str]) -> str:
    """Returns why a command line is refused, "" where it is not."""
    idle = {
        run: run_module.without_effect,
        ray: ray_module.without_effect,
        slurm: slurm_module.without_effect,
    }
    try:
        with command.make_context(command.name, typed) as context:
            if command in idle:
                refuse(idle[command](context.params))
    except click.UsageError as error:
        return error.message
    return ""


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("run -n 1 --json --view", "--view is for people, --json for programs"),
        ("run -n 1 --max-restarts 1 --no-standby --preload flax", "leave --no-standby out"),
        ("task --coordinator h:1 --host h", "is for a coordinator that process 0 starts"),
        ("task --coordinator h:1 --rendezvous f", "is for a coordinator that process 0 starts"),
        ("task --coordinator h:1 --insecure", "is for a coordinator that process 0 starts"),
        ("slurm -n 4", "o such option"),
        ("run --ray auto -n 1", "use `holdfast ray`"),
    ],
)
def test_an_option_that_does_nothing_beside_another_is_refused(command: str, sentence: str) -> None:
    """With what it is for."""
    refused = CliRunner().invoke(main, [*command.split(), "--", "true"])
    assert refused.exit_code == 2 and sentence in " ".join(refused.output.split()), refused.output


@pytest.mark.parametrize("command", ["run -n 1", "slurm", "task"])
def test_a_script_without_its_interpreter_is_refused(command: str, tmp_path: Path) -> None:
    """With the line that runs it; one that can be run is a command."""
    script = tmp_path / "train.py"
    script.write_text("#!/bin/sh\n")
    refused = CliRunner().invoke(main, [*command.split(), "--", str(script), "--lr", "1 2"])
    said = " ".join(refused.output.split())
    assert refused.exit_code == 2, said
    assert f"is a script, and no command that can be run: write python {script} --lr '1 2'" in said
    script.chmod(0o755)
    assert not refusal(run, ["-n", "1", "--", str(script)])


@pytest.mark.parametrize("command", ["run -n 1", "slurm", "task", "kubernetes"])
def test_a_mistyped_option_is_no_command(command: str) -> None:
    """It is named, with the option that it may be; what follows the command is the command's."""
    mistyped = "--heartbeat-timeout"
    refused = CliRunner().invoke(main, [*command.split(), mistyped, "3", "true", "--lr", "3"])
    assert refused.exit_code == 2
    said = " ".join(refused.output.split())
    assert "o such option" in said and mistyped in said and "--lr" not in said, said


def test_no_option_takes_what_is_no_number() -> None:
    """No range refuses nan by itself, and a wait of nan seconds ends at once or never."""
    context = click.Context(main)
    commands = [main.get_command(context, name) for name in main.list_commands(context)]
    options = [each for command in commands if command is not None for each in command.params]
    numbers = [each for each in options if isinstance(each.type, click.types.FloatParamType)]
    assert len(numbers) > 10
    for each in numbers:
        with pytest.raises(click.BadParameter, match="'nan' is not a number"):
            each.type.convert("nan", each, context)


def test_what_the_system_refuses_is_no_usage(tmp_path: Path) -> None:
    """A log folder below a file: one sentence, and no text on how to call the command."""
    (tmp_path / "file").touch()
    arguments = ["run", "-n", "1", "--log-dir", str(tmp_path / "file" / "logs"), "--", "true"]
    failed = CliRunner().invoke(main, arguments)
    assert failed.exit_code == 5 and "Usage" not in failed.output
    assert failed.output.strip() == f"Error: {tmp_path}/file/logs: Not a directory"


def test_a_full_disk_leaves_the_exit_code(tmp_path: Path) -> None:
    """Log files that cannot be written are said once, and the job's exit code stays."""
    (tmp_path / "process-0.log").symlink_to("/dev/full")
    command = [*RUN, "-n", "1", "--log-dir", str(tmp_path), "--", "sh", "-c", "echo hi; exit 7"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 7, ended.stderr
    assert ended.stderr.count("process-0.log cannot be written: [Errno 28]") == 1
    assert ended.stdout == "[0] hi\n" and "Usage" not in ended.stderr


def test_a_table_and_json_do_not_go_together() -> None:
    """One is for people."""
    refused = subprocess.run(
        [*RUN, "-n", "1", "--json", "--view", "--", "true"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert refused.returncode == 2 and "--view is for people, --json for programs" in refused.stderr
