"""Shows a recorded run: in TensorBoard's HPARAMS and TEXT, in the trackers that were requested, and as a table."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lm_profiler.callbacks.instruments.loop import Loop
from lm_profiler.callbacks.instruments.profiling_options import ProfilingOptions
from lm_profiler.callbacks.trackers import Tracker, facts, figures, results
from lm_profiler.measure.boundary import Guard, write_text
from lm_profiler.record.entry import Entry
from lm_profiler.record.run_record import RunRecord
from lm_profiler.report.run.run_page import end_tables
from lm_profiler.report.tables.formats import render
from lm_profiler.tensorboard.summary import write_hparams


@dataclass(frozen=True)
class RecordedRun:
    """A run whose ``record`` is in ``folder``. What cannot be shown is reported, and the rest is shown."""

    folder: Path
    record: RunRecord
    options: ProfilingOptions
    report: Callable[[str], object]  # gets a note of a problem

    def show_in_tensorboard(self) -> None:
        """Write the run's options and figures for TensorBoard's HPARAMS."""
        entry = Entry(self.folder, self.record)
        Guard("HPARAMS in TensorBoard", self.report, outcome="cannot be written").run(
            write_hparams, entry
        )

    def show_table(self) -> None:
        if not self.options.quiet:
            Guard("the table", self.report).run(self._print_table)

    def _print_table(self) -> None:
        """Print the table in one call, so that nothing else is printed between its lines."""
        tables = end_tables(self.record, self.folder, self.options.verbose)
        # The output of a program that did not request the profile is not ours to extend.
        is_added_from_outside = self.options.launch.added
        stream = sys.stderr if is_added_from_outside else sys.stdout
        text = render(tables, "terminal", stream)
        write_text(stream, text)

    def send_to_trackers(self, loop: Loop, trace: Path) -> Sequence[Tracker]:
        """If requested, send figures, facts and files, such as ``trace``, to the loop's loggers; return trackers."""
        if not self.options.export.trackers:
            return ()
        return Guard("the trackers", self.report).run(
            self._send, loop, trace, otherwise=()
        )

    def _send(self, loop: Loop, trace: Path) -> Sequence[Tracker]:
        """Send figures and facts to each of the loop's loggers, and files to those that accept them."""
        trackers = [Tracker(logger, self.report) for logger in loop.loggers]
        if not trackers:
            self.report("export.trackers: the Trainer has no logger")
            return ()
        files: list[Path] = []
        takes_files = any(tracker.send_files for tracker in trackers)
        if takes_files:
            files = results(self.folder, trace, self.report)
        values = figures(self.record, self.options.export.trackers)
        for tracker in trackers:
            tracker.send(values, loop.step_number, files, facts(self.record))
        return trackers
