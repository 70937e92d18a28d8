"""Opens a root together: the primary takes the claim, fences the dead and lists the steps; one
message brings it to all others.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from holdfast.coordination import HoldfastError
from holdfast.multihost import Group

from ..agreement.exchange import ask_primary
from ..agreement.host_sharing import find_sharers, launched_sharers
from ..agreement.messages import parsed
from ..errors import CheckpointError, error_text
from ..format.step_folders import (
    PLAIN_NAMES,
    STEP_NAMES,
    RootListing,
    StepNames,
    look_at_root,
    parse_step_format,
    read_step_names,
    step_folders,
)
from ..memory.budget import ALONE, MemoryBudget, Sharers
from ..options import Options
from ..storage.base import NameTaken, Storage
from ..storage.retries import until
from ..storage.steady_time import SteadyClock
from .claims import FOLDER, FULL_ERRORS, Claims, Writer, launched_writer
from .garbage import fence_others, sweep_files, sweep_step
from .left_behind import Identify, Mark, identify_own, left_among, read_marks

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class OtherLayouts:
    """The steps of a root in other people's layouts, which this wing does not know.

    `find` returns their folders' names, given what a look at the root has shown and how it calls
    its steps. `identify` knows the saves of theirs, too.
    """

    find: Callable[[Storage, RootListing, StepNames], Mapping[int, str]] = lambda *_: {}
    identify: Identify = identify_own


@dataclass(frozen=True)
class Listing:
    """What a look at a root shows: its steps, ascending, and other people's with their folders'
    names.

    `left_behind` are those of both that were. `step_names` is how the root calls its steps.
    `has_claim` is False for a reader, and where the disk was too full to make the claim: then
    nothing may be saved, but steps be deleted. Who looked alone has `marks`, which say what was
    left, `files`, the names of all files where they were listed, and of an opening `others`, the
    writers that have the root open too and are not known to be dead.
    """

    steps: tuple[int, ...] = ()
    foreign: Mapping[int, str] = field(default_factory=dict)
    left_behind: tuple[int, ...] = ()
    has_claim: bool = True
    step_names: StepNames = PLAIN_NAMES
    marks: Sequence[Mark] = ()
    files: Collection[str] | None = None
    others: Sequence[Writer] = ()

    @property
    def folders(self) -> dict[int, str]:
        """The names of the folders of all steps."""
        own = {step: self.step_names.name_of(step) for step in self.steps}
        return {**self.foreign, **own}

    def told(self) -> Self:
        """Returns what all processes hear of it: the rest may be much for a message."""
        return replace(self, marks=(), files=None, others=())


@dataclass(frozen=True)
class Opening:
    """What the primary tells all of an opening; whether all tell each other then where they are."""

    writer: Writer
    listing: Listing
    asks_hosts: bool


@dataclass(frozen=True, kw_only=True)
class OpenRoot:
    """A root as one process of a group has it open: its store, the writer that it has there, what
    was there, and with whom it shares its memory.
    """

    storage: Storage
    group: Group
    options: Options
    claims: Claims
    writer: Writer
    listing: Listing = Listing()
    sharers: Sharers = ALONE
    clock: SteadyClock = field(default_factory=SteadyClock)

    @property
    def memory(self) -> MemoryBudget:
        """What this process may take of its host's memory."""
        return MemoryBudget(self.sharers, self.options.host_memory_bytes)

    @property
    def where(self) -> str:
        """The root, as messages show it."""
        return self.storage.root

    @property
    def messages(self) -> str:
        """What the names of this opening's messages begin with: no other opening has the same."""
        return f"checkpoint/{self.writer.id}"

    @property
    def is_writing_primary(self) -> bool:
        """Whether this process is the one that commits and deletes."""
        return self.group.index == 0 and not self.options.read_only

    def give_up(self, remove: Callable[[Storage, Claims], None] = lambda *_: None) -> None:
        """Gives the claim up, at the primary, and has `remove` take away what goes with it: that
        takes the time of a save at most. What cannot be removed is left to the next writer.
        """
        if not self.is_writing_primary:
            return
        end_s = time.monotonic() + self.options.save_timeout_s
        claims = self.claims.until(end_s)
        try:
            claims.fence(self.writer.id)
            remove(until(self.storage, end_s), claims)
        except OSError as error:
            _log.warning(
                "the claim on %s could not be removed, the next writer does it: %s",
                self.where,
                error,
            )


