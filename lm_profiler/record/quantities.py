"""The registry of all measured quantities: names, units, formats, TensorBoard tags, meanings, places in records.

Columns of ``steps.csv``, keys of ``run.json`` and ``improve.json``, tags, table headers and the documentation come
from here. A figure's row stands beside its field, in ``record/run_record.py`` and the files that it imports; this
module reads them from there, and adds the groups, the times of each part, and what is computed from several values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from lm_profiler.record.figure import *  # noqa: F403  # the registry offers them too
from lm_profiler.record.figure import Figure, Place
from lm_profiler.record.figure_fields import figures_in, rows_in
from lm_profiler.record.files import Part
from lm_profiler.record.improve_record import ImproveRecord
from lm_profiler.record.parts import *  # noqa: F403
from lm_profiler.record.parts import MEANINGS, PARTS, TIMED, WORDS
from lm_profiler.record.run_record import (
    MOMENTS,
    Floor,
    MemoryCauses,
    MemoryReading,
    RunRecord,
)

Quantity = Figure  # a figure of the registry, with its path


# -- times of each part ------------------------------------------------------------------------------------------------

_PLACES = {
    "step": Place.HEADLINE,
    "forward": Place.TABLE,
    "backward": Place.TABLE,
    "optimizer": Place.TABLE,
}
_RUN_TAGS = {"step": "step_ms", "forward": "forward_ms", "backward": "backward_ms"}


class _Clock(NamedTuple):
    """The suffixes of the names, titles and meanings of times on one clock."""

    name_suffix: str
    title_suffix: str
    meaning_suffix: str


# the clocks, by the name of the record's field that has their times
_CLOCKS = {
    "time": _Clock(name_suffix="", title_suffix="", meaning_suffix=""),
    "host_time": _Clock(
        name_suffix="_host",
        title_suffix=" (host)",
        meaning_suffix=", on the host's clock",
    ),
}


class _Statistic(NamedTuple):
    """How a statistic of the times over the steps is described and where it is shown."""

    words: str
    unit: str
    place: Place


_STATISTICS = {
    "median": _Statistic(words="median", unit="ms", place=Place.FILE),
    "std": _Statistic(words="standard deviation", unit="ms", place=Place.FILE),
    "cv": _Statistic(
        words="coefficient of variation (standard deviation / mean)",
        unit="%",
        place=Place.FILE,
    ),
    "p95": _Statistic(words="95th percentile", unit="ms", place=Place.FILE),
    "p5": _Statistic(words="5th percentile", unit="ms", place=Place.ASKED),
    "min": _Statistic(words="minimum", unit="ms", place=Place.ASKED),
    "max": _Statistic(words="maximum", unit="ms", place=Place.ASKED),
}


def _time_getter(
    clock_name: str, part: str, statistic: str
) -> Callable[[RunRecord], Any]:
    """Return a function that reads a statistic of ``part`` on a clock; it returns None if the part did not occur."""

    def get(record: RunRecord) -> Any:
        time = getattr(record, clock_name).get(part)
        if time is None or not time.max:
            return None
        return getattr(time, statistic)

    return get


def _mean_time(clock_name: str, part: str) -> Figure:
    """Return the figure of the mean time of ``part`` on a clock, ``clock_name`` being the record's field for it.

    ``tag`` names the curve over the steps in TensorBoard, ``run_tag`` the run's one value among HPARAMS. Only the
    device's clock has such values, and columns in the tables.
    """
    clock = _CLOCKS[clock_name]
    figure = Figure(
        f"{WORDS[part]}{clock.title_suffix}",
        "ms",
        f"{MEANINGS[part]}{clock.meaning_suffix}",
        f"{part}{clock.name_suffix}_s",
        path=f"{clock_name}.{part}.mean",
        compute=_time_getter(clock_name, part, "mean"),
        interval_ends=("mean_low", "mean_high"),
        tag=f"{clock_name}_ms/{part}",
        group="Time on the host's clock",
    )
    if clock_name == "host_time":
        return figure
    return replace(
        figure,
        group="Time of a step",
        place=_PLACES.get(part, Place.FILE),
        run_tag=_RUN_TAGS.get(part),
    )


def _spread_figure(clock_name: str, part: str, name: str) -> Figure:
    """Return the figure of the statistic ``name`` (``median``, ``std``, …) of the times of ``part`` on a clock."""
    clock = _CLOCKS[clock_name]
    statistic = _STATISTICS[name]
    short_name = "CV" if name == "cv" else name
    unit_suffix = "_s" if statistic.unit == "ms" else ""
    return Figure(
        f"{WORDS[part]} {short_name}{clock.title_suffix}",
        statistic.unit,
        f"{statistic.words} of the times of {WORDS[part]} over the steps{clock.meaning_suffix}",
        f"{part}{clock.name_suffix}_{name}{unit_suffix}",
        path=f"{clock_name}.{part}.{name}",
        compute=_time_getter(clock_name, part, name),
        place=statistic.place if clock_name == "time" else Place.ASKED,
        group="Spread of the steps",
        member=part,
    )


# times on the device's stream, or on the host's clock if there is no device; a run's are means over its steps
TIMES = {part: _mean_time("time", part) for part in MEANINGS}
# times on the host's clock
HOST_TIMES = {part: _mean_time("host_time", part) for part in MEANINGS}

# -- figures that are computed from several values ---------------------------------------------------------------------

# the meaning of the term ``slow_products``; ``products`` names its operators
MEANING_OF_PRODUCTS = "time of {products} and fused attention beyond the ideal time at the clock of the run"

# the title and the meaning of each term, in the order of the waterfall
TERMS = {
    "ideal": ("ideal", "time that the model's FLOPs take at the device's peak"),
    "clock": (
        "lower clock",
        "additional time of the model's FLOPs because the device ran at a lower clock than the peak assumes",
    ),
    "slow_products": (
        "slow matmuls",
        MEANING_OF_PRODUCTS.format(products="matrix products"),
    ),
    "recomputation": (
        "recomputation",
        "time of the forward passes that activation checkpointing repeats in backward",
    ),
    "optimizer_products": (
        "optimizer's matmuls",
        "time of the optimizer's matrix products, for example in Muon, SOAP and Shampoo",
    ),
    "bandwidth": (
        "memory traffic",
        "time that memory-bound kernels would take at the device's full bandwidth",
    ),
    "beyond_bandwidth": (
        "beyond bandwidth",
        "time of memory-bound kernels beyond the time at the device's full bandwidth",
    ),
    "communication": (
        "communication",
        "time in which only communication ran, and no other kernel",
    ),
    "waiting": (
        "waiting for ranks",
        "time of waiting for other ranks, which shrinks only if those ranks become faster",
    ),
    "gaps": (
        "gaps",
        "time in which the device was idle: it waited for the host, or for a synchronization",
    ),
    "input": ("input", "time of waiting for data and for its transfer to the device"),
    "unexplained": (
        "unexplained",
        "time of the step that is in none of the other terms",
    ),
}


def term_title(name: str) -> str:
    """Return the title of a term; a term of a later version has its own name."""
    return TERMS[name][0] if name in TERMS else name.replace("_", " ")


def _term_getter(name: str) -> Callable[[RunRecord], float | None]:
    """Return a function that returns the seconds of a waterfall's term from a record; None if there is none."""

    def get(record: RunRecord) -> float | None:
        waterfall = record.waterfall
        if waterfall is None or name in waterfall.merged_terms:
            return None
        for term in waterfall.terms:
            if term.name == name:
                return term.seconds
        return None

    return get


