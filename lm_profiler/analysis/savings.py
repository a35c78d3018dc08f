"""Finds time that could be saved: one function per finding. Findings are ordered by the time that they likely save.

``Finding.saves_s`` is the most time that could be saved per step. It is a mean over all steps: a delay in every fifth
step, or between steps, costs each step its share. On a busy machine, other programs cannot distort counts, owners and
sleep. Figures that they can distort are left out, or reported with "may".
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, cast, get_args

from lm_profiler.analysis.remedies.catalogue import WORKERS_PER_CORE, likely_share
from lm_profiler.analysis.steps.odd_step_causes import (
    EXPLAINED,
    GARBAGE,
    NO_CPU,
    has_own_finding,
)
from lm_profiler.record.findings import PLACE_REASONS
from lm_profiler.record.parts import WORKING_PHASES
from lm_profiler.record.run_record import (
    CHECKPOINT,
    EPOCH,
    FIRST_BATCH,
    FIRST_STEP,
    LIGHTNING,
    OURS,
    TRAIN_DATALOADER,
    VALIDATION,
    Finding,
    FindingName,
    ForwardKind,
    NeedlessKind,
    NeedlessOperators,
    NeedlessReason,
    NeedlessWork,
    OddStep,
    OutsideSteps,
    OwnedTime,
    PythonTime,
    RunRecord,
    Settings,
    Term,
)

WORTH = 0.05  # the least share of the step that a finding must save to be reported

# A cause may cost more than its own time (waking up, cold caches), and runs differ. By this share the gain of a remedy
# may exceed the mean cost: in three of eleven programs it was 21 to 27 %.
_RUN_TOLERANCE = 0.25
# the same with the uncertainty of the mean added: an upper limit that is wider has no meaning
_LARGEST_TOLERANCE = 0.35
# Recomputation runs forward again with additional bookkeeping on cold caches: without it, a step was shorter by 1.27
# times the time of forward.
_RECOMPUTING_FACTOR = 1.3
# the share of forward's time by its share of the FLOPs, for the blocks of a model without its logits
_TIME_PER_FLOPS_SHARE = 1.3

# Findings whose remedy must be tried ("may") are ranked by this share of their saving, so that a certain finding of
# equal size comes first.
_TRIAL_FACTOR = 0.75
# The same on a busy machine, where other programs lengthen what the finding goes by. The data flow of a step is the
# same on any machine.
_BUSY_TRIAL_FACTOR = 0.5
# phases whose time does not depend on the batch size
_FIXED_PHASES = ("zero_grad", "clip", "optimizer")
_LARGE_FIXED_SHARE = 0.2  # of the step: a smaller fixed cost is normal
_FEW_SAMPLES = 2  # in a batch
# calls the model and backward itself, several times per step
CLOSURE_OPTIMIZER = "LBFGS"
_ITEM_METHODS = (".__getitem__", ".__getitems__", ".__iter__")  # of a dataset
_DISPATCH_MODE = (
    "PythonDispatchMode"  # torch's name of the code of such a mode in a trace
)
# A mode costs more than its own code: without FlopCounterMode, a step was shorter by 1.9 times that.
_DISPATCH_MODE_FACTOR = 2.0
# samples: a smaller batch is expected to grow to this size, if memory allows
_USUAL_BATCH = 8
_RARE_SHARE = 0.05  # of the steps: those beyond the 95th percentile
_SMALL_CALL_S = 50e-6  # a torch call shorter than this is mostly call overhead
_MANY_CALLS = 200  # of one operator in a step
_MANY_GROUPS = 16  # of parameters: fewer cost little
_LASTING_COUNT = 3  # so many odd steps are not a coincidence
_LOGGER_ENDINGS = ("Logger", "Monitor")  # of class names
_MODEL_PHASES = ("forward", "backward")
# the largest share of the time in float64 that float32 may save
_MOST_SHARE_OF_DOUBLE = 0.75
# terms of the waterfall whose operators can be fused
_FUSABLE_TERMS = ("bandwidth", "beyond_bandwidth")
_COSTLY_SHARE = 0.1  # of the step: an operator with this share is named in the advice
# of the Python time recorded in a phase: all gaps of the phase are attributed to a function with this share
_MAIN_SHARE = 0.75
_TRACEBACK = "traceback"  # the package in which anomaly detection spends its time
# the kinds of needless work with which the trace reports the same problem
_TRACED_KINDS: dict[NeedlessReason, tuple[NeedlessKind, ...]] = {
    "repeated": ("repeated_forward", "repeated_backward"),
    "unused": ("unused_gradients",),
    "broadcast": ("broadcast",),
}
_SURELY_MORE = 1.2  # a factor by which a traced time must exceed a limit
# The trace, which names the module, is preferred if it shows at least this share of what the data flow shows.
_ENOUGH_IN_TRACE = 0.6
_CERTAINLY_NEEDLESS = ("unused", "constant")
_DATA_FLOW_REASONS = get_args(NeedlessReason)
# The share of the optimizer's time that fused=True saves on a CPU: 64 to 82 % with Adam and AdamW, 9 to 84 % with SGD,
# more of it with momentum (models of 0.1 to 10 million parameters).
_SAVED_BY_FUSING_ON_CPU = 0.75
_SAVED_BY_FUSING_SGD_ON_CPU = 0.6
# The share of the fusable time that torch.compile saves on a CPU: 0 to 48 % in four small models.
_SAVED_BY_COMPILING_ON_CPU = 0.5
# By this factor the saving may exceed its estimate: the share of needless operators was measured in a single step.
_NEEDLESS_TOLERANCE = 1.35
# The same for float64, which may take more than twice as long as float32.
_DOUBLE_TOLERANCE = 1.5
_PYTHON = "python"  # `PythonTime.what` of a line that calls nothing


@dataclass(frozen=True)
class StepCosts:
    """A run's record, and the costs of its mean step that several finders use."""

    record: RunRecord

    @cached_property
    def settings(self) -> Settings:
        return self.record.settings or Settings()

    @cached_property
    def step_s(self) -> float:
        """The mean step in the long run, with the wait for batches that prefetched batches hid while measuring."""
        step = self.record.time.get("step")
        if step is None or step.mean is None:
            return self.hidden_wait_s
        return step.mean + self.hidden_wait_s

    @cached_property
    def hidden_wait_s(self) -> float:
        """The time by which a step becomes longer once the batches prefetched before the measurement are used up."""
        step = self.record.time.get("step")
        lasting_s = self.record.lasting_step_s
        if step is None or step.mean is None or lasting_s is None:
            return 0.0
        return max(lasting_s - step.mean, 0.0)

    @cached_property
    def whole_s(self) -> float:
        """The mean step with its share of the time between steps."""
        between_steps_s = sum(
            passed.per_step_s for passed in self.outside_steps if not passed.in_step
        )
        return self.step_s + between_steps_s

    @cached_property
    def outside_steps(self) -> Sequence[OutsideSteps]:
        """The time outside the phases, over the whole run.

        Records of versions before 0.3 hold it only for the measured steps.
        """
        if self.record.outside:
            return self.record.outside
        steps = max(self.record.steps.get("measure", 0), 1)
        all_passed: list[OutsideSteps] = []
        named_s = 0.0
        for named in self.record.between:
            per_step_s = named.seconds / steps
            passed = OutsideSteps(
                what=named.what,
                seconds=named.seconds,
                times=named.times,
                per_step_s=per_step_s,
            )
            all_passed.append(passed)
            named_s += named.seconds
        unnamed_s = (self.record.between_steps_s or 0.0) - named_s
        if unnamed_s > 0.0:
            all_passed.append(
                OutsideSteps(
                    what="", seconds=unnamed_s, times=0, per_step_s=unnamed_s / steps
                )
            )
        return all_passed

    @cached_property
    def tolerance(self) -> float:
        """The share by which a mean cost measured in this run may be too low (with 95 % confidence)."""
        step = self.record.time.get("step")
        if (
            step is None
            or step.mean_low is None
            or step.mean_high is None
            or not step.mean
        ):
            return _RUN_TOLERANCE
        uncertain_share = (step.mean_high - step.mean_low) / 2.0 / step.mean
        return min(_RUN_TOLERANCE + uncertain_share, _LARGEST_TOLERANCE)

    @property
    def contended(self) -> bool:
        return self.record.contended

    @property
    def has_pattern(self) -> bool:
        """Whether some of the steps are longer than others at regular distances."""
        steady = self.record.steadiness
        return steady is not None and steady.pattern is not None

    @property
    def on_device(self) -> bool:
        """Whether the work is queued on a device, such as a GPU, and not executed by the CPU."""
        return (
            self.record.environment is not None
            and self.record.environment.device_type != "cpu"
        )

    @cached_property
    def slowdown(self) -> float:
        """The factor by which other programs lengthen the computations of this one."""
        contention = self.record.contention
        if contention is None or contention.not_had is None:
            return 1.0
        lost_share = min(contention.not_had, 0.9)
        return 1.0 / (1.0 - lost_share)

    def slowdown_in(self, phase: str) -> float:
        """The same factor for CPU times in ``phase``: the time that its thread was awake over the thread's CPU time."""
        use = self.record.thread_use.get(phase)
        if use is None or use.ran_s <= 0.0:
            return self.slowdown
        awake_s = self.mean_s(phase) - use.asleep_s
        return max(awake_s / use.ran_s, 1.0)

    def mean_s(self, part: str, clock: str = "time") -> float:
        """Return the mean seconds of ``part`` in the long run; ``clock`` is the field of the record with its times."""
        mean_s = 0.0
        summary = getattr(self.record, clock).get(part)
        if summary is not None and summary.mean is not None:
            mean_s = summary.mean
        if part == "data":
            mean_s += self.hidden_wait_s
        return mean_s

    def regular_s(self, part: str, clock: str = "host_time") -> float:
        """Return the seconds that ``part`` takes in a step without disturbance.

        On a busy machine the mean of a short part is dominated by steps in which another program had the CPU, so the
        median and the CPU time are used, too. Call it only for parts that do the same in each step.
        """
        summary = getattr(self.record, clock).get(part)
        if summary is None or summary.mean is None:
            return 0.0
        if not self.contended or summary.median is None:
            return float(summary.mean)
        regular_s = min(summary.mean, summary.median * self.slowdown)
        cpu_share = self._cpu_share_of(part)
        if cpu_share is not None and not self.on_device:
            regular_s = min(regular_s, cpu_share * self.mean_s("step"))
        return float(regular_s)

    def _cpu_share_of(self, phase: str) -> float | None:
        """Return the share of a step's CPU time of the training thread that ``phase`` has; None if it is unknown."""
        phase_use = self.record.thread_use.get(phase)
        step_ran_s = sum(use.ran_s for use in self.record.thread_use.values())
        if phase_use is None or step_ran_s <= 0.0:
            return None
        return phase_use.ran_s / step_ran_s

    def outside_s(self, event: str) -> float:
        """Return the seconds per step that ``event``, such as validation, takes outside the phases."""
        return sum(
            passed.per_step_s for passed in self.outside_steps if passed.what == event
        )

    def times_per_step(self, event: str) -> float | None:
        """Return how often ``event`` takes place per step, in the long run; None if it did not, or took no time."""
        for passed in self.outside_steps:
            if passed.what == event and passed.seconds > 0.0:
                return passed.times * passed.per_step_s / passed.seconds
        return None

    def is_rarely_longer(self, part: str, seconds: float) -> bool:
        """Return whether fewer than ``_RARE_SHARE`` of the steps have ``part`` longer by about ``seconds``."""
        summary = self.record.host_time.get(part)
        if summary is None or summary.median is None or summary.p95 is None:
            return False
        return summary.p95 - summary.median < 0.5 * seconds

    def term_s(self, *names: str) -> float:
        """Return the seconds of these terms of the waterfall; 0 if there is none."""
        waterfall = self.record.waterfall
        if waterfall is None:
            return 0.0
        return sum(term.seconds for term in waterfall.terms if term.name in names)

    def gap_s(self, phase: str) -> float:
        """Return the seconds of ``phase`` in which no operator ran, by the waterfall; infinite without a waterfall.

        This is the upper limit of the time of Python code: the time of a line such as ``x * y`` includes the operator
        on its tensors, because Python's profiler does not see it as a call. Operators that are called hundreds of times
        outside of modules and are very short count as gaps too: they are mostly call overhead.
        """
        waterfall = self.record.waterfall
        if waterfall is None or not waterfall.terms:
            return math.inf
        seconds = 0.0
        for term in waterfall.terms:
            if term.name == "gaps":
                seconds += term.phases.get(phase, 0.0) if term.phases else term.seconds
            elif term.name in ("bandwidth", "beyond_bandwidth"):
                seconds += _short_operators_s(term, phase)
        return seconds

    def actions(self, is_wanted: Callable[[OwnedTime], bool]) -> list[OwnedTime]:
        """Return the timed actions of ``other`` for which ``is_wanted`` is true."""
        owned = self.record.other_by_owner
        if owned is None:
            return []
        return [action for action in owned.actions if is_wanted(action)]

    def rows_of_functions(self, phases: Collection[str]) -> list[list[PythonTime]]:
        """Return one list for each function of the program in each of ``phases``: its rows of recorded Python time."""
        by_function = defaultdict[tuple[str, str, str], list[PythonTime]](list)
        for row in self.record.python_times:
            if row.phase in phases:
                by_function[row.phase, row.file, row.function].append(row)
        return [*by_function.values()]

    def main_line(self, phase: str, seconds: float) -> dict[str, Any]:
        """Return the fields of a finding that name the function which took at least half of ``seconds`` in ``phase``.

        The line named is the one of the function that took longest. Empty if no function took half.
        """
        costliest: list[PythonTime] = []
        most_s = 0.0
        for rows in self.rows_of_functions([phase]):
            function_s = sum(row.seconds for row in rows)
            if function_s > most_s:
                costliest = rows
                most_s = function_s
        # other programs lengthen the measured steps, but not the step in which Python was recorded
        least_s = 0.5 * seconds / self.slowdown_in(phase)
        if not costliest or most_s < least_s:
            return {}
        return _longest_line(costliest)

    def line_of_items(self) -> dict[str, Any]:
        """Return the fields of a finding that name the method that makes a dataset's items; empty if it is unknown."""
        for rows in self.rows_of_functions(["data"]):
            if rows[0].function.endswith(_ITEM_METHODS):
                return _longest_line(rows)
        return {}

    def main_outer_call(self) -> dict[str, Any]:
        """Return the fields of a finding that name the costliest function called outside of all phases.

        Empty if it takes less than half of the time of all functions called there.
        """
        calls = self.record.outer_calls
        longest = max(calls, key=lambda call: call.seconds, default=None)
        total_s = sum(call.seconds for call in calls)
        if longest is None or longest.seconds < 0.5 * total_s:
            return {}
        return {
            "owner": longest.outer_function,
            "file": longest.file,
            "line": longest.line,
            "facts": _facts_of_forward(longest.forward),
        }

    def main_untrained_call(self) -> dict[str, Any]:
        """Return the fields of ``main_outer_call`` if that is a call of a module that no optimizer trains; or empty."""
        fields = self.main_outer_call()
        return fields if fields.get("facts") else {}

    @property
    def calls_model_unmarked(self) -> bool:
        """Whether most of ``other`` is the forward pass of a trained module that the program calls without a mark."""
        unmarked_s = 0.0
        total_s = 0.0
        for row in self.record.python_times:
            if row.phase == "other":
                total_s += row.seconds
                if row.forward == "unmarked":
                    unmarked_s += row.seconds
        return unmarked_s > 0.5 * total_s

    def finding(
        self, name: FindingName, saves_s: float, may: bool = False, **fields: Any
    ) -> Finding:
        """Return a finding that saves at most the whole step; ``may`` if only a trial shows whether it saves time."""
        saves_s = min(saves_s, self.whole_s)
        share = 0.0
        if self.whole_s > 0.0:
            share = saves_s / self.whole_s
        return Finding.model_validate(
            {"name": name, "saves_s": saves_s, "share": share, "may": may, **fields}
        )


