"""The rules of a root, by which any sequence of effects is judged: what a search makes happen, and
what a real run has logged.

An *effect* is what has become true: a name stands for bytes, or for nothing any more; a process was
told how its save ended; a reader took a step. The judge knows the store by the effects alone. It
raises `Broken`, with the name of the invariant, at the first effect that breaks one.

The names of files are relative to the root; a folder's name ends in `/`.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TypeAlias

from holdfast.checkpoint import CheckpointError
from holdfast.checkpoint.format.item_report import FILE_NAME
from holdfast.checkpoint.format.record import Record, parse_record
from tests.model.promise import Broken

# The invariants, by the names that docs/guarantees.md gives them.
WHOLE = "guarantee 1: a step is whole or absent"
STAYS = "guarantee 2: an acknowledged durable step stays"
EXACT = "guarantee 3: no silent change"
ONE_MEANING = "guarantee 4: one meaning per step"
BOUNDED = "guarantee 5: no endless wait"
REFUSES = "guarantee 9: a writer refuses what a reader would refuse"
NO_GUESS = "guarantee 11: nothing is deleted on a guess"
LEFT = "branches: what a job has left does not come back"
HELD = "holds: a step that a reader holds stays"
CLAIMED = "claims: no pack exists before its claim"
LIVES = "claims: a writer that lives is not fenced"
INVARIANTS = (
    WHOLE,
    STAYS,
    EXACT,
    ONE_MEANING,
    BOUNDED,
    REFUSES,
    NO_GUESS,
    LEFT,
    HELD,
    CLAIMED,
    LIVES,
)

SAVED = "saved"
FAILED = "failed"  # for certain: what it wrote may be deleted
UNKNOWN = "unknown"

RECORD = "checkpoint.json"
TOMBSTONE = b'{"format":"holdfast/tombstone"'
_CLAIM = re.compile(r"\.holdfast/([0-9a-f]{8})/claim\.json")
_MARK = re.compile(r"\.holdfast/left/[0-9a-f]+\.json")


# --- effects; `who` is a process


@dataclass(frozen=True, slots=True)
class Named:
    """A name stands for these bytes. They are `durable` at once in an object store; in a folder
    after `Durable` of file and folder. `source` is the file that it was until now, or is too.
    """

    who: str
    name: str
    data: bytes = b""
    durable: bool = True
    source: str = ""


@dataclass(frozen=True, slots=True)
class Gone:
    """A name stands for nothing any more."""

    who: str
    name: str


@dataclass(frozen=True, slots=True)
class Durable:
    """A file, or the names in a folder, outlive a power cut from now on."""

    who: str
    name: str


@dataclass(frozen=True, slots=True)
class May:
    """A step's record may be deleted or replaced from now on: a policy or a user wants it."""

    who: str
    step: int


@dataclass(frozen=True, slots=True)
class Decides:
    """A keep policy wants these steps to go, unless a reader holds them."""

    who: str
    steps: Collection[int]


@dataclass(frozen=True, slots=True)
class Holds:
    """A reader has been told that it holds a step, until the hold's file goes."""

    who: str
    step: int
    hold: str


@dataclass(frozen=True, slots=True)
class GoesBack:
    """A save begins a branch: it goes on from a step, and leaves what is above."""

    who: str
    save: str
    base: int


@dataclass(frozen=True, slots=True)
class Told:
    """A process knows how its save ended."""

    who: str
    save: str
    step: int
    how: str


@dataclass(frozen=True, slots=True)
class Began:
    """A reader begins to look for the newest step, or to read one."""

    who: str


@dataclass(frozen=True, slots=True)
class Took:
    """A reader has a step, with the values of this save; `as_newest` says that it chose it so."""

    who: str
    step: int
    save: str
    as_newest: bool = False


@dataclass(frozen=True, slots=True)
class Failed:
    """A reader was refused a step that it had listed."""

    who: str
    step: int
    why: str


Effect: TypeAlias = (
    Named | Gone | Durable | May | Decides | Holds | GoesBack | Told | Began | Took | Failed
)


@dataclass
class _Save:
    """What is known of one save."""

    step: int = -1
    ever: bool = False  # its record had its name at some time
    by_rule: bool = False  # its record went, or was replaced, as somebody wanted
    told: set[str] = field(default_factory=set)
    own_deletes: list[str] = field(default_factory=list)


@functools.lru_cache(1 << 12)
def _parsed(data: bytes) -> Record:
    return parse_record(data, "")


@dataclass(frozen=True, slots=True)
class _Standing:
    """A record that has its name."""

    save: str
    folder: str
    names: Collection[str]


