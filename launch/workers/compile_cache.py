"""The compile cache of a job: what one attempt has compiled, the next ones load."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from holdfast.coordination import CoordinationError
from holdfast.coordination.names import on_the_wire
from holdfast.coordination.process.job_folder import user_folder

_FOLDER = "JAX_COMPILATION_CACHE_DIR"
# jax keeps by itself only what took a second to compile: a restart waits for the sum of what did
# not.
_KEEP_ALL = {
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}
_PREFIX = "compile-cache-"


@contextlib.contextmanager
def compile_cache(
    environment: Mapping[str, str], log_dir: Path | None, say: Callable[[str], None]
) -> Iterator[dict[str, str]]:
    """Yields the variables that have jax keep what it compiles.

    The folder lies in `log_dir`, or is a temporary one that goes with the block. What comes out of
    it is run, so nobody but this user can enter it. Yields nothing where `environment` names a
    folder, which may be "", or where none can be had; `say` gets the reason.
    """
    if _FOLDER in environment:
        yield {}
        return
    with contextlib.ExitStack() as stack:
        variables: dict[str, str] = {}
        try:
            if log_dir is None or on_the_wire(str(log_dir)) != str(log_dir):  # jax cannot take it
                folder = stack.enter_context(_temporary_folder())
            else:
                folder = _private_folder(log_dir / "compile-cache")
            variables = {_FOLDER: str(folder)} | {
                key: value for key, value in _KEEP_ALL.items() if key not in environment
            }
        except OSError as error:
            say(
                f"no compile cache, each attempt compiles anew: {error.filename}: {error.strerror};"
                f" remove it, or set {_FOLDER}"
            )
        except CoordinationError:
            pass  # the coordinator needs that folder too, and says why there is none
        yield variables


def _private_folder(path: Path) -> Path:
    """Returns `path` as a folder of mode 0700. OSError: another user's, a link, or no folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            # By the descriptor, so that nobody can put another folder in between. The kernel
            # does not permit it for another user's.
            os.fchmod(descriptor, 0o700)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    return path


@contextlib.contextmanager
def _temporary_folder() -> Iterator[Path]:
    """Makes a folder that is locked while its launcher lives, and removes those of dead ones."""
    parent = user_folder(create=True)
    for path in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), _locked(path):
            shutil.rmtree(path, ignore_errors=True)
    path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    with _locked(path):
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)
