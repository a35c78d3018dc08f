"""The tables printed at the end of a run, and the page of everything in its record."""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from shlex import quote

from lm_profiler.record.figure import AT_LEAST, bytes_text, ms_text
from lm_profiler.record.files import relative_to_cwd
from lm_profiler.record.parts import PARTS
from lm_profiler.record.quantities import (
    CAUSES,
    MEMORY,
    MFU,
    QUANTITIES,
    TIMES,
    count_text,
    with_prefix,
)
from lm_profiler.record.run_record import (
    MemoryFacts,
    NumericsFacts,
    RunRecord,
    Utilisation,
)
from lm_profiler.record.text import short_path
from lm_profiler.report.run.rank_lines import own_work_table, ranks_lines
from lm_profiler.report.run.sections import (
    list_table,
    phase_table,
    sections,
    shown,
    step_line,
)
from lm_profiler.report.run.verdict import (
    findings_lines,
    odd_lines,
    percent,
    step_lines,
    verdict_lines,
)
from lm_profiler.report.run.waterfall_text import why_lines
from lm_profiler.report.tables.table import Table, text_table
from lm_profiler.report.tables.table_columns import device_text

_WAITS_SHOWN = 2
_ACTIONS_SHOWN = 4
# the share of the step from which ``other`` is broken down at a run's end
_LEAST_OTHER_SHARE = 0.05
# A measured peak whose ratio to the planned one lies between these is printed as "as planned".
_AS_PLANNED = (0.995, 1.005)  # smallest and largest ratio


# -- the pages ---------------------------------------------------------------------------------------------------------

_LOOP_NAMES = {
    "Fabric": "a Fabric loop",
    "transformers": "transformers' Trainer",
    "accelerate": "an accelerate loop",
    "own": "your own loop",
}


def end_tables(record: RunRecord, folder: Path, verbose: bool = False) -> list[Table]:
    """Return the tables that are printed at a run's end: verdict and advice, phases, numerics, and the folder.

    With ``verbose`` the caller prints all figures too. Then the lines around the table of phases are left out here.
    """
    table = time_table(record)
    verdict = Table()
    written = f"written to {relative_to_cwd(folder)}"
    if not verbose:
        table = replace(table, below=end_lines(record))
        verdict = Table(above=verdict_lines(record))
        if record.time:
            written += f"; all figures: lm_profiler report {quote(str(relative_to_cwd(folder)))}"
    numerics = Table()
    if record.numerics is not None:
        kinds = list_table(record, "numerics.kinds")
        numerics = replace(kinds, above=[numerics_headline(record.numerics)])
    return [verdict, table, numerics, Table(above=[written])]


def end_lines(record: RunRecord) -> list[str]:
    """Return the lines below the table of a run's end, without empty ones."""
    lines = [] if record.ranks is None else [step_line(record)]
    lines += step_lines(record)
    lines += _rate_lines(record)
    lines += _memory_lines(record)[:1]
    lines += ranks_lines(record)
    if record.shares.get("other", 0.0) >= _LEAST_OTHER_SHARE:
        lines += other_lines(record)
    lines += odd_lines(record)[:1]
    lines += _expert_line(record)
    lines += [f"note: {note}" for note in record.notes]
    return lines + failure_lines(record)


def run_page(record: RunRecord, folder: Path) -> list[Table]:
    """Return everything in a run's record, in sections; what is unknown is left out."""
    lines = failure_lines(record)
    for lines_of in (
        verdict_lines,
        findings_lines,
        step_lines,
        ranks_lines,
        why_lines,
        _expert_line,
    ):
        lines += lines_of(record)
    lines += [f"note: {note}" for note in record.notes]
    lines.append(f"folder: {relative_to_cwd(folder)}")
    rows = []
    for line in lines:
        label, _, text = line.partition(": ")
        rows.append((label, text))
    pages = [text_table(("", ""), rows, left=2, title=headline(record))]
    pages += sections(record)
    if record.command:
        command = record.command.splitlines()
        pages.append(Table(above=command, verbatim=True, title="Command"))
    return pages


