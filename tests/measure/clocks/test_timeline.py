"""Marks on a clock that the test sets, and on a device that it simulates."""

import random
import sys
from collections.abc import Sequence

import pytest
from fake_device import Clock, FakeStream

from lm_profiler.measure.clocks import tape as at
from lm_profiler.measure.clocks.tape import OUTSIDE, ClippedBatches, StepMarks
from lm_profiler.measure.clocks.timeline import Span, Timeline
from lm_profiler.record.quantities import PARTS, TIMED


@pytest.fixture
def clock() -> Clock:
    return Clock()


def in_ms(seconds: tuple[float, ...]) -> dict[str, float]:
    """The parts that took any time, and the step."""
    assert len(seconds) == len(TIMED)
    return {part: pytest.approx(s * 1e3) for part, s in zip(TIMED, seconds, strict=True) if s or part == "step"}


def end_step(timeline: Timeline) -> StepMarks:
    """The step that ends now."""
    timeline.mark(at.END)
    return timeline.reading().finished.popleft()


def data_and_forward_with_backward(timeline: Timeline, clock: Clock) -> StepMarks:
    """A step with data of 1 ms, forward of 2 + 8 with a backward of 4 in its middle, and 16 ms of nothing."""
    with Span(timeline, at.DATA):
        clock.pass_ms(1)
    with Span(timeline, at.FORWARD):
        clock.pass_ms(2)
        with Span(timeline, at.BACKWARD):
            clock.pass_ms(4)
        clock.pass_ms(8)
    clock.pass_ms(16)
    return end_step(timeline)


def test_time_belongs_to_the_innermost_part(clock: Clock) -> None:
    """The step has 1 ms of data, 2 + 8 of forward around 4 of backward, and 16 of nothing."""
    marks = data_and_forward_with_backward(Timeline(clock), clock)
    assert in_ms(marks.host_seconds()) == {"data": 1, "forward": 2 + 8, "backward": 4, "other": 16, "step": 31}
    assert sum(marks.host_seconds()[: len(PARTS)]) == pytest.approx(marks.host_seconds()[-1], abs=1e-15)


def test_a_device_has_times_of_its_own(clock: Clock) -> None:
    """It takes three times as long as the host: see the test above."""
    stream = FakeStream(clock, slowness=3)
    marks = data_and_forward_with_backward(Timeline(clock, stream), clock)
    assert in_ms(marks.host_seconds())["step"] == 31
    on_device = marks.stream_seconds(stream)
    assert in_ms(on_device) == {"data": 3, "forward": 30, "backward": 12, "other": 48, "step": 93}
    assert sum(on_device[: len(PARTS)]) == pytest.approx(on_device[-1], abs=1e-15)


def test_two_marks_are_a_span(clock: Clock) -> None:
    timeline = Timeline(clock)
    timeline.mark(at.DATA)
    clock.pass_ms(5)
    timeline.mark(at.LEAVE)
    clock.pass_ms(1)
    assert in_ms(end_step(timeline).host_seconds()) == {"data": 5, "other": 1, "step": 6}


def test_a_span_may_be_entered_again(clock: Clock) -> None:
    timeline = Timeline(clock)
    span = Span(timeline, at.FORWARD)
    for ms in (1, 2):
        with span:
            clock.pass_ms(ms)
    assert in_ms(end_step(timeline).host_seconds()) == {"forward": 1 + 2, "step": 3}


def test_marks_outside_of_steps_count_for_nothing(clock: Clock) -> None:
    timeline = Timeline(clock)
    with Span(timeline, at.TRANSFER):
        clock.pass_ms(1)
    assert not timeline.reading().is_step_running
    first = data_and_forward_with_backward(timeline, clock)
    clock.pass_ms(100)
    second = data_and_forward_with_backward(timeline, clock)
    assert first.host_seconds() == second.host_seconds()
    assert first.host_ns[-1] + 100_000_000 == second.host_ns[0]


