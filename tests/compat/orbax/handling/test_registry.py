"""Registries of handlers, and items that a step lacks: the same on Orbax and on holdfast."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.support.orbax_programs import outcome, run_both

TREE = {"w": np.arange(3.0)}


def _registry(ocp: Any) -> Any:
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    registry.add("state", ocp.args.StandardSave)
    registry.add("state", ocp.args.StandardRestore)
    registry.add("about", ocp.args.JsonSave, ocp.JsonCheckpointHandler())
    registry.add("about", ocp.args.JsonRestore, ocp.JsonCheckpointHandler)
    return registry


def _both(ocp: Any) -> Any:
    return ocp.args.Composite(state=ocp.args.StandardSave(TREE), about=ocp.args.JsonSave({"a": 1}))


def test_a_registry_has_handlers_by_item_and_arguments(tmp_path: Path) -> None:
    """It is asked by classes and by arguments, copied, and refuses a second entry."""

    def program(ocp: Any, root: Path) -> Any:
        args = ocp.args
        registry = _registry(ocp)
        copied = ocp.handlers.DefaultCheckpointHandlerRegistry(registry)
        by_item = ocp.handlers.create_default_handler_registry(
            state=ocp.StandardCheckpointHandler(), about=ocp.JsonCheckpointHandler()
        )
        found = registry.get("state", args.StandardSave)
        return {
            "has": [
                registry.has("state", args.StandardSave),
                registry.has("state", args.StandardSave(TREE)),
                registry.has("about", args.StandardSave),
                registry.has(None, args.StandardSave),
            ],
            "found": isinstance(found, ocp.StandardCheckpointHandler),
            "not found": outcome(lambda: registry.get("other", args.StandardSave)),
            "again": outcome(lambda: registry.add("state", args.StandardSave)),
            "unknown": outcome(lambda: registry.add("state", args.CheckpointArgs)),
            "copied": len(copied.get_all_entries()),
            "by item": sorted(item for item, _ in by_item.get_all_entries()),
        }

    run_both(program, tmp_path)


def test_a_manager_with_a_registry(tmp_path: Path) -> None:
    """It restores and describes without arguments, takes other items, and refuses arguments that
    an item has no entry for.
    """

    def program(ocp: Any, root: Path) -> Any:
        args = ocp.args
        with ocp.CheckpointManager(root / "a") as manager:
            manager.save(0, args=_both(ocp))
        with ocp.CheckpointManager(root / "a", handler_registry=_registry(ocp)) as manager:
            known = manager.item_metadata(0)
            found = {
                "restored": manager.restore(0),
                "known": [known.about, known.state["w"].shape],
                "saved": manager.save(1, args=_both(ocp)),
                "other kind": outcome(
                    lambda: manager.save(2, args=args.Composite(state=args.JsonSave({})))
                ),
                "other class": outcome(
                    lambda: manager.save(3, args=args.Composite(state=args.PyTreeSave(TREE)))
                ),
                "other item": manager.save(4, args=args.Composite(more=args.StandardSave(TREE))),
            }
            manager.wait_until_finished()
            found["steps"] = manager.all_steps()
        one = ocp.handlers.DefaultCheckpointHandlerRegistry()
        one.add("default", args.StandardSave)
        one.add("default", args.StandardRestore)
        with ocp.CheckpointManager(root / "one", handler_registry=one) as manager:
            manager.save(0, args=args.StandardSave(TREE))
            found["one"] = [
                outcome(lambda: manager.save(1, args=args.PyTreeSave(TREE))),
                manager.restore(0),
            ]
        for given in ({"item_names": ("state",)}, {"item_handlers": {"state": None}}):
            found[str(given)] = outcome(
                lambda given=given: ocp.CheckpointManager(
                    root / "a", handler_registry=_registry(ocp), **given
                )
            )
        return found

    run_both(program, tmp_path)


def test_a_composite_handler_with_a_registry(tmp_path: Path) -> None:
    """A checkpointer of such a handler saves and restores its items."""

    def program(ocp: Any, root: Path) -> Any:
        handler = ocp.CompositeCheckpointHandler(handler_registry=_registry(ocp))
        checkpointer = ocp.Checkpointer(handler)
        checkpointer.save(root / "c", args=_both(ocp))
        return checkpointer.restore(root / "c")

    run_both(program, tmp_path)


def test_an_item_that_is_left_out(tmp_path: Path) -> None:
    """None for an item that was saved before leaves it out of a step, which restores it as None;
    for an item that nobody knows it is a ValueError. One that is not named at all is not there.
    """

    def program(ocp: Any, root: Path) -> Any:
        args = ocp.args
        handlers = {"state": ocp.StandardCheckpointHandler(), "about": ocp.JsonCheckpointHandler()}
        without = args.Composite(state=args.StandardSave(TREE), about=None)
        with ocp.CheckpointManager(root / "a") as manager:
            found = [outcome(lambda: manager.save(0, args=without))]
            manager.save(1, args=_both(ocp))
            found.append(manager.save(2, args=without))
            manager.wait_until_finished()
            asked = args.Composite(about=args.JsonRestore())
            found += [manager.restore(2), manager.restore(2, args=asked), manager.restore(1)]
            found.append(manager.item_metadata(2).about)
            manager.save(3, args=args.Composite(state=args.StandardSave(TREE)))
            manager.wait_until_finished()
            found += [manager.restore(3), dict(manager.item_metadata(3)).keys()]
            found.append(manager.metadata(2).custom_metadata)
        for given in ({}, {"item_handlers": handlers}):
            with ocp.CheckpointManager(root / "a", **given) as manager:
                for step in (2, 3):
                    found += [manager.restore(step), dict(manager.item_metadata(step)).keys()]
                found.append(manager.restore(2, args=asked))
                found.append(outcome(lambda manager=manager: manager.restore(3, args=asked)))
        return found

    run_both(program, tmp_path)
