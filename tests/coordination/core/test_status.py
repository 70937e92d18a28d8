"""Statuses: gRPC's codes, and sentences that name who is missing."""

from __future__ import annotations

import grpc
import pytest

from holdfast.coordination.core.status import MAX_NAMED, Code, Missing, name_processes


def test_the_codes_are_those_of_grpc() -> None:
    """Every code of gRPC is there, by name and number."""
    assert {code.name: int(code) for code in Code} == {
        code.name: code.value[0] for code in grpc.StatusCode
    }


@pytest.mark.parametrize(
    ("missing", "sentence"),
    [
        ([Missing(2, "b7", 12.4, False)], "process 2 (host b7, silent for 12 s)"),
        ([Missing(2, "", 9.96, True)], "process 2 (silent for 10.0 s)"),
        (
            [Missing(0, "", None, False), Missing(3, "h", None, False)],
            "processes 0 (never seen), 3 (host h, never seen)",
        ),
    ],
)
def test_processes_are_named_with_host_and_silence(missing: list[Missing], sentence: str) -> None:
    """One or several, seen or not, with a host or without."""
    assert name_processes(missing) == sentence


def test_a_sentence_names_only_so_many() -> None:
    """Beyond the bound the rest is counted, so that jaxlib does not cut the message."""
    missing = [Missing(task_id, "", None, False) for task_id in range(MAX_NAMED)]
    sentence = name_processes(missing, MAX_NAMED + 7)
    assert sentence.endswith(f"{MAX_NAMED - 1} (never seen), and 7 more") and len(sentence) < 3_000
