"""`orbax.checkpoint.CheckpointManager` over holdfast's."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import operator
import os
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Self

import numpy as np

import holdfast.compat.orbax.args as args_lib
import holdfast.compat.orbax.handling.items as items_lib
import holdfast.compat.orbax.handling.standard as standard
from holdfast.checkpoint import (
    CheckpointError,
    Options,
    SaveHandle,
    StepNotFound,
    Structure,
    load,
    structure,
)
from holdfast.checkpoint import CheckpointManager as NativeManager
from holdfast.checkpoint.agreement.exchange import ask_primary
from holdfast.checkpoint.layouts.detect import find_steps, newest_step
from holdfast.checkpoint.manager import finish_all_at_exit
from holdfast.checkpoint.steps.claims import FOLDER as CLAIMS
from holdfast.checkpoint.storage.path import absolute, open_storage
from holdfast.multihost import coordination_timeout, default_group, is_primary_host

from .args import CheckpointArgs, CheckpointHandler  # noqa: F401
from .checkpointers import AbstractCheckpointer, AsyncCheckpointer, Checkpointer  # noqa: F401
from .handling.items import DEFAULT_ITEM, SavedItem, cancel, orbax_errors
from .handling.items import StepAlreadyExistsError as StepAlreadyExistsError
from .handling.registry import CheckpointHandlerRegistry, check_args, handler_in  # noqa: F401
from .handling.standard import CompositeCheckpointHandler, JsonCheckpointHandler  # noqa: F401
from .metadata import (
    RootMetadata,
    StepMetadata,
    left_out_of,
    step_metadata,
    with_item_metadata,
)
from .options import AsyncOptions, CheckpointManagerOptions
from .options import FileOptions as FileOptions
from .options import MultiprocessingOptions as MultiprocessingOptions
from .own_handlers import arguments, is_own, to_path
from .refusals import METADATA, not_covered, refuse, refusing
from .roots.policies import (
    AskToKeep,
    PolicyCheckpointInfo,
    asking,
    asks_for_metrics,
    keeps_all,
)
from .roots.root import Trash, called_otherwise, read_root_metadata, write_root_metadata

_log = logging.getLogger(__name__)
CALL = "CheckpointManager"
DEFAULT_ITEM_NAME = DEFAULT_ITEM
METRIC_ITEM_NAME = "metrics"


class AbstractCheckpointManager:
    """The base of managers."""


class CheckpointManager(AbstractCheckpointManager):
    """Orbax's manager, over `holdfast.checkpoint.CheckpointManager`.

    Steps are saved in holdfast's layout; steps of Orbax's are read. One tree is the item "default",
    as with Orbax; `args.Composite` names several. Threads and blocking are as with holdfast's,
    which is the attribute `native`.
    """

    def __init__(  # noqa: PLR0917 Orbax's
        self,
        directory: str | os.PathLike[str],
        checkpointers: Any = None,
        options: CheckpointManagerOptions | None = None,
        metadata: Mapping[str, Any] | None = None,
        item_names: Sequence[str] | None = None,
        item_handlers: Any = None,
        logger: Any = None,
        handler_registry: Any = None,
    ) -> None:
        # The arguments are Orbax's, in Orbax's order.
        for name, given in (("item_handlers", item_handlers), ("item_names", item_names)):
            if handler_registry is not None and given:
                raise ValueError(
                    f"found {name} beside handler_registry; expected one of them: the registry"
                    " names items and handlers"
                )
        refuse(CALL, "manager.native.statistics() has holdfast's counts", logger=logger)
        self._registry = handler_registry
        self._options = options or CheckpointManagerOptions()
        read_only = self._options.read_only
        directory = absolute(directory)
        self._directory = directory
        handlers = checkpointers if checkpointers is not None else item_handlers
        each = handlers if isinstance(handlers, Mapping) else {DEFAULT_ITEM: handlers}
        own = [given for given in each.values() if isinstance(given, Checkpointer)]
        waits = own and not any(isinstance(given, AsyncCheckpointer) for given in own)
        self._in_background = self._options.enable_async_checkpointing and not waits
        usual_s = (self._options.async_options or AsyncOptions()).timeout_secs
        self._timeout_s = max(float(usual_s), *(given.timeout_s for given in own), 0.0)
        # A checkpointer has a handler.
        self._handlers = {name: getattr(given, "handler", given) for name, given in each.items()}
        if handler_registry is not None:
            self._handlers = standard.handlers_by_item(handler_registry)
        # The items whose handlers are known: a save may leave them out, by None.
        self._known = {name for name, given in self._handlers.items() if given is not None}
        self._single: bool | None = None  # until the first call shows it
        self._item_names = frozenset(item_names or ())
        if item_names is not None or isinstance(handlers, Mapping):
            self._single = False
        elif handlers is not None:
            self._single = True
        # The step that was begun last, with its metrics: it may not be there yet.
        self._begun: dict[int, dict[str, float]] = {}
        self._times: dict[int, datetime] = {}  # when steps began: each decision may ask
        # Metrics that `prevent_write_metrics` keeps here alone, by step.
        self._unwritten: dict[int, dict[str, float]] = {}
        self._handle: SaveHandle | None = None
        if not keeps_all(self._options.keep_policy()):
            self._refuse_full_path()
        self._trash = Trash(directory, None if read_only else self._options.todelete_subdir)
        self.native = self._open()
        self._metadata = metadata
        # Not all processes need give it.
        if self._options.save_root_metadata and not read_only:
            self._at_primary("metadata", lambda: write_root_metadata(directory, metadata))

    def _at_primary(self, what: str, answer: Callable[[], Any]) -> Any:
        """Returns what the primary answers, on every process, or raises its error there."""
        name = f"holdfast.compat.orbax/{what}/{self._directory}"
        return ask_primary(default_group(), name, answer, coordination_timeout())

    def _refuse_full_path(self) -> None:
        refuse(
            CALL,
            "give todelete_subdir on a file system; in a bucket what is let go is deleted",
            todelete_full_path=self._options.todelete_full_path,
        )

    def _open(self) -> NativeManager:
        if not self._options.read_only and is_primary_host(0):
            _left_open.add(self._directory)
        mode = self._options.file_options.path_permission_mode
        return NativeManager(
            self._directory,
            save_policy=asking(
                self._options.save_policy(),
                lambda: _LazyInfos(self),
                self.is_saving_in_progress,
                self._options.multiprocessing_options,
            ),
            keep_policy=AskToKeep(
                self._options.keep_policy(), self._trash.put_aside, self._unwritten
            ),
            options=Options(
                save_timeout_s=self._timeout_s,
                read_only=self._options.read_only,
                step_format=self._step_format(),
                file_mode=None if mode is None else mode & 0o666,
                folder_mode=mode,
                # Orbax's own rule is `_is_next`.
                out_of_order=True,
            ),
        )

    def _step_format(self) -> str | None:
        """Returns how the options call steps; None for a root that calls its own otherwise."""
        wanted = self._options.step_format()
        found = None if wanted is None else called_otherwise(self._directory, wanted)
        if found is None:
            return wanted
        _log.warning(
            "%s calls its step 7 %s, and the options call it otherwise (%s). Its steps stay, and"
            " new ones are called as they are. Take another folder to begin anew",
            self._directory,
            found,
            wanted,
        )
        return None

    @property
    def directory(self) -> Any:
        """The root."""
        return to_path(self._directory)

    # --- steps

    def all_steps(self, read: bool = False) -> list[int]:
        """Returns the steps, ascending: those that are there, and the one whose save is in flight.

        With `read`, those that are there alone.
        """
        # Asked first: the step may be there by the time of the listing.
        in_flight = [] if read else self._in_flight()
        return sorted({*self.native.all_steps(), *in_flight})

    def steps_to_decide_by(self) -> list[int]:
        """Returns the steps that a decision to save knows, the last one that was begun among them.

        As with Orbax, without a look at the store, and whatever has become of that save: not all
        processes have heard of it.
        """
        return sorted({*self.native.known_steps(), *self._begun})

    def _in_flight(self) -> list[int]:
        return [*self._begun] if self.is_saving_in_progress() else []

    def latest_step(self) -> int | None:
        """Returns the newest step, None where there is none.

        None that was left behind by a manager of holdfast's.
        """
        # Asked first: the step may be there by the time of the listing.
        in_flight = self._in_flight()
        newest = self.native.latest_step()
        return max([*in_flight, *([] if newest is None else [newest])], default=None)

    def best_step(self) -> int | None:
        """Returns the best step by `best_fn`, None where no step has metrics.

        Without a `best_fn` it is the latest.
        """
        best_fn = self._options.best_fn
        if best_fn is None:
            return self.latest_step()
        sign = -1 if self._options.best_mode == "min" else 1
        scored = []
        for step in self.all_steps():
            if each := self._unwritten.get(step) or self.metrics(step):
                scored.append((sign * best_fn(each), step))
        return max(scored)[1] if scored else None

    def began(self, step: int) -> datetime:
        """Returns when the save of a step began; the time of the first question, for a step that
        cannot be read.
        """
        if step not in self._times:
            started_s = time.time()
            with contextlib.suppress(CheckpointError):
                started_s = self.native.structure(step).started_s or 0.0
            self._times[step] = datetime.fromtimestamp(started_s, UTC)
        return self._times[step]

    def metrics(self, step: int) -> dict[str, float] | None:
        """Returns the metrics of a step, None where it has none, or is not there."""
        step = operator.index(step)
        if step in self._begun:
            return self._begun[step] or None
        with contextlib.suppress(StepNotFound):
            return self.native.metrics(step) or None
        return None

    def reload(self) -> None:
        """Sees steps that others wrote. Waits for the save in flight."""
        self.native.reload()
        self._begun = {}

    def delete(self, step: int) -> None:
        """Deletes a step of holdfast's; a manager that only reads does nothing."""
        if self._options.read_only:
            return
        step = operator.index(step)
        self._refuse_full_path()
        with orbax_errors():
            if step in self._in_flight():
                self.native.wait_until_finished()
            if not self._at_primary("aside", lambda: self._trash.put_aside(step)):
                raise OSError(f"step {step} could not be put into {self._options.todelete_subdir}")
            self.native.delete(step)
        self._begun.pop(step, None)

    # --- saving

    def should_save(self, step: int) -> bool:
        """Says whether `save` would save: the step is above the latest, and the policy wants it."""
        return self._is_next(step) and self.native.should_save(step)

    def _is_next(self, step: int) -> bool:
        left = self.native.left_steps()
        latest = max({*self.steps_to_decide_by()} - {*left}, default=step - 1)
        return not self._options.read_only and step > latest

    def reached_preemption(self, step: int) -> bool:
        """Says whether the job has to stop at this step."""
        return self.native.reached_preemption(step)

    def save(  # noqa: PLR0917 Orbax's
        self,
        step: int,
        items: Any = None,
        save_kwargs: Any = None,
        metrics: Any = None,
        force: bool | None = False,
        args: args_lib.CheckpointArgs | None = None,
        custom_metadata: dict[str, Any] | None = None,
    ) -> bool:
        """Starts to save a step; returns False where no save is wanted.

        Raises StepAlreadyExistsError.
        """
        if items is None and args is None:
            raise ValueError("save: give args")
        given = self._composite(self._legacy(items, save_kwargs, "save") if args is None else args)
        if self._options.read_only or not (force or self.should_save(step)):
            return False
        to_save = {
            name: standard.to_save(f"{CALL}.save", each, self._handler_of(name, each))
            for name, each in given.items()
            if each is not None or name not in self._known
        }
        custom_metadata = with_item_metadata(custom_metadata, given)
        self._known |= to_save.keys()
        given_metrics = metrics
        if self._options.prevent_write_metrics:
            self._unwritten[operator.index(step)] = self._numbers(metrics) or {}
        if self._options.prevent_write_metrics or not self._asks_for_metrics():
            metrics = None
        self.save_items(step, to_save, metrics, custom_metadata)
        most = self._options.max_to_keep
        asked = self._options.best_fn
        if asked and given_metrics and most is not None and len(self.steps_to_decide_by()) > most:
            asked(given_metrics)  # raises here, as with Orbax: the policy asks in the background
        return True

    def _handler_of(self, name: str, args: Any) -> Any:
        return handler_in(self._registry, name, args) or self._handlers.get(name)

    def _asks_for_metrics(self) -> bool:
        """Says whether `best_fn` or a policy will ask for metrics."""
        options = self._options
        return options.best_fn is not None or asks_for_metrics(options.keep_policy())

    def save_items(
        self,
        step: int,
        items: Mapping[str, Any],
        metrics: Any,
        metadata: Any,
        *,
        overwrite: bool = False,
    ) -> SaveHandle:
        """Starts to save items of holdfast's, with all their metrics, whatever the policy says."""
        step = operator.index(step)
        numbers = self._numbers(metrics)
        begun = {step: numbers or {}}
        self._times[step] = datetime.now(UTC)
        with orbax_errors():
            try:
                handle = self.native.save(
                    step,
                    items=items,
                    metrics=numbers,
                    metadata=metadata,
                    force=True,
                    overwrite=overwrite,
                )
                if not self._in_background:
                    self.native.wait_until_finished()
            except CheckpointError as error:
                if error.step not in (None, step):
                    self._begun = begun  # the error is an earlier save's: this one has begun
                raise
        self._handle = handle
        self._begun = begun
        return handle

    def _numbers(self, metrics: Any) -> dict[str, float] | None:
        """Returns metrics as numbers."""
        if metrics is None:
            return None
        numbers = {}
        named = metrics if isinstance(metrics, Mapping) else {"metrics": None}
        for name, value in named.items():
            array = np.asarray(value)
            if array.size != 1 or array.dtype.kind not in "biuf":
                raise not_covered(
                    f"{CALL}.save(metrics={{{name!r}: ...}})", "give a flat dict of numbers"
                )
            numbers[name] = float(array.item())
        return numbers

    def _legacy(self, items: Any, kwargs: Any, verb: str) -> Any:
        """Returns the arguments that items without args mean.

        The handlers that the manager was made with say which.
        """
        if self._single is None:
            self._single = True
        if self._single:
            return self._legacy_item(DEFAULT_ITEM, items, kwargs or {}, verb)
        items = items or {}
        kwargs = kwargs or {}
        given = {
            name: self._legacy_item(name, items.get(name), kwargs.get(name) or {}, verb)
            for name in sorted({*items, *kwargs})  # alike on all processes, which exchange JSON
        }
        return args_lib.Composite(**given)

    def _legacy_item(self, name: str, item: Any, kwargs: Any, verb: str) -> Any:
        return arguments(self._handlers.get(name), verb, [] if item is None else [item], kwargs)

    def _composite(self, args: Any) -> Mapping[str, Any]:
        """Returns the arguments by item; the first call decides whether it is one or several."""
        if args is not None and not isinstance(args, args_lib.CheckpointArgs):
            raise ValueError(f"args: expected StandardSave(tree) or the like, found {type(args)}")
        if self._single is None:
            self._single = not isinstance(args, args_lib.Composite)
        if self._single and isinstance(args, args_lib.Composite):
            raise ValueError(
                "this manager has one item without a name, found a Composite; expected"
                " StandardSave(tree), ..., or a manager with item_names=(...)"
            )
        if self._single:
            return self._checked({DEFAULT_ITEM: args})
        if not isinstance(args, args_lib.Composite):
            raise ValueError(f"args: expected Composite(name=...), found {type(args)}")
        unknown = sorted(set(args) - self._item_names) if self._item_names else []
        if unknown:
            raise ValueError(
                f"the items {unknown} are not among item_names={sorted(self._item_names)}"
            )
        if METRIC_ITEM_NAME in args:
            raise ValueError(
                f"an item cannot be called {METRIC_ITEM_NAME!r}: that name is for metrics"
            )
        return self._checked(args)

    def _checked(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        if self._registry is not None:
            check_args(self._registry, given)
        return given

    # --- restoring

    def restore(
        self,
        step: int | None,
        items: Any = None,
        restore_kwargs: Any = None,
        directory: Any = None,
        args: args_lib.CheckpointArgs | None = None,
    ) -> Any:
        """Restores a step (None: the latest): the value of one item, or a Composite of several.

        Raises FileNotFoundError, ValueError.
        """
        chosen = self._chosen(step, directory)
        with orbax_errors():
            if chosen in self._in_flight():
                self.native.wait_until_finished()
            saved = self._find(chosen, directory)
            if self._single is None:
                several = isinstance(args, args_lib.Composite)
                self._single = DEFAULT_ITEM in saved.items and not several
            if args is None and (items is not None or restore_kwargs is not None):
                args = self._legacy(items, restore_kwargs, "restore")

            read = functools.partial(self.native.restore, chosen)
            if directory is not None:
                read = functools.partial(load, saved.path)
            restored: dict[str, Any] = {}
            for name, each in self._wanted(args, saved).items():
                if name in left_out_of(saved) and not self._single:
                    restored[name] = None
                    continue
                item = SavedItem.find(f"{CALL}.restore", saved, name, read)
                folder = to_path(saved.path) / name
                handler = self._handler_of(name, each)
                restored[name] = standard.restore_item(item, each, handler, folder)
        return restored[DEFAULT_ITEM] if self._single else args_lib.Composite(**restored)

    def _find(self, step: int, directory: Any) -> Structure:
        if directory is not None:
            return structure(directory, step)
        try:
            return self.native.structure(step)
        except StepNotFound as error:
            if self._options.step_name_format is None:
                raise
            raise ValueError(str(error)) from error  # as such formats have it

    def _chosen(self, step: int | None, directory: Any) -> int:
        if step is None and directory is None:
            step = self.latest_step()
        elif step is None:
            storage = open_storage(directory)
            step = newest_step(storage, find_steps(storage))
        if step is None:
            raise FileNotFoundError(f"No steps found in {directory or self._directory}.")
        return step

    def _wanted(self, args: Any, saved: Structure) -> Mapping[str, Any]:
        if not args and not self._single:  # an empty Composite too
            # Files need a handler. Without it they are left out, unless they were asked for.
            found = [
                name
                for name, item in saved.items.items()
                if item.kind != "files" or is_own(self._handlers.get(name))
            ]
            return dict.fromkeys([*found, *left_out_of(saved)])
        return self._composite(args)

    def item_metadata(self, step: int) -> Any:
        """Returns what is known of the items: of the only one, or a Composite."""
        if step is None:
            raise ValueError(f"{CALL}.item_metadata: expected a step, found None; a root has none")
        with orbax_errors():
            return self._item_metadata(self.native.structure(step))

    def _item_metadata(self, saved: Structure) -> Any:
        single = DEFAULT_ITEM in saved.items if self._single is None else self._single
        missing = dict.fromkeys(left_out_of(saved))
        described = items_lib.trees_metadata(saved) | missing
        return described.get(DEFAULT_ITEM) if single else args_lib.Composite(**described)

    def metadata(self, step: int | None = None) -> StepMetadata | RootMetadata:
        """Returns what is known of a step, or of the root."""
        if step is None:
            given = dict(self._metadata or {}) if self._options.read_only else {}
            return read_root_metadata(self._directory) or RootMetadata(custom_metadata=given)
        with orbax_errors():
            saved = self.native.structure(step)
            return step_metadata(saved, self._item_metadata(saved))

    # --- the end

    def is_saving_in_progress(self) -> bool:
        """Says whether a save is in flight."""
        return self.native.is_saving_in_progress()

    def wait_until_finished(self) -> None:
        """Blocks until no save is in flight; raises the error of one that failed."""
        with orbax_errors():
            self.native.wait_until_finished()

    def cancel(self) -> None:
        """Calls the save in flight off; blocks until it has ended. One that commits goes on."""
        if self._handle is not None:
            cancel(self._handle)
            self._begun = {}

    def check_for_errors(self) -> None:
        """Raises the error of a save that failed, once."""
        self.native.check_for_errors()

    def close(self) -> None:
        """Waits for the save in flight and closes the manager."""
        with orbax_errors():
            self.native.close()
        self._remove_empty_claims()

    def _remove_empty_claims(self) -> None:
        if self._directory in _left_open:
            _left_open.discard(self._directory)
            _remove_empty_claims(self._directory)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self.native.__exit__(*error)
        self._remove_empty_claims()


# Roots whose managers may never be closed, by the primary of each.
_left_open: set[str] = set()


def _remove_empty_claims(directory: str) -> None:
    """Removes the folder of claims where no other manager has one: programs list the root."""
    with contextlib.suppress(OSError):  # the next one that closes does it
        open_storage(directory).delete([f"{CLAIMS}/"])


@atexit.register
def _remove_claims_at_exit() -> None:
    if _left_open:
        finish_all_at_exit()  # they would let go of their claims after this
    for directory in _left_open:
        _remove_empty_claims(directory)


class _LazyInfo(PolicyCheckpointInfo):
    """A step for a policy of saving; its time and metrics are read when they are asked for."""

    def __init__(self, step: int, manager: CheckpointManager) -> None:
        self.step = step
        self._manager = manager

    @property
    def metrics(self) -> Any:
        return self._manager.metrics(self.step)

    @property
    def time(self) -> datetime:
        return self._manager.began(self.step)


class _LazyInfos(Sequence[PolicyCheckpointInfo]):
    """The steps for a policy of saving, listed when it looks at them."""

    def __init__(self, manager: CheckpointManager) -> None:
        self._manager = manager

    @functools.cached_property
    def _steps(self) -> list[int]:
        return self._manager.steps_to_decide_by()

    def __len__(self) -> int:
        return len(self._steps)

    def __getitem__(self, index: Any) -> Any:
        chosen = self._steps[index]
        if isinstance(chosen, int):
            return _LazyInfo(chosen, self._manager)
        return [_LazyInfo(step, self._manager) for step in chosen]


REFUSED = (
    "CheckpointInfo ProtoCheckpointHandler METADATA_ITEM_NAME RESERVED_ITEM_NAMES"
    " deserialize_root_metadata determine_default_item_mode_from_args is_async_checkpointer"
    " serialize_root_metadata"
)
__getattr__ = refusing(__name__, METADATA, REFUSED)
