"""global_max and broadcast_one_to_all in one process, and what they refuse."""

from __future__ import annotations

import numpy as np
import pytest

from holdfast.multihost import broadcast_one_to_all, global_max
from holdfast.multihost.group.collectives import bounded
from holdfast.multihost.group.group_client import Deadline


def test_an_error_of_a_computation_is_raised_as_it_is() -> None:
    """It is not its own cause, where nobody is lost."""
    with pytest.raises(ZeroDivisionError) as caught:
        bounded("a quotient", lambda: 1 // 0, Deadline(10.0))
    assert caught.value.__cause__ is None


def test_values_that_do_not_fit() -> None:
    """What is no integer of 32 bits is refused with its value; so is a leaf that is no array of
    numbers, with its path.
    """
    with pytest.raises(
        ValueError,
        match="global_max of 2147483648: expected integers from -2147483648 to 2147483647",
    ):
        global_max([0, 2**31])
    for value in (0.7, np.float32(2), "3"):
        with pytest.raises(TypeError, match=f"global_max of {value}: expected integers from"):
            global_max([0, value])  # type: ignore[list-item]
    with pytest.raises(
        TypeError, match=r"leaf \['a'\]\[1\] is str .*, expected an array of numbers"
    ):
        broadcast_one_to_all({"a": [1, "text"]})


def test_alone_they_answer_at_once() -> None:
    """In one process both give back what they get, arrays as numpy."""
    assert global_max([3, np.int64(-4)]) == [3, -4]
    assert global_max([]) == []
    found = broadcast_one_to_all({"x": [1.5, np.arange(3)], "none": None})
    assert isinstance(found["x"][0], np.ndarray)
    assert found["none"] is None
    np.testing.assert_array_equal(found["x"][1], np.arange(3))
