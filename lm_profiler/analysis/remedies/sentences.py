"""What to do about a finding, where that depends on it: never what is on already or what this machine has not."""

from __future__ import annotations

from pathlib import Path

from lm_profiler.record.quantities import counted
from lm_profiler.record.run import RANK_PARTS, Finding, RankFinding, Settings


def place_of(finding: Finding) -> str:
    """``Model.forward (model.py:12)``; empty where nobody is named."""
    where = f" ({Path(finding.file).name}:{finding.line})" if finding.file else ""
    return f"{finding.owner or ''}{where}".strip()


def ranks_text(finding: RankFinding) -> str:
    """One rank is slower than the others, or several, or a host, or each in its turn."""
    if finding.kind == "turns":
        if finding.phase == "data":
            return "Load further ahead (prefetch_factor): one late batch then stops nobody."
        if finding.phase in ("forward", "backward"):
            return "Give all ranks batches of like length (bucket or pack them)."
        return "Find what stops one rank at a time: logging, checkpoints, garbage collection, other programs."
    if finding.phase == RANK_PARTS[-1]:
        return "See what the slow ranks do between steps: validation, checkpoints, logging, a new epoch's loader."
    if finding.kind == "several" and finding.phase is None:
        return "Mend them together, each in its phase: one alone is hidden behind the others."
    if finding.kind == "several":
        return "See what these ranks have in common: their data, their disks, their host or switch, longer batches."
    who = f"host {finding.host}" if finding.kind == "host" else f"rank {finding.rank} (host {finding.host})"
    if finding.phase in ("data", "transfer"):
        return f"See what {who} reads its data from: its disk or network, the cores its loader has, its longer samples."
    return f"See what {who} has that the others have not: other programs, a lower clock, fewer cores, longer batches."


def input_text(of: Finding, s: Settings) -> str:
    where = place_of(of)
    prepare = (
        f"Make {where} faster, or prepare the data before training" if where else "Prepare the data before training"
    )
    if s.num_workers is None:
        return "Give the DataLoader more workers, or prepare (tokenize, pack) the data before training."
    more = 2 * s.num_workers or 2
    workers = more if s.cores is None else min(more, s.cores)
    if workers <= s.num_workers:
        return f"{prepare}: there are as many workers ({s.num_workers}) as CPU cores for them."
    if s.num_workers == 0:
        return f"Load batches in the background: num_workers={workers}."
    return f"Raise num_workers from {s.num_workers} to {workers}, or prepare the data before training."


def transfer_text(of: Finding, s: Settings) -> str:
    if s.pin_memory is False:
        return "Pin the batches' memory (pin_memory=True): copies then overlap with work."
    return "Send less: token ids as int32 instead of int64, and only what the step uses."


def epoch_text(of: Finding, s: Settings) -> str:
    if s.num_workers:
        return "Keep the loader's workers from epoch to epoch (persistent_workers=True), or make epochs longer."
    return "Make epochs longer: their end and beginning take time."


def owner_text(of: Finding, s: Settings) -> str:
    return f"Do less in {place_of(of)}, or do it in fewer steps."


def sleep_text(of: Finding, s: Settings) -> str:
    if not of.owner:
        return f"Find what {of.phase} waits for without computing: sleep, I/O or a lock."
    return f"Take the wait out of {of.phase}: {place_of(of)} waits in {of.what} without computing."


def python_text(of: Finding, s: Settings) -> str:
    if of.what == "torch":
        calls = f"{of.facts.get('calls', 0.0):,.0f} times a step"
        return f"Use fewer, larger operators in {place_of(of)}: it calls torch {calls}."
    how = "Python" if of.what == "python" else of.what
    return f"Move {how} out of {of.phase}: {place_of(of)}."


def pattern_text(of: Finding, s: Settings) -> str:
    every = int(of.facts.get("every", 0.0))
    if of.phase == "other":
        return f"See what happens every {every} steps: --actions.steps={every + 1} names its owner."
    return f"See what {of.phase} does every {every} steps."


def small_batch_text(of: Finding, s: Settings) -> str:
    for name, unit in (("tokens_per_batch", "token"), ("samples_per_batch", "sample")):
        if (count := of.facts.get(name)) is not None:
            now = f" (now {counted(int(count), unit)})"
            break
    else:
        now = ""
    full = s.memory_free_share is not None and s.memory_free_share < 0.1
    if full:
        return f"Memory is full: accumulate gradients over more batches{now}."
    return f"Try a larger batch{now}: much of the step takes as long whatever the batch is."
