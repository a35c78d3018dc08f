"""All remedies: their advice, the options that `improve` tries, and the options that `plan` offers.

An option is offered only if the run does not have it yet and the machine supports it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
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
    FindCandidates,
    FirstRun,
    MemoryCandidate,
    Remedy,
    Sentence,
    faster_candidate,
    memory_candidate,
)
from lm_profiler.analysis.remedies.slow_calls import SLOW_CALL_BY_NAME
from lm_profiler.record.quantities import count_text, duration_text, with_prefix
from lm_profiler.record.run_record import (
    AFTER,
    BEFORE,
    BETWEEN,
    EXCHANGE,
    PRINTING,
    RANK_PARTS,
    Finding,
    RankFinding,
    RunRecord,
    Settings,
)

ATTENTION = "model.attention"
WORKERS = ("data.num_workers", "loader.num_workers")
WORKERS_PER_CORE = 4  # at most, for workers that mostly wait for files and thus do not need a core each
_BATCH = "data.batch_size"
_ACCUMULATED_BATCHES = "trainer.accumulate_grad_batches"
_CHECKPOINTING = "model.activation_checkpointing"
_CHECKPOINT_EVERY = "model.checkpoint_every"
_LOSS = "model.loss"
_CHUNK_TOKENS = 1024  # tokens whose logits a chunked loss has in memory at one time
_PRECISION = "trainer.precision"
_FULL_PRECISIONS = (None, "32-true", "32", 32)
_MATMUL_PHASES = ("forward", "backward")
_MANY_TENSORS = 100  # in a batch
# the likely share of the possible saving if only fewer operators can help, because torch.compile cannot
_SHARE_OF_FEWER_OPERATORS = 0.35
_SMALLER_IN_VALIDATION = 4  # factor by which batches of validation are small
# the time in which a worker hands over a batch: measured 1.0 to 1.7 ms, for batches of 256 B to 2 MB
_HANDED_OVER_S = 1e-3
# A sample that a dataset makes in a shorter time is hardly more than indexed: all samples of a batch can be indexed at
# once, which removes this time instead of moving it to a worker.
_INDEXING_S = 100e-6
# The same if a new worker would have no CPU core of its own, and neither a package nor a C function, such as a decoder,
# takes most of the time.
_INDEXING_WITHOUT_CORE_S = 500e-6
# How many smaller batch sizes `plan` tries. The larger one may not fit, because accumulated gradients stay in memory.
_DIVISORS = 2


# -- what `improve` tries ----------------------------------------------------------------------------------------------


def lower_precision(run: FirstRun) -> Iterator[Candidate]:
    """Suggest half precision to a run in full precision."""
    if run.option(_PRECISION) not in _FULL_PRECISIONS:
        return
    precision = run.settings.half_precision or "bf16-mixed"
    may_change = FLOAT16 if precision.startswith("16") else BFLOAT16
    refused = ""
    # On a device of unknown speed half precision is tried all the same: the runs show whether it is faster.
    if not run.settings.half_precision and not run.has_device:
        refused = "half precision is not faster on this hardware"
    ceiling_s = run.phases_s(*_MATMUL_PHASES)
    yield faster_candidate(
        {_PRECISION: precision},
        group=_PRECISION,
        ceiling_s=ceiling_s,
        may_change=may_change,
        refused=refused,
    )


def allow_tf32(run: FirstRun) -> Iterator[Candidate]:
    """Suggest TF32 to a run in float32 whose device could use TF32 for matrix products and does not."""
    option = run.first_existing(
        "torch.float32_matmul_precision", "model.float32_matmul_precision"
    )
    if (
        option is None
        or not run.has_device
        or run.option(_PRECISION) not in _FULL_PRECISIONS
    ):
        return
    environment = run.record.environment
    if (
        environment is not None
        and environment.flags.get("float32_matmul_precision") != "highest"
    ):
        return
    refused = ""
    if run.settings.tf32 is None:
        refused = "this hardware has no TF32"
    ceiling_s = run.phases_s(*_MATMUL_PHASES)
    yield faster_candidate(
        {option: "high"},
        group=option,
        ceiling_s=ceiling_s,
        may_change=TF32,
        refused=refused,
    )


def toggle_compile(run: FirstRun) -> Iterator[Candidate]:
    """Suggest to switch torch.compile off if it is on. Otherwise suggest it, and its modes for a device."""
    option = run.first_existing("model.compile", "torch.compile")
    if option is None:
        return
    is_on = run.option(option)
    if not isinstance(is_on, bool):
        return
    if is_on:
        yield faster_candidate(
            {option: "false"}, group=option, ceiling_s=None, may_change=ORDER
        )
        return
    compiles_itself = run.record.model is not None and run.record.model.compiled
    if compiles_itself:
        return

    products_s = run.phases_s(*_MATMUL_PHASES)
    fusable_s = run.terms_s("bandwidth", "beyond_bandwidth", "gaps", "unexplained")
    ceiling_s = products_s if fusable_s is None else fusable_s
    yield faster_candidate(
        {option: "true"}, group=option, ceiling_s=ceiling_s, may_change=ORDER
    )

    mode = f"{option}_mode"
    if not run.has_device or not run.has_option(mode):
        return
    fewer_launches = {option: "true", mode: "reduce-overhead"}
    yield faster_candidate(
        fewer_launches, group=option, ceiling_s=ceiling_s, may_change=ORDER
    )
    # Tuned kernels may make the matmuls faster too.
    tuned_kernels = {option: "true", mode: "max-autotune"}
    yield faster_candidate(
        tuned_kernels, group=option, ceiling_s=products_s, may_change=ORDER
    )


def switch_attention(run: FirstRun) -> Iterator[Candidate]:
    """Suggest the other one of our two attention functions, because either may be faster."""
    attention = run.option(ATTENTION)
    ceiling_s = run.phases_s(*_MATMUL_PHASES)
    if attention == "math":
        yield faster_candidate(
            {ATTENTION: "sdpa"}, group=ATTENTION, ceiling_s=ceiling_s, may_change=ORDER
        )
    elif attention == "sdpa":
        yield faster_candidate(
            {ATTENTION: "math"}, group=ATTENTION, ceiling_s=ceiling_s, may_change=ORDER
        )


def stop_checkpointing(run: FirstRun) -> Iterator[Candidate]:
    """Suggest to switch off activation checkpointing and the chunked loss, which compute things twice."""
    ceiling_s = run.terms_s("recomputation") or run.phases_s("backward")
    if run.option(_LOSS) == "chunked":
        yield faster_candidate(
            {_LOSS: "plain"}, group=_LOSS, ceiling_s=ceiling_s, may_change=ORDER
        )
    if run.option(_CHECKPOINT_EVERY):
        options = {_CHECKPOINT_EVERY: "null"}
        if run.option(_CHECKPOINTING):
            options[_CHECKPOINTING] = "false"
        yield faster_candidate(options, group=_CHECKPOINT_EVERY, ceiling_s=ceiling_s)
        return
    for option in (_CHECKPOINTING, "model.gradient_checkpointing"):
        if run.option(option) is True:
            yield faster_candidate({option: "false"}, group=option, ceiling_s=ceiling_s)


def resize_batches(run: FirstRun) -> Iterator[Candidate]:
    """Suggest larger or smaller batches with the same number of samples per step; then more samples per step."""
    batch = run.option(_BATCH)
    batches = run.option(_ACCUMULATED_BATCHES)
    if not isinstance(batch, int) or not isinstance(batches, int):
        return
    may_checkpoint = run.option(_CHECKPOINTING) is False and not run.option(
        _CHECKPOINT_EVERY
    )
    resized = partial(faster_candidate, group="batch", ceiling_s=None)
    factor = 2
    while batches % factor == 0:
        fewer_batches = {
            _BATCH: str(batch * factor),
            _ACCUMULATED_BATCHES: str(batches // factor),
        }
        yield resized(fewer_batches, may_change=PER_BATCH)
        if may_checkpoint:  # so that the larger batch fits
            checkpointed = {**fewer_batches, _CHECKPOINTING: "true"}
            yield resized(checkpointed, may_change=PER_BATCH)
        factor *= 2
    if batch % 2 == 0:
        more_batches = {_BATCH: str(batch // 2), _ACCUMULATED_BATCHES: str(batches * 2)}
        yield resized(more_batches, may_change=PER_BATCH)
    for factor in (2, 4):
        yield resized({_BATCH: str(batch * factor)}, may_change=OTHER_BATCH)


def add_workers(run: FirstRun) -> Iterator[Candidate]:
    """Suggest more loader workers."""
    option = run.first_existing(*WORKERS)
    if option is None:
        return
    # the option is None if the data module sets the number itself
    current_count = run.option(option) or 0
    ceiling_s = run.phases_s("data")
    for count in (1, 2, 4, 8):
        if count <= current_count:
            continue
        refused = ""
        cores = run.settings.cores
        if cores and count > WORKERS_PER_CORE * cores:
            refused = f"too many workers for {cores} cores"
        options = {option: str(count)}
        yield faster_candidate(
            options,
            group="num_workers",
            ceiling_s=ceiling_s,
            may_change=BY_WORKERS,
            refused=refused,
        )


def pin_memory(run: FirstRun) -> Iterator[Candidate]:
    """Suggest pinned memory for batches, if they are not pinned yet."""
    option = run.first_existing("data.pin_memory", "loader.pin_memory")
    if option is None:
        return
    pins = run.option(option)
    leaves_it_to_data = option == "loader.pin_memory" and pins is None
    if pins is not False and not leaves_it_to_data:
        return
    refused = "" if run.has_device else "batches are not copied to a device"
    yield faster_candidate(
        {option: "true"},
        group=option,
        ceiling_s=run.phases_s("data", "transfer"),
        refused=refused,
    )


def benchmark_convolutions(run: FirstRun) -> Iterator[Candidate]:
    """Suggest that cuDNN benchmarks its convolution algorithms and uses the fastest."""
    option = "trainer.benchmark"
    if run.option(option) is True or not run.has_device or not run.has_option(option):
        return
    yield faster_candidate(
        {option: "true"},
        group=option,
        ceiling_s=run.phases_s(*_MATMUL_PHASES),
        may_change=ORDER,
    )


def switch_option(
    option: str,
    from_value: bool,
    to_value: str,
    phases: tuple[str, ...],
    may_change: str | None,
) -> FindCandidates:
    """Return a function that suggests ``option`` set to ``to_value`` to runs in which it is ``from_value``."""

    def candidates(run: FirstRun) -> Iterator[Candidate]:
        """Suggest the other value of the option."""
        if run.option(option) is from_value:
            ceiling_s = run.phases_s(*phases)
            yield faster_candidate(
                {option: to_value},
                group=option,
                ceiling_s=ceiling_s,
                may_change=may_change,
            )

    return candidates


# -- what `plan` rehearses ---------------------------------------------------------------------------------------------


def narrower_precisions(
    planned: Planned, largest_context: int | None
) -> Iterator[MemoryCandidate]:
    """Yield lower precisions; none for a run in float64, whose user is assumed to need it."""
    precision = str(planned.settings.get(_PRECISION) or "32-true")
    is_full = precision in _FULL_PRECISIONS
    if is_full:
        yield memory_candidate({_PRECISION: "bf16-mixed"}, may_change=BFLOAT16)
    if is_full or precision.endswith("-mixed"):
        yield memory_candidate({_PRECISION: "bf16-true"}, may_change=WEIGHTS)


def fused_attention(
    planned: Planned, largest_context: int | None
) -> Iterator[MemoryCandidate]:
    """Yield an attention function that does not store the matrix of attention weights."""
    if planned.settings.get(ATTENTION) == "math":
        yield memory_candidate({ATTENTION: "sdpa"}, may_change=ORDER)


def activation_checkpointing(
    planned: Planned, largest_context: int | None
) -> Iterator[MemoryCandidate]:
    """Yield activation checkpointing, if it is off."""
    if planned.settings.get(_CHECKPOINTING) is False and not planned.settings.get(
        _CHECKPOINT_EVERY
    ):
        yield memory_candidate({_CHECKPOINTING: "true"})


def chunked_loss(
    planned: Planned, largest_context: int | None
) -> Iterator[MemoryCandidate]:
    """Yield the loss that computes logits in chunks, if the batch has more tokens than one chunk."""
    tokens = (planned.batch or 0) * (planned.context or 0)
    if planned.settings.get(_LOSS) == "plain" and tokens > _CHUNK_TOKENS:
        yield memory_candidate({_LOSS: "chunked"}, may_change=ORDER)


def smaller_batches(
    planned: Planned, largest_context: int | None
) -> Iterator[MemoryCandidate]:
    """Yield smaller batches, accumulated to the same samples per step; then the largest batch that fits."""
    batch = planned.batch or 0
    divisors: list[int] = []
    largest_size = min(planned.largest or 0, batch - 1)
    for size in range(largest_size, 0, -1):
        if batch % size == 0 and len(divisors) < _DIVISORS:
            divisors.append(size)
    yield from accumulated_batches(planned, divisors)
    if planned.largest and planned.settings.get(_BATCH) == planned.batch:
        yield memory_candidate(
            {_BATCH: planned.largest}, may_change=OTHER_BATCH, surely_fits=True
        )


def accumulated_batches(
    planned: Planned, sizes: Sequence[int]
) -> Iterator[MemoryCandidate]:
    """Yield batches of each of ``sizes`` (divisors of the batch size), accumulated to the same samples per step."""
    batch = planned.settings.get(_BATCH)
    batches = planned.settings.get(_ACCUMULATED_BATCHES) or 1
    if batch is None or batch != planned.batch:
        # the option is not the size of the batch that was rehearsed
        return
    for size in sizes:
        if size < batch:
            yield memory_candidate(
                {_BATCH: size, _ACCUMULATED_BATCHES: batches * batch // size},
                may_change=PER_BATCH,
            )


def optimizer_without_state(
    planned: Planned, largest_context: int | None
) -> Iterator[MemoryCandidate]:
    """Yield SGD, which has no state, to replace AdamW or Muon."""
    if planned.settings.get("model.optimizer") in ("adamw", "muon"):
        yield memory_candidate({"model.optimizer": "sgd"}, may_change=OTHER_OPTIMIZER)


def shorter_context(
    planned: Planned, largest_context: int | None
) -> Iterator[MemoryCandidate]:
    """Yield the largest context that fits."""
    if largest_context and planned.context and largest_context < planned.context:
        yield memory_candidate(
            {"data.context_length": largest_context}, may_change=OTHER_CONTEXT
        )


# -- sentences ---------------------------------------------------------------------------------------------------------


def _place_text(finding: Finding) -> str:
    """Return ``Model.forward (model.py:12)``; empty if the finding names no owner."""
    return f"{finding.owner or ''} {_line_of(finding)}".strip()


def _line_of(finding: Finding) -> str:
    """Return ``(model.py:12)``; empty if the finding names no line."""
    if not finding.file:
        return ""
    return f"({Path(finding.file).name}:{finding.line})"


def _ranks_text(finding: RankFinding) -> str:
    """Return the advice about slow ranks; it depends on which ranks are slow, and in which phase."""
    if finding.kind == "turns":
        if finding.phase in _MATMUL_PHASES:
            return "Give all ranks batches of similar length (bucket or pack them)."
        return "Find out what delays one rank at a time: late batches, logging, checkpoints, other programs."
    is_between_steps = finding.phase == RANK_PARTS[-1]
    if is_between_steps:
        return "Check what the slow ranks do between steps: validation, checkpoints, logging, a new loader per epoch."
    if finding.kind == "several":
        ranks = "these ranks"
    elif finding.kind == "host":
        ranks = f"host {finding.host}"
    else:
        ranks = f"rank {finding.rank} (host {finding.host})"
    if finding.phase in ("data", "transfer"):
        return f"Compare the data of {ranks} with the others: disk, network, cores for the loader, length of samples."
    return f"Compare {ranks} with the others: programs beside it, clock, number of cores, length of samples."


def _precision_text(finding: Finding, settings: Settings) -> str:
    return f"Try precision {finding.what}: it makes matrix products faster."


def _plain_precision_text(finding: Finding, settings: Settings) -> str:
    dtype = "float16" if str(finding.what).startswith("16") else "bfloat16"
    return f"Try torch.autocast with dtype=torch.{dtype} around forward and loss: it makes matrix products faster."


def _input_text(finding: Finding, settings: Settings) -> str:
    """Return the advice for a step that waits for data: more workers, or a faster loader if workers do not help."""
    if settings.restarts_loader:
        return _iterator_text(settings)
    if settings.fetches_single_rows:
        return (
            "Fetch whole batches from the TensorDataset, with a BatchSampler as sampler and batch_size=None: now the "
            "DataLoader takes one row at a time and stacks them."
        )
    prepare = "prepare (decode, tokenize, pack) the data before training"
    workers = settings.num_workers
    if workers is None:
        return _text_without_loader(finding)
    if finding.facts.get("takes_over"):
        remedy = "Pass fewer, larger tensors per batch"
        loads_faster_than_it_receives = (
            finding.facts.get("loading_s", 0.0) < finding.saves_s
        )
        if loads_faster_than_it_receives:
            remedy += ", or load in the main process (num_workers=0)"
        return f"{remedy}: the training thread spends much time on receiving tensors from the workers."
    cores = settings.cores or math.inf
    wanted_workers = min(2 * workers or 2, cores)
    if "workers" in finding.facts:
        wanted_workers = int(finding.facts["workers"])

    wait_exceeds_transfer = finding.saves_s >= _HANDED_OVER_S
    if wait_exceeds_transfer and wanted_workers > workers:
        waits = ""
        if wanted_workers > cores:
            waits = f" (more than the {count_text(int(cores), 'core')}, because workers mostly wait)"
        costliest = ""
        if finding.file:
            costliest = f": {_place_text(finding)} takes most of that time{_package_text(finding)}"
        more_workers = f"num_workers from {workers} to {wanted_workers}{waits}"
        if _can_index_batches(finding, has_free_core=cores > wanted_workers):
            return f"{_index_batch_text(settings)}, or raise {more_workers}{costliest}."
        return f"Raise {more_workers}, or {prepare}{costliest}."
    if _can_index_batches(finding, has_free_core=False):
        return (
            f"{_index_batch_text(settings)}, or {prepare}: {_place_text(finding)} takes most of the time of the "
            f"loader{_package_text(finding)}."
        )

    reason = "transferring a batch from a worker takes as long as the wait"
    if wait_exceeds_transfer:
        reason = _reason_against_workers(finding, workers, cores)
    place = _place_text(finding) or "the loader"
    return f"Make {place} faster{_package_text(finding)}, or {prepare}: {reason}."


def _reason_against_workers(finding: Finding, workers: int, cores: float) -> str:
    """Return why more than ``workers`` workers would not help, as the end of a sentence."""
    if workers < cores:
        return f"more than {count_text(workers, 'worker')} would not help"
    if finding.facts.get("waits"):
        return f"the {workers} workers already wait most of the time"
    return f"there are already as many workers ({workers}) as available CPU cores"


def _can_index_batches(finding: Finding, has_free_core: bool) -> bool:
    """Return whether the loader makes samples one by one, each in so short a time that it is best made with others."""
    sample_s = finding.facts.get("sample_s")
    if sample_s is None:
        return False
    is_mostly_in_package = "package_share" in finding.facts
    is_in_other_code = is_mostly_in_package or "in_other_code" in finding.facts
    if has_free_core or is_in_other_code:
        return sample_s < _INDEXING_S
    return sample_s < _INDEXING_WITHOUT_CORE_S


def _index_batch_text(settings: Settings) -> str:
    """Return the beginning of the advice to make all samples of a batch at once."""
    return (
        f"Index all {count_text(settings.samples_per_batch or 0, 'sample')} of a batch at once (__getitems__ of the "
        "dataset, with a collate_fn that only returns its result)"
    )


def _package_text(finding: Finding) -> str:
    """Return the package in which the function that a finding names spends most of its time; empty without one."""
    share = finding.facts.get("package_share")
    return "" if share is None else f" ({share:.0%} of it in {finding.what})"


def _text_without_loader(finding: Finding) -> str:
    """Return the advice for batches of which no DataLoader is known.

    A generator of the program may make them, or several loaders with different numbers of workers.
    """
    place = ""
    if finding.file:
        place = f" (most of it under {_place_text(finding)})"
    reason = f"the training thread waits for each batch{place}"
    workers = "If its DataLoader has workers, more of them may help."
    if finding.facts.get("made_in_thread"):
        reason = f"the training thread makes each batch itself{place}"
        workers = (
            "Or wrap the data into an IterableDataset whose DataLoader has workers."
        )
    return f"Prepare the data before training, or cache what does not change from pass to pass: {reason}. {workers}"


def _iterator_text(settings: Settings) -> str:
    """Return the advice for a loop that makes a new iterator of its loader for each batch."""
    effect = "determines the order of all samples again"
    if settings.num_workers:
        effect += " and starts all workers again"
    return (
        "Keep one iterator of the DataLoader and call next() on it: the program makes a new one for each batch, "
        f"which {effect}."
    )


def _transfer_text(finding: Finding, settings: Settings) -> str:
    """Return the advice about the transfer of batches to the device."""
    tensors = settings.tensors_per_batch or 0
    if tensors >= _MANY_TENSORS:
        return (
            f"Collate each batch into a few large tensors: it has {count_text(tensors, 'tensor')}, and the transfer "
            "handles them one by one."
        )
    if settings.pin_memory is False:
        return "Pin the batches' memory (pin_memory=True): copies then overlap with computation."
    return "Send less data to the device: token ids as int32 instead of int64, and only tensors that the step uses."


def _validation_text(finding: Finding, settings: Settings) -> str:
    """Return the advice about validation by a Trainer."""
    advice = "Validate less often, or on fewer batches (val_check_interval, limit_val_batches)"
    size = settings.validation_batch_size
    training_size = settings.samples_per_batch or 0
    if size is not None and _SMALLER_IN_VALIDATION * size <= training_size:
        advice = f"Validate with larger batches (now {count_text(size, 'sample')}), or less often"
    return f"{advice}{_costliest_line_text(finding)}.{_frequency_sentence(finding)}"


def _plain_validation_text(finding: Finding, settings: Settings) -> str:
    """Return the advice about validation in a loop of the program's own."""
    advice = (
        "If training allows it, run the model without gradients (validation, acting) less often, or on fewer "
        "batches"
    )
    if settings.validates_with_gradients:
        advice = (
            "If validation needs no gradients, run it under torch.no_grad(): recording the autograd graph takes at "
            "most half of its time now. To save more, validate less often or on fewer batches"
        )
    return f"{advice}{_costliest_line_text(finding)}.{_frequency_sentence(finding)}"