def _longest_line(rows: Sequence[PythonTime]) -> dict[str, Any]:
    """Return the fields of a finding that name the line of a function's ``rows`` with the longest time."""
    longest = max(rows, key=lambda row: row.seconds)
    return {
        "owner": longest.function,
        "file": longest.file,
        "line": longest.line,
        "what": longest.what,
        "facts": _facts_of_forward(longest.forward),
    }


def _facts_of_forward(kind: ForwardKind | None) -> dict[str, float]:
    """Return the facts of a finding about a function; ``kind`` is how it is called, if it is a forward pass."""
    return {"untrained": 1.0} if kind == "untrained" else {}


def _short_operators_s(term: Term, phase: str) -> float:
    """Return the seconds of the many short operators that ``phase`` calls outside of modules."""
    seconds = 0.0
    for contributor in term.contributors:
        is_of_phase = contributor.what.startswith(f"{phase}: ")
        if contributor.module is not None or not is_of_phase:
            continue
        are_many = contributor.count >= _MANY_CALLS
        if are_many and contributor.seconds / contributor.count < _SMALL_CALL_S:
            seconds += contributor.seconds
    return seconds


Finder = Callable[[StepCosts], Iterator[Finding]]


def findings_of(record: RunRecord) -> list[Finding]:
    """Return the findings worth reporting, ordered by likely saving."""
    costs = StepCosts(record)
    if costs.whole_s <= 0.0:
        return []
    findings: list[Finding] = []
    for find in FINDERS:
        findings += list(find(costs))
    findings = _with_logging_as_one(findings, costs)
    findings = [finding for finding in findings if finding.share >= WORTH]

    def likely_s(finding: Finding) -> float:
        seconds = finding.saves_s * likely_share(finding)
        is_of_data_flow = finding.name in _DATA_FLOW_REASONS
        if not finding.may:
            return seconds
        if costs.contended and not is_of_data_flow:
            return seconds * _BUSY_TRIAL_FACTOR
        return seconds * _TRIAL_FACTOR

    findings.sort(key=likely_s, reverse=True)
    return [_with_upper_limit(finding, costs) for finding in findings]


