"""A process is killed at each request of a streamed save, before the store has done it or after."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

import pytest

from tests.support.object_servers import BUCKET, s3_server
from tests.support.paths import program
from tests.support.proxy import address_of

MOST_POINTS = 30  # a save of one pack in three parts makes some 15 requests


class _Killer:
    """A WSGI application in front of another. Once it is armed with a process it kills that at the
    request `point`, and refuses the process's later ones.
    """

    def __init__(self, application: Any) -> None:
        self._application = application
        self.point = 0
        self.is_done_first = False
        self.killed = ""
        self.acknowledged = False
        self._process = 0
        self._seen = 0

    def begin(self, point: int, *, is_done_first: bool) -> None:
        """Makes ready for one process that arms it."""
        self.point = point
        self.is_done_first = is_done_first
        self.killed = ""
        self.acknowledged = False
        self._process = 0
        self._seen = 0

    def end(self) -> None:
        """Serves all that come, as any store does."""
        self._process = 0
        self.killed = ""

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path.startswith("/-/"):
            self.acknowledged |= path == "/-/acknowledged"
            if path.startswith("/-/arm/"):
                self._process = int(path.rpartition("/")[2])
            start_response("200 OK", [("Content-Length", "0")])
            return [b""]
        is_point = False
        if self._process:
            is_point = self._seen == self.point
            self._seen += 1
        if self.killed or (is_point and not self.is_done_first):
            self._kill(environ)
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start_response("500 Killed", [("Content-Length", "0")])
            return [b""]
        if not is_point:
            answer: Iterable[bytes] = self._application(environ, start_response)
            return answer
        body = list(self._application(environ, start_response))
        self._kill(environ)
        return body

    def _kill(self, environ: dict[str, Any]) -> None:
        if not self.killed:
            self.killed = f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}"
            os.kill(self._process, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("is_done_first", [False, True])
def test_a_save_that_is_killed_at_any_request(is_done_first: bool) -> None:
    """Nothing half-written is listed, the step before is whole, the step is there if it was
    acknowledged, and the next manager sweeps and saves.
    """
    killers: list[_Killer] = []

    def around(application: Any) -> Any:
        killers.append(_Killer(application))
        return killers[0]

    killed: list[str] = []
    with s3_server(around=around) as query:
        (killer,) = killers
        command = [sys.executable, str(program("streamed_saves"))]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as saver:
            assert saver.stdin is not None and saver.stdout is not None
            for point in range(MOST_POINTS):
                killer.begin(point, is_done_first=is_done_first)
                url = f"s3://{BUCKET}/kills/{is_done_first}/{point}{query}"
                print(
                    json.dumps([url, f"http://{address_of(query)}"]), file=saver.stdin, flush=True
                )
                ended = json.loads(saver.stdout.readline())["ended"]
                at = killer.killed
                killer.end()
                print(file=saver.stdin, flush=True)
                found = json.loads(saver.stdout.readline())
                assert found["checked"] == 0, at
                assert found["steps"] in ([1], [1, 2]), at
                assert not killer.acknowledged or found["steps"] == [1, 2], at
                if not at:
                    assert ended == 0 and killer.acknowledged
                    break
                assert ended == -signal.SIGKILL, at
                killed.append(at)
            saver.stdin.close()
    parts = [at for at in killed if at.startswith("PUT") and at.endswith(".safetensors")]
    assert len(parts) == 3 and len(killed) > 9, killed
    assert any(at.endswith("2/checkpoint.json") and at.startswith("PUT") for at in killed)