class Judge:
    """Judges effects in the order in which they have become true.

    With `has_claims` a pack needs the claim of its writer.
    """

    def __init__(self, *, has_claims: bool = True) -> None:
        self.files: dict[str, bytes] = {}
        self.saves: dict[str, _Save] = {}
        self.records: dict[str, _Standing] = {}
        self._has_claims = has_claims
        self._fenced: set[str] = set()  # writers whose claim went
        self._unsynced: set[str] = set()  # files whose bytes, and names which, a power cut takes
        self._unsynced_names: set[str] = set()
        self._may: set[tuple[str, int]] = set()
        self._bases: dict[str, int] = {}
        self._left: set[tuple[int, str]] = set()
        self._left_then: dict[str, set[tuple[int, str]]] = {}
        self._gone_since: dict[str, set[int]] = {}  # by reader: steps that went since it began
        self._let_go: dict[str, Collection[int]] = {}  # by whose policy it is
        self._holds: dict[str, int] = {}  # the steps that are held, by the holds' files

    def take(self, effect: Effect) -> None:
        """Notes an effect. Raises Broken."""
        match effect:
            case Named():
                self._named(effect)
            case Gone(who, name):
                self._gone(who, name)
            case Durable(_, name):
                self._durable(name)
            case May(who, step):
                self._may.add((who, step))
            case Decides(who, steps):
                self._let_go[who] = steps
            case Holds():
                self._held(effect)
            case GoesBack(_, save, base):
                self._bases[save] = base
            case Told():
                self._told(effect)
            case Began(who):
                self._left_then[who] = set(self._left)
                self._gone_since[who] = set()
            case Took():
                self._took(effect)
            case Failed(who, step, why):
                if step not in self._gone_since.get(who, ()):
                    raise Broken(WHOLE, f"{who} was refused step {step}, which is there: {why}")

    def _save(self, save: str) -> _Save:
        return self.saves.setdefault(save, _Save())

    # --- names

    def _named(self, effect: Named) -> None:
        name = effect.name
        if not effect.durable:
            if effect.source not in self.files or effect.source in self._unsynced:
                self._unsynced.add(name)
            else:
                self._unsynced.discard(name)
            if name not in self.files:
                self._unsynced_names.add(name)
        if name.endswith("/"):
            self.files[name] = b""
            return
        if name.rpartition("/")[2] == RECORD and not name.startswith(".holdfast/"):
            self._record_named(effect)
        elif self._has_claims and (pack := FILE_NAME.fullmatch(name.rpartition("/")[2])):
            writer = pack[3][:8]
            has_claim = f".holdfast/{writer}/claim.json" in self.files
            # A pack of a writer that was fenced while it wrote is the next sweep's.
            if name not in self.files and not has_claim and writer not in self._fenced:
                raise Broken(CLAIMED, f"{effect.who} makes {name} without a claim")
        self.files[name] = effect.data

    def _record_named(self, effect: Named) -> None:
        name = effect.name
        folder = name.rpartition("/")[0]
        before = self.records.get(folder)
        if effect.data.startswith(TOMBSTONE):
            if before is not None:
                self._record_went(effect.who, folder)
            return
        try:
            record = _parsed(effect.data)
        except CheckpointError as error:
            raise Broken(
                REFUSES, f"{effect.who} commits {name}, which no reader takes: {error}"
            ) from error
        names = [f"{folder}/{each}" if folder else each for each in record.file_names()]
        save = self._save(record.writer_id)
        if before is not None and before.save == record.writer_id:
            return  # the same, with a mark of a sweep
        missing = [each for each in names if each not in self.files]
        if missing:
            raise Broken(
                WHOLE,
                f"{effect.who} commits {name} of save {record.writer_id}, and {missing[0]} is not"
                " there",
            )
        for item in record.items.values():
            for file in item.files:
                path = "/".join(filter(None, (folder, file.name)))
                if len(self.files.get(path, b"")) != file.size:
                    raise Broken(WHOLE, f"{effect.who} commits {name}, and {path} is cut")
        for each in names:
            self._check_durable(each, f"{effect.who} commits {name}")
        if FAILED in save.told:
            raise Broken(
                NO_GUESS, f"save {record.writer_id} was told as failed, and its record comes later"
            )
        if before is not None:
            self._record_went(effect.who, folder)
        save.step = record.step
        save.ever = True
        save.by_rule = False
        base = self._bases.get(record.writer_id)
        if base is not None:
            self._leave(record.writer_id, base, effect.who)
        self.records[folder] = _Standing(record.writer_id, folder, names)

    def _check_durable(self, name: str, what: str) -> None:
        if name in self._unsynced or name in self._unsynced_names:
            raise Broken(WHOLE, f"{what}, and {name} does not outlive a power cut")
        folder = name
        while folder := folder.rstrip("/").rpartition("/")[0]:
            if folder + "/" in self._unsynced_names:
                raise Broken(WHOLE, f"{what}, and the name of {folder}/ does not outlive a cut")

    def _record_went(self, who: str, folder: str) -> None:
        standing = self.records.pop(folder)
        save = self._save(standing.save)
        if (who, save.step) not in self._may:
            invariant = STAYS if SAVED in save.told else ONE_MEANING
            raise Broken(
                invariant,
                f"{who} takes the record of step {save.step}, save {standing.save}, away, and"
                " nobody wanted that",
            )
        if save.step in self._let_go.get(who, ()) and save.step in self._holds.values():
            raise Broken(HELD, f"{who} deletes step {save.step}, which a reader holds")
        save.by_rule = True
        for gone in self._gone_since.values():
            gone.add(save.step)

    def _gone(self, who: str, name: str) -> None:
        self.files.pop(name, None)
        self._unsynced.discard(name)
        self._unsynced_names.discard(name)
        if claim := _CLAIM.fullmatch(name):
            self._fenced.add(claim[1])
        self._holds.pop(name, None)
        folder, _, last = name.rpartition("/")
        if last == RECORD and folder in self.records:
            self._record_went(who, folder)
            return
        for standing in self.records.values():
            if name in standing.names:
                raise Broken(
                    WHOLE, f"{who} deletes {name}, which the record of save {standing.save} names"
                )
        pack = FILE_NAME.fullmatch(last)
        if pack is not None and pack[3] in self.saves:
            save = self.saves[pack[3]]
            if not save.by_rule and UNKNOWN in save.told and pack[3][:8] not in self._fenced:
                raise Broken(
                    NO_GUESS, f"{who} deletes {name}, and how save {pack[3]} ended is not known"
                )
        if pack is not None:
            self._save(pack[3]).own_deletes.append(who)

    def _durable(self, name: str) -> None:
        self._unsynced.discard(name)
        prefix = f"{name}/" if name else ""
        self._unsynced_names = {
            each
            for each in self._unsynced_names
            if not (each.startswith(prefix) and "/" not in each[len(prefix) :].rstrip("/"))
        }

    # --- what processes are told

    def _told(self, effect: Told) -> None:
        save = self._save(effect.save)
        save.told.add(effect.how)
        if {SAVED, FAILED} <= save.told:
            raise Broken(
                ONE_MEANING, f"save {effect.save} is told as saved to one process, as failed to one"
            )
        if effect.how == FAILED and save.ever:
            raise Broken(
                NO_GUESS,
                f"save {effect.save} is told as failed to {effect.who}, and its record has been"
                f" there{'' if save.by_rule else ', and still is'}",
            )
        if effect.how != SAVED:
            return
        standing = [each for each in self.records.values() if each.save == effect.save]
        if not standing and not save.by_rule:
            raise Broken(
                STAYS, f"{effect.who} is told that step {effect.step} is saved, and it is not there"
            )
        for each in standing:
            name = f"{each.folder}/{RECORD}" if each.folder else RECORD
            if name in self._unsynced or name in self._unsynced_names:
                raise Broken(
                    STAYS,
                    f"{effect.who} is told that step {effect.step} is saved, and its record does"
                    " not outlive a power cut",
                )

    # --- readers

    def _held(self, effect: Holds) -> None:
        standing = [self.saves[each.save].step for each in self.records.values()]
        if effect.step not in standing:
            raise Broken(HELD, f"{effect.who} holds step {effect.step}, which is not there")
        self._holds[effect.hold] = effect.step

    def _took(self, effect: Took) -> None:
        save = self.saves.get(effect.save)
        if save is None or not save.ever:
            raise Broken(
                EXACT,
                f"{effect.who} restores step {effect.step} with values of save {effect.save},"
                " which was never committed",
            )
        if save.step != effect.step:
            raise Broken(EXACT, f"{effect.who} restores step {effect.step} as step {save.step}")
        if effect.as_newest and (effect.step, effect.save) in self._left_then[effect.who]:
            raise Broken(
                LEFT,
                f"{effect.who} takes step {effect.step} of save {effect.save} for the newest, which"
                " the job has left behind",
            )

    # --- branches

    def _leave(self, own: str, base: int, who: str) -> None:
        """Notes what the first commit of a branch leaves; a durable mark must name it by then."""
        marked: set[tuple[int, str]] = set()
        for name, data in self.files.items():
            if _MARK.fullmatch(name) and name not in self._unsynced | self._unsynced_names:
                steps = json.loads(data)["steps"]
                marked |= {(int(step), save) for step, save in steps.items()}
        for standing in self.records.values():
            step = self.saves[standing.save].step
            if step <= base or standing.save == own or self._bases.get(standing.save) == base:
                continue
            if (step, standing.save) not in marked:
                raise Broken(
                    LEFT,
                    f"{who} commits save {own}, which goes on from step {base}, and no mark says"
                    f" that it has left step {step}",
                )
            self._left.add((step, standing.save))

    # --- the end

    def finish(self) -> None:
        """Judges how all stands once everything has ended."""
        for name, save in self.saves.items():
            standing = any(each.save == name for each in self.records.values())
            if SAVED in save.told and not standing and not save.by_rule:
                raise Broken(
                    STAYS, f"step {save.step} of save {name} was acknowledged, and is gone"
                )
