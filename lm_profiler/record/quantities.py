"""The registry of all measured quantities: names, units, formats, TensorBoard tags, meanings, places in records.

Columns of ``steps.csv``, keys of ``run.json`` and ``improve.json``, tags, table headers and the documentation come
from here. A figure's row stands beside its field, in ``record/run_record.py`` and the files that it imports; this
module reads them from there, and adds the groups, the times of each part, and what is computed from several values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import UnionType
from typing import Annotated, Any, TypeGuard, Union, get_args, get_origin, get_type_hints

from lm_profiler.record.figure import *  # noqa: F403  # the registry is asked for them too
from lm_profiler.record.figure import Figure, Place, Within, at
from lm_profiler.record.files import Part
from lm_profiler.record.improve_record import ImproveRecord
from lm_profiler.record.parts import *  # noqa: F403
from lm_profiler.record.parts import MEANINGS, PARTS, TIMED, WORDS
from lm_profiler.record.run_record import MOMENTS, Floor, MemoryCauses, MemoryReading, RunRecord

Quantity = Figure  # a figure of the registry, with its path


def figures_in(form: type[Part]) -> Iterator[Figure]:
    """Yield the figures that an object of the type has once: of its fields, of parts within it, of its properties."""
    for name, field in form.model_fields.items():
        told, kind = field.json_schema_extra, _bare(field.annotation)
        if isinstance(told, Figure) and told.keys:
            for key, word in _words(told.keys):
                texts = {of: getattr(told, of).format(key=key, word=word) for of in ("title", "meaning")}
                own, of = told.name.format(key=key) or key, key if told.place is Place.ASKED else None
                yield replace(told, name=own, path=f"{name}.{key}", of=of, **texts)
        elif isinstance(told, Figure) and not _is_column(kind):
            yield replace(told, name=told.name or name, path=name)
        elif isinstance(told, Within) or _is_part(kind):
            yield from _figures_within(name, told if isinstance(told, Within) else Within(), kind)
    for name, member in vars(form).items():
        returned = getattr(member.fget, "__annotations__", {}).get("return", "") if isinstance(member, property) else ""
        # Annotations are text here, and only those of figures need evaluating.
        if str(returned).startswith("Annotated"):
            told = get_type_hints(member.fget, include_extras=True)["return"].__metadata__[0]
            yield replace(told, name=told.name or name, compute=at(name))


def _figures_within(name: str, told: Within, kind: Any) -> Iterator[Figure]:
    by_key = get_origin(kind) is dict
    for inner in figures_in(get_args(kind)[1] if by_key else kind):
        if inner.path not in told.instead or inner.compute:
            for key, word in _words(told.keys) if by_key else [("", "")]:
                yield _retold(inner, told, f"{name}.{key}".rstrip("."), key, word)
    for field, other in told.instead.items():
        if other is not None:
            yield replace(other, path=f"{name}.{field}", group=other.group or told.group)


def _retold(inner: Figure, told: Within, above: str, key: str, word: str) -> Figure:
    own = {"name": inner.name, "title": inner.title, "meaning": inner.meaning, "key": key, "word": word}
    part, compute = at(above), inner.compute
    place = told.place or inner.place
    return replace(
        inner,
        name=told.name.format(**own),
        title=told.title.format(**own),
        meaning=told.meaning.format(**own).replace("PHASE", key),
        path=f"{above}.{inner.path}" if inner.path else "",
        compute=compute and (lambda record: None if (of := part(record)) is None else compute(of)),
        place=place,
        group=inner.group or told.group,
        of=inner.of if not key else key if place is Place.ASKED else None,
        tag=None if key else inner.tag,
        run_tag=None if key else inner.run_tag,
    )


def rows_in(form: type[Part], before: str = "") -> Iterator[tuple[str, tuple[Figure, ...]]]:
    """Yield the path and the columns of each list in the type whose rows have figures; ``[]`` stands for each item."""
    for name, field in form.model_fields.items():
        told, kind = field.json_schema_extra, _bare(field.annotation)
        inner = _bare(get_args(kind)[0]) if get_origin(kind) is list else None
        if isinstance(told, Figure) and _is_column(kind):
            yield before + name, (replace(told, name=told.name or name),)
        elif _is_part(inner):
            if row := tuple(figures_in(inner)):
                yield before + name, row
            yield from rows_in(inner, f"{before}{name}[].")
        elif _is_part(kind):
            yield from rows_in(kind, f"{before}{name}.")


def _bare(annotation: Any) -> Any:
    if get_origin(annotation) is Annotated:
        return _bare(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return _bare(next(kind for kind in get_args(annotation) if kind is not type(None)))
    return annotation


def _is_part(kind: Any) -> TypeGuard[type[Part]]:
    # Python 3.10 takes list[int] for a type, of which no one may ask what it is derived from
    return isinstance(kind, type) and get_origin(kind) is None and issubclass(kind, Part)


def _is_column(kind: Any) -> bool:
    """Return whether it is a list of numbers, which is a separate table; a list of words is one line."""
    return get_origin(kind) is list and _bare(get_args(kind)[0]) in (int, float)


def _words(keys: Any) -> list[tuple[str, str]]:
    return list(keys.items()) if isinstance(keys, Mapping) else [(key, key) for key in keys]


_PLACES = {"step": Place.HEADLINE, **dict.fromkeys(("forward", "backward", "optimizer"), Place.TABLE)}
_RUN_TAGS = {part: f"{part}_ms" for part in ("step", "forward", "backward")}
# by clock, the suffixes of name, title and meaning
_CLOCKS = {"time": ("", "", ""), "host_time": ("_host", " (host)", ", on the host's clock")}
_STATISTICS = {
    "median": ("median", "ms", Place.FILE),
    "std": ("standard deviation", "ms", Place.FILE),
    "cv": ("standard deviation over the mean", "%", Place.FILE),
    "p95": ("95th percentile", "ms", Place.FILE),
    "p5": ("5th percentile", "ms", Place.ASKED),
    "min": ("minimum", "ms", Place.ASKED),
    "max": ("maximum", "ms", Place.ASKED),
}


def _time(times: str, part: str, name: str) -> Figure:
    """Return the figure of a statistic of ``part`` on a clock; unknown if it took no time, so did not occur."""

    def get(record: RunRecord) -> Any:
        time = getattr(record, times).get(part)
        return getattr(time, name) if time is not None and time.max else None

    on, said, meant = _CLOCKS[times]
    title, path = WORDS[part], f"{times}.{part}.{name}"
    if name == "mean":
        return Figure(
            title + said, "ms", MEANINGS[part] + meant, f"{part}{on}_s", path=path, compute=get,
            interval_ends=("mean_low", "mean_high"), tag=f"{times}_ms/{part}",
            place=Place.FILE if on else _PLACES.get(part, Place.FILE), run_tag=None if on else _RUN_TAGS.get(part),
            group="Time on the host's clock" if on else "Time of a step",
        )  # fmt: skip
    words, unit, place = _STATISTICS[name]
    return Figure(
        f"{title} {name.upper() if name == 'cv' else name}{said}", unit, f"{words} of the time of {title}{meant}",
        f"{part}{on}_{name}" + "_s" * (unit == "ms"), path=path, compute=get,
        place=Place.ASKED if on else place, group="Spread of the steps", of=part,
    )  # fmt: skip


# times on the device's stream, or on the host's clock where there is no device; a run's are means over its steps
TIMES = {part: _time("time", part, "mean") for part in MEANINGS}
HOST_TIMES = {part: _time("host_time", part, "mean") for part in TIMES}  # times on the host's clock

# the title and the meaning of each term, in the order of the waterfall
TERMS = {
    "ideal": ("ideal", "the model's FLOPs at the peak"),
    "clock": ("lower clock", "excess time of the model's FLOPs at the clock that the device held"),
    "slow_products": ("slow matmuls", "what matrix products and fused attention take beyond the ideal at that clock"),
    "recomputation": ("recomputation", "what activation checkpointing recomputes"),
    "bandwidth": ("memory traffic", "memory-bound kernels, if they moved their bytes at the full bandwidth"),
    "beyond_bandwidth": ("beyond bandwidth", "what memory-bound kernels take longer than at the full bandwidth"),
    "communication": ("communication", "communication that no other kernel hides"),
    "waiting": ("waiting for ranks", "waiting for other ranks; only mending those ranks saves it"),
    "gaps": ("gaps", "nothing ran: waiting for the host, or at a synchronization"),
    "input": ("input", "waiting for data and its transfer"),
    "unexplained": ("unexplained", "what is left of the step"),
}


def term_title(name: str) -> str:
    """Return the title of a term; a term of a later version has its own name."""
    return TERMS[name][0] if name in TERMS else name.replace("_", " ")


def _term_s(name: str) -> Callable[[RunRecord], float | None]:
    def get(record: RunRecord) -> float | None:
        fall = record.waterfall
        terms = () if fall is None or name in fall.untold else fall.terms
        return next((term.seconds for term in terms if term.name == name), None)

    return get


def _over_ranks(statistic: Callable[[list[float]], float | None]) -> Callable[[RunRecord], float | None]:
    """Return a function that computes ``statistic`` of the ranks' median steps; None for a single rank."""
    return lambda record: statistic(record.rank_step_s) if len(record.rank_step_s) > 1 else None


