"""Reads the events of a trace file, one part after the other: as one document a trace takes a gigabyte."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

# no string of a trace looks like this: a quote inside of one has a backslash before it
_EVENTS_BEGIN = re.compile(r'"traceEvents"\s*:\s*\[')

# An operator's event as the profiler writes it, nine in ten of all: to find it takes a tenth of decoding it. An event
# of attention is decoded, because its values count.
_OPERATOR_EVENT = re.compile(
    r'\{\s*"ph": "X",\s*"cat": "cpu_op",\s*("name": "(?![^"]*attention)[^"]*",\s*"pid": [^,]*,\s*"tid": [^,]*),\s*'
    r'"ts": (\d+\.\d{3}),\s*"dur": (\d+\.\d{3})\s*,\s*"args": \{\n([^\n]*), "Ev Idx": \d+\n\s*\}\s*\}'
)
_GROUPS_OF_OPERATOR = 4
_BETWEEN_EVENTS = re.compile(r"[\s,]*")  # matches the empty string, too
_CHUNK_CHARACTERS = 1 << 16


class OperatorEvents(NamedTuple):
    """Many operators' events, as they stand in the file: a column of texts for each field that counts."""

    callers: Sequence[str]  # name, process and thread
    starts: Sequence[str]  # in microseconds with three decimals, as lengths
    lengths: Sequence[str]
    arguments: Sequence[str]


Event = Any  # a decoded event, a mapping unless the file is damaged; or ``OperatorEvents``, which are not decoded


def trace_events(path: Path) -> Iterator[Event]:
    """Yield the events of ``path``.

    Raises:
        ValueError: the file is not a whole trace.
    """
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            yield from _events_of_text(file)
    except (ValueError, EOFError, zlib.error, RecursionError) as error:
        raise ValueError(f"{path}: not a whole trace: {error}") from None


def _events_of_text(file: TextIO) -> Iterator[Event]:
    text = ""
    begin = _EVENTS_BEGIN.search(text)
    while begin is None:
        text += _next_characters(file, held=text)
        begin = _EVENTS_BEGIN.search(text)
    text = text[begin.end() :]

    while True:
        events, rest = _operators_first(text)
        yield from events
        events, position, is_end = _whole_events(rest)
        yield from events
        if is_end:
            break
        rest = rest[position:]
        text = rest + _next_characters(file, held=rest)

    # What follows must be whole as well, or the profiler did not come to the end.
    json.loads('{"traceEvents": [' + rest[position:] + file.read())


def _operators_first(text: str) -> tuple[list[Event], str]:
    """Return the events up to the last operator that ``text`` holds, and the text behind it."""
    *fields, rest = _OPERATOR_EVENT.split(text)
    fields_a_match = (
        1 + _GROUPS_OF_OPERATOR
    )  # the text before an operator, then the operator's groups
    events: list[Event] = []
    for other_events in fields[::fields_a_match]:
        stripped = other_events.strip(", \t\r\n")
        if stripped:
            events.extend(json.loads(f"[{stripped}]"))
    columns = [fields[group::fields_a_match] for group in range(1, fields_a_match)]
    if columns[0]:
        events.append(OperatorEvents(*columns))
    return events, rest


def _whole_events(text: str) -> tuple[list[Event], int, bool]:
    """Return the events that ``text`` holds whole, the position behind them, and whether the list ends there."""
    decode = json.JSONDecoder().raw_decode
    events: list[Event] = []
    position = 0
    while True:
        between = _BETWEEN_EVENTS.match(text, position)
        assert between is not None  # the pattern matches the empty string
        position = between.end()
        if text.startswith("]", position):
            return events, position, True
        try:
            event, position = decode(text, position)
        except json.JSONDecodeError:  # as a rule the event's end is not read yet
            return events, position, False
        events.append(event)


def _next_characters(file: TextIO, held: str) -> str:
    """Return the next characters, at least as many as are ``held``, so that a long event is not decoded too often."""
    characters = file.read(max(_CHUNK_CHARACTERS, len(held)))
    if not characters:
        raise ValueError("it ends, or is damaged, before the end of its events")
    return characters
