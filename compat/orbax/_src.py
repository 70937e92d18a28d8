"""`orbax.checkpoint._src`, out of which programs import: what is public too, and stand-ins."""

from typing import Any

from . import multihost as _multihost
from .refusals import PRIVATE, make_module, refusing
from .roots import policies, step_names
from .trees.shardings import construct_maximal_shardings


def _below(name: str, **names: Any) -> Any:
    return make_module(f"_src.{name}", PRIVATE, **names)


arrays = _below(
    "arrays",
    sharding=_below("arrays.sharding", construct_maximal_shardings=construct_maximal_shardings),
)
checkpoint_managers = _below(
    "checkpoint_managers",
    policy_checkpoint_info=policies,
    preservation_policy=policies,
    save_decision_policy=policies,
)
multihost = _below("multihost", multihost=_multihost, multislice=_multihost)
path = _below("path", step=step_names)
__getattr__ = refusing(__name__, PRIVATE)
