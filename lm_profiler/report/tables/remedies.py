"""Commands to paste after runs that did not fit: those that would fit instead."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lm_profiler.record.calls import command_line
from lm_profiler.record.entry import Entry
from lm_profiler.record.secrets import masked_line

_MOST = 5
"""The most runs that a table gives advice for."""


def remedies(entries: Sequence[Entry]) -> list[str]:
    """Return, for each of ``entries`` that did not fit, a command that would fit as planned, and other options.

    The run itself asked the planner and recorded the answer. Where it did not, the line says how to ask.
    """
    advice: dict[tuple[str, ...], list[str]] = {}
    for entry in entries:
        if lines := tuple(_remedies(entry)):
            advice.setdefault(lines, [f"{entry.name}:", *lines])  # repeats end alike and are told once
    shown = [line for lines in list(advice.values())[:_MOST] for line in lines]
    return shown + [f"{len(advice) - _MOST} more did not fit"] * (len(advice) > _MOST)


def _remedies(entry: Entry) -> Iterator[str]:
    if entry.status not in ("oom", "refused"):
        return
    failure = entry.record.failure if entry.record is not None else None
    if failure is not None and failure.remedies:
        first, *others = failure.remedies
        yield f"  would fit, as planned: {_command(entry)} {first}"
        if others:
            yield f"  or instead: {' or '.join(others)}"
    elif (command := _command(entry).replace(" -m lm_profiler fit ", " -m lm_profiler plan ", 1)) != _command(entry):
        yield f"  what would fit: {command}"


def _command(entry: Entry) -> str:
    """Return the call of ``entry`` on its own, without the options that a sweep adds to keep its cells apart."""
    if entry.cell is None:
        return entry.record.command if entry.record is not None else ""
    own = [given for given in entry.cell.arguments if not given.startswith(("--log_dir=", "--name="))]
    return command_line(masked_line(own))
