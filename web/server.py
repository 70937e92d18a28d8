"""The page's server: for whoever holds the token in the URL, at loopback by default.

It answers no page from elsewhere. Needs the extra `web`.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import secrets
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from holdfast.coordination.address import join_address
from holdfast.coordination.distribution import install_command
from holdfast.coordination.process.job_folder import LaunchedJob

from .feed import CoordinatorAddress, Feed

PAGE = Path(__file__).parent / "page"
MOST_VIEWERS = 200
_KEEP_ALIVE_S = 15.0
_MOST_DIGITS = 9  # of a process's number
_FILES = {
    "": ("page.html", "text/html"),
    "page.css": ("page.css", "text/css"),
    "page.js": ("page.js", "text/javascript"),
}
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri"
        " 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


class Hub:
    """The latest snapshot, for viewers on one event loop.

    A viewer that is slow misses what came in between, and delays nobody.
    """

    def __init__(self) -> None:
        self.viewers = 0
        self._version = 0
        self._data = ""
        self._changed = asyncio.Event()
        self._closed = False

    def set(self, data: str) -> None:
        """Takes a newer snapshot. On the loop's thread."""
        self._version += 1
        self._data = data
        self._wake()

    def close(self) -> None:
        """Ends the streams of all viewers. On the loop's thread."""
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        waited_for = self._changed
        self._changed = asyncio.Event()
        waited_for.set()

    async def stream(self) -> AsyncIterator[str]:
        """Yields each snapshot as an event, or a comment where there was none for a while.

        The comment is written to a viewer that is gone, and so that is noticed.
        """
        seen = 0
        self.viewers += 1
        try:
            while not self._closed:
                if self._version == seen:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._changed.wait(), _KEEP_ALIVE_S)
                if self._version == seen:
                    yield ": still here\n\n"
                else:
                    seen = self._version
                    yield f"data: {self._data}\n\n"
        finally:
            self.viewers -= 1


def make_app(hub: Hub, token: str, hosts: frozenset[str], feed: Feed) -> Any:
    """Returns the application: what is below `/<token>/`, for who asks under one of `hosts`."""
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.requests import Request
    from starlette.responses import PlainTextResponse, Response, StreamingResponse
    from starlette.routing import Route

    def refusal(request: Request) -> Response | None:
        host = request.headers.get("host", "")
        if host not in hosts and not _is_address(host):
            return PlainTextResponse(
                f"asked for as {host!r}; expected one of {', '.join(sorted(hosts))}\n",
                421,
                _HEADERS,
            )
        if not secrets.compare_digest(request.path_params["token"].encode(), token.encode()):
            return PlainTextResponse(
                "wrong token; use the URL that `holdfast web` or `holdfast run --web` printed\n",
                403,
                _HEADERS,
            )
        return None

    async def file(request: Request) -> Response:
        name, kind = _FILES.get(request.path_params.get("name", ""), ("", ""))
        if refused := refusal(request):
            return refused
        if not name:
            return PlainTextResponse("there is no such page\n", 404, _HEADERS)
        return Response((PAGE / name).read_bytes(), media_type=kind, headers=_HEADERS)

    async def events(request: Request) -> Response:
        if refused := refusal(request):
            return refused
        if hub.viewers >= MOST_VIEWERS:
            return PlainTextResponse(
                f"{MOST_VIEWERS} viewers are here already; close one\n", 503, _HEADERS
            )
        return StreamingResponse(hub.stream(), media_type="text/event-stream", headers=_HEADERS)

    questions = {
        "stacks": feed.stacks,
        "history": feed.history,
        "log": feed.log,
        "range": feed.range,
    }

    async def about_process(request: Request) -> Response:
        if refused := refusal(request):
            return refused
        number = request.path_params["number"]
        if not (number.isascii() and number.isdecimal() and len(number) <= _MOST_DIGITS):
            return PlainTextResponse("there is no such process\n", 404, _HEADERS)
        question = questions.get(request.path_params["question"])
        if question is None:
            return PlainTextResponse("there is no such page\n", 404, _HEADERS)
        return PlainTextResponse(await run_in_threadpool(question, int(number)), headers=_HEADERS)

    routes = [
        Route("/{token}/events", events),
        Route("/{token}/{question}/{number}", about_process),
        Route("/{token}/", file),
        Route("/{token}/{name}", file),
    ]
    return Starlette(routes=routes)