def _frequency_sentence(finding: Finding) -> str:
    """Return a sentence about a validation that was seen only once; empty if it was seen more often."""
    if not finding.may:
        return ""
    return (
        " It took place once in this run; if it comes less often later, it costs less."
    )


def _costliest_line_text(finding: Finding) -> str:
    """Return the end of a sentence that names the line with most of the time; empty if it is unknown."""
    if not finding.file:
        return ""
    caller = f", called in {finding.what}" if finding.what else ""
    return f": most of the time is spent in {_place_text(finding)}{caller}"


def _epoch_text(finding: Finding, settings: Settings) -> str:
    """Return the advice about epoch boundaries: longer epochs, or less work of the program between epochs."""
    if not finding.file:
        return "Make epochs longer: each epoch boundary takes time."
    return (
        f"Do less work between epochs in {_place_text(finding)}: most of the time from the last batch of an epoch to "
        "the first one of the next is spent there. Longer epochs help if that work does not grow with them."
    )


def _reload_text(finding: Finding, settings: Settings) -> str:
    hook = finding.owner or "train_dataloader"
    return f"Create the loader only once: {hook} is called in every epoch (reload_dataloaders_every_n_epochs)."


def _owner_text(finding: Finding, settings: Settings) -> str:
    """Return the advice about an action, or a gap between phases, with the function that takes most of its time."""
    if finding.phase == "optimizer":
        return (
            f"Make {_place_text(finding)} faster, for example with foreach operators: "
            "most of the optimizer's time is spent there."
        )
    if finding.facts.get("untrained"):
        place = f"{finding.what or 'the model'} {_line_of(finding)}".strip()
        if finding.facts.get("unfrozen"):
            return (
                f"Call {place} under torch.no_grad(), or set requires_grad_(False) for its weights: they get "
                "gradients, but do not change. Its outputs can be kept for data that repeats."
            )
        return (
            f"Call {place} less often: it is not trained. If its weights stay the same, keep its outputs for data that "
            "repeats, or use a smaller model."
        )
    owner = finding.owner or ""
    is_gap = owner.startswith((f"{BEFORE} ", f"{BETWEEN} ", f"{AFTER} "))
    action = owner if is_gap else f"in {owner}"
    if "loop_line" in finding.facts:
        return _loop_line_text(finding, action)
    function = finding.what
    if function and not owner.endswith(function):
        place = f"{function} {_line_of(finding)}".strip()
        reason = "most of the time is spent in"
        if finding.facts.get("costliest_line"):
            reason = "the costliest line is in"
        return f"Do less work {action}, or do it less often: {reason} {place}."
    action = f"{action} {_line_of(finding)}".strip()
    return f"Do less work {action}, or do it less often."


