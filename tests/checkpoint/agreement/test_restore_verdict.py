"""The agreement of a restore: who failed, and which error each process raises. (In jobs:
tests/system/test_group_restores.py.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from holdfast.checkpoint import CheckpointError, Corrupt, StepGone, StepNotFound, TreeMismatch
from holdfast.checkpoint.agreement.restore_verdict import (
    RestoreAgreement,
    RestoreAnswer,
    RestoreReport,
    Verdict,
    judge,
)
from holdfast.checkpoint.memory.need import MemoryNeed
from holdfast.coordination import BarrierTimeout
from holdfast.multihost import Group, Solo
from tests.support.checkpointing import at_once, groups


def raising(error: Exception | None) -> Callable[[], str]:
    def restore() -> str:
        if error is not None:
            raise error
        return "value"

    return restore


def agreed(
    errors: list[Exception | None],
    *,
    saves: tuple[str, ...] = ("a",),
    calls: tuple[str, ...] = ("step 1",),
) -> list[Verdict]:
    """Runs a restore on each of several processes of a real group that ends with `errors`."""

    def one(group: Group) -> Verdict:
        agreement = RestoreAgreement(group, "restore", calls[group.index % len(calls)], 30)
        agreement.opened(saves[group.index % len(saves)])
        value, verdict = agreement.run(raising(errors[group.index]), "root/1")
        assert value == (None if errors[group.index] else "value")
        return verdict

    with groups(len(errors)) as each:
        return at_once([lambda group=group: one(group) for group in each])


def test_all_is_well() -> None:
    """No error on any process: none to raise."""
    assert agreed([None, None]) == [Verdict(None, False)] * 2


def test_one_error_is_all_processes_error() -> None:
    """Its kind and facts arrive everywhere, with the process; that process raises its own error."""
    own = Corrupt("f: damaged", path="f", file="f", leaf="w")
    verdicts = agreed([None, own, None])
    assert verdicts[1].error is own and own.process == 1
    for process in (0, 2):
        error = verdicts[process].error
        assert type(error) is Corrupt and str(error) == "process 1: f: damaged"
        assert (error.process, error.path, error.file, error.leaf) == (1, "f", "f", "w")
    assert not any(verdict.is_mistake for verdict in verdicts)


def test_a_mistake_comes_before_damage_whoever_made_it() -> None:
    """Of several errors a mistaken caller's is the verdict, else that of the lowest process;
    whoever has one of that kind raises it.
    """
    damaged = Corrupt("damaged")
    mismatch = TreeMismatch("not so", leaf="w")
    verdicts = agreed([damaged, None, mismatch])
    assert [type(verdict.error) for verdict in verdicts] == [TreeMismatch] * 3 and all(
        verdict.is_mistake for verdict in verdicts
    )
    assert (
        verdicts[0].error is not None
        and verdicts[0].error.__cause__ is damaged
        and verdicts[2].error is mismatch
    )
    each = [Corrupt(name) for name in "abc"]
    assert [verdict.error for verdict in agreed(list(each))] == each and [
        error.process for error in each
    ] == [0, 1, 2]


def test_errors_of_other_trees_and_of_the_system() -> None:
    """An error that is not ours becomes a CheckpointError elsewhere, a mistake; one of the store is
    named and is no mistake.
    """
    own = ZeroDivisionError("by zero")
    verdicts = agreed([None, own])
    assert verdicts[1].error is own and type(verdicts[0].error) is CheckpointError
    assert (
        str(verdicts[0].error) == "process 1: ZeroDivisionError: by zero" and verdicts[0].is_mistake
    )
    verdicts = agreed([OSError(5, "Input/output error", "root/1/state/pack"), None])
    for verdict in verdicts:
        assert type(verdict.error) is CheckpointError and not verdict.is_mistake
        assert "root/1/state/pack cannot be read: Input/output error; look at the disk" in str(
            verdict.error
        )
        assert verdict.error.path == "root/1/state/pack" and verdict.error.process == 0


def test_different_calls_and_different_saves() -> None:
    """Another step than the primary's is a mistake of that process; the same step read before and
    after an overwrite is StepGone.
    """
    for verdict in agreed([None, None], calls=("step 1", "step 2")):
        assert (
            type(verdict.error) is CheckpointError
            and verdict.error.process == 1
            and verdict.is_mistake
        )
        assert (
            "it restores step 2, at its end, and the primary step 1, at its end; every process"
            " has to" in str(verdict.error)
        )
    for verdict in agreed([None, None, None], saves=("a", "a", "b")):
        assert (
            type(verdict.error) is StepGone
            and verdict.error.process == 2
            and not verdict.is_mistake
        )
        assert (
            "has read another save than the primary (step 1, at its end): the step was overwritten"
            " meanwhile" in str(verdict.error)
        )


def test_an_item_that_is_not_there_is_a_mistake_once_the_step_was_opened() -> None:
    """StepNotFound of a step that could not be opened is not the caller's: it may have been deleted
    since it was listed.
    """
    for is_open in (False, True):
        agreement = RestoreAgreement(Solo(), "restore", "step 1", 30)
        if is_open:
            agreement.opened("")
        assert agreement.run(raising(StepNotFound("no item")), "root")[1].is_mistake == is_open


def test_before_all_have_shared() -> None:
    """All raise there if one has failed, and nobody asks the others again at the end; a process
    that has none is told apart.
    """

    def one(group: Group, script: str) -> Any:
        agreement = RestoreAgreement(group, "restore", "step 1", 30)

        def restore() -> str:
            if group.index == 1 and script == "fails":
                raise Corrupt("damaged")
            if group.index == 0 or script != "has none":
                agreement.share(None)
            return "value"

        return agreement.run(restore, "root/1")

    with groups(2) as both:
        for script, kind in (
            ("fails", Corrupt),
            ("has none", CheckpointError),
            ("well", type(None)),
        ):
            found = at_once(
                [lambda group=group, script=script: one(group, script) for group in both]
            )
            assert [type(verdict.error) for _, verdict in found] == [kind, kind], (script, found)


def test_who_does_not_come_is_named_once() -> None:
    """The wait ends after the time given, in the middle and at the end; an own error is
    raised all the same.
    """
    with groups(2) as (primary, _):
        agreement = RestoreAgreement(primary, "restore", "step 1", 0.3)

        def restore() -> None:
            agreement.share(None)

        error = agreement.run(restore, "root")[1].error
        assert isinstance(error, BarrierTimeout) and error.missing == (1,)
        assert error.__notes__ == [
            "it came up while all processes were to agree on step 1, share 1"
        ]
        own = Corrupt("damaged")
        assert (
            RestoreAgreement(primary, "restore", "step 1", 0.3).run(raising(own), "root")[1].error
            is own
        )
        assert "could not be agreed on with the other processes" in own.__notes__[0]


@pytest.mark.parametrize("count", [1, 4096])
def test_the_cost_at_scale(count: int) -> None:
    """4,096 reports without an error have about 600 KB together, and one verdict answers them
    all.
    """
    reports = [
        RestoreReport(process, "the item 'state' of step 1000000, at its end", "0123456789abcdef")
        for process in range(count)
    ]
    assert (
        sum(len(report.to_bytes()) for report in reports) < 150 * count
        and judge(reports) == RestoreAnswer()
    )


def test_nobody_is_asked_for_memory_that_the_primary_has_found() -> None:
    """A process alone would wait for the others; without the primary's word it does."""
    need = MemoryNeed(1 << 40, "state", 1 << 40)
    with groups(2) as (group, _):
        agreement = RestoreAgreement(group, "restore", "step 1", 0.1)
        agreement.found_room()
        agreement.before_reading(need)
        agreement = RestoreAgreement(group, "restore", "step 1", 0.1)
        with pytest.raises(BarrierTimeout):
            agreement.before_reading(need)
