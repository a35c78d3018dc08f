"""The lines in which validations and epoch boundaries spend most of their time are found by samples of the stack."""

import linecache
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lm_profiler.callbacks.instruments import outside_lines
from lm_profiler.callbacks.instruments.outside_lines import OutsideLines, calling_line, costliest_line
from lm_profiler.measure.clocks.tape import DATA, END, FORWARD, LEAVE
from lm_profiler.measure.clocks.timeline import Timeline
from lm_profiler.record.operator_calls import CodeLine
from lm_profiler.record.run_record import EPOCH, FIRST_BATCH, VALIDATION

MAIN = CodeLine("train.py", 90, "main")
VALIDATE, VALIDATE_LATER = CodeLine("train.py", 20, "validate"), CodeLine("train.py", 21, "validate")
SORT, SORT_LATER = CodeLine("ranks.py", 7, "ranks"), CodeLine("ranks.py", 8, "ranks")


def test_the_innermost_function_with_half_of_the_samples_is_named() -> None:
    stacks = {(MAIN, VALIDATE, SORT): 4, (MAIN, VALIDATE, SORT_LATER): 5, (MAIN, VALIDATE_LATER): 3}
    assert costliest_line(stacks) == SORT_LATER


def test_without_a_costly_function_its_caller_is_named() -> None:
    others = [CodeLine("net.py", number, f"part_{number}") for number in range(4)]
    stacks = {(MAIN, VALIDATE, other): 3 for other in others}
    assert costliest_line(stacks) == VALIDATE


def test_few_samples_show_nothing() -> None:
    assert costliest_line({}) is None
    assert costliest_line({(MAIN, VALIDATE): 3}) is None


def run_until(stacks: Counter[Any], samples: int, deadline_s: float = 60.0) -> None:
    """Run until the instrument has added so many samples to ``stacks``."""
    end = time.monotonic() + deadline_s
    while sum(stacks.values()) < samples and time.monotonic() < end:
        sum(range(1000))


def outside_for(what: str) -> tuple[Timeline, OutsideLines]:
    """Return a timeline whose loop has left its steps for ``what``, and an instrument that samples since then."""
    timeline = Timeline()
    instrument = OutsideLines(timeline)
    instrument.begin("measure")
    timeline.go_outside(what)
    return timeline, instrument


class Slow(nn.Module):
    """A model whose forward pass goes on until the instrument has taken enough samples."""

    def __init__(self, stacks: Counter[Any]) -> None:
        super().__init__()
        self.stacks = stacks

    def forward(self) -> None:
        run_until(self.stacks, samples=10)


def evaluate(model: nn.Module) -> None:
    model()


def evaluate_without_hooks(model: nn.Module) -> None:
    model.forward()


@pytest.mark.parametrize("evaluation", [evaluate, evaluate_without_hooks])
def test_the_line_is_the_call_of_the_model(evaluation: Callable[[nn.Module], None]) -> None:
    _, instrument = outside_for(VALIDATION)
    evaluation(Slow(instrument._validation_stacks))
    instrument.end("measure")
    line = instrument.facts["lines_outside"][VALIDATION]
    assert (line.file, line.function) == (__file__, evaluation.__name__)


def test_the_caller_is_the_line_of_the_loop() -> None:
    timeline = Timeline()
    instrument = OutsideLines(timeline)
    instrument.begin("measure")  # the loop is this function
    timeline.go_outside(VALIDATION)
    for model in [Slow(instrument._validation_stacks)]:
        evaluate(model)
    instrument.end("measure")
    caller = instrument.facts["callers_outside"][VALIDATION]
    assert caller.function == "test_the_caller_is_the_line_of_the_loop"
    assert linecache.getline(caller.file, caller.line).strip() == "evaluate(model)"


LOOP = {(MAIN.file, MAIN.function)}


def test_a_loop_without_calls_has_no_caller() -> None:
    assert calling_line({(MAIN, VALIDATE): 10}, LOOP) == MAIN
    assert calling_line({(MAIN, VALIDATE): 10}, set()) is None
    assert calling_line({(MAIN,): 10}, LOOP) is None
    assert calling_line({(MAIN, VALIDATE): 3}, LOOP) is None


def test_the_line_of_an_epoch_boundary_runs_until_the_first_batch() -> None:
    timeline, instrument = outside_for(EPOCH)
    stacks = instrument._epoch_stacks
    run_until(stacks, samples=4)
    timeline.mark(DATA)
    run_until(stacks, samples=16)
    timeline.mark(LEAVE)
    timeline.mark(FORWARD)
    time.sleep(0.1)
    samples = sum(stacks.values())
    for _ in range(2):  # later steps and their batches
        run_until(stacks, samples + 3, deadline_s=0.1)
        timeline.mark(END)
        timeline.mark(DATA)
    assert sum(stacks.values()) == samples
    instrument.end("measure")
    lines = instrument.facts["lines_outside"]
    assert lines[EPOCH].function == lines[FIRST_BATCH].function == "run_until"
    assert lines[VALIDATION] is None
    assert instrument._sampler is None


class Rows(Dataset[int]):
    """A dataset of the program, whose first item waits until it was sampled."""

    def __init__(self, stacks: Counter[Any]) -> None:
        self.stacks = stacks

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        run_until(self.stacks, samples=10)
        return index


def test_the_dataset_of_a_loader_is_named_and_not_the_loop_over_it() -> None:
    timeline, instrument = outside_for(EPOCH)
    stacks = instrument._epoch_stacks
    for _ in DataLoader(Rows(stacks)):
        timeline.mark(FORWARD)
    instrument.end("measure")
    line = instrument.facts["lines_outside"][EPOCH]
    assert line.function in ("run_until", "Rows.__getitem__")


def test_a_loader_that_waits_has_no_line() -> None:
    """The stack of the thread that fetches batches for pinned memory, for example, has only code of torch."""
    frames = []

    def collate(rows: list[int]) -> list[int]:
        frames.append(sys._getframe().f_back)
        return rows

    list(DataLoader([1], collate_fn=collate))
    (frame,) = frames
    assert frame is not None
    assert outside_lines._stack_of(frame) == ()
