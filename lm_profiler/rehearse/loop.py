"""Runs a run's steps on fake tensors, to find the memory and the work of each phase without computing anything.

Lightning's own loop runs, with the module's hooks, precision, clipping and accumulation; only the tensors have no data.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from traceback import walk_tb
from typing import Any
from unittest.mock import MagicMock

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer
from torchmetrics import Metric

from lm_profiler.analysis.plan.planned import Planned, needed
from lm_profiler.callbacks.instruments.memory import MemoryReader
from lm_profiler.callbacks.instruments.work import StepWork, phase_work
from lm_profiler.callbacks.marks.phases import PhaseProfiler
from lm_profiler.measure.boundary import said
from lm_profiler.measure.clocks.timeline import Timeline
from lm_profiler.measure.counts.flops import StepFlops, UncountableError
from lm_profiler.measure.counts.traffic import ForwardTraffic
from lm_profiler.measure.fake.live import Uncounted
from lm_profiler.measure.fake.values import DependsOnValues
from lm_profiler.measure.fake.world import FakeWorld, WouldChange
from lm_profiler.measure.memory.causes import holdings
from lm_profiler.measure.memory.storage_notes import Site, seen_tensors
from lm_profiler.measure.user_code import package_of, user_line
from lm_profiler.record.text import short_path
from lm_profiler.rehearse.strategies import FakeDevice, LinkBytes, Size, buckets, ring_bytes
from lm_profiler.torch_names import BACKWARD_NODE, FAKES, NEXT_NODE_NUMBER, NODE_NUMBER

META = torch.device("meta")  # the device of fake tensors' storages

# yields the size of the next steps' batches, and is sent the bytes that these steps need
Sizes = Generator[Size, int, None]

_UNLIKE_STEPS, _LEAST = 8, 2  # observed steps if steps may differ: at most, if there is time, and at least


class CallSites:
    """Returns the ``Site`` of an operator when called with it, below the dispatcher's autograd.

    An operator of backward has the module and the line of the forward operator whose derivative it computes.
    """

    def __init__(self, module: nn.Module) -> None:
        self._paths = {child: path for path, child in module.named_modules() if path}
        self._running: list[nn.Module] = []
        self._of_node: dict[int, Site] = {}
        self._hooks = ExitStack()
        self._hooks.enter_context(register_module_forward_pre_hook(self._opened))
        self._hooks.enter_context(register_module_forward_hook(self._closed, always_call=True))
        self._node, self._next = BACKWARD_NODE.find_or(lambda: None), NEXT_NODE_NUMBER.find_or(lambda: 0)

    def __call__(self, func: Any) -> Site:
        node, module = self._node(), self._paths.get(self._running[-1]) if self._running else None
        if node is not None and not self._running:
            forward = self._of_node.get(NODE_NUMBER.get_or(node, lambda: -1)(), Site())
            return forward._replace(operator=str(func), recomputes=False)
        own_line = user_line(sys._getframe(2))
        line = None if own_line is None else f"{short_path(own_line[0])}:{own_line[1]}"
        site = Site(str(func), module, line, recomputes=node is not None)
        # Autograd makes an operator's node, and gives it its number, before the operator runs.
        self._of_node[self._next() - 1] = site
        return site

    def stop(self) -> None:
        self._hooks.close()

    def _opened(self, module: nn.Module, args: Any) -> None:
        self._running.append(module)

    def _closed(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._running:  # empty if the step began within this forward
            self._running.pop()


class Look:
    """The observers of one step of a rehearsal, attached when it begins."""

    def __init__(self, of: Rehearsal) -> None:
        self._of, forward, live, module = of, ForwardTraffic(), of.world.live, of.trainer.lightning_module
        live.convolution_bytes, self.notes = 0, live.take_notes()
        live.site = self._sites = CallSites(module)
        for bucket in of.buckets:
            self.notes.learn(seen_tensors("rest", "DDP's bucket", bucket))
        parties = lambda: (module, of.trainer.optimizers)  # noqa: E731
        self._reader = MemoryReader(live, of.timeline, META, parties, forward, self.notes.note_part)
        self._reader.begin("memory")
        self._flops = StepFlops(of.timeline, forward, on_shapes=True)
        of.timeline.observers += (self._flops,)
        of.world.link = self.link = LinkBytes(of.timeline)

    def end(self) -> Mapping[str, Any]:
        self._reader.step_peaks()
        self._reader.end("memory")
        self._of.timeline.unobserve(self._flops)
        self._flops.stop()
        self._of.world.live.notes = None
        self._sites.stop()
        return self._reader.facts

    def work(self) -> StepWork:
        return StepWork(self._flops.flops(), self._flops.by_dtype(), self._reader.facts["traffic"])


@dataclass(eq=False, kw_only=True)
class Rehearsal(Callback):
    """Has Lightning's loop run steps on fake tensors, and observes some of them.

    The first step is not observed: it makes gradients and optimizer states, which later steps find.
    """

    world: FakeWorld  # the fake tensors, among which the module was made
    # the first exception: Lightning then tears down what it has not set up yet, which may raise another
    failed: BaseException | None = None
    bucket_bytes: int | None = None  # bytes of DDP's buckets; None where there are none
    _inside: ExitStack = field(default_factory=ExitStack)
    _left: int = 1 << 20  # steps that are left: more than ``_steps`` ever asks for

    def _steps(self) -> Iterator[None]:
        """Yield where a step begins; resumed where that step has ended. When this returns, the loop ends."""
        raise NotImplementedError

    def _loop_starts(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(trainer.strategy, FakeDevice)
        self._strategy = trainer.strategy
        self.trainer, self.timeline = trainer, Timeline()
        self._course = self._steps()
        self._phases = PhaseProfiler(trainer, self.timeline, self._left, self._step_ended, self, ends=True)
        self._phases.install()
        self._phases.mark_optimizers()
        endless(trainer)
        pl_module.log = partial(_log, trainer)  # type: ignore[method-assign]
        for metric in (part for part in pl_module.modules() if isinstance(part, Metric)):
            metric.validate_args = False  # fake tensors have no values to check
            metric.distributed_available_fn = lambda: False  # nor have other ranks' tensors
        if self.world.gpu is not None:
            _step_together(trainer.optimizers)
        self.world.begin([*pl_module.parameters()], [*pl_module.buffers()])
        self.buckets: list[torch.Tensor] = []
        if self._strategy.has_buckets:
            with self.world.inside():
                self.buckets = buckets(pl_module)
                self.bucket_bytes = sum(each.nbytes for each in self.buckets)
        held = holdings(pl_module, trainer.optimizers, META)
        self._set_up = {**held._asdict(), "rest": self.world.live.held_bytes - held.total}

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.failed = self.failed or exception

    def _step_ended(self) -> int:
        self._left = 0 if next(self._course, _DONE) is _DONE else self._left - 1
        return self._left

    def _batch_starts(self, *_: Any) -> None:
        self._inside.enter_context(self.world.inside())

    def _batch_ends(self, *_: Any) -> None:
        self._inside.close()
        if not self._phases.is_sure:
            self._phases.batch_ended()  # raises if this Lightning has no actions to count steps by

    on_train_start = on_validation_start = on_test_start = on_predict_start = _loop_starts
    # The hooks differ in their arguments, which are not used.
    on_train_batch_start = on_validation_batch_start = _batch_starts  # type: ignore[assignment]
    on_test_batch_start = on_predict_batch_start = _batch_starts  # type: ignore[assignment]
    on_train_batch_end = on_validation_batch_end = _batch_ends  # type: ignore[assignment]
    on_test_batch_end = on_predict_batch_end = _batch_ends  # type: ignore[assignment]


@dataclass(eq=False, kw_only=True)
class RehearsedSizes(Rehearsal):
    # the sizes. Steps of the first size are observed phase by phase; for the others only the peak is read.
    sizes: Sizes
    # whether all steps are known to do the same. Otherwise several are rehearsed, and the largest counts: a module may
    # skip a step now and then, or do more in every other one, and batches may differ.
    alike: bool = False
    enough_s: float = 1.0  # CPU time for these steps, after which no further one begins
    clock: Callable[[], float] = time.process_time  # seconds of CPU time
    seen: list[Planned] = field(default_factory=list)  # the observed steps
    known: bool = False  # whether all required steps were observed

    def _steps(self) -> Iterator[None]:
        self._strategy.size = next(self.sizes)
        until = self.clock() + self.enough_s
        while self._wants_more(until):
            look = Look(self)
            yield
            self.seen.append(self._seen(look))
        self.known = True
        peaks = [step.peak for step in self.seen]
        peak, times, live = max(peaks), 1 if len({*peaks}) == 1 else len(peaks), self.world.live
        with suppress(StopIteration):
            while True:
                self._strategy.size, peak = self.sizes.send(needed(peak, live.peaks()[1])), 0
                live.give_back_unused()
                for _ in range(times):
                    live.reset()
                    yield
                    peak = max(peak, live.peaks()[0] or 0)

    def _wants_more(self, until: float) -> bool:
        few = len(self.seen) < (1 if self.alike else _UNLIKE_STEPS)
        return few and (len(self.seen) < _LEAST or self.clock() < until)

    def _seen(self, look: Look) -> Planned:
        facts = look.end()
        peaks = {phase: of[0] or 0 for phase, of in facts["part_peaks"].items()}
        if self.world.gpu is None and self.world.live.convolution_bytes > _SURE * max(peaks.values()):
            raise Uncounted("what the CPU's kernels of convolutions hold amid their work is unknown")
        work, sent, module = None, Counter(look.link.by_phase), self.trainer.lightning_module
        with suppress(UncountableError):
            work = replace(look.work(), traffic=None)
        batch_bytes = self._strategy.batch_bytes * self.trainer.accumulate_grad_batches
        if self._strategy.reduces:  # DDP's own reducer, which sends them, is missing
            trained = sum(each.nbytes for each in module.parameters() if each.requires_grad)
            sent["backward"] += ring_bytes("allreduce", trained, self._strategy.ranks)
        return Planned(
            peaks=peaks,
            causes=facts["causes"],
            held=facts["levels"],
            work=phase_work(self.trainer, work, facts["traffic"], batch_bytes),
            timeline=look.notes.timeline("planned").model_copy(update={"set_up": self._set_up}),
            reserved=self.world.live.peaks()[1],
            gathered=self.world.live.most_gathered,
            sent={phase: count for phase, count in sent.items() if count},
        )


_SURE = 1.05  # a peak that may be too low by a larger factor is not reported

_DONE = object()


def endless(trainer: Trainer) -> None:
    """Remove the loop's limits, which learning-rate schedules have already asked for."""
    trainer.fit_loop.max_epochs, trainer.fit_loop.epoch_loop.max_steps = -1, -1
    configs = trainer.strategy.lr_scheduler_configs  # a schedule would not find the metric that it monitors
    configs[:] = [config for config in configs if not config.reduce_on_plateau]


