"""What takes time that could be saved: a function per finding, from a run's record to findings, the likeliest first.

Each finding has the most time that it could save per step. Times are means, on a busy machine too: what happens in one
step of five, or between steps, costs its share of every step, and other programs can fake no count, no owner and no
sleep. What they do distort is left out, or reported with "may".
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from lm_profiler.analysis.remedies.catalogue import WORKERS_PER_CORE, likely_share
from lm_profiler.analysis.steps.odd_step_causes import EXPLAINED, NO_CPU, has_own_finding
from lm_profiler.record.parts import WORKING_PHASES
from lm_profiler.record.run_record import (
    CHECKPOINT,
    EPOCH,
    FIRST_BATCH,
    LIGHTNING,
    OURS,
    TRAIN_DATALOADER,
    VALIDATION,
    Finding,
    FindingName,
    OddStep,
    OutsideSteps,
    OwnedTime,
    PythonTime,
    RunRecord,
    Settings,
)

WORTH = 0.05  # the least share of the step that a finding must save to be reported

# factors for a remedy that must be tried, as a fact of equal size ranks first; and for one on a busy machine
_UNTRIED, _DOUBTED = 0.75, 0.5
_FIXED = ("zero_grad", "clip", "optimizer")
_MUCH_FIXED = 0.2  # share of the step: every step has some fixed cost
_FEW_SAMPLES, _USUAL_BATCH = 2, 8  # samples in a batch; and the size that it may at least reach, if memory allows
_SMALL_CALL_S = 50e-6  # a shorter call of torch costs more to make than to execute
_MANY_CALLS = 200
_SEVERAL = 3  # odd steps that are no chance
_LOGGERS = ("Logger", "Monitor")


@dataclass(frozen=True)
class StepCosts:
    """A run's record, with the costs of its mean step that several findings need."""

    record: RunRecord

    @cached_property
    def settings(self) -> Settings:
        return self.record.settings or Settings()

    @cached_property
    def step_s(self) -> float:
        """The mean step in the long run: with the wait for batches that a full queue hid while measuring."""
        step = self.record.time.get("step")
        measured_s = 0.0 if step is None else step.mean or 0.0
        return measured_s + self.hidden_wait_s

    @cached_property
    def hidden_wait_s(self) -> float:
        """How much longer than the measured step a step takes once no prefetched batches are left."""
        step, lasting_s = self.record.time.get("step"), self.record.lasting_step_s
        if step is None or step.mean is None or lasting_s is None:
            return 0.0
        return max(lasting_s - step.mean, 0.0)

    @cached_property
    def whole_s(self) -> float:
        """The mean step with its share of the time between steps."""
        return self.step_s + sum(passed.per_step_s for passed in self.outside if not passed.in_step)

    @cached_property
    def outside(self) -> Sequence[OutsideSteps]:
        """What passed beside the phases: in the whole run, or between the measured steps in a record before 0.3."""
        if self.record.outside:
            return self.record.outside
        steps = max(self.record.steps.get("measure", 0), 1)
        passed = [
            OutsideSteps(
                what=between.what, seconds=between.seconds, times=between.times, per_step_s=between.seconds / steps
            )
            for between in self.record.between
        ]
        named_s = sum(between.seconds for between in self.record.between)
        unnamed_s = (self.record.between_steps_s or 0.0) - named_s
        if unnamed_s > 0.0:
            passed.append(OutsideSteps(what="", seconds=unnamed_s, times=0, per_step_s=unnamed_s / steps))
        return passed

    @property
    def contended(self) -> bool:
        return self.record.contended

    @property
    def on_device(self) -> bool:
        """Whether work is queued to a device with its own clock."""
        return self.record.environment is not None and self.record.environment.device_type != "cpu"

    @cached_property
    def stretch(self) -> float:
        """The factor by which other programs lengthen what this one computes."""
        contention = self.record.contention
        lost_share = 0.0 if contention is None else contention.not_had or 0.0
        return 1.0 / (1.0 - min(lost_share, 0.9))

    def stretch_of(self, phase: str) -> float:
        """The same for what is timed on the CPU's clock in ``phase``: the mean of its time awake over its CPU time."""
        use = self.record.thread_use.get(phase)
        if use is None or use.ran_s <= 0.0:
            return self.stretch
        return max((self.mean_s(phase) - use.asleep_s) / use.ran_s, 1.0)

    def mean_s(self, part: str, clock: str = "time") -> float:
        """Return the mean seconds of ``part`` in the long run."""
        summary = getattr(self.record, clock).get(part)
        mean_s = 0.0 if summary is None else summary.mean or 0.0
        return mean_s + self.hidden_wait_s if part == "data" else mean_s

    def regular_s(self, part: str, clock: str = "host_time") -> float:
        """Return the seconds of ``part`` in a regular step.

        On a busy machine a short part takes long only if another program has the CPU: its mean says nothing, its median
        does. Use it only of parts that do the same in each step.
        """
        summary = getattr(self.record, clock).get(part)
        if summary is None or summary.mean is None:
            return 0.0
        if not self.contended or summary.median is None:
            return float(summary.mean)
        return float(min(summary.mean, summary.median * self.stretch))

    def outside_s(self, what: str) -> float:
        """Return the seconds per step that ``what`` takes beside the phases."""
        return sum(passed.per_step_s for passed in self.outside if passed.what == what)

    def term_s(self, *names: str) -> float:
        """Return the seconds of these terms of the waterfall; 0 where there is none."""
        waterfall = self.record.waterfall
        if waterfall is None:
            return 0.0
        return sum(term.seconds for term in waterfall.terms if term.name in names)

    def actions(self, is_wanted: Callable[[OwnedTime], bool]) -> list[OwnedTime]:
        """Return the owned actions of ``other`` for which ``is_wanted`` holds."""
        owned = self.record.other_by_owner
        if owned is None:
            return []
        return [action for action in owned.actions if is_wanted(action)]

    def line(self, phase: str, seconds: float) -> dict[str, Any]:
        """Return the line of the program that took most of ``seconds`` of a phase, if one did."""
        rows = [row for row in self.record.python_times if row.phase == phase]
        longest = max(rows, key=lambda row: row.seconds, default=None)
        if longest is None or longest.seconds < 0.5 * seconds:
            return {}
        return {"owner": longest.function, "file": longest.file, "line": longest.line, "what": longest.what}

    def finding(self, name: FindingName, saves_s: float, may: bool = False, **more: Any) -> Finding:
        saves_s = min(saves_s, self.whole_s)
        share = saves_s / self.whole_s if self.whole_s > 0.0 else 0.0
        return Finding.model_validate({"name": name, "saves_s": saves_s, "share": share, "may": may, **more})


