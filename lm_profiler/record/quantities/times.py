"""What a step is cut into, the time of each part, and the columns of ``steps.csv``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lm_profiler.record.quantities.quantity import UNITS, Place, Quantity, figure

if TYPE_CHECKING:
    from lm_profiler.record.run import RunRecord, TimeSummary

PHASES = ("data", "transfer", "forward", "zero_grad", "backward", "clip", "optimizer")
PARTS = (*PHASES, "other")
"""What a step is cut into: the phases, and ``other`` for what no phase covers. They add up to the step."""

TIMED = (*PARTS, "step")

_MEANINGS = {
    "data": "the loop asks for a batch, until it has it",
    "transfer": "the batch goes to the device",
    "forward": "training_step (or validation_step, test_step, predict_step)",
    "zero_grad": "gradients are cleared",
    "backward": "backward, without the hooks around it",
    "clip": "gradient clipping",
    "optimizer": "the optimizer's own arithmetic",
    "other": "what no phase covers: hooks, loggers, schedulers, the loop itself",
    "step": "from asking for the step's first batch to asking for the next step's",
    "forward_backward": "forward and backward added up within each step",
}
_PLACES = {"step": Place.HEADLINE, **dict.fromkeys(("forward", "backward", "optimizer"), Place.TABLE)}
_RUN_TAGS = {part: f"median_{part}_ms" for part in ("step", "forward", "backward")}
_CLOCKS = {"time": "", "host_time": "_host"}


def _summary(times: str, part: str) -> Callable[[RunRecord], TimeSummary | None]:
    """Of ``part``; None where it never took time, and so did not occur."""

    def get(record: RunRecord) -> TimeSummary | None:
        time = getattr(record, times).get(part)
        return time if time is not None and time.max else None

    return get


def _median(times: str, part: str) -> Quantity:
    host, summary = times == "host_time", _summary(times, part)

    def interval(record: RunRecord) -> tuple[float, float] | None:
        time = summary(record)
        return None if time is None or time.ci_low is None or time.ci_high is None else (time.ci_low, time.ci_high)

    return Quantity(
        f"{part}{_CLOCKS[times]}_s",
        part.replace("forward_backward", "forward + backward") + (" (host)" if host else ""),
        *UNITS["ms"],
        _MEANINGS[part] + (", on the host's clock" if host else ""),
        tag=f"{times}_ms/{part}",
        path=f"{times}.{part}.median",
        get=lambda record: None if (time := summary(record)) is None else time.median,
        interval=interval,
        place=Place.FILE if host else _PLACES.get(part, Place.FILE),
        run_tag=None if host else _RUN_TAGS.get(part),
        group="Time on the host's clock" if host else "Time of a step",
    )


TIMES = {part: _median("time", part) for part in (*TIMED, "forward_backward")}
"""Time on the device's stream; where there is none, the host's. Of a run: the median of its measured steps."""
HOST_TIMES = {part: _median("host_time", part) for part in TIMES}

_STATISTICS = {
    "mean": ("mean", Place.FILE),
    "std": ("standard deviation", Place.FILE),
    "cv": ("standard deviation over the mean", Place.FILE),
    "p95": ("95th percentile", Place.FILE),
    "p5": ("5th percentile", Place.ASKED),
    "min": ("minimum", Place.ASKED),
    "max": ("maximum", Place.ASKED),
    "outliers": ("number of values outside Tukey's fences", Place.ASKED),
}
_UNITLESS = {"cv": "%", "outliers": "count"}


def _statistic(times: str, part: str, name: str) -> Quantity:
    """One of ``_STATISTICS`` of a part's measured steps."""
    clock, summary, of = _CLOCKS[times], _summary(times, part), TIMES[part]
    words, place = _STATISTICS[name]

    def get(record: RunRecord) -> Any:
        time = summary(record)
        return None if time is None else getattr(time, name)

    return Quantity(
        f"{part}{clock}_{name}" + ("" if name in _UNITLESS else "_s"),
        f"{of.title} {name.upper() if name == 'cv' else name}" + (" (host)" if clock else ""),
        *UNITS[_UNITLESS.get(name, "ms")],
        f"{words} of the time of {of.title}" + (", on the host's clock" if clock else ""),
        path=f"{times}.{part}.{name}",
        get=get,
        place=Place.ASKED if clock else place,
        group="Spread of the steps",
        of=part,
    )


SPREAD = tuple(_statistic(times, part, name) for times in _CLOCKS for part in TIMES for name in _STATISTICS)


def _share(part: str) -> Quantity:
    title, group = TIMES[part].title, "Shares of the typical step"
    meaning = f"share of {title} in the typical step"
    return figure(
        f"shares.{part}", f"{title} share", "%", meaning, f"{part}_share", of=part, place=Place.ASKED, group=group
    )


SHARES = tuple(_share(part) for part in (*PARTS, "forward_backward"))


def _peak(reading: str, meaning: str, place: Place = Place.HEADLINE) -> Quantity:
    path, title = f"memory.measured.{reading}", "peak " + reading.removesuffix("_peak")
    tags = {"tag": f"memory_gib/{reading}", "run_tag": None if place is Place.FILE else f"{reading}_gib"}
    return figure(path, title, "GiB", meaning, f"{reading}_bytes", place=place, group="Memory", **tags)


MEMORY = {
    "allocated_peak": _peak("allocated_peak", "most bytes held by tensors on the device"),
    "reserved_peak": _peak("reserved_peak", "most bytes the allocator took from the device", Place.FILE),
    "resident_peak": _peak("resident_peak", "most bytes of the process in the machine's memory"),
}


def per_step(quantity: Quantity) -> Quantity:
    """``quantity``, which goes by the inverse of the step, with the interval of the median step turned over."""
    step = TIMES["step"]

    def interval(record: RunRecord) -> tuple[float, float] | None:
        value, time, around = quantity.get(record), step.get(record), step.interval(record)
        if value is None or time is None or around is None or not all(around):
            return None
        return value * time / around[1], value * time / around[0]

    return replace(quantity, interval=interval)


TOKENS = Quantity("tokens", "tokens", *UNITS["count"], "tokens trained on in the step", group="Throughput")
"""Of a step, in ``steps.csv``; of a run ``tokens_per_step``."""

TOKENS_PER_S = per_step(
    figure(
        "throughput.tokens_per_s",
        *("tokens/s", "tokens/s", "tokens of a step / its time"),
        tag="throughput/tokens_per_s",
        place=Place.HEADLINE,
        run_tag="tokens_per_s",
        group="Throughput",
    )
)
MFU = per_step(
    figure(
        "utilisation.mfu",
        *("MFU", "%", "model FLOPs of a step / (its time x the device's peak)"),
        tag="throughput/mfu",
        place=Place.TABLE,
        run_tag="mfu_percent",
        group="Use of the hardware",
    )
)

STEP_COLUMNS = (
    "step",
    "stage",
    *(TIMES[part].name for part in TIMED),
    *(HOST_TIMES[part].name for part in TIMED),
    TOKENS.name,
    *(quantity.name for quantity in MEMORY.values()),
    "rank",
)
"""The header of ``steps.csv``."""