def serve_page(
    find: Callable[[], CoordinatorAddress | None],
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    token: str | None = None,
    launched: Callable[[str], LaunchedJob | None] = lambda job: None,
    announce: Callable[[str], None] = print,
    end_with_input: bool = False,
) -> None:
    """Serves the page of the job whose coordinator `find` returns.

    `launched` returns what a launcher on this machine says of a job, by its id ("": not known).
    Blocks until a signal, or until the end of standard input where that is asked for. `announce`
    gets the URL, which holds the token (a random one by default). Raises OSError for a port that is
    taken, and ImportError with the line that installs what is missing.
    """
    try:
        import uvicorn
    except ImportError:
        command = install_command("web")
        raise ImportError(f"the page needs starlette and uvicorn: {command}") from None
    token = token or secrets.token_urlsafe(24)
    option = "--web-port" if end_with_input else "--port"  # `holdfast run --web` starts it so
    with _listening(host, port, option) as listener:
        address, port, *_ = listener.getsockname()

        async def serve() -> None:
            hub = Hub()
            loop = asyncio.get_running_loop()

            def publish(data: str) -> None:
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    loop.call_soon_threadsafe(hub.set, data)

            with Feed(find, publish, launched) as feed:
                app = make_app(hub, token, _names(host, port), feed)
                server = _make_server(uvicorn, app, hub)
                if end_with_input:
                    threading.Thread(target=server.end_with_input, daemon=True).start()
                announce(f"http://{join_address(address, port)}/{token}/")
                await server.serve(sockets=[listener])

        asyncio.run(serve())


def _listening(host: str, port: int, option: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host.strip("[]"), port), family=family)
    except OSError as error:
        if (error.errno or 0) < 0:  # of getaddrinfo
            raise OSError(f"cannot listen at {host}: no such host; choose another --host") from None
        raise OSError(
            f"cannot listen at {host}:{port}: {os.strerror(error.errno or 0)}; choose another"
            f" {option}, or 0 for a free one"
        ) from None


def _names(host: str, port: int) -> frozenset[str]:
    """Returns by which names a browser may ask for this server, beside addresses."""
    names = {"127.0.0.1", "localhost", host}
    if host in ("0.0.0.0", "::"):
        names.add(socket.gethostname())
    ports = {f":{port}", "" if port == 80 else f":{port}"}  # browsers leave 80 out
    return frozenset(name + port for name in names for port in ports)


def _is_address(host: str) -> bool:
    """Says whether a browser asks under an address, which nobody can point here as he can a name:
    a page elsewhere whose name was pointed to this machine asks under that.
    """
    try:
        ipaddress.ip_address(urlsplit(f"//{host}").hostname or "")
    except ValueError:
        return False
    return True


def _make_server(uvicorn: Any, app: Any, hub: Hub) -> Any:
    """Returns uvicorn's server of `app`, which ends the streams of `hub` before it waits."""
    config = uvicorn.Config(
        app,
        log_level="warning",
        lifespan="off",
        access_log=False,
        timeout_graceful_shutdown=1,
        ws="none",
    )

    class PageServer(uvicorn.Server):  # type: ignore[misc]  # imported where it is used
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            hub.close()
            # A viewer that does not read is cut off. That is meant, and no error.
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
            await super().shutdown(sockets)

        def end_with_input(self) -> None:
            while sys.stdin.buffer.read(4096):
                pass
            self.should_exit = True

    return PageServer(config)
