"""The loop of a Lightning Trainer: its facts, and the marks and instruments that are made for its actions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule

from lm_profiler.callbacks.failures import no_step
from lm_profiler.callbacks.instruments.action_owners import OwnersWatch
from lm_profiler.callbacks.instruments.instrument import Instrument
from lm_profiler.callbacks.instruments.loop import Holdings
from lm_profiler.callbacks.instruments.numerics import numerics_facts
from lm_profiler.callbacks.instruments.owners import ActionSteps, OwnersInstrument
from lm_profiler.callbacks.instruments.profiling_options import WatchOptions
from lm_profiler.callbacks.instruments.watches import loader_watch
from lm_profiler.callbacks.loop_length import fewest_steps_left
from lm_profiler.callbacks.marks.batches import BatchCounts
from lm_profiler.callbacks.marks.namespaces import is_a, lightning_base_of, overrides
from lm_profiler.callbacks.marks.phases import PhaseProfiler
from lm_profiler.callbacks.marks.step_counter import StepCounter
from lm_profiler.callbacks.watching import Watching
from lm_profiler.measure.clocks.timeline import Timeline
from lm_profiler.measure.counts.recompiles import is_compiled_in
from lm_profiler.record.run_record import Failure, LoopKind, NumericsFacts, Verb

# class names of Lightning's profilers: of the default, which does nothing, and of the one that records a trace
_NO_PROFILER = "PassThroughProfiler"
_TRACER = "PyTorchProfiler"

# strategies under which each rank holds the whole module and all optimizer states
_WHOLE = ("SingleDeviceStrategy", "DDPStrategy")
# strategies under which each rank holds a shard of both
_SHARDED = ("FSDPStrategy", "ModelParallelStrategy")

_NO_STEP_CAUSES = "the loader is empty or exhausted, every batch was skipped, or the Trainer's options allow no step"


@dataclass(eq=False)
class TrainerLoop:
    """The loop of ``verb``. A Trainer changes until its loop begins, so each fact is read when it is needed."""

    trainer: Any  # a Trainer from ``lightning.pytorch`` or ``pytorch_lightning``
    callback: Callback | None = None  # the profiling callback of this run
    verb: Verb = "fit"
    max_steps: int = -1  # the Trainer's own limit, which is restored at the end
    kind: LoopKind = field(default="Trainer", init=False)
    phases: PhaseProfiler | None = field(default=None, init=False)

    @property
    def device(self) -> torch.device:
        device: torch.device = self.trainer.strategy.root_device
        return device

    @property
    def rank(self) -> int:
        return int(self.trainer.global_rank)

    @property
    def world_size(self) -> int:
        return int(self.trainer.world_size)

    @property
    def ranks_of_host(self) -> int:
        return int(self.trainer.num_devices)

    @property
    def precision(self) -> str:
        return str(self.trainer.precision)

    @property
    def batches_per_step(self) -> int:
        return int(self.trainer.accumulate_grad_batches)

    @property
    def restarts_loader(self) -> bool:
        return False  # the Trainer keeps its iterator for an epoch

    @property
    def validates_with_gradients(self) -> bool:
        return False  # the Trainer validates without gradients

    @property
    def module(self) -> LightningModule:
        module: LightningModule = self.trainer.lightning_module
        return module

    @property
    def is_compiled(self) -> bool:
        return is_compiled_in(self.module)

    @property
    def wrapped_module(self) -> object:
        return self.trainer.strategy.model

    @property
    def optimizers(self) -> Sequence[Any]:
        optimizers: Sequence[Any] = self.trainer.optimizers
        return optimizers

    @property
    def holdings(self) -> Holdings:
        """What each rank holds of the parameters and of the optimizer's states: all, a shard of them, or unknown.

        Unknown for other strategies, and if ranks hold whole parameters but only parts of the states.
        """
        strategy_name = lightning_base_of(self.trainer.strategy)
        if strategy_name in _SHARDED:
            return "shards"
        # torch's ZeroRedundancyOptimizer keeps a part of the states on each rank; this method collects them.
        splits_states = any(
            hasattr(optimizer, "consolidate_state_dict")
            for optimizer in self.optimizers
        )
        if strategy_name in _WHOLE and not splits_states:
            return "whole"
        return "unknown"

    @property
    def clips(self) -> bool | None:
        """Whether the step clips gradients; None if the module decides that."""
        module = self.module
        if not module.automatic_optimization or self.trainer.gradient_clip_val:
            return True
        if overrides(module, "configure_gradient_clipping"):
            return None
        return False

    @property
    def can_fuse_optimizers(self) -> bool:
        # In mixed precision Lightning cannot clip for a fused optimizer (2.6.6: MixedPrecision.clip_gradients).
        clips = bool(self.trainer.gradient_clip_val)
        return not (clips and is_a(self.trainer.precision_plugin, "MixedPrecision"))

    @property
    def loader(self) -> Any:
        """The loader of the loop that runs, the first of several; None if the Trainer has none."""
        trainer = self.trainer
        loaders = (
            trainer.train_dataloader,
            trainer.val_dataloaders,
            trainer.test_dataloaders,
            trainer.predict_dataloaders,
        )
        for loader in loaders:
            if loader is None:
                continue
            is_several = isinstance(loader, (list, tuple)) and len(loader) > 0
            return loader[0] if is_several else loader
        return None

    @property
    def num_workers(self) -> int | None:
        return getattr(self.loader, "num_workers", None)

    @property
    def validation_batch_size(self) -> int | None:
        """The batch size of the first validation loader; None if there is none, or it is unknown."""
        loader = self.trainer.val_dataloaders
        if isinstance(loader, (list, tuple)):
            loader = loader[0] if loader else None
        size = getattr(loader, "batch_size", None)
        return size if isinstance(size, int) else None

    @property
    def loggers(self) -> Sequence[Any]:
        loggers: Sequence[Any] = self.trainer.loggers
        return loggers

    @property
    def step_number(self) -> int:
        return int(self.trainer.global_step)

    @property
    def users_profiler(self) -> str | None:
        profiler = type(self.trainer.profiler).__name__
        return None if profiler == _NO_PROFILER else profiler

    @property
    def traces_by_itself(self) -> bool:
        return is_a(self.trainer.profiler, _TRACER)

    @property
    def steps_by_itself(self) -> bool:
        return self.verb == "fit" and not self.module.automatic_optimization

    @property
    def is_trial(self) -> bool:
        return bool(self.trainer.fast_dev_run)

    @property
    def no_step(self) -> Failure:
        return no_step(_NO_STEP_CAUSES)

    def rehearsed_batch(self, get_batch: Callable[[], Any]) -> Any:
        return get_batch()

    @property
    def _has_no_limit(self) -> bool:
        return self.trainer.max_epochs == -1 and self.max_steps == -1

    def limit_steps(self, steps: int) -> None:
        """Limit the fit to ``steps`` until ``restore_limit``, if it has no limit of its own."""
        if self._has_no_limit:
            # A learning-rate schedule may ask how many there will be (``Trainer.estimated_stepping_batches``).
            self.trainer.fit_loop.epoch_loop.max_steps = steps

    def restore_limit(self) -> None:
        """Give the Trainer its own limit back."""
        self.trainer.fit_loop.epoch_loop.max_steps = self.max_steps

    def fewest_steps_left(self) -> float | None:
        if self.verb == "fit" and self._has_no_limit:
            return math.inf  # regardless of the limit that was set for the stages
        return fewest_steps_left(self.trainer, self.verb)

    def exit_codes(self) -> Mapping[int, int | None]:
        """Return the exit codes, by rank, of the ranks that this process has started; None for ranks that still run."""
        processes = getattr(self.trainer.strategy.launcher, "procs", [])
        codes = {}
        for rank, process in enumerate(processes, start=self.rank + 1):
            if hasattr(process, "poll"):
                codes[rank] = process.poll()
        return codes

    def make_marks(
        self, timeline: Timeline, counter: StepCounter, report: Callable[[str], object]
    ) -> PhaseProfiler:
        """Return new marks of the Trainer's actions; they are not installed yet."""

        def report_no_step(place: str) -> None:
            cause = "the loader is empty, or every batch is skipped"
            report(
                f"{place} had no step: {cause}. Without max_steps or max_time the Trainer would never end, so the "
                "run was stopped"
            )

        self.phases = PhaseProfiler(
            self.trainer,
            timeline,
            counter.steps_left,
            counter.step_ended,
            self.callback,
            agree_on_steps_left=counter.agree_on_steps_left,
            stages_ended=counter.stages_ended,
            ends_loop=counter.ends_loop,
            on_no_step=report_no_step,
        )
        return self.phases

    def owners_watch(self, timeline: Timeline, steps: ActionSteps) -> OwnersInstrument:
        """Return the instrument that divides the time that no phase covers among the Trainer's actions."""
        return OwnersWatch(
            trainer=self.trainer,
            timeline=timeline,
            profiler=lambda: self.phases,
            callback=self.callback,
            steps=steps,
        )

    def loader_watch(self) -> Instrument | None:
        if self.verb != "fit":
            return None
        return loader_watch(self.trainer)

    def batch_counts(self, report: Callable[[str], object]) -> BatchCounts:
        """Return the counter of the batches of this loop."""
        loader = self.trainer.train_dataloader if self.verb == "fit" else None
        return BatchCounts(
            module=self.module,
            combined=isinstance(loader, (dict, list, tuple)),
            report=report,
            batch_size=getattr(loader, "batch_size", None),
        )

    def audit(self, get_batch: Callable[[], Any]) -> NumericsFacts:
        return numerics_facts(self.trainer, self.verb, get_batch)

    def watch(
        self,
        options: WatchOptions,
        clock: Callable[[], int],
        began_ns: int,
        report: Callable[[str], object],
    ) -> Watching:
        """Return the watch of this fit; it has not begun yet."""
        return Watching(self.callback, self.trainer, options, clock, began_ns, report)
