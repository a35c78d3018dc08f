"""A loop without a Lightning Trainer, marked by torch's hooks: of Fabric, transformers' Trainer, or a program."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from lm_profiler.callbacks.failures import no_step
from lm_profiler.callbacks.found_loop import (
    WRAPPERS,
    FrameworkFacts,
    LoopModules,
    find_modules,
)
from lm_profiler.callbacks.instruments.gap_owners import GapsWatch
from lm_profiler.callbacks.instruments.instrument import Instrument
from lm_profiler.callbacks.instruments.loop import Holdings
from lm_profiler.callbacks.instruments.owners import ActionSteps, OwnersInstrument
from lm_profiler.callbacks.instruments.profiling_options import WatchOptions
from lm_profiler.callbacks.instruments.sent_step import without_data
from lm_profiler.callbacks.marks.batches import BatchCounts
from lm_profiler.callbacks.marks.hook_marks import HookMarks
from lm_profiler.callbacks.marks.step_counter import StepCounter
from lm_profiler.measure.boundary import Report
from lm_profiler.measure.clocks.timeline import Timeline
from lm_profiler.measure.counts.recompiles import is_compiled_in
from lm_profiler.measure.counts.uncountable import UncountableError
from lm_profiler.record.run_record import Failure, LoopKind, NumericsFacts

_NO_STEP_CAUSES = (
    "no optimizer stepped in this thread. A compiled step or a CUDA graph calls no hooks: name its phases with "
    "run.phase(...)"
)

_DTYPE_NAMES = {
    torch.float32: "32",
    torch.bfloat16: "bf16",
    torch.float16: "16",
    torch.float64: "64",
}


@dataclass(eq=False)
class HookedLoop:
    """A loop without a Lightning Trainer. What its framework does not state is taken from what the marks have seen."""

    # the outermost modules; those of further optimizers are added
    modules: list[nn.Module]
    optimizers: list[Any]  # further optimizers that step are added
    framework: FrameworkFacts = field(default_factory=FrameworkFacts)
    given_loader: Any = None  # the loader that the program names, or the only one found
    tokens_in: Callable[[Any], int] | None = None  # counts the tokens of a batch
    # receives each batch of the loop
    count_batch: Callable[[Any], object] = lambda batch: None
    marks: HookMarks | None = field(default=None, init=False)
    # the model of the first call that was marked, and the call's arguments without data
    _first_call: tuple[nn.Module, Any] | None = field(default=None, init=False)
    # several ``modules`` as one
    _all_modules: LoopModules | None = field(default=None, init=False)

    can_fuse_optimizers: bool = field(default=True, init=False)
    step_number: int = field(default=0, init=False)
    users_profiler: str | None = field(default=None, init=False)
    traces_by_itself: bool = field(default=False, init=False)
    steps_by_itself: bool = field(default=True, init=False)
    is_trial: bool = field(default=False, init=False)
    # True, because the marks show clipping if there is any
    clips: bool | None = field(default=True, init=False)

    @property
    def kind(self) -> LoopKind:
        return self.framework.kind

    @property
    def device(self) -> torch.device:
        """The device of the loop: that of its framework, or of its first parameter."""
        if self.framework.device is not None:
            return self.framework.device
        for module in self.modules:
            for parameter in module.parameters():
                return parameter.device
        return torch.device("cpu")

    @property
    def rank(self) -> int:
        if self.framework.rank is not None:
            return self.framework.rank
        return torch.distributed.get_rank() if _is_distributed() else 0

    @property
    def world_size(self) -> int:
        if self.framework.world_size is not None:
            return self.framework.world_size
        return torch.distributed.get_world_size() if _is_distributed() else 1

    @property
    def ranks_of_host(self) -> int:
        local_ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
        return int(local_ranks) if local_ranks.isdigit() else 1

    @property
    def precision(self) -> str:
        if self.framework.precision is not None:
            return self.framework.precision
        return self._seen_precision()

    def _seen_precision(self) -> str:
        """Return the precision that the weights and the state of autocast show: ``bf16-mixed``, ``32-true``, …

        Trained weights of several dtypes count as float32.
        """
        dtypes = set()
        for module in self.modules:
            for parameter in module.parameters():
                if parameter.requires_grad:
                    dtypes.add(parameter.dtype)
        weight_precision = "32"
        if len(dtypes) == 1:
            weight_precision = _DTYPE_NAMES.get(dtypes.pop(), "32")
        autocast = None if self.marks is None else self.marks.autocast
        if autocast is not None and autocast.is_on and weight_precision == "32":
            is_half_precision = autocast.dtype in (torch.bfloat16, torch.float16)
            if is_half_precision:
                return f"{_DTYPE_NAMES[autocast.dtype]}-mixed"
        return f"{weight_precision}-true"

    @property
    def batches_per_step(self) -> int:
        """The batches of a step: as the framework states, else as the marks have seen, else 1."""
        if self.framework.batches_per_step is not None:
            return self.framework.batches_per_step
        seen = None if self.marks is None else self.marks.batches_per_step
        return seen or 1

    @property
    def restarts_loader(self) -> bool | None:
        return None if self.marks is None else self.marks.restarts_loader

    @property
    def validates_with_gradients(self) -> bool | None:
        return None if self.marks is None else self.marks.validates_with_gradients

    @property
    def module(self) -> nn.Module:
        """The module that the loop trains; several modules are combined into one."""
        if len(self.modules) == 1:
            return _unwrapped(self.modules[0])
        if self._all_modules is None or len(self._all_modules) != len(self.modules):
            self._all_modules = LoopModules(self.modules)
        return self._all_modules

    @property
    def is_compiled(self) -> bool:
        # The wrappers are checked, because Fabric keeps the plain module beside the compiled one.
        return any(is_compiled_in(module) for module in self.modules)

    @property
    def wrapped_module(self) -> object:
        """The first DDP module within the loop's modules, or else the loop's first module; None without modules."""
        for module in self.modules:
            for part in module.modules():
                if isinstance(part, nn.parallel.DistributedDataParallel):
                    return part
        return self.modules[0] if self.modules else None

    @property
    def holdings(self) -> Holdings:
        """What this rank holds of the weights: all of them, shards, or unknown if a wrapper hides them."""
        for optimizer in self.optimizers:
            is_of_deepspeed = type(optimizer).__module__.startswith("deepspeed.")
            if is_of_deepspeed or hasattr(optimizer, "consolidate_state_dict"):
                return "unknown"
        parameters: list[nn.Parameter] = []
        for module in self.modules:
            parameters += module.parameters()
        if any(type(parameter).__name__ == "FlatParameter" for parameter in parameters):
            return "unknown"
        if any(hasattr(parameter, "device_mesh") for parameter in parameters):
            return "shards"
        return "whole"

    @property
    def loggers(self) -> Sequence[Any]:
        return self.framework.loggers

    @property
    def no_step(self) -> Failure:
        return no_step(_NO_STEP_CAUSES)

    def note_call(self, module: nn.Module, arguments: Any) -> None:
        """Keep the shapes of the positional and named ``arguments`` of a call of ``module``, for a rehearsal."""
        with suppress(UncountableError):
            # If an argument has no shape, the call cannot be rehearsed.
            self._first_call = module, without_data(arguments)

    def rehearsed_batch(self, get_batch: Callable[[], Any]) -> Any:
        """Return the arguments of the model's first call, without data; UncountableError if they are unknown."""
        if len(self.modules) != 1:
            raise UncountableError("the loop trains several models")
        if self._first_call is None:
            raise UncountableError("the model was not called with tensors")
        called_module, arguments = self._first_call
        if called_module is not self.modules[0]:
            raise UncountableError("the loop calls only a part of the model")
        return arguments

    def limit_steps(self, steps: int) -> None:
        """Do nothing: the program ends its loop itself."""

    def fewest_steps_left(self) -> float | None:
        return None

    def exit_codes(self) -> Mapping[int, int | None]:
        return {}

    def make_marks(
        self, timeline: Timeline, counter: StepCounter, report: Report
    ) -> HookMarks:
        """Return new marks of this loop; they are not installed yet."""
        if self.marks is not None:  # because installing them has failed halfway
            self.marks.restore()
        self.marks = HookMarks(
            timeline,
            counter,
            self.modules,
            self.optimizers,
            self.count_batch,
            self.note_call,
            find_modules,
            report,
        )
        return self.marks

    @property
    def loader(self) -> Any:
        """The loader over which the loop iterates; None if there is none, or several."""
        if self.given_loader is not None or self.marks is None:
            return self.given_loader
        return self.marks.passes.loader

    @property
    def num_workers(self) -> int | None:
        count: int | None = getattr(self.given_loader, "num_workers", None)
        if count is None and self.marks is not None:
            # The program may have named a generator that iterates over a loader.
            return self.marks.passes.num_workers
        return count

    @property
    def validation_batch_size(self) -> None:
        return None  # which loader validates is not known

    def owners_watch(self, timeline: Timeline, steps: ActionSteps) -> OwnersInstrument:
        """Return the instrument that divides the time that no phase covers among the gaps between phases."""
        return GapsWatch(
            timeline=timeline,
            is_compiled=lambda: self.is_compiled,
            modules=lambda: self.modules,
            steps=steps,
        )

    def loader_watch(self) -> Instrument | None:
        return None

    def batch_counts(self, report: Callable[[str], object]) -> BatchCounts:
        """Return the counter of the batches of this loop, with the program's own count of tokens if it has one."""
        counter: object = self.module
        if self.tokens_in is not None:
            counter = SimpleNamespace(tokens_in=self.tokens_in)
        return BatchCounts(
            counter, report=report, batch_size=getattr(self.loader, "batch_size", None)
        )

    def audit(self, get_batch: Callable[[], Any]) -> NumericsFacts:
        raise ValueError("expected a fit of a Lightning Trainer")

    def watch(
        self,
        options: WatchOptions,
        clock: Callable[[], int],
        began_ns: int,
        report: Callable[[str], object],
    ) -> None:
        """Report that such a loop cannot be watched."""
        report(
            "watch: only the fit of a Lightning Trainer can be watched; this run is profiled, but not watched"
        )


def _is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _unwrapped(module: nn.Module) -> nn.Module:
    """Return the module inside of wrappers such as DDP."""
    while type(module).__name__ in WRAPPERS:
        inner: Any = module.module
        module = inner
    return module
