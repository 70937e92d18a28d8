"""Writes tests/transcripts: what the real code does, told in order, with prose that says why.

`python -m tests.model.exhaustive.transcripts` writes them anew; a test compares them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.support.paths import ROOT

from .configurations import Configuration, Scene, Searcher, back_and_on, local_saves, searcher
from .disk import LATE
from .programs import read_newest, sweep
from .scheduler import CRASH, OK, Run, Task
from .search import NotRepeated
from .story import tell
from .world import Faults

FOLDER = ROOT / "tests" / "transcripts"


@dataclass(frozen=True)
class Cue:
    """Lets a process go on, until it is about to take a step whose label has this text, or to its
    end; `how` that step goes then. `why` is said before it.
    """

    why: str
    process: str
    until: str = ""
    how: str = ""


@dataclass(frozen=True)
class Transcript:
    """One page: who runs, in which order, and why."""

    file: str
    title: str
    prose: str
    store: str
    prepare: Callable[[Scene], None]
    cues: Sequence[Cue]
    faults: dict[str, Faults]


class Director:
    """A chooser that follows cues, and notes where in the story each of them begins."""

    def __init__(self, cues: Sequence[Cue]) -> None:
        self._cues = cues
        self._cue = 0
        self.begins: list[int] = [0]

    def choose(self, run: Run, ready: list[Task], *, time_passes: bool) -> Task | None:
        """Returns the task that the cue names; None after the last cue."""
        while self._cue < len(self._cues):
            cue = self._cues[self._cue]
            task = next((task for task in ready if task.process.startswith(cue.process)), None)
            if task is not None and not (cue.until and cue.until in task.stop.label):
                task.variant = OK
                return task
            waits = any(
                cue.until in each.stop.label
                for each in run.unfinished()
                if each.process.startswith(cue.process)
            )
            if task is None and cue.until and not waits:
                raise NotRepeated(f"{cue.process} does not come to {cue.until!r}")
            self._cue += 1
            if task is not None and cue.how:
                # The step itself is the cue's.
                task.variant = cue.how
                self.begins.append(len(run.world.story) + 1)  # type: ignore[attr-defined]
                return task
            self.begins.append(len(run.world.story))  # type: ignore[attr-defined]
        return None

    def finished(self, task: Task, accesses: object) -> None:
        """Takes no note."""


def render(own: Searcher, transcript: Transcript) -> str:
    """Returns the text of a page."""
    configuration = Configuration(
        transcript.title, transcript.store, transcript.prepare, faults=transcript.faults
    )
    director = Director(transcript.cues)
    world = own.world(configuration, director)
    world.run.execute()
    if world.run.violation is not None:
        raise world.run.violation
    ends = [*director.begins[1:], len(world.story)]
    parts = [tell(world.story[a:b]) for a, b in zip(director.begins, ends, strict=False)]
    own.end(world.run)
    if world.run.violation is not None:
        raise world.run.violation
    page = [f"# {transcript.title}", "", transcript.prose, ""]
    for cue, part in zip(transcript.cues, parts, strict=False):
        page += [cue.why, "", "```text", part, "```", ""]
    return "\n".join(page)


# --- the pages


def _save(scene: Scene) -> None:
    managers = scene.group_managers("ab")
    for process, manager in managers.items():
        scene.add(process, lambda manager=manager: manager.save(5))  # type: ignore[misc]


def _fenced(scene: Scene) -> None:
    writer = scene.manager("a")
    scene.add("a", lambda: writer.save(5))
    scene.add("s", lambda: sweep(scene.storage(), force=True))


def _unknown(scene: Scene) -> None:
    writer = scene.manager("a")
    scene.add("a", lambda: writer.save(5))
    scene.add("r", lambda: read_newest(scene.world, scene.storage()))


TRANSCRIPTS = (
    Transcript(
        file="save.md",
        title="A save of two processes",
        prose="Two processes, `a` and `b`, save step 5 into a folder. `a` is the primary.",
        store="folder",
        prepare=_save,
        faults={},
        cues=(
            Cue(
                "Process `b` writes its pack. The file and its folder are fsynced before\n"
                "`b` reports: a report means durable.",
                "b",
                until="waits for report",
            ),
            Cue(
                "Process `a` writes its own pack, and has both reports then. The record is\n"
                "written inside the claim of the writer. A link gives it its name: that is\n"
                "one operation, which fails if the step exists, or if the claim was taken\n"
                "away. The folder is synced before anybody is told that the step is saved.",
                "a",
            ),
            Cue("Process `b` hears how the save ended.", "b"),
        ),
    ),
    Transcript(
        file="fenced-writer.md",
        title="A writer that is fenced",
        prose="`a` is about to commit, and does not run for a while. `s` sweeps the root by force.",
        store="bucket",
        prepare=_fenced,
        faults={},
        cues=(
            Cue(
                "`a` has written its pack. It has looked for its claim, which stands, and\n"
                "for a record, which is not there. Then it stops.",
                "a",
                until="put if unchanged",
            ),
            Cue(
                "`s` takes the claim away. That alone would come too late: `a` has looked\n"
                "already. So `s` puts a tombstone where the record would be, before it\n"
                "deletes the pack.",
                "s",
            ),
            Cue(
                "`a` wakes. Its record goes in only if nothing has changed at the name\n"
                "since it looked. The tombstone has changed it. `a` looks again, and finds\n"
                "no claim: its save has failed for certain, so that it may delete what it\n"
                "wrote.",
                "a",
            ),
        ),
    ),
    Transcript(
        file="unknown-answer.md",
        title="A commit without an answer",
        prose="The store does not answer the commit of `a` in time, and carries it out later.",
        store="bucket",
        prepare=_unknown,
        faults={"a": Faults(frozenset({LATE}), most=1, where=("put if unchanged",))},
        cues=(
            Cue("`a` writes its pack, and comes to its commit.", "a", "put if unchanged", LATE),
            Cue(
                "No answer is neither yes nor no. `a` reads the record: it is not there\n"
                "now, which does not say that it never will be. So `a` is told that nobody\n"
                "knows, and deletes nothing.",
                "a",
            ),
            Cue("A reader finds no step.", "r"),
            Cue(
                "The store carries the write out. The step is whole, since every pack that\n"
                "its record names is still there.",
                "the store",
            ),
        ),
    ),
    Transcript(
        file="going-back.md",
        title="Going back, and a new branch",
        prose="`a` has saved steps 4 and 6, and restored step 4. It goes on from there.",
        store="bucket",
        prepare=back_and_on,
        faults={},
        cues=(
            Cue(
                "First a mark says, durably, that step 6 is left behind. It names the save,\n"
                "not the number alone, so that it holds for no step 6 that comes later. A\n"
                "crash after it is no harm: the job had gone back. Without it step 6 would\n"
                "come back as the newest. Only then comes the commit.",
                "a",
            ),
            Cue(
                "An evaluator passes over step 6, and takes step 5, though its number is\nlower.",
                "r",
            ),
        ),
    ),
    Transcript(
        file="local-save.md",
        title="A local save, and a host that is lost",
        prose="Two hosts keep step 1, each with a copy of the other's part. They save step 2.",
        store="folder",
        prepare=local_saves,
        faults={"b": Faults(crashes=True)},
        cues=(
            Cue(
                "`a` writes its part. A part gets its name last, when all of its files are\n"
                "there. Then `a` waits for the part of `b`.",
                "a",
                until="asks b",
            ),
            Cue(
                "`b` dies before its part has its name, and its host is lost.",
                "b",
                until="replace",
                how=CRASH,
            ),
            Cue(
                "`a` can copy nothing, and nobody reports for `b`: the save has failed.\n"
                "Step 1 stays: of each part of it `a` has the one that it wrote, or a copy.",
                "a",
            ),
        ),
    ),
)


def pages() -> dict[str, str]:
    """Returns the text of each page, by its file's name."""
    with searcher() as own:
        return {transcript.file: render(own, transcript) for transcript in TRANSCRIPTS}


def main() -> None:
    """Writes all pages."""
    FOLDER.mkdir(exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text)


if __name__ == "__main__":
    main()
