"""The one Callback of the instruments: it joins them to the Trainer.

One, because Lightning calls every hook of every callback: each further one in the list costs 6 to 8 microseconds a
step, whatever it does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lm_profiler.callbacks.extras import found
from lm_profiler.callbacks.failures import failure_of, keep_snapshot, phase_of, status_of
from lm_profiler.callbacks.folder import run_folder, snapshot_file
from lm_profiler.callbacks.hardware import Hardware, look_at_hardware
from lm_profiler.callbacks.instruments import CompileWatch, HistoryWatch, Instruments, SyncWatch, TelemetryWatch
from lm_profiler.callbacks.memory import MemoryOptions, MemoryReader
from lm_profiler.callbacks.numerics import NumericsAudit, NumericsOptions
from lm_profiler.callbacks.optimizers import OptimizerMarks
from lm_profiler.callbacks.phases import PhaseProfiler
from lm_profiler.callbacks.progress import Progress
from lm_profiler.callbacks.ranks import gather
from lm_profiler.callbacks.recorder import Launch, Recorder
from lm_profiler.callbacks.session import Session
from lm_profiler.callbacks.stages import Precision, Schedule, StageOptions
from lm_profiler.callbacks.trace import NvtxRanges, TraceOptions, Tracer
from lm_profiler.callbacks.work import Work
from lm_profiler.measure.memory import probe_of
from lm_profiler.measure.stream import stream_of
from lm_profiler.measure.timeline import Timeline
from lm_profiler.record.run import Failure, RunRecord, Status, Verb
from lm_profiler.record.steps import write_steps
from lm_profiler.report.terminal import print_run

_VERBS: dict[TrainerFn, Verb] = {
    TrainerFn.FITTING: "fit",
    TrainerFn.VALIDATING: "validate",
    TrainerFn.TESTING: "test",
    TrainerFn.PREDICTING: "predict",
}


class TrainingProfiler(Callback):
    """Profiles the next ``fit``, ``validate``, ``test`` or ``predict`` of its Trainer.

    Args:
        stages: how long to warm up and to measure.
        memory: peak memory by phase.
        trace: the PyTorch profiler's trace.
        launch: how the run was started; for the record.
        peak_flops_per_s: dense peak of one device, where the built-in table is not to be asked.
        clock: the host's clock in nanoseconds.
        quiet: print neither progress nor the table.
        numerics: what the precision does to the numbers.

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
    ) -> None:
        self._stages = stages or StageOptions()
        self._memory = memory or MemoryOptions()
        self._trace = trace or TraceOptions()
        self._numerics = numerics or NumericsOptions()
        self._launch = launch
        self._peak_flops_per_s = peak_flops_per_s
        self._clock = clock
        self._quiet = quiet
        self._session: Session | None = None
        self.record: RunRecord | None = None

    # -- a run begins -------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if trainer.barebones:
            raise MisconfigurationException("lm_profiler cannot profile under Trainer(barebones=True): leave it out")
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        if sum(isinstance(callback, TrainingProfiler) for callback in callbacks) > 1:
            raise MisconfigurationException("expected one of lm_profiler's callbacks in a Trainer, given more")
        assert trainer.state.fn is not None
        self._verb = _VERBS[trainer.state.fn]
        launch = self._launch or Launch()
        self.folder = run_folder(trainer, launch.name)
        self.record = None
        self._recorder = Recorder(self.folder, launch, trainer, pl_module, self._verb)
        self._tokens_in: Callable[[Any], int] | None = getattr(pl_module, "tokens_in", None)
        self._work = Work(self._verb)
        self._audit = NumericsAudit(self._numerics.audit, self._verb)
        self._max_steps = trainer.max_steps
        self._start(trainer)

    def _start(self, trainer: Trainer) -> None:
        device, rank = trainer.strategy.root_device, trainer.global_rank
        stream = stream_of(device)
        timeline = Timeline(self._clock, stream)
        if self._trace.nvtx:
            timeline.observers += (NvtxRanges(),)
        instruments = self._instruments(trainer, timeline)
        steps = {
            "warmup": self._stages.warmup_steps,
            "measure": self._stages.planned_steps,
            "memory": self._memory.steps,
            "trace": instruments.tracer.stage_steps,
        }
        progress = Progress(until_sure=self._stages.until_ci is not None)
        self._session = Session(
            timeline,
            stream,
            Schedule(steps),
            instruments,
            progress if trainer.is_global_zero and not self._quiet else None,
            rank,
            self._stages_done,
            Precision(self._stages, trainer.strategy.broadcast),
        )
        self._phases = PhaseProfiler(trainer, timeline, self._session.step_ended)
        self._optimizers = OptimizerMarks(timeline)
        self._trainer = trainer
        trainer.profiler = self._phases  # type: ignore[attr-defined]

    def _instruments(self, trainer: Trainer, timeline: Timeline) -> Instruments:
        device, folder = trainer.strategy.root_device, self.folder
        return Instruments(
            memory=MemoryReader(
                probe_of(device), timeline, device, lambda: (trainer.lightning_module, trainer.optimizers)
            ),
            compiles=CompileWatch(),
            syncs=SyncWatch(device),
            history=HistoryWatch(device, snapshot_file(folder, trainer.global_rank), self._memory.history),
            tracer=Tracer(self._trace, device, timeline, folder, trainer.global_rank, lambda: trainer.lightning_module),
            telemetry=TelemetryWatch(device),
        )

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._session is not None:
            self._optimizers.attach(trainer, pl_module)

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
        if session is None:
            return
        if self._tokens_in is not None:
            session.tokens = (session.tokens or 0) + self._tokens_in(batch)
        if not self._work.seen:
            self._work.see(batch)
            self._audit.see(batch)

    def on_validation_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.state.fn is TrainerFn.VALIDATING:
            self.on_train_batch_end(trainer, *args[:4])

    def on_test_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self.on_train_batch_end(trainer, *args[:4])

    def on_predict_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self.on_train_batch_end(trainer, *args[:4])

    def _stages_done(self) -> None:
        self._finish("ok")
        if self._stages.stop_when_done:
            # Both are needed: the loop takes StopIteration for the end of its data, and a fit would go on with the
            # next epoch.
            self._trainer.fit_loop.epoch_loop.max_steps = self._trainer.global_step
            raise StopIteration

    # -- a run ends -------------------------------------------------------------------------------------------------

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._finish_early()

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close_evaluation(trainer)

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close_evaluation(trainer)

    def on_predict_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close_evaluation(trainer)

    def _close_evaluation(self, trainer: Trainer) -> None:
        if trainer.state.fn is TrainerFn.FITTING or self._session is None:
            return
        self._phases.close_step()
        self._finish_early()

    def _finish_early(self) -> None:
        if self._session is None:
            return
        left = self._session.schedule
        self._session.notes.append(
            f"the loop ended in stage {left.stage}, after {left.done} of its {left.planned[left.stage or '']} steps"
        )
        self._finish("ok")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        session = self._session
        if session is None:
            return
        phase = phase_of(exception, session.timeline, session.steps)
        self._phases.close_step()  # one that was done before the run died counts
        if self._session is None:  # and was the last
            return
        status, device = status_of(exception), trainer.strategy.root_device
        failure = failure_of(exception, phase, session.steps + 1, device)
        if status == "oom":
            keep_snapshot(device, snapshot_file(self.folder, trainer.global_rank))
        self._finish(status, failure)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._finish_early()  # a loop that had nothing to do told nobody that it ended
        self._take_out(trainer)
        trainer.fit_loop.epoch_loop.max_steps = self._max_steps

    def _finish(self, status: Status, failure: Failure | None = None) -> None:
        session, trainer = self._session, self._trainer
        assert session is not None
        self._take_out(trainer)
        session.finish(trace=failure is None)
        measured = session.measured()
        if failure is None:
            measured = gather(measured)
        elif not trainer.is_global_zero:
            # The other ranks may never answer again: each keeps what it has.
            write_steps(self.folder / f"steps.rank{trainer.global_rank}.csv", measured.rows)
        if trainer.is_global_zero:
            # First what is certain: neither an error nor a signal in what is looked at afterwards can lose it.
            self.record = self._recorder.write(measured, status, failure)
            hardware = Hardware()
            if failure is None and measured.rows:
                tracer = session.instruments.tracer
                hardware = look_at_hardware(trainer, self._work, self._audit, tracer, self._peak_flops_per_s)
            self.record = self._recorder.complete(measured, self.record, hardware)
            if not self._quiet:
                print_run(self.record, self.folder)
        elif failure is None:
            found("kernels", session.instruments.tracer.kernels, [])  # rank 0 alone writes notes

    def _take_out(self, trainer: Trainer) -> None:
        """Leave the loop as it was; what is left of training pays nothing."""
        self._session = None
        self._phases.restore()
        self._optimizers.detach()
        if not self._stages.stop_when_done:
            others = [callback for callback in trainer.callbacks if callback is not self]  # type: ignore[attr-defined]
            trainer.callbacks = others  # type: ignore[attr-defined]
