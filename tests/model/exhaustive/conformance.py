"""Judges what real runs have logged by the rules that the search judges its executions by.

`python -m tests.model.exhaustive.conformance FOLDER` judges every log there, prints the first event
that the rules refuse in each that does not conform, and then forges one event in each of ten.
"""

from __future__ import annotations

import dataclasses
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from holdfast.checkpoint.format.item_report import FILE_NAME
from tests.model.promise import Broken
from tests.support.tracing import read_log

from .rules import (
    FAILED,
    RECORD,
    SAVED,
    Decides,
    Durable,
    Effect,
    Gone,
    Holds,
    Judge,
    Named,
    Told,
    Took,
)


def refusal(effects: Sequence[Effect]) -> str:
    """Returns the first event that the rules refuse, and why; "" where all conform."""
    judge = Judge()
    shown = ""
    try:
        for number, effect in enumerate(effects, 1):
            shown = f"event {number} of {len(effects)}, {_shown(effect)}"
            judge.take(effect)
        shown = f"the end, after {len(effects)} events"
        judge.finish()
    except Broken as error:
        return f"{shown}: {error}"
    return ""


def _shown(effect: Effect) -> str:
    fields = {field.name: getattr(effect, field.name) for field in dataclasses.fields(effect)}
    told = [
        f"{name}={len(value)} bytes" if isinstance(value, bytes) else f"{name}={value!r}"
        for name, value in fields.items()
    ]
    return f"{type(effect).__name__}({', '.join(told)})"


# --- forgeries; each changes, adds or leaves out one event, and returns None where none fits


def _is_record(effect: Effect) -> bool:
    is_named = isinstance(effect, Named) and effect.name.count("/") == 1
    return is_named and effect.name.endswith(f"/{RECORD}")


def _is_pack(effect: Effect) -> bool:
    return isinstance(effect, Named) and bool(FILE_NAME.fullmatch(effect.name.rpartition("/")[2]))


Forgery = Callable[[list[Effect]], list[Effect] | None]


def _last(effects: list[Effect], fits: Callable[[Effect], bool]) -> int | None:
    found = [number for number, effect in enumerate(effects) if fits(effect)]
    return found[-1] if found else None


def record_goes(effects: list[Effect]) -> list[Effect] | None:
    """Somebody deletes a record, and nobody wanted that."""
    at = _last(effects, _is_record)
    return None if at is None else [*effects[: at + 1], Gone("forger", effects[at].name)]


def pack_goes(effects: list[Effect]) -> list[Effect] | None:
    """A pack of a step that stands goes."""
    at = _last(effects, _is_record)
    folder = "" if at is None else effects[at].name.partition("/")[0]
    pack = _last(effects[:at], lambda each: _is_pack(each) and each.name.startswith(f"{folder}/"))
    return None if pack is None else [*effects[: at + 1], Gone("forger", effects[pack].name)]


def pack_is_cut(effects: list[Effect]) -> list[Effect] | None:
    """The last write of a pack is short."""
    at = _last(effects, _is_record)
    folder = "" if at is None else effects[at].name.partition("/")[0]
    pack = _last(effects[:at], lambda each: _is_pack(each) and each.name.startswith(f"{folder}/"))
    if pack is None:
        return None
    cut = dataclasses.replace(effects[pack], data=effects[pack].data[:-1])
    return [*effects[:pack], cut, *effects[pack + 1 :]]


def record_is_no_record(effects: list[Effect]) -> list[Effect] | None:
    """What is committed is no record."""
    at = _last(effects, _is_record)
    if at is None:
        return None
    return [*effects[:at], dataclasses.replace(effects[at], data=b"{}"), *effects[at + 1 :]]


def told_too_early(effects: list[Effect]) -> list[Effect] | None:
    """A process is told that a step is saved before its record has its name."""
    told = _last(effects, lambda each: isinstance(each, Told) and each.how == SAVED)
    if told is None:
        return None
    record = _last(effects[:told], _is_record)
    if record is None:
        return None
    return [*effects[:record], effects[told], *effects[record:told], *effects[told + 1 :]]


