"""Read and pack a trace's events, and walk over the host's: which operator and module each belongs to.

Times are integers of nanoseconds since an arbitrary moment.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from array import array
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np
from numpy.typing import NDArray

from lm_profiler.record.parts import BETWEEN_STEPS

# no string of a trace looks like this: a quote inside of one has a backslash before it
_EVENTS_BEGIN = re.compile(r'"traceEvents"\s*:\s*\[')

# An operator's event as the profiler writes it, nine in ten of all: to match it takes an eighth of decoding it.
_OPERATOR_EVENT = re.compile(
    r'[\s,]*\{\s*"ph": "X",\s*"cat": "cpu_op",\s*("name": "[^"]*",\s*"pid": [^,]*,\s*"tid": [^,]*),\s*"ts": ([^,]*),\s*'
    r'"dur": ([^,]*),\s*"args": \{\n([^\n]*), "Ev Idx": \d+\n\s*\}\s*\}'
)
_BETWEEN_EVENTS = re.compile(r"[\s,]*")
_CHUNK = 1 << 16  # characters that are read at once

Event = Mapping[str, Any] | re.Match[str]  # as the profiler wrote it; or a match of ``_OPERATOR_EVENT``


def trace_events(path: Path) -> Iterator[Event]:
    """Yield the events of ``path``; ValueError: it is not a whole trace."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            yield from _decoded(file)
    except (ValueError, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: not a whole trace: {error}") from None


def _decoded(file: TextIO) -> Iterator[Event]:
    """Yield one event after the other from the text at hand: a trace takes a gigabyte as one document of objects."""
    text = ""
    while (begin := _EVENTS_BEGIN.search(text)) is None:
        text += _more(file, text)
    decode, text, at = json.JSONDecoder().raw_decode, text[begin.end() :], 0
    while True:
        while match := _OPERATOR_EVENT.match(text, at):
            yield match
            at = match.end()
        at = _BETWEEN_EVENTS.match(text, at).end()  # type: ignore[union-attr]  # it matches the empty string, too
        if text.startswith("]", at):
            break
        try:
            event, at = decode(text, at)
        except json.JSONDecodeError:  # as a rule the event's end is not read yet
            text, at = text[at:] + _more(file, text[at:]), 0
        else:
            yield event
    # What follows must be whole as well, or the profiler did not come to the end.
    json.loads('{"traceEvents": [' + text[at:] + file.read())


def _more(file: TextIO, held: str) -> str:
    """Return the next characters, at least as many as are ``held``, so that a long event is not decoded too often."""
    if not (more := file.read(max(_CHUNK, len(held)))):
        raise ValueError("it ends, or is damaged, before the end of its events")
    return more


# beginnings of the names of ranges that the instruments, and the profiler itself, put into a trace
MODULE_PREFIX, PHASE_PREFIX, STEP_PREFIX = "module: ", "phase: ", "ProfilerStep#"

COMPILED_GRAPH = "CompiledFxGraph"  # the name of torch.compile's graphs here; the profiler puts a digest after it

# beginnings of the ranges of collectives that run on the host; those of a device are kernels
_BACKENDS = ("gloo:", "mpi:", "ucc:")

# the range in which FSDP2 asks for a module's parameters, the root's without a name (``FSDPParamGroup.unshard``)
_GATHER = re.compile(r"FSDP::all_gather(?: \((.+)\))?")

_COMPILED = f"## Call {COMPILED_GRAPH}"
_ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_OPERATOR, _MODULE, _FORWARD, _BACKWARD, _LAUNCH = range(5)
_FLOWS = {"s": _FORWARD, "f": _BACKWARD}


class Range(NamedTuple):
    """A named stretch of the host's time."""

    start: int
    end: int
    name: str


class Inputs(NamedTuple):
    """The inputs of an operator, an entry an argument, as the profiler writes it where it records shapes."""

    dims: Sequence[Any]  # of a list of tensors a list
    types: Sequence[str]
    values: Sequence[str]  # of attention alone, where they say whether it is causal


class Packed:
    """The part of ``events`` that counts, in some fifty bytes each; they may come in any order.

    ``names`` and ``inputs`` are by their number; -1, which stands for none, finds the None at their end.
    """

    def __init__(self, events: Iterable[Event]) -> None:
        self.steps: list[Range] = []
        self.phases: list[Range] = []
        self.collectives: list[Range] = []
        self.gathers: list[Range] = []
        self._numbers: defaultdict[str, int] = defaultdict(count().__next__)
        self._threads: defaultdict[tuple[Any, Any], int] = defaultdict(count().__next__)
        self._callers: dict[str, tuple[int, int]] = {}  # numbers of thread and name, by the text of both in the file
        self._given: dict[str, int] = {}  # numbers of inputs, by their text
        self._inputs: list[Inputs | None] = []
        self._host = array("q")  # thread, what, value, inputs or name of a call; the next event's
        self._spans = array("d")  # their start and length, in microseconds
        self._device = array("q")  # start, length, name, correlation; the next one's
        for event in events:
            if isinstance(event, re.Match):
                self._take_match(event)
            else:
                self._take(event)
        # start and length, which are first in both, in nanoseconds
        spans = np.rint(np.asarray(self._spans).reshape(-1, 2) * 1e3).astype(np.int64)
        self._on_the_host = np.hstack((spans, np.asarray(self._host).reshape(-1, 4)))
        self._on_the_device = np.asarray(self._device).reshape(-1, 4)
        self.steps.sort()
        self.phases.sort()
        if any(of.name == BETWEEN_STEPS for of in self.phases):
            self._leave_out_between_steps()
        if self.phases:  # torch's last step may be what came after the run's: no phase is in it
            begun = [phase.start for phase in self.phases]
            self.steps = [of for of in self.steps if bisect_left(begun, of.start) < bisect_left(begun, of.end)]
        self.names: list[str | None] = [*self._numbers, None]
        self.inputs: list[Inputs | None] = [*self._inputs, None]
        self.has_device = len(self._on_the_device) > 0

    def _leave_out_between_steps(self) -> None:
        """Take out what began between steps, a validation for example, and that time, as if none had passed."""
        starts, ends = np.array([(0, 0), *(of[:2] for of in self.phases if of.name == BETWEEN_STEPS)]).T
        gone = np.cumsum(ends - starts)

        def moved(times: Any) -> Any:
            last = np.searchsorted(starts, times, side="right") - 1
            return np.maximum(times, ends[last]) - gone[last]

        def kept(rows: NDArray[np.int64]) -> NDArray[np.int64]:
            rows = rows[rows[:, 0] >= ends[np.searchsorted(starts, rows[:, 0], side="right") - 1]]
            begin, end = moved(rows[:, 0]), moved(rows[:, 0] + rows[:, 1])
            return np.column_stack((begin, end - begin, rows[:, 2:]))

        for ranges in (self.steps, self.phases, self.collectives, self.gathers):
            shifted = [of._replace(start=int(moved(of.start)), end=int(moved(of.end))) for of in ranges]
            ranges[:] = [of for of in shifted if of.end > of.start]
        self._on_the_host, self._on_the_device = kept(self._on_the_host), kept(self._on_the_device)

    def window(self) -> tuple[int, int]:
        """Return where the first step begins and where the last one ends; ValueError: there is no whole step."""
        if not self.steps:
            raise ValueError("the trace has no whole step")
        return self.steps[0].start, max(step.end for step in self.steps)

    def device(self) -> Iterator[list[int]]:
        """Yield start, length, name's number and correlation of all that ran on the device, by start."""
        rows = self._on_the_device
        return iter(rows[np.argsort(rows[:, 0], kind="stable")].tolist())

    def host(self) -> Iterator[list[int]]:
        """Yield start, length, thread, what, value and the rest of the host's events, by start."""
        rows = self._on_the_host
        start, length, _, what, *_ = rows.T
        # At one moment ranges come before links and launches, and the longest range first, for it holds the others.
        order = np.lexsort((-length, np.maximum(what, _MODULE), start))
        for few in np.array_split(order, max(len(order) // 10_000, 1)):  # as Python's numbers, but not all at once
            yield from rows[few].tolist()

    def _take_match(self, match: re.Match[str]) -> None:
        """Take an operator as it stands in the file: what was decoded once is known by its text."""
        caller, ts, dur, arguments = match.groups()
        given = arguments.partition('"Input ')[2]
        try:
            (thread, name), inputs = self._callers[caller], self._given[given]
        except KeyError:
            event = json.loads(match[0].lstrip(", \t\r\n"))
            if "attention" in event["name"]:  # its values count, which stand before
                self._take(event)
                return
            thread, name = self._threads[event["pid"], event["tid"]], self._numbers[event["name"]]
            self._callers[caller] = thread, name
            inputs = self._given[given] = self._inputs_of(event)
        self._spans.extend((float(ts), float(dur)))
        self._host.extend((thread, _OPERATOR, name, inputs))

    def _take(self, event: Mapping[str, Any]) -> None:
        category = event.get("cat") or ""  # null in some
        if category == "cpu_op":
            self._on_host(event, _OPERATOR, self._numbers[event["name"]], self._inputs_of(event))
        elif category in _ON_DEVICE:
            correlation = (event.get("args") or {}).get("correlation", -1)
            self._device.extend((*_span(event), self._numbers[event["name"]], correlation))
        elif category == "user_annotation":
            self._take_range(event)
        elif category == "fwdbwd" and event["ph"] in _FLOWS:
            self._on_host(event, _FLOWS[event["ph"]], event["id"])
        elif category.endswith(("_runtime", "_driver")) and "correlation" in (event.get("args") or ()):
            self._on_host(event, _LAUNCH, event["args"]["correlation"], self._numbers[event["name"]])

    def _take_range(self, event: Mapping[str, Any]) -> None:
        name = event["name"]
        if name.startswith(MODULE_PREFIX):
            self._on_host(event, _MODULE, self._numbers[name])
        elif name.startswith(_COMPILED):
            self._on_host(event, _OPERATOR, self._numbers[COMPILED_GRAPH])
        else:
            start, length = _span(event)
            range_ = Range(start, start + length, name)
            if name.startswith(PHASE_PREFIX):
                self.phases.append(range_._replace(name=name.removeprefix(PHASE_PREFIX)))
            elif name.startswith(STEP_PREFIX):
                self.steps.append(range_)
            elif name.startswith(_BACKENDS):
                self.collectives.append(range_)
            elif gather := _GATHER.fullmatch(name):
                self.gathers.append(range_._replace(name=gather[1] or "the root"))

    def _inputs_of(self, event: Mapping[str, Any]) -> int:
        """Return the number of what the operator was given; equal inputs are kept once."""
        arguments = event.get("args")
        if not arguments or "Input Dims" not in arguments:
            return -1
        values = arguments.get("Concrete Inputs") if "attention" in event["name"] else None
        given = (arguments["Input Dims"], arguments.get("Input type"), values)
        number = self._given.setdefault(repr(given), len(self._inputs))
        if number == len(self._inputs):
            self._inputs.append(Inputs(*(field or () for field in given)))
        return number

    def _on_host(self, event: Mapping[str, Any], what: int, value: int, more: int = -1) -> None:
        self._spans.extend((event["ts"], event.get("dur", 0)))
        self._host.extend((self._threads[event["pid"], event["tid"]], what, value, more))


def _span(event: Mapping[str, Any]) -> tuple[int, int]:
    """Return start and length, which the profiler writes in microseconds."""
    return round(event["ts"] * 1e3), round(event.get("dur", 0) * 1e3)


class TracedCall(NamedTuple):
    """An operator's call that is over; or, with a ``correlation``, one that gave the device work or waited for it."""

    start: int
    length: int
    name: int  # a number, as all names and inputs; -1 is none
    operator: int  # what made the call
    module: int
    number: int  # tells an operator's calls apart; of a launch, that of the operator that made it
    inputs: int  # what that operator was given
    own: int = 0  # the length without that of the operators that it calls
    again: bool = False  # an operator of the same name, another overload, called it: no call of its own
    correlation: int | None = None


@dataclass(slots=True)
class _Open:
    """A range of one thread that the walk is in. ``operator`` is the innermost one, itself included."""

    start: int
    end: int
    what: int
    operator: int
    caller: int
    module: int
    number: int = -1
    inputs: int = -1
    again: bool = False
    children: int = 0


def walk(packed: Packed) -> Iterator[TracedCall]:
    """Yield all operators, as they end, and all launches.

    What runs in the backward pass belongs to the module in whose forward pass its node of the graph was made: the
    profiler links the two (``fwdbwd``). What is recomputed there is in its module's own range again.
    """
    nobody = _Open(0, 0, _MODULE, -1, -1, -1)
    stacks: defaultdict[int, list[_Open]] = defaultdict(list)
    forward: dict[int, int] = {}  # a link's module, until its backward node comes
    for number, (start, length, thread, what, value, more) in enumerate(packed.host()):
        stack = stacks[thread]
        while stack and stack[-1].end <= start:
            yield from _close(stack)
        inner = stack[-1] if stack else nobody
        # Operators are asked for first: nine in ten events are one.
        if what == _OPERATOR:
            again = inner.what == _OPERATOR and inner.operator == value
            caller = inner.caller if again else inner.operator
            stack.append(_Open(start, start + length, what, value, caller, inner.module, number, more, again))
        elif what == _MODULE:
            stack.append(_Open(start, start + length, what, inner.operator, -1, value, inner.number, inner.inputs))
        elif what == _FORWARD:
            forward[value] = inner.module
        elif what == _BACKWARD:
            if stack:
                inner.module = forward.pop(value, inner.module)
        else:
            outside = inner.operator, inner.module, inner.number, inner.inputs
            yield TracedCall(start, length, more, *outside, correlation=value)
    for stack in stacks.values():
        while stack:
            yield from _close(stack)


def _close(stack: list[_Open]) -> Sequence[TracedCall]:
    """End the innermost range: its caller, if any, has spent that time in a child. A module's range is no call."""
    over = stack.pop()
    length = over.end - over.start
    is_operator = over.what == _OPERATOR
    if stack:
        stack[-1].children += length if is_operator else over.children
    if not is_operator:
        return ()
    outside = over.caller, over.module, over.number, over.inputs
    return (TracedCall(over.start, length, over.operator, *outside, max(length - over.children, 0), over.again),)
