"""A process of a launched job that needs the standard library alone: `launched_plain.py ROLE ...`.

It is run with -S, so that it starts at once.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

SLEEPER = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
ME = os.environ.get("HOLDFAST_PROCESS_ID", "")
ATTEMPT = int(os.environ.get("HOLDFAST_ATTEMPT", "0"))


def wait_for_sigterm() -> None:
    """SIGTERM is blocked since the start: it cannot come too early."""
    signal.sigwait({signal.SIGTERM})


def fail_when_all_are_there(folder: str, how: str) -> None:
    """Process 1 ends with an exit code, or by a signal where `how` is negative."""
    print("pid", os.getpid(), flush=True)
    (Path(folder) / ME).touch()
    if ME == "1":
        while len(os.listdir(folder)) < 3:
            time.sleep(0.01)
        code = int(how)
        if code < 0:
            os.kill(os.getpid(), -code)
        sys.exit(code)
    time.sleep(600)


def ignore_sigterm(ready: str) -> None:
    """Process 0 fails once process 1 ignores SIGTERM."""
    signal.signal(signal.SIGTERM, lambda *_: print("no", flush=True))
    if ME == "0":
        while not os.path.exists(ready):
            time.sleep(0.01)
        sys.exit(1)
    Path(ready).touch()
    while True:
        time.sleep(1)


def save_and_leave() -> None:
    """Leaves as preempted at SIGTERM."""
    print("pid", os.getpid(), flush=True)
    wait_for_sigterm()
    print("saved", flush=True)
    sys.exit(75)


def flood(file: str) -> None:
    """Process 0 prints for ever; process 1 leaves a file at SIGTERM. Both leave as preempted."""
    if ME == "1":
        Path(file).with_suffix(".waits").touch()
        wait_for_sigterm()
        Path(file).touch()
        sys.exit(75)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(75))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    while True:
        print("x" * 10_000, flush=True)


def start_others() -> None:
    """Starts a child, one in a session of its own, and one whose parent ends."""
    child = subprocess.Popen(SLEEPER)
    own_session = subprocess.Popen(SLEEPER, start_new_session=True)
    daemon = [sys.executable, "-S", __file__, "start_daemon"]
    orphan = subprocess.run(daemon, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    coordinator = os.environ["HOLDFAST_COORDINATOR"]
    print("pid", os.getpid(), child.pid, own_session.pid, orphan, coordinator, flush=True)
    time.sleep(600)


def start_daemon() -> None:
    """Leaves a process behind, and prints its number."""
    print(subprocess.Popen(SLEEPER, start_new_session=True, stdout=2).pid)


def end_by_attempt() -> None:
    """Fails, is preempted, and is done."""
    print(ATTEMPT, os.environ["HOLDFAST_COORDINATOR"])
    sys.exit({1: 9, 2: 75, 3: 0}[ATTEMPT])


def change_room(file: str) -> None:
    """Says how many processes there are, and changes the room for them; done in attempt 3."""
    print(ATTEMPT, os.environ["HOLDFAST_NUM_PROCESSES"], flush=True)
    if ATTEMPT == 3:
        sys.exit(0)
    if ME == "0":
        Path(file).write_text({1: "2", 2: "4"}[ATTEMPT])
    wait_for_sigterm()
    sys.exit(75)


def look_as_nobody(address: str) -> None:
    """As another user, tries to reach a coordinator, and to look into its folder."""
    os.setgid(65534)
    os.setgroups([])
    os.setuid(65534)
    path = address.removeprefix("unix:")
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(path)
        except PermissionError:
            print("connect refused")
    try:
        os.listdir(os.path.dirname(path))
    except PermissionError:
        print("list refused")


ROLES = {
    role.__name__: role
    for role in (
        fail_when_all_are_there,
        ignore_sigterm,
        save_and_leave,
        flood,
        start_others,
        start_daemon,
        end_by_attempt,
        change_room,
        look_as_nobody,
    )
}

if __name__ == "__main__":
    if sys.argv[1] in ("save_and_leave", "change_room", "flood"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    ROLES[sys.argv[1]](*sys.argv[2:])
