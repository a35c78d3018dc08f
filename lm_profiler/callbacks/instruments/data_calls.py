"""Adds up the time of the functions that make a batch, and finds those that return more than its samples need."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple

from lm_profiler.callbacks.instruments.function_calls import Line, arrays_in
from lm_profiler.measure.contents import image_class, without_function_modes

# How many times as large as the samples a result must be to count as larger than needed.
_LARGER = 4.0
# A sample that is shorter in fewer dimensions may be made of the whole result, such as features of a recording by a
# matrix product.
_FEWEST_SHORTER = 2


class LargeResults(NamedTuple):
    """The results of a function that are larger than the samples that are made of them."""

    function: Line
    share_of_time: float  # of the time of all functions that make the batch
    shape: tuple[int, ...]
    used_shape: tuple[int, ...]
    used_share: float  # the elements of the samples by those of the results


@dataclass(frozen=True)
class _Size:
    """The size of what a function returns: tensors, arrays or images."""

    elements: int = 0
    shape: tuple[int, ...] = ()  # of the largest of them


@dataclass(eq=False)
class _DataCall:
    """A call of the program's code that makes a batch."""

    function: Line
    depth: int  # the depth of the stack while it runs
    begin_ns: float  # ``total_ns`` of ``DataCalls`` when the call began
    first_inner: int  # the number of calls that had ended before
    # set when it ends
    ns: float = 0.0
    size: _Size = _Size()
    is_outermost: bool = False


class DataCalls:
    """The calls of the program's code that make batches, and the time of each function in them."""

    def __init__(self) -> None:
        # the calls that have not returned, the outermost first
        self._running: list[_DataCall] = []
        # all others; those that a call has made stand before it
        self._ended: list[_DataCall] = []
        # the time of each function, with all that it calls
        self.ns_by_function: defaultdict[Line, float] = defaultdict(float)
        self.total_ns = 0.0  # the time of all lines of data together

    def begin(self, function: Line, depth: int) -> None:
        """Note a call of ``function``, which makes the stack as deep as ``depth``."""
        for call in self._running:
            # it calls itself: the outer call has the time
            if call.function == function:
                return
        call = _DataCall(function, depth, self.total_ns, first_inner=len(self._ended))
        self._running.append(call)

    def end(self, depth: int, result: Any) -> None:
        """Add up the time of the call that made the stack as deep as ``depth`` and returns ``result``, if it is noted.

        An exception may have ended the calls that it has made.
        """
        while self._running and depth <= self._running[-1].depth:
            call = self._running.pop()
            call.ns = self.total_ns - call.begin_ns
            call.is_outermost = not self._running
            self.ns_by_function[call.function] += call.ns
            if call.depth == depth:
                call.size = _size_of(result)
            self._ended.append(call)

    def large_results(self) -> list[LargeResults]:
        """Return the functions whose results are larger than needed, because the samples are only parts of them.

        The samples are what the last of the outermost functions returns: the dataset's or the collate function's. Of
        functions that call each other it is the outermost.
        """
        samples = self._samples()
        calls_by_function: defaultdict[Line, list[_DataCall]] = defaultdict(list)
        index = len(self._ended)
        while index > 0:
            index -= 1
            call = self._ended[index]
            if _may_contain(call.size.shape, samples.shape):
                calls_by_function[call.function].append(call)
                index = call.first_inner
        results = []
        for function, calls in calls_by_function.items():
            elements = sum(call.size.elements for call in calls)
            if elements < _LARGER * samples.elements:
                continue
            shape = calls[0].size.shape
            results.append(
                LargeResults(
                    function=function,
                    share_of_time=sum(call.ns for call in calls) / self.total_ns,
                    shape=shape,
                    used_shape=samples.shape[-len(shape) :],
                    used_share=samples.elements / elements,
                )
            )
        return results

    def _samples(self) -> _Size:
        """Return the size of all samples of the batch, and the shape of the last one."""
        made = [
            call for call in self._ended if call.is_outermost and call.size.elements
        ]
        if not made:
            return _Size()
        last = made[-1]
        elements = 0
        for call in made:
            if call.function == last.function:
                elements += call.size.elements
        return _Size(elements, last.size.shape)


def _size_of(result: Any) -> _Size:
    """Return the size of the tensors, arrays and images of Pillow in ``result``."""
    shapes = []
    with without_function_modes():
        for array in arrays_in(result):
            # a nested tensor has no shape
            if not getattr(array, "is_nested", False):
                shapes.append(tuple(array.shape))
    image = image_class()
    if image is not None and issubclass(type(result), image):
        width, height = result.size
        shapes.append((height, width, len(result.getbands())))
    if not shapes:
        return _Size()
    elements = sum(map(math.prod, shapes))
    return _Size(elements, max(shapes, key=math.prod))


def _may_contain(shape: tuple[int, ...], sample_shape: tuple[int, ...]) -> bool:
    """Return whether a sample may be a part of a result with this shape, and a much smaller one.

    The order of the dimensions may differ. ``sample_shape`` may be that of a batch, with one dimension more.
    """
    dimensions = len(shape)
    if len(sample_shape) not in (dimensions, dimensions + 1):
        return False
    used_shape = sample_shape[-dimensions:]
    if math.prod(shape) < _LARGER * math.prod(used_shape):
        return False
    # the dimensions that differ, whatever their order
    lengths = sorted((Counter(shape) - Counter(used_shape)).elements())
    used_lengths = sorted((Counter(used_shape) - Counter(shape)).elements())
    if len(lengths) < _FEWEST_SHORTER:
        return False
    pairs = zip(lengths, used_lengths, strict=True)
    return all(length > used_length for length, used_length in pairs)
