"""Tokens and samples of a batch: right, or unknown."""

from collections import UserDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from known_loop import make_profiler, trainer_with
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import BatchEncoding
from zoo import Masked, batches

from lm_profiler.callbacks.marks.batches import Samples, Tokens
from lm_profiler.record.run_record import RunRecord, read_run

IDS = {"input_ids": torch.zeros(2, 5, dtype=torch.long), "labels": torch.zeros(2)}


@pytest.mark.parametrize(
    "batch, tokens",
    [
        (IDS, 10),
        (UserDict(IDS), 10),
        (BatchEncoding(IDS), 10),
        ([IDS, torch.ones(3)], 10),
        ({"a": IDS, "b": IDS}, 20),
        (torch.ones(3), None),
    ],
)
def test_tokens_are_counted_in_input_ids(batch: Any, tokens: int | None) -> None:
    count = Tokens(torch.nn.Linear(1, 1))
    assert [count(batch), count(batch)] == [tokens, tokens]


@pytest.mark.parametrize(
    "batch, combined, samples",
    [
        ({"a": torch.ones(3, 2), "b": torch.ones(3)}, False, 3),
        ([torch.ones(3), torch.ones(5)], False, None),
        ("words", False, None),
        (SimpleNamespace(num_graphs=4, x=torch.ones(9, 2)), False, 4),
        (SimpleNamespace(batch_size=torch.Size([4, 2])), False, 8),
        (SimpleNamespace(batch_size=6), False, 6),
        (SimpleNamespace(batch_size=None), False, None),
        (BatchEncoding(IDS), False, 2),  # a tokenizer's
        # those of several loaders add up
        ({"labelled": [torch.ones(4, 2), torch.ones(4)], "bare": torch.ones(16, 2)}, True, 20),
        ([torch.ones(4), torch.ones(4)], True, 8),
        ([torch.ones(4), None], True, 4),
        ([torch.ones(4), "words"], True, None),
    ],
)
def test_samples_are_known_only_from_the_batch(batch: Any, combined: bool, samples: int | None) -> None:
    assert Samples(combined)(batch) == samples


def test_a_kind_of_batch_that_first_appears_later_counts() -> None:
    """Text alone, then text and code: 40 tokens and then 40 + 173 - 40."""
    text, code = ({"input_ids": torch.zeros(rows, columns)} for rows, columns in ((4, 10), (7, 19)))
    count = Tokens(torch.nn.Linear(1, 1))
    assert [count({"text": text}), count({"text": text, "code": code}), count({"text": text})] == [40, 173, 40]
    rows = Samples(combined=True)
    assert [rows({"text": text}), rows({"text": text, "code": code}), rows({"text": text})] == [4, 11, 4]


def test_time_first_batches_count_their_samples() -> None:
    """``pad_sequence`` puts time first by default; the loader's batch size shows which dimension is which."""
    padded = pad_sequence([torch.ones(length, 3) for length in (5, 9, 7)])
    count = Samples(combined=False, batch_size=3)
    assert [count([padded, padded[..., 0]]), count([padded[:6], padded[:6, :, 0]])] == [3, 3]
    assert count([padded[:, :2], padded[:, :2, 0]]) == 2  # the last batch of an epoch
    assert Samples(combined=False, batch_size=9)(padded) == 9


def run(module: Any, folder: Path, **options: Any) -> RunRecord:
    profiler = make_profiler(warmup=1, measure=3)
    trainer_with([profiler], folder).fit(module, **options)
    return read_run(profiler.folder)


def test_a_run_counts_samples_of_several_loaders(tmp_path: Path) -> None:
    class Both(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(torch.cat([batch["a"], batch["b"]]), batch_idx)

        def train_dataloader(self) -> Any:
            def loader(rows: int) -> DataLoader[Tensor]:
                return batches(lambda g, i: torch.randn(rows, 32, generator=g))

            return {"a": loader(4), "b": loader(3)}

    rate = run(Both(), tmp_path).throughput
    assert rate.samples_per_step == 7
    rate = run(Masked(), tmp_path).throughput  # of tokens, which the batch itself shows
    assert rate.tokens_per_step == 2 * Masked.tokens


@pytest.mark.parametrize("given", [None, -1])
def test_tokens_that_become_unknown_are_unknown(given: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Unsure(BoringModel):
        batches = 0

        def tokens_in(self, batch: Any) -> Any:
            self.batches += 1
            return given if self.batches == 3 else 5

    record = run(Unsure(), tmp_path)
    assert record.status == "ok"
    assert record.throughput.tokens_per_s is None
    assert sum(note.startswith("tokens_in failed") for note in record.notes) == 1
    assert capsys.readouterr().err.count("tokens_in failed") == 1
