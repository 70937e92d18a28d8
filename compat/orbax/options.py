"""`orbax.checkpoint.options`, and the options of a manager."""

from __future__ import annotations

import enum
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import Any

import holdfast.compat.orbax.roots.policies as policies
import holdfast.compat.orbax.roots.step_names as step_names

from .refusals import refuse


class Settable:
    """Options that may be set, but not while a context of v1 that has them is active."""

    def __setattr__(self, name: str, value: Any) -> None:
        if self.__dict__.get("_active"):
            raise RuntimeError(
                f"{type(self).__qualname__}.{name} is set inside of `with` of a context that has"
                " it; expected before it: options hold for the whole block"
            )
        super().__setattr__(name, value)

    def add_active(self, blocks: int) -> None:
        """Notes that a context with these is entered (1), or left (-1)."""
        vars(self)["_active"] = vars(self).get("_active", 0) + blocks


@dataclass
class AsyncOptions(Settable):
    """Of these `timeout_secs` counts: it bounds a save from its call to its commit."""

    timeout_secs: int = 1200
    barrier_sync_fn: Any = None
    post_finalization_callback: Callable[[], None] | None = None
    create_directories_asynchronously: bool = True

    def __post_init__(self) -> None:
        refuse(
            "options.AsyncOptions",
            "call wait_until_finished(), then do it",
            post_finalization_callback=self.post_finalization_callback,
        )
        refuse(
            "options.AsyncOptions",
            "leave it out: holdfast agrees by its own coordinator",
            barrier_sync_fn=self.barrier_sync_fn,
        )


@dataclass
class MultiprocessingOptions(Settable):
    """Which processes take part: all of the job; the primary is process 0."""

    primary_host: int | None = 0
    active_processes: set[int] | None = None
    barrier_sync_key_prefix: str | None = None

    def __post_init__(self) -> None:
        if self.primary_host != 0:
            refuse(
                "options.MultiprocessingOptions",
                "leave it out: the primary is process 0 of the group",
                primary_host=str(self.primary_host),
            )
        refuse(
            "options.MultiprocessingOptions",
            "holdfast.checkpoint.CheckpointManager(group=...)",
            active_processes=self.active_processes,
        )


@dataclass
class FileOptions(Settable):
    """How files are made: folders have `path_permission_mode`, files are not executable."""

    path_permission_mode: int | None = None
    skip_sync_file_validations: bool = False


class AtomicityMode(enum.Enum):
    """How Orbax commits. It has no effect: holdfast's record is the commit on every store."""

    AUTO = "auto"
    RENAME = "rename"
    COMMIT_FILE = "commit_file"


@dataclass
class AtomicityOptions:
    """How Orbax commits. It has no effect."""

    mode: AtomicityMode = AtomicityMode.AUTO
    allow_legacy_atomic_rename: bool = False


@dataclass
class MemoryLimitOptions:
    """Limits of memory. They have no effect."""

    max_transfer_concurrent_gb: int | None = None


