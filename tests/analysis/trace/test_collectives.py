"""Communication of made-up traces, whose overlap is known to the nanosecond."""

from typing import Any

import pytest

from lm_profiler.analysis.ranks.ranks_summary import communication_figures
from lm_profiler.analysis.trace.kernel_sums import collective_calls, communication_of
from lm_profiler.analysis.trace.packed_trace import PackedTrace
from lm_profiler.analysis.trace.pieces import TracedWork, traced_work
from lm_profiler.analysis.why.traced import broken_down


def event(name: str, category: str, start_us: float, end_us: float, thread: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "ph": "X", "name": name, "cat": category, "ts": start_us, "dur": end_us - start_us, "pid": 1, "tid": thread,
        **more,
    }  # fmt: skip


def work_with(*events: dict[str, Any]) -> TracedWork:
    """A step of 1,000 µs with ``events``; its backward lasts from 100 to 900, with a product until 500."""
    step = event("ProfilerStep#1", "user_annotation", 0, 1000)
    backward = event("phase: backward", "user_annotation", 100, 900)
    product = event("aten::mm", "cpu_op", 100, 500)
    return traced_work(PackedTrace([step, backward, product, *events]))


def test_communication_beside_compute_is_hidden() -> None:
    """Two all-reduces from 300 to 600 and from 550 to 800, a broadcast of 10; until 500 there is a product."""
    work = work_with(
        event("c10d::allreduce_", "cpu_op", 300, 302),  # the call itself computes nothing
        event("gloo:all_reduce", "user_annotation", 300, 600, thread=2),
        event("gloo:all_reduce", "user_annotation", 550, 800, thread=3),
        event("gloo:broadcast", "user_annotation", 950, 960, thread=2),
    )
    communication = communication_of(work)
    assert communication.steps == 1
    assert communication.ns == (800 - 300 + 10) * 1000
    assert communication.exposed_ns == (800 - 500 + 10) * 1000
    all_reduces, broadcasts = communication.by_name
    assert all_reduces == ("all_reduce", 2, (300 + 250) * 1000, (100 + 250) * 1000)
    assert broadcasts == ("broadcast", 1, 10_000, 10_000)


def test_kernels_of_one_device_hide_each_other() -> None:
    """The first 100 us of the all-gather are beside a product."""
    work = work_with(
        event("cudaLaunchKernel", "cuda_runtime", 100, 101, args={"correlation": 1}),
        event("cudaLaunchKernel", "cuda_runtime", 102, 103, args={"correlation": 2}),
        event("ampere_sgemm_128x64_nn", "kernel", 200, 400, thread=7, args={"correlation": 1}),
        event("ncclDevKernel_AllGather_RING_LL", "kernel", 300, 700, thread=8, args={"correlation": 2}),
    )
    (all_gather,) = communication_of(work).by_name
    assert all_gather == ("all_gather", 1, 400_000, 400_000 - 100_000)


def test_an_all_gather_has_the_name_of_the_module_that_fsdp2_gathers() -> None:
    work = work_with(
        event("FSDP::all_gather", "user_annotation", 500, 600),
        event("gloo:_all_gather_base", "user_annotation", 510, 590, thread=2),
        event("FSDP::all_gather (blocks.0)", "user_annotation", 600, 700),
        event("gloo:_all_gather_base", "user_annotation", 610, 690, thread=2),
        event("FSDP::all_gather_copy_out (blocks.1)", "user_annotation", 700, 800),
        event("gloo:_all_gather_base", "user_annotation", 710, 790, thread=2),
    )
    of_modules = [call.name.removeprefix("all_gather") for call in collective_calls(work)]
    assert of_modules == [" of the root", " of blocks.0", ""]


def test_collectives_are_recorded_in_seconds_per_step() -> None:
    assert communication_figures(broken_down(work_with())) == {}
    assert communication_figures(None) == {}
    work = work_with(event("gloo:all_reduce", "user_annotation", 400, 600, thread=2))
    figures = communication_figures(broken_down(work))
    assert figures["communication_s"] == pytest.approx(200e-6)
    assert figures["exposed_communication_s"] == pytest.approx(100e-6)
    assert figures["communication_share"] == pytest.approx(200 / 1000)
    [row] = figures["collectives"]
    assert (row.name, row.calls, row.seconds) == ("all_reduce", 1.0, pytest.approx(200e-6))
