"""The configs that come with the package, which `--config demo` and `sweep demo` name."""

from __future__ import annotations

from pathlib import Path


def by_name(below: str = "") -> dict[str, str]:
    """The paths of the shipped configs by their names, or those of the shipped sweeps (``below`` is ``sweeps``)."""
    folder = Path(__file__).parent.parent / "configs" / below
    return {file.stem: str(file) for file in sorted(folder.glob("*.yaml"))}


def config_file(given: str, below: str = "") -> str:
    """The path of the config that somebody calls ``given``: a file's own path, or the name of a shipped one.

    A file that is called so, in the current folder, goes before a shipped one.
    """
    shipped = by_name(below)
    return given if given not in shipped or Path(given).is_file() else shipped[given]
