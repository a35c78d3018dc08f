"""Functions for text and YAML of users, which keep everything as it was written."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import yaml


def printable(text: str, keep: str = "\n\t") -> str:
    """Return ``text`` with control characters spelled out, such as ``\\x1b`` for the escape character."""
    if text.isprintable():
        return text
    characters = []
    for character in text:
        if character.isprintable() or character in keep:
            characters.append(character)
        else:
            characters.append(ascii(character)[1:-1])
    return "".join(characters)


def well_formed(text: str) -> str:
    """Return ``text`` with lone surrogates, which names of files may have, spelled out: UTF-8 does not allow them."""
    return text.encode("utf-8", "backslashreplace").decode()


def shortened(name: str, most_characters: int = 48) -> str:
    """Return a long ``name`` without its middle, so that labels leave room for a picture; more of its end is kept."""
    if len(name) <= most_characters:
        return name
    head = most_characters // 3
    tail = most_characters - head - 1
    return f"{name[:head]}…{name[-tail:]}"


def short_path(path: str) -> str:
    """Return a code file's name; for library code, the path inside site-packages."""
    return path.partition("site-packages/")[2] or Path(path).name


def ranks_text(ranks: Iterable[int]) -> str:
    """Return ``ranks`` as text, such as ``rank 3`` or ``ranks 0, 2–5``."""
    numbers = sorted(ranks)
    runs: list[list[int]] = []  # each has consecutive numbers
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = []
    for run in runs:
        texts.append(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}")
    word = "rank" if len(numbers) == 1 else "ranks"
    return f"{word} {', '.join(texts)}"


_NULL = "tag:yaml.org,2002:null"  # the tag of ``null``, ``~`` and an empty value (without quotes)

# errors of reading YAML; ValueError is raised for a date such as 2001-99-99, and for a number of 5000 digits
_ERRORS = (yaml.YAMLError, ValueError, OverflowError, RecursionError)


class YamlTextError(ValueError):
    """A text is not valid YAML. The message continues the name of the text: "is not YAML at line 2: …"."""


def read_text(path: Path) -> str:
    """Return the text of ``path``, which is read only once, because it may be a pipe."""
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        raise YamlTextError("is not text") from None


def compose(text: str) -> yaml.Node | None:
    """Return the YAML nodes of ``text``, with scalars as text; None if there are none."""
    try:
        node: yaml.Node | None = yaml.compose(text, Loader=yaml.SafeLoader)
        yaml.safe_load(text)  # checks that values can be read
        return node
    except YamlTextError:
        raise
    except _ERRORS as error:
        mark = getattr(error, "problem_mark", None)
        place = "" if mark is None else f" at line {mark.line + 1}"
        lines = str(error).splitlines() or ["it cannot be read"]
        problem = getattr(error, "problem", None) or lines[0][:200]
        raise YamlTextError(f"is not YAML{place}: {problem}") from None


def text_of(node: yaml.Node) -> str:
    """Return a value as text for a command line: a scalar as it was written, anything else as one line of YAML."""
    if isinstance(node, yaml.ScalarNode):
        return "null" if node.tag == _NULL else str(node.value)
    _set_flow_style(node)
    return str(yaml.serialize(node, width=10**6)).strip()


def _set_flow_style(node: yaml.Node) -> None:
    """Make ``node`` and all nodes in it be written in one line."""
    if isinstance(node, yaml.MappingNode):
        node.flow_style = True
        for key, value in node.value:
            _set_flow_style(key)
            _set_flow_style(value)
    elif isinstance(node, yaml.SequenceNode):
        node.flow_style = True
        for item in node.value:
            _set_flow_style(item)


def text_without_keys(node: yaml.Node, keys: set[str]) -> str:
    """Return the mapping ``node`` as text without some of its keys; other values stay as they were written."""
    entries = [(key, value) for key, value in node.value if key.value not in keys]
    return str(yaml.serialize(yaml.MappingNode(node.tag, entries)))
