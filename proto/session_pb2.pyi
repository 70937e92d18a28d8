from holdfast.proto import coordination_pb2 as _coordination_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ClientFrame(_message.Message):
    __slots__ = ("open", "request", "cancel", "answer", "hello")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    open: Open
    request: Request
    cancel: Cancel
    answer: Answer
    hello: Hello
    def __init__(self, open: _Optional[_Union[Open, _Mapping]] = ..., request: _Optional[_Union[Request, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., answer: _Optional[_Union[Answer, _Mapping]] = ..., hello: _Optional[_Union[Hello, _Mapping]] = ...) -> None: ...

class ServerFrame(_message.Message):
    __slots__ = ("opened", "reply", "delta", "ask", "end")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    REPLY_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    ASK_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    opened: Opened
    reply: Reply
    delta: Delta
    ask: Ask
    end: End
    def __init__(self, opened: _Optional[_Union[Opened, _Mapping]] = ..., reply: _Optional[_Union[Reply, _Mapping]] = ..., delta: _Optional[_Union[Delta, _Mapping]] = ..., ask: _Optional[_Union[Ask, _Mapping]] = ..., end: _Optional[_Union[End, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("version", "authorization", "key")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    AUTHORIZATION_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    version: int
    authorization: str
    key: str
    def __init__(self, version: _Optional[int] = ..., authorization: _Optional[str] = ..., key: _Optional[str] = ...) -> None: ...

class End(_message.Message):
    __slots__ = ("code", "message")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    code: int
    message: str
    def __init__(self, code: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ("job", "attempt", "process_id", "incarnation", "num_processes", "host", "pid", "number")
    JOB_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PROCESS_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NUM_PROCESSES_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    job: str
    attempt: int
    process_id: int
    incarnation: int
    num_processes: int
    host: str
    pid: int
    number: int
    def __init__(self, job: _Optional[str] = ..., attempt: _Optional[int] = ..., process_id: _Optional[int] = ..., incarnation: _Optional[int] = ..., num_processes: _Optional[int] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., number: _Optional[int] = ...) -> None: ...

class Opened(_message.Message):
    __slots__ = ("service_incarnation", "heartbeat_timeout_ms", "num_processes", "job", "attempt", "recoverable", "survivable", "coordinator")
    SERVICE_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROCESSES_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    RECOVERABLE_FIELD_NUMBER: _ClassVar[int]
    SURVIVABLE_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_FIELD_NUMBER: _ClassVar[int]
    service_incarnation: int
    heartbeat_timeout_ms: int
    num_processes: int
    job: str
    attempt: int
    recoverable: bool
    survivable: bool
    coordinator: str
    def __init__(self, service_incarnation: _Optional[int] = ..., heartbeat_timeout_ms: _Optional[int] = ..., num_processes: _Optional[int] = ..., job: _Optional[str] = ..., attempt: _Optional[int] = ..., recoverable: bool = ..., survivable: bool = ..., coordinator: _Optional[str] = ...) -> None: ...

class Request(_message.Message):
    __slots__ = ("id", "method", "body", "timeout_ms", "needs", "number", "participants")
    ID_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    NEEDS_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    PARTICIPANTS_FIELD_NUMBER: _ClassVar[int]
    id: int
    method: str
    body: bytes
    timeout_ms: int
    needs: _containers.RepeatedScalarFieldContainer[int]
    number: int
    participants: bytes
    def __init__(self, id: _Optional[int] = ..., method: _Optional[str] = ..., body: _Optional[bytes] = ..., timeout_ms: _Optional[int] = ..., needs: _Optional[_Iterable[int]] = ..., number: _Optional[int] = ..., participants: _Optional[bytes] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: int
    def __init__(self, id: _Optional[int] = ...) -> None: ...

class Reply(_message.Message):
    __slots__ = ("id", "code", "message", "payloads", "body")
    class PayloadsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bytes
        def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...
    ID_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    PAYLOADS_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    id: int
    code: int
    message: str
    payloads: _containers.ScalarMap[str, bytes]
    body: bytes
    def __init__(self, id: _Optional[int] = ..., code: _Optional[int] = ..., message: _Optional[str] = ..., payloads: _Optional[_Mapping[str, bytes]] = ..., body: _Optional[bytes] = ...) -> None: ...

class LivingTasks(_message.Message):
    __slots__ = ("packed",)
    PACKED_FIELD_NUMBER: _ClassVar[int]
    packed: bytes
    def __init__(self, packed: _Optional[bytes] = ...) -> None: ...

class Lives(_message.Message):
    __slots__ = ("lives",)
    LIVES_FIELD_NUMBER: _ClassVar[int]
    lives: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, lives: _Optional[_Iterable[int]] = ...) -> None: ...

class Task(_message.Message):
    __slots__ = ("info", "host", "pid")
    INFO_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    info: _coordination_pb2.TaskInfo
    host: str
    pid: int
    def __init__(self, info: _Optional[_Union[_coordination_pb2.TaskInfo, _Mapping]] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ...) -> None: ...

class Delta(_message.Message):
    __slots__ = ("version", "tasks", "packed")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TASKS_FIELD_NUMBER: _ClassVar[int]
    PACKED_FIELD_NUMBER: _ClassVar[int]
    version: int
    tasks: _containers.RepeatedCompositeFieldContainer[Task]
    packed: bytes
    def __init__(self, version: _Optional[int] = ..., tasks: _Optional[_Iterable[_Union[Task, _Mapping]]] = ..., packed: _Optional[bytes] = ...) -> None: ...

class Tasks(_message.Message):
    __slots__ = ("tasks",)
    TASKS_FIELD_NUMBER: _ClassVar[int]
    tasks: _containers.RepeatedCompositeFieldContainer[Task]
    def __init__(self, tasks: _Optional[_Iterable[_Union[Task, _Mapping]]] = ...) -> None: ...

class Ask(_message.Message):
    __slots__ = ("id", "what")
    ID_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    id: int
    what: str
    def __init__(self, id: _Optional[int] = ..., what: _Optional[str] = ...) -> None: ...

class Answer(_message.Message):
    __slots__ = ("id", "body")
    ID_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    id: int
    body: bytes
    def __init__(self, id: _Optional[int] = ..., body: _Optional[bytes] = ...) -> None: ...

class Missing(_message.Message):
    __slots__ = ("tasks", "everyone")
    TASKS_FIELD_NUMBER: _ClassVar[int]
    EVERYONE_FIELD_NUMBER: _ClassVar[int]
    tasks: _containers.RepeatedCompositeFieldContainer[MissingTask]
    everyone: bytes
    def __init__(self, tasks: _Optional[_Iterable[_Union[MissingTask, _Mapping]]] = ..., everyone: _Optional[bytes] = ...) -> None: ...

class MissingTask(_message.Message):
    __slots__ = ("task_id", "host", "silent_s", "lost", "progress")
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    SILENT_S_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    task_id: int
    host: str
    silent_s: float
    lost: bool
    progress: ReportRequest
    def __init__(self, task_id: _Optional[int] = ..., host: _Optional[str] = ..., silent_s: _Optional[float] = ..., lost: bool = ..., progress: _Optional[_Union[ReportRequest, _Mapping]] = ...) -> None: ...

class ReportRequest(_message.Message):
    __slots__ = ("step", "saved_step", "values", "trouble", "root", "asks_preemption")
    class ValuesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    STEP_FIELD_NUMBER: _ClassVar[int]
    SAVED_STEP_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    ASKS_PREEMPTION_FIELD_NUMBER: _ClassVar[int]
    step: int
    saved_step: int
    values: _containers.ScalarMap[str, float]
    trouble: str
    root: CheckpointRoot
    asks_preemption: bool
    def __init__(self, step: _Optional[int] = ..., saved_step: _Optional[int] = ..., values: _Optional[_Mapping[str, float]] = ..., trouble: _Optional[str] = ..., root: _Optional[_Union[CheckpointRoot, _Mapping]] = ..., asks_preemption: bool = ...) -> None: ...

class CheckpointRoot(_message.Message):
    __slots__ = ("path", "num_steps", "steps")
    PATH_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    path: str
    num_steps: int
    steps: _containers.RepeatedCompositeFieldContainer[CheckpointStep]
    def __init__(self, path: _Optional[str] = ..., num_steps: _Optional[int] = ..., steps: _Optional[_Iterable[_Union[CheckpointStep, _Mapping]]] = ...) -> None: ...

class CheckpointStep(_message.Message):
    __slots__ = ("step", "bytes", "incremental", "local", "damaged", "survives", "copies", "saved_unix_s", "took_s", "metrics", "best", "left_behind")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    STEP_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    INCREMENTAL_FIELD_NUMBER: _ClassVar[int]
    LOCAL_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_FIELD_NUMBER: _ClassVar[int]
    SURVIVES_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    SAVED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    TOOK_S_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    BEST_FIELD_NUMBER: _ClassVar[int]
    LEFT_BEHIND_FIELD_NUMBER: _ClassVar[int]
    step: int
    bytes: int
    incremental: bool
    local: bool
    damaged: bool
    survives: int
    copies: _containers.RepeatedCompositeFieldContainer[HostCopies]
    saved_unix_s: float
    took_s: float
    metrics: _containers.ScalarMap[str, float]
    best: _containers.RepeatedScalarFieldContainer[str]
    left_behind: bool
    def __init__(self, step: _Optional[int] = ..., bytes: _Optional[int] = ..., incremental: bool = ..., local: bool = ..., damaged: bool = ..., survives: _Optional[int] = ..., copies: _Optional[_Iterable[_Union[HostCopies, _Mapping]]] = ..., saved_unix_s: _Optional[float] = ..., took_s: _Optional[float] = ..., metrics: _Optional[_Mapping[str, float]] = ..., best: _Optional[_Iterable[str]] = ..., left_behind: bool = ...) -> None: ...

class HostCopies(_message.Message):
    __slots__ = ("processes",)
    PROCESSES_FIELD_NUMBER: _ClassVar[int]
    processes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, processes: _Optional[_Iterable[int]] = ...) -> None: ...

class ReportResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SetKeysRequest(_message.Message):
    __slots__ = ("entries",)
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[_coordination_pb2.KeyValueEntry]
    def __init__(self, entries: _Optional[_Iterable[_Union[_coordination_pb2.KeyValueEntry, _Mapping]]] = ...) -> None: ...

class SetKeysResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReportErrorRequest(_message.Message):
    __slots__ = ("error_code", "error_message")
    ERROR_CODE_FIELD_NUMBER: _ClassVar[int]
    ERROR_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    error_code: int
    error_message: str
    def __init__(self, error_code: _Optional[int] = ..., error_message: _Optional[str] = ...) -> None: ...

class ReportErrorResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReportExitRequest(_message.Message):
    __slots__ = ("process_id", "exit_code")
    PROCESS_ID_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    process_id: int
    exit_code: int
    def __init__(self, process_id: _Optional[int] = ..., exit_code: _Optional[int] = ...) -> None: ...

class ReportExitResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReportEventRequest(_message.Message):
    __slots__ = ("kind", "text", "unix_s")
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    UNIX_S_FIELD_NUMBER: _ClassVar[int]
    kind: str
    text: str
    unix_s: float
    def __init__(self, kind: _Optional[str] = ..., text: _Optional[str] = ..., unix_s: _Optional[float] = ...) -> None: ...

class ReportEventResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReportLauncherRequest(_message.Message):
    __slots__ = ("launcher", "seconds")
    class SecondsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    LAUNCHER_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    launcher: Launcher
    seconds: _containers.ScalarMap[str, float]
    def __init__(self, launcher: _Optional[_Union[Launcher, _Mapping]] = ..., seconds: _Optional[_Mapping[str, float]] = ...) -> None: ...

class Launcher(_message.Message):
    __slots__ = ("state", "why", "waiting_for", "command", "folder", "began_unix_s", "attempt", "attempts")
    STATE_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    COMMAND_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    BEGAN_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    state: str
    why: str
    waiting_for: str
    command: str
    folder: str
    began_unix_s: float
    attempt: int
    attempts: _containers.RepeatedCompositeFieldContainer[Attempt]
    def __init__(self, state: _Optional[str] = ..., why: _Optional[str] = ..., waiting_for: _Optional[str] = ..., command: _Optional[str] = ..., folder: _Optional[str] = ..., began_unix_s: _Optional[float] = ..., attempt: _Optional[int] = ..., attempts: _Optional[_Iterable[_Union[Attempt, _Mapping]]] = ...) -> None: ...

class Attempt(_message.Message):
    __slots__ = ("number", "began_unix_s", "num_processes", "stayed", "replaced", "why")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    BEGAN_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    NUM_PROCESSES_FIELD_NUMBER: _ClassVar[int]
    STAYED_FIELD_NUMBER: _ClassVar[int]
    REPLACED_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    number: int
    began_unix_s: float
    num_processes: int
    stayed: int
    replaced: _containers.RepeatedScalarFieldContainer[int]
    why: str
    def __init__(self, number: _Optional[int] = ..., began_unix_s: _Optional[float] = ..., num_processes: _Optional[int] = ..., stayed: _Optional[int] = ..., replaced: _Optional[_Iterable[int]] = ..., why: _Optional[str] = ...) -> None: ...

class ReportLauncherResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EndAttemptRequest(_message.Message):
    __slots__ = ("why", "next", "notice", "grow")
    WHY_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    NOTICE_FIELD_NUMBER: _ClassVar[int]
    GROW_FIELD_NUMBER: _ClassVar[int]
    why: str
    next: NextAttempt
    notice: str
    grow: bool
    def __init__(self, why: _Optional[str] = ..., next: _Optional[_Union[NextAttempt, _Mapping]] = ..., notice: _Optional[str] = ..., grow: bool = ...) -> None: ...

class NextAttempt(_message.Message):
    __slots__ = ("attempt", "coordinator", "staying", "why", "saving", "num_processes", "places", "startup_timeout_s")
    class PlacesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: Place
        def __init__(self, key: _Optional[int] = ..., value: _Optional[_Union[Place, _Mapping]] = ...) -> None: ...
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_FIELD_NUMBER: _ClassVar[int]
    STAYING_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    SAVING_FIELD_NUMBER: _ClassVar[int]
    NUM_PROCESSES_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    STARTUP_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    coordinator: str
    staying: _containers.RepeatedScalarFieldContainer[int]
    why: str
    saving: _containers.RepeatedScalarFieldContainer[int]
    num_processes: int
    places: _containers.MessageMap[int, Place]
    startup_timeout_s: float
    def __init__(self, attempt: _Optional[int] = ..., coordinator: _Optional[str] = ..., staying: _Optional[_Iterable[int]] = ..., why: _Optional[str] = ..., saving: _Optional[_Iterable[int]] = ..., num_processes: _Optional[int] = ..., places: _Optional[_Mapping[int, Place]] = ..., startup_timeout_s: _Optional[float] = ...) -> None: ...

class Place(_message.Message):
    __slots__ = ("local_rank", "local_count", "devices", "process_id")
    LOCAL_RANK_FIELD_NUMBER: _ClassVar[int]
    LOCAL_COUNT_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    PROCESS_ID_FIELD_NUMBER: _ClassVar[int]
    local_rank: int
    local_count: int
    devices: str
    process_id: int
    def __init__(self, local_rank: _Optional[int] = ..., local_count: _Optional[int] = ..., devices: _Optional[str] = ..., process_id: _Optional[int] = ...) -> None: ...

class EndAttemptResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StacksRequest(_message.Message):
    __slots__ = ("task_id",)
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    task_id: int
    def __init__(self, task_id: _Optional[int] = ...) -> None: ...

class StacksResponse(_message.Message):
    __slots__ = ("stacks",)
    STACKS_FIELD_NUMBER: _ClassVar[int]
    stacks: bytes
    def __init__(self, stacks: _Optional[bytes] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ("with_events", "events_after", "service_life", "since_up_s")
    WITH_EVENTS_FIELD_NUMBER: _ClassVar[int]
    EVENTS_AFTER_FIELD_NUMBER: _ClassVar[int]
    SERVICE_LIFE_FIELD_NUMBER: _ClassVar[int]
    SINCE_UP_S_FIELD_NUMBER: _ClassVar[int]
    with_events: bool
    events_after: int
    service_life: int
    since_up_s: float
    def __init__(self, with_events: bool = ..., events_after: _Optional[int] = ..., service_life: _Optional[int] = ..., since_up_s: _Optional[float] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("number", "unix_s", "kind", "text", "task_id")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    UNIX_S_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    number: int
    unix_s: float
    kind: str
    text: str
    task_id: int
    def __init__(self, number: _Optional[int] = ..., unix_s: _Optional[float] = ..., kind: _Optional[str] = ..., text: _Optional[str] = ..., task_id: _Optional[int] = ...) -> None: ...

class TaskStatus(_message.Message):
    __slots__ = ("task_id", "state", "host", "pid", "heartbeat_age_s", "error", "has_session", "has_agent", "progress", "waiting_calls", "step_age_s", "steps_per_second", "usual_steps_per_second")
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_AGE_S_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    HAS_SESSION_FIELD_NUMBER: _ClassVar[int]
    HAS_AGENT_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    WAITING_CALLS_FIELD_NUMBER: _ClassVar[int]
    STEP_AGE_S_FIELD_NUMBER: _ClassVar[int]
    STEPS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    USUAL_STEPS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    task_id: int
    state: _coordination_pb2.TaskState
    host: str
    pid: int
    heartbeat_age_s: float
    error: str
    has_session: bool
    has_agent: bool
    progress: ReportRequest
    waiting_calls: int
    step_age_s: float
    steps_per_second: float
    usual_steps_per_second: float
    def __init__(self, task_id: _Optional[int] = ..., state: _Optional[_Union[_coordination_pb2.TaskState, str]] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., heartbeat_age_s: _Optional[float] = ..., error: _Optional[str] = ..., has_session: bool = ..., has_agent: bool = ..., progress: _Optional[_Union[ReportRequest, _Mapping]] = ..., waiting_calls: _Optional[int] = ..., step_age_s: _Optional[float] = ..., steps_per_second: _Optional[float] = ..., usual_steps_per_second: _Optional[float] = ...) -> None: ...

class Waiting(_message.Message):
    __slots__ = ("task_id", "since_s")
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    SINCE_S_FIELD_NUMBER: _ClassVar[int]
    task_id: int
    since_s: float
    def __init__(self, task_id: _Optional[int] = ..., since_s: _Optional[float] = ...) -> None: ...

class BarrierStatus(_message.Message):
    __slots__ = ("barrier_id", "counter", "waiting", "missing", "left_s")
    BARRIER_ID_FIELD_NUMBER: _ClassVar[int]
    COUNTER_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    LEFT_S_FIELD_NUMBER: _ClassVar[int]
    barrier_id: str
    counter: int
    waiting: _containers.RepeatedCompositeFieldContainer[Waiting]
    missing: _containers.RepeatedScalarFieldContainer[int]
    left_s: float
    def __init__(self, barrier_id: _Optional[str] = ..., counter: _Optional[int] = ..., waiting: _Optional[_Iterable[_Union[Waiting, _Mapping]]] = ..., missing: _Optional[_Iterable[int]] = ..., left_s: _Optional[float] = ...) -> None: ...

class KeyPrefix(_message.Message):
    __slots__ = ("prefix", "keys", "bytes")
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    prefix: str
    keys: int
    bytes: int
    def __init__(self, prefix: _Optional[str] = ..., keys: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class StatusResponse(_message.Message):
    __slots__ = ("job", "attempt", "num_processes", "up_s", "phase", "tasks", "barriers", "keys", "key_bytes", "prefixes", "calls", "barriers_passed", "barriers_failed", "recoverable", "survivable", "journal", "heartbeat_interval_s", "events", "goodput_s", "launcher", "service_life", "partial", "defects", "turned_away")
    class GoodputSEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    JOB_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    NUM_PROCESSES_FIELD_NUMBER: _ClassVar[int]
    UP_S_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    TASKS_FIELD_NUMBER: _ClassVar[int]
    BARRIERS_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    KEY_BYTES_FIELD_NUMBER: _ClassVar[int]
    PREFIXES_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    BARRIERS_PASSED_FIELD_NUMBER: _ClassVar[int]
    BARRIERS_FAILED_FIELD_NUMBER: _ClassVar[int]
    RECOVERABLE_FIELD_NUMBER: _ClassVar[int]
    SURVIVABLE_FIELD_NUMBER: _ClassVar[int]
    JOURNAL_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_INTERVAL_S_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    GOODPUT_S_FIELD_NUMBER: _ClassVar[int]
    LAUNCHER_FIELD_NUMBER: _ClassVar[int]
    SERVICE_LIFE_FIELD_NUMBER: _ClassVar[int]
    PARTIAL_FIELD_NUMBER: _ClassVar[int]
    DEFECTS_FIELD_NUMBER: _ClassVar[int]
    TURNED_AWAY_FIELD_NUMBER: _ClassVar[int]
    job: str
    attempt: int
    num_processes: int
    up_s: float
    phase: str
    tasks: _containers.RepeatedCompositeFieldContainer[TaskStatus]
    barriers: _containers.RepeatedCompositeFieldContainer[BarrierStatus]
    keys: int
    key_bytes: int
    prefixes: _containers.RepeatedCompositeFieldContainer[KeyPrefix]
    calls: int
    barriers_passed: int
    barriers_failed: int
    recoverable: bool
    survivable: bool
    journal: str
    heartbeat_interval_s: float
    events: _containers.RepeatedCompositeFieldContainer[Event]
    goodput_s: _containers.ScalarMap[str, float]
    launcher: Launcher
    service_life: int
    partial: bool
    defects: _containers.RepeatedScalarFieldContainer[str]
    turned_away: int
    def __init__(self, job: _Optional[str] = ..., attempt: _Optional[int] = ..., num_processes: _Optional[int] = ..., up_s: _Optional[float] = ..., phase: _Optional[str] = ..., tasks: _Optional[_Iterable[_Union[TaskStatus, _Mapping]]] = ..., barriers: _Optional[_Iterable[_Union[BarrierStatus, _Mapping]]] = ..., keys: _Optional[int] = ..., key_bytes: _Optional[int] = ..., prefixes: _Optional[_Iterable[_Union[KeyPrefix, _Mapping]]] = ..., calls: _Optional[int] = ..., barriers_passed: _Optional[int] = ..., barriers_failed: _Optional[int] = ..., recoverable: bool = ..., survivable: bool = ..., journal: _Optional[str] = ..., heartbeat_interval_s: _Optional[float] = ..., events: _Optional[_Iterable[_Union[Event, _Mapping]]] = ..., goodput_s: _Optional[_Mapping[str, float]] = ..., launcher: _Optional[_Union[Launcher, _Mapping]] = ..., service_life: _Optional[int] = ..., partial: bool = ..., defects: _Optional[_Iterable[str]] = ..., turned_away: _Optional[int] = ...) -> None: ...
