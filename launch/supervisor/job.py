"""The supervisor's values: the job, its policy and state, events, and actions to carry out."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias, TypeVar

from holdfast.coordination.names import GROWING, on_the_wire
from holdfast.multihost import JobError
from holdfast.multihost.group.group import SaveStage

T = TypeVar("T")

# Exit codes between a process and whoever started it.
DONE = 0
PREEMPTED = 75
DO_NOT_RESTART = 93
STUCK = 94  # it was to outlive an attempt, and sits in a call that does not return
HANG = 124
INTERRUPTED = 130  # of the launcher itself, after Ctrl-C


def how_ended(code: int) -> str:
    """Returns how a process ended, by its exit code or minus the signal that ended it."""
    return f"ended with exit code {code}" if code >= 0 else f"was ended by signal {-code}"


class State(enum.StrEnum):
    """The states of a job. `finished`, `preempted` and `failed` are final."""

    INITIALIZING = "initializing"  # nothing has been asked for yet
    SCHEDULING = "scheduling"  # waiting for machines, under one deadline for the whole gang
    RUNNING = "running"
    PREEMPTING = "preempting"  # a notice is out; the processes are saving and leaving
    # what is left of an attempt is being ended, if anything is; then a back-off
    RESTARTING = "restarting"
    REJOINING = "rejoining"  # a process is replaced; the others join the next attempt
    FINISHED = "finished"
    PREEMPTED = "preempted"
    FAILED = "failed"


@dataclass(frozen=True)
class RestartPolicy:
    """How often, how fast and how long a job is started again. Progress refills the budgets.

    Progress is a saved step above all earlier ones or, for a job that reports no saved steps, a
    step above all earlier ones.
    """

    max_failures: int = 0  # attempts that may end in a dead or hanging process
    max_preemptions: int = 0
    max_startup_failures: int = 3
    max_startup_timeouts: int = 0
    # That many in a row, of a job that has ever reported progress, end it.
    attempts_without_progress: int = 3
    startup_timeout_s: float = 600.0  # for the whole gang
    # To save and leave, where a notice brings no deadline of its own.
    preemption_grace_s: float = 120.0
    # From SIGTERM to SIGKILL, for what is left of a failed attempt without a client of ours.
    grace_s: float = 5.0
    # For what is left of a failed attempt to end a save that can still be committed.
    commit_grace_s: float = 600.0
    # For a process that outlives an attempt to be in the next one.
    rejoin_timeout_s: float = 10.0
    backoff_s: float = 1.0  # before the first restart; doubles with each one that made no progress
    backoff_cap_s: float = 60.0
    # Random share of the back-off, so that many jobs do not return together.
    backoff_jitter: float = 0.25
    grow_after_s: float = 30.0  # an attempt runs at least that long before it is made larger
    # Without a step, an attempt hangs. Before its first step it has `startup_timeout_s`.
    stall_timeout_s: float = math.inf
    straggler_steps: float = math.inf  # a process so far behind the median is reported

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 0:
                raise ValueError(f"RestartPolicy.{name} is {value}; expected 0 or more")


class SavePosition(NamedTuple):
    """How far a process has come in saving: the number of its latest save, and its stage.

    The positions of one process only rise.
    """

    save: int
    stage: SaveStage


NO_SAVE = SavePosition(-1, SaveStage.SETTLED)


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """What is known of one attempt. The next one begins with nothing of it."""

    alive: frozenset[int] = frozenset()
    # The life of each process: the attempt that it was started for, this one or one before.
    lives: Mapping[int, int] = field(default_factory=dict)
    exit_codes: Mapping[int, int] = field(default_factory=dict)  # by process
    notices: Mapping[str, Noticed] = field(default_factory=dict)  # by their sources
    reported_done: bool = False  # the training loop itself reported its end
    progressed: bool = False  # it passed the best of all earlier ones
    started_at: float = 0.0
    saves: Mapping[int, SavePosition] = field(default_factory=dict)  # of those that report
    leaving_since: float = 0.0  # when the first notice came
    ending_since: float = 0.0
    silent: frozenset[int] = frozenset()  # those that cannot report any more
    # Those whose end was ordered while others may still commit.
    killing: frozenset[int] = frozenset()
    # Those that were asked to end: nothing is known of their saves.
    asked: frozenset[int] = frozenset()
    leaving: frozenset[int] = frozenset()  # those that have begun to leave by themselves
    killed: bool = False  # all of them
    restartable: frozenset[int] = frozenset()  # those that can outlive it
    # Those that have left their training function, and wait for what becomes of them.
    held: frozenset[int] = frozenset()
    dismissed: bool = False  # those: there is no next attempt for them
    # Those of the attempt before whose machines are given back: they end by themselves.
    going: frozenset[int] = frozenset()
    # So many are to be in the next one, if it is smaller, or some stay for it; 0: as many as in
    # this one.
    resize_to: int = 0
    rejoining: frozenset[int] = frozenset()  # those of the attempt before that are not back yet
    # Those of them that a save of the attempt before may still need.
    saving_before: frozenset[int] = frozenset()
    replaced: frozenset[int] = frozenset()  # those that were started anew while others stayed
    why_waiting: str = ""  # what an engine last reported of missing room
    error: JobError | None = None


@dataclass(frozen=True)
class Job(Attempt):
    """All that the supervisor knows of a job, and of its attempt. Immutable; `decide` makes the
    next one.
    """

    job_id: str
    min_processes: int
    max_processes: int
    policy: RestartPolicy = field(default_factory=RestartPolicy)
    state: State = State.INITIALIZING
    attempt: int = 0
    # By the policy's setting, since the last progress.
    budget_used: Mapping[str, int] = field(default_factory=dict)
    stopping: bool = False  # the supervisor itself is to stop: no attempt after this one
    step: int = -1
    saved_step: int = -1
    idle_attempts: int = 0  # attempts in a row that ran and made no progress
    wake_at: float | None = None  # when the supervisor wants a Tick
    why_final: str = ""  # no attempt follows the one that is ending, and why
    exit_code: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.min_processes <= self.max_processes:
            raise ValueError(
                f"a job needs 1 <= min_processes <= num_processes, found {self.min_processes} and"
                f" {self.max_processes}"
            )
        if on_the_wire(self.job_id) != self.job_id:
            raise ValueError(f"job_id={self.job_id!r}: expected text that is valid UTF-8")

    @property
    def final(self) -> bool:
        """Whether nothing happens to this job any more."""
        return self.state in (State.FINISHED, State.PREEMPTED, State.FAILED)

    @property
    def may_restart(self) -> bool:
        """Whether an attempt may follow the first."""
        allowed = self.policy.max_failures + self.policy.max_preemptions
        return allowed > 0 or self.min_processes < self.max_processes

    @property
    def grows(self) -> bool:
        """Whether the processes leave for no other reason than to come back as more."""
        is_alone = self.notices.keys() == {GROWING}
        return self.state is State.PREEMPTING and is_alone and not self.stopping

    @property
    def resizes(self) -> bool:
        """Whether the processes leave to come back as more, or as fewer for want of room."""
        fewer = self.state is State.PREEMPTING and 0 < self.resize_to < self.num_processes
        return self.grows or (fewer and not self.stopping)

    @property
    def num_processes(self) -> int:
        """The number of processes of the current attempt."""
        return len(self.alive) + len(self.exit_codes)

    @property
    def surplus(self) -> frozenset[int]:
        """Those of the attempt before that leave, and whom nobody replaces."""
        return self.going - self.alive

    @property
    def staying(self) -> frozenset[int]:
        """The processes of this attempt that have outlived the one before, or are to."""
        outlived = frozenset(each for each, life in self.lives.items() if life < self.attempt)
        return outlived - self.going

    @property
    def noticed(self) -> frozenset[int]:
        """The processes of this attempt whose machines are to be given back."""
        everybody = self.alive | self.exit_codes.keys()
        # To grow, process 0 is asked alone, and has no notice of its own.
        who = (
            notice.processes or everybody
            for source, notice in self.notices.items()
            if source != GROWING or not self.resize_to
        )
        return frozenset().union(*who)


# --- Events: what an engine has seen

# Their times are on the engine's clock, the same one that `now` is read from.


@dataclass(frozen=True)
class Start:
    """The job was handed in."""


@dataclass(frozen=True)
class Reserved:
    """Room for `num_processes` is reserved for this attempt."""

    attempt: int
    num_processes: int


@dataclass(frozen=True)
class Waiting:
    """There is no room yet for this attempt, and why."""

    attempt: int
    why: str


@dataclass(frozen=True)
class StartFailed:
    """Reserving or starting failed for another reason than time."""

    attempt: int
    why: str
    final: bool = False  # the next attempt would fail alike
    preempted: bool = False  # a machine of the attempt was taken away before it stood


@dataclass(frozen=True)
class Unplaced:
    """There is no room for processes of an attempt that others stay for, and why; it may have fewer
    by so many.
    """

    attempt: int
    processes: frozenset[int]
    why: str


@dataclass(frozen=True)
class CoordinatorEnded:
    """The coordinator of an attempt is gone while processes still need it."""

    attempt: int
    why: str


@dataclass(frozen=True)
class Exited:
    """A process ended: its exit code, or minus the signal that ended it.

    `life` is the attempt that it was started for, whichever runs now. `met` is the latest attempt
    in which all processes may have met while it lived.
    """

    life: int
    process: int
    code: int
    why: str = ""
    met: float = math.inf


@dataclass(frozen=True)
class Progressed:
    """Processes reported progress to the coordinator."""

    attempt: int
    step: int = -1
    saved_step: int = -1
    done: bool = False  # the training loop is complete
    saves: Mapping[int, SavePosition] = field(default_factory=dict)  # of our clients' processes
    restored_s: float = 0.0  # spent in restores, by the process that spent most
    blocked_s: float = 0.0  # spent blocked in saves, likewise
    compiled_s: float = 0.0  # spent in compilations, likewise
    leaving: frozenset[int] = frozenset()  # processes in `multihost.shutdown()`
    restartable: frozenset[int] = frozenset()  # processes in `multihost.run_restartable()`
    held: frozenset[int] = frozenset()  # those of them that have left their training function


@dataclass(frozen=True)
class Stalled:
    """The processes make no steps any more, and why."""

    attempt: int
    why: str
    processes: tuple[int, ...] = ()  # they keep the others waiting
    silent: frozenset[int] = frozenset()  # they can report nothing any more


@dataclass(frozen=True)
class Stuck:
    """A process that an exception ends does not end: the engine ends it, and reports its end."""

    attempt: int
    process: int
    why: str


@dataclass(frozen=True)
class Noticed:
    """Machines are to be given back."""

    source: str
    deadline: float | None = None
    delivered: bool = False  # the processes know already
    processes: frozenset[int] = frozenset()  # that run there; none: all
    attempt: int | None = None  # in which processes have given it


@dataclass(frozen=True)
class Withdrawn:
    """The notice of that source no longer holds."""

    source: str


@dataclass(frozen=True)
class Capacity:
    """There is room for `num_processes` in all, those that run included."""

    num_processes: int


@dataclass(frozen=True)
class Stop:
    """The supervisor itself is to stop: the processes save and leave, and no attempt follows."""

    source: str


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


Event: TypeAlias = (
    Start
    | Reserved
    | Waiting
    | StartFailed
    | Unplaced
    | CoordinatorEnded
    | Exited
    | Progressed
    | Stalled
    | Noticed
    | Withdrawn
    | Capacity
    | Stop
    | Tick
)


# --- Actions: what an engine is to do


@dataclass(frozen=True)
class Reserve:
    """Reserve room for so many processes; answer with Reserved, Waiting or StartFailed."""

    attempt: int
    min_processes: int
    max_processes: int


@dataclass(frozen=True)
class Launch:
    """Start the processes of this attempt in what was reserved."""

    attempt: int
    num_processes: int


@dataclass(frozen=True)
class Notify:
    """Notify processes to save and leave. Those that hear (None: all) tell the others."""

    why: str
    processes: frozenset[int] | None = None


@dataclass(frozen=True)
class Grow:
    """Have process 0 tell all to save and leave their training function, to come back as more."""


@dataclass(frozen=True)
class Unnotify:
    """Notify every process that the notice is withdrawn, where the engine can."""


@dataclass(frozen=True)
class Dismiss:
    """Have those that wait for what becomes of them leave: there is no next attempt for them."""


@dataclass(frozen=True)
class Terminate:
    """Ask processes that still run to end (SIGTERM); None: all."""

    processes: frozenset[int] | None = None


@dataclass(frozen=True)
class Kill:
    """End processes that still run, now (SIGKILL); None: all."""

    processes: frozenset[int] | None = None


@dataclass(frozen=True)
class Release:
    """Give back all that is reserved for the attempt."""


@dataclass(frozen=True)
class PrepareNext:
    """Begin what the next attempt will need, if it has as many processes, during the back-off.

    An engine may leave it out.
    """

    attempt: int
    num_processes: int


@dataclass(frozen=True)
class Rejoin:
    """Open this attempt, and have the processes that outlive the one before join it."""

    attempt: int
    num_processes: int
    staying: frozenset[int]
    why: str  # the attempt before is over
    saving: frozenset[int] = frozenset()  # of those that stay: whose save can still be committed
    # Of those that stay: they live, and end by themselves, to be replaced then if the attempt has
    # their numbers.
    going: frozenset[int] = frozenset()
    # Which number each process had in the attempt before, where that has lost some for good.
    numbers_before: tuple[int, ...] = ()

    def number_before(self, process: int) -> int:
        """Returns the number that one of those that stay had in the attempt before."""
        return self.numbers_before[process] if self.numbers_before else process


def renumbered(every: Mapping[int, T], numbers_before: Sequence[int]) -> dict[int, T]:
    """Returns what there is for the processes of such an attempt, by their new numbers."""
    return {
        process: every[before] for process, before in enumerate(numbers_before) if before in every
    }


@dataclass(frozen=True)
class Replace:
    """Start these processes of the attempt anew. What runs in their place is ended first."""

    attempt: int
    processes: frozenset[int]


Action: TypeAlias = (
    Reserve
    | Launch
    | Notify
    | Grow
    | Unnotify
    | Dismiss
    | Terminate
    | Kill
    | Release
    | PrepareNext
    | Rejoin
    | Replace
)


@dataclass(frozen=True)
class Decision:
    """The next job, what to do, and why, with the counts in it."""

    job: Job
    actions: tuple[Action, ...]
    reason: str
