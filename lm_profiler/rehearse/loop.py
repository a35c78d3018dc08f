"""Rehearses the steps of a run on fake tensors, to find the memory and the work of each phase without computing.

Lightning's own loop runs, with the module's hooks, precision, clipping and accumulation, on tensors without data.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from traceback import walk_tb
from typing import Any
from unittest.mock import MagicMock

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.optim import Optimizer
from torchmetrics import Metric

from lm_profiler.analysis.plan.planned import Planned, needed_bytes
from lm_profiler.callbacks.instruments.memory import MemoryReader
from lm_profiler.callbacks.instruments.work import StepWork, phase_work
from lm_profiler.callbacks.marks.phases import PhaseProfiler
from lm_profiler.callbacks.trainer_loop import TrainerLoop
from lm_profiler.measure.boundary import error_text
from lm_profiler.measure.clocks.timeline import Timeline
from lm_profiler.measure.counts.flops import StepFlops
from lm_profiler.measure.counts.traffic import ForwardTraffic
from lm_profiler.measure.counts.uncountable import (
    BrokenFormulaError,
    UncountableError,
)
from lm_profiler.measure.fake.live import Uncounted
from lm_profiler.measure.fake.offload import refuse_host_optimizers
from lm_profiler.measure.fake.values import DependsOnValues
from lm_profiler.measure.fake.world import FakeWorld, WouldChange
from lm_profiler.measure.memory.causes import holdings
from lm_profiler.measure.memory.storage_notes import Site, seen_tensors
from lm_profiler.measure.user_code import package_of, user_line
from lm_profiler.record.text import short_path
from lm_profiler.rehearse.strategies import (
    FakeDevice,
    LinkBytes,
    Size,
    buckets,
    ring_bytes,
)
from lm_profiler.torch_names import BACKWARD_NODE, FAKES, NEXT_NODE_NUMBER, NODE_NUMBER

META = torch.device("meta")  # the device of fake tensors' storages

# a generator that yields the size of the next batches, and receives the bytes that steps of this size need
Sizes = Generator[Size, int, None]

# how many steps are observed if steps may differ: at least these, and more while there is time
_MIN_UNLIKE_STEPS = 2
_MAX_UNLIKE_STEPS = 8


class CallSites:
    """Finds where operators are called from: the instance is called with an operator and returns its ``Site``.

    An operator of backward has the module and the line of the forward operator whose derivative it computes.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module_paths = {
            child: path for path, child in module.named_modules() if path
        }
        # the modules whose forward runs, the innermost last
        self._running_modules: list[nn.Module] = []
        # the number of a node in autograd's graph to the site of the operator that made it
        self._forward_sites: dict[int, Site] = {}
        self._hooks = ExitStack()
        self._hooks.enter_context(register_module_forward_pre_hook(self._begin_forward))
        self._hooks.enter_context(
            register_module_forward_hook(self._end_forward, always_call=True)
        )
        # Both are functions of torch. They return autograd's node whose backward runs, and the number that the next
        # node will get; without these functions, an operator of backward has no line.
        self._backward_node = BACKWARD_NODE.find_or(lambda: None)
        self._next_node_number = NEXT_NODE_NUMBER.find_or(lambda: 0)

    def __call__(self, func: Any) -> Site:
        """Return where the operator ``func`` runs: its module and line, or in backward those of its forward."""
        backward_node = self._backward_node()
        is_in_backward = backward_node is not None
        if is_in_backward and not self._running_modules:
            node_number = NODE_NUMBER.get_or(backward_node, lambda: -1)()
            forward_site = self._forward_sites.get(node_number, Site())
            return forward_site._replace(operator=str(func), recomputes=False)

        module_path = None
        if self._running_modules:
            module_path = self._module_paths.get(self._running_modules[-1])
        line = None
        # Frame 1 is that of the dispatch mode, which calls this object; frame 2 ran the operator.
        code_line = user_line(sys._getframe(2))
        if code_line is not None:
            file, line_number, _ = code_line
            line = f"{short_path(file)}:{line_number}"
        site = Site(
            operator=str(func),
            module=module_path,
            line=line,
            recomputes=is_in_backward,
        )
        # Autograd makes and numbers the node of an operator before the operator runs.
        self._forward_sites[self._next_node_number() - 1] = site
        return site

    def stop(self) -> None:
        self._hooks.close()

    def _begin_forward(self, module: nn.Module, args: Any) -> None:
        self._running_modules.append(module)

    def _end_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        # Empty if the step began within this forward.
        if self._running_modules:
            self._running_modules.pop()


