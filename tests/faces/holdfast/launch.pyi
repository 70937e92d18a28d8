from typing import Literal
__all__ = ['DONE', 'DO_NOT_RESTART', 'Fatal', 'HANG', 'Hang', 'JobError', 'JobResult', 'KubernetesJob', 'LiveView', 'MetricsSettings', 'PREEMPTED', 'Preempted', 'RestartPolicy', 'RunSettings', 'StandbySettings', 'StartupFailed', 'StartupTimeout', 'TaskSettings', 'WorkerFailed', 'ray', 'render_kubernetes', 'run_local', 'run_slurm', 'run_task']
DONE = 0
DO_NOT_RESTART = 93
class Fatal(JobError):
    def __init__(self, message: str = '', **facts: Any) -> None: ...
    attempt: int | None
    elapsed_s: float | None
    knob: str
    message: str
    processes: tuple[int, ...]
    timeout_s: float | None
HANG = 124
class Hang(JobError):
    def __init__(self, message: str = '', **facts: Any) -> None: ...
    attempt: int | None
    elapsed_s: float | None
    knob: str
    message: str
    processes: tuple[int, ...]
    timeout_s: float | None
class JobError(HoldfastError):
    def __init__(self, message: str = '', **facts: Any) -> None: ...
    attempt: int | None
    elapsed_s: float | None
    knob: str
    message: str
    processes: tuple[int, ...]
    timeout_s: float | None
class JobResult:
    def __init__(self, outcome: str, job_id: str, attempts: int, exit_code: int, error: JobError | None, step: int, saved_step: int, reasons: tuple[str, ...], elapsed_s: float, interrupted: bool = False, goodput: Goodput = Goodput(), outlived: int = 0) -> None: ...
    def as_json(self) -> dict[str, Any]: ...
    attempts: int
    elapsed_s: float
    error: JobError | None
    exit_code: int
    goodput: Goodput
    interrupted: bool
    job_id: str
    outcome: str
    outlived: int
    def raise_for_outcome(self) -> None: ...
    reasons: tuple[str, ...]
    saved_step: int
    step: int
    summary: str
class KubernetesJob:
    def __init__(self, name: str, image: str, command: Sequence[str], num_processes: int, num_slices: int = 1, namespace: str = 'default', resources: Mapping[str, str] = dict(), node_selector: Mapping[str, str] = dict(), max_restarts: int = 10, grace_s: int = 120, insecure: bool = False) -> None: ...
    command: Sequence[str]
    grace_s: int
    image: str
    insecure: bool
    max_restarts: int
    name: str
    namespace: str
    node_selector: Mapping[str, str]
    num_processes: int
    num_slices: int
    processes_per_slice: int
    resources: Mapping[str, str]
class LiveView(ConsoleOutput):
    def __enter__(self) -> Self: ...
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...
    def __init__(self, stdout: TextIO, stderr: TextIO, num_processes: int, *, clock: Callable[[], float] = time.monotonic) -> None: ...
    def close(self) -> None: ...
    console = ...
    def follow(self, progress: Callable[[], tuple[ProcessProgress, ...]]) -> None: ...
    def frame(self) -> Group: ...
    def line(self, process: int, text: str) -> None: ...
    def observe(self, before: Job, decision: Decision) -> None: ...
    progress: Callable[[], tuple[ProcessProgress, ...]]
    def say(self, text: str) -> None: ...
    stalled: bool
class MetricsSettings:
    def __init__(self, *, port: int = 0, host: str = '127.0.0.1') -> None: ...
    host: str
    port: int
PREEMPTED = 75
class Preempted(JobError):
    def __init__(self, message: str = '', **facts: Any) -> None: ...
    attempt: int | None
    elapsed_s: float | None
    knob: str
    message: str
    processes: tuple[int, ...]
    timeout_s: float | None
