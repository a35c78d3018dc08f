"""Profiles a loop without a Lightning Trainer: ``with profile(model, optimizer) as run: ...``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

from torch import nn
from torch.optim import Optimizer

from lm_profiler.callbacks.found_loop import (
    FrameworkFacts,
    find_framework,
    find_modules,
    outermost_wrapper,
)
from lm_profiler.callbacks.hooked_loop import HookedLoop
from lm_profiler.callbacks.hooked_run import HookedRun, LoopSearch, begin
from lm_profiler.callbacks.instruments.profiling_options import (
    ActionsOptions,
    ExportOptions,
    Launch,
    MemoryOptions,
    NumericsOptions,
    ProfilingOptions,
    StageOptions,
    TraceOptions,
    TrackedFigures,
    WatchOptions,
    expect_step_numbers,
)
from lm_profiler.callbacks.marks.hook_marks import NESTED_DATA, HookMarks
from lm_profiler.callbacks.marks.torch_hooks import OPTIMIZER_HOOKS
from lm_profiler.measure.boundary import print_message
from lm_profiler.record.parts import PHASES
from lm_profiler.record.run_record import RunRecord
from lm_profiler.usage_error import expect, expect_one_of

Batch = TypeVar("Batch")

_NOTHING_STEPPED = (
    "profile(): no optimizer stepped inside, so nothing was profiled; a compiled step or a CUDA graph calls no hooks: "
    "use profile(model, optimizer), and name the phases with run.phase(...)"
)


class ProfiledLoop:
    """A loop that is profiled. Phases that the program does not name are found automatically.

    ``record`` is the run's record once it is written, and ``folder`` the run's folder. Both are None before that, and
    if the loop is not profiled.
    """

    def __init__(self, get_run: Callable[[], HookedRun | None]) -> None:
        self._get_run = get_run
        self._open_loops = 0  # the number of loops over ``data`` that have not ended

    @property
    def record(self) -> RunRecord | None:
        run = self._get_run()
        return None if run is None else run.record

    @property
    def folder(self) -> Path | None:
        run = self._get_run()
        return None if run is None else run.folder

    def data(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Iterate over ``batches``, of any kind. A step begins when the loop requests a batch."""
        run = self._get_run()
        if run is not None and run.loop.given_loader is None:
            run.loop.given_loader = batches
        if self._open_loops > 0:
            self._report_nested_loop()
        self._open_loops += 1
        try:
            yield from self._marked_batches(iter(batches))
        finally:
            self._open_loops -= 1

    def _report_nested_loop(self) -> None:
        """Report that ``data`` is iterated over within another ``data``."""
        marks = self._marks()
        if marks is None:  # because the loop was not found yet
            print_message(NESTED_DATA)
        else:
            marks.report_nested_loop()

    def _marked_batches(self, iterator: Iterator[Batch]) -> Iterator[Batch]:
        """Yield the batches of ``iterator``, each marked as the phase data."""
        while True:
            marks = self._marks()
            try:
                batch = next(iterator) if marks is None else marks.fetch(next, iterator)
            except StopIteration:
                return
            try:
                yield batch
            except GeneratorExit:  # the program leaves its loop
                if marks is not None:
                    marks.leave_loop()
                raise

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Return a context whose code counts as the phase ``name``, whatever it calls.

        Raises:
            UsageError: there is no phase of this name.
        """
        expect_one_of(PHASES, "phase", name)
        marks = self._marks()
        if marks is None:
            return nullcontext()
        return _NamedPhase(marks, PHASES.index(name))

    def _marks(self) -> HookMarks | None:
        run = self._get_run()
        return None if run is None else run.loop.marks


class _NamedPhase(AbstractContextManager[None]):
    """The context of a phase that the program names; it does nothing if the phase is not marked."""

    def __init__(self, marks: HookMarks, code: int) -> None:
        self._marks = marks
        self._code = code
        self._is_marked = False

    def __enter__(self) -> None:
        self._is_marked = self._marks.begin_phase(self._code)

    def __exit__(
        self, kind: object, error: BaseException | None, traceback: object
    ) -> None:
        if self._is_marked:
            self._marks.end_phase(self._code, error)


@contextmanager
def profile(
    *parties: nn.Module | Optimizer,
    tokens_in: Callable[[Any], int] | None = None,
    warmup_steps: int = 5,
    measure_steps: int | None = None,
    trace_steps: int = 2,
    memory_steps: int = 1,
    action_steps: int = 3,
    name: str = "lm_profiler",
    log_dir: str | Path = "logs",
    verbose: bool = False,
    quiet: bool = False,
    export_trackers: TrackedFigures = False,
) -> Iterator[ProfiledLoop]:
    """Profile the training loop that runs inside the ``with`` block, in this thread. The loop runs to its own end.

    Without ``parties`` it is the loop of the first optimizer that steps inside, such as that of transformers' Trainer.

    Args:
        parties: the models and optimizers of the loop.
        tokens_in: returns the number of tokens of a batch; if not given, tokens are the size of ``input_ids``.
        warmup_steps: steps before the measured ones.
        measure_steps: steps to measure; if not given, at least 40 steps and 10 s, but at most a minute.
        trace_steps: steps to trace with torch.profiler afterwards; 0 for none.
        memory_steps: steps in which memory is measured by phase, and FLOPs are counted; 0 for none.
        action_steps: steps in which the time outside of all phases is divided; 0 for none.
        name: name of the run.
        log_dir: folder of all runs; the folder of this run is ``<name>/version_<n>`` below it.
        verbose: print all figures at the end, not only the most important ones.
        quiet: print neither progress nor the table.
        export_trackers: log the figures of the usual table to Fabric's own loggers, after the stages.

    Raises:
        UsageError: an option is wrong, or ``parties`` contains something other than models and optimizers.
    """
    for party in parties:
        is_party = isinstance(party, (nn.Module, Optimizer))
        expect(is_party, "profile", "models and optimizers", type(party).__name__)
    options = loop_options(
        warmup_steps=warmup_steps,
        measure_steps=measure_steps,
        trace_steps=trace_steps,
        memory_steps=memory_steps,
        action_steps=action_steps,
        log_dir=log_dir,
        verbose=verbose,
        quiet=quiet,
        export_trackers=export_trackers,
        launch=Launch(name=name),
    )
    with profile_with(options, parties, tokens_in) as profiled:
        yield profiled


@contextmanager
def profile_with(
    options: ProfilingOptions,
    parties: Iterable[nn.Module | Optimizer] = (),
    tokens_in: Callable[[Any], int] | None = None,
) -> Iterator[ProfiledLoop]:
    """Do what ``profile`` does, with any ``options``."""
    parties = list(parties)
    search = LoopSearch(options, tokens_in=tokens_in)
    if parties and not OPTIMIZER_HOOKS.is_taken:
        search.run = begin(_loop_of(parties, tokens_in), options)
    else:
        search.start()  # reports if another loop is profiled
    try:
        yield ProfiledLoop(lambda: search.run)
    except BaseException as error:
        if search.run is not None:
            search.run.end(error)
        raise
    finally:
        search.stop()
        if search.run is not None:
            search.run.end()
        elif not search.has_reported:
            print_message(_NOTHING_STEPPED)


def _loop_of(
    parties: Iterable[Any], tokens_in: Callable[[Any], int] | None
) -> HookedLoop:
    """Return the loop of the arguments of ``profile()``: models, optimizers, or Fabric's wrappers of them."""
    modules: list[nn.Module] = []
    optimizers: list[Any] = []
    for party in parties:
        if isinstance(party, nn.Module):
            modules.append(outermost_wrapper(party))
        elif isinstance(party, Optimizer):
            # Fabric and accelerate wrap optimizers. torch calls the hooks of the optimizer inside the wrapper.
            optimizers.append(getattr(party, "optimizer", party))
    if not modules:
        for optimizer in optimizers:
            modules += find_modules(optimizer)
    framework = FrameworkFacts()
    is_of_framework = any(_is_of_framework(party) for party in parties)
    if is_of_framework:
        framework = find_framework(modules)
    return HookedLoop(modules, optimizers, framework, tokens_in=tokens_in)


