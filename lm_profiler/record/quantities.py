"""The one registry of all measured quantities: names, units, formats, TensorBoard tags, meanings, places in records.

Columns of ``steps.csv``, keys of ``run.json`` and ``improve.json``, tags, table headers and the documentation come
from here. A figure's row stands beside its field, in ``record/run/`` and ``record/improve.py``; this module adds the
groups, the times of each part, and what is computed from several values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lm_profiler.record.figure import UNITS, Place, bytes_text, counted, duration_text, with_prefix
from lm_profiler.record.improve import ImproveRecord
from lm_profiler.record.parts import MEANINGS, PARTS, PHASES, TIMED, WORDS
from lm_profiler.record.quantity import Quantity, between, column, figures_in, rows_in
from lm_profiler.record.run import MOMENTS, Floor, MemoryCauses, MemoryReading, Part, RunRecord

__all__ = [
    "CAUSES", "FIGURES", "FLOOR", "GROUPS", "HOST_TIMES", "LISTS", "MEMORY", "MFU", "PARTS", "PHASES",
    "PLANNED_COLUMNS", "QUANTITIES", "REMEDY_COLUMNS", "STEP_COLUMNS", "TERMS", "TIMED", "TIMES", "TIMES_FLOOR",
    "TOKENS", "TOKENS_PER_S", "TRIED_COLUMNS", "Place", "Quantity", "bytes_text", "counted", "duration_text",
    "overview", "term_title", "with_prefix",
]  # fmt: skip

_PLACES = {"step": Place.HEADLINE, **dict.fromkeys(("forward", "backward", "optimizer"), Place.TABLE)}
_RUN_TAGS = {part: f"{part}_ms" for part in ("step", "forward", "backward")}
_CLOCKS = {"time": "", "host_time": "_host"}
_STATISTICS = {
    "median": ("median", "ms", Place.FILE),
    "std": ("standard deviation", "ms", Place.FILE),
    "cv": ("standard deviation over the mean", "%", Place.FILE),
    "p95": ("95th percentile", "ms", Place.FILE),
    "p5": ("5th percentile", "ms", Place.ASKED),
    "min": ("minimum", "ms", Place.ASKED),
    "max": ("maximum", "ms", Place.ASKED),
}


def _of_time(times: str, part: str, statistic: str) -> Callable[[RunRecord], Any]:

    def get(record: RunRecord) -> Any:
        time = getattr(record, times).get(part)
        return getattr(time, statistic) if time is not None and time.max else None

    return get


def _mean(times: str, part: str) -> Quantity:
    host = times == "host_time"
    return Quantity(
        f"{part}{_CLOCKS[times]}_s",
        WORDS[part] + (" (host)" if host else ""),
        *UNITS["ms"],
        MEANINGS[part] + (", on the host's clock" if host else ""),
        tag=f"{times}_ms/{part}",
        path=f"{times}.{part}.mean",
        get=_of_time(times, part, "mean"),
        interval=between(_of_time(times, part, "mean_low"), _of_time(times, part, "mean_high")),
        place=Place.FILE if host else _PLACES.get(part, Place.FILE),
        run_tag=None if host else _RUN_TAGS.get(part),
    )


# times on the device's stream, or on the host's clock where there is no device; a run's are means over its steps
TIMES = {part: _mean("time", part) for part in MEANINGS}
HOST_TIMES = {part: _mean("host_time", part) for part in TIMES}  # times on the host's clock


def _statistic(times: str, part: str, name: str) -> Quantity:
    clock, (words, unit, place), title = _CLOCKS[times], _STATISTICS[name], WORDS[part]
    return Quantity(
        f"{part}{clock}_{name}" + ("_s" if unit == "ms" else ""),
        f"{title} {name.upper() if name == 'cv' else name}" + (" (host)" if clock else ""),
        *UNITS[unit],
        f"{words} of the time of {title}" + (", on the host's clock" if clock else ""),
        path=f"{times}.{part}.{name}",
        get=_of_time(times, part, name),
        place=Place.ASKED if clock else place,
        of=part,
    )


_SPREAD = [_statistic(times, part, name) for times in _CLOCKS for part in TIMES for name in _STATISTICS]

# the title and the meaning of each term, in the order of the waterfall
TERMS = {
    "ideal": ("ideal", "the model's FLOPs at the peak"),
    "clock": ("lower clock", "what the model's FLOPs take longer at the clock that the device held"),
    "slow_products": ("slow matmuls", "what matrix products and fused attention take beyond the ideal at that clock"),
    "recomputation": ("recomputation", "what activation checkpointing computes once more"),
    "bandwidth": ("memory traffic", "memory-bound kernels, if they moved their bytes at the full bandwidth"),
    "beyond_bandwidth": ("beyond bandwidth", "what memory-bound kernels take longer than at the full bandwidth"),
    "communication": ("communication", "communication that no other kernel hides"),
    "waiting": ("waiting for ranks", "waiting for other ranks, which only mending those saves"),
    "gaps": ("gaps", "nothing ran: waiting for the host, or at a synchronization"),
    "input": ("input", "waiting for data and its transfer"),
    "unexplained": ("unexplained", "what is left of the step"),
}


def term_title(name: str) -> str:
    """Return the title of a term; a term of a later version has its own name."""
    return TERMS[name][0] if name in TERMS else name.replace("_", " ")


def _computed(name: str, title: str, unit: str, meaning: str, get: Callable[[RunRecord], Any]) -> Quantity:
    return Quantity(name, title, *UNITS[unit], meaning, get=get)


def _term_s(name: str) -> Callable[[RunRecord], float | None]:
    def get(record: RunRecord) -> float | None:
        fall = record.waterfall
        if fall is None or name in fall.untold:
            return None
        return next((term.seconds for term in fall.terms if term.name == name), None)

    return get


def _over_ranks(statistic: Callable[[list[float]], float | None]) -> Callable[[RunRecord], float | None]:
    return lambda record: statistic(record.rank_step_s) if len(record.rank_step_s) > 1 else None


def _apart(steps: list[float]) -> float | None:
    return max(steps) / min(steps) - 1 if min(steps) > 0 else None


def _backward_over_forward(record: RunRecord) -> float | None:
    backward, forward = (TIMES[part].get(record) for part in ("backward", "forward"))
    return backward / forward if backward and forward else None


def _over_planned(record: RunRecord) -> float | None:
    # Without a device that counts its tensors, a process's resident size says too little of them.
    planned, memory = record.planned, record.memory
    if planned is None or memory is None:
        return None
    pairs = [(memory.measured.allocated_peak, planned.peak)]
    if memory.held is not None and planned.held is not None and memory.held.source == planned.held.source:
        pairs.append((memory.held.forward, planned.held.forward))
    return next((measured / whole for measured, whole in pairs if measured is not None and whole), None)


_APART = "median step of the slowest rank over the fastest's, less 1"
_OVER = "peak allocated over the planned one; where the device does not tell it, what forward left over what it should"
_LINES = "lines that made the host wait for the device, in the memory stage"
_CARDS = "cards of the run: energy and power are their sums, clocks the slowest's, the temperature the highest"
_MULTIPLYING = ("forward", "backward")
_RATIO = "mean backward over mean forward"
_ODD = "measured steps far from the others"

_GROUPS: dict[str, list[Quantity]] = {
    "Time of a step": [TIMES["step"], *(TIMES[part] for part in TIMES if part != "step")],
    "Time on the host's clock": [*HOST_TIMES.values()],
    "Throughput": [],
    "Use of the hardware": [],
    "Floors": [],
    "Waterfall": [],
    "Terms of the waterfall": [
        _computed(f"waterfall_{name}_s", title, "ms", meaning, _term_s(name))
        for name, (title, meaning) in TERMS.items()
    ],
    "Memory": [],
    "Planned memory": [_computed("measured_over_planned", "measured / planned", "x", _OVER, _over_planned)],
    "Memory by phase": [],
    "Memory by cause": [],
    "Memory at three moments": [],
    "Other, by its owner": [],
    "Use of the CPU": [],
    "Counters of the mean step": [],
    "Steps": [
        _computed("backward_over_forward", "backward / forward", "x", _RATIO, _backward_over_forward),
        _computed("odd_steps", "odd steps", "count", _ODD, lambda of: len(of.odd_steps) if of.time else None),
    ],
    "Steadiness": [],
    "Ranks": [
        _computed("ranks_apart", "slowest rank longer by", "%", _APART, _over_ranks(_apart)),
        _computed("fastest_rank_s", "fastest rank's step", "ms", "shortest median step of a rank", _over_ranks(min)),
        _computed("slowest_rank_s", "slowest rank's step", "ms", "longest median step of a rank", _over_ranks(max)),
    ],
    "Own work and waiting by phase": [],
    "GPU": [_computed("gpus", "GPUs", "count", _CARDS, lambda of: (of.telemetry and len(of.telemetry.gpus)) or None)],
    "Allocator": [],
    "Synchronization": [
        _computed(
            "sync_lines",
            "lines that synchronize",
            "count",
            _LINES,
            lambda of: None if of.syncs is None else len(of.syncs),
        ),
        _computed(
            *("syncs", "synchronizations", "count", "how often those lines did"),
            lambda of: None if of.syncs is None else sum(sync.count for sync in of.syncs),
        ),
    ],
    "What else used the machine": [],
    "Numerics": [],
    "Model": [],
    "Machine": [],
    "How it ended": [],
    "Shares of the typical step": [],
    "Spread of the steps": _SPREAD,
}


def _by_step(quantity: Quantity) -> Quantity:
    step = TIMES["step"]

    def interval(record: RunRecord) -> tuple[float, float] | None:
        value, time, around = quantity.get(record), step.get(record), step.interval(record)
        if value is None or time is None or around is None or not all(around):
            return None
        return value * time / around[1], value * time / around[0]

    return replace(quantity, interval=interval)


def _whole_run(record: RunRecord) -> float | None:
    # An unfinished record has the time until the loop began.
    return None if record.status == "unfinished" else record.duration_s


def _groups() -> dict[str, tuple[Quantity, ...]]:
    groups = {title: [*of] for title, of in _GROUPS.items()}
    for one in figures_in(RunRecord):
        # Other phases hardly multiply: their FLOPs would be columns that are nearly always empty.
        if one.path.startswith("floors.") and ".flops." in one.path and one.key not in _MULTIPLYING:
            continue
        quantity = _by_step(one.quantity) if one.figure.goes_by_step else one.quantity
        if quantity.path == "duration_s":
            quantity = replace(quantity, get=_whole_run)
        groups[quantity.group or "Steps"].append(quantity)
    for title in ("Use of the CPU", "Own work and waiting by phase"):
        groups[title].sort(key=lambda of: PARTS.index(of.of or ""))
    return {title: tuple(_within_group(title, quantity) for quantity in of) for title, of in groups.items()}


def _within_group(title: str, quantity: Quantity) -> Quantity:
    return quantity if quantity.group == title else replace(quantity, group=title)


GROUPS = _groups()  # all figures of a run, by group

# all figures of a run by their name
QUANTITIES: dict[str, Quantity] = {quantity.name: quantity for of in GROUPS.values() for quantity in of}

# the columns of each list in ``run.json``, by its path; their paths and ``get`` are relative to a row
LISTS = dict(rows_in(RunRecord))

_SEARCH = tuple(one.quantity for one in figures_in(ImproveRecord))

# the figures of each kind of file, by path: under an empty path those that it has once, then the columns of lists
FIGURES: dict[type[Part], dict[str, tuple[Quantity, ...]]] = {
    RunRecord: {"": tuple(QUANTITIES.values()), **LISTS},
    ImproveRecord: {"": _SEARCH, **dict(rows_in(ImproveRecord))},
}

MEMORY = {name: QUANTITIES[f"{name}_bytes"] for name in MemoryReading.model_fields}
TOKENS_PER_S, MFU = QUANTITIES["tokens_per_s"], QUANTITIES["mfu"]
# the tokens of one step in ``steps.csv``; a run has ``tokens_per_step``
TOKENS = Quantity("tokens", "tokens", *UNITS["count"], "tokens trained on in the step")

# the causes of memory, each with its title
CAUSES = {cause: cause.replace("_", " ") for cause in MemoryCauses.model_fields}

_TIME_COLUMNS = (times[part].name for times in (TIMES, HOST_TIMES) for part in TIMED)
# the header of ``steps.csv``
STEP_COLUMNS = ("step", "stage", *_TIME_COLUMNS, TOKENS.name, *(of.name for of in MEMORY.values()), "rank")

_FLOOR = {one.path: one.quantity for one in figures_in(Floor)}
# columns of a table that has a row for each phase
FLOOR, TIMES_FLOOR = (
    replace(of, meaning=of.meaning.replace("PHASE", "the phase")) for of in (_FLOOR["seconds"], _FLOOR["times"])
)

# the columns of a plan's table, which has a row for each phase
PLANNED_COLUMNS = (
    column("phase", "phase", "text", "part of the step"),
    column("peak", "peak", "bytes", "most bytes at one time in it, rehearsed"),
    *(column(f"causes.{cause}", title, "bytes", f"{title} in that peak") for cause, title in CAUSES.items()),
    column("workspaces", "workspaces", "bytes", "what cuBLAS keeps to work in"),
    FLOOR,
)

# the columns of a plan's table of settings that would need less
REMEDY_COLUMNS = (
    column("needs", "needs", "bytes", "memory that surely holds it: the peak and a ninth of it, or what is reserved"),
    replace(FLOOR, meaning="least time of the step: the sum of its phases' floors that are known"),
    column("fits", "verdict", "text", "whether it fits into the device"),
    column("changes", "may change", "text", "what of the training it may change"),
    column("words", "with", "text", "options to be added to the call"),
)

_TRIED = {of.name: of for of in FIGURES[ImproveRecord]["tried"]}
_BOTH = "without → with the change: "
_NUMERICS = "loss and gradients, and whether that is too much; only what is faster is checked"
# the columns of the table of `improve`: a row for each change, which shows values without and with it
TRIED_COLUMNS = (
    _TRIED["name"],
    replace(_TRIED["b_s"], title="step", meaning=_BOTH + _TRIED["b_s"].meaning.partition(": ")[2]),
    *(_TRIED[name] for name in ("saved_s", "ceiling_s", "pairs")),
    replace(_TRIED["b_bytes"], title="memory", meaning=f"peak {_BOTH}{_TRIED['b_bytes'].meaning.partition(': ')[2]}"),
    column("numerics", "numbers off by", "text", _NUMERICS),
    _TRIED["verdict"],
)


def overview() -> dict[str, list[Quantity]]:
    """Return the groups with one entry a family, such as one for each phase: ``PART`` or ``MOMENT`` stands for what
    differs."""
    return {title: list({of.name: of for of in map(_whole_family, group)}.values()) for title, group in GROUPS.items()}


def _whole_family(member: Quantity) -> Quantity:
    texts = {name: getattr(member, name) for name in ("name", "title", "meaning", "path")}
    if member.of is not None:
        stands = "MOMENT" if member.of in MOMENTS else "PART"
        for word in {member.of, MOMENTS.get(member.of, member.of)}:
            texts = {name: text.replace(word, stands, 1) for name, text in texts.items()}
    return replace(member, **texts)