def _with_logging_as_one(
    findings: Sequence[Finding], costs: StepCosts
) -> list[Finding]:
    """Return ``findings`` with all those about logging merged: in the program's own code, and in the loggers."""
    all_logging = [finding for finding in findings if finding.name == "logging"]
    if len(all_logging) < 2:
        return list(findings)
    longest = max(all_logging, key=lambda finding: finding.saves_s)
    saves_s = 0.0
    high_s = 0.0
    for finding in all_logging:
        saves_s += finding.saves_s
        high_s += finding.high_s or finding.saves_s
    share = min(saves_s / costs.whole_s, 1.0)
    changes = {"saves_s": saves_s, "share": share, "high_s": high_s}
    others = [finding for finding in findings if finding.name != "logging"]
    return [*others, longest.model_copy(update=changes)]


def _with_upper_limit(finding: Finding, costs: StepCosts) -> Finding:
    """Return ``finding`` with an upper limit of its saving; the mean alone would be too low in half of all runs."""
    high_s = finding.saves_s * (1.0 + costs.tolerance)
    if finding.high_s is not None:
        high_s = max(high_s, finding.high_s)
    # A finding that is most of the step is limited by the rest of the step, which is needed in any case.
    remaining_s = costs.whole_s - max(finding.saves_s, finding.high_s or 0.0)
    least_remaining_s = max(remaining_s, 0.0) * (1.0 - costs.tolerance)
    high_s = min(high_s, costs.whole_s - least_remaining_s)
    high_s = max(high_s, finding.saves_s)
    return finding.model_copy(update={"high_s": high_s})


def find_slow_ranks(costs: StepCosts) -> Iterator[Finding]:
    """Find that the ranks wait for a slow one."""
    ranks = costs.record.ranks
    if ranks is None:
        return
    slow = ranks.finding
    if slow.saves_s:
        yield costs.finding(
            "ranks",
            slow.saves_s,
            low_s=slow.low_s,
            high_s=slow.high_s,
            phase=slow.phase,
        )


def find_late_batches(costs: StepCosts) -> Iterator[Finding]:
    """Find waits for batches.

    The wait for the first batch of an epoch has a finding of its own.
    """
    data = costs.record.time.get("data")
    if data is not None and data.mean is not None:
        saves_s = max(_regular_wait_s(costs), 0.0)
        median_is_small = (data.median or 0.0) < WORTH * costs.step_s
        is_rare = median_is_small and not costs.has_pattern and not costs.hidden_wait_s
        fields = costs.main_line("data", saves_s) or costs.line_of_items()
        fields["phase"] = "data"
        fields["facts"] = _suggested_workers(costs)
        if (
            saves_s == data.mean
        ):  # otherwise the interval of the mean is not that of the saving
            fields["low_s"] = data.mean_low
            fields["high_s"] = data.mean_high
        yield costs.finding("input", saves_s, may=is_rare, **fields)


def find_slow_transfers(costs: StepCosts) -> Iterator[Finding]:
    """Find slow copies of batches to the device, or a slow function of the program that moves batches."""
    copy_s = costs.regular_s("transfer", clock="time")
    function = costs.main_line("transfer", copy_s)
    # on a device, the line may be the copy itself
    if function and not costs.on_device:
        yield costs.finding(
            "owner", copy_s, **{**function, "phase": "transfer", "what": None}
        )
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
    return costs.mean_s("data") - costs.outside_s(FIRST_BATCH) - other_causes_s / steps


def _suggested_workers(costs: StepCosts) -> dict[str, float]:
    """Return the facts of a finding about the loader: how many workers would keep up with the rest of the step.

    ``workers`` is their number, and ``waits`` is 1 if they mostly wait for a disk or a network. ``takes_over`` alone
    is 1 if more workers would not help. Empty if the number of workers or cores is unknown.
    """
    workers = costs.settings.num_workers
    cores = costs.settings.cores
    rest_s = costs.step_s - costs.mean_s("data")
    if workers is None or cores is None or rest_s <= 0.0:
        return {}
    if workers and _takes_over_slowly(costs):
        return {"takes_over": 1.0}
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


def _takes_over_slowly(costs: StepCosts) -> bool:
    """Return whether the training thread is busy in the data phase instead of waiting for its workers.

    It then spends the time on rebuilding the tensors that the workers send, which more workers do not speed up.
    """
    use = costs.record.thread_use.get("data")
    return use is not None and use.wall_s > 0.0 and use.ran_s >= 0.5 * use.wall_s


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


def _line_outside(costs: StepCosts, event: str) -> dict[str, Any]:
    """Return the fields of a finding that name the line in which ``event`` spends most of its time, if it is known."""
    for passed in costs.outside_steps:
        if passed.what == event and passed.file is not None:
            return {
                "owner": passed.function,
                "file": passed.file,
                "line": passed.line,
            }
    return {}


