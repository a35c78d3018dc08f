"""The instruments may fail; the training may not: faults at every call that a training makes of ours."""

import gc
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial, wraps
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from faults import (
    Manual,
    Place,
    Tiny,
    assert_same_weights,
    called_places,
    draw_lines,
    fault_at,
    fault_in,
    short_profiler,
    train_tiny,
)
from lightning.pytorch.trainer.connectors.signal_connector import _HandlersCompose

from lm_profiler.callbacks import StageOptions, TrainingProfiler
from lm_profiler.callbacks.instruments.tracer import Tracer
from lm_profiler.callbacks.session import Session
from lm_profiler.callbacks.stages import StoppingRule
from lm_profiler.measure.boundary import Guard
from lm_profiler.measure.counts.flops import FlopCounter
from lm_profiler.measure.memory.causes import HoldingsReader
from lm_profiler.record.run_record import read_run
from lm_profiler.record.steps import read_steps

pytestmark = pytest.mark.usefixtures("counted_apart", "quiet_trainers")


ERRORS: list[Callable[[], BaseException]] = [
    lambda: RuntimeError("boom"),
    lambda: SystemExit("boom"),
    lambda: MemoryError("boom"),
    lambda: GeneratorExit("boom"),
]


# They raise for a Trainer that cannot be profiled, before anything is measured, and the user must see it.
REFUSALS = {"_check_trainer"}


@pytest.fixture(autouse=True)
def files_of_faults() -> Iterator[None]:
    """Close what a fault between a file's opening and its ``with`` left open, before another test collects garbage."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def broken_by(
    faults: list[tuple[Place, int]],
    make: Callable[[], Tiny],
    folder: Path,
    read_output: Callable[[], str],
    trace_steps: int = 1,
) -> list[str]:
    """Train once with each of ``faults``; return those that the training felt, or that nobody reported."""
    whole = train_tiny(folder / "whole", [short_profiler(trace_steps)], make)
    plain = train_tiny(folder / "plain", [], make, max_steps=whole.steps)
    assert_same_weights(whole, plain)
    wrong = []
    for number, (place, time) in enumerate(faults):
        ours, raised, problem = short_profiler(trace_steps), [], ""
        error = ERRORS[number % len(ERRORS)]()
        try:
            with fault_at(place, error, time) as raised:
                module = train_tiny(folder / str(number), [ours], make)
            assert module.steps == plain.steps, f"{module.steps} steps for {plain.steps}"
            assert_same_weights(module, plain)
            assert_torch_is_as_before()
        except BaseException as error:
            problem = f"training felt it: {error!r}"
        is_reported = "boom" in read_output()
        if raised and not problem and not is_reported and not has_whole_record(ours):
            problem = "nothing was reported"
        if raised and not problem and has_begun(ours) and read_run(ours.folder) != ours.record:
            problem = "it left no record"
        if torch.autograd.profiler._is_profiler_enabled:
            torch.autograd.profiler._disable_profiler()
            problem += "; torch's profiler was left running"
        if problem:
            wrong.append(f"{raised or place}: {problem}")
    return wrong


def has_begun(ours: TrainingProfiler) -> bool:
    """Whether the run got as far as its folder: a fault before is reported, and nothing is measured."""
    try:
        return ours.folder.exists()
    except AttributeError:
        return False


def has_whole_record(ours: TrainingProfiler) -> bool:
    record = ours.record
    if record is None or record.status != "ok":
        return False
    return None not in (record.environment, record.model, record.verdict)


DISABLE = torch.autograd.graph.disable_saved_tensors_hooks


def assert_torch_is_as_before() -> None:
    """What comes after the training finds torch as it was."""
    assert torch.autograd.graph.disable_saved_tensors_hooks is DISABLE
    assert torch.func.grad(torch.square)(torch.ones(())) == 2  # refuses where hooks for saved tensors are left
    assert torch._C._len_torch_dispatch_stack() == 0
    assert not torch.autograd.profiler._is_profiler_enabled
    assert "__new__" not in vars(torch.Tensor)  # replaced while FLOPs are counted


def assert_no_fault_is_felt(
    places: list[Place], make: Callable[[], Tiny], folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A fit takes half as long without a trace: it has one only where the fault is in what nothing else calls."""
    called_without_trace = called_places(lambda: train_tiny(folder / "untraced", [short_profiler(trace_steps=0)], make))
    for trace_steps in (0, 1):
        needs_trace = trace_steps == 1
        faults = [(place, 1) for place in places if (place not in called_without_trace) is needs_trace]
        subfolder = folder / f"trace {trace_steps}"
        assert not broken_by(faults, make, subfolder, lambda: "".join(capfd.readouterr()), trace_steps)


