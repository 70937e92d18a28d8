"""A small S3 server for benchmarks: no signatures, one bucket's worth of keys, bodies in files.

    python benchmarks/s3_server.py FOLDER

It prints its address, and serves until its input ends. It knows PUT on conditions, copies, uploads
in parts, GET and HEAD with ranges, DELETE of one key and of many, and lists with a delimiter, in
pages of 1,000. Bodies go from socket to file by splice and back by sendfile. rclone's server takes
5 s of CPU for a GB that is put, more than all that is measured; this one takes 0.3.
"""

from __future__ import annotations

import contextlib
import email.utils
import itertools
import os
import re
import socket
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape, unescape

from http_by_splice import Connection, Head, Pipe

PAGE_KEYS = 1000
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


@dataclass
class Stored:
    """Bytes in files that are deleted when nobody uses them: a whole object, or its parts."""

    files: list[BodyFile]
    tag: str
    made_s: float = field(default_factory=time.time)

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def headers(self) -> dict[str, str]:
        return {
            "ETag": f'"{self.tag}"',
            "Last_Modified": email.utils.formatdate(self.made_s, usegmt=True),
            "Accept_Ranges": "bytes",
        }


class BodyFile:
    """A file without a name: it ends with its last user."""

    def __init__(self, folder: Path, size: int) -> None:
        self.size = size
        self.number = os.open(folder, os.O_TMPFILE | os.O_RDWR)

    def __del__(self) -> None:
        os.close(self.number)


