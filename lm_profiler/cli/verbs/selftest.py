"""``selftest``: how far can this machine's figures be trusted?

The same cell runs twice, each time in a fresh process (A/A): what differs between the two is not the program. Then
the instruments' own cost, against ``Trainer(barebones=True)``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from lm_profiler.analysis.compare.ratio import RatioInterval, change, minimum_detectable_effect, single_interval
from lm_profiler.analysis.hardware.contention import contention_lines
from lm_profiler.analysis.steps.cuts import steps_after
from lm_profiler.analysis.steps.statistics import mean_interval
from lm_profiler.cli.usage import TOLD_IN, answered
from lm_profiler.record.entry import Entry
from lm_profiler.record.exit_codes import FAILED, OK
from lm_profiler.record.quantities import TIMES
from lm_profiler.record.run import RunRecord, read_run
from lm_profiler.usage_error import UsageError

EXAMPLES = """\
for example:
  lm_profiler selftest
  lm_profiler selftest --config demo --stages.measure_steps=50"""

_TOY = (
    "--model.d_model=256",
    "--model.d_ff=1024",
    "--model.num_layers=4",
    "--model.num_heads=8",
    "--data.context_length=128",
)
_UNTIMED_OFF = ("--actions.steps=0", "--memory.steps=0", "--trace.steps=0")
_RESAMPLES = 2000


@dataclass(frozen=True)
class Options:
    """Run the same fit twice in fresh processes, and print how much two equal runs differ on this machine.

    Also the smallest change that a comparison can detect, and what the instruments cost beside Trainer(barebones=True).

    Args:
        options: Options of fit; without any, a small model.
    """

    options: Sequence[str] = ()


def run(options: Options) -> int:
    """Run the self-test with the options of ``fit``; returns the exit code.

    Raises:
        UsageError: ``fit`` does not take these options.
    """
    given = [*(options.options or _TOY), *_UNTIMED_OFF]
    try:
        with tempfile.TemporaryDirectory(prefix="lm_profiler-selftest-") as folder:
            runs = [_fit(given, Path(folder), name) for name in ("A", "B")]
            costs = _cost(runs[0][0], Path(folder))
    except subprocess.CalledProcessError as error:
        said = "\n".join(error.stderr.strip().splitlines()[-2:])
        print(said or f"a run of the self-test ended with code {error.returncode}", file=sys.stderr)
        return FAILED
    for line in report(runs, costs):
        print(line)
    return OK


def report(runs: Sequence[tuple[RunRecord, list[float]]], costs: tuple[list[float], list[float]]) -> list[str]:
    """The self-test's lines: ``runs`` are A and B with their steps (seconds), ``costs`` bare and instrumented steps."""
    (a, steps_a), (b, steps_b) = runs
    where = a.environment.device_name if a.environment is not None else "unknown"
    lines = [f"A/A on {where}: the same {a.verb} twice, in fresh processes"]
    for name, record in (("A", a), ("B", b)):
        step = record.time["step"]
        words = "; ".join([", ".join(record.words) or "too short to judge", *contention_lines(record.contention)])
        middle, low, high = (TIMES["step"].show(end, unit=False) for end in (step.mean, step.mean_low, step.mean_high))
        lines.append(f"  {name}: step {middle} ms [{low}, {high}], {words}")
    means = mean_interval(steps_a), mean_interval(steps_b)
    interval = None if means[0] is None or means[1] is None else single_interval(means[0], means[1])
    if interval is None:
        lines.append("  too few steps, or too noisy ones, to compare; raise --stages.measure_steps")
    else:
        lines += _comparison(interval)
    return [*lines, _cost_line(*costs, a.time["step"].mean)]


def _comparison(interval: RatioInterval) -> list[str]:
    word: str = change(interval)
    seen, low, high = (ratio - 1.0 for ratio in (interval.ratio, interval.low, interval.high))
    if word in ("FASTER", "SLOWER"):
        word = f"false alarm: {word}; something else was using the machine"
    return [
        f"  observed difference: {seen:+.2%} [{low:+.2%}, {high:+.2%}], {word}",
        f"  smallest change that one run against one can detect: {minimum_detectable_effect(interval):.1%}",
    ]


def _cost_line(bare: Sequence[float], instrumented: Sequence[float], step_s: float | None) -> str:
    if not bare or not instrumented:
        return "instruments: too few steps to measure their cost"
    added = median(instrumented) - median(bare)
    # The 95 % percentile bootstrap interval of the difference, with a fixed seed.
    rng = np.random.default_rng(0)
    base, ours = (np.median(rng.choice(x, size=(_RESAMPLES, len(x))), axis=1) for x in (bare, instrumented))
    low, high = np.quantile(ours - base, [0.025, 0.975])
    share = f", {added / step_s:.2%} of the step above" if step_s else ""
    return (
        f"instruments: {added * 1e6:+.1f} µs a step [{low * 1e6:+.1f}, {high * 1e6:+.1f}] against "
        f"Trainer(barebones=True), on a module that does next to nothing{share}"
    )


def _fit(options: Sequence[str], folder: Path, name: str) -> tuple[RunRecord, list[float]]:
    _python(folder, "lm_profiler", "fit", *options, f"--log_dir={folder}", f"--name={name}")
    run = folder / name / "version_0"
    record = read_run(run)
    return record, [row.time("step") for row in steps_after(Entry(run, record)).rows]


def _cost(record: RunRecord, folder: Path) -> tuple[list[float], list[float]]:
    """Bare and instrumented steps on the device that ``record`` ran on, in seconds."""
    where = [record.environment.device_type] if record.environment is not None else []
    answer = json.loads(_python(folder, "lm_profiler.cli.workers.cost", *where).splitlines()[-1])
    return answer["bare"], answer["instrumented"]


def _python(folder: Path, *arguments: str) -> str:
    """What a program prints, the first of ``arguments``; what is wrong with its call it leaves in ``folder``."""
    env = {**os.environ, TOLD_IN: str(folder / "wrong.json")}
    done = subprocess.run((sys.executable, "-m", *arguments), capture_output=True, text=True, check=False, env=env)
    if told := answered(folder / "wrong.json"):
        raise UsageError(told["message"])
    done.check_returncode()
    return done.stdout
