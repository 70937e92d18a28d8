"""Standbys, on real interpreters: what becomes of one is what a cold start would have been."""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from holdfast.launch import RestartPolicy, RunSettings, StandbySettings, run_local
from holdfast.launch.workers.process import WorkerProcess
from holdfast.launch.workers.standby import NO_STANDBYS, Standby, Standbys, standbys_of, why_cold
from tests.support.cluster import CollectedOutput
from tests.support.paths import program
from tests.support.processes import descendants, no_thread_can_be_started, wait_until_ended

HOLDFAST = Path(sys.executable).parent / "holdfast"
WITHIN_S = 60


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


class Ran:
    """The lines of a process, and at last its exit code."""

    def __init__(self) -> None:
        self.events: queue.Queue[str | int] = queue.Queue()

    def finish(self) -> list[str | int]:
        """Returns all lines, and the exit code behind them."""
        found = [self.events.get(timeout=WITHIN_S)]
        while not isinstance(found[-1], int):
            found.append(self.events.get(timeout=WITHIN_S))
        return found


class Waiting:
    """A standby that is ready, and what it says."""

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        cwd: Path,
        preload: Sequence[str] = ("json",),
    ) -> None:
        self.said: list[str] = []
        self.env = dict(env)
        self.standby = Standby(command, env, 3, cwd=cwd, preload=preload, say=self.said.append)
        wait_for(lambda: self.standby.said("ready") is not None or self.said)

    def take(self, **more: str) -> list[str | int] | None:
        ran = Ran()
        worker = self.standby.take(self.env | more, ran.events.put, ran.events.put)
        return None if worker is None else ran.finish()


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """An environment in which modules of the test's folder can be imported."""
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    base = {
        key: value for key, value in os.environ.items() if not key.startswith(("JAX_", "HOLDFAST_"))
    }
    return base | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def cold(command: Sequence[str], env: Mapping[str, str], cwd: Path) -> list[str | int]:
    ran = Ran()
    WorkerProcess(command, env, cwd=cwd, on_line=ran.events.put, on_exit=ran.events.put)
    return ran.finish()


def warm(
    command: Sequence[str], env: Mapping[str, str], cwd: Path, preload: Sequence[str] = ("json",)
) -> list[str | int] | None:
    waiting = Waiting(command, env, cwd, preload)
    try:
        return waiting.take()
    finally:
        waiting.standby.close()


FACTS = """
import json, os, sys
main = sys.modules["__main__"]
print(json.dumps({
    "argv": sys.argv,
    "orig_argv": sys.orig_argv,
    "path": sys.path,
    "flags": repr(sys.flags),
    "executable": sys.executable,
    "cwd": os.getcwd(),
    "environment": dict(os.environ),
    "is main": vars(main) is globals(),
    "stdin": os.fstat(0).st_rdev,
    "spec": __spec__ and [__spec__.name, __spec__.origin, type(__spec__.loader).__name__],
    "loader": type(__loader__).__name__,
    "main": {
        key: repr(value)
        for key, value in globals().items()
        if key.startswith("__") and key not in ("__spec__", "__loader__")
    },
}, sort_keys=True, indent=1))
"""
FORMS = {
    "a script": ["{folder}/program.py", "-x", "2"],
    "a relative one": ["./program.py"],
    "in a folder below": ["package/../package/__main__.py"],
    "a link": ["link.py"],
    "unbuffered": ["-u", "program.py"],
    "a module": ["-m", "program", "-x"],
    "a package": ["-m", "package"],
    "a module of a package": ["-u", "-m", "package.inner", "a b"],
}


@pytest.mark.parametrize("form", FORMS)
def test_the_program_finds_a_cold_start(form: str, env: dict[str, str], tmp_path: Path) -> None:
    """sys.argv, sys.path, flags, folder, environment and all of `__main__` are equal; globals() is
    `__main__`.
    """
    (tmp_path / "package").mkdir()
    (tmp_path / "linked").mkdir()
    for name in ("program.py", "package/__main__.py", "package/inner.py", "linked/program.py"):
        (tmp_path / name).write_text(FACTS)
    (tmp_path / "link.py").symlink_to(tmp_path / "linked" / "program.py")
    command = [sys.executable, *(each.format(folder=tmp_path) for each in FORMS[form])]
    assert why_cold(command, env, tmp_path) == ""
    expected = cold(command, env, tmp_path)
    assert expected[-1] == 0 and ' "is main": true,' in expected
    assert warm(command, env, tmp_path) == expected


