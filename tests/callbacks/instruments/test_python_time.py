"""Whose Python runs: known waits and calls, charged to the line of the program that makes them."""

import importlib
import inspect
import itertools
import json
import multiprocessing
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch
import numpy as np
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

from lm_profiler.callbacks.instruments import python_time
from lm_profiler.callbacks.instruments.python_time import FollowedTime, FollowingCost, PythonTimes, _Place
from lm_profiler.measure.boundary import Guard
from lm_profiler.measure.memory.peaks import ProcessProbe
from lm_profiler.measure.user_code import package_of
from lm_profiler.record.quantities import PARTS
from lm_profiler.record.run_record import PythonTime

FORWARD, OTHER = PARTS.index("forward"), PARTS.index("other")


def followed(
    work: Callable[[], object], phase: int = FORWARD, clock: Callable[[], int] = time.perf_counter_ns, **options: Any
) -> PythonTimes:
    """The times of ``work``, which runs in ``phase``."""
    times = PythonTimes(lambda: phase, clock, **options)
    assert times.start()
    try:
        work()
    finally:
        times.stop()
    assert sys.getprofile() is None
    return times


def python_times(work: Callable[[], object], clock: Callable[[], int] = time.perf_counter_ns) -> list[PythonTime]:
    return followed(work, clock=clock, thread_clock=clock).shares()


def line_marked_here(function: Callable[..., object]) -> int:
    """The number of the line of ``function`` that ends with "# here"."""
    lines, first_line = inspect.getsourcelines(function)
    return first_line + next(index for index, text in enumerate(lines) if text.endswith("# here\n"))


def seconds_in(rows: list[PythonTime], function: str, what: str) -> float:
    return sum(row.seconds for row in rows if row.function.endswith(function) and row.what == what)


def sleeps() -> None:
    time.sleep(0.03)


def sleeps_and_sums() -> None:
    sleeps()
    sum(number % 3 for number in range(2000))


def test_a_sleep_is_its_callers_line() -> None:
    rows = python_times(sleeps_and_sums)
    (row,) = [row for row in rows if row.what == "time.sleep"]
    assert row.function == "sleeps"
    assert row.file == __file__
    assert row.line == sleeps.__code__.co_firstlineno + 1
    assert (row.phase, row.calls) == ("forward", 1)
    assert row.seconds >= 0.03


def test_a_generator_is_the_function_that_it_stands_in() -> None:
    rows = python_times(sleeps_and_sums)
    assert seconds_in(rows, "sleeps_and_sums", "python") > 0.0
    assert not any("genexpr" in row.function for row in rows)


def test_what_the_function_with_the_loop_calls_itself_is_outside_of_phases() -> None:
    """It began before the following, and its phases are divided by the functions that they call."""
    phase = [OTHER]
    times = PythonTimes(lambda: phase[0], time.perf_counter_ns)
    times.start()
    time.sleep(0.03)  # here
    phase[0] = FORWARD
    time.sleep(0.02)
    phase[0] = OTHER
    times.stop()
    (row,) = [row for row in times.shares() if row.what == "time.sleep"]
    assert row.phase == "other"
    assert row.line == line_marked_here(test_what_the_function_with_the_loop_calls_itself_is_outside_of_phases)
    assert row.seconds >= 0.03


@pytest.mark.parametrize("phase, is_counted", [(OTHER, True), (FORWARD, False)])
def test_a_model_that_runs_outside_of_the_phases_counts_for_its_caller(phase: int, is_counted: bool) -> None:
    """As the target network of an agent. In forward, the operators that torch's modules call are the model."""
    target, states = nn.Linear(256, 256), torch.rand(256, 256)

    def targets() -> None:
        for _ in range(20):
            target(states)

    times = followed(targets, phase, thread_clock=time.perf_counter_ns)
    torch_s = seconds_in(times.shares(), "targets", "torch")
    assert (torch_s > 0.0) == is_counted


def test_a_function_that_enters_a_phase_counts_until_then() -> None:
    phase, now_ns = [OTHER], [0]

    def replay() -> None:
        now_ns[0] += 20_000_000
        len("")  # an event
        phase[0] = FORWARD
        now_ns[0] += 50_000_000

    times = PythonTimes(lambda: phase[0], lambda: now_ns[0], lambda: now_ns[0])
    times.start()
    replay()
    times.stop()
    (call,) = times.outer_calls()
    assert call.outer_function.endswith("replay")
    assert call.seconds == pytest.approx(0.02)


