"""What ends with a block."""

from __future__ import annotations

from types import TracebackType
from typing import Self


class Closing:
    """A context manager that calls its own `close()` when the block ends."""

    def close(self) -> None:
        """Ends it."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
