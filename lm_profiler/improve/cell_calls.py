"""The calls of an improvement's cells: of a setting, what is looked at in it, and the name that tells both."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from lm_profiler.record.run import RunRecord
from lm_profiler.record.sweep import Cell

FIRST, CHECK = "first", "check"
"""The name of the first setting's cells, and the end of the name of those whose numbers are looked at."""

_LONGEST_ID = 100
_TIMED = {f"{name}.steps": "0" for name in ("actions", "memory", "trace", "whatif")} | {"numerics.audit": "false"}
"""Of cells that are only timed: whatever comes after the measured steps is left out."""
_CHECKED = {**_TIMED, "memory.steps": "1", "numerics.audit": "true", "numerics.losses": "10"}
NOT_REHEARSED = {"check_memory": "false"}
"""Of a setting that has fitted before: to plan it again takes a fifth of a cell."""
_LOOKED = {"numerics.audit": "true", "numerics.losses": "10"}


_PREFETCH = 2
"""Batches that each worker of a DataLoader makes ahead, if not told otherwise."""


def setting_of(cell: Cell) -> str:
    """What tells the cells of one setting from all others."""
    return cell.id.rpartition(",")[0]


def look_cell(folder: Path, call: Sequence[str]) -> Cell:
    """The cell of ``Cells.look``: the first of all."""
    return _cell(folder, call, {}, "look", _LOOKED)


def check_cell(folder: Path, call: Sequence[str], options: Mapping[str, str]) -> Cell:
    """The cell of ``Cells.check``."""
    return _cell(folder, call, options, CHECK, _CHECKED)


def seed_cell(folder: Path, call: Sequence[str], seed: int) -> Cell:
    """The cell of ``Cells.under``: the first setting's losses under another seed."""
    return _cell(folder, call, {}, f"seed{seed}", {**_CHECKED, "numerics.audit": "false", "seed_everything": str(seed)})


def timed_cell(
    folder: Path, call: Sequence[str], options: Mapping[str, str], number: int, warm: Mapping[str, str] | None = None
) -> Cell:
    """The cell of ``Cells.time``."""
    return _cell(folder, call, options, f"r{number}", {**_TIMED, **(warm or {})}, number)


def warm_up(options: Mapping[str, str], first: RunRecord | None) -> dict[str, str]:
    """A longer warm-up where workers make more batches ahead than the ``first`` one took: those are used up in it."""
    if first is None or first.loader is None:
        return {}
    workers = [int(text) for name, text in options.items() if name.endswith(".num_workers") and text.isdecimal()]
    ahead = max([first.loader.ahead or 0, *(_PREFETCH * count for count in workers)])
    batches = 1 if first.model is None else first.model.accumulate_grad_batches
    steps = 1 + math.ceil(ahead / batches)  # the first, during which they are made
    return {} if steps <= first.steps_planned.get("warmup", steps) else {"stages.warmup_steps": str(steps)}


def _cell(
    folder: Path,
    call: Sequence[str],
    options: Mapping[str, str],
    suffix: str,
    instruments: Mapping[str, str],
    number: int = 0,
) -> Cell:
    """The cell of a setting: ``call`` with these ``options``, in whatever order they are given."""
    options = dict(sorted(options.items()))
    shown = options if "numerics.losses" not in instruments else {**options, "numerics.audit": "true"}
    cell_id = f"{_name(options)},{suffix}"
    words = [f"--{name}={text}" for name, text in {**instruments, **options}.items()]
    arguments = [*call, *words, f"--log_dir={folder}", f"--name={cell_id}"]
    return Cell(id=cell_id, overrides=shown, repeat=number, arguments=arguments)


def _name(options: Mapping[str, str]) -> str:
    """Of letters that any file system takes; what they cannot tell apart, a digest does."""
    if not options:
        return FIRST
    text = ",".join(f"{name.removeprefix('trainer.')}={value}" for name, value in options.items())
    plain = re.sub(r"[^A-Za-z0-9._+=,-]+", "-", text)
    if plain == text and len(text) <= _LONGEST_ID and text == text.lower():
        return text
    digest = hashlib.sha256(repr(options).encode()).hexdigest()[:8]
    return f"{plain[: _LONGEST_ID - 9]}-{digest}"