@dataclass
class CheckpointManagerOptions:
    """When to save and what to keep, in Orbax's words.

    Without effect, because holdfast does it always or has no need of it: create,
    cleanup_tmp_directories, single_host_load_and_broadcast, enable_background_delete,
    num_deletion_threads, atomicity_options, temporary_path_class, lightweight_initialize,
    enable_should_save_is_saving_in_progress_check, enable_per_process_directory_creation.
    `todelete_subdir` is a folder of the root: what is let go lies there from then on. In a bucket
    it has no effect, as with Orbax. `todelete_full_path` is refused by a manager that would let
    steps go. `step_name_format` is a prefix and the number (see step_names.NameFormat).
    """

    save_interval_steps: int = 1
    max_to_keep: int | None = None
    keep_time_interval: Any = None
    keep_period: int | None = None
    best_fn: Callable[[Any], float] | None = None
    best_mode: str = "max"
    keep_checkpoints_without_metrics: bool = True
    step_prefix: str | None = None
    step_format_fixed_length: int | None = None
    step_name_format: Any = None
    create: bool = True
    cleanup_tmp_directories: bool = False
    save_on_steps: Container[int] | None = None
    single_host_load_and_broadcast: bool = False
    todelete_subdir: str | None = None
    todelete_full_path: str | None = None
    enable_background_delete: bool = False
    num_deletion_threads: int | None = None
    read_only: bool = False
    enable_async_checkpointing: bool = True
    async_options: AsyncOptions | None = None
    multiprocessing_options: MultiprocessingOptions = field(default_factory=MultiprocessingOptions)
    should_save_fn: Callable[[int, int | None], bool] | None = None
    file_options: FileOptions = field(default_factory=FileOptions)
    atomicity_options: Any = None
    save_root_metadata: bool = True
    temporary_path_class: Any = None
    save_decision_policy: Any = None
    preservation_policy: Any = None
    prevent_write_metrics: bool = False
    enable_should_save_is_saving_in_progress_check: bool = True
    enable_per_process_directory_creation: bool = False
    lightweight_initialize: bool = False

    def __post_init__(self) -> None:
        if self.best_mode not in ("min", "max"):
            raise ValueError(
                f"CheckpointManagerOptions: best_mode is 'min' or 'max', not {self.best_mode!r}"
            )
        if self.preservation_policy is None and (self.max_to_keep or 0) < 0:
            raise ValueError(
                "CheckpointManagerOptions: max_to_keep must be None or not below 0, found"
                f" {self.max_to_keep}"
            )
        if None not in (self.todelete_subdir, self.todelete_full_path) and not self.read_only:
            raise ValueError(
                "CheckpointManagerOptions: found todelete_subdir and todelete_full_path, expected"
                " one of them"
            )
        self.step_format()  # refuses names that are more than a prefix and the number

    def step_format(self) -> str | None:
        """Returns how folders of steps are called, None where the options do not say, and for a
        reader, which finds steps by their numbers.
        """
        if self.read_only:
            return None
        if self.step_name_format is not None:
            return step_names.step_format(self.step_name_format)
        if self.step_prefix is None and self.step_format_fixed_length is None:
            return None
        names = step_names.StandardNameFormat(self.step_prefix, self.step_format_fixed_length)
        return step_names.step_format(names)

    def save_policy(self) -> Any:
        """Returns the policy of saving that the options mean, in Orbax's words."""
        if self.save_decision_policy is not None:
            return self.save_decision_policy
        preempted = policies.PreemptionCheckpointingPolicy()
        if self.should_save_fn is not None:
            return policies.AnySavePolicy([policies.ShouldSaveFn(self.should_save_fn), preempted])
        named = policies.SpecificStepsPolicy(self.save_on_steps or ())
        chosen: list[Any] = [named, preempted, policies.InitialSavePolicy()]
        if self.save_interval_steps:
            chosen.insert(0, policies.FixedIntervalPolicy(self.save_interval_steps))
        return policies.AnySavePolicy(chosen)

    def keep_policy(self) -> Any:
        """Returns the policy of keeping that the options mean, in Orbax's words."""
        if self.preservation_policy is not None:
            if not self.read_only and (
                self.max_to_keep or self.keep_period or self.keep_time_interval
            ):
                raise ValueError(
                    "CheckpointManagerOptions: found preservation_policy beside max_to_keep,"
                    " keep_period or keep_time_interval, expected the policy alone"
                )
            return self.preservation_policy
        chosen: list[Any] = []
        if self.keep_period is not None:
            chosen.append(policies.EveryNSteps(self.keep_period))
        if self.keep_time_interval is not None:
            chosen.append(policies.EveryNSeconds(int(self.keep_time_interval.total_seconds())))
        if self.best_fn is None:
            return policies.AnyPreservationPolicy([*chosen, policies.LatestN(self.max_to_keep)])
        best = policies.BestN(
            get_metric_fn=self.best_fn,
            reverse=self.best_mode == "min",
            n=self.max_to_keep,
            keep_checkpoints_without_metrics=self.keep_checkpoints_without_metrics,
        )
        return policies.AnyPreservationPolicy([*chosen, best])
