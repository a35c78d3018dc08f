"""A trace's table, against the hand-made step whose every microsecond is known."""

import random

import pytest
from cuda_trace import ADAM, ALL_REDUCE, AUTOGRAD, GEMM, MAIN, Trace, cuda_step, kernel_table

from lm_profiler.analysis.trace import pieces
from lm_profiler.analysis.trace.packed_trace import PackedTrace
from lm_profiler.analysis.why.traced import broken_down
from lm_profiler.record.kernels import KernelTable
from lm_profiler.report.run.kernel_tables import kernel_answers

US = 1e-6


def us(seconds: float) -> float:
    """Microseconds, to the nanosecond of a trace."""
    return round(seconds / US, 2)


def kinds_us(table: KernelTable, phase: str) -> dict[str, tuple[int, float]]:
    """Count and microseconds of each kind."""
    return {kind: (time.count, us(time.total_s)) for kind, time in table.phases[phase].kinds.items()}


@pytest.fixture(scope="module")
def step() -> KernelTable:
    return kernel_table(cuda_step())


def test_work_belongs_to_the_phase_that_launched_it(step: KernelTable) -> None:
    """The docstring of cuda_trace.py has when each kernel of the step runs."""
    assert (step.source, step.steps, us(step.window_s)) == ("kernels", 1, 170)
    busy_us = {name: us(phase.busy_s) for name, phase in step.phases.items()}
    assert busy_us == {"transfer": 4, "forward": 50, "backward": 40, "optimizer": 22, "other": 0}
    # A gap belongs to the work that ended it: 0-14, 18-30, 80-90, 130-140; 162-170 to none.
    idle_us = {name: us(phase.idle_s) for name, phase in step.phases.items()}
    assert idle_us == {"transfer": 14, "forward": 12, "backward": 10, "optimizer": 10, "other": 8}
    overlap_us = {name: us(phase.overlap_s) for name, phase in step.phases.items() if phase.overlap_s}
    assert overlap_us == {"backward": 10}  # the all-reduce beside a product
    assert kinds_us(step, "transfer") == {"host_copies": (1, 4)}
    assert kinds_us(step, "forward") == {"matmul": (2, 40), "attention": (1, 10)}  # though 60-80 ran in backward's time
    assert kinds_us(step, "backward") == {"communication": (1, 30), "matmul": (1, 20)}
    assert kinds_us(step, "optimizer") == {"elementwise": (1, 20), "copies": (1, 2)}
    assert step.memory_bound_share == pytest.approx(22 / 170)  # the optimizer and its memset, not the batch's copy
    assert step.communication_share == pytest.approx(20 / 170)  # 110-130


def test_the_order_of_events_does_not_matter(step: KernelTable) -> None:
    events = cuda_step()
    random.Random(0).shuffle(events)
    assert kernel_table(events) == step


def test_events_that_are_no_work_of_the_steps_change_nothing(step: KernelTable) -> None:
    before, after = Trace(-50), Trace()
    before.work("ampere_sgemm_128x64_tn", launched=0, start=10, end=40, correlation=1)
    after.range("ProfilerStep#2", 170, 400)
    lack_categories_or_arguments = [
        {"ph": "X", "cat": None, "name": "process_name", "pid": 1, "tid": 1, "ts": 1.0, "dur": 2.0},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaGetDevice", "pid": 1, "tid": 1, "ts": 1.0, "dur": 2.0},
        {"ph": "t", "cat": "fwdbwd", "name": "fwdbwd", "pid": 1, "tid": 1, "ts": 1.0, "id": 7},
    ]
    for other_events in (before.events, after.events, lack_categories_or_arguments):
        assert kernel_table([*other_events, *cuda_step()]) == step


@pytest.mark.parametrize("begins_before", [False, True])
def test_work_between_steps_does_not_change_the_table(begins_before: bool) -> None:
    """A validation of 5 ms, in the range of the step that follows or after that of the one before."""
    between = Trace(170)
    between.range("phase: between steps", 0, 5000)
    between.range("module: model (Transformer)", 10, 4900)
    for number in range(20):
        between.operator("aten::mm", 100 * number + 11, 100 * number + 90)
        between.work(GEMM, 100 * number + 20, 100 * number + 40, 100 * number + 120, 900 + number)
    following = cuda_step(number=2, origin=5170)
    if begins_before:
        following[0] = {**following[0], "ts": following[0]["ts"] - 5000, "dur": following[0]["dur"] + 5000}
    alone = [*cuda_step(), *cuda_step(number=2, origin=170)]
    events = [*cuda_step(), *between.events, *following]
    assert kernel_table(events) == kernel_table(alone)
    assert broken_down(pieces.traced_work(PackedTrace(events))) == broken_down(pieces.traced_work(PackedTrace(alone)))


