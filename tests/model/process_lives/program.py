"""A process that lives a life: `program.py FOLDER LIFE`. It imports nothing of the tests, so that
any Python which has holdfast runs it. What it has begun it writes to FOLDER/journal.
"""

from __future__ import annotations

import asyncio
import atexit
import gc
import json
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

FOLDER = sys.argv[1]
LIFE = SimpleNamespace(**json.loads(sys.argv[2]))
JOURNAL = os.open(f"{FOLDER}/journal", os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def note(*words: object) -> None:
    os.write(JOURNAL, (" ".join(map(str, words)) + "\n").encode())


def early() -> None:
    if LIFE.maker == "early hook" and __name__ == "__main__":
        work()


atexit.register(early)  # before holdfast is imported: it runs after holdfast's own hooks

import numpy as np  # noqa: E402

from holdfast.checkpoint import CheckpointManager, Options, save_async  # noqa: E402

HELD: list[Any] = []
WORDS = 100_000


class Ours(Exception):
    """How the program fails."""


def slowly(progress: object) -> None:
    """Stands for a store that needs its time, longer than the program does for its end."""
    time.sleep(0.15)
    if LIFE.call == "fails":
        raise OSError("no room")


def state(step: int) -> dict[str, Any]:
    value = np.full(WORDS, step, np.int32)
    if LIFE.jax:
        import jax.numpy as jnp

        return {"x": jnp.asarray(value)}
    return {"x": value}


def make() -> CheckpointManager:
    return CheckpointManager(f"{FOLDER}/root", options=Options(progress=slowly))


def save(manager: CheckpointManager, step: int) -> Any:
    handle = manager.save(step, state(step))
    note("begun", step)
    return handle


def call(manager: CheckpointManager) -> Any:
    """Does what is called last; returns a handle."""
    if LIFE.call == "save_async":
        handle = save_async(f"{FOLDER}/root/1", state(1), step=1)
        note("begun", 1)
        return handle
    handle = save(manager, 1)
    if LIFE.call == "two saves":
        handle = save(manager, 2)
    elif LIFE.call == "wait":
        handle.wait()
    elif LIFE.call == "restore":
        manager.restore(1)
        handle = save(manager, 2)
    elif LIFE.call == "callback":
        handle.on_commit(lambda step: note("committed", step))
    elif LIFE.call == "cancel" and handle.cancel():
        note("cancelled", 1)
    return handle


def work() -> None:
    """Makes the manager and saves."""
    if LIFE.made_first:
        call(HELD[0])
    elif LIFE.holder == "context":
        with make() as manager:
            call(manager)
    else:
        manager = make()
        handle = call(manager)
        if LIFE.holder == "global":
            HELD.append(manager)
        elif LIFE.holder == "handle":
            HELD.append(handle)
        elif LIFE.holder == "cycle":
            cycle: list[Any] = [manager]
            cycle.append(cycle)


def drop_and_collect() -> None:
    work()
    if LIFE.holder == "collected":
        gc.collect()


class Global:
    """Saves when it is destroyed, with the modules: it needs no name of this one."""

    def __init__(self) -> None:
        self.manager = make()
        self.state = state(1)

    def __del__(self) -> None:
        self.manager.save(1, self.state)


def end() -> None:
    """Ends the process."""
    if LIFE.end == "sys.exit":
        sys.exit(3)
    if LIFE.end == "exception":
        raise Ours
    if LIFE.end == "interrupt":
        raise KeyboardInterrupt
    if LIFE.end == "os._exit":
        os._exit(4)
    if LIFE.end == "exec":
        os.execv(sys.executable, [sys.executable, "-c", "raise SystemExit(5)"])
    if LIFE.end in ("SIGKILL", "SIGTERM"):
        os.kill(os.getpid(), getattr(signal, LIFE.end))
        time.sleep(60)


def live_in_child() -> None:
    drop_and_collect()
    end()


def after_main() -> None:
    threading.main_thread().join()
    drop_and_collect()


def begin_child() -> int:
    """Returns the exit code of a child, whose life it is."""
    if LIFE.maker == "os.fork":
        child = os.fork()
        if not child:
            live_in_child()
            return 0
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    else:
        process = multiprocessing.get_context(LIFE.maker).Process(target=live_in_child)
        process.start()
        process.join()
        code = process.exitcode or 0
    note("child", code)
    return code


def main() -> None:
    if LIFE.quiet:
        logging.basicConfig(filename=f"{FOLDER}/log")
    if LIFE.made_first:
        HELD.append(make())
        if LIFE.call != "fails":
            save(HELD[0], 0)
    if LIFE.parent_saves:
        own = CheckpointManager(f"{FOLDER}/parent", options=Options(progress=slowly))
        own.save(7, state(7))
        HELD.append(own)
    if LIFE.maker in ("os.fork", "fork", "forkserver", "spawn"):
        begin_child()
        return
    if LIFE.maker == "main":
        drop_and_collect()
    elif LIFE.maker == "thread":
        late = LIFE.end == "main first"
        threading.Thread(target=after_main if late else drop_and_collect).start()
    elif LIFE.maker == "executor":
        HELD.append(ThreadPoolExecutor(1).submit(drop_and_collect))
    elif LIFE.maker == "asyncio":
        asyncio.run(asyncio.to_thread(drop_and_collect))
    elif LIFE.maker == "hook":
        atexit.register(drop_and_collect)
    elif LIFE.maker == "finalizer":
        weakref.finalize(main, drop_and_collect)
    elif LIFE.maker == "global's finalizer":
        HELD.append(Global())
    end()


if __name__ == "__main__":
    main()
