"""Surgery against numpy, and what is said of rules that do not fit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.checkpoint import (
    Add,
    Cast,
    CheckpointError,
    Drop,
    Fuse,
    Rename,
    Repeat,
    Reshape,
    Split,
    Stack,
    StepNotFound,
    Transpose,
    TreeMismatch,
    Unstack,
    UnsupportedLeaf,
    convert,
    load,
    save,
    structure,
)
from holdfast.checkpoint.format.tree import plain_name
from holdfast.checkpoint.restoring import view_reader
from holdfast.checkpoint.restoring.reader import ReadRequest
from holdfast.checkpoint.restoring.surgery import operate
from holdfast.checkpoint.restoring.surgery_rules import Rules
from tests.support.array_readers import MemoryReader, item_of

RULES = 20  # in one drawn operation
DTYPES = ("float32", "bfloat16", "int8", "float16")


def fresh(nbytes: int) -> np.ndarray[Any, Any]:
    return np.empty(nbytes, np.uint8)


class Model:
    """A tree as numpy has it, and the rules that have led there: `draw` adds one of each."""

    def __init__(self, draw: Any) -> None:
        self._draw = draw
        self.rules: list[dict[str, Any]] = []
        self._names = 0
        rng = np.random.default_rng(draw(st.integers(0, 99)))
        self.families = {"layer": draw(st.integers(1, 4))}
        shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
        self.arrays = {
            f"layer.{place}.w": rng.integers(-99, 99, shape).astype(np.float32)
            for place in range(self.families["layer"])
        }
        self.arrays["alone"] = rng.integers(-99, 99, (4, 6)).astype(np.int8)
        self.stored = {name: array.copy() for name, array in self.arrays.items()}

    def _new(self) -> str:
        self._names += 1
        return f"n{self._names}"

    def _one(self, choices: list[Any]) -> Any:
        return choices[self._draw(st.integers(0, len(choices) - 1))]

    def step(self) -> None:
        """Adds one rule for one leaf, or for a family of leaves."""
        families = [
            name
            for name, count in self.families.items()
            if all(f"{name}.{place}.w" in self.arrays for place in range(count))
            and len({self._kind(name, place) for place in range(count)}) == 1
        ]
        if families and self._draw(st.booleans()):
            self._join(self._one(families))
        elif self.arrays:
            self._change(self._one(list(self.arrays)))

    def _kind(self, family: str, place: int) -> Any:
        array = self.arrays[f"{family}.{place}.w"]
        return array.shape, array.dtype.name

    def _shape_rules(self, array: Any) -> tuple[list[Any], Any]:
        """Returns drawn rules for one array, and what numpy makes of it."""
        rules: list[Any] = []
        for kind in self._draw(st.lists(st.sampled_from(["t", "c", "r", "repeat"]), max_size=3)):
            if kind == "t":
                axes = self._draw(st.none() | st.permutations(range(array.ndim)).map(tuple))
                rules.append(Transpose(axes))
                array = np.transpose(array, axes)
            elif kind == "c":
                name = self._draw(st.sampled_from(DTYPES))
                rules.append(Cast(name))
                array = array.astype(jnp.dtype(name))
            elif kind == "r":
                shape = self._one([(-1,), (1, -1), array.shape[::-1], (array.size, 1)])
                rules.append(Reshape(shape))
                array = array.reshape(shape)
            elif array.ndim and array.size < 200:
                axis = self._draw(st.integers(-array.ndim, array.ndim - 1))
                rules.append(Repeat(2, axis))
                array = np.repeat(array, 2, axis)
        return rules, array

    def _join(self, family: str) -> None:
        count = self.families.pop(family)
        leaves = [self.arrays.pop(f"{family}.{place}.w") for place in range(count)]
        rules, array = self._shape_rules(leaves[0])
        made = [array]
        for leaf in leaves[1:]:
            made.append(apply(rules, leaf))
        pattern = rf"{family}\.(\d+)\.w"
        name = self._new()
        rank = array.ndim
        if rank and self._draw(st.booleans()):
            axis = self._draw(st.integers(-rank, rank - 1))
            order = self._draw(st.permutations(range(count)))
            rule: Any = Fuse(name, [str(place) for place in order], axis=axis)
            self.arrays[name] = np.concatenate([made[place] for place in order], axis)
        else:
            axis = self._draw(st.integers(-rank - 1, rank))
            rule = Stack(name, axis=axis)
            self.arrays[name] = np.stack(made, axis)
        self.rules.append({pattern: [*rules, rule]})

    def _change(self, name: str) -> None:
        rules, array = self._shape_rules(self.arrays.pop(name))
        new = self._new()
        kind = self._draw(st.sampled_from(["rename", "unstack", "split", "drop", "add", "none"]))
        axis = array.ndim - 1
        if kind == "unstack" and array.ndim and array.shape[axis] < 5:
            rules.append(Unstack(f"{new}.{{index}}.w", axis=axis))
            self.families[new] = array.shape[axis]
            for place in range(array.shape[axis]):
                self.arrays[f"{new}.{place}.w"] = np.take(array, place, axis)
        elif kind == "split" and array.ndim:
            first = self._draw(st.integers(0, array.shape[axis]))
            sizes = {"a": first, "b": array.shape[axis] - first}
            rules.append(Split(f"{new}.{{name}}", sizes, axis=axis))
            self.arrays[f"{new}.a"], self.arrays[f"{new}.b"] = np.split(array, [first], axis)
        elif kind == "drop" and len(self.arrays) > 1:
            rules.append(Drop())
        elif kind == "add" or kind == "rename" or not rules:
            rules.append(new)
            self.arrays[new] = array
        else:
            self.arrays[name] = array
        mapping: dict[str, Any] = {re.escape(name): rules}
        if kind == "add":
            value = np.arange(6, dtype=np.int8).reshape(2, 3)
            mapping[f"{new}_added"] = Add(value)
            self.arrays[f"{new}_added"] = value
        self.rules.append(mapping)


def apply(rules: list[Any], array: Any) -> Any:
    """Returns what numpy makes of an array by rules of shape."""
    for rule in rules:
        match rule:
            case Transpose(axes):
                array = np.transpose(array, axes)
            case Cast(name):
                array = array.astype(jnp.dtype(name))
            case Reshape(shape):
                array = array.reshape(shape)
            case Repeat(count, axis):
                array = np.repeat(array, count, axis)
    return array


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_drawn_rules_do_what_numpy_does(data: st.DataObject) -> None:
    """Up to twenty rules in a row: names, shapes, dtypes, and any region of any leaf, bit for
    bit.
    """
    compare(data)


@pytest.mark.slow
@settings(max_examples=1000, deadline=None)
@given(st.data())
def test_many_drawn_rules_do_what_numpy_does(data: st.DataObject) -> None:
    """The same a thousand times."""
    compare(data)


def compare(data: st.DataObject) -> None:
    """Draws a tree and rules, and compares what is made of it with what numpy makes."""
    model = Model(data.draw)
    for _ in range(data.draw(st.integers(1, RULES))):
        model.step()
    reader = MemoryReader(model.stored)
    item, made = operate(item_of(model.stored), reader, model.rules)
    leaves = {plain_name(leaf.path): leaf for leaf in item.leaves}
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    assert leaves.keys() == model.arrays.keys()
    for name, expected in model.arrays.items():
        leaf = leaves[name]
        assert (leaf.shape, leaf.numpy_dtype) == (expected.shape, expected.dtype), name
        bounds = [tuple(sorted(rng.integers(0, size + 1, 2).tolist())) for size in leaf.shape]
        for region in (tuple((0, size) for size in leaf.shape), tuple(bounds)):
            read = ReadRequest(leaf, region)
            made.fill([read], fresh)
            cut = expected[tuple(slice(*each) for each in region)]
            assert read.array is not None and read.array.tobytes() == cut.tobytes(), name


def scanned(layers: int) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(0)
    return {
        f"model.layers.{layer}.{name}.weight": rng.random((6, 4), np.float32)
        for layer in range(layers)
        for name in "qkv"
    }


TO_SCANNED: Rules = [
    {
        r"model\.layers\.(\d+)\.([qkv])\.weight": [
            Transpose(),
            Fuse(r"layers.\1.qkv", "qkv", by=2, axis=1),
        ]
    },
    {r"layers\.(\d+)\.qkv": Stack("params.layers.qkv.kernel")},
]
FROM_SCANNED: Rules = [
    {r"params\.layers\.qkv\.kernel": Unstack("layers.{index}.qkv")},
    {
        r"layers\.(\d+)\.qkv": [
            Split(r"model.layers.\1.{name}.weight", "qkv", axis=1),
            Transpose(),
        ]
    },
]


@pytest.mark.parametrize("layout", ["holdfast", "orbax", "safetensors"])
def test_there_and_back_through_each_layout(layout: str, tmp_path: Path) -> None:
    """Layers fused, stacked and transposed, and taken apart again, by `convert` and by `load`."""
    tree = scanned(12)
    save(tmp_path / "a", tree)
    there = convert(tmp_path / "a", tmp_path / "b", layout, rules=TO_SCANNED)
    made = structure(there)
    (shape,) = {leaf.shape for leaf in jax.tree.leaves(next(iter(made.items.values())).tree)}
    assert shape == (12, 4, 18)
    back = load(there, rules=FROM_SCANNED)
    flat = {".".join(key.key for key in path): leaf for path, leaf in paths(back)}
    assert flat.keys() == tree.keys()
    assert all(flat[name].tobytes() == tree[name].tobytes() for name in tree)


def paths(tree: Any) -> Any:
    return jax.tree_util.tree_leaves_with_path(tree)


def test_a_like_is_filled_with_its_shardings(tmp_path: Path) -> None:
    """`load(like, rules=)` gives sharded arrays, each region made of what it needs."""
    tree = scanned(4)
    save(tmp_path / "a", tree)
    mesh = jax.make_mesh((1,), ("d",))
    sharding = jax.NamedSharding(mesh, jax.P("d"))
    wanted = jax.ShapeDtypeStruct((4, 4, 18), jnp.float32, sharding=sharding)
    like = {"params": {"layers": {"qkv": {"kernel": wanted}}}}
    kernel = load(tmp_path / "a", like, rules=TO_SCANNED)["params"]["layers"]["qkv"]["kernel"]
    assert kernel.sharding == sharding
    expected = load(tmp_path / "a", rules=TO_SCANNED)["params"]["layers"]["qkv"]["kernel"]
    assert np.asarray(kernel).tobytes() == expected.tobytes()


def test_a_tree_stays_where_no_name_changes(tmp_path: Path) -> None:
    """Lists and tuples are there still after a cast; after a new name there are nested dicts."""
    tree = {"a": [np.ones(2, np.float32), (np.zeros(3), 7, "text")], "odd.name": np.arange(3)}
    save(tmp_path / "a", tree)
    cast = load(tmp_path / "a", rules={r"a\.0": Cast("bfloat16")})
    assert jax.tree.structure(cast) == jax.tree.structure(tree)
    assert cast["a"][0].dtype == jnp.bfloat16 and cast["a"][1][1:] == (7, "text")
    named = load(tmp_path / "a", rules={r"a\.0": r"b.c\.d"})
    assert sorted(named) == ["a", "b", "odd.name"] and list(named["b"]) == ["c.d"]
    assert sorted(named["a"]["1"]) == ["0", "1", "2"] and named["a"]["1"]["2"] == "text"


@pytest.mark.parametrize("layout", ["holdfast", "orbax"])
def test_a_chunk_is_read_once_for_all_its_layers(
    layout: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers stacked along the second axis, in chunks that are read whole, become safetensors: each
    stored leaf is read once, not once for each layer.
    """
    stacks = {
        name: np.random.default_rng(0).random((8, 5, 16), np.float32) for name in ("q", "k", "v")
    }
    save(tmp_path / "a", stacks, layout=layout)
    filled: list[int] = []
    inner = view_reader._filled

    def count(reader: Any, batch: list[ReadRequest], allocate: Any) -> Any:
        if not isinstance(reader, view_reader.ViewReader):
            filled.extend(read.nbytes for read in batch)
        return inner(reader, batch, allocate)

    monkeypatch.setattr(view_reader, "_filled", count)
    rules: Rules = {"([qkv])": Unstack(r"layers.{index}.\1", axis=1)}
    convert(tmp_path / "a", tmp_path / "hf", "safetensors", rules=rules)
    assert filled == [stacks["q"].nbytes] * 3
    found = load(tmp_path / "hf")
    for name, stack in stacks.items():
        for place in range(5):
            assert found[f"layers.{place}.{name}"].tobytes() == stack[:, place].tobytes()