def _loop_line_text(finding: Finding, action: str) -> str:
    """Return the advice about ``action`` with the line of the program's own loop that takes most of its time."""
    place = _line_of(finding).strip("()")
    acting = ""
    if "acting_line" in finding.facts:
        line = int(finding.facts["acting_line"])
        acting = f", where line {line} runs the model without gradients (acting, generation or evaluation)"
    share = finding.facts["loop_line"]
    part = "most of that time" if share >= 0.5 else f"{share:.0%} of that time"
    if finding.facts.get("exchanges"):
        return (
            f"Wait less for other processes or threads {action}{acting}: {place} takes {part} to send them data and to "
            "wait for theirs (environments, pipes, sockets, queues). Give them more work per call or, if they do "
            "little, try to do it in the training thread."
        )
    if finding.what and finding.facts.get("short_torch_calls"):
        return _short_torch_calls_text(finding, finding.what, f"{action}{acting}")
    function = f", mostly in {finding.what}" if finding.what else ""
    return f"Do less work {action}{acting}, or do it less often: {place} takes {part}{function}."


def _short_torch_calls_text(finding: Finding, function: str, action: str) -> str:
    """Return the advice about a function that calls torch for a few numbers at a time."""
    calls = finding.facts["short_torch_calls"]
    return (
        f"Compute whole tensors at once in {function}, or convert them to lists or NumPy arrays first: it runs more "
        f"than {calls:,.0f} short operators per step, one after another, which takes most of the time {action}."
    )


