"""What is done to a root in a life, and what its model makes of each answer.

An operation is a value. `run` does it, and returns what each process answered. `judge` yields the
worlds in which that answer is right; it yields none where a rule is broken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

from holdfast.checkpoint import CheckpointManager, SaveCancelled, SaveHandle
from holdfast.checkpoint.steps.claims import FOLDER

from .contents import CASTS, differs, items_of, new_items_of, reading_of, write_over
from .policies import HARMED_RECORD, Saved, loss_of
from .site import Raised, Site
from .world import Begun, Place, World


class Broken(AssertionError):
    """Says which rule an answer breaks, whatever the world."""


CALLBACK_S = 5.0
DAMAGED = {"Corrupt", "HostileCheckpoint"}


class Operation(Protocol):
    """One call, or a few that belong together."""

    def run(self, site: Site) -> list[Any]:
        """Does it; returns what each process answered."""

    def judge(self, world: World, site: Site, found: list[Any]) -> Iterator[World]:
        """Yields what may be true after this answer."""


def alike(found: list[Any]) -> Any:
    """Returns the one answer of all processes, an error as its type's name."""
    answers = [answer.kind if isinstance(answer, Raised) else answer for answer in found]
    if any(answer != answers[0] for answer in answers):
        raise Broken(f"processes differ: {found}")
    return answers[0]


def attempted(call: Callable[[], Any]) -> Any:
    """Returns what a call returns, or what it raises."""
    try:
        return call()
    except Exception as error:
        return Raised(error)


# --- Saving


@dataclass(frozen=True)
class Save:
    """Saves content `number` as a step."""

    step: int
    number: int
    overwrite: bool = False
    force: bool = False
    waits: bool = True

    def run(self, site: Site) -> list[Any]:
        loss = loss_of(self.number)

        def save(rank: int, manager: CheckpointManager) -> bool:
            handle = manager.save(
                self.step,
                items=items_of(site.settings, self.number, rank),
                metrics=None if loss is None else {"loss": loss},
                metadata={"number": self.number},
                dtype=CASTS[site.settings.dtype],
                force=self.force,
                overwrite=self.overwrite,
            )
            if self._is_waited_for(site):
                handle.wait()
            return bool(handle)

        return site.each(save)

    def judge(self, world: World, site: Site, found: list[Any]) -> Iterator[World]:
        answer = alike(found)
        for is_local in (False, True):
            is_due = self.is_due(world, site, is_local=is_local)
            if is_due is not False:
                yield from self._saved(world, site, answer, is_local=is_local)
        if answer is False and all(
            self.is_due(world, site, is_local=is_local) is not True for is_local in (False, True)
        ):
            yield world

    def _is_again(self, world: World, site: Site) -> bool:
        """Says whether the step may be done, since the program was at it: once, for a policy."""
        has_policy = site.settings.save_policy != "always"
        return has_policy and self.step == world.at and not self.force

    def _is_waited_for(self, site: Site) -> bool:
        # A save on the hosts may be under way while durable ones begin: of two the model has none.
        return self.waits or site.settings.local is not None

    def is_due(self, world: World, site: Site, *, is_local: bool) -> bool | None:
        """Says whether a lane is to save the step; None: the processes may agree on a later one."""
        now_s = site.clock.true_s
        settings = site.settings
        agrees_later = settings.processes > 1 and settings.on_busy == "skip"
        is_busy = world.begun is not None and settings.on_busy == "skip"
        by_clock = settings.processes > 1 and "hourly" in settings.save_policy
        if is_local:
            if not world.wants_locally(self.step) or self.is_due(world, site, is_local=False):
                return False
            return None if settings.processes > 1 or world.begun is not None else True
        if self.force:
            return True
        if by_clock or agrees_later:
            return None
        is_due = world.wants(self.step, now_s)
        return None if is_due and is_busy else is_due

    def _saved(self, world: World, site: Site, answer: Any, *, is_local: bool) -> Iterator[World]:
        for ended in world.ended():
            for before in ended.seen():
                yield from self._begun(before, site, answer, is_local=is_local)

    def _begun(self, world: World, site: Site, answer: Any, *, is_local: bool) -> Iterator[World]:
        now_s = site.clock.true_s
        saved = Saved(self.number, now_s, clock=site.times_set)
        started = world if is_local else world.started(self.step, now_s)
        for place in world.places(self.step, is_local=is_local, overwrite=self.overwrite):
            if isinstance(place, str):
                is_done = answer is False and place == "StepExists" and self._is_again(world, site)
                if answer == place or is_done:
                    # In a group the others have begun this save, and its policy knows it.
                    now = started if is_done or site.settings.processes > 1 else world
                    if is_done:
                        now = replace(now, at=None)
                    yield now
                    if self.step in now.unlisted:  # the commit has found it
                        yield replace(now, unlisted=now.unlisted - {self.step})
                continue
            begun = Begun(self.step, saved, is_local, place)
            after = started.begins(self.step, place)
            if answer is True and self._is_waited_for(site):
                yield from after.committed(begun)
            elif answer is True:
                yield replace(after, begun=begun)


