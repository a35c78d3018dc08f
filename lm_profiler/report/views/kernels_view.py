"""The Kernels view: where the traced steps' time went, by phase and kind, and the largest kernels or operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from lm_profiler.record.entry import Entry
from lm_profiler.record.kernels import KernelTable, kernel_files, read_kernels
from lm_profiler.record.quantities import TIMES
from lm_profiler.record.run_record import RecordError
from lm_profiler.report.pictures.drawing import KIND_LOOKS
from lm_profiler.report.run.kernel_tables import (
    IDLE,
    kernel_answers,
    kernels_table,
    kind_rows,
    kinds_table,
    left_out_line,
)
from lm_profiler.report.tables.table import text_table
from lm_profiler.report.views.blocks import (
    Json,
    card,
    chart,
    choice,
    escaped,
    fold,
    line,
    table,
)
from lm_profiler.report.views.view import Limits, View, left_no_run

TRACE_SUFFIX = ".pt.trace.json.gz"
_LEAST_OVERLAP = 0.001  # the share of the step from which overlapping work is mentioned


def blocks(entry: Entry, limits: Limits) -> list[Json]:
    """Return the blocks of the traced rank; of several ranks one is shown at a time."""
    blocks_by_rank = {}
    for file in kernel_files(entry.folder):
        blocks_by_rank[_rank_name(file)] = _rank_blocks(file, limits.kernel_rows)
    if len(blocks_by_rank) == 1:
        [blocks_of_rank] = blocks_by_rank.values()
        return blocks_of_rank
    return [choice("Rank", blocks_by_rank)]


def missing(entry: Entry) -> str | None:
    """Return why there are no kernels to show, and what to do; None if there are some."""
    if kernel_files(entry.folder):
        return None
    if entry.record is None:
        return left_no_run(entry)
    if any((entry.folder / "trace").glob(f"*{TRACE_SUFFIX}")):
        return (
            "There is a trace but no table of its kernels: run it again to create one."
        )
    if entry.status != "ok":
        return f"No trace: the run ended before its trace stage ({entry.status}: {entry.reason})."
    return "No trace, so no kernels: run it again with --trace.steps=2."


KERNELS = View("kernels", "Kernels", blocks, missing)


def _rank_name(file: Path) -> str:
    name = file.name.removesuffix(".kernels.json")
    return name.replace("rank", "rank ").replace(".step", ", step ")


def _rank_blocks(file: Path, most_rows: int | None) -> list[Json]:
    """Return the blocks of one rank; for a damaged file, an error message, so that other ranks are still shown."""
    try:
        kernels = read_kernels(file)
    except RecordError as error:
        return [line(str(error), "error")]
    if kernels.source == "kernels":
        source = "Kernels on the device"
        title = "Largest kernels"
    else:
        source = "Operators on the host: this device has no kernels"
        title = "Largest operators"
    largest = kernels_table(kernels, most_rows)
    notes = []
    rest = left_out_line(kernels, most_rows)
    if rest:
        notes.append(line(rest, "quiet"))
    return [
        card(
            "Time by phase and kind",
            line(f"{source}.", "headline"),
            _chart(kernels),
            *_overlap_notes(kernels),
        ),
        card(title, *table(largest, is_long=True, first_sort="ms"), *notes),
        fold("Answers to common questions", *_answer_table(kernels)),
        fold("The same as a table", *table(kinds_table(kernels))),
    ]


def _chart(kernels: KernelTable) -> Json:
    """Return a bar for each phase and for the step, cut into the kinds of work."""
    step_s = kernels.window_s / kernels.steps
    phase_s = {}
    for phase, times in kernels.phases.items():
        phase_s[phase] = (times.busy_s + times.idle_s) / kernels.steps
    phase_s["step"] = step_s
    seconds = _seconds_by_kind(kernels)
    kinds = [kind for kind in KIND_LOOKS if kind in seconds]
    kinds += [kind for kind in seconds if kind not in KIND_LOOKS]  # of a later version
    data = [_bars_of_kind(kernels, kind, seconds[kind], phase_s) for kind in kinds]
    layout = {
        "barmode": "stack",
        "bargap": 0.25,
        "xaxis": {"title": {"text": "ms of one step"}, "rangemode": "tozero"},
        "yaxis": {"autorange": "reversed", "showgrid": False},
    }
    return chart(data, layout, rows=len(phase_s))


def _seconds_by_kind(kernels: KernelTable) -> dict[str, dict[str, float]]:
    """Return the seconds of one step by kind and phase, with their sum as the phase ``step``."""
    seconds: dict[str, dict[str, float]] = {}
    for row in kind_rows(kernels):
        if row["time_s"]:
            by_phase = seconds.setdefault(str(row["kind"]), {})
            by_phase[str(row["phase"])] = float(row["time_s"])
    for by_phase in seconds.values():
        by_phase["step"] = sum(by_phase.values())
    return seconds


def _bars_of_kind(
    kernels: KernelTable,
    kind: str,
    kind_s: Mapping[str, float],
    phase_s: Mapping[str, float],
) -> Json:
    """Return Plotly's bars of one kind of kernels, one per phase.

    Args:
        kernels: the table of kernels.
        kind: the kind.
        kind_s: the seconds of the kind by phase.
        phase_s: the seconds of all kinds by phase.
    """
    name = kind.replace("_", " ")
    if kind == IDLE and kernels.source == "operators":
        name = "no operator"
    colour, hatching = KIND_LOOKS.get(kind, KIND_LOOKS["other"])
    texts = []
    milliseconds = []
    for phase, all_s in phase_s.items():
        seconds = kind_s.get(phase, 0.0)
        share = seconds / all_s if all_s else 0.0
        texts.append(f"{TIMES['step'].show(seconds)}, {share:.1%} of {escaped(phase)}")
        milliseconds.append(round(seconds * 1e3, 6))
    pattern = {"shape": hatching, "fillmode": "replace", "size": 6, "solidity": 0.4}
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "y": [escaped(phase) for phase in phase_s],
        "x": milliseconds,
        "customdata": texts,
        "marker": {"color": colour, "pattern": pattern},
        "hovertemplate": f"{name}: %{{customdata}}<extra></extra>",
    }


def _overlap_notes(kernels: KernelTable) -> list[Json]:
    """Return the notes below the chart: how many steps were traced, and how much work overlapped."""
    steps = kernels.steps
    overlap_s = sum(phase.overlap_s for phase in kernels.phases.values())
    traced = "1 traced step" if steps == 1 else f"{steps} traced steps"
    notes = [f"Means of {traced}; tracing makes steps longer than the measured ones."]
    if overlap_s >= _LEAST_OVERLAP * kernels.window_s:
        overlap = TIMES["step"].show(overlap_s / steps)
        notes.append(
            f"{overlap} of a step ran at the same time as other work, and counts twice."
        )
    return [line(note, "quiet") for note in notes]


def _answer_table(kernels: KernelTable) -> Sequence[Json]:
    """Return a table of answers to common questions about the kernels."""
    rows = [list(pair) for pair in kernel_answers(kernels)]
    share = kernels.memory_bound_share
    if share is not None:
        text = f"{share:.1%} of the step runs only kernels that mostly move bytes"
        rows.append(["bound by memory", text])
    share = kernels.communication_share
    if share:
        rows.append(
            ["communication", f"only communication runs in {share:.1%} of the step"]
        )
    return table(text_table(("", ""), rows, left=2))
