"""Make the calls of an improvement's cells from a setting and the instruments that a cell needs."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from lm_profiler.record.run import RunRecord
from lm_profiler.record.sweep import Cell

# the name of the first setting in cell ids, and the suffix of cells whose numerics are compared
FIRST, CHECK = "first", "check"

_LONGEST_ID = 100
# options of cells that are only timed: they leave out all stages after the measured steps
_TIMED = {f"{name}.steps": "0" for name in ("actions", "memory", "trace")} | {"numerics.audit": "false"}

_CHECKED = {**_TIMED, "memory.steps": "1", "numerics.audit": "true", "numerics.losses": "10"}
# options of a setting that has fitted before: planning it again takes a fifth of a cell's time
NOT_REHEARSED = {"check_memory": "false"}

_LOOKED = {"numerics.audit": "true", "numerics.losses": "10"}

_PREFETCH = 2  # batches that each worker of a torch DataLoader prefetches by default (``prefetch_factor``)


def setting_of(cell: Cell) -> str:
    """Return the part of the cell's id that all cells of its setting share."""
    return cell.id.rpartition(",")[0]


def look_cell(folder: Path, call: Sequence[str]) -> Cell:
    """Return the cell of ``Cells.look``, the first of all cells."""
    return _cell(folder, call, {}, "look", _LOOKED)


def check_cell(folder: Path, call: Sequence[str], options: Mapping[str, str]) -> Cell:
    """Return the cell of ``Cells.check``."""
    return _cell(folder, call, options, CHECK, _CHECKED)


def seed_cell(folder: Path, call: Sequence[str], seed: int) -> Cell:
    """Return the cell of ``Cells.under``, which records the first setting's losses under another seed."""
    return _cell(folder, call, {}, f"seed{seed}", {**_CHECKED, "numerics.audit": "false", "seed_everything": str(seed)})


def timed_cell(
    folder: Path, call: Sequence[str], options: Mapping[str, str], number: int, warm: Mapping[str, str] | None = None
) -> Cell:
    """Return the cell of ``Cells.time``; ``warm`` are the options of its warm-up."""
    return _cell(folder, call, options, f"r{number}", {**_TIMED, **(warm or {})}, number)


def warm_up(options: Mapping[str, str], first: RunRecord | None) -> dict[str, str]:
    """Return options for a longer warm-up where workers prefetch more batches than the ``first`` run's warm-up uses."""
    if first is None or first.loader is None:
        return {}
    workers = [int(text) for name, text in options.items() if name.endswith(".num_workers") and text.isdecimal()]
    ahead = max([first.loader.ahead or 0, *(_PREFETCH * count for count in workers)])
    batches = 1 if first.model is None else first.model.accumulate_grad_batches
    steps = 1 + math.ceil(ahead / batches)  # one more: batches are prefetched during the first step
    return {} if steps <= first.steps_planned.get("warmup", steps) else {"stages.warmup_steps": str(steps)}


def _cell(
    folder: Path,
    call: Sequence[str],
    options: Mapping[str, str],
    suffix: str,
    instruments: Mapping[str, str],
    number: int = 0,
) -> Cell:
    """Return the cell of a setting: ``call`` with these ``options``; their order does not matter."""
    # One setting has one name, in whatever order the search has collected its options.
    options = dict(sorted(options.items()))
    shown = options if "numerics.losses" not in instruments else {**options, "numerics.audit": "true"}
    cell_id = f"{_name(options)},{suffix}"
    words = [f"--{name}={text}" for name, text in {**instruments, **options}.items()]
    arguments = [*call, *words, f"--log_dir={folder}", f"--name={cell_id}"]
    return Cell(id=cell_id, overrides=shown, repeat=number, arguments=arguments)


def _name(options: Mapping[str, str]) -> str:
    """Return a name of the setting that any file system accepts, with a digest where characters had to be replaced."""
    if not options:
        return FIRST
    text = ",".join(f"{name.removeprefix('trainer.')}={value}" for name, value in options.items())
    plain = re.sub(r"[^A-Za-z0-9._+=,-]+", "-", text)
    if plain == text and len(text) <= _LONGEST_ID and text == text.lower():
        return text
    digest = hashlib.sha256(repr(options).encode()).hexdigest()[:8]
    return f"{plain[: _LONGEST_ID - 9]}-{digest}"
