"""Lives that once broke a rule, each as plain as it goes."""

from __future__ import annotations

from .life import Life

FOUND: dict[str, Life] = {
    # On every Python.
    "a manager that is dropped": Life(holder="collected"),
    "a manager that is dropped, and Ctrl-C": Life(end="interrupt"),
    "its save fails, and its handle is kept": Life(holder="handle", call="fails"),
    "its save fails, and the log goes to a file": Life(call="fails", quiet=True),
    "a thread that outlives main uses a manager of main's": Life(
        "thread", "global", end="main first", made_first=True
    ),
    "a hook that was there before ours": Life("early hook"),
    "that hook saves, after Ctrl-C": Life("early hook", end="interrupt"),
    "that hook has a manager of main's": Life("early hook", "global", made_first=True),
    "a save in it fails": Life("early hook", "global", "fails"),
    # On those that start no thread at their end.
    "a hook": Life("hook"),
    "a hook saves twice": Life("hook", call="two saves"),
    "a finalizer": Life("finalizer"),
    "a thread that outlives main makes a manager": Life("thread", end="main first"),
    # A child ends without hooks of atexit.
    "a manager that a child drops": Life("forkserver", "collected"),
    "a child's save fails": Life("spawn", "handle", "fails"),
    "a child, while its parent saves": Life("fork", call="save_async", parent_saves=True),
    # After all threads.
    "a finalizer of a global": Life("global's finalizer", "global"),
}
