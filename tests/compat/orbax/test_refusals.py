"""Refusals: what they say, and what a refused name can still be used for."""

from __future__ import annotations

import pytest

from holdfast.compat import orbax as ocp
from holdfast.compat.orbax.refusals import make_module, refusal_of, refuse, stand_in


def test_a_stand_in_cannot_be_called() -> None:
    """Annotations, isinstance and subclasses work; a call, a subclass's too, names the call, the
    nearest thing and the page.
    """
    handler = stand_in("orbax.checkpoint", "CheckpointHandler", "save a tree")

    class Mine(handler):  # type: ignore[misc]
        pass

    assert (
        not isinstance(3, handler)
        and refusal_of(handler) == "save a tree"
        and refusal_of(dict) is None
    )
    for cls, name in ((handler, r"orbax\.checkpoint\.CheckpointHandler"), (Mine, "Mine")):
        with pytest.raises(
            NotImplementedError,
            match=(
                rf"{name} is not covered by holdfast\.compat\.orbax: save a tree\. See"
                r" docs/from-orbax\.md"
            ),
        ):
            cls()


def test_the_first_argument_that_was_given_is_named() -> None:
    """None, False and () were not given."""
    refuse("f", "leave it out", a=None, b=False, c=())
    with pytest.raises(NotImplementedError, match=r"f\(b=3\) is not covered.*leave it out"):
        refuse("f", "leave it out", a=None, b=3)


def test_a_refused_module_refuses_each_name() -> None:
    """Its names can be imported, and say why when they are called; a name that Orbax does not have
    is an AttributeError elsewhere.
    """
    module = make_module("nothing_here", reason="use another")
    with pytest.raises(
        NotImplementedError, match=r"nothing_here\.anything is not covered.*use another"
    ):
        module.anything(1)
    with pytest.raises(AttributeError, match="'no_such_name', and neither has orbax"):
        _ = ocp.no_such_name  # type: ignore[attr-defined]
