"""Whether all that can be asked about a run tells one story: exit code, the launcher's last lines,
the log, the status as JSON, the page's snapshots, the report, `ls`, `verify`, statistics.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from .drawing import STEPS
from .endings import Part, Runner

_PREFIX = re.compile(r"^\[(\d+)\] ")
# A line's end is a write of its own: Ctrl-C may put a traceback before it.
_SAID = re.compile(r"^step (\d+) loss (nan|-?inf|-?\d[-+.\de]*)", re.MULTILINE)
_GOODPUT = re.compile(r"^holdfast: goodput (\d+)% of ([\d.]+) s: (.*)$", re.MULTILINE)
_DATA = re.compile(r'<script type="application/json" id="data">(.*?)</script>', re.DOTALL)
_TROUBLE = re.compile(
    r"Exception ignored in|Fatal Python error|ResourceWarning|was never awaited|Error in atexit"
)
# A Ctrl-C that comes when the program is done meets what jax has to do at its end.
_JAX_AT_EXIT = re.compile(
    r"^((?:\[\d+\] )?)Exception ignored in atexit callback.*\n\1Traceback .*\n"
    r'(?:\1  File ".*/jax/.*\n(?:\1(?:    .*)?\n)*)+\1KeyboardInterrupt.*$',
    re.MULTILINE,
)
# One that comes before its first line meets the interpreter, which begins.
_PYTHON_AT_START = re.compile(
    r"^((?:\[\d+\] )?)Fatal Python error: init_\w+: .*\n(?:\1.*\n)*?\1KeyboardInterrupt$",
    re.MULTILINE,
)
_CAUSED = ("The above exception was", "During handling of the above")
# What a program's own call may raise where another process is gone.
_OF_LOSS = "Gloo|ProcessLost|SaveFailed|CheckpointError|is lost|is gone|is over"
# By the exit code of the launcher: its own last word, and the page's.
_OUTCOMES = {
    0: ("done", "finished", "Finished"),
    75: ("preempted", "preempted", "Preempted"),
    130: ("preempted", "preempted", "Preempted"),
    124: ("failed", "failed", "Failed"),
}
_GOODPUT_PARTS = {
    "new steps": "stepping_s",
    "waiting for machines": "waiting_s",
    "starting": "starting_s",
    "joining again": "rejoining_s",
    "compiling": "compiling_s",
    "restoring": "restoring_s",
    "blocked in saves": "saving_s",
    "steps done again": "redoing_s",
    "hung": "hung_s",
    "ending attempts": "ending_s",
}
_ALONE = {
    "finished": {0},
    "resumed": {0},
    "killed": {-9, 0},
    "preempted": {0, 75, -15},  # -15: before holdfast is there
    "interrupted": {0, 1, 130, -2},
    "hung": {0, -15, -9},
}
_TOGETHER = {
    "finished": {0},
    "resumed": {0},
    "killed": {0},
    "preempted": {0, 75},
    "interrupted": {0, 130},
    "hung": {0, 124},
}


Steps: TypeAlias = list[dict[str, Any]]


@dataclass
class Told:
    """What was said of a part, by whom."""

    said: dict[int, float] = field(default_factory=dict)  # losses by step
    twice: list[str] = field(default_factory=list)
    resumed: set[int] = field(default_factory=set)
    statistics: list[dict[str, Any]] = field(default_factory=list)  # of the primary
    roots: dict[str, Steps] = field(default_factory=dict)  # by ls
    verified: dict[str, Steps] = field(default_factory=dict)
    sentence: str = ""  # of `holdfast status` about a job that is over

    @property
    def last_said(self) -> int:
        """Returns the last step that the program has printed; 0 where it printed none."""
        return max(self.said, default=0)

    @property
    def listed(self) -> dict[int, dict[str, Any]]:
        """Returns the steps of all roots that `ls` lists as whole, by number."""
        return {
            step["step"]: step
            for steps in self.roots.values()
            for step in steps
            if step["state"] == "whole"
        }

    @property
    def newest(self) -> int:
        """Returns the newest step; 0 where there is none."""
        return max(self.listed, default=0)


class Story:
    """The story of a run, part by part."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._run = runner.run
        self._before = Told()  # what was told of the part before
        self._losses: dict[int, float] = {}

    def listen(self, part: Part) -> Told:
        """Returns what the commands say of the folders now. Bytes are read once the run is done."""
        told = Told()
        folder = self._runner.folder
        roots = sorted(str(root.relative_to(folder)) for root in _roots(folder / "run"))
        done = roots if part.code == 0 else []
        commands = [["status", "log"]] if part.launched else []
        commands += [["ls", root] for root in roots]
        commands += [["verify", root, "--all"] for root in done]
        answers = self._runner.ask(*commands) if commands else []
        if part.launched:
            told.sentence = answers.pop(0).get("error", "")
        for root in roots:
            told.roots[root] = answers.pop(0).get("steps", [])
        for root in done:
            told.verified[root] = answers.pop(0).get("steps", [])
        return told

    def contradictions(self, part: Part, told: Told) -> Iterator[str]:
        """Yields where what is told of a part does not agree. To be asked as each part ends."""
        if part.limit_passed:
            yield "it had to be ended: it did not end by itself"
            self._before = told
            return
        if part.launched and part.code in (-15, 130) and ", coordinator at" not in part.log:
            return  # it was asked to stop before it was there
        _read_log(part, told)
        yield from _codes(part, self._run.ending, is_last=part.code == 0)
        yield from _tracebacks(part, self._run.program)
        yield from self._steps_and_losses(part, told)
        yield from self._folders(part, told)
        yield from _statistics(part, told, self._before)
        if part.launched:
            yield from _launched(part, told, self._run.ending)
        self._before = told

    def end(self) -> Iterator[str]:
        """Yields what is wrong with how the run as a whole has ended."""
        last = self._runner.parts[-1]
        if last.code != 0:
            yield f"the last start ended with {last.code}, not with 0"
        elif self._losses and max(self._losses) != STEPS:
            yield f"the last step is {max(self._losses)}, not {STEPS}"

    def _steps_and_losses(self, part: Part, told: Told) -> Iterator[str]:
        """A step that is done again has the loss that it had; so has a step that is listed."""
        yield from told.twice
        for step, loss in told.said.items():
            known = self._losses.setdefault(step, loss)
            if not _near(known, loss):
                yield f"step {step} had loss {known} in an earlier start, and has {loss}"
        for step, listed in told.listed.items():
            metric = listed["metrics"].get("loss")
            said = self._losses.get(step)
            if metric is not None and said is not None and not _near(metric, said):
                yield f"step {step}: the log says loss {said}, ls {metric}"
        if told.newest > max(self._losses, default=0) > 0:
            yield f"ls lists step {told.newest}, the program came to {max(self._losses)}"
        for step in told.resumed:
            if not part.launched and step != self._before.newest:
                yield f"it resumed from step {step}; ls had listed {self._before.newest}"
            if step < self._before.newest:
                yield f"it resumed from step {step}, below {self._before.newest} of ls"
        in_last = re.split(r"holdfast: attempt \d+, coordinator", part.log)[-1]
        if stops := re.findall(r"stops after step (\d+)", in_last):
            stopped = int(stops[-1])
            if told.newest != stopped:
                yield f"it stopped after step {stopped}, and ls lists {told.newest} as the newest"
        if part.code == 0 and not stops and told.said and told.last_said != part.steps:
            yield f"exit code 0, and the last step printed is {told.last_said} of {part.steps}"

    def _folders(self, part: Part, told: Told) -> Iterator[str]:
        """What is listed is whole, what is verified is what is listed."""
        ended_well = part.code in (0, 75, 130) and not any("KILL" in sent for sent in part.sent)
        for name, steps in told.roots.items():
            for step in steps:
                wrong = step["state"] not in ("whole", "left behind", "unfinished")
                if wrong or (step["state"] == "unfinished" and ended_well):
                    yield f"ls {name}: {step['name']} is {step['state']}: {step['note']}"
            listed = sorted(step["step"] for step in steps if step["state"] == "whole")
            verified = told.verified.get(name, [] if part.code == 0 else None)
            if verified is None:
                continue
            for step in verified:
                if "error" in step:
                    yield f"verify {name}: {step['error']}"
            if listed != sorted(step["step"] for step in verified):
                yield f"{name}: ls lists {listed}, verify {[s['step'] for s in verified]}"


