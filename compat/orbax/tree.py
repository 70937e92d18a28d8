"""`orbax.checkpoint.tree`: trees as flat dicts and as plain ones."""

# ruff: noqa: F401, F403
from .metadata import to_shape_dtype_struct
from .refusals import refusing
from .trees.flat import *
from .trees.nested import *
from .trees.nested import merge_trees  # type: ignore[assignment]

REFUSED = "JsonType PyTree PyTreeKey PyTreeOf PyTreePath tree_difference tree_trim"
__getattr__ = refusing(__name__, "jax.tree_util and flax.traverse_util do this", REFUSED)