class Refused(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(code)
        self.status = status
        self.code = code


class S3Server:
    """Serves connections, each on a thread of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._objects: dict[str, Stored] = {}
        self._uploads: dict[str, dict[int, Stored]] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    def serve(self, peer: socket.socket) -> None:
        """Answers the requests of one connection."""
        connection = Connection(peer)
        with peer, Pipe() as pipe, contextlib.suppress(ConnectionError):
            while (request := connection.head()) is not None:
                try:
                    self._answer(connection, request, pipe)
                except Refused as refused:
                    body = f"<Error><Code>{refused.code}</Code><Message/></Error>".encode()
                    length = len(body)
                    if request.method == "HEAD":
                        body = b""
                    connection.answer(refused.status, body, length=length)

    def _answer(self, connection: Connection, request: Head, pipe: Pipe) -> None:
        url = urlsplit(request.target)
        key = unquote(url.path).lstrip("/").partition("/")[2]
        query = {name: values[0] for name, values in parse_qs(url.query, True).items()}
        match request.method:
            case "PUT" if request.header("x-amz-copy-source") is not None:
                body = self._copy(request, key)
                connection.answer(200, body, Content_Type="application/xml")
            case "PUT":
                self._put(connection, request, pipe, key, query)
            case "GET" if not key:
                connection.answer(200, self._page(query), Content_Type="application/xml")
            case "GET" | "HEAD":
                self._get(connection, request, key)
            case "POST":
                body = connection.body(request.length).decode()
                connection.answer(200, self._post(key, query, body), Content_Type="application/xml")
            case "DELETE":
                with self._lock:
                    self._objects.pop(key, None)
                    self._uploads.pop(query.get("uploadId", ""), None)
                connection.answer(204)
            case _:
                raise Refused(501, "NotImplemented")

    def _put(
        self, connection: Connection, request: Head, pipe: Pipe, key: str, query: dict[str, str]
    ) -> None:
        if request.expects_continue:
            connection.send(CONTINUE)
        file = BodyFile(self._folder, request.length)
        pipe.move(connection.fileno(), file.number, request.length)
        stored = Stored([file], f"{next(self._numbers):032x}")
        with self._lock:
            if "uploadId" in query:
                self._uploads[query["uploadId"]][int(query["partNumber"])] = stored
            elif key:
                self._check_condition(request, key)
                self._objects[key] = stored
        connection.answer(200, ETag=f'"{stored.tag}"')

    def _copy(self, request: Head, key: str) -> bytes:
        source = unquote(request.header("x-amz-copy-source") or "").lstrip("/").partition("/")[2]
        with self._lock:
            found = self._objects.get(source)
            if found is None:
                raise Refused(404, "NoSuchKey")
            copy = Stored(found.files, f"{next(self._numbers):032x}")
            self._objects[key] = copy
        made = f"<LastModified>{_date(copy.made_s)}</LastModified>"
        return _xml("CopyObjectResult", f"<ETag>{copy.tag}</ETag>{made}")

    def _check_condition(self, request: Head, key: str) -> None:
        known = self._objects.get(key)
        wanted = request.header("if-match")
        if request.header("if-none-match") == "*" and known is not None:
            raise Refused(412, "PreconditionFailed")
        if wanted is not None and (known is None or wanted.strip('"') != known.tag):
            raise Refused(412, "PreconditionFailed")

    def _get(self, connection: Connection, request: Head, key: str) -> None:
        found = self._objects.get(key)
        if found is None:
            raise Refused(404, "NoSuchKey")
        start, stop = _range_of(request, found.size)
        headers = found.headers
        status = 200
        if request.header("range") is not None:
            status = 206
            headers["Content_Range"] = f"bytes {start}-{stop - 1}/{found.size}"
        connection.answer(status, length=stop - start, **headers)
        if request.method == "GET":
            _send(connection, found, start, stop)

    def _post(self, key: str, query: dict[str, str], body: str) -> bytes:
        if "uploads" in query:
            upload = f"{next(self._numbers):032x}"
            self._uploads[upload] = {}
            return _xml("InitiateMultipartUploadResult", f"<UploadId>{upload}</UploadId>")
        if "uploadId" in query:
            with self._lock:
                parts = self._uploads.pop(query["uploadId"])
                files = [file for _, part in sorted(parts.items()) for file in part.files]
                self._objects[key] = Stored(files, f"{next(self._numbers):032x}")
                tag = self._objects[key].tag
            return _xml("CompleteMultipartUploadResult", f"<ETag>{tag}</ETag>")
        with self._lock:
            keys = re.findall("<Key>(.*?)</Key>", body)
            for name in keys:
                self._objects.pop(unescape(name), None)
        return _xml(
            "DeleteResult", "".join(f"<Deleted><Key>{name}</Key></Deleted>" for name in keys)
        )

    def _page(self, query: dict[str, str]) -> bytes:
        """Returns a page of a listing; where the last ended is its token."""
        prefix = query.get("prefix", "")
        delimiter = query.get("delimiter", "")
        after = query.get("continuation-token", query.get("start-after", ""))
        names: list[str] = []
        with self._lock:
            known = dict(self._objects)
        for key in sorted(known):
            if not key.startswith(prefix):
                continue
            name = key
            if delimiter and delimiter in key[len(prefix) :]:
                name = key[: key.index(delimiter, len(prefix)) + 1]
            if name > after and (not names or names[-1] != name):
                names.append(name)
        shown = names[:PAGE_KEYS]
        lines = [_entry(name, known.get(name)) for name in shown]
        is_cut = len(names) > PAGE_KEYS
        lines.append(f"<IsTruncated>{str(is_cut).lower()}</IsTruncated>")
        if is_cut:
            lines.append(f"<NextContinuationToken>{escape(shown[-1])}</NextContinuationToken>")
        return _xml("ListBucketResult", "".join(lines))


def _entry(name: str, stored: Stored | None) -> str:
    if stored is None:
        return f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>"
    return (
        f"<Contents><Key>{escape(name)}</Key><LastModified>{_date(stored.made_s)}</LastModified>"
        f"<ETag>{stored.tag}</ETag><Size>{stored.size}</Size></Contents>"
    )


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(seconds))


def _range_of(request: Head, size: int) -> tuple[int, int]:
    found = re.fullmatch(r"bytes=(\d+)-(\d*)", request.header("range") or "bytes=0-")
    if found is None:
        raise Refused(501, "NotImplemented")
    start = int(found[1])
    stop = min(int(found[2]) + 1, size) if found[2] else size
    if start >= size and request.header("range") is not None:
        raise Refused(416, "InvalidRange")
    return start, stop


def _send(connection: Connection, found: Stored, start: int, stop: int) -> None:
    begin = 0
    for file in found.files:
        at = max(start - begin, 0)
        end = min(stop - begin, file.size)
        while at < end:
            at += os.sendfile(connection.fileno(), file.number, at, end - at)
        begin += file.size


def _xml(name: str, inside: str) -> bytes:
    return f'<?xml version="1.0" encoding="UTF-8"?><{name}>{inside}</{name}>'.encode()


def main() -> None:
    server = S3Server(Path(sys.argv[1]))
    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)

    def accept() -> None:
        while True:
            peer, _ = listener.accept()
            threading.Thread(target=server.serve, args=(peer,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    sys.stdin.read()


if __name__ == "__main__":
    main()
