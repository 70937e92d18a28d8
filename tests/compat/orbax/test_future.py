"""The ends of work in the background: the same on Orbax and on holdfast."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from tests.support.orbax_programs import outcome, run_both


def test_ends_of_work(tmp_path: Path) -> None:
    """A coroutine runs at once, `result` raises its error, and a chain ends with its callback."""

    def program(ocp: Any, root: Path) -> Any:
        begun = threading.Event()
        ended: list[str] = []

        async def work(*, fails: bool) -> None:
            begun.set()
            if fails:
                raise ValueError("no")

        future = ocp.future
        good = future.CommitFutureAwaitingContractedSignals(work(fails=False), name="good")
        assert begun.wait(60)
        bad = future.CommitFutureAwaitingContractedSignals(work(fails=True))
        chain = future.ChainedFuture([good, future.NoopFuture()], lambda: ended.append("both"))
        failing = future.ChainedFuture([bad], lambda: ended.append("never"))
        found = [good.result(60), chain.result(60), outcome(lambda: failing.result(60))]
        return [*found, future.NoopFuture().cancel(), chain.cancel(), ended]

    run_both(program, tmp_path)


def test_a_chain_has_one_time(tmp_path: Path) -> None:
    """Its timeout is for all together."""

    def program(ocp: Any, root: Path) -> Any:
        class Endless:
            def result(self, timeout: float | None = None) -> None:
                assert timeout is not None and timeout <= 0.01
                raise TimeoutError

        chain = ocp.future.ChainedFuture([Endless()], lambda: None)
        try:
            chain.result(0.01)
        except TimeoutError:
            return "late"

    assert run_both(program, tmp_path) == "late"