def time_table(record: RunRecord) -> Table:
    """Return a row for each phase that occurred and for the step, with the summary lines below."""
    if not _has_measured_steps(record):
        return Table(below=summary_lines(record))
    # With several ranks, a phase that ends in a collective takes equally long on all of them. Only the table of own
    # work and waiting shows how they differ.
    table = phase_table(record) if record.ranks is None else own_work_table(record)
    return replace(table, title=headline(record), below=summary_lines(record))


def headline(record: RunRecord) -> str:
    """Return what was measured and where; for a run without measured steps, how it ended."""
    if not _has_measured_steps(record):
        return f"{record.name}: {record.verb}, {record.status}"
    steps = count_text(record.time["step"].n, "step")
    warmup = count_text(record.steps.get("warmup", 0), "warm-up step")
    ran: str = record.verb
    if record.loop != "Trainer":
        ran = _LOOP_NAMES.get(record.loop, record.loop)
    text = f"{record.name}: {steps} of {ran} after {warmup}"
    device = device_text(record.environment)
    if device is not None:
        text += f" on {device}"
    if record.model is not None:
        text += f", {record.model.precision}"
    return text


def _has_measured_steps(record: RunRecord) -> bool:
    return bool(record.time) and record.time["step"].n > 0


def summary_lines(record: RunRecord) -> list[str]:
    """Return lines on throughput, memory, verdict, ranks, waterfall, first step, notes and failure."""
    # The table of own work has no columns for the step's spread.
    lines = [step_line(record)] if record.ranks is not None and record.time else []
    for lines_of in (
        _rate_lines,
        _memory_lines,
        _planned_lines,
        verdict_lines,
        step_lines,
        ranks_lines,
        why_lines,
        _wait_lines,
        odd_lines,
        other_lines,
        _expert_line,
    ):
        lines += lines_of(record)
    if record.first_step_s is not None:
        lines.append(f"first step {TIMES['step'].show(record.first_step_s)}")
    lines += findings_lines(record)
    lines += [f"note: {note}" for note in (*record.notes, *record.details)]
    if record.waterfall is not None:
        lines += [f"note: why: {note}" for note in record.waterfall.notes]
    return lines + failure_lines(record)


def main_lines(record: RunRecord) -> list[str]:
    """Return the lines that are shown next to the verdict: rates, memory, and which rank waits for which."""
    return _rate_lines(record) + _memory_lines(record)[:1] + ranks_lines(record)[:1]


# -- single lines ------------------------------------------------------------------------------------------------------


def _memory_lines(record: RunRecord) -> list[str]:
    """Return lines with the peaks, the peak of each phase, and the causes of the largest of these."""
    memory = record.memory
    if memory is None:
        return []
    lines = []
    peaks = _peak_texts(memory)
    if peaks:
        lines.append(", ".join(peaks))
    phase_peaks = _phase_peaks(memory)
    if phase_peaks:
        texts = [
            f"{TIMES[phase].title} {bytes_text(peak)}"
            for phase, peak in phase_peaks.items()
        ]
        lines.append(f"peak by phase: {', '.join(texts)}")
        phase = max(phase_peaks, key=phase_peaks.__getitem__)
        place = f"at the peak, in {phase}"
    else:
        # On the CPU no allocator reports peaks. The causes of backward are what the step holds in any case.
        phase = "backward"
        place = "held by the step"
    causes = _cause_texts(memory, phase)
    if causes:
        lines.append(f"{place}: {', '.join(causes)}")
    return lines


def _peak_texts(memory: MemoryFacts) -> list[str]:
    """Return the known peaks of the run with their titles: of allocated, reserved and resident memory."""
    texts = []
    for name, figure in MEMORY.items():
        peak = getattr(memory.measured, name)
        if peak is not None:
            texts.append(f"{figure.title} {bytes_text(peak)}")
    return texts