def test_marks_of_a_validation_within_a_step_count_for_nothing(clock: Clock) -> None:
    timeline = Timeline(clock)
    with Span(timeline, at.FORWARD):
        clock.pass_ms(2)
    clock.pass_ms(1)
    timeline.go_outside()
    clock.pass_ms(50)
    with Span(timeline, at.TRANSFER):
        clock.pass_ms(60)
    timeline.go_outside()  # a second hook reports it too
    timeline.mark(at.ZERO_GRAD)  # and is never left
    clock.pass_ms(70)
    timeline.mark(at.DATA)
    clock.pass_ms(4)
    timeline.mark(at.LEAVE)
    clock.pass_ms(8)
    marks = end_step(timeline)
    assert in_ms(marks.host_seconds()) == {"data": 4, "forward": 2, "other": 9, "step": 15}
    assert OUTSIDE in marks.codes
    assert timeline.stack == [at.OTHER]


def test_a_step_may_end_outside(clock: Clock) -> None:
    timeline = Timeline(clock)
    with Span(timeline, at.FORWARD):
        clock.pass_ms(2)
    timeline.go_outside()
    clock.pass_ms(50)
    assert in_ms(end_step(timeline).host_seconds()) == {"forward": 2, "step": 2}


def test_leaving_more_than_was_entered_is_harmless(clock: Clock) -> None:
    timeline = Timeline(clock)
    timeline.mark(at.DATA)
    for _ in range(3):
        timeline.mark(at.LEAVE)
    clock.pass_ms(1)
    assert timeline.stack == [at.OTHER]
    assert in_ms(end_step(timeline).host_seconds()) == {"other": 1, "step": 1}


def test_a_stopped_timeline_has_no_steps(clock: Clock) -> None:
    timeline = Timeline(clock)
    timeline.stop()
    timeline.go_outside()
    with Span(timeline, at.FORWARD):
        timeline.mark(at.END)
    assert not timeline.reading().finished


def test_the_optimizer_ends_however_often_it_began(clock: Clock) -> None:
    timeline = Timeline(clock)
    timeline.mark(at.DATA)
    timeline.mark(at.LEAVE)
    with Span(timeline, at.CLIP):
        clock.pass_ms(1)
    timeline.mark(at.OPTIMIZER)
    clock.pass_ms(2)
    timeline.mark(at.OPTIMIZER)
    clock.pass_ms(4)
    timeline.mark(at.OPTIMIZED)
    clock.pass_ms(8)
    timeline.mark(at.OPTIMIZED)  # marked again by another hook
    clock.pass_ms(16)
    marks = end_step(timeline)
    assert in_ms(marks.host_seconds()) == {"clip": 1, "optimizer": 2 + 4, "other": 8 + 16, "step": 31}


def test_the_innermost_part_that_raises_is_the_one_that_failed(clock: Clock) -> None:
    timeline = Timeline(clock)
    with pytest.raises(ValueError, match="wrong"), Span(timeline, at.FORWARD):  # noqa: SIM117
        with Span(timeline, at.BACKWARD):
            raise ValueError("wrong")
    assert timeline.reading().failed_in == at.BACKWARD
    assert timeline.stack == [at.OTHER]


def test_a_failure_between_parts_is_forgotten_with_the_step(clock: Clock) -> None:
    timeline = Timeline(clock)
    timeline.mark(at.DATA)
    timeline.mark(at.LEAVE)
    timeline.mark(at.FAIL)
    assert timeline.reading().failed_in == at.OTHER
    timeline.mark(at.END)
    timeline.mark(at.DATA)
    assert timeline.reading().failed_in is None


def test_observers_hear_every_mark_after_its_instant(clock: Clock) -> None:
    timeline = Timeline(clock)
    heard_codes: list[int] = []
    innermost_parts: list[int] = []

    def observe(code: int) -> None:
        heard_codes.append(code)
        innermost_parts.append(timeline.stack[-1])

    timeline.observers += (observe,)
    observed = data_and_forward_with_backward(timeline, clock)
    codes = [at.DATA, at.OTHER, at.FORWARD, at.BACKWARD, at.FORWARD, at.OTHER, at.OTHER]
    assert heard_codes == innermost_parts == observed.codes == codes

    timeline.observers = ()
    unobserved = data_and_forward_with_backward(timeline, clock)
    assert unobserved.host_seconds() == pytest.approx(observed.host_seconds())
    assert heard_codes == codes


