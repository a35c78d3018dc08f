"""Handles the end of a run: it finished, it died, or recording it failed.

Each of the three functions for that collects the measurements, has the record concluded and written to the run's
folder, and shows the run.
"""

from __future__ import annotations

import gc
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial

from lm_profiler.analysis.conclude import conclude
from lm_profiler.analysis.evidence import Evidence
from lm_profiler.callbacks.collect import Collector
from lm_profiler.callbacks.failures import (
    ends_of_ranks,
    failure_of,
    is_of_the_group,
    keep_snapshot,
    status_of,
)
from lm_profiler.callbacks.gather import Exchange
from lm_profiler.callbacks.instruments.instrument import Measured
from lm_profiler.callbacks.instruments.loop import Loop
from lm_profiler.callbacks.instruments.profiling_options import ProfilingOptions
from lm_profiler.callbacks.run_files import (
    RunFiles,
    snapshot_file,
    with_rows_left_behind,
)
from lm_profiler.callbacks.session import Session
from lm_profiler.callbacks.show_run import RecordedRun
from lm_profiler.callbacks.trackers import Tracker
from lm_profiler.lightning_names import OBSERVED, OBSERVER
from lm_profiler.measure.boundary import UNGUARDED, Guard, error_text, try_or_note
from lm_profiler.record.files import write_whole
from lm_profiler.record.quantities import count_text
from lm_profiler.record.rank_ends import (
    RankEnd,
    end_file,
    end_of_loop,
    first_end,
    read_ends,
)
from lm_profiler.record.run_record import Failure, RunRecord, Status
from lm_profiler.record.steps import (
    begin_rows,
    rank_file,
    rank_files,
    read_rows,
    write_steps,
)
from lm_profiler.record.text import ranks_text


