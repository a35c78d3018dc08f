"""The catalogue itself: a remedy, an entry; and what findings, `improve` and `plan` take from it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from lm_profiler.analysis.improve.trials import Candidate
from lm_profiler.analysis.plan.planned import Planned
from lm_profiler.analysis.remedies import remedy_options as options
from lm_profiler.analysis.remedies import sentences
from lm_profiler.analysis.remedies.remedy import (
    EFFECTS,
    ORDER,
    WITHOUT_CLIPPING,
    FirstRun,
    Hardware,
    Remedy,
    Smaller,
    smaller,
    switch,
)
from lm_profiler.record.run import Finding, RunRecord, Settings

# all remedies; those that `improve` tries in the order in which it does where ceilings are equal
REMEDIES: Sequence[Remedy] = (
    Remedy(
        "precision",
        lambda of, s: f"Try precision {of.what}: matrix products are faster in it.",
        likely=0.35,
        against=("memory bandwidth",),
        faster=options.half_precision,
        smaller=options.narrower,
    ),
    Remedy(
        "tf32", "Allow TF32 products: torch.set_float32_matmul_precision('high').", likely=0.35, faster=options.tf32
    ),
    Remedy(
        "compile",
        "Try torch.compile: it fuses small operators, which saves launches and memory traffic.",
        likely=0.3,
        against=("host", "memory bandwidth"),
        faster=options.compiled,
    ),
    Remedy(
        "optimizer",
        "Use the fused optimizer (fused=True): one pass over the weights, and one launch instead of hundreds.",
        likely=0.5,
        against=("host", "memory bandwidth"),
        faster=switch("model.fused", lambda now: now is False, "true", ("optimizer",), ORDER),
    ),
    Remedy("attention", faster=options.other_attention, smaller=options.fused_attention),
    Remedy(
        "recomputation",
        "Switch activation checkpointing off: there is memory for the activations.",
        faster=options.no_checkpointing,
        smaller=options.checkpointing,
    ),
    Remedy(
        "small_batch",
        sentences.small_batch_text,
        likely=0.35,
        against=("host", "communication"),
        faster=options.other_batches,
        smaller=options.smaller_batches,
    ),
    Remedy("input", sentences.input_text, likely=0.9, against=("input",), faster=options.workers),
    Remedy("transfer", sentences.transfer_text, likely=0.6, against=("input",), faster=options.pinned),
    Remedy(
        "clip",
        "Clip gradients with foreach operators, or see whether they have to be clipped.",
        likely=0.5,
        faster=switch("trainer.gradient_clip_val", bool, "null", ("clip",), WITHOUT_CLIPPING),
    ),
    Remedy(
        "anomalies",
        "Switch off the search for anomalies (detect_anomaly): it checks every gradient.",
        likely=0.5,
        faster=switch("trainer.detect_anomaly", lambda now: now is True, "false", options.PRODUCTS, None),
    ),
    Remedy("benchmark", faster=options.benchmark),
    Remedy("sgd", smaller=options.sgd),
    Remedy("context", smaller=options.shorter_context),
    Remedy("ranks", likely=0.9),  # its sentence is of the record's own finding about ranks
    Remedy("validation", "Validate less often, or on fewer batches (val_check_interval, limit_val_batches)."),
    Remedy("checkpoint", "Save checkpoints less often (every_n_train_steps), or asynchronously (AsyncCheckpointIO)."),
    Remedy("epoch", sentences.epoch_text),
    Remedy("owner", sentences.owner_text, likely=0.95),
    Remedy("logging", lambda of, s: f"Log less often (log_every_n_steps): {sentences.place_of(of)}.", likely=0.9),
    Remedy("sleep", sentences.sleep_text),
    Remedy("python", sentences.python_text, likely=0.8),
    Remedy("pattern", sentences.pattern_text, likely=0.7),
    Remedy(
        "garbage",
        "Collect garbage less often: gc.freeze() after set-up, or gc.disable() with a gc.collect() now and then.",
    ),
    Remedy("compilation", "Keep shapes equal, or compile with dynamic=True: torch.compile compiles again and again."),
    Remedy("profiler", lambda of, s: f"Train without the Trainer's own profiler ({of.owner}).", likely=0.5),
    Remedy(
        "sync",
        lambda of, s: f"Do not wait for the device in each step: {of.what} ({Path(of.file or '').name}:{of.line}).",
        likely=0.7,
    ),
    Remedy("double", "Train in float32: float64 takes at least twice as long.", likely=0.5),
    Remedy(
        "communication",
        "Try a larger batch: gradients are exchanged once a step, however many samples it has.",
        likely=0.4,
    ),
)

_BY_NAME = {remedy.name: remedy for remedy in REMEDIES}


def likely_share(finding: Finding) -> float:
    """Return how much of what is possible the remedy of ``finding`` usually saves."""
    remedy = _BY_NAME.get(finding.name)
    return 1.0 if remedy is None else remedy.likely


def remedy_of(finding: Finding, record: RunRecord) -> str:
    """One sentence: what to do next. A finding of a later version has none, and is told by its name."""
    if finding.name == "ranks" and record.ranks is not None:
        return sentences.ranks_text(record.ranks.finding)
    remedy = _BY_NAME.get(finding.name)
    if remedy is None or not remedy.say:
        return f"See {finding.name.replace('_', ' ')}."
    return remedy.say if isinstance(remedy.say, str) else remedy.say(finding, record.settings or Settings())


def remedies(planned: Planned, largest_context: int | None = None) -> list[Smaller]:
    """Settings that need less than ``planned``, of those that its call has (its ``settings`` tell which).

    What changes the least of the training goes first.

    Args:
        planned: with the largest batch that fits, if a smaller one is to be among them.
        largest_context: that fits; None where it is unknown.
    """
    asked = [remedy.smaller for remedy in REMEDIES if remedy.smaller is not None]
    candidates = [one for of_remedy in asked for one in of_remedy(planned, largest_context)]
    effects = list(EFFECTS)
    return sorted(candidates, key=lambda one: effects.index(one.may_change))


def together(planned: Planned) -> list[Smaller]:
    """All at once that leaves the step what it was but for rounding; then whatever needs least."""
    narrower = list(options.narrower(planned, None))
    kept = [
        *options.checkpointing(planned, None),
        *options.fused_attention(planned, None),
        *options.accumulated(planned, [1]),
    ]
    least = [*narrower[-1:], *kept, *options.sgd(planned, None)]
    return [_all(each) for each in ([*narrower[:1], *kept], least) if len(each) > 1]


def _all(each: Sequence[Smaller]) -> Smaller:
    united = {name: value for one in each for name, value in one.options.items()}
    return smaller(united, ", ".join(dict.fromkeys(one.changes for one in each if one.changes)))


def tried_on(run: FirstRun, hardware: Hardware) -> Iterator[tuple[Candidate, str]]:
    """Candidates that ``run`` leaves open, each with why it cannot work; what its verdict advises goes first."""
    bound_by = run.record.verdict and run.record.verdict.bound_by
    for remedy in sorted(REMEDIES, key=lambda remedy: bound_by not in remedy.against):
        if remedy.faster is not None:
            yield from remedy.faster(run, hardware)
