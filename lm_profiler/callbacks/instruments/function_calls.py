"""Finds functions of the program that compute the same result again, among the calls that ``PythonTimes`` follows."""

from __future__ import annotations

import inspect
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any, NamedTuple
from weakref import ref

import numpy as np
import torch
from torch import Tensor, nn

from lm_profiler.measure.contents import (
    Content,
    content_of,
    is_one_of,
    without_function_modes,
)
from lm_profiler.measure.user_code import installed_package, qualified_name
from lm_profiler.torch_names import BACKWARD_NODE

Line = tuple[str, int, str]  # file, line and function

# The most time that reading arguments and results may take in a step. The step is that much longer, so it is bounded.
_MOST_NS = 500_000_000
# A function whose call was shorter is not compared any more: reading its arguments would take as long.
_SHORT_NS = 50_000
# A result with fewer numbers or characters is equal by chance, or it only says how something went.
_FEWEST_ELEMENTS = 16
_MOST_PARTS = 1_000
# functions of which each call computes only a part, or which return before they run
_IN_PARTS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
# arguments with a state that changes with each use
_RANDOM = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


class Elapsed(NamedTuple):
    """The time of all lines that were followed so far."""

    ns: float = 0.0
    intervals: int = 0  # the number of intervals between events that it consists of


@dataclass(eq=False)
class FunctionResults:
    """The calls of a function of the program in one phase of a step that was followed."""

    phase: int
    function: Line
    calls: int = 0
    # the calls with the arguments and the result of an earlier call of the step, and their time
    repeats: int = 0
    repeated_ns: float = 0.0
    repeated_intervals: int = 0
    has_gradients: bool = False  # whether autograd recorded them


@dataclass(eq=False)
class _Call:
    """A call of a function, from its begin on."""

    code: CodeType
    function: Line
    phase: int
    depth: int  # the depth of the stack while it runs
    begin: Elapsed
    first_inner: int  # the number of calls that had ended before
    arguments: _Arguments | None  # None if they are unknown
    random_state: object
    # set when it ends
    result: Content | None = None
    # the tensors and arrays of the result, as far as they still exist
    result_refs: list[ref[Any]] = field(default_factory=list)
    has_gradients: bool = False
    duration: Elapsed = field(default_factory=Elapsed)
    is_repeat: bool = False

    def has_arguments_of(self, earlier: _Call) -> bool:
        """Return whether both calls have the same known arguments."""
        if self.arguments is None or earlier.arguments is None:
            return False
        return self.arguments.equal(earlier.arguments)

    def computes_again(self, earlier: _Call) -> bool:
        """Return whether this call has computed the result of ``earlier``, which has the same arguments.

        A result that was stored and is handed out again was not computed again.
        """
        if self.result != earlier.result:
            return False
        own = {id(leaf()) for leaf in self.result_refs}
        kept = {id(leaf()) for leaf in earlier.result_refs if leaf() is not None}
        return own.isdisjoint(kept)


