"""Rows of lists in a run's record, each a table of its own."""

from __future__ import annotations

from dataclasses import replace

from lm_profiler.record.quantities import ranks, slack, slow_steps, waterfall
from lm_profiler.record.quantities.quantity import Quantity, figure

ERROR = "norm of the difference to float32, over its norm"
_PYTHON = "what took it: python, torch, library, a package, or a function of C"
_FINDING = "what takes time that could be saved"

LISTS: dict[str, tuple[Quantity, ...]] = {
    "steadiness.levels": (
        figure("first", "from step", "count", "the first measured step of the level"),
        figure("last", "to step", "count", "the last measured step of the level"),
        figure("seconds", "level", "ms", "mean of its regular steps"),
    ),
    "steadiness.pattern.slow": (figure("", "slow step", "count", "its place among so many steps", "pattern_slow"),),
    "findings": (
        figure("name", "finding", "text", _FINDING),
        figure("phase", "phase", "text", "where in the step"),
        figure("owner", "owner", "text", "whose code"),
        figure("file", "file", "text", "of that code"),
        figure("line", "line", "count", "its number"),
        figure("what", "what", "text", "what the time is spent in"),
        replace(
            figure("saves_s", "could save at most", "ms", "of a step, what lies between steps counted with them"),
            interval=lambda row: None if row.low_s is None or row.high_s is None else (row.low_s, row.high_s),
        ),
        figure("share", "share", "%", "of the step that this is"),
        figure("low_s", "from", "ms", "lower end of the 95 % interval of what it could save"),
        figure("high_s", "to", "ms", "upper end of that interval"),
    ),
    "between": (
        figure("what", "what passed", "text", "between measured steps"),
        figure("seconds", "time", "ms", "what it took in all"),
        figure("times", "times", "count", "how often"),
    ),
    "python_times": (
        figure("phase", "phase", "text", "where in the step"),
        figure("file", "file", "text", "of the program"),
        figure("line", "line", "count", "its number"),
        figure("function", "function", "text", "what it is in"),
        figure("what", "what", "text", _PYTHON),
        figure("seconds", "time", "ms", "of the line's own, in one step"),
        figure("calls", "calls", "count", "how often it was entered in that step"),
    ),
    "odd_steps": slow_steps.ODD_STEP_ROW,
    "step_counters": slow_steps.COUNTERS_ROW,
    "syncs": (
        figure("file", "file", "text", "of the line that made the host wait for the device"),
        figure("line", "line", "count", "its number"),
        figure("function", "function", "text", "what it is in"),
        figure("count", "times", "count", "how often it made the host wait"),
        figure("call", "call", "text", "what waits"),
    ),
    "other_by_owner.actions": (
        figure("owner", "owner", "text", "whose code ran: a class, Lightning, or lm_profiler"),
        figure("action", "action", "text", "hook, method, or a word for several"),
        figure("seconds", "time", "ms", "of a mean step, without other actions inside of it"),
        figure("least_s", "at least", "ms", "in the step where it took least, over the share of such steps"),
        figure("calls", "calls", "number", "in a mean step"),
        figure("in_steps", "in steps", "count", "of the steps that were timed by action, those in which it took time"),
    ),
    "numerics.kinds": (
        figure("kind", "class", "text", "class of the modules"),
        figure("modules", "modules", "count", "how many there are"),
        figure("parameters", "parameters", "text", "dtypes of their own parameters"),
        figure("outputs", "outputs", "text", "dtypes of their outputs"),
        figure("gradients", "gradients", "text", "dtypes of their gradients"),
        figure("gradient_error", "error of the gradients", "error", ERROR),
    ),
    "numerics.losses": (figure("", "loss", "loss", "mean loss of each of the first steps", "numerics_losses"),),
    "numerics.gradient_norms": (
        figure("", "norm of the gradients", "loss", "in each of the first steps", "numerics_gradient_norms"),
    ),
    "slack.places": slack.PLACE_ROW,
    "slack.savings": slack.SAVING_ROW,
    "waterfall.terms": waterfall.TERM_ROW,
    "waterfall.terms[].contributors": waterfall.CONTRIBUTOR_ROW,
    "rates.flops": (
        figure("dtype", "dtype", "text", "of the factors of matrix products"),
        figure("flops_per_s", "FLOP rate", "TFLOP/s", "FLOP/s of one device that its products are held against"),
        figure("source", "source", "text", "where that figure is from"),
    ),
    "ranks.by_rank": ranks.RANK_ROW,
    "ranks.finding.slow": ranks.SLOW_RANK_ROW,
    "ranks.by_rank[].own_by_column_s": (figure("", "own work", "ms", "of the rank in each column", "rank_own_s"),),
    "ranks.columns": (figure("", "first step", "count", "of each column of the heat map", "ranks_column"),),
    "rank_step_s": (figure("", "median step", "ms", "median step of each rank", "rank_step_s"),),
}
"""By where ``run.json`` has them: rows of a table of their own. Paths and ``get`` are of a row; ``[]``
is each of a list."""
