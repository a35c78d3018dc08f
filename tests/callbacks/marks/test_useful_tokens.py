"""Useful tokens, occupancy and squared lengths: exact on planted masks, unknown where nothing shows them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from known_loop import make_profiler, trainer_with
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.data import DataLoader

from lm_profiler.callbacks.marks.batches import BatchCounts
from lm_profiler.callbacks.marks.optimizers import call_before
from lm_profiler.callbacks.marks.useful_tokens import TokenUse, UsefulTokens, token_use
from lm_profiler.record.run_record import read_run

LENGTHS = [5, 3, 8, 1]
SIZE = 8


def padded(lengths: list[int], size: int = SIZE) -> Tensor:
    return (torch.arange(size) < torch.tensor(lengths)[:, None]).long()


IDS = torch.zeros(4, SIZE, dtype=torch.long)
MASK = padded(LENGTHS)
LABELS = torch.where(MASK.bool(), 7, -100)
SQUARES = sum(length**2 for length in LENGTHS)
WORDS = torch.arange(1, 31).reshape(3, 10)
WIDE = padded([5, 3, 4], size=10)
PACKED = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 0, 0]])  # 3 and 5; 6 and two of padding
NUMBERED = torch.tensor([[1, 1, 1, 2, 2, 2, 2, 2], [1, 1, 1, 1, 1, 1, 0, 0]])


@pytest.mark.parametrize(
    "tensors, own_count, use",
    [
        ({"input_ids": IDS, "attention_mask": MASK}, None, TokenUse(17, 32, SQUARES, 0)),
        ({"input_ids": IDS, "attention_mask": MASK.bool(), "labels": LABELS}, None, TokenUse(17, 32, SQUARES, 0)),
        ({"input_ids": IDS, "labels": LABELS}, None, TokenUse(17, 32, SQUARES, 0)),
        ({"input_ids": IDS, "attention_mask": MASK}, 11, TokenUse(11, 32, SQUARES, 0)),
        ({"input_ids": IDS[:1], "cu_seqlens": torch.tensor([0, 3, 7])}, None, TokenUse(7, 8, 9 + 16)),
        ({"input_ids": IDS[:1], "position_ids": PACKED[:1]}, None, TokenUse(8, 8, 9 + 25)),
        ({"attention_mask": (NUMBERED > 0).long(), "position_ids": PACKED}, None, TokenUse(14, 16, 9 + 25 + 36, 0)),
        ({"attention_mask": NUMBERED}, None, TokenUse(14, 16, 9 + 25 + 36, 0)),
        ({"input_ids": IDS}, None, TokenUse(None, 32, None)),
        ({"labels": torch.tensor([1, -100])}, None, TokenUse()),
        ({"input_ids": IDS, "attention_mask": torch.ones(4, 1, SIZE, SIZE)}, None, TokenUse(None, 32, None)),
        # positions beyond the longest sequence are unused
        ({"attention_mask": WIDE}, None, TokenUse(12, 30, 50, 3 * 5)),
        ({"attention_mask": WIDE.flip(1)}, None, TokenUse(12, 30, 50, 3 * 5)),
        ({"input_ids": WIDE, "labels": torch.where(WIDE.bool(), 7, -100)}, None, TokenUse(12, 30, 50, 3 * 5)),
        ({"labels": torch.where(WIDE.bool(), 7, -100)}, None, TokenUse(12, 30, None, 3 * 5)),
        # a prompt has no labels either
        ({"input_ids": WIDE, "labels": torch.where(WIDE.flip(1).bool(), 7, -100)}, None, TokenUse(30, 30, 300, 0)),
        ({"input_ids": WORDS, "labels": torch.full((3, 10), -100)}, None, TokenUse(30, 30, 300, 0)),
        # the last token may have no label; padding has the same id in all rows
        ({"input_ids": WORDS, "labels": torch.where(WORDS < 10, 7, -100)}, None, TokenUse(30, 30, 300, 3)),
        (
            {"input_ids": torch.tensor([[1, 2, 2], [1, 3, 3]]), "labels": torch.full((2, 3), -100)},
            None,
            TokenUse(0, 6, None, 0),
        ),
        ({"input_ids": IDS[:, :3], "labels": LABELS}, None, TokenUse(17, 12, None, 0)),
        ({"attention_mask": torch.zeros(2, 3, dtype=torch.long)}, None, TokenUse(0, 6, 0, 0)),
        ({}, 9, TokenUse()),
    ],
)
def test_planted_masks_count_exactly(tensors: Any, own_count: int | None, use: TokenUse) -> None:
    assert token_use(tensors, own_count) == use


def test_labels_in_a_tuple_are_known_by_the_label_that_is_ignored() -> None:
    counts = UsefulTokens()
    tokens, labels = torch.randint(9, (3, 10)), torch.where(WIDE.bool(), 7, -100)
    assert not counts.has_token_tensors((tokens, tokens))
    assert counts.has_token_tensors((tokens, labels))
    counts.add((tokens, labels), None)
    assert counts.take() == TokenUse(12, 30, None, 15)


def test_a_mask_is_read_before_its_transfer() -> None:
    counts = UsefulTokens()
    moved = {"input_ids": IDS.to("meta"), "attention_mask": MASK.to("meta")}
    counts.add(moved, None)
    assert counts.take() == TokenUse(None, 32, None)

    strategy = SimpleNamespace(batch_to_device=lambda batch, device=None: moved)
    from contextlib import ExitStack

    with ExitStack() as undo:
        call_before(strategy, "batch_to_device", counts.note_host_batch, undo)
        for _ in range(2):  # two batches of an accumulated step
            counts.add(strategy.batch_to_device({"input_ids": IDS, "attention_mask": MASK}), None)
    assert counts.take() == TokenUse(34, 64, 2 * SQUARES, 0)
    assert counts.take() == TokenUse()


def test_an_odd_batch_makes_useful_tokens_unknown() -> None:
    reports: list[str] = []
    counts = BatchCounts(report=reports.append)
    hostile = {"input_ids": IDS, "attention_mask": MASK, "position_ids": torch.zeros(0, 0, dtype=torch.long)}
    counts.add(hostile)
    count = counts.take()
    assert (count.batches, count.tokens) == (1, 32)


class Padded(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(8, 4)

    def training_step(self, batch: Any, _: int) -> Tensor:
        return self.embedding(batch["input_ids"]).square().sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 1e-3)


def test_a_run_has_tokens_and_useful_tokens(tmp_path: Path) -> None:
    lengths = [[5, 3], [8, 8], [2, 1], [7, 2], [4, 4], [6, 3]]
    batches = [{"input_ids": IDS[:2], "attention_mask": padded(pair)} for pair in lengths]
    profiler = make_profiler(warmup=1, measure=4)
    trainer_with([profiler], tmp_path, max_steps=6).fit(Padded(), DataLoader(batches, batch_size=None))
    record = read_run(profiler.folder)
    used = lengths[1 + record.stretch.start : 1 + (record.stretch.stop or 4)]
    useful = sum(map(sum, used)) / len(used)
    assert record.throughput.useful_tokens_per_step == round(useful)
    assert record.throughput.occupancy == pytest.approx(useful / 16)
    step_s = record.time["step"].mean
    assert record.throughput.useful_tokens_per_s == pytest.approx(useful / step_s)
    squares = sum(length**2 for pair in used for length in pair) / len(used)
    assert record.throughput.squared_lengths_per_step == round(squares)
    assert record.throughput.tokens_per_step == 16
