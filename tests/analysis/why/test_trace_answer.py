"""Answers about traces: against figures reckoned by hand, planted queues and waits, and sums that must add up."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from cuda_trace import ALL_REDUCE, GEMM, Trace, cuda_step

from lm_profiler.analysis.trace.any_trace import AnyTrace, read_any_trace
from lm_profiler.analysis.trace.kernel_sums import kernel_table
from lm_profiler.analysis.why.trace_answer import launch_verdict, trace_answer
from lm_profiler.analysis.why.trace_comparison import compare_traces
from lm_profiler.analysis.why.trace_ranks import are_ranks, compare_ranks
from lm_profiler.record.trace_answer import TimeDifference

US = 1e-6


def trace_of(folder: Path, events: Sequence[Any], name: str = "trace", **header: Any) -> AnyTrace:
    path = folder / f"{name}.json"
    path.write_text(json.dumps({**header, "traceEvents": list(events)}))
    return read_any_trace(path)


def test_collectives_and_copied_bytes_of_a_trace(tmp_path: Path) -> None:
    communication = trace_answer(trace_of(tmp_path, cuda_step())).communication
    assert communication.total_s == pytest.approx(30 * US)
    assert communication.exposed_s == pytest.approx(20 * US)  # the first 10 are beside a product
    trace = Trace()
    trace.range("ProfilerStep#1", 0, 100)
    for number in (1, 2):
        trace.work("Memcpy DtoH", 10 * number, 10 * number + 1, 10 * number + 3, number, cat="gpu_memcpy")
        trace.events[-2]["args"]["bytes"] = 1000 * number
    (copy,) = trace_answer(trace_of(tmp_path, trace.events)).copies
    assert (copy.count, copy.bytes, round(copy.total_s / US, 3)) == (2, 3000, 4)
    trace.work("Memcpy DtoH", 40, 41, 43, 3, cat="gpu_memcpy")
    (copy,) = trace_answer(trace_of(tmp_path, trace.events)).copies
    assert copy.bytes is None


def queued(launch_us: float, kernel_us: float, count: int = 60) -> tuple[list[dict[str, Any]], float]:
    """A host that launches one kernel after the other, and the share of the time that the device waits for it."""
    trace = Trace()
    device_free, waiting = 0.0, 0.0
    for number in range(count):
        launched = launch_us * (number + 1)
        trace.operator("aten::mul", launched - 1, launched + 1)
        start = max(device_free, launched + 1)
        waiting += start - device_free
        trace.work("vectorized_elementwise_kernel", launched, start, start + kernel_us, number + 1)
        device_free = start + kernel_us
    trace.range("ProfilerStep#1", 0, device_free)
    return trace.events, waiting / device_free


def test_kernels_that_wait_for_launches_are_launch_bound(tmp_path: Path) -> None:
    draw = random.Random(5)
    for _ in range(40):
        launch_us, kernel_us = draw.uniform(3, 40), draw.uniform(1, 80)
        events, share = queued(launch_us, kernel_us)
        launches = trace_answer(trace_of(tmp_path, events)).launches
        window_s = kernel_table(trace_of(tmp_path, events).work).window_s
        assert launches.launching_s / window_s == pytest.approx(share, abs=1e-3)
        if abs(share - 0.2) > 0.01 and abs(share - 0.05) > 0.01:
            assert launches.verdict == launch_verdict(share)


def test_the_floor_is_that_of_the_requested_device(tmp_path: Path) -> None:
    trace = Trace()
    trace.range("ProfilerStep#1", 0, 1000)
    shapes = {"Input Dims": [[4096, 4096], [4096, 4096]], "Input type": ["c10::BFloat16", "c10::BFloat16"]}
    trace.operator("aten::mm", 1, 10, **shapes)
    trace.work(GEMM, 2, 20, 420, 1)
    adds = {"Input Dims": [[10**7], [10**7], []], "Input type": ["float", "float", "Scalar"]}
    trace.operator("aten::add", 12, 20, **adds)
    trace.work("vectorized_elementwise_kernel", 13, 420, 520, 2)
    header = {"deviceProperties": [{"id": 0, "name": "NVIDIA H100 80GB HBM3"}]}
    answer = trace_answer(trace_of(tmp_path, trace.events, **header))
    assert answer.floor.products_s == pytest.approx(2 * 4096**3 / 989.4e12)
    assert answer.floor.memory_s == pytest.approx(3 * 4 * 10**7 / 3.35e12)
    assert sum(term.seconds for term in answer.waterfall.terms) == pytest.approx(1000 * US)

    other = trace_answer(trace_of(tmp_path, trace.events, **header), "NVIDIA B200")
    assert other.floor.products_s == pytest.approx(2 * 4096**3 / 2250e12)
    assert other.waterfall is None  # the step was not traced on it
    unknown = trace_answer(trace_of(tmp_path, trace.events, **header), "my own")
    assert unknown.floor is None
    assert any("'my own'" in note for note in unknown.notes)


def difference_s(differences: Sequence[TimeDifference]) -> float:
    return sum(difference.b_s - difference.a_s for difference in differences)


def test_the_differences_of_two_traces_add_up(tmp_path: Path) -> None:
    draw = random.Random(6)
    for _ in range(20):
        a = cuda_step(all_reduce_us=draw.uniform(5, 60), adam_us=draw.uniform(5, 60))
        b = [*cuda_step(all_reduce_us=draw.uniform(5, 60)), *cuda_step(number=2, origin=500)]
        b = [event for event in b if event["cat"] != "kernel" or draw.random() < 0.9]
        trace_a, trace_b = trace_of(tmp_path, a, "a"), trace_of(tmp_path, b, "b")
        comparison = compare_traces(trace_a, trace_b)
        assert difference_s(comparison.kinds) == pytest.approx(comparison.b.step_s - comparison.a.step_s)
        work_s = []
        for trace in (trace_a, trace_b):
            work_s.append(sum(piece.own_ns for piece in trace.work.pieces) * 1e-9 / len(trace.work.packed.steps))
        for differences in (comparison.kernels, comparison.operators):
            assert difference_s(differences) == pytest.approx(work_s[1] - work_s[0])
    a, b = Trace(), Trace()
    for trace, kernels in ((a, {"gemm_old": 50, "relu_kernel": 10, "gelu": 30}), (b, {"gemm_new": 40, "relu_kernel": 20,
                                                                                    "gelu": 30.1})):  # fmt: skip
        trace.range("ProfilerStep#1", 0, 300)
        start = 10.0
        for number, (name, length) in enumerate(kernels.items()):
            trace.work(name, start - 2, start, start + length, number + 1)
            start += length
    comparison = compare_traces(trace_of(tmp_path, a.events, "a"), trace_of(tmp_path, b.events, "b"))
    assert {difference.name: difference.change for difference in comparison.kernels} == {
        "gemm_old": "went",
        "gemm_new": "came",
        "relu_kernel": "slower",
        "gelu": "same",
    }


def rank_events(compute_us: Sequence[float], end_us: Sequence[float], clock_us: float) -> list[dict[str, Any]]:
    """A rank that computes and then all-reduces until a common end, by a clock of its own."""
    trace = Trace(origin=clock_us)
    begin = 0.0
    for number, (compute, end) in enumerate(zip(compute_us, end_us, strict=True)):
        trace.range(f"ProfilerStep#{number}", begin, end)
        trace.work(GEMM, begin + 1, begin + 2, begin + compute, 2 * number + 1)
        trace.work(ALL_REDUCE, begin + 3, begin + compute, end, 2 * number + 2, stream=20)
        trace.events[-2]["args"]["Process Group Name"] = "0"
        begin = end
    return trace.events


def test_planted_waiting_between_ranks_is_found(tmp_path: Path) -> None:
    draw = random.Random(7)
    compute_us = [[100 + draw.uniform(0, 50) for _ in range(10)] for _ in range(3)]
    for step in range(10):
        compute_us[1][step] += 200  # rank 1 is always the last
    ends, reached = [], 0.0
    for step in range(10):
        reached += max(times[step] for times in compute_us) + 30
        ends.append(reached)
    traces = []
    for rank, times in enumerate(compute_us):
        begins = [0.0, *ends[:-1]]
        in_step = [time for time, _ in zip(times, begins, strict=True)]
        events = rank_events(in_step, ends, clock_us=draw.uniform(0, 1e6))
        info = {"rank": rank, "world_size": 3}
        traces.append(trace_of(tmp_path, events, f"rank{rank}", distributedInfo=info))
    assert are_ranks(traces)
    answer = compare_ranks(traces)
    assert (answer.matched, answer.unmatched) == (10, 0)
    assert {(wait.rank, wait.last_rank) for wait in answer.waits} == {(0, 1), (2, 1)}
    for rank in (0, 2):
        truth_us = sum(slow - fast for slow, fast in zip(compute_us[1], compute_us[rank], strict=True)) / 10
        assert answer.ranks[rank].waited_s == pytest.approx(truth_us * US, abs=2e-9)
        assert answer.ranks[rank].caused_s == 0
    assert answer.ranks[1].waited_s == 0
    assert answer.ranks[1].caused_s == pytest.approx((answer.ranks[0].waited_s + answer.ranks[2].waited_s) / 2)


def test_collectives_that_cannot_be_compared_are_counted(tmp_path: Path) -> None:
    traces = []
    for rank, length in enumerate((5, 50)):
        trace = Trace()
        trace.range("ProfilerStep#1", 0, 100)
        trace.work("ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 5, 10, 10 + length, 1)
        traces.append(trace_of(tmp_path, trace.events, f"rank{rank}"))
    answer = compare_ranks(traces)
    assert (answer.matched, answer.waits) == (0, [])
    assert answer.ranks[1].communication_s == pytest.approx(50 * US)
    # Calls that other ranks lack are counted and not compared.
    events = rank_events([100, 100], [200, 400], clock_us=0)
    shorter = rank_events([150], [200], clock_us=5)
    answer = compare_ranks([trace_of(tmp_path, events, "a"), trace_of(tmp_path, shorter, "b")])
    assert (answer.matched, answer.unmatched) == (1, 1)
    assert any("different numbers of steps" in note for note in answer.notes)
