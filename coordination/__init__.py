"""Who is alive, and what do we agree on: the coordination service and its client. Never imports jax."""

from ._errors import BarrierTimeout, CoordinationError, CoordinatorLost, Fenced, HoldfastError, ProcessLost

__all__ = ["BarrierTimeout", "CoordinationError", "CoordinatorLost", "Fenced", "HoldfastError", "ProcessLost"]
