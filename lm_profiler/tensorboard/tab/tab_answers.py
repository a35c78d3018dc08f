"""What the tab asks for, of the runs below the log folder; ``report.page.answers`` says what is shown of them.

Every function takes the log folder, and a run by its folder relative to that. All raise NotFoundError where there is
no such run or it lies outside, and RecordError where its files are damaged.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from tensorboard.errors import NotFoundError

from lm_profiler.analysis.compare.comparison import compare
from lm_profiler.analysis.steps.cuts import with_unfinished
from lm_profiler.record.collection import collect
from lm_profiler.record.entry import Entry
from lm_profiler.record.process_spread import known_spread
from lm_profiler.record.run import RecordError
from lm_profiler.report.page import answers, views
from lm_profiler.report.page.answers import TRACE_SUFFIX, Json
from lm_profiler.report.run import comparison_table as compare_output
from lm_profiler.tensorboard.tab.sending import has_perfetto, inside


def listing(logdir: Path) -> Json:
    """All runs and cells, less what a link or a sweep's file put outside the log folder: that is a problem."""
    collection = with_unfinished(collect([logdir]))
    root, runs = os.path.realpath(logdir), dict[str, Entry]()
    for entry in collection.entries:
        name = os.path.relpath(os.path.realpath(entry.folder), root)
        if name.split(os.sep, 1)[0] == os.pardir:
            collection.problems.append(f"{entry.folder}: lies outside the log folder")
        else:
            runs[name] = entry
    searches = {os.path.relpath(of.folder, logdir): of.record for of in collection.searches}
    listed = answers.listing(runs, str(logdir), collection.problems)
    return {**listed, "searches": views.searched(searches)}


def run(logdir: Path, name: str) -> Json:
    """The run's own page."""
    return answers.run(name, _entry(logdir, name))


def _entry(logdir: Path, name: str) -> Entry:
    """The run in one folder, an unfinished one with the figures of its steps so far."""
    inside(logdir, f"{name}/run.json")
    collection = with_unfinished(collect([logdir / name]))
    if not collection.entries:
        raise RecordError(collection.problems[0] if collection.problems else f"{name}: not a run")
    return collection.entries[0]


def why(logdir: Path, name: str) -> Json:
    """The run's waterfall."""
    return views.why(_entry(logdir, name))


def ranks(logdir: Path, name: str) -> Json:
    """Who of the run's ranks works and who waits."""
    return views.ranks(_entry(logdir, name))


def kernels(logdir: Path, name: str) -> Json:
    """The run's kernel tables."""
    _has_traces(logdir, name)
    return answers.kernels(_entry(logdir, name))


def comparison(logdir: Path, a: list[str], b: list[str]) -> Json:
    """B's runs against A's, as ``lm_profiler compare`` has it; ``header``, ``rows`` and ``closing`` as it prints them.

    Raises:
        UsageError: they are no two sides of a comparison.
    """
    side_a, side_b = ([_entry(logdir, name) for name in side] for side in (a, b))
    first = side_a[0].record if side_a else None
    compared = compare(side_a, side_b, known_spread(None if first is None else first.environment))
    shown = {"header": compare_output.HEADER, "rows": compare_output.rows(compared)}
    return {**dataclasses.asdict(compared), **shown, "closing": compare_output.closing(compared)}


def _has_traces(logdir: Path, name: str) -> bool:
    """Whether the run has a folder of traces. Raises NotFoundError where that is a link out of the log folder."""
    return os.path.lexists(inside(logdir, name) / "trace") and inside(logdir, f"{name}/trace").is_dir()


def traces(logdir: Path, name: str) -> Json:
    """The run's traces, with their sizes in bytes, and whether Perfetto's page is there to show them."""
    files = (inside(logdir, name) / "trace").glob(f"*{TRACE_SUFFIX}") if _has_traces(logdir, name) else ()
    ordered = sorted(files, key=lambda file: (len(file.name), file.name))  # rank 2 before rank 10
    shown = [{"file": file.name, "bytes": file.lstat().st_size} for file in ordered if not file.name.startswith(".")]
    return {"traces": shown, "perfetto": has_perfetto()}


def trace(logdir: Path, name: str, file: str) -> Path:
    """The path of one of the run's ``traces``."""
    if file not in [known["file"] for known in traces(logdir, name)["traces"]]:
        raise NotFoundError(f"{file!r}: not a trace of {name!r}")
    return inside(logdir, f"{name}/trace/{file}")
