"""The contract suite fails on a store that breaks a rule, in the test of that rule."""

from __future__ import annotations

import builtins
import contextlib
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from holdfast.checkpoint.steps.claims import this_writer
from holdfast.checkpoint.steps.object_claims import open_claims
from holdfast.checkpoint.storage.base import Entry, NameTaken, Part
from holdfast.checkpoint.storage.local import LocalStorage
from holdfast.coordination import Fenced
from holdfast.testing import StorageContract
from tests.support.paths import program


class KeepsOrder(LocalStorage):
    """Writes the parts one after the other, wherever they belong."""

    def write(self, name: str, size: int, parts: Iterable[Part]) -> None:
        at = 0
        moved: list[Part] = []
        for _, buffers in parts:
            moved.append((at, buffers))
            at += sum(buffer.nbytes for buffer in buffers)
        super().write(name, size, moved)


class SwallowsErrors(LocalStorage):
    """Takes what parts there are, if one cannot be made."""

    def write(self, name: str, size: int, parts: Iterable[Part]) -> None:
        with contextlib.suppress(KeyError):
            super().write(name, size, parts)


class WritesOver(LocalStorage):
    """Writes a file over, and keeps what is behind."""

    def write(self, name: str, size: int, parts: Iterable[Part]) -> None:
        path = self.path / name
        rest = path.read_bytes()[size:] if path.exists() else b""
        super().write(name, size, parts)
        with open(path, "ab") as file:
            file.write(rest)


class CountsTooMuch(LocalStorage):
    """Says that all buffers were filled."""

    def read(self, name: str, offset: int, buffers: Sequence[memoryview]) -> int:
        super().read(name, offset, buffers)
        return sum(buffer.nbytes for buffer in buffers)


class ReadsNothing(LocalStorage):
    """Takes a missing file for an empty one."""

    def read(self, name: str, offset: int, buffers: Sequence[memoryview]) -> int:
        try:
            return super().read(name, offset, buffers)
        except FileNotFoundError:
            return 0


class RoundsSizes(LocalStorage):
    """Knows sizes in blocks."""

    def size(self, name: str) -> int:
        return -super().size(name) // 512 * -512


class FetchesAll(LocalStorage):
    """Reads a file of any length."""

    def fetch(self, name: str, limit_bytes: int) -> bytes:
        return super().fetch(name, 1 << 40)


class Unsorted(LocalStorage):
    """Lists names in any order."""

    def list(
        self, folder: str, *, recursive: bool = False, names_only: bool = False
    ) -> builtins.list[Entry]:
        return super().list(folder, recursive=recursive, names_only=names_only)[::-1]


class LooksAtFiles(LocalStorage):
    """Asks about each file, even where names are enough."""

    def list(
        self, folder: str, *, recursive: bool = False, names_only: bool = False
    ) -> builtins.list[Entry]:
        return super().list(folder, recursive=recursive)


class MissesNames(LocalStorage):
    """Fails to delete what is not there."""

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            (self.path / name).lstat()
        super().delete(names)


class CommitsAlways(LocalStorage):
    """Puts each record into the place of the last."""

    def commit(self, name: str, data: bytes, claim: str, *, replace: bool = False) -> None:
        super().commit(name, data, claim, replace=True)


class NeverReplaces(LocalStorage):
    """Forgets what `replace` means."""

    def commit(self, name: str, data: bytes, claim: str, *, replace: bool = False) -> None:
        with contextlib.suppress(NameTaken):
            super().commit(name, data, claim)


class CommitsWithoutClaim(LocalStorage):
    """Makes a record though the claim is gone."""

    def commit(self, name: str, data: bytes, claim: str, *, replace: bool = False) -> None:
        try:
            super().commit(name, data, claim, replace=replace)
        except Fenced:
            self.write(name, len(data), [(0, [memoryview(data)])])


class LinksAnything(LocalStorage):
    """Gives a second name to a file of any size."""

    def link(self, source: str, name: str, size: int) -> None:
        super().link(source, name, (self.path / source).stat().st_size)


class KeepsNobodyOut(LocalStorage):
    """Cannot keep writers apart, and has no conditions."""

    posix = None  # type: ignore[assignment]


BROKEN = {
    KeepsOrder: "what_is_written_is_read",
    SwallowsErrors: "an_error_of_the_parts_comes_through",
    WritesOver: "a_write_replaces_a_file",
    CountsTooMuch: "ranges_are_read",
    ReadsNothing: "a_missing_name_is_not_found",
    RoundsSizes: "sizes",
    FetchesAll: "a_longer_file_is_not_fetched",
    Unsorted: "a_listing_has_files_and_folders",
    LooksAtFiles: "a_listing_of_names_alone",
    MissesNames: "deleting",
    CommitsAlways: "a_commit_happens_once",
    NeverReplaces: "a_commit_replaces_where_it_says_so",
    CommitsWithoutClaim: "a_commit_needs_its_claim",
    LinksAnything: "a_link_is_a_second_name",
    KeepsNobodyOut: "it_says_what_it_can_do",
}


def check(test: str, storage: LocalStorage) -> None:
    """Runs one test of the suite on a store."""
    claims = open_claims(LocalStorage(storage.root))
    writer = this_writer()
    values = {"storage": storage, "claims": claims, "writer": writer, "posix": storage}
    method = getattr(StorageContract(), f"test_{test}")
    names = inspect.signature(method).parameters
    if "writer" in names:
        claims.take(writer)
    try:
        method(**{name: values[name] for name in names})
    finally:
        claims.fence(writer.id)


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_a_broken_rule_fails_its_test(broken: type[LocalStorage], tmp_path: Path) -> None:
    """A store that breaks one rule does not pass; a sound one does."""
    check(BROKEN[broken], LocalStorage(tmp_path / "sound"))
    with pytest.raises((AssertionError, pytest.fail.Exception, FileNotFoundError)):
        check(BROKEN[broken], broken(tmp_path / "broken"))


@pytest.mark.slow
def test_the_suite_fails_in_pytest() -> None:
    """An author's class runs under pytest: the tests of the broken rule fail, all others pass."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    # What says how this very suite runs (PYTEST_ADDOPTS) is not for the author's.
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")
    }
    ran = subprocess.run(
        [*command, program("broken_store_suite")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    failed = set(re.findall(r"FAILED .*::test_(\w+)", ran.stdout))
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert "a_listing_has_files_and_folders" in failed
    assert "passed" in ran.stdout
    assert "a_commit_happens_once" not in failed