def test_no_fault_in_any_function_reaches_the_training(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Of the functions called while the loop runs every eleventh fails, and of those at its end every hundredth.

    Those at the end are within one part, whose failure is caught as a whole.
    """
    called = list(called_places(lambda: train_tiny(tmp_path / "calls", [short_profiler()])))
    loop_ended = [code.co_name for code, _ in called].index("_record_finished")
    places = []
    for number, place in enumerate(called):
        is_in_loop = number <= loop_ended
        code, _ = place
        if code.co_name in REFUSALS:
            continue
        if number % (11 if is_in_loop else 100) == 0:
            places.append(place)
    assert_no_fault_is_felt(places, Tiny, tmp_path, capfd)


def test_no_fault_reaches_a_training_with_manual_optimization(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Every thirtieth fails of the functions that no training with automatic optimization calls."""
    called = called_places(lambda: train_tiny(tmp_path / "calls", [short_profiler()], Manual))
    called_by_automatic = called_places(lambda: train_tiny(tmp_path / "automatic", [short_profiler()]))
    places = [place for place in called if place not in called_by_automatic][::30]
    assert places
    assert_no_fault_is_felt(places, Manual, tmp_path, capfd)


def test_no_fault_in_any_line_reaches_the_training(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Twelve lines are drawn of all that a training reaches."""
    lines = called_places(lambda: train_tiny(tmp_path / "lines", [short_profiler()]), lines=True)
    faults = draw_lines(lines, 12, seed=1)
    assert not broken_by(faults, Tiny, tmp_path, lambda: "".join(capfd.readouterr()))


def test_a_fault_in_any_line_that_ends_the_trace_leaves_no_profiler_running(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    lines = called_places(lambda: train_tiny(tmp_path / "lines", [short_profiler()]), lines=True)
    faults = [(place, 1) for place in lines if place[0] is Tracer.discard.__code__]
    assert len(faults) >= 4
    assert not broken_by(faults, Tiny, tmp_path, lambda: "".join(capfd.readouterr()))


@pytest.mark.parametrize("function", [FlopCounter._kind_of_operator, FlopCounter.begin_pass])
def test_a_fault_in_the_counting_of_operators_does_not_reach_it(
    function: Callable[..., object], tmp_path: Path
) -> None:
    ours = short_profiler()
    with fault_in(function) as raised:
        module = train_tiny(tmp_path, [ours])
    assert raised
    assert_torch_is_as_before()
    assert ours.record.status == "ok"
    assert ours.record.utilisation is None
    assert_same_weights(module, train_tiny(tmp_path / "plain", [], max_steps=module.steps))


@pytest.mark.parametrize("method", ["__repr__", "__eq__", "__getattr__"])
def test_a_module_whose_own_methods_raise(tmp_path: Path, method: str) -> None:
    def raises(self: object, *args: object) -> object:
        raise LookupError(f"{method} of somebody's own")

    class Odd(torch.nn.Linear):
        __hash__ = torch.nn.Module.__hash__

    if method == "__getattr__":
        inherited = Odd.__getattr__
        raises = lambda self, name: inherited(self, name) if name in {"weight", "bias"} else {}[name]  # noqa: E731
    setattr(Odd, method, raises)

    class Model(Tiny):
        def __init__(self) -> None:
            super().__init__()
            self.layers[2] = Odd(4, 1)

    ours = short_profiler()
    module = train_tiny(tmp_path, [ours], Model)
    assert_same_weights(module, train_tiny(tmp_path / "plain", [], Model, max_steps=module.steps))
    assert ours.record.status == "ok"


def test_training_that_was_to_be_stopped_ends_if_the_instruments_fail(tmp_path: Path) -> None:
    ours = short_profiler(until_ci=0.005, max_steps=500)
    with fault_at((Session.step_ended.__code__, None), KeyError("gone"), time=3):
        module = train_tiny(tmp_path, [ours], max_steps=600)
    assert 3 < module.steps < 20


def test_training_that_was_to_go_on_does_so_if_the_instruments_fail(tmp_path: Path) -> None:
    ours = short_profiler(stop_when_done=False)
    with fault_in(Session.step_ended):
        module = train_tiny(tmp_path, [ours], max_steps=12)
    assert module.steps == 12
    assert (ours.record.status, ours.record.failure.phase) == ("failed", "instruments")


def test_a_rank_without_instruments_answers_when_all_are_asked() -> None:
    """Rank 0 says after step 1 to go on for four steps, and after step 5 to stop."""
    answers_of_rank_0, answered = iter([4, 0]), []

    def exchange(own_answer: int) -> int:
        answered.append(own_answer)
        return next(answers_of_rank_0)

    stopping = StoppingRule(StageOptions(until_ci=0.1), exchange)
    assert [stopping.follow_rank_0(steps) for steps in range(1, 8)] == [False] * 4 + [True] * 3
    assert answered == [0, 0]


def test_an_instrument_that_fails_takes_itself_out_alone(tmp_path: Path) -> None:
    """Only the memory's causes are missing: there are three measured steps, a trace, and rows of all nine steps."""
    ours = short_profiler()
    with fault_in(HoldingsReader.__call__, OSError("no such probe")):
        train_tiny(tmp_path, [ours])
    record = ours.record
    assert record.status == "ok"
    assert not record.memory.causes
    assert any(note.startswith("memory failed") and "OSError" in note for note in record.notes)
    assert record.time["step"].n == 3
    assert list(ours.folder.rglob("*.json.gz"))
    assert len(read_steps(ours.folder / "steps.csv")) == 9


def exit_in_handler(number: int, frame: FrameType | None) -> None:
    raise SystemExit("raised by the user's handler")


def exit_once(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)
    raise SystemExit("raised by the user's handler")


class ExitingObject:
    def __call__(self, number: int, frame: FrameType | None) -> None:
        raise SystemExit("raised by the user's handler")


@pytest.mark.parametrize(
    "handler",
    [
        exit_in_handler,
        exit_once,
        ExitingObject(),
        _HandlersCompose([exit_in_handler]),
        partial(exit_in_handler),
        lambda *given: exit_in_handler(*given),
        wraps(exit_in_handler)(lambda *args, **kwargs: exit_in_handler(*args, **kwargs)),
    ],
    ids=["function", "gone by then", "object", "within Lightning's", "partial", "lambda", "decorated"],
)
def test_a_guard_passes_on_what_a_handler_of_signals_raises(handler: Any) -> None:
    messages: list[str] = []
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(SystemExit, match="raised by the user"):
            Guard("it", messages.append).run(signal.raise_signal, signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not messages


def test_a_guard_reports_an_exit_that_no_handler_raised() -> None:
    messages: list[str] = []
    Guard("it", messages.append).run(sys.exit, 3)
    (message,) = messages
    assert message.endswith(" 3")


def test_a_guard_passes_on_ctrl_c() -> None:
    messages: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        Guard("it", messages.append).run(interrupted)
    assert not messages


def interrupted() -> None:
    raise KeyboardInterrupt