def find_costs_between_steps(costs: StepCosts) -> Iterator[Finding]:
    """Find the costs of validation, checkpoints and epoch boundaries, inside or outside the measured steps."""
    yield costs.finding(
        "validation", costs.outside_s(VALIDATION), **_line_outside(costs, VALIDATION)
    )
    yield costs.finding("checkpoint", costs.outside_s(CHECKPOINT))
    loader_calls: list[OutsideSteps] = []
    for passed in costs.outside_steps:
        if passed.what == TRAIN_DATALOADER:
            loader_calls.append(passed)
        elif passed.owner is not None:
            yield costs.finding("owner", passed.per_step_s, owner=passed.owner)
    for loader_call in loader_calls:
        yield costs.finding("reload", loader_call.per_step_s, owner=loader_call.owner)

    # The cost of a new epoch, apart from creating its loader: ending the old epoch and starting the new one, and the
    # additional time of its first step.
    epoch_boundary_s = costs.outside_s(EPOCH)
    first_step_s = costs.outside_s(FIRST_BATCH) + costs.outside_s(FIRST_STEP)
    starts_workers = (
        costs.settings.num_workers and not costs.settings.persistent_workers
    )
    if loader_calls:
        yield costs.finding("epoch", epoch_boundary_s)
    elif starts_workers:
        yield costs.finding("worker_start", epoch_boundary_s + first_step_s)
    else:
        yield costs.finding("epoch", epoch_boundary_s + first_step_s)


def find_costly_owners(costs: StepCosts) -> Iterator[Finding]:
    """Find the owners of the time in ``other``: callbacks, loggers, hooks of the module.

    Checkpoints have a finding of their own.
    """
    has_checkpoint_finding = costs.outside_s(CHECKPOINT) > 0.0

    def belongs_to_program(action: OwnedTime) -> bool:
        """Return whether ``action`` belongs neither to this profiler nor to the loop, and is in no other finding."""
        if action.owner == OURS or _belongs_to_loop(action):
            return False
        is_gap = not action.owner
        if is_gap and costs.calls_model_unmarked:
            return False
        is_checkpoint = (
            action.owner.endswith("Checkpoint") or action.action == "save_checkpoint"
        )
        return not (is_checkpoint and has_checkpoint_finding)

    seconds_by_owner: defaultdict[str, float] = defaultdict(float)
    longest_action: dict[str, str] = {}  # by owner
    scales = _scales_of_actions(costs, belongs_to_program)
    for action in costs.actions(belongs_to_program):
        # Gaps, and actions named by the program, have no owner: each is treated as its own owner.
        owner = action.owner or action.name
        seconds_by_owner[owner] += _timed_s(costs, action) * scales.of(costs, action)
        # actions are sorted, the longest first
        longest_action.setdefault(owner, action.name)

    most_s = max(seconds_by_owner.values(), default=0.0)
    for owner, seconds in seconds_by_owner.items():
        is_logging = owner.endswith(_LOGGER_ENDINGS) or owner == LIGHTNING
        name: FindingName = "logging" if is_logging else "owner"
        fields: dict[str, Any] = {}
        # The owner of a line is not recorded; the costliest line is assumed to belong to the costliest owner.
        if not is_logging and seconds == most_s:
            fields = costs.main_line("other", seconds) or costs.main_outer_call()
            if fields.get("facts"):  # an inner module of one that is not trained
                fields = costs.main_untrained_call() or fields
            if fields:
                fields["what"] = fields["owner"]
        fields["phase"] = "other"
        fields["owner"] = longest_action[owner]
        yield costs.finding(name, seconds, **fields)


class _ActionScales(NamedTuple):
    """Factors by which the times of actions in the timed steps are multiplied, so that they hold for the measured ones.

    The total time of ``other`` is known from all measured steps; how it divides among actions only from the few steps
    in which actions were timed.
    """

    usual: float  # of actions that most timed steps had
    rare: float

    def of(self, costs: StepCosts, action: OwnedTime) -> float:
        return self.rare if _is_rare(costs, action) else self.usual


def _scales_of_actions(
    costs: StepCosts, belongs_to_program: Callable[[OwnedTime], bool]
) -> _ActionScales:
    """Return the factors for the times of the actions of ``other``.

    Time that the timed steps do not show, such as that of an evaluation once in 50 steps, is attributed to no action.
    """
    if costs.contended:
        # Here an action's time is that of its fastest step. The total includes the delay by other programs, which
        # affects all actions alike: the factor may exceed 1.
        usual_total_s = costs.regular_s("other")
        if costs.has_pattern:  # then the timed steps are whole periods of it
            usual_total_s = costs.mean_s("other", clock="host_time")
        actions = costs.actions(lambda action: action.owner != OURS)
        most_usual = math.inf
    else:
        # An action that runs only every few steps may be overrepresented in the timed steps: never scale up.
        usual_total_s = costs.mean_s("other", clock="host_time")
        actions = costs.actions(belongs_to_program)
        most_usual = 1.0
    usual_s = 0.0
    rare_s = 0.0
    for action in actions:
        if _is_rare(costs, action):
            rare_s += _timed_s(costs, action)
        else:
            usual_s += _timed_s(costs, action)

    usual_scale = 1.0
    if usual_s > 0.0:
        usual_scale = min(usual_total_s / usual_s, most_usual)
    # Rare actions make the mean of ``other`` longer than its median. In the timed steps they may be overrepresented.
    rare_scale = 1.0
    summary = costs.record.host_time.get("other")
    if rare_s > 0.0 and summary is not None and summary.median is not None:
        rare_total_s = max((summary.mean or 0.0) - summary.median, 0.0)
        rare_scale = min(rare_total_s / rare_s, 1.0)
    return _ActionScales(usual_scale, rare_scale)


def _is_rare(costs: StepCosts, action: OwnedTime) -> bool:
    """Return whether fewer than half of the timed steps had ``action``, and how often it comes is not known."""
    owned = costs.record.other_by_owner
    return (
        owned is not None
        and action.in_steps < 0.5 * owned.steps
        and not costs.has_pattern
    )


def _timed_s(costs: StepCosts, action: OwnedTime) -> float:
    """Return the seconds of ``action`` in a mean step: on a busy machine those of its fastest step, if known.

    How often the loop validates is known from the whole run, and not only from the few timed steps. The measured steps
    show that an action is in few of them, if it would make them longer.
    """
    seconds = action.seconds
    if costs.contended and action.least_s is not None:
        seconds = action.least_s
    owned = costs.record.other_by_owner
    if owned is None:
        return seconds
    times_per_step = 1.0
    is_before_validation = action.name.endswith(f" and {VALIDATION}")
    validations = costs.times_per_step(VALIDATION)
    if is_before_validation and validations is not None:
        times_per_step = validations
    seconds_per_time = seconds * owned.steps / max(action.in_steps, 1)
    if _is_rare(costs, action) and costs.is_rarely_longer("other", seconds_per_time):
        times_per_step = min(times_per_step, _RARE_SHARE)
    return min(seconds_per_time * times_per_step, seconds)


def _belongs_to_loop(action: OwnedTime) -> bool:
    """Return whether ``action`` is Lightning's own work. Logging is not: the program requests it."""
    return action.owner == LIGHTNING and action.action != "logged metrics"


def find_slow_python(costs: StepCosts) -> Iterator[Finding]:
    """Find functions of the program that sleep, compute outside of torch, or call torch too often."""
    # Python delays a device only while the device is idle: less than a tenth of the step is not worth a finding.
    if costs.on_device and costs.term_s("gaps") < 0.1 * costs.step_s:
        return
    for rows in costs.rows_of_functions(WORKING_PHASES):
        # Anomaly detection records the stack of each operator, and has a finding of its own.
        is_anomaly_detection = any(row.what == _TRACEBACK for row in rows)
        if costs.settings.anomalies and is_anomaly_detection:
            continue
        yield _python_finding(costs, rows)


