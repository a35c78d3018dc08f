"""Finds time that batches cost: waiting for them, moving them to the device, and padding in them."""

from __future__ import annotations

import math
from collections.abc import Iterator

from lm_profiler.analysis.remedies.catalogue import WORKERS_PER_CORE
from lm_profiler.analysis.savings.step_costs import MODEL_PHASES, WORTH, StepCosts
from lm_profiler.analysis.steps.odd_step_causes import GARBAGE
from lm_profiler.record.run_record import FIRST_BATCH, NO_CPU, Finding

# The share of the padding's time that batches of similar lengths save: some padding remains, and small operators take
# as long with fewer positions. Of the pairs of a preference data set it was half.
_SAVED_BY_SIMILAR_LENGTHS = 0.6
# A smaller share of a step may only seem to be hidden by prefetched batches, because a batch is counted as a whole.
_LEAST_HIDDEN_WAIT = 0.2


def find_late_batches(costs: StepCosts) -> Iterator[Finding]:
    """Find waits for batches.

    The wait for the first batch of an epoch has a finding of its own.
    """
    data = costs.record.time.get("data")
    if data is None or data.mean is None:
        return
    saves_s = max(_regular_wait_s(costs), 0.0)
    # the code to make faster: the first of these that is known
    code = (
        costs.main_line_of_workers(saves_s)
        or costs.main_line("data", saves_s)
        or costs.line_of_items()
        or costs.main_data_call()
    )
    facts = _suggested_workers(costs)
    if costs.settings.num_workers is None and _is_thread_busy(costs):
        facts["made_in_thread"] = 1.0
    if code is not None:
        package = costs.main_package(code)
        if package is not None:
            name, facts["package_share"] = package
            code = code._replace(what=name)
        if costs.is_mostly_in_other_code(code):
            facts["in_other_code"] = 1.0
        makes_one_sample = str(code.owner).endswith(".__getitem__")
        if makes_one_sample:
            facts.update(_time_of_sample(costs, saves_s))

    median_is_small = (data.median or 0.0) < WORTH * costs.step_s
    # How often rare waits come is uncertain. Those of a pattern, or hidden by prefetching, are not rare.
    is_rare = median_is_small and not costs.has_pattern and not costs.hidden_wait_s
    # In the training process, loading would take as long as receiving batches from workers.
    is_as_slow_without_workers = facts.get("loading_s", 0.0) >= saves_s
    may = is_rare or is_as_slow_without_workers
    yield costs.finding("input", saves_s, may, code, phase="data", facts=facts)


def find_slow_transfers(costs: StepCosts) -> Iterator[Finding]:
    """Find slow copies of batches to the device, or a slow function of the program that moves batches."""
    copy_s = costs.regular_s("transfer", clock="time")
    function = costs.main_line("transfer", copy_s)
    # on a device, the line may be the copy itself
    if function is not None and not costs.on_device:
        function = function._replace(what=None)
        yield costs.finding("owner", copy_s, code=function, phase="transfer")
    else:
        yield costs.finding("transfer", copy_s, phase="transfer")


def _regular_wait_s(costs: StepCosts) -> float:
    """Return the mean wait for batches per step that the loader causes.

    The first batches of epochs and garbage collections have findings of their own. Waits for a CPU are due to others.
    """
    other_causes_s = 0.0
    for odd in costs.record.odd_steps:
        is_of_other_cause = odd.cause == NO_CPU or (odd.cause or "").startswith(GARBAGE)
        if is_of_other_cause and odd.part == "data":
            other_causes_s += odd.cause_s or 0.0
    steps = max(costs.record.time["data"].n, 1)
    wait_s = (
        costs.mean_s("data") - costs.outside_s(FIRST_BATCH) - other_causes_s / steps
    )
    if costs.contended and costs.settings.num_workers:
        # While the training thread is ready to run, the next batch may be ready, too: the loader is not slow.
        wait_s *= 1.0 - _share_without_cpu(costs)
    return wait_s


def _share_without_cpu(costs: StepCosts) -> float:
    """Return the share of the data phase in which the training thread was ready to run but had no CPU."""
    use = costs.record.thread_use.get("data")
    if use is None or use.wall_s <= 0.0:
        return 0.0
    return min(use.no_cpu_s / use.wall_s, 1.0)