def _phase_peaks(memory: MemoryFacts) -> dict[str, int]:
    """Return the peak of allocated bytes in each phase, in the order of a step; empty if no allocator reports them."""
    peaks = {}
    for phase in PARTS:
        reading = memory.parts.get(phase)
        if reading is not None and reading.allocated_peak:
            peaks[phase] = reading.allocated_peak
    return peaks


def _cause_texts(memory: MemoryFacts, phase: str) -> list[str]:
    """Return the causes of the memory of ``phase`` with their bytes, without causes that hold none."""
    causes = memory.causes.get(phase)
    if causes is None:
        return []
    texts = []
    for name, title in CAUSES.items():
        held_bytes = getattr(causes, name)
        if held_bytes:
            texts.append(f"{title} {bytes_text(held_bytes)}")
    return texts


def _planned_lines(record: RunRecord) -> list[str]:
    """Return a line with the planned peak, and the ratio of the measured peak to it."""
    planned = record.planned
    if planned is None:
        return []
    if planned.peak is None:
        return [f"planned: unknown ({planned.unknown})"]
    peak = QUANTITIES["planned_peak_bytes"]
    scope_of_plan = " without torch.compile" if planned.compiled else ""
    text = (
        f"planned{scope_of_plan}: peak {peak.fit(peak.get(record))}, in {planned.phase}"
    )
    ratio = QUANTITIES["measured_over_planned"].get(record)
    if ratio is None:
        return [f"{text}; the measured value is unknown"]
    least_ratio, most_ratio = _AS_PLANNED
    result = f"{ratio:.3f} times as much"
    if least_ratio <= ratio <= most_ratio:
        result = "as planned"
    # A device's allocator also counts workspaces of libraries other than cuBLAS, which a rehearsal does not count.
    scope = ", with workspaces of libraries,"
    if record.memory is not None and record.memory.measured.allocated_peak is None:
        scope = " when forward has ended"
    return [f"{text}; measured{scope} {result}"]


def _wait_lines(record: RunRecord) -> list[str]:
    """Return a line with the most frequent calls in which the host waits for the device."""
    waits = sorted(record.syncs or [], key=lambda sync: sync.count, reverse=True)
    if not waits:
        return []
    texts = []
    for sync in waits[:_WAITS_SHOWN]:
        place = f"{short_path(sync.file)}, line {sync.line}"
        texts.append(f"{sync.call or sync.function} ({place})")
    waits_left = len(waits) - _WAITS_SHOWN
    if waits_left > 0:
        texts.append(count_text(waits_left, "more line"))
    return [f"the host waits for the device at: {', '.join(texts)}"]


def _expert_line(record: RunRecord) -> list[str]:
    """Return a line on the load of the busiest expert, in the layer in which the load is least balanced."""
    if not record.experts:
        return []
    worst = max(record.experts, key=attrgetter("busiest_ratio"))
    text = f"experts: the busiest of {worst.experts} gets {worst.busiest_ratio:.2f} x the mean number of tokens"
    if len(record.experts) > 1:
        text += f" (layer {worst.layer})"
    return [text]


def failure_lines(record: RunRecord) -> list[str]:
    """Return one line on where and why the run failed; none if it did not fail."""
    failure = record.failure
    if failure is None:
        return []
    place = f"{record.status} in {failure.where}"
    if failure.message:
        return [f"{place}: {failure.type}: {failure.message}"]
    if record.status == "interrupted":  # The name KeyboardInterrupt would add nothing.
        return [place]
    return [f"{place}: {failure.type}"]


def _rate_lines(record: RunRecord) -> list[str]:
    """Return a line with tokens/s, or samples/s if tokens are unknown, and with the utilisation."""
    parts = _throughput_texts(record)
    use = record.utilisation
    if use is not None and not record.contended:  # meaningless on a shared machine
        parts += _utilisation_texts(use)
    if not parts:
        return []
    return [", ".join(parts)]


