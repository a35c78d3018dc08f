"""What torch and its DataLoader do for a module and data that know nothing of it."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from raised import refusal
from stored_texts import assert_stored
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, TensorDataset

from lm_profiler.training.offered import LoaderOptions, TorchOptions
from lm_profiler.usage_error import UsageError

DATA = TensorDataset(torch.arange(20))


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.arange(20))


class Source:
    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def train_dataloader(self) -> Any:
        return self.loader


def batches_seen(loader: Any) -> list[list[int]]:
    return [(batch[0] if isinstance(batch, list) else batch).tolist() for batch in loader]


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(DATA, 3),
        lambda: DataLoader(DATA, 3, shuffle=True, drop_last=True, generator=torch.Generator().manual_seed(1)),
        lambda: DataLoader(DATA, batch_sampler=Reversed(SequentialSampler(DATA), 4, False)),
        lambda: DataLoader(Stream(), 3, drop_last=True),
    ],
)
def test_a_loader_made_anew_gives_the_same_batches(make: Any) -> None:
    source = Source(make())
    LoaderOptions(num_workers=1).apply(source, "train_dataloader")
    changed = source.train_dataloader()
    assert changed.num_workers == 1
    again = LoaderOptions(num_workers=0).changed(changed)  # the same, without starting one
    assert again.num_workers == 0
    assert batches_seen(again) == batches_seen(make())


class Reversed(BatchSampler):
    def __iter__(self) -> Iterator[list[int]]:
        return iter(list(super().__iter__())[::-1])


def test_loaders_change_only_on_request() -> None:
    source = Source(loader := DataLoader(DATA))
    LoaderOptions().apply(source, "train_dataloader")
    assert source.train_dataloader() is loader
    for workers in (0, 2):  # batches that come as they are ready
        loader = DataLoader(DATA, 3, num_workers=workers, in_order=False)
        assert LoaderOptions(num_workers=1).changed(loader).in_order is False
    message = refusal(UsageError, lambda: LoaderOptions(pin_memory=True).changed([1]))
    assert_stored("training/refused: loader", {"a list": message})


class Called(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.many = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        self.one = nn.Sequential(nn.Linear(2, 2))
        self.none = nn.ReLU()


def test_parts_with_weights_are_compiled() -> None:
    module = Called()
    TorchOptions(compile=True).apply(module)
    compiled = {name for name, part in module.named_modules() if part._compiled_call_impl is not None}
    assert compiled == {"many.0", "many.1", "one"}
    compiling = TorchOptions(compile=True)
    messages = {
        "no parts": refusal(UsageError, lambda: compiling.apply(nn.Linear(2, 2))),
        "no weights": refusal(UsageError, lambda: compiling.apply(nn.Sequential(nn.ReLU()))),
    }
    message = refusal(UsageError, lambda: TorchOptions(compile=True, compile_mode="fastest").apply(module))
    messages["mode"] = re.sub(r"(?<=one of ).*(?=, given)", "TORCH'S MODES", message)
    assert_stored("training/refused: compile", messages)
