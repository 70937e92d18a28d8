"""The round trip: trees x shardings x topologies, bit-exact, with real processes and real devices.

A job of each topology lives as long as this module's tests and is asked, case by case, to save or
to load what hypothesis draws: so hypothesis shrinks over real processes.
"""

from __future__ import annotations

import itertools
import json
import math
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.support.checkpointing import free_port
from tests.support.cluster import Processes
from tests.support.paths import SUPPORT

SCRIPT = (SUPPORT / "roundtrip_job.py").read_text()
TOPOLOGIES = [(1, 1), (1, 4), (1, 8), (2, 1), (2, 4), (4, 1), (4, 2)]  # processes, devices of each
PAIRS = list(itertools.product(TOPOLOGIES, repeat=2))
RESIZED = [((4, 1), (6, 1)), ((16, 1), (3, 1))]
FAST_PAIRS = [((2, 1), (1, 8)), ((1, 8), (2, 1))]
ANSWER_S = 60.0


class Job:
    """A job of real processes that makes round trips on demand."""

    def __init__(self, processes: int, devices: int) -> None:
        self.processes = processes
        self.devices = processes * devices
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.settimeout(ANSWER_S)
            arguments = [free_port(), listener.getsockname()[1]]
            self._running = Processes(SCRIPT, processes, arguments=arguments, devices=devices)
            self._streams: dict[int, Any] = {}
            for _ in range(processes):
                connection, _ = listener.accept()
                connection.settimeout(ANSWER_S)
                stream = connection.makefile("rw")
                connection.close()
                self._streams[int(stream.readline())] = stream

    def do(self, request: dict[str, Any]) -> None:
        """Has all processes do it; fails with what any of them says is wrong."""
        for stream in self._streams.values():
            print(json.dumps(request), file=stream, flush=True)
        try:
            answers = {
                index: json.loads(stream.readline()) for index, stream in self._streams.items()
            }
        except (OSError, ValueError) as error:
            outputs = "\n".join(
                f"--- process {index}:\n{self._running.output(index)[-3000:]}"
                for index in self._streams
            )
            raise AssertionError(f"{request} was not answered: {error!r}\n{outputs}") from error
        assert not any(answers.values()), "\n".join(
            f"--- process {index}:\n{trouble}" for index, trouble in answers.items() if trouble
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for stream in self._streams.values():
            stream.close()
        self._running.__exit__(kind, error, trace)


@pytest.fixture(scope="module")
def job() -> Iterator[Callable[[tuple[int, int]], Job]]:
    """Returns what gives the job of a topology, started when it is first asked for."""
    jobs: dict[tuple[int, int], Job] = {}
    yield (
        lambda topology: (
            jobs[topology] if topology in jobs else jobs.setdefault(topology, Job(*topology))
        )
    )
    for started in jobs.values():
        started.__exit__(None, None, None)


FLOATS = [
    "float32",
    "bfloat16",
    "float16",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e8m0fnu",
    "complex64",
]
DTYPES = [*FLOATS, "int8", "uint8", "int16", "uint32", "int32", "bool", "int4", "uint4"]
WIDE = ["float64", "int64", "uint64", "complex128"]  # numpy's own
SIZES = [0, 1, 2, 3, 4, 6, 8, 16, 24]
KEYS = st.one_of(
    st.sampled_from(["w", "a.b", "c[0:1]", "back\\slash", "", "__metadata__", "new\nline", "ключ"]),
    st.text(max_size=3),
)


@st.composite
def meshes(
    draw: st.DrawFn, devices: int, shape: tuple[int, ...], processes: int, *, local: bool = False
) -> dict[str, Any]:
    """Draws a mesh of 1 to 3 axes over some or all devices of a job, in any order, and a spec over
    it that divides the shape.

    In a job of several processes the mesh has devices of more than one: what lies on one process
    alone is local to it.
    """
    factors = [
        sizes
        for rank in (1, 2, 3)
        for sizes in itertools.product(range(1, devices + 1), repeat=rank)
        if devices % math.prod(sizes) == 0
    ]
    sizes = draw(st.sampled_from(factors))
    order = draw(st.permutations(range(devices)))[: math.prod(sizes)]
    if processes > 1 and len({index * processes // devices for index in order}) == 1:
        sizes = (devices,)
        order = draw(st.permutations(range(devices)))
    spec = []
    free = list(zip("xyz", sizes, strict=False))
    for size in shape:
        axes = []
        parts = 1
        for name, count in (
            draw(st.lists(st.sampled_from(free), unique=True, max_size=2)) if free else []
        ):
            if size % (parts * count) == 0:
                axes.append(name)
                parts *= count
                free.remove((name, count))
        spec.append(axes)
    return {"devices": list(order), "sizes": list(sizes), "spec": spec, "local": local}


@st.composite
def leaves(draw: st.DrawFn, saver: Job, loader: Job) -> list[Any]:
    """Draws a leaf: where it is saved from and how it is wanted."""
    kind = draw(st.sampled_from(["array"] * 6 + ["key", "numpy", "scalar", "value"]))
    if kind == "value":
        pairs = st.one_of(
            st.tuples(st.just("int"), st.integers()),
            st.tuples(st.just("float"), st.floats(allow_nan=False).map(float.hex)),
            st.tuples(st.just("bool"), st.booleans()),
            st.tuples(st.just("str"), st.text(max_size=5)),
            st.tuples(st.just("bytes"), st.binary(max_size=5).map(bytes.hex)),
        )
        name, value = draw(pairs)
        return ["leaf", {"kind": kind, "type": name, "value": value}]
    shape = () if kind == "scalar" else tuple(draw(st.lists(st.sampled_from(SIZES), max_size=3)))
    host = kind in ("numpy", "scalar")
    dtype = (
        "uint32" if kind == "key" else draw(st.sampled_from([*DTYPES, *WIDE] if host else DTYPES))
    )

    def place(job: Job) -> Any:
        one = st.builds(lambda device: {"device": device}, st.integers(0, 7))
        everywhere = meshes(job.devices, shape, job.processes)
        here = meshes(job.devices // job.processes, shape, 1, local=job.processes > 1)
        return draw(st.one_of(everywhere, everywhere, here, one, st.just("free")))

    saved = "numpy" if host else place(saver)
    wanted = (
        "numpy"
        if dtype in WIDE
        or (host and draw(st.booleans()))
        or (kind == "array" and draw(st.integers(0, 5)) == 0)
        else place(loader)
    )
    return [
        "leaf",
        {
            "kind": kind,
            "dtype": dtype,
            "shape": shape,
            "seed": draw(st.integers(0, 99)),
            "saved": saved,
            "wanted": wanted,
        },
    ]


def trees(saver: Job, loader: Job) -> st.SearchStrategy[Any]:
    """Returns the strategy of trees."""

    def nodes(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        several = st.lists(children, max_size=4)
        keys = st.one_of(
            st.lists(KEYS, unique=True, max_size=4),
            st.lists(st.integers(-5, 10**6), unique=True, max_size=4),
        )
        dicts = keys.flatmap(
            lambda names: st.tuples(*(st.tuples(st.just(name), children) for name in names))
        )
        pairs = st.lists(children, min_size=2, max_size=2)
        return st.one_of(
            *(
                st.tuples(st.just(name), part)
                for name, part in zip(
                    ("list", "tuple", "pair", "dict"), (several, several, pairs, dicts), strict=True
                )
            )
        )

    some = st.recursive(
        st.one_of(leaves(saver, loader), leaves(saver, loader), st.just(["none"])),
        nodes,
        max_leaves=10,
    )
    return some.filter(
        lambda tree: tree != ["none"]
    )  # None where a state is expected is a mistake, and refused


def round_trips(folder: Path, saver: Job, loader: Job, examples: int, draw: int) -> int:
    """Saves and loads `examples` trees; returns how many."""
    done = itertools.count()

    @seed(draw)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    @given(
        trees(saver, loader), st.one_of(st.none(), st.tuples(*[st.sampled_from([16, 64, 256])] * 4))
    )
    def check(tree: Any, cuts: tuple[int, ...] | None) -> None:
        step = folder / str(next(done))
        saver.do({"do": "save", "folder": str(step), "tree": tree, "cuts": cuts})
        loader.do({"do": "load", "folder": str(step), "tree": tree})
        loader.do({"do": "load_once", "folder": str(step), "tree": tree})
        shutil.rmtree(step)

    check()
    return next(done)


def names(pairs: list[tuple[tuple[int, int], tuple[int, int]]]) -> list[str]:
    return [f"{a}x{b}-{c}x{d}" for (a, b), (c, d) in pairs]


@pytest.mark.parametrize(("saver", "loader"), FAST_PAIRS, ids=names(FAST_PAIRS))
def test_any_tree_to_another_topology(
    tmp_path: Path,
    job: Callable[[tuple[int, int]], Job],
    saver: tuple[int, int],
    loader: tuple[int, int],
) -> None:
    """Whatever the tree, the saved shardings and the wanted ones, every bit comes back in a job of
    other processes and devices.
    """
    assert round_trips(tmp_path, job(saver), job(loader), 8, 0) >= 8


@pytest.mark.slow
@pytest.mark.parametrize(("saver", "loader"), PAIRS, ids=names(PAIRS))
def test_any_topology_to_any_other(
    tmp_path: Path,
    job: Callable[[tuple[int, int]], Job],
    saver: tuple[int, int],
    loader: tuple[int, int],
) -> None:
    """The matrix: 1, 2 and 4 processes, 1 to 8 devices, meshes of 1 to 3 axes, each pair with trees
    of its own.
    """
    number = PAIRS.index((saver, loader))
    assert round_trips(tmp_path, job(saver), job(loader), 25, number) >= 25


@pytest.mark.slow
@pytest.mark.parametrize(("saver", "loader"), RESIZED, ids=names(RESIZED))
def test_a_job_of_another_size_restores(
    tmp_path: Path,
    job: Callable[[tuple[int, int]], Job],
    saver: tuple[int, int],
    loader: tuple[int, int],
) -> None:
    """A job that grew, or shrank by much, has every bit of trees that the other one saved."""
    assert round_trips(tmp_path, job(saver), job(loader), 10, len(saver)) >= 10


@pytest.mark.parametrize(
    "draw", [0, *(pytest.param(draw, marks=pytest.mark.slow) for draw in range(1, 6))]
)
def test_any_sharding_to_any_other(
    tmp_path: Path, job: Callable[[tuple[int, int]], Job], draw: int
) -> None:
    """In one process of 8 devices, where most can be drawn."""
    examples = 300 if draw else 20
    assert round_trips(tmp_path, job((1, 8)), job((1, 8)), examples, draw) >= examples


def test_a_sharding_that_does_not_divide(
    tmp_path: Path, job: Callable[[tuple[int, int]], Job]
) -> None:
    """What was saved in one piece cannot come back in halves: an error of the tree that names the
    leaf, on every process.
    """
    wanted = {"devices": [0, 1], "sizes": [2], "spec": [["x"]], "local": False}
    leaf = [
        "leaf",
        {
            "kind": "array",
            "dtype": "float32",
            "shape": [3],
            "seed": 1,
            "saved": "free",
            "wanted": wanted,
        },
    ]
    request = {"folder": str(tmp_path / "c"), "tree": ["dict", [["w", leaf]]], "cuts": None}
    job((2, 1)).do({"do": "save"} | request)
    job((2, 1)).do({"do": "refuse"} | request)