@dataclass(frozen=True)
class Cancel:
    """Begins to save content `number` as a step, and calls that off on the first process."""

    step: int
    number: int

    def run(self, site: Site) -> list[Any]:
        def save(rank: int, manager: CheckpointManager) -> Any:
            items = items_of(site.settings, self.number, rank)
            handle = save_forced(self, site, items, manager)
            is_cancelled = handle.cancel() if rank == 0 else None
            try:
                handle.wait()
            except SaveCancelled:
                return "cancelled"
            return "late" if not is_cancelled else "committed in spite of its cancel"

        return site.each(save)

    def judge(self, world: World, site: Site, found: list[Any]) -> Iterator[World]:
        answer = alike(found)
        now_s = site.clock.true_s
        saved = Saved(self.number, now_s, clock=site.times_set, has_metrics=False)
        for begun in forced(world, self.step, saved, now_s):
            if answer == "late":
                yield from begun.ended()
            if answer == "cancelled":
                # A save that comes to nothing may begin a stretch, or none.
                assert begun.begun is not None
                sure = begun.branched(self.step, begun.begun.place).sure
                yield replace(begun, begun=None, sure=sure)


def save_forced(operation: Any, site: Site, items: Any, manager: CheckpointManager) -> SaveHandle:
    """Begins a durable save of an operation's content, over whatever is there."""
    return manager.save(
        operation.step,
        items=items,
        metadata={"number": operation.number},
        dtype=CASTS[site.settings.dtype],
        force=True,
        overwrite=True,
    )


def commit_of(operation: Any, world: World, site: Site) -> Iterator[World]:
    """Yields the worlds after the commit of `save_forced`."""
    now_s = site.clock.true_s
    saved = Saved(operation.number, now_s, clock=site.times_set, has_metrics=False)
    for begun in forced(world, operation.step, saved, now_s):
        yield from begun.ended()


def forced(world: World, step: int, saved: Saved, now_s: float) -> Iterator[World]:
    """Yields the worlds in which a durable save over whatever is there has begun."""
    for ended in world.ended():
        for before in ended.seen():
            started = before.started(step, now_s)
            for place in before.places(step, is_local=False, overwrite=True):
                assert isinstance(place, Place)
                begun = Begun(step, saved, is_local=False, place=place)
                yield replace(started.begins(step, place), begun=begun)


CALLED_BACK: dict[str, Callable[[CheckpointManager, int], Any]] = {
    "wait_until_finished": lambda manager, step: manager.wait_until_finished(),
    "save": lambda manager, step: manager.save(step + 1, {"w": 1}, force=True),
    "delete": lambda manager, step: manager.delete(step),
    "restore": lambda manager, step: manager.restore(step),
    "reload": lambda manager, step: manager.reload(),
    "close": lambda manager, step: manager.close(),
}


@dataclass(frozen=True)
class SaveAndCall:
    """Saves content `number` as a step; once it is committed, a callback makes a call that would
    wait for the save itself. It is refused at once.
    """

    step: int
    number: int
    call: str

    def run(self, site: Site) -> list[Any]:
        def save(rank: int, manager: CheckpointManager) -> Any:
            told: list[Any] = []

            def call(step: int) -> None:
                told.append(attempted(lambda: CALLED_BACK[self.call](manager, step)))

            items = items_of(site.settings, self.number, rank)
            handle = save_forced(self, site, items, manager)
            handle.on_commit(call)
            handle.wait(CALLBACK_S)
            return [each.kind if isinstance(each, Raised) else each for each in told]

        return site.each(save)

    def judge(self, world: World, site: Site, found: list[Any]) -> Iterator[World]:
        if alike(found) == ["RuntimeError"]:
            yield from commit_of(self, world, site)


