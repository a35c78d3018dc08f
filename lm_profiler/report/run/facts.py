"""What a record knows beside its times and its verdict: facts for people, grouped by what they are about."""

from __future__ import annotations

from collections.abc import Callable

from lm_profiler.record.quantities import MFU, TIMES, counted
from lm_profiler.record.run import RunRecord

Facts = list[tuple[str, str]]
"""What is told, and how much of it."""

_UNITS = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
_MOST_RANKS, _MOST_LINES = 16, 10


def facts(record: RunRecord) -> dict[str, Facts]:
    """Facts by what they are about; what the record does not know is left out, and so is a group without any."""
    groups: dict[str, Callable[[RunRecord], Facts]] = {
        "Steps": _steps,
        "Ranks": _ranks,
        "Who used the machine": _contention,
        "Use of the hardware": _utilisation,
        "The GPU while measuring": _telemetry,
        "The device's allocator": _allocator,
        "Lines that make the host wait for the device": _syncs,
    }
    return {title: found for title, of in groups.items() if (found := of(record))}


def bytes_text(count: float) -> str:
    """Bytes with three figures, in the largest unit of which they are at least a half."""
    unit, size = next(((unit, size) for unit, size in _UNITS if abs(count) >= size / 2), ("B", 1))
    shown = count / size
    digits = 0 if size == 1 or abs(shown) >= 99.95 else 1 if abs(shown) >= 9.995 else 2
    return f"{shown:,.{digits}f} {unit}"


def _steps(record: RunRecord) -> Facts:
    found: Facts = []
    if record.first_step_s is not None:
        found.append(("first step, compilation included", TIMES["step"].show(record.first_step_s)))
    if record.between_steps_s is not None:
        found.append(("between the measured steps", TIMES["step"].show(record.between_steps_s)))
    if (step := record.time.get("step")) is not None and step.n:
        found.append(("outliers among them", f"{step.outliers} of {step.n}"))
    return found


def _ranks(record: RunRecord) -> Facts:
    """Medians of each rank's step, on the host's clock."""
    medians = record.rank_step_s
    if len(medians) < 2:
        return []
    fast, slow = min(medians), max(medians)
    apart = "" if fast <= 0.0 else f", {slow / fast - 1:.1%} longer"
    named = [(f"rank {rank}", TIMES["step"].show(median)) for rank, median in enumerate(medians)]
    return [
        ("shortest median step", f"{TIMES['step'].show(fast)}, rank {medians.index(fast)}"),
        ("longest median step", f"{TIMES['step'].show(slow)}, rank {medians.index(slow)}{apart}"),
        *(named if len(named) <= _MOST_RANKS else []),
    ]


def _contention(record: RunRecord) -> Facts:
    """CPU time over the measured steps, of all CPUs that the run may use."""
    of = record.contention
    if of is None:
        return []
    seconds = {
        "CPU time of the run": of.had_s,
        "of other processes": of.others_s,
        "that a hypervisor took": of.stolen_s,
        "that a limit withheld": of.throttled_s,
    }
    found = [(name, f"{value:,.3g} s") for name, value in seconds.items() if value is not None]
    if of.not_had is not None:
        found.append(("wanted and not had", f"{of.not_had:.0%}"))
    if of.pressure is not None:
        found.append(("something waited for a CPU", f"{of.pressure:.0%} of {of.wall_s:.3g} s on {of.cpus}"))
    if of.gpu is not None and of.gpu.processes:
        held = "" if of.gpu.memory_bytes is None else f", which held {bytes_text(of.gpu.memory_bytes)}"
        found.append(("other processes on the GPU", f"{of.gpu.processes}{held}"))
    return found


def _utilisation(record: RunRecord) -> Facts:
    use = record.utilisation
    if use is None:
        return []
    flops = use.flops
    work = f"{_scaled(flops.forward, 'FLOP')} forward, {_scaled(flops.backward, 'FLOP')} backward"
    repeated = f", {_scaled(flops.recomputation, 'FLOP')} computed again" if flops.recomputation else ""
    found = [("work of a step", work + repeated)]
    if use.mfu is not None:
        found.append(("MFU, of the model's work", MFU.show(use.mfu)))
    if use.hfu is not None:
        found.append(("HFU, of all that was computed", MFU.show(use.hfu)))
    if use.peak_flops_per_s is not None:
        source = f" ({use.peak_source})" if use.peak_source else ""
        found.append(("peak of a device", f"{rate_text(use.peak_flops_per_s)} in {use.dtype}{source}"))
    if use.ceiling_flops_per_s is not None:
        share = "" if use.of_ceiling is None else f", {use.of_ceiling:.0%} of it reached"
        found.append(("its own matrix product", rate_text(use.ceiling_flops_per_s) + share))
    return found