def _threads_text(finding: Finding, settings: Settings) -> str:
    """Return the advice about the busiest of the other threads, with the line in which it was seen most often."""
    place = ""
    if finding.file:
        place = f" in {finding.what} {_line_of(finding)}"
    return (
        f"Do not let the thread {finding.owner} hold Python's global lock (GIL){place}: the training thread waits for "
        "it after each operator. If it polls, block on a queue, a semaphore or a condition instead; if it computes in "
        "Python, do that in another process."
    )


def _logging_text(finding: Finding, settings: Settings) -> str:
    is_of_logger = (finding.owner or "").endswith(("Logger.log_metrics", "Logger.save"))
    if is_of_logger:
        return f"Log less often (log_every_n_steps): {_place_text(finding)} takes most of that time."
    return f"Log less often in {_place_text(finding)}, for example only `if batch_idx % 50 == 0`."


def _plain_logging_text(finding: Finding, settings: Settings) -> str:
    return f"Log less often in {_place_text(finding)}, for example only `if step % 50 == 0`."


def _odd_steps_text(finding: Finding, settings: Settings) -> str:
    """Return the advice about slow steps, with the longest of them."""
    count = int(finding.facts.get("steps", 0.0))
    step = int(finding.facts.get("step", 0.0))
    seconds = finding.facts.get("seconds", 0.0)
    longest = f"step {step} took {duration_text(seconds)}"
    if finding.what:
        longest += f", {finding.what}"
    if count == 1:
        return f"Find out why {finding.phase} was slow in one step: {longest}."
    return f"Find out why {finding.phase} was slow in {count_text(count, 'step')}: {longest}."


def _sleep_text(finding: Finding, settings: Settings) -> str:
    """Return the advice about a phase that sleeps, with the line that waits if it is known."""
    if not finding.owner:
        return f"Find out what {finding.phase} waits for without computing: sleep, I/O or a lock."
    wait = f"waits in {finding.what} without computing"
    if finding.what == EXCHANGE:
        wait = "waits for other processes or threads"
    return f"Remove the wait from {finding.phase}: {_place_text(finding)} {wait}."


def _slow_call_text(finding: Finding, settings: Settings) -> str:
    """Return the advice about a call of a library that is slow in a known way."""
    name = finding.what or ""
    remedy = ""
    if name in SLOW_CALL_BY_NAME:
        remedy = f": {SLOW_CALL_BY_NAME[name].remedy}"
    return f"Replace {name} in {_place_text(finding)}{remedy or '.'}"


def _python_text(finding: Finding, settings: Settings) -> str:
    """Return the advice about a line that takes much time; it depends on what the line does (``finding.what``).

    That is "torch" for many short operators, ``PRINTING``, ``EXCHANGE``, "python" for code that calls nothing, or the
    name of the package or C function that it calls.
    """
    place = _place_text(finding)
    if finding.what == "torch":
        calls = finding.facts.get("calls", 0.0)
        return f"Use fewer, larger operators in {place}: it calls torch {calls:,.0f} times per step."
    if finding.what == PRINTING:
        return f"Do not convert tensors to text in {finding.phase}: {place} does so, even if the text is never read."
    if finding.what == EXCHANGE:
        return f"Exchange less data with other processes or threads in {finding.phase}: {place} spends its time on it."
    if finding.what != "python":
        return f"Move the {finding.what} code of {place} out of {finding.phase}."
    if finding.phase == "optimizer":
        return (
            f"Make the Python code of {place} faster: update all weights together (torch._foreach functions, or an "
            "optimizer with fused=True)."
        )
    return (
        f"Make the Python code of {place} faster, for example with fewer operators (torch._foreach functions for lists "
        f"of tensors), or move it out of {finding.phase}."
    )


