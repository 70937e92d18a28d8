"""The stand-ins in an interpreter that finds no Orbax."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from types import ModuleType


class Hidden:
    """Hides Orbax from the import system."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> None:
        if name.split(".")[0] == "orbax":
            raise ModuleNotFoundError(name)


sys.meta_path.insert(0, Hidden())

from holdfast.compat import orbax as ocp
from holdfast.compat.orbax import checkpoint_utils, v1  # noqa: F401

managers = importlib.import_module("holdfast.compat.orbax.checkpoint_managers")
found = [
    managers.LatestN,
    ocp.CheckpointManager,
    v1.load,
    ocp.args.StandardSave,
    ocp.multihost.process_index,
]
assert all(found)
assert ocp.experimental.v1 is v1
sys.exit("orbax" in sys.modules)