def test_a_phase_hidden_by_another_stream_has_no_own_time() -> None:
    trace = Trace()
    trace.range("ProfilerStep#1", 0, 100)
    trace.range("phase: backward", 0, 30)
    trace.work(ALL_REDUCE, 10, 20, 90, 1, stream=20)
    trace.range("phase: optimizer", 30, 100)
    trace.work(ADAM, 40, 50, 80, 2)
    table = kernel_table(trace.events)
    optimizer = table.phases["optimizer"]
    assert (us(optimizer.busy_s), us(optimizer.idle_s), us(optimizer.overlap_s)) == (0, 0, 30)
    assert sum(us(phase.busy_s + phase.idle_s) for phase in table.phases.values()) == us(table.window_s) == 100
    assert kernel_answers(table)


def test_without_a_device_operators_count_without_their_children() -> None:
    trace = Trace()
    trace.range("ProfilerStep#1", 0, 100)
    trace.range("phase: forward", 10, 50)
    trace.range("module: head (Linear)", 12, 42)
    trace.operator("aten::linear", 14, 40)  # own 26 - 20 = 6
    trace.operator("aten::mm", 16, 36)
    trace.range("phase: backward", 50, 90)
    engine = "autograd::engine::evaluate_function: MmBackward0"
    trace.operator(engine, 52, 88, AUTOGRAD)  # own 36 - 32 = 4
    trace.operator("MmBackward0", 54, 86, AUTOGRAD)  # own 32 - 24 = 8
    trace.link(1, 16, 54)
    # Recomputed inside the backward pass, in its module's range again: 24 that are not the caller's.
    recomputed = Trace()
    recomputed.range("module: norm (RMSNorm)", 56, 82)
    recomputed.operator("aten::mul", 57, 81)
    trace.events += [{**event, "tid": AUTOGRAD} for event in recomputed.events]
    trace.operator("aten::fill_", 60, 70, MAIN)  # beside it, in another thread

    table = kernel_table(trace.events)
    assert (table.source, table.memory_bound_share, table.communication_share) == ("operators", None, None)
    assert {row.name: us(row.total_s) for row in table.rows} == {
        "aten::linear": 6, "aten::mm": 20, engine: 4, "MmBackward0": 8, "aten::mul": 24, "aten::fill_": 10,
    }  # fmt: skip
    assert {row.name: row.operator for row in table.rows if row.operator} == {
        "aten::mm": "aten::linear", "MmBackward0": engine, "aten::mul": "MmBackward0",
    }  # fmt: skip
    assert {row.name: row.module for row in table.rows if row.module} == {
        "aten::linear": "head", "aten::mm": "head", "MmBackward0": "head", "aten::mul": "norm",
    }  # fmt: skip
    assert {name: us(phase.busy_s) for name, phase in table.phases.items()} == {
        "forward": 26, "backward": 36, "other": 0,
    }  # fmt: skip
    assert {name: us(phase.idle_s) for name, phase in table.phases.items()} == {
        "forward": 14, "backward": 4, "other": 20,
    }  # fmt: skip
    assert us(table.phases["backward"].overlap_s) == 10


def test_an_operator_that_calls_its_own_overload_counts_once() -> None:
    trace = Trace()
    trace.range("ProfilerStep#1", 0, 100)
    trace.operator("aten::mean", 10, 50)
    trace.operator("aten::sum", 12, 48)
    trace.operator("aten::sum", 20, 40)
    rows = {row.name: row for row in kernel_table(trace.events).rows}
    outer, inner = rows["aten::mean"], rows["aten::sum"]
    assert (outer.count, us(outer.total_s), outer.operator) == (1, 40 - 36, None)
    assert (inner.count, us(inner.total_s), inner.operator) == (1, 36, "aten::mean")
