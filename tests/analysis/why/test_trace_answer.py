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


def test_a_collective_is_exposed_where_no_product_hides_it(tmp_path: Path) -> None:
    """It takes 30 us, the first 10 beside a product."""
    communication = trace_answer(trace_of(tmp_path, cuda_step(all_reduce_us=30))).communication
    assert communication.total_s == pytest.approx(30 * US)
    assert communication.exposed_s == pytest.approx((30 - 10) * US)


@pytest.mark.parametrize("sizes, total", [([1000, 2000], 3000), ([1000, 2000, None], None)])
def test_bytes_of_copies_add_up_if_all_are_known(tmp_path: Path, sizes: list[int | None], total: int | None) -> None:
    trace = Trace()
    trace.range("ProfilerStep#1", 0, 100)
    for number, size in enumerate(sizes, 1):
        start = 10 * number
        trace.work("Memcpy DtoH", start, start + 1, start + 3, number, cat="gpu_memcpy")
        copy = trace.events[-2]
        if size is not None:
            copy["args"]["bytes"] = size
    (copies,) = trace_answer(trace_of(tmp_path, trace.events)).copies
    assert copies.count == len(sizes)
    assert copies.bytes == total
    assert copies.total_s == pytest.approx(2 * US * len(sizes))


def events_of_launches(launch_us: float, kernel_us: float, count: int = 60) -> tuple[list[dict[str, Any]], float]:
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
    """The verdict changes at 5 and at 20 % of waiting, so it is not compared near them."""
    draw = random.Random(5)
    for _ in range(40):
        events, waiting_share = events_of_launches(launch_us=draw.uniform(3, 40), kernel_us=draw.uniform(1, 80))
        trace = trace_of(tmp_path, events)
        launches = trace_answer(trace).launches
        window_s = kernel_table(trace.work).window_s
        assert launches.launching_s / window_s == pytest.approx(waiting_share, abs=1e-3)
        if abs(waiting_share - 0.2) > 0.01 and abs(waiting_share - 0.05) > 0.01:
            assert launches.verdict == launch_verdict(waiting_share)


def product_and_sum() -> list[dict[str, Any]]:
    """A step of 1000 us: a product of 4096 x 4096 matrices in bfloat16, and a sum of two vectors of 10^7 float32."""
    trace = Trace()
    trace.range("ProfilerStep#1", 0, 1000)
    matrices = {"Input Dims": [[4096, 4096], [4096, 4096]], "Input type": ["c10::BFloat16", "c10::BFloat16"]}
    trace.operator("aten::mm", 1, 10, **matrices)
    trace.work(GEMM, 2, 20, 420, 1)
    vectors = {"Input Dims": [[10**7], [10**7], []], "Input type": ["float", "float", "Scalar"]}
    trace.operator("aten::add", 12, 20, **vectors)
    trace.work("vectorized_elementwise_kernel", 13, 420, 520, 2)
    return trace.events


H100 = {"deviceProperties": [{"id": 0, "name": "NVIDIA H100 80GB HBM3"}]}


def test_the_floor_is_that_of_the_traced_device(tmp_path: Path) -> None:
    """The sum moves two vectors in and one out."""
    answer = trace_answer(trace_of(tmp_path, product_and_sum(), **H100))
    assert answer.floor.products_s == pytest.approx(2 * 4096**3 / 989.4e12)
    assert answer.floor.memory_s == pytest.approx(3 * 4 * 10**7 / 3.35e12)
    assert sum(term.seconds for term in answer.waterfall.terms) == pytest.approx(1000 * US)


def test_the_floor_is_that_of_the_requested_device(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, product_and_sum(), **H100)
    answer = trace_answer(trace, "NVIDIA B200")
    assert answer.floor.products_s == pytest.approx(2 * 4096**3 / 2250e12)
    assert answer.waterfall is None  # the step was not traced on it
    unknown = trace_answer(trace, "my own")
    assert unknown.floor is None
    assert any("'my own'" in note for note in unknown.notes)


def difference_s(differences: Sequence[TimeDifference]) -> float:
    return sum(difference.b_s - difference.a_s for difference in differences)


def work_per_step_s(trace: AnyTrace) -> float:
    return sum(piece.own_ns for piece in trace.work.pieces) * 1e-9 / len(trace.work.packed.steps)