@dataclass(frozen=True)
class SaveAndChange:
    """Saves content `number` as a step, and then writes over the host's memory of its arrays.

    A jax.Array may have the memory of a numpy array, into which its owner may write.
    """

    step: int
    number: int

    def run(self, site: Site) -> list[Any]:
        def save(rank: int, manager: CheckpointManager) -> bool:
            items = new_items_of(site.settings, self.number, rank)
            handle = save_forced(self, site, items, manager)
            write_over(items)
            handle.wait()
            return bool(handle)

        return site.each(save)

    def judge(self, world: World, site: Site, found: list[Any]) -> Iterator[World]:
        if alike(found) is True:
            yield from commit_of(self, world, site)


@dataclass(frozen=True)
class Wait:
    """Waits until no save is under way."""

    def run(self, site: Site) -> list[Any]:
        return site.each(lambda rank, manager: manager.wait_until_finished())

    def judge(self, world: World, site: Site, found: list[Any]) -> Iterator[World]:
        if alike(found) is None:
            yield from world.ended()


# --- Listing


@dataclass(frozen=True)
class List:
    """Lists the steps, in each of the ways there are."""

    def run(self, site: Site) -> list[Any]:
        return site.each(
            lambda rank, manager: [
                manager.all_steps(),
                manager.local_steps(),
                manager.latest_step(),
                manager.left_steps(),
            ]
        )

    def judge(self, world: World, site: Site, found: list[Any]) -> Iterator[World]:
        # Processes hear of the end of a save one after the other: one may list what there is before
        # it, and the next what there is after it.
        answers = found if world.begun is not None else [alike(found)]
        seen = list(world.seen())
        if all(any(_lists(now, answer) for now in seen) for answer in answers):
            yield from (now for now in seen if any(_lists(now, answer) for answer in answers))


def _lists(world: World, answer: Any) -> bool:
    """Says whether a listing is one of a world, and of what may become of it meanwhile."""
    if isinstance(answer, Raised | str):
        return False
    steps, local, newest, left = answer
    if set(left) not in (world.left_now, world.left_now - world.unheard) and not world.unlisted:
        return False
    if set(steps) | world.unlisted != set(world.all_steps) | world.unlisted or not set(
        local
    ) <= set(world.local):
        # Local steps that the store has too are the store's.
        return False
    if set(world.local) - set(local) - set(world.steps):
        return False
    if steps != sorted(steps):
        return False
    told = replace(world, left=world.left - world.unheard)
    later = [each.newest for now in (world, told) for each in now.seen()]
    return newest in later or (bool(world.unlisted) and newest == max(steps, default=None))


@dataclass(frozen=True)
class Look:
    """Asks what the store says of a step, without its arrays."""

    step: int

    def run(self, site: Site) -> list[Any]:
        def look(rank: int, manager: CheckpointManager) -> Any:
            metrics = repr(manager.metrics(self.step))  # NaN is not NaN
            structure = manager.structure(self.step)
            return [metrics, manager.metadata(self.step), sorted(structure.items)]

        return site.each(look)

    def judge(self, world: World, site: Site, found: list[Any]) -> Iterator[World]:
        for now in world.seen():
            if all(self._tells(now, answer, site) for answer in found):
                yield now

    def _tells(self, world: World, answer: Any, site: Site) -> bool:
        saved = world.all_steps.get(self.step)
        kind = answer.kind if isinstance(answer, Raised) else ""
        if saved is None or (world.begun is not None and kind):
            # It may go between two questions.
            return kind == "StepNotFound"
        if HARMED_RECORD in saved.harmed:
            return kind in DAMAGED
        if HARMED_RECORD in saved.doubtful and kind in DAMAGED:
            return True
        return bool(answer == self._facts(saved, site))

    def _facts(self, saved: Saved, site: Site) -> list[Any]:
        loss = saved.loss
        metrics = {} if loss is None else {"loss": loss}
        items = items_of(site.settings, saved.number, 0)
        return [repr(metrics), {"number": saved.number}, sorted(items)]


