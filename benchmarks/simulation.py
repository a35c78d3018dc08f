"""Step times with a known answer: what real training loops do, made from a seeded generator.

Every kind takes a numpy Generator and a number of steps, and gives seconds together with the truth about
them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lm_profiler.analysis.steps.steadiness import Level

BASE_S = 0.1
NOISE = 0.02


@dataclass(frozen=True)
class Simulated:
    """Step times in seconds with the truth: the steps of warm-up, the level's median, and the word that
    their level deserves; where they do not tell the median they are noisy as well.

    `median_s` is None where there is no one level.
    """

    times_s: NDArray[np.float64]
    warmup: int
    median_s: float | None
    word: Level


Kind = Callable[[np.random.Generator, int], Simulated]


def independent(rng: np.random.Generator, steps: int, noise: float = NOISE) -> Simulated:
    """Independent lognormal noise: skewed to the right, as step times are."""
    return Simulated(BASE_S * np.exp(noise * rng.standard_normal(steps)), 0, BASE_S, "steady")


def heavy_noise(rng: np.random.Generator, steps: int) -> Simulated:
    """A busy machine: independent lognormal noise of 15 %."""
    return independent(rng, steps, noise=0.15)


def shared_machine(rng: np.random.Generator, steps: int, share: float = 0.5, length: float = 4.0) -> Simulated:
    """Another program runs now and then: for bursts of 4 steps, half of the time, steps take up to three times as
    long.
    """
    times = independent(rng, steps).times_s.copy()
    busy = rng.random() < share
    for i in range(steps):
        times[i] *= 1.0 + 2.0 * rng.random() * busy
        busy ^= rng.random() < (1.0 / length if busy else share / (1.0 - share) / length)
    return Simulated(times, 0, None, "steady")


def autocorrelated(rng: np.random.Generator, steps: int, rho: float = 0.3, noise: float = NOISE) -> Simulated:
    """AR(1) noise about the level: a step resembles the one before it."""
    z = rng.standard_normal(steps)
    for i in range(1, steps):
        z[i] = rho * z[i - 1] + np.sqrt(1.0 - rho**2) * z[i]
    return Simulated(BASE_S * np.exp(noise * z), 0, BASE_S, "steady")


def strongly_autocorrelated(rng: np.random.Generator, steps: int) -> Simulated:
    """AR(1) noise with a lag-1 autocorrelation of 0.6."""
    return autocorrelated(rng, steps, rho=0.6)


def spiky(rng: np.random.Generator, steps: int, share: float = 0.05, height: float = 3.0) -> Simulated:
    """One-sided spikes: 5 % of the steps, anywhere, take three times as long."""
    from scipy.special import ndtri

    times = independent(rng, steps).times_s
    times = np.where(rng.random(steps) < share, height * times, times)
    # Spikes lie above every other step, so the mixture's median is the quantile 0.5 / (1 - share) of the
    # rest.
    return Simulated(times, 0, float(BASE_S * np.exp(NOISE * ndtri(0.5 / (1.0 - share)))), "steady")


def eager(rng: np.random.Generator, steps: int) -> Simulated:
    """Eager start: the first step takes five times as long (context, autotuning), the second half as long
    again.
    """
    return _warmed(rng, np.array([5.0, 1.5]), steps)


def compiled(rng: np.random.Generator, steps: int) -> Simulated:
    """torch.compile: the first step takes a hundred times as long."""
    return _warmed(rng, np.array([100.0]), steps)


def allocator(rng: np.random.Generator, steps: int) -> Simulated:
    """The caching allocator grows: the first four steps are 20 % slower."""
    return _warmed(rng, np.full(4, 1.2), steps)


def exponential(rng: np.random.Generator, steps: int, excess: float = 0.5, decay: float = 3.0) -> Simulated:
    """Excess that dies away exponentially; warm-up lasts until it is below 1 %."""
    warmup = int(np.ceil(decay * np.log(excess / 0.01)))
    return _warmed(rng, 1.0 + excess * np.exp(-np.arange(warmup) / decay), steps)


def never_settles(rng: np.random.Generator, steps: int) -> Simulated:
    """Excess of 50 % that dies away over the whole run: there is no level."""
    times = independent(rng, steps).times_s * (1.0 + 0.5 * np.exp(-np.arange(steps) / (steps / 2.0)))
    return Simulated(times, steps, None, "unsettled")


def late_recompile(rng: np.random.Generator, steps: int) -> Simulated:
    """One step, somewhere in the middle third, takes fifty times as long: an outlier and no warm-up."""
    times = independent(rng, steps).times_s.copy()
    times[rng.integers(steps // 3, 2 * steps // 3)] *= 50.0
    return Simulated(times, 0, BASE_S, "steady")


def throttled(rng: np.random.Generator, steps: int, slowdown: float = 0.1) -> Simulated:
    """The clock drops between 30 % and 70 % of the run: everything after is 10 % slower."""
    times = independent(rng, steps).times_s.copy()
    times[int(steps * rng.uniform(0.3, 0.7)) :] *= 1.0 + slowdown
    return Simulated(times, 0, None, "slowing")


KINDS: Mapping[str, Kind] = {
    "independent, 2 %": independent,
    "independent, 15 %": heavy_noise,
    "bursts of others": shared_machine,
    "AR(1), 0.3": autocorrelated,
    "AR(1), 0.6": strongly_autocorrelated,
    "one-sided spikes": spiky,
    "eager warm-up": eager,
    "compile warm-up": compiled,
    "allocator warm-up": allocator,
    "exponential warm-up": exponential,
    "late recompile": late_recompile,
    "never settles": never_settles,
    "mid-run throttling": throttled,
}


def _warmed(rng: np.random.Generator, factors: NDArray[np.float64], steps: int) -> Simulated:
    times = independent(rng, steps).times_s.copy()
    count = min(factors.size, steps)
    times[:count] *= factors[:count]
    word: Level = "unsettled" if 2 * count > steps else "steady"
    return Simulated(times, count, BASE_S, word)
