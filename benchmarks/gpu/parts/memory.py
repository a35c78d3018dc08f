"""Planned against measured memory, and where the step's time went, from the ideal one on, with what nobody explains.

Where planned and measured differ, the tables tell in which phase, for which cause, and how much of it is what the
allocator rounds up and what cuBLAS keeps for itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks.gpu.findings import Findings, shown
from benchmarks.gpu.parts import main_job
from benchmarks.gpu.place import Place, how_told
from lm_profiler.record.run_record import MemoryCauses, MemoryLevels, RunRecord

SIZES = ("small", "xl", "2.7B")
AIM = 0.05
"""Of the planned peak."""

_PLANNED = "measured / planned peak"
_STEPS = (
    "--stages.warmup_steps=3",
    "--stages.measure_steps=6",
    "--memory.steps=1",
    "--trace.steps=1",
)
_HEADINGS = (
    "size",
    "of the step",
    "planned (MiB)",
    "measured (MiB)",
    "measured - planned (MiB)",
)
_FLOORS = ("size", "phase", "bound by", "floor (ms)", "took (ms)", "times")


def run(place: Place, findings: Findings) -> None:
    if not place.on_cpu:
        kept_by_cublas(place, findings)
    rows: list[list[str]] = []
    phases: list[list[str]] = []
    terms: list[list[str]] = []
    for size in SIZES[:1] if place.on_cpu else SIZES:
        code, record = measured(place, size)
        if record is None or record.status != "ok" or code != 0:
            findings.note(
                f"{size}: {'no record' if record is None else record.status}, {how_told(code)}"
            )
        if record is None or record.status != "ok":
            findings.aim(f"{size}: {_PLANNED}", f"1 ± {AIM:g}", "no whole run", None)
            continue
        rows += planned(size, record, findings)
        findings.table("Memory", _HEADINGS, rows, left=2)
        phases += floors(place, size, record, findings)
        findings.table("The least that each phase could take", _FLOORS, phases, left=3)
        terms += explained(place, size, record, findings)
        findings.table(
            "Where the step went", ("size", "term", "ms", "of the step"), terms, left=2
        )


def kept_by_cublas(place: Place, findings: Findings) -> None:
    """Bytes that stay allocated when every tensor of a product is gone."""
    told = place.folder / "workspaces.json"
    place.apart(
        partial(multiply, torch.device("cuda", 0), told), output="workspaces.txt"
    )
    if told.exists():
        kept = json.loads(told.read_text("utf-8"))
        findings.add(workspace_bytes=kept)
        words = ", ".join(
            f"{name} {count / 2**20:.3f} MiB" for name, count in kept.items()
        )
        findings.note(f"What libraries keep after products, all tensors gone: {words}.")


def multiply(device: torch.device, told: Path) -> None:
    """Products in this thread and in autograd's, without and with a bias, which cuBLASLt adds."""
    kept: dict[str, int] = {}
    for name, bias in (("product", False), ("with a bias", True)):
        x, b = (
            torch.ones(256, 256, device=device, requires_grad=True),
            torch.ones(256, device=device),
        )
        y = F.linear(x, x, b if bias else None)
        for when, backward in (("forward", False), ("backward", True)):
            if backward:
                y.sum().backward()
                del y
            torch.cuda.synchronize(device)
            tensors = (x, b, x.grad if backward else y)
            held = sum(each.nbytes for each in tensors if each is not None)
            kept[f"{name}, {when}"] = torch.cuda.memory_allocated(device) - held
        del x, b, tensors
    told.write_text(json.dumps(kept), "utf-8")


def measured(place: Place, size: str) -> tuple[int | None, RunRecord | None]:
    """The run of the main job, where it is this one and went well; else a new one, whose trace is not kept."""
    job = replace(place, folder=place.folder.parent / "02-main_job")
    if (
        size == "xl"
        and (record := job.last(main_job.CONFIG)) is not None
        and record.status == "ok"
    ):
        return 0, record
    # What stands last has the last word, also over what makes the run tiny.
    ended = place.fit(size, *place.sized(f"--config={size}_bf16"), *_STEPS)
    for trace in place.newest(size).glob("trace/*.gz"):
        trace.unlink()
    return ended


