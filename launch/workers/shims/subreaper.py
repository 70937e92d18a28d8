"""Runs a command and leaves nothing of it behind.

Run as a script by its path: `python -I -S subreaper.py PARENT_PID COMMAND...`.

It is the command's parent, and the subreaper (prctl(2)) of all that the command starts: a process
that loses its parent, in a session of its own or not, becomes a child of this process instead of
init's. When
the command has ended, or the process that started this one is gone, whatever is left gets SIGKILL.
Its input takes lines, `signal NUMBER` for the command and `kill` for all; the end of its input is
the end of the starter. Where the command is a shell or the like, and below it a process has joined
the job, the signal is that process's: a shell would end at once, and take it along. The command
gets one that asks it to leave once that process has ended. At last this process ends as the
command did, with the same exit code or by the same signal; but a shell whose program was asked to
leave, and that ends with 0 or by that signal, says nothing of the program: that is 75. A command
that ends with 0 may have left the program to itself, as `setsid` does: then the program is the
command from there on, also where it has ended by then. What else it has left in the background is
named. It imports nothing of holdfast.
"""

import contextlib
import ctypes
import importlib.util
import os
import select
import signal
import sys
import time
import types

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_CHILD_SUBREAPER = 36
# Sent to a process group or a job step: the command gets its own, by the launcher.
_NOT_FOR_US = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
_ASKS_TO_LEAVE = (signal.SIGTERM, signal.SIGINT)
_PREEMPTED = 75  # the exit code of a process that has left as it was asked to
_SET_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)
_LINUX = sys.platform == "linux"
_KILL_AGAIN_S = 0.05  # for what was started while others were being killed
_EXECUTES_S = 1.0  # for what the command has forked to become a program
_YOUNG_S = 10.0  # what is older when the command ends was no program that it has just left
_NOT_RUN = (126 << 8, 127 << 8)  # a shell's words for a program that is not there, or may not run
_NAME_BYTES = 15  # of a process, as the kernel keeps it
_LOOK_S = 0.01
_OF_A_PROGRAM = b"HOLDFAST_JOINED="  # in the environment of what a process has started that joined
_END_BY_ITSELF_S = 1.0  # for a shell whose program has ended, and for helpers of the command
# A file in memory of each process that has joined (coordination/vitals.py).
_JOINED = "/memfd:holdfast-vitals-"


def prctl(option: int, value: int) -> None:
    if _LINUX:
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def title() -> types.ModuleType:
    """Returns the script of that name. The command is not among this process's arguments then: who
    looks for it in ps finds the command's process alone.
    """
    path = os.path.join(os.path.dirname(__file__), "title.py")
    spec = importlib.util.spec_from_file_location("title", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def execute(command: list[str], hangup: signal.Handlers, blocked: set[int]) -> None:
    """Becomes the command, in a session of its own; the kernel ends it with this process.

    A signal that came since the fork is blocked, and ends the process before it is the command.
    """
    parent = os.getppid()
    signal.set_wakeup_fd(-1)
    os.setsid()
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in (*_NOT_FOR_US, *_SET_BY_PYTHON, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, hangup)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked - {*_NOT_FOR_US, signal.SIGCHLD})
    if os.getppid() != parent:  # it died before prctl, and its death was no signal to us
        os._exit(127)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"holdfast: cannot run {command[0]!r}: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def all_children() -> dict[int, list[int]]:
    """Returns the children of every process of this machine."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc") if _LINUX else ():
        with contextlib.suppress(OSError, ValueError):
            with open(f"/proc/{int(name)}/stat", "rb") as file:
                parent = int(file.read().rpartition(b")")[2].split()[1])
            children.setdefault(parent, []).append(int(name))
    return children


def descendants(above: int | None = None) -> list[int]:
    """Returns all processes below one, or this one."""
    children = all_children()
    below = list(children.get(above or os.getpid(), ()))
    for pid in below:  # grows while it is read
        below += children.get(pid, ())
    return below


def words_of(pid: int, name: str) -> list[bytes]:
    """Returns a process's arguments, its `cmdline`, or its `environ`; [] where it has ended."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/{name}", "rb") as file:
        data = file.read()
        return data.removesuffix(b"\0").split(b"\0") if data else []
    return []


def name_and_start(pid: int) -> tuple[bytes, float]:
    """Returns the name of a process that may have ended, and when it began, in seconds since the
    machine did.
    """
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
        head, _, fields = file.read().rpartition(b")")
        return head.partition(b"(")[2], int(fields.split()[19]) / os.sysconf("SC_CLK_TCK")
    return b"", 0.0


