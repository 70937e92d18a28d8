"""What inventories add up to: never a mixture, never a dead step, never older than what was
acknowledged.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.checkpoint import HostileCheckpoint, SaveFailed
from holdfast.checkpoint.format.item_report import FileReport, ItemReport, pack_name
from holdfast.checkpoint.format.record import parse_record
from holdfast.checkpoint.local_tier.inventory import (
    FoundStep,
    Inventory,
    SurveyVerdict,
    find_whole,
    living_steps,
    record_of,
)
from holdfast.checkpoint.local_tier.parts import (
    LocalKey,
    Part,
    PartSummary,
)
from holdfast.checkpoint.local_tier.placement import Member, place_copies
from holdfast.checkpoint.steps.lineage import NOTHING, Branch
from tests.support.local_parts import RUN, SAVE, saved_parts


def _inventory(*parts: Part) -> Inventory:
    sent = Inventory([part.summary() for part in parts])
    found = Inventory.from_bytes(sent.to_bytes())
    assert found == sent
    return found


def test_a_verdict_survives_the_wire(tmp_path: Path) -> None:
    """Keys and holders travel; the reports stay with the primary."""
    parts = saved_parts(tmp_path)
    verdict = SurveyVerdict(find_whole([_inventory(*parts)]))
    (step,) = SurveyVerdict.from_bytes(verdict.told().to_bytes()).steps
    assert step == replace(verdict.steps[0], reports=[])
    off = SurveyVerdict(why_off="a link")
    assert SurveyVerdict.from_bytes(off.to_bytes()).why_off == "a link"


def test_the_record_of_whole_parts_is_the_commits(tmp_path: Path) -> None:
    """Built from the parts alone it parses, names every file, and says of which branch it is."""
    parts = saved_parts(tmp_path)
    (found,) = find_whole([_inventory(*parts), _inventory(parts[1])])
    assert found.holders == [[0], [0, 1]]
    assert parts[0].head is not None
    record = parse_record(record_of(found, parts[0].head), "r")
    assert (record.step, record.opening, record.writer_id, record.processes, record.metadata) == (
        7,
        1,
        SAVE,
        2,
        {"a": [1]},
    )
    assert {f"{found.key.folder}/{name}" for name in record.file_names()} == {
        name for part in parts for name in part.files
    }
    assert {leaf.path: leaf.value for leaf in record.items["state"].leaves if not leaf.dtype} == {
        "n": 3,
        "name": "net",
    }


def _with_report(found: FoundStep, process: int, **changes: Any) -> FoundStep:
    report = json.loads(found.reports[process])
    report["state"] |= changes
    return replace(
        found, reports=[*found.reports[:process], json.dumps(report), *found.reports[process + 1 :]]
    )


def test_reports_that_do_not_fit_together_are_no_step(tmp_path: Path) -> None:
    """Another plan, another value of a local leaf, other items, too many files or values: an error,
    never a record.
    """
    parts = saved_parts(tmp_path)
    (found,) = find_whole([_inventory(*parts)])
    head = parts[0].head
    assert head is not None
    local = json.loads(found.reports[1])["state"]["local"]
    file = FileReport(pack_name(1, 0, SAVE), 1, 0, 0)
    with pytest.raises(SaveFailed, match=r"processes \[1\] planned another save"):
        record_of(_with_report(found, 1, plan="x"), head)
    with pytest.raises(
        SaveFailed, match=r"'name' is local to each process and differs on processes \[1\]"
    ):
        record_of(_with_report(found, 1, local=[*local[:-1], local[-1] ^ 1]), head)
    for changes in (
        {"local": local[1:]},
        {"values": [["int", "0x1"]]},
        {"files": [[file.name, 1, 0, 0]]},
        {"where": [[0, 0, 1]]},
    ):
        with pytest.raises(HostileCheckpoint, match="not what its plan asks for"):
            record_of(_with_report(found, 1, **changes), head)
    with pytest.raises(SaveFailed, match="process 1 saved the items"):
        record_of(replace(found, reports=[found.reports[0], "{}"]), head)


def test_json_that_is_one_for_all_has_to_be_equal(tmp_path: Path) -> None:
    """Of a JSON item that process 0 alone has written, all report one checksum; of one that each
    has written, their own.
    """
    parts = saved_parts(tmp_path)
    head = parts[0].head
    assert head is not None

    def found(files: int) -> FoundStep:
        reports = []
        for process in range(2):
            name = f"{process:05d}-j-{SAVE}.json"
            own = (FileReport(name, 2, 0, process),) if process < files else ()
            reports.append(
                replace(
                    parts[process],
                    items=dict(parts[process].items)
                    | {"data": ItemReport(process, "", own, (process,))},
                )
            )
        return find_whole([_inventory(*reports)])[0]

    with pytest.raises(SaveFailed, match="its JSON on processes"):
        record_of(found(1), head)
    assert len(parse_record(record_of(found(2), head), "r").items["data"].files) == 2


def test_a_missing_part_makes_no_step(tmp_path: Path) -> None:
    """Parts of two saves never add up to one, whatever is missing of each."""
    one = saved_parts(tmp_path)
    two = saved_parts(tmp_path, save_id="0000000100000002")
    assert find_whole([_inventory(one[0]), _inventory(two[1])]) == []
    assert [
        found.key.save_id for found in find_whole([_inventory(one[0], two[0]), _inventory(two[1])])
    ] == ["0000000100000002"]
    assert find_whole([Inventory()]) == []


def test_how_many_losses_a_step_survives(tmp_path: Path) -> None:
    """The part with the fewest hosts says it; two processes of one host are one."""
    parts = saved_parts(tmp_path)
    (found,) = find_whole([_inventory(*parts), _inventory(*parts), _inventory(parts[0])])
    assert found.survives(["a", "b", "c"]) == 1
    assert found.survives(["a", "a", "c"]) == 0


# --- a job with many lives


@dataclass
class Job:
    """A model of a root and its hosts. A state is the tuple of all local saves and durable steps
    that it has come from.
    """

    hosts: int
    replicas: int
    keep: int = 1
    branches: list[Branch] = field(default_factory=list)
    durable: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    folders: dict[int, dict[LocalKey, set[int]]] = field(
        default_factory=dict
    )  # host: key: processes whose part is there
    history: dict[LocalKey, tuple[Any, ...]] = field(default_factory=dict)
    acknowledged: LocalKey | None = None
    of_this_life: list[LocalKey] = field(default_factory=list)  # acknowledged ones
    state: tuple[Any, ...] = ()
    trunk: tuple[Any, ...] = ()  # the state of the last life that saved or deleted anything
    step: int = 0
    base: int = NOTHING
    fresh: bool = True
    saves: int = 0

    def begin(self, present: list[int]) -> FoundStep | None:
        """Opens the root on some hosts and goes on from the best step; returns the local one that
        was chosen.
        """
        inventories = [self._listed(host) for host in present]
        found = next(iter(living_steps(inventories, self.branches)), None)
        newest = max(self.durable, default=NOTHING)
        if found is not None and found.key.step > newest:
            self.state = self.history[found.key]
            self.step = found.key.step
        else:
            found = None
            self.state = self.durable.get(newest, ())
            self.step = max(newest, 0)
        self.base = found.key.step if found else newest
        self.fresh = True
        self.of_this_life = []
        return found

    def roll_back(self, step: int) -> None:
        """Restores a durable step by its number; what is above is deleted."""
        self.state = self.durable[step]
        self.step = step
        self.base = step
        self.fresh = True
        if any(at > step for at in self.durable):
            self.durable = {at: state for at, state in self.durable.items() if at <= step}
            self._open()
            self.trunk = self.state

    def _listed(self, host: int) -> Inventory:
        parts = self.folders.get(host, {})
        return Inventory(
            [PartSummary(key, process, "{}") for key, there in parts.items() for process in there]
        )

    def _open(self) -> Branch:
        if self.fresh:
            number = len(self.branches) + 1
            self.branches.append(Branch(RUN, number, f"{number:08x}", self.base))
            self.fresh = False
        return self.branches[-1]

    def save_durably(self, steps: int) -> None:
        self.step += steps
        self._open()
        self.state = self.trunk = (*self.state, ("durable", self.step, len(self.branches)))
        self.durable[self.step] = self.state

    def led_to(self, state: tuple[Any, ...], key: LocalKey) -> bool:
        """Says whether a state has come from that of a save."""
        saved = self.history[key]
        return state[: len(saved)] == saved

    def covers(self, present: list[int], key: LocalKey) -> bool:
        """Says whether every part of a save is on one of some hosts."""
        there = [self.folders.get(host, {}).get(key, set()) for host in present]
        return set().union(*there) == set(range(key.processes))

    def begin_locally(
        self, steps: int, present: list[int]
    ) -> tuple[LocalKey, list[tuple[int, int]]]:
        """Begins a save; returns its key, and what it is to write: pairs of a process and a host
        that is to have its part.
        """
        self.step += steps
        branch = self._open()
        self.saves += 1
        key = LocalKey(self.step, branch.number, f"{branch.writer}{self.saves:08x}", len(present))
        # A step that is saved again on its branch is the same state under another key.
        if steps:
            self.state = (*self.state, key)
        self.trunk = self.history[key] = self.state
        copies = place_copies([Member(str(host)) for host in present], self.replicas)
        return key, [
            (process, present[rank])
            for process, others in enumerate(copies)
            for rank in [process, *others]
        ]

    def write(self, key: LocalKey, pairs: Collection[tuple[int, int]]) -> None:
        """Writes parts onto hosts."""
        for process, host in pairs:
            self.folders.setdefault(host, {}).setdefault(key, set()).add(process)

    def acknowledge(self, key: LocalKey, present: list[int], *, cleans: bool) -> None:
        """Ends a save of which all is written; what is older than it goes, unless it could not be
        deleted.
        """
        self.acknowledged = key
        self.of_this_life = [*self.of_this_life, key][-self.keep :]
        for host in present if cleans else []:
            self.folders[host] = {
                old: parts for old, parts in self.folders[host].items() if old in self.of_this_life
            }


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_no_abandoned_step_ever_comes_back(data: st.DataObject) -> None:
    """In any history of lives on changing hosts, with saves that fail or are cut off, rollbacks and
    folders that were away, the decision

    takes whole saves alone, never one that the newest life had not come from, and none below the
    last acknowledged one while it is covered.
    """
    job = Job(
        data.draw(st.integers(1, 4)), data.draw(st.integers(0, 2)), data.draw(st.integers(1, 2))
    )
    everybody = list(range(job.hosts))
    gaps = st.integers(1, 3)
    for life in range(data.draw(st.integers(2, 6))):
        present = sorted(data.draw(st.sets(st.sampled_from(everybody), min_size=1)))
        trunk = job.trunk
        acknowledged = job.acknowledged
        found = job.begin(present)
        if found is not None:
            assert job.covers(present, found.key), "a mixture"
            assert job.led_to(trunk, found.key), "a step of an abandoned branch"
        if (
            acknowledged is not None
            and job.led_to(trunk, acknowledged)
            and job.covers(present, acknowledged)
        ):
            assert job.step >= acknowledged.step, (
                f"life {life}: an older step came back than was acknowledged and is there"
            )
        failed = False
        for what in data.draw(
            st.lists(
                st.sampled_from(["local", "fails", "dies", "durable", "rollback"]),
                min_size=1,
                max_size=3,
            )
        ):
            if what in ("local", "fails", "dies"):
                key, pairs = job.begin_locally(
                    0 if failed else data.draw(gaps), present
                )  # a step that failed may be saved again
                failed = what == "fails"
                job.write(
                    key, pairs if what == "local" else data.draw(st.sets(st.sampled_from(pairs)))
                )
            if what == "local":
                job.acknowledge(key, present, cleans=data.draw(st.booleans()))
            elif what == "dies":
                break
            elif what == "durable":
                job.save_durably(data.draw(gaps))
            elif what == "rollback" and job.durable:
                job.roll_back(data.draw(st.sampled_from(sorted(job.durable))))


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 7), st.integers(0, 2), st.data())
def test_an_acknowledged_step_is_there_while_a_host_of_each_part_is(
    hosts: int, replicas: int, data: st.DataObject
) -> None:
    """Lose any `replicas` hosts, and the step is found; a part without a host left makes it
    none.
    """
    job = Job(hosts, replicas)
    key, pairs = job.begin_locally(5, list(range(hosts)))
    job.write(key, pairs)
    lost = data.draw(st.sets(st.sampled_from(range(hosts)), max_size=hosts - 1))
    copies = place_copies([Member(str(rank)) for rank in range(hosts)], replicas)
    covered = all({rank, *others} - lost for rank, others in enumerate(copies))
    assert covered or len(lost) > min(replicas, hosts - 1)
    found = job.begin([host for host in range(hosts) if host not in lost])
    assert (found is not None) == covered
