"""`orbax.checkpoint.utils`: names that stand in other modules too."""

# ruff: noqa: F401, F403
from holdfast.multihost import (
    broadcast_one_to_all,
    is_pathways_backend,
    is_primary_host,
    reached_preemption,
    sync_global_processes,
)

from .checkpoint_utils import record_saved_duration
from .metadata import to_shape_dtype_struct
from .refusals import refusing
from .step import *
from .trees.flat import *
from .trees.nested import *
from .trees.shardings import fully_replicated_host_local_array_to_global_array

sync_global_devices = sync_global_processes

REFUSED = (
    "all_leaves_are_placeholders get_tmp_directory is_gcs_path is_scalar"
    " is_supported_aggregation_type leaf_is_placeholder leaf_placeholder"
    " name_from_leaf_placeholder pytree_structure register_ts_spec_for_serialization"
    " should_skip_device_sync"
)
__getattr__ = refusing(
    __name__, "use holdfast's manager for steps, and jax.tree_util for trees", REFUSED
)
