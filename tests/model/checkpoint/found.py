"""Lives in which the face once broke a rule, each as short as it goes."""

from __future__ import annotations

from .damage import FORGERIES, CopyStep, Forge, HarmHost
from .faulty import ENOUGH_FILES, Faulty
from .lives import YEAR_S, Life
from .operations import (
    CALLED_BACK,
    Cancel,
    Delete,
    GoBack,
    Keep,
    List,
    Look,
    Reload,
    Reopen,
    Restore,
    Save,
    SaveAndCall,
    SaveAndChange,
    SetClock,
)
from .refused import HOWS, SaveRefused, SaveThroughLink
from .settings import Settings
from .tools import Copy, CopyOver, Rival, SaveTwice, Watch

_THREE = (Save(1, 1), Save(3, 3), Save(5, 5))
_GONE_BACK = (*_THREE, GoBack((3, 1), Save(2, 7)))
# What a job that goes back broke, for itself and for others.
_GOING_BACK: dict[str, Life] = {
    "a job that goes back deletes what it saves": Life(
        Settings(keep_policy="last three"),
        (*_GONE_BACK, List(), Save(4, 8), List(), Reopen(), Restore(), Save(6, 9), List()),
    ),
    "a number that was left is saved again": Life(
        Settings(), (*_GONE_BACK, Save(5, 8), Restore(), List())
    ),
    "a base below what was restored besides": Life(
        Settings(), (*_THREE, GoBack((1, 3), Save(4, 7)), List(), Restore(3), Save(5, 8), Reopen())
    ),
    "a look at an older step": Life(
        Settings(), (*_THREE, GoBack((1,), Save(6, 7)), List(), Save(4, 8), List())
    ),
    "a branch that is gone on from": Life(
        Settings(), (*_GONE_BACK, Save(2, 8), Save(4, 8), Save(3, 9), List())
    ),
    "a run from scratch": Life(Settings(), (*_THREE, Reopen(), Save(2, 7), List())),
    "an evaluator of a job that goes back": Life(
        Settings(), (*_GONE_BACK, Watch(5), Watch(3), Watch(2), Watch(None), Save(3, 8), Watch(2))
    ),
    "a root of one that went back, copied": Life(
        Settings(), (*_GONE_BACK, Copy(by_shell=True), Copy(by_shell=False))
    ),
    "a rival that goes back": Life(
        Settings(), (*_THREE, Rival(2, 7, back=1), List(), Restore(), Save(5, 8), List())
    ),
    "a job that goes back on its hosts": Life(
        Settings(save_policy="named", local=2),
        (Save(1, 1), Save(5, 5), Save(6, 6), GoBack((1,), Save(3, 7)), List(), Reopen(), Restore()),
    ),
    **{
        f"two that go back, {store}": Life(
            Settings(store=store, processes=2, keep_policy="last three"),
            (*_GONE_BACK, List(), Save(3, 8), List(), Reload(), List(), Restore(5)),
        )
        for store in ("disk", "memory")
    },
}