class StepObservers:
    """The observers of one step of a rehearsal, attached when it begins."""

    def __init__(self, rehearsal: Rehearsal) -> None:
        self._timeline = rehearsal.timeline
        self._world = rehearsal.world
        live = self._world.live
        live.convolution_bytes = 0
        self.notes = live.begin_notes()
        module = rehearsal.trainer.lightning_module
        self._sites = CallSites(module)
        live.site = self._sites
        for bucket in rehearsal.buckets:
            self.notes.note_causes(seen_tensors("rest", "DDP's bucket", bucket))

        def module_and_optimizers() -> tuple[nn.Module, Sequence[Optimizer]]:
            return module, rehearsal.trainer.optimizers

        forward = ForwardTraffic()
        self._memory_reader = MemoryReader(
            live,
            self._timeline,
            device=META,
            parties=module_and_optimizers,
            forward=forward,
            note_tensors=self.notes.note_part,
        )
        self._memory_reader.begin("memory")
        self._flops = StepFlops(self._timeline, forward, on_shapes=True)
        self._timeline.observers += (self._flops,)
        self.link_bytes = LinkBytes(self._timeline)
        self._world.link_mode = self.link_bytes

    def end(self) -> Mapping[str, Any]:
        """Detach the observers at the end of the step, and return the facts of the memory reader."""
        self._memory_reader.end_step()  # its result is not needed: ``facts`` has the peaks of all phases
        self._memory_reader.end("memory")
        self._timeline.unobserve(self._flops)
        self._flops.stop()
        # The notes end with the step: storages are not noted between steps.
        self._world.live.notes = None
        self._sites.stop()
        return self._memory_reader.facts

    def work(self) -> StepWork:
        """Return the FLOPs and the moved bytes of the step, which has ended."""
        return StepWork(
            flops=self._flops.flops(),
            by_dtype=self._flops.by_dtype(),
            traffic=self._memory_reader.facts["traffic"],
        )