W = "item 'state': the rule"
REFUSED: dict[str, tuple[Rules, str]] = {
    "nothing": (
        {r"w\.\d": Cast("int8"), "x": Drop(), "y": Drop()},
        r"item 'state': the rules 'x', 'y' match no leaf; no rule touches the leaves 'keys', 'n'",
    ),
    "twice": (
        {r"w\.\d": Drop(), r"w\.1": Cast("int8")},
        r"the rules 'w\\\\.\\\\d' and 'w\\\\.1' both touch the leaf 'w\.1'; let one of them",
    ),
    "one name": (
        {r"w\.\d": "x"},
        r"the rules give one name, 'x', to 'w\.0' and to 'w\.1'; change one",
    ),
    "a name that is there": ({"n": "keys"}, r"one name, 'keys', to 'keys' and to 'n'"),
    "added where one is": ({"n": Drop(), "keys": Add(1)}, r"'keys' and to \"Add\('keys'\)\""),
    "a leaf for a dict": ({"n": "w"}, r"cannot stand beside the others: a leaf has the name"),
    "a gap": ({r"w\.(1)": Stack("w")}, rf"{W} .* 'w' is stacked of the places '1'.* 0 is missing"),
    "no place": ({r"(w)\.\d": Stack("w")}, r"its place is 'w'; expected a number"),
    "a place in letters": ({r"w\.\d()": Stack("w", by=0)}, r"its place is 'w\.0'"),
    "one place": ({r"(?:odd|w)\.(\d)": Stack("w")}, r"place 0 of 'w', as 'odd\.0' has"),
    "another shape": (
        {r"(w|odd)\.0": Fuse("x", ["w", "odd"])},
        r"leaf 'odd\.0': \[3\] does not go with \[2, 3\], the shape or dtype of 'w\.0'",
    ),
    "no such name": (
        {r"w\.(\d)": Fuse("w", ["0", "2"])},
        r"'w' is fused of one of each of '0', '2'",
    ),
    "a missing name": (
        {r"w\.(\d)": Fuse("w", ["0", "1", "2"])},
        r"is fused of '0', '1', '2', and '2' is missing; found 'w\.0', 'w\.1'",
    ),
    "axes": ({r"w\.0": Transpose((1, 2))}, r"the axes \[1, 2\] are no order of its 2 axes"),
    "no axis": ({r"w\.0": Repeat(2, 2)}, r"an array of \[2, 3\] has no axis 2"),
    "unstacked": ({r"w\.0": Unstack("{index}", axis=2)}, r"has no axis 2"),
    "sizes": ({r"w\.0": Split("{name}", {"a": 1, "b": 2})}, r"axis 0 has 2 entries, and .* are 3"),
    "shape": ({r"w\.0": Reshape((4, -1))}, r"an array of \[2, 3\] has no shape \[4, -1\]"),
    "keys": ({"keys": Cast("int8")}, r"'keys', which is an array of random keys: it can be ren"),
    "a value": ({"n": Transpose()}, r"'n', which is a Python int: it can be renamed and dropped"),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("surgery") / "c"
    w = [np.ones((2, 3), np.float32), np.zeros((2, 3), np.float32)]
    save(folder, {"w": w, "odd": [np.ones(3, np.float32)], "n": 7, "keys": jax.random.key(0)})
    return folder


@pytest.mark.parametrize("case", REFUSED)
def test_rules_that_do_not_fit_are_refused(case: str, saved: Path) -> None:
    """The message names the rules and the leaves, both sides."""
    rules, message = REFUSED[case]
    with pytest.raises(TreeMismatch, match=message):
        load(saved, rules=rules)


@pytest.mark.parametrize(
    ("rules", "error", "message"),
    [
        ({"w(": Drop()}, ValueError, r"'w\(' is no regular expression"),
        ({"n": []}, ValueError, r"expected rules, of which at most one is Rename, Stack"),
        ({"n": [Drop(), "x"]}, ValueError, r"goes into a second mapping"),
        ({"n": 3}, TypeError, r"expected Rename, Stack, Cast or another rule.*found 3"),
        (["n"], TypeError, r"expected a mapping of patterns to rules"),
        ({"n": r"\1"}, ValueError, r"is no template for it: invalid group reference"),
        ({r"w\.(\d)": Stack("w", by=2)}, ValueError, r"by=2: the pattern has no such group"),
        ({"n": "a..b"}, ValueError, r"'a\.\.b' is no name: expected keys with dots"),
        ({r"w\.0": Unstack("u")}, ValueError, r"would all be called 'u'; expected \{index\}"),
        ({r"w\.0": Cast("datetime64[s]")}, UnsupportedLeaf, r"cannot hold the dtype datetime64"),
        (
            {"new": Add([[1], [1, 2]])},
            TypeError,
            r"rules=\{'new': Add\(.*what numpy makes an array",
        ),
        ({3: Drop()}, TypeError, r"rules=\{3: ...\}: expected a pattern or a name, which is text"),
        ({b"w": Drop()}, TypeError, r"rules=\{b'w': ...\}: expected a pattern"),
        (3, TypeError, r"expected a mapping of patterns to rules, or several, found 3"),
        ({"new": Add("text")}, UnsupportedLeaf, r"Add\('new'\): a checkpoint cannot hold"),
    ],
)
def test_what_are_no_rules_is_a_mistake(
    rules: Any, error: type[Exception], message: str, saved: Path
) -> None:
    """They are refused before anything is read."""
    with pytest.raises(error, match=message):
        load(saved, rules=rules)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Cast("nonsense"), r"Cast\(dtype='nonsense'\): expected a dtype"),
        (lambda: Cast(None), r"Cast\(dtype=None\): expected a dtype"),
        (lambda: Reshape(4), r"Reshape\(shape=4\): expected whole numbers"),
        (lambda: Reshape("44"), r"Reshape\(shape='44'\): expected whole numbers"),
        (lambda: Transpose("0"), r"Transpose\(axes='0'\): expected whole numbers"),
        (lambda: Rename(3), r"Rename\(to=3\): expected text"),
        (lambda: Repeat(1.5), r"Repeat\(count=1.5\): expected a whole number"),
        (lambda: Repeat(2, None), r"Repeat\(axis=None\): expected a whole number"),
        (lambda: Stack("w", axis="0"), r"Stack\(axis='0'\): expected a whole number"),
        (lambda: Stack("w", by=None), r"Stack\(by=None\): expected the number or the name"),
        (lambda: Unstack(None), r"Unstack\(to=None\): expected text"),
        (lambda: Fuse("w", ["0", "0", "1"]), r"Fuse\(names=\['0', '0', '1'\]\): expected names"),
        (lambda: Fuse("w", [0, 1]), r"Fuse\(names=\[0, 1\]\): expected names, each once"),
        (lambda: Split("{name}", ["a", "a"]), r"Split\(names=\['a', 'a'\]\): expected names"),
        (lambda: Split("{name}", {"a": "1"}), r"Split\(names=\{'a': '1'\}\): expected names"),
        (lambda: Split("{name}", 2), r"Split\(names=2\): expected names, each once"),
    ],
)
def test_an_argument_of_a_rule_names_the_rule(make: Any, message: str) -> None:
    """Where the rule is made, before anything is read."""
    with pytest.raises(TypeError, match=message):
        make()