def _pattern_text(
    finding: Finding, settings: Settings, option: str = "--actions.steps"
) -> str:
    """Return the advice about every n-th step being slow; ``option`` is the option that shows whose code is slow."""
    period = int(finding.facts.get("every", 0.0))
    if finding.file:
        return (
            f"Do the work of {_place_text(finding)} less often, or make it faster: {finding.phase} takes longer every "
            f"{period} steps, and most of that time is spent there."
        )
    sentence = f"Find out why {finding.phase} takes longer every {period} steps"
    if finding.phase == "other":
        sentence += f": {option}={period + 1} shows which code takes the time"
    return f"{sentence}."


def _optimizer_text(finding: Finding, settings: Settings) -> str:
    """Return the advice to update many weights with one kernel."""
    if settings.fused_optimizer is None:
        return "Let the optimizer update all weights together (foreach=True), not one by one."
    sentence = "Use the fused optimizer (fused=True): one pass over the weights, and one launch instead of hundreds"
    if settings.weight_by_weight:
        sentence += " (foreach=False is currently set)"
    return f"{sentence}."


def _clip_text(finding: Finding, settings: Settings) -> str:
    """Return the advice about clipping that is slow, or that comes before the last batch."""
    batches = round(finding.facts.get("batches", 0.0))
    if not batches:
        return "Clip gradients with foreach operators, or check whether clipping is necessary."
    return (
        f"Clip gradients once per step, right before optimizer.step(): they are now clipped after each of {batches} "
        "batches, although later batches still add to them. The result differs, so keep it if the gradients of each "
        "batch must be clipped, as for differential privacy."
    )


def _optimizer_products_text(finding: Finding, settings: Settings) -> str:
    """Return the advice about the matrix products of an optimizer such as Muon."""
    flops = with_prefix(finding.facts.get("flops", 0.0), "FLOP")
    flops_per_s = with_prefix(finding.facts.get("flops_per_s", 0.0), "FLOP/s")
    return (
        f"Make the optimizer's own matrix products cheaper ({flops} per step at {flops_per_s}): run them as one "
        "batched product per shape, divide them among the ranks, use fewer iterations (Newton-Schulz), or "
        "accumulate more batches per step."
    )


def _small_batch_text(finding: Finding, settings: Settings) -> str:
    """Return the advice to use larger batches, or to accumulate them if memory is full."""
    noun = ""
    size = 0
    if "tokens_per_batch" in finding.facts:
        noun = "token"
        size = int(finding.facts["tokens_per_batch"])
    elif "samples_per_batch" in finding.facts:
        noun = "sample"
        size = int(finding.facts["samples_per_batch"])
    present_size = f" (now {count_text(size, noun)})" if noun else ""
    if settings.memory_is_full:
        return f"Accumulate the gradients of more batches{present_size}: memory is too full for a larger batch."
    growth = finding.facts.get("growth")
    example = ""
    if growth is not None and noun:
        example = f", for example of {count_text(round(growth * size), noun)}"
    elif growth is not None:
        example = f", for example {growth:.3g} times as large"
    return f"Try a larger batch{present_size}{example}: much of the step time does not depend on the batch size."


def _profiler_text(finding: Finding, settings: Settings) -> str:
    return f"Train without the Trainer's own profiler ({finding.owner})."


def _sync_text(finding: Finding, settings: Settings) -> str:
    file_name = Path(finding.file or "").name
    return f"Do not wait for the device in each step, as {finding.what} does ({file_name}:{finding.line})."


def _repeated_forward_text(finding: Finding, settings: Settings) -> str:
    """Return the advice about a forward pass that is repeated on the same input."""
    passes = finding.facts.get("passes", 0.0)
    often = "again" if passes <= 1.0 else f"{passes:,.3g} more times"
    sentence = f"Reuse the first result of {finding.what}: each step runs its forward pass {often} on the same input"
    if finding.file is not None:
        sentence += f", at {_line_or_operator(finding)}"
    return f"{sentence}. Keep both if dropout makes them differ on purpose (R-Drop, SimCSE)."


def _recomputation_text(finding: Finding, settings: Settings) -> str:
    """Return the advice about activation checkpointing; whether memory is free may be unknown."""
    condition = ": there is enough memory to keep the activations"
    if settings.memory_free_share is None:
        condition = ", if there is enough memory to keep the activations"
    return f"Recompute less (activation checkpointing, chunked loss){condition}."


def _compile_text(finding: Finding, settings: Settings) -> str:
    """Return the advice to use torch.compile; it names the costliest operator that could be fused."""
    sentence = "Try torch.compile: it fuses small operators, which saves launches and memory traffic"
    if finding.what and finding.owner:
        share = finding.facts.get("costliest", 0.0)
        sentence += f" (costliest operator: {finding.what} in {finding.owner}, {share:.0%} of the step)"
    return f"{sentence}."


def _padding_text(finding: Finding, settings: Settings) -> str:
    """Return the advice against padding: narrower batches, or sequences of similar length."""
    padding = finding.facts.get("padding", 0.0)
    unused = finding.facts.get("unused", 0.0)
    if unused >= padding / 2.0:
        return (
            f"Pad each batch only to its own longest sequence (in the collate function): {unused:.0%} of the positions "
            "lie beyond that length."
        )
    return f"Batch sequences of similar length together, or pack them: {padding:.0%} of the positions are padding."


def _unused_gradients_text(finding: Finding, settings: Settings) -> str:
    if finding.file:
        # Gradients pass through this module to another one, so that no_grad would end the training.
        module = f"the module in {_place_text(finding)}"
        if not finding.owner:
            module = f"the module that {Path(finding.file).name}:{finding.line} calls"
        return (
            f"Freeze the weights of {module} by requires_grad_(False): each backward pass "
            "computes their gradients, but no optimizer updates them."
        )
    return (
        f"Set requires_grad=False for the weights of {finding.what}, or run it under torch.no_grad(): the weights "
        "get gradients, but no optimizer updates them."
    )


def _broadcast_text(finding: Finding, settings: Settings) -> str:
    """Return the advice about a table of all pairs.

    A finding from the trace has the shapes in ``what``. One from the data-flow analysis has the line.
    """
    table = finding.what
    if finding.file:
        table = f"{_place_text(finding)} broadcasts small tensors to a far larger one"
    return (
        f"Check the shapes: {table}. If you need all pairs, torch.cdist or a matrix product avoids this large tensor; "
        "if not, an input has a dimension too few or too many (unsqueeze or squeeze it)."
    )


def _unused_text(finding: Finding, settings: Settings) -> str:
    """Return the advice about results, or gradients, that nothing reads."""
    if finding.phase == "backward":
        return (
            f"Avoid the unused gradients of {_line_or_operator(finding)}: detach its output, call it under "
            "torch.no_grad(), or set requires_grad_(False) on its weights while they are not trained."
        )
    return f"Remove the computation in {_line_or_operator(finding)}: nothing uses its result."