def _apart(steps: list[float]) -> float | None:
    return max(steps) / min(steps) - 1 if min(steps) > 0 else None


def _backward_over_forward(record: RunRecord) -> float | None:
    backward, forward = (TIMES[part].get(record) for part in ("backward", "forward"))
    return backward / forward if backward and forward else None


def _over_planned(record: RunRecord) -> float | None:
    """Return the measured over the planned bytes: of the peak, or else of the level after forward."""
    # If no device counts its tensors, a process's resident size says too little about them.
    planned, memory = record.planned, record.memory
    if planned is None or memory is None:
        return None
    pairs = [(memory.measured.allocated_peak, planned.peak)]
    if memory.held is not None and planned.held is not None and memory.held.source == planned.held.source:
        pairs.append((memory.held.forward, planned.held.forward))
    return next((measured / whole for measured, whole in pairs if measured is not None and whole), None)


_OVER = "peak allocated over the planned one; without a device that reports it, the level after forward over its plan"
_CARDS = "cards of the run: energy and power are their sums, clocks the slowest's, the temperature the highest"

# by name: title, unit, meaning, group, and how it is computed
_COMPUTED: dict[str, tuple[str, str, str, str, Callable[[RunRecord], Any]]] = {
    **{
        f"waterfall_{name}_s": (title, "ms", meaning, "Terms of the waterfall", _term_s(name))
        for name, (title, meaning) in TERMS.items()
    },
    "measured_over_planned": ("measured / planned", "x", _OVER, "Planned memory", _over_planned),
    "backward_over_forward": (
        "backward / forward", "x", "mean backward over mean forward", "Steps", _backward_over_forward,
    ),
    "odd_steps": (
        "odd steps", "count", "measured steps far from the others", "Steps",
        lambda of: len(of.odd_steps) if of.time else None,
    ),
    "ranks_apart": (
        "slowest rank longer by", "%", "median step of the slowest rank over the fastest's, less 1", "Ranks",
        _over_ranks(_apart),
    ),
    "fastest_rank_s": ("fastest rank's step", "ms", "shortest median step of a rank", "Ranks", _over_ranks(min)),
    "slowest_rank_s": ("slowest rank's step", "ms", "longest median step of a rank", "Ranks", _over_ranks(max)),
    "gpus": ("GPUs", "count", _CARDS, "GPU", lambda of: (of.telemetry and len(of.telemetry.gpus)) or None),
    "sync_lines": (
        "lines that synchronize", "count", "lines that made the host wait for the device, in the memory stage",
        "Synchronization", lambda of: None if of.syncs is None else len(of.syncs),
    ),
    "syncs": (
        "synchronizations", "count", "how often those lines did", "Synchronization",
        lambda of: None if of.syncs is None else sum(sync.count for sync in of.syncs),
    ),
}  # fmt: skip

