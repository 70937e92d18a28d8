"""What a root may be, as a plain dictionary of steps with the rules of docs/guarantees.md.

A `World` is one thing that may be true. After an answer that leaves several open, a life goes on
with all of them, and each later answer ends those that it contradicts. No world left: the face has
broken a rule.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations

from .policies import SAVE, Saved, may_stay, must_stay, unreadable
from .settings import Settings

NOTHING = -1  # below every step


@dataclass(frozen=True)
class Place:
    """Where a save stands. It goes on from `base`, and as a branch leaves what is above that.
    `gone_back_to` is what was restored by then.
    """

    base: int
    is_branch: bool = False
    gone_back_to: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Begun:
    """A save that may still be under way, durable or local."""

    step: int
    saved: Saved
    is_local: bool
    place: Place


@dataclass(frozen=True)
class World:
    """The steps of a root, and what its manager knows.

    `local` are the steps that the hosts may have, oldest save first; those in `sure` have to be
    there. What the hosts have above the base of a stretch of saves is dead; with `is_open` one goes
    on, else the next save begins one. `passed` are steps that a fallback has passed over,
    `unlisted` those whose commit only the store may know of, until their numbers are saved again.
    `replaced` are local steps that a durable one has replaced: their files stay until the next
    local save, so that another manager finds them. `last_step` and `last_s` are what a save policy
    knows of the newest save.

    `left` are the steps of the store that were left behind, of which the manager does not know
    those in `unheard`. `restored` is what it may go on from, `own` what it has saved as a branch
    since the last restore, `at` the step that it has just saved or restored. `bases` has by each
    step that was ever left the lowest base of a branch that left it.
    """

    settings: Settings
    steps: Mapping[int, Saved] = field(default_factory=dict)
    local: Mapping[int, Saved] = field(default_factory=dict)
    sure: frozenset[int] = frozenset()
    begun: Begun | None = None
    is_open: bool = False
    left: frozenset[int] = frozenset()
    unheard: frozenset[int] = frozenset()
    restored: frozenset[int] = frozenset()
    own: frozenset[int] = frozenset()
    at: int | None = None
    bases: Mapping[int, int] = field(default_factory=dict)
    passed: frozenset[int] = frozenset()
    unlisted: frozenset[int] = frozenset()
    replaced: Mapping[int, Saved] = field(default_factory=dict)
    last_step: int | None = None
    last_s: float = 0.0

    @property
    def all_steps(self) -> dict[int, Saved]:
        """The steps of store and hosts; of two with one number the durable one, unless that was
        left.
        """
        return {**self.steps, **self.local, **self.line}

    @property
    def left_now(self) -> set[int]:
        """The steps that are left behind: a mark holds for what says whose it is."""
        return {step for step in self.left if step in self.steps and not self.steps[step].nameless}

    @property
    def line(self) -> dict[int, Saved]:
        """The steps of the store that were not left behind."""
        left = self.left_now
        return {step: saved for step, saved in self.steps.items() if step not in left}

    @property
    def newest(self) -> int | None:
        """The step that is the newest for everybody."""
        return max([*self.line, *self.local], default=None)

    def is_local(self, step: int) -> bool:
        """Says whether a step comes from the hosts."""
        return step in self.local and step not in self.line

    # --- Opening

    def opened(self, now_s: float) -> World:
        """Returns the world with a new manager, which knows what the store lists."""
        newest = max(self.line, default=None)
        return replace(
            self,
            is_open=False,
            unheard=frozenset(),
            restored=frozenset(),
            own=frozenset(),
            at=None,
            passed=frozenset(),
            unlisted=frozenset(),
            local={**self.replaced, **self.local},
            replaced={},
            last_step=newest,
            last_s=now_s,
        )

    # --- Saving

    def wants(self, step: int, now_s: float) -> bool:
        """Says whether the save policy wants a step in the store."""
        return SAVE[self.settings.save_policy][1](step, self.last_step, now_s - self.last_s)

    def wants_locally(self, step: int) -> bool:
        """Says whether the hosts are to have a step that the store is not to have."""
        is_there = step in self.line and not self._may_go_back(step)
        return self.settings.local is not None and not is_there

    def _may_go_back(self, step: int) -> bool:
        return not self.settings.out_of_order and any(each < step for each in self.restored)

    def places(self, step: int, *, is_local: bool, overwrite: bool) -> Iterator[Place | str]:
        """Yields where a save may stand, or the error that refuses it: of the steps that only the
        store knows of, nothing says whether the manager does.
        """
        told = [self]
        if self.unheard:
            told.append(replace(self, left=self.left - self.unheard, unheard=frozenset()))
        if self.unlisted:
            steps = {each: saved for each, saved in self.steps.items() if each not in self.unlisted}
            told.append(replace(self, steps=steps, unlisted=frozenset()))
        nameless = {each for each, saved in self.steps.items() if saved.nameless}
        if nameless:
            told.append(
                replace(
                    self,
                    left=self.left - nameless,
                    steps={
                        each: replace(saved, nameless=False) for each, saved in self.steps.items()
                    },
                )
            )
        found = [each._place(step, is_local=is_local, overwrite=overwrite) for each in told]
        yield from dict.fromkeys(found)

    def _place(self, step: int, *, is_local: bool, overwrite: bool) -> Place | str:
        newest = max([*self.line, *(each for each in self.local if each != step)], default=NOTHING)
        lower = [each for each in self.restored if each < step]
        is_there = step in self.line and not is_local
        replaces = overwrite or (step in self.passed and not is_local)
        if step > newest:
            return Place(newest)
        if lower and not overwrite and not self.settings.out_of_order:
            return Place(max(lower), is_branch=True, gone_back_to=self.restored)
        if replaces:
            return Place(newest)
        if is_there:
            return "StepExists"
        return Place(newest) if self.settings.out_of_order else "StepOutOfOrder"

    def begins(self, step: int, place: Place) -> World:
        """Returns the world in which a save has begun: above the newest step what was restored for
        a look is forgotten.
        """
        if place.is_branch or step <= place.base:
            return replace(self, at=step)
        return replace(self, restored=frozenset(), at=step)

    def started(self, step: int, now_s: float) -> World:
        """Returns the world whose save policy knows of a durable save."""
        return replace(self, last_step=step, last_s=now_s)

    def branched(self, step: int, place: Place) -> World:
        """Returns the world once a save has begun its branch or stretch: what is above the base is
        left behind in the store, and dead on the hosts.
        """
        own = self.own
        before = self
        if place.is_branch:
            leaves = {
                each
                for each, saved in self.steps.items()
                if each > place.base and each not in own and not saved.nameless
            }
            fresh = leaves - self.left
            bases = dict(self.bases)
            for each in fresh:
                bases[each] = min(place.base, bases.get(each, place.base))
            before = replace(
                self,
                left=self.left | leaves,
                unheard=self.unheard | fresh,
                own=own | {step},
                bases=bases,
            )
        elif self.is_open:
            return self
        local = {each: saved for each, saved in self.local.items() if each <= place.base}
        return replace(before, local=local, sure=self.sure & set(local), is_open=True)

    def committed(self, begun: Begun, *, keeps_all: bool = False) -> Iterator[World]:
        """Yields what is there once a save is: the step, and what the keep policy lets stay.

        With `keeps_all` nothing need be deleted: it is tried again after the next save.
        """
        place = begun.place
        before = replace(self.branched(begun.step, place), begun=None, unheard=frozenset())
        if place.is_branch:
            before = replace(before, restored=before.restored - place.gone_back_to)
        if begun.is_local:
            yield before._committed_locally(begun)
            return
        after = {**before.steps, begun.step: begun.saved}
        before = replace(before, left=before.left - {begun.step})
        left = replace(before, steps=after).left_now
        # The keep policy does not judge what the manager does not know.
        unlisted = self.unlisted - {begun.step}
        line = {
            each: saved
            for each, saved in after.items()
            if each not in left and each not in unlisted
        }
        policy = self.settings.keep_policy
        waiting = {each for each in left if each > max(line)}
        overtaken = left - waiting
        must = must_stay(policy, line) | {begun.step} | waiting | unlisted
        may = set(after) if keeps_all else may_stay(policy, line) | waiting
        if policy == "all":
            must |= overtaken
        # A damaged record says nothing that a keep policy could let go.
        may |= overtaken & unreadable(after)
        free = sorted(may - must)
        local = {step: saved for step, saved in before.local.items() if step != begun.step}
        replaced = {step: saved for step, saved in before.local.items() if step == begun.step}
        for count in range(len(free) + 1):
            for stay in combinations(free, count):
                there = must.union(stay)
                yield replace(
                    before,
                    steps={each: after[each] for each in sorted(there)},
                    left=before.left & there,
                    local=local,
                    sure=before.sure & set(local),
                    passed=self.passed - {begun.step},
                    unlisted=unlisted,
                    replaced={**before.replaced, **replaced},
                )

    def _committed_locally(self, begun: Begun) -> World:
        others = {step: saved for step, saved in self.local.items() if step != begun.step}
        local = {**others, begun.step: begun.saved}
        return replace(self, local=local, sure=frozenset({begun.step}), replaced={})

    def ended(self) -> Iterator[World]:
        """Yields the worlds in which no save is under way any more."""
        if self.begun is None:
            yield self
        else:
            yield from self.committed(self.begun)

    def meanwhile(self) -> Iterator[World]:
        """Yields what may be seen while a save may be under way: before its commit, after it,
        and between its deletions, which come oldest first.
        """
        yield self
        if self.begun is None:
            return
        if self.begun.place.is_branch:
            yield self.branched(self.begun.step, self.begun.place)
        for end in self.committed(self.begun):
            yield end
            going = sorted(step for step in self.steps if step not in end.steps)
            for left in range(len(going) + 1):
                still = {each: self.steps[each] for each in going[len(going) - left :]}
                # The save is under way until its thread says that it has ended.
                ending = replace(end, steps={**end.steps, **still}, begun=self.begun)
                yield ending
                if self.begun.step not in self.steps:
                    yield ending._without_commit()

    def _without_commit(self) -> World:
        """Returns what a listing may see that was at the new step before its commit, and at others
        after they were deleted.
        """
        assert self.begun is not None
        unseen = {step: saved for step, saved in self.steps.items() if step != self.begun.step}
        return replace(self, steps=unseen)

    def seen(self) -> Iterator[World]:
        """Yields what may be seen: `meanwhile`, with each choice of the local steps that may be
        there, at most as many as stay.
        """
        for now in self.meanwhile():
            perhaps = [step for step in now.local if step not in now.sure]
            for count in range(len(perhaps) + 1):
                for there in combinations(perhaps, count):
                    chosen = now.sure.union(there)
                    # One more is there while its successor is written.
                    if len(chosen) > (self.settings.local or 0) + (now.begun is not None):
                        continue
                    local = {step: saved for step, saved in now.local.items() if step in chosen}
                    yield replace(now, local=local, sure=chosen)

    # --- Restoring and deleting

    def goes_on_from(self, step: int, passed: set[int]) -> World:
        """Returns the world that may go on from a step."""
        return replace(
            self,
            is_open=False,
            restored=self.restored | {step},
            own=frozenset(),
            at=step,
            passed=self.passed | passed,
        )

    def without(self, step: int) -> Iterator[World]:
        """Yields the world without a step. The newest takes what the hosts have from there on."""
        steps = {each: saved for each, saved in self.steps.items() if each != step}
        is_newest = step == self.newest
        local = {each: saved for each, saved in self.local.items() if each != step}
        if is_newest:
            local = {each: saved for each, saved in local.items() if each < step}
        sure = self.sure & set(local)
        if step not in self.line or step in self.local:
            # A branch from there on takes the newer ones along.
            sure &= set(range(step))
        yield replace(self, steps=steps, left=self.left - {step}, local=local, sure=sure)

    def without_local(self, step: int) -> World:
        """Returns the world in which the hosts have not a step any more."""
        local = {each: saved for each, saved in self.local.items() if each != step}
        return replace(self, local=local, sure=self.sure - {step})

    def __str__(self) -> str:
        text = _shown(self.steps)
        if self.settings.local is not None:
            text += f", on the hosts {_shown(self.local)}, surely {sorted(self.sure)}"
        if self.begun is not None:
            text += f", begun {self.begun.step}"
        if self.left:
            text += f", left {sorted(self.left)}"
        if self.restored:
            text += f", restored {sorted(self.restored)}"
        if self.passed:
            text += f", passed over {sorted(self.passed)}"
        return text


def _shown(steps: Mapping[int, Saved]) -> str:
    shown = [f"{step}: save {saved.number}{_harms(saved)}" for step, saved in steps.items()]
    return f"{{{', '.join(shown)}}}"


def _harms(saved: Saved) -> str:
    said = f" (harmed: {', '.join(sorted(saved.harmed))})" if saved.harmed else ""
    return said + (f" (perhaps: {', '.join(sorted(saved.doubtful))})" if saved.doubtful else "")
