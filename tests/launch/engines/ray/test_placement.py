"""Which machines a gang gets: a pure function, from what is free, what is leaving, and which slice
is whole.
"""

from __future__ import annotations

from holdfast.launch.engines.ray.placement import Node, place_gang

ONE = {"CPU": 1.0}


def node(
    name: str, cpus: float = 1, *, draining: bool = False, slice_name: str = "", worker: int = 0
) -> Node:
    return Node(
        name, name, {"CPU": cpus}, draining=draining, slice_name=slice_name, worker_id=worker
    )


def names(
    nodes: list[Node],
    min_processes: int,
    max_processes: int,
    num_slices: int = 1,
    resources: dict[str, float] = ONE,
) -> list[str]:
    return [
        chosen.node_id
        for chosen in place_gang(
            nodes, resources, min_processes, max_processes, num_slices=num_slices
        ).nodes
    ]


def test_ranks_on_a_machine_are_neighbours() -> None:
    """Machines in natural order of their addresses; no more than asked for."""
    assert names([node("n10", 2), node("n9", 2)], 1, 3) == ["n9", "n9", "n10"]


def test_what_fits_between_the_least_and_the_most() -> None:
    """Three of four; none when the least does not fit, and the reason has the counts."""
    nodes = [node("a"), node("b"), node("c"), node("d", draining=True)]
    assert names(nodes, 2, 4) == ["a", "b", "c"]
    refused = place_gang(nodes, ONE, 4, 4)
    assert (refused.nodes, refused.why_not_more) == (
        (),
        "room for 3 of 4 processes on 4 machines, 1 of them draining",
    )


def test_a_fraction_counts_as_one_thinks() -> None:
    """Ten processes of a tenth fit one processor; a resource that a machine lacks is no room; a
    need of 0 is no need.
    """
    assert len(names([node("a")], 1, 20, resources={"CPU": 0.1})) == 10
    assert names([node("a")], 1, 1, resources={"CPU": 1, "GPU": 1}) == []
    assert names([node("a")], 1, 1, resources={"CPU": 1, "GPU": 0}) == ["a"]


def two_slices(**changes: bool) -> list[Node]:
    """Slices s10 and s9 of two machines each, in a mixed-up order."""
    return [
        node(
            f"{name}w{worker}",
            slice_name=name,
            worker=worker,
            draining=changes.get(f"{name}w{worker}", False),
        )
        for name, worker in (("s10", 1), ("s9", 1), ("s10", 0), ("s9", 0))
    ]


def test_ranks_are_sorted_by_slice_and_worker() -> None:
    """ENV-4: by the slice's index as an integer, then the worker's; each rank knows its slice."""
    chosen = place_gang(two_slices(), ONE, 4, 4, num_slices=2)
    assert [each.node_id for each in chosen.nodes] == ["s9w0", "s9w1", "s10w0", "s10w1"]
    assert (chosen.slice_of, chosen.num_slices) == ((0, 0, 1, 1), 2)


def test_a_draining_host_takes_its_slice_along() -> None:
    """ERR-2, PRE-2: the other slice alone is left, which becomes slice 0 of 1."""
    chosen = place_gang(two_slices(s9w1=True), ONE, 2, 4, num_slices=2)
    assert [each.node_id for each in chosen.nodes] == ["s10w0", "s10w1"]
    assert (chosen.slice_of, chosen.num_slices) == ((0, 0), 1)
    assert chosen.why_not_more == "1 of 2 slices are whole; slice s9 has 1 of 2 machines draining"
    assert place_gang(two_slices(s9w1=True), ONE, 4, 4, num_slices=2).nodes == ()


def test_an_incomplete_slice_is_not_used() -> None:
    """ENV-4: the reason says which, and how many processes it has room for."""
    short = place_gang(two_slices()[:3], ONE, 2, 4, num_slices=2)
    assert [each.node_id for each in short.nodes] == ["s10w0", "s10w1"]
    assert short.why_not_more == "1 of 2 slices are whole; slice s9 has room for 1 of 2 processes"


def test_every_machine_of_a_slice_gets_its_share() -> None:
    """Four processes on two machines of four places each: two and two."""
    nodes = [
        node(f"w{worker}", 4, slice_name=name, worker=worker)
        for name in ("s0", "s1")
        for worker in (0, 1)
    ]
    assert names(nodes, 8, 8, 2) == ["w0", "w0", "w1", "w1"] * 2