_BY_PHASE = ("Use of the CPU", "Own work and waiting by phase")
_ORDER = (
    "Time of a step", "Time on the host's clock", "Throughput", "Use of the hardware", "Floors", "Waterfall",
    "Terms of the waterfall", "Memory", "Planned memory", "Memory by phase", "Memory by cause",
    "Memory at three moments", "Other, by its owner", "Use of the CPU", "Counters of the mean step", "Steps",
    "Steadiness", "Ranks", "Own work and waiting by phase", "GPU", "Allocator", "Synchronization",
    "What else used the machine", "Numerics", "Model", "Machine", "How it ended", "Shares of the typical step",
    "Spread of the steps",
)  # fmt: skip


def _whole_run(record: RunRecord) -> float | None:
    # An unfinished record has the time until the loop began.
    return None if record.status == "unfinished" else record.duration_s


def _every_figure() -> Iterator[Figure]:
    yield from sorted(TIMES.values(), key=lambda of: of is not TIMES["step"])
    yield from HOST_TIMES.values()
    for name, (title, unit, meaning, group, compute) in _COMPUTED.items():
        yield Figure(title, unit, meaning, name, group=group, compute=compute)
    for of in figures_in(RunRecord):
        # Other phases have hardly any FLOPs: their columns would be nearly always empty.
        if not (of.path.startswith("floors.") and ".flops." in of.path) or of.of in ("forward", "backward"):
            of = replace(of, group=of.group or "Steps")
            yield replace(of, compute=_whole_run) if of.path == "duration_s" else of
    yield from (_time(times, part, name) for times in _CLOCKS for part in TIMES for name in _STATISTICS)


