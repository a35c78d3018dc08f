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
from faults import Manual, Place, Tiny, assert_same_weights, breaks, fault, places, profiler, some, train
from lightning.pytorch.trainer.connectors.signal_connector import _HandlersCompose

from lm_profiler.callbacks import StageOptions, TrainingProfiler
from lm_profiler.callbacks.session import Session
from lm_profiler.callbacks.stages import StoppingRule
from lm_profiler.measure.boundary import Guard
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
    """What of ``faults`` a training felt, or that nobody reported."""
    whole = train(folder / "whole", [profiler(trace_steps)], make)
    plain = train(folder / "plain", [], make, max_steps=whole.steps)
    assert_same_weights(whole, plain)
    wrong = []
    for number, (place, time) in enumerate(faults):
        ours, raised, felt = profiler(trace_steps), [], ""
        try:
            with fault(place, ERRORS[number % len(ERRORS)](), time) as raised:
                module = train(folder / str(number), [ours], make)
            assert module.steps == plain.steps, f"{module.steps} steps for {plain.steps}"
            assert_same_weights(module, plain)
            assert_nothing_is_left()
        except BaseException as error:
            felt = f"training felt it: {error!r}"
        words = read_output()
        if raised and not felt and "boom" not in words and not is_whole(ours):
            felt = "nothing was reported"
        if raised and not felt and read_run(ours.folder) != ours.record:
            felt = "it left no record"
        if torch.autograd.profiler._is_profiler_enabled:
            torch.autograd.profiler._disable_profiler()
            felt += "; torch's profiler was left running"
        if felt:
            wrong.append(f"{raised or place}: {felt}")
    return wrong


def is_whole(ours: TrainingProfiler) -> bool:
    record = ours.record
    return (
        record is not None and record.status == "ok" and None not in (record.environment, record.model, record.verdict)
    )


DISABLE = torch.autograd.graph.disable_saved_tensors_hooks


def assert_nothing_is_left() -> None:
    """What comes after the training finds torch as it was."""
    assert torch.autograd.graph.disable_saved_tensors_hooks is DISABLE
    assert torch.func.grad(torch.square)(torch.ones(())) == 2  # refuses where hooks for saved tensors are left
    assert torch._C._len_torch_dispatch_stack() == 0
    assert not torch.autograd.profiler._is_profiler_enabled


@pytest.mark.parametrize("make", [Tiny, Manual])
def test_no_fault_in_any_function_reaches_the_training(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], make: Callable[[], Tiny]
) -> None:
    calls = places(lambda: train(tmp_path / "calls", [profiler()], make))
    # Of what is called while the loop runs every eleventh; of what is found out when it has ended, inside of one part,
    # every hundredth.
    ended = [code.co_name for code, _ in calls].index("_record_finished")
    faults = [(place, 1) for number, place in enumerate(calls) if number % (11 if number <= ended else 100) == 0]
    if make is Manual:  # every thirtieth of what the automatic one has not been through
        known = places(lambda: train(tmp_path / "automatic", [profiler()]))
        faults = [(place, 1) for place in [place for place in calls if place not in known][::30]]
        assert faults
    # A fit takes half as long without a trace: it has one only where the fault is in what nothing else calls.
    untraced = places(lambda: train(tmp_path / "untraced", [profiler(trace_steps=0)], make))
    for trace_steps in (0, 1):
        chosen = [(place, time) for place, time in faults if (place in untraced) is (trace_steps == 0)]
        read_output: Callable[[], str] = lambda: "".join(capfd.readouterr())  # noqa: E731
        assert not broken_by(chosen, make, tmp_path / f"trace {trace_steps}", read_output, trace_steps)


def test_no_fault_in_any_line_reaches_the_training(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    lines = places(lambda: train(tmp_path / "lines", [profiler()]), lines=True)
    faults = some(lines, 12, seed=1)
    assert not broken_by(faults, Tiny, tmp_path, lambda: "".join(capfd.readouterr()))


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

    ours = profiler()
    module = train(tmp_path, [ours], Model)
    assert_same_weights(module, train(tmp_path / "plain", [], Model, max_steps=module.steps))
    assert ours.record.status == "ok"


def test_training_ends_when_nobody_measures_any_more(tmp_path: Path) -> None:
    ours = profiler(until_ci=0.005, max_steps=500)
    with fault((Session.step_ended.__code__, None), KeyError("gone"), 3):
        module = train(tmp_path, [ours], max_steps=600)
    assert 3 < module.steps < 20
    going_on = profiler(stop_when_done=False)
    with breaks(Session.step_ended):
        module = train(tmp_path, [going_on], max_steps=12)
    assert module.steps == 12
    assert (going_on.record.status, going_on.record.failure.phase) == ("failed", "instruments")


def test_a_rank_without_instruments_answers_when_all_are_asked() -> None:
    answers, sent = iter([4, 0]), []

    def of_rank_0(mine: int) -> int:
        sent.append(mine)
        return next(answers)

    stopping = StoppingRule(StageOptions(until_ci=0.1), of_rank_0)
    assert [stopping.follow_rank_0(steps) for steps in range(1, 8)] == [False] * 4 + [True] * 3
    assert sent == [0, 0]  # asked after steps 1 and 5 alone, as everybody


def test_an_instrument_that_fails_takes_itself_out_alone(tmp_path: Path) -> None:
    ours = profiler()
    with breaks(HoldingsReader.__call__, OSError("no such probe")):
        train(tmp_path, [ours])
    assert ours.record.status == "ok"
    assert ours.record.time["step"].n == 3
    assert not ours.record.memory.causes
    assert any(note.startswith("memory failed") and "OSError" in note for note in ours.record.notes)
    assert list(ours.folder.rglob("*.json.gz"))
    assert len(read_steps(ours.folder / "steps.csv")) == 9


def _leaves(number: int, frame: FrameType | None) -> None:
    raise SystemExit("raised by the user's handler")


def _leaves_once(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)
    raise SystemExit("raised by the user's handler")


class _Leaves:
    def __call__(self, number: int, frame: FrameType | None) -> None:
        raise SystemExit("raised by the user's handler")


@pytest.mark.parametrize(
    "handler",
    [
        _leaves,
        _leaves_once,
        _Leaves(),
        _HandlersCompose([_leaves]),
        partial(_leaves),
        lambda *given: _leaves(*given),
        wraps(_leaves)(lambda *args, **kwargs: _leaves(*args, **kwargs)),
    ],
    ids=["function", "gone by then", "object", "within Lightning's", "partial", "lambda", "decorated"],
)
def test_a_guard_passes_on_what_a_handler_of_signals_raises(handler: Any) -> None:
    messages: list[str] = []
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(SystemExit, match="raised by the user"):
            Guard("it", messages.append).run(signal.raise_signal, signal.SIGUSR1)
        assert not messages
        Guard("it", messages.append).run(sys.exit, 3)  # that no handler asked for
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert [line.rpartition(" ")[2] for line in messages] == ["3"]
    with pytest.raises(KeyboardInterrupt):
        Guard("it", messages.append).run(interrupted)
    assert len(messages) == 1


def interrupted() -> None:
    raise KeyboardInterrupt
