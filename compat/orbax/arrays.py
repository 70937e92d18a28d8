"""`orbax.checkpoint.arrays`."""

from .metadata import to_shape_dtype_struct  # noqa: F401
from .refusals import refusing
from .trees.shardings import construct_maximal_shardings  # noqa: F401

REFUSED = "Index Shape"
__getattr__ = refusing(__name__, "jax.sharding says how an array is sharded", REFUSED)
