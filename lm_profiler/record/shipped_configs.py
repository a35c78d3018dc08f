"""The configs that come with the package, which `--config demo` and `sweep demo` name."""

from __future__ import annotations

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