def joined_by(pid: int) -> str:
    """Returns the thread that has joined a job, of a process or one that it was forked from; "":
    none has.
    """
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):  # closed meanwhile
                target = os.readlink(f"/proc/{pid}/fd/{name}")
                if target.startswith(_JOINED):
                    return target.rpartition("-")[2].split()[0]
    return ""


def has_joined(pid: int) -> bool:
    """Returns whether a process has joined a job itself, and not one that it was forked from."""
    thread = joined_by(pid)
    return bool(thread) and os.path.exists(f"/proc/{pid}/task/{thread}")


def program_left(command: list[bytes]) -> int | None:
    """Returns the child that goes on as the command, which has ended; None where none does.

    That is one with a process that has joined, or one that runs what the command was to run.
    """
    deadline = time.monotonic() + _EXECUTES_S
    while True:
        is_undecided = False
        for pid in all_children().get(os.getpid(), ()):
            words = words_of(pid, "cmdline")
            if any(map(has_joined, (pid, *descendants(pid)))):
                return pid
            if len(words) < len(command) and words and words == command[-len(words) :]:
                return pid
            # A fork, or a wrapper, of what runs the same: it may become the program yet. One that
            # is becoming it has no words for a moment.
            is_undecided |= not words or words[-1:] == command[-1:]
        if not is_undecided or time.monotonic() > deadline:
            return None
        time.sleep(_LOOK_S)


def in_background(command: list[bytes]) -> dict[int, bytes]:
    """Returns what the command has left in the background, and not a program of the job's."""
    left = {}
    for pid in all_children().get(os.getpid(), ()):
        words = words_of(pid, "cmdline")
        # Of a program that has joined a fork is no program: it ends with that one.
        is_known = not words or (words == command and joined_by(pid))
        if not is_known and not any(
            word.startswith(_OF_A_PROGRAM) for word in words_of(pid, "environ")
        ):
            left[pid] = b" ".join(words)
    return left


def name_left(command: list[bytes], errors: int) -> None:
    """Names what the command has left in the background, and does not end by itself, as helpers of
    multiprocessing do.
    """
    deadline = time.monotonic() + _END_BY_ITSELF_S
    while (left := in_background(command)) and time.monotonic() < deadline:
        time.sleep(_KILL_AGAIN_S)
    for pid, words in left.items():
        line = (
            f"holdfast: the command has ended with 0, so process {pid}"
            f" ({words.decode(errors='replace')}), which it has left in the background,"
            " is ended: a program stays in the foreground, a shell waits by `wait`, setsid by"
            " `setsid --wait`\n"
        )
        with contextlib.suppress(OSError):
            os.write(errors, line.encode())


