"""The words of a command line: options with their values, and words that belong to none. Nothing else reads it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

MANY = sys.maxsize


class Option(NamedTuple):
    """An option as it was written; the ``name`` is empty for a word that belongs to none, which is its value."""

    name: str
    values: Sequence[str]
    words: Sequence[str]

    @property
    def value(self) -> str:
        """The one value; empty where there is none."""
        return self.values[0] if self.values else ""


def options_in(arguments: Sequence[str], takes: Callable[[str], int] = lambda name: 1) -> Iterator[Option]:
    """The options in ``arguments``; ``takes`` says how many values one may have, 1 where its name is unknown.

    >>> [option[:2] for option in options_in(["fit", "--config", "a.yaml", "--model.size=large"])]
    [('', ['fit']), ('config', ['a.yaml']), ('model.size', ['large'])]
    """
    left = list(arguments)
    while left:
        word = left.pop(0)
        name, equals, value = word.partition("=")
        name = {"-c": "--config", "-h": "--help"}.get(name, name)
        if not name.startswith("--") or name == "--":
            yield Option("", [word], [word])
            continue
        values = [value] if equals else []
        most = takes(name[2:])
        while not equals and left and len(values) < most and not left[0].startswith("--"):
            values.append(left.pop(0))
        if not most and not equals and left and left[0].lower() in ("true", "false"):  # no file is called that
            values.append(left.pop(0))
        yield Option(name[2:], values, [word] if equals else [word, *values])
