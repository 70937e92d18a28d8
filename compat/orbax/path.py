"""`orbax.checkpoint.path`: where the folders of steps are."""

from .refusals import PATHS, refusing
from .roots import step_names as step  # noqa: F401

REFUSED = "atomicity atomicity_defaults atomicity_types deleter format_utils"
__getattr__ = refusing(__name__, PATHS, REFUSED)
