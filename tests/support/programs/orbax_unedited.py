"""A program that imports Orbax in every form, and starts children that do. argv: root."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"  # before anything has imported jax
import multiprocessing
import subprocess
import sys
from typing import Any

assert "jax" not in sys.modules

import orbax.checkpoint as ocp
import orbax.checkpoint.checkpoint_utils  # noqa: F401
import orbax.checkpoint.experimental.v1 as ocp_v1
from orbax.checkpoint import args, checkpoint_managers, test_utils, v1  # noqa: F401
from orbax.checkpoint.checkpoint_managers import LatestN  # noqa: F401


def whose(_: Any = None) -> str:
    import orbax.checkpoint

    return str(orbax.checkpoint.CheckpointManager.__module__)


def main(root: str) -> None:
    assert whose().startswith("holdfast.")
    assert ocp_v1.load is v1.load
    assert args.StandardSave is ocp.args.StandardSave
    with ocp.CheckpointManager(root) as manager:
        manager.save(1, args=args.StandardSave({"x": 1}))
    assert os.path.exists(f"{root}/1/checkpoint.json")
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print("spawned", pool.map(whose, [0]))
    code = "import orbax.checkpoint as ocp; print('started', ocp.CheckpointManager.__module__)"
    print(subprocess.check_output([sys.executable, "-c", code], text=True).strip())
    try:
        import orbax.checkpoint.no_such_module  # noqa: F401
    except ModuleNotFoundError as error:
        print(error)


if __name__ == "__main__":
    main(os.path.abspath(sys.argv[1]))
