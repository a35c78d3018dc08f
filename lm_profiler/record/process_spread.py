"""How processes of one program differ on a machine: ``selftest`` learns it, ``compare`` and ``improve`` read it."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from lm_profiler.record.files import write_whole
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
    """Where programs keep what they can find out again (XDG Base Directory Specification 0.8)."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (given if given.is_absolute() else Path.home() / ".cache") / "lm_profiler"


def spread_of(mean_steps_s: Sequence[float]) -> ProcessSpread | None:
    """What the mean steps (seconds) of equal processes say; None of fewer than two, or where one is not positive."""
    if len(mean_steps_s) < 2 or min(mean_steps_s) <= 0.0:
        return None
    logs = [math.log(seconds) for seconds in mean_steps_s]
    freedom = len(logs) - 1
    return ProcessSpread(math.sqrt(sum((x - fmean(logs)) ** 2 for x in logs) / freedom), freedom)


def known_spread(machine: Environment | None) -> ProcessSpread:
    """What self-tests have shown of ``machine``; ``ASSUMED_SPREAD`` where there were none, or it is unknown."""
    try:
        kept = {} if machine is None else json.loads(_path(machine).read_bytes())
        spread = ProcessSpread(float(kept["std"]), float(kept["freedom"]))
    except (OSError, RuntimeError, ValueError, TypeError, KeyError):  # no home, no file, or a damaged one
        return ASSUMED_SPREAD
    right = 0.0 <= spread.std < math.inf and 1.0 <= spread.freedom < math.inf
    return ProcessSpread(max(spread.std, _LEAST), spread.freedom) if right else ASSUMED_SPREAD


def keep_spread(machine: Environment, seen: ProcessSpread) -> ProcessSpread:
    """Keep what equal runs of ``machine`` have just shown; returns it together with what earlier ones did."""
    before = known_spread(machine)
    weight = min(before.freedom, _MOST_KEPT) if before.learned else 0.0
    freedom = seen.freedom + weight
    both = ProcessSpread(math.sqrt((seen.freedom * seen.std**2 + weight * before.std**2) / freedom), freedom)
    with suppress(OSError, RuntimeError):
        path = _path(machine)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps({"std": both.std, "freedom": both.freedom}) + "\n")
    return both


def _path(machine: Environment) -> Path:
    what = json.dumps([machine.device_name, machine.cpu, machine.cpu_count])
    return cache_folder() / f"processes-{hashlib.sha256(what.encode()).hexdigest()[:16]}.json"