@pytest.mark.parametrize("dtype", ["float8_e5m2", "float8_e4m3fn", "bfloat16", "int4", "bool"])
def test_every_dtype_is_reshaped(dtype: str, tmp_path: Path) -> None:
    w = np.arange(24).reshape(4, 6).astype(jnp.dtype(dtype))
    save(tmp_path / "c", {"w": w})
    found = load(tmp_path / "c", rules={"w": [Reshape((3, 8)), Transpose()]})["w"]
    assert found.tobytes() == w.reshape(3, 8).T.tobytes()


@pytest.mark.parametrize("layout", ["holdfast", "safetensors", "orbax"])
def test_what_does_not_fit_the_disk_is_not_begun(layout: str, tmp_path: Path) -> None:
    """A conversion says how much it would write, and how much room there is."""
    save(tmp_path / "c", {"w": np.ones(1)})
    message = r"step 0 of .*c needs 8,000,000,000,000,000 bytes as .* has .* left"
    with pytest.raises(CheckpointError, match=message):
        convert(tmp_path / "c", tmp_path / "d", layout, rules={"w": Repeat(10**15)})
    assert not (tmp_path / "d").exists()


def test_keys_and_values_are_renamed_and_dropped(saved: Path) -> None:
    """What is no plain array keeps what it is."""
    found = load(saved, rules={"n": Rename("step"), "keys": "rng", r"(w|odd)\..*": Drop()})
    assert sorted(found) == ["rng", "step"] and found["step"] == 7


def test_rules_are_for_one_tree(tmp_path: Path) -> None:
    """Of several items one is named."""
    save(tmp_path / "c", items={"a": {"w": np.ones(2)}, "b": {"w": np.zeros(2)}})
    rules: Rules = {"w": "x"}
    with pytest.raises(ValueError, match=r"expected one tree to operate on, found \['a', 'b'\]"):
        convert(tmp_path / "c", tmp_path / "d", rules=rules)
    convert(tmp_path / "c", tmp_path / "d", rules=rules, items=["b"])
    assert load(tmp_path / "d", item="b")["x"].tolist() == [0, 0]
    with pytest.raises(StepNotFound):
        load(tmp_path / "d", item="a")
