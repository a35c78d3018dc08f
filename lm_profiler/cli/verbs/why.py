"""The verb ``why``: where the time of any trace went that torch.profiler wrote, of one, of two, or of all ranks."""

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
  lm_profiler why trace.json --step train_step                   steps are the ranges of this name
  lm_profiler why trace.json.gz --device "NVIDIA H100 80GB HBM3"   with the floor of another GPU
  lm_profiler why trace.json.gz --output why.md
  lm_profiler why before.json.gz after.json.gz                   which kernels came, went, or take another time
  lm_profiler why rank0.json rank1.json rank2.json               who waits for whom at each collective
  lm_profiler why merged.json --process 4243                     one process of a file that holds several
  lm_profiler why logs/run/version_0                             the traces of a run of our own"""

_MOST_TRACES = 64
_PAGE = "html"
_TRACES_OF_RUN = "trace/rank*.pt.trace.json.gz"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Show where the time of a trace's steps went, from any program that torch.profiler traced.

    Steps are the ranges ProfilerStep#, else the whole trace is one. A phase is shown only where a range names it:
    torch's Optimizer.step# and autograd nodes, or a range of the program that is called forward, backward, optimizer.
    Two traces are compared. Traces of several ranks, or more than two, show which rank waits for which.

    Args:
        config: A YAML file of these options.
        traces: A trace (.json or .json.gz), two to compare, those of the ranks of a run, or the folder of a run.
        ranks: Whether the traces are of ranks of one run; if not given, what the traces record decides.
        process: Of a file with the work of several processes, show this one; if not given, the one with the most work.
        step: The steps are the ranges of this name, with or without a number behind it.
        device: Compute the floor for this device, by the name that its driver reports; if not given, for the trace's.
        format: terminal, markdown, latex, typst, json or html; if not given, by the suffix of output.
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
    """Return the format of the answer; a page needs a file, and no further package."""
    is_page = format_option == _PAGE
    if format_option is None and output is not None:
        is_page = output.suffix.lower() == ".html"
    if not is_page:
        return choose_answer_format(format_option, output)
    if output is None:
        raise UsageError(f"format: expected --output FILE for {_PAGE}, given none")
    return _PAGE


def run(options: Options) -> int:
    """Print or write the answer; raise UsageError for a file that is no trace, or has no such step."""
    paths = _trace_files(options.traces)
    if len(paths) > _MOST_TRACES:
        raise UsageError(
            f"TRACE: expected at most {_MOST_TRACES} traces, given {len(paths)}"
        )
    if options.ranks and len(paths) == 1:
        traces = _traces_of_processes(paths[0], options.step)
    else:
        most_events = MOST_EVENTS // len(paths)  # they are in memory together
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
    """Return the files of traces among ``paths``, those of the ranks for the folder of a run."""
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
    """Return the trace of each process of a file that holds several: the ranks of a run."""
    with _refused(path):
        processes = processes_in(path)
    if not processes:
        raise UsageError("ranks: expected the traces of several ranks, given one")
    most_events = MOST_EVENTS // len(processes)
    return [_read(path, step_name, most_events, process.name) for process in processes]


def _read(
    path: Path, step_name: str | None, most_events: int, process_name: str | None
) -> AnyTrace:
    """Read the trace in ``path`` with a line of progress; raise UsageError if it is none."""
    line = ReadingLine(path)
    try:
        with _refused(path):
            return read_any_trace(path, step_name, most_events, process_name, line.draw)
    finally:
        line.erase()


@contextmanager
def _refused(path: Path) -> Iterator[None]:
    """Turn what a file has that cannot be read into a UsageError with its name."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"TRACE: {path}: {error.strerror or error}") from None
    except ValueError as error:
        # names that stand in it may hold line breaks
        message = " ".join(str(error).removeprefix(f"{path}: ").split())
        raise UsageError(f"TRACE: {path}: {message}") from None


VERBS = {"why": (Options, EXAMPLES, run)}
