"""Lives in which the face once broke a rule, each as short as it goes."""

from __future__ import annotations

from .calls import (
    Ask,
    Barrier,
    Block,
    Broadcast,
    Cancel,
    Die,
    Gather,
    Increment,
    Live,
    Look,
    Notify,
    Report,
    Return,
)
from .coordinator import FULL, MOMENTS
from .life import Life, Step
from .network import LOSE_ANSWERS, RESET, STALL, Fault

FOUND: dict[str, Life] = {
    "the answer of who lives is lost": Life(
        steps=(Step(Live(), (Fault(0, LOSE_ANSWERS),)), Step(Barrier())),
    ),
    "the answer of who lives is lost, and the coordinator dies": Life(
        steps=(
            Step(Live(), (Fault(0, LOSE_ANSWERS, 0.3),)),
            Step(Look(), (Fault(1, MOMENTS[0]),)),
            Step(Barrier()),
        ),
    ),
    "one does not ask who lives": Life(3, steps=(Step(Live(absent=(1,))),)),
    "a report, and the coordinator dies": Life(
        steps=(Step(Report()), Step(Look(), (Fault(0, MOMENTS[0]),)), Step(Barrier())),
    ),
    "the time ends in an outage": Life(
        3, steps=(Step(Live(absent=(1,)), (Fault(0, LOSE_ANSWERS, 0.6),)),)
    ),
    "the answer to a cancellation is lost": Life(
        steps=(Step(Cancel(), (Fault(0, LOSE_ANSWERS),)),),
    ),
    "the coordinator dies as a barrier is cancelled": Life(
        steps=(Step(Cancel(), (Fault(0, MOMENTS[2]),), (0.3, 0.0)),),
    ),
    "a listener calls as its connection breaks": Life(
        4,
        listens=True,
        steps=(
            Step(Barrier()),
            Step(Die((3,), how="reported")),
            Step(Look(only=(0, 1, 2)), (Fault(0, RESET, 0.0), Fault(1, RESET, 0.02))),
            Step(Live()),
        ),
    ),
    **{
        f"a process that has ended ({how}) is back at once": Life(
            steps=(
                Step(Die((1,), how=how)),
                Step(Return((1,))),
                Step(Live()),
                Step(Barrier()),
                Step(Block()),
                Step(Notify((0,))),
                Step(Ask()),
            ),
        )
        for how in ("reported", "error")
    },
    "a process is back after a step was agreed on": Life(
        3,
        steps=(
            Step(Ask()),
            Step(Die((0,), how="reported")),
            Step(Notify((1,))),
            Step(Barrier(only=(1, 2))),
            Step(Ask(only=(1, 2))),
            Step(Return((0,))),
            Step(Ask()),
            Step(Live()),
        ),
    ),
    "a journal without room, and again with room": Life(
        steps=(
            Step(Increment(), (Fault(0, FULL),)),
            Step(Increment()),
            # It is begun anew after five seconds.
            Step(Barrier(), late_s=(6.0, 0.0)),
            Step(Increment()),
            Step(Increment(), (Fault(0, MOMENTS[0]),)),
            Step(Barrier()),
        ),
    ),
    "a coordinator does not answer in time": Life(
        steps=(Step(Gather(absent=(1,)), (Fault(0, STALL, 1.2),)),)
    ),
    "a connection is on its way for longer than the next": Life(
        3,
        steps=(Step(Broadcast(name="b"), (Fault(2, MOMENTS[2]), Fault(1, STALL, 1.2))),),
    ),
}

# Those whose mends are to come: each name goes with its mend.
UNMENDED: set[str] = set()