class _Arguments:
    """The arguments of a call: their content, and which objects those of unknown content are."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        """Raises TypeError if a value is neither known by its content nor can be recognized."""
        # A result with one of these identities was handed through.
        self.ids = {id(value) for value in values.values()}
        self._contents: dict[str, Content] = {}
        self._objects: dict[str, ref[Any]] = {}
        for name, value in values.items():
            content = content_of(value)
            if content is not None:
                self._contents[name] = content
            elif issubclass(type(value), (Tensor, np.ndarray, *_RANDOM)):
                # not isinstance, which reads the attribute ``__class__``: it may be code of the program
                raise TypeError
            else:
                self._objects[name] = ref(value)

    def equal(self, other: _Arguments) -> bool:
        if self._contents != other._contents:
            return False
        if self._objects.keys() != other._objects.keys():
            return False
        return all(
            value() is other._objects[name]() for name, value in self._objects.items()
        )


class FunctionCalls:
    """Compares the calls of the program's functions, as they begin and end in the step that is followed.

    ``clock`` returns nanoseconds. Once ``_MOST_NS`` is used up, later calls are not compared.
    """

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        self._ns_left = _MOST_NS
        self._running: list[_Call] = []  # the innermost last
        self._ended: list[_Call] = []
        self._calls_of_code: defaultdict[int, list[_Call]] = defaultdict(list)
        # how often each function was called in each phase
        self._counts: Counter[tuple[int, int]] = Counter()
        # the functions with short calls; they are kept so that their identities are not used again
        self._short: dict[int, CodeType] = {}
        # the functions that returned different results for the same arguments: they depend on something else, too
        self._varying: set[int] = set()
        self._backward_node = BACKWARD_NODE.find_or(lambda: None)

    def begin(self, frame: FrameType, phase: int, depth: int, elapsed: Elapsed) -> None:
        """Note that a call of the program's function begins which ``frame`` runs, if its result may be compared.

        Args:
            frame: the frame of the function.
            phase: the phase of the step, as an index of ``PARTS``.
            depth: the depth of the stack while the function runs.
            elapsed: the time of all lines so far.
        """
        code = frame.f_code
        self._counts[id(code), phase] += 1
        if self._ns_left <= 0 or id(code) in self._short or not _may_be_kept(frame):
            return
        if self._backward_node() is not None:
            # Activation checkpointing computes results again on purpose.
            return
        begin_ns = self._clock()
        call = _Call(
            code=code,
            function=function_of(frame),
            phase=phase,
            depth=depth,
            begin=elapsed,
            first_inner=len(self._ended),
            arguments=_arguments_of(frame),
            random_state=_random_state(),
        )
        self._running.append(call)
        self._ns_left -= self._clock() - begin_ns

    def end(self, phase: int, depth: int, result: Any, elapsed: Elapsed) -> None:
        """Note that the function returns ``result`` whose call made the stack as deep as ``depth``.

        The other arguments are those of ``begin``.
        """
        while self._running and self._running[-1].depth > depth:
            self._running.pop()
        if not self._running or self._running[-1].depth != depth:
            return
        call = self._running.pop()
        begin = call.begin
        call.duration = Elapsed(
            elapsed.ns - begin.ns, elapsed.intervals - begin.intervals
        )
        if call.duration.ns < _SHORT_NS:
            self._short[id(call.code)] = call.code
            return
        begin_ns = self._clock()
        if call.phase == phase and call.random_state == _random_state():
            self._compare(call, result)
        self._ns_left -= self._clock() - begin_ns

    def _compare(self, call: _Call, result: Any) -> None:
        """Keep the content of the ``result`` of ``call``, and compare it with those of earlier calls."""
        if call.arguments is None or id(result) in call.arguments.ids:
            return
        content = content_of(result)
        if content is None or content.elements < _FEWEST_ELEMENTS:
            return
        leaves = arrays_in(result)
        call.result = content
        call.result_refs = [ref(leaf) for leaf in leaves]
        with without_function_modes():
            call.has_gradients = any(_has_gradient(leaf) for leaf in leaves)
        earlier_calls = self._calls_of_code[id(call.code)]
        for earlier in earlier_calls:
            if not call.has_arguments_of(earlier):
                continue
            if call.result != earlier.result:
                self._varying.add(id(call.code))
            elif call.computes_again(earlier):
                call.is_repeat = True
        if call.is_repeat:
            # What it calls need not be kept if its own result is.
            for inner in self._ended[call.first_inner :]:
                inner.is_repeat = False
        earlier_calls.append(call)
        self._ended.append(call)

    def stop(self) -> None:
        """Forget the objects of the program: a tensor cannot be swapped while there is a weak reference to it."""
        for call in self._ended:
            call.arguments = None
            call.result_refs = []
        self._running.clear()

    def results(self) -> list[FunctionResults]:
        """Return the functions that computed a result again."""
        by_function: dict[tuple[Line, int], FunctionResults] = {}
        for call in self._ended:
            if not call.is_repeat or id(call.code) in self._varying:
                continue
            key = (call.function, call.phase)
            if key not in by_function:
                calls = self._counts[id(call.code), call.phase]
                by_function[key] = FunctionResults(call.phase, call.function, calls)
            results = by_function[key]
            results.repeats += 1
            results.repeated_ns += call.duration.ns
            results.repeated_intervals += call.duration.intervals
            results.has_gradients |= call.has_gradients
        return [*by_function.values()]


def _may_be_kept(frame: FrameType) -> bool:
    """Return whether the function that ``frame`` runs is the user's, and one whose result could be kept."""
    code = frame.f_code
    if code.co_flags & _IN_PARTS or code.co_name.startswith("<"):
        return False
    # The trace and the data flow show the forward pass of a module that is repeated.
    is_forward = code.co_name == "forward"
    if is_forward and issubclass(type(_first_argument(frame)), nn.Module):
        return False
    return not installed_package(code.co_filename)


def _first_argument(frame: FrameType) -> Any:
    names = frame.f_code.co_varnames
    return frame.f_locals.get(names[0]) if names else None


def _arguments_of(frame: FrameType) -> _Arguments | None:
    """Return the arguments of the function that ``frame`` begins to run; None if they are unknown."""
    code = frame.f_code
    count = code.co_argcount + code.co_kwonlyargcount
    count += bool(code.co_flags & inspect.CO_VARARGS)
    count += bool(code.co_flags & inspect.CO_VARKEYWORDS)
    # An argument that an inner function uses may be missing here.
    local_values = frame.f_locals
    names = code.co_varnames[:count]
    if any(name not in local_values for name in names):
        return None
    try:
        return _Arguments({name: local_values[name] for name in names})
    except TypeError:
        return None


def _random_state() -> object:
    """Return the states of the generators of random numbers on the CPU that programs share."""
    return (
        content_of(torch.default_generator.get_state()),
        # the form that every generator has; for others than the usual one, NumPy warns about the older form
        content_of(np.random.get_state(legacy=False)),
        hash(random.getstate()),  # the state itself takes 25 KB
    )


def arrays_in(result: Any) -> list[Any]:
    """Return the tensors and arrays in ``result``, which may be one, or a container of them.

    Those of other classes are left out: reading their shape may call code of the program. So are those in a container
    with more than ``_MOST_PARTS`` items.
    """
    if _is_array(result):
        return [result]
    kind = type(result)
    is_container = kind is dict or kind is list or kind is tuple
    if not is_container or len(result) > _MOST_PARTS:
        return []
    parts = list(result.values() if kind is dict else result)
    return [part for part in parts if _is_array(part)]


def _is_array(value: Any) -> bool:
    return is_one_of(type(value), (Tensor, nn.Parameter, np.ndarray))


def _has_gradient(leaf: Any) -> bool:
    return issubclass(type(leaf), Tensor) and leaf.requires_grad


def function_of(frame: FrameType) -> Line:
    """Return file, first line and name of the function that ``frame`` runs; a method has the class of its object."""
    code = frame.f_code
    name = qualified_name(code)
    if code.co_varnames[:1] == ("self",) and "self" in frame.f_locals:
        name = f"{type(frame.f_locals['self']).__name__}.{code.co_name}"
    return code.co_filename, code.co_firstlineno, name
