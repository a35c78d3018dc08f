"""Whatever line of our hooks fails, the program trains on, bit for bit, and nothing of ours stays in torch."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lm_profiler.callbacks.marks.hook_marks import HookMarks
from lm_profiler.callbacks.marks.step_counter import StepCounter
from lm_profiler.callbacks.marks.torch_hooks import OPTIMIZER_HOOKS
from lm_profiler.measure.boundary import Guard
from lm_profiler.measure.clocks.timeline import Timeline

ENTRIES = {
    "fetch", "enter_loop", "exit_loop", "leave_loop", "begin_phase", "end_phase",  # call the others by ``_run``
    "_run", "_marked", "_marked_scaler", "_marked_fetch",
    "__init__", "install", "restore", "count_only", "close_step", "_report_what_was_not_seen",  # outside of steps
    "_close_named_phases", "_report_once", "_report_nested_loop",  # for wrong use, which this program has none of
    "_hook", "_hook_parts", "_fail_optimizer", "see_host_batches", "mark_optimizers",
}  # fmt: skip
HOOKS = {name: hook for name, hook in vars(HookMarks).items() if inspect.isfunction(hook) and name not in ENTRIES}


def lines_of(code: CodeType) -> set[int]:
    """The lines of a function, without those that only define it."""
    return {line for _, _, line in code.co_lines() if line is not None and line > code.co_firstlineno}


LINES = [(name, line) for name, hook in HOOKS.items() for line in sorted(lines_of(hook.__code__))]
PLACES = LINES[::2]  # a line and its neighbour fail alike


class Planted(Exception):
    pass


def planted(code: CodeType, line: int) -> Callable[..., Any]:
    """A tracer that raises where ``line`` of ``code`` is about to run; Python then removes it."""

    def at_line(frame: FrameType, event: str, argument: object) -> Any:
        if event == "line" and frame.f_lineno == line:
            raise Planted
        return at_line

    return lambda frame, event, argument: at_line if frame.f_code is code else None


def train(marks: HookMarks | None, model: nn.Module, optimizer: Any) -> list[Tensor]:
    scaler = torch.amp.GradScaler("cpu")
    rows = DataLoader(TensorDataset(torch.arange(16.0).reshape(4, 4)), batch_size=2)
    bias = nn.Linear(4, 1)
    second = torch.optim.SGD(bias.parameters(), lr=1e-3)
    for _ in range(2):
        for (batch,) in rows:
            loss = model(batch).square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            bias(batch).sum().backward()
            second.step()
        model.eval()
        with torch.no_grad():
            model(batch)
        model.train()
        for phase in (0, 2) if marks is not None else ():
            is_marked = marks.begin_phase(phase)
            if is_marked:
                marks.end_phase(phase, None)
    model(torch.ones(2, 4)).mean().backward()  # without a loader
    optimizer.step()
    if marks is not None:
        marks.leave_loop()
    return [*model.parameters(), *bias.parameters()]


def seeded() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    return model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.5)


def what_torch_has() -> list[Any]:
    functions = [torch.autograd.backward, nn.utils.clip_grad_norm_, torch.optim.Optimizer.zero_grad]
    return [*functions, torch.amp.GradScaler.step, OPTIMIZER_HOOKS.is_taken]


def profiled(code: CodeType | None, line: int) -> tuple[list[Tensor], Guard]:
    """The weights after training with marks, where ``line`` of ``code`` fails once, and the guard that met it."""
    guard = Guard("the profiler", lambda text: None)
    timeline = Timeline(guard=guard)
    model, optimizer = seeded()
    counter = StepCounter(timeline, 10**6, step_ended=lambda: 10**6)
    ignore: Callable[..., Any] = lambda *_: []  # noqa: E731 - of batches, calls and modules of optimizers
    marks = HookMarks(timeline, counter, [model], [optimizer], ignore, ignore, ignore, print)
    guard.leave = marks.count_only
    marks.install()
    if code is not None:
        sys.settrace(planted(code, line))
    try:
        weights = train(marks, model, optimizer)
    finally:
        sys.settrace(None)
        marks.restore()
    hooks = [*model._forward_hooks, *model._forward_pre_hooks]
    assert hooks == []
    return weights, guard


@pytest.mark.filterwarnings("ignore:.*lr_scheduler")
def test_a_fault_at_a_line_of_a_hook_leaves_the_training_as_it_is() -> None:
    before = what_torch_has()
    bare = train(None, *seeded())
    faults = 0
    for name, line in PLACES:
        weights, guard = profiled(HOOKS[name].__code__, line)
        place = f"{name}, line {line}"
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(bare, weights, strict=True)), place
        assert what_torch_has() == before, place
        assert guard.is_disabled == isinstance(guard.error, Planted), place
        faults += guard.is_disabled
    weights, guard = profiled(None, 0)
    assert not guard.is_disabled
    assert faults > 0.7 * len(PLACES)  # the program passes most of them