class RestartPolicy:
    def __init__(self, max_failures: int = 0, max_preemptions: int = 0, max_startup_failures: int = 3, max_startup_timeouts: int = 0, attempts_without_progress: int = 3, startup_timeout_s: float = 600.0, preemption_grace_s: float = 120.0, grace_s: float = 5.0, commit_grace_s: float = 600.0, rejoin_timeout_s: float = 10.0, backoff_s: float = 1.0, backoff_cap_s: float = 60.0, backoff_jitter: float = 0.25, grow_after_s: float = 30.0, stall_timeout_s: float = math.inf, straggler_steps: float = math.inf) -> None: ...
    attempts_without_progress: int
    backoff_cap_s: float
    backoff_jitter: float
    backoff_s: float
    commit_grace_s: float
    grace_s: float
    grow_after_s: float
    max_failures: int
    max_preemptions: int
    max_startup_failures: int
    max_startup_timeouts: int
    preemption_grace_s: float
    rejoin_timeout_s: float
    stall_timeout_s: float
    startup_timeout_s: float
    straggler_steps: float
class RunSettings:
    def __init__(self, *, restart: RestartPolicy = _NEVER, min_processes: int | None = None, job_id: str | None = None, first_attempt: int = 1, env: Mapping[str, str] | None = None, cwd: str | Path | None = None, capacity_file: str | Path | None = None, heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S, log_dir: str | Path | None = None, standby: StandbySettings = _STANDBY, metrics: MetricsSettings | None = None) -> None: ...
    capacity_file: str | Path | None
    cwd: str | Path | None
    env: Mapping[str, str] | None
    first_attempt: int
    heartbeat_timeout_s: float
    def job(self, num_processes: int) -> Job: ...
    job_id: str | None
    log_dir: str | Path | None
    log_folder: Path | None
    metrics: MetricsSettings | None
    min_processes: int | None
    restart: RestartPolicy
    standby: StandbySettings
class StandbySettings:
    def __init__(self, *, wanted: bool | None = None, preload: Sequence[str] = ()) -> None: ...
    preload: Sequence[str]
    wanted: bool | None
class StartupFailed(JobError):
    def __init__(self, message: str = '', **facts: Any) -> None: ...
    attempt: int | None
    elapsed_s: float | None
    knob: str
    message: str
    processes: tuple[int, ...]
    timeout_s: float | None
class StartupTimeout(JobError):
    def __init__(self, message: str = '', **facts: Any) -> None: ...
    attempt: int | None
    elapsed_s: float | None
    knob: str
    message: str
    processes: tuple[int, ...]
    timeout_s: float | None
class TaskSettings:
    def __init__(self, *, coordinator: str | None = None, host: str | None = None, rendezvous: Path | None = None, job_id: str | None = None, attempt: int | None = None, secrets_dir: Path | None = None, insecure: bool = False, grace_s: float = 5.0, commit_grace_s: float = 600.0) -> None: ...
    attempt: int | None
    commit_grace_s: float
    coordinator: str | None
    grace_s: float
    host: str | None
    insecure: bool
    job_id: str | None
    rendezvous: Path | None
    secrets_dir: Path | None
class WorkerFailed(JobError):
    def __init__(self, message: str = '', **facts: Any) -> None: ...
    attempt: int | None
    elapsed_s: float | None
    knob: str
    message: str
    processes: tuple[int, ...]
    timeout_s: float | None
ray: object
def render_kubernetes(job: KubernetesJob, secrets: JobSecrets | None = None) -> str: ...
def run_local(command: Sequence[str], num_processes: int, settings: RunSettings = _AS_IT_COMES, *, output: Output | None = None) -> JobResult: ...
def run_slurm(command: Sequence[str], environment: Mapping[str, str] = os.environ, *, restart: RestartPolicy | None = None, host: str | None = None, output: Output | None = None, requeue: bool = True, heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S, insecure: bool = False) -> JobResult: ...
def run_task(command: Sequence[str], environment: Mapping[str, str], settings: TaskSettings, *, report: bool = False) -> int: ...
