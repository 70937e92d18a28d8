"""Restores a step of holdfast's with numpy and the standard library, from docs/format.md alone.

All bytes are checked. Types that numpy lacks come as raw bits, classes as dicts, tuples as lists.
"""

import base64
import itertools
import json
import sys
from pathlib import Path

import numpy as np

ROW = 4096  # bytes: the checksums of pieces of this length are taken side by side
TABLE = np.arange(256, dtype=np.uint32)
for _ in range(8):
    TABLE = (TABLE >> 1) ^ (TABLE & 1) * np.uint32(0x82F63B78)
MOVED = np.uint32(1) << np.arange(32, dtype=np.uint32)  # what ROW zero bytes make of each bit
for _ in range(ROW):
    MOVED = TABLE[MOVED & 255] ^ (MOVED >> 8)
VALUES = {"bool": json.loads, "int": lambda t: int(t, 16), "float": float.fromhex, "str": str}
VALUES |= {"complex": lambda t: complex(*map(float.fromhex, t.split())), "bytes": base64.b64decode}


def crc32c(data):
    rows = np.frombuffer(data, np.uint8, len(data) // ROW * ROW).reshape(-1, ROW)
    sums = np.zeros(len(rows), np.uint32)
    for column in rows.T if len(rows) else ():
        sums = TABLE[(sums ^ column) & 255] ^ (sums >> 8)
    crc = 0xFFFFFFFF
    for row in sums.tolist():
        crc = row ^ int(np.bitwise_xor.reduce(MOVED[crc >> np.arange(32) & 1 == 1]))
    for byte in data[rows.size :]:
        crc = int(TABLE[(crc ^ byte) & 255]) ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def read_file(step, name, size, head, crc):  # a pack as {chunk: bytes}
    data = (Path(step) / name).read_bytes()
    assert len(data) == size and crc32c(data[: head or size]) == crc, f"{name} is damaged"
    if not head:
        return json.loads(data) if name.endswith(".json") else data
    chunks = json.loads(data[8:head])
    sums = bytes.fromhex(chunks.pop("__metadata__")["crc32c"])
    places = sorted((*entry["data_offsets"], chunk) for chunk, entry in chunks.items())
    for i, (start, stop, chunk) in enumerate(places):
        chunks[chunk] = memoryview(data)[head + start : head + stop]
        assert crc32c(chunks[chunk]).to_bytes(4) == sums[4 * i : 4 * i + 4], f"{chunk} is damaged"
    return chunks


def read_array(leaf, packs):  # the packs of its chunks, in order
    raw = "uint16" if leaf["dtype"] == "bfloat16" else "uint8"
    array = np.empty(leaf["shape"], getattr(np, leaf["dtype"], raw))
    axes = []
    for size, shard, chunk in zip(leaf["shape"], *leaf["grid"], strict=True):
        starts = [s + c for s in range(0, size, shard or 1) for c in range(0, shard, chunk or 1)]
        axes.append([*itertools.pairwise([*(starts or [0]), size])])
    for pack, part in zip(packs, itertools.product(*axes), strict=True):
        cut = array[(*(slice(*bounds) for bounds in part), ...)]
        place = "" if cut.shape == array.shape else f"[{','.join(f'{i}:{j}' for i, j in part)}]"
        cut[...] = np.frombuffer(pack[leaf["path"] + place], array.dtype).reshape(cut.shape)
    return array


def read_leaves(item, files, process):
    values = iter(item["values"])
    for leaf in item["leaves"]:
        if "dtype" in leaf:
            packs = [files[a + b * i] for a, b, n in item["cells"][leaf["cells"]] for i in range(n)]
            array = read_array(leaf, packs)
            yield array[process] if leaf.get("per_process") else array
        else:
            kind, text = next(values)
            yield VALUES[kind](text[process] if leaf.get("per_process") else text)


def build(node, leaves):
    if not isinstance(node, dict):
        return None if node is None else leaves[node]
    nodes = [build(child, leaves) for child in node["nodes"]]
    return dict(zip(node["keys"], nodes, strict=True)) if "keys" in node else nodes


def restore(step, process=0):  # {item: value}, as that process of the job would see it
    body, _, crc = (Path(step) / "checkpoint.json").read_bytes().rpartition(b',"crc32c":"')
    assert crc == b'%08x"}\n' % crc32c(body), "checkpoint.json is damaged"
    found = json.loads(body + b"}")["items"]
    for name, item in found.items():
        files = [read_file(step, *file) for file in item["files"]]
        if item["kind"] == "tree":
            found[name] = build(item["tree"], [*read_leaves(item, files, process)])
        else:  # of several processes, by the names of their files
            names = item.get("names", [file[0] for file in item["files"]])
            found[name] = dict(zip(names, files, strict=True))
    return found


if __name__ == "__main__":
    print(restore(*sys.argv[1:2]))
