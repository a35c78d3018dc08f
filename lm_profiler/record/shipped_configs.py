"""The configs that come with the package, which `--config demo` and `sweep demo` name."""

from __future__ import annotations

from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path

_SUFFIX = ".yaml"


def names(below: str = "") -> list[str]:
    """The names of the shipped configs, or of the shipped sweeps (``below`` is ``sweeps``)."""
    folder = files("lm_profiler") / "configs" / below
    return sorted(file.name.removesuffix(_SUFFIX) for file in folder.iterdir() if file.name.endswith(_SUFFIX))


def config_file(given: str, below: str = "") -> str:
    """The path of the config that somebody calls ``given``: a file's own path, or the name of a shipped one.

    A file that is called so, in the current folder, goes before a shipped one.
    """
    if given not in names(below) or Path(given).is_file():
        return given
    return str(files("lm_profiler") / "configs" / below / f"{given}{_SUFFIX}")


def instead_of(given: str, below: str = "") -> str:
    """What to add where there is no file ``given``: the shipped names, if it may be a misspelt one."""
    misspelt = "/" not in given and not given.endswith((_SUFFIX, ".yml", ".json"))
    if close := get_close_matches(given, names(below), n=1) if misspelt else []:
        return f"; did you mean {close[0]}?"
    return f"; shipped are {', '.join(names(below))}" if misspelt else ""
