"""How much processes of one program differ on a machine: ``selftest`` measures it, ``compare`` and ``improve`` use
it."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from lm_profiler.record.files import read_json, write_whole
from lm_profiler.record.run_record import Environment

# processes of earlier self-tests that count besides those of the latest: old results fade
_MOST_EARLIER_PROCESSES = 16.0

# the least std that is believed: processes of one minute agree better than those of one week (Mytkowicz et al., ASPLOS
# 2009, found this much from the size of the environment alone)
_LEAST_STD = 0.005


@dataclass(frozen=True)
class ProcessSpread:
    """How much processes of one program differ on a machine: the standard deviation of the logarithm of their mean
    steps."""

    std: float
    # the degrees of freedom: the number of measured processes less 1; infinite if the spread is assumed
    freedom: float = math.inf
    # whether the user stated it with the option ``--spread``
    is_set_by_user: bool = False

    @property
    def is_learned(self) -> bool:
        return math.isfinite(self.freedom)

    @property
    def text(self) -> str:
        """The spread of equal processes, and its source."""
        size = f"equal processes differ by {self.std:.1%} (std)"
        if self.is_set_by_user:
            return f"{size}, set with --spread"
        if self.is_learned:
            return (
                f"{size}, measured by selftest on this machine; --spread overrides it"
            )
        return f"{size}, by assumption; `lm_profiler selftest` measures the spread, --spread overrides it"


# used until equal runs on this machine have shown it (``selftest``): single runs then detect no change below 15 %
ASSUMED_SPREAD = ProcessSpread(0.05)


def cache_folder() -> Path:
    """Return the folder for data that can be measured again (XDG Base Directory 0.8)."""
    cache_home = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if cache_home.is_absolute():
        return cache_home / "lm_profiler"
    try:
        return Path.home() / ".cache" / "lm_profiler"
    except RuntimeError:  # the user has no home
        return Path(os.devnull)


class FigureCache:
    """Figures that can be measured again at any time, in a file named after everything on which they depend."""

    def __init__(
        self, kind: str, depends_on: object, folder: Path | None = None
    ) -> None:
        dependencies = json.dumps(depends_on, sort_keys=True)
        digest = hashlib.sha256(dependencies.encode()).hexdigest()[:16]
        folder = folder or cache_folder()
        self.path = folder / f"{kind}-{digest}.json"

    def read(self) -> dict[str, float]:
        """Return the figures that are finite and not negative; an unreadable file counts as absent."""
        try:
            figures = {
                name: float(value) for name, value in read_json(self.path).items()
            }
        except (ValueError, TypeError, AttributeError, OverflowError):
            return {}
        return {
            name: value for name, value in figures.items() if 0.0 <= value < math.inf
        }

    def write(self, figures: Mapping[str, float]) -> None:
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.path, json.dumps(figures) + "\n")


def spread_of(mean_steps_s: Sequence[float]) -> ProcessSpread | None:
    """Return the spread of equal processes' mean steps (seconds); None for fewer than two, or one not positive."""
    if len(mean_steps_s) < 2 or min(mean_steps_s) <= 0.0:
        return None
    logs = [math.log(mean_s) for mean_s in mean_steps_s]
    freedom = len(logs) - 1
    mean_log = fmean(logs)
    squares = sum((log - mean_log) ** 2 for log in logs)
    return ProcessSpread(math.sqrt(squares / freedom), freedom)


def known_spread(machine: Environment | None) -> ProcessSpread:
    """Return the spread that self-tests measured on ``machine``; ``ASSUMED_SPREAD`` if none did."""
    if machine is None:
        return ASSUMED_SPREAD
    figures = _spread_cache(machine).read()
    std, freedom = figures.get("std"), figures.get("freedom", 0.0)
    if std is None or freedom < 1.0:
        return ASSUMED_SPREAD
    return ProcessSpread(max(std, _LEAST_STD), freedom)


def save_spread(machine: Environment, measured: ProcessSpread) -> ProcessSpread:
    """Store the spread that was just measured on ``machine``, combined with earlier ones; return what was stored."""
    earlier = known_spread(machine)
    weight = 0.0
    if earlier.is_learned:
        weight = min(earlier.freedom, _MOST_EARLIER_PROCESSES)
    freedom = measured.freedom + weight
    variance = (measured.freedom * measured.std**2 + weight * earlier.std**2) / freedom
    combined = ProcessSpread(math.sqrt(variance), freedom)
    _spread_cache(machine).write({"std": combined.std, "freedom": combined.freedom})
    return combined


def _spread_cache(machine: Environment) -> FigureCache:
    return FigureCache(
        "processes", [machine.device_name, machine.cpu, machine.cpu_count]
    )
