"""Marks on a clock that the test sets, and on a device that it simulates."""

import random
import sys

import pytest
from fake_device import Clock, FakeStream

from lm_profiler.measure.clocks import tape as at
from lm_profiler.measure.clocks.tape import OUTSIDE, StepMarks
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


def known_step(timeline: Timeline, clock: Clock) -> StepMarks:
    """data 1, forward 2 with a backward of 4 in it and then 8 more, and 16 of nothing in particular."""
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
    marks = known_step(Timeline(clock), clock)
    assert in_ms(marks.host_seconds()) == {"data": 1, "forward": 10, "backward": 4, "other": 16, "step": 31}
    stream = FakeStream(clock, slowness=3)
    marks = known_step(Timeline(clock, stream), clock)
    assert in_ms(marks.host_seconds())["step"] == 31
    assert in_ms(marks.stream_seconds(stream)) == {"data": 3, "forward": 30, "backward": 12, "other": 48, "step": 93}
    for seconds in (marks.host_seconds(), marks.stream_seconds(stream)):
        assert sum(seconds[: len(PARTS)]) == pytest.approx(seconds[-1], abs=1e-15)


def test_two_marks_are_a_span(clock: Clock) -> None:
    timeline = Timeline(clock)
    timeline.mark(at.DATA)
    clock.pass_ms(5)
    timeline.mark(at.LEAVE)
    clock.pass_ms(1)
    assert in_ms(end_step(timeline).host_seconds()) == {"data": 5, "other": 1, "step": 6}
    timeline = Timeline(clock)
    span = Span(timeline, at.FORWARD)
    for ms in (1, 2):
        with span:
            clock.pass_ms(ms)
    assert in_ms(end_step(timeline).host_seconds()) == {"forward": 3, "step": 3}


def test_marks_outside_of_steps_count_for_nothing(clock: Clock) -> None:
    timeline = Timeline(clock)
    with Span(timeline, at.TRANSFER):
        clock.pass_ms(1)
    assert not timeline.reading().is_step_running
    first = known_step(timeline, clock)
    clock.pass_ms(100)
    second = known_step(timeline, clock)
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
    assert in_ms(end_step(timeline).host_seconds()) == {"clip": 1, "optimizer": 6, "other": 24, "step": 31}


def test_the_innermost_part_that_raises_is_the_one_that_failed(clock: Clock) -> None:
    timeline = Timeline(clock)
    with pytest.raises(ValueError, match="wrong"), Span(timeline, at.FORWARD):  # noqa: SIM117
        with Span(timeline, at.BACKWARD):
            raise ValueError("wrong")
    assert timeline.reading().failed_in == at.BACKWARD
    assert timeline.stack == [at.OTHER]
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
    marks: list[tuple[int, list[int]]] = []
    timeline.observers += (lambda code: marks.append((code, timeline.stack.copy())),)
    observed = known_step(timeline, clock)
    codes = [at.DATA, at.OTHER, at.FORWARD, at.BACKWARD, at.FORWARD, at.OTHER, at.OTHER]
    assert [code for code, _ in marks] == codes == observed.codes
    assert [stack[-1] for _, stack in marks] == codes
    timeline.observers = ()
    assert known_step(timeline, clock).host_seconds() == pytest.approx(observed.host_seconds())
    assert len(marks) == len(codes)


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
    drawn = random.Random(seed)
    events = [drawn.choice((*range(OUTSIDE + 1), *[at.LEAVE] * 5, at.OPTIMIZED, at.END)) for _ in range(60)]
    seen = []
    for reads in (0.0, 0.3):
        clock = Clock()
        timeline, steps = Timeline(clock, FakeStream(clock)), []
        for event in events:
            clock.pass_ms(1 + event)
            timeline.mark(event)
            if drawn.random() < reads:
                steps += interrupted(timeline, drawn.randint(1, 60))
        steps += [*timeline.reading().finished]
        seen.append([(marks.codes, marks.host_ns) for marks in steps])
    assert seen[0] == seen[1]


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
