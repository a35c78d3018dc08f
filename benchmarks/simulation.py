"""Step times with a known answer: what real training loops do, made from a seeded generator.

Every kind takes a numpy Generator and a number of steps, and gives seconds together with the truth about them. `TUNED`
are those that thresholds were chosen on, with plain jumps, lines and patterns; `HELD_OUT` were only looked at.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

BASE_S = 0.1
NOISE = 0.02

Times = NDArray[np.float64]


@dataclass(frozen=True)
class Simulated:
    """Step times in seconds with the truth about them.

    `warmup` steps come before the level; `level_s` is the mean of regular steps (None where there is no one level);
    `word` is what their level deserves, whether or not noise lets it be known; `period` of a pattern, 0 of none.
    """

    times_s: Times
    warmup: int
    level_s: float | None
    word: str
    period: int = 0


Kind = Callable[[np.random.Generator, int], Simulated]


def wander(rng: np.random.Generator, steps: int, rho: float) -> Times:
    """AR(1) noise of unit variance."""
    z = rng.standard_normal(steps)
    for i in range(1, steps):
        z[i] = rho * z[i - 1] + math.sqrt(1.0 - rho**2) * z[i]
    return z


def level(
    rng: np.random.Generator, steps: int, noise: float = NOISE, rho: float = 0.0
) -> Simulated:
    """One level with lognormal noise, AR(1) where ``rho`` is not 0."""
    return Simulated(
        BASE_S * np.exp(noise * wander(rng, steps, rho)),
        0,
        BASE_S * math.exp(noise**2 / 2),
        "steady",
    )


def _steady(times_s: Times, mean: float = 1.0, period: int = 0) -> Simulated:
    return Simulated(times_s, 0, BASE_S * mean, "steady", period)


def _course(
    rng: np.random.Generator,
    steps: int,
    factors: Times,
    word: str,
    noise: float = NOISE,
    rho: float = 0.0,
) -> Simulated:
    return Simulated(level(rng, steps, noise, rho).times_s * factors, 0, None, word)


def jump(
    rng: np.random.Generator,
    steps: int,
    at: float = 0.5,
    by: float = 0.25,
    noise: float = 0.01,
    rho: float = 0.0,
) -> Simulated:
    """Steps from the share ``at`` of the run on take longer by ``by``."""
    later = np.arange(steps) >= round(steps * at)
    return _course(rng, steps, 1.0 + by * later, "slowing", noise, rho)


def repeating(
    rng: np.random.Generator,
    steps: int,
    every: int,
    slow: tuple[int, ...],
    by: float,
    noise: float = NOISE,
) -> Simulated:
    """Steps of the ``slow`` phases of every ``every`` take longer by ``by``."""
    made = level(rng, steps, noise)
    factors = 1.0 + by * np.isin(np.arange(steps) % every, slow)
    return Simulated(made.times_s * factors, 0, made.level_s, "steady", every)


def shared_machine(
    rng: np.random.Generator, steps: int, share: float = 0.5, length: float = 4.0
) -> Simulated:
    """Another program runs now and then: for bursts of 4 steps, half of the time, steps take up to three times as
    long.
    """
    times = level(rng, steps).times_s.copy()
    busy = rng.random() < share
    for i in range(steps):
        times[i] *= 1.0 + 2.0 * rng.random() * busy
        busy ^= rng.random() < (
            1.0 / length if busy else share / (1.0 - share) / length
        )
    return Simulated(times, 0, None, "unsettled")


def spiky(
    rng: np.random.Generator, steps: int, share: float = 0.05, height: float = 3.0
) -> Simulated:
    """One-sided spikes: 5 % of the steps, anywhere, take three times as long."""
    made = level(rng, steps)
    return Simulated(
        np.where(rng.random(steps) < share, height, 1.0) * made.times_s,
        0,
        made.level_s,
        "steady",
    )


def _warmed(factors: Times, rng: np.random.Generator, steps: int) -> Simulated:
    made = level(rng, steps)
    count = min(factors.size, steps)
    made.times_s[:count] *= factors[:count]
    return Simulated(
        made.times_s,
        count,
        made.level_s,
        "unsettled" if 2 * count > steps else "steady",
    )


def decaying(
    rng: np.random.Generator, steps: int, excess: float = 0.5, decay: float = 3.0
) -> Simulated:
    """Excess that dies away exponentially; warm-up lasts until it is below 1 %."""
    warmup = int(np.ceil(decay * np.log(excess / 0.01)))
    return _warmed(1.0 + excess * np.exp(-np.arange(warmup) / decay), rng, steps)


def never_settles(rng: np.random.Generator, steps: int) -> Simulated:
    """Excess of 50 % that dies away over the whole run: there is no level."""
    return _course(
        rng, steps, 1.0 + 0.5 * np.exp(-np.arange(steps) / (steps / 2.0)), "unsettled"
    )


def late_recompile(rng: np.random.Generator, steps: int) -> Simulated:
    """One step, somewhere in the middle third, takes fifty times as long: an outlier and no warm-up."""
    made = level(rng, steps)
    made.times_s[rng.integers(steps // 3, 2 * steps // 3)] *= 50.0
    return made


def throttled(rng: np.random.Generator, steps: int, slowdown: float = 0.1) -> Simulated:
    """The clock drops between 30 % and 70 % of the run: everything after is 10 % slower."""
    return jump(rng, steps, rng.uniform(0.3, 0.7), slowdown, NOISE)


def gamma(rng: np.random.Generator, steps: int) -> Simulated:
    """Skewed noise of 10 %: a gamma distribution of shape 2 above a floor."""
    return _steady(
        BASE_S * (1.0 + 0.1 * (rng.gamma(2.0, 1.0, steps) - 2.0) / math.sqrt(2.0))
    )


def exponential_noise(rng: np.random.Generator, steps: int) -> Simulated:
    """More skewed still: exponential noise of 5 % above a floor."""
    return _steady(BASE_S * (1.0 + 0.05 * (rng.exponential(1.0, steps) - 1.0)))


def ticks(rng: np.random.Generator, steps: int) -> Simulated:
    """A clock that ticks every 5 % of a step."""
    made = level(rng, steps)
    return Simulated(
        np.round(made.times_s / BASE_S * 20.0) * BASE_S / 20.0,
        0,
        made.level_s,
        "steady",
    )


def constant(rng: np.random.Generator, steps: int) -> Simulated:
    """No noise at all."""
    return _steady(np.full(steps, BASE_S))


def moving_average(rng: np.random.Generator, steps: int) -> Simulated:
    """Each step shares half of its noise with the two before it and the two after it."""
    e = rng.standard_normal(steps + 3)
    noise = 0.03 * (e[3:] + e[2:-1] + e[1:-2] + e[:-3]) / 2.0
    return _steady(BASE_S * np.exp(noise), math.exp(0.03**2 / 2))


def pink(rng: np.random.Generator, steps: int) -> Simulated:
    """Long memory: noise whose power falls with the frequency."""
    frequency = np.fft.rfftfreq(4 * steps)
    amplitude = np.append(0.0, frequency[1:] ** -0.5)
    noise = np.fft.irfft(amplitude * np.exp(2j * np.pi * rng.random(frequency.size)))[
        :steps
    ]
    return Simulated(BASE_S * np.exp(NOISE * noise / noise.std()), 0, None, "steady")


def heavy_tailed(
    rng: np.random.Generator, steps: int, heavy: int = 4, rho: float = 0.4
) -> Simulated:
    """Student's t noise of 2 %, autocorrelated."""
    z = rng.standard_t(heavy, steps) / math.sqrt(heavy / (heavy - 2))
    for i in range(1, steps):
        z[i] = rho * z[i - 1] + math.sqrt(1.0 - rho**2) * z[i]
    return Simulated(BASE_S * np.exp(NOISE * z), 0, None, "steady")