def test_a_part_that_began_before_the_step_is_in_it_from_its_start(clock: Clock) -> None:
    """training_step(dataloader_iter) asks for its batch itself: there one step ends and the next begins."""
    timeline = Timeline(clock)
    with Span(timeline, at.FORWARD):
        clock.pass_ms(1)
    with Span(timeline, at.FORWARD):
        clock.pass_ms(7)
        first = end_step(timeline)
        with Span(timeline, at.DATA):
            clock.pass_ms(2)
        clock.pass_ms(4)
    assert in_ms(first.host_seconds()) == {"forward": 8, "step": 8}
    assert in_ms(end_step(timeline).host_seconds()) == {"data": 2, "forward": 4, "step": 6}


@pytest.mark.parametrize("seed", range(20))
def test_it_does_not_matter_when_the_tape_is_read(seed: int) -> None:
    """Ctrl-C anywhere in the reading, and reading again, gives what reading once gives."""
    draw = random.Random(seed)
    codes = [draw.choice((*range(OUTSIDE + 1), *[at.LEAVE] * 5, at.OPTIMIZED, at.END)) for _ in range(60)]

    def marks_of_steps(share_of_readings: float) -> list[tuple[list[int], list[int]]]:
        """Mark all codes, and read after this share of them."""
        clock = Clock()
        timeline, steps = Timeline(clock, FakeStream(clock)), []
        for code in codes:
            clock.pass_ms(1 + code)
            timeline.mark(code)
            if draw.random() < share_of_readings:
                steps += interrupted(timeline, draw.randint(1, 60))
        steps += [*timeline.reading().finished]
        return [(marks.codes, marks.host_ns) for marks in steps]

    assert marks_of_steps(share_of_readings=0.0) == marks_of_steps(share_of_readings=0.3)


def interrupted(timeline: Timeline, after: int) -> list[StepMarks]:
    """What is known after a reading in whose ``after``-th line Ctrl-C came."""
    left = after

    def trace(frame: object, event: str, argument: object) -> object:
        nonlocal left
        left -= 1
        if left == 0:
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        timeline.reading()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    finished = timeline.reading().finished
    return [finished.popleft() for _ in range(len(finished))]


BATCH = [at.DATA, at.FORWARD, at.BACKWARD]
UPDATE = [at.OPTIMIZER, at.ZERO_GRAD, at.OTHER]
CLIPPED: dict[str, tuple[list[Sequence[int]], tuple[int, int]]] = {
    "after each of three batches": ([[*BATCH, at.CLIP] * 3 + UPDATE], (3, 2)),
    "after the last of three batches": ([[*BATCH * 3, at.CLIP, *UPDATE]], (1, 0)),
    "in two steps of one batch": ([[*BATCH, at.CLIP, *UPDATE]] * 2, (2, 0)),
    "in steps that only accumulate gradients": (
        [[*BATCH, at.CLIP, at.OTHER], [*BATCH, at.CLIP, *UPDATE], [*BATCH, at.CLIP, at.OTHER]], (3, 1),
    ),
    "group by group": ([[*BATCH, at.CLIP, at.OTHER, at.CLIP, *UPDATE]], (1, 0)),
    "for each of two losses of a batch": (
        [[*BATCH, at.CLIP, at.FORWARD, at.BACKWARD, at.CLIP, *UPDATE]], (1, 0),
    ),
    "of two networks, in a loop without a loader": ([[at.FORWARD, at.BACKWARD, at.CLIP] * 2 + UPDATE], (1, 0)),
    "before gradients are kept elsewhere and cleared": ([[*BATCH, at.CLIP, at.ZERO_GRAD] * 2 + UPDATE], (2, 0)),
    "for each of two optimizers": ([[*BATCH, at.CLIP, at.OPTIMIZER, *BATCH, at.CLIP, *UPDATE]], (2, 0)),
    "never": ([[*BATCH, *UPDATE]], (0, 0)),
}  # fmt: skip


@pytest.mark.parametrize("case", CLIPPED)
def test_clipping_is_early_if_a_later_batch_adds_to_the_gradients(case: str) -> None:
    steps, counts = CLIPPED[case]
    clipped = ClippedBatches()
    for codes in steps:
        clipped.add(codes)
    assert (clipped.count, clipped.early) == counts
