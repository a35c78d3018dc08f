"""The tables of ``plan``: what each phase of a step would hold, and which other settings would need less."""

from __future__ import annotations

from dataclasses import replace

from lm_profiler.record.quantities.floors import FLOOR
from lm_profiler.record.quantities.quantity import figure
from lm_profiler.record.quantities.resources import CAUSES

PLANNED_COLUMNS = (
    figure("phase", "phase", "text", "part of the step"),
    figure("peak", "peak", "bytes", "most bytes at one time in it, rehearsed"),
    *(figure(f"causes.{cause}", title, "bytes", f"{title} in that peak") for cause, title in CAUSES.items()),
    figure("workspaces", "workspaces", "bytes", "what cuBLAS keeps to work in"),
    FLOOR,
)
"""Of a row for each phase."""

REMEDY_COLUMNS = (
    figure("needs", "needs", "bytes", "memory that surely holds it: the peak and a ninth of it, or what is reserved"),
    replace(FLOOR, meaning="least time of the step: the sum of its phases' floors that are known"),
    figure("fits", "verdict", "text", "whether it fits into the device"),
    figure("changes", "may change", "text", "what of the training it may change"),
    figure("words", "with", "text", "options to be added to the call"),
)
"""Of a row for each setting that would need less."""
