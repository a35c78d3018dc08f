"""Reads the events of a trace file, one part after the other: as one document a trace takes a gigabyte."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

# No string of a trace looks like this: a quote inside of one has a backslash before it. Some tools write only the list.
_EVENTS_BEGIN = re.compile(r'\A\s*\[|"traceEvents"\s*:\s*\[')

# An operator's event as the profiler writes it, nine in ten of all: to find it takes a tenth of decoding it. An event
# of attention is decoded, because its values count; so is one with an impossible time, which is left out then.
_OPERATOR_EVENT = re.compile(
    r'\{\s*"ph": "X",\s*"cat": "cpu_op",\s*("name": "(?![^"]*attention)[^"]*",\s*"pid": [^,]*,\s*"tid": [^,]*),\s*'
    r'"ts": ([0-3]?[0-9]{1,15}\.[0-9]{3}),\s*"dur": ([0-9]{1,12}\.[0-9]{3})\s*,\s*'
    r'"args": \{\n([^\n]*), "Ev Idx": \d+\n\s*\}\s*\}'
)
_GROUPS_OF_OPERATOR = 4  # groups of the pattern above
_BETWEEN_EVENTS = re.compile(r"[\s,]*")  # matches the empty string, too
_CHUNK_CHARACTERS = 1 << 16
# of what stands before the events, or of one event: a file with more is no trace
_MOST_CHARACTERS = 1 << 26
_GZIP_MAGIC = b"\x1f\x8b"


class OperatorEvents(NamedTuple):
    """Many operators' events, as they stand in the file: a column of texts for each field that counts."""

    callers: Sequence[str]  # name, process and thread
    starts: Sequence[str]  # in microseconds with three decimals, as lengths
    lengths: Sequence[str]
    arguments: Sequence[str]


Event = Any  # a decoded event, a mapping unless the file is damaged; or ``OperatorEvents``, which are not decoded


# gets how many bytes of the file are read so far
ReportPosition = Callable[[int], None]


def ignore_position(bytes_read: int) -> None:
    """Show no progress."""


def trace_events(
    path: Path,
    surroundings: dict[str, Any] | None = None,
    report_position: ReportPosition = ignore_position,
) -> Iterator[Event]:
    """Yield the events of ``path``, which may be compressed.

    ``surroundings`` gets what stands around them once all are read: the devices, the rank, the profiler's options.

    Raises:
        ValueError: the file is not a whole trace.
    """
    try:
        with _opened(path) as file:
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
        raise ValueError(f"{path}: not a whole trace: {error}") from None


def _opened(path: Path) -> TextIO:
    """Open ``path`` as text. Bytes that are not UTF-8, which a name may hold, are replaced."""
    with path.open("rb") as file:
        is_compressed = file.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
    if is_compressed:
        return gzip.open(path, "rt", encoding="utf-8", errors="replace")
    return path.open(encoding="utf-8", errors="replace")


def _header_and_rest(file: TextIO) -> tuple[str, str]:
    """Read up to the events: return the text before their list, and the text behind its opening bracket."""
    text = ""
    begin = None
    while begin is None:
        characters = file.read(max(_CHUNK_CHARACTERS, len(text)))
        text += characters
        begin = _EVENTS_BEGIN.search(text)
        if begin is None and (not characters or len(text) > _MOST_CHARACTERS):
            raise ValueError("it has no list of events (traceEvents)")
    return text[: begin.start()], text[begin.end() :]


def _bytes_read(file: TextIO) -> int:
    """Return how many bytes of the file on disk are read, of a compressed one too."""
    unpacked_file = file.buffer
    disk_file = getattr(unpacked_file, "fileobj", unpacked_file)
    return int(disk_file.tell())


def _events_of_text(
    file: TextIO, surroundings: dict[str, Any], report_position: ReportPosition
) -> Iterator[Event]:
    """Yield the events in ``file``, many operators at a time; ``surroundings`` gets the fields beside the events.

    Raises:
        ValueError: it is no whole trace.
    """
    header, text = _header_and_rest(file)
    is_list_alone = not header

    while True:
        report_position(_bytes_read(file))
        events, rest = _operators_first(text)
        yield from events
        events, position, is_end = _whole_events(rest)
        yield from events
        if is_end:
            break
        rest = rest[position:]
        text = rest + _next_characters(file, held=rest)

    # What follows must be whole as well, or the profiler did not come to the end.
    beginning = "[" if is_list_alone else '{"traceEvents": ['
    tail = rest[position:]
    while characters := file.read(_CHUNK_CHARACTERS):
        tail += characters
        if len(tail) > _MOST_CHARACTERS:
            raise ValueError("too much follows its events")
    after_events = json.loads(beginning + tail, strict=False)
    if isinstance(after_events, dict):
        surroundings.update(_before_events(header))
        surroundings.update(after_events)


def _before_events(header: str) -> dict[str, Any]:
    """Return the fields that stand before the events; none if they are damaged, which costs no event."""
    try:
        content = json.loads(header.rstrip().removesuffix(",") + "}", strict=False)
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _operators_first(text: str) -> tuple[list[Event], str]:
    """Return the events up to the last operator that ``text`` holds, and the text behind it."""
    *fields, rest = _OPERATOR_EVENT.split(text)
    # the text before an operator, then the operator's groups
    fields_a_match = 1 + _GROUPS_OF_OPERATOR
    events: list[Event] = []
    for other_events in fields[::fields_a_match]:
        stripped = other_events.strip(", \t\r\n")
        if stripped:
            events.extend(json.loads(f"[{stripped}]", strict=False))
    columns = [fields[group::fields_a_match] for group in range(1, fields_a_match)]
    if columns[0]:
        events.append(OperatorEvents(*columns))
    return events, rest


def _whole_events(text: str) -> tuple[list[Event], int, bool]:
    """Return the events that ``text`` holds whole, the position behind them, and whether the list ends there."""
    # a name may hold a tabulator as it is
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
        except json.JSONDecodeError:  # as a rule the event's end is not read yet
            return events, position, False
        events.append(event)


def _next_characters(file: TextIO, held: str) -> str:
    """Return the next characters, at least as many as are ``held``, so that a long event is not decoded too often."""
    if len(held) > _MOST_CHARACTERS:
        raise ValueError("it has an event that does not end")
    characters = file.read(max(_CHUNK_CHARACTERS, len(held)))
    if not characters:
        raise ValueError("it ends, or is damaged, before the end of its events")
    return characters
