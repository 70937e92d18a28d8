"""Has coordinators write down each message that arrives, and how it was answered.

The coordinators of a launcher whose environment is `tapped(FOLDER)` import this module as they
start. Each of them writes a file of its own into the folder, a line of JSON for each message.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from holdfast.coordination.names import END_ATTEMPT, PROFILE_A
from holdfast.coordination.server.profiles import RPCS_A
from holdfast.coordination.server.service import Service
from holdfast.coordination.server.sessions import ResponseWriter, SessionCall, SessionStreams
from holdfast.proto import session_pb2

from .paths import ROOT
from .running_logs import whole_lines

_FOLDER = "COORDINATOR_TAP"
_NAMES = ("barrier_id", "key", "directory_key")
OPEN = "Open"


def tapped(folder: Path) -> dict[str, str]:
    """Returns the variables with which coordinators write their messages into a folder."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(
        "import sys\n"
        'if "coordinator" in sys.orig_argv:\n'
        f"    sys.path.append({str(ROOT)!r})\n"
        "    from tests.support import coordinator_tap\n"
        "    coordinator_tap.begin()\n"
    )
    return {"PYTHONPATH": str(folder), _FOLDER: str(folder)}


@dataclass(frozen=True)
class Message:
    """A message at a coordinator: whose it says it is, what it is about, and the answer's code.

    `attempt` is the coordinator's; an Open `says` which one it is for. An `incarnation` of 0 is
    that of a caller who is no process of the job, such as the launcher.
    """

    attempt: int
    method: str
    incarnation: int = 0
    process: int = -1
    name: str = ""
    says: tuple[str, int] = ("", 0)
    code: int | None = None

    @property
    def is_end(self) -> bool:
        """Whether it says that the attempt is over."""
        return self.method == END_ATTEMPT


def messages(folder: Path) -> Iterator[list[Message]]:
    """Yields what each coordinator has heard, in the order of its answers."""
    for file in sorted(folder.glob("*.messages")):
        yield [
            Message(**fields | {"says": tuple(fields["says"])})
            for fields in map(json.loads, whole_lines(file))
        ]


class _Tap:
    """Writes the messages of this coordinator."""

    def __init__(self, folder: str) -> None:
        # In a long job two coordinators may have one process id.
        self._file = (Path(folder) / f"{uuid.uuid4()}.messages").open("w", buffering=1)

    def write(self, message: Message, code: int) -> None:
        """Writes a message, once it is answered."""
        self._file.write(json.dumps(asdict(replace(message, code=code))) + "\n")


class _Writer:
    """The writer of a response, which is written down too."""

    def __init__(self, writer: ResponseWriter, tap: _Tap, message: Message) -> None:
        self._writer = writer
        self._tap = tap
        self._message = message
        self.key = writer.key
        self.timed = writer.timed

    def names(self) -> Sequence[bytes]:
        return self._writer.names()

    def succeed(self, body: bytes) -> None:
        self._tap.write(self._message, 0)
        self._writer.succeed(body)

    def fail(self, code: int, message: str, details: bytes) -> None:
        self._tap.write(self._message, code)
        self._writer.fail(code, message, details)


def begin() -> None:
    """Begins to write down what this coordinator hears."""
    tap = _Tap(os.environ[_FOLDER])
    _tap_unary(tap)
    _tap_sessions(tap)


def _tap_unary(tap: _Tap) -> None:
    """Taps the calls of jaxlib's agents, and of launchers."""
    take = Service.unary

    def unary(self: Service, path: str, body: bytes, writer: ResponseWriter) -> Any:
        message = Message(self.config.attempt, path)
        rpc = RPCS_A.get(path.removeprefix(PROFILE_A))
        if rpc is not None:
            request = rpc.parse(body)
            claim = rpc.claim(request)
            message = replace(
                message,
                incarnation=claim.incarnation,
                process=-1 if claim.task_id is None else claim.task_id,
                name=_name_of(request),
            )
        return take(self, path, body, _Writer(writer, tap, message))

    Service.unary = unary  # type: ignore[method-assign]


def _tap_sessions(tap: _Tap) -> None:
    """Taps what comes over the Sessions of holdfast's clients."""
    open_one = SessionStreams._open
    ask = SessionStreams._request
    answer = SessionCall.answer

    def opened(self: SessionStreams, stream: Any, opening: session_pb2.Open, now: float) -> None:
        open_one(self, stream, opening, now)
        message = Message(
            self._machine.config.attempt,
            OPEN,
            incarnation=opening.incarnation,
            process=opening.process_id,
            says=(opening.job, opening.attempt),
        )
        tap.write(message, 0 if stream.session is not None else -1)

    def asked(self: SessionStreams, session: Any, request: session_pb2.Request, now: float) -> None:
        rpc = RPCS_A.get(request.method)
        message = Message(
            self._machine.config.attempt,
            request.method,
            incarnation=session.incarnation,
            process=session.task_id,
            name="" if rpc is None else _name_of(rpc.parse(request.body)),
        )
        asking[session, request.id] = message
        ask(self, session, request, now)

    def answered(self: SessionCall, machine: Any) -> None:
        message = asking.pop((self.owner, self.reply_to), None)
        if message is not None:
            tap.write(message, 0 if self.status is None else int(self.status.code))
        answer(self, machine)

    asking: dict[tuple[Any, int], Message] = {}
    SessionStreams._open = opened  # type: ignore[method-assign]
    SessionStreams._request = asked  # type: ignore[method-assign]
    SessionCall.answer = answered  # type: ignore[method-assign]


def _name_of(request: Any) -> str:
    """Returns the barrier, key or folder that a request is about."""
    if hasattr(request, "kv"):
        return str(request.kv.key)
    return next((str(getattr(request, name)) for name in _NAMES if hasattr(request, name)), "")
