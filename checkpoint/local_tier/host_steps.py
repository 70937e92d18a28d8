"""The local steps of a root as one host's folder shows them, without the job: for people who look,
check and clean up.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ..errors import Corrupt, StepGone, StepNotFound
from ..steps.claims import writer_of
from ..steps.lineage import Branch, read_branches, run_of
from ..steps.object_claims import open_claims
from ..storage.base import Storage
from .host_folder import HostFolder, check_run_folder
from .parts import LocalKey, Part, why_dead


@dataclass(frozen=True)
class HostStep:
    """A local step in one host's folder: its parts that are complete here, and why it may not come
    back ("": it may).
    """

    key: LocalKey
    parts: tuple[Part, ...]
    dead: str

    @property
    def bytes(self) -> int:
        """The bytes of its packs here."""
        return sum(sum(part.files.values()) for part in self.parts)


def open_host(root: Storage, path: str) -> tuple[HostFolder, list[Branch]]:
    """Returns the folder of a root's run on this host, and the root's branches. Raises StepNotFound
    where there are none, CheckpointError where the folder is a link, or open to other users.
    """
    branches = read_branches(root)
    run = run_of(branches)
    if not run or not (Path(path) / run).is_dir():
        found = (
            f"the run of {root.root} is {run}"
            if run
            else f"{root.root} was never used with a local tier, or is a copy of a root that was"
        )
        raise StepNotFound(f"there is nothing of {root.root} in {path}: {found}", path=path)
    check_run_folder(Path(path) / run, of_any_user=os.geteuid() == 0)
    return HostFolder(Path(path), run), branches


def list_host_steps(root: Storage, path: str) -> list[HostStep]:
    """Returns the local steps of a root of which parts are in a host's folder, ascending. Raises
    StepNotFound, OSError.
    """
    folder, branches = open_host(root, path)
    found: dict[LocalKey, list[Part]] = {}
    for part in folder.scan():
        found.setdefault(part.key, []).append(part)
    return [
        HostStep(key, tuple(parts), why_dead(key, branches)) for key, parts in sorted(found.items())
    ]


def verify_host_step(root: Storage, path: str, step: HostStep) -> int:
    """Reads every byte of a local step's parts here and checks it; returns how many files. Raises
    Corrupt, StepGone, OSError.
    """
    try:
        return _verify_parts(root, path, step)
    except (Corrupt, FileNotFoundError) as error:
        if any(step.key == found.key for found in list_host_steps(root, path)):
            raise
        raise StepGone(
            f"{path}: the local step {step.key.step} was deleted while it was being read", path=path
        ) from error


def _verify_parts(root: Storage, path: str, step: HostStep) -> int:
    folder, _ = open_host(root, path)
    files = 0
    for part in step.parts:
        for reader, report in part.readers(folder.storage):
            for file in report.files:
                reader.check_file(file)
                files += 1
    return files


def sweep_host(root: Storage, path: str) -> list[str]:
    """Deletes what is dead and what is torn of a root in a host's folder; returns the names of what
    went.

    What may come back stays, and what belongs to a writer that has its claim still: it may be at
    work.
    """
    folder, branches = open_host(root, path)
    standing = open_claims(root).standing()
    stay = [step.key for step in list_host_steps(root, path) if not step.dead]
    newest = max(branch.number for branch in branches)
    return folder.delete(
        lambda branch, save_id: branch <= newest and writer_of(save_id) not in standing,
        stay,
    )