@dataclass(frozen=True)
class Reload:
    """Lists the store again on all processes."""

    def run(self, site: Site) -> list[Any]:
        return site.each(lambda rank, manager: manager.reload())

    def judge(self, world: World, site: Site, found: list[Any]) -> Iterator[World]:
        if alike(found) is None:
            for ended in world.ended():
                yield replace(ended, unlisted=frozenset())


# --- Restoring


@dataclass(frozen=True)
class Restore:
    """Restores a step, None the newest, as the settings read."""

    step: int | None = None

    def run(self, site: Site) -> list[Any]:
        settings = site.settings

        def restore(rank: int, manager: CheckpointManager) -> Any:
            names = items_of(settings, 0, rank)
            readings = {name: reading_of(settings, name, 0, rank) for name in names}
            words = {key: word for each in readings.values() for key, word in each.words.items()}
            words |= {
                "read": "once" if settings.read_once else "each",
                "fallback": settings.fallback,
            }
            likes = {name: reading.like for name, reading in readings.items()}
            if len(likes) > 1:
                return manager.restore(self.step, items=likes, **words)
            return {"state": manager.restore(self.step, likes["state"], **words)}

        return site.each(restore)

    def judge(self, world: World, site: Site, found: list[Any]) -> Iterator[World]:
        for now in world.seen():
            after = self._told(now, site, found)
            if after is not None:
                yield after

    def _told(self, world: World, site: Site, found: list[Any]) -> World | None:
        """Returns the world after the restore, None where it would have ended otherwise."""
        if world.begun is not None and _kinds(found) == {"StepGone"}:
            # The keep policy of the save under way has let it go while it was read.
            return None if self.step is None else replace(world, at=None)
        passed: set[int] = set()
        while (step := self._candidate(world, passed)) is not None:
            saved = world.all_steps[step]
            if not saved.harmed and _holds(found, saved.number, site):
                return world.goes_on_from(step, passed)
            if not saved.harmed and not saved.doubtful:
                return None
            is_local = world.is_local(step)
            gives_way = site.settings.fallback or (is_local and self.step is None)
            if not gives_way:
                return replace(world, at=None) if _kinds(found) <= DAMAGED else None
            if is_local:
                world = world.without_local(step)
            else:
                passed.add(step)
        if _kinds(found) == {"StepNotFound"}:
            return replace(world, passed=world.passed | passed, at=None)
        return None

    def _candidate(self, world: World, passed: set[int]) -> int | None:
        """Returns the step that comes back next, None where none is left."""
        if self.step is not None and not world.settings.fallback:
            return self.step if self.step in world.all_steps else None
        asked = {step for step in world.all_steps if step == self.step}
        line = {*world.line, *world.local, *asked}
        steps = [step for step in line if self.step is None or step <= self.step]
        newest = max((step for step in steps if step not in passed), default=None)
        # Without a fallback no other step of the store follows one that is damaged.
        return None if passed and not world.settings.fallback else newest


def _kinds(found: list[Any]) -> set[str]:
    return {answer.kind if isinstance(answer, Raised) else "a value" for answer in found}


def _holds(found: list[Any], number: int, site: Site) -> bool:
    """Says whether every process got what it saved, to the bit."""
    return not any(_difference(answer, number, site, rank) for rank, answer in enumerate(found))


def _difference(answer: Any, number: int, site: Site, rank: int) -> str:
    if isinstance(answer, Raised):
        return repr(answer)
    settings = site.settings
    items = items_of(settings, number, rank)
    expected = {name: reading_of(settings, name, number, rank).expected for name in items}
    return differs(expected, answer)


@dataclass(frozen=True)
class GoBack:
    """Restores some steps, one after the other, and saves content `number` as a step."""

    steps: tuple[int | None, ...]
    save: Save

    @property
    def _parts(self) -> list[Operation]:
        return [*map(Restore, self.steps), self.save]

    def run(self, site: Site) -> list[Any]:
        return [part.run(site) for part in self._parts]

    def judge(self, world: World, site: Site, found: list[Any]) -> Iterator[World]:
        worlds = [world]
        for part, answers in zip(self._parts, found, strict=True):
            after: list[World] = []
            for each in worlds:
                after += [new for new in part.judge(each, site, answers) if new not in after]
            worlds = after
        yield from worlds


