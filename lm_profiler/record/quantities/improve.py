"""A search of ``improve``: figures of its record, of each change that it tried, and the columns of its table."""

from __future__ import annotations

from dataclasses import replace

from lm_profiler.record.improve import Tried
from lm_profiler.record.quantities.quantity import Quantity, figure, figures_of

_MEAN = "the geometric mean of the processes' mean steps"
_PEAK = "of the device's tensors, on the CPU of the process"
_LOSS = "how far the mean loss of the first steps is from that without the change, as a share"
_GRADIENTS = "norm of the gradients' difference to float32, over its norm"
_NUMERICS = "loss and gradients, and whether that is too much; only what is faster is checked"
_END = "an end of that interval"

_SEARCH = (
    figure("budget_s", "budget", "s", "time that all runs may take"),
    figure("elapsed_s", "elapsed", "s", "time that runs took, over all calls that went on with it"),
    figure("first_s", "first run", "ms", "step of the first setting's first run, before anything was compared"),
    figure("runs", "runs", "count", "processes that were asked for"),
    *figures_of(
        "final",
        ("pairs", "last pairs", "count", "of processes that nothing was chosen by", "final_pairs"),
        ("first_s", "first step", "ms", f"step of the first setting: {_MEAN}", "final_first_s"),
        ("final_s", "final step", "ms", f"step of the final setting: {_MEAN}"),
        ("ratio", "times as fast", "x", "first step over final step, with its interval", "final_ratio"),
        ("low", "times as fast, low", "x", _END, "final_ratio_low"),
        ("high", "times as fast, high", "x", _END, "final_ratio_high"),
        ("first_bytes", "first memory", "bytes", f"peak with the first setting: {_PEAK}", "final_first_bytes"),
        ("final_bytes", "final memory", "bytes", f"peak with the final setting: {_PEAK}"),
    ),
)


def _interval(tried: Tried) -> tuple[float, float] | None:
    return None if tried.low_s is None or tried.high_s is None else (tried.low_s, tried.high_s)


_SAVED = figure("saved_s", "saved", "ms", "the difference, with the interval that decided")

_TRIED = (
    figure("name", "change", "text", "what the call gets more"),
    figure("a_s", "step without", "ms", f"without the change: {_MEAN}"),
    figure("b_s", "step with", "ms", f"with the change: {_MEAN}"),
    replace(_SAVED, interval=_interval),
    figure("low_s", "saved, low", "ms", _END),
    figure("high_s", "saved, high", "ms", _END),
    figure("ceiling_s", "at most", "ms", "the most that it could save, as the first run tells it"),
    figure("pairs", "pairs", "count", "of processes that were compared"),
    figure("a_bytes", "memory without", "bytes", f"peak without the change: {_PEAK}"),
    figure("b_bytes", "memory with", "bytes", f"peak with the change: {_PEAK}"),
    figure("numerics.loss", "loss off by", "error", _LOSS, "loss_off"),
    figure("numerics.gradients", "gradients off by", "error", _GRADIENTS, "gradients_off"),
    figure("verdict", "verdict", "text", "how the comparison ended, and whether the change was kept"),
    figure("may_change", "may change", "text", "what of the results it may change"),
    figure("why", "why", "text", "of a verdict that does not say it alone"),
)
_NAMED = {of.name: of for of in _TRIED}

IMPROVE: dict[str, tuple[Quantity, ...]] = {"": _SEARCH, "tried": _TRIED}
"""By where ``improve.json`` has them, as ``LISTS`` are of ``run.json``; first what it has once."""

TRIED_COLUMNS = (
    _NAMED["name"],
    replace(_NAMED["b_s"], title="step", meaning=f"without → with the change: {_MEAN}"),
    *(_NAMED[name] for name in ("saved_s", "ceiling_s", "pairs")),
    replace(_NAMED["b_bytes"], title="memory", meaning=f"peak without → with the change: {_PEAK}"),
    figure("numerics", "numbers off by", "text", _NUMERICS),
    _NAMED["verdict"],
)
"""Of the table of changes, where what is without a change stands beside what is with it."""
