"""How many Python functions of ours a usual step calls: what a step costs, without the noise of a clock."""

import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from known_loop import make_profiler, trainer_with
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lm_profiler
from lm_profiler.callbacks.own_loop import loop_options, profile_with

OURS = str(Path(lm_profiler.__file__).parent)
STEPS = 24


class Calls:
    """Counts calls of our functions in this thread; ``cut`` ends a step."""

    def __init__(self) -> None:
        self.of_steps: list[int] = []
        self._count = 0

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(OURS):
            self._count += 1

    def cut(self) -> None:
        self.of_steps.append(self._count)
        self._count = 0

    @property
    def usual(self) -> int:
        """The fewest of a step: in others a stage began, for example."""
        return min(self.of_steps[8:])


@pytest.fixture
def calls() -> Iterator[Calls]:
    counting = Calls()
    sys.setprofile(counting)
    yield counting
    sys.setprofile(None)


def fast_clock() -> Callable[[], int]:
    """A clock on which all steps together take less than the 5 ms after which counters are read again."""
    return count(step=1_000).__next__


class Module(LightningModule):
    def __init__(self, calls: Calls) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.calls = calls

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.calls.cut()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layer(batch["x"]).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-6)

    def train_dataloader(self) -> Any:
        return DataLoader([{"x": torch.ones(8), "y": torch.ones(1)}] * STEPS)


def test_a_step_under_the_trainer_calls_few_functions(calls: Calls, tmp_path: Path) -> None:
    profiler = make_profiler(warmup=2, measure=1000, clock=fast_clock())
    trainer_with([profiler], tmp_path, max_epochs=1).fit(Module(calls))
    assert 10 < calls.usual <= 22


def test_a_step_of_a_loop_of_ones_own_calls_few_functions(calls: Calls) -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    few = {"memory_steps": 0, "trace_steps": 0, "action_steps": 0}
    options = loop_options(warmup_steps=2, measure_steps=1000, quiet=True, clock=fast_clock(), **few)
    with profile_with(options, [model, optimizer]) as run:
        for batch in run.data(torch.ones(STEPS, 1, 8)):
            calls.cut()
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert 10 < calls.usual <= 40
