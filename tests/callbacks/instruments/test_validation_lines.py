"""The line in which validations spend most of their time is found by samples of the stack."""

import time

from torch import nn

from lm_profiler.callbacks.instruments.validation_lines import ValidationLines, costliest_line
from lm_profiler.measure.clocks.timeline import Timeline
from lm_profiler.record.operator_calls import CodeLine
from lm_profiler.record.run_record import EPOCH, VALIDATION

MAIN = CodeLine("train.py", 90, "main")
VALIDATE, VALIDATE_LATER = CodeLine("train.py", 20, "validate"), CodeLine("train.py", 21, "validate")
SORT, SORT_LATER = CodeLine("ranks.py", 7, "ranks"), CodeLine("ranks.py", 8, "ranks")


def test_the_innermost_function_with_half_of_the_samples_is_named_with_its_main_line() -> None:
    stacks = {(MAIN, VALIDATE, SORT): 4, (MAIN, VALIDATE, SORT_LATER): 5, (MAIN, VALIDATE_LATER): 3}
    assert costliest_line(stacks) == SORT_LATER


def test_without_a_costly_function_its_caller_is_named() -> None:
    others = [CodeLine("net.py", number, f"part_{number}") for number in range(4)]
    stacks = {(MAIN, VALIDATE, other): 3 for other in others}
    assert costliest_line(stacks) == VALIDATE


def test_few_samples_show_nothing() -> None:
    assert costliest_line({}) is None
    assert costliest_line({(MAIN, VALIDATE): 3}) is None


def run_until(instrument: ValidationLines, samples: int, deadline_s: float) -> None:
    """Run until the instrument has taken so many samples."""
    end = time.monotonic() + deadline_s
    while sum(instrument._stacks.values()) < samples and time.monotonic() < end:
        sum(range(1000))


class Slow(nn.Module):
    """A model whose forward pass goes on until the instrument has taken enough samples."""

    def __init__(self, instrument: ValidationLines) -> None:
        super().__init__()
        self.instrument = instrument

    def forward(self) -> None:
        run_until(self.instrument, samples=10, deadline_s=60.0)


def evaluate(model: nn.Module) -> None:
    model()


def test_the_line_is_the_call_of_the_model_and_not_within_it() -> None:
    timeline = Timeline()
    instrument = ValidationLines(timeline)
    instrument.begin("measure")
    timeline.go_outside(VALIDATION)
    evaluate(Slow(instrument))
    instrument.end("measure")
    line = instrument.facts["validation_line"]
    assert (line.file, line.function) == (__file__, "evaluate")


def test_only_validations_are_sampled() -> None:
    timeline = Timeline()
    instrument = ValidationLines(timeline)
    instrument.begin("measure")
    timeline.go_outside(EPOCH)
    run_until(instrument, samples=1, deadline_s=0.2)
    assert not instrument._stacks
    timeline.go_outside(VALIDATION)
    run_until(instrument, samples=10, deadline_s=60.0)
    instrument.end("measure")
    line = instrument.facts["validation_line"]
    assert (line.file, line.function) == (__file__, "run_until")
    assert instrument._sampler is None