def _groups_text(finding: Finding, settings: Settings) -> str:
    """Return the advice about an optimizer with more groups of parameters than different options."""
    groups = round(finding.facts.get("groups", 0.0))
    different = round(finding.facts.get("different", 0.0))
    return (
        f"Merge the optimizer's parameter groups: it has {groups:,}, which it updates one after another, but only "
        f"{different:,} with different options."
    )


def _on_operators(template: str) -> Sentence:
    """Return the sentence of a finding from the data flow.

    Args:
        template: may name the line (``code``), the needless share of the operators (``share``), how many they are
            (``operators``), and the costliest of them (``what``).
    """

    def sentence(finding: Finding, settings: Settings) -> str:
        return template.format(
            code=_line_or_operator(finding),
            share=_share_text(finding),
            operators=round(finding.facts.get("operators", 0.0)),
            what=finding.what,
        )

    return sentence


def _repeated_text(finding: Finding, settings: Settings) -> str:
    """Return the advice about a repeated computation, or about whole passes that are repeated."""
    code = _line_or_operator(finding)
    if finding.facts.get("passes"):
        return (
            f"Run each batch through the model once: {code} runs forward and backward again on the same batch, with "
            "the same weights. The closure of an optimizer contains both; if it was called before, pass one that only "
            "returns the loss (not to LBFGS, which needs the whole closure)."
        )
    return f"Reuse the first result: {code} repeats a computation of the same step on the same values."


def _same_result_text(finding: Finding, settings: Settings) -> str:
    """Return the advice about a function that computes the same result again."""
    calls = int(finding.facts.get("calls", 0.0))
    repeats = int(finding.facts.get("repeats", 0.0))
    remedy = (
        "compute it once and keep it (once per step, or before training if the arguments do not change; "
        "functools.lru_cache does so for arguments that are no tensors)"
    )
    if finding.facts.get("has_gradients"):
        # the weights change from step to step
        remedy = "call it once and reuse the result"
    if repeats == calls - 1:
        which = f"all {calls} calls of a step"
    else:
        which = f"{repeats} of {calls} calls of a step as an earlier call"
    return f"{_place_text(finding)} returns the same result in {which}, from the same arguments: {remedy}."


def _large_result_text(finding: Finding, settings: Settings) -> str:
    """Return the advice about a function that returns more than the samples need."""
    return f"Crop or resize samples before {_place_text(finding)}, not after it: it returns {finding.what}."


def _unfused_text(finding: Finding, settings: Settings) -> str:
    """Return the advice about a costly place between the layers; torch.compile is left out where it cannot help."""
    code = _line_or_operator(finding)
    remedy = f"Use fewer or fused operators in {code}, or torch.compile"
    if _is_uncompiled(finding):
        remedy = f"Use fewer operators in {code}"
    operators = round(finding.facts.get("operators", 0.0))
    return (
        f"{remedy}: much of the step is spent there, in {operators} operators between the model's layers (costliest: "
        f"{finding.what})."
    )


def _is_uncompiled(finding: Finding) -> bool:
    """Return whether torch.compile does not fuse most operators of the phase of ``finding``."""
    return finding.facts.get("uncompiled", 0.0) > 0.5


def _narrow_text(finding: Finding, settings: Settings) -> str:
    """Return the advice about half precision that makes a step on the CPU slower."""
    return (
        f"Train in float32 (neither autocast nor weights in half precision): on this CPU, in {settings.precision}, the "
        f"operators take longer than in float32, most of all {finding.what}, and conversions take further time."
    )


def _accumulated_text(finding: Finding, settings: Settings) -> str:
    """Return the advice about small micro-batches; the finding's share is 1 - 1/n for n of them."""
    single_share = 1.0 - finding.facts.get("share", 0.0)
    count = "several"
    if single_share > 0.0:
        count = str(round(1.0 / single_share))
    return (
        "Use larger micro-batches, and accumulate the gradients of fewer of them, if memory allows: each step "
        f"computes {count} small ones one after another in {_line_or_operator(finding)}, which spend much of their "
        "time on calling operators."
    )


def _line_or_operator(finding: Finding) -> str:
    """Return the line that a finding is about, or else its main operator."""
    return _place_text(finding) or str(finding.what)


def _share_text(finding: Finding) -> str:
    """Return the needless share of a finding's operators as text, such as ``98%`` or ``99.9%``."""
    share = finding.facts.get("share", 0.0)
    return f"{share:.1%}" if 0.99 < share < 1.0 else f"{share:.0%}"


# -- the catalogue -----------------------------------------------------------------------------------------------------