def _fastest_rank_s(record: RunRecord) -> float | None:
    return min(record.rank_step_s) if len(record.rank_step_s) > 1 else None


def _slowest_rank_s(record: RunRecord) -> float | None:
    return max(record.rank_step_s) if len(record.rank_step_s) > 1 else None


def _ranks_apart(record: RunRecord) -> float | None:
    """Return by which share the slowest rank takes longer than the fastest; None if unknown."""
    fastest_s, slowest_s = _fastest_rank_s(record), _slowest_rank_s(record)
    if slowest_s is None or not fastest_s:
        return None
    return slowest_s / fastest_s - 1


def _backward_over_forward(record: RunRecord) -> float | None:
    """Return the ratio of backward to forward; None if one of them did not occur."""
    backward_s = TIMES["backward"].get(record)
    forward_s = TIMES["forward"].get(record)
    if not backward_s or not forward_s:
        return None
    ratio: float = backward_s / forward_s
    return ratio


def _odd_step_count(record: RunRecord) -> int | None:
    return len(record.odd_steps) if record.time else None


def _gpu_count(record: RunRecord) -> int | None:
    if record.telemetry is None:
        return None
    return len(record.telemetry.gpus) or None


def _sync_line_count(record: RunRecord) -> int | None:
    return None if record.syncs is None else len(record.syncs)


