"""The waterfall of real runs on the CPU: there, adding up, and never in the way of the record."""

import gc
import time
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import warm
from faults import fault_in
from known_loop import make_profiler, trainer_with
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lm_profiler.analysis.why.traced import broken_down
from lm_profiler.callbacks.collect import lists_of
from lm_profiler.record.run_record import RunRecord, TermName, read_run
from lm_profiler.training import FakeTokens, LanguageModel

SLEPT_S = 0.08


class Sleeper(LightningModule):
    """One product, one addition, and much sleep."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 64)

    def training_step(self, batch: Tensor) -> Tensor:
        time.sleep(SLEPT_S)
        return self.head(batch).add(1.0).sum()

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(torch.ones(800, 64), batch_size=8)  # a tensor is a dataset of its rows

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def run(module: LightningModule, folder: Path, data: Any = None) -> RunRecord:
    """Rates are given: a busy machine's own would be unknown."""
    profiler = make_profiler(warmup=1, measure=5, memory=1, trace=2)
    with warm.with_rates(flops_per_s=1e11, bytes_per_s=1e10):
        trainer_with([profiler], folder).fit(module, data)
    return read_run(profiler.folder)


def test_the_terms_of_a_run_add_up_to_its_step(tmp_path: Path) -> None:
    model = LanguageModel(d_model=64, d_ff=128, num_layers=2, num_heads=2, vocab_size=500)
    record = run(model, tmp_path, FakeTokens(context_length=64, batch_size=2, vocab_size=500))
    fall = record.waterfall
    assert fall is not None, record.notes
    assert (fall.source, fall.step_s) == ("operators", record.time["step"].mean)
    terms = {term.name: term for term in fall.terms}
    # AdamW multiplies no matrices.
    assert [*terms] == [name for name in get_args(TermName) if name != "optimizer_products"]
    assert sum(term.seconds for term in fall.terms) == pytest.approx(fall.step_s)
    assert all(term.seconds >= 0 for term in fall.terms[:-1])
    # Products are listed by module, with their shapes.
    assert "model.blocks.*.feed_forward.gate" in {part.module for part in terms["ideal"].contributors}
    details = [part.detail or "" for part in terms["slow_products"].contributors if part.what == "aten::mm"]
    assert all("; m " in detail and ", k " in detail for detail in details)
    # The optimizer moves the bytes of all parameters, though a trace has no types of tensors in lists.
    assert terms["bandwidth"].phases["optimizer"] > 0
    parameters = [torch.zeros(3, 4), torch.zeros(5)]
    assert lists_of(parameters) == (17, 4)
    assert lists_of([*parameters, torch.zeros(2, dtype=torch.bfloat16)]) == (19, None)


class Validates(Sleeper):
    """After each step it validates, with products that take far longer than the step."""

    def training_step(self, batch: Tensor) -> Tensor:
        return self.head(batch).add(1.0).sum()

    def validation_step(self, batch: Tensor) -> None:
        for _ in range(20):
            torch.ones(256, 256) @ torch.ones(256, 256)

    def val_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(torch.ones(16, 64), batch_size=4)


def test_work_of_a_validation_between_traced_steps_is_left_out(tmp_path: Path) -> None:
    profiler = make_profiler(warmup=1, measure=5, memory=1, trace=2)
    with warm.with_rates(flops_per_s=1e11, bytes_per_s=1e10):
        trainer_with([profiler], tmp_path, val_check_interval=1, limit_val_batches=4).fit(Validates())
    record = read_run(profiler.folder)
    fall = record.waterfall
    assert fall is not None, record.notes
    assert record.between[0].what == "validation"
    assert fall.step_s == record.time["step"].mean
    assert all(0.0 <= term.seconds <= fall.step_s for term in fall.terms)
    assert sum(term.seconds for term in fall.terms) == pytest.approx(fall.step_s)
    contributors = [part.what for term in fall.terms for part in term.contributors if part.what.endswith("aten::mm")]
    assert "other: aten::mm" not in contributors


def test_a_waterfall_that_fails_is_a_note(tmp_path: Path) -> None:
    """While the trace is read Python does not look for reference cycles: each search would take 0.3 s beside torch."""
    looks_for_cycles = []

    class Broken(KeyError):
        """Made where it is raised."""

        def __init__(self) -> None:
            super().__init__("ts")
            looks_for_cycles.append(gc.isenabled())

    with fault_in(broken_down, Broken):
        record = run(Sleeper(), tmp_path)
    assert (record.status, record.waterfall) == ("ok", None)
    assert record.verdict is not None
    assert any(note.startswith("waterfall unknown") and "Broken" in note for note in record.notes)
    assert looks_for_cycles == [False]
    assert gc.isenabled()