def explained(operation: Operation, worlds: list[World], site: Site, found: list[Any]) -> str:
    """Returns how a restored value differs from what it should have been."""
    if not isinstance(operation, Restore) or isinstance(found[0], Raised):
        return ""
    numbers = {saved.number for world in worlds for saved in world.all_steps.values()}
    lines = [f"save {number}: {_difference(found[0], number, site, 0)}" for number in numbers]
    return "; ".join(lines)


# --- Deleting, closing


@dataclass(frozen=True)
class Delete:
    """Deletes a step."""

    step: int

    def run(self, site: Site) -> list[Any]:
        return site.each(lambda rank, manager: manager.delete(self.step))

    def judge(self, world: World, site: Site, found: list[Any]) -> Iterator[World]:
        answer = alike(found)
        for ended in world.ended():
            for before in ended.seen():
                if self.step not in before.all_steps:
                    if answer == "StepNotFound":
                        yield before
                elif answer == "StepNotFound" and self.step in before.unlisted:
                    yield before
                elif answer is None:
                    yield from before.without(self.step)


@dataclass(frozen=True)
class Reopen:
    """Closes the managers, looks at what they have left, and opens the root again."""

    def run(self, site: Site) -> list[Any]:
        site.close()
        left = [
            site.names(),
            site.listed(),
            site.own_names(),
            site.lost_foreign_files(),
            site.strange_neighbours(),
        ]
        left.append(site.unnamed_files() if site.is_whole else [])
        site.open()
        return left

    def judge(self, world: World, site: Site, found: list[Any]) -> Iterator[World]:
        names, listed, own_names, lost, strange_neighbours, unnamed = found
        allowed = {"steps.json"} if site.settings.step_format else set()
        if not site.settings.out_of_order:
            allowed.add("left")
        if site.settings.local is not None:
            allowed.add("openings")
        if site.settings.store == "memory":
            allowed.add("saved.json")  # the key that those who wait for steps poll
        if own_names - allowed and not site.has_failed:
            raise Broken(f"{FOLDER} keeps {own_names}")
        if lost:
            raise Broken(f"files of others are gone or changed: {lost}")
        if strange_neighbours:
            raise Broken(f"beside the root there is {strange_neighbours}")
        if unnamed:
            raise Broken(f"files and records do not fit: {unnamed}")
        for closed in world.ended():
            there = {site.step_name(step) for step in closed.steps}
            strange = names - there - site.foreign_names()
            # What a copied record named stays where its step is overwritten, until an opening.
            may_stay = site.has_failed or not site.is_whole
            if listed == sorted(closed.steps) and (may_stay or not strange):
                yield closed.opened(site.clock.true_s)


@dataclass(frozen=True)
class Keep:
    """Opens the root again with another keep policy."""

    policy: str

    def run(self, site: Site) -> list[Any]:
        site.settings = replace(site.settings, keep_policy=self.policy)
        return Reopen().run(site)

    def judge(self, world: World, site: Site, found: list[Any]) -> Iterator[World]:
        for opened in Reopen().judge(world, site, found):
            settings = replace(opened.settings, keep_policy=self.policy)
            yield replace(opened, settings=settings)


# --- Time


@dataclass(frozen=True)
class Pass:
    """Lets time go on."""

    seconds: float

    def run(self, site: Site) -> list[Any]:
        site.each(lambda rank, manager: manager.wait_until_finished())
        site.clock.true_s += self.seconds
        return []

    def judge(self, world: World, site: Site, found: list[Any]) -> Iterator[World]:
        yield from world.ended()


@dataclass(frozen=True)
class SetClock:
    """Sets the clock of all processes ahead or back."""

    seconds: float

    def run(self, site: Site) -> list[Any]:
        site.settle()
        site.clock.skew_s += self.seconds
        site.clock.times_set += 1
        return []

    def judge(self, world: World, site: Site, found: list[Any]) -> Iterator[World]:
        yield from world.ended()
