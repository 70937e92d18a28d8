"""`orbax.checkpoint.v1.errors`, and those of `v1.training`."""

from ..refusals import refusing


class InvalidLayoutError(ValueError):
    """There is no checkpoint of a layout that is known."""


class StepAlreadyExistsError(FileExistsError):
    """The step is there already."""


class StepNotFoundError(FileNotFoundError):
    """There is no such step."""


REFUSED = "DeletionInProgressError DeletionRecoveryError"
__getattr__ = refusing(__name__, "a deletion here is done when it returns", REFUSED)
