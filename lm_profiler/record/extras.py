"""What only some installations have, and the one way to say that it is missing."""

from __future__ import annotations

from importlib import import_module

EXTRA_OF = {
    "matplotlib": "report",
    "plotly": "report",
    "pyarrow": "parquet",
    "submitit": "slurm",
    "viztracer": "perfetto",
}
"""The extra of this package that brings a module; pyproject.toml says the same."""


class MissingExtra(ImportError):
    """A call needs an extra that is not installed: a wrong call, in a line for the terminal."""


def require(module: str, subject: str) -> None:
    """Import ``module``, which ``subject`` (an option, mostly) needs.

    Raises:
        MissingExtra: it cannot be imported.
    """
    try:
        import_module(module)
    except ImportError:
        raise MissingExtra(
            f"{subject}: expected {module}, which is not installed; pip install 'lm_profiler[{EXTRA_OF[module]}]'"
        ) from None
