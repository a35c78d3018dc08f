"""Keeps the machine's ceilings across runs: a single short reading may come from a machine that others used."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from math import isfinite
from pathlib import Path

import torch

from lm_profiler.measure.device.ceiling import matmul_ceiling
from lm_profiler.measure.device.copy_rate import copy_rate
from lm_profiler.measure.device.environment import cpu_name, device_name
from lm_profiler.measure.device.precision import float32_matmul_precision
from lm_profiler.record.files import read_json, write_whole
from lm_profiler.record.process_spread import cache_folder

AGREE = 0.8  # two readings agree if the smaller is at least this share of the larger

# seconds for which nothing is read anew once two readings have agreed: a reading costs each run CPU time
FRESH_S = 86_400.0


_AGREED = "agreed_at"  # the key of the time at which two readings agreed, in seconds since 1970


def known_ceiling(
    device: torch.device,
    dtype: torch.dtype,
    say: Callable[[str], None],
    folder: Path | None = None,
    probe: Callable[[torch.device, torch.dtype], float | None] = matmul_ceiling,
    clock: Callable[[], float] = time.time,
) -> float | None:
    """Return the matmul ceiling in FLOP/s: the better of the reading of now and the kept one, where the two agree.

    The best reading is kept in a file for each device, CPU, number of threads, dtype, precision and version of torch.
    For ``FRESH_S`` after two readings have agreed it is used without a new reading. A file that cannot be read or
    written counts as absent; processes that write at the same time leave one whole file.

    Args:
        say: Gets the reason why the ceiling is unknown, where the readings disagree.
        folder: Where readings are kept; ``cache_folder()`` if not given.
        probe: Measures the ceiling.
        clock: Seconds since 1970.
    """
    of = {"dtype": str(dtype).removeprefix("torch."), "precision": float32_matmul_precision(device.type)}
    path = _path("ceiling", device, of, folder)
    rate, kept = _readings(path, "flops_per_s", lambda: probe(device, dtype), clock())
    if rate is None or kept is None:
        return rate
    if not _agree(rate, kept):
        say(
            f"ceiling unknown: the matmul rate measured here was {rate / 1e9:.3g} GFLOP/s now and "
            f"{kept / 1e9:.3g} GFLOP/s before: something else uses it, or did; if it was changed, remove {path}"
        )
        return None
    return max(rate, kept)


def known_copy_rate(
    device: torch.device,
    folder: Path | None = None,
    probe: Callable[[torch.device], float | None] = copy_rate,
    clock: Callable[[], float] = time.time,
) -> float | None:
    """Return the memory bandwidth in bytes/s: the better of the reading of now and the kept one.

    They need not agree: bandwidth gives the least time of a phase, and other users of the machine can only slow a copy.
    Once they agree, nothing is read anew for ``FRESH_S``.
    """
    path = _path("bandwidth", device, {}, folder)
    rate, kept = _readings(path, "bytes_per_s", lambda: probe(device), clock())
    return rate if rate is None else max(rate, kept or 0.0)


def _path(kind: str, device: torch.device, of: Mapping[str, str], folder: Path | None) -> Path | None:
    """Return the file of a reading; None where there is no home folder."""
    try:
        return (folder or cache_folder()) / f"{kind}-{_digest(device, of)}.json"
    except RuntimeError:
        return None


def _readings(
    path: Path | None, key: str, probe: Callable[[], float | None], now_s: float
) -> tuple[float | None, float | None]:
    """Return the rate of now and the kept one; keep the better of them, and the time if they agree."""
    kept = None if path is None else _read(path, key)
    agreed_s = None if path is None or kept is None else _read(path, _AGREED)
    # A time in the future means that the clock was set back: read anew.
    if agreed_s is not None and 0.0 <= now_s - agreed_s < FRESH_S:
        return kept, kept
    rate = probe()
    if path is not None and rate is not None:
        agrees = kept is not None and _agree(rate, kept)
        if agrees or kept is None or rate > kept:
            _write(path, {key: max(rate, kept or 0.0)} | ({_AGREED: now_s} if agrees else {}))
    return rate, kept


def _agree(a: float, b: float) -> bool:
    return min(a, b) >= AGREE * max(a, b)


def _digest(device: torch.device, of: Mapping[str, str]) -> str:
    """Return a short hash of everything on which a rate depends."""
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


def _write(path: Path, content: Mapping[str, float]) -> None:
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(content) + "\n")