def _python_finding(costs: StepCosts, rows: Sequence[PythonTime]) -> Finding:
    """Return the finding about one function of the program: ``rows`` are its times, by what it called."""
    longest = max(rows, key=_outside_torch_s)
    phase = longest.phase
    phase_s = costs.mean_s(phase)
    function = _time_of_function(costs, phase, rows)
    most_s = function.most_s * (1.0 + costs.tolerance)

    # The function sleeps if C functions take most of its time, and its thread slept for at least half of that.
    mostly_waits = function.waits_s > 0.5 * function.seconds
    use = costs.record.thread_use.get(phase)
    sleeps = mostly_waits and use is not None and use.asleep_s >= 0.5 * function.waits_s
    name: FindingName = "python"
    if sleeps:
        name = "sleep"
    elif longest.what == LIGHTNING:
        name = "logging"
    # On a busy machine the time of a C function that does not sleep may include that of other programs.
    is_uncertain = costs.contended and mostly_waits and not sleeps
    return costs.finding(
        name,
        min(function.seconds, phase_s),
        high_s=min(most_s, phase_s),
        may=is_uncertain,
        phase=phase,
        owner=longest.function,
        file=longest.file,
        line=longest.line,
        what=longest.what,
        facts={"calls": float(longest.calls)},
    )


class _FunctionTime(NamedTuple):
    """The estimated seconds per step that a function of the program takes."""

    seconds: float  # outside of torch
    # Upper limit of ``seconds``. In phases other than forward it includes the function's torch calls.
    most_s: float
    waits_s: float  # the part of ``seconds`` in C functions, which may wait


def _time_of_function(
    costs: StepCosts, phase: str, rows: Sequence[PythonTime]
) -> _FunctionTime:
    """Estimate the seconds per step of one function: likely, at most, and how much of it may be waiting.

    ``rows`` are the times of the function in ``phase``, by what it called.
    """
    recorded = _recorded_time(rows)
    python_limit_s = _python_limit_s(costs, phase)

    computes_s = recorded.computes_s + min(recorded.python_s, python_limit_s)
    if phase == "forward":
        # The function's torch calls may be the model itself: they are not counted.
        outside_torch_s = recorded.computes_s + recorded.python_s
        most_computing_s = min(outside_torch_s, _outside_operators_s(costs, phase))
    else:
        # A hook or an optimizer: its torch calls may be a part of its time.
        most_computing_s = min(recorded.all_s, python_limit_s) - recorded.waits_s
    if costs.contended:
        # other programs lengthen computing, but not waiting
        slowdown = costs.slowdown_in(phase)
        computes_s *= slowdown
        most_computing_s *= slowdown
    likely_s = recorded.waits_s + computes_s
    most_s = recorded.waits_s + most_computing_s

    # A second estimate. On a busy machine it is too high, because other programs lengthen gaps.
    gap_s = _gap_of_function_s(costs, phase, rows)
    if not costs.contended:
        likely_s = max(likely_s, gap_s)
    most_s = max(most_s, gap_s)
    return _FunctionTime(likely_s, most_s, recorded.waits_s)


class _RecordedTime(NamedTuple):
    """The recorded seconds of one function in a step, by activity."""

    waits_s: float  # C functions, which may wait
    python_s: float  # the function's own Python code
    computes_s: float  # other activities outside of torch
    all_s: float  # all activities, torch included


def _recorded_time(rows: Sequence[PythonTime]) -> _RecordedTime:
    waits_s = 0.0
    python_s = 0.0
    computes_s = 0.0
    for row in rows:
        if row.is_c_function:
            waits_s += row.seconds
        elif row.what == _PYTHON:
            python_s += row.seconds
        else:
            computes_s += _outside_torch_s(row)
    all_s = sum(row.seconds for row in rows)
    return _RecordedTime(waits_s, python_s, computes_s, all_s)


def _gap_of_function_s(
    costs: StepCosts, phase: str, rows: Sequence[PythonTime]
) -> float:
    """Return the seconds without operators in ``phase`` that one Python function causes; 0 unless it is the main one.

    ``rows`` are the recorded lines of the function.

    This is a second estimate of the function's time, from untraced steps. Recording Python calls has a limit, and a
    cost that is not known exactly. The estimate needs a function with nearly all of the Python time recorded in the
    phase.
    """
    gap_s = costs.gap_s(phase)
    recorded_s = 0.0
    for row in costs.record.python_times:
        if row.phase == phase:
            recorded_s += row.seconds
    if math.isinf(gap_s) or recorded_s <= 0.0:
        return 0.0
    share = sum(_outside_torch_s(row) for row in rows) / recorded_s
    if share < _MAIN_SHARE:
        return 0.0
    return share * gap_s


def _python_limit_s(costs: StepCosts, phase: str) -> float:
    """Return the most seconds of ``phase`` that may count as the program's own Python code."""
    if phase == "forward":
        # Only the gaps count. An operator of a line such as ``x * y`` may belong to the model.
        return costs.gap_s(phase)
    # In other phases a Python function is a hook or an optimizer, and its operators count as its time.
    limit_s = costs.mean_s(phase)
    if phase == "optimizer":  # its matrix products have a finding of their own
        limit_s -= costs.term_s("optimizer_products")
    return max(limit_s, 0.0)


def _outside_operators_s(costs: StepCosts, phase: str) -> float:
    """Return the seconds of ``phase`` beyond the least time that its operators need by the waterfall."""
    operators_s = 0.0
    if costs.record.waterfall is not None:
        for term in costs.record.waterfall.terms:
            if term.name in ("ideal", "bandwidth"):
                operators_s += term.phases.get(phase, 0.0)
    return max(costs.mean_s(phase) - operators_s, 0.0)


def _outside_torch_s(row: PythonTime) -> float:
    """Return the seconds of ``row`` outside of torch and libraries; many very short torch calls count as outside."""
    if row.what == "library":
        return 0.0
    if row.what == "torch":
        has_many_short_calls = (
            row.calls >= _MANY_CALLS and row.seconds / row.calls < _SMALL_CALL_S
        )
        return row.seconds if has_many_short_calls else 0.0
    return row.seconds


def find_sleeping_phases(costs: StepCosts) -> Iterator[Finding]:
    """Find phases in which the thread sleeps, if no Python time was recorded that could name the line."""
    has_several_ranks = len(costs.record.rank_step_s) > 1
    if costs.on_device or has_several_ranks:
        # waiting for the device or for other ranks is normal
        return
    phases_with_a_line = {row.phase for row in costs.record.python_times}
    for phase, use in costs.record.thread_use.items():
        if phase not in WORKING_PHASES or phase in phases_with_a_line or not use.wall_s:
            continue
        asleep_s = costs.mean_s(phase) * use.asleep_s / use.wall_s
        # Only "may": the threads of an operator wait for each other, and longer if other programs use the cores.
        yield costs.finding("sleep", asleep_s, may=True, phase=phase)


def find_pattern(costs: StepCosts) -> Iterator[Finding]:
    """Find a part that takes longer in every n-th step, unless another finding explains it."""
    steady = costs.record.steadiness
    if (
        steady is None
        or steady.pattern is None
        or not steady.pattern_s
        or steady.pattern_s < 0.0
    ):
        return
    pattern = steady.pattern
    if pattern.short_batch or _has_part_finding(costs, pattern.part):
        return
    mean = costs.record.mean_counters
    if mean is not None:
        # garbage collection and compilation have findings of their own
        counted_s = (mean.gc_s or 0.0) + (mean.compile_s or 0.0)
        if counted_s >= EXPLAINED * steady.pattern_s:
            return
    fields: dict[str, Any] = {}
    if pattern.part is not None:
        fields = costs.main_line(pattern.part, steady.pattern_s)
    fields["phase"] = pattern.part
    fields["facts"] = {"every": float(pattern.every)}
    yield costs.finding("pattern", steady.pattern_s, **fields)