def _sync_count(record: RunRecord) -> int | None:
    return None if record.syncs is None else sum(sync.count for sync in record.syncs)


def _over_planned(record: RunRecord) -> float | None:
    """Return the measured over the planned bytes: of the peak, or else of the level after forward."""
    # On a CPU only levels can be compared: a process's resident size does not show the bytes of its tensors.
    planned, memory = record.planned, record.memory
    if planned is None or memory is None:
        return None
    if memory.measured.allocated_peak is not None and planned.peak:
        return memory.measured.allocated_peak / planned.peak
    if memory.held is None or planned.held is None:
        return None
    if memory.held.source != planned.held.source:
        return None
    if memory.held.forward is None or not planned.held.forward:
        return None
    return memory.held.forward / planned.held.forward


_CARDS = (
    "number of GPUs of the run; energy and power are sums over them, the clocks are those of the slowest GPU, "
    "and the temperature is that of the hottest"
)


def _computed_figures() -> Iterator[Figure]:
    """Yield the figures that no field of the record holds: each is computed from others when it is requested."""
    for name, (title, meaning) in TERMS.items():
        yield Figure(
            title, "ms", meaning, f"waterfall_{name}_s",
            group="Terms of the waterfall", compute=_term_getter(name),
        )  # fmt: skip
    yield Figure(
        "measured / planned", "x",
        "peak of allocated memory / planned peak; without a GPU, bytes held after forward / the planned bytes",
        "measured_over_planned", group="Planned memory", compute=_over_planned,
    )  # fmt: skip
    yield Figure(
        "backward / forward", "x", "mean time of backward / mean time of forward", "backward_over_forward",
        group="Steps", compute=_backward_over_forward,
    )  # fmt: skip
    yield Figure(
        "odd steps",
        "count",
        "number of measured steps whose duration is far from what the other steps predict",
        "odd_steps",
        group="Steps",
        compute=_odd_step_count,
    )
    yield Figure(
        "slowest rank longer by",
        "%",
        "how much longer the median step takes on the slowest rank than on the fastest rank",
        "ranks_apart",
        group="Ranks",
        compute=_ranks_apart,
    )
    yield Figure(
        "fastest rank's step", "ms", "median duration of a step on the fastest rank", "fastest_rank_s",
        group="Ranks", compute=_fastest_rank_s,
    )  # fmt: skip
    yield Figure(
        "slowest rank's step", "ms", "median duration of a step on the slowest rank", "slowest_rank_s",
        group="Ranks", compute=_slowest_rank_s,
    )  # fmt: skip
    yield Figure("GPUs", "count", _CARDS, "gpus", group="GPU", compute=_gpu_count)
    yield Figure(
        "lines that synchronize",
        "count",
        "number of lines of code at which the host waited for the device, in the memory stage",
        "sync_lines",
        group="Synchronization",
        compute=_sync_line_count,
    )
    yield Figure(
        "synchronizations", "count", "how often the host waited for the device, in the memory stage", "syncs",
        group="Synchronization", compute=_sync_count,
    )  # fmt: skip


# -- the registry ------------------------------------------------------------------------------------------------------

