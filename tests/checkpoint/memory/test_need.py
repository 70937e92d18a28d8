from __future__ import annotations

import pickle

import pytest

from holdfast.checkpoint import NotEnoughMemory, SaveFailed
from holdfast.checkpoint.agreement.restore_verdict import RestoreReport, judge
from holdfast.checkpoint.memory.need import MemoryNeed, SeenLevel, find_shortage, shown_size

GIB = 1 << 30


def seen(key: str, most_bytes: int, name: str = "the cgroup /job") -> SeenLevel:
    return SeenLevel(key, name, 4 * GIB, most_bytes)


def test_an_error_says_what_would_fit() -> None:
    """What is needed for which leaf, what is left where, and by how much to raise the limit."""
    need = MemoryNeed(
        int(3.1 * GIB), leaf="params.embed", leaf_bytes=int(3.1 * GIB), levels=(seen("a", 2 * GIB),)
    )
    shortage = find_shortage([need])
    assert shortage is not None
    error = shortage.error
    assert error.message == (
        "this restore needs 3.1 GiB at a time for 'params.embed'; 2.0 GiB are left in the cgroup"
        " /job; raise its limit of 4.0 GiB by 1.1 GiB, drop arrays that are held besides, or"
        " restore on more machines"
    )
    assert (error.leaf, error.needed_bytes, error.free_bytes) == (
        "params.embed",
        int(3.1 * GIB),
        2 * GIB,
    )
    assert pickle.loads(pickle.dumps(error)).leaf == "params.embed"


def test_processes_that_share_a_level_need_it_together() -> None:
    """Two of one cgroup need too much; a third has the same need on another machine."""
    needs = [
        MemoryNeed(nbytes, leaf="w", leaf_bytes=GIB, stays=True, levels=(seen(key, 3 * GIB),))
        for nbytes, key in ((GIB, "a"), (3 * GIB, "b"), (2 * GIB, "a"))
    ]
    assert find_shortage(needs) is None
    needs[0] = MemoryNeed(
        2 * GIB, leaf="w", leaf_bytes=GIB, stays=True, levels=(seen("a", 2 * GIB),)
    )
    shortage = find_shortage(needs)
    assert shortage is not None
    # The most that one of them has seen counts: another may have looked before memory came back.
    assert shortage.error.message.startswith(
        "this restore needs 2.0 GiB for its values, 1.0 GiB of them for 'w'; 3.0 GiB are left in"
        " the cgroup /job, which 2 processes share that need 4.0 GiB together; raise its limit of"
        " 4.0 GiB by 1.0 GiB"
    )


def test_all_processes_raise_it() -> None:
    """It crosses as itself, and is no damage that an older step would mend."""
    need = MemoryNeed(2 * GIB, leaf="w", leaf_bytes=2 * GIB, levels=(seen("a", 3 * GIB),))
    reports = [RestoreReport(process, "all", "id", need=need) for process in range(2)]
    sent = [RestoreReport.from_bytes(report.to_bytes()) for report in reports]
    assert sent == reports
    answer = judge(sent)
    assert answer.is_mistake and answer.agreed is not None
    error = answer.agreed.here(1, None)
    assert isinstance(error, NotEnoughMemory) and error.needed_bytes == 4 * GIB
    assert error.message.startswith("process 0: this restore needs 2.0 GiB at a time for 'w'")


def test_a_failure_elsewhere_comes_first() -> None:
    need = MemoryNeed(2 * GIB, leaf="w", leaf_bytes=2 * GIB, levels=(seen("a", GIB),))
    failed = RestoreReport.from_bytes(RestoreReport(1, "all", "id").to_bytes())
    assert failed.need is None
    answer = judge([RestoreReport(0, "all", "id", need=need), failed])
    with pytest.raises(NotEnoughMemory):
        raise answer.agreed.here(0, None) if answer.agreed else SaveFailed("none")


@pytest.mark.parametrize(
    ("nbytes", "text"), [(5, "5 bytes"), (2048, "2.0 KiB"), (3 << 20, "3.0 MiB"), (GIB, "1.0 GiB")]
)
def test_sizes_are_shown_as_limits_are_written(nbytes: int, text: str) -> None:
    assert shown_size(nbytes) == text