def open_root(
    storage: Storage,
    claims: Claims,
    group: Group,
    options: Options,
    *,
    layouts: OtherLayouts = OtherLayouts(),
    check: Callable[[], None] = lambda: None,
    needs_claim: bool = True,
) -> OpenRoot:
    """Opens a root for a group; every process calls it. Raises, on every process, what the primary
    ran into.

    `check` raises, at the primary, what is wrong with the root, before anything is written there.
    Without `needs_claim` a root on a full disk is opened all the same, without a claim: see
    `claim_root`.
    """
    name = f"checkpoint/open/{hashlib.sha256(os.fsencode(storage.root)).hexdigest()[:16]}"
    root = OpenRoot(
        storage=storage, group=group, options=options, claims=claims, writer=launched_writer()
    )
    listings: list[Listing] = []  # at the primary

    def open_it() -> Opening:
        check()
        listings.append(_open(root, layouts, needs_claim=needs_claim))
        return Opening(root.writer, listings[0].told(), launched_sharers() is None)

    opening: Opening = parsed(Opening, _ask(root, name, open_it))
    listing = listings[0] if listings else opening.listing
    root = replace(root, writer=opening.writer, listing=listing)
    has_claim = group.index == 0 and listing.has_claim
    with _or_fenced(root) if has_claim else contextlib.nullcontext():
        sharers = find_sharers(
            group, f"{name}/hosts", options.save_timeout_s, asks=opening.asks_hosts
        )
    return replace(root, sharers=sharers)


def claim_root(root: OpenRoot) -> None:
    """Takes the claim that the disk had no room for when the root was opened; every process calls
    it, before its first save. How the steps are called is settled then.

    Raises, on every process, what the primary ran into.
    """

    def claim() -> None:
        root.claims.take(root.writer)
        _settle_step_names(root, _step_names(root))

    _ask(root, f"{root.messages}/claim", claim)


def list_root(root: OpenRoot, layouts: OtherLayouts) -> Listing:
    """Returns what the primary sees in a root by now, on every process; every process calls it."""

    name = f"{root.messages}/reload"
    told = _ask(root, name, lambda: look_at_steps(root.storage, layouts).told())
    listing: Listing = parsed(Listing, told)
    return listing


def look_at_steps(
    storage: Storage,
    layouts: OtherLayouts = OtherLayouts(),
    names: StepNames | None = None,
) -> Listing:
    """Returns the steps of a root, by a look at it; `names` are read where they are not known.
    Raises as `read_marks` does.
    """
    names = names or read_step_names(storage)
    listing = look_at_root(storage, names)
    marks = read_marks(storage, listing.files)
    own = {step: names.name_of(step) for step in listing.steps}
    found = layouts.find(storage, listing, names).items()
    foreign = {step: name for step, name in found if step not in own}
    left = left_among(storage, foreign | own, marks, layouts.identify)
    return Listing(
        tuple(own),
        foreign,
        tuple(sorted(left)),
        step_names=names,
        marks=marks,
        files=listing.files,
    )


def _ask(root: OpenRoot, name: str, work: Callable[[], Any]) -> Any:
    """Does work at the primary; returns its value, or raises its error as ours, on all."""

    def answer() -> Any:
        try:
            return work()
        except HoldfastError:
            raise
        except Exception as error:
            raise CheckpointError(f"cannot open {root.where}: {error_text(error)}") from error

    return ask_primary(root.group, name, answer, root.options.save_timeout_s)


