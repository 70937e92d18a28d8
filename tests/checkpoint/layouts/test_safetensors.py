"""Plain safetensors folders, read and written, against the safetensors library."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import deserialize, safe_open
from safetensors.numpy import load_file, save_file

from holdfast.checkpoint import (
    CheckpointError,
    CheckpointManager,
    Corrupt,
    Drop,
    Files,
    HostileCheckpoint,
    Split,
    Stack,
    StepExists,
    StepNotFound,
    TreeMismatch,
    UnsupportedLeaf,
    load,
    save,
    structure,
    verify,
)
from holdfast.checkpoint.format.tree import plain_name
from holdfast.checkpoint.layouts.detect import open_checkpoint
from holdfast.checkpoint.layouts.safetensors import runs, split_evenly, split_shards
from holdfast.checkpoint.storage.local import LocalStorage
from holdfast.checkpoint.storage.path import StorePath
from holdfast.checkpoint.tools.convert import convert
from holdfast.cli.convert import convert as convert_command

DTYPES = ("float32", "bfloat16", "float16", "int8", "float8_e4m3fn", "float8_e5m2", "bool", "int64")


def numbers(dtype: str, shape: tuple[int, ...] = (8, 16)) -> np.ndarray:
    rng = np.random.default_rng(len(dtype))
    return rng.integers(0, 2 if dtype == "bool" else 100, shape).astype(
        getattr(ml_dtypes, dtype, dtype)
    )


def write_folder(folder: Path, tensors: dict[str, np.ndarray]) -> None:
    """Writes a sharded folder as Hugging Face lays it out: two files and an index, by the
    safetensors library.
    """
    names = list(tensors)
    files = {
        "model-00001-of-00002.safetensors": names[::2],
        "model-00002-of-00002.safetensors": names[1::2],
    }
    folder.mkdir()
    for file, chosen in files.items():
        save_file(
            {name: tensors[name] for name in chosen}, folder / file, metadata={"format": "pt"}
        )
    weight_map = {name: file for file, chosen in files.items() for name in chosen}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )


@pytest.fixture
def model(tmp_path: Path) -> tuple[Path, dict[str, np.ndarray]]:
    tensors = {f"model.layers.{i}.{dtype}.weight": numbers(dtype) for i, dtype in enumerate(DTYPES)}
    write_folder(tmp_path / "hf", tensors)
    return tmp_path / "hf", tensors


def nested(tensors: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, value in tensors.items():
        *parents, last = name.split(".")
        level = tree
        for parent in parents:
            level = level.setdefault(parent, {})
        level[last] = value
    return tree


def test_a_sharded_folder_loads_flat_or_onto_a_tree(
    model: tuple[Path, dict[str, np.ndarray]],
) -> None:
    """All dtypes come back bit-exact: without a `like` under the file's names, with one as a flat
    or as a nested tree.
    """
    folder, tensors = model
    flat = load(folder)
    assert flat.keys() == tensors.keys()
    for name, value in tensors.items():
        assert flat[name].dtype == value.dtype and flat[name].tobytes() == value.tobytes()
    for like in (tensors, nested(tensors)):
        back = load(folder, like)
        for one, two in zip(jax.tree.leaves(back), jax.tree.leaves(like), strict=True):
            assert one.tobytes() == two.tobytes()
    with pytest.raises(TreeMismatch, match="not in `like`"):
        load(folder, {"model": {}})
    assert verify(folder).leaves == len(tensors)
    one = load(folder / "model-00001-of-00002.safetensors")
    assert set(one) < set(tensors)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_runs_cover_a_region_exactly(data: st.DataObject) -> None:
    """The byte runs of any region, laid end to end, are the region's bytes in C order."""
    shape = tuple(data.draw(st.lists(st.integers(1, 5), max_size=4)))
    region = []
    for size in shape:
        start = data.draw(st.integers(0, size))
        region.append((start, data.draw(st.integers(start, size))))
    array = np.arange(int(np.prod(shape)), dtype=np.uint16).reshape(shape)
    part = array[tuple(slice(*bounds) for bounds in region)]
    raw = array.tobytes()
    found = (
        b"".join(raw[offset : offset + length] for offset, length in runs(shape, region, 2))
        if part.size
        else b""
    )
    assert found == part.tobytes()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:4], "less than 8 bytes"),
        (lambda data: data[:-9], "cut off"),
        (lambda data: struct.pack("<Q", 1 << 60) + data[8:], "claims a header of"),
        (lambda data: data[:8] + b"[" + data[9:], "is damaged"),
        (lambda data: data.replace(b"[0,64]", b"[0,60]"), "gives 'w' 60 bytes for the shape"),
    ],
)
def test_damaged_files_are_typed_errors(tmp_path: Path, damage: Any, message: str) -> None:
    """A file that is cut off, lies about its sizes or is no safetensors file at all is an error
    that names it.
    """
    save_file({"w": np.arange(16, dtype=np.float32)}, tmp_path / "model.safetensors")
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(damage(data))
    with pytest.raises((Corrupt, HostileCheckpoint), match=message) as caught:
        load(tmp_path)
    assert caught.value.file.endswith("model.safetensors")


