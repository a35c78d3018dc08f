"""Sessions of torch.profiler of the program, wherever in a step they begin or end: none is lost, nothing crashes."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from crossing_ranges import FIRST_SESSIONS, program_session
from scripts import SUPPORT
from warm import run_python

from lm_profiler.callbacks import TraceOptions
from lm_profiler.callbacks.instruments.torch_sessions import close_open_ranges, is_called_by_torch
from lm_profiler.callbacks.instruments.tracer import Tracer
from lm_profiler.measure.boundary import Guard
from lm_profiler.measure.clocks.timeline import Timeline

Function = Callable[[], object]


@pytest.mark.parametrize("first", FIRST_SESSIONS)
def test_a_range_may_begin_in_one_session_and_end_in_the_next(tmp_path: Path, first: str) -> None:
    done = run_python(str(SUPPORT / "crossing_ranges.py"), first, str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "calls in the program's session: 1" in done.stdout


def hook_that(call: Function) -> Callable[..., None]:
    def hook(*arguments: Any) -> None:
        call()

    return hook


def in_the_loop(call: Function) -> None:
    call()


def in_a_range(call: Function) -> None:
    with torch.profiler.record_function("a range of the program"):
        call()


def in_a_forward_hook(call: Function) -> None:
    layer = torch.nn.Linear(2, 2)
    layer.register_forward_hook(hook_that(call))
    layer(torch.ones(1, 2))


def in_an_optimizer_hook(call: Function) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    optimizer.register_step_post_hook(hook_that(call))
    optimizer.step()


def in_a_hook_of_a_gradient(call: Function) -> None:
    parameter = torch.ones(2, requires_grad=True)
    output = parameter * 2
    output.register_hook(hook_that(call))
    output.sum().backward()


class CallsInForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, call: Function) -> torch.Tensor:
        call()
        return tensor.clone()


def in_an_operator(call: Function) -> None:
    CallsInForward.apply(torch.ones(1), call)


class CallsInDispatch(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self, call: Function) -> None:
        super().__init__()
        self.calls = [call]

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        while self.calls:
            self.calls.pop()()
        return operator(*args, **(kwargs or {}))


def in_a_dispatched_operator(call: Function) -> None:
    with CallsInDispatch(call):
        torch.ones(1)


def in_another_thread(call: Function) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


PLACES = [in_the_loop, in_a_range, in_a_forward_hook, in_an_optimizer_hook]
PLACES_IN_TORCH = [in_a_hook_of_a_gradient, in_an_operator, in_a_dispatched_operator]


@pytest.mark.parametrize("place", [*PLACES, in_another_thread])
def test_torch_has_not_called_code_of_the_loop(place: Callable[[Function], None]) -> None:
    answers: list[bool] = []
    place(lambda: answers.append(is_called_by_torch()))
    assert answers == [False]


@pytest.mark.parametrize("place", PLACES_IN_TORCH)
def test_torch_has_called_code_within_its_operators(place: Callable[[Function], None]) -> None:
    answers: list[bool] = []
    place(lambda: answers.append(is_called_by_torch()))
    assert answers == [True]


def test_a_range_that_is_closed_early_is_recorded_once() -> None:
    with program_session() as session:
        with torch.profiler.record_function("outer"), torch.profiler.record_function("inner"):
            close_open_ranges()
        torch.ones(1)
    names = [event.name for event in session.events()]
    assert (names.count("outer"), names.count("inner"), names.count("aten::ones")) == (1, 1, 1)


def tracer_in(folder: Path) -> tuple[Tracer, list[str]]:
    """A tracer that traces, and the list of what its guard reports."""
    reports: list[str] = []
    module = torch.nn.Linear(2, 2)
    tracer = Tracer(TraceOptions(steps=1), torch.device("cpu"), Timeline(), folder, 0, lambda: module)
    tracer.guard = Guard("trace", reports.append, tracer.discard)
    tracer.guard.run(tracer.start)
    tracer.guard.run(tracer.step)
    return tracer, reports


STYLES = [program_session, torch.autograd.profiler.profile, torch.autograd.profiler.emit_itt]


def assert_the_next_session_records() -> None:
    with program_session() as session:
        torch.ones(1)
    assert "aten::ones" in [event.name for event in session.events()]
    assert not torch.autograd._profiler_enabled()


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("place", PLACES)
def test_ours_ends_where_another_session_begins(tmp_path: Path, place: Any, style: Callable[[], Any]) -> None:
    tracer, reports = tracer_in(tmp_path)
    session = style()
    place(session.__enter__)
    torch.ones(1)
    session.__exit__(None, None, None)
    tracer.guard.end(tracer.result)
    assert len(reports) == 1
    assert "another session of torch.profiler began" in reports[0]
    if style is program_session:
        assert "aten::ones" in [event.name for event in session.events()]
    assert_the_next_session_records()


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("place", [*PLACES_IN_TORCH, in_another_thread])
def test_ours_continues_where_it_cannot_end(tmp_path: Path, place: Any, style: Callable[[], Any]) -> None:
    """The other session records nothing, can be read, and the report explains why."""
    tracer, reports = tracer_in(tmp_path)
    sessions: list[Any] = []

    def measure() -> None:
        sessions.append(style())
        with sessions[-1]:
            torch.ones(1)

    place(measure)
    place(measure)
    tracer.guard.end(tracer.result)
    assert len(reports) == 1
    assert "recorded nothing" in reports[0]
    assert tracer.path.exists()
    for session in sessions:
        if style is program_session:
            assert list(session.events()) == []
            session.export_chrome_trace(str(tmp_path / "empty.json"))
            assert (tmp_path / "empty.json").exists()
    assert_the_next_session_records()


@pytest.mark.parametrize("place", PLACES_IN_TORCH)
@pytest.mark.parametrize("method", ["start", "step", "result", "discard"])
def test_no_session_of_ours_begins_or_ends_within_an_operator(tmp_path: Path, place: Any, method: str) -> None:
    """As in a loop whose optimizer steps in hooks of gradients, or if a hook of a module fails."""
    tracer, reports = tracer_in(tmp_path)
    if method == "start":
        tracer.discard()
    place(lambda: tracer.guard.run(getattr(tracer, method)))
    tracer.guard.undo()  # as at the end of the run
    if method != "discard":
        assert len(reports) == 1
        assert "within a backward pass" in reports[0]
    assert not tracer.path.exists()
    assert_the_next_session_records()


def test_a_session_of_ours_that_had_to_stay_ends_before_the_next_one(tmp_path: Path) -> None:
    tracer, reports = tracer_in(tmp_path)
    in_a_hook_of_a_gradient(lambda: tracer.guard.run(tracer.step))
    assert torch.autograd._profiler_enabled()
    assert_the_next_session_records()
    tracer.guard.undo()
    assert len(reports) == 1