def louder(rng: np.random.Generator, steps: int) -> Simulated:
    """Noise grows threefold midway; the level stays."""
    sd = np.where(np.arange(steps) < steps // 2, 0.01, 0.03)
    return Simulated(
        BASE_S * np.exp(sd * rng.standard_normal(steps)), 0, None, "steady"
    )


def pauses(rng: np.random.Generator, steps: int) -> Simulated:
    """Two steps in a row, somewhere, take four times as long."""
    made = level(rng, steps)
    at = int(rng.integers(3, steps - 4))
    made.times_s[at : at + 2] *= 4.0
    return made


def uniform(rng: np.random.Generator, steps: int) -> Simulated:
    """Uniform noise of 3 %."""
    return _steady(BASE_S * (1.0 + 0.03 * math.sqrt(12.0) * (rng.random(steps) - 0.5)))


def lengths(rng: np.random.Generator, steps: int) -> Simulated:
    """Texts of any length: steps take from half to one and a half of the mean."""
    return _steady(BASE_S * rng.uniform(0.5, 1.5, steps))


def markov(rng: np.random.Generator, steps: int) -> Simulated:
    """Two levels, 15 % apart, that change at random every twelve steps or so."""
    high = rng.random() < 0.5
    state = np.empty(steps)
    for i in range(steps):
        high ^= rng.random() < 1.0 / 12.0
        state[i] = high
    return _course(
        rng, steps, 1.0 + 0.15 * state, "unsettled" if np.ptp(state) else "steady"
    )


def recovers(rng: np.random.Generator, steps: int) -> Simulated:
    """A quarter of the run, from a third on, is 20 % slower."""
    at = np.arange(steps) / steps
    return _course(rng, steps, 1.0 + 0.2 * ((at >= 1 / 3) & (at < 7 / 12)), "unsettled")


def stairs(rng: np.random.Generator, steps: int) -> Simulated:
    """Three levels, each 10 % slower than the one before."""
    return _course(rng, steps, 1.1 ** np.floor(np.arange(steps) * 3 / steps), "slowing")


def late_throttle(rng: np.random.Generator, steps: int) -> Simulated:
    """The last fifth is 15 % slower."""
    return jump(rng, steps, 0.8, 0.15, NOISE)


def creeping(rng: np.random.Generator, steps: int) -> Simulated:
    """A straight line, 15 % up."""
    return _course(rng, steps, 1.0 + 0.15 * np.arange(steps) / steps, "slowing")


def cycle(rng: np.random.Generator, steps: int) -> Simulated:
    """The level goes up and down by 12 % every ten steps."""
    return _course(rng, steps, 1.0 + 0.12 * (np.arange(steps) // 10 % 2), "unsettled")


def both(rng: np.random.Generator, steps: int) -> Simulated:
    """Every fourth step takes 40 % longer, and from the middle on all take 15 % longer."""
    pattern = 1.0 + 0.4 * (np.arange(steps) % 4 == 1)
    made = jump(rng, steps, 0.5, 0.15, NOISE)
    return Simulated(made.times_s * pattern, 0, None, "slowing", 4)


def speedup(rng: np.random.Generator, steps: int) -> Simulated:
    """From 60 % on, steps are a fifth faster."""
    return Simulated(jump(rng, steps, 0.6, -0.2, NOISE).times_s, 0, None, "unsettled")


def saw_tooth(rng: np.random.Generator, steps: int) -> Simulated:
    """A heap that grows: each step 3 % slower than the one before, and the seventh collects."""
    return Simulated(
        level(rng, steps).times_s * (1.0 + 0.03 * (np.arange(steps) % 7)),
        0,
        None,
        "steady",
        7,
    )


def sine(rng: np.random.Generator, steps: int) -> Simulated:
    """A fan: 8 % up and down every ten steps."""
    wave = 1.0 + 0.08 * np.sin(2 * np.pi * np.arange(steps) / 10)
    return Simulated(level(rng, steps, 0.01).times_s * wave, 0, None, "steady", 10)


TUNED: Mapping[str, Kind] = {
    "independent, 2 %": level,
    "independent, 15 %": partial(level, noise=0.15),
    "AR(1), 0.3": partial(level, rho=0.3),
    "AR(1), 0.6": partial(level, rho=0.6),
    "one-sided spikes": spiky,
    "eager warm-up": partial(_warmed, np.array([5.0, 1.5])),
    "compile warm-up": partial(_warmed, np.array([100.0])),
    "allocator warm-up": partial(_warmed, np.full(4, 1.2)),
    "decaying warm-up": decaying,
    "late recompile": late_recompile,
    "never settles": never_settles,
    "mid-run throttling": throttled,
}

HELD_OUT: Mapping[str, Kind] = {
    "bursts of others": shared_machine,
    "gamma noise": gamma,
    "exponential noise": exponential_noise,
    "ticks of the clock": ticks,
    "no noise": constant,
    "moving average": moving_average,
    "pink noise": pink,
    "heavy tails, AR(1) 0.4": heavy_tailed,
    "noise grows threefold": louder,
    "two steps pause": pauses,
    "uniform noise": uniform,
    "texts of any length": lengths,
    "two levels at random": markov,
    "slow for a quarter": recovers,
    "stairs": stairs,
    "late throttling": late_throttle,
    "creeping": creeping,
    "up and down every ten": cycle,
    "pattern and throttling": both,
    "faster from 60 % on": speedup,
    "saw-tooth of seven": saw_tooth,
    "sine of ten": sine,
    "loader of 4 workers": partial(repeating, every=4, slow=(0,), by=1.0),
    "every fifth +50 %": partial(repeating, every=5, slow=(2,), by=0.5),
    "two levels in turn": partial(repeating, every=2, slow=(1,), by=0.3),
    "two slow of six": partial(repeating, every=6, slow=(2, 3), by=0.3),
    "every tenth fourfold": partial(repeating, every=10, slow=(9,), by=3.0),
}
