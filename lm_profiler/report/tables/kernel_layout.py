"""The layout ``kernels``: shares of matmuls, and the largest kernels, by size and context.

Shares refer to the time of the kernels alone, as in the kernel summary of Nsight Systems. The columns ``share_matmul``
and ``top_kernel`` count idle time too. Inference is the forward pass of runs that do not train.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from lm_profiler.record.entry import Entry
from lm_profiler.record.kernels import KernelSum, KernelTable
from lm_profiler.record.text import shortened
from lm_profiler.report.tables.kernel_columns import PRODUCTS, first_kernels
from lm_profiler.report.tables.layouts import MODEL_FACTS, distinguishing, model_name
from lm_profiler.report.tables.run_groups import (
    STATUS_WORDS,
    fact_phrase,
    group_by_facts,
)
from lm_profiler.report.tables.table import Heading, Table, TableCell, text_cell
from lm_profiler.report.tables.table_columns import COLUMNS

_TRAINING = "fit"
_FACTS_OF_ROWS = ("verb", "context_length", "optimizer", *MODEL_FACTS)
_LEGEND = "shares of the time of all kernels, without idle time"

CellFunction = Callable[[Sequence[Entry]], list[TableCell]]


class _LargestKernel(NamedTuple):
    """The kernel that takes the most time of a pass, over all traced steps, and its share of the pass's kernels."""

    kernel: KernelSum
    share: float


def kernel_layout(entries: Sequence[Entry]) -> list[Table]:
    """Return three tables for each model: shares of matmuls, largest kernels, largest kernels that are not products."""
    tables: list[Table] = []
    for model, runs in _runs_by_model(entries).items():
        tables.append(
            _table_of_contexts(
                f"{model}: share of matmuls",
                ["inference", "training"],
                runs,
                _share_cells,
            )
        )
        tables.append(
            _table_of_contexts(
                f"{model}: largest kernel of each pass",
                ["inference forward", "training forward", "training backward"],
                runs,
                _largest_cells,
            )
        )
        tables.append(
            _table_of_contexts(
                f"{model}: largest kernel of forward that is neither a matmul nor attention",
                ["kernel", "share", "ms per step", "calls per step"],
                runs,
                _largest_other_cells,
            )
        )
    return tables


def _runs_by_model(entries: Sequence[Entry]) -> dict[str, list[Entry]]:
    """Return the runs by model and by all facts that distinguish them, except for context and verb."""
    facts = [
        fact for fact in distinguishing(entries) if fact.name not in _FACTS_OF_ROWS
    ]
    runs: dict[str, list[Entry]] = {}
    for entry in entries:
        words = [model_name(entry)]
        for fact in facts:
            words.append(fact_phrase(fact, fact.get(entry)))
        runs.setdefault(", ".join(filter(None, words)), []).append(entry)
    return runs


def _table_of_contexts(
    title: str, titles: Sequence[str], runs: Sequence[Entry], cells_of_row: CellFunction
) -> Table:
    """Return a table with a row for each context of ``runs``."""
    context = COLUMNS["context_length"]
    headings = [Heading(context.name, context.title, figures=True)]
    headings += [Heading(name, name, figures=True) for name in titles]
    rows = []
    for runs_of_row in group_by_facts(runs, [context]).values():
        length = context.get(runs_of_row[0])
        length_cell = TableCell(length, "" if length is None else str(length))
        rows.append([length_cell, *cells_of_row(runs_of_row)])
    return Table(headings, rows, title=title, below=[_LEGEND])


def _share_cells(runs: Sequence[Entry]) -> list[TableCell]:
    """Return the share of matmuls in inference and in training, or why it is unknown."""
    cells = []
    for run, phase in ((_inference_run(runs), "forward"), (_training_run(runs), None)):
        kernels = _kernel_table(run)
        share = None if kernels is None else _share_of_matmuls(kernels, phase)
        if share is None:
            cells.append(_reason_cell(run))
        else:
            cells.append(TableCell(share, f"{share:.1%}"))
    return cells


