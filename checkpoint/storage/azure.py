"""Azure's blob storage as a store, az://container/path, through obstore: its conditional writes
carry the commit.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from holdfast.coordination.distribution import install_command

from ..errors import CheckpointError
from .base import run_side_by_side
from .object import ObjectStorage

MISSING = b""  # the generation of what is not there


class AzureStorage(ObjectStorage):
    """A store below one prefix of a container. Safe for use from several threads.

    What follows a `?` in the URL are settings of obstore's AzureStore, such as `account_name=mine`;
    the rest it takes from the environment (AZURE_STORAGE_ACCOUNT_NAME, ...). Needs the extra
    `azure`. tensorstore does not know Azure, so that other people's arrays are not read
    there. Nothing is deleted on a condition, as on S3.
    """

    def __init__(self, url: str, *, single_writer: bool = False) -> None:
        try:
            import obstore
            from obstore.store import AzureStore
        except ImportError as error:
            command = install_command("azure")
            message = f"{url} needs obstore, which is not installed: {command}"
            raise CheckpointError(message, path=url) from error
        parts = urlsplit(url)
        self._url, self._single_writer = url.split("?", 1)[0].rstrip("/"), single_writer
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
        run_side_by_side(
            self._delete, [name for name in names if not name.endswith("/")], self.max_concurrency
        )

    def _delete(self, name: str) -> None:
        try:
            self._obstore.delete(self._store, self._prefix + name)
        except FileNotFoundError:
            pass
        except Exception as error:
            raise OSError(errno.EIO, _text(error), name) from error

    def kvstore(self, folder: str) -> dict[str, Any]:
        """Raises CheckpointError: tensorstore cannot open it."""
        message = (
            f"{self._url}/{folder}: tensorstore, which reads and writes other people's arrays, does"
            " not know Azure; copy it to a disk first"
        )
        raise CheckpointError(message, path=self._url)

    def keys(self, prefix: str) -> Sequence[str]:
        whole = self._prefix + prefix
        folder = whole.rpartition("/")[0]
        try:
            found = [
                entry["path"]
                for page in self._obstore.list(self._store, prefix=folder or None)
                for entry in page
            ]
        except Exception as error:
            raise OSError(errno.EIO, _text(error), prefix) from error
        return sorted(name[len(self._prefix) :] for name in found if name.startswith(whole))

    def get(self, name: str) -> tuple[bytes | None, bytes]:
        try:
            found = self._obstore.get(self._store, self._prefix + name)
            return bytes(found.bytes()), str(found.meta["e_tag"]).encode()
        except FileNotFoundError:
            return None, MISSING
        except Exception as error:
            raise OSError(errno.EIO, _text(error), name) from error

    def put(self, name: str, data: bytes | bytearray, generation: bytes | None = None) -> bool:
        mode: Any = "overwrite"
        if generation is not None and not self._single_writer:
            mode = {"e_tag": generation.decode()} if generation else "create"
        try:
            self._obstore.put(
                self._store, self._prefix + name, bytes(data), mode=mode, use_multipart=False
            )
        except (
            self._obstore.exceptions.AlreadyExistsError,
            self._obstore.exceptions.PreconditionError,
        ):
            return False
        except Exception as error:
            raise OSError(errno.EIO, _text(error), name) from error
        return True

    def put_at_once(self, name: str, values: Sequence[bytes], generation: bytes) -> int:
        return sum(
            run_side_by_side(
                lambda value: self.put(name, value, generation), list(values), len(values)
            )
        )

    @property
    def deletes_on_condition(self) -> bool:
        return self._single_writer

    def remove(self, name: str, generation: bytes) -> None:
        self._delete(name)

    def size(self, name: str) -> int:
        try:
            found: int = self._obstore.head(self._store, self._prefix + name)["size"]
        except FileNotFoundError as error:
            raise FileNotFoundError(
                errno.ENOENT, "No such object", f"{self._url}/{name}"
            ) from error
        except Exception as error:
            raise OSError(errno.EIO, _text(error), name) from error
        return found

    def _range(self, name: str, start: int, stop: int) -> bytes:
        if stop <= start:
            return b""
        try:
            return bytes(
                self._obstore.get_range(self._store, self._prefix + name, start=start, end=stop)
            )
        except FileNotFoundError as error:
            raise FileNotFoundError(
                errno.ENOENT, "No such object", f"{self._url}/{name}"
            ) from error
        except Exception as error:
            if (
                self.size(name) <= start
            ):  # an empty object has no range, nor has one that ends before it
                return b""
            raise OSError(errno.EIO, _text(error), name) from error


def _text(error: Exception) -> str:
    """Returns what an error of obstore's says, without its account of where."""
    return str(error).split("\n\nDebug source")[0]
