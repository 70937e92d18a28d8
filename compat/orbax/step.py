"""`orbax.checkpoint.step`: how the folders of steps are called, and which there are."""

from .checkpoint_utils import any_checkpoint_step, checkpoint_steps  # noqa: F401
from .refusals import PATHS, refusing
from .roots.step_names import *  # noqa: F403

REFUSED = "all_temporary_paths build_step_metadatas MetadataT"
__getattr__ = refusing(__name__, PATHS, REFUSED)