def find_odd_steps(costs: StepCosts) -> Iterator[Finding]:
    """Find steps that take far longer than the others, for a reason that has no other finding.

    Steps that another program delayed are left out.
    """
    steady = costs.record.steadiness
    slow = [odd for odd in costs.record.odd_steps if odd.ratio > 1.0]
    excess_s = sum(_excess_s(odd) for odd in slow)
    if steady is None or not steady.odd_s or excess_s <= 0.0:
        return
    unexplained: list[OddStep] = []
    for odd in slow:
        if not has_own_finding(odd.cause) and not _has_part_finding(costs, odd.part):
            unexplained.append(odd)
    if not unexplained:
        return
    unexplained_share = sum(_excess_s(odd) for odd in unexplained) / excess_s
    worst = max(unexplained, key=_excess_s)
    yield costs.finding(
        "odd_steps",
        steady.odd_s * unexplained_share,
        may=len(unexplained) < _LASTING_COUNT,  # a few may be a coincidence
        phase=worst.part,
        what=worst.cause,
        facts={
            "steps": float(len(unexplained)),
            "step": float(worst.step),
            "seconds": worst.step_s,
        },
    )


def _excess_s(odd: OddStep) -> float:
    """Return by how many seconds a step took longer than usual."""
    usual_s = odd.step_s / odd.ratio
    return odd.step_s - usual_s


def _has_part_finding(costs: StepCosts, part: str | None) -> bool:
    """Return whether another finding already covers the variation of ``part`` from step to step."""
    if part in ("data", "transfer"):
        return True
    if part != "other":
        return False
    findings = [*find_costly_owners(costs), *find_costs_between_steps(costs)]
    return any(finding.share >= WORTH for finding in findings)


def find_garbage_and_compilation(costs: StepCosts) -> Iterator[Finding]:
    """Find the time of garbage collection and of compilation, by their counters."""
    mean = costs.record.mean_counters
    if mean is None:
        return
    if mean.gc_s:
        # Calls of gc.collect by the program are found with their lines.
        explicit_s = sum(
            row.seconds for row in costs.record.python_times if row.what == "gc.collect"
        )
        profiler_s = mean.gc_own_s or 0.0
        yield costs.finding("garbage", max(mean.gc_s - profiler_s - explicit_s, 0.0))
    if mean.compile_s:
        yield costs.finding("compilation", mean.compile_s, owner=mean.compiled)


def find_diagnostics(costs: StepCosts) -> Iterator[Finding]:
    """Find diagnostics that cost time: anomaly detection, a dispatch mode, and the Trainer's own profiler."""
    if costs.settings.anomalies:
        compute_s = sum(costs.mean_s(phase) for phase in _MODEL_PHASES)
        yield costs.finding("anomalies", compute_s)
    mode_s = _dispatch_mode_s(costs)
    yield costs.finding("dispatch_mode", mode_s, high_s=_DISPATCH_MODE_FACTOR * mode_s)
    if costs.settings.profiler is not None:
        yield costs.finding(
            "profiler", costs.step_s, may=True, owner=costs.settings.profiler
        )


def _dispatch_mode_s(costs: StepCosts) -> float:
    """Return the seconds in which the code of a ``TorchDispatchMode`` ran at the operators of the traced steps."""
    if costs.record.waterfall is None:
        return 0.0
    seconds = 0.0
    for term in costs.record.waterfall.terms:
        for contributor in term.contributors:
            if contributor.what.endswith(_DISPATCH_MODE):
                seconds += contributor.seconds
    return seconds


def find_syncs(costs: StepCosts) -> Iterator[Finding]:
    """Find lines that make the host wait for the device. Their cost is the gaps with a synchronization or a copy."""
    waterfall = costs.record.waterfall
    syncs = costs.record.syncs
    if waterfall is None or not syncs:
        return
    waits_s = 0.0
    for term in waterfall.terms:
        if term.name != "gaps":
            continue
        for contributor in term.contributors:
            # "ync" matches both "Synchronize" and "sync"
            is_sync_or_copy = "ync" in contributor.what or "cpy" in contributor.what
            if is_sync_or_copy:
                waits_s += contributor.seconds
    worst = max(syncs, key=lambda sync: sync.count)
    yield costs.finding(
        "sync",
        waits_s,
        file=worst.file,
        line=worst.line,
        what=worst.call or worst.function,
    )


def find_small_batch(costs: StepCosts) -> Iterator[Finding]:
    """Find a high cost per step that does not depend on the batch size: a batch k times as large divides it by k."""
    fixed_s = _fixed_s(costs)
    if fixed_s < _LARGE_FIXED_SHARE * costs.step_s:
        return
    free_share = costs.settings.memory_free_share
    memory_is_full = free_share is not None and free_share < 0.1
    if memory_is_full:
        return

    samples = costs.settings.samples_per_batch
    growth = 2.0  # the factor by which the batch may grow
    if samples:
        growth = max(_USUAL_BATCH / samples, 2.0)
    if free_share is not None:
        growth_that_fits = 1.0 / (1.0 - free_share)
        growth = max(min(growth, growth_that_fits), 2.0)
    facts = {}
    for name in ("tokens_per_batch", "samples_per_batch"):
        count = getattr(costs.settings, name)
        if count is not None:
            facts[name] = float(count)
    # With one or two samples and such a fixed cost, a larger batch is certain to help.
    has_few_samples = samples is not None and samples <= _FEW_SAMPLES and growth > 2.0
    saves_s = min(fixed_s, costs.step_s) * (1.0 - 1.0 / growth)
    yield costs.finding("small_batch", saves_s, may=not has_few_samples, facts=facts)


def _fixed_s(costs: StepCosts) -> float:
    """Return the seconds of a step that do not depend on the batch size, and that no other finding explains."""
    fixed_s = sum(costs.regular_s(phase) for phase in _FIXED_PHASES)
    products_s = costs.term_s("optimizer_products")
    own_code_s = sum(finding.saves_s for finding in find_costly_optimizer_code(costs))
    fixed_s -= min(products_s + own_code_s, costs.regular_s("optimizer"))
    if costs.contended:
        # Other programs lengthen gaps and the loop's actions, of which only the means are known.
        return fixed_s
    python_s = sum(finding.saves_s for finding in find_slow_python(costs))
    fixed_s += max(costs.term_s("gaps") - python_s, 0.0)
    fixed_s += sum(action.seconds for action in costs.actions(_belongs_to_loop))
    return fixed_s


def find_slow_optimizer(costs: StepCosts) -> Iterator[Finding]:
    """Find an optimizer whose step could be fused into few kernels, and slow clipping of gradients.

    An optimizer is reported if it could be fused and is not, or if it updates weight by weight on a device. The finding
    is certain (``may`` is False) if the user requested that with ``foreach=False``. Clipping is reported if it takes
    twice the share of the step that other findings need.
    """
    by_weight = costs.settings.weight_by_weight
    could_be_fused = costs.settings.fused_optimizer is False
    has_kernels_by_weight = by_weight and costs.on_device
    if could_be_fused or has_kernels_by_weight:
        saves_s = _saved_by_fusing(costs)
        yield costs.finding("optimizer", saves_s, may=not by_weight, phase="optimizer")
    yield from _needless_groups(costs)
    clip_s = costs.regular_s("clip")
    clips_slowly = clip_s >= 2 * WORTH * costs.whole_s
    if clips_slowly:
        yield costs.finding("clip", clip_s, may=True, phase="clip")