Look = Callable[[StepCosts], Iterator[Finding]]


def findings_of(record: RunRecord) -> list[Finding]:
    """Return the findings worth reporting, ordered by likely saving."""
    costs = StepCosts(record)
    if costs.whole_s <= 0.0:
        return []
    worth = [finding for look in LOOKS for finding in look(costs) if finding.share >= WORTH]
    untried = _DOUBTED if costs.contended else _UNTRIED

    def likely_s(finding: Finding) -> float:
        seconds = finding.saves_s * likely_share(finding)
        return seconds * untried if finding.may else seconds

    return sorted(worth, key=likely_s, reverse=True)


def _ranks(costs: StepCosts) -> Iterator[Finding]:
    ranks = costs.record.ranks
    if ranks is None:
        return
    slow = ranks.finding
    if slow.saves_s:
        yield costs.finding("ranks", slow.saves_s, low_s=slow.low_s, high_s=slow.high_s, phase=slow.phase)


def _input(costs: StepCosts) -> Iterator[Finding]:
    """Find late batches, without those that begin an epoch: these have a finding of their own."""
    data = costs.record.time.get("data")
    if data is not None and data.mean is not None:
        saves_s = max(_regular_wait_s(costs), 0.0)
        steady = costs.record.steadiness
        has_pattern = steady is not None and steady.pattern is not None
        is_rare = (data.median or 0.0) < WORTH * costs.step_s and not has_pattern and not costs.hidden_wait_s
        more: dict[str, Any] = {"phase": "data", "facts": _workers_wanted(costs), **costs.line("data", saves_s)}
        if saves_s == data.mean:  # else the interval is of another figure
            more |= {"low_s": data.mean_low, "high_s": data.mean_high}
        yield costs.finding("input", saves_s, may=is_rare, **more)
    yield costs.finding("transfer", costs.regular_s("transfer", "time"), phase="transfer")