def _throughput_texts(record: RunRecord) -> list[str]:
    """Return a text with tokens/s, or with samples/s if tokens were not counted; nothing if neither was counted."""
    for noun in ("tokens", "samples"):
        count = QUANTITIES[f"{noun}_per_step"].get(record)
        if count is None:
            continue
        rate = QUANTITIES[f"{noun}_per_s"]
        text = f"unknown {noun}/s"
        if rate.get(record) is not None:
            text = shown(rate, record)
        return [f"{text} ({count:,} per step)"]
    return []


def _utilisation_texts(use: Utilisation) -> list[str]:
    """Return texts with the MFU, and with the share of the matmul rate that was measured on this machine."""
    is_lower_bound = bool(use.flops.uncounted)
    bound = ""
    if is_lower_bound and use.mfu is not None:
        bound = f"{AT_LEAST} "
    text = f"MFU {bound}{MFU.show(use.mfu)}"
    if use.peak_flops_per_s is not None:
        text += f" of {with_prefix(use.peak_flops_per_s, 'FLOP/s')} ({use.dtype})"
    if use.mixed_mfu is not None:
        parts = [f"{part.dtype} {MFU.show(part.mfu)}" for part in use.by_dtype]
        text += f", {bound}{percent(use.mixed_mfu)} with each dtype at its own peak ({', '.join(parts)})"
    if use.of_ceiling is None or use.ceiling_flops_per_s is None:
        return [text]
    ceiling = with_prefix(use.ceiling_flops_per_s, "FLOP/s")
    share = percent(use.of_ceiling)
    if is_lower_bound:  # "at least less than 1%" would make no sense, so a small share is printed as a number.
        share = f"{AT_LEAST} {100 * use.of_ceiling:.2g}%"
    return [text, f"{share} of the matmul rate measured here ({ceiling})"]


def numerics_headline(audit: NumericsFacts) -> str:
    """Return the loss in both precisions, and the errors of output and gradients."""
    losses = f"{_loss_text(audit.loss)} against {_loss_text(audit.reference_loss)}"
    if audit.loss_dtype is not None:
        losses += f" (in {audit.loss_dtype})"
    output = _error_text(audit.output_error)
    gradients = _error_text(audit.gradient_error)
    text = f"numerics against float32: loss {losses}, output off by {output}, gradients by {gradients}"
    if not audit.losses:
        return text
    steps = count_text(len(audit.losses), "step")
    first_loss = _loss_text(audit.losses[0])
    last_loss = _loss_text(audit.losses[-1])
    return f"{text}; loss of the first {steps} from {first_loss} to {last_loss}"


def _loss_text(loss: float | None) -> str:
    return "not finite" if loss is None else f"{loss:.6g}"


def _error_text(error: float | None) -> str:
    return "unknown" if error is None else f"{error:.2%}"


def other_lines(record: RunRecord) -> list[str]:
    """Return a line with the measured ``other``, and with the actions that took it while each of them was timed."""
    owned = record.other_by_owner
    if owned is None or not owned.actions:
        return []
    # The actions add up to this figure. It is larger than the measured one, because timing each action takes time.
    total = f"{ms_text(owned.seconds)} ms in {count_text(owned.steps, 'step')} in which each action was timed"
    if owned.measured_s is not None:
        total = f"{ms_text(owned.measured_s)} ms, {total}"
    texts = []
    for action in owned.actions[:_ACTIONS_SHOWN]:
        text = f"{action.name} {ms_text(action.seconds)}"
        if action.in_steps != owned.steps:
            text += f" (in {action.in_steps} of {owned.steps} steps)"
        texts.append(text)
    actions_left = owned.actions[_ACTIONS_SHOWN:]
    if actions_left:
        seconds_left = sum(action.seconds for action in actions_left)
        texts.append(f"{len(actions_left)} more {ms_text(seconds_left)}")
    title = "other of rank 0" if len(record.rank_step_s) > 1 else "other"
    return [f"{title}: {total}: {', '.join(texts)}"]
