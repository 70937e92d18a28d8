"""Imports what a program needs, waits, and becomes the program.

That is MODULES, and what a script itself imports before it does anything else, as far as that is
installed: a module of its own may read what is told later.

Run as a script by its path: `python standby.py FD MODULES COMMAND...`.

COMMAND is `python [-u] SCRIPT ...` or `python [-u] -m MODULE ...`; MODULES are separated by commas.
At FD is a socket to the launcher: it gets one JSON line, {"ready": ""} or {"failed": why}, and
later {"cold": why} where the program had to be started anew after all. It sends one, {"set": {...},
"unset": [...]}: the changes of the environment with which the program begins; its end is the end of
this process.

Until it is the program, ps and pgrep show the title of a standby: who looks for the program's
command finds none that only wait.

The program is the real `__main__`, so this file loads itself once more under a name of its own, and
leaves `__main__` empty.
"""

import ast
import builtins
import contextlib
import gc
import importlib
import importlib.machinery
import importlib.util
import json
import os
import runpy
import select
import socket
import sys
from collections.abc import Iterator
from types import TracebackType
from typing import Any, NoReturn

_INSTALLED = ("site-packages", "dist-packages")
_NAME = "_holdfast_standby"
_TITLE = "_holdfast_title"


class Launcher:
    """The other end of the socket."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._socket.set_inheritable(False)  # what the program starts must not hold it open

    def send(self, kind: str, why: str = "") -> None:
        with contextlib.suppress(OSError):
            self._socket.sendall(json.dumps({kind: why}).encode() + b"\n")

    def has_told(self) -> bool:
        """Returns whether the program is to begin already."""
        told = select.poll()
        told.register(self._socket, select.POLLIN)
        return bool(told.poll(0))

    def wait(self) -> dict[str, Any]:
        """Blocks until the program is to begin; ends the process when the launcher is gone."""
        received = b""
        while not received.endswith(b"\n"):
            data = self._socket.recv(1 << 16)
            if not data:
                # The launcher is gone, and no program has begun: there is nothing to clean up.
                os._exit(0)
            received += data
        changes: dict[str, Any] = json.loads(received)
        return changes


class Program:
    """A command, and what the interpreter would be like had it been started by it."""

    def __init__(self, command: list[str], launcher: Launcher) -> None:
        self.command = command
        self._launcher = launcher
        rest = command[2:] if command[1] == "-u" else command[1:]
        self.module = rest[1] if rest[0] == "-m" else None
        self.argv = ["-m", *rest[2:]] if self.module else rest
        self._environment = dict(os.environ)
        self._cwd = os.getcwd()

    def folder(self) -> str:
        """Returns what begins sys.path."""
        return self._cwd if self.module else os.path.dirname(os.path.realpath(self.argv[0]))

    def change_environment(self, changes: dict[str, Any]) -> None:
        for environment in (self._environment, os.environ):
            for key in changes["unset"]:
                environment.pop(key, None)
            environment.update(changes["set"])

    def start_cold(self, why: str) -> NoReturn:
        """Starts the command in place of this process, as if there had been no standby."""
        self._launcher.send("cold", why)
        print(f"holdfast: started anew, without its standby: {why}")
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        # What was imported may have moved. The process keeps its number and its output.
        os.chdir(self._cwd)
        os.execvpe(self.command[0], self.command, self._environment)

    def run(self) -> None:
        """Runs it as `__main__`."""
        main = sys.modules["__main__"].__dict__
        # Up to Python 3.13 the interpreter makes `__main__` with an empty one.
        made_with: dict[str, Any] = {}
        if "__annotations__" in main:
            made_with["__annotations__"] = {}
        main.clear()
        main.update(
            made_with,
            __name__="__main__",
            __doc__=None,
            __package__=None,
            __spec__=None,
            __builtins__=builtins,
        )
        if self.module:
            loader: Any = importlib.machinery.BuiltinImporter  # what `python -m` begins with
            main.update(__loader__=loader)
            # By name, since it is private: `python -m` itself calls it.
            run_module = getattr(runpy, "_run_module_as_main")  # noqa: B009
            run_module(self.module)
            return
        path = os.path.join(self._cwd, self.argv[0])
        main.update(
            __loader__=importlib.machinery.SourceFileLoader("__main__", path),
            __file__=path,
            __cached__=None,
        )
        with open(path, "rb") as file:
            source = file.read()
        exec(compile(source, path, "exec", dont_inherit=True), main)


class ImportGuard:
    """Stands in for `__import__` until the program has imported jax itself.

    What the program does before an import that has already happened here came too late: a change of
    the environment, or of sys.path where another module would be found now. It is then started
    cold, which repeats no more than that: no backend is up yet.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._import = builtins.__import__
        self._roots = (
            {name.partition(".")[0] for name in sys.modules}
            - sys.stdlib_module_names
            - {"__main__", _NAME, _TITLE}
        )
        self._waiting = set(self._roots)
        self._environment = dict(os.environ)
        self._path = _search_path()
        builtins.__import__ = self

    def __call__(self, name: str, *arguments: Any, **keywords: Any) -> Any:
        root = name.partition(".")[0]
        if root in self._waiting:
            self._waiting.discard(root)
            if root == "jax" or backend_is_up():
                builtins.__import__ = self._import
            if not backend_is_up() and (why := self._change()):
                self._program.start_cold(f"the program changes {why} before it imports {root}")
        return self._import(name, *arguments, **keywords)

    def _change(self) -> str:
        """Returns what the program has changed that an import would have seen, "" for nothing."""
        now = dict(os.environ)
        names = self._environment.keys() | now
        changed = [name for name in names if self._environment.get(name) != now.get(name)]
        if changed:
            return ", ".join(sorted(changed))
        path = _search_path()
        if [entry for entry in path if entry in self._path] != self._path:
            return "the order of sys.path"
        # An entry that is new matters only where it has another module of a name that is taken.
        added = [entry for entry in path if entry not in self._path]
        for name in sorted(self._roots):
            spec = importlib.machinery.PathFinder.find_spec(name, added)
            # A folder without a loader is a namespace: a module elsewhere goes before it.
            if spec is not None and spec.loader is not None:
                return f"sys.path, which has another {name},"
        return ""