def _regular_wait_s(costs: StepCosts) -> float:
    """Return the wait for batches in a mean step, without the start of epochs and without waiting for a CPU."""
    without_cpu_s = sum(
        odd.cause_s or 0.0 for odd in costs.record.odd_steps if odd.cause == NO_CPU and odd.part == "data"
    )
    steps = max(costs.record.time["data"].n, 1)
    return costs.mean_s("data") - costs.outside_s(FIRST_BATCH) - without_cpu_s / steps


def _workers_wanted(costs: StepCosts) -> dict[str, float]:
    """Return how many workers would make batches as fast as the rest of the step takes them; nothing if unknown.

    Workers that compute need a core each. Those that mostly wait, for a disk or a network, do not.
    """
    workers, cores = costs.settings.num_workers, costs.settings.cores
    rest_s = costs.step_s - costs.mean_s("data")
    if workers is None or cores is None or rest_s <= 0.0:
        return {}
    # The workers make a batch per step at most: each of them then takes as many steps for one as there are workers.
    batch_s = workers * costs.step_s if workers else costs.mean_s("data")
    most = max(cores, 1)
    loader_waits = _loader_waits(costs)
    if loader_waits:
        most *= WORKERS_PER_CORE
    wanted = min(max(math.ceil(batch_s / rest_s), 1), most)
    return {"workers": float(wanted), "waits": float(loader_waits)}


def _loader_waits(costs: StepCosts) -> bool:
    """Whether whoever makes the batches mostly sleeps."""
    loader, use = costs.record.loader, costs.record.thread_use.get("data")
    if costs.settings.num_workers:
        return loader is not None and loader.awake_share is not None and loader.awake_share < 0.5
    return use is not None and use.wall_s > 0.0 and use.asleep_s >= 0.5 * use.wall_s


def _between(costs: StepCosts) -> Iterator[Finding]:
    """Find validation, checkpoints and the start of epochs, whether or not they count in a step's time."""
    yield costs.finding("validation", costs.outside_s(VALIDATION))
    yield costs.finding("checkpoint", costs.outside_s(CHECKPOINT))
    for passed in costs.outside:
        if passed.owner is not None and passed.what != TRAIN_DATALOADER:
            yield costs.finding("owner", passed.per_step_s, owner=passed.owner)
    makers = [passed for passed in costs.outside if passed.what == TRAIN_DATALOADER]
    for maker in makers:
        yield costs.finding("reload", maker.per_step_s, owner=maker.owner)
    # What a new epoch costs beside its loader: the loop's own end and beginning, and new workers' first batch.
    first_batch_s, turn_s = costs.outside_s(FIRST_BATCH), costs.outside_s(EPOCH)
    if costs.settings.num_workers and not costs.settings.persistent_workers and not makers:
        yield costs.finding("worker_start", turn_s + first_batch_s)
    elif makers:
        yield costs.finding("epoch", turn_s)
    else:
        yield costs.finding("epoch", turn_s + first_batch_s)


def _owners(costs: StepCosts) -> Iterator[Finding]:
    """Find owners of ``other``: callbacks, loggers, hooks of the module. Checkpoints are a separate finding."""
    checkpoints_known = costs.outside_s(CHECKPOINT) > 0.0

    def is_the_programs(action: OwnedTime) -> bool:
        saves = action.owner.endswith("Checkpoint") or action.action == "save_checkpoint"
        return action.owner != OURS and not _is_the_loops(action) and not (checkpoints_known and saves)

    by_owner: defaultdict[str, float] = defaultdict(float)
    longest: dict[str, str] = {}
    for action in costs.actions(is_the_programs):
        by_owner[action.owner] += _own_s(action, costs.contended)
        longest.setdefault(action.owner, action.name)
    # The measured steps show how long ``other`` is, the few steps timed by action how it divides.
    if costs.contended:  # where each action is timed in its fastest step: other programs lengthen all alike
        timed_s = sum(_own_s(action, True) for action in costs.actions(lambda action: action.owner != OURS))
        scale = costs.mean_s("other", "host_time") / timed_s if timed_s > 0.0 else 1.0
    else:  # some actions run every few steps, and were timed more often than they happen
        timed_s = sum(by_owner.values())
        scale = min(costs.mean_s("other", "host_time") / timed_s, 1.0) if timed_s > 0.0 else 1.0
    for owner, seconds in by_owner.items():
        logs = owner.endswith(_LOGGERS) or owner == LIGHTNING
        place = {} if logs else costs.line("other", seconds)
        name: FindingName = "logging" if logs else "owner"
        yield costs.finding(name, seconds * scale, **{"phase": "other", **place, "owner": longest[owner]})


