"""The end of a run: what was measured becomes a record in the run's folder, also where something fails."""

from __future__ import annotations

import gc
import os
import platform
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from lightning.pytorch import Trainer

from lm_profiler.analysis.conclude import RunSteps, conclude
from lm_profiler.analysis.evidence import Evidence, write_evidence
from lm_profiler.analysis.steps.summaries import ideal_step_s, scalars
from lm_profiler.callbacks.collect import Collector
from lm_profiler.callbacks.failures import (
    NO_STEP,
    codes_of,
    ends_of_ranks,
    failure_of,
    is_of_the_group,
    keep_snapshot,
    status_of,
)
from lm_profiler.callbacks.gather import Exchange
from lm_profiler.callbacks.instruments.instrument import Measured
from lm_profiler.callbacks.instruments.profiling_options import ProfilingOptions
from lm_profiler.callbacks.session import Session
from lm_profiler.callbacks.trackers import Tracker, facts, figures, results
from lm_profiler.lightning_names import OBSERVED, OBSERVER
from lm_profiler.measure.boundary import UNGUARDED, Guard, put, said, try_or_note
from lm_profiler.record.entry import Entry
from lm_profiler.record.files import claim_run_dir, write_whole
from lm_profiler.record.quantities import counted
from lm_profiler.record.rank_ends import RankEnd, end_file, end_of_loop, first_end, read_ends
from lm_profiler.record.run_record import Failure, RunRecord, Status
from lm_profiler.record.steps import (
    begin_rows,
    join_rank_files,
    rank_file,
    rank_files,
    read_rows,
    write_rows,
    write_steps,
)
from lm_profiler.record.text import ranks_text
from lm_profiler.report.run.run_page import end_tables
from lm_profiler.report.tables.formats import render
from lm_profiler.tensorboard.summary import scalars_summary, write_events, write_hparams


