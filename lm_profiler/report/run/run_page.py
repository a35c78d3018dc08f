"""The tables printed at the end of a run, and the page of everything in its record."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from shlex import quote

from lm_profiler.record.figure import ms_text
from lm_profiler.record.files import from_here
from lm_profiler.record.quantities import GROUPS, MEMORY, MFU, QUANTITIES, TIMES, counted, with_prefix
from lm_profiler.record.run_record import NumericsFacts, RunRecord
from lm_profiler.record.text import short_path
from lm_profiler.report.run.rank_lines import own_work_table, ranks_lines
from lm_profiler.report.run.sections import list_table, phase_table, sections, shown, step_line
from lm_profiler.report.run.verdict import findings_lines, odd_lines, percent, step_lines, verdict_lines
from lm_profiler.report.run.waterfall_text import why_lines
from lm_profiler.report.tables.table import Table, text_table
from lm_profiler.report.tables.table_columns import device_of

_WAITS_SHOWN = 2
_ACTIONS_SHOWN = 4
_SAID = 0.05  # the share of the step from which ``other`` is broken down at a run's end


def end_tables(record: RunRecord, folder: Path, verbose: bool = False) -> list[Table]:
    """Return what is printed at a run's end: what binds it, what to do next, its phases; or how the run died."""
    audit = Table()
    if record.numerics is not None:
        audit = replace(list_table(record, "numerics.kinds"), above=[numerics_headline(record.numerics)])
    table = time_table(record) if verbose else replace(time_table(record), below=end_lines(record))
    where = from_here(folder)
    more = "" if verbose or not record.time else f"; all of it: lm_profiler report {quote(str(where))}"
    verdict = Table(above=[] if verbose else verdict_lines(record))
    return [verdict, table, audit, Table(above=[f"written to {where}{more}"])]


def end_lines(record: RunRecord) -> list[str]:
    """Return the lines below the table of a run's end, without empty ones."""
    spread = [] if record.ranks is None else [step_line(record)]
    other = other_lines(record) if record.shares.get("other", 0.0) >= _SAID else []
    lines = [*spread, *step_lines(record), *_rates(record), *_memory(record)[:1], *ranks_lines(record), *other]
    return [*lines, *odd_lines(record)[:1], *(f"note: {note}" for note in record.notes), *failure_lines(record)]


def run_page(record: RunRecord, folder: Path) -> list[Table]:
    """Return everything in a run's record, in sections; what is unknown is left out."""
    said = [*failure_lines(record), *verdict_lines(record), *step_lines(record), *ranks_lines(record)]
    said += [*why_lines(record), *(f"note: {note}" for note in record.notes), f"folder: {from_here(folder)}"]
    head = text_table(("", ""), [line.partition(": ")[::2] for line in said], left=2, title=headline(record))
    command = Table(above=record.command.splitlines(), verbatim=True, title="Command")
    return [head, *sections(record), *([command] if record.command else [])]


def time_table(record: RunRecord) -> Table:
    """Return a row for each phase that occurred and for the step, with the summary lines below."""
    if not record.time or not record.time["step"].n:
        return Table(below=summary_lines(record))
    # A phase that ends in a collective takes equally long on all ranks: own work and waiting distinguish them.
    table = phase_table(record) if record.ranks is None else own_work_table(record)
    return replace(table, title=headline(record), below=summary_lines(record))


def headline(record: RunRecord) -> str:
    """Return what was measured and where; for a run without measured steps, how it ended."""
    if not record.time or not record.time["step"].n:
        return f"{record.name}: {record.verb}, {record.status}"
    device = device_of(record.environment)
    where = f" on {device}" if device is not None else ""
    precision = f", {record.model.precision}" if record.model is not None else ""
    steps, warmup = counted(record.time["step"].n, "step"), record.steps.get("warmup", 0)
    return f"{record.name}: {steps} of {record.verb} after {counted(warmup, 'warm-up step')}{where}{precision}"


def summary_lines(record: RunRecord) -> list[str]:
    """Return a line each on throughput, memory, verdict, ranks, waterfall, first step, notes and failure."""
    # The table of own work has no columns for the step's spread.
    spread = [step_line(record)] if record.ranks is not None and record.time else []
    first = [] if record.first_step_s is None else [f"first step {TIMES['step'].show(record.first_step_s)}"]
    of_why = [] if record.waterfall is None else [f"why: {note}" for note in record.waterfall.notes]
    return [
        *(*spread, *_rates(record), *_memory(record), *_planned(record), *verdict_lines(record), *step_lines(record)),
        *(*ranks_lines(record), *why_lines(record), *_waits(record), *odd_lines(record), *other_lines(record), *first),
        *findings_lines(record),
        *(f"note: {note}" for note in (*record.notes, *record.details, *of_why)),
        *failure_lines(record),
    ]


def main_lines(record: RunRecord) -> list[str]:
    """Return the lines that belong beside the verdict: the rates, the memory, and who waits for whom."""
    return [*_rates(record), *_memory(record)[:1], *ranks_lines(record)[:1]]