def through_a_pool() -> None:
    end, other_end = multiprocessing.Pipe()
    for number in range(50):
        end.send(number)
        other_end.recv()


def through_a_socket() -> None:
    end, other_end = socket.socketpair()
    with end, other_end:
        for _ in range(50):
            end.send(b"1")
            other_end.recv(1)


def through_a_pipe() -> None:
    with subprocess.Popen(["yes"], stdout=subprocess.PIPE, text=True) as process:
        for _ in range(50):
            process.stdout.readline()
        process.kill()


def reads_a_file() -> None:
    with Path(__file__).open() as file:
        for _ in range(50):
            file.readline()


def computes() -> None:
    sorted(range(50_000), key=str)


@pytest.mark.parametrize(
    "work, exchanges",
    [
        (through_a_pool, True),
        (through_a_socket, True),
        (through_a_pipe, True),
        (reads_a_file, False),
        (computes, False),
    ],
)
def test_what_goes_to_other_processes_adds_up_under_the_line_of_the_loop(
    work: Callable[[], None], exchanges: bool
) -> None:
    times = PythonTimes(lambda: OTHER, time.perf_counter_ns)
    times.start()
    work()  # here
    times.stop()
    planted_line = line_marked_here(test_what_goes_to_other_processes_adds_up_under_the_line_of_the_loop)
    calls = [call for call in times.outer_calls() if call.loop_line == planted_line]
    assert work.__name__ in {call.outer_function for call in calls}
    assert (sum(call.exchange_s for call in calls) > 0.0) == exchanges


@pytest.mark.parametrize(
    "is_same, has_gradients, forward",
    [(True, False, "acting"), (True, True, None), (False, False, "following")],
)
def test_a_line_of_the_loop_acts_if_it_runs_a_trained_model_without_gradients(
    is_same: bool, has_gradients: bool, forward: str | None
) -> None:
    """Of torch's own class, which has no function of the program; an average of models is not the trained model."""
    policy = nn.Sequential(nn.Linear(4, 4))
    average = nn.Sequential(nn.Linear(4, 4))
    model = policy if is_same else average
    times = PythonTimes(
        lambda: OTHER,
        time.perf_counter_ns,
        is_trained=lambda module: module is policy,
        may_follow=lambda module: True,
    )
    observations = torch.ones(2, 4)
    times.start()
    with torch.set_grad_enabled(has_gradients):
        model(observations)
    times.stop()
    kinds = {call.forward for call in times.outer_calls()}
    assert kinds - {None} == {forward} - {None}


def test_two_lines_of_the_loop_call_one_module_in_different_ways() -> None:
    """As in a perceptual loss, whose target has no gradients."""
    features = Net()
    times = PythonTimes(lambda: OTHER, time.perf_counter_ns, is_trained=lambda module: False)
    image = torch.ones(2, 8, requires_grad=True)
    times.start()
    with torch.no_grad():
        features(image)
    features(image)
    times.stop()
    calls = [call for call in times.outer_calls() if call.outer_function.endswith("forward")]
    calls.sort(key=lambda call: call.loop_line or 0)
    assert [call.forward for call in calls] == ["untrained", "passing_unfrozen"]


def test_generators_that_make_a_batch_have_the_time_of_those_that_they_ask() -> None:
    """A chain of two transforms of one class over rows: each row takes 1 ms, each transform of it 2 and 3 ms."""
    now_ns = [0]

    def rows() -> Iterator[int]:
        for number in range(4):
            now_ns[0] += 1_000_000
            yield number

    class Transform:
        milliseconds = 2

        def __call__(self, items: Iterable[int]) -> Iterator[int]:
            for item in items:
                now_ns[0] += self.milliseconds * 1_000_000
                yield item

    class SlowTransform(Transform):
        milliseconds = 3

    phase = [PARTS.index("data")]
    times = PythonTimes(lambda: phase[0], lambda: now_ns[0], lambda: now_ns[0])
    batches = SlowTransform()(Transform()(rows()))
    times.start()
    sum(batches)
    phase[0] = OTHER
    sum(Transform()(rows()))  # this makes no batch
    times.stop()
    calls = {
        call.outer_function.rpartition(".<locals>.")[2]: call.seconds for call in times.data_calls({"data": 0.048})
    }
    assert calls == pytest.approx(
        {"SlowTransform.__call__": 0.048, "Transform.__call__": 0.024, "rows": 0.008}, rel=0.01
    )


