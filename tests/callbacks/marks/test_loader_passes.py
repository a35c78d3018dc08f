"""What is known of the loaders of a loop by the passes that it begins."""

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lm_profiler.callbacks.marks.loader_passes import LoaderPasses

ROWS = TensorDataset(torch.zeros(8, 2))


def loader(workers: int, dataset: Any = ROWS) -> DataLoader[Any]:
    return DataLoader(dataset, num_workers=workers)


@pytest.mark.parametrize(
    "workers_of_loaders, known_workers",
    [
        ([], None),  # batches come from elsewhere
        ([2, 2], 2),  # a new loader for each epoch, or two that run side by side
        ([2, 0], None),
    ],
)
def test_workers_are_known_of_loaders_that_no_longer_exist(
    workers_of_loaders: list[int], known_workers: int | None
) -> None:
    passes = LoaderPasses()
    for workers in workers_of_loaders:
        passes.begin(loader(workers))
    assert passes.loader is None
    assert passes.num_workers == known_workers


def test_a_loader_over_a_list_is_known() -> None:
    passes = LoaderPasses()
    rows = loader(0, dataset=[1.0, 2.0])
    for _ in range(2):
        passes.begin(rows)
    assert passes.loader is rows
