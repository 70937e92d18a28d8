"""The protocol of a save in a seeded simulator: what is acknowledged can be read back, and nobody
deletes, believes or waits wrongly.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from holdfast.checkpoint import SaveFailed
from holdfast.checkpoint.agreement import save_protocol as protocol
from holdfast.checkpoint.agreement.save_protocol import (
    Found,
    RecordAbsent,
    RecordFound,
    RecordUnreadable,
    SaveKey,
    SaveResult,
)
from tests.support.simulated_saves import SaveSimulation, Violation

SEEDS_AN_ITEM = 500
REAL_SETTLE = protocol.settle
REAL_UNHEARD = protocol.unheard
REAL_DELETE = protocol.local_saves_to_delete


def test_the_invariants_hold_in_the_first_seeds() -> None:
    """1,000 runs keep them all."""
    for seed in range(1000):
        SaveSimulation(seed).run()


@pytest.mark.slow
@pytest.mark.parametrize("item", range(20))
def test_the_invariants_hold_in_ten_thousand_seeds(item: int) -> None:
    """Seeds 500 * item to 500 * item + 499; a failure names its seed, and `SIMULATION_SEED=n pytest
    -k replays` runs it alone.
    """
    for seed in range(item * SEEDS_AN_ITEM, (item + 1) * SEEDS_AN_ITEM):
        SaveSimulation(seed).run()


def test_a_seed_replays_exactly() -> None:
    """The same seed gives the same trace, another seed another one."""
    seed = int(os.environ.get("SIMULATION_SEED", "7"))
    assert (
        SaveSimulation(seed).run() == SaveSimulation(seed).run() != SaveSimulation(seed + 1).run()
    )


def test_everything_really_happens() -> None:
    """Among 300 seeds there are all ends of a save, unclear commits, late ones that land, deaths,
    sweeps, rivals, deletions and cancels.
    """
    lines = "\n".join(line for seed in range(300) for line in SaveSimulation(seed).run())
    for event in (
        *(
            ": committed",
            ": SaveFailed, deletes",
            ": SaveCancelled, deletes",
            ": StepExists, deletes",
            ": Fenced, deletes",
            ": CommitUnknown, keeps",
        ),
        *(
            ": Unclear",
            ": Refused",
            ": Committed",
            "lands",
            "dies",
            "swept",
            "rival commits",
            "is deleted",
        ),
        *("off, in time", "off, too late"),
        *(": acknowledged", "unsure", "the survey finds", "the survey fails"),
    ):
        assert event in lines, event


def _failed(key: SaveKey) -> SaveResult:
    return SaveResult(key, SaveFailed("it is not there"), deletable=True)


def _settles(kind: type[Found]) -> dict[str, Any]:
    """Returns a settling that takes one finding for a failure."""

    def settle(key: SaveKey, answer: protocol.Unclear, found: Found) -> SaveResult:
        wrong = isinstance(found, kind) and not protocol.is_ours(found, key)
        return _failed(key) if wrong else REAL_SETTLE(key, answer, found)

    return {"settle": settle}


def _deletes_own(own: int, result: SaveResult, **more: Any) -> list[int]:
    """A process deletes its part of each save that failed, whether or not it was told so."""
    return REAL_DELETE(own, replace(result, deletable=result.error is not None), **more)


def _deletes_older(own: int, result: SaveResult, **more: Any) -> list[int]:
    """A process that was not told takes the save for whole, and lets the older one go."""
    known = result if result.deletable else replace(result, error=None)
    return REAL_DELETE(own, known, **more | {"is_unsure": False})


def _durable(rule: Callable[..., SaveResult]) -> Callable[..., SaveResult]:
    def careless(key: SaveKey, first: Any, second: Any) -> SaveResult:
        first, second = (
            replace(each, durable=True) if isinstance(each, RecordFound) else each
            for each in (first, second)
        )
        return rule(key, first, second)

    return careless


MUTATIONS: dict[str, tuple[dict[str, Any], dict[str, bool]]] = {
    "a record that cannot be read is nobody's": (_settles(RecordUnreadable), {}),
    "a record that is not there now never will be": (_settles(RecordAbsent), {}),
    "another's record means that ours never will be": (_settles(RecordFound), {}),
    "an unclear answer is a refusal": ({"settle": lambda key, answer, found: _failed(key)}, {}),
    "what is there is durable": ({"settle": _durable(REAL_SETTLE)}, {}),
    "whose record it is does not matter": (
        {"is_ours": lambda found, key: isinstance(found, RecordFound)},
        {},
    ),
    "messages of another save are believed": ({"fits": lambda found, key: True}, {}),
    "who hears nothing has failed": ({"unheard": lambda key, found, why: _failed(key)}, {}),
    "who hears nothing and finds no record has failed": (
        {
            "unheard": lambda key, found, why: (
                _failed(key) if isinstance(found, RecordAbsent) else REAL_UNHEARD(key, found, why)
            )
        },
        {},
    ),
    "who hears nothing and cannot read has failed": (
        {
            "unheard": lambda key, found, why: (
                _failed(key)
                if isinstance(found, RecordUnreadable)
                else REAL_UNHEARD(key, found, why)
            )
        },
        {},
    ),
    "reports are not looked at": ({"check_save_reports": lambda reports, key: None}, {}),
    "the record is not parsed before the commit": ({}, {"parses": False}),
    "a save that failed is not counted": ({}, {"counts_failures": False}),
    "a cancel after the report, or while it commits, is in time": ({}, {"closes": False}),
    "a local outcome that was not heard is a failure": (
        {"unheard_locally": lambda key, why: _failed(key)},
        {},
    ),
    "a local outcome that was not heard is a commit": (
        {"unheard_locally": lambda key, why: SaveResult(key)},
        {},
    ),
    "a local save that failed is deleted untold": ({"local_saves_to_delete": _deletes_own}, {}),
    "an older local save goes for one that was not heard": (
        {"local_saves_to_delete": _deletes_older},
        {},
    ),
    "an unsure process deletes what it no longer needs": (
        {
            "local_saves_to_delete": lambda own, result, **more: REAL_DELETE(
                own, result, **more | {"is_unsure": False}
            )
        },
        {},
    ),
    "a part that was given up is its own cause": ({"is_consequence": lambda report: False}, {}),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_each_rule_is_missed_when_it_goes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A protocol without one of its rules breaks an invariant in one of 3,000 seeds."""
    functions, options = MUTATIONS[name]
    for function, mutated in functions.items():
        monkeypatch.setattr(protocol, function, mutated)
    for seed in range(3000):
        try:
            SaveSimulation(seed, **options).run()
        except Violation:
            return
    pytest.fail("no seed noticed")
