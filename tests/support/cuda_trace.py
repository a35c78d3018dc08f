"""A step on a CUDA device as the PyTorch profiler writes it, small enough to be reckoned by hand.

Names, categories and arguments are those of real traces. Times of the device, in microseconds of the step:

    14-18 the batch's copy; 30-50, 50-60 and 60-80 the forward pass; 90-110 a gradient's matrix product;
    100-130 its all-reduce on another stream; then the optimizer, after a gap of 10, and a memset; 8 more to the end.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from lm_profiler.analysis.trace import kernel_sums
from lm_profiler.analysis.trace.packed_trace import PackedTrace
from lm_profiler.analysis.trace.pieces import traced_work
from lm_profiler.record.kernels import KernelTable

Event = dict[str, Any]

PROCESS, MAIN, AUTOGRAD = 514683, 514683, 514999
GEMM = "nvjet_tst_192x192_64x3_2x1_v_bz_coopB_NTN"
FLASH = (
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4, false, false, cutlass::bfloat16_t, "
    "Flash_kernel_traits<64, 128, 128, 4, cutlass::bfloat16_t> >, false, true, false, false, false, true, false, "
    "false>(pytorch_flash::Flash_fwd_params)"
)
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
ADAM = (
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
    "FusedOptimizerTensorListMetadata<4>, at::native::(anonymous namespace)::FusedAdamMathFunctor<float, 4, "
    "(at::native::ADAM_MODE)1, false>, float const*, double, double, double, double, double, bool, float*, float*, "
    "(at::native::ADAM_MODE)1>(...)"
)
_EPOCH = 88511388202.755  # microseconds: what Kineto's clock reads


class Trace:
    """Collects events; ``origin`` is where its times count from."""

    def __init__(self, origin: float = 0.0) -> None:
        self.events: list[Event] = []
        self.origin = origin

    def complete(self, cat: str, name: str, start: float, end: float, tid: int | str, **args: Any) -> None:
        ts, dur = round(_EPOCH + self.origin + start, 3), round(end - start, 3)
        pid = 0 if cat in ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation") else PROCESS
        self.events.append(
            {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args}
        )

    def operator(self, name: str, start: float, end: float, tid: int = MAIN, **args: Any) -> None:
        self.complete("cpu_op", name, start, end, tid, **{"External id": len(self.events), **args})

    def range(self, name: str, start: float, end: float) -> None:
        self.complete("user_annotation", name, start, end, MAIN, **{"External id": len(self.events)})

    def link(self, number: int, forward: float, backward: float) -> None:
        """The profiler's own link of a forward operator to its backward one, by when they begin."""
        for ph, tid, start in (("s", MAIN, forward), ("f", AUTOGRAD, backward)):
            ts = round(_EPOCH + self.origin + start, 3)
            flow = {"ph": ph, "id": number, "pid": PROCESS, "tid": tid, "ts": ts, "cat": "fwdbwd", "name": "fwdbwd"}
            self.events.append(flow if ph == "s" else {**flow, "bp": "e"})

    def work(
        self,
        name: str,
        launched: float,
        start: float,
        end: float,
        correlation: int,
        tid: int = MAIN,
        stream: int = 7,
        cat: str = "kernel",
        by: str = "cudaLaunchKernel",
    ) -> None:
        """What runs on the device, the call that launched it, and the arrow between them."""
        api = "cuda_driver" if by.startswith("cu") and not by.startswith("cuda") else "cuda_runtime"
        self.complete(api, by, launched, launched + 0.5, tid, cbid=211, correlation=correlation)
        args = {"device": 0, "context": 1, "stream": stream, "correlation": correlation, "queued": 0}
        self.complete(cat, name, start, end, stream, **args)
        flow = {"cat": "ac2g", "name": "ac2g", "id": correlation, "pid": PROCESS, "tid": tid}
        self.events.append({"ph": "s", "ts": round(_EPOCH + self.origin + launched, 3), **flow})


def cuda_step(all_reduce_us: float = 30.0, adam_us: float = 20.0, number: int = 1, origin: float = 0.0) -> list[Event]:
    """One step, which begins at ``origin`` microseconds; with the default lengths it lasts 170."""
    trace = Trace(origin)
    first = number * 100  # correlations of a step
    reduced = 100 + all_reduce_us
    adam = reduced + 10
    end = adam + adam_us + 10
    trace.range(f"ProfilerStep#{number}", 0, end)
    trace.complete("gpu_user_annotation", f"ProfilerStep#{number}", 14, end - 8, 7)  # no work of its own

    trace.range("phase: data", 0, 10)
    trace.range("phase: transfer", 10, 20)
    trace.operator("aten::copy_", 11, 15)
    copy = "Memcpy HtoD (Pinned -> Device)"
    trace.work(copy, 12, 14, 18, first + 1, cat="gpu_memcpy", by="cudaMemcpyAsync", stream=13)

    trace.range("phase: forward", 20, 60)
    trace.complete("python_function", "train.py(12): forward", 20, 60, MAIN, **{"Python id": 1})
    trace.range("module: model.blocks.0.attention (SelfAttention)", 22, 40)
    trace.operator("aten::linear", 23, 27)
    trace.operator("aten::mm", 24, 26)
    trace.work(GEMM, 25, 30, 50, first + 2, by="cuLaunchKernelEx")
    trace.operator("aten::_flash_attention_forward", 30, 36)
    trace.work(FLASH, 32, 50, 60, first + 3)
    trace.range("module: model.blocks.1.attention (SelfAttention)", 42, 55)
    trace.operator("aten::mm", 44, 46)
    trace.work(GEMM, 45, 60, 80, first + 4, by="cuLaunchKernelEx")

    trace.range("phase: zero_grad", 60, 62)
    trace.range("phase: backward", 62, 100)
    trace.operator("autograd::engine::evaluate_function: MmBackward0", 65, 75, AUTOGRAD)
    trace.operator("MmBackward0", 66, 74, AUTOGRAD)
    trace.link(first, 24, 66)
    trace.operator("aten::mm", 67, 70, AUTOGRAD)
    trace.work(GEMM, 68, 90, 110, first + 5, AUTOGRAD, by="cuLaunchKernelEx")
    trace.operator("c10d::allreduce_", 79, 82, AUTOGRAD)
    trace.work(ALL_REDUCE, 80, 100, reduced, first + 6, AUTOGRAD, stream=20)

    trace.range("phase: optimizer", 110, 125)
    trace.operator("aten::_fused_adamw_", 112, 118)
    trace.work(ADAM, 114, adam, adam + adam_us, first + 7)
    memset = "Memset (Device)"
    trace.work(memset, 120, adam + adam_us, adam + adam_us + 2, first + 8, cat="gpu_memset", by="cudaMemsetAsync")
    return trace.events


def kernel_table(events: Iterable[Mapping[str, Any]]) -> KernelTable:
    """Of events in any order."""
    return kernel_sums.kernel_table(traced_work(PackedTrace(events)))