# `improve` tries them in this order if their ceilings are equal.
REMEDIES: Sequence[Remedy] = (
    Remedy(
        "precision",
        _precision_text,
        _plain_precision_text,
        likely_share=0.35,
        bounds=("memory bandwidth",),
        candidates=lower_precision,
        smaller_settings=narrower_precisions,
    ),
    Remedy(
        "tf32",
        "Allow TF32 for matrix products: torch.set_float32_matmul_precision('high').",
        likely_share=0.35,
        candidates=allow_tf32,
    ),
    Remedy(
        "compile",
        _compile_text,
        likely_share=0.3,
        bounds=("host", "memory bandwidth"),
        candidates=toggle_compile,
    ),
    Remedy(
        "optimizer",
        _optimizer_text,
        likely_share=0.5,
        likely_share_of_fact=0.9,
        bounds=("host", "memory bandwidth"),
        candidates=switch_option(
            "model.fused",
            from_value=False,
            to_value="true",
            phases=("optimizer",),
            may_change=ORDER,
        ),
    ),
    Remedy("optimizer_products", _optimizer_products_text, likely_share=0.4),
    Remedy("attention", candidates=switch_attention, smaller_settings=fused_attention),
    Remedy(
        "recomputation",
        _recomputation_text,
        # more than the repeated forward itself, which runs on cold caches with additional bookkeeping
        likely_share=1.25,
        candidates=stop_checkpointing,
        smaller_settings=activation_checkpointing,
    ),
    Remedy("padding", _padding_text, likely_share=0.8),
    Remedy("repeated_forward", _repeated_forward_text, likely_share=0.9),
    Remedy(
        "repeated_backward",
        "Add the losses and call backward once: part of the graph runs its backward pass twice (retain_graph=True).",
        likely_share=0.9,
    ),
    Remedy("unused_gradients", _unused_gradients_text, likely_share=0.9),
    Remedy("broadcast", _broadcast_text, likely_share=0.8),
    Remedy("unused", _unused_text, likely_share=0.9),
    Remedy("repeated", _repeated_text, likely_share=0.9),
    Remedy("same_result", _same_result_text),
    Remedy("large_result", _large_result_text, likely_share=0.9),
    Remedy(
        "cancelled",
        _on_operators(
            "Skip the computation in {code} while its weight is zero: the result is multiplied by 0."
        ),
        likely_share=0.9,
    ),
    Remedy(
        "causal",
        _on_operators(
            "Use is_causal=True in {code}: the attention mask only hides later positions, and fused attention then "
            "skips these. scaled_dot_product_attention then needs no mask; nn.MultiheadAttention still needs one (make "
            "it once), and need_weights=False."
        ),
        likely_share=0.9,
    ),
    Remedy(
        "constant",
        _on_operators(
            "Compute the result of {code} once, before training: it is the same in each step."
        ),
        likely_share=0.9,
    ),
    Remedy(
        "summed",
        _on_operators(
            "Apply one layer in {code}, with the sum of the weights and biases of several: these get the same input, "
            "and their results are only added or averaged. Pad smaller kernels with zeros; for an average, divide the "
            "sums by the number of layers. The result is the same."
        ),
        likely_share=0.9,
    ),
    Remedy(
        "zeros",
        _on_operators(
            "Do not multiply by zeros in {code}: {share} of the elements of a factor are zero. Replace a diagonal "
            "matrix by scaling rows, a one-hot matrix by indexing, or any other by a sparse matrix."
        ),
        likely_share=0.9,
    ),
    Remedy(
        "ignored",
        _on_operators(
            "Leave out the positions in {code} that neither the loss nor a later layer reads: the gradient is zero at "
            "{share} of all positions (ignored labels, padding, unused outputs)."
        ),
        likely_share=0.9,
    ),
    Remedy(
        "ignored_at_last",
        _on_operators(
            "In the last of the layers that run {code}, compute only the positions that are used afterwards: in that "
            "layer the gradient is zero at {share} of all positions, but not in the layers before it. Attention still "
            "needs the keys and values of all positions, so select the used positions only for its queries, and for "
            "the norms and the MLP after it."
        ),
        likely_share=0.9,
    ),
    Remedy(
        "growing",
        _on_operators(
            "Collect the pieces in a list and concatenate them once, after the loop: each call of {code} copies "
            "all pieces so far."
        ),
        likely_share=0.9,
    ),
    Remedy(
        "packed_equal",
        _on_operators(
            "Pass a tensor instead of a PackedSequence to the recurrent layer at {code}: all sequences of the recorded "
            "batch are equally long. The layer takes one slice of a PackedSequence per time step, and the gradient of "
            "each slice is as large as the whole tensor."
        ),
        likely_share=0.9,
    ),
    Remedy(
        "packed",
        _on_operators(
            "Pass a padded tensor instead of a PackedSequence to the recurrent layer at {code}: the layer takes one "
            "slice of a PackedSequence per time step, and the gradient of each slice is as large as the whole tensor. "
            "The outputs of a unidirectional layer before the padding stay the same; take the last output of each "
            "sequence by its length. For a bidirectional layer, make batches of equally long sequences."
        ),
        likely_share=0.7,
    ),
    Remedy(
        "sliced",
        _on_operators(
            "Take all slices at once before the loop (x.unbind(dim) or x.split(size)) instead of one by one in {code}: "
            "the gradient of each slice is as large as the whole tensor."
        ),
        likely_share=0.9,
    ),
    Remedy(
        "order",
        _on_operators(
            "Multiply in the other order in {code}: A·(B·C) takes {share} fewer multiplications than (A·B)·C."
        ),
        likely_share=0.9,
    ),
    Remedy(
        "unused_rows",
        _on_operators(
            "Give the embedding in {code} sparse gradients (sparse=True, with SparseAdam, Adagrad or SGD): "
            "{share} of its rows are not used in a step, but the optimizer updates all rows."
        ),
        likely_share=0.9,
    ),
    Remedy(
        "small_parameters",
        _on_operators(
            "Make one parameter of the many small ones that {code} stacks in each step, such as a table: autograd and "
            "the optimizer handle each parameter on its own."
        ),
        likely_share=0.9,
    ),
    Remedy(
        "renormalized",
        _on_operators(
            "Renormalize all rows of the embedding in {code} at once after each update (weight.data.renorm_) instead "
            "of with max_norm, which handles the rows that are looked up one by one."
        ),
        likely_share=0.9,
    ),
    Remedy(
        "indexed",
        _on_operators(
            "Select rows with x.index_select(dim, index) instead of x[index] in {code} (dim is the indexed dimension, "
            "and no number may be negative): it copies whole rows, and its gradient adds whole rows, while index_put_ "
            "adds element by element."
        ),
        likely_share=0.8,
    ),
    Remedy(
        "transposed",
        _on_operators(
            "Flatten the logits and targets in {code} instead of transposing the logits: "
            "cross_entropy(logits.flatten(0, 1), targets.flatten()) computes the same, and softmax over the last "
            "dimension is faster."
        ),
        likely_share=0.9,
    ),
    Remedy(
        "some_double",
        _on_operators(
            "Compute in float32: {code} produces float64 tensors (a NumPy array is float64 by default), and "
            "float64 takes at least twice as long."
        ),
        likely_share=0.9,
    ),
    # more than the estimate, which leaves out short operators
    Remedy("narrow", _narrow_text, likely_share=1.5),
    Remedy(
        "channels_first",
        _on_operators(
            "Keep images in the memory format channels_last, as in model.to(memory_format=torch.channels_last) and "
            "batch.to(memory_format=torch.channels_last): the convolutions of the step are faster in it on this CPU."
        ),
        likely_share=1.0,
    ),
    Remedy(
        "sparse_layout",
        _on_operators(
            "Convert the sparse matrix in {code} from COO to CSR once, before training, if it is the same in each "
            "step (matrix.to_sparse_csr()): products in CSR are faster on this CPU. For a fast backward pass, too, "
            "write a torch.autograd.Function whose backward multiplies by matrix.t().to_sparse_csr(), which is also "
            "converted once: autograd itself uses a slower layout."
        ),
        likely_share=0.9,
    ),
    Remedy(
        "patches",
        _on_operators(
            "Compute the convolution in {code} as a linear layer, with the same weight: its patches do not overlap, so "
            "functional.linear(patches.flatten(1), conv.weight.flatten(1), conv.bias) returns the same for patches as "
            "large as the kernel, which view and permute cut. On this CPU that is faster."
        ),
        likely_share=0.9,
    ),
    Remedy(
        "fourier",
        _on_operators(
            "Compute the convolution in {code} by FFT: its kernel is long. torch.fft.irfft(torch.fft.rfft(x, n) * "
            "torch.fft.rfft(kernel, n).conj(), n) gives the same up to rounding in each channel, if x is padded, n is "
            "its length, and the end is cut off (rfft2 for images). On this CPU that is faster."
        ),
        likely_share=0.9,
    ),
    Remedy(
        "figures",
        _on_operators(
            "Leave out the computation in {code}, or do it less often (every 50 steps, for example): training does not "
            "need its result, which only Python code keeps or reads, such as a metric."
        ),
        likely_share=0.9,
    ),
    Remedy(
        "scores",
        _on_operators(
            "Use fused attention at {code}: torch.nn.functional.scaled_dot_product_attention does not store "
            "the attention scores (nn.MultiheadAttention uses it with need_weights=False; some masks prevent it)."
        ),
        likely_share=0.7,
    ),
    Remedy("groups", _groups_text, likely_share=0.8),
    Remedy("accumulated", _accumulated_text, likely_share=0.8),
    Remedy(
        "looped",
        _on_operators(
            "Replace the loop at {code} by operators on whole tensors, or move this line out of the loop and run it "
            "once on the stacked inputs: its {operators:,} small calls do not depend on each other."
        ),
        likely_share=0.8,
    ),
    Remedy(
        "cells",
        _on_operators(
            "Give whole sequences to the recurrent layer in {code} (nn.LSTM instead of nn.LSTMCell, for example), or "
            "all elements between two states that are reset or detached: its inputs do not depend on its own earlier "
            "outputs."
        ),
        likely_share=0.9,
    ),
    Remedy(
        "gathered",
        _on_operators(
            "Apply the layer before rows are copied, and copy its results: {share} of the rows that {code} "
            "multiplies by a weight are copies of other rows."
        ),
        likely_share=0.8,
    ),
    Remedy(
        "copied",
        _on_operators(
            "Avoid the copies at {code}, such as contiguous(), clone(), a change of the dtype, or reshape() of a "
            "permuted tensor: keep one memory layout and one dtype."
        ),
        likely_share=0.6,
    ),
    Remedy(
        "side_work",
        _on_operators(
            "Compute less in {code}, or less often: much of the step is spent there, outside the model's layers "
            "(costliest operator: {what})."
        ),
        likely_share=0.6,
    ),
    Remedy("unfused", _unfused_text, likely_share=0.6),
    Remedy("loss", smaller_settings=chunked_loss),
    Remedy(
        "small_batch",
        _small_batch_text,
        likely_share=0.35,
        likely_share_of_fact=0.8,
        bounds=("host", "communication"),
        candidates=resize_batches,
        smaller_settings=smaller_batches,
    ),
    Remedy(
        "input",
        _input_text,
        likely_share=0.9,
        bounds=("input",),
        candidates=add_workers,
    ),
    Remedy(
        "transfer",
        _transfer_text,
        likely_share=0.6,
        bounds=("input",),
        candidates=pin_memory,
    ),
    Remedy("clip", _clip_text, likely_share=0.5, likely_share_of_fact=0.9),
    Remedy(
        "dispatch_mode",
        "Leave torch's dispatch mode, such as FlopCounterMode, out of most training steps: it runs Python code at each "
        "operator.",
        likely_share=0.95,
    ),
    Remedy(
        "anomalies",
        "Switch off anomaly detection (detect_anomaly): it checks every gradient.",
        "Switch off anomaly detection (torch.autograd.set_detect_anomaly): it checks every gradient.",
        likely_share=0.5,
        candidates=switch_option(
            "trainer.detect_anomaly",
            from_value=True,
            to_value="false",
            phases=_MATMUL_PHASES,
            may_change=None,
        ),
    ),
    Remedy("benchmark", candidates=benchmark_convolutions),
    Remedy("sgd", smaller_settings=optimizer_without_state),
    Remedy("context", smaller_settings=shorter_context),
    # `remedy_of` writes its sentence from the record's finding about ranks
    Remedy("ranks", likely_share=0.9),
    Remedy(
        "validation",
        _validation_text,
        _plain_validation_text,
        # If it was seen once, it may come less often than the finding assumes: two to five times in three programs.
        likely_share=0.25,
        likely_share_of_fact=1.0,
    ),
    Remedy(
        "checkpoint",
        "Save checkpoints less often (every_n_train_steps), or asynchronously (AsyncCheckpointIO).",
        "Save checkpoints less often, or asynchronously (torch.distributed.checkpoint.async_save).",
    ),
    Remedy("epoch", _epoch_text),
    Remedy(
        "worker_start",
        "Keep the loader's workers from epoch to epoch (persistent_workers=True), or make epochs longer: at present "
        "new workers are started for each epoch.",
    ),
    Remedy("reload", _reload_text),
    Remedy("owner", _owner_text, likely_share=0.95),
    Remedy("logging", _logging_text, _plain_logging_text, likely_share=0.9),
    Remedy("sleep", _sleep_text),
    Remedy("slow_call", _slow_call_text, likely_share=0.95),
    Remedy("threads", _threads_text),
    Remedy("python", _python_text, likely_share=0.8),
    Remedy(
        "pattern",
        _pattern_text,
        partial(_pattern_text, option="action_steps"),
        likely_share=0.7,
    ),
    Remedy("odd_steps", _odd_steps_text, likely_share=0.7),
    Remedy(
        "garbage",
        "Collect garbage less often: gc.freeze() after set-up, or gc.disable() with an occasional gc.collect().",
    ),
    Remedy(
        "compilation",
        "Use the same shapes in all steps, or compile with dynamic=True: torch.compile recompiles repeatedly.",
    ),
    Remedy("profiler", _profiler_text, likely_share=0.5),
    Remedy(
        "sync",
        _sync_text,
        likely_share=0.7,
    ),
    Remedy(
        "double",
        "Train in float32: large operators take at least twice as long in float64.",
        likely_share=0.7,
    ),
    Remedy(
        "communication",
        "Try a larger batch: gradients are exchanged once per step, regardless of the batch size.",
        likely_share=0.4,
    ),
)

