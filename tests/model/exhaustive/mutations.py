"""Rules taken back in the real code, each of which an invariant misses."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from tests.model.promise import edited

from . import rules


@dataclass(frozen=True, kw_only=True)
class Edit:
    """A change of the code: in `function` of a module, `text` becomes `instead`."""

    module: str
    function: str
    text: str
    instead: str

    def applied(self) -> AbstractContextManager[None]:
        """Has the code go so."""
        return edited(
            f"holdfast.checkpoint.{self.module}",
            self.function,
            self.text,
            self.instead,
            takers=("holdfast.checkpoint", "tests.model.exhaustive"),
        )


@dataclass(frozen=True, kw_only=True)
class Mutation(Edit):
    """A rule of the code that is taken back, `besides` where it is kept in a second place too.

    `found_in` are the configurations that miss it, and `breaks` the invariants that they name.
    """

    name: str = field(kw_only=False)
    found_in: str
    breaks: tuple[str, ...]
    besides: Edit | None = None

    @contextlib.contextmanager
    def taken_back(self) -> Iterator[None]:
        """Has the code go without the rule."""
        with self.applied(), self.besides.applied() if self.besides else contextlib.nullcontext():
            yield


PROTOCOL = "agreement.save_protocol"
OBJECT = "storage.object"
LOCAL = "storage.local"
GARBAGE = "steps.garbage"
HOLDS = "steps.holds"
MARKS = """names = _mark(storage, steps, writer_id)
    if not names:
        yield list(steps)
        return"""
TAKES = "name = add_hold(storage, step, seconds)"
LOOKS = "going = {int(mark[1]) for mark in list_marks(storage).values()}"
COMMIT = "saving.commit"

MUTATIONS = (
    Mutation(
        "an unclear answer is a refusal",
        module=PROTOCOL,
        function="settle",
        text="if is_ours(found, key):",
        instead="if not is_ours(found, key): return _not_committed(key, answer.error)\n"
        "    if is_ours(found, key):",
        found_in="unknown answer, and a reader",
        breaks=(rules.NO_GUESS, rules.WHOLE),
    ),
    Mutation(
        "an error of a commit is a refusal",
        module=COMMIT,
        function="EffectPerformer.perform",
        text="return Unclear(error)",
        instead="return Refused(error)",
        found_in="unknown answer, and a reader",
        breaks=(rules.NO_GUESS, rules.WHOLE),
    ),
    Mutation(
        "a process that heard nothing has failed",
        module=PROTOCOL,
        function="follow",
        text="return unheard(key, (yield from _read()), untold)",
        instead="return _not_committed(key, SaveFailed('not heard'))",
        found_in="the primary dies",
        breaks=(rules.NO_GUESS, rules.WHOLE, rules.ONE_MEANING),
    ),
    Mutation(
        "reports are not looked at",
        module=PROTOCOL,
        function="_commit",
        text="check_save_reports(reports, key)",
        instead="pass",
        besides=Edit(
            module="saving.save",
            function="SnapshotWork.build",
            text="for report in reports]",
            instead="for report in reports if name in report.items]",
        ),
        found_in="a group of two, one error",
        breaks=(rules.EXACT,),
    ),
    Mutation(
        "whose record stands does not matter",
        module=PROTOCOL,
        function="is_ours",
        text="and found.save_id == key.save_id",
        instead="",
        found_in="two writers of one step, one error",
        breaks=(rules.STAYS,),
    ),
    Mutation(
        "a commit that was begun is told as done",
        module=PROTOCOL,
        function="_commit",
        text="assert isinstance(answer, Unclear)",
        instead="return SaveResult(key)",
        found_in="unknown answer, and a reader",
        breaks=(rules.STAYS,),
    ),
    Mutation(
        "a commit replaces what stands",
        module=LOCAL,
        function="LocalStorage._publish",
        text="if replace or self._single_writer:",
        instead="if True:",
        found_in="two writers of one step, in a folder",
        breaks=(rules.ONE_MEANING, rules.STAYS),
    ),
    Mutation(
        "a pack is not fsynced",
        module=LOCAL,
        function="LocalStorage.write",
        text="os.fsync(file)",
        instead="pass",
        found_in="two writers of one step, in a folder",
        breaks=(rules.WHOLE,),
    ),
    Mutation(
        "the folder of a pack is not synced",
        module=LOCAL,
        function="LocalStorage.write",
        text="sync_folder(path.parent)",
        instead="pass",
        found_in="two writers of one step, in a folder",
        breaks=(rules.WHOLE,),
    ),
    Mutation(
        "a record's name is not synced",
        module=LOCAL,
        function="LocalStorage.commit",
        text="sync_folder(path.parent)",
        instead="pass",
        found_in="two writers of one step, in a folder",
        breaks=(rules.STAYS,),
    ),
    Mutation(
        "a record is not fsynced",
        module=LOCAL,
        function="LocalStorage._written",
        text="os.fsync(file)",
        instead="pass",
        found_in="two writers of one step, in a folder",
        breaks=(rules.STAYS,),
    ),
    Mutation(
        "the folder of a step is not synced",
        module=LOCAL,
        function="make_folders",
        text="sync_folder(folder.parent)",
        instead="pass",
        found_in="two writers of one step, in a folder",
        breaks=(rules.WHOLE,),
    ),
    Mutation(
        "a commit is put without a condition",
        module=OBJECT,
        function="ObjectStorage.commit",
        text="self.put(name, data, generation)",
        instead="self.put(name, data)",
        found_in="two writers of one step, in a bucket",
        breaks=(rules.ONE_MEANING, rules.STAYS),
    ),
    Mutation(
        "a commit does not look for its claim",
        module=OBJECT,
        function="ObjectStorage._before_commit",
        text="if not has_claim:",
        instead="if False:",
        found_in="a writer that is fenced and wakes, in a bucket",
        breaks=(rules.ONE_MEANING, rules.STAYS, rules.WHOLE),
    ),
    Mutation(
        "a tombstone names nobody",
        module=OBJECT,
        function="ObjectStorage._before_commit",
        text="if writer_id in fenced_writers(standing):",
        instead="if False:",
        found_in="a writer that is fenced, one error, in a bucket",
        breaks=(rules.WHOLE,),
    ),
    Mutation(
        "a commit is not looked at again by its own bytes",
        module=OBJECT,
        function="ObjectStorage._before_commit",
        text="if standing is not None and says_the_same(standing, data):",
        instead="if False:",
        found_in="unknown answer, and a reader, in a bucket",
        breaks=(rules.NO_GUESS, rules.WHOLE),
    ),
    Mutation(
        "a sweep buries nobody in a bucket",
        module="steps.object_claims",
        function="ObjectClaims.bury",
        text="return names if self._values.put(name, marked, generation) else []",
        instead="return names",
        found_in="a writer that is fenced and wakes, in a bucket",
        breaks=(rules.WHOLE,),
    ),
    Mutation(
        "a tombstone is put without a condition",
        module="steps.object_claims",
        function="ObjectClaims.bury",
        text="self._values.put(name, marked, generation)",
        instead="self._values.put(name, marked)",
        found_in="a writer that is fenced and wakes, in a bucket",
        breaks=(rules.STAYS, rules.ONE_MEANING, rules.WHOLE),
    ),
    Mutation(
        "a sweep lists claims before packs",
        module=GARBAGE,
        function="sweep_files",
        text="steps = list_steps_files(storage, listed)",
        instead=(
            "standing = claims.standing(); claims.standing = lambda: standing;"
            " steps = list_steps_files(storage, listed)"
        ),
        found_in="an opening and a save, beside a sweep, in a bucket",
        breaks=(rules.LIVES,),
    ),
    Mutation(
        "a fence leaves the claim",
        module="steps.local_claims",
        function="LocalClaims.fence",
        text="if writer_id in self.standing():",
        instead="if False:",
        found_in="a writer that is fenced as it commits, in a folder",
        breaks=(rules.ONE_MEANING, rules.WHOLE),
    ),
    Mutation(
        "a sweep removes what it lists of an empty folder",
        module=GARBAGE,
        function="_delete_empty",
        text='if name.endswith("/")',
        instead="",
        found_in="a writer and a sweep",
        breaks=(rules.STAYS, rules.ONE_MEANING),
    ),
    Mutation(
        "a sweep does not look a second time in a folder",
        module=GARBAGE,
        function="_delete_suspects",
        text="names = _unnamed(storage, step_dir, names)\n    delete_files",
        instead="pass\n    delete_files",
        found_in="a link that lands late, beside a sweep",
        breaks=(rules.WHOLE,),
    ),
    Mutation(
        "a sweep leaves a fenced writer's record",
        module="steps.local_claims",
        function="LocalClaims.bury",
        text="Path(entry).unlink(missing_ok=True)",
        instead="pass",
        found_in="a link that lands late, beside a sweep",
        breaks=(rules.WHOLE,),
    ),
    Mutation(
        "a sweep takes every writer for dead",
        module="steps.claims",
        function="may_fence",
        text="if dead:",
        instead="if True:",
        found_in="a writer and a sweep",
        breaks=(rules.LIVES,),
    ),
    Mutation(
        "a deletion takes the packs first",
        module="steps.step_files",
        function="StepDeleter.delete",
        text="storage.delete([record])",
        instead=(
            "storage.delete([f'{folder}/{name}' for name in names()]); storage.delete([record])"
        ),
        found_in="retention and a reader's hold",
        breaks=(rules.WHOLE,),
    ),
    Mutation(
        "holds are not looked at",
        module=HOLDS,
        function="letting_go",
        text="if step not in held",
        instead="",
        found_in="retention and a reader's hold",
        breaks=(rules.HELD,),
    ),
    Mutation(
        "holds are looked at before steps are marked",
        module=HOLDS,
        function="letting_go",
        text=f"{MARKS}\n    entries = storage.list(HOLDS)",
        instead=f"entries = storage.list(HOLDS)\n    {MARKS}",
        found_in="retention and a reader's hold",
        breaks=(rules.HELD,),
    ),
    Mutation(
        "marks are not looked at",
        module=HOLDS,
        function="take_hold",
        text="step not in going and",
        instead="",
        found_in="retention and a reader's hold",
        breaks=(rules.HELD,),
    ),
    Mutation(
        "marks are looked at before a hold is written",
        module=HOLDS,
        function="take_hold",
        text=f"{TAKES}\n    is_held = False\n    try:\n        {LOOKS}",
        instead=f"{LOOKS}\n    {TAKES}\n    is_held = False\n    try:",
        found_in="retention and a reader's hold",
        breaks=(rules.HELD,),
    ),
    Mutation(
        "a step that is gone is held",
        module=HOLDS,
        function="take_hold",
        text="and has_record(storage, folder)",
        instead="",
        found_in="retention and a reader's hold",
        breaks=(rules.HELD,),
    ),
    Mutation(
        "a sweep forgets the marks of the living",
        module=GARBAGE,
        function="sweep_files",
        text="if mark[2] not in standing",
        instead="",
        found_in="a hold and a sweep, the writer dies",
        breaks=(rules.HELD,),
    ),
    Mutation(
        "a sweep leaves the marks of the dead",
        module=GARBAGE,
        function="sweep_files",
        text="forget_marks(",
        instead="max(0, 1) or (",
        found_in="a hold and a sweep, the writer dies",
        breaks=(rules.HELD,),
    ),
    Mutation(
        "an overwrite deletes before it commits",
        module=COMMIT,
        function="EffectPerformer._commit",
        text="self._name_record(record)",
        instead="self._delete_replaced(replaced)\n    self._name_record(record)",
        found_in="overwrite and a reader",
        breaks=(rules.WHOLE,),
    ),
    Mutation(
        "what is left is marked after the commit",
        module="steps.lineage",
        function="Lineage.current",
        text="self._mark(storage, place.base, key.save_id, self._saved)",
        instead="pass",
        found_in="going back and saving on",
        breaks=(rules.LEFT,),
    ),
    Mutation(
        "a local save that nobody was told of is a failure",
        module=PROTOCOL,
        function="unheard_locally",
        text="return SaveResult(key, CommitUnknown(message, step=key.step))",
        instead="return _not_committed(key, SaveFailed(message, step=key.step))",
        found_in="a local save of two, the primary lost",
        breaks=(rules.STAYS,),
    ),
    Mutation(
        "a local save that nobody was told of is there",
        module=PROTOCOL,
        function="unheard_locally",
        text="return SaveResult(key, CommitUnknown(message, step=key.step))",
        instead="return SaveResult(key)",
        found_in="a local save of two, the primary lost",
        breaks=(rules.STAYS,),
    ),
    Mutation(
        "an older local step goes for one that nobody was told of",
        module=PROTOCOL,
        function="local_saves_to_delete",
        text="return [own] if result.deletable else []",
        instead="return [own] if result.deletable else [each for each in written if each != own]",
        found_in="a local save of two, the primary lost",
        breaks=(rules.STAYS,),
    ),
    Mutation(
        "a host reports before it has copied its peer's part",
        module="local_tier.local_save",
        function="LocalSave._write_and_copy",
        text="for owner in place.meeting.copies_from:",
        instead="for owner in ():",
        found_in="a local save of two, the primary lost",
        breaks=(rules.STAYS,),
    ),
)
