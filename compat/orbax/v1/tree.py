"""`orbax.checkpoint.v1.tree`."""

from ..refusals import refusing
from ..trees.nested import merge_trees as merge  # noqa: F401

REFUSED = "AbstractLeaf JsonType Leaf PyTree PyTreeKey PyTreeKeyPath PyTreeOf"
__getattr__ = refusing(
    __name__, "these are names for annotations; jax.tree_util works on trees", REFUSED
)
