"""The one Callback of the instruments: it joins them to the Trainer.

One, because Lightning calls every hook of every callback: each further one in the list costs 6 to 8 microseconds a
step, whatever it does.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lm_profiler.callbacks.instruments.instruments import (
    CompileWatch,
    HistoryWatch,
    Instruments,
    SyncWatch,
    TelemetryWatch,
    require_history,
)
from lm_profiler.callbacks.instruments.memory import MemoryOptions, MemoryReader
from lm_profiler.callbacks.instruments.numerics import NumericsAudit, NumericsOptions
from lm_profiler.callbacks.instruments.trace import NvtxRanges, TraceOptions, Tracer
from lm_profiler.callbacks.instruments.work import FlopsWatch, Work
from lm_profiler.callbacks.marks.batches import Tokens
from lm_profiler.callbacks.marks.optimizers import OptimizerMarks
from lm_profiler.callbacks.marks.phases import PhaseProfiler
from lm_profiler.callbacks.namespaces import is_a, verb_of
from lm_profiler.callbacks.outcome.failures import (
    NO_STEP,
    failure_of,
    failure_of_ours,
    keep_snapshot,
    phase_of,
    status_of,
)
from lm_profiler.callbacks.outcome.folder import run_folder, second_place, snapshot_file
from lm_profiler.callbacks.outcome.gather import Exchange
from lm_profiler.callbacks.outcome.hardware import Hardware, look_at_hardware
from lm_profiler.callbacks.outcome.measured import Measured
from lm_profiler.callbacks.outcome.recorder import Launch, Recorder
from lm_profiler.callbacks.progress import Progress
from lm_profiler.callbacks.session import Session
from lm_profiler.callbacks.stages import StageCounter, StageOptions, StoppingRule
from lm_profiler.measure.boundary import UNGUARDED, Part, put, said, say, try_or_note
from lm_profiler.measure.clocks.stream import stream_of
from lm_profiler.measure.clocks.timeline import StepMarks, Timeline
from lm_profiler.measure.device.contention import ContentionWatch
from lm_profiler.measure.memory.peaks import probe_of
from lm_profiler.record.quantities import counted
from lm_profiler.record.run import Failure, RunRecord, Status, Verb
from lm_profiler.record.steps import write_steps
from lm_profiler.report.run.terminal import end_tables
from lm_profiler.report.tables.formats import render


class TrainingProfiler(Callback):
    """Profiles each ``verb`` of its Trainer, and leaves the others alone.

    Args:
        stages: how long to warm up and to measure.
        memory: peak memory by phase.
        trace: the PyTorch profiler's trace.
        launch: how the run was started; for the record.
        peak_flops_per_s: dense peak of one device, where the built-in table is not to be asked.
        clock: the host's clock in nanoseconds.
        quiet: print neither progress nor the table.
        numerics: what the precision does to the numbers.
        verb: what is profiled: ``fit``, ``validate``, ``test`` or ``predict``.
        log_dir: folder of all runs; this one's is ``<name>/version_<n>`` below it.

    ``record`` holds the run's record once it is written, ``folder`` where.
    """

    def __init__(
        self,
        stages: StageOptions | None = None,
        memory: MemoryOptions | None = None,
        trace: TraceOptions | None = None,
        launch: Launch | None = None,
        peak_flops_per_s: float | None = None,
        clock: Callable[[], int] = time.perf_counter_ns,
        quiet: bool = False,
        numerics: NumericsOptions | None = None,
        verb: Verb = "fit",
        log_dir: str | Path = "logs",
    ) -> None:
        self._stages = stages or StageOptions()
        self._memory = memory or MemoryOptions()
        self._trace = trace or TraceOptions()
        self._numerics = numerics or NumericsOptions()
        self._launch = launch
        self._peak_flops_per_s = peak_flops_per_s
        self._clock = clock
        self._quiet = quiet
        self._verb: Verb = verb
        self._log_dir = Path(log_dir)
        self.part: Part = UNGUARDED
        self._notes: list[str] = []
        self._recorder: Recorder | None = None
        self._phases: PhaseProfiler | None = None
        self._session: Session | None = None
        self._asked, self._begun, self._over = False, False, True
        self.record: RunRecord | None = None
        self._recording: Part = UNGUARDED
        self._options = dict(vars(self))

    def __getstate__(self) -> dict[str, Any]:
        """A copy, or a pickle, can profile a run of its own; it knows nothing of this one's."""
        return {**self._options, "_options": self._options}

    # -- a run begins -------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if trainer.barebones:
            raise MisconfigurationException("lm_profiler cannot profile under Trainer(barebones=True): leave it out")
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        ours = 0
        for callback in callbacks:
            ours += isinstance(callback, TrainingProfiler)
        if ours > 1:
            raise MisconfigurationException("expected one of lm_profiler's callbacks in a Trainer, given more")
        if self._memory.history:
            require_history(trainer.strategy.root_device)
        for hook in _NO_HOOKS:
            vars(self).pop(hook, None)
        self._trainer = trainer
        self._session = self._recorder = self._phases = None
        self.part = Part("the profiler", self._tell, self._leave)
        self._asked = self.part.run(verb_of, trainer, otherwise=self._verb) == self._verb
        self._over = not self._asked
        if self._over:
            return  # and keep the last run's record
        self._max_steps = trainer.max_steps
        self._notes = []
        self._gathered: Measured | None = None
        self._stopping: StoppingRule | None = None
        self._begun = False
        self.record = None
        self._recording = Part("the record", self._tell, self._abandon)
        self._exchange = self.part.run(Exchange.of_process_group) or Exchange()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.part.run(self._loop_starts, "fit")

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.part.run(self._loop_starts, "validate")

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.part.run(self._loop_starts, "test")

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.part.run(self._loop_starts, "predict")

    def _loop_starts(self, verb: Verb) -> None:
        """Not before: what is tried out earlier, for a batch size or a learning rate, is not the run."""
        if verb == self._verb and not self._over and not self._begun:
            self._start()

    def _start(self) -> None:
        self._begun = True
        self.part.run(self._begin, self._trainer.lightning_module)
        if self._verb == "fit":
            self.part.run(self._attach)

    def _begin(self, module: LightningModule) -> None:
        trainer, launch = self._trainer, self._launch or Launch()
        device, rank = trainer.strategy.root_device, trainer.global_rank
        self.folder = run_folder(self._log_dir / launch.name, launch.folder, self._exchange, self._tell)
        recorder = self._recorder = Recorder(self.folder, launch, trainer, module, self._verb)
        self._tokens = Part("tokens_in", self._tell)
        self._tokens_in: Tokens | None = self._tokens.run(Tokens, module)
        self._work = Work(self._verb)
        self._audit = NumericsAudit(self._numerics.audit, self._verb)
        stream = stream_of(device)
        timeline = Timeline(self._clock, stream, self.part)
        if self._trace.nvtx:
            timeline.observers += (Part("trace.nvtx", self._tell).guard(NvtxRanges()),)
        progress = None
        if trainer.is_global_zero and not self._quiet:
            progress = try_or_note(
                "progress", lambda: Progress(until_sure=self._stages.until_ci is not None), self._notes
            )
        schedule = StageCounter(self._planned)
        stopping = self._stopping = StoppingRule(self._stages, self._agree)
        instruments = self._instruments(timeline)
        self._optimizers = OptimizerMarks(timeline)
        keep = recorder.keep if trainer.is_global_zero else None
        self._session = Session(timeline, stream, schedule, instruments, progress, rank, stopping, self._tell, keep)
        if trainer.is_global_zero:
            Part("writing an unfinished record", self._tell).run(recorder.begin, self._planned)
        self._stand_in(timeline)

    @property
    def _planned(self) -> dict[str, int]:
        return {
            "warmup": self._stages.warmup_steps,
            "measure": self._stages.planned_steps,
            "memory": self._memory.steps,
            "trace": self._trace.stage_steps,
        }

    def _stand_in(self, timeline: Timeline) -> None:
        following = Part("stages.until_ci", self._tell)
        self._phases = PhaseProfiler(
            self._trainer,
            timeline,
            sum(self._planned.values()),
            self._step_ended,
            lambda left: following.run(self._follow, left, otherwise=left),
            partial(self._recording.run, self._finish, "ok"),
            self._stages.stop_when_done,
            partial(self._recording.run, self._died),
            self,
            self._no_step_in,
        )
        self._trainer.profiler = self._phases  # type: ignore[attr-defined]

    def _follow(self, left: int) -> int:
        """The other ranks ask whether enough was measured until one of them knows; all have to answer."""
        planned, stopping = self._planned, self._stopping
        later = planned["memory"] + planned["trace"]
        measured = planned["measure"] - (left - later)
        if stopping is None or left <= later or measured < 1:
            return left
        return later if stopping.follow(measured) else left

    def _agree(self, own: int) -> int:
        return self._exchange.of_first("answer", lambda: own)

    def _no_step_in(self, what: str) -> None:
        self._tell(f"{what} had no step, and the Trainer has no other end: the loader ran dry, or all is skipped")

    def _step_ended(self, marks: StepMarks) -> int:
        assert self._session is not None
        return self._session.step_ended(marks)

    def _instruments(self, timeline: Timeline) -> Instruments:
        trainer, folder = self._trainer, self.folder
        device, rank = trainer.strategy.root_device, trainer.global_rank
        return Instruments(
            memory=MemoryReader(
                probe_of(device), timeline, device, lambda: (trainer.lightning_module, trainer.optimizers)
            ),
            compiles=CompileWatch(),
            syncs=SyncWatch(device),
            history=HistoryWatch(device, snapshot_file(folder, rank), self._memory.history),
            tracer=Tracer(
                self._trace,
                device,
                timeline,
                folder,
                rank,
                lambda: trainer.lightning_module,
                taken=is_a(trainer.profiler, "PyTorchProfiler"),  # type: ignore[attr-defined]
            ),
            telemetry=TelemetryWatch(device),
            flops=FlopsWatch(timeline, lambda: trainer.lightning_module),
            contention=ContentionWatch(device),
        )

    def _tell(self, text: str) -> None:
        """Into the record, and at once to whoever watches: there may be no record."""
        rank = self._trainer.global_rank
        text = f"rank {rank}: {text}" if rank else text
        self._notes.append(text)
        say(text)

    def _leave(self) -> None:
        """The core of the instruments failed: count steps, and nothing else."""
        if self._phases is None:
            self._stand_in(Timeline(part=self.part))
        assert self._phases is not None
        self._phases.count_only()
        if self._session is not None:
            self._optimizers.detach()
            self._session.instruments.discard()

    def _attach(self) -> None:
        self._optimizers.attach(self._trainer, self._trainer.lightning_module)

    # -- steps ----------------------------------------------------------------------------------------------------

    # Lightning passes over a hook that is not callable. Empty methods would cost it two microseconds each.
    on_train_batch_start = None  # type: ignore[assignment]
    on_before_zero_grad = None  # type: ignore[assignment]
    on_before_backward = None  # type: ignore[assignment]
    on_after_backward = None  # type: ignore[assignment]
    on_before_optimizer_step = None  # type: ignore[assignment]

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        session = self._session
        if session is None or self._over or self.part.out:
            return
        if self._tokens_in is not None:
            try:
                tokens = self._tokens_in(batch)
                session.tokens = None if tokens is None else (session.tokens or 0) + tokens
            except BaseException as error:
                self._tokens.failed(error)
                self._tokens_in = session.tokens = None
        if not self._work.seen:
            self.part.run(self._see, batch)

    def _see(self, batch: Any) -> None:
        self._work.see(self._trainer, batch)
        self._audit.see(batch)

    def on_validation_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if self._verb == "validate":
            self.on_train_batch_end(trainer, *args[:4])

    def on_test_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self.on_train_batch_end(trainer, *args[:4])

    def on_predict_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self.on_train_batch_end(trainer, *args[:4])

    # -- a run ends -------------------------------------------------------------------------------------------------

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._recording.run(self._finish_early)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._recording.run(self._close_evaluation)

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._recording.run(self._close_evaluation)

    def on_predict_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._recording.run(self._close_evaluation)

    def _close_evaluation(self) -> None:
        if self._verb == "fit" or self._over:
            return
        if self._phases is not None:
            self.part.run(self._phases.close_step)
        self._finish_early()

    def _finish_early(self) -> None:
        if not self._over:
            self._finish("ok", early=True)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._over:
            return
        if not self._begun:
            self.part.run(self._start)
        self._recording.run(self._died, exception)

    def _died(self, exception: BaseException) -> None:
        session, device = self._session, self._trainer.strategy.root_device
        phase, steps = "other", 0
        if session is not None and self._phases is not None:
            phase = phase_of(exception, session.timeline, session.steps)
            self.part.run(self._phases.close_step)  # one that was done before the run died counts
            steps = session.steps
        if self._over:  # and was the last
            return
        status = status_of(exception)
        failure = failure_of(exception, phase, steps + 1, device)
        if status == "oom":
            keep_snapshot(device, snapshot_file(self.folder, self._trainer.global_rank))
        self._finish(status, failure)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not self._asked:
            return
        self._recording.run(self._end)
        trainer.fit_loop.epoch_loop.max_steps = self._max_steps

    def _end(self) -> None:
        if not self._begun and is_a(sys.exc_info()[1], "_TunerExitException"):
            self._over = True  # a Tuner's fit ends before it begins
            return
        if not self._over:
            if not self._begun:
                self.part.run(self._start)
            self._finish_early()  # a loop that had nothing to do told nobody that it ended
        self._take_out()

    def _finish(self, status: Status, failure: Failure | None = None, early: bool = False) -> None:
        self._take_out()
        trainer, session = self._trainer, self._session
        if early and session is not None and not self.part.out:
            left = session.schedule
            planned = counted(left.planned[left.stage or ""], "step")
            self._notes.append(f"the loop ended in stage {left.stage}, after {left.done} of its {planned}")
        measured = self._measured(failure)
        if failure is None:
            measured = self._gathered = self._exchange.gather(measured)
            if self.part.error is not None:
                status, failure = "failed", failure_of_ours(self.part.error, session.steps + 1 if session else None)
            elif not measured.rows:
                status, failure = "failed", NO_STEP
        elif not trainer.is_global_zero:
            # The other ranks may never answer again: each keeps what it has.
            write_steps(self.folder / f"steps.rank{trainer.global_rank}.csv", measured.rows)
        if trainer.is_global_zero:
            self._record(measured, status, failure)
        elif failure is None and session is not None:
            try_or_note("kernels", session.instruments.tracer.kernels, [])  # rank 0 alone writes notes
        self._over = True
        self._session = None

    def _abandon(self) -> None:
        """What was to be recorded could not be: leave the loop as it was, and keep what can be kept."""
        error = self._recording.error
        self._take_out()
        if self._session is not None:
            self._session.instruments.discard()
        if self._trainer.is_global_zero and error is not None:
            measured = self._gathered if self._gathered is not None else self._measured(None)
            record = self.record
            if record is None:
                record = self._a_recorder().bare(measured, "failed", failure_of_ours(error, None))
            self._save(measured, record.model_copy(update={"notes": [*record.notes, f"not complete: {said(error)}"]}))
        self._over = True

    def _measured(self, failure: Failure | None) -> Measured:
        """What there is: of instruments that failed, what they had by then."""
        session = self._session
        measured = None
        if session is not None:
            last = Part("the last steps", self._tell, session.instruments.discard, outcome="unknown")
            last.run(session.finish, failure is None)
            measured = try_or_note("what was measured", session.measured, self._notes)
        if measured is None:
            measured = Measured((), {}, self._planned, None, None, 0, ())
        return replace(measured, notes=(*self._notes, *measured.notes))

    def _record(self, measured: Measured, status: Status, failure: Failure | None) -> None:
        """First what is certain: neither an error nor a signal in what is looked at afterwards can lose it."""
        recorder, notes = self._a_recorder(), list(measured.notes)
        record = try_or_note("figures", lambda: recorder.first(measured, status, failure), notes)
        self._save(measured, record or recorder.bare(replace(measured, notes=notes), status, failure))
        self._over = True
        if record is not None:
            hardware = Hardware()
            if failure is None and measured.rows and self._session is not None:
                tracer = self._session.instruments.tracer
                hardware = look_at_hardware(
                    self._trainer, self._work, measured, self._audit, tracer, self._peak_flops_per_s
                )
            self.record = recorder.complete(measured, record, hardware)
        if not self._quiet:
            Part("the table", self._tell).run(self._show)

    def _show(self) -> None:
        """Print the table in one go."""
        assert self.record is not None
        put(sys.stdout, render(end_tables(self.record, self.folder), "terminal", sys.stdout))

    def _a_recorder(self) -> Recorder:
        """The run's, or where there is none one at the second place."""
        if self._recorder is None:
            launch = self._launch or Launch()
            self.folder = second_place(launch.name)
            self._recorder = Recorder(self.folder, launch, self._trainer, self._trainer.lightning_module, self._verb)
        return self._recorder

    def _save(self, measured: Measured, record: RunRecord) -> None:
        self.record = record
        recorder = self._a_recorder()
        try:
            recorder.save(measured, record)
        except OSError as error:
            first, second = self.folder, second_place(record.name)
            text = f"the record is in {second}: {first} cannot be written to: {said(error)}"
            record = record.model_copy(update={"notes": [*record.notes, text]})
            recorder.folder = second
            try:
                recorder.save(measured, record)
            except OSError:
                recorder.folder = first
                raise
            self.folder, self.record = second, record
            self._tell(text)

    def _take_out(self) -> None:
        """Leave the loop as it was; what is left of training pays nothing."""
        if self._phases is not None:
            self._phases.restore()
        if self._session is not None:
            self._optimizers.detach()
        if not self._stages.stop_when_done:
            vars(self).update(_NO_HOOKS)


_NO_HOOKS = dict.fromkeys(h for h in vars(TrainingProfiler) if h.startswith("on_") and h != "on_exception")
"""Of a profiler that is done: it stays in the Trainer's list, which is the user's, and Lightning passes it over. It can
still be told that its record's writing was interrupted."""