def test_an_index_cannot_lead_outside_and_must_be_complete(
    model: tuple[Path, dict[str, np.ndarray]],
) -> None:
    """An index that names a missing file, or one in another folder, is an error."""
    folder, _ = model
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "../../secret.safetensors"}}))
    with pytest.raises(HostileCheckpoint, match="not in its own folder"):
        load(folder)
    index.write_text(json.dumps({"weight_map": {"w": "gone.safetensors"}}))
    with pytest.raises(Corrupt, match=r"gone\.safetensors is missing"):
        load(folder)


INDEX = "model.safetensors.index.json"
A = "model-00001-of-00002.safetensors"
B = "model-00002-of-00002.safetensors"
SINGLE = "model.safetensors"


def write_model(folder: Path, files: dict[str, list[str]], index: dict[str, str] | None) -> None:
    """Writes files of tensors, each filled with the number of its file, and an index."""
    folder.mkdir()
    for number, (file, names) in enumerate(files.items()):
        save_file({name: np.full(2, number, np.float32) for name in names}, folder / file)
    if index is not None:
        (folder / INDEX).write_text(json.dumps({"weight_map": index}))


@pytest.mark.parametrize(
    ("files", "index", "expected", "left_out"),
    [
        # A tensor of an older save, and one that another file has by the index.
        ({A: ["a", "old", "b"], B: ["b"]}, {"a": A, "b": B}, {"a": 0, "b": 1}, ["old", "b"]),
        # Files that the index does not name: another model, an older save, the same in another form
        (
            {A: ["a"], B: ["b"], SINGLE: ["a", "c"], "adapter_model.safetensors": ["d"]},
            {"a": A, "b": B},
            {"a": 0, "b": 1},
            [SINGLE, "adapter_model.safetensors"],
        ),
        # Without an index the usual file is the model.
        ({"model.fp16.safetensors": ["a"], SINGLE: ["a"]}, None, {"a": 1}, ["model.fp16"]),
        # What a system leaves there is nothing to speak of.
        ({"._model.safetensors": ["a"], SINGLE: ["a"]}, None, {"a": 1}, []),
        ({"one.safetensors": ["a"], "two.safetensors": ["b"]}, None, {"a": 0, "b": 1}, []),
    ],
)
def test_what_the_index_assigns_is_taken_exactly(
    files: dict[str, list[str]],
    index: dict[str, str] | None,
    expected: dict[str, int],
    left_out: list[str],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Other tensors and files are left out, with one warning that names them."""
    write_model(tmp_path / "hf", files, index)
    assert {name: int(value[0]) for name, value in load(tmp_path / "hf").items()} == expected
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == bool(left_out)
    for name in left_out:
        assert name in warnings[0]


@pytest.mark.parametrize(
    ("files", "index", "message"),
    [
        ({A: ["a"], B: ["c"]}, {"a": A, "b": B}, rf"says that 'b' are in {B}, and 'b' is not:"),
        ({A: ["a"], B: ["b"]}, {"a": B, "b": B}, rf"says that 'a', 'b' are in {B}, and 'a' is not"),
        ({A: ["a"]}, {"a": A, "b": B}, rf"{B} is missing: .* says that 'b' are in {B}; fetch"),
        ({SINGLE: ["a"]}, {"a": A}, rf"{A} is missing: .*, or load .*/{SINGLE} by itself"),
        ({A: ["a"]}, {}, rf"{INDEX} assigns no tensor to a file: its weight_map is empty; fetch"),
        ({A: ["a", "b"], B: ["b"]}, None, rf"'b' is both in {A} and in {B} of .*by its path, or"),
        ({B: ["b"]}, None, rf"{A} is missing: 1 of 2 shards are there; fetch it again"),
    ],
)
def test_an_index_and_its_files_have_to_agree(
    files: dict[str, list[str]], index: dict[str, str] | None, message: str, tmp_path: Path
) -> None:
    """What is promised and not there is an error that names tensor and file."""
    write_model(tmp_path / "hf", files, index)
    with pytest.raises(Corrupt, match=message) as caught:
        load(tmp_path / "hf")
    assert caught.value.file.startswith(str(tmp_path / "hf"))


def test_the_usual_index_is_that_of_the_model(tmp_path: Path) -> None:
    """An index of a variant beside it changes nothing; of two others neither is guessed at."""
    folder = tmp_path / "hf"
    write_model(folder, {A: ["a"], B: ["b"], "half.safetensors": ["a"]}, {"a": A, "b": B})
    variant = {"weight_map": {"a": "half.safetensors"}}
    (folder / "model.fp16.safetensors.index.json").write_text(json.dumps(variant))
    assert load(folder).keys() == {"a", "b"}
    (folder / INDEX).rename(folder / "other.safetensors.index.json")
    with pytest.raises(Corrupt, match=r"has 2 models, by 'model\.fp16.*only one can be meant"):
        load(folder)


def test_a_file_that_is_not_there_is_told_with_those_that_are(tmp_path: Path) -> None:
    """As itself, and not as one that an index has promised."""
    write_model(tmp_path / "hf", {A: ["a"]}, None)
    with pytest.raises(StepNotFound, match=rf"no file .*/hf/x\.safetensors; .* has '{A}'"):
        load(tmp_path / "hf" / "x.safetensors")


def test_a_dtype_that_numpy_lacks_is_one_tensor_s_alone(tmp_path: Path) -> None:
    """The others are read, listed and verified; the one is named with what leaves it out."""
    tensors = {name: np.arange(4, dtype=np.float32) for name in ("w", "x")}
    save_file(tensors, tmp_path / "model.safetensors")
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data.replace(b'"F32"', b'"F99"', 1))
    with pytest.raises(TreeMismatch, match=r"has 'w' as F99, a dtype that numpy .*; leave it out"):
        load(tmp_path)
    (tmp_path / "out").mkdir()
    with pytest.raises(UnsupportedLeaf, match=r"has 'w' as F99.*rules=\{'w': Drop\(\)\}"):
        to_layout(tmp_path, tmp_path / "out", "holdfast")
    for found in (
        load(tmp_path, partial=lambda path: path != "w")["x"],
        load(tmp_path, {"x": tensors["x"]}, partial=True)["x"],
        load(tmp_path, rules={"w": Drop()})["x"],
    ):
        assert found.tobytes() == tensors["x"].tobytes()
    assert verify(tmp_path).bytes == 32
    assert structure(tmp_path).items["state"].nbytes == 32


@pytest.mark.parametrize(
    ("tag", "dtype", "bits"),
    [("F4", "float4_e2m1fn", 4), ("F6_E2M3", "float6_e2m3fn", 6), ("F6_E3M2", "float6_e3m2fn", 6)],
)
def test_elements_below_a_byte(tag: str, dtype: str, bits: int, tmp_path: Path) -> None:
    """Each number comes back, whole and of any region, and goes out as the library takes it: the
    first element in the lowest bits.
    """
    codes = np.random.default_rng(0).integers(0, 1 << bits, (6, 10)).astype(np.uint8)
    whole = sum(int(code) << bits * place for place, code in enumerate(codes.reshape(-1)))
    data = whole.to_bytes(codes.size * bits // 8, "little")
    header = {"w": {"dtype": tag, "shape": [6, 10], "data_offsets": [0, len(data)]}}
    head = json.dumps(header).encode()
    (tmp_path / "hf").mkdir()
    file = struct.pack("<Q", len(head)) + head + data
    (tmp_path / "hf" / "model.safetensors").write_bytes(file)
    expected = codes.view(getattr(ml_dtypes, dtype))
    assert load(tmp_path / "hf")["w"].tobytes() == expected.tobytes()
    part = load(tmp_path / "hf", rules={"w": Split("{name}", {"a": 3, "b": 7}, axis=1)})
    assert part["b"].tobytes() == np.ascontiguousarray(expected[:, 3:]).tobytes()
    to_layout(
        Path(to_layout(tmp_path / "hf", tmp_path / "ours", "holdfast")),
        tmp_path / "out",
        "safetensors",
    )
    ((name, entry),) = deserialize((tmp_path / "out" / "model.safetensors").read_bytes())
    assert (name, entry["dtype"], entry["shape"]) == ("w", tag, [6, 10])
    assert bytes(entry["data"]) == data
    save(tmp_path / "odd", {"w": expected[:1, :1]})
    with pytest.raises(UnsupportedLeaf, match="last byte would be half full"):
        to_layout(tmp_path / "odd", tmp_path / "no", "safetensors")


def test_renaming_onto_a_model(model: tuple[Path, dict[str, np.ndarray]]) -> None:
    """Rules and mappings lead from a file's names to a model's own tree; two leaves never get one
    name.
    """
    folder, tensors = model
    rules = [(r"model\.layers\.(\d+)\.(\w+)\.weight", r"blocks.\1.kernel")]
    like = {"blocks": {str(i): {"kernel": value} for i, value in enumerate(tensors.values())}}
    back = load(folder, like, rename=rules)
    for i, value in enumerate(tensors.values()):
        assert back["blocks"][str(i)]["kernel"].tobytes() == value.tobytes()
    assert set(load(folder, rename={"model.layers.0.float32.weight": "first"})) >= {
        "first",
        "model.layers.1.bfloat16.weight",
    }
    with pytest.raises(ValueError, match="the same name 'x'"):
        load(folder, rename=lambda name: "x")


def test_export_opens_with_the_library(tmp_path: Path) -> None:
    """A step exported as one file, and as indexed shards, holds what was saved, under names that
    people know.
    """
    tree = {
        "params": {
            "w": jnp.ones((64, 8)),
            "b": jnp.zeros(8, jnp.bfloat16),
            "odd.name": jnp.arange(3),
        },
        "step": 7,
        "text": "hello",
    }
    save(tmp_path / "c", tree, step=7)
    convert(
        open_checkpoint(tmp_path / "c"), StorePath(LocalStorage(tmp_path / "one")), "safetensors"
    )
    found = load_file(tmp_path / "one" / "model.safetensors")
    assert found["params.w"].tobytes() == np.ones((64, 8), np.float32).tobytes()
    assert found["params.odd.name"].tolist() == [0, 1, 2] and found["step"].item() == 7
    with safe_open(tmp_path / "one" / "model.safetensors", "np") as file:
        assert (
            file.metadata() == {"format": "pt", "text": "hello", "step": "7"}
            or file.metadata()["text"] == "hello"
        )
    with pytest.raises(StepExists, match="already"):
        convert(
            open_checkpoint(tmp_path / "c"),
            StorePath(LocalStorage(tmp_path / "one")),
            "safetensors",
        )
    convert(
        open_checkpoint(tmp_path / "c"),
        StorePath(LocalStorage(tmp_path / "many")),
        "safetensors",
        under="params",
        shard_bytes=1024,
    )
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert (
        set(index["weight_map"]) == {"params.w", "params.b", "params.odd.name"}
        and len(set(index["weight_map"].values())) > 1
    )
    for name, file in index["weight_map"].items():
        assert name in load_file(tmp_path / "many" / file)
    assert load(tmp_path / "many")["params.w"].shape == (64, 8)


FP8 = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")


def all_bytes(dtype: str) -> np.ndarray:
    """Every value that an 8-bit float has, NaNs and both zeros included."""
    return np.arange(256, dtype=np.uint8).view(getattr(ml_dtypes, dtype)).reshape(16, 16)


def test_fp8_there_and_back(tmp_path: Path) -> None:
    """All 256 values of each 8-bit float: from the library's file to us, into our own layout, and
    out again as the library takes it.
    """
    tensors = {f"w.{dtype}": all_bytes(dtype) for dtype in FP8}
    (tmp_path / "hf").mkdir()
    save_file(tensors, tmp_path / "hf" / "model.safetensors")
    convert(
        open_checkpoint(tmp_path / "hf"), StorePath(LocalStorage(tmp_path / "ours")), "holdfast"
    )
    convert(
        open_checkpoint(tmp_path / "ours"), StorePath(LocalStorage(tmp_path / "out")), "safetensors"
    )
    tags = {"F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0"}
    for folder in ("hf", "out"):
        found = dict(deserialize((tmp_path / folder / "model.safetensors").read_bytes()))
        assert {entry["dtype"] for entry in found.values()} == tags
        assert {name: bytes(entry["data"]) for name, entry in found.items()} == {
            name: value.tobytes() for name, value in tensors.items()
        }
    for folder in ("hf", "ours", "out"):
        for name, value in load(tmp_path / folder).items():
            assert value.dtype == tensors[name].dtype and value.tobytes() == tensors[name].tobytes()


def test_fp8_between_torch_and_jax(tmp_path: Path) -> None:
    """What torch writes in 8 bits, jax has bit for bit; what we export, torch has."""
    torch = pytest.importorskip("torch", reason="in no group: torch brings gigabytes of CUDA")
    from safetensors.torch import load_file as load_torch
    from safetensors.torch import save_file as save_torch

    raw = torch.arange(256, dtype=torch.uint8).reshape(16, 16)
    dtypes = [dtype for dtype in FP8 if hasattr(torch, dtype)]
    tensors = {dtype: raw.clone().view(getattr(torch, dtype)) for dtype in dtypes} | {
        "bfloat16": torch.ones(3, dtype=torch.bfloat16) * 1.5
    }
    (tmp_path / "hf").mkdir()
    save_torch(tensors, tmp_path / "hf" / "model.safetensors")
    found = load(
        tmp_path / "hf",
        {
            name: jax.ShapeDtypeStruct(tuple(t.shape), getattr(ml_dtypes, name))
            for name, t in tensors.items()
        },
    )
    for dtype in dtypes:
        assert np.asarray(found[dtype]).tobytes() == all_bytes(dtype).tobytes()
    save(tmp_path / "ours", found)
    convert(
        open_checkpoint(tmp_path / "ours"), StorePath(LocalStorage(tmp_path / "out")), "safetensors"
    )
    for name, tensor in load_torch(tmp_path / "out" / "model.safetensors").items():
        assert tensor.dtype == tensors[name].dtype and torch.equal(
            tensor.view(torch.uint8), tensors[name].view(torch.uint8)
        )


def test_what_a_file_cannot_hold_is_named(tmp_path: Path) -> None:
    """A dtype that safetensors lacks, or two leaves of one name, are refused with the leaf's
    name.
    """
    save(tmp_path / "c", {"w": {"x": jnp.ones(3, jnp.int4)}})
    with pytest.raises(UnsupportedLeaf, match=r"'w\.x' of dtype int4"):
        convert(
            open_checkpoint(tmp_path / "c"),
            StorePath(LocalStorage(tmp_path / "out")),
            "safetensors",
        )
    save(tmp_path / "d", {"a": {"b": 1}, "a.b": 2})
    with pytest.raises(UnsupportedLeaf, match=r"two leaves would be called 'a\.b'"):
        convert(
            open_checkpoint(tmp_path / "d"),
            StorePath(LocalStorage(tmp_path / "out")),
            "safetensors",
        )
    assert issubclass(UnsupportedLeaf, CheckpointError)


def test_names_and_shards() -> None:
    """Escapes leave a path as people write it; shards fill up in order and a large tensor has its
    own.
    """
    assert plain_name(r"a\.b.c\[0\]") == "a.b.c[0]"
    assert split_shards({"a": 4, "b": 4, "c": 20, "d": 1}, 8) == [["a", "b"], ["c"], ["d"]]


BESIDE = {
    "config.json": b'{"hidden_size": 16}',
    "tokenizer.json": b"\x00\xff words",
    "empty.txt": b"",
    "chat_templates/default.jinja": b"{{ messages }}",
}
NOT_BESIDE = (
    "pytorch_model-00001-of-00002.bin",
    "flax_model.msgpack",
    "model.gguf",
    ".gitattributes",
    ".cache/huggingface/lock",
    "checkpoint-500/model.safetensors",
    "checkpoint-500/config.json",
)


def write_beside(folder: Path) -> None:
    for name in (*BESIDE, *NOT_BESIDE):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(BESIDE.get(name, b"other"))


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def tensors_in(folder: Path) -> dict[str, bytes]:
    """Returns the bytes of all tensors of a folder, as the safetensors library has them."""
    return {
        name: bytes(entry["data"])
        for path in folder.glob("*.safetensors")
        for name, entry in deserialize(path.read_bytes())
    }


@pytest.mark.parametrize("by_way_of", ["holdfast", "safetensors"])
def test_what_lies_beside_a_model_travels(
    by_way_of: str, model: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    """Config, tokenizer and templates come back byte for byte, and as many shards with an index;
    hidden files, other checkpoints and the same weights in other forms stay where they are.
    """
    folder, tensors = model
    write_beside(folder)
    there = to_layout(folder, tmp_path / "there", by_way_of)
    convert(open_checkpoint(there), StorePath.of(tmp_path / "back"), "safetensors")
    back = files_of(tmp_path / "back")
    shards = {name for name in back if name.endswith(".safetensors")}
    index = json.loads(back.pop("model.safetensors.index.json"))
    assert set(index["weight_map"].values()) == shards and len(shards) == 2
    assert {name: data for name, data in back.items() if name not in shards} == BESIDE
    found = tensors_in(tmp_path / "back")
    assert found.keys() == tensors.keys()
    assert all(found[name] == tensors[name].tobytes() for name in tensors)
    with safe_open(tmp_path / "back" / sorted(shards)[0], "numpy") as file:
        assert file.metadata()["format"] == "pt"
    assert load(there, item="files")["config.json"] == BESIDE["config.json"]


def to_layout(path: Path, root: Path, layout: str) -> str:
    return convert(open_checkpoint(path), StorePath(LocalStorage(root)), layout)


def test_the_number_of_files_is_asked_for(
    model: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    """As many as asked for, of about one size; one file has no index."""
    folder, tensors = model
    for count in (1, 3, 8):
        out = tmp_path / str(count)
        convert(open_checkpoint(folder), StorePath.of(out), "safetensors", shards=count)
        files = [path for path in out.iterdir() if path.suffix == ".safetensors"]
        assert len(files) == count
        assert (out / "model.safetensors.index.json").exists() == (count > 1)
        assert tensors_in(out).keys() == tensors.keys()


@given(
    st.lists(st.integers(0, 100), min_size=1, max_size=30),
    st.integers(1, 12),
)
def test_names_are_split_evenly(sizes: list[int], count: int) -> None:
    """In order, none left out, as many as asked for, none empty; no shard is larger than its share
    and one more tensor.
    """
    named = {str(number): size for number, size in enumerate(sizes)}
    shards = split_evenly(named, count)
    assert [name for shard in shards for name in shard] == list(named)
    assert len(shards) == min(count, len(sizes)) and all(shards)
    largest = max(sum(named[name] for name in shard) for shard in shards)
    assert largest <= sum(sizes) / len(shards) + 2 * max(sizes)


def test_files_of_a_run_lie_beside_its_tensors(tmp_path: Path) -> None:
    """What a trainer saved as files is exported with the weights; what stands there already, and
    what would be taken for tensors, is refused, and nothing is left of the attempt.
    """
    tokenizer = Files(lambda folder: (folder / "tokenizer.json").write_text("a b"))
    save(tmp_path / "c", items={"model": {"w": np.ones(3)}, "tokenizer": tokenizer})
    to_layout(tmp_path / "c", tmp_path / "hf", "safetensors")
    assert (tmp_path / "hf" / "tokenizer.json").read_text() == "a b"
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "tokenizer.json").write_text("mine")
    with pytest.raises(StepExists, match=r"taken holds 'tokenizer\.json' already"):
        to_layout(tmp_path / "c", taken, "safetensors")
    assert files_of(taken) == {"tokenizer.json": b"mine"}
    other = Files(lambda folder: (folder / "x.safetensors").write_text("a b"))
    save(tmp_path / "d", items={"model": {"w": np.ones(3)}, "other": other})
    with pytest.raises(UnsupportedLeaf, match=r"'x\.safetensors' among the files of .*--item"):
        to_layout(tmp_path / "d", tmp_path / "no", "safetensors")
    assert not (tmp_path / "no").exists()


def test_what_lies_beside_a_model_is_no_part_of_orbax(
    model: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    """A model is written in Orbax's layout as before; its files are refused where they are
    named.
    """
    folder, tensors = model
    write_beside(folder)
    rules = {r"model\.layers\.\d+\.(\w+)\.weight": r"\1"}
    there = convert(
        open_checkpoint(folder), StorePath(LocalStorage(tmp_path / "o")), "orbax", rules=rules
    )
    assert load(there).keys() == {name.split(".")[3] for name in tensors}
    with pytest.raises(UnsupportedLeaf, match=r"'files' of .* is a folder of files, which orbax"):
        convert(
            open_checkpoint(folder),
            StorePath(LocalStorage(tmp_path / "p")),
            "orbax",
            items=["state", "files"],
        )


def test_a_fine_tuned_model_is_one_again(
    model: tuple[Path, dict[str, Any]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Loaded, trained and saved by a manager it has no config or tokenizer: an export says so, and
    takes those of the folder that it is told, and as many files of tensors.
    """
    folder, tensors = model
    write_beside(folder)
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, load(folder)).wait()
    caplog.clear()
    convert(open_checkpoint(tmp_path / "run"), StorePath.of(tmp_path / "alone"), "safetensors")
    (warning,) = [each.getMessage() for each in caplog.records]
    assert warning.startswith(f"{tmp_path}/alone gets tensors alone") and "--beside" in warning
    caplog.clear()
    whole = tmp_path / "whole"
    typed = f"{tmp_path / 'run'} {whole} --to safetensors --beside {folder}"
    assert CliRunner().invoke(convert_command, typed).exit_code == 0
    assert caplog.records == []
    found = files_of(whole)
    assert {name: found[name] for name in found if name in BESIDE} == BESIDE
    assert len([name for name in found if name.endswith(".safetensors")]) == 2
    assert load(whole).keys() == tensors.keys()
    with pytest.raises(StepNotFound, match="gone has no files that could lie beside a model"):
        convert(
            open_checkpoint(folder / "model-00001-of-00002.safetensors"),
            StorePath.of(tmp_path / "no"),
            "safetensors",
            beside=tmp_path / "gone",
        )
    with pytest.raises(ValueError, match='beside= is for "safetensors", and not for "orbax"'):
        convert(open_checkpoint(folder), StorePath.of(tmp_path / "no"), "orbax", beside=folder)
    assert not (tmp_path / "no").exists()
    rules = {r"model\.layers\.\d+\.(\w+)\.weight": r"\1"}
    convert(open_checkpoint(folder), StorePath.of(tmp_path / "orbax"), "orbax", rules=rules)
    assert "stays there: orbax holds no files" in caplog.text


def test_a_large_tensor_is_written_in_pieces(tmp_path: Path) -> None:
    """A stack of layers that is larger than a chunk comes out bit for bit."""
    layers = {
        f"l.{place}": np.random.default_rng(place).integers(0, 255, (5 << 20, 5), np.uint8)
        for place in range(3)
    }
    save(tmp_path / "c", layers)
    rules = {r"l\.(\d)": Stack("l")}
    there = StorePath.of(tmp_path / "hf")
    convert(open_checkpoint(tmp_path / "c"), there, "safetensors", rules=rules)
    (found,) = tensors_in(tmp_path / "hf").values()
    assert found == b"".join(array.tobytes() for array in layers.values())
