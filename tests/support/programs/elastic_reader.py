"""A reader of grain that goes on with other numbers of processes."""

from __future__ import annotations

from typing import Any

import grain
from grain import experimental

NUM_ELEMENTS = 240
GLOBAL_BATCH = 24


def reader(index: int, count: int) -> Any:
    dataset = grain.MapDataset.range(NUM_ELEMENTS).shuffle(seed=3)
    return experimental.ElasticIterator(
        dataset, GLOBAL_BATCH, grain.sharding.ShardOptions(index, count)
    )
