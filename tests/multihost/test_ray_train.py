"""Workers of Ray Train, on a real Ray cluster: the page's example is drained and killed; slices;
what is refused.
"""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.libraries import need
from tests.support.paths import ROOT
from tests.support.ray_fleet import Fleet
from tests.support.running_logs import whole_lines

pytestmark = [pytest.mark.slow, pytest.mark.timeout(290), pytest.mark.filterwarnings("ignore")]
if os.environ.get("CI") != "true":
    need("ray.train", "make slow-libraries")

PAGE = ROOT / "docs" / "running-jobs.md"
POD = {"ray.io/tpu-pod-type": "v4-16", "ray.io/tpu-topology": "2x2x2"}
SLICES = [
    {"ray.io/tpu-slice-name": f"slice-{index}", "ray.io/tpu-worker-id": str(worker)} | POD
    for index in (0, 1)
    for worker in (0, 1)
]


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_PLATFORMS", "cpu")
        patch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=1")
        patch.setenv("RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S", "0.5")
        patch.setenv("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "20")
        fleet = Fleet(__name__)
        yield fleet
        fleet.close()


@pytest.fixture
def example() -> Mapping[str, Any]:
    """What the page's code defines."""
    (code,) = re.findall(
        r"^```py\n(import ray\n.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL
    )
    names: dict[str, Any] = {}
    exec(compile(code, PAGE, "exec"), names)
    return names


class Reports:
    """Collects in a file what the workers report; `after_report` and `after_exception` are called
    in Ray's controller.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def callback(self) -> Any:
        import ray.train

        path = self._path

        class Recorder(ray.train.UserCallback):  # type: ignore[misc]
            def after_report(
                self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any
            ) -> None:
                with path.open("a") as file:
                    file.write(json.dumps(metrics) + "\n")

            def after_exception(
                self, run_context: Any, worker_exceptions: dict[int, Exception]
            ) -> None:
                with path.with_suffix(".errors").open("a") as file:
                    file.write(
                        json.dumps(
                            [
                                f"{type(error).__name__}: {error}"
                                for error in worker_exceptions.values()
                            ]
                        )
                        + "\n"
                    )

        return Recorder()

    def all(self) -> list[list[dict[str, int]]]:
        return [json.loads(line) for line in whole_lines(self._path)]

    def errors(self) -> str:
        path = self._path.with_suffix(".errors")
        return path.read_text() if path.exists() else ""


def run_beside(fit: Callable[[], Any], script: Callable[[], None]) -> Any:
    """Runs a trainer on a thread beside, while `script` does to the cluster what it does."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(fit()))
    thread.start()
    try:
        script()
    finally:
        thread.join()
    return results[0]


def workers() -> dict[str, int]:
    """Returns node and process id of each training worker that lives, by the cluster's own table:
    its dashboard may be another's.
    """
    import ray

    actors = ray._private.state.actors().values()
    alive = [
        actor
        for actor in actors
        if actor["ActorClassName"] == "RayTrainWorker" and actor["State"] == "ALIVE"
    ]
    return {actor["Address"]["NodeID"]: actor["Pid"] for actor in alive}


def test_the_example_is_drained_and_resumes(
    fleet: Fleet, example: Mapping[str, Any], tmp_path: Path
) -> None:
    """The page's code: a node drains, all save one step and leave; Ray starts again on nodes that
    stay, and they go on behind that step.
    """
    fleet.become([{}] * 3)
    reports = Reports(tmp_path / "reports")

    def drain() -> None:
        fleet.wait_until(lambda: len(reports.all()) >= 3)
        node = next(node for node in fleet.nodes if node.node_id in workers())
        fleet.drain(node, 120)

    result = run_beside(
        lambda: example["main"](str(tmp_path / "checkpoints"), 600, [reports.callback()]), drain
    )
    resumed = result.return_value["resumed_from"]
    assert f"Preempted: step {resumed} is saved" in reports.errors() and resumed < 600
    assert result.return_value["total"] == 600 * 8
    seen = [(ranks[0]["resumed_from"], ranks[0]["step"]) for ranks in reports.all()]
    first = [step for start, step in seen if start == 0]
    second = [step for start, step in seen if start == resumed]
    assert first + second == list(range(20, 601, 20)), (
        "report works, and no step is done twice or left out"
    )
    assert all(ranks[0] == ranks[1] for ranks in reports.all())


def test_a_killed_worker_brings_all_back(
    fleet: Fleet, example: Mapping[str, Any], tmp_path: Path
) -> None:
    """SIGKILL of a worker: Ray starts all again, as the next attempt of the same job, from the last
    of every 100 steps.
    """
    fleet.become([{}] * 3)
    reports = Reports(tmp_path / "reports")

    def kill() -> None:
        fleet.wait_until(lambda: len(reports.all()) >= 7)
        os.kill(next(iter(workers().values())), signal.SIGKILL)

    result = run_beside(
        lambda: example["main"](str(tmp_path / "checkpoints"), 400, [reports.callback()]), kill
    )
    assert result.return_value["total"] == 400 * 8
    assert result.return_value["resumed_from"] in (100, 200, 300)


def slice_of_a_worker(config: dict[str, str]) -> None:
    from holdfast import multihost

    multihost.initialize()
    spec = multihost.current_spec()
    assert spec is not None
    seen = {key: value for key, value in os.environ.items() if key.startswith("MEGASCALE_")} | {
        "attempt": str(spec.attempt)
    }
    with open(
        f"{config['folder']}/{spec.attempt}-{spec.process_id}-of-{spec.num_processes}", "w"
    ) as file:
        json.dump(seen, file)
    step = 0
    while spec.num_processes == 4 and not multihost.reached_preemption(step):
        step += 1
        multihost.sync_global_processes("step", timeout=60)
    if spec.num_processes == 4:
        raise multihost.Preempted(f"{multihost.preemption_notice()}")
    multihost.shutdown()


def test_a_slice_is_drained_others_go_on(fleet: Fleet, tmp_path: Path) -> None:
    """Two fake slices of two hosts: one host drains, its slice leaves with it, and two workers go
    on, without stale slice variables.
    """
    import ray.train
    from ray.train.v2.jax import JaxConfig, JaxTrainer

    fleet.become(SLICES)
    reports = Reports(tmp_path / "reports")
    trainer = JaxTrainer(
        slice_of_a_worker,
        train_loop_config={"folder": str(tmp_path)},
        jax_config=JaxConfig(),
        scaling_config=ray.train.ScalingConfig(
            num_workers=(2, 4), use_tpu=True, topology="2x2x2", accelerator_type="TPU-V4"
        ),
        run_config=ray.train.RunConfig(
            failure_config=ray.train.FailureConfig(max_failures=3), callbacks=[reports.callback()]
        ),
    )

    def drain() -> None:
        fleet.wait_until(lambda: len(list(tmp_path.glob("*-of-4"))) == 4)
        going = [fleet.nodes[fleet.labels.index(label)] for label in SLICES[2:]]
        fleet.drain(going[0], 120)
        fleet.wait_until(lambda: "Preempted" in reports.errors())
        for node in going:
            fleet.remove(node)

    run_beside(trainer.fit, drain)
    of_four = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("1-*-of-4"))]
    assert [seen["MEGASCALE_SLICE_ID"] for seen in of_four] == ["0", "0", "1", "1"]
    assert {seen["MEGASCALE_NUM_SLICES"] for seen in of_four} == {"2"}
    assert [json.loads(path.read_text()) for path in sorted(tmp_path.glob("2-*-of-2"))] == [
        {"attempt": "2"}
    ] * 2
    assert "Ray takes the node of rank" in reports.errors()


