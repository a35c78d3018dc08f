"""What a run's record holds beside the times of its steps: every figure once, by what it is about."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from lm_profiler.record.improve import ImproveRecord
from lm_profiler.record.parts import PARTS
from lm_profiler.record.quantities import ranks, resources, slack, slow_steps, waterfall
from lm_profiler.record.quantities.floors import FLOORS
from lm_profiler.record.quantities.improve import IMPROVE
from lm_profiler.record.quantities.lists import ERROR, LISTS
from lm_profiler.record.quantities.quantity import Place, Quantity, at, computed, figure, figures_of
from lm_profiler.record.quantities.times import HOST_TIMES, MEMORY, SHARES, SPREAD, TIMES, TOKENS_PER_S, per_step
from lm_profiler.record.run import Part, RunRecord, Sync


def _backward_over_forward(record: RunRecord) -> float | None:
    backward, forward = (TIMES[part].get(record) for part in ("backward", "forward"))
    return backward / forward if backward and forward else None


def _whole_run(record: RunRecord) -> float | None:
    """Of a run that has not ended, its record tells what it took until the loop began."""
    return None if record.status == "unfinished" else record.duration_s


def _times_synchronized(syncs: list[Sync]) -> int:
    return sum(sync.count for sync in syncs)


def _of_syncs(what: Callable[[list[Sync]], int]) -> Callable[[RunRecord], int | None]:
    return lambda record: None if record.syncs is None else what(record.syncs)


def _interval_of(part: str, low: str, high: str) -> Callable[[RunRecord], tuple[float, float] | None]:
    """Of a figure whose part of the record has both ends."""

    def get(record: RunRecord) -> tuple[float, float] | None:
        ends = at(f"{part}.{low}")(record), at(f"{part}.{high}")(record)
        return None if None in ends else ends

    return get


_SHARE = "share of the step that the bottleneck takes"
_RATIO = "mean backward over mean forward"
_ODD = "measured steps far from the others"
_LINES = "lines that made the host wait for the device, in the memory stage"
_STAGES = (
    ("warmup", "warm-up"),
    ("measure", "measure"),
    ("collectives", "collectives"),
    ("whatif", "what-if"),
    ("actions", "actions"),
    ("memory", "memory"),
    ("trace", "trace"),
)

_STEPS = (
    figure("first_step_s", "first step", "ms", "the run's first step, compilation included"),
    figure("between_steps_s", "between steps", "ms", "time of the measure stage in no step: validation, epoch ends"),
    computed("backward_over_forward", "backward / forward", "x", _RATIO, _backward_over_forward),
    computed("odd_steps", "odd steps", "count", _ODD, lambda record: len(record.odd_steps) if record.time else None),
    replace(figure("duration_s", "whole run", "s", "from the start of the run to its end"), get=_whole_run),
    *(figure(f"steps.{at}", f"{of} steps", "count", f"steps of the {of} stage", f"steps_{at}") for at, of in _STAGES),
    *(
        figure(f"steps_planned.{at}", f"{of} steps planned", "count", f"for the {of} stage", f"steps_planned_{at}")
        for at, of in _STAGES
    ),
)

_LOADER = figures_of(
    "loader",
    ("workers", "workers of the loader", "count", "processes that make batches", "loader_workers"),
    ("ahead", "batches made ahead at most", "count", "by its workers, before one is taken", "loader_ahead"),
    ("ready_before", "batches ready at first", "count", "made and not taken where the measured steps began"),
    ("ready_after", "batches ready at last", "count", "made and not taken where the measured steps ended"),
)

_STEADINESS = figures_of(
    "steadiness",
    ("known_to", "level known to", "%", "half the 95 % interval of the level, over it"),
    ("pattern_s", "pattern", "ms", "what every so many-th step adds to the mean step"),
    ("odd_s", "cost of odd steps", "ms", "what odd steps add to the mean step"),
    ("pattern.every", "every so many steps", "count", "after how many steps the pattern repeats", "pattern_every"),
    ("pattern.extra", "slower by", "%", "by what share of the level the slowest steps of the pattern differ"),
    ("rise", "rise", "%", "of a trend: the last step's level over the first's, less 1"),
    ("first", "first step told", "count", "the first measured step that figures are of"),
    ("last", "last step told", "count", "the last measured step that figures are of"),
    ("lag1", "lag-1", "number", "autocorrelation of a step's time with the next one's"),
    ("cut", "steps left out", "count", "measured steps left out because they were not level yet"),
    ("bias_of_mean", "bias of the mean", "%", "shift of the mean if the steps left out were counted"),
    ("recompilations", "recompilations", "count", "of torch.compile, while measuring"),
)

_LEVEL = replace(
    figure("steadiness.level_s", "level", "ms", "mean of the regular steps: neither odd nor slow by a pattern"),
    interval=_interval_of("steadiness", "level_low_s", "level_high_s"),
)

_THROUGHPUT = (
    TOKENS_PER_S,
    figure("throughput.tokens_per_step", "tokens/step", "count", "tokens of a step on all ranks, the mean"),
    per_step("throughput.samples_per_s", "samples/s", "samples/s", "samples of a step / its time"),
    figure("throughput.samples_per_step", "samples/step", "count", "rows of a step's batches on all ranks, the mean"),
)

_SYNCS = (
    computed("sync_lines", "lines that synchronize", "count", _LINES, _of_syncs(len)),
    computed("syncs", "synchronizations", "count", "how often those lines did", _of_syncs(_times_synchronized)),
)

_OWNERS = figures_of(
    "other_by_owner",
    ("steps", "steps timed by action", "count", "steps of which each action was timed", "owner_steps"),
    ("seconds", "other, timed by action", "ms", "mean of other in those steps, on the host's clock", "owned_other_s"),
    (
        "measured_s",
        "other of rank 0",
        "ms",
        "mean of other in the measured steps of rank 0, on the host's clock",
        "rank_0_other_s",
    ),
)

_USES = (
    ("ran_s", "ran", "the training thread ran"),
    ("no_cpu_s", "no CPU", "the training thread was ready and had no CPU"),
    ("asleep_s", "asleep", "the training thread slept, or waited for something else than a CPU"),
)
_THREAD_USE = tuple(
    replace(
        figure(
            f"thread_use.{part}.{name}",
            f"{TIMES[part].title} {title} (ms)",
            "ms",
            f"in {part}, {meaning}",
            f"{part}_{name}",
        ),
        path="" if name == "asleep_s" else f"thread_use.{part}.{name}",  # what is left, which the file does not have
        of=part,
        place=Place.ASKED,
    )
    for part in PARTS
    for name, title, meaning in _USES
)

_NUMERICS = figures_of(
    "numerics",
    ("loss", "loss", "loss", "loss of the first batch, in the run's precision", "audit_loss"),
    ("reference_loss", "loss in float32", "loss", "loss of the first batch, in float32", "audit_float32_loss"),
    ("output_error", "error of the output", "error", ERROR),
    ("gradient_error", "error of the gradients", "error", ERROR),
)

_MODEL = figures_of(
    "model",
    ("parameters", "parameters", "count", "parameters of the module"),
    ("parameters_without_embedding", "parameters without embedding", "count", "all but those of the token embedding"),
    ("trainable_parameters", "trainable parameters", "count", "parameters that get gradients"),
    ("bytes", "parameters and buffers", "GiB", "bytes of parameters and buffers", "model_bytes"),
    ("accumulate_grad_batches", "batches a step", "count", "batches whose gradients are accumulated"),
)

_MACHINE = figures_of(
    "environment",
    ("device_bytes", "device memory", "GiB", "memory of the device"),
    ("cpu_count", "CPU cores", "count", "cores of the machine"),
    ("threads", "threads", "count", "threads that torch uses within an operator"),
)

_END = (
    replace(
        figure("verdict.share", "share of the bottleneck", "%", _SHARE, "bound_share"),
        interval=_interval_of("verdict", "share_low", "share_high"),
    ),
    figure("failure.step", "failed at step", "count", "the step in which the run died", "failed_step"),
    figure("failure.rank", "failed on rank", "count", "whose failure the others' ends followed from", "failed_rank"),
    figure("failure.host", "failed on host", "text", "that rank's machine", "failed_host"),
    *figures_of(
        "failure.out_of_memory",
        ("requested", "requested", "GiB", "what was asked for, as the error reports", "oom_requested_bytes"),
        ("free", "free", "GiB", "free on the device, as the error reports", "oom_free_bytes"),
        ("total", "total", "GiB", "the device's memory, as the error reports", "oom_total_bytes"),
        ("allocated", "allocated", "GiB", "in use by tensors, as the error reports", "oom_allocated_bytes"),
        ("fragmented", "fragmented", "GiB", "reserved and not in use, as the error reports", "oom_fragmented_bytes"),
        ("allowed", "allowed", "GiB", "a limit set below the device's memory, as it reports", "oom_allowed_bytes"),
    ),
)

GROUPS: dict[str, tuple[Quantity, ...]] = {
    title: tuple(replace(quantity, group=title) for quantity in of)
    for title, of in {
        "Time of a step": (TIMES["step"], *(TIMES[part] for part in TIMES if part != "step")),
        "Time on the host's clock": HOST_TIMES.values(),
        "Throughput": _THROUGHPUT,
        "Use of the hardware": resources.UTILISATION,
        "Floors": FLOORS,
        "Waterfall": waterfall.WATERFALL,
        "Terms of the waterfall": waterfall.TERM_FIGURES,
        "Slack": slack.SLACK,
        "Memory": (*MEMORY.values(), *resources.HELD),
        "Planned memory": resources.PLANNED,
        "Memory by phase": resources.MEMORY_BY_PHASE,
        "Memory by cause": resources.MEMORY_BY_CAUSE,
        "Other, by its owner": _OWNERS,
        "Use of the CPU": _THREAD_USE,
        "Counters of the mean step": slow_steps.MEAN_COUNTERS,
        "Steps": (*_STEPS, *_LOADER),
        "Steadiness": (_LEVEL, *_STEADINESS),
        "Ranks": ranks.RANKS,
        "Own work and waiting by phase": ranks.RANKS_BY_PHASE,
        "GPU": resources.GPU,
        "Allocator": resources.ALLOCATOR,
        "Synchronization": _SYNCS,
        "What else used the machine": resources.CONTENTION,
        "Numerics": _NUMERICS,
        "Model": _MODEL,
        "Machine": _MACHINE,
        "How it ended": _END,
        "Shares of the typical step": SHARES,
        "Spread of the steps": SPREAD,
    }.items()
}
"""All figures of a run, by what they are about."""

QUANTITIES: dict[str, Quantity] = {quantity.name: quantity for of in GROUPS.values() for quantity in of}
"""All figures of a run by their name."""

FIGURES: dict[type[Part], dict[str, tuple[Quantity, ...]]] = {
    RunRecord: {"": tuple(QUANTITIES.values()), **LISTS},
    ImproveRecord: IMPROVE,
}
"""Of each kind of file, by where it has them: what it has once, and rows of lists."""


def overview() -> dict[str, list[Quantity]]:
    """The groups, for people: of a family, such as one for each phase, one entry with ``PART`` for what differs."""
    return {title: list({of.name: of for of in map(_whole_family, group)}.values()) for title, group in GROUPS.items()}


def _whole_family(member: Quantity) -> Quantity:
    texts = {name: getattr(member, name) for name in ("name", "title", "meaning", "path")}
    told = {name: text if member.of is None else text.replace(member.of, "PART", 1) for name, text in texts.items()}
    return replace(member, **told)
