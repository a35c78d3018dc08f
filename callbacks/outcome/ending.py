"""The end of a run: what was measured becomes a record, also where something fails."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from lightning.pytorch import Trainer

from lm_profiler.analysis.conclude import conclude
from lm_profiler.analysis.evidence import Evidence
from lm_profiler.callbacks.collect import Collector
from lm_profiler.callbacks.exports import send_figures
from lm_profiler.callbacks.instruments.instrument import Measured
from lm_profiler.callbacks.outcome.failures import NO_STEP, failure_of, keep_snapshot, status_of
from lm_profiler.callbacks.outcome.gather import Exchange
from lm_profiler.callbacks.outcome.rank_position import position_of, stragglers, where_they_are
from lm_profiler.callbacks.outcome.rank_status import RankStatus, StallWatch, is_of_the_group
from lm_profiler.callbacks.outcome.run_files import (
    second_place,
    snapshot_file,
    with_rows_left_behind,
    without_steps,
    write_run,
)
from lm_profiler.callbacks.profiling_options import Launch, ProfilingOptions
from lm_profiler.callbacks.session import Session
from lm_profiler.measure.boundary import UNGUARDED, Guard, put, said, try_or_note
from lm_profiler.record.files import write_whole
from lm_profiler.record.quantities import counted
from lm_profiler.record.run import Failure, RankEnd, RecordError, RunRecord, Status, end_file, read_run
from lm_profiler.record.steps import begin_rows, rank_file, read_rows, write_steps
from lm_profiler.report.run.run_page import end_tables
from lm_profiler.report.tables.formats import render

# seconds to wait for how the other ranks ended, where a watchdog ends those that are stuck: it needs less
_PATIENCE_S = 8.0

# seconds to wait where nothing ends ranks that are stuck: the rank whose end came first has told of it by now
_UNKEPT_S = 2.0


@dataclass(eq=False)
class Ending:
    """Ends one run, which may not have reached its loop. The constructor calls nothing that could fail.

    ``part`` guards every call, and calls ``abandon`` on an error. ``leaving`` is true once the end has begun, ``over``
    once nothing is left to do. ``folder`` holds the run's files, and ``record`` is what was last written there. ``end``
    is how this rank ended, None where it ended well.
    """

    trainer: Trainer  # the run's
    options: ProfilingOptions  # what the run was to do
    launch: Launch  # how it was started
    core: Guard  # the guard of the profiler as a whole; if that failed, so did the run
    take_out: Callable[[], None]  # restores the Trainer
    tell: Callable[[str], object]  # reports a problem, and adds it to ``notes``
    notes: list[str]  # what was reported so far
    part: Guard = UNGUARDED
    exchange: Exchange = field(default_factory=Exchange)
    session: Session | None = None
    collector: Collector = field(init=False)
    folder: Path | None = None
    record: RunRecord | None = None
    ranks: RankStatus = field(init=False)
    watch: StallWatch | None = None
    end: RankEnd | None = None
    leaving: bool = False
    over: bool = False
    _gathered: Measured | None = None

    def __post_init__(self) -> None:
        self.ranks = RankStatus(self.exchange)
        self.collector = Collector(self.trainer, self.options, self.launch)

    def begin(self, planned: Mapping[str, int]) -> None:
        """Write a record with the status ``unfinished`` and no steps: a killed process leaves that one."""
        folder = self._folder_or_new()
        if self.launch.config_yaml is not None:
            write_whole(folder / "config.yaml", self.launch.config_yaml)
        begin_rows(folder, 0)
        evidence = self.collector.evidence(Measured(rows=(), steps_planned=planned), "unfinished")
        # Without notes: all of them come with the last record, and would stand there twice.
        conclude(replace(evidence, notes=()), findings=()).write(folder / "run.json")

    def early(self) -> None:
        """Record a run whose loop ended before all stages were done."""
        if self.over:
            return
        if self.session is not None and not self.core.out:
            left = self.session.schedule
            planned = counted(left.planned[left.stage or ""], "step")
            self.notes.append(f"the loop ended in stage {left.stage}, after {left.done} of its {planned}")
        self.finish("ok")

    def died(self, exception: BaseException, phase: str, step: int) -> None:
        """Record a run that ``exception`` ended in ``phase`` of ``step``."""
        self.leaving = True
        device, status = self.trainer.strategy.root_device, status_of(exception)
        followed = not self.ranks.alone and (is_of_the_group(exception) or self.ranks.has_lost)
        self.end = self.ranks.end_of(status, failure_of(exception, phase, step, device), followed)
        if status == "oom" and self.folder is not None:
            keep_snapshot(device, snapshot_file(self.folder, self.trainer.global_rank))
        self.finish(status, self.end.failure)

    def never_began(self, exception: BaseException) -> None:
        """Tell the other ranks that ``exception`` ended this one before the loop; rank 0 writes the record."""
        self.leaving = self.over = True
        failure = failure_of(exception, "setup", None)
        self.end = self.ranks.end_of(status_of(exception), failure, is_of_the_group(exception))
        self.take_out()
        self.ranks.tell(self.end, None)

    def finish(self, status: Status, failure: Failure | None = None) -> None:
        """Record the run, and print its table."""
        self.leaving = True
        if self.watch is not None:
            self.watch.end()  # no step ends any more while this rank waits for the others below
        self.take_out()  # before anything that may fail: training goes on with the Trainer as it was
        trainer, session = self.trainer, self.session
        measured = self._measured(failure)
        if failure is None:
            self.ranks.done()
            Guard("the ranks' clocks", self.tell, outcome="could not be compared").run(self.exchange.compare_clocks)
            measured = self._gathered = self.exchange.gather(measured)
            if self.core.error is not None:
                step = session.steps + 1 if session else None
                status, failure = "failed", failure_of(self.core.error, "instruments", step)
            elif not measured.rows:
                status, failure = "failed", NO_STEP
        elif not trainer.is_global_zero:
            # The other ranks may not answer any more, so each saves its own steps and nothing is gathered.
            write_steps(rank_file(self._folder_or_new(), trainer.global_rank), measured.rows)
        if failure is not None and self.end is not None and self.folder is not None:
            self.ranks.tell(self.end, self.folder)
        if trainer.is_global_zero:
            self._record(measured, status, failure)
        elif self.end is not None:
            self._record_for_rank_0(measured)
        elif failure is None and session is not None:
            tracer = session.instruments.tracer
            try_or_note("kernels", lambda: tracer.kernels(tracer.work([])), [])  # only rank 0 writes notes
        self.over = True
        self.session = None  # the callback may live as long as the program; its rows and instruments need not

    def abandon(self) -> None:
        """Recording failed: restore the Trainer, and save what can be saved."""
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
        """Return what was measured; of an instrument that failed, what it had by then."""
        session, measured = self.session, None
        if session is not None:
            last = Guard("the last steps", self.tell, session.instruments.discard, outcome="unknown")
            last.run(session.finish, failure is None)
            measured = try_or_note("what was measured", session.measured, self.notes)
        if measured is None:
            measured = Measured(rows=(), steps_planned=self.options.steps())
        return replace(measured, notes=(*self.notes, *measured.notes))

    def _record(self, measured: Measured, status: Status, failure: Failure | None) -> None:
        """Write the record twice: at once with what was measured, and once more with what is found out afterwards.

        So no error or signal in what follows the first can lose what was measured.
        """
        evidence = self.collector.evidence(measured, status, failure)
        evidence = self._write(with_rows_left_behind(evidence, self._folder_or_new()))
        self.over = True  # from here on there is a record, whatever ends the process
        of_all_ranks = None
        if self.end is not None and not self.ranks.alone:
            of_all_ranks = try_or_note("how the ranks ended", lambda: self._with_all_ranks(evidence), self.notes)
        elif failure is None and measured.rows and self.session is not None:
            evidence = self.collector.look_back(evidence, measured, self.session.instruments.tracer)
        # Rows are written again only where other ranks' were added to them.
        self._write(of_all_ranks or evidence, rows=of_all_ranks is not None, last=True)
        if self.options.export.trackers and self.record is not None and failure is None:
            send = partial(send_figures, self.trainer.loggers, self.record, self.trainer.global_step)
            Guard("the trackers", self.tell).run(send, self.tell)
        if not self.options.quiet:
            Guard("the table", self.tell).run(self._show)

    def _with_all_ranks(self, evidence: Evidence) -> Evidence:
        """Return ``evidence`` with the steps that every rank left, and the end that was the cause of all others."""
        assert self.end is not None
        folder = self._folder_or_new()
        patience_s = _PATIENCE_S if self.launch.kept else _UNKEPT_S if self.end.followed else 0.0
        ends, silent = self.ranks.others(folder, patience_s)
        cause = self.ranks.cause(self.end, ends, silent)
        rows, notes = read_rows(folder, growing=True), list(evidence.notes)
        if late := stragglers(places := self.ranks.places()):
            notes.append(f"at the end {where_they_are(places, late)}")
        missing = sorted({*range(self.exchange.ranks)} - {*rows.rank.tolist()})
        if missing and len(rows):
            notes += without_steps(missing, folder, self.ranks.host_of)
        return replace(evidence, rows=rows, status=cause.status, failure=cause.failure, notes=notes)

    def _record_for_rank_0(self, measured: Measured) -> None:
        """Record the run in the place of rank 0 where that is gone; the first rank to come here does it for all."""
        folder = self._folder_or_new()
        if self.end is None or self.ranks.is_there():
            return
        lost = self.ranks.cause(self.end.model_copy(update={"followed": True}), {}, [0])
        try:
            # "x" fails if the file exists: only one rank can make it, and that one writes the record.
            with (folder / end_file(0)).open("x", encoding="utf-8") as file:
                file.write(lost.model_dump_json(indent=1) + "\n")
            if read_run(folder).status == "unfinished":
                self._write(self._with_all_ranks(self.collector.evidence(measured, self.end.status, self.end.failure)))
        except (OSError, RecordError):  # another rank or rank 0 has done it, or this node does not see the folder
            return

    def last_words(self, status: Status, why: str, followed: bool) -> bool:
        """Keep this rank's steps and tell how it ended: called by another thread where training is stuck.

        The process ends right after it. Returns False where the run had not begun.
        """
        session, folder = self.session, self.folder
        if self.over:
            return True
        if session is None or folder is None:
            return False
        self.over = self.leaving = True
        there = position_of(session)
        failure = Failure(phase=there.phase, step=there.step, type="Stuck", message=f"{why}; {there.said_since}")
        self.end = self.ranks.end_of(status, failure, followed or self.ranks.has_lost)
        session.keep()
        notes = (*self.notes, *session.notes)
        measured = Measured(rows=session.rows, steps_planned=session.schedule.planned, notes=notes)
        self.ranks.tell(self.end, folder)
        if self.exchange.rank > 0:
            self._record_for_rank_0(measured)
            return True
        evidence = self._write(self.collector.evidence(measured, status, self.end.failure))
        if not self.ranks.alone:
            self._write(self._with_all_ranks(evidence))
        return True

    def _show(self) -> None:
        """Print the table in one call, so that nothing else is printed between its lines."""
        assert self.record is not None
        tables = end_tables(self.record, self._folder_or_new(), self.options.verbose)
        out = sys.stderr if self.launch.added else sys.stdout
        put(out, render(tables, "terminal", out))

    def _folder_or_new(self) -> Path:
        """Return the run's folder; where there is none, make one at the second place."""
        self.folder = self.folder or second_place(self.launch.name, self.tell)
        return self.folder

    def _write(self, evidence: Evidence, rows: bool = True, last: bool = False) -> Evidence:
        """Call ``write_run``; once more at the second place where the run's folder cannot be written to any more."""
        folder = self._folder_or_new()
        try:
            evidence, self.record = write_run(folder, evidence, rows, last)
        except OSError as error:
            text = f"{folder} cannot be written to: {said(error)}"
            self.tell(text)
            second = second_place(self.launch.name, self.tell)
            evidence = replace(evidence, notes=[*evidence.notes, f"the record is in {second}: {text}"])
            evidence, self.record = write_run(second, evidence, last=last)
            self.folder = second
        return evidence