def told_as_failed(effects: list[Effect]) -> list[Effect] | None:
    """A process is told that a save has failed whose record is there."""
    told = _last(effects, lambda each: isinstance(each, Told) and each.how == SAVED)
    if told is None:
        return None
    return [*effects[:told], dataclasses.replace(effects[told], how=FAILED), *effects[told + 1 :]]


def both_ends(effects: list[Effect]) -> list[Effect] | None:
    """Another process is told another end of the same save."""
    told = _last(effects, lambda each: isinstance(each, Told) and each.how == SAVED)
    if told is None:
        return None
    return [*effects[: told + 1], dataclasses.replace(effects[told], who="x", how=FAILED)]


def strange_values(effects: list[Effect]) -> list[Effect] | None:
    """A reader has values of a save that nobody made."""
    at = _last(effects, lambda each: isinstance(each, Took))
    if at is None:
        return None
    return [*effects[:at], dataclasses.replace(effects[at], save="f" * 16), *effects[at + 1 :]]


def other_step(effects: list[Effect]) -> list[Effect] | None:
    """A reader has the values of another step."""
    at = _last(effects, lambda each: isinstance(each, Took))
    if at is None:
        return None
    other = dataclasses.replace(effects[at], step=effects[at].step + 1)
    return [*effects[:at], other, *effects[at + 1 :]]


def claim_comes_late(effects: list[Effect]) -> list[Effect] | None:
    """A writer's first pack comes before its claim."""
    claims = {
        each.name.split("/")[1]: number
        for number, each in enumerate(effects)
        if isinstance(each, Named) and each.name.endswith("/claim.json") and not each.durable
    }
    for writer, number in claims.items():
        mine = [
            at
            for at, each in enumerate(effects)
            if _is_pack(each) and each.name.rpartition("-")[2].startswith(writer)
        ]
        if mine and mine[0] > number:
            return [*effects[:number], effects[mine[0]], *effects[number : mine[0]]]
    return None


def no_sync(effects: list[Effect]) -> list[Effect] | None:
    """A file of a step is not made durable before its record is."""
    at = _last(effects, _is_record)
    folder = "" if at is None else effects[at].name.partition("/")[0]
    syncs = [
        number
        for number, each in enumerate(effects[:at])
        if isinstance(each, Durable) and FILE_NAME.fullmatch(each.name.rpartition("/")[2])
        if each.name.startswith(f"{folder}/")
    ]
    if not syncs:
        return None
    lost = effects[syncs[-1]].name
    return [each for each in effects if not (isinstance(each, Durable) and each.name == lost)]


def held_step_goes(effects: list[Effect]) -> list[Effect] | None:
    """A reader has been told that it holds a step, and a keep policy deletes it all the same."""
    for at, each in enumerate(effects):
        if not isinstance(each, Decides):
            continue
        for step in each.steps:
            if any(
                isinstance(gone, Gone) and gone.name == f"{step}/{RECORD}" for gone in effects[at:]
            ):
                held = Holds("forger", step, ".holdfast/holds/forged")
                return [*effects[: at + 1], held, *effects[at + 1 :]]
    return None


FORGERIES: tuple[Forgery, ...] = (
    record_goes,
    pack_goes,
    pack_is_cut,
    record_is_no_record,
    told_too_early,
    told_as_failed,
    both_ends,
    strange_values,
    other_step,
    claim_comes_late,
    no_sync,
    held_step_goes,
)


def main(folder: str) -> int:
    logs = sorted(Path(folder).rglob("*.trace"))
    traces = {log: read_log(log) for log in logs}
    refused = {log: why for log, effects in traces.items() if (why := refusal(effects))}
    for log, why in refused.items():
        print(f"{log.name}: {why}")
    events = sum(map(len, traces.values()))
    print(f"{len(logs) - len(refused)} of {len(logs)} traces of {events:,} events conform")
    rng = random.Random(20261127)
    unfound = 0
    for forgery in FORGERIES:
        for log in rng.sample(logs, len(logs)):
            forged = forgery(traces[log])
            if forged is None:
                continue
            why = refusal(forged)
            unfound += not why
            print(f"{forgery.__name__} in {log.name}: {why or 'NOT REFUSED'}")
            break
        else:
            unfound += 1
            print(f"{forgery.__name__}: fits no trace")
    return bool(refused or unfound)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