@dataclass(eq=False)
class RunFinisher:
    """Ends one run, which may not have reached its loop. The constructor calls nothing that could fail."""

    trainer: Trainer  # the Trainer of the run
    options: ProfilingOptions  # the options of the run
    core: Guard  # the guard of the profiler as a whole; if that failed, so did the run
    take_out: Callable[[], None]  # restores the Trainer
    tell: Callable[[str], object]  # reports a problem, and adds it to ``notes``
    notes: list[str]  # what was reported so far
    part: Guard = UNGUARDED  # guards every call, and calls ``abandon`` on an error
    exchange: Exchange = field(default_factory=Exchange)
    session: Session | None = None
    collector: Collector = field(init=False)
    folder: Path | None = None  # holds the run's files
    record: RunRecord | None = None  # what was last written there
    end: RankEnd | None = None  # how this rank ended; None where it ended well, or is the only one
    over: bool = False  # whether nothing is left to do
    process: int = field(default_factory=os.getpid)  # a copy that the program forks later has no say in the run
    trackers: Sequence[Tracker] = ()  # the loggers that get results
    _gathered: Measured | None = None

    def __post_init__(self) -> None:
        self.collector = Collector(self.trainer, self.options)

    def begin(self, planned: Mapping[str, int]) -> None:
        """Write a record with the status ``unfinished`` and no steps: a killed process leaves that one."""
        folder = self._folder_or_new()
        if self.options.launch.config_yaml is not None:
            write_whole(folder / "config.yaml", self.options.launch.config_yaml)
        begin_rows(folder, 0)
        evidence = self.collector.evidence(Measured(rows=(), steps_planned=planned), "unfinished")
        # Without notes: the last record has all of them, and would repeat them.
        conclude(replace(evidence, notes=()), findings=()).write(folder / "run.json")

    def early(self) -> None:
        """Record a run whose loop ended before all stages were done."""
        if self.over:
            return
        if self.session is not None and not self.core.out:
            left = self.session.schedule
            planned = counted(left.planned[left.stage or ""], "step")
            self.notes.append(f"the loop ended in stage {left.stage}, after {left.done} of its {planned}")
            self._leave_loop_end(self.session.steps)
        self.finish("ok")

    def _leave_loop_end(self, steps: int) -> None:
        """Leave for the other ranks that this rank has no step left: they may fail because of that."""
        is_original = self.process == os.getpid()
        if self.exchange.ranks == 1 or not is_original:
            return
        rank = self.exchange.rank
        loop_end = end_of_loop(rank, platform.node(), steps, time.time())
        with suppress(OSError):
            loop_end.write(self._folder_or_new() / end_file(rank))

    def died(self, exception: BaseException, phase: str, step: int) -> None:
        """Record a run that ``exception`` ended in ``phase`` of ``step``."""
        device, status = self.trainer.strategy.root_device, status_of(exception)
        failure = failure_of(exception, phase, step, device)
        if self.exchange.ranks > 1:
            failure = failure.model_copy(update={"rank": self.exchange.rank, "host": platform.node()})
            followed = is_of_the_group(exception)
            self.end = RankEnd(status=status, failure=failure, at=time.time(), followed=followed)
            with suppress(OSError):  # at once: whoever launched the ranks may end this one too
                self.end.write(self._folder_or_new() / end_file(self.exchange.rank))
            if self.options.launch.kept:
                _call_off_observer()
        if status == "oom" and self.folder is not None:
            keep_snapshot(device, snapshot_file(self.folder, self.trainer.global_rank))
        self.finish(status, failure)

    def finish(self, status: Status, failure: Failure | None = None) -> None:
        """Record the run, and print its table."""
        self.take_out()  # before anything that may fail: training continues with the restored Trainer
        if self.process != os.getpid():
            self.over = True
            return
        trainer, session = self.trainer, self.session
        measured = self._measured(failure)
        if failure is None:
            measured = self._gathered = self.exchange.gather(measured)
            if self.core.error is not None:
                step = session.steps + 1 if session else None
                status, failure = "failed", failure_of(self.core.error, "instruments", step)
            elif not measured.rows:
                status, failure = "failed", NO_STEP
        elif not trainer.is_global_zero:
            # The other ranks may not answer any more, so each saves its own steps and nothing is gathered.
            write_steps(rank_file(self._folder_or_new(), trainer.global_rank), measured.rows)
        if trainer.is_global_zero:
            with collector_paused():
                self._record(measured, status, failure)
            self._tell_of_record(failure)
            if failure is None:
                self._remove_loop_ends()
        elif failure is None and session is not None:
            tracer = session.instruments.tracer
            try_or_note("kernels", lambda: tracer.kernels(tracer.work([])), [])  # only rank 0 writes notes
        self.over = True
        self.session = None  # the callback may live as long as the program; its rows and instruments need not

    def _remove_loop_ends(self) -> None:
        """Remove the ends of the ranks' loops: all ranks ended well."""
        folder = self._folder_or_new()
        for rank, end in read_ends(folder).items():
            if end.status == "ok":
                with suppress(OSError):
                    (folder / end_file(rank)).unlink()

    def abandon(self) -> None:
        """Restore the Trainer and save what can be saved, because recording failed."""
        error = self.part.error
        self.take_out()
        if self.session is not None:
            self.session.instruments.discard()
        if self.trainer.is_global_zero and error is not None:
            measured = self._gathered if self._gathered is not None else self._measured(None)
            evidence = self.collector.evidence(measured, "failed", failure_of(error, "instruments", None))
            if self.record is not None:  # the run itself went well, and its record is there
                evidence = replace(evidence, status=self.record.status, failure=self.record.failure)
            self._write(replace(evidence, notes=[*evidence.notes, f"not complete: {said(error)}"]))
        self.over = True

    def _measured(self, failure: Failure | None) -> Measured:
        """Return what was measured; from an instrument that failed, what it had before."""
        session, measured = self.session, None
        if session is not None:
            last = Guard("the last steps", self.tell, session.instruments.discard, outcome="unknown")
            last.run(session.finish, failure is None)
            measured = try_or_note("what was measured", session.measured, self.notes)
        if measured is None:
            measured = Measured(rows=(), steps_planned=self.options.steps())
        return replace(measured, notes=(*self.notes, *measured.notes))

    def _record(self, measured: Measured, status: Status, failure: Failure | None) -> None:
        """Write the record twice: at once with what was measured, and again with what is determined afterwards.

        So no error or signal after the first write can lose what was measured.
        """
        evidence = self.collector.evidence(measured, status, failure)
        evidence = self._write(with_rows_left_behind(evidence, self._folder_or_new()))
        self.over = True  # from here on a record exists, however the process ends
        of_all_ranks = None
        if (end := self.end) is not None:
            of_all_ranks = try_or_note("how the ranks ended", lambda: self._with_all_ranks(evidence, end), self.notes)
        elif failure is None and measured.rows and self.session is not None:
            evidence = self.collector.look_back(evidence, measured, self.session.instruments.tracer)
        # Rows are written again only where rows of other ranks were added.
        self._write(of_all_ranks or evidence, rows=of_all_ranks is not None, last=True)

    def _tell_of_record(self, failure: Failure | None) -> None:
        """Send the record to the trackers that were asked for, and print its table."""
        if self.options.export.trackers and failure is None:
            Guard("the trackers", self.tell).run(self._track)
        if not self.options.quiet:
            Guard("the table", self.tell).run(self._show)

    def _track(self) -> None:
        assert self.record is not None
        assert self.session is not None
        values = figures(self.record, self.options.export.trackers)
        trace = self.session.instruments.tracer.path
        self.trackers = [Tracker(logger, self.tell) for logger in self.trainer.loggers]
        if not self.trackers:
            self.tell("export.trackers: the Trainer has no logger")
        taken = any(tracker.send_files for tracker in self.trackers)
        files = results(self._folder_or_new(), trace, self.tell) if taken else []
        for tracker in self.trackers:
            tracker.send(values, self.trainer.global_step, files, facts(self.record))

    def _with_all_ranks(self, evidence: Evidence, own: RankEnd) -> Evidence:
        """Return ``evidence`` with the steps that every rank left, and the rank end that caused all others."""
        folder, ranks, codes = self._folder_or_new(), self.exchange.ranks, partial(codes_of, self.trainer)
        cause = first_end(ends_of_ranks(own, folder, ranks, codes), range(ranks), codes()) or own
        rows, notes = read_rows(folder, growing=True), list(evidence.notes)
        missing = sorted({*range(ranks)} - {*rows.rank.tolist()})
        if missing and len(rows):
            there = "" if {*missing} <= {*rank_files(folder)} else f"; what they left may be in {folder} on their host"
            notes.append(f"no steps of {ranks_text(missing)}{there}")
        return replace(evidence, rows=rows, status=cause.status, failure=cause.failure, notes=notes)

    def _show(self) -> None:
        """Print the table in one call, so that nothing else is printed between its lines."""
        assert self.record is not None
        tables = end_tables(self.record, self._folder_or_new(), self.options.verbose)
        out = sys.stderr if self.options.launch.added else sys.stdout
        put(out, render(tables, "terminal", out))

    def _folder_or_new(self) -> Path:
        """Return the run's folder; where there is none, make one in the temporary folder."""
        self.folder = self.folder or second_place(self.options.launch.name, self.tell)
        return self.folder

    def _write(self, evidence: Evidence, rows: bool = True, last: bool = False) -> Evidence:
        """Call ``write_run``; if the run's folder is no longer writable, call it again with a temporary folder."""
        folder = self._folder_or_new()
        try:
            evidence, self.record = write_run(folder, evidence, rows, last)
        except OSError as error:
            text = f"{folder} cannot be written to: {said(error)}"
            self.tell(text)
            second = second_place(self.options.launch.name, self.tell)
            evidence = replace(evidence, notes=[*evidence.notes, f"the record is in {second}: {text}"])
            evidence, self.record = write_run(second, evidence, last=last)
            self.folder = second
        return evidence


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause Python's search for reference cycles, which many objects of a trace would start again and again.

    Each search visits all objects of the process, 0.3 s of CPU time with torch loaded, and finds nothing.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def write_run(folder: Path, evidence: Evidence, rows: bool = True, last: bool = False) -> tuple[Evidence, RunRecord]:
    """Conclude from ``evidence`` and write run.json into ``folder``; returns the evidence as written, and the record.

    With ``rows`` the rows are written too, and with ``last`` the evidence itself and TensorBoard's files.
    """
    if rows:
        notes = write_rows(folder, evidence.rows, all_ended=evidence.failure is None)
        evidence = replace(evidence, notes=[*evidence.notes, *notes])
    record = conclude(evidence)
    if last:
        notes = list(record.notes)  # run.json comes last, with a note on each of these files that could not be written
        try_or_note("evidence", lambda: write_evidence(folder, evidence), notes)
        try_or_note("scalars in TensorBoard", lambda: _write_scalars(folder, evidence, record), notes)
        try_or_note("HPARAMS in TensorBoard", lambda: write_hparams(Entry(folder, record)), notes)
        record = record.model_copy(update={"notes": notes})
    record.write(folder / "run.json")
    return evidence, record


