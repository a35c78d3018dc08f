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

# processes of earlier self-tests that count beside those of the latest: what a machine was like long ago fades
_MOST_KEPT = 16.0

# no std of less is believed: processes of one minute agree better than those of one week (Mytkowicz et al., ASPLOS
# 2009, found as much from the size of the environment alone)
_LEAST = 0.005


@dataclass(frozen=True)
class ProcessSpread:
    """How processes of one program differ on a machine: the std of the logarithm of their mean steps."""

    std: float
    freedom: float = math.inf  # how many processes beyond the first have shown it; infinite where it is assumed

    @property
    def learned(self) -> bool:
        return math.isfinite(self.freedom)


# until equal runs of this machine have shown it (``selftest``): no change of a single run below 15 % is then told
ASSUMED_SPREAD = ProcessSpread(0.05)


def cache_folder() -> Path:
    """Where programs keep what they can find out again (XDG Base Directory 0.8); without a home, nowhere."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    with suppress(RuntimeError):
        return (given if given.is_absolute() else Path.home() / ".cache") / "lm_profiler"
    return Path(os.devnull)


class KeptFigures:
    """Figures that can be found out again, in a file that is named by all on which they depend."""

    def __init__(self, kind: str, depends_on: object, folder: Path | None = None) -> None:
        digest = hashlib.sha256(json.dumps(depends_on, sort_keys=True).encode()).hexdigest()[:16]
        self.path = (folder or cache_folder()) / f"{kind}-{digest}.json"

    def read(self) -> dict[str, float]:
        """Return the finite ones that are not negative; a file that cannot be read counts as absent."""
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
    """What the mean steps (seconds) of equal processes say; None of fewer than two, or where one is not positive."""
    if len(mean_steps_s) < 2 or min(mean_steps_s) <= 0.0:
        return None
    logs = [math.log(seconds) for seconds in mean_steps_s]
    freedom = len(logs) - 1
    return ProcessSpread(math.sqrt(sum((x - fmean(logs)) ** 2 for x in logs) / freedom), freedom)


def known_spread(machine: Environment | None) -> ProcessSpread:
    """What self-tests have shown of ``machine``; ``ASSUMED_SPREAD`` where there were none, or it is unknown."""
    kept = {} if machine is None else _of(machine).read()
    std, freedom = kept.get("std"), kept.get("freedom", 0.0)
    return ASSUMED_SPREAD if std is None or freedom < 1.0 else ProcessSpread(max(std, _LEAST), freedom)


def keep_spread(machine: Environment, seen: ProcessSpread) -> ProcessSpread:
    """Keep what equal runs of ``machine`` have just shown; returns it together with what earlier ones did."""
    before = known_spread(machine)
    weight = min(before.freedom, _MOST_KEPT) if before.learned else 0.0
    freedom = seen.freedom + weight
    both = ProcessSpread(math.sqrt((seen.freedom * seen.std**2 + weight * before.std**2) / freedom), freedom)
    _of(machine).keep({"std": both.std, "freedom": both.freedom})
    return both


def _of(machine: Environment) -> KeptFigures:
    return KeptFigures("processes", [machine.device_name, machine.cpu, machine.cpu_count])