def test_the_differences_of_two_traces_add_up(tmp_path: Path) -> None:
    """Trace B has two steps, of whose kernels a tenth is missing."""
    draw = random.Random(6)
    for _ in range(20):
        step_of_a = cuda_step(all_reduce_us=draw.uniform(5, 60), adam_us=draw.uniform(5, 60))
        steps_of_b = [*cuda_step(all_reduce_us=draw.uniform(5, 60)), *cuda_step(number=2, origin=500)]
        steps_of_b = [event for event in steps_of_b if event["cat"] != "kernel" or draw.random() < 0.9]
        trace_a, trace_b = trace_of(tmp_path, step_of_a, "a"), trace_of(tmp_path, steps_of_b, "b")
        comparison = compare_traces(trace_a, trace_b)
        assert difference_s(comparison.kinds) == pytest.approx(comparison.b.step_s - comparison.a.step_s)
        difference_of_work_s = work_per_step_s(trace_b) - work_per_step_s(trace_a)
        assert difference_s(comparison.kernels) == pytest.approx(difference_of_work_s)
        assert difference_s(comparison.operators) == pytest.approx(difference_of_work_s)


def trace_of_kernels(folder: Path, name: str, **lengths_us: float) -> AnyTrace:
    trace = Trace()
    trace.range("ProfilerStep#1", 0, 300)
    start = 10.0
    for number, (kernel, length_us) in enumerate(lengths_us.items()):
        trace.work(kernel, start - 2, start, start + length_us, number + 1)
        start += length_us
    return trace_of(folder, trace.events, name)


def test_kernels_that_came_went_or_changed_are_named(tmp_path: Path) -> None:
    a = trace_of_kernels(tmp_path, "a", gemm_old=50, relu_kernel=10, gelu=30)
    b = trace_of_kernels(tmp_path, "b", gemm_new=40, relu_kernel=20, gelu=30.1)
    changes = {difference.name: difference.change for difference in compare_traces(a, b).kernels}
    assert changes == {"gemm_old": "went", "gemm_new": "came", "relu_kernel": "slower", "gelu": "same"}


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
    """Of three ranks, which compute for 100 to 150 us, rank 1 takes 200 more in each of ten steps: both wait for it.

    A step ends for all of them 30 us after the last one has computed.
    """
    draw = random.Random(7)
    compute_us = [[100 + draw.uniform(0, 50) for _ in range(10)] for _ in range(3)]
    compute_us[1] = [us + 200 for us in compute_us[1]]
    ends_us, now = [], 0.0
    for of_step in zip(*compute_us, strict=True):
        now += max(of_step) + 30
        ends_us.append(now)
    traces = []
    for rank in range(3):
        events = rank_events(compute_us[rank], ends_us, clock_us=draw.uniform(0, 1e6))
        info = {"rank": rank, "world_size": 3}
        traces.append(trace_of(tmp_path, events, f"rank{rank}", distributedInfo=info))
    assert are_ranks(traces)
    answer = compare_ranks(traces)
    assert (answer.matched, answer.unmatched) == (10, 0)
    assert {(wait.rank, wait.last_rank) for wait in answer.waits} == {(0, 1), (2, 1)}
    rank_0, rank_1, rank_2 = answer.ranks
    for number, rank in ((0, rank_0), (2, rank_2)):
        waits_us = [slow - fast for slow, fast in zip(compute_us[1], compute_us[number], strict=True)]
        assert rank.waited_s == pytest.approx(sum(waits_us) / 10 * US, abs=2e-9)
        assert rank.caused_s == 0
    assert rank_1.waited_s == 0
    assert rank_1.caused_s == pytest.approx((rank_0.waited_s + rank_2.waited_s) / 2)


def test_broadcasts_are_counted_and_not_compared(tmp_path: Path) -> None:
    traces = []
    for rank, length_us in enumerate((5, 50)):
        trace = Trace()
        trace.range("ProfilerStep#1", 0, 100)
        trace.work("ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 5, 10, 10 + length_us, 1)
        traces.append(trace_of(tmp_path, trace.events, f"rank{rank}"))
    answer = compare_ranks(traces)
    assert (answer.matched, answer.waits) == (0, [])
    assert answer.ranks[1].communication_s == pytest.approx(50 * US)


def test_calls_that_other_ranks_lack_are_counted_and_not_compared(tmp_path: Path) -> None:
    two_steps = rank_events([100, 100], [200, 400], clock_us=0)
    one_step = rank_events([150], [200], clock_us=5)
    answer = compare_ranks([trace_of(tmp_path, two_steps, "a"), trace_of(tmp_path, one_step, "b")])
    assert (answer.matched, answer.unmatched) == (1, 1)
    assert any("different numbers of steps" in note for note in answer.notes)
