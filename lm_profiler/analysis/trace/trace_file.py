"""Reads the events of a trace file in parts, because decoding the whole file at once would take a gigabyte."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

# The beginning of the list of events, which some tools write without anything around it. It cannot be part of a string,
# in which quotes have a backslash.
_EVENTS_BEGIN = re.compile(r'\A\s*\[|"traceEvents"\s*:\s*\[')

# The event of an operator as the profiler writes it: 90 % of all events. Matching this pattern takes a tenth of the
# time of decoding JSON. It does not match events of attention, whose argument values are needed, and events with
# impossible times: these are decoded.
_OPERATOR_EVENT = re.compile(
    r'\{\s*"ph": "X",\s*"cat": "cpu_op",\s*("name": "(?![^"]*attention)[^"]*",\s*"pid": [^,]*,\s*"tid": [^,]*),\s*'
    r'"ts": ([0-3]?[0-9]{1,15}\.[0-9]{3}),\s*"dur": ([0-9]{1,12}\.[0-9]{3})\s*,\s*'
    r'"args": \{\n([^\n]*), "Ev Idx": \d+\n\s*\}\s*\}'
)
_GROUPS_OF_OPERATOR = 4  # groups of the pattern above
_BETWEEN_EVENTS = re.compile(r"[\s,]*")
_CHUNK_CHARACTERS = 1 << 16
# the most characters before the events, after them, or of one event: a file with more is not a trace
_MOST_CHARACTERS = 1 << 26
_GZIP_MAGIC = b"\x1f\x8b"


class OperatorEvents(NamedTuple):
    """The events of many operators, as columns of texts that are not decoded."""

    callers: Sequence[str]  # name, process and thread
    starts: Sequence[str]  # start times in microseconds, with three decimals
    lengths: Sequence[str]  # durations in microseconds, with three decimals
    arguments: Sequence[str]


# a decoded event (a mapping, unless the file is damaged), or ``OperatorEvents``
Event = Any


# is called with the number of bytes of the file that have been read
ReportPosition = Callable[[int], None]


def ignore_position(bytes_read: int) -> None:
    """Do nothing: the ``ReportPosition`` that shows no progress."""


def trace_events(
    path: Path,
    surroundings: dict[str, Any] | None = None,
    report_position: ReportPosition = ignore_position,
) -> Iterator[Event]:
    """Yield the events of ``path``, which may be compressed.

    After the last event, the other fields of the file are put into ``surroundings``: the devices, the rank, options of
    the profiler.

    Raises:
        ValueError: the file is not a whole trace.
    """
    try:
        with _open_text(path) as file:
            if surroundings is None:
                surroundings = {}
            yield from _events_of_text(file, surroundings, report_position)
    except (
        ValueError,
        EOFError,
        zlib.error,
        gzip.BadGzipFile,
        RecursionError,
    ) as error:
        raise ValueError(f"{path}: not a complete trace: {error}") from None


def _open_text(path: Path) -> TextIO:
    """Open ``path`` as text; bytes that are not UTF-8, which may occur in names, are replaced."""
    with path.open("rb") as file:
        is_compressed = file.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
    if is_compressed:
        return gzip.open(path, "rt", encoding="utf-8", errors="replace")
    return path.open(encoding="utf-8", errors="replace")


def _header_and_rest(file: TextIO) -> tuple[str, str]:
    """Read until the list of events begins; return the text before the list, and the text after its bracket."""
    text = ""
    begin = None
    while begin is None:
        # at least as many characters as before, because all of the text is searched again
        characters = file.read(max(_CHUNK_CHARACTERS, len(text)))
        text += characters
        begin = _EVENTS_BEGIN.search(text)
        if begin is None and (not characters or len(text) > _MOST_CHARACTERS):
            raise ValueError("it has no list of events (traceEvents)")
    return text[: begin.start()], text[begin.end() :]


def _bytes_read(file: TextIO) -> int:
    """Return how many bytes of the file on disk have been read, even if it is compressed."""
    unpacked_file = file.buffer
    disk_file = getattr(unpacked_file, "fileobj", unpacked_file)
    return int(disk_file.tell())


def _events_of_text(
    file: TextIO, surroundings: dict[str, Any], report_position: ReportPosition
) -> Iterator[Event]:
    """Yield the events in ``file``, and put its other fields into ``surroundings``.

    Raises:
        ValueError: it is not a whole trace.
    """
    header, text = _header_and_rest(file)
    is_list_alone = not header  # a file that is nothing but the list of events

    while True:
        report_position(_bytes_read(file))
        events, rest = _operators_first(text)
        yield from events
        events, position, is_end = _complete_events(rest)
        yield from events
        if is_end:
            break
        # the beginning of an event that has not been read completely
        rest = rest[position:]
        text = rest + _next_characters(file, unfinished_event=rest)

    # The rest of the file must be complete too; otherwise the profiler did not finish writing.
    beginning = "[" if is_list_alone else '{"traceEvents": ['
    tail = rest[position:]
    while characters := file.read(_CHUNK_CHARACTERS):
        tail += characters
        if len(tail) > _MOST_CHARACTERS:
            raise ValueError("too much follows its events")
    after_events = json.loads(beginning + tail, strict=False)
    if isinstance(after_events, dict):
        surroundings.update(_fields_before_events(header))
        surroundings.update(after_events)


def _fields_before_events(header: str) -> dict[str, Any]:
    """Return the fields before the events; empty if they are damaged, since the events can be used without them."""
    try:
        content = json.loads(header.rstrip().removesuffix(",") + "}", strict=False)
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _operators_first(text: str) -> tuple[list[Event], str]:
    """Return the events up to the last operator in ``text``, and the text after it."""
    # split yields for each operator the text before it and the groups of the pattern; last, the text after all
    *fields, rest = _OPERATOR_EVENT.split(text)
    fields_per_match = 1 + _GROUPS_OF_OPERATOR
    events: list[Event] = []
    for other_events in fields[::fields_per_match]:
        stripped = other_events.strip(", \t\r\n")
        if stripped:
            events.extend(json.loads(f"[{stripped}]", strict=False))
    columns = [fields[group::fields_per_match] for group in range(1, fields_per_match)]
    if columns[0]:
        events.append(OperatorEvents(*columns))
    return events, rest


def _complete_events(text: str) -> tuple[list[Event], int, bool]:
    """Return the first complete events of ``text``, the position after them, and whether the list ends there."""
    # strict=False, because names may contain tabs
    decode = json.JSONDecoder(strict=False).raw_decode
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
        except json.JSONDecodeError:
            # usually the end of the event has not been read yet
            return events, position, False
        events.append(event)


def _next_characters(file: TextIO, unfinished_event: str) -> str:
    """Read at least as many characters as ``unfinished_event`` has: so a long event is decoded only a few times.

    Raises:
        ValueError: the file ends, or has an event that is too long.
    """
    if len(unfinished_event) > _MOST_CHARACTERS:
        raise ValueError("it has an event that does not end")
    characters = file.read(max(_CHUNK_CHARACTERS, len(unfinished_event)))
    if not characters:
        raise ValueError("it ends, or is damaged, before the end of its events")
    return characters
