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
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np
from numpy.typing import NDArray

from lm_profiler.record.parts import BETWEEN_STEPS

# no string of a trace looks like this: a quote inside of one has a backslash before it
_EVENTS_BEGIN = re.compile(r'"traceEvents"\s*:\s*\[')

# An operator's event as the profiler writes it, nine in ten of all: to find it takes a tenth of decoding it. One of
# attention is decoded, for its values count.
_OPERATOR_EVENT = re.compile(
    r'\{\s*"ph": "X",\s*"cat": "cpu_op",\s*("name": "(?![^"]*attention)[^"]*",\s*"pid": [^,]*,\s*"tid": [^,]*),\s*'
    r'"ts": (\d+\.\d{3}),\s*"dur": (\d+\.\d{3})\s*,\s*"args": \{\n([^\n]*), "Ev Idx": \d+\n\s*\}\s*\}'
)
_BETWEEN_EVENTS = re.compile(r"[\s,]*")  # matches the empty string, too
_CHUNK = 1 << 16  # characters that are read at once


class OperatorEvents(NamedTuple):
    """Many operators' events, as they stand in the file: a column of texts for each field that counts."""

    callers: Sequence[str]  # name, process and thread
    starts: Sequence[str]  # in microseconds with three decimals, as lengths
    lengths: Sequence[str]
    arguments: Sequence[str]


_PARTS = 1 + len(OperatorEvents._fields)  # of each match, with what stands before it

Event = Mapping[str, Any] | OperatorEvents  # as the profiler wrote it; or many that are not decoded


def trace_events(path: Path) -> Iterator[Event]:
    """Yield the events of ``path``; ValueError: it is not a whole trace."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            yield from _decoded(file)
    except (ValueError, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: not a whole trace: {error}") from None


def _decoded(file: TextIO) -> Iterator[Event]:
    """Yield what the text at hand holds, one part after the other: as one document a trace takes a gigabyte."""
    text = ""
    while (begin := _EVENTS_BEGIN.search(text)) is None:
        text += _more(file, text)
    decode, text = json.JSONDecoder().raw_decode, text[begin.end() :]
    while True:
        *parts, text = _OPERATOR_EVENT.split(text)
        between, *columns = (parts[at::_PARTS] for at in range(_PARTS))
        for others in between:
            if others := others.strip(", \t\r\n"):
                yield from json.loads(f"[{others}]")
        if columns[0]:
            yield OperatorEvents(*columns)
        at = 0
        while not text.startswith("]", at := _BETWEEN_EVENTS.match(text, at).end()):  # type: ignore[union-attr]
            try:
                event, at = decode(text, at)
            except json.JSONDecodeError:  # as a rule the event's end is not read yet
                break
            yield event
        else:
            break
        text = text[at:] + _more(file, text[at:])
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
        self._callers: defaultdict[str, int] = defaultdict(count().__next__)  # by their text in the file
        self._given: dict[str, int] = {}  # numbers of inputs, by their text
        self._inputs: list[Inputs | None] = []
        self._operators = [np.empty((4, 0), np.int64)]  # start, length, number of the caller, inputs
        self._host = array("q")  # start, length, thread, what, value, inputs or name of a call; the next event's
        self._device = array("q")  # start, length, name, correlation; the next one's
        for event in events:
            if isinstance(event, OperatorEvents):
                self._take_operators(event)
            else:
                self._take(event)
        start, length, caller, inputs = np.hstack(self._operators)
        decoded = [json.loads(f"{{{text}}}") for text in self._callers]
        calling = [(self._threads[of["pid"], of["tid"]], _OPERATOR, self._numbers[of["name"]]) for of in decoded]
        operators = np.column_stack((start, length, np.array(calling, np.int64).reshape(-1, 3)[caller], inputs))
        self._on_the_host = np.vstack((np.asarray(self._host).reshape(-1, 6), operators))
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

    def host(self) -> NDArray[np.int64]:
        """Return start, length, thread, what, value and the rest of the host's events, by start."""
        rows = self._on_the_host
        start, length, _, what, *_ = rows.T
        # At one moment ranges come before links and launches, and the longest range first, for it holds the others.
        return rows[np.lexsort((-length, np.maximum(what, _MODULE), start))]

    def _take_operators(self, events: OperatorEvents) -> None:
        """Take operators as they stand in the file: what was decoded once is known by its text."""
        given = [text.partition('"Input ')[2] for text in events.arguments]
        for text, whole in zip(given, events.arguments, strict=True):
            if text not in self._given:
                self._given[text] = self._inputs_of({"name": "", "args": json.loads(f"{{{whole}}}")})
        # Without their points they are nanoseconds.
        times = (np.fromstring(",".join(of).replace(".", ""), np.int64, sep=",") for of in events[1:3])
        numbers = [self._callers[text] for text in events.callers], [self._given[text] for text in given]
        self._operators.append(np.array((*times, *numbers)))

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
        self._host.extend((*_span(event), self._threads[event["pid"], event["tid"]], what, value, more))


