"""Tells an execution: who did what in which order, and what became true by it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from .rules import (
    TOMBSTONE,
    Began,
    Decides,
    Durable,
    Effect,
    Failed,
    GoesBack,
    Gone,
    Holds,
    May,
    Named,
    Told,
    Took,
)
from .scheduler import CRASH, OK
from .world import Line

# Ids are drawn by process: see `world.letters`.
_DRAWN = re.compile(r"(?<![0-9a-f])(0[1-9a-f]|1[0-9a])([0-9a-f]{30})(?![0-9a-f])")
_SAVE = re.compile(r"(?<![0-9a-f])(0[1-9a-f]|1[0-9a])([0-9a-f]{6})([0-9a-f]{8})(?![0-9a-f])")
_WRITER = re.compile(r"(?<![0-9a-f])(0[1-9a-f]|1[0-9a])([0-9a-f]{6})(?![0-9a-f])")
_HOLD = re.compile(r"(\.holdfast/holds/\d+-\d+)-\d+-")
_LOOKS = ("stat", "open", "open folder", "list", "read", "get")


def _letter(digits: str) -> str:
    return chr(96 + int(digits, 16))


def plain(text: str) -> str:
    """Returns a text with ids as people read them: writer `a1`, its save `a1.2`."""
    text = _DRAWN.sub(lambda found: f"{_letter(found[1])}-{int(found[2], 16)}", text)
    text = _SAVE.sub(
        lambda found: f"{_letter(found[1])}{int(found[2], 16)}.{int(found[3], 16)}", text
    )
    text = _WRITER.sub(lambda found: f"{_letter(found[1])}{int(found[2], 16)}", text)
    return _HOLD.sub(r"\1-", text)


def tell_effect(effect: Effect) -> str:
    """Returns what has become true; "" for what is no news to a reader."""
    match effect:
        case Named(name=name, data=data) if name.endswith("checkpoint.json"):
            if data.startswith(TOMBSTONE):
                fenced = ", ".join(json.loads(data)["fenced"])
                return f"{name} is a tombstone against {fenced}"
            record = json.loads(data)
            marks = record.get("fenced")
            fenced = f", and {', '.join(marks)} may not replace it" if marks else ""
            return f"step {record['step']} is save {record['writer']}{fenced}"
        case Named(name=name) if name.startswith(".holdfast/left/"):
            return f"{name} says what is left behind"
        case Named(name=name) if name.endswith("claim.json") and "/fenced-" not in name:
            return f"{name} is there"
        case Gone(name=name) if not name.endswith(".record"):
            return f"{name} is gone"
        case Told(who, save, step, how):
            return f"{who} is told: step {step}, save {save}, {how}"
        case Holds(who, step):
            return f"{who} holds step {step}"
        case Took(who, step, save):
            return f"{who} has step {step} of save {save}"
        case Failed(who, step, _):
            return f"{who} hears that step {step} is gone"
        case Durable(name=name):
            return f"{name or 'the root'} is synced"
        case May() | Decides() | GoesBack() | Began() | Named() | Gone():
            return ""


def tell(lines: Sequence[Line]) -> str:
    """Returns a story: looks of one process in a row stand on one line."""
    told: list[str] = []
    looks: list[str] = []
    looker = ""

    def end_looks() -> None:
        if looks:
            told.append(f"{looker:<3} looks at {', '.join(dict.fromkeys(looks))}")
            looks.clear()

    for line in lines:
        verb, _, name = line.label.partition(" ")
        if line.label.startswith("open folder"):
            verb = "open folder"
            name = line.label.removeprefix("open folder ")
        effects = [text for text in map(tell_effect, line.effects) if text]
        if verb in _LOOKS and line.variant == OK and not effects:
            if looker != line.task:
                end_looks()
            looker = line.task
            looks.append(name or "/")
            continue
        end_looks()
        how = f": {line.variant}" if line.variant not in (OK, CRASH) else ""
        told.append(f"{line.task:<3} {line.label}{how}")
        told.extend(f"        > {text}" for text in effects)
    end_looks()
    return plain("\n".join(told))