def _largest_cells(runs: Sequence[Entry]) -> list[TableCell]:
    """Return the largest kernels of inference and of both passes of training, or why they are unknown."""
    inference, training = _inference_run(runs), _training_run(runs)
    passes = ((inference, "forward"), (training, "forward"), (training, "backward"))
    cells = []
    for run, phase in passes:
        kernels = _kernel_table(run)
        largest = None if kernels is None else _largest_kernel(kernels, phase)
        if largest is None:
            cells.append(_reason_cell(run))
        else:
            name = shortened(largest.kernel.name)
            cells.append(text_cell(f"{name} ({largest.share:.1%})"))
    return cells


def _largest_other_cells(runs: Sequence[Entry]) -> list[TableCell]:
    """Return the name, share, milliseconds and calls of the largest kernel of forward that is not a product."""
    run = _inference_run(runs) or _training_run(runs)
    kernels = _kernel_table(run)
    largest = None
    if kernels is not None:
        largest = _largest_kernel(kernels, "forward", kinds_left_out=PRODUCTS)
    if kernels is None or largest is None:
        empty_cells = [TableCell()] * 3
        return [_reason_cell(run), *empty_cells]
    step_s = largest.kernel.total_s / kernels.steps
    calls = largest.kernel.calls / kernels.steps
    return [
        text_cell(shortened(largest.kernel.name)),
        TableCell(largest.share, f"{largest.share:.1%}"),
        TableCell(step_s * 1e3, f"{step_s * 1e3:.3g}"),
        TableCell(calls, f"{calls:,.5g}"),
    ]


def _inference_run(runs: Sequence[Entry]) -> Entry | None:
    """Return the run that computes only forward passes, if there is one; of several, the first with a trace."""
    return _traced_first([run for run in runs if run.verb != _TRAINING])


def _training_run(runs: Sequence[Entry]) -> Entry | None:
    return _traced_first([run for run in runs if run.verb == _TRAINING])


def _traced_first(runs: Sequence[Entry]) -> Entry | None:
    """Return the first run with a table of kernels, or else the first run; None without runs."""
    for run in runs:
        if first_kernels(run) is not None:
            return run
    return runs[0] if runs else None


def _kernel_table(run: Entry | None) -> KernelTable | None:
    return None if run is None else first_kernels(run)


def _reason_cell(run: Entry | None) -> TableCell:
    """Return the cell of a run without kernels: how it ended, or that it was not traced; empty if there is no run."""
    if run is None:
        return TableCell()
    if run.status == "ok":
        return TableCell(text="no trace")
    return TableCell(text=STATUS_WORDS.get(run.status, run.status), status=run.status)


def _kernels_s(kernels: KernelTable, phase: str | None) -> float:
    """Return the time of the kernels of ``phase``, or of all phases, without idle time."""
    seconds = 0.0
    for name, part in kernels.phases.items():
        if phase in (None, name):
            seconds += sum(time.total_s for time in part.kinds.values())
    return seconds


def _share_of_matmuls(kernels: KernelTable, phase: str | None) -> float | None:
    """Return the share of matmuls in the kernels' time of ``phase``, or of all phases; None without kernels."""
    all_s = _kernels_s(kernels, phase)
    if not all_s:
        return None
    return kernels.kind_s("matmul", None if phase is None else [phase]) / all_s


def _largest_kernel(
    kernels: KernelTable, phase: str, kinds_left_out: Sequence[str] = ()
) -> _LargestKernel | None:
    """Return the kernel of ``phase`` that takes the most time; None if none ran."""
    all_s = _kernels_s(kernels, phase)
    by_size = kernels.by_name([phase], kinds_left_out)
    if not by_size or not by_size[0].total_s or not all_s:
        return None
    return _LargestKernel(by_size[0], by_size[0].total_s / all_s)
