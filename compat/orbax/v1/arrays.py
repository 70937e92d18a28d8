"""`orbax.checkpoint.v1.arrays`."""

from ..metadata import to_shape_dtype_struct  # noqa: F401
from ..refusals import refusing

REFUSED = "AbstractArray AbstractScalar AbstractShardedArray ArrayLike DType Scalar Shape"
__getattr__ = refusing(
    __name__, "it is a name for annotations: numpy's and jax's types stand for it", REFUSED
)