FOUND: dict[str, Life] = {
    **_GOING_BACK,
    "an incremental item without a chunk": Life(
        Settings(items="values", incremental="yes"), (Save(1, 1),)
    ),
    "an incremental process without a chunk": Life(
        Settings(processes=2, incremental="yes"), (Save(1, 1),)
    ),
    "a copied step is another": Life(
        Settings(step_format="step_{:d}"), (Save(4, 1), CopyStep(4, 5), Restore(5))
    ),
    "a damaged copy, read once, two items": Life(
        Settings(
            processes=2, items="two", read_once=True, per_process=True, save_policy="named", local=1
        ),
        (Save(3, 1), HarmHost(0, 0), Restore()),
    ),
    "a damaged copy, read once, two items, the other host": Life(
        Settings(
            processes=2, items="two", read_once=True, per_process=True, save_policy="named", local=1
        ),
        (Save(3, 1), HarmHost(1, 0), Restore()),
    ),
    **{
        f"{error} of {verb}, call {place}, is no damage": Life(
            Settings(store="faulty", fallback=True),
            (Save(1, 1), Save(2, 2), Faulty(Restore(), verb, error, place), Save(2, 3)),
        )
        for verb, place in (("fetch", 1), ("read", 2), ("read", 3), ("list", 0))
        for error in ("EMFILE", "ENOENT", "memory")
    },
    "no descriptors are no damage": Life(
        Settings(fallback=True),
        (Save(1, 1), Save(2, 2), Faulty(Restore(), "open", "EMFILE", 1), Save(2, 3)),
    ),
    **{
        f"with {count} descriptors a local step is not passed over": Life(
            Settings(save_policy="never", local=1),
            (Save(1, 1), Faulty(Restore(), "open", "EMFILE", count), List(), Restore()),
        )
        for count in range(4)
    },
    "no descriptors are no step": Life(
        Settings(), (Save(3, 1), Faulty(Save(2, 2), "open", "EMFILE", 0), List())
    ),
    "no descriptor to see that a step is there": Life(
        Settings(), (Save(5, 1), Faulty(Save(5, 2), "open", "EMFILE", 0), List())
    ),
    "a root without a step that cannot be listed": Life(
        Settings(store="faulty", save_policy="named", local=2),
        (Faulty(Restore(), "list", "ENOENT", 3, times=2),),
    ),
    "an empty folder": Life(Settings(items="empty folder"), (Save(1, 1), Restore())),
    **{
        f"a clock that goes {seconds / YEAR_S:+g} years": Life(
            Settings(keep_policy="last hours"),
            (
                *(Save(1, 1), Save(2, 2)),
                *(SetClock(seconds), Reopen(), Save(3, 3), Save(4, 4)),
                *(SetClock(-seconds), Reopen(), Save(5, 5), Save(6, 6), List()),
            ),
        )
        for seconds in (YEAR_S, -YEAR_S)
    },
    "a copied root without its names": Life(
        Settings(step_format="step_{:d}"), (Save(1, 1), Copy(by_shell=False))
    ),
    "a branch that was left": Life(
        Settings(save_policy="never", local=3),
        (Save(1, 1), Save(2, 2), Save(3, 3), Restore(1), Save(2, 4), List()),
    ),
    "a delete that fails on one process": Life(
        Settings(store="faulty", processes=2),
        (Save(1, 1), Save(2, 2), Faulty(Delete(1), "delete", "EIO", 0)),
    ),
    "a step that is not there, of a store that fails": Life(
        Settings(store="faulty", processes=2), (Faulty(Delete(5), "fetch", "ENOSPC", 0),)
    ),
    **{
        f"a callback that calls {call}": Life(Settings(), (SaveAndCall(1, 1, call),))
        for call in CALLED_BACK
    },
    "a durable step with younger local ones": Life(
        Settings(save_policy="never", local=2),
        (Save(1, 1, force=True), Save(2, 2), Delete(1), List()),
    ),
    "a link that was said to have failed": Life(
        Settings(store="faulty", incremental="yes"),
        (
            Save(1, 1),
            Faulty(Save(2, 1), "link", "EIO", 0, after=True),
            Reopen(),
        ),
    ),
    "a copied root with the local steps of its source": Life(
        Settings(save_policy="never", local=2),
        (Save(1, 1, force=True), Save(2, 2), Copy(by_shell=True)),
    ),
    **{how: Life(Settings(), (SaveRefused(1, how), List())) for how in HOWS},
    "a local step that a durable one has replaced": Life(
        Settings(save_policy="never", local=2),
        (Save(5, 15), Save(5, 11, force=True), List(), Save(6, 1), Delete(5), List()),
    ),
    "a local save that is refused": Life(
        Settings(processes=2, save_policy="hourly", local=2),
        (Save(0, 22), Cancel(2, 20), Save(4, 3), Restore(), Save(2, 23), Restore()),
    ),
    "a commit that the primary alone has found": Life(
        Settings(store="faulty", processes=2),
        (
            Faulty(Save(2, 4), "commit", "EIO", 0, times=1000, after=True),
            List(),
            Save(3, 1),
            List(),
        ),
    ),
    "a delete whose branch cannot be listed": Life(
        Settings(store="faulty", save_policy="even", local=1),
        (Save(1, 14), Save(3, 14), Faulty(Delete(3), "list", "ESTALE", 1)),
    ),
    "a copy of a step whose writer is above the root": Life(
        Settings(), (Save(1, 1), Forge(1, "a writer above the root"), Copy(by_shell=False))
    ),
    **{
        f"a record with {how}": Life(
            Settings(arrays="jax", read="saved"), (Save(1, 1), Forge(1, how), Look(1), Restore(1))
        )
        for how in FORGERIES
    },
    "more deletions at once than files may be open": Life(
        Settings(),
        (
            *(Save(step, 1) for step in range(60)),
            Keep("last"),
            Faulty(Save(60, 1), "open", "EMFILE", ENOUGH_FILES),
        ),
    ),
    **{
        f"the files of a step that is let go, with {how}": Life(
            Settings(keep_policy="last"), (Save(1, 1), Forge(1, how), Save(2, 2), Reopen())
        )
        for how in FORGERIES
    },
    "a deletion without memory": Life(
        Settings(store="faulty", processes=2), (Faulty(Delete(3), "fetch", "memory", 0),)
    ),
    "overwriting on the hosts": Life(
        Settings(save_policy="named", local=3), (Save(3, 6), Save(0, 1, overwrite=True))
    ),
    "a copy over files of equal size": Life(Settings(), (Save(1, 1), Save(2, 2), CopyOver(1, 2))),
    "two writers of one path": Life(Settings(), (SaveTwice((1, 2)), SaveTwice((3, 4)))),
    **{
        f"a link on a host, {'strict' if strict else 'not strict'}": Life(
            Settings(save_policy="never", local=2, local_strict=strict),
            (Save(1, 1), Save(2, 2), SaveThroughLink(3, 3), List(), Restore()),
        )
        for strict in (False, True)
    },
    "arrays that change while they are saved": Life(
        Settings(arrays="jax"), (SaveAndChange(1, 1), Restore(1))
    ),
    "a memory of the host": Life(Settings(arrays="pinned", read="saved"), (Save(1, 1), Restore(1))),
}

# Those whose mends are to come: each name goes with its mend.
UNMENDED: set[str] = set()