def _own_s(action: OwnedTime, contended: bool) -> float:
    if contended and action.least_s is not None:
        return action.least_s
    return action.seconds


def _is_the_loops(action: OwnedTime) -> bool:
    return action.owner == LIGHTNING and action.action != "logged metrics"


def _python(costs: StepCosts) -> Iterator[Finding]:
    """Find functions of the program that sleep, compute outside of torch, or call torch too often."""
    # With a device, it can matter only if the device is idle for a tenth of the step.
    if costs.on_device and costs.term_s("gaps") < 0.1 * costs.step_s:
        return
    by_function: defaultdict[tuple[str, str, str], list[PythonTime]] = defaultdict(list)
    for row in costs.record.python_times:
        if row.phase in WORKING_PHASES:
            by_function[row.phase, row.file, row.function].append(row)
    for (phase, file, function), rows in by_function.items():
        longest = max(rows, key=_outside_torch)
        waits_s = sum(row.seconds for row in rows if _is_timed_by_the_clock(row))
        computes_s = sum(_outside_torch(row) for row in rows if not _is_timed_by_the_clock(row))
        if costs.contended:
            computes_s *= costs.stretch_of(phase)
        seconds = min(waits_s + computes_s, costs.mean_s(phase))
        use = costs.record.thread_use.get(phase)
        mostly_waits = waits_s > 0.5 * seconds
        sleeps = use is not None and mostly_waits and use.asleep_s >= 0.5 * waits_s
        name: FindingName = "python"
        if sleeps:
            name = "sleep"
        elif longest.what == LIGHTNING:
            name = "logging"
        # The clock's time of a C function may include other programs.
        may = costs.contended and not sleeps and mostly_waits
        place = {"phase": phase, "owner": function, "file": file, "line": longest.line, "what": longest.what}
        yield costs.finding(name, seconds, may, facts={"calls": float(longest.calls)}, **place)


def _is_timed_by_the_clock(row: PythonTime) -> bool:
    """Whether ``row`` is a C function, such as ``time.sleep``: it may wait, so that its CPU time says little."""
    return "." in row.what


def _outside_torch(row: PythonTime) -> float:
    """Return the seconds outside of torch and libraries; calls of torch that are too short count as outside."""
    if row.what == "torch":
        are_too_short = row.calls >= _MANY_CALLS and row.seconds / row.calls < _SMALL_CALL_S
        return row.seconds if are_too_short else 0.0
    return 0.0 if row.what == "library" else row.seconds


def _asleep(costs: StepCosts) -> Iterator[Finding]:
    """Find phases in which the thread sleeps and no line of the program is known as the cause."""
    if costs.on_device or len(costs.record.rank_step_s) > 1:  # it then waits for the device, or for other ranks
        return
    phases_with_a_line = {row.phase for row in costs.record.python_times}
    for phase, use in costs.record.thread_use.items():
        if phase not in WORKING_PHASES or phase in phases_with_a_line or not use.wall_s:
            continue
        # An operator's threads wait for each other, and longer if other programs use the cores.
        yield costs.finding("sleep", costs.mean_s(phase) * use.asleep_s / use.wall_s, may=True, phase=phase)