def _groups() -> dict[str, tuple[Figure, ...]]:
    groups: dict[str, list[Figure]] = {title: [] for title in _ORDER}
    for of in _every_figure():
        groups[of.group].append(of)
    for title in _BY_PHASE:
        groups[title].sort(key=lambda of: PARTS.index(of.of or ""))
    return {title: tuple(of) for title, of in groups.items()}


GROUPS = _groups()  # all figures of a run, by group

# all figures of a run by their name
QUANTITIES: dict[str, Figure] = {of.name: of for group in GROUPS.values() for of in group}

# the columns of each list in ``run.json``, by its path; their paths and ``get`` are relative to a row
LISTS = dict(rows_in(RunRecord))

# the figures of each kind of file, by path: under an empty path the figures that it has once, then the columns of lists
FIGURES: dict[type[Part], dict[str, tuple[Figure, ...]]] = {
    RunRecord: {"": tuple(QUANTITIES.values()), **LISTS},
    ImproveRecord: {"": tuple(figures_in(ImproveRecord)), **dict(rows_in(ImproveRecord))},
}

MEMORY = {name: QUANTITIES[f"{name}_bytes"] for name in MemoryReading.model_fields}
TOKENS_PER_S, MFU = QUANTITIES["tokens_per_s"], QUANTITIES["mfu"]
# the tokens of one step in ``steps.csv``; a run has ``tokens_per_step``
TOKENS = Figure("tokens", "count", "tokens trained on in the step", "tokens")

# the causes of memory, each with its title
CAUSES = {cause: cause.replace("_", " ") for cause in MemoryCauses.model_fields}

_TIME_COLUMNS = (times[part].name for times in (TIMES, HOST_TIMES) for part in TIMED)
# the header of ``steps.csv``
STEP_COLUMNS = ("step", "stage", *_TIME_COLUMNS, TOKENS.name, *(of.name for of in MEMORY.values()), "rank")

# columns of a table that has a row for each phase
_FLOOR = {of.path: replace(of, meaning=of.meaning.replace("PHASE", "the phase")) for of in figures_in(Floor)}
FLOOR, TIMES_FLOOR = _FLOOR["seconds"], _FLOOR["times"]


def _column(path: str, title: str, unit: str, meaning: str) -> Figure:
    return Figure(title, unit, meaning, path.rpartition(".")[2], path=path)


# the columns of a plan's table, which has a row for each phase
PLANNED_COLUMNS = (
    _column("phase", "phase", "text", "part of the step"),
    _column("peak", "peak", "bytes", "most bytes at one time in it, rehearsed"),
    *(_column(f"causes.{cause}", title, "bytes", f"{title} in that peak") for cause, title in CAUSES.items()),
    _column("workspaces", "workspaces", "bytes", "memory that cuBLAS keeps as workspace"),
    FLOOR,
)

# the columns of a plan's table of settings that would need less
REMEDY_COLUMNS = (
    _column("needs", "needs", "bytes", "memory that surely suffices: the peak and a ninth of it, or what is reserved"),
    replace(FLOOR, meaning="least time of the step: the sum of its phases' floors that are known"),
    _column("fits", "verdict", "text", "whether it fits into the device"),
    _column("changes", "may change", "text", "what it may change in training"),
    _column("words", "with", "text", "options to be added to the call"),
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
    _column("numerics", "numbers off by", "text", _NUMERICS),
    _TRIED["verdict"],
)


def overview() -> dict[str, list[Figure]]:
    """Return the groups with one entry per family; ``PART`` or ``MOMENT`` stands for the word that differs in it."""
    return {title: list({of.name: of for of in map(_whole_family, group)}.values()) for title, group in GROUPS.items()}


def _whole_family(member: Figure) -> Figure:
    texts = {name: getattr(member, name) for name in ("name", "title", "meaning", "path")}
    if member.of is not None:
        stands = "MOMENT" if member.of in MOMENTS else "PART"
        for word in {member.of, MOMENTS.get(member.of, member.of)}:
            texts = {name: text.replace(word, stands, 1) for name, text in texts.items()}
    return replace(member, **texts)
