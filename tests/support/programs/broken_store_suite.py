"""The contract suite on a store that forgets the order of its listings. Pytest runs this file."""

from __future__ import annotations

import builtins
from pathlib import Path

import pytest

from holdfast.checkpoint import Storage, register_storage
from holdfast.checkpoint.storage.base import Entry
from holdfast.checkpoint.storage.local import LocalStorage
from holdfast.testing import StorageContract


class Unsorted(LocalStorage):
    def list(
        self, folder: str, *, recursive: bool = False, names_only: bool = False
    ) -> builtins.list[Entry]:
        return super().list(folder, recursive=recursive, names_only=names_only)[::-1]


def opened(url: str, single_writer: bool) -> Storage:
    return Unsorted(url.removeprefix("unsorted://"), single_writer=single_writer)


register_storage("unsorted", opened)


class TestUnsorted(StorageContract):
    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        return f"unsorted://{tmp_path}/root"
