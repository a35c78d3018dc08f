"""What to do about a finding: one concrete next thing, never one that is on already or that this machine has not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from lm_profiler.record.quantities import counted
from lm_profiler.record.run import RANK_PARTS, Finding, FindingName, RankFinding, RunRecord, Settings

Say = Callable[[Finding, Settings], str]


def remedy_of(finding: Finding, record: RunRecord) -> str:
    """One sentence. A finding of a later version has none, and is told by its name."""
    settings = record.settings or Settings()
    if finding.name == "ranks" and record.ranks is not None:
        return _for_ranks(record.ranks.finding)
    say = _REMEDIES.get(finding.name)
    return f"See {finding.name.replace('_', ' ')}." if say is None else say(finding, settings)


def place_of(finding: Finding) -> str:
    """``Model.forward (model.py:12)``; empty where nobody is named."""
    where = f" ({Path(finding.file).name}:{finding.line})" if finding.file else ""
    return f"{finding.owner or ''}{where}".strip()


def _for_ranks(finding: RankFinding) -> str:
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


def _input(of: Finding, s: Settings) -> str:
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


def _transfer(of: Finding, s: Settings) -> str:
    if s.pin_memory is False:
        return "Pin the batches' memory (pin_memory=True): copies then overlap with work."
    return "Send less: token ids as int32 instead of int64, and only what the step uses."


def _epoch(of: Finding, s: Settings) -> str:
    if s.num_workers:
        return "Keep the loader's workers from epoch to epoch (persistent_workers=True), or make epochs longer."
    return "Make epochs longer: their end and beginning take time."


def _owner(of: Finding, s: Settings) -> str:
    return f"Do less in {place_of(of)}, or do it in fewer steps."


def _sleep(of: Finding, s: Settings) -> str:
    if not of.owner:
        return f"Find what {of.phase} waits for without computing: sleep, I/O or a lock."
    return f"Take the wait out of {of.phase}: {place_of(of)} waits in {of.what} without computing."


def _python(of: Finding, s: Settings) -> str:
    if of.what == "torch":
        calls = f"{of.facts.get('calls', 0.0):,.0f} times a step"
        return f"Use fewer, larger operators in {place_of(of)}: it calls torch {calls}."
    how = "Python" if of.what == "python" else of.what
    return f"Move {how} out of {of.phase}: {place_of(of)}."


def _pattern(of: Finding, s: Settings) -> str:
    every = int(of.facts.get("every", 0.0))
    if of.phase == "other":
        return f"See what happens every {every} steps: --actions.steps={every + 1} names its owner."
    return f"See what {of.phase} does every {every} steps."


def _small_batch(of: Finding, s: Settings) -> str:
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


def _optimizer(of: Finding, s: Settings) -> str:
    return "Use the fused optimizer (fused=True): one pass over the weights, and one launch instead of hundreds."


def _ready(text: str) -> Say:
    return lambda finding, settings: text


_REMEDIES: Mapping[FindingName, Say] = {
    "input": _input,
    "transfer": _transfer,
    "validation": _ready("Validate less often, or on fewer batches (val_check_interval, limit_val_batches)."),
    "checkpoint": _ready("Save checkpoints less often (every_n_train_steps), or asynchronously (AsyncCheckpointIO)."),
    "epoch": _epoch,
    "owner": _owner,
    "logging": lambda of, s: f"Log less often (log_every_n_steps): {place_of(of)}.",
    "sleep": _sleep,
    "python": _python,
    "pattern": _pattern,
    "garbage": _ready(
        "Collect garbage less often: gc.freeze() after set-up, or gc.disable() with a gc.collect() now and then."
    ),
    "compilation": _ready("Keep shapes equal, or compile with dynamic=True: torch.compile compiles again and again."),
    "anomalies": _ready("Switch off the search for anomalies (detect_anomaly): it checks every gradient."),
    "profiler": lambda of, s: f"Train without the Trainer's own profiler ({of.owner}).",
    "sync": lambda of, s: f"Do not wait for the device in each step: {of.what} ({Path(of.file or '').name}:{of.line}).",
    "small_batch": _small_batch,
    "optimizer": _optimizer,
    "clip": _ready("Clip gradients with foreach operators, or see whether they have to be clipped."),
    "compile": _ready("Try torch.compile: it fuses small operators, which saves launches and memory traffic."),
    "double": _ready("Train in float32: float64 takes at least twice as long."),
    "precision": lambda of, s: f"Try precision {of.what}: matrix products are faster in it.",
    "tf32": _ready("Allow TF32 products: torch.set_float32_matmul_precision('high')."),
    "recomputation": _ready("Switch activation checkpointing off: there is memory for the activations."),
    "communication": _ready("Try a larger batch: gradients are exchanged once a step, however many samples it has."),
}
