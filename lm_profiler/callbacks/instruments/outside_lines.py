"""Finds the lines of the program in which validations and epoch boundaries spend most of their time.

The stack of the training thread is sampled for that.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Collection, Mapping
from threading import Event, Thread, get_ident
from traceback import walk_stack
from types import FrameType

from torch import nn

from lm_profiler.callbacks.instruments.instrument import Instrument
from lm_profiler.measure.clocks import tape
from lm_profiler.measure.clocks.timeline import Timeline
from lm_profiler.measure.user_code import package_of, user_lines
from lm_profiler.record.operator_calls import CodeLine
from lm_profiler.record.run_record import EPOCH, FIRST_BATCH, VALIDATION

# Sampling costs some 0.1 ms each time, which is 1 % of a validation.
_EVERY_S = 0.01
_FEWEST_SAMPLES = 8
_LOADERS = "/torch/utils/data/"  # the folder of torch's code of loaders
# the codes of the parts that a step begins with, until its batch has arrived
_CODES_BEFORE_BATCH = {tape.DATA, tape.OTHER, tape.OUTSIDE}
_FORWARD_METHOD = "forward"
_LARGE_SHARE = 0.5  # the share of the samples that a function must have

# the lines of the program on the stack, the outermost first
_Stack = tuple[CodeLine, ...]
_Function = tuple[str, str]  # the file and the name of a function


class OutsideLines(Instrument):
    """Samples the stack of the training thread during validations, and from the end of an epoch to the next batch.

    It samples in a thread of its own, which sleeps until the loop leaves its steps, so that it does not disturb them.
    """

    name = "lines outside of steps"

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._training_thread = get_ident()
        # the number of samples of each stack
        self._validation_stacks: Counter[_Stack] = Counter()
        self._epoch_stacks: Counter[_Stack] = Counter()
        # the functions of the program that ran when the stage began, which is between two steps of its loop
        self._functions_of_loop: set[_Function] = set()
        self._has_left_step = Event()
        self._stage_is_over = Event()
        self._sampler: Thread | None = None

    def begin(self, stage: str) -> None:
        """Start the sampling thread, which sleeps until the timeline reports that the loop has left its steps."""
        self._functions_of_loop = set()
        for line in _stack_of(sys._getframe()):
            self._functions_of_loop.add((line.file, line.function))
        self._stage_is_over.clear()
        self._has_left_step.clear()
        self._timeline.left_step = self._has_left_step.set
        self._sampler = Thread(target=self._sample, name=self.name, daemon=True)
        self._sampler.start()

    def end(self, stage: str) -> None:
        """Stop sampling, and keep the costliest line of each activity outside of steps."""
        self._stop()
        epoch_line = costliest_line(self._epoch_stacks)
        self.facts["lines_outside"] = {
            VALIDATION: costliest_line(self._validation_stacks),
            EPOCH: epoch_line,
            FIRST_BATCH: epoch_line,
        }
        self.facts["callers_outside"] = {
            VALIDATION: calling_line(self._validation_stacks, self._functions_of_loop)
        }

    def discard(self) -> None:
        self._stop()

    def _stop(self) -> None:
        """End the sampling thread, if it runs: wake it, so that it sees that the stage is over."""
        sampler = self._sampler
        self._sampler = None
        if sampler is not None:
            self._stage_is_over.set()
            self._has_left_step.set()
            sampler.join()

    def _sample(self) -> None:
        """Sample the stack outside of steps, until the stage is over; this runs in the sampling thread."""
        is_over = self._stage_is_over.is_set
        while not is_over():
            self._has_left_step.wait()
            self._has_left_step.clear()
            while not is_over() and self._timeline.is_outside_for(VALIDATION):
                self._add_sample(self._validation_stacks)
            boundary = _EpochBoundary(self._timeline)
            while not is_over() and boundary.is_going_on():
                self._add_sample(self._epoch_stacks)

    def _add_sample(self, stacks: Counter[_Stack]) -> None:
        """Add the present stack of the training thread to ``stacks``, and wait for the time of the next sample."""
        frame = sys._current_frames().get(self._training_thread)
        if frame is not None:
            stacks[_stack_of(frame)] += 1
        del frame  # it would keep the objects of the functions alive
        time.sleep(_EVERY_S)


class _EpochBoundary:
    """The time from the end of an epoch until the first batch of the next one has arrived, for the sampling thread."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        # when the first step after the boundary began
        self._first_begin_ns: int | None = None

    def is_going_on(self) -> bool:
        """Return whether the loop has left its steps for the end of an epoch, and no batch has arrived since.

        The first call during a step takes that as the first step after the boundary.
        """
        if not self._timeline.has_left_for(EPOCH):
            return False
        reading = self._timeline.read_without_change()
        if not reading.is_step_running:
            return True
        codes = reading.step.codes
        begin_ns = reading.step.host_ns[0]
        if self._first_begin_ns is None:
            self._first_begin_ns = begin_ns
        is_first_step = begin_ns == self._first_begin_ns
        waits_for_batch = _CODES_BEFORE_BATCH.issuperset(codes)
        return is_first_step and waits_for_batch


