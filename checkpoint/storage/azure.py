"""Azure's blob storage as a store, az://container/path, through obstore.

A commit rests on conditional writes, as in every object store.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from holdfast.coordination.distribution import install_command

from ..errors import CheckpointError
from .object import ObjectStorage
from .threads import run_side_by_side

MISSING = b""  # the generation of what is not there


class AzureStorage(ObjectStorage):
    """A store below one prefix of a container. Thread-safe.

    What follows a `?` in the URL are settings of obstore's AzureStore, such as `account_name=mine`.
    obstore takes the rest from the environment (AZURE_STORAGE_ACCOUNT_NAME, ...). tensorstore does
    not know Azure, so other libraries' arrays are not read there. Nothing is deleted on a
    condition, as on S3.
    """

    tensorstore = None

    def __init__(self, url: str, *, single_writer: bool = False) -> None:
        try:
            import obstore
            from obstore.store import AzureStore
        except ImportError as error:
            command = install_command("azure")
            message = f"{url} needs obstore, which is not installed: {command}"
            raise CheckpointError(message, path=url) from error
        parts = urlsplit(url)
        self._url = url.split("?", 1)[0].rstrip("/")
        self._single_writer = single_writer
        path = unquote(parts.path).strip("/")
        self._prefix = f"{path}/" if path else ""
        self._obstore = obstore
        settings: Any = dict(parse_qsl(parts.query))
        try:
            self._store = AzureStore(
                parts.netloc,
                config=settings,
                client_options={"allow_http": settings.get("use_emulator") == "true"},
            )
        except Exception as error:
            raise CheckpointError(f"cannot open {url}: {_text(error)}", path=url) from error

    def delete(self, names: Sequence[str]) -> None:
        files = [name for name in names if not name.endswith("/")]
        run_side_by_side(self._delete, files, self.max_concurrency)

    def _delete(self, name: str) -> None:
        try:
            self._obstore.delete(self._store, self._prefix + name)
        except FileNotFoundError:
            pass
        except Exception as error:
            raise OSError(errno.EIO, _text(error), name) from error

    def keys(self, prefix: str) -> Sequence[str]:
        whole = self._prefix + prefix
        folder = whole.rpartition("/")[0]
        try:
            pages = self._obstore.list(self._store, prefix=folder or None)
            paths = [entry["path"] for page in pages for entry in page]
        except Exception as error:
            raise OSError(errno.EIO, _text(error), prefix) from error
        return sorted(path[len(self._prefix) :] for path in paths if path.startswith(whole))

    def get(self, name: str) -> tuple[bytes | None, bytes]:
        try:
            read = self._obstore.get(self._store, self._prefix + name)
            return bytes(read.bytes()), str(read.meta["e_tag"]).encode()
        except FileNotFoundError:
            return None, MISSING
        except Exception as error:
            raise OSError(errno.EIO, _text(error), name) from error

    def put(self, name: str, data: bytes | bytearray, generation: bytes | None = None) -> bool:
        mode: Any = "overwrite"
        if generation is not None and not self._single_writer:
            mode = {"e_tag": generation.decode()} if generation else "create"
        errors = self._obstore.exceptions
        key = self._prefix + name
        try:
            self._obstore.put(self._store, key, bytes(data), mode=mode, use_multipart=False)
        except (errors.AlreadyExistsError, errors.PreconditionError):
            return False
        except Exception as error:
            raise OSError(errno.EIO, _text(error), name) from error
        return True

    def put_at_once(self, name: str, values: Sequence[bytes], generation: bytes) -> int:
        def put(value: bytes) -> bool:
            return self.put(name, value, generation)

        return sum(run_side_by_side(put, list(values), len(values)))

    @property
    def deletes_on_condition(self) -> bool:
        return self._single_writer

    def remove(self, name: str, generation: bytes) -> None:
        self._delete(name)

    def size(self, name: str) -> int:
        try:
            head = self._obstore.head(self._store, self._prefix + name)
        except FileNotFoundError as error:
            raise self._missing(name) from error
        except Exception as error:
            raise OSError(errno.EIO, _text(error), name) from error
        return int(head["size"])

    def _range(self, name: str, start: int, stop: int) -> bytes:
        if stop <= start:
            return b""
        key = self._prefix + name
        try:
            return bytes(self._obstore.get_range(self._store, key, start=start, end=stop))
        except FileNotFoundError as error:
            raise self._missing(name) from error
        except Exception as error:
            # An empty object has no range, nor has one that ends before `start`.
            if self.size(name) <= start:
                return b""
            raise OSError(errno.EIO, _text(error), name) from error

    def _missing(self, name: str) -> FileNotFoundError:
        return FileNotFoundError(errno.ENOENT, "No such object", f"{self._url}/{name}")


def _text(error: Exception) -> str:
    """Returns what an error of obstore's says, without its account of where."""
    return str(error).split("\n\nDebug source")[0]
