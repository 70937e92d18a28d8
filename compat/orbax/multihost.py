"""`orbax.checkpoint.multihost`: the processes of the job."""

from holdfast import multihost as multislice  # noqa: F401
from holdfast.multihost import *  # noqa: F403

from .refusals import PATHWAYS, refusing

REFUSED = "is_cloud_pathways_persistence_enabled"
__getattr__ = refusing(__name__, PATHWAYS, REFUSED)
