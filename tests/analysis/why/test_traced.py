"""Gaps of a device, and what the host did in each: planted, in microseconds."""

from cuda_trace import GEMM, MAIN, Trace

from lm_profiler.analysis.trace.packed_trace import PackedTrace
from lm_profiler.analysis.trace.pieces import traced_work
from lm_profiler.analysis.why.traced import QUEUED, broken_down


def test_each_gap_has_the_activity_of_the_host() -> None:
    trace = Trace()
    trace.range("ProfilerStep#1", 0, 1000)
    trace.range("phase: forward", 0, 600)
    trace.operator("aten::mm", 80, 95)
    trace.work(GEMM, 90, 100, 200, 1)
    # The host was ahead: the next kernel waited for nobody, and began 5 later.
    trace.operator("aten::mm", 110, 125)
    trace.work(GEMM, 120, 205, 300, 2)
    # It asked for memory during most of the gap.
    trace.operator("aten::empty", 310, 395)
    trace.complete("cuda_runtime", "cudaMalloc", 315, 390, MAIN, correlation=3)
    trace.operator("aten::mm", 395, 399)
    trace.work(GEMM, 396, 400, 500, 4)
    # It waited for the device, and then was in Python for a while.
    trace.operator("aten::item", 420, 505)
    trace.complete("cuda_runtime", "cudaStreamSynchronize", 425, 503, MAIN, correlation=5)
    trace.range("phase: optimizer", 600, 1000)
    trace.operator("aten::add_", 640, 655)
    trace.work(GEMM, 645, 650, 900, 6)
    gaps = broken_down(traced_work(PackedTrace(trace.events))).gaps
    assert {(gap.phase, gap.what.partition(" in aten::")[0]): gap.ns for gap in gaps} == {
        ("forward", "launching aten::mm"): 100_000,
        ("forward", QUEUED): 5_000,
        ("forward", "in cudaMalloc"): 100_000,
        ("optimizer", "after cudaStreamSynchronize"): 150_000,
        ("optimizer", "the loop"): 100_000,
    }
    assert {gap.what.rpartition(" in ")[2] for gap in gaps} >= {"aten::empty", "aten::item"}