class Subreaper:
    """The command's process, and how it ended."""

    def __init__(
        self, pid: int, parent: int, woken: int, command: list[bytes], errors: int
    ) -> None:
        self._pid = pid
        self._command = command
        self._errors = errors  # a descriptor
        self._program: int | None = None  # below the command: a descriptor of the one signalled
        self._owed = 0  # the signal that the command gets after it
        self._due_s: float | None = None  # when
        self._parent = parent
        self._woken = woken
        self._input = b""
        self._over = False
        self._failed = 0  # the exit status of the last that failed of what the command was to run
        self._failed_began_s = 0.0
        self.status: int | None = None

    def hang_up(self, *_: object) -> None:
        """Takes the kernel's word that the process that started this one is gone.

        A SIGHUP from anybody else means nothing.
        """
        self._over = self._over or os.getppid() != self._parent

    def reap(self) -> bool:
        """Takes the exit status of every child that has ended; returns whether one is left."""
        try:
            while (ended := self._next_ended())[0]:
                if ended[0] == self._pid:
                    self.status = ended[1]
        except ChildProcessError:
            return False
        return True

    def _next_ended(self) -> tuple[int, int]:
        if not _LINUX:
            return os.waitpid(-1, os.WNOHANG)
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is None:
            return 0, 0
        name, began_s = name_and_start(found.si_pid)  # while the number is its own
        pid, status = os.waitpid(found.si_pid, 0)
        # A fork of the command's that could not run the program has the command's own name.
        words = self._command if status in _NOT_RUN else self._command[1:]
        if status and name in {os.path.basename(word)[:_NAME_BYTES] for word in words}:
            self._failed_began_s = began_s
            self._failed = status
        return pid, status

    def serve(self) -> None:
        """Passes signals on until the command has ended, or all shall end."""
        while (self.reap() and not self._over) and (self.status is None or self._goes_on()):
            sources = [0, self._woken]
            if self._program is not None:
                sources.append(self._program)
            wait_s = None if self._due_s is None else max(0.0, self._due_s - time.monotonic())
            readable, _, _ = select.select(sources, [], [], wait_s)
            if not readable:
                self._due_s = None
                self._send(self._owed)
            if self._program in readable:
                self._close_program()
                if self._owed:
                    self._due_s = time.monotonic() + _END_BY_ITSELF_S
            if self._woken in readable:
                os.read(self._woken, 4096)
            if 0 in readable:
                data = os.read(0, 4096)
                self._over = self._over or not data
                *lines, self._input = (self._input + data).split(b"\n")
                for line in lines:
                    self._obey(line.split())
        self._take_failure()

    def _goes_on(self) -> bool:
        """Returns whether the command, which has ended, has left the program to itself."""
        if self.status != 0 or self._owed:
            return False
        program = program_left(self._command)
        if program is None:
            name_left(self._command, self._errors)
            return False
        self._pid = program
        self.status = None
        return True

    def _take_failure(self) -> None:
        """Ends as the program did that the command has left, if it failed before the first look."""
        self.reap()
        if self.status == 0 and self._failed and not self._over:
            age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - self._failed_began_s
            self.status = self._failed if age_s < _YOUNG_S else 0

    def _obey(self, words: list[bytes]) -> None:
        if words[:1] == [b"kill"]:
            self._over = True
        elif words[:1] == [b"signal"]:
            self._signal(int(words[1]))

    def _signal(self, number: int) -> None:
        program = next(filter(has_joined, descendants()), self._pid)
        if program == self._pid:
            self._send(number)
            return
        self._close_program()
        with contextlib.suppress(OSError):
            self._program = os.pidfd_open(program)
            signal.pidfd_send_signal(self._program, number)
        self._due_s = None
        if number in _ASKS_TO_LEAVE:
            self._owed = number

    def _send(self, number: int) -> None:
        # The command is still a child of ours, or a zombie: its number is not another process's.
        with contextlib.suppress(OSError):
            os.kill(self._pid, number)

    @property
    def ending(self) -> int | None:
        """The exit status that this process ends with, None where the command's is not known."""
        if self._owed and self.status in (0, self._owed):
            return _PREEMPTED << 8
        return self.status

    def _close_program(self) -> None:
        if self._program is not None:
            os.close(self._program)
            self._program = None

    def end_all(self) -> None:
        """Kills until no child is left."""
        # What is killed may just have started something, which becomes a child of ours then.
        while self.reap():
            for pid in descendants() or [self._pid]:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(OSError):
                os.killpg(self._pid, signal.SIGKILL)
            if select.select([self._woken], [], [], _KILL_AGAIN_S)[0]:
                os.read(self._woken, 4096)


def main() -> None:
    parent = int(sys.argv[1])
    command = sys.argv[2:]
    title().set_title(b"holdfast: subreaper", b"hf-subreaper")
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    hangup = signal.signal(signal.SIGHUP, lambda number, frame: None)
    # Blocked, not ignored: what the command gets before it has begun must wait for it.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, (*_NOT_FOR_US, signal.SIGHUP))
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    prctl(_PR_SET_PDEATHSIG, signal.SIGHUP)
    if os.getppid() != parent:  # it died before prctl
        os._exit(127)
    pid = os.fork()
    if pid == 0:
        handler = hangup if isinstance(hangup, signal.Handlers) else signal.SIG_DFL
        execute(command, handler, blocked)
    errors = os.dup(2)
    words = [os.fsencode(word) for word in command]
    subreaper = Subreaper(pid, parent, woken, words, errors)
    signal.signal(signal.SIGHUP, subreaper.hang_up)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
    subreaper.hang_up()  # for what came before the handler
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    subreaper.serve()
    subreaper.end_all()
    end_as(subreaper.ending)


def end_as(status: int | None) -> None:
    """Ends this process as the command ended."""
    if status is None or not os.WIFSIGNALED(status):
        os._exit(1 if status is None else os.waitstatus_to_exitcode(status))
    number = os.WTERMSIG(status)
    # The command has left a core, where one is wanted; this process is to leave none.
    prctl(_PR_SET_DUMPABLE, 0)
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)


if __name__ == "__main__":
    main()
