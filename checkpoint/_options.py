"""Options: the settings of a manager that are no policy, as one value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

DAY_S = 24 * 3600.0


@dataclass(frozen=True)
class Progress:
    """How far a save of this process is: `done_bytes` of the `total_bytes` that it writes are out. `phase` is "save"."""

    step: int
    phase: str
    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, kw_only=True)
class Options:
    """Settings of a CheckpointManager.

    save_timeout_s: from the call of `save` to the commit; a process that has not reported by then fails the save on all.
    exit_timeout_s: how long an interpreter that exits waits for a save in flight.
    on_busy: what `save` does while the last save is in flight: "wait" for it, or "skip" this one (in a group the step after is agreed on).
    host_memory_bytes: bound on the host memory that a snapshot holds; `save` blocks for the rest (None: all at once).
    single_writer: promises that nobody else writes to this root, where the store has no atomic create-if-absent.
    read_only: takes no claim: `save` and `delete` are errors, and nothing is written.
    check_free_space: refuses a save that does not fit on the disk before it begins.
    progress: called with a `Progress` from background threads, a few times a second at most.
    claim_age_s: on stores without locks, the age from which a claim that was not renewed counts as dead.
    per_process: says of a leaf's path whether each process keeps its own value, `lambda path: path.startswith("reader.")`. Such a leaf is a
        value of the host (numpy, Python, an array on this process's devices) of one shape and dtype everywhere; without this it has to be
        equal on all processes. It comes back on as many processes, or by `restore(process=...)`.
    hang_timeout_s: without a question about a step or a save for so long, the stacks of all threads go to the log and to the coordinator
        (see `multihost.watchdog`); None: nobody watches. With `hang_exit` the process then ends with exit code 124.
    """

    save_timeout_s: float = 600.0
    exit_timeout_s: float = 600.0
    on_busy: Literal["wait", "skip"] = "wait"
    host_memory_bytes: int | None = None
    single_writer: bool = False
    read_only: bool = False
    check_free_space: bool = True
    progress: Callable[[Progress], None] | None = None
    claim_age_s: float = DAY_S
    per_process: Callable[[str], bool] | None = None
    hang_timeout_s: float | None = None
    hang_exit: bool = False

    def __post_init__(self) -> None:
        if self.on_busy not in ("wait", "skip"):
            raise ValueError(f'Options: on_busy is "wait" or "skip", not {self.on_busy!r}')
        for name in ("save_timeout_s", "exit_timeout_s", "claim_age_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"Options: {name} must be above 0, found {getattr(self, name)!r}")


__all__ = ["DAY_S", "Options", "Progress"]
