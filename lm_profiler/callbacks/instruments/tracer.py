"""Records a torch.profiler trace of whole steps, with ranges of phases and modules, in a stage after all timing."""

from __future__ import annotations

import ctypes
import gzip
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd import profiler as autograd_profiler
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from lm_profiler.analysis.trace.kernel_sums import kernel_table
from lm_profiler.analysis.trace.pieces import TracedWork, read_traced_work
from lm_profiler.analysis.trace.range_names import (
    module_range_name,
    phase_range_name,
    repeated_range_name,
)
from lm_profiler.callbacks.instruments.instrument import Instrument
from lm_profiler.callbacks.instruments.profiling_options import TraceOptions
from lm_profiler.callbacks.instruments.repeated_calls import CallsOfStep
from lm_profiler.callbacks.instruments.torch_sessions import (
    close_open_ranges,
    is_called_by_torch,
    is_session_taken,
    keep_from_starting,
)
from lm_profiler.callbacks.marks.torch_hooks import is_within_optimizer_step
from lm_profiler.measure.boundary import UNGUARDED, Guard
from lm_profiler.measure.clocks.tape import OUTSIDE
from lm_profiler.measure.clocks.timeline import Timeline
from lm_profiler.measure.code_parts import PART_TYPE, open_ranges_with
from lm_profiler.measure.counts.recompiles import is_compiled
from lm_profiler.record.kernels import KernelTable, kernels_file
from lm_profiler.record.parts import BETWEEN_STEPS, NO_PHASE, PHASES
from lm_profiler.record.quantities import count_text
from lm_profiler.torch_names import PREPARE_TRACE

# devices whose kernels torch.profiler records, besides the host's operators
TRACED = {"cuda": ProfilerActivity.CUDA, "xpu": ProfilerActivity.XPU}

# matches what torch's wrappers insert into a module's path, such as ``_fsdp_wrapped_module.``
_WRAPPERS = re.compile(r"_[a-z]+_wrapped_module\.")

# The names of ranges by the codes of parts. Work between steps, such as a validation, has a range too, so that it does
# not count as work of a step.
_RANGES = {**dict(enumerate(PHASES)), OUTSIDE: BETWEEN_STEPS}

# why there is no trace if, for example, hooks of gradients call the optimizer
_STEPS_END_IN_TORCH = (
    "the steps of this loop end within a backward pass, an operator or another thread, "
    "where torch.profiler cannot begin or end"
)


@dataclass(frozen=True)
class _OpenPhase:
    """A range that is open."""

    code: int
    depth: int  # how many nested optimizer steps were running when it was opened


class PhaseRanges:
    """Observer of marks that opens a range for each phase. It may run in timed steps, so it uses no context managers.

    torch has a range of its own around every optimizer step, and ranges must nest. So a range that is open when an
    optimizer step begins (``enter_optimizer_step``) stays open until the step ends (``leave_optimizer_step``). The
    parts in between have ranges inside of it, even if they are in no phase.

    Args:
        push: opens a range with a name.
        pop: closes the innermost range.
    """

    def __init__(
        self, push: Callable[[str], object], pop: Callable[[], object]
    ) -> None:
        self._push = push
        self._pop = pop
        self._open: list[_OpenPhase] = []
        # the number of nested optimizer steps that are running; an optimizer may call another one
        self._depth = 0
        # Optimizers in other threads are ignored: only this thread has phases.
        self._thread = get_ident()

    def __call__(self, code: int) -> None:
        """Close the range of the phase that ended, and open the range of the part with this ``code``."""
        self._close_ranges_of(self._depth)
        has_outer_range = len(self._open) > 0
        if has_outer_range and self._open[-1].code == code:
            return
        if code in _RANGES:
            self._push(_RANGES[code])
        elif has_outer_range:
            self._push(NO_PHASE)
        else:
            return
        self._open.append(_OpenPhase(code, self._depth))

    def enter_optimizer_step(self, *hook_arguments: Any) -> None:
        if get_ident() == self._thread:
            self._depth += 1

    def leave_optimizer_step(self, *hook_arguments: Any) -> None:
        if get_ident() == self._thread:
            self._close_ranges_of(self._depth)
            self._depth -= 1

    def _close_ranges_of(self, depth: int) -> None:
        """Close the ranges that were opened at this ``depth`` of optimizer steps, or deeper."""
        while self._open and self._open[-1].depth >= depth:
            self._open.pop()
            self._pop()


class TraceRanges:
    """Opens and closes the ranges of phases in a trace."""

    def __init__(self) -> None:
        self._open: list[record_function] = []

    def push(self, part: str) -> None:
        trace_range = record_function(phase_range_name(part))
        trace_range.__enter__()
        self._open.append(trace_range)

    def pop(self) -> None:
        trace_range = self._open.pop()
        trace_range.__exit__(None, None, None)