def _pattern(costs: StepCosts) -> Iterator[Finding]:
    """Find that every n-th step takes longer, in a part without another finding."""
    steady = costs.record.steadiness
    if steady is None or steady.pattern is None or not steady.pattern_s or steady.pattern_s < 0.0:
        return
    pattern, mean = steady.pattern, costs.record.mean_counters
    if pattern.short_batch or _is_explained(costs, pattern.part):
        return
    counted_s = 0.0 if mean is None else (mean.gc_s or 0.0) + (mean.compile_s or 0.0)
    if counted_s >= EXPLAINED * steady.pattern_s:  # and has a finding of its own
        return
    yield costs.finding("pattern", steady.pattern_s, phase=pattern.part, facts={"every": float(pattern.every)})


def _odd_steps(costs: StepCosts) -> Iterator[Finding]:
    """Find steps far above the others, of a cause that has no other finding; other programs are none of the run's."""
    steady = costs.record.steadiness
    slow = [odd for odd in costs.record.odd_steps if odd.ratio > 1.0]
    excess_s = sum(map(_excess_s, slow))
    if steady is None or not steady.odd_s or excess_s <= 0.0:
        return
    unexplained = [odd for odd in slow if not has_own_finding(odd.cause) and not _is_explained(costs, odd.part)]
    if not unexplained:
        return
    share = sum(map(_excess_s, unexplained)) / excess_s
    worst = max(unexplained, key=_excess_s)
    facts = {"steps": float(len(unexplained)), "step": float(worst.step), "seconds": worst.step_s}
    may = len(unexplained) < _SEVERAL  # they need not come again
    yield costs.finding("odd_steps", steady.odd_s * share, may, phase=worst.part, what=worst.cause, facts=facts)


def _excess_s(odd: OddStep) -> float:
    return odd.step_s - odd.step_s / odd.ratio


def _is_explained(costs: StepCosts, part: str | None) -> bool:
    """Return whether another finding is about what varies in ``part``."""
    if part in ("data", "transfer"):
        return True
    if part != "other":
        return False
    return any(finding.share >= WORTH for finding in (*_owners(costs), *_between(costs)))


def _counters(costs: StepCosts) -> Iterator[Finding]:
    mean = costs.record.mean_counters
    if mean is None:
        return
    if mean.gc_s:
        # What the program collects itself has an owner.
        explicit_s = sum(row.seconds for row in costs.record.python_times if row.what == "gc.collect")
        own_s = mean.gc_own_s or 0.0
        yield costs.finding("garbage", max(mean.gc_s - own_s - explicit_s, 0.0))
    if mean.compile_s:
        yield costs.finding("compilation", mean.compile_s, owner=mean.compiled)


def _checks(costs: StepCosts) -> Iterator[Finding]:
    """Find checks for errors that are switched on and cost time."""
    compute_s = sum(costs.mean_s(part) for part in ("forward", "backward"))
    if costs.settings.anomalies:
        yield costs.finding("anomalies", compute_s)
    if costs.settings.profiler is not None:
        yield costs.finding("profiler", costs.step_s, may=True, owner=costs.settings.profiler)


def _sync(costs: StepCosts) -> Iterator[Finding]:
    """Find lines that make the host wait for the device, by the gaps that they leave."""
    waterfall, syncs = costs.record.waterfall, costs.record.syncs
    if waterfall is None or not syncs:
        return
    waits_s = 0.0
    for term in waterfall.terms:
        if term.name == "gaps":
            waits_s += sum(part.seconds for part in term.contributors if "ync" in part.what or "cpy" in part.what)
    worst = max(syncs, key=lambda sync: sync.count)
    where: dict[str, Any] = {"file": worst.file, "line": worst.line, "what": worst.call or worst.function}
    yield costs.finding("sync", waits_s, **where)


def _small_batch(costs: StepCosts) -> Iterator[Finding]:
    """Find the cost of a step that does not depend on the batch: k times the samples leave 1/k of it per sample."""
    fixed_s = sum(costs.regular_s(part) for part in _FIXED)
    if not costs.contended:  # contention stretches gaps, and all else that is known only as a mean
        fixed_s += max(costs.term_s("gaps") - sum(finding.saves_s for finding in _python(costs)), 0.0)
        fixed_s += sum(action.seconds for action in costs.actions(_is_the_loops))
    free_share, samples = costs.settings.memory_free_share, costs.settings.samples_per_batch
    if fixed_s < _MUCH_FIXED * costs.step_s or (free_share is not None and free_share < 0.1):
        return
    times = 2.0 if not samples else max(_USUAL_BATCH / samples, 2.0)
    if free_share is not None:
        times = max(min(times, 1.0 / (1.0 - free_share)), 2.0)
    facts = {}
    for name in ("tokens_per_batch", "samples_per_batch"):
        count = getattr(costs.settings, name)
        if count is not None:
            facts[name] = float(count)
    # One or two samples are few for any model with so much fixed cost.
    few = samples is not None and samples <= _FEW_SAMPLES and times > 2.0
    saves_s = min(fixed_s, costs.step_s) * (1.0 - 1.0 / times)
    yield costs.finding("small_batch", saves_s, may=not few, facts=facts)