def with_rows_left_behind(evidence: Evidence, folder: Path) -> Evidence:
    """Return ``evidence`` with steps that ranks left but could not send; a failed run's steps are read later."""
    if evidence.failure is not None or evidence.ranks_heard >= evidence.world_size:
        return evidence
    notes = list(evidence.notes)
    rows = try_or_note("steps that ranks left", lambda: join_rank_files(evidence.rows, folder), notes)
    return replace(evidence, rows=evidence.rows if rows is None else rows, notes=notes)


def _write_scalars(folder: Path, evidence: Evidence, record: RunRecord) -> None:
    if steps := RunSteps(evidence).steps:
        ideal_s = ideal_step_s(record)
        write_events(folder, ((row.step, scalars_summary(scalars(row, ideal_s))) for row in steps))


def snapshot_file(folder: Path, rank: int) -> Path:
    """Return the path of the allocator's snapshot of ``rank``."""
    return folder / ("memory_snapshot.pickle" if rank == 0 else f"memory_snapshot.rank{rank}.pickle")


def run_folder(parent: Path, claimed: Path | None, exchange: Exchange, tell: Callable[[str], object]) -> Path:
    """Return the folder of this run on every rank: the ``claimed`` one, or one that rank 0 makes below ``parent``.

    A claimed folder that already holds a record belongs to another run. If none can be made, it is a temporary one.
    """

    def claim() -> str:
        is_free = claimed is not None and not (claimed / "run.json").exists()
        making = Guard("the run's folder", tell, outcome="cannot be made")
        folder = claimed if is_free else making.run(claim_run_dir, parent)
        return str((folder or second_place(parent.name, tell)).absolute())

    return Path(exchange.of_first("folder", claim))


def second_place(name: str, tell: Callable[[str], object]) -> Path:
    """Make and return a temporary folder for a run whose own folder cannot be written to; ``tell`` gets its path."""
    # A random name, which only its owner may enter: others could have put a link at a known path in a shared folder.
    folder = Path(tempfile.mkdtemp(prefix=f"lm_profiler-{Path(name).name[:50]}-"))
    tell(f"the run's files are in {folder}")
    return folder


def _call_off_observer() -> None:
    """Stop Lightning's observer, which kills this process once a rank fails: the record is not yet written."""
    observer = OBSERVER.find_or(())
    for thread in threading.enumerate():
        if isinstance(thread, observer):
            setattr(thread, OBSERVED.name, [])
