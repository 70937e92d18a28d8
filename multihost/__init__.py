"""The processes of one job as one: ids, barriers, preemption, collectives."""

from .compiled.folder import keep_compiled
from .errors import (
    Fatal,
    Hang,
    JobError,
    Preempted,
    StartupFailed,
    StartupTimeout,
    WorkerFailed,
)
from .group.barriers import (
    BarrierSyncFn,
    coordination_timeout,
    get_barrier_sync_fn,
    should_skip_process_sync,
    sync_global_processes,
    unique_barrier_key,
)
from .group.collectives import broadcast_one_to_all, global_max
from .group.group import ClusterGroup, Group, Solo, default_group
from .group.ids import (
    distributed_to_device_ids,
    initialize_distributed_to_device_ids,
    initialize_runtime_to_distributed_ids,
    is_distributed_to_device_ids_initialized,
    is_runtime_to_distributed_ids_initialized,
    process_index_from_device,
    runtime_to_distributed_ids,
    runtime_to_distributed_process_id,
    unique_processes_from_devices,
)
from .group.peers import Health, HealthListener, ProcessHealth
from .group.replica_broadcast import (
    broadcast_one_replica_to_all,
    get_available_memory,
    get_device_memory,
    get_leaf_memory_per_device,
    tree_memory_per_device,
)
from .group.runtime import (
    current_client,
    current_spec,
    get_jax_distributed_client,
    is_jax_distributed_client_initialized,
    is_primary_host,
    process_count,
    process_index,
    use_experimental_distributed_process_id,
)
from .group.slices import (
    in_replica,
    local_replica_devices,
    primary_process_in_replica,
    process_replica_id,
    replica_count,
    replica_devices,
    slice_count,
)
from .job import AttemptOver
from .liveness.health import health, live_devices, live_processes
from .liveness.watchdog import HANG_EXIT_CODE, Watchdog, watchdog
from .pathways import (
    is_native_pathways_backend,
    is_pathways_backend,
    is_pathways_colocated_runtime_active,
    is_pathways_controller,
    is_proxy_pathways_backend,
    mark_pathways_colocated_runtime_active,
)
from .preemption.preemption import (
    add_preemption_source,
    notify_preemption,
    preempted_processes,
    preemption_notice,
    reached_preemption,
)
from .preemption.signals import Signals
from .preemption.sources import GceMetadata, Notice, Polled, RayTrain, SlurmEnd, Source, WatchedFile
from .preemption.step_agreement import SyncPoint, agree_on_step
from .spec import ProcessSpec
from .start.restartable import run_restartable
from .start.start import initialize, is_initialized, shutdown

__all__ = [
    "HANG_EXIT_CODE",
    "AttemptOver",
    "BarrierSyncFn",
    "ClusterGroup",
    "Fatal",
    "GceMetadata",
    "Group",
    "Hang",
    "Health",
    "HealthListener",
    "JobError",
    "Notice",
    "Polled",
    "Preempted",
    "ProcessHealth",
    "ProcessSpec",
    "RayTrain",
    "Signals",
    "SlurmEnd",
    "Solo",
    "Source",
    "StartupFailed",
    "StartupTimeout",
    "SyncPoint",
    "Watchdog",
    "WatchedFile",
    "WorkerFailed",
    "add_preemption_source",
    "agree_on_step",
    "broadcast_one_replica_to_all",
    "broadcast_one_to_all",
    "coordination_timeout",
    "current_client",
    "current_spec",
    "default_group",
    "distributed_to_device_ids",
    "get_available_memory",
    "get_barrier_sync_fn",
    "get_device_memory",
    "get_jax_distributed_client",
    "get_leaf_memory_per_device",
    "global_max",
    "health",
    "in_replica",
    "initialize",
    "initialize_distributed_to_device_ids",
    "initialize_runtime_to_distributed_ids",
    "is_distributed_to_device_ids_initialized",
    "is_initialized",
    "is_jax_distributed_client_initialized",
    "is_native_pathways_backend",
    "is_pathways_backend",
    "is_pathways_colocated_runtime_active",
    "is_pathways_controller",
    "is_primary_host",
    "is_proxy_pathways_backend",
    "is_runtime_to_distributed_ids_initialized",
    "keep_compiled",
    "live_devices",
    "live_processes",
    "local_replica_devices",
    "mark_pathways_colocated_runtime_active",
    "notify_preemption",
    "preempted_processes",
    "preemption_notice",
    "primary_process_in_replica",
    "process_count",
    "process_index",
    "process_index_from_device",
    "process_replica_id",
    "reached_preemption",
    "replica_count",
    "replica_devices",
    "run_restartable",
    "runtime_to_distributed_ids",
    "runtime_to_distributed_process_id",
    "should_skip_process_sync",
    "shutdown",
    "slice_count",
    "sync_global_processes",
    "tree_memory_per_device",
    "unique_barrier_key",
    "unique_processes_from_devices",
    "use_experimental_distributed_process_id",
    "watchdog",
]
