"""The face of the engine: all that the manager, the one-shot functions and the command line call.

A save of one item runs through it as follows; one Planner serves all saves of a manager.

    plan = planner.plan(tree)                        # pure and cached; every process computes the same
    snapshot = take_snapshot(plan, tree)             # the caller's thread; then snapshot.wait() and the caller may donate
    report = write_snapshot(snapshot, storage, "100", "state", writer_id)      # a background thread; durable on return
    data = report.to_bytes()                         # one gather in a save: ItemReport.from_bytes(data) at the primary
    check_reports("state", plan, reports)            # every process's report, by rank; raises SaveFailed
    record = build_record(100, {"state": (plan, reports)}, ...)
    storage.commit("100/checkpoint.json", record, claim)

and a restore: `record = read_record(storage, "100")`, then `restore_item(storage, "100", record, "state", like)`. Nothing in here
synchronises processes, keeps threads between calls, or lists the store.
"""

from __future__ import annotations

from ._match import SAVED
from ._own import Own
from ._plan import Plan
from ._planner import Planner
from ._record import ItemRecord, Record, build_record, parse_record
from ._reports import FileReport, ItemReport, check_reports
from ._restore import How, Report, read_json, read_record, restore_item, verify_step
from ._snapshot import Snapshot, take_snapshot
from ._writer import write_json, write_snapshot

RECORD_NAME = "checkpoint.json"

__all__ = [
    "RECORD_NAME",
    "SAVED",
    "FileReport",
    "How",
    "ItemRecord",
    "ItemReport",
    "Own",
    "Plan",
    "Planner",
    "Record",
    "Report",
    "Snapshot",
    "build_record",
    "check_reports",
    "parse_record",
    "read_json",
    "read_record",
    "restore_item",
    "take_snapshot",
    "verify_step",
    "write_json",
    "write_snapshot",
]
