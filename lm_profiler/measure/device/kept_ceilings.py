"""The machine's ceilings as earlier runs found them: one short look may have been at a machine that others used."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from math import isfinite
from pathlib import Path
from typing import NamedTuple

import torch

from lm_profiler.measure.device.ceiling import matmul_ceiling
from lm_profiler.measure.device.copy_rate import copy_rate
from lm_profiler.measure.device.environment import cpu_name, device_name
from lm_profiler.measure.device.precision import float32_matmul_precision
from lm_profiler.record.files import write_whole
from lm_profiler.record.reading import read_json

AGREE = 0.8
"""A reading of less than this share of the kept one, or one that beats it by as much, is of another state of things."""


def cache_folder() -> Path:
    """Where programs keep what they can find out again (XDG Base Directory Specification 0.8)."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (given if given.is_absolute() else Path.home() / ".cache") / "lm_profiler"


def known_ceiling(
    device: torch.device,
    dtype: torch.dtype,
    say: Callable[[str], None],
    folder: Path | None = None,
    probe: Callable[[torch.device, torch.dtype], float | None] = matmul_ceiling,
) -> float | None:
    """The ceiling of this machine in FLOP/s: the better of what is read now and what was kept, where the two agree.

    The best reading is kept in a file for each device, CPU, number of threads, dtype, precision and version of torch.
    What cannot be read or written there is as if nothing had been kept; processes that write at once leave one whole
    reading.

    Args:
        say: Told why the ceiling is unknown, where a reading was made that disagrees.
        folder: Where readings are kept; ``cache_folder()`` if not given.
        probe: Reads the ceiling.
    """
    of = {"dtype": str(dtype).removeprefix("torch."), "precision": float32_matmul_precision(device.type)}
    return _agreed(
        _Kind("ceiling", "matmul rate", "flops_per_s", "FLOP/s"), probe(device, dtype), device, of, say, folder
    )


def known_copy_rate(
    device: torch.device,
    say: Callable[[str], None],
    folder: Path | None = None,
    probe: Callable[[torch.device], float | None] = copy_rate,
) -> float | None:
    """The memory bandwidth of this machine in bytes/s, by copying; kept as ``known_ceiling``."""
    return _agreed(_Kind("bandwidth", "copy rate", "bytes_per_s", "B/s"), probe(device), device, {}, say, folder)


class _Kind(NamedTuple):
    """What is read: its name, what it is called in words, its key in the file and its unit."""

    name: str
    words: str
    key: str
    unit: str


def _agreed(
    kind: _Kind,
    rate: float | None,
    device: torch.device,
    of: Mapping[str, str],
    say: Callable[[str], None],
    folder: Path | None,
) -> float | None:
    if rate is None:
        return None
    try:
        path = (folder or cache_folder()) / f"{kind.name}-{_digest(device, of)}.json"
    except RuntimeError:  # without a home
        return rate
    kept = _read(path, kind.key)
    if kept is None or rate > kept:
        _write(path, kind.key, rate)
    if kept is not None and min(rate, kept) < AGREE * max(rate, kept):
        say(
            f"{kind.name} unknown: the {kind.words} measured here was {rate / 1e9:.3g} G{kind.unit} now and "
            f"{kept / 1e9:.3g} G{kind.unit} before: something else uses it, or did; if it was changed, remove {path}"
        )
        return None
    return max(rate, kept or 0.0)


def _digest(device: torch.device, of: Mapping[str, str]) -> str:
    what = {
        "device": device_name(device),
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        **of,
    }
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]


def _read(path: Path, key: str) -> float | None:
    try:
        kept = float(read_json(path)[key])
    except (ValueError, TypeError, KeyError):
        return None
    return kept if isfinite(kept) and kept > 0 else None


def _write(path: Path, key: str, rate: float) -> None:
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps({key: rate}) + "\n")
