"""Split a command line into options with their values, and read the config files that they name.

No other module reads either. This one imports no parser, so that a wrong file is reported at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import yaml

from lm_profiler.cli.errors import nearest
from lm_profiler.record.calls import by_name, config_file
from lm_profiler.record.text import YamlTextError, compose, read_text
from lm_profiler.usage_error import UsageError

MANY = sys.maxsize  # the number of values of an option that takes any number of them

_EXPECTED = "config: expected a YAML file of options"


class Option(NamedTuple):
    """An option as it was written; a word that belongs to no option is the value of one with an empty ``name``."""

    name: str
    values: Sequence[str]
    words: Sequence[str]

    @property
    def value(self) -> str:
        """The first value, or an empty text where there is none."""
        return self.values[0] if self.values else ""


def options_in(arguments: Sequence[str], takes: Callable[[str], int] = lambda name: 1) -> Iterator[Option]:
    """Yield the options in ``arguments``; ``takes`` returns how many values an option may have.

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
        # A flag takes a boolean that follows it: no positional argument is called "true".
        if not most and not equals and left and left[0].lower() in ("true", "false"):
            values.append(left.pop(0))
        yield Option(name[2:], values, [word] if equals else [word, *values])


def is_text(path: str) -> bool:
    """Whether a config is given as its text, as it is for the other ranks of a run whose config came through a pipe."""
    return "\n" in path or path.startswith("{")


def read_config(path: str, shipped: str = "") -> tuple[yaml.MappingNode, str]:
    """Return the nodes and the text of the config ``path``; a config may also be given as text.

    Args:
        path: The file, or the name of a config that comes with the package. It is opened once: it may be a pipe.
        shipped: The folder of the package in which the name is looked up, such as ``sweeps``.

    Raises:
        UsageError: it is missing, unreadable, not YAML, not a mapping of options, or larger than people write.
    """
    if not path:
        raise UsageError(f"{_EXPECTED}, given none")
    try:
        text = path if is_text(path) else read_text(Path(config_file(path, shipped)))
        node = compose(text)
    except OSError as error:
        raise UsageError(f"{_EXPECTED}, given {path[:200]} ({error.strerror}){_instead_of(path, shipped)}") from None
    except YamlTextError as error:
        raise UsageError(f"{_EXPECTED}, given {path[:200]}, which {error}") from None
    if isinstance(node, yaml.MappingNode):
        return node, text
    content = None if node is None else yaml.safe_load(text)
    what = "nothing" if content is None else f"a {type(content).__name__}"
    raise UsageError(f"{_EXPECTED}, given {path[:200]}, which holds {what}; write for example `model: {{size: small}}`")


def _instead_of(path: str, shipped: str) -> str:
    """Suggest the closest shipped config, or list them all; return nothing where ``path`` looks like a file."""
    if "/" in path or path.endswith((".yaml", ".yml", ".json")):
        return ""
    known = by_name(shipped)
    return f"; did you mean {close}?" if (close := nearest(path, known)) else f"; shipped are {', '.join(known)}"