def only_rank_0_joins(config: dict[str, str]) -> None:
    import ray.train

    from holdfast import multihost

    if ray.train.get_context().get_world_rank() == 0:
        try:
            multihost.initialize(timeout_s=3)
        finally:
            left = [each.name for each in threading.enumerate() if "holdfast" in each.name]
            assert not left, left
    else:
        threading.Event().wait(20)


def joins_twice(config: dict[str, str]) -> None:
    from holdfast import multihost

    multihost.initialize()


@pytest.mark.parametrize(
    ("train", "started", "message"),
    [
        (
            only_rank_0_joins,
            False,
            r"the 2 workers of Ray Train have not all called initialize\(\) in 3 s",
        ),
        (
            joins_twice,
            True,
            r"JaxTrainer leaves it to initialize\(\) where it is given jax_config=JaxConfig\(\)",
        ),
    ],
    ids=["some workers do not come", "Ray Train has started jax itself"],
)
def test_a_start_that_cannot_be_says_why(
    fleet: Fleet, train: Callable[[dict[str, str]], None], started: bool, message: str
) -> None:
    """A worker that does not call initialize() is waited for no longer than asked;
    jax.distributed's own start is named with the remedy.
    """
    import ray.train
    from ray.train.v2.jax import JaxConfig, JaxTrainer

    fleet.become([{}] * 3)
    trainer = JaxTrainer(
        train,
        train_loop_config={},
        jax_config=JaxConfig(use_gpu=started),
        scaling_config=ray.train.ScalingConfig(num_workers=2),
    )
    with pytest.raises(ray.train.TrainingFailedError, match=message):
        trainer.fit()
