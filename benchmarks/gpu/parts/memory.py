"""Planned against measured memory, and where the step's time went, from the ideal one on, with what nobody explains."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.gpu.findings import Findings, shown
from benchmarks.gpu.parts import main_job
from benchmarks.gpu.place import Place
from lm_profiler.record.run import RunRecord

SIZES = ("small", "xl", "2.7B")
_STEPS = ("--stages.warmup_steps=3", "--stages.measure_steps=6", "--memory.steps=1", "--trace.steps=1")
_HEADINGS = ("size", "planned without activations", "planned peak", "measured peak", "measured / planned")
_FLOORS = ("size", "phase", "bound by", "floor (ms)", "took (ms)", "times")


def run(place: Place, findings: Findings) -> None:
    rows: list[list[str]] = []
    phases: list[list[str]] = []
    terms: list[list[str]] = []
    for size in SIZES[:1] if place.on_cpu else SIZES:
        record = measured(place, size)
        if record is None or record.status != "ok":
            findings.note(f"{size}: {'no record' if record is None else record.status}")
            continue
        rows.append(planned(size, record))
        findings.table("GiB", _HEADINGS, rows)
        phases += floors(size, record)
        findings.table("The least that each phase could take", _FLOORS, phases, left=3)
        terms += explained(place, size, record, findings)
        findings.table("Where the step went", ("size", "term", "ms", "of the step"), terms, left=2)


def measured(place: Place, size: str) -> RunRecord | None:
    """The run of the main job, where it is this one and is there; else a new one, whose trace is not kept."""
    job = replace(place, folder=place.folder.parent / "02-main_job")
    if size == "xl" and (job.folder / main_job.CONFIG).exists():
        return job.last(main_job.CONFIG)
    # What stands last has the last word, also over what makes the run tiny.
    record = place.fit(size, *place.sized(f"--config={size}_bf16"), *_STEPS)
    for trace in place.newest(size).glob("trace/*.gz"):
        trace.unlink()
    return record


def planned(size: str, record: RunRecord) -> list[str]:
    """Planned bytes beside the allocator's peak."""
    plan, measured = record.planned, None if record.memory is None else record.memory.measured.allocated_peak
    whole, at_peak = (None, None) if plan is None else (plan.peak, plan.at_peak)
    states = None if whole is None or at_peak is None else whole - (at_peak.activations_and_rest or 0)
    ratio = "unknown" if measured is None or whole is None else f"{measured / whole:.3f}"
    return [size, *(shown(value, scale=2**-30) for value in (states, whole, measured)), ratio]


def floors(size: str, record: RunRecord) -> list[list[str]]:
    """Each phase's floor beside what it took."""
    rows = []
    for phase, floor in record.floors.items():
        seconds = (floor.seconds, record.time[phase].median)
        times = shown(floor.times, digits=3)
        rows.append([size, phase, floor.bound or "unknown", *(shown(s, scale=1e3) for s in seconds), times])
    return rows


def explained(place: Place, size: str, record: RunRecord, findings: Findings) -> list[list[str]]:
    """The waterfall's terms, and the share of the step that none of them explains."""
    fall = record.waterfall
    if fall is None:
        findings.note(f"{size}: no waterfall in its record")
        return []
    unexplained = sum(term.seconds for term in fall.terms if term.name == "unexplained") / fall.step_s
    findings.add(**{f"{size}_unexplained_share": unexplained})
    met = None if place.on_cpu else abs(unexplained) <= 0.05
    findings.aim(f"{size}: unexplained of the step", "5 % at most", f"{unexplained:.1%}", met)
    rows = [[size, t.name, shown(t.seconds, scale=1e3), f"{t.seconds / fall.step_s:.1%}"] for t in fall.terms]
    return [*rows, [size, "step", shown(fall.step_s, scale=1e3), "100.0%"]]
