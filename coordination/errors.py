"""The errors of holdfast: one tree, picklable, with their facts as attributes.

- HoldfastError
    - CoordinationError: the coordination service refused or failed a call; `.code` is the gRPC
      status name
        - BarrierTimeout: a barrier's time ran out; also a TimeoutError
        - ProcessLost: another process of the job is gone
        - CoordinatorLost: the coordination service cannot be reached
        - Fenced: this process may not go on: another has taken over, or this is another's job or
          number
    - JobError, in holdfast.multihost
    - CheckpointError, in holdfast.checkpoint
"""

from __future__ import annotations

from typing import Any

from .names import on_the_wire


class HoldfastError(Exception):
    """The root of every error that holdfast raises. Facts are keyword arguments and become
    attributes.

    Each class annotates the facts it knows, with their defaults; a fact that no class declares is a
    TypeError. Instances pickle with their facts, so they can cross processes.
    """

    _may_follow_death = True  # whether the death of another process can cause it

    def __init__(self, message: str = "", **facts: Any) -> None:
        super().__init__(on_the_wire(message))  # it is printed, whatever it quotes
        for name, value in facts.items():
            if not hasattr(type(self), name):
                raise TypeError(f"{type(self).__name__} has no fact named {name!r}")
            setattr(self, name, value)

    @property
    def message(self) -> str:
        """The sentence alone, without the status code with which `str()` of a CoordinationError
        begins.
        """
        return str(self.args[0]) if self.args else ""


class CoordinationError(HoldfastError):
    """Says that the coordination service refused or failed a call.

    Its string begins with the status code, as the strings of jaxlib's errors do, so programs that
    match on "DEADLINE_EXCEEDED" work with both.
    """

    code: str = "INTERNAL"

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"


class BarrierTimeout(CoordinationError, TimeoutError):
    """Says that a barrier's time ran out before all its processes had arrived.

    `missing` holds those that had not, `progress` what each of them last reported, such as "step
    40, saved_step 30", where it did.
    """

    code: str = "DEADLINE_EXCEEDED"
    name: str = ""
    missing: tuple[int, ...] = ()
    progress: dict[int, str] = {}  # noqa: RUF012  # a fact's default, never changed


class ProcessLost(CoordinationError):
    """Says that a process that this call needs is gone: dead, silent for `silent_s` seconds, or
    restarted.
    """

    code: str = "UNAVAILABLE"
    process: int | None = None
    host: str | None = None
    silent_s: float | None = None


class CoordinatorLost(CoordinationError):
    """Says that the coordination service at `address` could not be reached for `tried_s`
    seconds.
    """

    code: str = "UNAVAILABLE"
    address: str = ""
    tried_s: float = 0.0


class Fenced(CoordinationError):
    """Says that this process may not go on: another writer, attempt or life has taken over, or the
    service is another job's.
    """

    code: str = "ABORTED"
