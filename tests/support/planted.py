"""Steps of a CUDA device in which every term of the waterfall was planted, in microseconds; peaks are round."""

from typing import Any

from cuda_trace import ALL_REDUCE, MAIN, Event, Trace

PEAK, BANDWIDTH = 1e15, 1e12
SIDE, ELEMENTS = 4096, 50_000_000
PRODUCT_US = 2 * SIDE**3 / PEAK * 1e6
"""At the peak, 137 microseconds."""
ADDED_US = 3 * 4 * ELEMENTS / BANDWIDTH * 1e6
"""Two operands read and a result written, at the bandwidth: 600 microseconds."""

GEMM = "sm80_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x256x64_stage3_warpsize2x4x1_execute_kernel__5x_cublas"
ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float> >(int)"

PRODUCTS, PRODUCT_TOOK, ADD_TOOK, HIDDEN, COPY, REDUCED, EXPOSED = 10, 300.0, 1000.0, 200.0, 100.0, 700.0, 200.0
REPLAYED = 3 * 50.0
WAIT, LATE = 300.0, 400.0
"""Gaps of the step that was not traced: for the batch, and for the host."""
STRETCHED = 2.0
"""How much longer gaps are in the trace."""
BUSY = PRODUCTS * PRODUCT_TOOK + 2 * ADD_TOOK - HIDDEN + REPLAYED + EXPOSED + COPY
STEP = BUSY + WAIT + LATE


def matrices(side: int = SIDE, type_: str = "c10::BFloat16") -> dict[str, Any]:
    """What an ``aten::mm`` of square matrices was given."""
    strides = [[side, 1], [side, 1]]
    return {"Input Dims": [[side, side]] * 2, "Input type": [type_] * 2, "Input Strides": strides}


def numbers(elements: int = ELEMENTS) -> dict[str, Any]:
    """What an ``aten::add`` of two vectors was given."""
    dims = {"Input Dims": [[elements], [elements], []], "Input type": ["float", "float", "Scalar"]}
    return {**dims, "Input Strides": [[1], [1], []]}


def planted_step(number: int = 1, origin: float = 0.0) -> tuple[list[Event], float]:
    """The events of one traced step, and how long it lasts."""
    trace = Trace(origin)
    first = number * 1000
    wait, late = STRETCHED * WAIT, STRETCHED * LATE
    at = wait  # of the device
    trace.range("phase: data", 0, wait - 20)
    trace.range("phase: transfer", wait - 20, wait + 5)
    trace.operator("aten::copy_", wait - 10, wait + 1)
    copied = "Memcpy HtoD (Pageable -> Device)"
    trace.work(copied, wait - 5, at, at + COPY, first, cat="gpu_memcpy", by="cudaMemcpyAsync")

    trace.range("phase: forward", wait + 5, wait + 2000)
    trace.range("module: model.blocks.0.attention (SelfAttention)", wait + 5.5, wait + 90)
    at += COPY
    for n in range(PRODUCTS):
        called, start = wait + 6 + 8 * n, at + n * PRODUCT_TOOK
        trace.operator("aten::mm", called, called + 5, **matrices())
        trace.work(GEMM, called + 1, start, start + PRODUCT_TOOK, first + 1 + n)
    # A second stream: hidden by the last product, then by itself.
    trace.operator("aten::add", at + 200, at + 210, **numbers())
    end = at + PRODUCTS * PRODUCT_TOOK
    trace.work(ADD, at + 204, end - HIDDEN, end - HIDDEN + ADD_TOOK, first + 20, stream=11)
    # Communication: all but its end is hidden.
    end += ADD_TOOK - HIDDEN
    trace.operator("c10d::allreduce_", at + 300, at + 310)
    trace.work(ALL_REDUCE, at + 305, end - REDUCED + EXPOSED, end + EXPOSED, first + 21, stream=20)
    end += EXPOSED
    # The host waited for the device, and was late.
    trace.complete("cuda_runtime", "cudaStreamSynchronize", at + 400, end + 1, MAIN, correlation=first + 22)
    begin = end + late
    trace.range("phase: optimizer", end + 2, begin + 50)
    trace.operator("aten::add", begin - 20, begin + 1, **numbers())
    trace.work(ADD, begin - 5, begin, begin + ADD_TOOK, first + 23)
    # A CUDA graph: one launch, three kernels, two of them on streams of their own, one after the other.
    graph = begin + ADD_TOOK
    trace.complete("cuda_runtime", "cudaGraphLaunch", begin + 10, begin + 15, MAIN, correlation=first + 24)
    for n in range(3):
        start = graph + 50.0 * n
        args = {"device": 0, "context": 1, "stream": 30 + n, "correlation": first + 24}
        trace.complete("kernel", f"triton_poi_fused_add_{n}", start, start + 50.0, 30 + n, **args)
    end = graph + REPLAYED
    trace.range(f"ProfilerStep#{number}", 0, end)
    return trace.events, end


def planted(steps: int = 2) -> list[Event]:
    """Several such steps, one after the other."""
    events, origin = [], 0.0
    for number in range(1, steps + 1):
        more, length = planted_step(number, origin)
        events += more
        origin += length
    return events