def _optimizer(costs: StepCosts) -> Iterator[Finding]:
    """Find an optimizer with many kernels; it is a fact if the user asked for them (``foreach=False``).

    A fused one still has to move its bytes. On a busy machine, its rate is not known well enough.
    """
    by_weight, floor = costs.settings.weight_by_weight, costs.record.floors.get("optimizer")
    least_s = 0.0
    if floor is not None and not costs.contended:
        least_s = floor.seconds or 0.0
    if costs.settings.fused_optimizer is False or (by_weight and costs.on_device):
        saves_s = max(costs.regular_s("optimizer") - least_s, 0.0)
        yield costs.finding("optimizer", saves_s, may=not by_weight, phase="optimizer")
    clip_s = costs.regular_s("clip")
    if clip_s >= 2 * WORTH * costs.whole_s:
        yield costs.finding("clip", clip_s, may=True, phase="clip")


def _compile(costs: StepCosts) -> Iterator[Finding]:
    """Find gaps and memory traffic that fusing saves; nothing if neither is known, or contention had a part."""
    waterfall = costs.record.waterfall
    if costs.settings.compiled is not False or waterfall is None or costs.contended:
        return
    fused_s = 0.0
    for term in waterfall.terms:
        if term.name not in ("gaps", "bandwidth", "beyond_bandwidth"):
            continue
        in_model_s = sum(term.phases.get(part, 0.0) for part in ("forward", "backward"))
        fused_s += in_model_s if term.phases else term.seconds
    explained_s = sum(finding.saves_s for finding in (*_python(costs), *_asleep(costs)))
    yield costs.finding("compile", max(fused_s - explained_s, 0.0), may=True)


def _precision(costs: StepCosts) -> Iterator[Finding]:
    """Find matmuls in more bits than needed; on a busy machine only their time at the peak is certain."""
    settings, use = costs.settings, costs.record.utilisation
    products_s = costs.term_s("ideal")
    if not costs.contended:
        products_s = costs.term_s("ideal", "slow_products", "clock")
    if costs.record.waterfall is None and use is not None:
        products_s = (use.of_ceiling or use.hfu or 0.0) * (costs.step_s - costs.hidden_wait_s)
    if settings.precision == "float64" or str(settings.precision).startswith("64"):
        # Twice the bytes, and half the FLOP/s at best: in float32, computing takes at most half as long.
        yield costs.finding("double", products_s or sum(map(costs.mean_s, WORKING_PHASES)) / 2.0)
    elif settings.full_precision and settings.half_precision:
        yield costs.finding("precision", products_s, may=True, what=settings.half_precision)
    if settings.full_precision and settings.tf32 is False and costs.on_device:
        yield costs.finding("tf32", products_s, may=True)


def _recomputation(costs: StepCosts) -> Iterator[Finding]:
    free_share = costs.settings.memory_free_share
    if costs.settings.checkpointing and (free_share is None or free_share >= 0.3):
        yield costs.finding("recomputation", costs.term_s("recomputation"), may=free_share is None)


def _communication(costs: StepCosts) -> Iterator[Finding]:
    ranks = costs.record.ranks
    exposed_s = 0.0 if ranks is None else sum(ranks.exposed_s.values())
    yield costs.finding("communication", exposed_s or costs.term_s("communication"), may=True)


LOOKS: Sequence[Look] = (
    *(_ranks, _input, _between, _owners, _python, _asleep, _pattern, _odd_steps, _counters, _checks, _sync),
    *(_small_batch, _optimizer, _compile, _precision, _recomputation, _communication),
)