def _open(root: OpenRoot, layouts: OtherLayouts, *, needs_claim: bool) -> Listing:
    options = root.options
    # Who writes and names no format reads it once, when others see the claim.
    reads_now = options.read_only or options.step_format is not None
    names = _step_names(root) if reads_now else None
    others = None if options.read_only else _claim(root, needs_claim=needs_claim)
    if others is None:
        return replace(look_at_steps(root.storage, layouts, names), has_claim=False)
    with _or_fenced(root):
        names = _settle_step_names(root, names)
        return replace(look_at_steps(root.storage, layouts, names), others=others)


@contextlib.contextmanager
def _or_fenced(root: OpenRoot) -> Iterator[None]:
    """Takes the claim back where the block fails."""
    try:
        yield
    except BaseException:
        root.claims.fence(root.writer.id)
        raise


def _step_names(root: OpenRoot) -> StepNames:
    """Returns how the root calls its steps, or is to call them from now on. Raises CheckpointError
    where it calls them otherwise.
    """
    options = root.options
    names = read_step_names(root.storage)
    wanted = names if options.step_format is None else parse_step_format(options.step_format)
    if wanted != names and (
        options.read_only or names != PLAIN_NAMES or step_folders(root.storage, names)
    ):
        raise _called_otherwise(root, names, wanted)
    return wanted


def _called_otherwise(root: OpenRoot, names: StepNames, wanted: StepNames) -> CheckpointError:
    return CheckpointError(
        f"{root.where} calls its step 7 {names.name_of(7)}, and step_format would call it"
        f" {wanted.name_of(7)}: a root has one format for good. Leave step_format out, or choose"
        " another folder",
        path=root.where,
    )


def _settle_step_names(root: OpenRoot, names: StepNames | None) -> StepNames:
    """Returns how the root calls its steps, now that others see our claim; writes those that are
    wanted, once, where nothing says so yet.

    Of two writers that begin a root the first decides; one that is there already calls its steps by
    plain numbers.
    """
    storage = root.storage
    found = read_step_names(storage)
    if names is None or found == names:
        return found
    if others := root.claims.others(root.writer.id):
        raise CheckpointError(
            f"{root.where} gets no step_format while writer {others[0][0].id} has it open, which"
            " calls its steps 7: close that one first",
            path=root.where,
        )
    with contextlib.suppress(NameTaken, FileExistsError):
        storage.commit(STEP_NAMES, names.to_bytes(), root.writer.claim)
    found = read_step_names(storage)
    if found != names:
        raise _called_otherwise(root, found, names)
    return names


def _claim(root: OpenRoot, *, needs_claim: bool) -> list[Writer] | None:
    """Takes the claim and fences the dead; returns who else writes there, None where it was not
    taken. Where the disk is full, what the dead have left is swept first.
    """
    if _take(root) is None:
        with _or_fenced(root):
            return fence_others(root.claims, root.writer).others
    others = fence_others(root.claims, root.writer).others
    sweep_files(root.storage, root.claims)
    full = _take(root)
    if full is None:
        return others
    if needs_claim:
        raise full
    _log.warning(
        "opened without a claim: steps can be restored and deleted, none saved until there is"
        " room: %s",
        full,
    )
    return None


def _take(root: OpenRoot) -> CheckpointError | None:
    """Takes the claim; returns the error of a disk that is too full for it."""
    try:
        root.claims.take(root.writer)
    except CheckpointError as error:
        cause = error.__cause__
        if isinstance(cause, OSError) and cause.errno in FULL_ERRORS:
            return error
        raise
    return None


def give_up_claim(root: OpenRoot, step_dir: str = "", *, is_unclear: bool) -> None:
    """Gives up the claim of a single save, as `give_up`, and the folder of claims where it is
    empty; sweeps what single saves have left in its folder, unless it `is_unclear` how this one
    ended.
    """

    def remove(storage: Storage, claims: Claims) -> None:
        if not is_unclear:
            # Without its claim: of several saves at once the last one out finds what all have left,
            # its own packs too, where another has replaced its record.
            sweep_step(storage, claims, step_dir)
        storage.delete([f"{FOLDER}/"])

    root.give_up(remove)