# they list figures in the order of the phases
_GROUPS_BY_PHASE = ("Use of the CPU", "Own work and waiting by phase")
_GROUP_ORDER = (
    "Time of a step", "Time on the host's clock", "Throughput", "Use of the hardware", "Floors", "Waterfall",
    "Terms of the waterfall", "Memory", "Planned memory", "Memory by phase", "Memory by cause",
    "Memory at three moments", "Other, by its owner", "Use of the CPU", "Counters of the mean step", "Steps",
    "Steadiness", "Ranks", "Own work and waiting by phase", "GPU", "Allocator", "Synchronization",
    "What else used the machine", "Numerics", "Model", "Machine", "How it ended", "Shares of the typical step",
    "Spread of the steps",
)  # fmt: skip


def _whole_run_s(record: RunRecord) -> float | None:
    # An unfinished record has the time until the loop began.
    return None if record.status == "unfinished" else record.duration_s


def _all_figures() -> Iterator[Figure]:
    """Yield all figures, in the order in which tables and files have them."""
    yield TIMES["step"]
    for part, figure in TIMES.items():
        if part != "step":
            yield figure
    yield from HOST_TIMES.values()
    yield from _computed_figures()
    for figure in figures_in(RunRecord):
        # Phases without matmuls have hardly any FLOPs: their columns would be nearly always empty.
        is_flops_of_a_phase = (
            figure.path.startswith("floors.") and ".flops." in figure.path
        )
        if is_flops_of_a_phase and figure.member not in ("forward", "backward"):
            continue
        if figure.path == "duration_s":
            figure = replace(figure, compute=_whole_run_s)
        yield replace(figure, group=figure.group or "Steps")
    for clock_name in _CLOCKS:
        for part in TIMES:
            for name in _STATISTICS:
                yield _spread_figure(clock_name, part, name)


def _groups() -> dict[str, tuple[Figure, ...]]:
    """Return all figures by the title of their group."""
    groups: dict[str, list[Figure]] = {title: [] for title in _GROUP_ORDER}
    for figure in _all_figures():
        groups[figure.group].append(figure)
    for title in _GROUPS_BY_PHASE:
        groups[title].sort(key=_phase_number)
    return {title: tuple(figures) for title, figures in groups.items()}


def _phase_number(figure: Figure) -> int:
    phase = figure.member or ""
    return PARTS.index(phase)


GROUPS = _groups()  # all figures of a run, by group

# all figures of a run by their name
QUANTITIES: dict[str, Figure] = {}
for _figures in GROUPS.values():
    QUANTITIES.update({figure.name: figure for figure in _figures})

# the columns of each list in ``run.json``, by its path; their paths and ``get`` are relative to a row
LISTS = dict(rows_in(RunRecord))

# the figures of each kind of file, by path: under an empty path the figures that it has once, then the columns of lists
FIGURES: dict[type[Part], dict[str, tuple[Figure, ...]]] = {
    RunRecord: {"": tuple(QUANTITIES.values()), **LISTS},
    ImproveRecord: {
        "": tuple(figures_in(ImproveRecord)),
        **dict(rows_in(ImproveRecord)),
    },
}

MEMORY = {name: QUANTITIES[f"{name}_bytes"] for name in MemoryReading.model_fields}
TOKENS_PER_S = QUANTITIES["tokens_per_s"]
MFU = QUANTITIES["mfu"]
# the tokens of one step in ``steps.csv``; a run has ``tokens_per_step``
TOKENS = Figure(
    "tokens", "count", "number of tokens in the batches of the step", "tokens"
)

# the causes of memory, each with its title
CAUSES = {cause: cause.replace("_", " ") for cause in MemoryCauses.model_fields}

# the header of ``steps.csv``
STEP_COLUMNS = (
    "step",
    "stage",
    *(TIMES[part].name for part in TIMED),
    *(HOST_TIMES[part].name for part in TIMED),
    TOKENS.name,
    *(reading.name for reading in MEMORY.values()),
    "rank",
)

