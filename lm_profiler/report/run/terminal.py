"""The table at the end of a run."""

from __future__ import annotations

from pathlib import Path

from lm_profiler.analysis.hardware.contention import contention_lines
from lm_profiler.record.files import from_here
from lm_profiler.record.quantities import MEMORY, MFU, PARTS, TIMES, counted
from lm_profiler.record.run import OddStep, RunRecord, Steadiness, Telemetry, TimeSummary, Utilisation
from lm_profiler.report.run.facts import bytes_text, rate_text
from lm_profiler.report.run.numerics import numerics_table
from lm_profiler.report.tables.table import Cell, Heading, Table

_ODD_SHOWN = 3

_SLOW_CLOCK = 0.75
"""Under this share of the highest SM clock a GPU's figures say more about its cooling than about the program."""


def run_tables(record: RunRecord, folder: Path) -> list[Table]:
    """The phases, the step, throughput, memory and where everything is; or how the run died."""
    tables = [time_table(record), numerics_table(record.numerics) if record.numerics is not None else Table()]
    return [*tables, Table(above=[f"written to {from_here(folder)}"])]


def time_table(record: RunRecord) -> Table:
    """A row for each phase that occurred, then forward + backward, and the step; below them what else is to be said."""
    if not record.time or not record.time["step"].n:
        return Table(below=summary_lines(record))
    host = record.environment is not None and record.environment.device_type != "cpu"
    titles = ["phase", "mean ± std (ms)", "CV", "median [95 % interval]", "p95", "share", *["host (ms)"] * host]
    rows = []
    for part in (*PARTS, "forward_backward", "step"):
        # A phase that this verb or loop does not have; without a backward pass the sum is the forward pass once more.
        if not record.time["backward" if part == "forward_backward" else part].max and part != "step":
            continue
        digits = _digits(record.time[part].mean or 0.0)
        cells = _cells(part, record.time[part], _share(record, part), digits)
        if host:
            cells.append(TIMES[part].show(record.host_time[part].median, unit=False, digits=digits))
        rows.append([Cell(text, text, style="bold" if part == "step" else "") for text in cells])
    headings = [Heading(title, title, figures=title != "phase") for title in titles]
    return Table(headings, rows, below=summary_lines(record), title=headline(record))


def headline(record: RunRecord) -> str:
    """What was measured, where."""
    step = record.time["step"]
    warmup = record.steps.get("warmup", 0)
    environment, model = record.environment, record.model
    where = f" on {environment.device_name}" if environment is not None else ""
    if environment is not None and environment.world_size > 1:
        where += f" x {environment.world_size}"
    precision = f", {model.precision}" if model is not None else ""
    return f"{record.name}: {counted(step.n, 'step')} of {record.verb} after {warmup} of warm-up{where}{precision}"


def _digits(seconds: float) -> int:
    """Behind the point of milliseconds: three or four figures that mean something."""
    return 3 if seconds < 0.01 else 2 if seconds < 0.1 else 1


def _share(record: RunRecord, part: str) -> float | None:
    """Of the typical step; of the mean one in records that do not know it."""
    mean, step_s = record.time[part].mean, record.time["step"].mean
    return record.shares.get(part, mean / step_s if mean is not None and step_s else None)


def _cells(part: str, time: TimeSummary, share: float | None, digits: int) -> list[str]:
    def show(value: float | None) -> str:
        return TIMES[part].show(value, unit=False, digits=digits)

    median = show(time.median)
    if time.ci_low is not None:
        median += f" [{show(time.ci_low)}, {show(time.ci_high)}]"
    return [
        TIMES[part].title,
        show(time.mean) + ("" if time.std is None else f" ± {show(time.std)}"),
        "" if time.cv is None else f"{time.cv:.1%}",
        median,
        show(time.p95),
        "" if share is None else f"{share:.1%}",
    ]


def summary_lines(record: RunRecord) -> list[str]:
    """Throughput, memory, first step, notes and failure: a line each."""
    lines = []
    if rates := [*_rates(record), *_utilisation(record.utilisation)]:
        lines.append(", ".join(rates))
    if record.memory is not None:
        peaks = ((MEMORY[name], value) for name, value in record.memory.measured.model_dump().items())
        known = [f"{quantity.title} {bytes_text(value)}" for quantity, value in peaks if value is not None]
        if known:
            lines.append(", ".join(known))
    if record.verdict is not None:
        lines += verdict_lines(record)
    lines += odd_lines(record)
    if record.first_step_s is not None:
        lines.append(f"first step {TIMES['step'].show(record.first_step_s)}")
    lines += [f"note: {note}" for note in record.notes]
    return [*lines, *failure_lines(record)]


def failure_lines(record: RunRecord) -> list[str]:
    """Where and why the run died, in one line; none where it did not."""
    failure = record.failure
    if failure is None:
        return []
    at = f" of step {failure.step}" if failure.step is not None else ""
    said = f": {failure.message}" if failure.message else ""
    return [f"{record.status} in {failure.phase}{at}: {failure.type}{said}"]


