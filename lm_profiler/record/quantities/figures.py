"""What a run's record holds beside the times of its steps: every figure once, by what it is about."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from lm_profiler.record.quantities.quantity import Quantity, computed, figure
from lm_profiler.record.quantities.resources import (
    allocator,
    contention,
    gpu,
    memory,
    memory_by_cause,
    memory_by_phase,
    utilisation,
)
from lm_profiler.record.quantities.times import HOST_TIMES, PARTS, SHARES, SPREAD, TIMES, TOKENS_PER_S, per_step

if TYPE_CHECKING:
    from lm_profiler.record.run import RunRecord, Sync


def _backward_over_forward(record: RunRecord) -> float | None:
    backward, forward = (TIMES[part].get(record) for part in ("backward", "forward"))
    return backward / forward if backward and forward else None


def _ranks_apart(record: RunRecord) -> float | None:
    ranks = record.rank_step_s
    return max(ranks) / min(ranks) - 1 if len(ranks) > 1 and min(ranks) > 0 else None


def _of_ranks(which: Callable[[list[float]], float]) -> Callable[[RunRecord], float | None]:
    return lambda record: which(record.rank_step_s) if len(record.rank_step_s) > 1 else None


_ERROR = "norm of the difference to float32, over its norm"
_FIRST = PARTS[0]
_STAGES = {"warmup": "warm-up", "measure": "measure", "memory": "memory", "trace": "trace"}
_OUT_OF_MEMORY = {
    "requested": "what was asked for",
    "free": "free on the device",
    "total": "the device's memory",
    "allocated": "in use by tensors",
    "fragmented": "reserved by the allocator and not in use",
    "allowed": "a limit that somebody set below the device's memory",
}


def _steps() -> Iterator[Quantity]:
    between = "time of the measure stage in no step: validation, epoch ends"
    odd = "measured steps far from the others"
    yield figure("first_step_s", "first step", "ms", "the run's first step, compilation included")
    yield figure("between_steps_s", "between steps", "ms", between)
    ratio = "median backward over median forward"
    yield computed("backward_over_forward", "backward / forward", "x", ratio, _backward_over_forward)
    yield computed(
        "odd_steps", "odd steps", "count", odd, lambda record: len(record.odd_steps) if record.time else None
    )
    yield figure("duration_s", "whole run", "s", "from the start of the run to its end")
    for stage, words in _STAGES.items():
        yield figure(f"steps.{stage}", f"{words} steps", "count", f"steps of the {words} stage", f"steps_{stage}")
    for stage, words in _STAGES.items():
        name, meaning = f"steps_planned_{stage}", f"steps planned for the {words} stage"
        yield figure(f"steps_planned.{stage}", f"{words} steps planned", "count", meaning, name)


def _steadiness() -> Iterator[Quantity]:
    of = "steadiness."
    yield figure(f"{of}known_to", "median known to", "%", "half the 95 % interval of the median step, over it")
    yield figure(f"{of}drift", "drift", "%", "median of the second half of the steps over the first's, less 1")
    yield figure(f"{of}lag1", "lag-1", "number", "autocorrelation of a step's time with the next one's")
    yield figure(f"{of}cut", "steps left out", "count", "measured steps left out because they were not level yet")
    yield figure(f"{of}bias_of_mean", "bias of the mean", "%", "shift of the mean if the steps left out were counted")
    yield figure(f"{of}recompilations", "recompilations", "count", "of torch.compile, while measuring")


def _throughput() -> Iterator[Quantity]:
    of = "throughput."
    yield TOKENS_PER_S
    yield figure(f"{of}tokens_per_step", "tokens/step", "count", "tokens of a step on all ranks, the median")
    yield per_step(figure(f"{of}samples_per_s", "samples/s", "samples/s", "samples of a step / its time"))
    yield figure(f"{of}samples_per_step", "samples/step", "count", "rows of a batch, times the batches of a step")


def _ranks() -> Iterator[Quantity]:
    yield figure("environment.world_size", "ranks", "count", "processes of the run", "world_size")
    apart = "median step of the slowest rank over the fastest's, less 1"
    yield computed("ranks_apart", "slowest rank longer by", "%", apart, _ranks_apart)
    yield computed("fastest_rank_s", "fastest rank's step", "ms", "shortest median step of a rank", _of_ranks(min))
    yield computed("slowest_rank_s", "slowest rank's step", "ms", "longest median step of a rank", _of_ranks(max))


def _of_syncs(what: Callable[[list[Sync]], int]) -> Callable[[RunRecord], int | None]:
    return lambda record: None if record.syncs is None else what(record.syncs)


def _syncs() -> Iterator[Quantity]:
    lines = "lines that made the host wait for the device, in the memory stage"
    count = _of_syncs(lambda syncs: sum(sync.count for sync in syncs))
    yield computed("sync_lines", "lines that synchronize", "count", lines, _of_syncs(len))
    yield computed("syncs", "synchronizations", "count", "how often those lines did", count)


def _numerics() -> Iterator[Quantity]:
    of, batch = "numerics.", "loss of the first batch"
    yield figure(f"{of}loss", "loss", "loss", f"{batch}, in the run's precision", "audit_loss")
    yield figure(f"{of}reference_loss", "loss in float32", "loss", f"{batch}, in float32", "audit_float32_loss")
    yield figure(f"{of}output_error", "error of the output", "error", _ERROR)
    yield figure(f"{of}gradient_error", "error of the gradients", "error", _ERROR)


def _model() -> Iterator[Quantity]:
    yield figure("model.parameters", "parameters", "count", "parameters of the module")
    without = "parameters without those of the token embedding"
    yield figure("model.parameters_without_embedding", "parameters without embedding", "count", without)
    yield figure("model.trainable_parameters", "trainable parameters", "count", "parameters that get gradients")
    yield figure("model.bytes", "parameters and buffers", "GiB", "bytes of parameters and buffers", "model_bytes")
    yield figure("model.accumulate_grad_batches", "batches a step", "count", "batches whose gradients are accumulated")


def _machine() -> Iterator[Quantity]:
    yield figure("environment.device_bytes", "device memory", "GiB", "memory of the device")
    yield figure("environment.cpu_count", "CPU cores", "count", "cores of the machine")
    yield figure("environment.threads", "threads", "count", "threads that torch uses within an operator")


def _end() -> Iterator[Quantity]:
    share = "share of the step that the bottleneck takes"
    yield figure("verdict.share", "share of the bottleneck", "%", share, "bound_share")
    yield figure("failure.step", "failed at step", "count", "the step in which the run died", "failed_step")
    for what, meaning in _OUT_OF_MEMORY.items():
        path, title = f"failure.out_of_memory.{what}", what.replace("_", " ")
        yield figure(path, title, "GiB", f"{meaning}, as the error reports", f"oom_{what}_bytes")


LISTS: dict[str, tuple[Quantity, ...]] = {
    "odd_steps": (
        figure("step", "step", "count", "a step far from the others"),
        figure("step_s", "time", "ms", "what it took"),
        figure("ratio", "ratio", "x", "over the median step"),
        figure("part", "part", "text", "what differed most from its own median"),
        figure("excess_s", "excess", "ms", "by how much it did"),
    ),
    "syncs": (
        figure("file", "file", "text", "of the line that made the host wait for the device"),
        figure("line", "line", "count", "its number"),
        figure("function", "function", "text", "what it is in"),
        figure("count", "times", "count", "how often it made the host wait"),
        figure("call", "call", "text", "what waits"),
    ),
    "numerics.kinds": (
        figure("kind", "class", "text", "class of the modules"),
        figure("modules", "modules", "count", "how many there are"),
        figure("parameters", "parameters", "text", "dtypes of their own parameters"),
        figure("outputs", "outputs", "text", "dtypes of their outputs"),
        figure("gradients", "gradients", "text", "dtypes of their gradients"),
        figure("gradient_error", "error of the gradients", "error", _ERROR),
    ),
    "rank_step_s": (figure("", "median step", "ms", "median step of each rank", "rank_step_s"),),
}
"""By where ``run.json`` has them: rows of a table of their own. Paths and ``get`` are of a row."""

GROUPS: dict[str, tuple[Quantity, ...]] = {
    title: tuple(quantity if quantity.group else replace(quantity, group=title) for quantity in of)
    for title, of in {
        "Time of a step": (TIMES["step"], *(TIMES[part] for part in TIMES if part != "step")),
        "Time on the host's clock": HOST_TIMES.values(),
        "Throughput": _throughput(),
        "Use of the hardware": utilisation(),
        "Memory": memory(),
        "Memory by phase": memory_by_phase(),
        "Memory by cause": memory_by_cause(),
        "Steps": _steps(),
        "Steadiness": _steadiness(),
        "Ranks": _ranks(),
        "GPU": gpu(),
        "Allocator": allocator(),
        "Synchronization": _syncs(),
        "What else used the machine": contention(),
        "Numerics": _numerics(),
        "Model": _model(),
        "Machine": _machine(),
        "How it ended": _end(),
        "Shares of the typical step": SHARES,
        "Spread of the steps": SPREAD,
    }.items()
}
"""All figures of a run, by what they are about."""

QUANTITIES: dict[str, Quantity] = {quantity.name: quantity for of in GROUPS.values() for quantity in of}
"""All figures of a run by their name."""


def overview() -> dict[str, list[Quantity]]:
    """The groups, for people: of a family, such as one for each phase, one entry with ``PART`` for what differs."""
    return {title: [_whole_family(of) for of in group if of.of in (None, _FIRST)] for title, group in GROUPS.items()}


def _whole_family(member: Quantity) -> Quantity:
    texts = {name: getattr(member, name) for name in ("name", "title", "meaning", "path")}
    told = {name: text if member.of is None else text.replace(member.of, "PART", 1) for name, text in texts.items()}
    return replace(member, **told)