def _telemetry(record: RunRecord) -> Facts:
    gpu = record.telemetry
    if gpu is None:
        return []
    found: Facts = []
    if len(gpu.gpus) > 1:
        together = "energy and power are sums, the clock is the slowest one's, the temperature the highest"
        found.append(("cards", f"{len(gpu.gpus)}: {together}"))
    if gpu.median_sm_clock_hz is not None:
        highest = "" if gpu.max_sm_clock_hz is None else f" of at most {gpu.max_sm_clock_hz / 1e6:,.0f}"
        found.append(("SM clock", f"{gpu.median_sm_clock_hz / 1e6:,.0f} MHz{highest}"))
    if gpu.throttle_reasons is not None:
        found.append(("throttled", ", ".join(gpu.throttle_reasons) or "no"))
    if gpu.median_temperature_c is not None:
        found.append(("temperature", f"{gpu.median_temperature_c:.0f} °C"))
    if gpu.median_power_w is not None:
        limit = "" if gpu.power_limit_w is None else f" of at most {gpu.power_limit_w:,.0f}"
        found.append(("power", f"{gpu.median_power_w:,.0f} W{limit}"))
    if gpu.energy_per_step_j is not None:
        found.append(("energy of a step", f"{gpu.energy_per_step_j:.4g} J"))
    if gpu.energy_per_token_j is not None:
        found.append(("energy of a token", f"{gpu.energy_per_token_j:.3g} J"))
    if gpu.energy_j is not None:
        found.append(("energy in all", f"{gpu.energy_j:,.4g} J in {gpu.duration_s:.3g} s (by its {gpu.energy_source})"))
    return found


def held(record: RunRecord) -> Facts:
    """What tensors hold at moments of a step, and what of that are activations; on the CPU too."""
    levels = None if record.memory is None else record.memory.held
    if levels is None:
        return []
    how = {
        "allocator": "all tensors on the device",
        "counted": "counted: parameters, gradients, optimizer states, buffers, and what autograd saved",
    }
    start, forward = levels.start, levels.forward
    moments = {"when forward begins": start, "when forward ends": forward, "when backward ends": levels.backward}
    found = [(moment, bytes_text(count)) for moment, count in moments.items() if count is not None]
    if start is not None and forward is not None:
        found.append(("activations: what forward leaves for backward", bytes_text(forward - start)))
    return [*found, ("of what", how[levels.source])] if found else []


def _allocator(record: RunRecord) -> Facts:
    of = None if record.memory is None else record.memory.allocator
    if of is None:
        return []
    sizes = {
        "in use, at most": of.active_peak,
        "reserved, at most": of.reserved_peak,
        "reserved and not in use when most was": of.fragmentation,
        "taken of the device, by all processes": of.driver_used,
    }
    counts = {"freed its cache to go on": of.alloc_retries, "ran out of memory": of.ooms}
    return [
        *((name, bytes_text(count)) for name, count in sizes.items() if count is not None),
        *((name, counted(count, "time")) for name, count in counts.items() if count),
    ]


def _syncs(record: RunRecord) -> Facts:
    lines = sorted(record.syncs or (), key=lambda sync: -sync.count)
    found = [(f"{sync.file}:{sync.line} in {sync.function}", f"{sync.count:,} × {sync.call}") for sync in lines]
    more = len(found) - _MOST_LINES
    return [*found[:_MOST_LINES], (f"and {counted(more, 'more line')}", "")] if more > 0 else found


def rate_text(flops_per_s: float) -> str:
    """``196 GFLOP/s``."""
    return _scaled(flops_per_s, "FLOP/s")


def _scaled(value: float, unit: str) -> str:
    """With three figures and the prefix that fits."""
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if value >= size:
            return f"{value / size:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"