def _span(event: Mapping[str, Any]) -> tuple[int, int]:
    """Return start and length, which the profiler writes in microseconds."""
    us = event["ts"]  # times 1,000 it may have more digits than a float
    return int(us) * 1000 + round(us % 1 * 1e3), round(event.get("dur", 0) * 1e3)


class DriverCall(NamedTuple):
    """A call of the driver that gave the device work, or waited for it. Names and inputs are numbers, -1 is none."""

    start: int
    length: int
    name: int
    correlation: int  # names what it launched
    operator: int  # what made the call
    module: int
    number: int  # tells calls of an operator apart
    inputs: int  # what that operator was given


class OperatorCalls(NamedTuple):
    """Operators' calls in the order in which they end, a column for each field; names and inputs as above."""

    start: NDArray[Any]
    length: NDArray[Any]
    name: NDArray[Any]
    caller: NDArray[Any]  # the operator that made the call
    module: NDArray[Any]
    number: NDArray[Any]  # tells an operator's calls apart
    inputs: NDArray[Any]
    own: NDArray[Any]  # the length without that of the operators that it calls
    again: NDArray[Any]  # whether an operator of the same name, another overload, called it: no call of its own


def walk(packed: Packed) -> tuple[OperatorCalls, list[DriverCall]]:
    """Return the calls of all operators, and all launches by their start.

    What runs in the backward pass belongs to the module in whose forward pass its node of the graph was made: the
    profiler links the two (``fwdbwd``). What is recomputed there is in its module's own range again.
    """
    rows = np.vstack((packed.host(), np.full(6, -1)))  # the last one stands for none
    start, length, thread, what, value, more = rows.T
    none, is_operator = len(rows) - 1, what == _OPERATOR
    # Of each event: the range around it, and the operator that it is, or is in, by their numbers; its module's name.
    around, operator, module = [none] * len(rows), [none] * len(rows), [-1] * len(rows)
    stacks: defaultdict[int, list[int]] = defaultdict(list)  # the ranges that a thread is in
    forward: dict[int, int] = {}  # a link's module, until its backward node comes
    ends = (start + length).tolist()
    columns = (column[:none].tolist() for column in (start, thread, what, value))
    for at, (begin, on, kind, given) in enumerate(zip(*columns, strict=True)):
        stack = stacks[on]
        while stack and ends[stack[-1]] <= begin:
            stack.pop()
        around[at] = inner = stack[-1] if stack else none
        if kind == _FORWARD:
            forward[given] = module[inner]
        elif kind == _BACKWARD:
            if stack:
                module[inner] = forward.pop(given, module[inner])
        else:
            operator[at] = at if kind == _OPERATOR else operator[inner]
            module[at] = given if kind == _MODULE else module[inner]
            if kind != _LAUNCH:
                stack.append(at)
    of, modules, name = np.array(operator), np.array(module), np.where(is_operator, value, -1)
    parent = of[np.array(around)]
    caller = name[parent]
    again = is_operator & (parent == around) & (name == caller)
    for at in np.flatnonzero(again).tolist():
        caller[at] = caller[parent[at]]
    within = np.zeros_like(length)
    np.add.at(within, parent[is_operator], length[is_operator])
    own = np.maximum(length - within, 0)
    number = np.where(of == none, -1, of)
    over = np.flatnonzero(is_operator)
    over = over[np.lexsort((-over, (start + length)[over]))]  # of those that end at one moment, the inner ones first
    called = start, length, name, caller, modules, number, more, own, again
    calls = OperatorCalls(*(column[over] for column in called))
    launched = (start, length, more, value, name[of], modules, number, more[of])
    launches = zip(*(column[what == _LAUNCH].tolist() for column in launched), strict=True)
    return calls, list(map(DriverCall._make, launches))