# -- columns of tables that are no lists of a record -------------------------------------------------------------------


def _floor_column(field_name: str) -> Figure:
    """Return the column of a floor in a table that has a row for each phase."""
    columns = {column.path: column for column in figures_in(Floor)}
    column = columns[field_name]
    return replace(column, meaning=column.meaning.replace("PHASE", "the phase"))


FLOOR = _floor_column("seconds")
TIMES_FLOOR = _floor_column("times")


def _column(path: str, title: str, unit: str, meaning: str) -> Figure:
    return Figure(title, unit, meaning, path.rpartition(".")[2], path=path)


# the columns of a plan's table, which has a row for each phase
PLANNED_COLUMNS = (
    _column("phase", "phase", "text", "phase of the step"),
    _column(
        "peak",
        "peak",
        "bytes",
        "largest number of bytes held at one time within the phase, from a rehearsal",
    ),
    *(
        _column(
            f"causes.{cause}",
            title,
            "bytes",
            f"memory of {title} in the peak of the phase",
        )
        for cause, title in CAUSES.items()
    ),
    _column(
        "workspaces",
        "workspaces",
        "bytes",
        "memory that cuBLAS keeps as workspace, in the peak of the phase",
    ),
    FLOOR,
)

# the columns of a plan's table of settings that would need less
REMEDY_COLUMNS = (
    _column(
        "needs",
        "needs",
        "bytes",
        "least memory in which the run fits: the planned peak divided by 0.9, or the planned reserved memory if larger",
    ),
    replace(
        FLOOR,
        meaning="least time of the step: the sum of the known floors of its phases",
    ),
    _column(
        "fits",
        "verdict",
        "text",
        "whether a step with the changed options fits into the memory of the device",
    ),
    _column(
        "changes", "may change", "text", "effect that the change may have on training"
    ),
    _column("words", "with", "text", "options of the change, to add to the call"),
)

_TRIED = {column.name: column for column in FIGURES[ImproveRecord]["tried"]}


def _without_and_with(subject: str, name: str) -> str:
    """Return the meaning of the column ``name`` if it also shows the value without the change."""
    _, _, quantity = _TRIED[name].meaning.partition(": ")
    return f"{subject} without → with the change: {quantity}"


_NUMERICS = (
    "relative difference of loss and gradients with the change, and whether it is too large; "
    "only changes that are faster are checked"
)
# the columns of the table of `improve`: a row for each change, which shows values without and with it
TRIED_COLUMNS = (
    _TRIED["name"],
    replace(_TRIED["b_s"], title="step", meaning=_without_and_with("step time", "b_s")),
    _TRIED["saved_s"],
    _TRIED["ceiling_s"],
    _TRIED["pairs"],
    replace(
        _TRIED["b_bytes"],
        title="memory",
        meaning=_without_and_with("peak memory", "b_bytes"),
    ),
    _column("numerics", "numbers off by", "text", _NUMERICS),
    _TRIED["verdict"],
)


def overview() -> dict[str, list[Figure]]:
    """Return the groups with one entry per family; ``PART`` or ``MOMENT`` stands for the word that differs in it."""
    families_by_group = {}
    for title, figures in GROUPS.items():
        families: dict[str, Figure] = {}
        for figure in figures:
            family = _figure_of_family(figure)
            families[family.name] = family
        families_by_group[title] = list(families.values())
    return families_by_group


def _figure_of_family(figure: Figure) -> Figure:
    """Return ``figure`` with ``PART`` or ``MOMENT`` for the word that distinguishes it from others of its family."""
    if figure.member is None:
        return figure
    placeholder = "MOMENT" if figure.member in MOMENTS else "PART"
    words = {
        MOMENTS.get(figure.member, figure.member),
        WORDS.get(figure.member, figure.member),
        figure.member,
    }
    texts = {}
    for field in ("name", "title", "meaning", "path"):
        text = getattr(figure, field)
        for word in words:
            text = text.replace(word, placeholder, 1)
        texts[field] = text
    return replace(figure, **texts)