def _read_log(part: Part, told: Told) -> None:
    """Adds what the program has printed."""
    lines = [_PREFIX.sub("", line) for line in part.log.splitlines()]
    for step, loss in _SAID.findall("\n".join(lines)):
        known = told.said.setdefault(int(step), float(loss))
        if not _near(known, float(loss)):
            told.twice.append(f"step {step} had loss {known}, and then {loss}")
        told.said[int(step)] = float(loss)
    told.resumed = {int(step) for step in re.findall(r"resumed from step (\d+)", part.log)}
    for line in part.log.splitlines():
        if found := re.match(r"(?:\[0\] )?statistics (\{.*\})$", line):
            told.statistics.append(json.loads(found[1]))


def _roots(folder: Path) -> set[Path]:
    return {record.parent.parent for record in folder.rglob("checkpoint.json")}


def _near(one: float, other: float) -> bool:
    return abs(one - other) <= 2e-3 * max(abs(one), abs(other), 1e-2)


def _codes(part: Part, ending: str, *, is_last: bool) -> Iterator[str]:
    expected = (_TOGETHER if part.launched else _ALONE)[ending]
    if part.code not in expected:
        yield f"exit code {part.code}, expected one of {sorted(expected)}"
    elif part.code == 0 and (step := re.search(r"SIGINT .* after step (\d+)", " ".join(part.sent))):
        if int(step[1]) < part.steps - 5:
            yield f"it got a Ctrl-C after step {step[1]}, and went on to its end"
    elif part.code and not part.sent:
        yield f"exit code {part.code}, though nothing was done to it"


