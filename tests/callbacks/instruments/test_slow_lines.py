"""Calls that are slow in a known way, and calls that only look like them."""

import collections
import copy
import datetime
import itertools
import json
import pickle
import random
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.slow_calls import EXAMPLES

from lm_profiler.analysis.remedies.slow_calls import SLOW_CALL_BY_NAME
from lm_profiler.callbacks.instruments import python_time
from lm_profiler.callbacks.instruments.python_time import FollowingCost, PythonTimes
from lm_profiler.record.quantities import PARTS


class Memory:
    """An object whose attribute is a deque, and whose property must not be computed."""

    def __init__(self) -> None:
        self.stored = collections.deque(range(100))

    @property
    def computed(self) -> Any:
        raise AssertionError("code of the program was called")


def program() -> dict[str, Any]:
    """What the lines of the cases can use."""
    return {
        "collections": collections, "copy": copy, "datetime": datetime, "json": json, "np": np, "pickle": pickle,
        "random": random, "sample": random.sample, "torch": torch,
        "buffer": SimpleNamespace(
            rows=torch.zeros(100, 4), other=torch.zeros(100, 4), trained=torch.zeros(100, 4, requires_grad=True),
            array=np.zeros(100),
        ),
        "row": torch.ones(1, 4),
        "arrays": [np.zeros(100), np.ones(100)],
        "doubled": np.vectorize(lambda value: 2.0 * value),
        "items": list(range(100)),
        "memory": Memory(),
        "p": np.full(100, 0.01),
        "rng": np.random.default_rng(0),
        "values": torch.rand(100),
    }  # fmt: skip


def followed(
    line: str, folder: Path, thread_clock: Callable[[], int] = time.thread_time_ns, **names: Any
) -> PythonTimes:
    """The times of a function that consists of this line, which can use ``names``, too."""
    file = folder / "program.py"
    file.write_text(f"def step():\n    {line}\n")
    namespace = {**program(), **names}
    exec(compile(file.read_text(), file, "exec"), namespace)
    times = PythonTimes(lambda: PARTS.index("forward"), time.perf_counter_ns, thread_clock)
    assert times.start()
    try:
        namespace["step"]()
    finally:
        times.stop()
    return times


def rows_of(line: str, folder: Path, **names: Any) -> list[tuple[str, int]]:
    """The slow calls in a function of this line, with the numbers of their lines."""
    return [(row.what, row.line) for row in followed(line, folder, **names).slow_calls()]


@pytest.mark.filterwarnings("ignore:Creating a tensor from a list of numpy.ndarrays:UserWarning")
@pytest.mark.parametrize(
    "line, name",
    [
        ("np.random.choice(100, size=3, p=p)", "NumPy's choice with p"),
        ("rng.choice(100, 3, True, p)", "NumPy's choice with p"),
        ("np.random.choice(100, 3, replace=False)", "NumPy's choice with replace=False"),
        ("torch.randperm(100)[:3]", "a part of a permutation"),
        ("random.sample(memory.stored, 3)", "random.sample of a deque"),
        ("sample(memory.stored, 3)", "random.sample of a deque"),
        ("random.choices(items, weights=items, k=3)", "random.choices with weights"),
        ("[memory.stored[place] for place in range(9)]", "an index into a deque"),
        ("items.pop(0)", "list.pop(0)"),
        ("items.insert(0, 1)", "list.insert(0, …)"),
        ("items.index(50)", "list.index"),
        ("x = arrays[0]; x = np.append(x, 1.0)", "an array that grows"),
        ("x = arrays[0]; x = np.concatenate([x, x])", "an array that grows"),
        ("buffer.rows = torch.cat([row, buffer.rows])[: len(buffer.rows)]", "a buffer that is shifted"),
        ("buffer.rows = torch.cat((buffer.rows[1:], values[None, :4]))", "a buffer that is shifted"),
        ("buffer.array = np.concatenate([buffer.array, arrays[0][:2]])[2:]", "a buffer that is shifted"),
        ("doubled(arrays[0])", "np.vectorize"),
        ("np.apply_along_axis(sum, 0, arrays)", "np.apply_along_axis"),
        ("torch.tensor(arrays)", "a tensor made of a list of arrays"),
        ("[value for value in values]", "a loop over the elements of a tensor"),
        ("torch.inverse(torch.eye(3))", "the inverse of a matrix"),
        ("values.argsort()[:3]", "a part of a sorted order"),
        ("torch.multinomial(values, 3, replacement=True)", "torch.multinomial with replacement"),
        ("json.loads('[1]')", "json.loads"),
        ("pickle.loads(pickle.dumps(items))", "pickle.loads"),
        ("copy.deepcopy(items)", "copy.deepcopy"),
        ("datetime.datetime.strptime('2024', '%Y')", "datetime.strptime"),
        ("np.random.multivariate_normal(np.zeros(2), np.eye(2))", "multivariate_normal"),
    ],
)
def test_a_slow_call_is_found_in_its_line(line: str, name: str, tmp_path: Path) -> None:
    assert rows_of(line, tmp_path) == [(name, 2)]