def _rates(record: RunRecord) -> list[str]:
    """Tokens/s with the interval of the step's median turned over; samples/s where tokens are unknown."""
    rate, step = record.throughput, record.time.get("step")
    if rate is None or step is None:
        return []
    what, count, per_s = "tokens", rate.tokens_per_step, rate.tokens_per_s
    if count is None:
        what, count, per_s = "samples", rate.samples_per_step, rate.samples_per_s
    if count is None:
        return []
    if per_s is None:
        return [f"unknown {what}/s ({count:,} a step)"]
    interval = f" [{count / step.ci_high:,.0f}, {count / step.ci_low:,.0f}]" if step.ci_low and step.ci_high else ""
    return [f"{per_s:,.0f} {what}/s{interval} ({count:,} a step)"]


def _utilisation(use: Utilisation | None) -> list[str]:
    """Against the datasheet, and against the machine's own matrix product."""
    if use is None:
        return []
    parts = [f"MFU {MFU.show(use.mfu)}"]
    if use.peak_flops_per_s is not None:
        parts[0] += f" of {rate_text(use.peak_flops_per_s)} ({use.dtype})"
    if use.of_ceiling is not None and use.ceiling_flops_per_s is not None:
        own = rate_text(use.ceiling_flops_per_s)
        parts.append(f"{use.of_ceiling:.0%} of this machine's own matrix product ({own})")
    return parts


def verdict_lines(record: RunRecord) -> list[str]:
    """What binds the run and whether it was steady, in one line; what to try, in another."""
    verdict, steadiness = record.verdict, record.steadiness
    if verdict is None:
        return []
    bound = f"bound by {verdict.bound_by}" if verdict.bound_by is not None else "bound by nothing that shows"
    text = f"{bound if verdict.certain else 'what binds it is not known'}: {verdict.evidence}"
    if steadiness is not None:
        text = "; ".join([_words(steadiness), *contention_lines(record.contention), text])
        if steadiness.cut:
            text += f"; left out {steadiness.cut} more of warm-up"
            if steadiness.bias_of_mean is not None:
                text += f", with which the mean would be off by {steadiness.bias_of_mean:+.1%}"
        if steadiness.recompilations:
            text += f"; {counted(steadiness.recompilations, 'recompilation')} while measuring"
    return [f"verdict: {text}{_clock(record.telemetry)}", f"next: {verdict.advice}"]


def _words(steadiness: Steadiness) -> str:
    """What may be said of the run's steps, the gravest first."""
    if steadiness.word is None:
        return "too few steps to call it steady"
    text = ", ".join(steadiness.words)
    if steadiness.word != "noisy":
        return text
    if steadiness.known_to is None:
        return f"{text}: the median step is not known from so few steps"
    share = steadiness.known_to
    known = f"{share:.1%}" if share < 0.1 else f"{share:.0%}"  # just above the limit it must not read as the limit
    return f"{text}: the median step is known to ±{known} only"


def odd_lines(record: RunRecord) -> list[str]:
    """The three steps that are farthest from the others, and how many more are: one line, or none."""
    if not record.odd_steps:
        return []
    told = [_odd(odd) for odd in record.odd_steps[:_ODD_SHOWN]]
    if (more := len(record.odd_steps) - _ODD_SHOWN) > 0:
        told.append(f"and {counted(more, 'more step')}")
    return [f"odd: {'; '.join(told)}"]


def _odd(odd: OddStep) -> str:
    excess = f"{'+' if odd.excess_s > 0 else '-'}{_duration(abs(odd.excess_s))}"
    ratio = f"{odd.ratio:,.0f}" if odd.ratio >= 10 else f"{odd.ratio:.2g}"
    return f"step {odd.step}: {_duration(odd.step_s)}, {ratio} x the median, {excess} in {odd.part}"


def _duration(seconds: float) -> str:
    """Two or three figures that mean something, in seconds or milliseconds."""
    return f"{seconds:,.1f} s" if seconds >= 1.0 else f"{seconds * 1e3:.3g} ms"


def _clock(telemetry: Telemetry | None) -> str:
    """A slow or throttled GPU makes every figure above slow: that is part of the verdict."""
    if telemetry is None:
        return ""
    reasons = f" ({', '.join(telemetry.throttle_reasons)})" if telemetry.throttle_reasons else ""
    which = "the slowest GPU" if len(telemetry.gpus) > 1 else "the GPU"
    if telemetry.clock_share is not None and (telemetry.clock_share < _SLOW_CLOCK or reasons):
        return f"; {which} ran at {telemetry.clock_share:.0%} of its highest clock{reasons}"
    which = "a GPU" if len(telemetry.gpus) > 1 else "the GPU"
    return f"; {which} was throttled{reasons}" if reasons else ""
