"""Flat trees: the same program on Orbax's and on holdfast's."""

from __future__ import annotations

from typing import Any

import orbax.checkpoint as real

from holdfast.compat import orbax as ours
from tests.support.orbax_programs import assert_equal


def test_flat_trees() -> None:
    """`to_flat_dict` and `from_flat_dict`, with and without a separator, targets and empty
    nodes.
    """

    def program(ocp: Any) -> Any:
        tree = {"a": [1, {"b": 2}], "none": None, "empty": {}, "pair": (3, ())}
        flat = ocp.tree.to_flat_dict(tree, sep="/")
        return [
            flat,
            ocp.utils.to_flat_dict(tree, sep="/", keep_empty_nodes=True),
            {"/".join(path): leaf for path, leaf in ocp.utils.to_flat_dict(tree).items()},
            ocp.utils.from_flat_dict(flat, sep="/"),
            ocp.utils.from_flat_dict(flat, target=tree, sep="/"),
            ocp.tree.get_param_names(tree, include_empty_nodes=False),
            ocp.tree.is_flat_dict({"a": 1}) and not ocp.tree.is_flat_dict(tree),
            [ocp.utils.is_empty_node(node) for node in ({}, None, [1], 3, ())],
        ]

    assert_equal(program(ours), program(real))