def _tracebacks(part: Part, program: str) -> Iterator[str]:
    """No traceback but the program's own (of a Ctrl-C, of a collective whose peer is gone), and no
    trouble of the interpreter's.
    """
    logs = {"its output": part.log}
    for name in ("launcher.log", "coordinator.log"):
        path = part.log_dir / name
        if part.launched and path.exists():
            logs[name] = path.read_text(errors="replace")
    is_interrupted = any("SIGINT" in sent for sent in part.sent)
    own_errors = "KeyboardInterrupt" if is_interrupted else _OF_LOSS
    for name, text in logs.items():
        if is_interrupted:
            text = _PYTHON_AT_START.sub("", _JAX_AT_EXIT.sub("", text))
        for lines in _streams(text):
            for traceback in _tracebacks_in(lines):
                own = f"{program}.py" in traceback
                if not (own and part.sent and re.search(own_errors, traceback.splitlines()[-1])):
                    yield f"{name} has a traceback:\n{traceback}"
        if trouble := _TROUBLE.search(text):
            yield f"{name} says {trouble.group()!r}"


def _streams(text: str) -> Iterable[list[str]]:
    """Returns the lines of each process, without the launcher's prefix."""
    streams: dict[str, list[str]] = {}
    for line in text.splitlines():
        prefix = _PREFIX.match(line)
        key = prefix[1] if prefix else ""
        streams.setdefault(key, []).append(_PREFIX.sub("", line))
    return streams.values()


def _tracebacks_in(lines: list[str]) -> Iterator[str]:
    """Yields each traceback with those that it was caused by."""
    chain: list[str] = []
    inside = False
    for line in lines:
        if line.startswith("Traceback (most recent call last)"):
            inside = True
        elif chain and not inside and line and not line.startswith(_CAUSED):
            yield "\n".join(chain)
            chain = []
        if inside:
            chain.append(line)
            # A call that ends before its first line has an empty one, until Python 3.13.
            inside = not line or line.startswith((" ", "Traceback"))
    if chain:
        yield "\n".join(chain)


