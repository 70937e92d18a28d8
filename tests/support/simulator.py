"""A whole job under one seeded clock: the service's own machine, simulated clients, a network that
misbehaves, crashes with replay.

Nothing here waits or runs in parallel: one heap of events in virtual time, one random generator.
The same seed gives the same run, to the last event, so a failing seed is a reproduction. What is
simulated is our session (one stream per client, resent on the next stream when it breaks), with
losses, duplicates and reordering that are worse than TCP's.

Invariants, checked at every completion of the machine, at every tick, after every replay and at the
end (`simulated_truth`):
1. a barrier releases only when every participant of that instance has come;
2. all who learn the result of an instance learn the same one;
3. a key whose writing was acknowledged is there, with its value, until the job begins anew; it does
   when nobody is there;
4. nobody waits past a deadline: the service answers at the very moment, and only the network's
   delay comes on top;
5. while the job gathers, nobody with a stream is lost, and nobody is answered that it has gathered
   before all have come;
6. lost is lost: an incarnation that was given up is served nothing more;
7. where all leave together, nobody is let go before all have asked to leave;
8. nobody who has come back on another stream is given up because an earlier one was closed.
"""

from __future__ import annotations

from holdfast.coordination.limits import Config
from tests.support.simulated_clients import Clients
from tests.support.simulated_service import SimulatedService
from tests.support.simulated_truth import Truth
from tests.support.simulated_world import Faults, World

SERVICE_INCARNATION = 77
HEARTBEAT_TIMEOUT_S = 20.0


class Simulation:
    """Runs one job of `processes` clients, each through `steps` steps, and checks the invariants.

    `unison`: every step is a barrier of all. `batch_s`: how long the service gathers events for one
    write of its journal, 0 for each alone.
    """

    def __init__(
        self,
        seed: int,
        processes: int = 4,
        steps: int = 6,
        faults: Faults | None = None,
        *,
        recoverable: bool = True,
        journal: bool = True,
        unison: bool = False,
        batch_s: float = 0.0,
    ) -> None:
        self.world = World(seed, faults if faults is not None else Faults())
        self._steps = steps
        self._recoverable = recoverable
        config = Config(
            processes,
            SERVICE_INCARNATION,
            heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S,
            recoverable=recoverable,
            survivable=True,
        )
        self.truth = Truth(self.world, processes, recoverable=recoverable)
        self.clients = Clients(
            self.world, self.truth, processes, steps, unison=unison, recoverable=recoverable
        )
        self.service = SimulatedService(
            self.world, config, self.truth, self.clients.reach, journal=journal, batch_s=batch_s
        )
        self.clients.service = self.service
        self.service.on_fence = self.clients.take_end
        self.service.on_end = self.clients.lose_service  # type: ignore[method-assign]

    def run(self, most_s: float = 3_000.0) -> str:
        """Runs to the end and returns the hash of all that happened."""
        self.clients.begin()
        self._plan_faults()
        self.service.wind()
        while not self.clients.finished and self.world.step():
            if self.world.now > most_s:
                left = [
                    (each.task_id, each.step, each.dead)
                    for each in self.clients.all
                    if not each.finished
                ]
                self.world.fail(f"not finished after {most_s} s: {left[:20]}")
        if self.service.machine is None:
            self.service.restart()
        assert self.service.machine is not None
        self.truth.at_end(self.service.machine)
        return self.world.hash.hexdigest()

    def _plan_faults(self) -> None:
        """Spreads crashes, pauses and broken streams over the run."""
        faults = self.world.faults
        span_s = 4.0 * self._steps
        for rate, fault in (
            (faults.breaks, self.clients.break_one),
            (faults.client_crashes if self._recoverable else 0.0, self.clients.crash_one),
            (faults.client_pauses if self._recoverable else 0.0, self.clients.pause_one),
            (faults.service_crashes if self.service.disk else 0.0, self.service.crash),
        ):
            for _ in range(round(self.world.random.uniform(0, 2 * rate))):
                self.world.at(self.world.random.uniform(1, span_s), fault)
