"""Calls of a module are observed; its class is as before afterwards, and nothing else that is called changes."""

import copy
import pickle
import time
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from lm_profiler.callbacks.instruments.python_time import PythonTimes
from lm_profiler.callbacks.marks.module_calls import MODULE_CALLS
from lm_profiler.measure.boundary import UNGUARDED, Guard


class Scale(nn.Module):
    def __init__(self, factor: float = 2.0) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor))

    def forward(self, x: Tensor, fails: bool = False) -> Tensor:
        if fails:
            raise KeyError("wrong")
        return x * self.factor


@pytest.fixture
def calls() -> Iterator[list[str]]:
    yield []
    assert "_compiled_call_impl" not in vars(Scale)
    assert nn.Module._compiled_call_impl is None


def observe(module: nn.Module, calls: list[str], name: str = "") -> Callable[[], None]:
    def begin(observed: nn.Module, args: Any, kwargs: Any) -> None:
        assert observed is module
        calls.append(f"{name}begin {[*args[1:], *kwargs.values()]}")

    def end(observed: nn.Module, args: Any, output: Any) -> None:
        assert observed is module
        calls.append(f"{name}end {output if output is None else output.tolist()}")

    return MODULE_CALLS.observe(module, begin, end, UNGUARDED)


def test_observers_are_called_around_the_module_and_its_hooks(calls: list[str]) -> None:
    module = Scale()
    module.register_forward_hook(lambda *_: calls.append("hook"))
    stops = [observe(module, calls, "inner "), observe(module, calls, "outer ")]
    module(torch.ones(()))
    with pytest.raises(KeyError):
        module(torch.ones(()), fails=True)
    assert calls == [
        *("outer begin []", "inner begin []", "hook", "inner end 2.0", "outer end 2.0"),
        *("outer begin [True]", "inner begin [True]", "inner end None", "outer end None"),
    ]
    for stop in stops:
        stop()
    module(torch.ones(()))
    assert calls.count("hook") == 2
    assert len(calls) == 10


def test_other_modules_of_the_class_and_copies_are_not_observed(calls: list[str]) -> None:
    module = Scale()
    stop = observe(module, calls)
    by_hand = object.__new__(Scale)
    by_hand.__dict__ = {**vars(module), "_parameters": {"factor": torch.tensor(3.0)}}  # as nn.DataParallel does
    others: list[tuple[nn.Module, float]] = [(Scale(5.0), 5.0), (by_hand, 3.0)]
    others += [
        (copied, 2.0) for copied in (copy.copy(module), copy.deepcopy(module), pickle.loads(pickle.dumps(module)))
    ]
    for other, factor in others:
        assert other(torch.ones(())) == factor
    assert calls == []
    stop()


def test_a_class_copied_by_its_value_does_not_contain_us(calls: list[str]) -> None:
    module = Scale()
    stop = observe(module, calls)
    cloudpickle.register_pickle_by_value(__import__(__name__))
    try:
        pickled = cloudpickle.dumps(Scale)
    finally:
        cloudpickle.unregister_pickle_by_value(__import__(__name__))
    assert b"lm_profiler.callbacks" not in pickled
    assert pickle.loads(pickled)()(torch.ones(())) == 2.0
    stop()


def test_a_module_without_a_class_of_its_own_can_be_observed(calls: list[str]) -> None:
    module = nn.Module()
    module.forward = torch.neg  # type: ignore[method-assign]
    stop = observe(module, calls)
    assert module(torch.ones(())) == -1.0
    assert calls == ["begin []", "end -1.0"]
    assert Scale()(torch.ones(())) == 2.0
    stop()


def test_an_error_of_an_observer_does_not_reach_the_program(calls: list[str]) -> None:
    def fail(*_: Any) -> None:
        raise GeneratorExit("boom")

    module = Scale()
    stop = MODULE_CALLS.observe(module, fail, fail, Guard("forward", calls.append))
    assert module(torch.ones(())) == 2.0
    assert calls == ["forward failed and was disabled: GeneratorExit: boom"]
    stop()


@pytest.mark.parametrize("follows_lines", [False, True])
def test_what_the_program_compiles_stays_the_same(calls: list[str], follows_lines: bool) -> None:
    """A compiled module calls the plain one where torch.compile compiles each function that it finds."""
    torch.compiler.reset()
    counters.clear()
    times = PythonTimes(lambda: 1, time.perf_counter_ns, guard=UNGUARDED)

    def begin(*_: Any) -> None:
        calls.append("begin")
        torch.ones(2).sum()
        if follows_lines and len(calls) == 2:
            times.start()

    module = Scale()
    stop = MODULE_CALLS.observe(module, begin, lambda *_: None, UNGUARDED)
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    try:
        for _ in range(3):
            assert compiled(torch.ones(())) == 2.0
    finally:
        times.stop()
    assert calls == ["begin"] * 3
    assert counters["stats"]["unique_graphs"] == 1
    stop()
