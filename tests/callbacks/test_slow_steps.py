"""One step of each kind of slowness, in loops that a Trainer runs: its cause is named, or none is."""

import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from known_loop import make_profiler, trainer_with
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from wall_clock import WallClockCheck

from lm_profiler.record.run_record import OddStep, RunRecord

pytestmark = pytest.mark.skipif(not Path("/proc/thread-self/schedstat").exists(), reason="Linux counts")

AT = 14
"""The batch whose step is slow; steps count from 1."""
WARMUP, MEASURED = 4, 14
SLOW_S = 0.5
"""Far more than what a busy machine does to a step of 10 ms, and than half of it."""


class Rows(Dataset[Tensor]):
    """Batches of a row; ``late`` takes long to be made."""

    def __init__(self, late: int | None = None) -> None:
        self.late = late

    def __len__(self) -> int:
        return 40

    def __getitem__(self, at: int) -> Tensor:
        time.sleep(SLOW_S if at == self.late else 0.0)
        return torch.ones(4)


class Slow(LightningModule):
    """Steps of 10 ms; in one of them ``happens`` does."""

    def __init__(self, happens: Callable[[], object] = int) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.happens = happens

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        time.sleep(0.01)
        if batch_idx == AT:
            self.happens()
        return self.layer(batch).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def fitted(folder: Path, module: LightningModule, data: Dataset[Tensor] | None = None, workers: int = 0) -> RunRecord:
    profiler = make_profiler(WARMUP, MEASURED)
    trainer_with([profiler], folder).fit(module, DataLoader(data or Rows(), num_workers=workers))
    return profiler.record


def slow_step(record: RunRecord) -> OddStep:
    """On a busy machine others may be odd too."""
    (odd,) = (odd for odd in record.odd_steps if odd.step == AT + 1)
    return odd


class Cycle:
    """Garbage whose finalizer takes long."""

    def __init__(self) -> None:
        self.me = self

    def __del__(self) -> None:
        time.sleep(SLOW_S)


def collect() -> None:
    Cycle()
    gc.collect()


def test_a_step_in_which_garbage_is_collected(tmp_path: Path) -> None:
    record = fitted(tmp_path, Slow(collect))
    odd = slow_step(record)
    assert (odd.part, odd.beside) == ("forward", None)
    assert "garbage collection" in odd.cause
    assert 0.9 * SLOW_S <= odd.cause_s <= odd.step_s  # less what garbage usually takes in a step


@pytest.mark.parametrize("workers, cause", [(1, "queue"), (0, "num_workers=0")])
def test_a_step_whose_batch_comes_late(workers: int, cause: str, tmp_path: Path) -> None:
    odd = slow_step(fitted(tmp_path, Slow(), Rows(AT), workers))
    assert odd.part == "data"
    assert cause in odd.cause
    if workers:
        assert SLOW_S / 2 < odd.cause_s <= odd.step_s  # as the worker is some batches ahead


def test_a_step_that_compiles(tmp_path: Path) -> None:
    torch._dynamo.reset()

    def backend(graph: torch.fx.GraphModule, examples: Any) -> Any:
        time.sleep(SLOW_S)
        return graph.forward

    @torch.compile(backend=backend, dynamic=False)
    def doubled(x: Tensor) -> Tensor:
        return x * 2

    doubled(torch.ones(2))
    wall_clock = WallClockCheck()  # torch notes compilations by it
    record = fitted(tmp_path, Slow(lambda: doubled(torch.ones(3))))
    odd = slow_step(record)
    if odd.cause is None:
        assert wall_clock.was_set()
        return
    assert odd.cause.startswith("recompilation")
    assert "(test_slow_steps.py:" in odd.cause
    assert odd.cause.endswith("expected 2, actual 3")
    assert odd.cause_s >= SLOW_S
    assert record.steadiness.recompilations == 1
    assert sum(note.startswith(f"recompiled while measuring (step {AT + 1}): ") for note in record.notes) == 1


def test_a_step_that_sleeps_has_no_cause(tmp_path: Path) -> None:
    odd = slow_step(fitted(tmp_path, Slow(lambda: time.sleep(SLOW_S))))
    assert (odd.part, odd.cause) == ("forward", None)
    assert " more asleep" in odd.beside
