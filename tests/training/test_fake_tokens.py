"""The fake data: endless, the same for the same seed, and cheap."""

import importlib
from collections.abc import Callable
from itertools import islice
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DistributedSampler

from lm_profiler.training import FakeTokens, LanguageModel
from lm_profiler.training.fake_tokens import ENDLESS, RankSampler, TokenSequences
from lm_profiler.usage_error import UsageError


@pytest.fixture
def stats() -> Any:
    """Imported where it is asked for: a machine with a GPU may lack it, and has a test in here."""
    return importlib.import_module("scipy.stats")


def batches(count: int = 4, **options: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    options = {"vocab_size": 1000, "context_length": 32, **options}
    return list(islice(FakeTokens(**options).train_dataloader(), count))


def test_targets_are_the_tokens_after_the_inputs() -> None:
    inputs, targets = batches(batch_size=3)[0]
    assert inputs.shape == targets.shape == (3, 32)
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.is_contiguous()
    assert targets.is_contiguous()
    torch.testing.assert_close(inputs[:, 1:], targets[:, :-1])
    assert len(FakeTokens(batch_size=4, vocab_size=10).train_dataloader()) == ENDLESS // 4


def test_the_same_seed_gives_the_same_tokens() -> None:
    alone = batches(num_workers=0)
    for workers in (1, 2):
        for expected, given in zip(alone, batches(num_workers=workers), strict=True):
            torch.testing.assert_close(given, expected)
    wide = torch.cat([inputs for inputs, _ in batches(2, batch_size=4)])
    narrow = torch.cat([inputs for inputs, _ in batches(8, batch_size=1, context_length=20)])
    torch.testing.assert_close(narrow, wide[:, :20])


def test_other_seeds_give_other_tokens() -> None:
    rows = [tuple(row.tolist()) for seed in range(20) for inputs, _ in batches(16, seed=seed) for row in inputs]
    assert len(set(rows)) == len(rows) == 20 * 16 * 4


@pytest.mark.parametrize("distribution, vocab_size", [("uniform", 10), ("zipf", 50)])
def test_ids_follow_their_distribution(distribution: Any, vocab_size: int, stats: Any) -> None:
    ids = TokenSequences(vocab_size, 10_000, distribution, seed=3).__getitems__(range(10))[0].numpy()
    counts = np.bincount(ids.ravel(), minlength=vocab_size)
    assert len(counts) == vocab_size
    zipf = stats.zipfian(1.0, vocab_size).pmf(np.arange(1, vocab_size + 1))
    shares = zipf if distribution == "zipf" else np.full(vocab_size, 1 / vocab_size)
    assert stats.chisquare(counts, shares * ids.size).pvalue > 1e-3


@pytest.mark.parametrize("distribution", ["uniform", "zipf"])
def test_neighbours_are_independent(distribution: Any, stats: Any) -> None:
    ids = TokenSequences(4, 50_000, distribution, seed=0).__getitems__([0, 1])[0].numpy()
    for first, second in ((ids[0, :-1], ids[0, 1:]), (ids[0], ids[1])):
        table = np.zeros((4, 4))
        np.add.at(table, (first, second), 1)
        assert stats.chi2_contingency(table).pvalue > 1e-3


def test_the_vocabulary_is_the_modules(make_trainer: Callable[..., Trainer], tiny: dict[str, Any]) -> None:
    vocab_size = 123
    seen: set[int] = set()

    class Watching(LanguageModel):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            seen.update(batch[0].flatten().tolist())
            return super().training_step(batch, batch_idx)

    make_trainer(2).fit(Watching(**{**tiny, "vocab_size": vocab_size}), datamodule=FakeTokens())
    assert seen == set(range(vocab_size))


def test_data_that_do_not_fit_the_module_are_refused_first(make_trainer: Callable[..., Trainer], tiny: dict[str, Any]):
    with pytest.raises(ValueError, match=r"^data: .*BoringModel.*vocab_size"):
        make_trainer().fit(BoringModel(), datamodule=FakeTokens())
    module = LanguageModel(**tiny)
    with pytest.raises(ValueError, match=r"vocab_size.*50.*51"):
        make_trainer().fit(module, datamodule=FakeTokens(vocab_size=51))
    assert not hasattr(module, "model")


def test_ranks_share_the_sequences_out_without_listing_them() -> None:
    data = TokenSequences(10, 8, "uniform", seed=0)
    firsts = [list(islice(RankSampler(data, 3, rank, shuffle=False, drop_last=True), 5)) for rank in range(3)]
    assert sorted(index for first in firsts for index in first) == list(range(15))
    # The sampler that Lightning would use deals them out likewise, once it has listed them all.
    small = range(15)
    theirs = [list(DistributedSampler(small, 3, rank, shuffle=False)) for rank in range(3)]
    assert firsts == theirs


@pytest.mark.parametrize("ranks", [1, 2])  # DDP and FSDP of one process are distributed too
def test_the_loader_of_a_rank_deals_out_that_ranks_sequences(ranks: int) -> None:
    alone = torch.cat([inputs for inputs, _ in batches(2, batch_size=2)])
    for rank in range(ranks):
        data = FakeTokens(batch_size=2, vocab_size=1000, context_length=32)
        data.trainer = SimpleNamespace(
            world_size=ranks,
            global_rank=rank,
            lightning_module=None,
            strategy=SimpleNamespace(root_device=torch.device("cpu")),
        )
        loader = data.train_dataloader()
        # By this class Lightning knows that it need not put a sampler of its own in place.
        assert isinstance(loader.sampler, DistributedSampler)
        inputs, _ = next(iter(loader))
        torch.testing.assert_close(inputs, alone[rank : 2 * ranks : ranks])


@pytest.mark.parametrize(
    "option, value, expected",
    [
        ("batch_size", 0, "1 or more"),
        ("context_length", -3, "1 or more"),
        ("seed", -1, "0 or more"),
        ("num_workers", -1, "0 or more"),
        ("vocab_size", 0, "1 or more"),
        ("distribution", "normal", "one of uniform, zipf"),
    ],
)
def test_wrong_options_are_refused(option: str, value: Any, expected: str) -> None:
    with pytest.raises(UsageError, match=f"^{option}: expected {expected}, given '?{value}'?"):
        FakeTokens(**{option: value})