@dataclass(eq=False, kw_only=True)
class Rehearsal(Callback):
    """Makes Lightning's loop run steps on fake tensors, and observes some of them.

    The first step is not observed, because it makes gradients and optimizer states, which exist in later steps.
    """

    world: FakeWorld  # makes the fake tensors; the module was made inside of it
    # the first exception: after it Lightning tears down what it has not set up yet, which may raise others
    first_error: BaseException | None = None
    bucket_bytes: int | None = None  # bytes of DDP's buckets; None if there are none
    # entered while a batch runs
    _fake_context: ExitStack = field(default_factory=ExitStack)
    _steps_left: int = 1 << 20  # more than ``_steps`` ever needs

    def _steps(self) -> Iterator[None]:
        """Yield before each step; the generator is resumed when that step has ended. When it returns, the loop ends."""
        raise NotImplementedError

    def _prepare_loop(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prepare the rehearsal when the strategy has set the model up."""
        assert isinstance(trainer.strategy, FakeDevice)
        self._strategy = trainer.strategy
        self.trainer = trainer
        self._install_marks(trainer)
        self._replace_what_needs_values(trainer, pl_module)
        self._count_set_up(trainer, pl_module)

    def _install_marks(self, trainer: Trainer) -> None:
        """Mark the phases of the loop on a timeline, and resume ``_steps`` at the end of each step."""
        self.timeline = Timeline()
        self._steps_to_run = self._steps()
        self._phases = PhaseProfiler(
            trainer,
            self.timeline,
            steps_left=self._steps_left,
            step_ended=self._step_ended,
            callback=self,
            ends_loop=True,
        )
        self._phases.install()
        self._phases.mark_optimizers()

    def _replace_what_needs_values(
        self, trainer: Trainer, pl_module: LightningModule
    ) -> None:
        """Replace what a real run does with the values of tensors: limits, logging, checks of metrics, defaults."""
        remove_limits(trainer)
        pl_module.log = partial(_log, trainer)  # type: ignore[method-assign]
        for part in pl_module.modules():
            if isinstance(part, Metric):
                part.validate_args = False  # fake tensors have no values to check
                part.distributed_available_fn = _no_other_ranks
        if self.world.gpu is not None:
            refuse_host_optimizers(trainer.optimizers)
            _use_foreach(trainer.optimizers)

    def _count_set_up(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count the bytes that exist before the first step, by their causes; make DDP's buckets if it has any."""
        self.world.begin([*pl_module.parameters()], [*pl_module.buffers()])
        self.buckets: list[torch.Tensor] = []
        if self._strategy.has_buckets:
            with self.world.inside():
                self.buckets = buckets(pl_module)
                self.bucket_bytes = sum(bucket.nbytes for bucket in self.buckets)
        held = holdings(pl_module, trainer.optimizers, META)
        self._set_up = {
            **held._asdict(),
            "rest": self.world.live.held_bytes - held.total,
        }

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        if self.first_error is None:
            self.first_error = exception

    def _step_ended(self) -> int:
        """Resume ``_steps`` up to its next step; return how many steps are left."""
        try:
            next(self._steps_to_run)
        except StopIteration:
            self._steps_left = 0
        else:
            self._steps_left -= 1
        return self._steps_left

    def _begin_batch(self, *_: Any) -> None:
        self._fake_context.enter_context(self.world.inside())

    def _end_batch(self, *_: Any) -> None:
        self._fake_context.close()
        if not self._phases.has_seen_actions:
            # Raises if this version of Lightning has no actions by which steps can be counted.
            self._phases.give_up_without_actions()

    on_train_start = on_validation_start = on_test_start = on_predict_start = (
        _prepare_loop
    )
    # The hooks differ in their arguments, which are not used.
    on_train_batch_start = on_validation_batch_start = _begin_batch  # type: ignore[assignment]
    on_test_batch_start = on_predict_batch_start = _begin_batch  # type: ignore[assignment]
    on_train_batch_end = on_validation_batch_end = _end_batch  # type: ignore[assignment]
    on_test_batch_end = on_predict_batch_end = _end_batch  # type: ignore[assignment]


@dataclass(eq=False, kw_only=True)
class RehearsedSizes(Rehearsal):
    """A rehearsal of steps with batches of several sizes."""

    # Steps of the first size are observed phase by phase; of other sizes only the peak is read.
    sizes: Sizes
    # Whether all steps certainly do the same. Otherwise several are rehearsed, and the largest counts: a module may
    # skip a step now and then, or do more in every other step, and batches may differ.
    has_equal_steps: bool = False
    # CPU time after which no further step of the first size begins
    enough_s: float = 1.0
    clock: Callable[[], float] = time.process_time  # seconds of CPU time
    observed_steps: list[Planned] = field(default_factory=list)
    has_observed_all: bool = False  # whether all required steps were observed

    def _steps(self) -> Iterator[None]:
        yield from self._steps_of_first_size()
        yield from self._steps_of_further_sizes()

    def _steps_of_first_size(self) -> Iterator[None]:
        """Observe as many steps of the first size as needed, phase by phase."""
        self._strategy.size = next(self.sizes)
        deadline = self.clock() + self.enough_s
        while self._needs_more_steps(deadline):
            observers = StepObservers(self)
            yield
            self.observed_steps.append(self._observed_step(observers))
        self.has_observed_all = True

    def _steps_of_further_sizes(self) -> Iterator[None]:
        """Run steps of each further size that ``sizes`` yields, and send it the bytes that each size has needed."""
        peaks = [step.peak for step in self.observed_steps]
        peaks_are_equal = len(set(peaks)) == 1
        steps_of_size = 1 if peaks_are_equal else len(peaks)
        peak_bytes = max(peaks)
        live = self.world.live
        while True:
            _, reserved_bytes, *_ = live.peaks()
            try:
                next_size = self.sizes.send(needed_bytes(peak_bytes, reserved_bytes))
            except StopIteration:  # there are no further sizes
                return
            self._strategy.size = next_size
            live.empty_cache()
            peak_bytes = 0
            for _ in range(steps_of_size):
                live.reset()
                yield
                step_peak_bytes, *_ = live.peaks()
                peak_bytes = max(peak_bytes, step_peak_bytes or 0)

    def _needs_more_steps(self, deadline: float) -> bool:
        """Return whether another step has to be observed; ``deadline`` is a time of ``clock``."""
        steps = len(self.observed_steps)
        if self.has_equal_steps:
            return steps < 1
        if steps < _MIN_UNLIKE_STEPS:
            return True
        return steps < _MAX_UNLIKE_STEPS and self.clock() < deadline

    def _observed_step(self, observers: StepObservers) -> Planned:
        """Return the bytes and the work of the step that has just ended.

        Raises:
            Uncounted: kernels may need far more temporary memory than was counted.
            BrokenFormulaError: a formula that the program registered fails.
        """
        memory = observers.end()
        peaks: dict[str, int] = {}
        for phase, (allocated_bytes, *_) in memory["part_peaks"].items():
            peaks[phase] = allocated_bytes or 0
        live = self.world.live
        is_on_cpu = self.world.gpu is None
        if is_on_cpu and live.convolution_bytes > _SURE_FACTOR * max(peaks.values()):
            raise Uncounted(
                "the temporary memory of the CPU's convolution kernels is unknown"
            )

        work = _countable_work(observers)
        uncounted = [] if work is None else work.flops.uncounted
        batch_bytes = self._strategy.batch_bytes * self.trainer.accumulate_grad_batches
        _, reserved_bytes, *_ = live.peaks()
        return Planned(
            peaks=peaks,
            causes=memory["causes"],
            held=memory["levels"],
            work=phase_work(
                TrainerLoop(self.trainer), work, memory["traffic"], batch_bytes
            ),
            uncounted=uncounted,
            timeline=observers.notes.timeline("planned").model_copy(
                update={"set_up": self._set_up}
            ),
            reserved=reserved_bytes,
            gathered=live.most_gathered,
            sent=self._bytes_sent(observers.link_bytes),
        )

    def _bytes_sent(self, link: LinkBytes) -> dict[str, int]:
        """Return the bytes that each phase of a step sends to other ranks, without phases that send none."""
        bytes_by_phase = Counter(link.by_phase)
        if self._strategy.reduces:
            # The reducer of DDP, which sends the gradients, does not run in a rehearsal.
            parameters = self.trainer.lightning_module.parameters()
            gradient_bytes = sum(
                parameter.nbytes for parameter in parameters if parameter.requires_grad
            )
            bytes_by_phase["backward"] += ring_bytes(
                "allreduce", gradient_bytes, self._strategy.ranks
            )
        return {phase: count for phase, count in bytes_by_phase.items() if count}


def _countable_work(observers: StepObservers) -> StepWork | None:
    """Return the work of the observed step; None if it is uncountable: then the least times of phases are unknown.

    Raises:
        BrokenFormulaError: a formula that the program registered fails.
    """
    try:
        return replace(observers.work(), traffic=None)
    except BrokenFormulaError:
        raise
    except UncountableError:
        return None


# a peak that may be too low by more than this factor is not reported
_SURE_FACTOR = 1.05


def remove_limits(trainer: Trainer) -> None:
    """Remove the loop's limits, which learning-rate schedules have read already, and schedules that monitor metrics."""
    trainer.fit_loop.max_epochs = -1
    trainer.fit_loop.epoch_loop.max_steps = -1
    # Their metrics do not exist in a rehearsal.
    configs = trainer.strategy.lr_scheduler_configs
    configs[:] = [config for config in configs if not config.reduce_on_plateau]


def _no_other_ranks() -> bool:
    """Stand in for a metric's ``distributed_available_fn``: no other rank has tensors to gather."""
    return False


def _use_foreach(optimizers: Sequence[Optimizer]) -> None:
    """Make optimizers use their multi-tensor (foreach) variants, as they would by default with real tensors on a GPU.

    Adafactor would not (torch/optim/_adafactor.py), nor optimizers with a learning rate in a tensor.
    """
    for optimizer in optimizers:
        if type(optimizer).__name__ == "Adafactor":
            continue
        for group in optimizer.param_groups:
            uses_default = "foreach" in group and group["foreach"] is None
            rate_is_tensor = isinstance(group.get("lr"), torch.Tensor)
            has_other_variant = (
                group.get("fused") or group.get("differentiable") or rate_is_tensor
            )
            if uses_default and not has_other_variant:
                group["foreach"] = True


def _log(trainer: Trainer, name: str, value: Any, *_: object, **__: object) -> None:
    """Stand in for a module's ``log``: keep the value in ``callback_metrics``, and log nothing."""
    if isinstance(value, Metric):
        return
    if isinstance(value, torch.Tensor):
        value = value.detach()
    trainer.callback_metrics[name] = value


# matches torch's error if a tensor subclass makes its instances from plain tensors
_MADE_FROM_PLAIN = re.compile(r"Creating a new Tensor subclass (\w+) but the raw")
# a part of torch's error if a kernel itself reads values
_NO_DATA = "its data is not allocated yet"


def reason_of(error: Exception) -> str:
    """Return why a step cannot be rehearsed, with the line of the user's code."""
    # The parser of the command line wraps the errors of classes that it instantiates.
    while isinstance(error.__cause__, Exception):
        error = error.__cause__
    line = _user_line_of(error)
    if _depends_on_values(error):
        return f"it depends on the values of tensors, which are unknown unless it runs{line}"
    if isinstance(error, WouldChange):
        return f"{error}{line}"
    if isinstance(error, Uncounted):
        return str(error)
    own_class = _MADE_FROM_PLAIN.search(str(error))
    if own_class is not None:
        # such as the 4-bit weights of bitsandbytes, which are quantized when they move to a GPU
        return f"tensors of class {own_class[1]} cannot be made from tensors without data{line}"
    return f"{error_text(error)}{line}"


def _user_line_of(error: Exception) -> str:
    """Return the innermost line of the user's code in the traceback, as " (model.py, line 12)"; "" if there is none."""
    text = ""
    for frame, line_number in walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        is_user_code = not package_of(file) and "site-packages" not in file
        if is_user_code:
            text = f" ({os.path.basename(file)}, line {line_number})"  # noqa: PTH119
    return text


def _depends_on_values(error: Exception) -> bool:
    """Return whether ``error`` was raised because the step needed the values of fake tensors."""
    kinds: list[type[BaseException]] = [DependsOnValues]
    fakes = FAKES.find_or(None)
    if fakes is not None:
        kinds += [fakes.DataDependentOutputException, fakes.DynamicOutputShapeException]
    return isinstance(error, tuple(kinds)) or _NO_DATA in str(error)


class BeforeSteps(Callback):
    """Runs only those hooks of ``callback`` that Lightning calls before the first step; they may freeze parameters."""

    def __init__(self, callback: Callback, world: FakeWorld) -> None:
        self._callback = callback
        self._world = world
        for hook in ("setup", "on_fit_start", "on_train_start", "on_train_epoch_start"):
            vars(self)[hook] = partial(self._run, hook)

    def _run(self, hook: str, *args: Any, **kwargs: Any) -> None:
        with self._world.inside():
            getattr(self._callback, hook)(*args, **kwargs)


class SilentLogger(DummyLogger):
    """Stands in for any logger: accepts every call and logs nothing. Its ``experiment`` has every attribute."""

    save_dir = log_dir = root_dir = "nowhere"

    @property
    def experiment(self) -> Any:
        return MagicMock()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock()