_BY_NAME = {remedy.name: remedy for remedy in REMEDIES}


def likely_share(finding: Finding) -> float:
    """Return the share of the possible saving that the remedy of ``finding`` usually achieves."""
    remedy = _BY_NAME.get(finding.name)
    if remedy is None:
        return 1.0
    if finding.name == "unfused" and _is_uncompiled(finding):
        return _SHARE_OF_FEWER_OPERATORS
    is_fact = not finding.may
    if is_fact and remedy.likely_share_of_fact is not None:
        return remedy.likely_share_of_fact
    return remedy.likely_share


def remedy_of(finding: Finding, record: RunRecord) -> str:
    """Return the advice for ``finding``; of a finding that only a later version knows, a sentence with its name."""
    if finding.name == "ranks" and record.ranks is not None:
        return _ranks_text(record.ranks.finding)
    remedy = _BY_NAME.get(finding.name)
    if remedy is None or not remedy.sentence:
        return f"Check {finding.name.replace('_', ' ')}."
    sentence = remedy.sentence
    if record.loop != "Trainer" and remedy.plain_sentence:
        sentence = remedy.plain_sentence
    if isinstance(sentence, str):
        return sentence
    return sentence(finding, record.settings or Settings())


def remedies(
    planned: Planned, largest_context: int | None = None
) -> list[MemoryCandidate]:
    """Return all single changes with which the planned run needs less memory, ordered by their effect on training.

    They include the largest batch that fits and the largest context that fits, if these are known.
    """
    settings: list[MemoryCandidate] = []
    for remedy in REMEDIES:
        if remedy.smaller_settings is not None:
            settings += remedy.smaller_settings(planned, largest_context)
    return sorted(settings, key=lambda setting: LEAST_FIRST.index(setting.may_change))


def combined_remedies(planned: Planned) -> list[MemoryCandidate]:
    """Return two combinations of changes: one with the least effect on training, and one that needs least memory.

    The first changes only rounding and the batch size. The second also has the lowest precision, and SGD.
    """
    # bf16-mixed first, which changes only rounding, then bf16-true
    precisions = list(narrower_precisions(planned, largest_context=None))
    rounding_only = [
        *activation_checkpointing(planned, largest_context=None),
        *fused_attention(planned, largest_context=None),
        *chunked_loss(planned, largest_context=None),
        *accumulated_batches(planned, sizes=[1]),
    ]
    least_changes = precisions[:1] + rounding_only
    needs_least = precisions[-1:] + rounding_only
    needs_least += optimizer_without_state(planned, largest_context=None)
    combinations = (least_changes, needs_least)
    return [
        _combined_candidate(settings) for settings in combinations if len(settings) > 1
    ]


def _combined_candidate(settings: Sequence[MemoryCandidate]) -> MemoryCandidate:
    """Return one setting with the options of all ``settings``, and with the effects of all of them on training."""
    options: dict[str, str] = {}
    changes: list[str] = []
    for setting in settings:
        options.update(setting.options)
        if setting.changes and setting.changes not in changes:
            changes.append(setting.changes)
    return memory_candidate(options, may_change=", ".join(changes))


def candidates_for(run: FirstRun) -> Iterator[Candidate]:
    """Yield the changes that `improve` may try on ``run``; remedies against its bottleneck come first.

    Changes that cannot work have ``refused`` set.
    """
    verdict = run.record.verdict
    bound_by = None if verdict is None else verdict.bound_by
    against_the_bound = [remedy for remedy in REMEDIES if bound_by in remedy.bounds]
    other_remedies = [remedy for remedy in REMEDIES if bound_by not in remedy.bounds]
    for remedy in against_the_bound + other_remedies:
        if remedy.candidates is not None:
            yield from remedy.candidates(run)
