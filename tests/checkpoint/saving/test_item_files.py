"""Items that are JSON or files: where they go, and what is reported of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from crc32c import crc32c

from holdfast.checkpoint.format.item_report import FileReport
from holdfast.checkpoint.format.own_files import StagedFiles, own_names
from holdfast.checkpoint.saving.item_files import (
    PIECE_BYTES,
    ItemTarget,
    report_json,
    write_files,
    write_json,
)
from holdfast.checkpoint.storage.local import LocalStorage
from tests.support.processes import no_file_can_be_opened


@pytest.mark.parametrize(("step_dir", "folder"), [("7", "7/item"), ("", "item")])
def test_json_is_one_file_of_its_process(step_dir: str, folder: str, tmp_path: Path) -> None:
    """The file has the process and the save in its name, and a report of the same CRC elsewhere."""
    target = ItemTarget(LocalStorage(tmp_path), step_dir, "item", "ab")
    report = write_json(target, 3, b"{}")
    name = "00003-j-ab.json"
    assert (tmp_path / folder / name).read_bytes() == b"{}"
    assert report.files == (FileReport(name, 2, 0, crc32c(b"{}")),)
    assert report.local == report_json(4, b"{}").local


def test_a_folder_that_cannot_be_listed_is_not_empty(tmp_path: Path) -> None:
    """Its files would be missing in the save."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/file").write_text("text")
    with no_file_can_be_opened(), pytest.raises(OSError, match="Too many open files"):
        own_names(tmp_path)
    assert own_names(tmp_path) == ["folder/file"]


@pytest.mark.parametrize("per_process", [False, True])
def test_files_keep_their_own_names(per_process: bool, tmp_path: Path) -> None:
    """Files of any size are numbered in the store; the report has their names and checksums."""
    contents = {"a": b"", "b/c": bytes(range(256)) * (PIECE_BYTES // 128)}
    staged = tmp_path / "staged"
    for name, data in contents.items():
        (staged / name).parent.mkdir(parents=True, exist_ok=True)
        (staged / name).write_bytes(data)
    target = ItemTarget(LocalStorage(tmp_path), "1", "item", "ab")
    heard: list[int] = []
    report = write_files(
        target, 2, StagedFiles(staged, tuple(contents), per_process, 0), heard.append
    )
    assert report.per_process is per_process
    assert report.names == (("00002/a", "00002/b/c") if per_process else ("a", "b/c"))
    assert sum(heard) == sum(map(len, contents.values()))
    for number, (file, data) in enumerate(zip(report.files, contents.values(), strict=True)):
        assert file == FileReport(f"00002-{number:05d}-ab.bin", len(data), 0, crc32c(data))
        assert (tmp_path / target.path(file.name)).read_bytes() == data
