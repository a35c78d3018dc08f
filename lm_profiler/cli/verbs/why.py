"""The verb ``why``: where the time went in traces of torch.profiler: in one, in two, or in those of all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from lm_profiler.analysis.trace.any_trace import (
    AnyTrace,
    processes_in,
    read_any_trace,
)
from lm_profiler.analysis.trace.large_trace import MOST_EVENTS
from lm_profiler.analysis.why.trace_answer import trace_answer
from lm_profiler.analysis.why.trace_comparison import compare_traces
from lm_profiler.analysis.why.trace_ranks import are_ranks, compare_ranks
from lm_profiler.cli.reading_line import ReadingLine
from lm_profiler.cli.verbs.shared import (
    choose_answer_format,
    writable,
    write,
    write_json,
)
from lm_profiler.record.calls import OK
from lm_profiler.record.entry import Collection
from lm_profiler.record.files import Part
from lm_profiler.report.page.tables_page import write_tables_page
from lm_profiler.report.run.trace_pair_tables import comparison_tables, ranks_tables
from lm_profiler.report.run.trace_tables import trace_tables
from lm_profiler.report.tables.table import Table
from lm_profiler.usage_error import UsageError

EXAMPLES = """\
for example:
  lm_profiler why trace.json.gz
  lm_profiler why trace.json --step train_step                   use ranges of this name as steps
  lm_profiler why trace.json.gz --device "NVIDIA H100 80GB HBM3"   compute the floor for another GPU
  lm_profiler why trace.json.gz --output why.md
  lm_profiler why before.json.gz after.json.gz                   which kernels are new, are gone, or changed
  lm_profiler why rank0.json rank1.json rank2.json               which rank waits for which
  lm_profiler why merged.json --process 4243                     one process of a merged trace
  lm_profiler why logs/run/version_0                             the traces of a recorded run"""

_MOST_TRACES = 64
_PAGE = "html"
_TRACES_OF_RUN = "trace/rank*.pt.trace.json.gz"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Show where the time of the steps went in a trace that torch.profiler wrote, from any program.

    The steps are the ranges ProfilerStep#, or the whole trace if it has none. Phases are shown only if ranges name
    them: torch's Optimizer.step# and autograd nodes, or ranges of the program called forward, backward or optimizer.
    Two traces are compared. For traces of several ranks, or more than two, the answer shows which rank waits for which.

    Args:
        config: A YAML file of these options.
        traces: A trace (.json or .json.gz), two traces to compare, the traces of a run's ranks, or the folder of a run.
        ranks: Whether the traces are those of the ranks of one run; if not given, this is read from the traces.
        process: The process to show if a file contains several; if not given, the one with the most work.
        step: Use the ranges of this name as steps; a number may follow the name in the trace.
        device: Compute the floor for this device, named as its driver reports it; if not given, for that of the trace.
        format: terminal, markdown, latex, typst, json or html; if not given, it follows from the suffix of output.
        output: Write to this file.
    """

    WORDS: ClassVar[str] = "traces"

    config: str | None = None
    traces: Sequence[Path] = ()
    ranks: bool | None = None
    process: str | None = None
    step: str | None = None
    device: str | None = None
    format: str | None = None
    output: Path | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "format", _choose_format(self.format, self.output))
        if not self.traces:
            raise UsageError(
                "TRACE: expected a trace that torch.profiler wrote, given none; try `why trace.json.gz`"
            )
        if self.process is not None and len(self.traces) != 1:
            raise UsageError(
                f"process: works only with one trace, given {len(self.traces)}"
            )


def _choose_format(format_option: str | None, output: Path | None) -> str:
    """Return the format of the answer; raise UsageError if a page was requested without a file for it."""
    is_page = format_option == _PAGE
    if format_option is None and output is not None:
        is_page = output.suffix.lower() == ".html"
    if not is_page:
        return choose_answer_format(format_option, output)
    if output is None:
        raise UsageError(f"format: expected --output FILE for {_PAGE}, given none")
    return _PAGE


def run(options: Options) -> int:
    """Print or write the answer; raise UsageError for a file that is not a trace, or has no such step."""
    paths = _trace_files(options.traces)
    if len(paths) > _MOST_TRACES:
        raise UsageError(
            f"TRACE: expected at most {_MOST_TRACES} traces, given {len(paths)}"
        )
    if options.ranks and len(paths) == 1:
        traces = _traces_of_processes(paths[0], options.step)
    else:
        # All traces are in memory at the same time.
        most_events = MOST_EVENTS // len(paths)
        traces = [
            _read(path, options.step, most_events, options.process) for path in paths
        ]
    answer, tables = _answer(traces, options)
    if options.format == "json":
        write_json(answer, options.output)
    elif options.format == _PAGE and options.output is not None:
        names = ", ".join(path.name for path in paths)
        with writable(options.output):
            write_tables_page(tables, f"why: {names}", options.output)
    else:
        write(Collection(), tables, options.format or "terminal", options.output)
    return OK


def _answer(traces: Sequence[AnyTrace], options: Options) -> tuple[Part, list[Table]]:
    """Return the answer about one trace, two traces, or those of several ranks, and its tables."""
    if len(traces) == 1:
        answer = trace_answer(traces[0], options.device)
        return answer, trace_tables(answer)
    is_of_ranks = options.ranks
    if is_of_ranks is None:
        is_of_ranks = len(traces) > 2 or are_ranks(traces)
    if is_of_ranks:
        ranks = compare_ranks(traces)
        return ranks, ranks_tables(ranks)
    if len(traces) > 2:
        raise UsageError(
            f"TRACE: expected two traces to compare, given {len(traces)}; leave out --ranks=false"
        )
    comparison = compare_traces(*traces)
    return comparison, comparison_tables(comparison)


def _trace_files(paths: Sequence[Path]) -> list[Path]:
    """Return the trace files that ``paths`` name; the folder of a run stands for the traces of its ranks."""
    files = []
    for path in paths:
        if not path.is_dir():
            files.append(path)
            continue
        files_of_run = sorted(
            path.glob(_TRACES_OF_RUN), key=lambda file: (len(file.name), file.name)
        )
        if not files_of_run:
            raise UsageError(
                f"TRACE: expected a trace, given {path}, which has no {_TRACES_OF_RUN}"
            )
        files += files_of_run
    return files


def _traces_of_processes(path: Path, step_name: str | None) -> list[AnyTrace]:
    """Return the traces of all processes in a merged file: the ranks of a run."""
    with _as_usage_error(path):
        processes = processes_in(path)
    if not processes:
        raise UsageError("ranks: expected the traces of several ranks, given one")
    most_events = MOST_EVENTS // len(processes)
    return [_read(path, step_name, most_events, process.name) for process in processes]


def _read(
    path: Path, step_name: str | None, most_events: int, process_name: str | None
) -> AnyTrace:
    """Read the trace in ``path`` while showing the progress; raise UsageError if it is not a trace."""
    line = ReadingLine(path)
    try:
        with _as_usage_error(path):
            return read_any_trace(path, step_name, most_events, process_name, line.draw)
    finally:
        line.erase()


@contextmanager
def _as_usage_error(path: Path) -> Iterator[None]:
    """Turn an error of reading ``path`` into a UsageError with its name."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"TRACE: {path}: {error.strerror or error}") from None
    except ValueError as error:
        # The message may contain names from the trace, which may have line breaks.
        message = " ".join(str(error).removeprefix(f"{path}: ").split())
        raise UsageError(f"TRACE: {path}: {message}") from None


VERBS = {"why": (Options, EXAMPLES, run)}
