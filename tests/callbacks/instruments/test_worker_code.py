"""Which lines take the time of a loader's workers: a slow function, which each worker calls for every sample."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lm_profiler.callbacks.instruments.python_time import PythonTimes
from lm_profiler.callbacks.instruments.worker_code import WorkerCode
from lm_profiler.torch_names import MAP_FETCHER

SAMPLES = 24


def decoded(index: int) -> torch.Tensor:
    """The slow function: it computes without a call."""
    total = 0
    for number in range(20_000):
        total += number % 7
    return torch.tensor([float(total), float(index)])


class Pictures(Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return decoded(index)


class PictureStream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        for index in range(SAMPLES):
            yield decoded(index)


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@pytest.fixture
def workers() -> Any:
    code = WorkerCode()
    code.install()
    yield code
    code.restore()


@pytest.mark.parametrize("dataset", [Pictures(), PictureStream()], ids=["map", "iterable"])
def test_the_slow_function_of_a_worker_is_found(workers: WorkerCode, dataset: Any) -> None:
    loader = DataLoader(dataset, batch_size=4, num_workers=1, multiprocessing_context="fork")
    assert len(list(loader)) == SAMPLES // 4
    first = workers.times(None)[0]
    assert (first.function, first.what) == ("decoded", "python")
    assert first.phase == "workers"


def test_loading_in_the_training_process_is_not_followed(workers: WorkerCode) -> None:
    list(DataLoader(Pictures(), batch_size=4))
    assert workers.times(None) == []


def test_only_the_first_worker_is_followed_and_only_once(workers: WorkerCode) -> None:
    """Workers start anew at each epoch; following one would lengthen the first step of each."""
    loader = DataLoader(Pictures(), batch_size=2, num_workers=2, multiprocessing_context="fork")
    for _ in range(3):
        list(loader)
    workers.times(None)
    assert len(workers._messages.splitlines()) == 1


def test_the_lines_are_those_of_the_loader_of_training(workers: WorkerCode) -> None:
    """A validation before training has the first workers."""

    class Validation(Pictures):
        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.zeros(1)

    loaders = [
        DataLoader(dataset, batch_size=4, num_workers=1, multiprocessing_context="fork")
        for dataset in (Validation(), Pictures())
    ]
    for loader in loaders:
        list(loader)
    assert workers.times(loaders[1])[0].function == "decoded"


def test_a_second_run_of_the_process_has_its_own_lines() -> None:
    code = WorkerCode()
    code.install()
    list(DataLoader(Pictures(), batch_size=2, num_workers=1, multiprocessing_context="fork"))
    code.restore()
    assert code.times(None)
    code.install()
    assert code.times(None) == []
    code.restore()


def test_a_fetcher_of_the_program_may_name_its_arguments(workers: WorkerCode) -> None:
    fetcher = MAP_FETCHER.find()(Pictures(), True, list, False)
    assert len(fetcher.fetch(possibly_batched_index=[1, 2])) == 2


def test_our_error_does_not_end_a_worker(workers: WorkerCode, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise RecursionError("planted")

    for method in ("start", "shares", "_enter"):
        monkeypatch.setattr(PythonTimes, method, fail)
        loader = DataLoader(Pictures(), batch_size=2, num_workers=1, multiprocessing_context="fork")
        assert len(list(loader)) == SAMPLES // 2
        monkeypatch.undo()
    assert workers.times(None) == []


def test_torch_is_as_before_when_it_is_over() -> None:
    fetch = MAP_FETCHER.find().fetch
    files = open_files()
    code = WorkerCode()
    code.install()
    code.install()  # a second run of the same process
    assert MAP_FETCHER.find().fetch is not fetch
    code.restore()
    code.restore()
    assert MAP_FETCHER.find().fetch is fetch
    assert open_files() == files


def test_a_fetcher_that_outlives_the_run_writes_nowhere(tmp_path: Path) -> None:
    """The number of the closed pipe may be that of a file of the program by then."""
    code = WorkerCode()
    code.install()
    fetcher = MAP_FETCHER.find()
    kept_fetch = fetcher.fetch
    code.restore()
    fetch = fetcher.fetch
    fetcher.fetch = kept_fetch
    try:
        with (tmp_path / "file").open("wb") as file:
            file.flush()
            list(DataLoader(Pictures(), batch_size=2, num_workers=1, multiprocessing_context="fork"))
        assert (tmp_path / "file").read_bytes() == b""
    finally:
        fetcher.fetch = fetch
    assert code.times(None) == []


def test_a_fetch_that_the_program_replaced_meanwhile_stays() -> None:
    fetcher = MAP_FETCHER.find()
    original = fetcher.fetch
    code = WorkerCode()
    code.install()

    def fetch_of_program(*arguments: Any) -> Any:
        return original(*arguments)

    fetcher.fetch = fetch_of_program
    try:
        code.restore()
        assert fetcher.fetch is fetch_of_program
    finally:
        fetcher.fetch = original


def test_a_worker_that_outlives_the_run_goes_on_loading() -> None:
    code = WorkerCode()
    code.install()
    batches = iter(DataLoader(Pictures(), batch_size=2, num_workers=1, multiprocessing_context="fork"))
    next(batches)
    code.restore()
    assert len(list(batches)) == SAMPLES // 2 - 1


def test_an_error_of_the_dataset_stays_the_programs(workers: WorkerCode) -> None:
    class Broken(Pictures):
        def __getitem__(self, index: int) -> torch.Tensor:
            if index >= 4:
                raise ValueError("no such picture")
            return decoded(index)

    loader = DataLoader(Broken(), batch_size=2, num_workers=1, multiprocessing_context="fork")
    with pytest.raises(ValueError, match="no such picture"):
        list(loader)
