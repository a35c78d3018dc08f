"""The words of a command line, options with their values, and the files of options that they name.

Nothing else reads either. Imports no parser: a wrong file is told at once.
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

MANY = sys.maxsize

_EXPECTED = "config: expected a YAML file of options"


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


def is_text(path: str) -> bool:
    """Whether a config is given by its text: so are the other ranks of a run, whose config came through a pipe."""
    return "\n" in path or path.startswith("{")


def read_config(path: str, shipped: str = "") -> tuple[yaml.MappingNode, str]:
    """The nodes and the text of the config ``path``, which is opened once; a config may also be given as text.

    Args:
        path: The file, or the name of a config that comes with the package.
        shipped: The folder of those names: ``sweeps`` for sweeps.

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
    """The shipped config that was probably meant, else all of them; nothing where ``path`` looks like a file."""
    if "/" in path or path.endswith((".yaml", ".yml", ".json")):
        return ""
    known = by_name(shipped)
    return f"; did you mean {close}?" if (close := nearest(path, known)) else f"; shipped are {', '.join(known)}"