def _search_path() -> list[str]:
    """Returns sys.path without what it has twice."""
    return list(dict.fromkeys(sys.path))


def backend_is_up() -> bool:
    """Returns whether jax has touched a device."""
    bridge = sys.modules.get("jax._src.xla_bridge")
    return bridge is not None and bool(bridge.backends_are_initialized())


def preload(modules: list[str]) -> str:
    """Imports the modules; returns why one cannot be, or that it starts a backend."""
    for name in modules:
        why = ""
        try:
            importlib.import_module(name)
        except BaseException as error:  # whatever a module of the user's does
            why = f"importing {name}: {type(error).__name__}: {error}"
        # A backend holds its devices, which the attempt that runs now has.
        if not why and backend_is_up():
            why = f"importing {name} starts a jax backend, which is for the program alone"
        if why:
            return why
    return ""


def first_imports(path: str) -> Iterator[str]:
    """Yields what a script imports before it does anything else: modules, and names in them."""
    with open(path, "rb") as file:
        statements = ast.parse(file.read()).body
    for statement in statements:
        for each in statement.body if isinstance(statement, ast.Try) else [statement]:
            if isinstance(each, ast.Import):
                yield from (alias.name for alias in each.names)
            elif isinstance(each, ast.ImportFrom) and each.module and not each.level:
                yield from (f"{each.module}.{alias.name}" for alias in each.names)
            elif not (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant)):
                return


def is_installed(root: str) -> bool:
    """Returns whether a module is of Python's own, or in a folder of installed packages."""
    if root in sys.stdlib_module_names or root in sys.modules:
        return True
    spec = importlib.util.find_spec(root)
    places = [] if spec is None else [spec.origin or "", *(spec.submodule_search_locations or ())]
    return any(f"{os.sep}{name}{os.sep}" in place for place in places for name in _INSTALLED)


def preload_first(path: str) -> str:
    """Imports what a script imports first, up to what is not installed; returns why that cannot be,
    as `preload` does. What cannot be imported the program will meet itself.
    """
    with contextlib.suppress(BaseException):  # of a script, too, that cannot be read
        for name in first_imports(path):
            if not is_installed(name.partition(".")[0]):
                break
            module, _, attribute = name.rpartition(".")
            if module:
                importlib.import_module(module)
            if not (module and hasattr(sys.modules[module], attribute)):
                importlib.import_module(name)
            if backend_is_up():
                return f"importing {name} starts a jax backend, which is for the program alone"
    return ""


def hide_our_frames() -> None:
    """Has an error of the program printed as if this file had not called it."""
    hook = sys.excepthook

    def without_ours(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        while traceback is not None and traceback.tb_frame.f_code.co_filename == __file__:
            traceback = traceback.tb_next
        hook(kind, error.with_traceback(traceback), traceback)

    sys.excepthook = without_ours


def load(name: str, path: str) -> Any:
    """Returns the script at `path` as a module of that name."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def main(descriptor: str, modules: str, *command: str) -> None:
    title = load(_TITLE, os.path.join(os.path.dirname(__file__), "title.py"))
    name = title.name()
    process = os.environ.get("HOLDFAST_PROCESS_ID", "")
    title.set_title(f"holdfast: standby for process {process}".encode(), b"hf-standby")
    launcher = Launcher(int(descriptor))
    program = Program(list(command), launcher)
    # Before the imports: a module may read them.
    sys.argv = list(program.argv)
    sys.orig_argv = program.command
    folder = program.folder()
    if not sys.flags.safe_path:
        sys.path[0] = folder
    why = preload(modules.split(","))
    if not (why or program.module):
        why = preload_first(program.argv[0])
    if why:
        launcher.send("failed", why)
        if not launcher.has_told():
            os._exit(1)
        program.change_environment(launcher.wait())
        program.start_cold(why)
    gc.collect()  # of what the imports have left behind: later, others wait for this process
    launcher.send("ready")
    program.change_environment(launcher.wait())
    title.set_title(b"".join(os.fsencode(word) + b"\0" for word in command), name)
    if program.folder() != folder or not (program.module or os.path.isfile(program.argv[0])):
        program.start_cold("the program is elsewhere than it was")
    ImportGuard(program)
    try:
        program.run()
    except BaseException:
        # Raised on, not printed here: exit codes and hooks of the program stay what they are.
        hide_our_frames()
        raise


if __name__ == "__main__":
    load(_NAME, __file__).main(*sys.argv[1:])
