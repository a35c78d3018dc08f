"""The names of the ranges that our instruments put into a trace, and functions that recognise them.

The names begin with a mark (``lm_profiler``), because a program may name its own ranges ``phase: rollout``. They are
ASCII, because Kineto replaces other names by "unknown". Traces of version 0.2 and before have no mark.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import quote, unquote

from lm_profiler.record.parts import BETWEEN_STEPS, PARTS

STEP_PREFIX = "ProfilerStep#"  # torch.profiler's own

_PHASE = "lm_profiler phase: "
_MODULE = "lm_profiler module: "
_REPEATED = "lm_profiler repeated: "
_UNMARKED_PHASE = "phase: "
_UNMARKED_MODULE = "module: "

# the parts of a run that may have a range
_PARTS_WITH_RANGE = frozenset({*PARTS, BETWEEN_STEPS})

_PATH_AND_TYPE = re.compile(r"(?P<path>.*?)(?: \((?P<type>\w+)\))?")

_KEPT_IN_ASCII = "".join(chr(code) for code in range(0x20, 0x7F) if chr(code) != "%")


class ModuleName(NamedTuple):
    """The path of a module within the trained one, and the name of its class if the range has it."""

    path: str
    type_name: str | None


def phase_range_name(part: str) -> str:
    """Return the name of the range of a part of the step, or of the time between steps."""
    return _PHASE + part


def module_range_name(path: str, type_name: str) -> str:
    """Return the name of the range of a module's forward pass; characters that are not ASCII are percent-encoded."""
    return _MODULE + quote(f"{path} ({type_name})", safe=_KEPT_IN_ASCII)


def repeated_range_name(path: str, type_name: str) -> str:
    """Return the name of the range of a repeated forward pass: the module had the same inputs before in this step.

    ``path`` is empty for the trained module itself.
    """
    module_name = f"{path} ({type_name})" if path else type_name
    return _REPEATED + quote(module_name, safe=_KEPT_IN_ASCII)


def repeated_module_in(range_name: str) -> str | None:
    """Return the module if ``range_name`` is that of a repeated forward pass; otherwise None."""
    if not range_name.startswith(_REPEATED):
        return None
    return unquote(range_name.removeprefix(_REPEATED))


def phase_in(range_name: str, is_marked: bool) -> str | None:
    """Return the phase if ``range_name`` is that of a phase; otherwise None.

    ``is_marked`` is whether the instruments of this trace mark their names.
    """
    prefix = _PHASE if is_marked else _UNMARKED_PHASE
    if not range_name.startswith(prefix):
        return None
    part = range_name.removeprefix(prefix)
    return part if part in _PARTS_WITH_RANGE else None


@lru_cache(maxsize=4096)
def module_in(range_name: str, is_marked: bool) -> ModuleName | None:
    """Return the module if ``range_name`` is that of a module's forward pass; otherwise None."""
    prefix = _MODULE if is_marked else _UNMARKED_MODULE
    if not range_name.startswith(prefix):
        return None
    match = _PATH_AND_TYPE.fullmatch(unquote(range_name.removeprefix(prefix)))
    if match is None:  # a line break in a name
        return None
    return ModuleName(match["path"], match["type"])


def is_marked_range(range_name: str) -> bool:
    """Return whether ``range_name`` carries the mark of the instruments."""
    return range_name.startswith((_PHASE, _MODULE, _REPEATED))