def _saved_by_fusing(costs: StepCosts) -> float:
    """Return the seconds that a fused optimizer saves."""
    optimizer_s = costs.regular_s("optimizer")
    if costs.on_device:
        # A fused optimizer still has to move its bytes. Their least time is subtracted if it is known; on a busy
        # machine the memory bandwidth is not known well enough.
        floor = costs.record.floors.get("optimizer")
        floor_s = 0.0
        if floor is not None and not costs.contended:
            floor_s = floor.seconds or 0.0
        return max(optimizer_s - floor_s, 0.0)
    model = costs.record.model
    share = _SAVED_BY_FUSING_ON_CPU
    if model is not None and set(model.optimizers) == {"SGD"}:
        share = _SAVED_BY_FUSING_SGD_ON_CPU
    return share * optimizer_s


def _needless_groups(costs: StepCosts) -> Iterator[Finding]:
    """Find groups of parameters with equal options: an optimizer updates one group after another."""
    groups = costs.settings.parameter_groups
    different = costs.settings.different_groups
    if groups is None or different is None or groups < _MANY_GROUPS:
        return
    needless_share = 1.0 - different / groups
    if needless_share >= 0.5:
        yield costs.finding(
            "groups",
            needless_share * costs.regular_s("optimizer"),
            may=True,
            phase="optimizer",
            facts={"groups": float(groups), "different": float(different)},
        )


def find_optimizer_products(costs: StepCosts) -> Iterator[Finding]:
    """Find an optimizer that spends its time on matrix products of its own, as Muon, SOAP and Shampoo do."""
    floor = costs.record.floors.get("optimizer")
    if floor is None or not floor.flops:
        return
    model = costs.record.model
    if model is not None and CLOSURE_OPTIMIZER in model.optimizers:
        return  # the products are those of the model, which the optimizer calls
    # Without a waterfall, the whole optimizer counts: its products are most of it.
    products_s = costs.regular_s("optimizer", clock="time")
    if costs.record.waterfall is not None:
        products_s = costs.term_s("optimizer_products")
    if products_s <= 0.0:
        return
    flops = sum(floor.flops.values())
    facts = {"flops": float(flops), "flops_per_s": flops / products_s}
    yield costs.finding(
        "optimizer_products", products_s, may=True, phase="optimizer", facts=facts
    )


def find_costly_optimizer_code(costs: StepCosts) -> Iterator[Finding]:
    """Find functions of the program's own optimizer that mostly run long torch operators.

    Optimizers with many short operators, and those that mostly compute matrix products, have findings of their own.
    """
    products_s = sum(finding.saves_s for finding in find_optimizer_products(costs))
    for all_rows in costs.rows_of_functions(["optimizer"]):
        rows = [row for row in all_rows if row.what not in ("library", LIGHTNING)]
        if not rows:
            continue
        seconds = sum(row.seconds for row in rows)
        longest = max(rows, key=lambda row: row.seconds)
        seconds = min(seconds, costs.mean_s("optimizer"))
        has_many_calls = longest.calls >= _MANY_CALLS
        if longest.what != "torch" or has_many_calls or products_s > 0.5 * seconds:
            continue
        yield costs.finding(
            "owner",
            seconds,
            phase="optimizer",
            owner=longest.function,
            file=longest.file,
            line=longest.line,
        )


def find_unfused_operators(costs: StepCosts) -> Iterator[Finding]:
    """Find gaps and memory traffic of forward and backward that torch.compile could save by fusing operators.

    Needs a model that is not compiled, and a waterfall that other programs did not distort.
    """
    waterfall = costs.record.waterfall
    if costs.settings.compiled is not False or waterfall is None or costs.contended:
        return
    fusable_s = 0.0
    for term in waterfall.terms:
        if term.name not in ("gaps", *_FUSABLE_TERMS):
            continue
        if term.phases:
            fusable_s += sum(term.phases.get(phase, 0.0) for phase in _MODEL_PHASES)
        else:
            fusable_s += term.seconds
    explained_s = 0.0  # by other findings
    for finding in (*find_slow_python(costs), *find_sleeping_phases(costs)):
        if finding.phase in _MODEL_PHASES:
            explained_s += finding.saves_s
    explained_s += _all_needless_s(costs)
    share = 1.0 if costs.on_device else _SAVED_BY_COMPILING_ON_CPU
    yield costs.finding(
        "compile",
        share * max(fusable_s - explained_s, 0.0),
        may=True,
        **_costliest_operator(costs),
    )


def _costliest_operator(costs: StepCosts) -> dict[str, Any]:
    """Return the fields of a finding that name the costliest fusable operator; empty below a tenth of the step."""
    waterfall = costs.record.waterfall
    if waterfall is None or costs.step_s <= 0.0:
        return {}
    seconds_by_place: defaultdict[tuple[str, str], float] = defaultdict(float)
    for term in waterfall.terms:
        if term.name in _FUSABLE_TERMS:
            for contributor in term.contributors:
                if contributor.module is not None:
                    place = (contributor.module, contributor.what)
                    seconds_by_place[place] += contributor.seconds
    if not seconds_by_place:
        return {}
    module, operator = max(seconds_by_place, key=seconds_by_place.__getitem__)
    share = seconds_by_place[module, operator] / costs.step_s
    if share < _COSTLY_SHARE:
        return {}
    return {"owner": module, "what": operator, "facts": {"costliest": share}}


def find_high_precision(costs: StepCosts) -> Iterator[Finding]:
    """Find matrix products in a higher precision than needed: float64, float32, or float32 without TF32."""
    settings = costs.settings
    products_s = _matmul_s(costs)
    is_double = settings.precision == "float64" or str(settings.precision).startswith(
        "64"
    )
    if is_double and (_is_recorded(costs) or costs.record.factorizing_operators):
        # The data flow shows which operators are large enough to be faster in float32. Factorizing matrices or solving
        # systems may need the digits of float64.
        return
    if is_double:
        # float64 has twice the bytes and at best half the FLOP/s: float32 saves at least half of the time. It may
        # save more, because some operators, such as convolutions on a CPU, have no fast float64 version.
        working_s = sum(costs.mean_s(phase) for phase in WORKING_PHASES)
        yield costs.finding(
            "double",
            products_s or working_s / 2.0,
            high_s=_MOST_SHARE_OF_DOUBLE * working_s,
        )
    elif settings.full_precision and settings.half_precision:
        yield costs.finding(
            "precision", products_s, may=True, what=settings.half_precision
        )
    if settings.full_precision and settings.tf32 is False and costs.on_device:
        yield costs.finding("tf32", products_s, may=True)


def _is_recorded(costs: StepCosts) -> bool:
    """Return whether the operators of a step were recorded for the data flow."""
    has_stage = costs.record.steps.get("memory", 0) > 0
    return has_stage and costs.settings.compiled is False


def _matmul_s(costs: StepCosts) -> float:
    """Return the seconds that matmuls take: by the waterfall, or else by the utilisation of the device."""
    if costs.record.waterfall is not None:
        if costs.contended:
            # Other programs slow down matmuls and lower the clock: only the time at peak rate is certain.
            return costs.term_s("ideal")
        return costs.term_s("ideal", "slow_products", "clock")
    use = costs.record.utilisation
    if use is None:
        return 0.0
    used_share = use.of_ceiling or use.hfu or 0.0
    # The utilisation is a share of the measured step, without the wait that prefetched batches hid.
    measured_step_s = costs.step_s - costs.hidden_wait_s
    return used_share * measured_step_s


def find_recomputation(costs: StepCosts) -> Iterator[Finding]:
    """Find activation checkpointing in a run with enough free memory to store the activations."""
    free_share = costs.settings.memory_free_share
    may_fit = free_share is None or free_share >= 0.3
    if costs.settings.checkpointing and may_fit:
        repeated_s = _recomputation_s(costs)
        yield costs.finding(
            "recomputation",
            repeated_s,
            high_s=repeated_s * _RECOMPUTING_FACTOR,
            may=free_share is None,
        )


