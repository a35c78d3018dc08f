"""A training pipeline, simulated event by event: the loader's workers, the host and what they wait for.

Independent of what it tests: no formula of a mean step stands here, only who may start when.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from lm_profiler.analysis.why.slack_model import DelayBlock, Held

Delay = tuple[float, float, float]


@dataclass(frozen=True)
class Pipeline:
    """Seconds of a batch in a worker and on the host, each times log-normal noise of about ``noise``.

    Batch k is made by worker k % workers and handed out in order. As torch's loader does, each is ordered when the
    batch ``workers * prefetch`` before it was taken.
    """

    worker_s: float
    host_s: float
    workers: int = 1
    prefetch: int = 2
    noise: float = 0.05
    drift: float = 0.0
    """By what share the host is slower after 1,000 steps."""
    seed: int = 0

    def run(
        self, steps: int, delay: Callable[[int], tuple[float, float, float]] = lambda step: (0.0, 0.0, 0.0)
    ) -> list[float]:
        """Seconds of each step; ``delay`` says what a step adds to a batch in a worker, to the host, and how long the
        workers hold at its beginning."""
        random = np.random.default_rng(self.seed)
        noise = np.exp(random.normal(-(self.noise**2) / 2, self.noise, (steps, 2))).tolist()  # of mean 1
        taken_s = [0.0] * (self.workers * self.prefetch)  # when each batch was ordered: so many at once, at first
        made_s, times, now = list[float](), list[float](), 0.0
        said_s, in_worker_s, held_s = list[float](), list[float](), list[float]()  # what each step says, and when
        for step in range(steps):
            in_worker, on_host, hold = delay(step)
            said_s.append(now)
            in_worker_s.append(in_worker)
            held_s.append(now + hold if hold else 0.0)
            begun = max(taken_s[step], made_s[step - self.workers] if step >= self.workers else 0.0)
            # It may have begun long ago, under what was said then; nothing new is said while the host waits for it.
            heard = bisect_right(said_s, begun)
            begun = max(begun, *held_s[max(step - 63, 0) : heard])
            made_s.append(begun + in_worker_s[heard - 1] + self.worker_s * noise[step][0])
            taken = max(now, made_s[step])
            taken_s.append(taken)
            ended = taken + self.host_s * (1 + self.drift * step / 1000) * noise[step][1] + on_host
            times.append(ended - now)
            now = ended
        return times


def held(pipeline: Pipeline, blocks: Sequence[DelayBlock], step_s: float) -> list[Held]:
    """What the blocks measure of the pipeline."""
    of = {step: block for block in blocks for step in range(block.first, block.end)}
    queue = pipeline.workers * pipeline.prefetch

    def delay(step: int) -> tuple[float, float, float]:
        block = of[step]
        on_host = block.place not in (None, "loader")
        delayed = block.level * step_s
        hold = queue * (step_s + delayed * on_host) if step == block.first else 0.0
        return delayed * pipeline.workers * (block.place == "loader"), delayed * on_host, hold

    times = pipeline.run(blocks[-1].end, delay)
    return [Held(b.round, b.place, b.level, b.level * step_s, float(np.mean(times[b.kept : b.end]))) for b in blocks]