@pytest.mark.parametrize(
    "line",
    [
        "np.random.choice(100, size=3)",
        "np.random.choice(100, size=3, p=None)",
        "rng.choice(100, 3, replace=False)",
        "np.random.choice(100, 3, replace=True)",
        "torch.randperm(100)",
        "random.sample(items, 3)",
        "random.sample(list(memory.stored), 3)",
        "items[50]",
        "items.pop()",
        "items.pop(False)",
        "memory.stored.popleft()",
        "items.append(1)",
        "x = np.concatenate(arrays)",
        "buffer.rows = torch.cat([buffer.rows, row])",
        "buffer.rows = torch.cat([buffer.other, buffer.rows])[: len(buffer.rows)]",
        "buffer.trained = torch.cat([row, buffer.trained])[: len(buffer.trained)]",
        "buffer.rows = torch.cat([row, buffer.other])[:4]",
        "rows = buffer.rows; rows = torch.cat([row, rows[:-1]])",
        "torch.tensor(items)",
        "[value for value in values.tolist()]",
        "values.argsort()",
        "torch.multinomial(values, 3)",
        "json.dumps([1])",
        "[2 * row for row in values[None]]",
        "table = values[None]; [2 * row for row in table]",
        "few = values[:4]; [2 * value for value in few]",
        "memory.stored[0] + memory.stored[-1]",
    ],
)
def test_a_call_that_only_looks_like_a_slow_one_is_not_found(line: str, tmp_path: Path) -> None:
    assert rows_of(line, tmp_path) == []


@pytest.mark.parametrize(
    "line, slow_s",
    [
        ("torch.dot(values, values) * items.index(50)", 1.0),
        ("memory.stored[50] * torch.dot(values, values)", 2.0),
    ],
)
def test_operators_beside_a_slow_call_are_not_its_time(
    line: str, slow_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each interval between events is one second long. Python does not report the index of a deque as an event."""
    monkeypatch.setattr(python_time, "following_cost", lambda *clocks: FollowingCost())
    ticks = itertools.count(step=10**9)
    times = followed(line, tmp_path, thread_clock=lambda: next(ticks))
    [row] = times.slow_calls()
    assert row.seconds == slow_s


@pytest.mark.filterwarnings("error")
def test_reading_the_source_does_not_warn(tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text(
        "PATTERN = '\\d \\N{BULLET} \\' ' + f'\\N{BULLET}{1}' + \\\n"
        " b'\\\\'.decode()\n\ndef step(items):\n    items.index(1)\n"
    )
    namespace: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(file.read_text(), file, "exec"), namespace)
    times = PythonTimes(lambda: PARTS.index("forward"), time.perf_counter_ns)
    assert times.start()
    namespace["step"]([1])
    times.stop()
    assert [row.line for row in times.slow_calls()] == [5]


def test_no_code_of_the_program_is_called(tmp_path: Path) -> None:
    """The property would raise, and so would the comparison of the classes."""
    line = "try: random.sample(memory.computed, 3)\n    except AssertionError: calls.append(1)"
    calls: list[int] = []
    assert rows_of(line, tmp_path, calls=calls) == []
    assert calls == [1]


def test_functions_of_the_program_that_a_slow_call_calls_are_a_part_of_it(tmp_path: Path) -> None:
    """The function of np.vectorize waits, which is neither its own row nor missing."""
    waiting = np.vectorize(lambda value: time.sleep(1e-3))
    [row] = followed("waiting(arrays[0])", tmp_path, waiting=waiting).slow_calls()
    assert row.seconds >= 100e-3


def test_a_compiled_function_is_not_slowed_down_by_following(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python runs at half of its speed while it is followed. The line is one interval, of one tick of the clock."""
    monkeypatch.setattr(python_time, "following_cost", lambda *clocks: FollowingCost(slower=2.0))
    ticks = itertools.count(step=10**9)
    times = followed("memory.stored[50]", tmp_path, thread_clock=lambda: next(ticks))
    assert [row.seconds for row in times.slow_calls()] == [1.0]


def test_each_slow_call_has_a_measured_example() -> None:
    assert [*EXAMPLES] == [*SLOW_CALL_BY_NAME]
