"""All remedies: when each applies, what `improve` tries and `plan` rehearses of it, and its sentence.

A remedy is offered only where it is not on already and where this machine has what it needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from lm_profiler.analysis.plan.planned import Planned
from lm_profiler.analysis.remedies.remedy import (
    BFLOAT16,
    BY_WORKERS,
    FLOAT16,
    LEAST_FIRST,
    ORDER,
    OTHER_BATCH,
    OTHER_CONTEXT,
    OTHER_OPTIMIZER,
    PER_BATCH,
    TF32,
    WEIGHTS,
    Candidate,
    Faster,
    FirstRun,
    Remedy,
    Smaller,
    faster,
    smaller,
)
from lm_profiler.record.quantities import counted, duration_text
from lm_profiler.record.run_record import RANK_PARTS, Finding, RankFinding, RunRecord, Settings

ATTENTION = "model.attention"
WORKERS = ("data.num_workers", "loader.num_workers")
_BATCH, _BATCHES = "data.batch_size", "trainer.accumulate_grad_batches"
_CHECKPOINTING, _CHECKPOINTS = "model.activation_checkpointing", "model.checkpoint_every"
_PRECISION = "trainer.precision"
_FULL = (None, "32-true", "32", 32)
_PRODUCTS = ("forward", "backward")
WORKERS_PER_CORE = 4  # if they wait for files: such workers do not each need a core
_HANDED_OVER_S = 1e-3  # what a worker's batch takes to arrive: measured 1.0 to 1.7 ms, of 256 B to 2 MB
# number of smaller batches that a plan tries: the largest may not fit once gradients stay from batch to batch
_DIVISORS = 2


def half_precision(run: FirstRun) -> Iterator[Candidate]:
    if run.option(_PRECISION) not in _FULL:
        return
    kind = run.settings.half_precision or "bf16-mixed"
    may_change = FLOAT16 if kind.startswith("16") else BFLOAT16
    # The runs themselves show what an unknown device multiplies faster.
    why = "" if run.settings.half_precision or run.has_device else "this hardware multiplies no half precision faster"
    yield faster({_PRECISION: kind}, _PRECISION, run.phases_s(*_PRODUCTS), may_change, refused=why)


def narrower(planned: Planned, context: int | None) -> Iterator[Smaller]:
    # A run in float64 gets no other precision: whoever asks for float64 needs it.
    precision = str(planned.settings.get(_PRECISION) or "32-true")
    if precision in _FULL:
        yield smaller({_PRECISION: "bf16-mixed"}, BFLOAT16)
    if precision in _FULL or precision.endswith("-mixed"):
        yield smaller({_PRECISION: "bf16-true"}, WEIGHTS)


def tf32(run: FirstRun) -> Iterator[Candidate]:
    name = run.first_known("torch.float32_matmul_precision", "model.float32_matmul_precision")
    if name is None or not run.has_device or run.option(_PRECISION) not in _FULL:
        return
    environment = run.record.environment
    if environment is not None and environment.flags.get("float32_matmul_precision") != "highest":
        return
    why = "this hardware has no TF32" if run.settings.tf32 is None else ""
    yield faster({name: "high"}, name, run.phases_s(*_PRODUCTS), TF32, refused=why)


def compiled(run: FirstRun) -> Iterator[Candidate]:
    name = run.first_known("model.compile", "torch.compile")
    if name is None or not isinstance(run.option(name), bool):
        return
    if run.option(name):
        yield faster({name: "false"}, name, None, ORDER)
        return
    if run.record.model is not None and run.record.model.compiled:  # by its own code
        return
    fused_s = run.terms_s("bandwidth", "beyond_bandwidth", "gaps", "unexplained")
    ceiling_s = run.phases_s(*_PRODUCTS) if fused_s is None else fused_s
    yield faster({name: "true"}, name, ceiling_s, ORDER)
    mode = f"{name}_mode"
    if run.has_device and run.has(mode):
        # Tuned kernels may make the matmuls faster too.
        for kind, most_s in (("reduce-overhead", ceiling_s), ("max-autotune", run.phases_s(*_PRODUCTS))):
            yield faster({name: "true", mode: kind}, name, most_s, ORDER)


def other_attention(run: FirstRun) -> Iterator[Candidate]:
    other = {"math": "sdpa", "sdpa": "math"}.get(str(run.option(ATTENTION)))
    if other is not None:
        yield faster({ATTENTION: other}, ATTENTION, run.phases_s(*_PRODUCTS), ORDER)


def fused_attention(planned: Planned, context: int | None) -> Iterator[Smaller]:
    if planned.settings.get(ATTENTION) == "math":
        yield smaller({ATTENTION: "sdpa"}, ORDER)


def no_checkpointing(run: FirstRun) -> Iterator[Candidate]:
    ceiling_s = run.terms_s("recomputation") or run.phases_s("backward")
    if run.option(_CHECKPOINTS):
        off = {_CHECKPOINTS: "null", **({_CHECKPOINTING: "false"} if run.option(_CHECKPOINTING) else {})}
        yield faster(off, _CHECKPOINTS, ceiling_s)
        return
    for name in (_CHECKPOINTING, "model.gradient_checkpointing"):
        if run.option(name) is True:
            yield faster({name: "false"}, name, ceiling_s)


def checkpointing(planned: Planned, context: int | None) -> Iterator[Smaller]:
    if planned.settings.get(_CHECKPOINTING) is False and not planned.settings.get(_CHECKPOINTS):
        yield smaller({_CHECKPOINTING: "true"})


def other_batches(run: FirstRun) -> Iterator[Candidate]:
    """Yield options for the same samples per step in fewer or more batches; then for more samples."""
    batch, batches = run.option(_BATCH), run.option(_BATCHES)
    if not isinstance(batch, int) or not isinstance(batches, int):
        return
    factor = 2
    while batches % factor == 0:
        options = {_BATCH: str(batch * factor), _BATCHES: str(batches // factor)}
        yield faster(options, "batch", None, PER_BATCH)
        if run.option(_CHECKPOINTING) is False and not run.option(_CHECKPOINTS):
            yield faster({**options, _CHECKPOINTING: "true"}, "batch", None, PER_BATCH)
        factor *= 2
    if batch % 2 == 0:
        yield faster({_BATCH: str(batch // 2), _BATCHES: str(batches * 2)}, "batch", None, PER_BATCH)
    for factor in (2, 4):
        yield faster({_BATCH: str(batch * factor)}, "batch", None, OTHER_BATCH)


def smaller_batches(planned: Planned, context: int | None) -> Iterator[Smaller]:
    """Yield divisors of the batch that was asked for, for equally many samples per step; then the largest that fits."""
    batch = planned.batch or 0
    divisors = (n for n in range(min(planned.largest or 0, batch - 1), 0, -1) if batch % n == 0)
    yield from accumulated(planned, list(islice(divisors, _DIVISORS)))
    if planned.largest and planned.settings.get(_BATCH) == planned.batch:
        yield smaller({_BATCH: planned.largest}, OTHER_BATCH, is_known=True)


def accumulated(planned: Planned, sizes: Sequence[int]) -> Iterator[Smaller]:
    batch, times = planned.settings.get(_BATCH), planned.settings.get(_BATCHES) or 1
    if batch is None or batch != planned.batch:  # the option then means something else
        return
    for n in sizes:
        if n < batch:
            yield smaller({_BATCH: n, _BATCHES: times * batch // n}, PER_BATCH)


def workers(run: FirstRun) -> Iterator[Candidate]:
    name = run.first_known(*WORKERS)
    if name is None:
        return
    now = run.option(name)  # None for the loader's option: the data decides
    for count in (1, 2, 4, 8):
        if count > (now or 0):
            cores = run.settings.cores or count
            # Workers that wait for files do not each need a core.
            why = "" if count <= WORKERS_PER_CORE * cores else f"there are {cores} cores for them"
            yield faster({name: str(count)}, "num_workers", run.phases_s("data"), BY_WORKERS, refused=why)


def pinned(run: FirstRun) -> Iterator[Candidate]:
    name = run.first_known("data.pin_memory", "loader.pin_memory")
    if name and (run.option(name) is False or (name == "loader.pin_memory" and run.option(name) is None)):
        why = "" if run.has_device else "batches are not copied to a device"
        yield faster({name: "true"}, name, run.phases_s("data", "transfer"), refused=why)


def benchmark(run: FirstRun) -> Iterator[Candidate]:
    name = "trainer.benchmark"
    if run.option(name) is not True and run.has_device and run.has(name):
        yield faster({name: "true"}, name, run.phases_s(*_PRODUCTS), ORDER)


def switch(name: str, when: bool, to: str, phases: tuple[str, ...], may_change: str | None) -> Faster:
    """Return the candidate that sets one option to ``to``, for runs where it is ``when``."""

    def candidates(run: FirstRun) -> Iterator[Candidate]:
        if run.option(name) is when:
            yield faster({name: to}, name, run.phases_s(*phases), may_change)

    return candidates


def sgd(planned: Planned, context: int | None) -> Iterator[Smaller]:
    if planned.settings.get("model.optimizer") == "adamw":
        yield smaller({"model.optimizer": "sgd"}, OTHER_OPTIMIZER)


def shorter_context(planned: Planned, context: int | None) -> Iterator[Smaller]:
    if context and planned.context and context < planned.context:
        yield smaller({"data.context_length": context}, OTHER_CONTEXT)


# -- sentences ---------------------------------------------------------------------------------------------------------


def _place(finding: Finding) -> str:
    """Return ``Model.forward (model.py:12)``; empty where the finding names no owner."""
    where = f" ({Path(finding.file).name}:{finding.line})" if finding.file else ""
    return f"{finding.owner or ''}{where}".strip()


def _ranks_text(finding: RankFinding) -> str:
    if finding.kind == "turns":
        if finding.phase in _PRODUCTS:
            return "Give all ranks batches of like length (bucket or pack them)."
        return "Find what stops one rank at a time: late batches, logging, checkpoints, other programs."
    if finding.phase == RANK_PARTS[-1]:
        return "See what the slow ranks do between steps: validation, checkpoints, logging, a new epoch's loader."
    one = f"rank {finding.rank} (host {finding.host}) has"
    who = {"several": "these ranks have", "host": f"host {finding.host} has"}.get(finding.kind, one)
    if finding.phase in ("data", "transfer"):
        return f"See what {who} for data: a slower disk or network, fewer cores for the loader, longer samples."
    return f"See what {who} that the others have not: other programs, a lower clock, fewer cores, longer batches."


def _input_text(of: Finding, s: Settings) -> str:
    prepare = "prepare (tokenize, pack) the data before training"
    if s.num_workers is None:
        return f"Give the DataLoader more workers, or {prepare}."
    cores = s.cores or 1 << 30
    wanted = min(2 * s.num_workers or 2, cores)
    if "workers" in of.facts:
        wanted = int(of.facts["workers"])
    is_beyond_cores = wanted > cores
    if of.saves_s < _HANDED_OVER_S:
        why = "a worker takes as long to hand a batch over"
    elif wanted > s.num_workers:
        waits = (
            f" (more than the {counted(cores, 'core')}: they wait more than they compute)" if is_beyond_cores else ""
        )
        return f"Raise num_workers from {s.num_workers} to {wanted}{waits}, or {prepare}."
    elif s.num_workers >= cores:
        why = f"there are as many workers ({s.num_workers}) as CPU cores for them"
        if of.facts.get("waits"):
            why = f"there are {s.num_workers} workers, and each of them waits most of the time"
    else:
        why = f"more than {counted(s.num_workers, 'worker')} would not help"
    return f"Make {_place(of) or 'the loader'} faster, or {prepare}: {why}."


def _transfer_text(of: Finding, s: Settings) -> str:
    if s.pin_memory is False:
        return "Pin the batches' memory (pin_memory=True): copies then overlap with work."
    return "Send less: token ids as int32 instead of int64, and only what the step uses."


def _reload_text(of: Finding, s: Settings) -> str:
    maker = of.owner or "train_dataloader"
    return f"Make the loader once: {maker} is called at each new epoch (reload_dataloaders_every_n_epochs)."


def _odd_steps_text(of: Finding, s: Settings) -> str:
    count, step = int(of.facts.get("steps", 0.0)), int(of.facts.get("step", 0.0))
    longest = f"step {step} took {duration_text(of.facts.get('seconds', 0.0))}"
    why = f", {of.what}" if of.what else ""
    if count == 1:
        return f"Find what {of.phase} did in one slow step: {longest}{why}."
    return f"Find what {of.phase} does in {counted(count, 'slow step')}: {longest}{why}."


def _sleep_text(of: Finding, s: Settings) -> str:
    if not of.owner:
        return f"Find what {of.phase} waits for without computing: sleep, I/O or a lock."
    return f"Take the wait out of {of.phase}: {_place(of)} waits in {of.what} without computing."


def _python_text(of: Finding, s: Settings) -> str:
    if of.what == "torch":
        calls = f"{of.facts.get('calls', 0.0):,.0f} times a step"
        return f"Use fewer, larger operators in {_place(of)}: it calls torch {calls}."
    return f"Move {'Python' if of.what == 'python' else of.what} out of {of.phase}: {_place(of)}."


def _pattern_text(of: Finding, s: Settings) -> str:
    every = int(of.facts.get("every", 0.0))
    owner = f": --actions.steps={every + 1} names its owner" if of.phase == "other" else ""
    return f"See what {of.phase} does every {every} steps{owner}."


def _optimizer_text(of: Finding, s: Settings) -> str:
    if s.fused_optimizer is None:
        return "Let the optimizer update all weights together (foreach=True), not one by one."
    why = " (foreach=False is set now)" if s.weight_by_weight else ""
    return f"Use the fused optimizer (fused=True): one pass over the weights, and one launch instead of hundreds{why}."


def _small_batch_text(of: Finding, s: Settings) -> str:
    units = (("tokens_per_batch", "token"), ("samples_per_batch", "sample"))
    known = [f" (now {counted(int(of.facts[name]), unit)})" for name, unit in units if name in of.facts]
    now = known[0] if known else ""
    if s.memory_free_share is not None and s.memory_free_share < 0.1:
        return f"Memory is full: accumulate gradients over more batches{now}."
    return f"Try a larger batch{now}: much of the step takes as long whatever the batch is."


# -- the catalogue -----------------------------------------------------------------------------------------------------

# in the order in which `improve` tries them where ceilings are equal
REMEDIES: Sequence[Remedy] = (
    Remedy(
        "precision",
        lambda of, s: f"Try precision {of.what}: matrix products are faster in it.",
        likely=0.35,
        against=("memory bandwidth",),
        faster=half_precision,
        smaller=narrower,
    ),
    Remedy("tf32", "Allow TF32 products: torch.set_float32_matmul_precision('high').", likely=0.35, faster=tf32),
    Remedy(
        "compile",
        "Try torch.compile: it fuses small operators, which saves launches and memory traffic.",
        likely=0.3,
        against=("host", "memory bandwidth"),
        faster=compiled,
    ),
    Remedy(
        "optimizer",
        _optimizer_text,
        likely=0.5,
        likely_seen=0.8,
        against=("host", "memory bandwidth"),
        faster=switch("model.fused", False, "true", ("optimizer",), ORDER),
    ),
    Remedy("attention", faster=other_attention, smaller=fused_attention),
    Remedy(
        "recomputation",
        "Switch activation checkpointing off: there is memory for the activations.",
        faster=no_checkpointing,
        smaller=checkpointing,
    ),
    Remedy(
        "small_batch",
        _small_batch_text,
        likely=0.35,
        likely_seen=0.8,
        against=("host", "communication"),
        faster=other_batches,
        smaller=smaller_batches,
    ),
    Remedy("input", _input_text, likely=0.9, against=("input",), faster=workers),
    Remedy("transfer", _transfer_text, likely=0.6, against=("input",), faster=pinned),
    Remedy("clip", "Clip gradients with foreach operators, or see whether they have to be clipped.", likely=0.5),
    Remedy(
        "anomalies",
        "Switch off the search for anomalies (detect_anomaly): it checks every gradient.",
        likely=0.5,
        faster=switch("trainer.detect_anomaly", True, "false", _PRODUCTS, None),
    ),
    Remedy("benchmark", faster=benchmark),
    Remedy("sgd", smaller=sgd),
    Remedy("context", smaller=shorter_context),
    Remedy("ranks", likely=0.9),  # the record's own finding about ranks has the sentence
    Remedy("validation", "Validate less often, or on fewer batches (val_check_interval, limit_val_batches)."),
    Remedy("checkpoint", "Save checkpoints less often (every_n_train_steps), or asynchronously (AsyncCheckpointIO)."),
    Remedy("epoch", "Make epochs longer: their end and beginning take time."),
    Remedy(
        "worker_start",
        "Keep the loader's workers from epoch to epoch (persistent_workers=True), or make epochs longer: new workers "
        "start at each epoch.",
    ),
    Remedy("reload", _reload_text),
    Remedy("owner", lambda of, s: f"Do less in {_place(of)}, or do it in fewer steps.", likely=0.95),
    Remedy("logging", lambda of, s: f"Log in fewer steps, as by `if batch_idx % 50 == 0`: {_place(of)}.", likely=0.9),
    Remedy("sleep", _sleep_text),
    Remedy("python", _python_text, likely=0.8),
    Remedy("pattern", _pattern_text, likely=0.7),
    Remedy("odd_steps", _odd_steps_text, likely=0.7),
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
    if remedy is None:
        return 1.0
    return remedy.likely if finding.may or remedy.likely_seen is None else remedy.likely_seen


def remedy_of(finding: Finding, record: RunRecord) -> str:
    """Return a sentence on what to do next; a finding of a later version is shown by its name."""
    if finding.name == "ranks" and record.ranks is not None:
        return _ranks_text(record.ranks.finding)
    remedy = _BY_NAME.get(finding.name)
    if remedy is None or not remedy.say:
        return f"See {finding.name.replace('_', ' ')}."
    return remedy.say if isinstance(remedy.say, str) else remedy.say(finding, record.settings or Settings())


def remedies(planned: Planned, largest_context: int | None = None) -> list[Smaller]:
    """Return settings that need less than ``planned``, given its call; those that change training least come first.

    The largest batch that fits is among them where ``planned`` has it, and the largest context.
    """
    offered = [one for each in REMEDIES if each.smaller is not None for one in each.smaller(planned, largest_context)]
    return sorted(offered, key=lambda one: LEAST_FIRST.index(one.may_change))


def together(planned: Planned) -> list[Smaller]:
    """Return the combination of all settings that change only rounding; then the combination that needs least."""
    half = list(narrower(planned, None))
    kept = [*checkpointing(planned, None), *fused_attention(planned, None), *accumulated(planned, [1])]
    least = [*half[-1:], *kept, *sgd(planned, None)]
    return [_united(each) for each in ([*half[:1], *kept], least) if len(each) > 1]


def _united(each: Sequence[Smaller]) -> Smaller:
    options = {name: value for one in each for name, value in one.options.items()}
    return smaller(options, ", ".join(dict.fromkeys(one.changes for one in each if one.changes)))


def tried_on(run: FirstRun) -> Iterator[Candidate]:
    """Yield candidates that ``run`` leaves open, with the reason if one cannot work; the verdict's come first."""
    bound_by = run.record.verdict and run.record.verdict.bound_by
    for remedy in sorted(REMEDIES, key=lambda remedy: bound_by not in remedy.against):
        if remedy.faster is not None:
            yield from remedy.faster(run)
