"""The end of a run: what was measured becomes a record, also where something fails."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from lightning.pytorch import Trainer

from lm_profiler.analysis.conclude import conclude
from lm_profiler.analysis.evidence import Evidence
from lm_profiler.callbacks.collect import Collector
from lm_profiler.callbacks.launch import Launch, ProfilingOptions
from lm_profiler.callbacks.measured import Measured
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
from lm_profiler.callbacks.session import Session
from lm_profiler.measure.boundary import UNGUARDED, Guard, put, said, try_or_note
from lm_profiler.record.files import write_whole
from lm_profiler.record.quantities import counted
from lm_profiler.record.run import Failure, RankEnd, RecordError, RunRecord, Status, end_file, read_run
from lm_profiler.record.step_files import begin_rows, rank_file, read_rows
from lm_profiler.record.steps import write_steps
from lm_profiler.report.run.run_page import end_tables
from lm_profiler.report.tables.formats import render

_PATIENCE_S = 8.0
"""For how the other ranks ended: one that is stuck is ended within it."""

_UNKEPT_S = 2.0
"""Where nobody ends those that are stuck; what brought this rank's end about was told before."""


@dataclass(eq=False)
class Ending:
    """The end of one run; it may come before the loop starts. The constructor calls nothing that could fail.

    Args:
        trainer: of the run.
        options: what it was to do.
        launch: how it was started.
        core: the guard of the profiler as a whole; if it failed, so did the run.
        take_out: restores the Trainer.
        tell: reports a problem, and adds it to ``notes``.
        notes: what was reported so far.

    ``part`` guards every call, and calls ``abandon`` on an error. ``leaving``: the end has begun; ``over``: nothing is
    left to do. ``folder`` has its files, ``record`` is what was written last; ``end`` is how this rank ended where that
    was not well.
    """

    trainer: Trainer
    options: ProfilingOptions
    launch: Launch
    core: Guard
    take_out: Callable[[], None]
    tell: Callable[[str], object]
    notes: list[str]
    part: Guard = UNGUARDED
    exchange: Exchange = field(default_factory=Exchange)
    session: Session | None = None
    collector: Collector = field(init=False)
    folder: Path | None = None
    record: RunRecord | None = None
    roll: RankStatus = field(init=False)
    watch: StallWatch | None = None
    end: RankEnd | None = None
    leaving: bool = False
    over: bool = False
    _gathered: Measured | None = None

    def __post_init__(self) -> None:
        self.roll = RankStatus(self.exchange)
        self.collector = Collector(self.trainer, self.options, self.launch)

    def begin(self, planned: Mapping[str, int]) -> None:
        """Write a record with the status ``unfinished`` and no steps: what a killed process leaves."""
        folder = self._a_folder()
        if self.launch.config_yaml is not None:
            write_whole(folder / "config.yaml", self.launch.config_yaml)
        begin_rows(folder, 0)
        evidence = self.collector.evidence(Measured((), planned), "unfinished")
        conclude(replace(evidence, notes=()), findings=()).write(folder / "run.json")  # notes are told at the end

    def early(self) -> None:
        """The loop ended before all stages were done."""
        if self.over:
            return
        if self.session is not None and not self.core.out:
            left = self.session.schedule
            planned = counted(left.planned[left.stage or ""], "step")
            self.notes.append(f"the loop ended in stage {left.stage}, after {left.done} of its {planned}")
        self.finish("ok")

    def died(self, exception: BaseException, phase: str, step: int) -> None:
        """``exception`` ended the run in ``phase`` of ``step``."""
        self.leaving = True
        device, status = self.trainer.strategy.root_device, status_of(exception)
        failure = self.roll.mine(failure_of(exception, phase, step, device))
        followed = not self.roll.alone and (is_of_the_group(exception) or self.roll.has_lost)
        self.end = RankEnd(status=status, failure=failure, at=self.roll.clock(), followed=followed)
        if status == "oom" and self.folder is not None:
            keep_snapshot(device, snapshot_file(self.folder, self.trainer.global_rank))
        self.finish(status, failure)

    def never_began(self, exception: BaseException) -> None:
        """``exception`` ended a rank other than the first before the loop."""
        self.leaving = self.over = True
        failure = self.roll.mine(failure_of(exception, "setup", None))
        followed = is_of_the_group(exception)
        self.end = RankEnd(status=status_of(exception), failure=failure, at=self.roll.clock(), followed=followed)
        self.take_out()
        self.roll.tell(self.end, None)

    def finish(self, status: Status, failure: Failure | None = None) -> None:
        """Record the run, and print its table."""
        self.leaving = True
        if self.watch is not None:
            self.watch.end()
        self.take_out()
        trainer, session = self.trainer, self.session
        measured = self._measured(failure)
        if failure is None:
            self.roll.done()
            Guard("the ranks' clocks", self.tell, outcome="could not be compared").run(self.exchange.compare_clocks)
            measured = self._gathered = self.exchange.gather(measured)
            if self.core.error is not None:
                step = session.steps + 1 if session else None
                status, failure = "failed", failure_of(self.core.error, "instruments", step)
            elif not measured.rows:
                status, failure = "failed", NO_STEP
        elif not trainer.is_global_zero:
            # The other ranks may not answer any more, so each saves its own steps.
            write_steps(rank_file(self._a_folder(), trainer.global_rank), measured.rows)
        if failure is not None and self.end is not None and self.folder is not None:
            self.roll.tell(self.end, self.folder)
        if trainer.is_global_zero:
            self._record(measured, status, failure)
        elif self.end is not None:
            self._stand_in(measured)
        elif failure is None and session is not None:
            tracer = session.instruments.tracer
            try_or_note("kernels", lambda: tracer.kernels(tracer.work([])), [])  # only rank 0 writes notes
        self.over = True
        self.session = None

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
        """What was measured; of an instrument that failed, what it had by then."""
        session, measured = self.session, None
        if session is not None:
            last = Guard("the last steps", self.tell, session.instruments.discard, outcome="unknown")
            last.run(session.finish, failure is None)
            measured = try_or_note("what was measured", session.measured, self.notes)
        if measured is None:
            measured = Measured((), self.options.steps())
        return replace(measured, notes=(*self.notes, *measured.notes))

    def _record(self, measured: Measured, status: Status, failure: Failure | None) -> None:
        """Write what was measured first, so that no error or signal in what follows can lose it."""
        evidence = self.collector.evidence(measured, status, failure)
        evidence = self._write(with_rows_left_behind(evidence, self._a_folder()))
        self.over = True
        settled = None
        if self.end is not None and not self.roll.alone:
            settled = try_or_note("how the ranks ended", lambda: self._settled(evidence), self.notes)
        elif failure is None and measured.rows and self.session is not None:
            evidence = self.collector.look_back(evidence, measured, self.session.instruments.tracer)
        self._write(settled or evidence, rows=settled is not None, last=True)
        if not self.options.quiet:
            Guard("the table", self.tell).run(self._show)

    def _settled(self, evidence: Evidence) -> Evidence:
        """``evidence`` with what every rank left: its steps, and of all ends the cause."""
        assert self.end is not None
        folder = self._a_folder()
        patience_s = _PATIENCE_S if self.launch.kept else _UNKEPT_S if self.end.followed else 0.0
        ends, silent = self.roll.others(folder, patience_s)
        cause = self.roll.cause(self.end, ends, silent)
        rows, notes = read_rows(folder, growing=True), list(evidence.notes)
        if late := stragglers(places := self.roll.places()):
            notes.append(f"at the end {where_they_are(places, late)}")
        missing = sorted({*range(self.exchange.ranks)} - {*rows.rank.tolist()})
        if missing and len(rows):
            notes += without_steps(missing, folder, self.roll.host_of)
        return replace(evidence, rows=rows, status=cause.status, failure=cause.failure, notes=notes)

    def _stand_in(self, measured: Measured) -> None:
        """Record the run where rank 0 is gone and has not: one of the others does."""
        folder = self._a_folder()
        if self.end is None or self.roll.is_there():
            return
        lost = self.roll.cause(self.end.model_copy(update={"followed": True}), {}, [0])
        try:
            with (folder / end_file(0)).open("x", encoding="utf-8") as file:
                file.write(lost.model_dump_json(indent=1) + "\n")
            if read_run(folder).status == "unfinished":
                self._write(self._settled(self.collector.evidence(measured, self.end.status, self.end.failure)))
        except (OSError, RecordError):  # another rank does, or rank 0 had; or this node does not see the folder
            return

    def last_words(self, status: Status, why: str, followed: bool) -> bool:
        """From another thread, where training is stuck: keep this rank's steps, and tell how it ended.

        Nothing is done after it. False where the run had not begun.
        """
        session, folder = self.session, self.folder
        if self.over:
            return True
        if session is None or folder is None:
            return False
        self.over = self.leaving = True
        there = position_of(session)
        failure = Failure(phase=there.phase, step=there.step, type="Stuck", message=f"{why}; {there.said_since}")
        followed = followed or self.roll.has_lost
        self.end = RankEnd(status=status, failure=self.roll.mine(failure), at=self.roll.clock(), followed=followed)
        session.keep()
        measured = Measured(session.rows, session.schedule.planned, notes=(*self.notes, *session.notes))
        rank = self.exchange.rank
        self.roll.tell(self.end, folder)
        if rank > 0:
            self._stand_in(measured)
            return True
        evidence = self._write(self.collector.evidence(measured, status, self.end.failure))
        if not self.roll.alone:
            self._write(self._settled(evidence))
        return True

    def _show(self) -> None:
        """Print the table in one go."""
        assert self.record is not None
        tables = end_tables(self.record, self._a_folder(), self.options.verbose)
        put(sys.stdout, render(tables, "terminal", sys.stdout))

    def _a_folder(self) -> Path:
        """The run's, or where there is none one at the second place."""
        self.folder = self.folder or second_place(self.launch.name, self.tell)
        return self.folder

    def _write(self, evidence: Evidence, rows: bool = True, last: bool = False) -> Evidence:
        """``write_run``, at the second place where the run's folder cannot be written to any more."""
        folder = self._a_folder()
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
