"""`orbax.checkpoint.v1.path`."""

from ..refusals import refusing
from ..roots import step_names as step  # noqa: F401
from .checkpointables import PathAwaitingCreation  # noqa: F401

REFUSED = "Path PathLike"
__getattr__ = refusing(__name__, "pathlib.Path, str and URLs are paths", REFUSED)
