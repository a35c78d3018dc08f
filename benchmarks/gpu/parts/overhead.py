"""What the instruments cost on `small` and on a toy, where every mark is an event, beside SimpleProfiler."""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import Trainer
from scipy.stats import t

from benchmarks.gpu.findings import Findings
from benchmarks.gpu.place import Place
from benchmarks.overhead import added, contenders, interleaved, table, time_one
from lm_profiler.measure.clocks.stream import stream_of
from lm_profiler.report.tables.formats import markdown
from lm_profiler.training import FakeTokens, LanguageModel

NAMES = ("bare Trainer", "lm_profiler, all but the trace", "SimpleProfiler")
SKIP = 10
TINY: dict[str, Any] = {"d_model": 16, "d_ff": 24, "num_layers": 2, "num_heads": 2}
AIM = 0.003
"""Of small's step."""


class Timed(LanguageModel):
    """Notes when each step begins; at both ends of what is timed the device has done all that came before."""

    def __init__(self, last: int, **options: Any) -> None:
        super().__init__(**options)
        self.began_ns: list[int] = []
        self._waits_at = (SKIP, last)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx in self._waits_at and self.device.type != "cpu":
            torch.accelerator.synchronize()
        self.began_ns.append(time.perf_counter_ns())


def run(place: Place, findings: Findings) -> None:
    findings.add(event_us=event_us(place))
    toy_steps, small_steps = (5, 3) if place.on_cpu else (400, 50)
    toy = rounds(
        place,
        0.35,
        lambda options: time_one(options, toy_steps, place.accelerator),
        toy_steps,
    )
    tell(findings, "toy", toy)
    small = rounds(
        place, 1.0, lambda options: time_small(place, options, small_steps), small_steps
    )
    tell(findings, "small", small)
    step_us = statistics.median(small[NAMES[0]])
    share, low, high = share_of(added(small, NAMES[1]), step_us)
    found = f"{share:.2%} [{low:.2%}, {high:.2%}] of {step_us / 1e3:.2f} ms"
    findings.aim(
        "added to small's step",
        f"{AIM:.1%}",
        found,
        None if place.on_cpu else met(low, high),
    )


def share_of(extra_us: Sequence[float], step_us: float) -> tuple[float, float, float]:
    """The mean of what the rounds differ by, as a share of a step, with its 95 % interval by Student's t."""
    mean = statistics.mean(extra_us)
    half = (
        t.ppf(0.975, len(extra_us) - 1)
        * statistics.stdev(extra_us)
        / math.sqrt(len(extra_us))
    )
    return mean / step_us, (mean - half) / step_us, (mean + half) / step_us


def met(low: float, high: float) -> bool | None:
    """None where the rounds differ too much to say it."""
    if high <= AIM:
        return True
    return False if low > AIM else None


def rounds(
    place: Place, until_share: float, time_with: Any, steps: int
) -> dict[str, list[float]]:
    """Rounds of all contenders until that share of the part's time is over; two that count at least."""
    until_s = time.monotonic() + until_share * max(place.left_s, 0.0)
    given = contenders(steps)

    def microseconds(name: str) -> float:
        with tempfile.TemporaryDirectory() as folder:
            return float(time_with(given[name](folder)))

    def more(done: int) -> bool:
        return done < 2 or (not place.on_cpu and time.monotonic() < until_s)

    return interleaved(NAMES, microseconds, more)


def time_small(place: Place, options: dict[str, Any], steps: int) -> float:
    """Microseconds a step of the small preset, as configs/small_bf16.yaml has it."""
    module = Timed(SKIP + steps, **(TINY if place.on_cpu else {}))
    data = (
        FakeTokens(batch_size=1, context_length=8)
        if place.on_cpu
        else FakeTokens(batch_size=4, context_length=512)
    )
    off: dict[str, Any] = dict.fromkeys(
        ("enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False
    )
    trainer = Trainer(
        accelerator=place.accelerator,
        devices=1,
        precision="bf16-mixed",
        max_steps=SKIP + steps + 1,
        **off,
        **options,
    )
    trainer.fit(module, datamodule=data)
    return (module.began_ns[SKIP + steps] - module.began_ns[SKIP]) / steps * 1e-3


def tell(findings: Findings, what: str, results: dict[str, list[float]]) -> None:
    findings.text(
        f"A step of {what}, {len(results[NAMES[0]])} rounds", markdown(table(results))
    )
    findings.add(**{what: results})


def event_us(place: Place, count: int = 2_000) -> float | None:
    """Microseconds of the host that one event from the pool takes; None where a mark has none."""
    if (stream := stream_of(place.device)) is None:
        return None
    took_ns = 0
    for _ in range(2):  # the first time fills the pool
        began_ns = time.perf_counter_ns()
        events = [stream.record() for _ in range(count)]
        took_ns = time.perf_counter_ns() - began_ns
        stream.wait()
        stream.release(events)
    return took_ns / count * 1e-3