def _step_together(optimizers: Sequence[Optimizer]) -> None:
    """Have optimizers use their multi-tensor (foreach) variants, as they would by default with real tensors on a GPU.

    Adafactor would not (torch/optim/_adafactor.py), nor optimizers with a learning rate in a tensor.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            chosen = group.get("fused") or group.get("differentiable") or isinstance(group.get("lr"), torch.Tensor)
            if group.get("foreach", False) is None and not chosen and type(optimizer).__name__ != "Adafactor":
                group["foreach"] = True


def _log(trainer: Trainer, name: str, value: Any, *_: object, **__: object) -> None:
    """Replace a module's ``log``: keep the value in ``callback_metrics``, and log nothing."""
    if not isinstance(value, Metric):
        kept = value.detach() if isinstance(value, torch.Tensor) else value
        trainer.callback_metrics[name] = kept


_NO_DATA = "its data is not allocated yet"  # the text of torch's error if a kernel reads values itself


def reason_of(error: Exception) -> str:
    """Return why a step cannot be rehearsed, with the line of the user's code."""
    while isinstance(error.__cause__, Exception):  # the parser wraps errors of classes that it builds
        error = error.__cause__
    files = [(f.f_code.co_filename, f.f_lineno) for f, _ in walk_tb(error.__traceback__)]
    theirs = [(name, line) for name, line in files if not package_of(name) and "site-packages" not in name]
    where = f" ({os.path.basename(theirs[-1][0])}, line {theirs[-1][1]})" if theirs else ""  # noqa: PTH119
    fakes = FAKES.find_or(None)
    asked = () if fakes is None else (fakes.DataDependentOutputException, fakes.DynamicOutputShapeException)
    depends = isinstance(error, (DependsOnValues, *asked))
    if depends or _NO_DATA in str(error):
        return f"its work depends on values, which are unknown without running it{where}"
    if isinstance(error, WouldChange):
        return f"{error}{where}"
    if isinstance(error, Uncounted):
        return str(error)
    return f"{said(error)}{where}"


class BeforeSteps(Callback):
    """Runs only those hooks of ``callback`` that come before the first step, as for freezing a part of the module."""

    def __init__(self, callback: Callback, world: FakeWorld) -> None:
        self._callback, self._world = callback, world
        for hook in ("setup", "on_fit_start", "on_train_start", "on_train_epoch_start"):
            vars(self)[hook] = partial(self._run, hook)

    def _run(self, hook: str, *given: Any, **named: Any) -> None:
        with self._world.inside():
            getattr(self._callback, hook)(*given, **named)


class SilentLogger(DummyLogger):
    """Replaces any logger: takes every call, and keeps nothing. Its ``experiment`` has every attribute and method."""

    save_dir = log_dir = root_dir = "nowhere"

    @property
    def experiment(self) -> Any:
        return MagicMock()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock()