def _memory(record: RunRecord) -> list[str]:
    of_parts = [of for of in GROUPS["Memory by phase"] if of.path.endswith("allocated_peak") and of.get(record)]
    at = max(of_parts, key=lambda of: of.get(record)).of if of_parts else "backward"
    causes = [of for of in GROUPS["Memory by cause"] if of.of == at and of.get(record)]
    where = f"at the peak, in {at}" if of_parts else "held by the step"
    lines = {
        "": [f"{of.title} {of.fit(value)}" for of in MEMORY.values() if (value := of.get(record)) is not None],
        "peak by phase: ": [f"{TIMES[str(of.of)].title} {of.fit(of.get(record))}" for of in of_parts],
        f"{where}: ": [f"{of.title.partition(': ')[2]} {of.fit(of.get(record))}" for of in causes],
    }
    return [f"{start}{', '.join(known)}" for start, known in lines.items() if known]


def _planned(record: RunRecord) -> list[str]:
    if record.planned is None:
        return []
    if record.planned.peak is None:
        return [f"planned: unknown ({record.planned.unknown})"]
    peak, ratio = (QUANTITIES[name] for name in ("planned_peak_bytes", "measured_over_planned"))
    known = ratio.get(record)
    # A device's allocator also counts workspaces of libraries other than cuBLAS, which a rehearsal does not know.
    by_device = record.memory is None or record.memory.measured.allocated_peak is not None
    of = ", with workspaces of libraries," if by_device else " when forward has ended"
    became = "; what was measured is unknown"
    if known is not None:
        became = f"; measured{of} {'as planned' if 0.995 <= known <= 1.005 else f'{known:.3f} times as much'}"
    eager = " without torch.compile" * record.planned.compiled
    return [f"planned{eager}: peak {peak.fit(peak.get(record))}, in {record.planned.phase}{became}"]


def _waits(record: RunRecord) -> list[str]:
    waits = sorted(record.syncs or [], key=lambda sync: -sync.count)
    told = [f"{of.call or of.function} ({short_path(of.file)}, line {of.line})" for of in waits[:_WAITS_SHOWN]]
    more = [f"{counted(len(waits) - _WAITS_SHOWN, 'more line')}"] if len(waits) > _WAITS_SHOWN else []
    return [f"the host waits for the device at: {', '.join([*told, *more])}"] if told else []


def failure_lines(record: RunRecord) -> list[str]:
    """Return where and why the run died, in one line; none where it did not."""
    failure = record.failure
    if failure is None:
        return []
    at = f"{record.status} in {failure.where}"
    if failure.message:
        return [f"{at}: {failure.type}: {failure.message}"]
    return [at if record.status == "interrupted" else f"{at}: {failure.type}"]  # KeyboardInterrupt adds nothing


def _rates(record: RunRecord) -> list[str]:
    """Return a line with tokens/s, or samples/s where tokens are unknown, and with the utilisation."""
    parts = list[str]()
    for what in ("tokens", "samples"):
        rate, count = QUANTITIES[f"{what}_per_s"], QUANTITIES[f"{what}_per_step"].get(record)
        if count is not None and not parts:
            known = shown(rate, record) if rate.get(record) is not None else f"unknown {what}/s"
            parts.append(f"{known} ({count:,} a step)")
    use = record.utilisation
    if use is not None and not record.contended:  # meaningless on a shared machine
        peak = (
            "" if use.peak_flops_per_s is None else f" of {with_prefix(use.peak_flops_per_s, 'FLOP/s')} ({use.dtype})"
        )
        parts.append(f"MFU {MFU.show(use.mfu)}{peak}")
        if use.of_ceiling is not None and use.ceiling_flops_per_s is not None:
            own = with_prefix(use.ceiling_flops_per_s, "FLOP/s")
            parts.append(f"{percent(use.of_ceiling)} of the matmul rate measured here ({own})")
    return [", ".join(parts)] if parts else []


def numerics_headline(audit: NumericsFacts) -> str:
    """Return the loss in both precisions, and how far output and gradients are off."""
    losses = " against ".join("not finite" if x is None else f"{x:.6g}" for x in (audit.loss, audit.reference_loss))
    losses += "" if audit.loss_dtype is None else f" (in {audit.loss_dtype})"
    output, gradients = ("unknown" if x is None else f"{x:.2%}" for x in (audit.output_error, audit.gradient_error))
    text = f"numerics against float32: loss {losses}, output off by {output}, gradients by {gradients}"
    steps = ["not finite" if x is None else f"{x:.6g}" for x in audit.losses]
    return f"{text}; loss of the first {counted(len(steps), 'step')} from {steps[0]} to {steps[-1]}" if steps else text


def other_lines(record: RunRecord) -> list[str]:
    """Return a line with the measured ``other``, and with ``other`` while each action was timed, by action."""
    owned = record.other_by_owner
    if owned is None or not owned.actions:
        return []
    rank = " of rank 0" * (len(record.rank_step_s) > 1)
    # The actions add up to this figure: timing each of them takes some time itself.
    total = f"{ms_text(owned.seconds)} ms while each action of {counted(owned.steps, 'step')} was timed"
    whole = total if owned.measured_s is None else f"{ms_text(owned.measured_s)} ms, {total}"
    said = []
    for of in owned.actions[:_ACTIONS_SHOWN]:
        often = "" if of.in_steps == owned.steps else f" (in {of.in_steps} of {owned.steps} steps)"
        said.append(f"{of.name} {ms_text(of.seconds)}{often}")
    if rest := owned.actions[_ACTIONS_SHOWN:]:
        said.append(f"{len(rest)} more {ms_text(sum(action.seconds for action in rest))}")
    return [f"other{rank}: {whole}: {', '.join(said)}"]