@dataclass(eq=False)
class RunFinisher:
    """Ends one run, which may not have reached its loop. The constructor calls nothing that could fail."""

    loop: Loop  # the loop of the run
    options: ProfilingOptions  # the options of the run
    # the guard of the profiler as a whole; if the profiler failed, so did the run
    profiler_guard: Guard
    restore_loop: Callable[[], None]  # removes the marks from the loop
    report: Callable[[str], object]  # reports a problem, and adds it to ``notes``
    notes: list[str]  # the problems that were reported so far
    # guards every call, and calls ``recording_failed`` on an error
    guard: Guard = UNGUARDED
    exchange: Exchange = field(default_factory=Exchange)
    session: Session | None = None
    collector: Collector = field(init=False)
    files: RunFiles = field(init=False)
    is_over: bool = False  # whether nothing is left to do
    trackers: Sequence[Tracker] = ()  # send results to the loop's loggers
    _process: int = field(default_factory=os.getpid)
    _gathered_measurements: Measured | None = None

    def __post_init__(self) -> None:
        self.collector = Collector(self.loop, self.options)
        self.files = RunFiles(self.options.launch.name, self.report)

    @property
    def record(self) -> RunRecord | None:
        return self.files.record

    @property
    def is_forked_copy(self) -> bool:
        """Whether the program has forked this process after the run began; such a copy does not end the run."""
        return self._process != os.getpid()

    def begin(self, planned: Mapping[str, int]) -> None:
        """Write a record with the status ``unfinished`` and no steps, which stays if the process is killed."""
        folder = self.files.folder_or_new()
        config = self.options.launch.config_yaml
        if config is not None:
            write_whole(folder / "config.yaml", config)
        begin_rows(folder, rank=0)
        evidence = self.collector.evidence(
            Measured(rows=(), steps_planned=planned), "unfinished"
        )
        # Without notes, because the last record has all of them and would repeat these.
        record = conclude(replace(evidence, notes=()), findings=())
        record.write(folder / "run.json")

    # -- it finished

    def finished_early(self) -> None:
        """Record a run whose loop ended before all stages were done."""
        if self.is_over:
            return
        if self.session is not None and not self.profiler_guard.is_disabled:
            schedule = self.session.schedule
            planned = count_text(schedule.planned[schedule.stage or ""], "step")
            self.notes.append(
                f"the loop ended in stage {schedule.stage}, after {schedule.steps_done} of its {planned}"
            )
            self._write_loop_end(self.session.steps)
        self.finished()

    def finished(self) -> None:
        """Record a run that raised nothing, and show it."""
        # before anything that may fail, because training continues with the restored loop
        self.restore_loop()
        if self.is_forked_copy:
            self.is_over = True
            return

        measured = self.exchange.gather(self._measurements())
        self._gathered_measurements = measured
        failure = self._hidden_failure(measured)
        if self.loop.rank == 0:
            with collector_paused():
                self._record_finished(measured, failure)
            if failure is None:
                self._send_to_trackers()
                self._remove_loop_ends()
            self._show()
        elif failure is None and self.session is not None:
            _write_kernels(self.session)
        self._close()

    def _hidden_failure(self, measured: Measured) -> Failure | None:
        """Return why a run without an exception has failed: its instruments failed, or it had no step. None if not."""
        if self.profiler_guard.error is not None:
            step = None if self.session is None else self.session.steps + 1
            return failure_of(self.profiler_guard.error, "instruments", step)
        if not measured.rows:
            return self.loop.no_step
        return None

    def _record_finished(self, measured: Measured, failure: Failure | None) -> None:
        """Write the record twice: at once with the measurements, and then with what is determined afterwards.

        So no error or signal after the first write can lose the measurements. ``collect_afterwards`` takes some
        seconds: it determines FLOPs, the machine's rates, kernels, and numerics if they were requested.
        """
        status: Status = "ok" if failure is None else "failed"
        evidence = self.collector.evidence(measured, status, failure)
        if failure is None:
            evidence = with_rows_left_behind(evidence, self.files.folder_or_new())
        evidence = self.files.write_record(evidence)
        self.is_over = True  # from here on a record exists, however the process ends
        if failure is None and self.session is not None:
            evidence = self.collector.collect_afterwards(
                evidence, measured, self.session.instruments.tracer
            )
        # the rows of all ranks were written with the first record
        self.files.write_all_files(evidence, rows_are_new=False)

    def _write_loop_end(self, steps: int) -> None:
        """Write a file that shows the other ranks that this rank has no step left: they may fail because of that."""
        if self.exchange.ranks == 1 or self.is_forked_copy:
            return
        rank = self.exchange.rank
        loop_end = end_of_loop(rank, platform.node(), steps, time.time())
        with suppress(OSError):
            loop_end.write(self.files.folder_or_new() / end_file(rank))

    def _remove_loop_ends(self) -> None:
        """Remove the files about the ends of the ranks' loops, because all ranks ended well."""
        folder = self.files.folder_or_new()
        for rank, end in read_ends(folder).items():
            if end.status == "ok":
                with suppress(OSError):
                    (folder / end_file(rank)).unlink()

    # -- it died

    def died(self, exception: BaseException, phase: str, step: int) -> None:
        """Record a run that ``exception`` ended in ``phase`` of ``step``, and show it."""
        device = self.loop.device
        status = status_of(exception)
        failure = failure_of(exception, phase, step, device)
        rank_end: RankEnd | None = None
        if self.exchange.ranks > 1:
            failure = failure.model_copy(
                update={"rank": self.exchange.rank, "host": platform.node()}
            )
            is_consequence = is_of_the_group(exception)
            rank_end = RankEnd(
                status=status, failure=failure, at=time.time(), followed=is_consequence
            )
            self._write_rank_end(rank_end)
        if status == "oom" and self.files.folder is not None:
            keep_snapshot(device, snapshot_file(self.files.folder, self.loop.rank))

        self.restore_loop()
        measured = self._measurements(keep_trace=False)
        if self.loop.rank == 0:
            with collector_paused():
                self._record_death(measured, status, failure, rank_end)
            self._show()
        else:
            # Other ranks may no longer answer, so nothing is gathered: each rank saves its own steps.
            write_steps(
                rank_file(self.files.folder_or_new(), self.loop.rank), measured.rows
            )
        self._close()

    def _write_rank_end(self, rank_end: RankEnd) -> None:
        """Write how this rank ended, at once, because the launcher of the ranks may end this one too."""
        with suppress(OSError):
            rank_end.write(self.files.folder_or_new() / end_file(self.exchange.rank))
        if self.options.launch.is_supervised:
            # Our command line ends the ranks. Lightning's observer would also end this process, before it has a record.
            _call_off_observer()

    def _record_death(
        self,
        measured: Measured,
        status: Status,
        failure: Failure,
        rank_end: RankEnd | None,
    ) -> None:
        """Write the record at once, and all files when the other ranks have had time to write how they ended."""
        evidence = self.files.write_record(
            self.collector.evidence(measured, status, failure)
        )
        self.is_over = True  # from here on a record exists, however the process ends
        with_all_ranks: Evidence | None = None
        if rank_end is not None:
            add_all_ranks = partial(self._with_files_of_ranks, evidence, rank_end)
            with_all_ranks = try_or_note(
                "how the ranks ended", add_all_ranks, self.notes
            )
        if with_all_ranks is None:
            self.files.write_all_files(evidence, rows_are_new=False)
        else:
            self.files.write_all_files(with_all_ranks, rows_are_new=True)

    def _with_files_of_ranks(self, evidence: Evidence, own_end: RankEnd) -> Evidence:
        """Return ``evidence`` with the steps that all ranks have written, and with the failure that came first."""
        folder = self.files.folder_or_new()
        ranks = self.exchange.ranks
        get_exit_codes = self.loop.exit_codes
        ends = ends_of_ranks(own_end, folder, ranks, get_exit_codes)
        cause = first_end(ends, range(ranks), get_exit_codes()) or own_end
        rows = read_rows(folder, growing=True)
        notes = list(evidence.notes)
        ranks_without_steps = sorted(set(range(ranks)).difference(rows.rank.tolist()))
        if ranks_without_steps and len(rows):
            note = f"no steps of {ranks_text(ranks_without_steps)}"
            have_files_here = set(ranks_without_steps) <= set(rank_files(folder))
            if not have_files_here:
                note += f"; their files may be in {folder} on the hosts of these ranks"
            notes.append(note)
        return replace(
            evidence, rows=rows, status=cause.status, failure=cause.failure, notes=notes
        )

    # -- recording failed

    def recording_failed(self) -> None:
        """Restore the loop and save what can be saved, because recording failed."""
        error = self.guard.error
        self.restore_loop()
        if self.session is not None:
            self.session.instruments.discard()
        if self.loop.rank == 0 and error is not None:
            measured = self._gathered_measurements
            if measured is None:
                measured = self._measurements()
            evidence = self.collector.evidence(
                measured, "failed", failure_of(error, "instruments", step=None)
            )
            if self.record is not None:
                # The run itself ended well, and its record exists.
                evidence = replace(
                    evidence, status=self.record.status, failure=self.record.failure
                )
            self.files.write_record(
                replace(
                    evidence,
                    notes=[*evidence.notes, f"not complete: {error_text(error)}"],
                )
            )
        self.is_over = True

    # -- shared by all three

    def _measurements(self, keep_trace: bool = True) -> Measured:
        """Return the measurements. If an instrument fails at its end, return what was measured before that."""
        measured: Measured | None = None
        if self.session is not None:
            session = self.session
            last_steps = Guard(
                "the last steps",
                self.report,
                session.instruments.discard,
                outcome="unknown",
            )
            last_steps.run(session.finish, keep_trace)
            measured = try_or_note("what was measured", session.measured, self.notes)
        if measured is None:
            measured = Measured(rows=(), steps_planned=self.options.steps())
        return replace(measured, notes=[*self.notes, *measured.notes])

    def _recorded_run(self) -> RecordedRun:
        """Return the run as it is recorded in its folder, so that it can be shown."""
        assert self.record is not None
        return RecordedRun(
            self.files.folder_or_new(), self.record, self.options, self.report
        )

    def _send_to_trackers(self) -> None:
        assert self.session is not None
        trace = self.session.instruments.tracer.path
        self.trackers = self._recorded_run().send_to_trackers(self.loop, trace)

    def _show(self) -> None:
        recorded_run = self._recorded_run()
        recorded_run.show_in_tensorboard()
        recorded_run.show_table()

    def _close(self) -> None:
        self.is_over = True
        # The callback may exist as long as the program, so rows and instruments are freed here.
        self.session = None


def _write_kernels(session: Session) -> None:
    """Write the table of kernels of a rank that writes no record, and so no notes."""
    tracer = session.instruments.tracer
    unwritten_notes: list[str] = []
    try_or_note("kernels", lambda: tracer.kernels(tracer.work([])), unwritten_notes)


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause Python's garbage collector, which the many objects of a trace would start repeatedly.

    Each collection visits all objects of the process, which takes 0.3 s of CPU time with torch loaded, and frees
    nothing.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _call_off_observer() -> None:
    """Stop Lightning's observer: it kills this process when a rank fails, but the record is not written yet."""
    observer = OBSERVER.find_or(())
    for thread in threading.enumerate():
        if isinstance(thread, observer):
            setattr(thread, OBSERVED.name, [])
