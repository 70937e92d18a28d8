"""A life of a process that saves, drawn by a seed."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass

MAKERS = (
    "main",
    "thread",
    "executor",
    "asyncio",
    "hook",
    "early hook",
    "finalizer",
    "global's finalizer",
    "os.fork",
    "fork",
    "forkserver",
    "spawn",
)
CHILDREN = ("os.fork", "fork", "forkserver", "spawn")
HOLDERS = ("scope", "collected", "handle", "global", "cycle", "context")
CALLS = ("save", "two saves", "wait", "save_async", "restore", "callback", "cancel", "fails")
ENDS = (
    "return",
    "sys.exit",
    "exception",
    "interrupt",
    "main first",
    "os._exit",
    "exec",
    "SIGKILL",
    "SIGTERM",
)
SUDDEN = ("os._exit", "exec", "SIGKILL", "SIGTERM")
# how often each is drawn: the sudden ends ask less
_WEIGHTS = {end: 1 if end in SUDDEN else 3 for end in ENDS}


@dataclass(frozen=True)
class Life:
    """Who makes the manager (`maker`), where it is held, which call is the last, and how the
    process ends.

    `made_first`: by the main thread, which saves with it before its maker does. `parent_saves`: the
    parent of a child has a save in flight itself. `quiet`: the log goes to a file.
    """

    maker: str = "main"
    holder: str = "scope"
    call: str = "save"
    end: str = "return"
    made_first: bool = False
    parent_saves: bool = False
    quiet: bool = False
    jax: bool = False

    @property
    def is_possible(self) -> bool:
        """Whether there is such a program."""
        if self.end == "main first":
            return self.maker == "thread"
        if self.made_first and (self.maker in CHILDREN or self.holder != "global"):
            return False
        if self.parent_saves and self.maker not in CHILDREN:
            return False
        if self.maker == "global's finalizer" and (self.holder, self.call) != ("global", "save"):
            return False
        if self.maker == "os.fork" and self.parent_saves and self.end not in SUDDEN:
            return False  # with a backend of its parent's, jax's own end hangs in such a child
        # jax's own threads are not in a forked child.
        return not (self.jax and self.maker in ("os.fork", "fork"))

    def plainer(self) -> list[Life]:
        """Returns lives that differ in one thing, which is plainer there."""
        plain = asdict(Life())
        mine = asdict(self)
        lives = [
            Life(**(mine | {name: plain[name]})) for name in plain if mine[name] != plain[name]
        ]
        return [life for life in lives if life.is_possible]


def life_of(seed: int) -> Life:
    """Returns the life of a seed."""
    rng = random.Random(f"process {seed}")
    while True:
        life = Life(
            rng.choice(MAKERS),
            rng.choice(HOLDERS),
            rng.choice(CALLS),
            rng.choices(ENDS, [_WEIGHTS[end] for end in ENDS])[0],
            made_first=rng.random() < 0.3,
            parent_saves=rng.random() < 0.3,
            quiet=rng.random() < 0.2,
            jax=rng.random() < 0.2,
        )
        if life.is_possible:
            return life