PROGRAMS = {
    "spawn": (
        (
            "import multiprocessing\ndef square(x): return x * x\nif __name__ == '__main__':\n   "
            " with multiprocessing.get_context('spawn').Pool(1) as pool: print(pool.map(square, [2,"
            " 3]))"
        ),
        ["[4, 9]", 0],
    ),
    "pickle in an exit hook": (
        (
            "import atexit, pickle\nclass Box: pass\natexit.register(lambda:"
            " print(type(pickle.loads(pickle.dumps(Box()))).__name__))"
        ),
        ["Box", 0],
    ),
    "a thread that outlives main": (
        (
            "import threading\ndef helper(): return 'there'\ndef late():\n   "
            " threading.main_thread().join()\n    print(__name__,"
            " helper())\nthreading.Thread(target=late).start()"
        ),
        ["__main__ there", 0],
    ),
    "an exit code": ("import sys\nsys.exit(75)", [75]),
    "an exit message": ("import sys\nsys.exit('no')", ["no", 1]),
    "a signal": ("import os\nos.kill(os.getpid(), 15)", [-15]),
    "an interrupt": ("raise KeyboardInterrupt", [-2]),
    "an error": ("def fail(): raise ValueError('shown')\nfail()", ["ValueError: shown", 1]),
    "an error with a hook": (
        (
            "import sys, traceback\nsys.excepthook = lambda kind, error, tb: print([each.name for"
            " each in traceback.extract_tb(tb)], error, sep='\\n')\n1 / 0"
        ),
        ["division by zero", 1],
    ),
    "no Python": ("def", ["SyntaxError: invalid syntax", 1]),
    "defaults of a handler": (
        "import signal\nprint(*(signal.getsignal(n) for n in (1, 2, 13, 15)))",
        [0],
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("as_module", [False, True], ids=["script", "module"])
def test_a_program_does_what_it_does_cold(
    name: str, as_module: bool, env: dict[str, str], tmp_path: Path
) -> None:
    """Line by line, tracebacks included, and with the same exit code or signal."""
    source, last = PROGRAMS[name]
    (tmp_path / "program.py").write_text(source)
    command = [sys.executable, *(["-m", "program"] if as_module else ["program.py"])]
    expected = cold(command, env, tmp_path)
    assert expected[-len(last) :] == last
    assert warm(command, env, tmp_path) == expected


LATE = {
    "a variable": (
        "import os\nos.environ['HEAVY'] = 'set by the program'",
        "the program changes HEAVY before it imports heavy",
    ),
    "a path": (
        "import sys\nsys.path.insert(0, 'other')",
        "the program changes sys.path, which has another heavy, before it imports heavy",
    ),
    "the path's order": (
        "import sys\nsys.path[1:] = sys.path[:0:-1]",
        "the program changes the order of sys.path before it imports heavy",
    ),
}


@pytest.mark.parametrize("name", LATE)
@pytest.mark.parametrize("as_module", [False, True], ids=["script", "module"])
def test_settings_before_an_import_hold_for_it(
    name: str, as_module: bool, env: dict[str, str], tmp_path: Path
) -> None:
    """A program that changes its environment or path first is started cold after all, and the
    launcher hears why.
    """
    setting, why = LATE[name]
    (tmp_path / "other").mkdir()
    (tmp_path / "heavy.py").write_text("import os\nVALUE = os.environ.get('HEAVY', 'plain')")
    (tmp_path / "other" / "heavy.py").write_text("VALUE = 'the other one'")
    (tmp_path / "program.py").write_text(f"{setting}\nimport heavy\nprint(heavy.VALUE)")
    command = [sys.executable, *(["-m", "program"] if as_module else ["program.py"])]
    expected = cold(command, env, tmp_path)
    assert expected[0] in ("set by the program", "the other one", "plain")
    waiting = Waiting(command, env, tmp_path, ("heavy",))
    assert waiting.take() == [f"holdfast: started anew, without its standby: {why}", *expected]
    assert waiting.standby.said("cold") == why
    waiting.standby.close()


def test_a_waiting_one_has_jax_and_no_backend(env: dict[str, str], tmp_path: Path) -> None:
    """The program finds jax imported and no backend started; what it sets after its import of jax
    starts nothing anew.

    Neither does a folder that it adds to sys.path, where none of the modules is.
    """
    source = (
        "import jax, os\nfrom jax._src import"
        " xla_bridge\nprint(xla_bridge.backends_are_initialized())\nos.environ['JAX_LATE'] = '1'\n"
    )
    source = (
        f"import sys\nsys.path.insert(0, '{tmp_path}/elsewhere')\nprint('jax' in"
        f" sys.modules)\n{source}"
    )
    (tmp_path / "program.py").write_text(f"{source}import numpy\nprint(os.environ['JAX_LATE'])")
    waiting = Waiting(
        [sys.executable, "program.py"],
        env,
        tmp_path,
        ("jax", "holdfast.multihost", "holdfast.checkpoint"),
    )
    assert waiting.take() == ["True", "False", "1", 0]
    assert waiting.standby.said("cold") is None
    waiting.standby.close()


def test_what_a_script_imports_first_is_imported_ahead(env: dict[str, str], tmp_path: Path) -> None:
    """What is installed, up to the first module of its own, which may read what is told later."""
    installed = tmp_path / "site-packages"
    for folder, name in (
        *((installed, each) for each in ("plain", "tried", "behind", "later")),
        (tmp_path, "own"),
    ):
        folder.mkdir(exist_ok=True)
        (folder / f"{name}.py").write_text(
            f"from pathlib import Path\nvalue = 1\nPath({str(tmp_path)!r}, '{name}.done').touch()\n"
        )
    program = tmp_path / "program.py"
    program.write_text(
        '"""Trains."""\nfrom __future__ import annotations\nimport os, plain\n'
        "try:\n    from tried import value\nexcept ImportError:\n    value = 0\n"
        "import own\nimport behind\nprint(value, plain.value)\nimport later\n"
    )
    env |= {"PYTHONPATH": f"{installed}{os.pathsep}{env['PYTHONPATH']}"}
    command = [sys.executable, "program.py"]
    waiting = Waiting(command, env, tmp_path)
    assert sorted(each.stem for each in tmp_path.glob("*.done")) == ["plain", "tried"]
    assert waiting.take() == ["1 1", 0]
    assert sorted(each.stem for each in tmp_path.glob("*.done")) == [
        *("behind", "later", "own", "plain", "tried"),
    ]
    waiting.standby.close()
    for source in ("import no_such_module", "this is no Python", "import plain.nothing"):
        program.write_text(source)
        ended = warm(command, env, tmp_path)
        assert ended is not None and ended[-2:] == cold(command, env, tmp_path)[-2:]


BAD = {
    "no_such_module": (
        "importing no_such_module: ModuleNotFoundError: No module named 'no_such_module'"
    ),
    "leaves": "importing leaves: SystemExit: 3",
    "eager": "importing eager starts a jax backend, which is for the program alone",
}


@pytest.mark.parametrize("module", BAD)
def test_a_preload_that_fails_is_said_once(
    module: str, env: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line names module and reason; the next attempt is cold, and later ones are not tried."""
    (tmp_path / "program.py").write_text("")
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit(3)")
    (tmp_path / "eager.py").write_text("import jax\njax.devices()")
    said: list[str] = []
    standbys = Standbys(
        [sys.executable, "program.py"], cwd=tmp_path, preload=[module], say=said.append
    )
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    standbys.warm({0: env, 1: env}, in_turn=True)
    wait_for(lambda: said)
    assert said == [f"no standby for process 0, which will start cold: {BAD[module]}"]
    assert standbys.take(0, env, print, print) is None
    standbys.warm({0: env, 1: env}, in_turn=True)
    assert not standbys.warm_next() and not standbys._waiting
    assert said[1:] == [f"no standbys from here on: {BAD[module]}"]
    assert standbys.take(0, env, print, print) is None
    standbys.close()


@pytest.mark.parametrize("lack", ["process", pytest.param("thread", marks=pytest.mark.slow)])
def test_where_no_more_can_be_started_there_are_no_standbys(
    lack: str, env: dict[str, str], tmp_path: Path
) -> None:
    """That is said once, and is no error. One that is there is of use, and none is half there."""
    (tmp_path / "program.py").write_text("print('ran')")
    said: list[str] = []
    standbys = Standbys([sys.executable, "program.py"], cwd=tmp_path, preload=[], say=said.append)
    standbys.warm({0: env})
    wait_for(lambda: not standbys._waiting[0].imports)
    before = set(descendants(os.getpid()))
    too_large = env | {"TOO_LARGE": "x" * 200_000} if lack == "process" else env
    with no_thread_can_be_started() if lack == "thread" else contextlib.nullcontext():
        standbys.warm({0: env, 1: too_large, 2: env})
    (line,) = said
    assert line.startswith("no standbys from here on: ")
    standbys.warm({1: env})
    assert not standbys.warm_next() and standbys._waiting.keys() == {0} and len(said) == 1
    new = set(descendants(os.getpid())) - before
    assert wait_until_ended([*new])
    ran = Ran()
    assert standbys.take(0, env, ran.events.put, ran.events.put) is not None
    assert ran.finish() == ["ran", 0]
    standbys.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_one_that_dies_waiting_is_replaced(
    number: int, env: dict[str, str], tmp_path: Path
) -> None:
    """SIGTERM ends a waiting one as it ends any program without a handler."""
    (tmp_path / "program.py").write_text("")
    waiting = Waiting([sys.executable, "program.py"], env, tmp_path)
    waiting.standby.signal(number)
    wait_for(lambda: waiting.said)
    assert waiting.said == [
        f"no standby for process 3, which will start cold: it was ended by signal {int(number)}"
    ]
    assert waiting.take() is None
    waiting.standby.close()


def test_only_the_attempts_own_variables_come_late(env: dict[str, str], tmp_path: Path) -> None:
    """HOLDFAST_*, MEGASCALE_* and JAX_COORDINATOR_* are set and unset; with any other difference it
    is not taken, and that is said.
    """
    (tmp_path / "program.py").write_text(
        "import os\nprint(*(os.environ.get(key) for key in ('HOLDFAST_ATTEMPT', 'MEGASCALE_PORT',"
        " 'OTHER')))"
    )
    command = [sys.executable, "program.py"]
    early = env | {"OTHER": "1", "MEGASCALE_PORT": "8081", "HOLDFAST_ATTEMPT": "1"}
    waiting = Waiting(command, early, tmp_path)
    del waiting.env["MEGASCALE_PORT"]
    assert waiting.take(HOLDFAST_ATTEMPT="2") == ["2 None 1", 0]
    other = Waiting(command, early, tmp_path)
    assert other.take(OTHER="2", JAX_X="1") is None
    assert other.said == ["process 3 starts cold: its standby has another JAX_X, OTHER"]
    for each in (waiting, other):
        each.standby.close()


def test_they_import_in_turn_and_one_may_become_another(
    env: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where one is enough for the next attempt, on two cores one imports at a time. The one that is
    ready becomes the process that died, but not one that has another environment.
    """
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    (tmp_path / "program.py").write_text("import os\nprint(os.environ['HOLDFAST_PROCESS_ID'])")
    (tmp_path / "slow.py").write_text(
        "import os, time\nwhile not os.path.exists('go'): time.sleep(0.01)\nos.remove('go')"
    )
    said: list[str] = []
    standbys = Standbys(
        [sys.executable, "program.py"], cwd=tmp_path, preload=["slow"], say=said.append
    )
    environments = {each: env | {"HOLDFAST_PROCESS_ID": str(each)} for each in range(3)}
    standbys.warm(environments, in_turn=True)
    assert standbys.warm_next() and standbys._waiting.keys() == {0}
    (tmp_path / "go").touch()
    wait_for(lambda: standbys.warm_next() and len(standbys._waiting) == 2)
    other = environments[2] | {"JAX_LOCAL_DEVICE_IDS": "2"}
    assert standbys.take(2, other, print, print) is None
    ran = Ran()
    assert standbys.take(2, environments[2], ran.events.put, ran.events.put) is not None
    assert ran.finish() == ["2", 0]
    second = Ran()
    assert standbys.take(0, environments[0], second.events.put, second.events.put) is not None
    (tmp_path / "go").touch()
    assert second.finish() == ["0", 0], "it imported when it was taken"
    assert standbys.take(1, environments[1], print, print) is None
    assert standbys.take(2, environments[2], print, print) is None
    assert said == ["process 2 starts cold: its standby has not begun"] * 2  # asked for twice
    standbys.close()
    assert not standbys.warm_next()


@pytest.mark.parametrize(
    "ending",
    [
        "goes on",
        "closed",
        *(pytest.param(end, marks=pytest.mark.slow) for end in ("taken", "ready when held")),
    ],
)
def test_those_that_import_are_held(ending: str, env: dict[str, str], tmp_path: Path) -> None:
    """One that imports stops while an attempt begins. It goes on afterwards, and where it is taken,
    be it that it had become ready just then, and another attempt begins. One that is ready is taken
    as ever.
    """
    (tmp_path / "program.py").write_text("print('ran')")
    (tmp_path / "slow.py").write_text(
        "import os, time\n"
        "open('pid', 'w').write(str(os.getpid()))\n"
        "os.rename('pid', 'importing')\n"
        "while not os.path.exists('go'): time.sleep(0.01)"
    )
    said: list[str] = []
    standbys = Standbys(
        [sys.executable, "program.py"], cwd=tmp_path, preload=["slow"], say=said.append
    )

    def state() -> str:
        pid = (tmp_path / "importing").read_text()
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]

    standbys.warm({0: env})
    wait_for(lambda: (tmp_path / "importing").exists())
    standbys.hold()
    wait_for(lambda: state() == "T")
    (tmp_path / "go").touch()
    if ending == "ready when held":
        pid = int((tmp_path / "importing").read_text())
        os.kill(pid, signal.SIGCONT)
        wait_for(lambda: not standbys._waiting[0].imports)
        os.kill(pid, signal.SIGSTOP)
        standbys.hold()
    if ending == "goes on":
        assert not standbys.warm_next()
        wait_for(lambda: not standbys._waiting[0].imports)
        standbys.hold()
    if ending != "closed":
        ran = Ran()
        assert standbys.take(0, env, ran.events.put, ran.events.put) is not None
        assert ran.finish() == ["ran", 0]
    standbys.close()
    assert said == []


def test_one_that_fails_after_it_was_taken_starts_cold(env: dict[str, str], tmp_path: Path) -> None:
    """The module that it could not import is not the program's fault."""
    (tmp_path / "program.py").write_text("print('begun')")
    (tmp_path / "fails.py").write_text(
        "import os, time\nwhile not os.path.exists('go'): time.sleep(0.01)\nraise OSError('disk')"
    )
    said: list[str] = []
    command = [sys.executable, "program.py"]
    standby = Standby(command, env, 3, cwd=tmp_path, preload=["fails"], say=said.append)
    ran = Ran()
    assert standby.take(env, ran.events.put, ran.events.put) is not None
    (tmp_path / "go").touch()
    why = "importing fails: OSError: disk"
    assert ran.finish() == [f"holdfast: started anew, without its standby: {why}", "begun", 0]
    assert (standby.said("failed"), said) == (why, [])
    standby.close()


def test_commands_of_other_forms_start_cold(env: dict[str, str], tmp_path: Path) -> None:
    """What was asked for and cannot be had is said; what was not asked for is silent; a name that
    no module can have is refused.
    """
    (tmp_path / "program.py").write_text("")
    shutil.make_archive(str(tmp_path / "packed"), "zip", tmp_path, "program.py")
    (tmp_path / "python").write_text("#!/bin/sh")
    (tmp_path / "python").chmod(0o755)
    form = "the command is neither `python [-u] SCRIPT` nor `python [-u] -m MODULE`"
    for command in (
        ["-c", "1"],
        ["-m"],
        ["-i", "program.py"],
        ["-"],
        ["."],
        ["packed.zip"],
        ["missing.py"],
        [],
    ):
        assert why_cold([sys.executable, *command], env, tmp_path) == form
    other = f"is another interpreter than {sys.executable}"
    for name in (str(tmp_path / "python"), "./python", "no-such-program"):
        assert why_cold([name, "program.py"], env, tmp_path) == f"{name} {other}"
    said: list[str] = []
    for wanted in (None, True):
        settings = StandbySettings(wanted=wanted)
        standbys = standbys_of(
            ["true"], env, settings, cwd=tmp_path, restarts=True, say=said.append
        )
        assert standbys is NO_STANDBYS
    assert said == [f"no standbys, each attempt starts cold: true {other}"]
    assert (
        standbys_of(
            [sys.executable, "program.py"],
            env,
            StandbySettings(),
            cwd=tmp_path,
            restarts=False,
            say=said.append,
        )
        is NO_STANDBYS
    )
    with pytest.raises(
        ValueError, match=r"preload 'fl-ax': expected the name of a module, such as flax\.linen"
    ):
        standbys_of(
            ["true"],
            env,
            StandbySettings(preload=["fl-ax"]),
            cwd=tmp_path,
            restarts=False,
            say=said.append,
        )


def standby_pids(folder: Path) -> list[int]:
    """Returns the waiting interpreters of the job in `folder`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            title = path.read_bytes()
            is_here = os.readlink(path.parent / "cwd") == str(folder)
        except OSError:
            continue
        if is_here and (title.startswith(b"holdfast: standby") or b"shims/standby.py" in title):
            found.append(int(path.parent.name))
    return found


def are_ready(folder: Path, count: int) -> bool:
    """Returns whether `count` standbys wait: each in recv, after all its imports."""
    pids = standby_pids(folder)
    return len(pids) == count and all(
        "unix_stream" in Path(f"/proc/{pid}/wchan").read_text() for pid in pids
    )


def shown(folder: Path) -> dict[int, tuple[str, str]]:
    """Returns what ps shows of the processes in `folder`: name and command."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.readlink(path / "cwd") == str(folder):
                words = (path / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
                name = (path / "comm").read_text().strip()
                found[int(path.name)] = (name, b" ".join(words).decode())
    return found


def ours(folder: Path) -> list[int]:
    """Returns the standbys and the subreapers in `folder`."""
    names = ("hf-standby", "hf-subreaper")
    return [pid for pid, (name, _) in shown(folder).items() if name in names]


def test_ps_tells_standbys_from_programs(env: dict[str, str], tmp_path: Path) -> None:
    """By their titles while they wait: the program's command finds the program alone. One that was
    taken is shown as the program.
    """
    (tmp_path / "own.py").write_text("print('begun')\nimport time\ntime.sleep(600)\n")
    command = [sys.executable, "own.py", "--lr", "a b"]
    ran = Ran()
    first = WorkerProcess(
        command, env, cwd=tmp_path, on_line=ran.events.put, on_exit=ran.events.put
    )
    assert ran.events.get(timeout=WITHIN_S) == "begun"
    waiting = Waiting(command, env | {"HOLDFAST_PROCESS_ID": "3"}, tmp_path)
    interpreter = Path(sys.executable).name
    program = (interpreter[:15], f"{sys.executable} own.py --lr a b")
    subreaper = ("hf-subreaper", "holdfast: subreaper")
    standby = ("hf-standby", "holdfast: standby for process 3")
    assert sorted(shown(tmp_path).values()) == sorted([program, subreaper, standby, subreaper])
    first.kill()
    assert ran.finish() == [-signal.SIGKILL]
    taken = waiting.standby.take(waiting.env, ran.events.put, ran.events.put)
    assert taken is not None and ran.events.get(timeout=WITHIN_S) == "begun"
    assert sorted(shown(tmp_path).values()) == sorted([program, subreaper])
    taken.kill()
    assert ran.finish() == [-signal.SIGKILL]
    waiting.standby.close()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Path]:
    """The program of a job, in a folder of its own."""
    (tmp_path / "program.py").write_text(program("standby_job").read_text())
    yield tmp_path / "program.py"
    assert not standby_pids(tmp_path)


def start(job: Path, *options: str) -> subprocess.Popen[str]:
    command = [str(HOLDFAST), "run", "-n", "2", *options, "--", sys.executable, str(job)]
    return subprocess.Popen(
        command, cwd=job.parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def test_the_second_attempt_begins_warm(job: Path) -> None:
    """With restarts allowed, each process of the second attempt was there before the first had
    failed; none is left at the end.
    """
    with start(job, "--max-restarts", "1") as popen:
        wait_for(lambda: are_ready(job.parent, 2))
        (job.parent / "go").touch()
        output, _ = popen.communicate(timeout=WITHIN_S)
    assert popen.returncode == 0, output
    assert (
        sorted(
            line.partition(" ")[2]
            for line in output.splitlines()
            if line.endswith(("warm 2", "cold 1"))
        )
        == ["cold 1"] * 2 + ["warm 2"] * 2
    )


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_none_outlives_the_launcher(number: int, job: Path) -> None:
    """Waiting standbys end with it, however it ends."""
    with start(job, "--max-restarts", "1") as popen:
        # Two standbys, their subreapers, and those of the two programs.
        wait_for(lambda: len(ours(job.parent)) == 6)
        pids = ours(job.parent)
        popen.send_signal(number)
        popen.communicate(timeout=WITHIN_S)
        assert wait_until_ended(pids)


def test_without_restarts_there_is_no_standby(job: Path) -> None:
    """Nobody pays for what cannot be used: a job that is not started again has no standbys."""
    (job.parent / "go").touch()
    for standby, restart in (
        (None, RestartPolicy()),
        (False, RestartPolicy(max_failures=1, backoff_s=0)),
    ):
        output = CollectedOutput()
        run_local(
            [sys.executable, str(job)],
            1,
            RunSettings(cwd=job.parent, restart=restart, standby=StandbySettings(wanted=standby)),
            output=output,
        )
        assert {line.split()[0] for _, line in output.lines} == {"cold"}
