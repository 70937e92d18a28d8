"""Draws that once came back otherwise, or were refused too late or without a word of ours."""

from __future__ import annotations

from collections.abc import Mapping

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from .destinations import Draw
from .nodes import Box, Point

FOUND: Mapping[str, Draw] = {
    "another byte order in a state": Draw("iterator", np.arange(3, dtype=">i4")),
    "texts in a state": Draw("iterator", np.array(["ab", "c"])),
    "fields in a state": Draw("iterator", np.zeros(2, [("a", "i4"), ("b", ">f8")])),
    "a scalar of text in a state": Draw("iterator", np.str_("a")),
    "fields that do not lie in their order": Draw(
        "iterator", np.zeros(1, {"names": ["b", "a"], "formats": ["i4", "i2"], "offsets": [4, 0]})
    ),
    "a namedtuple in a state": Draw("iterator", Point(1, 2)),
    "a bytearray in a state": Draw("iterator", bytearray(b"a")),
    "an array that its computation owes": Draw("failed", [1.0, 2.0], dice=8),
    "an array of jax in a state": Draw("iterator", jnp.asarray(0.5)),
    "an array of jax in a state, where transfers are refused": Draw(
        "iterator", [jnp.asarray(1)], context="transfer_guard"
    ),
    "half a character in a state": Draw("iterator", "\ud800"),
    "an int of many digits in a state": Draw("iterator", 10**5000),
    "two keys of JSON that become one": Draw("JSON", {1: "a", "1": "b"}),
    "a number of numpy in JSON": Draw("JSON", {"a": np.int32(1)}),
    "an int of many digits in JSON": Draw("JSON", [10**5000]),
    "a key that is no text in metadata": Draw("metadata", {True: 1}),
    "metadata of orbax that is no dict": Draw("metadata of orbax", [1]),
    "a metric without a name": Draw("metrics", {5: 1.0}),
    "metrics that are a number": Draw("metrics", 0.5),
    "a metric of many digits": Draw("metrics", {"a": 10**5000}),
    "a metric that is a text": Draw("metrics", {"a": "1"}),
    "a number on a mesh": Draw("holdfast", {"a": 7}, "elsewhere"),
    "a weak array": Draw("holdfast", {"a": jnp.asarray(0.5)}, "like"),
    "a weak array as it was": Draw("converted", {"a": jnp.asarray(0.5)}, "saved"),
    "an int without a sign": Draw("holdfast", 0, "cast", dice=1),
    "an int that is rounded": Draw("holdfast", 2**24 + 1, "cast", dice=9),
    "numbers that wrap": Draw("holdfast", [np.array([300, -1, 2**31])] * 9, "cast"),
    "small numbers that wrap": Draw("holdfast", [np.array([9], ml_dtypes.uint4)] * 9, "cast"),
    "keys within a class that have no order": Draw("manager", Box({1: 2, "a": 3}), "like"),
    "keys of one type that have no order": Draw("holdfast", {1j: 2, 2j: 3}, "like"),
    "a mask in orbax": Draw("orbax", {"a": np.ma.masked_array([1], [True])}, "like"),
    "a large int in orbax": Draw("through orbax", {"a": 2**70}, "like"),
    "a dtype that orbax lacks, beside others": Draw(
        "orbax", (2, 2, np.array(1, ml_dtypes.float6_e2m3fn)), "like"
    ),
    "an array called format": Draw("safetensors", {"format": np.ones(1), "step": np.ones(1)}),
    "a text called step": Draw("safetensors", {"step": "x"}),
    "a name that is not printed": Draw("safetensors", {"a\nb": np.ones(1), "ax0ab": np.ones(1)}),
    "an array called as the header": Draw("safetensors", {"__metadata__": np.ones(1)}),
    "half a character in safetensors": Draw("safetensors", {"a": "\ud800"}),
}