def _statistics(part: Part, told: Told, before: Told) -> Iterator[str]:
    """What the manager has counted is what is there."""
    if len(told.roots) != 1 or not told.statistics:
        return
    counted = told.statistics[-1]
    if counted["saves_failed"] or counted["saves_missed"]:
        yield f"statistics: {counted['saves_failed']} failed, {counted['saves_missed']} missed"
    if told.resumed and not counted["restores"]:
        yield f"it resumed from {told.resumed}, and statistics say no restore"
    if len(_attempts_said(part)) <= 1:
        there = len(before.listed) + counted["saves"] - counted["steps_deleted"]
        if there != len(told.listed):
            yield (
                f"{len(before.listed)} steps were there, statistics say {counted['saves']} saved,"
                f" {counted['steps_deleted']} deleted; ls lists {len(told.listed)}"
            )


def _attempts_said(part: Part) -> list[int]:
    return sorted({int(n) for n in re.findall(r"holdfast: attempt (\d+), coordinator", part.log)})


def _launched(part: Part, told: Told, ending: str) -> Iterator[str]:
    """What the launcher has left, and what was seen while it ran."""
    path = part.log_dir / "status.json"
    if not path.exists():
        yield "there is no status.json"
        return
    left = json.loads(path.read_text())
    report = _DATA.search((part.log_dir / "report.html").read_text())
    if report is None:
        yield "the report has no data"
        return
    shown = json.loads(report[1])
    yield from _outcome(part, told, left, shown)
    yield from _reached(part, told, left["status"], shown)
    yield from _saved(part, told, left["status"], shown)
    yield from _seconds(part, told, left["status"], shown)
    yield from _ended_by(part, left["status"], shown)
    yield from _live(part, told, left["status"], shown, ending)


def _outcome(part: Part, told: Told, left: dict[str, Any], shown: dict[str, Any]) -> Iterator[str]:
    """How it ended."""
    assert part.code is not None
    outcome, state, verdict = _OUTCOMES.get(part.code, ("failed", "failed", "Failed"))
    ended = left["ended"]
    told_by = ended["launcher"]
    found = {
        "status.json outcome": (left["outcome"].partition(": ")[0], outcome),
        "status.json exit code": (ended["exit_code"], part.code),
        "status.json launcher state": (left["status"]["launcher"]["state"], state),
        "report": (shown["verdict"]["state"], verdict),
        "report's reason": (shown["verdict"]["text"], told_by["why"]),
    }
    said = re.search(r"attempt (\d+), ended .* ago: (\w+), exit code (\d+): (.*)", told.sentence)
    if said is None:
        yield f"`status log` says {told.sentence!r}"
    else:
        found["`status log` attempt"] = (int(said[1]), int(told_by["attempt"]))
        found["`status log` outcome"] = (said[2], state)
        found["`status log` exit code"] = (int(said[3]), part.code)
        found["`status log` reason"] = (said[4], told_by["why"])
    words = re.findall(r"^holdfast: (\w+): (.*)$", part.log, re.MULTILINE)
    own = [(word, text) for word, text in words if word == state]
    errors = re.findall(r"^Error: (.*)$", part.log, re.MULTILINE)
    if own:
        reason, _, counts = own[-1][1].rpartition("; ")
        found["the launcher's reason"] = (reason, told_by["why"])
        # An attempt that comes back at the end has nothing to do: those before it count.
        samples = max((int(step) for _, step, *_ in left["samples"]), default=0)
        step = _furthest(left["status"], "step") or max(0, samples)
        counted = re.search(r"(?:step (\d+)|no step reported)(?:, .*)?, exit code (\d+)$", counts)
        found["the launcher's counts"] = (
            counted and (int(counted[1] or 0), int(counted[2])),
            (step, part.code),
        )
    elif errors:
        found["the launcher's error"] = (errors[-1], told_by["why"])
    else:
        yield "the launcher's lines do not say how it ended"
    events = left["status"].get("events", [])
    launcher_events = [event["text"] for event in events if event["kind"] == "launcher"]
    if not launcher_events or f" is {state}: " not in launcher_events[-1]:
        yield f"the last event of the launcher is {launcher_events[-1:]}, not {state}"
    attempts = left["status"]["launcher"]["attempts"]
    count = max(_attempts_said(part), default=0)
    found["attempts of status.json"] = (max(each["number"] for each in attempts), count)
    found["attempts of the report"] = (max(each["number"] for each in shown["attempts"]), count)
    for what, (value, expected) in found.items():
        if value != expected:
            yield f"{what}: {value!r}, expected {expected!r}"


