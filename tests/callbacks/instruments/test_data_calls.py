"""Which functions return more than the samples of a batch need; the clock of each batch goes on by known times."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.data import default_collate

from lm_profiler.callbacks.instruments.python_time import PythonTimes
from lm_profiler.record.quantities import PARTS
from lm_profiler.record.run_record import LargeResult

DATA = PARTS.index("data")
now_ns = [0]


def works(milliseconds: float = 1.0) -> None:
    now_ns[0] += int(milliseconds * 1e6)


def large_in(make_batch: Callable[[], object]) -> dict[str, LargeResult]:
    """The functions with large results, by their names without that of the test."""
    times = PythonTimes(lambda: DATA, lambda: now_ns[0], lambda: now_ns[0])
    assert times.start()
    make_batch()
    times.stop()
    return {row.function.rpartition(".<locals>.")[2]: row for row in times.large_results()}


def tone(size: int = 64, channels: int = 3) -> Tensor:
    works(2.0)
    return torch.ones(channels, size, size)


class ForbiddenFunctions(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        pytest.fail(f"the program's mode saw {function}")


def test_reading_results_does_not_disturb_the_program() -> None:
    """One result is longer than what is read, one has no shape, and a mode of the program runs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is a prototype
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    stored: Any = [nested, [torch.ones(4)], [torch.ones(4)] * 2000]

    def load(index: int) -> Any:
        works()
        return stored[index]

    with ForbiddenFunctions():
        assert large_in(lambda: [load(index) for index in range(3)]) == {}


def batch_of(sample: Callable[[int], object], collate: Callable[[list[Any]], object] = default_collate) -> object:
    return collate([sample(index) for index in range(4)])


def test_a_function_before_the_crop_returns_more_than_its_samples_need() -> None:
    def sample(index: int) -> tuple[Tensor, int]:
        works(1.0)
        return tone()[:, :16, :16].flip(2), index

    (row,) = large_in(lambda: batch_of(sample)).values()
    assert (row.function, row.shape, row.used_shape) == ("tone", "3 x 64 x 64", "3 x 16 x 16")
    assert row.line == tone.__code__.co_firstlineno
    assert row.seconds == pytest.approx(8e-3, rel=0.01)
    assert row.used_share == pytest.approx(1 / 16, rel=0.01)


def test_the_outermost_function_before_the_crop_is_named() -> None:
    def augmented() -> Tensor:
        works(1.0)
        return tone() * 2

    rows = large_in(lambda: batch_of(lambda index: cropped(augmented())))
    assert rows["augmented"].seconds == pytest.approx(12e-3, rel=0.01)
    assert [*rows] == ["augmented"]


def cropped(image: Tensor) -> Tensor:
    works(0.1)
    return image[:, :16, :16].clone()


def crops_when_it_collates(samples: list[Tensor]) -> Tensor:
    works(0.1)
    return torch.stack([sample[:, :16, :16] for sample in samples])


def rows_of_channels(index: int) -> Tensor:
    """From an array with the channels last."""

    def decoded() -> Any:
        works()
        return np.ones((64, 64, 3))

    return cropped(torch.from_numpy(decoded()).permute(2, 0, 1))


def yielded_samples() -> Iterator[Tensor]:
    for _ in range(4):
        yield cropped(tone())


@pytest.mark.parametrize(
    "make_batch, names",
    [
        (lambda: batch_of(lambda index: cropped(tone())), ["tone"]),
        (lambda: batch_of(lambda index: tone(), crops_when_it_collates), ["tone"]),
        (lambda: batch_of(rows_of_channels), ["decoded"]),
        (lambda: default_collate(list(yielded_samples())), ["tone"]),
    ],
)
def test_the_samples_are_what_the_batch_is_made_of(make_batch: Callable[[], object], names: list[str]) -> None:
    assert [name.rpartition(".")[2] for name in large_in(make_batch)] == names


def several_crops(index: int) -> list[Tensor]:
    image = tone()
    return [image[:, :24, :24] for _ in range(6)]


def features(index: int) -> Tensor:
    """Of a recording, all of which is needed."""

    def filtered() -> Tensor:
        works()
        return torch.ones(6400)

    return filtered().reshape(40, 160).mean(dim=1)


def spectrum(index: int) -> Tensor:
    def power() -> Tensor:
        works()
        return torch.ones(256, 100)

    return torch.ones(32, 256) @ power()


def slightly_cropped(index: int) -> Tensor:
    return tone()[:, :48, :48]


def of_one_image(samples: list[Tensor]) -> Tensor:
    """A batch of crops from one photograph, which is prepared once."""
    image = tone()
    return torch.stack([image[:, index : index + 32, :32] for index in range(8)])


@pytest.mark.parametrize(
    "make_batch",
    [
        lambda: batch_of(several_crops),
        lambda: batch_of(features),
        lambda: batch_of(spectrum),
        lambda: batch_of(slightly_cropped),
        lambda: of_one_image([]),
        lambda: batch_of(lambda index: index),
        lambda: None,
    ],
)
def test_what_the_samples_need_is_not_too_large(make_batch: Callable[[], object]) -> None:
    assert large_in(make_batch) == {}