def _is_of_framework(party: object) -> bool:
    packages = {kind.__module__.partition(".")[0] for kind in type(party).__mro__}
    return bool(packages & {"lightning", "lightning_fabric", "accelerate"})


def loop_options(
    warmup_steps: int = 5,
    measure_steps: int | None = None,
    trace_steps: int = 2,
    memory_steps: int = 1,
    action_steps: int = 3,
    log_dir: str | Path = "logs",
    verbose: bool = False,
    quiet: bool = False,
    export_trackers: TrackedFigures = False,
    watch: bool = False,
    launch: Launch | None = None,
    clock: Callable[[], int] = time.perf_counter_ns,
) -> ProfilingOptions:
    """Return the options of a loop without a Trainer; raise UsageError if one is wrong."""
    expect_step_numbers(
        warmup_steps=warmup_steps,
        measure_steps=measure_steps,
        trace_steps=trace_steps,
        memory_steps=memory_steps,
        action_steps=action_steps,
    )
    options = ProfilingOptions(
        stages=StageOptions(
            warmup_steps=warmup_steps, measure_steps=measure_steps, stop_when_done=False
        ),
        actions=ActionsOptions(steps=action_steps),
        memory=MemoryOptions(steps=memory_steps),
        trace=TraceOptions(steps=trace_steps),
        launch=launch or Launch(),
        peak_flops_per_s=None,
        clock=clock,
        quiet=quiet,
        verbose=verbose,
        numerics=NumericsOptions(),
        verb="fit",
        log_dir=Path(log_dir),
        export=ExportOptions(trackers=export_trackers),
        watch=WatchOptions() if watch else None,
    )
    options.check()
    return options