def _may_go_on(part: Part) -> bool:
    """Returns whether process 0, which prints, may have been gone or still while others went on."""
    return any(re.search("KILL|STOP|USR1", sent) for sent in part.sent)


def _furthest(status: dict[str, Any], name: str) -> int:
    """Returns the most that a process has reached, by protobuf's own JSON or by the status's."""
    tasks = status.get("tasks", [])
    return max((int(task.get("progress", {}).get(name, 0)) for task in tasks), default=0)


def _reached(
    part: Part, told: Told, status: dict[str, Any], shown: dict[str, Any]
) -> Iterator[str]:
    """The last step."""
    step = _furthest(status, "step")
    if max(0, shown["furthest"]["step"]) != step:
        yield f"the report's last step is {shown['furthest']['step']}, status.json's {step}"
    if part.code in (0, 75, 130) and told.said and step not in (0, told.last_said):
        yield f"status.json's last step is {step}, the log's {told.last_said}"
    restored = _steps_in_events(status.get("events", []), "restored")
    # An attempt that comes back at the end has nothing to do.
    if part.code == 0 and told.said and step == 0 and told.last_said not in restored:
        yield f"status.json knows no step, the log says {told.last_said}"
    if part.code == 0 and told.statistics and not told.resumed <= restored:
        yield f"restored by events of status.json: {sorted(restored)}, log: {sorted(told.resumed)}"
    if step > max(told.last_said + 1, *told.resumed, 0) and told.said and not _may_go_on(part):
        yield f"status.json's last step is {step}; the program printed {told.last_said}"


def _saves_of(look: dict[str, Any]) -> set[int]:
    """Returns the steps that a snapshot of the page, or a status, calls saved."""
    if "saves" in look:
        return {step for _, step in look["saves"]}
    return _steps_in_events(look["events"])


def _steps_in_events(events: list[dict[str, Any]], kind: str = "saved") -> set[int]:
    """Returns the steps that the history calls saved, or restored."""
    steps = set()
    for event in events:
        if event["kind"] == kind:
            steps.update(int(number) for number in re.findall(r"\d+", event["text"]))
    return steps


