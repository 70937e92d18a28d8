"""What the local saves of one process share: its host's folder, and the other processes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from holdfast.multihost.group.runtime import peer_tls

from ..options import Local
from ..steps.lineage import Lineage
from ..steps.opening import OpenRoot
from .host_folder import HostFolder, HostStorage, RunFolder
from .meeting import Meeting, meet
from .part_copier import PartCopier
from .parts import Part


@dataclass(frozen=True, kw_only=True)
class HostPlace:
    """Where the local saves of a process go, and with whom. `root` is the manager's, with this
    host's folder for its store.
    """

    local: Local
    root: OpenRoot
    meeting: Meeting
    copier: PartCopier
    lineage: Lineage | None
    folders: RunFolder

    @classmethod
    def open(cls, local: Local, store: OpenRoot, lineage: Lineage | None) -> Self:
        """Meets the other processes of a root; every process calls it. Blocks."""
        path = Path(local.path)
        # The store's disk is not this host's, and a bar for each local save would flicker.
        options = replace(
            store.options, progress=None, check_free_space=False, save_timeout_s=local.timeout_s
        )
        meeting = meet(local, store.group, f"{store.messages}/local/meet", peer_tls())
        return cls(
            local=local,
            root=replace(store, storage=HostStorage(path), options=options),
            meeting=meeting,
            copier=PartCopier(local, meeting),
            lineage=lineage,
            folders=RunFolder(path, syncs=local.sync),
        )

    @property
    def messages(self) -> str:
        """What the names of the tier's messages begin with."""
        return f"{self.root.messages}/local"

    def serve(self, found: Part, folder: HostFolder) -> None:
        """Lets peers read a part of this host."""
        if self.meeting.server is not None:
            self.meeting.server.publish(folder.path, found.name, found.files)

    def withdraw(self, folders: Iterable[str]) -> None:
        """Lets peers read nothing more of these local saves."""
        for name in folders:
            if self.meeting.server is not None:
                self.meeting.server.withdraw(name)

    def close(self) -> None:
        """Ends the part server, and closes the folder."""
        self.meeting.close()
        self.folders.close()
