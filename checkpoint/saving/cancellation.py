"""Whether a save was called off: one flag, which is asked while it writes, and for the last time before the save may be committed."""

from __future__ import annotations

from ..errors import SaveCancelled


class Cancellation:
    """Calls a save off, until `close`. Thread-safe, without a lock that an interrupt could leave held: the first call decides."""

    def __init__(self) -> None:
        self._first: dict[None, str] = {}

    def cancel(self) -> bool:
        """Calls the save off; returns whether that came in time, so that nothing of it is or will be committed."""
        return self._first.setdefault(None, "cancelled") == "cancelled"

    def check(self, step: int, process: int) -> None:
        """Raises SaveCancelled where the save was called off."""
        if self._first.get(None) == "cancelled":
            message = f"step {step} was not saved: process {process} called it off; nothing of it stays"
            raise SaveCancelled(message, step=step, process=process)

    def close(self, step: int, process: int) -> None:
        """Lets no later `cancel` come in time: from here on others may commit. Raises SaveCancelled where the save was called off."""
        self._first.setdefault(None, "closed")
        self.check(step, process)