def _saved(part: Part, told: Told, status: dict[str, Any], shown: dict[str, Any]) -> Iterator[str]:
    """Saves, the steps that are there, their metrics, and the best."""
    in_events = _steps_in_events(status.get("events", []))
    in_report = {step for _, step in shown["saves"]}
    if in_events != in_report:
        yield f"saved by events of status.json: {sorted(in_events)}, of report: {sorted(in_report)}"
    if in_events and max(in_events) != told.newest and len(told.roots) == 1:
        yield f"the newest that was saved is {max(in_events)} by events, {told.newest} by ls"
    said = _furthest(status, "savedStep")
    restored = _steps_in_events(status.get("events", []), "restored")
    known = said == told.newest or (said == 0 and told.newest in restored)
    if part.code == 0 and in_events and not known and len(told.roots) == 1:
        yield f"status.json's last saved step is {said}, ls's {told.newest}"
    root = next(
        (r for t in status.get("tasks", []) if (r := t.get("progress", {}).get("root"))), None
    )
    if root is None:
        if told.statistics and part.code == 0:  # of a manager
            yield "status.json knows no root"
        return
    name = next((name for name in told.roots if root["path"].endswith(name)), None)
    if name is None or part.code != 0:
        return
    steps = {int(step["step"]): step for step in root.get("steps", [])}
    listed = {step["step"]: step for step in told.roots[name] if step["state"] == "whole"}
    if sorted(steps) != sorted(listed) or int(root.get("numSteps", 0)) != len(listed):
        count = root.get("numSteps")
        yield f"{name}: status.json has {sorted(steps)} ({count}), ls {sorted(listed)}"
        return
    report = {step["step"]: step for step in (shown["root"] or {"steps": []})["steps"]}
    if sorted(report) != sorted(listed):
        yield f"{name}: the report has {sorted(report)}, ls {sorted(listed)}"
    for number, step in steps.items():
        metrics = step.get("metrics", {})
        known = listed[number]["metrics"]
        if metrics and metrics != known:
            yield f"step {number}: metrics {metrics} by status.json, {known} by ls"
        saved_s = step.get("savedUnixS")
        listed_s = listed[number]["saved_s"]
        if saved_s and abs(saved_s - listed_s) > 1:
            yield f"step {number}: saved at {saved_s} by status.json, at {listed_s} by ls"
    if best := re.findall(r"best step (\d+)", part.log):
        marked = sorted(number for number, step in steps.items() if step.get("best"))
        if int(best[-1]) not in marked:
            yield f"the program's best step is {best[-1]}, status.json marks {marked}"
        if int(best[-1]) not in listed:
            yield f"the program's best step is {best[-1]}, ls lists {sorted(listed)}"


def _seconds(
    part: Part, told: Told, status: dict[str, Any], shown: dict[str, Any]
) -> Iterator[str]:
    """Where the time went."""
    kept = {name: float(value) for name, value in status.get("goodputS", {}).items()}
    line = _GOODPUT.search(part.log)
    if line is None:
        # A start that makes its few steps between two reports has none, and says so.
        is_short = len(told.said) <= 1 or "holdfast: goodput is not known" in part.log
        if part.code == 0 and not (is_short and len(told.said) <= 20):
            yield "the launcher says no goodput"
        return
    percent = int(line[1])
    total_s = float(line[2])
    parts = {text.rsplit(" ", 1)[0]: float(text.rsplit(" ", 1)[1]) for text in line[3].split(", ")}
    unknown = set(parts) - set(_GOODPUT_PARTS)
    if unknown:
        yield f"goodput has the parts {sorted(unknown)}"
        return
    if abs(sum(parts.values()) - total_s) > 0.06 * (len(parts) + 1):
        yield f"the parts of the goodput sum to {sum(parts.values()):.1f}, not to {total_s}"
    took_s = part.elapsed_s - part.silent_s
    if not total_s - part.silent_s - 0.3 <= took_s <= total_s + 6:
        yield f"goodput is of {total_s} s; the command took {took_s:.1f} s after its first line"
    rounded = 1.1 + 5 / max(total_s, 0.1)  # percents, of tenths of a second
    if total_s and abs(percent - 100 * parts["new steps"] / total_s) > rounded:
        yield f"goodput is {percent}%; its parts say {100 * parts['new steps'] / total_s:.0f}%"
    for name, seconds in parts.items():
        known = _GOODPUT_PARTS[name]
        if abs(kept.get(known, 0.0) - seconds) > 0.11:
            yield f"{name}: {seconds} s by the launcher, {kept.get(known, 0.0):.1f} by status.json"
        reported = shown["goodput_s"].get(known, 0.0)
        if abs(reported - seconds) > 0.11:
            yield f"{name}: {seconds} s by the launcher, {reported} by the report"
    if hang := re.search(r"hangs: (.*?) for (\d+) s", part.log):
        # While others go on, the job does not hang.
        if "behind" not in hang[1] and parts["hung"] < int(hang[2]) - 1.5:
            yield f"a hang of {hang[2]} s is told, and {parts['hung']} s are counted as hung"
    elif parts["hung"] > 3 and not any("USR1" in s or "STOP" in s for s in part.sent):
        yield f"{parts['hung']} s are counted as hung; nothing hung"


