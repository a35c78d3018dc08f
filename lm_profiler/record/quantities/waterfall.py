"""The waterfall's terms: what each is called and means; their figures, and rows of what they consist of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from lm_profiler.record.parts import PARTS
from lm_profiler.record.quantities.quantity import computed, figure, figures_of
from lm_profiler.record.run import RunRecord

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
"""The title and the meaning of each term, in the order of the waterfall."""


def term_title(name: str) -> str:
    """What a term is called; one of a later version by its own name."""
    return TERMS[name][0] if name in TERMS else name.replace("_", " ")


def _seconds(name: str) -> Callable[[RunRecord], float | None]:
    def get(record: RunRecord) -> float | None:
        fall = record.waterfall
        if fall is None or name in fall.untold:
            return None
        return next((term.seconds for term in fall.terms if term.name == name), None)

    return get


TERM_FIGURES = tuple(
    computed(f"waterfall_{name}_s", title, "ms", meaning, _seconds(name)) for name, (title, meaning) in TERMS.items()
)
"""Seconds of each term."""


def _interval(record: RunRecord) -> tuple[float, float] | None:
    fall = record.waterfall
    known = fall is not None and fall.ci_low is not None and fall.ci_high is not None
    return (fall.ci_low, fall.ci_high) if known else None  # type: ignore[union-attr, return-value]  # as `known` says


_STEP = figure("waterfall.step_s", "step taken apart", "ms", "mean step that the terms add up to", "waterfall_step_s")

WATERFALL = (
    replace(_STEP, interval=_interval),
    *(
        figure(f"waterfall.step_phases.{of}", f"of it in {of}", "ms", "of the mean step", f"waterfall_{of}_s")
        for of in PARTS
    ),
    *figures_of(
        "waterfall",
        ("source", "terms are of", "text", "kernels on the device, or operators of the host", "waterfall_source"),
        (
            "peak_flops_per_s",
            "peak",
            "TFLOP/s",
            "FLOP/s of a device that the ideal is at",
            "waterfall_peak_flops_per_s",
        ),
        ("peak_source", "source of the peak", "text", "where that peak is from", "waterfall_peak_source"),
        (
            *("bandwidth_bytes_per_s", "bandwidth", "GB/s", "bytes that a device can move each second"),
            "waterfall_bandwidth_bytes_per_s",
        ),
        ("bandwidth_source", "source of the bandwidth", "text", "where it is from", "waterfall_bandwidth_source"),
        ("clock_share", "clock held", "%", "SM clock over the one that the peak is of", "waterfall_clock_share"),
    ),
)
"""What the terms are of."""

TERM_ROW = (
    figure("name", "term", "text", "a step of the waterfall"),
    figure("seconds", "time", "ms", "what it adds to the step"),
    figure("low_s", "from", "ms", "lower end of the 95 % interval of that"),
    figure("high_s", "to", "ms", "upper end of that interval"),
    figure("at_most_s", "could save at most", "ms", "ceiling of what could be saved there, never a gain"),
    *(figure(f"phases.{part}", part, "ms", f"of which in {part}") for part in PARTS),
)
CONTRIBUTOR_ROW = (
    figure("module", "module", "text", "path, with * for the indices of equal layers"),
    figure("what", "what", "text", "operator or kernel, or in words"),
    figure("count", "times", "count", "how often in a step"),
    figure("seconds", "time", "ms", "of one step"),
    figure("detail", "detail", "text", "why it took so long, where that is known"),
)
