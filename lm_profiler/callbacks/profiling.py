"""The only Callback of the profiler: it connects Lightning's hooks to the run.

There is only one, because Lightning calls every hook of every callback: each further callback costs 6 to 8
microseconds per step, even if it does nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partialmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lm_profiler.callbacks.instruments.profiling_options import (
    ActionsOptions,
    ExportOptions,
    Launch,
    MemoryOptions,
    NumericsOptions,
    ProfilingOptions,
    StageOptions,
    TraceOptions,
    WatchOptions,
)
from lm_profiler.callbacks.marks.namespaces import verb_of
from lm_profiler.lightning_names import SIGNALS, SIGTERM_HANDLER
from lm_profiler.measure.boundary import Guard
from lm_profiler.record.run_record import RunRecord, Verb

if TYPE_CHECKING:
    from lm_profiler.callbacks.attachment import Attachment
    from lm_profiler.callbacks.hooked_run import LoopSearch
    from lm_profiler.callbacks.run_finisher import RunFinisher
    from lm_profiler.callbacks.trainer_loop import TrainerLoop


class Admits(Protocol):
    """Decides which Trainer of a program is profiled."""

    def __call__(self, trainer: Trainer) -> bool: ...

    def release(self) -> None:
        """Take the last admission back, because nothing was profiled."""


class TrainingProfiler(Callback):
    """Profiles each run of ``verb`` by its Trainer; other verbs are not profiled.

    Args:
        stages: how long to warm up and to measure.
        memory: peak memory by phase.
        trace: the PyTorch profiler's trace.
        launch: how the run was started, which its record states.
        peak_flops_per_s: dense peak of one device, instead of the built-in table's.
        clock: the host's clock in nanoseconds.
        quiet: print neither progress nor the table.
        verbose: print all figures below the table, as ``lm_profiler report`` of the run does.
        numerics: compare the numerical results of the precision with float32.
        verb: what is profiled: ``fit``, ``validate``, ``test`` or ``predict``.
        log_dir: folder of all runs; each run is written to ``<name>/version_<n>`` below it.
        actions: measure which code uses the time outside all phases.
        export: places to which results are sent, besides the run's folder.
        watch: keep measuring until training ends, and report when and why it gets slower; the fit is then not ended.

    ``record`` holds the run's record once it is written, ``folder`` its folder.
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
        verbose: bool = False,
        numerics: NumericsOptions | None = None,
        verb: Verb = "fit",
        log_dir: str | Path = "logs",
        actions: ActionsOptions | None = None,
        export: ExportOptions | None = None,
        watch: WatchOptions | bool = False,
    ) -> None:
        stages = stages or StageOptions()
        watch_options: WatchOptions | None = None
        if watch:
            stages = stages.for_watched_run()
            watch_options = WatchOptions() if watch is True else watch
        self._options = ProfilingOptions(
            stages=stages,
            actions=actions or ActionsOptions(),
            memory=memory or MemoryOptions(),
            trace=trace or TraceOptions(),
            launch=launch or Launch(),
            peak_flops_per_s=peak_flops_per_s,
            clock=clock,
            quiet=quiet,
            verbose=verbose,
            numerics=numerics or NumericsOptions(),
            verb=verb,
            log_dir=Path(log_dir),
            export=export or ExportOptions(),
            watch=watch_options,
        )
        self._options.check()
        self._run: Attachment | None = None
        self._loop: TrainerLoop | None = None  # the loop of that run
        self._last_finisher: RunFinisher | None = None
        self._search: LoopSearch | None = None  # for a loop of Fabric
        # decides whether a Trainer is profiled, where Lightning added the callback to every Trainer of a program
        self.admits: Admits | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return only the options, so that a copy or a pickle can profile its own run, and has no data of this one."""
        return {
            "_options": self._options,
            "_run": None,
            "_loop": None,
            "_last_finisher": None,
            "_search": None,
            "admits": self.admits,
        }

    @property
    def record(self) -> RunRecord | None:
        """The record of the last run; None before it is written."""
        finisher = self._finisher_of_last_run()
        return None if finisher is None else finisher.record

    @property
    def folder(self) -> Path:
        """The folder of the last run.

        Raises:
            AttributeError: there is none yet.
        """
        finisher = self._finisher_of_last_run()
        if finisher is None or finisher.files.folder is None:
            raise AttributeError("the run has no folder yet")
        return finisher.files.folder

    def _finisher_of_last_run(self) -> RunFinisher | None:
        if self._search is not None and self._search.run is not None:
            return self._search.run.attachment.finisher
        return self._last_finisher

    def launched(self, **facts: Any) -> None:
        """Add ``facts`` about how the next run is started: fields of its ``Launch``."""
        launch = replace(self._options.launch, **facts)
        self._options = replace(self._options, launch=launch)

    def on_after_setup(self, fabric: Any, module: Any) -> None:
        """Profile a loop of Lightning Fabric from its first optimizer step on."""
        self._wait_for_loop(fabric)

    def on_after_optimizer_step(self, strategy: Any, optimizer: Any) -> None:
        self._wait_for_loop()  # Fabric.setup_module calls no hook

    def _wait_for_loop(self, fabric: Any = None) -> None:
        """Wait for the first step of an optimizer, and then profile the loop that made it."""
        if self._search is not None:
            return
        from lm_profiler.callbacks.hooked_run import LoopSearch, end_with_program

        # A program may call hooks by ``Fabric.call`` with any arguments, so those of the Trainer are replaced.
        vars(self).update(_IGNORED_HOOKS)
        self._search = LoopSearch(self._options, fabric=fabric)
        self._search.start()
        end_with_program(self._search)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Attach a run to the Trainer as soon as its device and callbacks are known, or refuse what cannot be profiled.

        If ``admits`` rejects the Trainer, all hooks are removed, so that they cost nothing.
        """
        began_ns = self._options.clock()
        # Imported when a run starts, so that importing the callback loads only its options.
        from lm_profiler.callbacks.attachment import Attachment
        from lm_profiler.callbacks.instruments.watches import history_watch
        from lm_profiler.callbacks.trainer_loop import TrainerLoop

        options = self._options
        if self.admits is not None and not self.admits(trainer):
            self._run = None
            self._loop = None
            vars(self).update(_NO_HOOKS)
            return
        _check_trainer(trainer)
        if options.memory.history:
            # refuses a device that keeps no history
            history_watch(trainer.strategy.root_device, Path())
        for hook in _NO_HOOKS:  # the last run may have disabled them
            vars(self).pop(hook, None)
        loop = TrainerLoop(trainer, self, options.verb, trainer.max_steps)
        run = Attachment(loop, options, self._restore_trainer)
        if options.launch.is_supervised:
            # Lightning's own handler broadcasts while the ranks are inside other collectives.
            guard = Guard(
                "keeping Lightning's broadcast out of signal handlers", run.report
            )
            guard.run(_disable_sigterm_handler, trainer)
        self._run = None
        self._loop = None
        if run.guard.run(verb_of, trainer, otherwise=options.verb) == options.verb:
            self._run = run
            self._loop = loop
            self._last_finisher = run.finisher
            run.guard.run(run.prepare, began_ns)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._run is not None and self._loop is not None:
            self._run.guard.run(self._loop.restore_limit)

    def _end_ledger_term(
        self, term: str, trainer: Trainer, pl_module: LightningModule
    ) -> None:
        """Add the time since the last such call to the ``term`` of a watched fit's ledger."""
        if self._run is not None and self._run.watching is not None:
            self._run.watching.guard.run(self._run.watching.book_time_until_now, term)

    on_sanity_check_start = partialmethod(_end_ledger_term, "set-up")
    on_sanity_check_end = partialmethod(_end_ledger_term, "sanity check")

    def _start_run(
        self, verb: Verb, trainer: Trainer, pl_module: LightningModule
    ) -> None:
        """Start the run; not earlier, because a Tuner's trials of a batch size or learning rate are not part of it."""
        run = self._run
        if run is not None and verb == self._options.verb and not run.has_begun:
            run.guard.run(run.start)

    on_train_start = partialmethod(_start_run, "fit")
    on_validation_start = partialmethod(_start_run, "validate")
    on_test_start = partialmethod(_start_run, "test")
    on_predict_start = partialmethod(_start_run, "predict")

    state_key = "TrainingProfiler"  # read at every hook; Lightning's is a property, which is slower

    # Lightning skips a hook that is not callable. Empty methods would cost two microseconds each.
    on_train_batch_start = None  # type: ignore[assignment]
    on_before_zero_grad = None  # type: ignore[assignment]
    on_before_backward = None  # type: ignore[assignment]
    on_after_backward = None  # type: ignore[assignment]
    on_before_optimizer_step = None  # type: ignore[assignment]

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        *_: Any,
    ) -> None:
        """Count the batch; raise StopIteration, which ends the loop, if no action of Lightning came."""
        run = self._run
        if run is None:
            return
        phases = None if self._loop is None else self._loop.phases
        if phases is not None and not phases.has_seen_actions:
            try:
                is_over = phases.give_up_without_actions()
            except BaseException as error:
                run.guard.handle(error)
                is_over = False
            if is_over:
                raise StopIteration
        elif phases is not None and self._options.verb == "fit":
            # The options need no further check: from now on Lightning calls the run itself, which saves a Python frame.
            vars(self)["on_train_batch_end"] = run.count_ended_batch
        run.count_batch(batch)

    on_test_batch_end = on_predict_batch_end = on_train_batch_end  # type: ignore[assignment]

    def on_validation_batch_end(self, *args: Any) -> None:
        if self._options.verb == "validate":
            # (Validation during a fit belongs to no step.)
            self.on_train_batch_end(*args)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._run is not None:
            self._run.finisher.guard.run(self._run.finisher.finished_early)

    def on_validation_epoch_end(
        self, trainer: Trainer, pl_module: LightningModule
    ) -> None:
        if self._run is not None:
            self._run.finisher.guard.run(self._run.end_evaluation)

    on_test_epoch_end = on_predict_epoch_end = on_validation_epoch_end

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Record the run that ``exception`` ended."""
        run = self._run
        if run is None or run.finisher.is_forked_copy:
            return
        if run.watching is not None:
            run.watching.guard.run(run.watching.end, exception)
        if not run.finisher.is_over:
            run.finisher.guard.run(run.died, exception)

    def teardown(
        self, trainer: Trainer, pl_module: LightningModule, stage: str
    ) -> None:
        """Record the run if it is not recorded yet, and restore the Trainer."""
        run = self._run
        if run is None or run.finisher.is_forked_copy:
            return
        if run.watching is not None:
            run.watching.guard.run(run.watching.end)
        run.finisher.guard.run(run.end)
        if run.is_search and self.admits is not None:
            run.finisher.guard.run(self.admits.release)
        if self._loop is not None:
            # once more: a run may end before on_fit_start
            run.finisher.guard.run(self._loop.restore_limit)

    def _restore_trainer(self) -> None:
        """Restore the Trainer, so that the rest of training has no overhead."""
        from lm_profiler.callbacks.instruments.worker_code import WORKER_CODE

        if self._run is not None and self._run.phases is not None:
            self._run.phases.restore()
        if not self._options.stages.stop_when_done:
            vars(self).update(_NO_HOOKS)
        WORKER_CODE.restore()


def _check_trainer(trainer: Trainer) -> None:
    """Raise MisconfigurationException for a barebones Trainer, or one with several profilers of the program."""
    if trainer.barebones:
        raise MisconfigurationException(
            "lm_profiler cannot profile under Trainer(barebones=True): remove barebones=True"
        )
    profilers = [
        callback
        for callback in trainer.callbacks  # type: ignore[attr-defined]
        if isinstance(callback, TrainingProfiler)
    ]
    programs_own = [profiler for profiler in profilers if profiler.admits is None]
    if len(programs_own) > 1:
        raise MisconfigurationException(
            "expected one TrainingProfiler in a Trainer, given more"
        )


def _disable_sigterm_handler(trainer: Trainer) -> None:
    """Make Lightning's own handler of SIGTERM do nothing."""
    setattr(SIGNALS.get(trainer), SIGTERM_HANDLER.name, _ignore_signal)


def _ignore_signal(signum: int, frame: object) -> None:
    """Do nothing in place of Lightning's handler; Lightning then calls the handler that was installed before."""


def _ignore(*_: Any, **__: Any) -> None:
    """Stand in for a hook of the Trainer that a program may call for Fabric."""


_IGNORED_HOOKS: dict[str, Callable[..., None]] = {}
for _name in vars(Callback):
    if _name.startswith("on_") or _name in ("setup", "teardown"):
        _IGNORED_HOOKS[_name] = _ignore

# The hooks of a profiler that has finished, which stays in the user's list of callbacks: Lightning skips those that are
# None. ``on_exception`` stays, because writing the record may be interrupted.
_NO_HOOKS: dict[str, None] = {}
for _name in vars(TrainingProfiler):
    if _name.startswith("on_") and _name != "on_exception":
        _NO_HOOKS[_name] = None
