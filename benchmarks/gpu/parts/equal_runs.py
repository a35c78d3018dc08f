"""A/A: runs of equal work, each against each other. None is faster, so each such word is a false alarm."""

from __future__ import annotations

from itertools import combinations

from benchmarks.gpu.findings import Findings, shown
from benchmarks.gpu.place import Place
from lm_profiler.analysis.compare.comparison import compare
from lm_profiler.record.entry import Entry

RUNS = 6
_ALONE = ("--memory.steps=0", "--trace.steps=0", "--check_memory=false")


def run(place: Place, findings: Findings) -> None:
    runs = 2 if place.on_cpu else RUNS
    options = place.sized(
        "--config=small_bf16", "--list=[{model.size: small}]", *_ALONE
    )
    entries = [
        e
        for e in place.sweep("equal", *options, f"--repeats={runs}")
        if e.record is not None and e.shows_steps
    ]
    tell(findings, entries)
    words = [compare([a], [b]).step.verdict for a, b in combinations(entries, 2)]
    alarms = sum(word in ("FASTER", "SLOWER") for word in words)
    counts = {word: words.count(word) for word in sorted(set(words))}
    findings.add(pairs=len(words), verdicts=counts)
    # Each comparison is wrong in at most 3 of 100 cases; one of 15 may be.
    met = None if place.on_cpu or len(words) < 6 else alarms <= 1
    findings.aim(
        "equal runs called faster or slower",
        "1 of 15 pairs at most",
        f"{alarms} of {len(words)}",
        met,
    )


def tell(findings: Findings, entries: list[Entry]) -> None:
    """Each run, and how far their means lie apart."""
    rows, means = [], []
    for entry in entries:
        step = entry.record.time["step"] if entry.record is not None else None
        if step is None or step.mean is None:
            continue
        means.append(step.mean)
        low, high = (
            shown(bound, scale=1e3) for bound in (step.mean_low, step.mean_high)
        )
        words = ", ".join(entry.record.words) if entry.record is not None else ""
        rows.append(
            [
                entry.folder.parent.name,
                shown(step.mean, scale=1e3),
                f"[{low}, {high}]",
                words,
            ]
        )
    findings.table(
        "Equal runs", ("run", "step, mean (ms)", "95 % interval", "words"), rows
    )
    if means:
        findings.add(means_s=means, spread=max(means) / min(means) - 1)
