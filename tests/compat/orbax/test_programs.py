"""Programs of the shape of well-known clients: the same on Orbax and on holdfast."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

from tests.support.orbax_programs import outcome, run_both

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Sharding info not provided"),  # Orbax's own
]


def _params(value: float = 0.0) -> dict[str, Any]:
    return {
        "layer_0": {"kernel": jnp.full((4, 3), value), "bias": jnp.zeros(3)},
        "layer_1": {"kernel": jnp.full((3, 2), value + 1, jnp.bfloat16)},
    }


def test_a_training_callback(tmp_path: Path) -> None:
    """As Keras's OrbaxCheckpoint: at the ends of epochs, the best or the last, with counters and
    names of steps, and weights that come back into a model.
    """

    class Callback:
        def __init__(self, ocp: Any, folder: Path, **options: Any) -> None:
            self.ocp = ocp
            self.manager = ocp.CheckpointManager(
                folder, options=ocp.CheckpointManagerOptions(**options)
            )

        def on_epoch_end(self, epoch: int, logs: dict[str, float]) -> bool:
            state = {
                "trainable": [np.full(3, epoch, np.float32), np.zeros((2, 2))],
                "optimizer": {"iterations": np.int32(epoch), "learning_rate": 0.5},
                "epoch": epoch,
            }
            args = self.ocp.args.StandardSave(state)
            return bool(self.manager.save(epoch, args=args, metrics=logs))

    def program(ocp: Any, root: Path) -> Any:
        losses = [3.0, 1.0, 2.0, 0.5, 4.0]
        found = []
        for name, options in {
            "last": {"max_to_keep": 2},
            "best": {"max_to_keep": 2, "best_fn": lambda logs: logs["loss"], "best_mode": "min"},
            "rare": {"save_interval_steps": 2, "step_prefix": "epoch"},
        }.items():
            callback = Callback(ocp, root / name, **options)
            saved = [callback.on_epoch_end(at, {"loss": loss}) for at, loss in enumerate(losses)]
            callback.manager.wait_until_finished()
            step = 3 if name == "best" else callback.manager.latest_step()
            restored = callback.manager.restore(step)
            like = jax.tree.map(lambda leaf: leaf, restored)
            again = callback.manager.restore(step, args=ocp.args.StandardRestore(like))
            callback.manager.close()
            folders = [path.name for path in (root / name).iterdir()]
            kept = [each for each in folders if each.rpartition("_")[2] == str(step)]
            found.append((saved, restored, again, kept))
        return found

    run_both(program, tmp_path)


def test_a_manager_of_models_and_optimizers(tmp_path: Path) -> None:
    """As Tunix: policies of saving and keeping, items that may be absent, metadata of a step, a
    restore that says what there is, or that there is nothing.
    """

    @dataclasses.dataclass
    class Options:
        interval: int = 2
        keep: int = 3

    class Manager:
        def __init__(self, ocp: Any, root: Path, options: Options) -> None:
            policies = ocp.checkpoint_managers
            self.ocp = ocp
            self.manager = ocp.CheckpointManager(
                root,
                item_names=("model_params", "optimizer_state"),
                options=ocp.CheckpointManagerOptions(
                    save_decision_policy=policies.AnySavePolicy(
                        [policies.FixedIntervalPolicy(options.interval)]
                    ),
                    preservation_policy=policies.LatestN(options.keep),
                    async_options=ocp.AsyncOptions(timeout_secs=300),
                ),
            )

        def save(self, step: int, model: Any, optimizer: Any = None, **about: Any) -> bool:
            args = self.ocp.args
            items = {"model_params": args.PyTreeSave(model)}
            if optimizer is not None:
                items["optimizer_state"] = args.PyTreeSave(optimizer)
            given = args.Composite(**items)
            return bool(self.manager.save(step, args=given, custom_metadata=about or None))

        def maybe_restore(self, model: Any, step: int | None = None) -> tuple[int, Any, Any]:
            step = self.manager.latest_step() if step is None else step
            if step is None:
                return 0, model, None
            metadata = self.manager.metadata(step)
            how = self.ocp.checkpoint_utils.construct_restore_args(target=model)
            items = {"model_params": self.ocp.args.PyTreeRestore(item=model, restore_args=how)}
            if metadata.item_metadata.get("optimizer_state") is not None:
                items["optimizer_state"] = self.ocp.args.PyTreeRestore()
            found = self.manager.restore(step, args=self.ocp.args.Composite(**items))
            optimizer = found["optimizer_state"] if "optimizer_state" in items else None
            return step, found["model_params"], (optimizer, dict(metadata.custom_metadata))

    def program(ocp: Any, root: Path) -> Any:
        manager = Manager(ocp, root, Options())
        first = manager.maybe_restore(_params())
        saved = []
        for step in range(9):
            optimizer = {"count": jnp.int32(step), "mu": _params()} if step % 4 == 0 else None
            saved.append(manager.save(step, _params(step), optimizer, epoch=step))
        manager.manager.wait_until_finished()
        found = [manager.maybe_restore(_params()), manager.maybe_restore(_params(), 6)]
        steps = list(manager.manager.all_steps())
        missing = outcome(lambda: manager.maybe_restore(_params(), 5))
        manager.manager.close()
        return first, saved, steps, found, missing

    run_both(program, tmp_path)


def test_a_policy_and_its_configuration(tmp_path: Path) -> None:
    """As Brax: folders of padded steps that a checkpointer fills, a configuration beside them,
    replaced by force, loaded with and without a structure.
    """

    def program(ocp: Any, root: Path) -> Any:
        checkpointer = ocp.PyTreeCheckpointer()
        params = ({"mean": jnp.zeros(3), "count": jnp.int32(2)}, _params(2.0), _params(3.0))
        for step in (10, 20, 20):
            path = epath.Path(root) / f"{step:012d}"
            save_args = jax.tree.map(lambda _: ocp.SaveArgs(), params)
            checkpointer.save(path, params, force=True, save_args=save_args)
            (path / "config.json").write_text(json.dumps({"step": step}))
        latest = max(each for each in root.iterdir() if each.is_dir())
        how = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), list(params))
        return [
            latest.name,
            json.loads((latest / "config.json").read_text()),
            checkpointer.restore(latest),
            checkpointer.restore(latest, item=list(params), restore_args=how),
            outcome(lambda: checkpointer.save(latest, params)),
            outcome(lambda: checkpointer.restore(root / "none")),
        ]

    run_both(program, tmp_path)


def test_assets_beside_parameters(tmp_path: Path) -> None:
    """As openpi: a handler that calls back in the background, items without args, parameters read
    by themselves out of the step's folder.
    """

    def program(ocp: Any, root: Path) -> Any:
        class CallbackHandler(ocp.AsyncCheckpointHandler):  # type: ignore[misc]
            def save(self, directory: Any, args: Any) -> None:
                args.callback(directory)

            async def async_save(self, directory: Any, args: Any) -> list[Any]:
                work = asyncio.to_thread(self.save, directory, args)
                return [ocp.future.CommitFutureAwaitingContractedSignals(work)]

            def restore(self, *args: Any, **kwargs: Any) -> Any:
                raise NotImplementedError("CallbackHandler does not support restore")

        @ocp.args.register_with_handler(CallbackHandler, for_save=True)
        @dataclasses.dataclass
        class CallbackSave(ocp.args.CheckpointArgs):  # type: ignore[misc]
            callback: Any

        @ocp.args.register_with_handler(CallbackHandler, for_restore=True)
        class CallbackRestore(ocp.args.CheckpointArgs):  # type: ignore[misc]
            pass

        handlers = {
            "assets": CallbackHandler(),
            "train_state": ocp.PyTreeCheckpointHandler(),
            "params": ocp.PyTreeCheckpointHandler(),
        }
        options = ocp.CheckpointManagerOptions(
            max_to_keep=1, keep_period=5, create=False, async_options=ocp.AsyncOptions(7200)
        )
        manager = ocp.CheckpointManager(root, item_handlers=handlers, options=options)
        state = {"step": 3, "opt": {"mu": jnp.ones(3)}}
        for step in (5, 6, 7):
            items = {
                "assets": lambda folder: (folder / "norm.json").write_text("{}"),
                "train_state": state,
                "params": {"params": _params(step)},
            }
            manager.save(step, items)
        manager.wait_until_finished()
        like = {"train_state": state, "params": {"params": _params()}}
        restored = manager.restore(7, items=like)
        steps = list(manager.all_steps())
        manager.close()
        with ocp.PyTreeCheckpointer() as checkpointer:
            metadata = checkpointer.metadata(root / "7" / "params")
            item = {"params": metadata.item_metadata["params"]}
            how = jax.tree.map(lambda _: ocp.ArrayRestoreArgs(dtype=jnp.float32), item)
            args = ocp.args.PyTreeRestore(item=item, restore_args=how)
            alone = checkpointer.restore(root / "7" / "params", args)
        return steps, restored["train_state"], restored["params"], alone

    run_both(program, tmp_path)


def test_an_index_beside_a_state(tmp_path: Path) -> None:
    """As AXLearn: names of steps, a function that says when to save, an index in JSON, paths of
    steps, and what happens where there is none.
    """

    def program(ocp: Any, root: Path) -> Any:
        names = ocp.step.standard_name_format(step_prefix="step", step_format_fixed_length=8)
        manager = ocp.CheckpointManager(
            directory=root,
            options=ocp.CheckpointManagerOptions(
                create=True,
                max_to_keep=2,
                enable_async_checkpointing=True,
                step_name_format=names,
                should_save_fn=lambda step, last: step % 3 == 0,
                enable_background_delete=True,
                async_options=ocp.options.AsyncOptions(timeout_secs=300),
            ),
            item_handlers={
                "index": ocp.JsonCheckpointHandler(filename="index"),
                "state": ocp.PyTreeCheckpointHandler(save_concurrent_gb=1),
            },
        )

        def restore(step: int | None) -> Any:
            how = jax.tree.map(ocp.checkpoint_utils.construct_restore_args, _params())
            args = ocp.args.Composite(
                index=ocp.args.JsonRestore(None),
                state=ocp.args.PyTreeRestore(item=_params(), restore_args=how),
            )
            found = manager.restore(step, args=args)
            return found["index"], found["state"]

        empty = outcome(lambda: restore(None))
        for step in range(10):
            args = ocp.args.Composite(
                index=ocp.args.JsonSave([["step", step]]),
                state=ocp.args.PyTreeSave(item=_params(step)),
            )
            manager.save(step=step, args=args)
            assert not manager.reached_preemption(step)
        manager.wait_until_finished()
        found = [empty, restore(None), restore(6), outcome(lambda: restore(7))]
        manager.close()
        paths = sorted(path.name for path in ocp.utils.checkpoint_steps_paths(root))
        built = str(ocp.step.build_step_path(root, names, 9)).rpartition("/")[2]
        return [*found, paths, built, sorted(ocp.utils.checkpoint_steps(root))]

    run_both(program, tmp_path)


def test_parameters_out_of_a_state(tmp_path: Path) -> None:
    """As MaxText: items with chunk sizes and handlers of one replica, parameters alone by
    transforms, a full state by v1.
    """

    def program(ocp: Any, root: Path) -> Any:
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True)
        manager = ocp.CheckpointManager(
            root / "run",
            item_names=("items",),
            item_handlers={"items": handler},
            options=ocp.CheckpointManagerOptions(create=True, save_interval_steps=1),
        )
        state = {"params": _params(4.0), "opt_state": {"mu": _params()}, "step": jnp.int32(7)}
        save_args = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=1 << 20), state)
        args = ocp.args.PyTreeSave(
            item=state, save_args=save_args, ocdbt_target_data_file_size=1 << 20
        )
        manager.save(7, args=ocp.args.Composite(items=args), force=True)
        manager.wait_until_finished()

        def how(leaf: Any) -> Any:
            return ocp.type_handlers.SingleReplicaArrayRestoreArgs(
                sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype
            )

        restore_args = jax.tree.map(
            lambda leaf: ocp.type_handlers.ArrayRestoreArgs(sharding=leaf.sharding), state
        )
        made = jax.tree.map(how, state)
        args = ocp.args.PyTreeRestore(item=state, restore_args=restore_args)
        whole = manager.restore(7, args=ocp.args.Composite(items=args))["items"]
        manager.close()
        checkpointer = ocp.Checkpointer(
            ocp.PyTreeCheckpointHandler(restore_concurrent_gb=8, use_ocdbt=True, use_zarr3=True)
        )
        params = checkpointer.restore(
            epath.Path(root) / "run" / "7" / "items",
            item={"params": state["params"]},
            transforms={},
            restore_args={"params": ocp.checkpoint_utils.construct_restore_args(state["params"])},
        )
        ocp.PyTreeCheckpointer(use_ocdbt=True).save(root / "out", params, force=True)
        alone = ocp.StandardCheckpointer().restore(root / "out", params)
        return whole, params, alone, jax.tree.leaves(made)[0].dtype

    run_both(program, tmp_path)


def test_a_trainer_with_a_data_iterator(tmp_path: Path) -> None:
    """As MaxText: a manager of a registry, or of handlers by item, whose iterator is saved by a
    handler of the program's with arguments of its own, beside a state of chunks; a restart.
    """

    class Iterator:
        def __init__(self) -> None:
            self.at = 0

        def get_state(self) -> bytes:
            return json.dumps({"at": self.at}).encode()

        def set_state(self, state: bytes) -> None:
            self.at = json.loads(state)["at"]

    def program(ocp: Any, root: Path) -> Any:
        class GrainHandler(ocp.CheckpointHandler):  # type: ignore[misc]
            def _file(self, directory: Any) -> Any:
                return directory / f"process_{jax.process_index()}-of-{jax.process_count()}.json"

            def save(self, directory: Any, item: Any = None, args: Any = None) -> None:
                self._file(directory).write_bytes((item or args.item).get_state())

            def restore(self, directory: Any, item: Any = None, args: Any = None) -> Any:
                item = item or args.item
                item.set_state(self._file(directory).read_bytes())
                return item

        @ocp.args.register_with_handler(GrainHandler, for_save=True)
        @dataclasses.dataclass
        class GrainSave(ocp.args.CheckpointArgs):  # type: ignore[misc]
            item: Any

        @ocp.args.register_with_handler(GrainHandler, for_restore=True)
        @dataclasses.dataclass
        class GrainRestore(ocp.args.CheckpointArgs):  # type: ignore[misc]
            item: Any

        def handler() -> Any:
            return ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True)

        def with_registry() -> dict[str, Any]:
            registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
            for args in (ocp.args.PyTreeSave, ocp.args.PyTreeRestore):
                registry.add("items", args, handler())
            for args in (GrainSave, GrainRestore):
                registry.add("iter", args, GrainHandler())
            return {"handler_registry": registry}

        def with_handlers() -> dict[str, Any]:
            handlers = {"items": handler(), "iter": GrainHandler()}
            return {"item_names": ("items", "iter"), "item_handlers": handlers}

        found = []
        for name, made in (("registry", with_registry), ("handlers", with_handlers)):
            options = ocp.CheckpointManagerOptions(
                create=True, save_interval_steps=2, enable_async_checkpointing=True, max_to_keep=2
            )
            iterator = Iterator()
            with ocp.CheckpointManager(root / name, options=options, **made()) as manager:
                for step in range(5):
                    iterator.at = 10 * step
                    state = {"params": _params(step), "step": jnp.int32(step)}
                    save_args = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=1 << 20), state)
                    items = ocp.args.PyTreeSave(item=state, save_args=save_args)
                    both = ocp.args.Composite(items=items, iter=GrainSave(item=iterator))
                    found.append(manager.save(step, args=both))
                manager.wait_until_finished()
            with ocp.CheckpointManager(root / name, options=options, **made()) as manager:
                state = {"params": _params(), "step": jnp.int32(0)}
                how = ocp.checkpoint_utils.construct_restore_args(state)
                items = ocp.args.PyTreeRestore(item=state, restore_args=how)
                both = ocp.args.Composite(items=items, iter=GrainRestore(item=Iterator()))
                step = manager.latest_step()
                restored = manager.restore(step, args=both)
                found += [list(manager.all_steps()), restored["items"], restored["iter"].at]
        return found

    assert 40 in run_both(program, tmp_path)


def test_items_that_know_their_handlers(tmp_path: Path) -> None:
    """As kauldron: a manager made late, the usual item among named ones, new steps iterated."""

    def program(ocp: Any, root: Path) -> Any:
        default = ocp.checkpoint_manager.DEFAULT_ITEM_NAME
        options = ocp.CheckpointManagerOptions(
            max_to_keep=3,
            step_prefix="ckpt",
            create=True,
            async_options=ocp.AsyncOptions(timeout_secs=60 * 30),
            multiprocessing_options=ocp.options.MultiprocessingOptions(),
            file_options=ocp.checkpoint_manager.FileOptions(path_permission_mode=0o770),
        )
        handlers = {default: ocp.StandardCheckpointHandler(), "ds": ocp.JsonCheckpointHandler()}
        with ocp.CheckpointManager(root, options=options, item_handlers=handlers) as manager:
            for step in (1, 2):
                args = ocp.args.Composite(
                    **{default: ocp.args.StandardSave(_params(step))},
                    ds=ocp.args.JsonSave({"at": step}),
                )
                manager.save(step, args=args)
            manager.wait_until_finished()
            manager.reload()
            wanted = ocp.args.Composite(
                **{default: ocp.args.StandardRestore(_params())}, ds=ocp.args.JsonRestore()
            )
            found = manager.restore(2, args=wanted)
            shape = manager.item_metadata(2)[default]["layer_0"]["kernel"].shape
        new = ocp.checkpoint_utils.checkpoints_iterator(
            checkpoint_dir=root, step_prefix="ckpt", step_format_fixed_length=None, timeout=0
        )
        return found[default], found["ds"], shape, list(new)

    run_both(program, tmp_path)
