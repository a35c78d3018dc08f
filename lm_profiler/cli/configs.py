"""The files of options that a call names."""

from __future__ import annotations

from pathlib import Path

import yaml

from lm_profiler.cli.usage import nearest
from lm_profiler.record.calls import by_name, config_file
from lm_profiler.record.text import YamlTextError, compose, read_text
from lm_profiler.usage_error import UsageError

_EXPECTED = "config: expected a YAML file of options"


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
