"""The table at the end of a run."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from lm_profiler.record.quantities import MEMORY, PARTS, TIMES, TOKENS_PER_S
from lm_profiler.record.run import RunRecord, TimeSummary


def print_run(record: RunRecord, folder: Path, console: Console | None = None) -> None:
    """Print the phases, the step, throughput, memory and where everything is; or how the run died."""
    console = console or Console()
    if not console.is_terminal:  # a file has no width to keep to
        console.width = 120
    if record.time and record.time["step"].n:
        console.print(headline(record), highlight=False, soft_wrap=True, style="bold")
        console.print(time_table(record))
    for line in summary_lines(record):
        console.print(line, highlight=False, soft_wrap=True)
    console.print(f"written to {folder}", highlight=False, soft_wrap=True)


def time_table(record: RunRecord) -> Table:
    """A row for each phase that occurred, then forward + backward, and the step."""
    step = record.time["step"]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("phase", "mean ± std (ms)", "CV", "median [95 % interval]", "p95", "share"):
        table.add_column(name, justify="left" if name == "phase" else "right", no_wrap=True)
    digits = 3 if (step.mean or 0.0) < 0.01 else 2 if (step.mean or 0.0) < 0.1 else 1
    host = record.environment is not None and record.environment.device_type != "cpu"
    if host:
        table.add_column("host (ms)", justify="right", no_wrap=True)
    for part in (*PARTS, "forward_backward", "step"):
        if not record.time[part].max and part != "step":  # a phase that this verb or loop does not have
            continue
        cells = _cells(part, record.time[part], step.mean or 0.0, digits)
        if host:
            cells.append(TIMES[part].show(record.host_time[part].median, unit=False, digits=digits))
        table.add_row(*cells, style="bold" if part == "step" else None)
    return table


def headline(record: RunRecord) -> str:
    """What was measured, where."""
    step = record.time["step"]
    warmup = record.steps.get("warmup", 0)
    environment, model = record.environment, record.model
    where = f" on {environment.device_name}" if environment is not None else ""
    if environment is not None and environment.world_size > 1:
        where += f" x {environment.world_size}"
    precision = f", {model.precision}" if model is not None else ""
    return f"{record.name}: {step.n} steps of {record.verb} after {warmup} of warm-up{where}{precision}"


def _cells(part: str, time: TimeSummary, step_s: float, digits: int) -> list[str]:
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
        "" if time.mean is None or not step_s else f"{time.mean / step_s:.1%}",
    ]


def summary_lines(record: RunRecord) -> list[str]:
    """Throughput, memory, first step, notes and failure: a line each."""
    lines = []
    if record.throughput is not None and record.throughput.tokens_per_step is not None:
        tokens = f"{record.throughput.tokens_per_step:,} tokens a step"
        lines.append(f"{TOKENS_PER_S.show(record.throughput.tokens_per_s)} ({tokens})")
    if record.memory is not None:
        peaks = ((MEMORY[name], value) for name, value in record.memory.measured.model_dump().items())
        known = [f"{quantity.title} {quantity.show(value)}" for quantity, value in peaks if value is not None]
        if known:
            lines.append(", ".join(known))
    if record.verdict is not None:
        lines += verdict_lines(record)
    if record.first_step_s is not None:
        lines.append(f"first step {TIMES['step'].show(record.first_step_s)}")
    lines += [f"note: {note}" for note in record.notes]
    if record.failure is not None:
        at = f" of step {record.failure.step}" if record.failure.step is not None else ""
        lines.append(f"{record.status} in {record.failure.phase}{at}: {record.failure.type}: {record.failure.message}")
    return lines


def verdict_lines(record: RunRecord) -> list[str]:
    """What binds the run and whether it was steady, in one line; what to try, in another."""
    verdict, steadiness = record.verdict, record.steadiness
    if verdict is None:
        return []
    bound = f"bound by {verdict.bound_by}" if verdict.bound_by is not None else "bound by nothing that shows"
    text = f"{bound}: {verdict.evidence}"
    if steadiness is not None:
        text = f"{steadiness.word or 'too few steps to call it steady'}; {text}"
        if steadiness.cut:
            text += f"; left out {steadiness.cut} more of warm-up"
            if steadiness.bias_of_mean is not None:
                text += f", with which the mean would be off by {steadiness.bias_of_mean:+.1%}"
        if steadiness.recompilations:
            text += f"; {steadiness.recompilations} recompilations while measuring"
    return [f"verdict: {text}", f"try: {verdict.advice}"]