def test_the_cost_of_following_is_charged_to_no_line() -> None:
    """By a clock that goes on with each reading, a thousand calls take what the program itself adds to it."""
    now_ns = [0]  # no variable of these functions, which Python 3.10 would put back when the profiler's call is over

    def clock() -> int:
        now_ns[0] += 700
        return now_ns[0]

    def leaf() -> None:
        now_ns[0] += 1000

    def calls() -> None:
        for _ in range(1000):
            leaf()

    rows = python_times(calls, clock)
    assert seconds_in(rows, "leaf", "python") == pytest.approx(1e-3, rel=0.01)
    assert sum(row.seconds for row in rows) == pytest.approx(1e-3, rel=0.01)


def test_a_function_with_many_calls_is_no_longer_than_one_that_computes() -> None:
    """``sample`` of a replay memory makes 500 small calls, ``push`` moves a long list: 1 ms beside 4 ms."""
    now_ns = [0]

    def clock() -> int:
        now_ns[0] += 3000  # the cost of following
        return now_ns[0]

    def small() -> None:
        now_ns[0] += 2000

    def sample() -> None:
        for _ in range(500):
            small()

    def push() -> None:
        now_ns[0] += 4_000_000

    times = PythonTimes(lambda: OTHER, clock, clock)
    times.start()
    sample()
    push()
    times.stop()
    push_call, sample_call = times.outer_calls()
    assert push_call.outer_function.endswith("push")
    assert push_call.seconds == pytest.approx(4e-3, rel=0.01)
    assert sample_call.outer_function.endswith("sample")
    assert sample_call.seconds == pytest.approx(1e-3, rel=0.01)


