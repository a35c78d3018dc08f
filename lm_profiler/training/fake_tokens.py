"""Generates endless random token ids at almost no cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, get_args

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lm_profiler.usage_error import UsageError, expect, expect_one_of

Batch = tuple[Tensor, Tensor]
Distribution = Literal["uniform", "zipf"]

# The number of sequences in the data. It has a length, because Lightning prefetches a batch from a loader without one.
ENDLESS = 2**40

# the constants of SplitMix64 (Steele, Lea, Flood 2014): 2^64 divided by the golden ratio, and two multipliers
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


class TokenSequences(Dataset[Batch]):
    """Sequences of token ids. Each is a function of the seed and its index only, so all workers and ranks agree.

    Ids run from 0 to ``vocab_size`` - 1; with `zipf` the probability of id r is proportional to 1 / (r + 1).
    """

    def __init__(
        self,
        vocab_size: int,
        context_length: int,
        distribution: Distribution,
        seed: int,
    ) -> None:
        self.vocab_size = vocab_size
        self.context_length = context_length
        self.seed = seed
        # the cumulative probabilities of the ids; None if they are uniform
        self._cumulative: NDArray[np.float64] | None = None
        if distribution == "zipf":
            cumulative = np.cumsum(1.0 / np.arange(1, vocab_size + 1))
            self._cumulative = cumulative / cumulative[-1]

    def __len__(self) -> int:
        return ENDLESS

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """Return inputs and targets [B, T] of a whole batch, so that nothing has to be collated."""
        ids = self._token_ids(indices)
        # Two contiguous arrays, because the copy of views to the device would be strided, and slow.
        inputs = ids[:, :-1].copy()
        targets = ids[:, 1:].copy()
        return torch.from_numpy(inputs), torch.from_numpy(targets)

    def _token_ids(self, indices: Sequence[int]) -> NDArray[np.int64]:
        """Return token ids [B, T + 1] for the sequences ``indices``.

        They are hashes of counters, because seeding a generator for each sequence would cost more.
        """
        seed_key = _splitmix64(np.array([self.seed], dtype=np.uint64))
        sequence_keys = _splitmix64(np.asarray(indices, dtype=np.uint64) + seed_key)
        counters = np.arange(self.context_length + 1, dtype=np.uint64) * _GOLDEN
        random_bits = _splitmix64(sequence_keys[:, None] + counters[None, :])
        if self._cumulative is None:
            return self._uniform_ids(random_bits)
        # The 53 highest bits, as many as a double has between 0 and 1.
        uniform_numbers = (random_bits >> np.uint64(11)) * 2.0**-53
        ids = np.searchsorted(self._cumulative, uniform_numbers, side="right")
        return ids.astype(np.int64)

    def _uniform_ids(self, random_bits: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return ids of equal probability, to within 2^-32, from the 32 highest bits of each number."""
        half = np.uint64(32)
        scaled = (random_bits >> half) * np.uint64(self.vocab_size)
        ids = scaled >> half
        return ids.astype(np.int64)


class RankSampler(DistributedSampler[int]):
    """Yields every world-size-th index for a rank, without making a list: Lightning's own sampler lists all 2^40."""

    def __iter__(self) -> Iterator[int]:
        end = self.num_samples * self.num_replicas
        return iter(range(self.rank, end, self.num_replicas))


class FakeTokens(LightningDataModule):
    """Endless batches of random token ids, with the same tokens for the same seed.

    A batch is (inputs, targets), both [B, T] (int64); the target at a position is the input at the next.

    Args:
        batch_size: Sequences in a batch, per device.
        context_length: Tokens in a sequence.
        distribution: `uniform` over the vocabulary, or `zipf`: as in text, few ids make up most tokens.
        seed: Seed of the tokens.
        num_workers: Processes that make batches; 0 makes them in the training process.
        pin_memory: Put batches in page-locked memory; if not given, on CUDA only.
        vocab_size: Number of token ids; if not given, that of the trained module.
    """

    def __init__(
        self,
        batch_size: int = 4,
        context_length: int = 512,
        distribution: Distribution = "uniform",
        seed: int = 0,
        num_workers: int = 0,
        pin_memory: bool | None = None,
        vocab_size: int | None = None,
    ) -> None:
        super().__init__()
        minima = {
            "batch_size": 1,
            "context_length": 1,
            "seed": 0,
            "num_workers": 0,
            "vocab_size": 1,
        }
        for name, minimum in minima.items():
            value = locals()[name]
            is_valid = value is None or value >= minimum
            expect(is_valid, name, f"{minimum} or more", value)
        expect_one_of(get_args(Distribution), "distribution", distribution)
        self.batch_size = batch_size
        self.context_length = context_length
        self.distribution: Distribution = distribution
        self.seed = seed
        self.num_workers = num_workers
        self.pin_memory = pin_memory
        self.vocab_size = vocab_size

    def setup(self, stage: str) -> None:
        self._vocabulary()  # raises before the model is built if the vocabulary is unknown

    def train_dataloader(self) -> DataLoader[Batch]:
        """Return a loader of this rank's sequences; on CUDA its memory is pinned unless ``pin_memory`` is False."""
        data = TokenSequences(
            self._vocabulary(), self.context_length, self.distribution, self.seed
        )
        trainer = self.trainer
        sampler = None
        if trainer is not None:
            # also for a single rank, because under DDP and FSDP Lightning would add its own sampler
            sampler = RankSampler(
                data,
                trainer.world_size,
                trainer.global_rank,
                shuffle=False,
                drop_last=True,
            )
        pin_memory = self.pin_memory
        if pin_memory is None:
            pin_memory = (
                trainer is not None and trainer.strategy.root_device.type == "cuda"
            )
        return DataLoader(
            data,
            batch_size=self.batch_size,
            sampler=sampler,
            collate_fn=_return_batch,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            pin_memory=pin_memory,
        )

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader

    def _vocabulary(self) -> int:
        """Return the number of token ids: ``vocab_size``, or else that of the module.

        Raises:
            UsageError: both are unknown, or the module's is smaller.
        """
        module = self.trainer.lightning_module if self.trainer is not None else None
        module_size = getattr(module, "vocab_size", None)
        if self.vocab_size is None:
            if isinstance(module_size, int):
                return module_size
            raise UsageError(
                f"data: {type(module).__name__} has no dataloader of its own, and no vocab_size for random tokens; "
                "name a LightningDataModule with --data, or set data.vocab_size"
            )
        if isinstance(module_size, int) and self.vocab_size > module_size:
            raise UsageError(
                f"data.vocab_size: expected at most the model's {module_size}, given {self.vocab_size}; "
                "leave data.vocab_size out to use the number of the model"
            )
        return self.vocab_size


def _return_batch(batch: Any) -> Any:
    return batch  # already collated


def _splitmix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return 64 random bits for each counter in ``x``."""
    x = x + _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))
