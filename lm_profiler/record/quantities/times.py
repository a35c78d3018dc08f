"""The time of each part of a step, and the columns of ``steps.csv``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lm_profiler.record.parts import MEANINGS, PARTS, TIMED
from lm_profiler.record.quantities.quantity import UNITS, Place, Quantity, figure
from lm_profiler.record.run import RunRecord

_PLACES = {"step": Place.HEADLINE, **dict.fromkeys(("forward", "backward", "optimizer"), Place.TABLE)}
_RUN_TAGS = {part: f"{part}_ms" for part in ("step", "forward", "backward")}
_CLOCKS = {"time": "", "host_time": "_host"}


def _of_time(times: str, part: str, statistic: str) -> Callable[[RunRecord], Any]:
    """A statistic of ``part``; None where that never took time, and so did not occur."""

    def get(record: RunRecord) -> Any:
        time = getattr(record, times).get(part)
        return getattr(time, statistic) if time is not None and time.max else None

    return get


def _mean(times: str, part: str) -> Quantity:
    host, (low, high) = times == "host_time", (_of_time(times, part, end) for end in ("mean_low", "mean_high"))

    def interval(record: RunRecord) -> tuple[float, float] | None:
        ends = low(record), high(record)
        return None if None in ends else ends

    return Quantity(
        f"{part}{_CLOCKS[times]}_s",
        part.replace("forward_backward", "forward + backward") + (" (host)" if host else ""),
        *UNITS["ms"],
        MEANINGS[part] + (", on the host's clock" if host else ""),
        tag=f"{times}_ms/{part}",
        path=f"{times}.{part}.mean",
        get=_of_time(times, part, "mean"),
        interval=interval,
        place=Place.FILE if host else _PLACES.get(part, Place.FILE),
        run_tag=None if host else _RUN_TAGS.get(part),
    )


TIMES = {part: _mean("time", part) for part in MEANINGS}
"""Time on the device's stream; where there is none, the host's. Of a run: the mean of its measured steps."""
HOST_TIMES = {part: _mean("host_time", part) for part in TIMES}

_STATISTICS = {
    "median": ("median", "ms", Place.FILE),
    "std": ("standard deviation", "ms", Place.FILE),
    "cv": ("standard deviation over the mean", "%", Place.FILE),
    "p95": ("95th percentile", "ms", Place.FILE),
    "p5": ("5th percentile", "ms", Place.ASKED),
    "min": ("minimum", "ms", Place.ASKED),
    "max": ("maximum", "ms", Place.ASKED),
}


def _statistic(times: str, part: str, name: str) -> Quantity:
    """One of ``_STATISTICS`` of a part's measured steps."""
    clock, (words, unit, place), title = _CLOCKS[times], _STATISTICS[name], TIMES[part].title
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


SPREAD = tuple(_statistic(times, part, name) for times in _CLOCKS for part in TIMES for name in _STATISTICS)


def _share(part: str) -> Quantity:
    title, meaning = f"{TIMES[part].title} share", f"share of {TIMES[part].title} in the mean step"
    return figure(f"shares.{part}", title, "%", meaning, f"{part}_share", of=part, place=Place.ASKED)


SHARES = tuple(_share(part) for part in (*PARTS, "forward_backward"))


def _peak(reading: str, meaning: str, place: Place = Place.HEADLINE) -> Quantity:
    path, title = f"memory.measured.{reading}", "peak " + reading.removesuffix("_peak")
    tags = {"tag": f"memory_gib/{reading}", "run_tag": None if place is Place.FILE else f"{reading}_gib"}
    return figure(path, title, "GiB", meaning, f"{reading}_bytes", place=place, **tags)


MEMORY = {
    "allocated_peak": _peak("allocated_peak", "most bytes held by tensors on the device"),
    "reserved_peak": _peak("reserved_peak", "most bytes the allocator took from the device", Place.FILE),
    "resident_peak": _peak("resident_peak", "most bytes of the process in the machine's memory, since it began"),
}


def per_step(*row: str, **more: Any) -> Quantity:
    """A ``figure`` that goes by the inverse of the step, with the interval of the mean step turned over."""
    quantity, step = figure(*row, **more), TIMES["step"]

    def interval(record: RunRecord) -> tuple[float, float] | None:
        value, time, around = quantity.get(record), step.get(record), step.interval(record)
        if value is None or time is None or around is None or not all(around):
            return None
        return value * time / around[1], value * time / around[0]

    return replace(quantity, interval=interval)


TOKENS = Quantity("tokens", "tokens", *UNITS["count"], "tokens trained on in the step")
"""Of a step, in ``steps.csv``; of a run ``tokens_per_step``."""

TOKENS_PER_S = per_step(
    *(
        "throughput.tokens_per_s",
        "tokens/s",
        "tokens/s",
        "tokens of a step / its time; of an evaluation, the slowest rank's",
    ),
    tag="throughput/tokens_per_s",
    place=Place.HEADLINE,
    run_tag="tokens_per_s",
)
MFU = per_step(
    *("utilisation.mfu", "MFU", "%", "model FLOPs of a step / (its time x the device's peak)"),
    tag="throughput/mfu",
    place=Place.TABLE,
    run_tag="mfu_percent",
)

_TIME_COLUMNS = (times[part].name for times in (TIMES, HOST_TIMES) for part in TIMED)
STEP_COLUMNS = ("step", "stage", *_TIME_COLUMNS, TOKENS.name, *(of.name for of in MEMORY.values()), "rank")
"""The header of ``steps.csv``."""
