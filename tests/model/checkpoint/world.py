"""What a root may be, as a plain dictionary of steps with the rules of docs/guarantees.md.

A `World` is one thing that may be true. After an answer that leaves several open, a life goes on
with all of them, and each later answer ends those that it contradicts. No world left: the face has
broken a rule.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations

from .policies import SAVE, Saved, may_stay, must_stay
from .settings import Settings

NOTHING = -1  # what an opening goes on from, before it restores


@dataclass(frozen=True)
class Begun:
    """A save that may still be under way, durable or local."""

    step: int
    saved: Saved
    is_local: bool


@dataclass(frozen=True)
class World:
    """The steps of a root, and what its manager knows.

    `local` are the steps that the hosts may have, oldest save first; those in `sure` have to be
    there. `base` is the step that a new branch goes on from, None while one is open; what the
    hosts have above it is dead from the next save on. `passed` are steps that a fallback has
    passed over, `unlisted` those whose commit only the store knows of. `replaced` are local steps
    that a durable one has replaced: their files stay until the next local save, so that another
    manager finds them. `last_step` and `last_s` are what a save policy knows of the newest save.
    """

    settings: Settings
    steps: Mapping[int, Saved] = field(default_factory=dict)
    local: Mapping[int, Saved] = field(default_factory=dict)
    sure: frozenset[int] = frozenset()
    begun: Begun | None = None
    base: int | None = NOTHING
    has_restored: bool = False
    passed: frozenset[int] = frozenset()
    unlisted: frozenset[int] = frozenset()
    replaced: Mapping[int, Saved] = field(default_factory=dict)
    last_step: int | None = None
    last_s: float = 0.0

    @property
    def all_steps(self) -> dict[int, Saved]:
        """The steps of store and hosts; of two with one number the durable one."""
        return {**self.local, **self.steps}

    # --- Opening

    def opened(self, now_s: float) -> World:
        """Returns the world with a new manager, which knows what the store lists."""
        newest = max(self.steps, default=None)
        return replace(
            self,
            base=NOTHING,
            has_restored=False,
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
        return self.settings.local is not None and step not in self.steps

    def refuses(self, step: int, *, overwrite: bool) -> bool:
        """Says whether a save would replace what it may not."""
        return step in self.steps and not overwrite and step not in self.passed

    def started(self, step: int, now_s: float) -> World:
        """Returns the world whose save policy knows of a durable save."""
        return replace(self, last_step=step, last_s=now_s)

    def branched(self) -> World:
        """Returns the world once something is saved: what the hosts have of branches that were
        left is dead.
        """
        if self.base is None:
            return self
        local = {step: saved for step, saved in self.local.items() if step <= self.base}
        sure = self.sure & set(local)
        return replace(self, local=local, sure=sure, base=None, has_restored=False)

    def committed(self, begun: Begun, *, keeps_all: bool = False) -> Iterator[World]:
        """Yields what is there once a save is: the step, and what the keep policy lets stay.

        With `keeps_all` nothing need be deleted: it is tried again after the next save.
        """
        before = replace(self.branched(), begun=None)
        if begun.is_local:
            yield before._committed_locally(begun)
            return
        after = {**before.steps, begun.step: begun.saved}
        policy = self.settings.keep_policy
        must = must_stay(policy, after) | {begun.step}
        may = set(after) if keeps_all else may_stay(policy, after)
        free = sorted(may - must)
        local = {step: saved for step, saved in before.local.items() if step != begun.step}
        replaced = {step: saved for step, saved in before.local.items() if step == begun.step}
        for count in range(len(free) + 1):
            for stay in combinations(free, count):
                yield replace(
                    before,
                    steps={each: after[each] for each in sorted(must.union(stay))},
                    local=local,
                    sure=before.sure & set(local),
                    passed=self.passed - {begun.step},
                    unlisted=frozenset(),
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

    def restored(self, step: int, passed: set[int]) -> World:
        """Returns the world that goes on from a step, of several from the lowest."""
        base = min(step, self.base or 0) if self.has_restored else step
        return replace(self, base=base, has_restored=True, passed=self.passed | passed)

    def without(self, step: int) -> Iterator[World]:
        """Yields the world without a step. The newest takes what the hosts have from there on."""
        steps = {each: saved for each, saved in self.steps.items() if each != step}
        is_newest = step == max(self.all_steps)
        local = {each: saved for each, saved in self.local.items() if each != step}
        if is_newest:
            local = {each: saved for each, saved in local.items() if each < step}
        sure = self.sure & set(local)
        if step not in self.steps or step in self.local:
            # A branch from there on takes the newer ones along.
            sure &= set(range(step))
        yield replace(self, steps=steps, local=local, sure=sure)

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
        if self.passed:
            text += f", passed over {sorted(self.passed)}"
        return text


def _shown(steps: Mapping[int, Saved]) -> str:
    shown = [f"{step}: save {saved.number}{_harms(saved)}" for step, saved in steps.items()]
    return f"{{{', '.join(shown)}}}"


def _harms(saved: Saved) -> str:
    said = f" (harmed: {', '.join(sorted(saved.harmed))})" if saved.harmed else ""
    return said + (f" (perhaps: {', '.join(sorted(saved.doubtful))})" if saved.doubtful else "")