def _stack_of(frame: FrameType) -> _Stack:
    """Return the lines of the program on the stack whose innermost frame is ``frame``, without those inside of modules.

    If a validation takes long, its caller can call it less often; a line within the model does not help. The result is
    empty while a loader works, such as when its iterator starts workers: the line that loops over it does not help.
    """
    if _is_in_loader(frame):
        return ()
    lines: list[CodeLine] = []
    for line in user_lines(frame, callees_left_out=nn.Module.__call__.__code__):
        code_line = CodeLine(*line)
        # ``user_lines`` leaves out what ``model(batch)`` runs, but a program may also call ``model.forward(batch)``.
        method = code_line.function.rpartition(".")[2]
        is_called_by_program = bool(lines)
        if method == _FORWARD_METHOD and is_called_by_program:
            break
        lines.append(code_line)
    return tuple(lines)


def _is_in_loader(innermost: FrameType) -> bool:
    """Return whether a loader of torch runs, or a library that it calls, and no dataset of the program."""
    for frame, _ in walk_stack(innermost):
        file = frame.f_code.co_filename
        if not package_of(file):
            return False
        if _LOADERS in file:
            return True
    return False


def costliest_line(stacks: Mapping[_Stack, int]) -> CodeLine | None:
    """Return the line with the most samples in the innermost function that is on at least half of the stacks.

    ``stacks`` has the number of samples of each stack. Returns None if no function is on half of them, or if there are
    too few samples.
    """
    if sum(stacks.values()) < _FEWEST_SAMPLES:
        return None
    innermost = _innermost_function(stacks)
    if innermost is None:
        return None
    samples_by_line: Counter[CodeLine] = Counter()
    for stack, count in stacks.items():
        for line in dict.fromkeys(stack):
            if (line.file, line.function) == innermost:
                samples_by_line[line] += count
    return samples_by_line.most_common(1)[0][0]


def calling_line(
    stacks: Mapping[_Stack, int], functions_of_loop: Collection[_Function]
) -> CodeLine | None:
    """Return the line of the training loop that calls the activity during which ``stacks`` were sampled.

    Of the innermost function of the loop on each stack, it is the line with the most samples. None if that function
    runs most of the activity itself, or if there are too few samples.

    Args:
        stacks: the number of samples of each stack.
        functions_of_loop: the functions of the program that are on the stack between two steps.
    """
    samples_by_line: Counter[CodeLine] = Counter()
    samples = sum(stacks.values())
    for stack, count in stacks.items():
        line_of_loop = None  # the innermost one
        for line in stack:
            if (line.file, line.function) in functions_of_loop:
                line_of_loop = line
        if line_of_loop is not None and line_of_loop != stack[-1]:
            samples_by_line[line_of_loop] += count
    if samples < _FEWEST_SAMPLES or samples_by_line.total() < _LARGE_SHARE * samples:
        return None
    return samples_by_line.most_common(1)[0][0]


def _innermost_function(stacks: Mapping[_Stack, int]) -> _Function | None:
    """Return the file and the name of the innermost function that is on at least half of the ``stacks``; else None.

    The innermost is the one whose innermost call is deepest in the stack, on average.
    """
    samples_by_function: Counter[tuple[str, str]] = Counter()
    # for each function, the sum over its samples of the depth of its innermost call
    depths: Counter[tuple[str, str]] = Counter()
    for stack, count in stacks.items():
        depth_by_function: dict[tuple[str, str], int] = {}
        for depth, line in enumerate(stack):
            depth_by_function[line.file, line.function] = depth
        for function, depth in depth_by_function.items():
            samples_by_function[function] += count
            depths[function] += count * depth
    samples = sum(stacks.values())
    mean_depths = {
        function: depths[function] / count
        for function, count in samples_by_function.items()
        if count >= _LARGE_SHARE * samples
    }
    return max(mean_depths, key=mean_depths.__getitem__, default=None)
