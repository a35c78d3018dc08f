"""What a run's record holds beside the times of its steps: every figure once, by what it is about."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lm_profiler.record.quantities.quantity import (
    CELSIUS,
    COUNT,
    GFLOP,
    GIB,
    JOULE,
    MHZ,
    MS,
    NUMBER,
    RATIO,
    SECONDS,
    SHARE,
    TEXT,
    TFLOP_PER_S,
    WATT,
    Place,
    Quantity,
    Unit,
)
from lm_profiler.record.quantities.times import (
    HOST_TIMES,
    MEMORY,
    MFU,
    PARTS,
    SHARES,
    SPREAD,
    TIMES,
    TOKENS_PER_S,
    per_step,
)

if TYPE_CHECKING:
    from lm_profiler.record.run import RunRecord


def _at(path: str) -> Callable[[Any], Any]:
    """What a record has at ``path``; None where there is no such part."""
    keys = path.split(".") if path else []

    def get(record: Any) -> Any:
        for key in keys:
            record = record.get(key) if isinstance(record, dict) else getattr(record, key)
            if record is None:
                return None
        return record

    return get


def _figure(path: str, title: str, unit: Unit, meaning: str, name: str = "") -> Quantity:
    """One that the record has at ``path``; called as there, unless ``name`` tells it from another."""
    return Quantity(name or path.rpartition(".")[2], title, *unit, meaning, path=path, get=_at(path))


def _computed(name: str, title: str, unit: Unit, meaning: str, get: Callable[[RunRecord], Any]) -> Quantity:
    return Quantity(name, title, *unit, meaning, get=get)


def _backward_over_forward(record: RunRecord) -> float | None:
    backward, forward = (TIMES[part].get(record) for part in ("backward", "forward"))
    return backward / forward if backward and forward else None


def _saved(record: RunRecord) -> int | None:
    held = record.memory.held if record.memory is not None else None
    return None if held is None or held.start is None or held.forward is None else held.forward - held.start


def _ranks_apart(record: RunRecord) -> float | None:
    ranks = record.rank_step_s
    return max(ranks) / min(ranks) - 1 if len(ranks) > 1 and min(ranks) > 0 else None


def _of_ranks(which: Callable[[list[float]], float]) -> Callable[[RunRecord], float | None]:
    return lambda record: which(record.rank_step_s) if len(record.rank_step_s) > 1 else None


_LOSS: Unit = ("1", "", 1.0, 6)
_ERROR: Unit = ("1", "%", 100.0, 4)
_STAGES = {"warmup": "warm-up", "measure": "measure", "memory": "memory", "trace": "trace"}
_READINGS = {"allocated_peak": "allocated", "reserved_peak": "reserved", "resident_peak": "resident"}
_CAUSES = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer_states": "optimizer states",
    "buffers": "buffers",
    "activations_and_rest": "activations and rest",
}
_OUT_OF_MEMORY = {
    "requested": "what was asked for",
    "free": "free on the device",
    "total": "the device's memory",
    "allocated": "in use by tensors",
    "fragmented": "reserved by the allocator and not in use",
    "allowed": "a limit that somebody set below the device's memory",
}


def _steps() -> Iterator[Quantity]:
    yield _figure("first_step_s", "first step", MS, "the run's first step, compilation included")
    yield _figure(
        "between_steps_s", "between steps", MS, "time of the measure stage in no step: validation, epoch ends"
    )
    yield _computed(
        "backward_over_forward",
        "backward / forward",
        RATIO,
        "median backward over median forward",
        _backward_over_forward,
    )
    yield _computed(
        "odd_steps",
        "odd steps",
        COUNT,
        "measured steps far from the others",
        lambda record: len(record.odd_steps) if record.time else None,
    )
    yield _figure("duration_s", "whole run", SECONDS, "from the start of the run to its end")
    for stage, words in _STAGES.items():
        yield _figure(f"steps.{stage}", f"{words} steps", COUNT, f"steps of the {words} stage", f"steps_{stage}")
    for stage, words in _STAGES.items():
        name, meaning = f"steps_planned_{stage}", f"steps planned for the {words} stage"
        yield _figure(f"steps_planned.{stage}", f"{words} steps planned", COUNT, meaning, name)


def _steadiness() -> Iterator[Quantity]:
    of = "steadiness."
    yield _figure(f"{of}known_to", "median known to", SHARE, "half the 95 % interval of the median step, over it")
    yield _figure(f"{of}drift", "drift", SHARE, "median of the second half of the steps over the first's, less 1")
    yield _figure(f"{of}lag1", "lag-1", NUMBER, "autocorrelation of a step's time with the next one's")
    yield _figure(f"{of}cut", "steps left out", COUNT, "measured steps left out because they were not level yet")
    yield _figure(f"{of}bias_of_mean", "bias of the mean", SHARE, "how far off the steps left out would make the mean")
    yield _figure(f"{of}recompilations", "recompilations", COUNT, "of torch.compile, while measuring")


def _throughput() -> Iterator[Quantity]:
    of = "throughput."
    yield TOKENS_PER_S
    yield _figure(f"{of}tokens_per_step", "tokens/step", COUNT, "tokens of a step on all ranks, the median")
    rate: Unit = ("1/s", "samples/s", 1.0, 1)
    yield per_step(_figure(f"{of}samples_per_s", "samples/s", rate, "samples of a step / its time"))
    yield _figure(f"{of}samples_per_step", "samples/step", COUNT, "rows of a batch, times the batches of a step")


def _utilisation() -> Iterator[Quantity]:
    of = "utilisation."
    yield MFU
    yield per_step(_figure(f"{of}hfu", "HFU", SHARE, "all executed FLOPs of a step / (its time x the device's peak)"))
    peak = "FLOP/s of one device on its datasheet, in the run's precision"
    yield _figure(f"{of}peak_flops_per_s", "peak of a device", TFLOP_PER_S, peak)
    yield _figure(f"{of}dtype", "dtype of the peak", TEXT, "precision that the peak is of", "peak_dtype")
    yield _figure(f"{of}peak_source", "source of the peak", TEXT, "where the peak of a device is from")
    ceiling = "FLOP/s of one device in a large matrix product, measured after the run"
    yield _figure(f"{of}ceiling_flops_per_s", "own matrix product", TFLOP_PER_S, ceiling)
    share = "executed FLOPs of a step / (its time x the device's own matrix product)"
    yield per_step(_figure(f"{of}of_ceiling", "of own matrix product", SHARE, share))
    for part in ("forward", "backward"):
        yield _figure(
            f"{of}flops.{part}", f"{part} work", GFLOP, f"FLOPs of a step's {part}, all ranks", f"{part}_flops"
        )
    again = "FLOPs of a step that activation checkpointing repeats, all ranks"
    yield _figure(f"{of}flops.recomputation", "recomputed work", GFLOP, again, "recomputation_flops")


def _memory() -> Iterator[Quantity]:
    yield from MEMORY.values()
    moments = {"start": "forward begins", "forward": "forward has ended", "backward": "backward has ended"}
    yield _computed("saved_bytes", "saved for backward", GIB, "bytes that forward leaves for backward", _saved)
    for moment, words in moments.items():
        meaning = f"bytes held when {words}"
        yield _figure(f"memory.held.{moment}", f"held: {words}", GIB, meaning, f"held_{moment}_bytes")
    how = "`allocator`: all tensors of the device; `counted`: parameters, gradients, states, buffers, saved tensors"
    yield _figure("memory.held.source", "held, by", TEXT, how, "held_source")


def _memory_by_phase() -> Iterator[Quantity]:
    for reading, words in _READINGS.items():
        for part in PARTS:
            path, name = f"memory.parts.{part}.{reading}", f"{part}_{reading}_bytes"
            of_part = _figure(path, f"{part}: peak {words}", GIB, f"peak {words} within {part}", name)
            yield replace(of_part, of=part, place=Place.ASKED)


def _memory_by_cause() -> Iterator[Quantity]:
    for cause, words in _CAUSES.items():
        for part in PARTS:
            path, name = f"memory.causes.{part}.{cause}", f"{part}_{cause}_bytes"
            of_part = _figure(path, f"{part}: {words}", GIB, f"{words} in the peak allocated of {part}", name)
            yield replace(of_part, of=part, place=Place.ASKED)


def _allocator() -> Iterator[Quantity]:
    sizes = {
        "allocated_peak": ("allocated", "most bytes held by tensors over the measured steps"),
        "active_peak": ("in use", "most bytes in use, blocks that wait for a stream included"),
        "reserved_peak": ("reserved", "most bytes taken from the device"),
        "inactive_split_peak": ("inactive split", "most bytes free in blocks that are partly in use"),
        "fragmentation": ("fragmentation", "at most what was reserved and not in use when most was in use"),
        "driver_used": ("used on the device", "by all processes, as the driver tells"),
    }
    for reading, (title, meaning) in sizes.items():
        yield _figure(f"memory.allocator.{reading}", title, GIB, meaning, f"allocator_{reading}_bytes")
    retries = "how often the allocator freed its cache to go on, since the process began"
    yield _figure("memory.allocator.alloc_retries", "retries", COUNT, retries)
    yield _figure("memory.allocator.ooms", "OOMs", COUNT, "how often memory ran out, since the process began")


def _gpu() -> Iterator[Quantity]:
    of = "telemetry."
    cards = "cards of the run: energy and power are their sums, clocks the slowest's, the temperature the highest"
    yield _computed(
        "gpus", "GPUs", COUNT, cards, lambda record: (record.telemetry and len(record.telemetry.gpus)) or None
    )
    yield _figure(f"{of}energy_per_step_j", "energy per step", JOULE, "energy of the GPU over the steps, for each")
    yield _figure(f"{of}energy_per_token_j", "energy per token", JOULE, "energy of a step / its tokens")
    yield _figure(f"{of}energy_j", "energy", JOULE, "energy of the GPU over the measured steps")
    yield _figure(f"{of}energy_source", "source of the energy", TEXT, "the GPU's own counter, or samples of its power")
    yield _figure(f"{of}median_power_w", "power", WATT, "median power of the GPU over the measured steps")
    yield _figure(f"{of}power_limit_w", "power limit", WATT, "most power that the GPU may draw")
    yield _figure(f"{of}median_temperature_c", "temperature", CELSIUS, "median temperature of the GPU")
    yield _figure(f"{of}median_sm_clock_hz", "SM clock", MHZ, "median clock of the GPU's multiprocessors")
    yield _figure(f"{of}max_sm_clock_hz", "highest SM clock", MHZ, "highest boost clock of the card")
    yield _figure(f"{of}clock_share", "of the highest clock", SHARE, "median SM clock over the card's highest")
    yield _figure(f"{of}throttle_reasons", "throttled by", TEXT, "reasons that held in 5 % of the samples or more")
    yield _figure(f"{of}samples", "samples", COUNT, "how often the GPU was read", "gpu_samples")
    yield _figure(f"{of}duration_s", "sampled for", SECONDS, "time that energy and samples span", "gpu_sampled_s")


def _contention() -> Iterator[Quantity]:
    of = "contention."
    yield _figure(f"{of}not_had", "wanted and not had", SHARE, "share of the wanted CPU time that something else had")
    yield _figure(f"{of}had_s", "CPU time of the run", SECONDS, "CPU time of the run's own processes", "cpu_had_s")
    yield _figure(f"{of}others_s", "of other processes", SECONDS, "CPU time of all other processes", "cpu_others_s")
    yield _figure(f"{of}stolen_s", "that a hypervisor took", SECONDS, "CPU time that a hypervisor took", "cpu_stolen_s")
    yield _figure(
        f"{of}throttled_s", "that a limit withheld", SECONDS, "by the control group's limit", "cpu_throttled_s"
    )
    waited = "how long threads of the run were ready and had no CPU"
    yield _figure(f"{of}waited_s", "ready and waiting", SECONDS, waited, "cpu_waited_s")
    pressure = "share of the time in which something waited for a CPU"
    yield _figure(f"{of}pressure", "something waited for a CPU", SHARE, pressure, "cpu_pressure")
    switches = "how often this process lost a CPU that it still wanted"
    yield _figure(f"{of}involuntary_switches", "involuntary switches", COUNT, switches)
    yield _figure(f"{of}wall_s", "watched for", SECONDS, "time that these figures span", "contention_wall_s")
    yield _figure(f"{of}cpus", "CPUs", COUNT, "CPUs that the run may use")
    gpu = f"{of}gpu."
    yield _figure(
        f"{gpu}processes", "other processes on the GPU", COUNT, "at the end of the measured steps", "gpu_others"
    )
    busy = "share of time in which kernels of other processes ran"
    yield _figure(f"{gpu}utilisation", "their kernels ran", SHARE, busy, "gpu_others_utilisation")
    yield _figure(f"{gpu}memory_bytes", "they held", GIB, "GPU memory of other processes", "gpu_others_bytes")


def _ranks() -> Iterator[Quantity]:
    yield _figure("environment.world_size", "ranks", COUNT, "processes of the run", "world_size")
    apart = "median step of the slowest rank over the fastest's, less 1"
    yield _computed("ranks_apart", "slowest rank longer by", SHARE, apart, _ranks_apart)
    yield _computed("fastest_rank_s", "fastest rank's step", MS, "shortest median step of a rank", _of_ranks(min))
    yield _computed("slowest_rank_s", "slowest rank's step", MS, "longest median step of a rank", _of_ranks(max))


def _syncs() -> Iterator[Quantity]:
    yield _computed(
        "sync_lines",
        "lines that synchronize",
        COUNT,
        "lines that made the host wait for the device, in the memory stage",
        lambda record: None if record.syncs is None else len(record.syncs),
    )
    yield _computed(
        "syncs",
        "synchronizations",
        COUNT,
        "how often they did",
        lambda record: None if record.syncs is None else sum(sync.count for sync in record.syncs),
    )


def _numerics() -> Iterator[Quantity]:
    of = "numerics."
    yield _figure(f"{of}loss", "loss", _LOSS, "of the first batch, in the run's precision", "audit_loss")
    yield _figure(
        f"{of}reference_loss", "loss in float32", _LOSS, "of the first batch, in float32", "audit_float32_loss"
    )
    yield _figure(
        f"{of}output_error", "error of the output", _ERROR, "norm of the difference to float32, over its norm"
    )
    yield _figure(f"{of}gradient_error", "error of the gradients", _ERROR, "the same of the gradients")


def _model() -> Iterator[Quantity]:
    yield _figure("model.parameters", "parameters", COUNT, "parameters of the module")
    without = "parameters but those of the token embedding"
    yield _figure("model.parameters_without_embedding", "parameters without embedding", COUNT, without)
    yield _figure("model.trainable_parameters", "trainable parameters", COUNT, "parameters that get gradients")
    yield _figure("model.bytes", "parameters and buffers", GIB, "bytes of parameters and buffers", "model_bytes")
    yield _figure("model.accumulate_grad_batches", "batches a step", COUNT, "batches whose gradients are accumulated")


def _machine() -> Iterator[Quantity]:
    yield _figure("environment.device_bytes", "device memory", GIB, "memory of the device")
    yield _figure("environment.cpu_count", "CPU cores", COUNT, "cores of the machine")
    yield _figure("environment.threads", "threads", COUNT, "threads that torch uses within an operator")


def _end() -> Iterator[Quantity]:
    yield _figure(
        "verdict.share", "share of what binds", SHARE, "share of the step that the bottleneck takes", "bound_share"
    )
    yield _figure("failure.step", "failed at step", COUNT, "the step in which the run died", "failed_step")
    for what, meaning in _OUT_OF_MEMORY.items():
        path, title = f"failure.out_of_memory.{what}", what.replace("_", " ")
        yield _figure(path, title, GIB, f"{meaning}, as the error tells", f"oom_{what}_bytes")


def _lists() -> Iterator[tuple[str, tuple[Quantity, ...]]]:
    yield (
        "odd_steps",
        (
            _figure("step", "step", COUNT, "a step far from the others"),
            _figure("step_s", "time", MS, "what it took"),
            _figure("ratio", "ratio", RATIO, "over the median step"),
            _figure("part", "part", TEXT, "what differed most from its own median"),
            _figure("excess_s", "excess", MS, "by how much it did"),
        ),
    )
    yield (
        "syncs",
        (
            _figure("file", "file", TEXT, "of the line that made the host wait for the device"),
            _figure("line", "line", COUNT, "its number"),
            _figure("function", "function", TEXT, "what it is in"),
            _figure("count", "times", COUNT, "how often it made the host wait"),
            _figure("call", "call", TEXT, "what waits"),
        ),
    )
    yield (
        "numerics.kinds",
        (
            _figure("kind", "class", TEXT, "class of the modules"),
            _figure("modules", "modules", COUNT, "how many there are"),
            _figure("parameters", "parameters", TEXT, "dtypes of their own parameters"),
            _figure("outputs", "outputs", TEXT, "dtypes of their outputs"),
            _figure("gradients", "gradients", TEXT, "dtypes of their gradients"),
            _figure(
                "gradient_error", "error of the gradients", _ERROR, "norm of the difference to float32, over its norm"
            ),
        ),
    )
    yield "rank_step_s", (_figure("", "median step", MS, "median step of each rank", "rank_step_s"),)


LISTS: dict[str, tuple[Quantity, ...]] = dict(_lists())
"""By where ``run.json`` has them: rows of a table of their own. Paths and ``get`` are of a row."""

GROUPS: dict[str, tuple[Quantity, ...]] = {
    title: tuple(quantity if quantity.group else replace(quantity, group=title) for quantity in of)
    for title, of in {
        "Time of a step": (TIMES["step"], *(TIMES[part] for part in TIMES if part != "step")),
        "Time on the host's clock": HOST_TIMES.values(),
        "Throughput": _throughput(),
        "Use of the hardware": _utilisation(),
        "Memory": _memory(),
        "Steps": _steps(),
        "Steadiness": _steadiness(),
        "Ranks": _ranks(),
        "GPU": _gpu(),
        "Allocator": _allocator(),
        "Synchronization": _syncs(),
        "What else used the machine": _contention(),
        "Numerics": _numerics(),
        "Model": _model(),
        "Machine": _machine(),
        "How it ended": _end(),
        "Shares of the typical step": SHARES,
        "Spread of the steps": SPREAD,
        "Memory by phase": _memory_by_phase(),
        "Memory by cause": _memory_by_cause(),
    }.items()
}
"""All figures of a run, by what they are about."""

QUANTITIES: dict[str, Quantity] = {quantity.name: quantity for of in GROUPS.values() for quantity in of}
"""All figures of a run by their name."""