def _recomputation_s(costs: StepCosts) -> float:
    """Return the seconds of recomputation: the waterfall's term, or an estimate from FLOPs if that is larger.

    The term counts only recomputed matmuls, at peak rate. The estimate goes by the recomputed share of forward's FLOPs.
    Its share of the time is larger, because what is not recomputed is mostly one large matmul, that of the logits.
    """
    term_s = costs.term_s("recomputation")
    use = costs.record.utilisation
    if use is None or not use.flops.forward:
        return term_s
    flops_share = use.flops.recomputation / use.flops.forward
    repeated_share = min(_TIME_PER_FLOPS_SHARE * flops_share, 1.0)
    estimated_s = repeated_share * costs.regular_s("forward", clock="time")
    return max(term_s, estimated_s)


def find_padding(costs: StepCosts) -> Iterator[Finding]:
    """Find batches padded beyond their longest sequence, and batches of sequences with very different lengths.

    The second is known only if the lengths of the sequences are: labels that the loss ignores need not be padding,
    except at the end of all sequences of a batch.
    """
    rate = costs.record.throughput
    if rate is None or rate.unused_share is None:
        return
    compute_s = sum(costs.mean_s(phase) for phase in _MODEL_PHASES)
    padding_share = rate.unused_share
    lengths_are_known = rate.squared_lengths_per_step is not None
    if lengths_are_known and rate.occupancy is not None:
        padding_share = max(1.0 - rate.occupancy, rate.unused_share)
    yield costs.finding(
        "padding",
        padding_share * compute_s,
        may=True,
        phase="forward",
        facts={"padding": padding_share, "unused": rate.unused_share},
    )


def find_needless_work(costs: StepCosts) -> Iterator[Finding]:
    """Find work that the trace shows as possibly needless: repeated passes, unused gradients, large broadcasts.

    It may be intended: a second pass may draw other random numbers, and a program may want a table of all pairs.
    """
    by_place: defaultdict[tuple[str, str | None], list[NeedlessWork]] = defaultdict(
        list
    )
    # the data flow shows more of these, and has the finding
    left_out: set[NeedlessKind] = set()
    for operators in costs.record.needless_operators:
        if not _is_shown_by_trace(costs, operators):
            left_out.update(_TRACED_KINDS.get(operators.reason, ()))
    for work in _traced_works(costs):
        if work.kind not in left_out:
            by_place[work.kind, work.what].append(work)
    for (kind, what), works in by_place.items():
        passes = max(works, key=lambda work: work.phase == "forward").count
        saves_s = sum(work.seconds for work in works)
        if kind == "repeated_forward" and _first_pass_evaluates(costs, works, passes):
            works = [work for work in works if work.phase == "forward"]
            saves_s = sum(work.seconds for work in works)
            # The first pass is validation for us if it ran in evaluation mode: then its own time is known.
            evaluation_s = costs.outside_s(VALIDATION)
            if evaluation_s > 0.0:
                saves_s = min(saves_s, evaluation_s)
        longest = max(works, key=lambda work: work.seconds)
        yield costs.finding(
            cast(FindingName, kind),
            saves_s,
            may=True,
            phase=longest.phase,
            what=what,
            facts={"passes": passes},
        )


def _first_pass_evaluates(
    costs: StepCosts, works: list[NeedlessWork], passes: float
) -> bool:
    """Return whether the first of the passes that ``works`` repeat has no backward pass: it only evaluates.

    The later one then trains, so that of the two only a forward pass can be saved. If each of n passes had a backward
    pass, those of the later ones would take (n - 1) / n of the phase.
    """
    backward_s = sum(work.seconds for work in works if work.phase == "backward")
    most_s = passes / (passes + 1.0) * costs.mean_s("backward")
    has_forward = any(work.phase == "forward" for work in works)
    return has_forward and backward_s > _SURELY_MORE * most_s


def find_needless_operators(costs: StepCosts) -> Iterator[Finding]:
    """Find operators that the data-flow analysis of a step shows as possibly needless: one finding per reason.

    Problems of which the trace shows as much, with the module's name, are left out.
    """
    for operators in costs.record.needless_operators:
        if _is_shown_by_trace(costs, operators):
            continue
        saves_s = _needless_s(costs, operators)
        is_double = operators.reason in ("some_double", "double")
        tolerance = _DOUBLE_TOLERANCE if is_double else _NEEDLESS_TOLERANCE
        shares = operators.phase_shares
        facts = {"share": operators.share, "operators": float(operators.count)}
        yield costs.finding(
            operators.reason,
            saves_s,
            high_s=tolerance * saves_s,
            may=operators.reason not in _CERTAINLY_NEEDLESS,
            phase=max(shares, key=lambda phase: shares[phase] * costs.mean_s(phase)),
            what=operators.what,
            facts=facts,
            **_line_of_operators(operators),
        )


def _line_of_operators(operators: NeedlessOperators) -> dict[str, Any]:
    """Return the fields of a finding that name the line of ``operators``; empty if the reason is the whole model."""
    if operators.reason == "double":
        return {}
    return {
        "owner": operators.function,
        "file": operators.file,
        "line": operators.line,
    }


def _traced_works(costs: StepCosts) -> Sequence[NeedlessWork]:
    """Return the work that the trace shows as possibly needless."""
    waterfall = costs.record.waterfall
    return () if waterfall is None else waterfall.needless


def _is_shown_by_trace(costs: StepCosts, operators: NeedlessOperators) -> bool:
    """Return whether the trace shows about as much of the problem of ``operators``, with the name of a module."""
    seconds_by_module: defaultdict[str | None, float] = defaultdict(float)
    for work in _traced_works(costs):
        if work.kind in _TRACED_KINDS.get(operators.reason, ()):
            seconds_by_module[work.what] += work.seconds
    if not seconds_by_module:
        return False
    needless_s = _needless_s(costs, operators)
    return max(seconds_by_module.values()) >= _ENOUGH_IN_TRACE * needless_s


def _all_needless_s(costs: StepCosts) -> float:
    """Return the seconds of a mean step of all operators that may be needless.

    The operators of side work may have another reason, too: they count once.
    """
    side_work_s = 0.0
    other_reasons_s = 0.0
    for operators in costs.record.needless_operators:
        if operators.reason == "double":
            continue  # fusing operators saves their time, too
        if operators.reason in PLACE_REASONS:
            side_work_s += _needless_s(costs, operators)
        else:
            other_reasons_s += _needless_s(costs, operators)
    return max(side_work_s, other_reasons_s)


def _needless_s(costs: StepCosts, operators: NeedlessOperators) -> float:
    """Return the seconds of a mean step that ``operators`` take.

    Recording slowed down the step in which they were timed, so only their share of each phase is used.
    """
    return sum(
        share * costs.mean_s(phase) for phase, share in operators.phase_shares.items()
    )


def find_communication(costs: StepCosts) -> Iterator[Finding]:
    """Find communication that no computation overlaps, by the figures of the ranks, or else by the waterfall."""
    ranks = costs.record.ranks
    exposed_s = 0.0
    if ranks is not None:
        exposed_s = sum(ranks.exposed_s.values())
    yield costs.finding(
        "communication", exposed_s or costs.term_s("communication"), may=True
    )


FINDERS: Sequence[Finder] = (
    find_slow_ranks,
    find_late_batches,
    find_slow_transfers,
    find_costs_between_steps,
    find_costly_owners,
    find_slow_python,
    find_sleeping_phases,
    find_pattern,
    find_odd_steps,
    find_garbage_and_compilation,
    find_diagnostics,
    find_syncs,
    find_small_batch,
    find_slow_optimizer,
    find_optimizer_products,
    find_unfused_operators,
    find_high_precision,
    find_recomputation,
    find_padding,
    find_needless_work,
    find_needless_operators,
    find_costly_optimizer_code,
    find_communication,
)
