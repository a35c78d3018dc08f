"""What else used the machine, in words."""

from __future__ import annotations

from lm_profiler.record.run import SHARED, Contention, GpuSharing

_MUCH = 0.10  # of what the CPUs could do: it costs caches, memory bandwidth and clock where nobody had to wait


def contention_lines(contention: Contention | None) -> list[str]:
    """Return what took CPU time or the GPU from the run, a phrase each; none where nothing did, or nobody knows."""
    if contention is None:
        return []
    said, whole_s = [], contention.wall_s * contention.cpus
    if (contention.not_had or 0.0) >= SHARED:
        said.append(
            f"shared machine, times are upper bounds: other processes took {contention.not_had:.0%} of the CPU time "
            "that this run needed"
        )
    elif (contention.others_s or 0.0) >= _MUCH * whole_s:
        said.append(f"something else used {(contention.others_s or 0.0) / whole_s:.0%} of this machine's CPU time")
    if (contention.throttled_s or 0.0) >= SHARED * contention.had_s > 0.0:
        said.append(f"the CPU limit of its cgroup throttled this run for {contention.throttled_s:.1f} s")
    return said + ([] if contention.gpu is None or not contention.gpu.processes else [_on_gpu(contention.gpu)])


def _on_gpu(gpu: GpuSharing) -> str:
    others = "1 other process" if gpu.processes == 1 else f"{gpu.processes} other processes"
    used = "unknown use" if gpu.utilisation is None else f"{gpu.utilisation:.0%}"
    held = "unknown memory" if gpu.memory_bytes is None else f"{gpu.memory_bytes * 2**-30:.1f} GiB"
    return f"{others} on this GPU: {used} of its time, {held}"
