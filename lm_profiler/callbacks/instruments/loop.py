"""The interface of the loop that is profiled: its facts, and the marks of its phases.

``trainer_loop`` implements it for a Lightning Trainer; ``hooked_loop`` for Fabric, transformers' Trainer and a
program's own loop. Nothing here is called within a measured step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import nn

from lm_profiler.callbacks.instruments.instrument import Instrument
from lm_profiler.callbacks.instruments.owners import ActionSteps, OwnersInstrument
from lm_profiler.callbacks.instruments.profiling_options import WatchOptions
from lm_profiler.callbacks.marks.batches import BatchCounts
from lm_profiler.callbacks.marks.step_counter import StepCounter
from lm_profiler.measure.boundary import Report
from lm_profiler.measure.clocks.timeline import Timeline
from lm_profiler.record.run_record import Failure, LoopKind, NumericsFacts

# what the optimizers of one rank hold: all parameters and states, its own shards of them, or unknown
Holdings = Literal["whole", "shards", "unknown"]


class Marks(Protocol):
    """Divides the loop's time into phases, from ``install`` until ``restore``."""

    def install(self) -> None: ...

    def mark_optimizers(self) -> None: ...

    def see_host_batches(self, note: Callable[[Any], object]) -> None: ...

    def restore(self) -> None:
        """Restore the loop's objects; may be called twice."""

    def count_only(self) -> None:
        """Take no more marks, but still count steps, because the other ranks do."""

    def close_step(self) -> None:
        """End the step if it is done, because the loop ends."""


class Loop(Protocol):
    """The facts of one loop. They are read after the loop has begun."""

    @property
    def kind(self) -> LoopKind: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def ranks_of_host(self) -> int:
        """The number of ranks on this machine, which share its cores."""

    @property
    def precision(self) -> str:
        """Lightning's name of the precision, such as ``bf16-mixed``."""

    @property
    def batches_per_step(self) -> int:
        """The number of batches of one training step on one rank."""

    @property
    def restarts_loader(self) -> bool | None:
        """Whether nearly each step begins a new pass over a loader's data; None if it is unknown."""

    @property
    def validation_batch_size(self) -> int | None:
        """The batch size of validation; None if it is unknown."""

    @property
    def validates_with_gradients(self) -> bool | None:
        """Whether autograd records a graph in validations; None if it is unknown."""

    @property
    def module(self) -> nn.Module:
        """The model as the program wrote it."""

    @property
    def wrapped_module(self) -> object:
        """The model as its strategy wrapped it, such as in DDP."""

    @property
    def is_compiled(self) -> bool:
        """Whether torch.compile has compiled the model or a part of it, even if a strategy wraps the result."""

    @property
    def optimizers(self) -> Sequence[Any]: ...

    @property
    def holdings(self) -> Holdings:
        """What each rank holds of the parameters and of the optimizer's states."""

    @property
    def clips(self) -> bool | None:
        """Whether the loop clips gradients; None means unknown."""

    @property
    def can_fuse_optimizers(self) -> bool:
        """Whether fused optimizers would work, as far as the loop decides it."""

    @property
    def loader(self) -> Any:
        """The loader that runs, or the first of several; None if there is none, or it is unknown."""

    @property
    def num_workers(self) -> int | None:
        """The number of workers of the loader, or of each of several; None if it is unknown, or if they differ."""

    @property
    def loggers(self) -> Sequence[Any]: ...

    @property
    def step_number(self) -> int:
        """The loop's own count of optimizer steps."""

    @property
    def users_profiler(self) -> str | None:
        """The class of the profiler that the program chose for its loop; None if it chose none."""

    @property
    def traces_by_itself(self) -> bool:
        """Whether that profiler records a trace by torch.profiler. Only one torch.profiler can run at a time."""

    @property
    def steps_by_itself(self) -> bool:
        """Whether the program's own code calls backward and its optimizers."""

    @property
    def is_trial(self) -> bool:
        """Whether the program only tries a few batches, so that its rates are of no use."""

    @property
    def no_step(self) -> Failure:
        """The failure of a run that ended without a step."""

    def rehearsed_batch(self, get_batch: Callable[[], Any]) -> Any:
        """Return the input of a step that is repeated on shapes alone: ``get_batch()``, or a call's arguments.

        Raises:
            UncountableError: its step cannot be repeated.
        """

    def limit_steps(self, steps: int) -> None:
        """End the loop after ``steps`` if nothing else would; a loop that cannot be ended goes on."""

    def fewest_steps_left(self) -> float | None:
        """Return how many steps the loop has at least; None if that is unknown."""

    def exit_codes(self) -> Mapping[int, int | None]:
        """Return the exit codes of the ranks that this process started; None for a rank that runs."""

    def make_marks(
        self, timeline: Timeline, counter: StepCounter, report: Report
    ) -> Marks: ...

    def owners_watch(self, timeline: Timeline, steps: ActionSteps) -> OwnersInstrument:
        """Return the instrument that divides the time that no phase covers among its owners."""

    def loader_watch(self) -> Instrument | None:
        """Return the instrument that counts prefetched batches, if they can be counted."""

    def batch_counts(self, report: Callable[[str], object]) -> BatchCounts: ...

    def audit(self, get_batch: Callable[[], Any]) -> NumericsFacts:
        """Compare the results of the loop's precision with float32; may raise any error."""

    def watch(
        self,
        options: WatchOptions,
        clock: Callable[[], int],
        began_ns: int,
        report: Callable[[str], object],
    ) -> Any:
        """Return what watches the rest of training; None if such a loop cannot be watched."""
