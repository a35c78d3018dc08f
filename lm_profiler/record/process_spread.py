"""How processes of one program differ on a machine: ``selftest`` learns it, ``compare`` and ``improve`` read it."""

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
_MOST_KEPT = 16.0

# the least std that is believed: processes of one minute agree better than those of one week (Mytkowicz et al., ASPLOS
# 2009, found this much from the size of the environment alone)
_LEAST = 0.005


@dataclass(frozen=True)
class ProcessSpread:
    """How processes of one program differ on a machine: the std of the logarithm of their mean steps."""

    std: float
    freedom: float = math.inf  # number of processes beyond the first that have shown it; infinite if it is assumed
    is_given: bool = False  # whether the user says so

    @property
    def learned(self) -> bool:
        return math.isfinite(self.freedom)

    @property
    def text(self) -> str:
        """How far equal processes differ, and how that is known."""
        differ = f"equal processes differ by {self.std:.1%} (std)"
        if self.is_given:
            return f"{differ}, as --spread says"
        if self.learned:
            return f"{differ}, as selftest has seen on this machine; --spread overrides it"
        return f"{differ}, which is assumed: lm_profiler selftest measures it here, --spread overrides it"


# used until equal runs on this machine have shown it (``selftest``): single runs then detect no change below 15 %
ASSUMED_SPREAD = ProcessSpread(0.05)


def cache_folder() -> Path:
    """Return the folder for data that can be measured again (XDG Base Directory 0.8)."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    with suppress(RuntimeError):
        return (given if given.is_absolute() else Path.home() / ".cache") / "lm_profiler"
    return Path(os.devnull)


class KeptFigures:
    """Figures that can be measured again, in a file named after everything that they depend on."""

    def __init__(self, kind: str, depends_on: object, folder: Path | None = None) -> None:
        digest = hashlib.sha256(json.dumps(depends_on, sort_keys=True).encode()).hexdigest()[:16]
        self.path = (folder or cache_folder()) / f"{kind}-{digest}.json"

    def read(self) -> dict[str, float]:
        """Return the figures that are finite and not negative; an unreadable file counts as absent."""
        try:
            kept = {name: float(value) for name, value in read_json(self.path).items()}
        except (ValueError, TypeError, AttributeError):
            return {}
        return {name: value for name, value in kept.items() if 0.0 <= value < math.inf}

    def keep(self, figures: Mapping[str, float]) -> None:
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.path, json.dumps(figures) + "\n")


def spread_of(mean_steps_s: Sequence[float]) -> ProcessSpread | None:
    """Return the spread of equal processes' mean steps (seconds); None for fewer than two, or one not positive."""
    if len(mean_steps_s) < 2 or min(mean_steps_s) <= 0.0:
        return None
    logs = [math.log(seconds) for seconds in mean_steps_s]
    freedom = len(logs) - 1
    return ProcessSpread(math.sqrt(sum((x - fmean(logs)) ** 2 for x in logs) / freedom), freedom)


def known_spread(machine: Environment | None) -> ProcessSpread:
    """Return the spread that self-tests have shown for ``machine``; ``ASSUMED_SPREAD`` if none, or it is unknown."""
    kept = {} if machine is None else _of(machine).read()
    std, freedom = kept.get("std"), kept.get("freedom", 0.0)
    return ASSUMED_SPREAD if std is None or freedom < 1.0 else ProcessSpread(max(std, _LEAST), freedom)


def keep_spread(machine: Environment, seen: ProcessSpread) -> ProcessSpread:
    """Store the spread that equal runs of ``machine`` have just shown; return it combined with earlier ones."""
    before = known_spread(machine)
    weight = min(before.freedom, _MOST_KEPT) if before.learned else 0.0
    freedom = seen.freedom + weight
    both = ProcessSpread(math.sqrt((seen.freedom * seen.std**2 + weight * before.std**2) / freedom), freedom)
    _of(machine).keep({"std": both.std, "freedom": both.freedom})
    return both


def _of(machine: Environment) -> KeptFigures:
    return KeptFigures("processes", [machine.device_name, machine.cpu, machine.cpu_count])