def _ended_by(part: Part, status: dict[str, Any], shown: dict[str, Any]) -> Iterator[str]:
    """What was done to it is told, and nothing else."""
    sent = " ".join(part.sent)
    lost = [event["text"] for event in status.get("events", []) if event["kind"] == "lost"]
    pages = [event["text"] for event in shown["events"] if event["kind"] == "lost"]
    if lost != pages:
        yield f"lost by status.json: {lost}, by the report: {pages}"
    killed = "SIGKILL" in sent
    hung = "SIGUSR1" in sent or "SIGSTOP" in sent
    if not part.sent and lost:
        yield f"nothing was done to it, and the history says {lost}"
    restarts = len(_attempts_said(part)) > 1
    if restarts and not part.sent:
        yield "nothing was done to it, and it started again"
    if killed and restarts and "was ended by signal 9" not in part.log:
        yield "a process was killed, and no line says so"
    if hung and (restarts or part.code == 124):
        pid = int(re.search(r"\((\d+)\)", sent)[1])  # type: ignore[index]
        number = _process_of(part, pid)
        told = re.search(r"hang: process (\d+)", part.log)
        if told is None:
            yield "it hung, and no line of the log begins with hang:"
        elif number is not None and int(told[1]) != number:
            yield f"process {number} hung, the log says process {told[1]}"
    elif hung is False and "hang:" in part.log:
        yield "nothing hung, and the log says so"


def _process_of(part: Part, pid: int) -> int | None:
    """Returns which process a pid is, by what the status said while it ran."""
    for status in part.statuses:
        for task in status["tasks"]:
            if task["pid"] == pid:
                return int(task["task_id"])
    return None


_STATES = {
    "finished": {"Starting", "Healthy", "Slow", "Finished"},
    "resumed": {"Starting", "Healthy", "Slow", "Finished"},
    "preempted": {
        "Starting",
        "Healthy",
        "Slow",
        "Finished",
        "Preempting",
        "Preempted",
        "Restarting",
    },
}
_STATES["interrupted"] = _STATES["preempted"]


def _live(
    part: Part, told: Told, status: dict[str, Any], shown: dict[str, Any], ending: str
) -> Iterator[str]:
    """What the page and the status said while it ran does not contradict how it ended."""
    if not part.snapshots and part.elapsed_s - part.silent_s > 2:  # else it was over too soon
        yield "the page showed nothing"
    furthest = max([told.last_said, *told.resumed]) + 1
    for name, seen in (("the page", part.snapshots), ("status --json", part.statuses)):
        states = [each["verdict"]["state"] for each in seen]
        odd = set(states) - _STATES.get(ending, set(states))
        if _is_busy():
            odd.discard("Hung")  # so it is, for a while
        if odd:
            texts = {e["verdict"]["text"] for e in seen if e["verdict"]["state"] in odd}
            yield f"{name} showed {sorted(odd)}: {sorted(texts)}"
        steps = [
            each["furthest"]["step"] if "furthest" in each else _furthest(each, "step")
            for each in seen
        ]
        if told.said and max(steps, default=0) > furthest and not _may_go_on(part):
            yield f"{name} showed step {max(steps)}, the log has {furthest - 1}"
        saved = set().union(*map(_saves_of, seen)) if seen else set()
        final = _steps_in_events(status.get("events", []))
        if not saved <= final:
            yield f"{name} had steps {sorted(saved - final)} as saved, which the end does not know"
        # In the first moment of an attempt its coordinator has not heard of those before.
        forgotten = sorted(saved.difference(*map(_saves_of, seen[-3:])))
        if forgotten:
            yield f"{name} showed the saves of {forgotten}, and at last no more"
    last = part.snapshots[-1] if part.snapshots else None
    state = shown["verdict"]["state"]
    if last and last["verdict"]["over"] and last["verdict"]["state"] != state:
        yield f"the page ended with {last['verdict']['state']}, the report with {state}"


def _is_busy() -> bool:
    """Returns whether the machine has so much to do that processes wait long for a core."""
    return os.getloadavg()[0] > 3 * (os.cpu_count() or 1)
