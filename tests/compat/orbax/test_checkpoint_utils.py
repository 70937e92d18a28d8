"""Programs on checkpoint_utils and utils: each runs on Orbax and on holdfast, with the same
results.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from holdfast.compat import orbax as ours
from tests.support.orbax_programs import run_both

pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")  # Orbax's own


def test_restore_arguments_say_what_a_target_is(tmp_path: Path) -> None:
    """Of arrays, numpy arrays and numbers: types, dtypes, shapes and shardings, those of another
    tree too.
    """

    def program(ocp: Any, root: Path) -> Any:
        target = {"w": jnp.ones((2, 3)), "b": np.zeros(2, np.int16), "n": 3}
        args = ocp.checkpoint_utils.construct_restore_args(target)
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        other = ocp.checkpoint_utils.construct_restore_args({"w": target["w"]}, {"w": sharding})[
            "w"
        ]
        w = args["w"]
        struct = ocp.utils.to_shape_dtype_struct(target["w"])
        about = (
            [(arg.restore_type, arg.dtype) for arg in (w, args["b"])],
            args["n"].restore_type,
            w.sharding,
            tuple(w.global_shape),
        )
        return about, other.sharding == sharding, (struct.shape, struct.dtype, struct.sharding)

    run_both(program, tmp_path)


def test_steps_are_listed_and_waited_for(tmp_path: Path) -> None:
    """The steps of a root, and each new one as it comes, until none has come for the timeout."""

    def program(ocp: Any, root: Path) -> Any:
        with ocp.CheckpointManager(root) as manager:

            def save(step: int) -> None:
                manager.save(step, args=ocp.args.StandardSave({"x": step}))
                manager.wait_until_finished()

            save(1)
            first = list(ocp.checkpoint_utils.checkpoints_iterator(root, timeout=0))
            timer = threading.Timer(0.2, save, [2])
            timer.start()
            wait = ocp.checkpoint_utils.wait_for_new_checkpoint
            with wait(root, until_step=2, timeout=60, set_immutable=False) as waited:
                timer.join()
            return (
                first,
                waited,
                list(ocp.utils.checkpoint_steps(root)),
                ocp.utils.any_checkpoint_step(root) in (1, 2),
            )

    program(ours, tmp_path)
    assert list(ours.utils.checkpoint_steps(tmp_path)) == [1, 2]
    named = ours.checkpoint_utils.checkpoints_iterator(tmp_path, step_prefix="a", timeout=0)
    assert list(named) == [2]
    with pytest.raises(TypeError, match="unexpected keyword argument 'prefix'"):
        next(ours.checkpoint_utils.checkpoints_iterator(tmp_path, prefix="a"))
    with ours.checkpoint_utils.wait_for_new_checkpoint(tmp_path, until_step=9, timeout=0) as step:
        assert step == -1
