"""Marks on a clock that the test sets, and on a device that it simulates."""

from __future__ import annotations

import pytest
from fake_device import Clock, FakeStream

from lm_profiler.measure.clocks import timeline as at
from lm_profiler.measure.clocks.timeline import OUTSIDE, Span, StepMarks, Timeline
from lm_profiler.record.quantities import PARTS, TIMED


@pytest.fixture
def clock() -> Clock:
    return Clock()


def in_ms(seconds: tuple[float, ...]) -> dict[str, float]:
    """The parts that took any time, and the step."""
    assert len(seconds) == len(TIMED)
    return {part: pytest.approx(s * 1e3) for part, s in zip(TIMED, seconds, strict=True) if s or part == "step"}


def step(timeline: Timeline, clock: Clock) -> StepMarks:
    """data 1, forward 2 with a backward of 4 in it and then 8 more, and 16 of nothing in particular."""
    timeline.begin_step()
    with Span(timeline, at.DATA):
        clock.pass_ms(1)
    with Span(timeline, at.FORWARD):
        clock.pass_ms(2)
        with Span(timeline, at.BACKWARD):
            clock.pass_ms(4)
        clock.pass_ms(8)
    clock.pass_ms(16)
    return timeline.end_step()


def test_time_belongs_to_the_innermost_part(clock: Clock) -> None:
    marks = step(Timeline(clock), clock)
    assert in_ms(marks.host_seconds()) == {"data": 1, "forward": 10, "backward": 4, "other": 16, "step": 31}


def test_each_clock_adds_up_by_itself(clock: Clock) -> None:
    stream = FakeStream(clock, slowness=3)
    marks = step(Timeline(clock, stream), clock)
    assert in_ms(marks.host_seconds())["step"] == 31
    assert in_ms(marks.stream_seconds(stream)) == {"data": 3, "forward": 30, "backward": 12, "other": 48, "step": 93}
    for seconds in (marks.host_seconds(), marks.stream_seconds(stream)):
        assert sum(seconds[: len(PARTS)]) == pytest.approx(seconds[-1], abs=1e-15)


def test_enter_and_leave_do_what_a_span_does(clock: Clock) -> None:
    timeline = Timeline(clock)
    timeline.begin_step()
    timeline.enter(at.CLIP)
    clock.pass_ms(5)
    timeline.leave()
    clock.pass_ms(1)
    assert in_ms(timeline.end_step().host_seconds()) == {"clip": 5, "other": 1, "step": 6}


def test_the_same_part_twice_adds_up(clock: Clock) -> None:
    timeline, span = Timeline(clock), None
    timeline.begin_step()
    span = Span(timeline, at.FORWARD)
    for ms in (1, 2):
        with span:
            clock.pass_ms(ms)
    assert in_ms(timeline.end_step().host_seconds()) == {"forward": 3, "step": 3}


def test_outside_of_a_step_nothing_is_marked(clock: Clock) -> None:
    timeline = Timeline(clock)
    with Span(timeline, at.TRANSFER):
        clock.pass_ms(1)
    assert timeline.host_ns == []
    first = step(timeline, clock)
    clock.pass_ms(100)
    second = step(timeline, clock)
    assert first.host_seconds() == second.host_seconds()
    assert first.host_ns[-1] + 100_000_000 == second.host_ns[0]


def test_a_gap_amid_a_step_is_no_part_of_it(clock: Clock) -> None:
    """Validation between two batches of one step: whatever is opened in it, and left open, counts for nothing."""
    timeline = Timeline(clock)
    timeline.begin_step()
    with Span(timeline, at.FORWARD):
        clock.pass_ms(2)
    clock.pass_ms(1)
    timeline.go_outside()
    clock.pass_ms(50)
    with Span(timeline, at.TRANSFER):
        clock.pass_ms(60)
    timeline.go_outside()  # a second hook says so too
    timeline.enter(at.FORWARD)  # and is never left
    clock.pass_ms(70)
    timeline.come_inside()
    timeline.enter(at.DATA)
    clock.pass_ms(4)
    timeline.leave()
    clock.pass_ms(8)
    marks = timeline.end_step()
    assert in_ms(marks.host_seconds()) == {"data": 4, "forward": 2, "other": 9, "step": 15}
    assert OUTSIDE in marks.codes
    assert timeline.current == at.OTHER


def test_coming_inside_without_having_left_changes_nothing(clock: Clock) -> None:
    timeline = Timeline(clock)
    timeline.begin_step()
    timeline.enter(at.FORWARD)
    timeline.come_inside()
    assert timeline.current == at.FORWARD
    clock.pass_ms(3)
    assert in_ms(timeline.end_step().host_seconds()) == {"forward": 3, "step": 3}


def test_leaving_more_than_was_entered_is_harmless(clock: Clock) -> None:
    timeline = Timeline(clock)
    timeline.begin_step()
    timeline.leave()
    timeline.leave()
    clock.pass_ms(1)
    assert timeline.current == at.OTHER
    assert in_ms(timeline.end_step().host_seconds()) == {"other": 1, "step": 1}


def test_the_innermost_part_that_raises_is_the_one_that_failed(clock: Clock) -> None:
    timeline = Timeline(clock)
    timeline.begin_step()
    with pytest.raises(ValueError, match="wrong"), Span(timeline, at.FORWARD):  # noqa: SIM117
        with Span(timeline, at.BACKWARD):
            raise ValueError("wrong")
    assert timeline.failed_in == at.BACKWARD
    assert timeline.current == at.OTHER


def test_a_new_step_has_not_failed(clock: Clock) -> None:
    timeline = Timeline(clock)
    timeline.begin_step()
    timeline.fail()
    assert timeline.failed_in == at.OTHER
    timeline.end_step()
    timeline.begin_step()
    assert timeline.failed_in is None


def test_observers_hear_every_mark_after_its_instant(clock: Clock) -> None:
    timeline = Timeline(clock)
    heard: list[tuple[int, int]] = []
    timeline.observers += (lambda code: heard.append((code, len(timeline.host_ns))),)
    step(timeline, clock)
    codes = [at.OTHER, at.DATA, at.OTHER, at.FORWARD, at.BACKWARD, at.FORWARD, at.OTHER, at.OTHER]
    assert heard == [(code, n) for n, code in enumerate(codes, 1)]
    timeline.observers = ()
    step(timeline, clock)
    assert len(heard) == len(codes)


def test_a_part_that_began_before_the_step_is_in_it_from_its_start(clock: Clock) -> None:
    timeline = Timeline(clock)
    timeline.enter(at.DATA)
    clock.pass_ms(7)
    timeline.begin_step()
    clock.pass_ms(2)
    timeline.leave()
    assert in_ms(timeline.end_step().host_seconds()) == {"data": 2, "step": 2}