def _suggested_workers(costs: StepCosts) -> dict[str, float]:
    """Return the facts of a finding about the loader: how many workers would keep up with the rest of the step.

    ``workers`` is their number, and ``waits`` is 1 if they mostly wait for a disk or a network. If more workers would
    not help, there are two other facts: ``takes_over`` is 1, and ``loading_s`` is how long they compute for a batch.
    Empty if the number of workers or cores is unknown.
    """
    workers = costs.settings.num_workers
    cores = costs.settings.cores
    rest_s = costs.step_s - costs.mean_s("data")
    if workers is None or cores is None or rest_s <= 0.0:
        return {}
    # Workers that compute most of the time are too slow, whatever the training thread does meanwhile.
    has_free_workers = (
        workers > 0 and not _workers_are_busy(costs) and not _empties_queue(costs)
    )
    if has_free_workers and (_is_thread_busy(costs) or _keeps_queue_full(costs)):
        return {"takes_over": 1.0, "loading_s": _loading_s(costs)}
    # n workers together deliver one batch per step, so that one worker needs n steps for a batch.
    batch_s = workers * costs.step_s if workers else costs.mean_s("data")
    # Workers that compute need a core each. Those that mostly wait do not.
    workers_limit = max(cores, 1)
    loader_waits = _loader_waits(costs)
    if loader_waits:
        workers_limit *= WORKERS_PER_CORE
    workers_needed = max(math.ceil(batch_s / rest_s), 1)
    return {
        "workers": float(min(workers_needed, workers_limit)),
        "waits": float(loader_waits),
    }


def _time_of_sample(costs: StepCosts, wait_s: float) -> dict[str, float]:
    """Return the fact of a finding about the loader how long a sample takes; empty if that is unknown, or mostly sleep.

    ``wait_s`` is the wait for a batch.
    """
    samples = costs.settings.samples_per_batch
    if not samples or _loader_waits(costs):
        return {}
    workers = costs.settings.num_workers
    batch_s = _loading_s(costs) if workers else wait_s
    return {"sample_s": batch_s / samples} if batch_s > 0.0 else {}


def _loading_s(costs: StepCosts) -> float:
    """Return the seconds for which a worker computes for a batch; 0 if that is unknown."""
    code_s = sum(row.seconds for row in costs.record.worker_times)
    loader = costs.record.loader
    if loader is None or loader.awake_share is None or not loader.workers:
        return code_s
    awake_s = loader.awake_share * loader.workers * costs.step_s
    return max(awake_s, code_s)


def _workers_are_busy(costs: StepCosts) -> bool:
    """Return whether the workers compute, or are ready to, at least half of the time; False if that is unknown."""
    loader = costs.record.loader
    return (
        loader is not None
        and loader.awake_share is not None
        and loader.awake_share >= 0.5
    )


def _is_thread_busy(costs: StepCosts) -> bool:
    """Return whether the training thread runs, rather than sleeps, most of the data phase; False if that is unknown.

    If the loader has workers, the thread then rebuilds the tensors that they send, which more workers do not speed up.
    """
    use = costs.record.thread_use.get("data")
    if use is None:
        return False
    # The time in which the thread was ready to run but had no CPU is left out: other programs cause it.
    ran_or_slept_s = use.wall_s - use.no_cpu_s
    return ran_or_slept_s > 0.0 and use.ran_s >= 0.5 * ran_or_slept_s


def _empties_queue(costs: StepCosts) -> bool:
    """Return whether the loop took batches so much faster than the workers make them that it will have to wait."""
    return costs.hidden_wait_s >= _LEAST_HIDDEN_WAIT * costs.step_s


def _keeps_queue_full(costs: StepCosts) -> bool:
    """Return whether at least half of the batches that workers load ahead were ready before and after the steps."""
    loader = costs.record.loader
    if loader is None or not loader.ahead:
        return False
    ready = min(loader.ready_before or 0, loader.ready_after or 0)
    return ready >= 0.5 * loader.ahead


def _loader_waits(costs: StepCosts) -> bool:
    """Return whether the process that loads the batches (a worker, or else the training process) mostly sleeps."""
    if costs.settings.num_workers:
        loader = costs.record.loader
        return (
            loader is not None
            and loader.awake_share is not None
            and loader.awake_share < 0.5
        )
    use = costs.record.thread_use.get("data")
    return use is not None and use.wall_s > 0.0 and use.asleep_s >= 0.5 * use.wall_s


def find_padding(costs: StepCosts) -> Iterator[Finding]:
    """Find batches padded beyond their longest sequence, and batches of sequences with very different lengths.

    Different lengths are found only if the lengths of the sequences are known: labels that the loss ignores need not be
    padding, except at the end of all sequences of a batch.
    """
    rate = costs.record.throughput
    if rate is None or rate.unused_share is None:
        return
    compute_s = sum(costs.mean_s(phase) for phase in MODEL_PHASES)
    padding_share = rate.unused_share
    saved_share = rate.unused_share
    lengths_are_known = rate.squared_lengths_per_step is not None
    if lengths_are_known and rate.occupancy is not None:
        padding_share = max(1.0 - rate.occupancy, rate.unused_share)
        among_others_share = padding_share - rate.unused_share
        saved_share += _SAVED_BY_SIMILAR_LENGTHS * among_others_share
    yield costs.finding(
        "padding",
        saved_share * compute_s,
        high_s=padding_share * compute_s,
        may=True,
        phase="forward",
        facts={"padding": padding_share, "unused": rate.unused_share},
    )