def planned(size: str, record: RunRecord, findings: Findings) -> list[list[str]]:
    """Planned bytes beside the allocator's: the peak of each phase, what it consists of, and what is held."""
    plan, memory = record.planned, record.memory
    what, aim = f"{size}: {_PLANNED}", f"1 ± {AIM:g}"
    if plan is None or plan.peak is None or memory is None:
        findings.aim(
            what, aim, f"not planned: {None if plan is None else plan.unknown}", None
        )
        return []
    peaks = {phase: reading.allocated_peak for phase, reading in memory.parts.items()}
    most, allocator = memory.measured.allocated_peak, memory.allocator
    ratio = None if most is None else most / plan.peak
    met = None if ratio is None else abs(ratio - 1) <= AIM
    findings.aim(what, aim, shown(ratio), met)
    asked = None if allocator is None else allocator.requested_peak
    at = plan.phase or "forward"
    return [
        beside(size, "peak", plan.peak, most),
        beside(size, "peak, as it was asked for", plan.peak, asked),
        *(
            beside(size, f"peak of {phase}", planned, peaks.get(phase))
            for phase, planned in plan.peaks.items()
        ),
        *each(size, f"in {at}:", causes(plan.at_peak), causes(memory.causes.get(at))),
        *each(size, "held after", levels(plan.held), levels(memory.held)),
    ]


def causes(of: MemoryCauses | None) -> dict[str, int | None]:
    return (
        {}
        if of is None
        else {name.replace("_", " "): count for name, count in of.model_dump().items()}
    )


def levels(of: MemoryLevels | None) -> dict[str, int | None]:
    return (
        {}
        if of is None
        else {name: getattr(of, name) for name in ("start", "forward", "backward")}
    )


def each(
    size: str,
    what: str,
    plan: Mapping[str, int | None],
    found: Mapping[str, int | None],
) -> list[list[str]]:
    return [
        beside(size, f"{what} {name}", planned, found.get(name))
        for name, planned in plan.items()
    ]


def beside(size: str, what: str, plan: int | None, found: int | None) -> list[str]:
    off = (
        "unknown"
        if plan is None or found is None
        else f"{(found - plan) / 2**20:+,.2f}"
    )
    return [
        size,
        what,
        *("unknown" if n is None else f"{n / 2**20:,.2f}" for n in (plan, found)),
        off,
    ]


def floors(
    place: Place, size: str, record: RunRecord, findings: Findings
) -> list[list[str]]:
    """Each phase's floor beside what it took; of one that took less the record says so, and has none."""
    beaten = [note for note in record.notes if note.startswith("the floor")]
    met = None if place.on_cpu else not beaten
    findings.aim(
        f"{size}: phases that beat their floor",
        "none",
        "; ".join(beaten) or "none",
        met,
    )
    rows = []
    for phase, floor in record.floors.items():
        seconds = (floor.seconds, record.time[phase].median)
        times = shown(floor.times, digits=3)
        rows.append(
            [
                size,
                phase,
                floor.bound or "unknown",
                *(shown(s, scale=1e3) for s in seconds),
                times,
            ]
        )
    return rows


def explained(
    place: Place, size: str, record: RunRecord, findings: Findings
) -> list[list[str]]:
    """The waterfall's terms, and the share of the step that none of them explains."""
    fall = record.waterfall
    what, aim = f"{size}: unexplained of the step", "5 % at most"
    if fall is None:
        findings.aim(what, aim, "no waterfall in its record", None)
        return []
    unexplained = (
        sum(term.seconds for term in fall.terms if term.name == "unexplained")
        / fall.step_s
    )
    findings.add(**{f"{size}_unexplained_share": unexplained})
    met = None if place.on_cpu else abs(unexplained) <= 0.05
    findings.aim(what, aim, f"{unexplained:.1%}", met)
    rows = [
        [size, t.name, shown(t.seconds, scale=1e3), f"{t.seconds / fall.step_s:.1%}"]
        for t in fall.terms
    ]
    return [*rows, [size, "step", shown(fall.step_s, scale=1e3), "100.0%"]]
