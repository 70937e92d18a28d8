"""v1's Checkpointer of many steps, over the manager."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Self

import holdfast.compat.orbax.roots.policies as policies
from holdfast.checkpoint import StepNotFound, Structure

from ..checkpoint_manager import CheckpointManager
from ..handling.items import StepAlreadyExistsError as StepIsThereError
from ..handling.items import orbax_errors
from ..metadata import with_text_keys
from ..options import CheckpointManagerOptions
from ..refusals import refuse
from . import checkpoints as checkpoints_lib
from .errors import StepAlreadyExistsError, StepNotFoundError
from .options import AsyncOptions, Context, current
from .results import (
    AsyncResponse,
    CheckpointMetadata,
    RootMetadata,
    StepMetadata,
    describe,
)

CALL = "training.Checkpointer"


def _usual_policy() -> policies.AnySavePolicy:
    """Returns the policy that saves each step but while another is being saved."""
    return policies.AnySavePolicy(
        [
            policies.InitialSavePolicy(),
            policies.ContinuousCheckpointingPolicy(),
            policies.PreemptionCheckpointingPolicy(),
        ]
    )


class Checkpointer:
    """Saves, keeps and loads the steps of one root.

    Every process of a job makes one and calls the same.
    """

    # More than eight parameters: they are Orbax's.
    def __init__(
        self,
        directory: Any,
        *,
        context: Context | None = None,
        save_decision_policy: Any = None,
        preservation_policy: Any = None,
        step_name_format: Any = None,
        custom_metadata: Any = None,
        cleanup_tmp_directories: bool = False,
        lightweight_initialize: bool = False,
        logger: Any = None,
    ) -> None:
        refuse(CALL, "holdfast.checkpoint's manager has statistics()", logger=logger)
        self._context = context
        deletion = current(context).deletion_options.gcs_deletion_options
        options = CheckpointManagerOptions(
            save_decision_policy=save_decision_policy or _usual_policy(),
            preservation_policy=preservation_policy or policies.PreserveAll(),
            step_name_format=step_name_format,
            cleanup_tmp_directories=cleanup_tmp_directories,
            lightweight_initialize=lightweight_initialize,
            todelete_full_path=deletion.todelete_full_path,
            async_options=AsyncOptions(timeout_secs=int(current(context).timeout_s)),
        )
        self._manager = CheckpointManager(
            directory, options=options, metadata=custom_metadata, item_names=()
        )

    @property
    def directory(self) -> Any:
        """The root."""
        return self._manager.directory

    @property
    def checkpoints(self) -> Sequence[CheckpointMetadata[None]]:
        """The steps, ascending, the one whose save is in flight among them."""
        return [self._about(step) for step in self._manager.all_steps()]

    @property
    def latest(self) -> CheckpointMetadata[None] | None:
        """The newest step, None where there is none."""
        step = self._manager.latest_step()
        return None if step is None else self._about(step)

    def _about(self, step: int) -> CheckpointMetadata[None]:
        try:
            return describe(self._manager.native.structure(step), None, step=step)
        except StepNotFound:  # in flight
            return StepMetadata(step, metadata=None)

    # --- saving

    def should_save(self, step: int) -> bool:
        """Says whether `save` would save."""
        return self._manager.should_save(step)

    def save(
        self,
        step: int,
        state: Any,
        *,
        checkpointable_name: str = checkpoints_lib.STATE,
        **options: Any,
    ) -> bool:
        """Saves a tree as a step and blocks until it is durable; False where no save is wanted.

        Raises StepAlreadyExistsError.
        """
        return self.save_checkpointables(step, {checkpointable_name: state}, **options)

    def save_async(
        self,
        step: int,
        state: Any,
        *,
        checkpointable_name: str = checkpoints_lib.STATE,
        **options: Any,
    ) -> AsyncResponse[bool] | None:
        """Starts to save a tree; None where no save is wanted."""
        return self.save_checkpointables_async(step, {checkpointable_name: state}, **options)

    def save_checkpointables(
        self, step: int, checkpointables: Mapping[str, Any], **options: Any
    ) -> bool:
        """Saves several trees as a step and blocks until it is durable."""
        started = self.save_checkpointables_async(step, checkpointables, **options)
        return started is not None and started.result()

    def save_checkpointables_async(
        self,
        step: int,
        checkpointables: Mapping[str, Any],
        *,
        force: bool = False,
        overwrite: bool = False,
        metrics: Mapping[str, Any] | None = None,
        custom_metadata: Any = None,
    ) -> AsyncResponse[bool] | None:
        """Starts to save several trees as a step; None where no save is wanted."""
        if not overwrite and step in self._manager.steps_to_decide_by():
            raise StepAlreadyExistsError(
                f"Step {step} already exists in {self.directory}; pass overwrite=True to"
                " replace it."
            )
        if not (force or overwrite or self.should_save(step)):
            return None
        try:
            with checkpoints_lib.handled(checkpointables):
                handle = self._manager.save_items(
                    step,
                    checkpoints_lib.to_items(checkpointables, self._context),
                    metrics,
                    with_text_keys(custom_metadata),
                    overwrite=overwrite,
                )
        except StepIsThereError as error:  # another manager has saved it
            raise StepAlreadyExistsError(str(error)) from error
        return AsyncResponse.of(handle, True)

    # --- loading

    def _step(self, step: int | CheckpointMetadata[Any] | None) -> int:
        chosen = step.step if isinstance(step, CheckpointMetadata) else step
        chosen = self._manager.latest_step() if chosen is None else chosen
        steps = self._manager.all_steps()
        if chosen is None or chosen not in steps:
            at = "" if chosen is None else f" at step {chosen}"
            raise StepNotFoundError(
                f"No checkpoint found{at} in {self.directory}; there are {steps}."
            )
        return chosen

    def load(
        self,
        step: Any = None,
        abstract_state: Any = None,
        *,
        checkpointable_name: str = checkpoints_lib.STATE,
    ) -> Any:
        """Loads a tree of a step (None: the latest).

        Raises StepNotFoundError, ValueError, KeyError.
        """
        items = self.load_checkpointables(step, {checkpointable_name: abstract_state})
        return items[checkpointable_name]

    def load_checkpointables(
        self, step: Any = None, abstract_checkpointables: Any = None
    ) -> dict[str, Any]:
        """Loads several trees of a step by name; None: all."""
        number = self._step(step)
        native = self._manager.native
        with orbax_errors():
            return checkpoints_lib.load_all(
                f"{CALL}.load",
                native.structure(number),
                abstract_checkpointables,
                current(self._context),
                reader=partial(native.restore, number),
            )

    def load_async(self, step: Any = None, abstract_state: Any = None) -> AsyncResponse[Any]:
        """Loads as `load` does, blocking; the response is done."""
        return AsyncResponse.done(self.load(step, abstract_state))

    def load_checkpointables_async(
        self, step: Any = None, abstract_checkpointables: Any = None
    ) -> AsyncResponse[dict[str, Any]]:
        """Loads as `load_checkpointables` does, blocking; the response is done."""
        items = self.load_checkpointables(step, abstract_checkpointables)
        return AsyncResponse.done(items)

    save_pytree = save
    save_pytree_async = save_async
    load_pytree = load
    load_pytree_async = load_async

    # --- what is known

    def metadata(self, step: Any = None) -> CheckpointMetadata[Any]:
        """Returns what is known of a step's tree, without reading it."""
        number = self._step(step)
        return checkpoints_lib.describe_tree(self._structure(number), step=number)

    pytree_metadata = metadata

    def checkpointables_metadata(self, step: Any = None) -> CheckpointMetadata[dict[str, Any]]:
        """Returns what is known of all items of a step, without reading them."""
        number = self._step(step)
        return checkpoints_lib.describe_all(self._structure(number), step=number)

    def _structure(self, step: int) -> Structure:
        with orbax_errors():
            return self._manager.native.structure(step)

    def root_metadata(self) -> RootMetadata:
        """Returns what is known of the root: where it is, and what was given for it."""
        found = self._manager.metadata()
        return RootMetadata(self.directory, found.custom_metadata)

    # --- steps and the end

    def delete(
        self, step: Any, *, checkpointable_name: str | None = None, missing_ok: bool = False
    ) -> bool:
        """Deletes a step; True if it was there. Raises StepNotFoundError."""
        refuse(f"{CALL}.delete", "delete the whole step", checkpointable_name=checkpointable_name)
        try:
            number = self._step(step)
        except StepNotFoundError:
            if missing_ok:
                return False
            raise
        self._manager.delete(number)
        return True

    def delete_async(self, step: Any, **options: Any) -> AsyncResponse[bool]:
        """Deletes as `delete` does, blocking; the response is done."""
        return AsyncResponse.done(self.delete(step, **options))

    def cancel(self, step: Any = None) -> None:
        """Calls the save in flight off, and deletes a step, where it is there. Blocks."""
        self._manager.cancel()
        if step is not None:
            self.wait()
            self.delete(step, missing_ok=True)

    def is_saving_in_progress(self) -> bool:
        """Says whether a save is in flight."""
        return self._manager.is_saving_in_progress()

    def wait(self) -> None:
        """Blocks until no save is in flight; raises the error of one that failed."""
        self._manager.wait_until_finished()

    def reload(self) -> None:
        """Sees steps that others wrote."""
        self._manager.reload()

    def close(self) -> None:
        """Waits for the save in flight and closes."""
        self._manager.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self._manager.__exit__(*error)
