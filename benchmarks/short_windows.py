"""What a short window can know: words and intervals on step times that no threshold was chosen on.

    python -m benchmarks.short_windows [--series 100] [--steps 20,40,100,300]

Prints a Markdown row for each kind of run and number of steps: how often each word is used, how often the 95 % interval
of the mean holds the mean of the long run, and how often the tool reports a kind, a pattern, a change or a warm-up.
The generators were written after the code and are not used by the tests.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lm_profiler.analysis.steps.step_model import StepModel, fit, steadiness

SEED = 20_261_128
BASE_S = 0.05
NOISE = 0.02

Times = NDArray[np.float64]


@dataclass(frozen=True)
class Window:
    """Step times, and the mean step of a long run of which they are a window."""

    times_s: Times
    long_run_s: float | None  # None if there is no such mean


def _noisy(rng: np.random.Generator, steps: int, noise: float = NOISE) -> Times:
    return BASE_S * np.exp(noise * rng.standard_normal(steps))


def one_level(rng: np.random.Generator, steps: int) -> Window:
    return Window(_noisy(rng, steps), BASE_S)


def buckets(rng: np.random.Generator, steps: int) -> Window:
    """Batches of three lengths, drawn with 55, 30 and 15 %."""
    factors = rng.choice([1.0, 1.35, 1.9], steps, p=[0.55, 0.3, 0.15])
    return Window(
        _noisy(rng, steps) * factors, BASE_S * (0.55 + 0.3 * 1.35 + 0.15 * 1.9)
    )


def rare_kind(rng: np.random.Generator, steps: int) -> Window:
    """12 % of the steps take 2.5 times as long, whatever the others do."""
    factors = np.where(rng.random(steps) < 0.12, 2.5, 1.0)
    return Window(_noisy(rng, steps) * factors, BASE_S * (1.0 + 0.12 * 1.5))


def every_seventh(rng: np.random.Generator, steps: int) -> Window:
    """Every seventh step takes 2.2 times as long, and the window begins anywhere in the period."""
    phases = (np.arange(steps) + rng.integers(7)) % 7
    return Window(
        _noisy(rng, steps) * np.where(phases == 0, 2.2, 1.0), BASE_S * (1.0 + 1.2 / 7.0)
    )


def checkpoint_every_50(rng: np.random.Generator, steps: int) -> Window:
    """Every 50th step takes ten times as long; the window begins anywhere."""
    phases = (np.arange(steps) + rng.integers(50)) % 50
    return Window(
        _noisy(rng, steps) * np.where(phases == 0, 10.0, 1.0),
        BASE_S * (1.0 + 9.0 / 50.0),
    )


def stalls(rng: np.random.Generator, steps: int) -> Window:
    """Each step stalls with a chance of 3 %, for 2 to 20 times its time."""
    is_stalled = rng.random(steps) < 0.03
    lengths = np.exp(rng.uniform(math.log(2.0), math.log(20.0), steps))
    mean_length = 18.0 / math.log(10.0)
    return Window(
        _noisy(rng, steps) * (1.0 + is_stalled * lengths),
        BASE_S * (1.0 + 0.03 * mean_length),
    )


def slow_warm_up(rng: np.random.Generator, steps: int) -> Window:
    """An excess of 25 % that falls with the power -0.4 of the steps."""
    return Window(
        _noisy(rng, steps) * (1.0 + 0.25 * (1.0 + np.arange(steps)) ** -0.4), BASE_S
    )


def fast_warm_up(rng: np.random.Generator, steps: int) -> Window:
    """An excess of 80 % that halves each step and a half."""
    return Window(
        _noisy(rng, steps) * (1.0 + 0.8 * 0.5 ** (np.arange(steps) / 1.5)), BASE_S
    )


def throttling(rng: np.random.Generator, steps: int) -> Window:
    """From 55 % of the window on, steps take 18 % longer."""
    return Window(
        _noisy(rng, steps) * np.where(np.arange(steps) >= 0.55 * steps, 1.18, 1.0), None
    )


def wandering(rng: np.random.Generator, steps: int) -> Window:
    """A level that wanders by 3 %, with a memory of 100 steps: no window of a few dozen steps can know its mean."""
    wander = np.empty(steps)
    state = rng.standard_normal()
    keep = math.exp(-1.0 / 100.0)
    for step in range(steps):
        state = keep * state + math.sqrt(1.0 - keep**2) * rng.standard_normal()
        wander[step] = state
    return Window(_noisy(rng, steps) * np.exp(0.03 * wander), BASE_S)


def skewed(rng: np.random.Generator, steps: int) -> Window:
    """A floor, and above it lognormal delays of 10 % of it on average."""
    delays = rng.lognormal(mean=math.log(0.1) - 0.5, sigma=1.0, size=steps)
    return Window(BASE_S * (1.0 + delays), BASE_S * 1.1)


KINDS: Mapping[str, Callable[[np.random.Generator, int], Window]] = {
    "one level": one_level,
    "buckets of three lengths": buckets,
    "12 % at x2.5, by chance": rare_kind,
    "every seventh x2.2": every_seventh,
    "every 50th x10": checkpoint_every_50,
    "stalls, 3 %, of any length": stalls,
    "warm-up, power -0.4": slow_warm_up,
    "warm-up, halves in 1.5 steps": fast_warm_up,
    "slower by 18 % from 55 % on": throttling,
    "wanders by 3 %": wandering,
    "skewed delays": skewed,
}


def _holds(model: StepModel, long_run_s: float) -> bool:
    interval = model.interval_of(model.seconds)
    return interval is not None and interval.low <= long_run_s <= interval.high


def row(name: str, steps: int, series: int) -> list[str]:
    """Return the row of a kind: its words, how often the interval holds, and what else is reported."""
    rng = np.random.default_rng(SEED)
    words: Counter[str] = Counter()
    reported: Counter[str] = Counter()
    held = 0
    has_mean = True
    for _ in range(series):
        window = KINDS[name](rng, steps)
        model = fit(window.times_s)
        words[steadiness(model).word or "none"] += 1
        reported["kinds"] += bool(model.kinds)
        reported["pattern"] += model.pattern is not None
        reported["change"] += len(model.edges) > 2 or bool(np.any(model.trend))
        reported["warm-up"] += model.cut > 0
        if window.long_run_s is None:
            has_mean = False
        else:
            held += _holds(model, window.long_run_s)
    text = ", ".join(
        f"{word} {100 * count / series:.0f} %" for word, count in words.most_common()
    )
    holds = f"{100 * held / series:.0f} %" if has_mean else "–"
    columns = [
        f"{100 * reported[what] / series:.0f} %"
        for what in ("kinds", "pattern", "change", "warm-up")
    ]
    return [name, str(steps), text, holds, *columns]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--series", type=int, default=100, help="simulated runs per row"
    )
    parser.add_argument("--steps", default="20,40,100,300", help="numbers of steps")
    options = parser.parse_args()
    header = [
        "steps are",
        "number",
        "words",
        "the mean is held",
        "kinds",
        "pattern",
        "change",
        "warm-up",
    ]
    for cells in (header, ["---"] * len(header)):
        print("| " + " | ".join(cells) + " |")
    for name in KINDS:
        for steps in options.steps.split(","):
            print(
                "| " + " | ".join(row(name, int(steps), options.series)) + " |",
                flush=True,
            )


if __name__ == "__main__":
    main()
