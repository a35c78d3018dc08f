"""The classes that a call names: imported here first, so that what is wrong with a module is told in its own words."""

from __future__ import annotations

import sys
import traceback
from importlib import import_module
from typing import Any, get_type_hints

from lightning.pytorch import LightningDataModule, LightningModule

from lm_profiler.measure.boundary import said
from lm_profiler.usage_error import UsageError

_BASES = {"model": LightningModule, "data": LightningDataModule}


def class_at(path: str, key: str) -> Any:
    """The class or the function at the import path ``path``; None for anything else, of which the parser tells.

    Raises:
        UsageError: its module was found and breaks when imported; the message names error, file and line.
    """
    module, _, name = path.rpartition(".")
    if not module or not all(part.isidentifier() for part in path.split(".")):
        return None
    try:
        named = getattr(import_module(module), name, None)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module}.".startswith(f"{error.name}."):
            return None
        raise _broken(path, key, error) from error
    except (Exception, SystemExit) as error:
        raise _broken(path, key, error) from error
    made = named if isinstance(named, type) else _returns(named)
    return named if isinstance(made, type) and issubclass(made, _BASES[key]) else None


def _returns(function: Any) -> Any:
    """What a function says that it returns."""
    try:
        return get_type_hints(function).get("return")
    except (NameError, TypeError):
        return None


def _broken(path: str, key: str, error: BaseException) -> UsageError:
    return UsageError(
        f"{key}: expected a class that can be imported, given {path!r}, whose module does not import\n"
        f"{_place(error)}: {said(error)}"
    )


def _place(error: BaseException) -> str:
    """File and line at which the user's own code failed."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{error.filename}:{error.lineno}"
    at = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in at if not frame.filename.startswith(("<frozen", __file__))]
    # What Python and installed packages do is not where the fault lies, if a file of the user's led there.
    own = [frame for frame in frames if not frame.filename.startswith((sys.prefix, sys.base_prefix))]
    last = (own or frames)[-1:]
    return f"{last[0].filename}:{last[0].lineno}" if last else "unknown place"