class _OpenRanges(threading.local):
    """The open ranges of each thread; the autograd engine recomputes checkpointed modules in its own thread."""

    def __init__(self) -> None:
        # each module whose call runs, with its ranges; the innermost last
        self.open: list[tuple[nn.Module, list[record_function]]] = []


class _RangeNames(NamedTuple):
    """Names of the ranges around the calls of a module."""

    # the name of the range around every call; None for the trained module itself, whose calls have no range
    call: str | None
    # the name of the range around a call with the same inputs as an earlier one in the step
    repeated: str


class ModuleRanges:
    """Opens a range (``module_range_name``) around every forward pass below ``module``, until ``detach``.

    If one of these modules, or ``module`` itself, is called with the same inputs again in a step, that call has a
    second range around it (``repeated_range_name``). ``end_step`` must be called between steps.

    Compiled modules and their parts have no ranges, because a hook would cause a recompilation.
    """

    def __init__(self, guard: Guard = UNGUARDED) -> None:
        self._guard = guard
        self._hooks = ExitStack()
        self._threads = _OpenRanges()
        self._calls = CallsOfStep()

    def attach(self, module: nn.Module) -> None:
        """Add hooks that open and close ranges to ``module`` and to all called modules below it."""
        close_ranges = self._guard.wrap(self._close)
        for path, child in _called_modules(module):
            type_name = type(child).__name__
            names = _RangeNames(
                call=module_range_name(path, type_name) if path else None,
                repeated=repeated_range_name(path, type_name),
            )
            open_ranges = self._guard.wrap(partial(self._open, names))
            # They run before and after all hooks of the user. `always_call` closes the ranges even if forward raises.
            self._hooks.enter_context(
                child.register_forward_pre_hook(
                    open_ranges, prepend=True, with_kwargs=True
                )
            )
            self._hooks.enter_context(
                child.register_forward_hook(close_ranges, always_call=True)
            )

        open_ranges_with(self._part_range)

    def leave_optimizer_step(self, optimizer: Any) -> None:
        """Forget the calls of the modules that ``optimizer`` trains."""
        self._calls.forget_trained(optimizer)

    def end_step(self) -> None:
        """Forget the calls of the step that ends."""
        self._calls.clear()

    def detach(self) -> None:
        """Remove the hooks of the modules, and close the ranges that are still open."""
        open_ranges_with(None)
        self._hooks.close()
        for _, ranges in reversed(self._threads.open):
            _close_all(ranges)
        self._threads.open.clear()

    def _part_range(self, name: str) -> AbstractContextManager[Any]:
        """Return the range of a part that the program marks (``lm_profiler.part``)."""
        if torch.compiler.is_compiling():
            return nullcontext()
        return record_function(module_range_name(name, PART_TYPE))

    def _open(
        self,
        names: _RangeNames,
        module: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        """Open the ranges of a call of ``module``: with its name, and around it for inputs that it had before."""
        if torch.compiler.is_compiling():
            return
        ranges: list[record_function] = []
        self._threads.open.append((module, ranges))
        if self._calls.add(module, args, kwargs):
            ranges.append(record_function(names.repeated))
        if names.call is not None:
            ranges.append(record_function(names.call))
        for range_ in ranges:
            range_.__enter__()

    def _close(self, module: nn.Module, args: Any, output: Any) -> None:
        """Close the ranges of the call of ``module`` that ends."""
        if torch.compiler.is_compiling():
            return
        stack = self._threads.open
        has_ranges = any(open_module is module for open_module, _ in stack)
        if not has_ranges:
            return
        # Ctrl-C may have left ranges of inner modules open.
        open_module = None
        while open_module is not module:
            open_module, ranges = stack.pop()
            _close_all(ranges)


def _close_all(ranges: Sequence[record_function]) -> None:
    """Close nested ``ranges``, which were opened in this order."""
    for range_ in reversed(ranges):
        range_.__exit__(None, None, None)


def _called_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the path and the module, each once, of ``module`` and all modules below it that have a forward pass.

    The path of ``module`` itself is empty. Compiled modules and their parts are left out.
    """
    compiled_modules: set[nn.Module] = set()
    for submodule in module.modules():
        if is_compiled(submodule):
            compiled_modules.update(submodule.modules())
    for path, submodule in module.named_modules(memo=compiled_modules):
        # A ModuleList, for example, is never called.
        is_called = type(submodule).forward is not nn.Module.forward
        if is_called:
            yield _WRAPPERS.sub("", path), submodule


@dataclass(eq=False)
class Tracer(Instrument):
    """Runs torch.profiler over whole steps and writes the trace to ``trace/rank<n>.pt.trace.json.gz``.

    TensorBoard's PyTorch plugin looks for this name, and Perfetto can open the file.
    """

    options: TraceOptions  # the options that state how much is traced
    device: torch.device  # the device whose kernels are traced
    timeline: Timeline  # the timeline, whose marks name the phases
    folder: Path  # the folder of the run
    rank: int  # the rank of this process
    # returns the module whose parts are named in the trace; called when the module exists
    module: Callable[[], nn.Module]
    is_profiler_taken: bool = False  # whether the user has a profiler of torch's own, which may begin at any time
    label: str = ""  # follows the rank in the file's name, such as ``.step500`` for a trace during training
    name = "trace"
    stage = "trace"
    _profile: profile | None = None
    _modules: ModuleRanges | None = None
    _optimizer_hooks: ExitStack = field(default_factory=ExitStack)
    _session: ExitStack = field(default_factory=ExitStack)  # ends our session
    _is_session_open: bool = False
    _thread: int = 0  # the thread of our session
    _has_lost_session: bool = False  # whether a session of the program could not begin

    @property
    def path(self) -> Path:
        return self.folder / "trace" / f"rank{self.rank}{self.label}.pt.trace.json.gz"

    def start(self) -> None:
        """Start torch's profiler, with ranges for phases and modules, unless another profiler runs in this process."""
        if self.is_profiler_taken or is_session_taken():
            # torch allows one session per process: a second one would end the user's session, or the process.
            self.guard.disable(
                "torch.profiler is already running in this process, and only one session is possible"
            )
            return
        if is_called_by_torch():
            self.guard.disable(_STEPS_END_IN_TORCH)
            return
        # Otherwise ranges that began in an earlier session of the program would end in ours.
        close_open_ranges()
        tracing = self._started_profile()
        self._session.callback(tracing.stop)
        self._is_session_open = True
        self._thread = get_ident()
        self._profile = tracing
        self._open_ranges_of_phases()
        modules = ModuleRanges(self.guard)
        self._undo.callback(modules.detach)
        modules.attach(self.module())
        self._modules = modules
        self._give_way_to_others()

    def _started_profile(self) -> profile:
        """Start torch's profiler with the ``options``, and return it."""
        activities = [ProfilerActivity.CPU]
        if self.device.type in TRACED:
            activities.append(TRACED[self.device.type])
        # The profiler's first step is slow, so it is a warm-up step, which is discarded.
        tracing = profile(
            activities=activities,
            schedule=schedule(wait=0, warmup=1, active=self.options.steps, repeat=1),
            record_shapes=self.options.record_shapes,
            with_stack=self.options.with_stack,
            profile_memory=self.options.profile_memory,
            acc_events=True,  # otherwise torch before 2.13 warns of a second cycle that never comes
        )
        tracing.start()
        if tracing.profiler is not None:
            # Otherwise torch would parse all events into objects, which are not needed.
            tracing.profiler.acc_events = False
            with suppress(AttributeError):
                # Before torch 2.13 it parses them anyway, at 800 bytes each, unless this is set.
                tracing.profiler.experimental_config.trace_only = (
                    not self.options.with_stack
                )
        return tracing

    def _open_ranges_of_phases(self) -> None:
        """Open a range of the trace for each phase of the timeline from now on."""
        trace_ranges = TraceRanges()
        phases = PhaseRanges(trace_ranges.push, trace_ranges.pop)
        before_step = register_optimizer_step_pre_hook(
            self.guard.wrap(phases.enter_optimizer_step)
        )
        self._optimizer_hooks.callback(before_step.remove)
        after_step = register_optimizer_step_post_hook(
            self.guard.wrap(partial(self._leave_optimizer_step, phases))
        )
        self._optimizer_hooks.callback(after_step.remove)
        self.observe(self.timeline, phases)

    def _leave_optimizer_step(
        self, phases: PhaseRanges, optimizer: Any, *hook_arguments: Any
    ) -> None:
        """Note that ``optimizer`` has stepped: in one hook, because each must be removed outside of all hooks."""
        phases.leave_optimizer_step(optimizer)
        if self._modules is not None:
            self._modules.leave_optimizer_step(optimizer)

    def _give_way_to_others(self) -> None:
        """End our session before another one starts, such as one of the user's callbacks: two would end the process.

        A session of torch.profiler is prepared before it starts; ``emit_nvtx`` and ``emit_itt`` start without that.
        """
        # raises if this version of torch has no such method
        PREPARE_TRACE.get(autograd_profiler.profile)
        # the methods with which sessions begin
        beginnings: list[tuple[type, str]] = [
            (autograd_profiler.profile, PREPARE_TRACE.name),
            (autograd_profiler.emit_nvtx, "__enter__"),
            (autograd_profiler.emit_itt, "__enter__"),
        ]
        for session_class, name in beginnings:
            method = getattr(session_class, name)
            setattr(session_class, name, self._after_giving_way(method))
            self._session.callback(setattr, session_class, name, method)

    def _after_giving_way(self, method: Callable[..., object]) -> Callable[..., object]:
        """Return ``method`` of another session, before which ours ends."""

        def give_way_first(session: Any, *args: Any) -> object:
            if session.enabled:  # a disabled one does nothing
                self.guard.end(self._give_way)
                if self._is_session_open:
                    keep_from_starting(session)
                    self._report_lost_session()
                    return session
            return method(session, *args)

        return give_way_first

    def _give_way(self) -> None:
        """End our session of the profiler, if that is possible here, because another one begins."""
        if self._can_end_session():
            self.discard()
            self.guard.disable(
                "another session of torch.profiler began, and only one session is possible"
            )

    def _can_end_session(self) -> bool:
        """Return whether torch lets our session end here.

        It does only in the thread that began the session, and outside of Python functions that torch's C++ code calls.
        """
        return get_ident() == self._thread and not is_called_by_torch()

    def _report_lost_session(self) -> None:
        """Report, once, that a session of the program records nothing."""
        if not self._has_lost_session:
            self._has_lost_session = True
            self.guard.report(
                f"{self.guard.name}: a session of torch.profiler that the program began meanwhile recorded nothing, "
                "because it began within an operator, a backward pass or another thread"
            )

    def step(self) -> None:
        """Begin the next step of the profiler, because a step of the stage has ended and another follows."""
        if self._profile is None:
            return
        if not self._can_end_session():
            self._profile = None
            self.guard.disable(_STEPS_END_IN_TORCH)
            return
        if self._profile.step_num == 0 and self.device.type in TRACED:
            # Otherwise work that is queued in the warm-up step would run in the first traced step.
            torch.accelerator.synchronize(self.device)
        self._profile.step()
        if self._modules is not None:
            self._modules.end_step()

    def result(self) -> Mapping[str, Any]:
        """End the session and write its trace to ``path``; there are no facts."""
        profile = self._profile
        self.discard()  # ends the session; its events stay in ``profile``
        if profile is None:
            return {}
        if self._is_session_open:
            self.guard.disable(_STEPS_END_IN_TORCH)
            return {}
        self._write(profile)
        return {}

    def _write(self, profile: profile) -> None:
        """Write the events of ``profile`` to ``path``, compressed, and free them."""
        self.path.parent.mkdir(exist_ok=True)
        # In a temporary folder, which is removed with its content: torch writes a second file beside the requested one,
        # and leaves it behind if the disk is full.
        with TemporaryDirectory(
            dir=self.path.parent, prefix=".writing-", ignore_cleanup_errors=True
        ) as folder:
            plain_file = Path(folder, "trace.json")
            compressed_file = Path(folder, self.path.name)
            profile.export_chrome_trace(str(plain_file))
            # The inner profiler holds all events, 3 kB each. It is in a reference cycle, so without this line it would
            # exist until the next garbage collection.
            profile.profiler = None
            # glibc keeps freed memory: 150 MB after 60,000 events. Other C libraries lack this function.
            with suppress(AttributeError):
                ctypes.CDLL(None).malloc_trim(0)
            # Compressed here and not by torch, at a level that takes a tenth of the time and makes the file a third
            # larger.
            with (
                plain_file.open("rb") as source,
                gzip.open(compressed_file, "wb", compresslevel=3) as target,
            ):
                shutil.copyfileobj(source, target)
            compressed_file.replace(self.path)

    def work(self, notes: list[str]) -> TracedWork | None:
        """Return the work in the traced steps; None without a trace, and, with a note, if it has no whole step."""
        work = read_traced_work(self.path)
        if work is None:
            if self.path.exists():
                notes.append(
                    "no kernels and no waterfall: the run ended before a traced step was complete"
                )
            return None
        for damage, events in work.packed.damaged_events.items():
            notes.append(f"trace: {count_text(events, 'event')} {damage} left out")
        return work

    def kernels(self, work: TracedWork | None) -> KernelTable | None:
        """Write the table of kernels in the traced steps beside the trace, and return it; None without a trace."""
        if work is None:
            return None
        table = kernel_table(work)
        table.write(kernels_file(self.path))
        return table

    def discard(self) -> None:
        """End the session without a result, and remove all hooks.

        torch iterates over the hooks of optimizers themselves, so within an optimizer's step these hooks stay until
        this is called again. A guard that is disabled does not call their functions. The session stays too, where it
        cannot end.
        """
        self._profile = None
        super().discard()
        if self._is_session_open and self._can_end_session():
            # Otherwise ranges that began in our session would end in one that the program begins next.
            close_open_ranges()
            self._session.close()
            # Only now: if closing fails, the next call tries again.
            self._is_session_open = False
        if not is_within_optimizer_step():
            self._optimizer_hooks.close()
