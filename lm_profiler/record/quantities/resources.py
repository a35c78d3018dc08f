"""Figures of what a run used: the hardware's peak, memory, the GPU, the machine's CPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from lm_profiler.record.quantities.quantity import Place, Quantity, computed, figure
from lm_profiler.record.quantities.times import MEMORY, MFU, PARTS, per_step

if TYPE_CHECKING:
    from lm_profiler.record.run import RunRecord

_READINGS = {"allocated_peak": "allocated", "reserved_peak": "reserved", "resident_peak": "resident"}
_CAUSES = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer_states": "optimizer states",
    "buffers": "buffers",
    "activations_and_rest": "activations and rest",
}


def _added(after: str, before: str) -> Callable[[RunRecord], int | None]:
    """How much more is held at one moment of a step than at another."""

    def get(record: RunRecord) -> int | None:
        held = record.memory.held if record.memory is not None else None
        ends = None if held is None else (getattr(held, after), getattr(held, before))
        return None if ends is None or None in ends else ends[0] - ends[1]

    return get


def utilisation() -> Iterator[Quantity]:
    of = "utilisation."
    yield MFU
    yield per_step(figure(f"{of}hfu", "HFU", "%", "all executed FLOPs of a step / (its time x the device's peak)"))
    peak = "FLOP/s of one device on its datasheet, in the run's precision"
    yield figure(f"{of}peak_flops_per_s", "peak of a device", "TFLOP/s", peak)
    yield figure(f"{of}dtype", "dtype of the peak", "text", "precision that the peak is of", "peak_dtype")
    yield figure(f"{of}peak_source", "source of the peak", "text", "where the peak of a device is from")
    ceiling = "FLOP/s of one device in a large matrix product, measured after the run"
    yield figure(f"{of}ceiling_flops_per_s", "measured matmul rate", "TFLOP/s", ceiling)
    share = "executed FLOPs of a step / (its time x the device's measured matmul rate)"
    yield per_step(figure(f"{of}of_ceiling", "of the measured matmul rate", "%", share))
    for part in ("forward", "backward"):
        yield figure(
            f"{of}flops.{part}", f"{part} work", "GFLOP", f"FLOPs of a step's {part}, all ranks", f"{part}_flops"
        )
    again = "FLOPs of a step that activation checkpointing repeats, all ranks"
    yield figure(f"{of}flops.recomputation", "recomputed work", "GFLOP", again, "recomputation_flops")


def memory() -> Iterator[Quantity]:
    yield from MEMORY.values()
    moments = {"start": "forward begins", "forward": "forward has ended", "backward": "backward has ended"}
    yield computed(
        "saved_bytes", "saved for backward", "GiB", "bytes that forward leaves for backward", _added("forward", "start")
    )
    less = "what backward added: gradients, less what was saved for it"
    yield computed("backward_added_bytes", "added by backward", "GiB", less, _added("backward", "forward"))
    for moment, words in moments.items():
        meaning = f"bytes held when {words}"
        yield figure(f"memory.held.{moment}", f"held: {words}", "GiB", meaning, f"held_{moment}_bytes")
    how = "`allocator`: all tensors of the device; `counted`: parameters, gradients, states, buffers, saved tensors"
    yield figure("memory.held.source", "source of held", "text", how, "held_source")


def memory_by_phase() -> Iterator[Quantity]:
    for reading, words in _READINGS.items():
        for part in PARTS:
            path, name = f"memory.parts.{part}.{reading}", f"{part}_{reading}_bytes"
            title, meaning = f"{part}: peak {words}", f"peak {words} within {part}"
            yield figure(path, title, "GiB", meaning, name, of=part, place=Place.ASKED)


def memory_by_cause() -> Iterator[Quantity]:
    for cause, words in _CAUSES.items():
        for part in PARTS:
            path, name = f"memory.causes.{part}.{cause}", f"{part}_{cause}_bytes"
            title, meaning = f"{part}: {words}", f"{words} in the peak allocated of {part}"
            yield figure(path, title, "GiB", meaning, name, of=part, place=Place.ASKED)


def allocator() -> Iterator[Quantity]:
    sizes = {
        "allocated_peak": ("allocated", "most bytes held by tensors over the measured steps"),
        "active_peak": ("in use", "most bytes in use, blocks that wait for a stream included"),
        "reserved_peak": ("reserved", "most bytes taken from the device"),
        "inactive_split_peak": ("inactive split", "most bytes free in blocks that are partly in use"),
        "fragmentation": ("fragmentation", "upper bound of what was reserved but unused at the peak of use"),
        "driver_used": ("used on the device", "memory that all processes use, as the driver reports"),
    }
    for reading, (title, meaning) in sizes.items():
        yield figure(f"memory.allocator.{reading}", title, "GiB", meaning, f"allocator_{reading}_bytes")
    retries = "how often the allocator had to free its cache, since the process began"
    yield figure("memory.allocator.alloc_retries", "retries", "count", retries)
    yield figure("memory.allocator.ooms", "OOMs", "count", "how often memory ran out, since the process began")


def gpu() -> Iterator[Quantity]:
    of = "telemetry."
    cards = "cards of the run: energy and power are their sums, clocks the slowest's, the temperature the highest"
    yield computed(
        "gpus", "GPUs", "count", cards, lambda record: (record.telemetry and len(record.telemetry.gpus)) or None
    )
    yield figure(
        f"{of}energy_per_step_j",
        "energy per step",
        "J",
        "energy of the GPU over the measured steps, divided by their number",
    )
    yield figure(f"{of}energy_per_token_j", "energy per token", "J", "energy of a step / its tokens")
    yield figure(f"{of}energy_j", "energy", "J", "energy of the GPU over the measured steps")
    yield figure(f"{of}energy_source", "source of the energy", "text", "the GPU's own counter, or samples of its power")
    yield figure(f"{of}median_power_w", "power", "W", "median power of the GPU over the measured steps")
    yield figure(f"{of}power_limit_w", "power limit", "W", "most power that the GPU may draw")
    yield figure(f"{of}median_temperature_c", "temperature", "°C", "median temperature of the GPU")
    yield figure(f"{of}median_sm_clock_hz", "SM clock", "MHz", "median clock of the GPU's multiprocessors")
    yield figure(f"{of}max_sm_clock_hz", "highest SM clock", "MHz", "highest boost clock of the card")
    yield figure(f"{of}clock_share", "SM clock / highest", "%", "median SM clock over the card's highest")
    yield figure(f"{of}throttle_reasons", "throttled by", "text", "reasons that held in 5 % of the samples or more")
    yield figure(f"{of}samples", "samples", "count", "how often the GPU was read", "gpu_samples")
    yield figure(f"{of}duration_s", "sampled for", "s", "time that energy and samples span", "gpu_sampled_s")


def contention() -> Iterator[Quantity]:
    of = "contention."
    yield figure(f"{of}not_had", "CPU time taken", "%", "share of the CPU time the run needed that something else took")
    yield figure(f"{of}had_s", "CPU time of the run", "s", "CPU time of the run's own processes", "cpu_had_s")
    yield figure(f"{of}others_s", "CPU time of other processes", "s", "CPU time of all other processes", "cpu_others_s")
    yield figure(f"{of}stolen_s", "CPU time stolen", "s", "CPU time that a hypervisor took", "cpu_stolen_s")
    yield figure(
        f"{of}throttled_s",
        "CPU time throttled",
        "s",
        "CPU time that the cgroup's limit kept from the run",
        "cpu_throttled_s",
    )
    waited = "how long threads of the run were ready and had no CPU"
    yield figure(f"{of}waited_s", "waited for a CPU", "s", waited, "cpu_waited_s")
    pressure = "share of the time in which something waited for a CPU"
    yield figure(f"{of}pressure", "something waited for a CPU", "%", pressure, "cpu_pressure")
    switches = "how often this process lost a CPU that it still wanted"
    yield figure(f"{of}involuntary_switches", "involuntary switches", "count", switches)
    yield figure(f"{of}wall_s", "observed for", "s", "time that these figures span", "contention_wall_s")
    yield figure(f"{of}cpus", "CPUs", "count", "CPUs that the run may use")
    gpu = f"{of}gpu."
    yield figure(
        f"{gpu}processes", "other processes on the GPU", "count", "at the end of the measured steps", "gpu_others"
    )
    busy = "share of time in which kernels of other processes ran"
    yield figure(f"{gpu}utilisation", "GPU use of others", "%", busy, "gpu_others_utilisation")
    yield figure(
        f"{gpu}memory_bytes", "GPU memory of others", "GiB", "GPU memory of other processes", "gpu_others_bytes"
    )
