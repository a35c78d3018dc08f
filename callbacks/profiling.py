"""The one Callback of the instruments: it joins them to the Trainer.

One, because Lightning calls every hook of every callback: each further one in the list costs 6 to 8 microseconds a
step, whatever it does.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lm_profiler.callbacks.instruments.instrument import Instruments
from lm_profiler.callbacks.instruments.memory import MemoryOptions, MemoryReader
from lm_profiler.callbacks.instruments.numerics import NumericsOptions
from lm_profiler.callbacks.instruments.trace import NvtxRanges, TraceOptions, Tracer
from lm_profiler.callbacks.instruments.watches import history_watch, watches_of
from lm_profiler.callbacks.instruments.work import FlopsWatch
from lm_profiler.callbacks.marks.batches import Tokens
from lm_profiler.callbacks.marks.optimizers import OptimizerMarks
from lm_profiler.callbacks.marks.phases import PhaseProfiler
from lm_profiler.callbacks.namespaces import is_a, verb_of
from lm_profiler.callbacks.outcome.afterwards import Afterwards
from lm_profiler.callbacks.outcome.ending import Ending
from lm_profiler.callbacks.outcome.failures import phase_of
from lm_profiler.callbacks.outcome.folder import run_folder, snapshot_file
from lm_profiler.callbacks.outcome.gather import Exchange
from lm_profiler.callbacks.outcome.recorder import Launch
from lm_profiler.callbacks.progress import Progress
from lm_profiler.callbacks.session import Session
from lm_profiler.callbacks.stages import StageCounter, StageOptions, StoppingRule
from lm_profiler.measure.boundary import UNGUARDED, Guard, say, try_or_note
from lm_profiler.measure.clocks.stream import stream_of
from lm_profiler.measure.clocks.timeline import StepMarks, Timeline
from lm_profiler.measure.memory.peaks import probe_of
from lm_profiler.record.run import RunRecord, Verb


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
        self._planned = {
            "warmup": self._stages.warmup_steps,
            "measure": self._stages.planned_steps,
            "memory": self._memory.steps,
            "trace": self._trace.stage_steps,
        }
        self.part: Guard = UNGUARDED
        self._notes: list[str] = []
        self._phases: PhaseProfiler | None = None
        self._ending: Ending | None = None
        self._asked = self._begun = False
        self._options = dict(vars(self))

    def __getstate__(self) -> dict[str, Any]:
        """A copy, or a pickle, can profile a run of its own; it knows nothing of this one's."""
        return {**self._options, "_options": self._options}

    @property
    def record(self) -> RunRecord | None:
        """The last run's; None before it is written."""
        return None if self._ending is None else self._ending.record

    @property
    def folder(self) -> Path:
        """The last run's.

        Raises:
            AttributeError: it has none yet.
        """
        if self._ending is None or self._ending.recorder is None:
            raise AttributeError("the run has no folder yet")
        return self._ending.recorder.folder

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
            history_watch(trainer.strategy.root_device, Path())  # refuses a device that keeps none
        for hook in _NO_HOOKS:
            vars(self).pop(hook, None)
        self._trainer = trainer
        self._phases = None
        self._notes = []
        self.part = Guard("the profiler", self._tell, self._leave)
        last, launch = self._ending, self._launch or Launch()
        ending = self._ending = Ending(
            trainer, launch, self._verb, self._planned, self.part, self._take_out, self._tell, self._notes, self._quiet
        )
        ending.part = Guard("the record", self._tell, ending.abandon)
        self._asked = self.part.run(verb_of, trainer, otherwise=self._verb) == self._verb
        if not self._asked:
            self._ending = last
            return
        self._max_steps = trainer.max_steps
        self._stopping: StoppingRule | None = None
        self._begun = False
        ending.exchange = self.part.run(Exchange.of_process_group)

    def _loop_starts(self, verb: Verb, trainer: Trainer, pl_module: LightningModule) -> None:
        """Not before: what is tried out earlier, for a batch size or a learning rate, is not the run."""
        if verb == self._verb and self._asked and not self._begun:
            self.part.run(self._start)

    on_train_start = partialmethod(_loop_starts, "fit")
    on_validation_start = partialmethod(_loop_starts, "validate")
    on_test_start = partialmethod(_loop_starts, "test")
    on_predict_start = partialmethod(_loop_starts, "predict")

    def _start(self) -> None:
        self._begun = True
        self.part.run(self._begin, self._trainer.lightning_module)
        if self._verb == "fit":
            self.part.run(self._attach)

    def _begin(self, module: LightningModule) -> None:
        trainer, ending = self._trainer, self._ending
        assert ending is not None
        assert ending.exchange is not None
        launch = ending.launch
        folder = run_folder(self._log_dir / launch.name, launch.folder, ending.exchange, self._tell)
        recorder = ending.recorder = ending.recorder_in(folder)
        self._tokens = Guard("tokens_in", self._tell)
        self._tokens_in: Tokens | None = self._tokens.run(Tokens, module)
        self._afterwards = ending.afterwards = Afterwards(self._verb, self._numerics.audit, self._peak_flops_per_s)
        stream = stream_of(trainer.strategy.root_device)
        timeline = Timeline(self._clock, stream, self.part)
        if self._trace.nvtx:
            timeline.observers += (Guard("trace.nvtx", self._tell).guard(NvtxRanges()),)
        progress, keep = None, None
        if trainer.is_global_zero:
            keep = recorder.keep
            if not self._quiet:
                progress = try_or_note(
                    "progress", lambda: Progress(until_sure=bool(self._stages.until_ci)), self._notes
                )
        self._stopping = StoppingRule(self._stages, self._agree)
        self._optimizers = OptimizerMarks(timeline)
        session = Session(
            timeline,
            stream,
            StageCounter(self._planned),
            self._instruments(timeline, folder),
            progress,
            trainer.global_rank,
            self._stopping,
            self._tell,
            keep,
        )
        ending.session = session
        if trainer.is_global_zero:
            Guard("writing an unfinished record", self._tell).run(recorder.begin, self._planned)
        self._stand_in(timeline, session.step_ended)

    def _instruments(self, timeline: Timeline, folder: Path) -> Instruments:
        trainer = self._trainer
        device, rank = trainer.strategy.root_device, trainer.global_rank
        parties = lambda: (trainer.lightning_module, trainer.optimizers)  # noqa: E731
        taken = is_a(trainer.profiler, "PyTorchProfiler")  # type: ignore[attr-defined]
        return Instruments(
            MemoryReader(probe_of(device), timeline, device, parties),
            Tracer(self._trace, device, timeline, folder, rank, lambda: trainer.lightning_module, taken),
            [
                FlopsWatch(timeline, lambda: trainer.lightning_module),
                *watches_of(device, snapshot_file(folder, rank) if self._memory.history else None),
            ],
            self._tell,
        )

    def _stand_in(self, timeline: Timeline, step_ended: Callable[[StepMarks], int]) -> None:
        assert self._ending is not None
        following, recording = Guard("stages.until_ci", self._tell), self._ending.part
        self._phases = PhaseProfiler(
            self._trainer,
            timeline,
            sum(self._planned.values()),
            step_ended,
            lambda left: following.run(self._follow, left, otherwise=left),
            partial(recording.run, self._ending.finish, "ok"),
            self._stages.stop_when_done,
            partial(recording.run, self._died),
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
        assert self._ending is not None
        assert self._ending.exchange is not None
        return self._ending.exchange.of_first("answer", lambda: own)

    def _no_step_in(self, what: str) -> None:
        self._tell(f"{what} had no step, and the Trainer has no other end: the loader ran dry, or all is skipped")

    def _tell(self, text: str) -> None:
        """Into the record, and at once to whoever watches: there may be no record."""
        rank = self._trainer.global_rank
        text = f"rank {rank}: {text}" if rank else text
        self._notes.append(text)
        say(text)

    def _leave(self) -> None:
        """The core of the instruments failed: count steps, and nothing else."""
        if self._phases is None:
            self._stand_in(Timeline(part=self.part), lambda marks: 0)
        assert self._phases is not None
        self._phases.count_only()
        if self._ending is not None and self._ending.session is not None:
            self._optimizers.detach()
            self._ending.session.instruments.discard()

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
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        ending = self._ending
        if ending is None or ending.over or (session := ending.session) is None or self.part.out:
            return
        if self._tokens_in is not None:
            try:
                tokens = self._tokens_in(batch)
                session.tokens = None if tokens is None else (session.tokens or 0) + tokens
            except BaseException as error:
                self._tokens.failed(error)
                self._tokens_in = session.tokens = None
        if not self._afterwards.seen:
            self.part.run(self._afterwards.see, trainer, batch)

    on_test_batch_end = on_predict_batch_end = on_train_batch_end  # type: ignore[assignment]

    def on_validation_batch_end(self, *args: Any) -> None:
        if self._verb == "validate":
            self.on_train_batch_end(*args)

    # -- a run ends -------------------------------------------------------------------------------------------------

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._asked and self._ending is not None:
            self._ending.part.run(self._ending.early)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._asked and self._ending is not None:
            self._ending.part.run(self._close_evaluation)

    on_test_epoch_end = on_predict_epoch_end = on_validation_epoch_end

    def _close_evaluation(self) -> None:
        if self._verb == "fit" or self._ending is None or self._ending.over:
            return
        if self._phases is not None:
            self.part.run(self._phases.close_step)
        self._ending.early()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if not self._asked or self._ending is None or self._ending.over:
            return
        if not self._begun:
            self.part.run(self._start)
        self._ending.part.run(self._died, exception)

    def _died(self, exception: BaseException) -> None:
        assert self._ending is not None
        phase, step, session = "other", 1, self._ending.session
        if session is not None and self._phases is not None:
            phase = phase_of(exception, session.timeline, session.steps)
            self.part.run(self._phases.close_step)  # one that was done before the run died counts
            step = session.steps + 1
        if not self._ending.over:  # that step was the last
            self._ending.died(exception, phase, step)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._asked and self._ending is not None:
            self._ending.part.run(self._end)
            trainer.fit_loop.epoch_loop.max_steps = self._max_steps

    def _end(self) -> None:
        assert self._ending is not None
        if not self._begun and is_a(sys.exc_info()[1], "_TunerExitException"):
            self._ending.over = True  # a Tuner's fit ends before it begins
            return
        if not self._ending.over:
            if not self._begun:
                self.part.run(self._start)
            self._ending.early()  # a loop that had nothing to do told nobody that it ended
        self._take_out()

    def _take_out(self) -> None:
        """Leave the loop as it was; what is left of training pays nothing."""
        if self._phases is not None:
            self._phases.restore()
        if self._ending is not None and self._ending.session is not None:
            self._optimizers.detach()
        if not self._stages.stop_when_done:
            vars(self).update(_NO_HOOKS)


_NO_HOOKS = dict.fromkeys(h for h in vars(TrainingProfiler) if h.startswith("on_") and h != "on_exception")
"""Of a profiler that is done: it stays in the Trainer's list, which is the user's, and Lightning passes it over. It can
still be told that its record's writing was interrupted."""