@pytest.mark.parametrize("part, function, what", [("data", "collated", "modelkit"), ("forward", "tokenized", "python")])
def test_a_package_of_models_that_loads_data_is_its_callers_line(
    part: str, function: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package that uses torch may be the model, so it is code of the program; a tokenizer in the loader is not."""
    folder = tmp_path / "site-packages" / "modelkit"
    folder.mkdir(parents=True)
    text = "import torch\n\ndef tokenized():\n    for number in range(50_000):\n        number % 7\n"
    (folder / "__init__.py").write_text(text)
    monkeypatch.syspath_prepend(folder.parent)
    modelkit = importlib.import_module("modelkit")

    def collated() -> None:
        modelkit.tokenized()

    longest = followed(collated, PARTS.index(part)).shares()[0]
    assert longest.function.endswith(function)
    assert longest.what == what


class BusyMachine:
    """From ``begin`` on, a second passes from one reading of the clock to the next, of which this thread runs 1 us."""

    def __init__(self) -> None:
        self._has_begun = False
        self._seconds_ns, self._ran_ns = itertools.count(0, 10**9), itertools.count(0, 1000)

    def begin(self) -> None:
        self._has_begun = True

    def clock(self) -> int:
        return next(self._seconds_ns) if self._has_begun else 0

    def thread_clock(self) -> int:
        return next(self._ran_ns) if self._has_begun else 0


def test_cpu_time_of_other_programs_is_charged_to_no_line() -> None:
    machine = BusyMachine()
    times = PythonTimes(lambda: FORWARD, machine.clock, machine.thread_clock)
    times.start()
    machine.begin()
    sleeps_and_sums()
    times.stop()
    rows = times.shares()
    assert seconds_in(rows, "sleeps", "time.sleep") >= 1.0  # a function of C may wait
    assert sum(row.seconds for row in rows if row.what == "python") < 0.02


@pytest.mark.parametrize("switches_per_reading, seconds", [(0, 0.0), (1, 1.0)])
def test_a_c_function_that_only_waited_for_a_cpu_has_not_waited(switches_per_reading: int, seconds: float) -> None:
    """A thread that waits gives up its CPU: the system counts a voluntary switch."""
    machine = BusyMachine()
    switches = itertools.count(0, switches_per_reading)
    times = PythonTimes(lambda: FORWARD, machine.clock, machine.thread_clock, switches=lambda: next(switches))
    children = OrderedDict(layer=1)

    def visits() -> None:
        children.items()

    times.start()
    machine.begin()
    visits()
    times.stop()
    waited_s = sum(row.seconds for row in times.shares() if row.what == "collections.OrderedDict.items")
    assert waited_s == pytest.approx(seconds, abs=0.01)


def test_readings_of_the_instruments_are_charged_to_no_line() -> None:
    """The memory of a process is read from files, while a line of the program calls its model."""
    probe = ProcessProbe()

    def calls() -> None:
        for _ in range(20):
            probe._status_peak()

    assert {row.what for row in python_times(calls)} <= {"python"}


def test_lines_take_no_longer_than_the_phase_does_undisturbed() -> None:
    """Logging takes 5 of 55 ms. Each of its 10,000 events costs 800 ns more than the calibrated 600.

    So it looked like 13 ms, until the whole phase is known to take 55.
    """
    times = PythonTimes(lambda: FORWARD, time.perf_counter_ns)
    times._cost = FollowingCost(event_ns=300.0, event_ran_ns=600.0, slower=1.0)
    events = 10_000
    logging_ns = 5_000_000 + events * (600 + 800)
    forward_ns = 50_000_000
    logging = _Place(FORWARD, ("net.py", 3, "Net.logs"), "Lightning", None)
    times._followed[logging] = FollowedTime(logging_ns, logging_ns, events, events)
    forward = _Place(FORWARD, ("net.py", 9, "Net.forward"), "torch", None)
    times._followed[forward] = FollowedTime(forward_ns, forward_ns, 1, 2)
    seconds = {row.function: row.seconds for row in times.shares({"forward": 0.055})}
    assert seconds == pytest.approx({"Net.logs": 0.005, "Net.forward": 0.050}, rel=0.01)
    seconds_without_phases = {row.function: row.seconds for row in times.shares()}
    assert seconds_without_phases["Net.logs"] == pytest.approx(0.005 + 0.008, rel=0.01)


@pytest.mark.parametrize("undisturbed_s, seconds", [(0.030, 0.010), (0.035, 0.015), (0.090, 0.020)])
def test_what_following_does_not_slow_down_is_not_made_shorter(undisturbed_s: float, seconds: float) -> None:
    """Python runs at half of its speed while it is followed, but a line of 20 ms may call a compiled function.

    Beside 20 ms of operators, that is so if the phase takes longer than 30 ms when it is not followed.
    """
    times = PythonTimes(lambda: FORWARD, time.perf_counter_ns)
    times._cost = FollowingCost(slower=2.0)
    line = _Place(FORWARD, ("net.py", 3, "Net.draws"), "python", None)
    operators = _Place(FORWARD, ("net.py", 9, "Net.forward"), "torch", None)
    for place in (line, operators):
        times._followed[place] = FollowedTime(20_000_000, 20_000_000, 1, 1)
    found = {row.function: row.seconds for row in times.shares({"forward": undisturbed_s})}
    assert found == pytest.approx({"Net.draws": seconds, "Net.forward": 0.020})


def test_an_operator_that_a_builtin_calls_is_torch() -> None:
    def ranks() -> None:
        sorted([3.0, 1.0, 2.0])
        list(map(torch.neg, [torch.zeros(2)]))

    times = followed(ranks)
    activities = {place.activity for place in times._followed if place.line[2].endswith("ranks")}
    assert {"builtin", "torch"} <= activities


def test_a_builtin_counts_as_python() -> None:
    """The line takes 4 ms in ``sorted`` and 2 ms in Python, in which loops run half as fast while it is followed."""
    times = PythonTimes(lambda: FORWARD, time.perf_counter_ns)
    times._cost = FollowingCost(event_ns=0.0, event_ran_ns=0.0, slower=2.0)
    line = ("net.py", 3, "Net.ranks")
    times._followed[_Place(FORWARD, line, "builtin", None)] = FollowedTime(4_000_000, 4_000_000, 7, 1)
    times._followed[_Place(FORWARD, line, "python", None)] = FollowedTime(2_000_000, 2_000_000, 1, 1)
    (row,) = times.shares()
    assert (row.what, row.calls) == ("python", 1)
    assert row.seconds == pytest.approx(0.004 + 0.002 / 2)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(50):
            x = x + 1.0
        return self.layer(x)


def test_operators_of_pythons_syntax_are_no_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """``Net`` has a sum in a loop, and calls a layer, whose Python is the library's."""
    # on a busy machine, the calibrated cost may exceed the time of a short line
    monkeypatch.setattr(python_time, "following_cost", lambda *clocks: FollowingCost())
    net, x = Net(), torch.zeros(2, 8)
    rows = python_times(lambda: net(x))
    assert sum(row.calls for row in rows if row.what == "torch") == 0
    assert any(row.what == "library" for row in rows)


def test_operators_called_by_a_line_are_torch() -> None:
    x = torch.zeros(2, 8)
    rows = python_times(lambda: [torch.add(x, 1.0) for _ in range(50)])
    assert sum(row.calls for row in rows if row.what == "torch") == 50


def test_other_packages_have_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    # on a busy machine, the calibrated cost may exceed the time of a short line
    monkeypatch.setattr(python_time, "following_cost", lambda *clocks: FollowingCost())
    text = json.dumps(list(range(3000)))
    rows = python_times(lambda: (np.linalg.norm(np.ones(9)), json.loads(text)))
    assert {"numpy", "json"} <= {row.what for row in rows}


@pytest.mark.parametrize("is_logging, activity", [(True, "Lightning"), (False, "library")])
def test_of_lightning_only_what_logs_is_logging(
    is_logging: bool, activity: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most of Lightning's functions that a program calls run its training, such as an optimizer's closure."""
    monkeypatch.setattr(python_time, "following_cost", lambda *clocks: FollowingCost())
    logger, model = DummyLogger(), BoringModel()

    def calls() -> None:
        for _ in range(50):
            if is_logging:
                logger.log_metrics({"loss": 1.0})
            else:
                is_overridden("training_step", model)

    activities = {row.what for row in python_times(calls)}
    assert activities & {"Lightning", "library"} == {activity}


def test_the_package_of_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that imports torch is a part of the program: it has no name."""
    packages = {
        __file__: "",
        torch.__file__: "library",
        lightning.pytorch.__file__: "Lightning",
        np.__file__: "numpy",
        threading.__file__: "threading",
        python_time.__file__: "lm_profiler",
        "<frozen importlib._bootstrap>": "Python",
        "/x/lib/python3.11/site-packages/nets_of_others/a.py": "",
        "/x/lib/python3.11/site-packages/pictures_of_others/a.py": "pictures_of_others",
    }
    monkeypatch.setitem(sys.modules, "nets_of_others.layers", SimpleNamespace(torch=torch))
    assert {file: package_of(file) for file in packages} == packages


def call_module(net: Net) -> None:
    net(torch.ones(1, 8))


def call_forward(net: Net) -> None:
    net.forward(torch.ones(1, 8))


def call_and_change(net: Net) -> None:
    net(torch.ones(1, 8))
    net.layer.weight.mul_(0.9)


def call_and_change_data(net: Net) -> None:
    """Of one element, through ``.data``, of which torch counts no changes."""
    net(torch.ones(1, 8))
    net.layer.weight.data[3, 2] += 0.5


def call_frozen(net: Net) -> None:
    net.requires_grad_(False)
    net(torch.ones(1, 8))


def judge(net: Net) -> None:
    """The gradient passes through the module to what it judges."""
    net(torch.ones(1, 8, requires_grad=True))


def judge_frozen(net: Net) -> None:
    net.requires_grad_(False)
    judge(net)


def judge_and_change(net: Net) -> None:
    judge(net)
    with torch.no_grad():
        net.layer.weight.mul_(0.9)


@pytest.mark.parametrize(
    "run, is_trained, has_gradients, kind",
    [
        (call_forward, True, True, "unmarked"),
        (call_forward, True, False, None),  # acts, for example
        (call_module, True, True, None),
        (call_module, False, False, "untrained"),  # a teacher
        (call_and_change, False, False, "following"),  # a mean of models
        (call_and_change_data, False, False, "following"),
        (call_module, False, True, "unfrozen"),  # a teacher without no_grad
        (call_frozen, False, True, "untrained"),
        (judge, False, True, "passing_unfrozen"),
        (judge_frozen, False, True, "passing"),
        (judge_and_change, False, True, None),
        (judge, True, True, None),
    ],
)
def test_how_a_forward_pass_outside_of_all_phases_is_called(
    run: Callable[[Net], None], is_trained: bool, has_gradients: bool, kind: str | None
) -> None:
    net = Net()
    with torch.set_grad_enabled(has_gradients):
        times = followed(lambda: run(net), OTHER, is_trained=lambda module: is_trained and module is net)
    rows = [row for row in times.shares() if row.function.rpartition(".")[2] == "forward"]
    assert {row.forward for row in rows} == {kind}


def test_the_text_of_a_tensor_is_printing_with_the_operators_that_make_it(monkeypatch: pytest.MonkeyPatch) -> None:
    # Each of the many calls takes no longer than following it, so that an estimate of that may leave nothing.
    monkeypatch.setattr(python_time, "following_cost", lambda *_: FollowingCost(0, 0, 1.0))
    x = torch.randn(30, 30)

    def print_both() -> str:
        return f"{x} {x.mean():.3f}"

    print_both()  # torch imports what it prints with
    rows = python_times(print_both)
    by_activity = {row.what: row.seconds for row in rows}
    assert by_activity["printing of tensors"] == max(by_activity.values())


def test_waiting_for_a_lock_is_a_wait() -> None:
    lock = threading.Lock()
    lock.acquire()
    timer = threading.Timer(0.03, lock.release)

    def waits() -> None:
        timer.start()  # not before: to begin the following takes almost as long
        lock.acquire()

    rows = python_times(waits)
    assert max(rows, key=lambda row: row.seconds).what == "_thread.lock.acquire"


def test_another_profiler_is_left_alone() -> None:
    def profile_of_the_program(*_: Any) -> None:
        """Somebody else's."""

    sys.setprofile(profile_of_the_program)
    try:
        times = PythonTimes(lambda: FORWARD, time.perf_counter_ns)
        assert not times.start()
        times.stop()
        assert sys.getprofile() is profile_of_the_program
    finally:
        sys.setprofile(None)


def test_a_partly_followed_phase_is_scaled_up() -> None:
    """Of the 1000 calls of a loop only the first 400 events are followed; the whole phase takes 100 ms."""

    def small() -> int:
        return len("")

    def calls_often() -> None:
        for _ in range(1000):
            small()

    ticks = itertools.count(step=1000)
    times = PythonTimes(lambda: FORWARD, lambda: next(ticks), lambda: next(ticks), _events_left=400)
    times.start()
    times._cost = FollowingCost()
    calls_often()
    assert sys.getprofile() is None
    assert sum(row.seconds for row in times.shares({"forward": 0.1})) == pytest.approx(0.1)


def test_a_failure_disables_the_instrument_alone() -> None:
    messages: list[str] = []
    guard = Guard("Python's lines", messages.append)

    def broken() -> int:
        raise RuntimeError("no phase")

    times = PythonTimes(broken, time.perf_counter_ns, guard=guard)
    times.start()
    assert sleeps_and_sums() is None
    assert guard.is_disabled
    assert len(messages) == 1
    assert sys.getprofile() is None


class Preempted(OSError):
    """What a handler of the program raises."""


class InterruptedFile:
    """A file at which a signal arrives while it is asked for its descriptor."""

    def fileno(self) -> int:
        signal.raise_signal(signal.SIGUSR1)
        return 9


def test_what_a_signal_handler_raises_during_the_search_for_a_pipe_reaches_the_program() -> None:
    def handler(number: int, frame: object) -> None:
        raise Preempted

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(Preempted):
            python_time._is_of_pipe("_io.BufferedReader.read", SimpleNamespace(__self__=InterruptedFile()))
    finally:
        signal.signal(signal.SIGUSR1, before)
