"""Finds time that could be saved: a function per finding, from a run's record to findings, the likeliest first.

Each finding has the most time that it could save per step. Times are means, on a busy machine too: what happens in one
step of five, or between steps, costs its share of every step, and other programs can fake no count, no owner and no
sleep. Figures that they do distort are left out, or reported with "may".
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, cast

from lm_profiler.analysis.remedies.catalogue import WORKERS_PER_CORE, likely_share
from lm_profiler.analysis.steps.odd_step_causes import (
    EXPLAINED,
    NO_CPU,
    has_own_finding,
)
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

# A share: what a trouble costs beyond its own time, such as waking up and cold caches, and what differs from run to
# run. Measured gains of remedies exceeded the mean cost by 21 to 27 % in three of eleven programs.
_RUN_TOLERANCE = 0.25
_LARGEST_TOLERANCE = 0.35  # with the uncertainty of the mean; beyond that an upper limit would report nothing
# Recomputing is forward with bookkeeping of its own, on cold caches: the remedy saved 1.27 times forward's time.
_RECOMPUTING_FACTOR = 1.3

# for a remedy that must be tried: a fact of equal size ranks first
_TRIAL_FACTOR = 0.75
_BUSY_TRIAL_FACTOR = 0.5  # the same on a busy machine
# which take as long whatever the batch is
_FIXED_PHASES = ("zero_grad", "clip", "optimizer")
_LARGE_FIXED_SHARE = 0.2  # of the step: every step has some fixed cost
_FEW_SAMPLES = 2  # in a batch
_USUAL_BATCH = 8  # samples that a batch may at least reach, if memory allows
_SMALL_CALL_S = 50e-6  # a shorter call of torch costs more to make than to execute
_MANY_CALLS = 200  # of one operator in a step
_LASTING_COUNT = 3  # odd steps that are no chance
_LOGGER_ENDINGS = ("Logger", "Monitor")  # of names of classes
_MODEL_PHASES = ("forward", "backward")
_MOST_SHARE_OF_DOUBLE = 0.75  # of the time of float64 that float32 may save
# terms of the waterfall whose operators can be fused
_FUSABLE_TERMS = ("bandwidth", "beyond_bandwidth")
_COSTLY_SHARE = 0.1  # of the step: an operator with as much is worth a name
_MAIN_SHARE = 0.75  # of the Python that was followed in a phase: a function with as much has the phase's gaps
_TRACEBACK = "traceback"  # the package that anomaly detection spends its time in
_FINDING_OF_REASON: dict[NeedlessReason, FindingName] = {
    "unused": "unused",
    "repeated": "repeated",
    "constant": "constant",
    "zeros": "zeros",
    "ignored": "ignored",
    "broadcast": "broadcast",
    "growing": "growing",
    "order": "order",
    "unused rows": "unused_rows",
    "double": "some_double",
    "figures": "figures",
}
# what the trace shows of the same reason
_TRACED_KINDS: dict[NeedlessReason, tuple[NeedlessKind, ...]] = {
    "repeated": ("repeated_forward", "repeated_backward"),
    "unused": ("unused_gradients",),
    "broadcast": ("broadcast",),
}
_CERTAINLY_NEEDLESS = ("unused", "constant")
# The share of needless operators is that of a single step; float64 may take more than twice as long as float32.
_NEEDLESS_TOLERANCE = 1.35
_DOUBLE_TOLERANCE = 1.5
_PYTHON = "python"  # what a line of the program does that calls nothing


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
        if step is None or step.mean is None:
            return self.hidden_wait_s
        return step.mean + self.hidden_wait_s

    @cached_property
    def hidden_wait_s(self) -> float:
        """The additional time of a step, compared with the measured one, once no prefetched batches are left."""
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
        """The time outside the phases: in the whole run, or between the measured steps in a record before 0.3."""
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
        """The share by which a mean cost of this run may be too low, at a level of 95 %."""
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
    def on_device(self) -> bool:
        """Whether work is queued to a device with its own clock."""
        return (
            self.record.environment is not None
            and self.record.environment.device_type != "cpu"
        )

    @cached_property
    def slowdown(self) -> float:
        """The factor by which other programs lengthen what this one computes."""
        contention = self.record.contention
        if contention is None or contention.not_had is None:
            return 1.0
        lost_share = min(contention.not_had, 0.9)
        return 1.0 / (1.0 - lost_share)

    def slowdown_in(self, phase: str) -> float:
        """The same for what is timed on the CPU's clock in ``phase``: the mean of its time awake over its CPU time."""
        use = self.record.thread_use.get(phase)
        if use is None or use.ran_s <= 0.0:
            return self.slowdown
        return max((self.mean_s(phase) - use.asleep_s) / use.ran_s, 1.0)

    def mean_s(self, part: str, clock: str = "time") -> float:
        """Return the mean seconds of ``part`` in the long run."""
        mean_s = 0.0
        summary = getattr(self.record, clock).get(part)
        if summary is not None and summary.mean is not None:
            mean_s = summary.mean
        if part == "data":
            mean_s += self.hidden_wait_s
        return mean_s

    def regular_s(self, part: str, clock: str = "host_time") -> float:
        """Return the seconds of ``part`` in a regular step.

        On a busy machine a short part takes long only if another program has the CPU: its mean shows nothing, its
        median does. Use it only of parts that do the same in each step.
        """
        summary = getattr(self.record, clock).get(part)
        if summary is None or summary.mean is None:
            return 0.0
        if not self.contended or summary.median is None:
            return float(summary.mean)
        return float(min(summary.mean, summary.median * self.slowdown))

    def outside_s(self, event: str) -> float:
        """Return the seconds per step that ``event``, such as validation, takes beside the phases."""
        return sum(
            passed.per_step_s for passed in self.outside_steps if passed.what == event
        )

    def term_s(self, *names: str) -> float:
        """Return the seconds of these terms of the waterfall; 0 if there is none."""
        waterfall = self.record.waterfall
        if waterfall is None:
            return 0.0
        return sum(term.seconds for term in waterfall.terms if term.name in names)

    def gap_s(self, phase: str) -> float:
        """Return the seconds of ``phase`` in which no operator ran, by the waterfall; infinite if they are unknown.

        Python of a program takes no longer than that. A line such as ``x * y`` seems to: the operator of its tensors
        is no call that can be followed. Operators that are called hundreds of times outside of modules, and end at
        once, count as no operators: calling them takes longer than what they do.
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
        """Return the owned actions of ``other`` for which ``is_wanted`` holds."""
        owned = self.record.other_by_owner
        if owned is None:
            return []
        return [action for action in owned.actions if is_wanted(action)]

    def rows_of_functions(self, phases: Collection[str]) -> list[list[PythonTime]]:
        """Return the rows of each function of the program, by phase, that was followed in one of ``phases``."""
        by_function = defaultdict[tuple[str, str, str], list[PythonTime]](list)
        for row in self.record.python_times:
            if row.phase in phases:
                by_function[row.phase, row.file, row.function].append(row)
        return [*by_function.values()]

    def main_line(self, phase: str, seconds: float) -> dict[str, Any]:
        """Return the fields of a finding for the function of the program that took most of ``seconds`` of ``phase``.

        The line is its longest. Empty if no function took that much.
        """
        costliest: list[PythonTime] = []
        most_s = 0.0
        for rows in self.rows_of_functions([phase]):
            function_s = sum(row.seconds for row in rows)
            if function_s > most_s:
                costliest = rows
                most_s = function_s
        if not costliest or most_s < 0.5 * seconds:
            return {}
        longest = max(costliest, key=lambda row: row.seconds)
        return {
            "owner": longest.function,
            "file": longest.file,
            "line": longest.line,
            "what": longest.what,
        }

    def main_outer_call(self) -> dict[str, Any]:
        """Return the fields of a finding for the function with most of the time that is called outside of all phases.

        Empty if no function has half of what all such functions take.
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
        }

    def finding(
        self, name: FindingName, saves_s: float, may: bool = False, **fields: Any
    ) -> Finding:
        """Return a finding that saves at most the whole step; ``may`` if that must be tried."""
        saves_s = min(saves_s, self.whole_s)
        share = 0.0
        if self.whole_s > 0.0:
            share = saves_s / self.whole_s
        return Finding.model_validate(
            {"name": name, "saves_s": saves_s, "share": share, "may": may, **fields}
        )


def _short_operators_s(term: Term, phase: str) -> float:
    """Return the seconds of operators outside of modules that are many and short, which ``phase`` calls."""
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
    trial_factor = _BUSY_TRIAL_FACTOR if costs.contended else _TRIAL_FACTOR

    def likely_s(finding: Finding) -> float:
        seconds = finding.saves_s * likely_share(finding)
        if finding.may:
            seconds *= trial_factor
        return seconds

    findings.sort(key=likely_s, reverse=True)
    return [_with_upper_limit(finding, costs) for finding in findings]


def _with_logging_as_one(
    findings: Sequence[Finding], costs: StepCosts
) -> list[Finding]:
    """Return ``findings`` with one for all logging: in the program's step and in what the loggers do with it."""
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
    """Return ``finding`` with the most that it could save: the mean would be too low in half of all runs.

    If it saves most of the step, the limit depends on how little may remain of the step.
    """
    high_s = finding.saves_s * (1.0 + costs.tolerance)
    if finding.high_s is not None:
        high_s = max(high_s, finding.high_s)
    remaining_s = costs.whole_s - max(finding.saves_s, finding.high_s or 0.0)
    least_remaining_s = max(remaining_s, 0.0) * (1.0 - costs.tolerance)
    high_s = max(min(high_s, costs.whole_s - least_remaining_s), finding.saves_s)
    return finding.model_copy(update={"high_s": high_s})


def find_slow_ranks(costs: StepCosts) -> Iterator[Finding]:
    """Find ranks that the others wait for."""
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
    """Find late batches and their copies, without batches that begin an epoch: these have a finding of their own."""
    data = costs.record.time.get("data")
    if data is not None and data.mean is not None:
        saves_s = max(_regular_wait_s(costs), 0.0)
        steady = costs.record.steadiness
        has_pattern = steady is not None and steady.pattern is not None
        median_is_small = (data.median or 0.0) < WORTH * costs.step_s
        is_rare = median_is_small and not has_pattern and not costs.hidden_wait_s
        fields = costs.main_line("data", saves_s)
        fields["phase"] = "data"
        fields["facts"] = _workers_wanted(costs)
        if saves_s == data.mean:  # else the interval is of another figure
            fields["low_s"] = data.mean_low
            fields["high_s"] = data.mean_high
        yield costs.finding("input", saves_s, may=is_rare, **fields)
    yield costs.finding(
        "transfer", costs.regular_s("transfer", clock="time"), phase="transfer"
    )


def _regular_wait_s(costs: StepCosts) -> float:
    """Return the wait for batches in a mean step, without the start of epochs and without waiting for a CPU."""
    without_cpu_s = 0.0
    for odd in costs.record.odd_steps:
        if odd.cause == NO_CPU and odd.part == "data":
            without_cpu_s += odd.cause_s or 0.0
    steps = max(costs.record.time["data"].n, 1)
    return costs.mean_s("data") - costs.outside_s(FIRST_BATCH) - without_cpu_s / steps


def _workers_wanted(costs: StepCosts) -> dict[str, float]:
    """Return how many workers would make batches as fast as the rest of the step takes them; nothing if unknown.

    Workers that compute need a core each. Those that mostly wait, for a disk or a network, do not.
    """
    workers = costs.settings.num_workers
    cores = costs.settings.cores
    rest_s = costs.step_s - costs.mean_s("data")
    if workers is None or cores is None or rest_s <= 0.0:
        return {}
    if workers and _takes_over_slowly(costs):
        return {"takes_over": 1.0}
    # The workers make a batch per step at most: each of them then takes as many steps for one as there are workers.
    batch_s = workers * costs.step_s if workers else costs.mean_s("data")
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
    """Return whether the training thread works in the data phase instead of waiting for its workers.

    It makes the tensors of each batch anew from what the workers send: more workers send no faster.
    """
    use = costs.record.thread_use.get("data")
    return use is not None and use.wall_s > 0.0 and use.ran_s >= 0.5 * use.wall_s


def _loader_waits(costs: StepCosts) -> bool:
    """Return whether the process that makes the batches mostly sleeps: a worker, or without workers the training."""
    if costs.settings.num_workers:
        loader = costs.record.loader
        return (
            loader is not None
            and loader.awake_share is not None
            and loader.awake_share < 0.5
        )
    use = costs.record.thread_use.get("data")
    return use is not None and use.wall_s > 0.0 and use.asleep_s >= 0.5 * use.wall_s


def find_costs_between_steps(costs: StepCosts) -> Iterator[Finding]:
    """Find validation, checkpoints and the start of epochs, whether or not they count in a step's time."""
    yield costs.finding("validation", costs.outside_s(VALIDATION))
    yield costs.finding("checkpoint", costs.outside_s(CHECKPOINT))
    loader_calls: list[OutsideSteps] = []
    for passed in costs.outside_steps:
        if passed.what == TRAIN_DATALOADER:
            loader_calls.append(passed)
        elif passed.owner is not None:
            yield costs.finding("owner", passed.per_step_s, owner=passed.owner)
    for loader_call in loader_calls:
        yield costs.finding("reload", loader_call.per_step_s, owner=loader_call.owner)

    # What a new epoch costs beside its loader: the loop's own end and beginning, and what its first step takes longer.
    first_step_s = costs.outside_s(FIRST_BATCH) + costs.outside_s(FIRST_STEP)
    epoch_boundary_s = costs.outside_s(EPOCH)
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
    """Find owners of ``other``: callbacks, loggers, hooks of the module. Checkpoints are a separate finding."""
    has_checkpoint_finding = costs.outside_s(CHECKPOINT) > 0.0

    def belongs_to_program(action: OwnedTime) -> bool:
        """Return whether the time of ``action`` is neither ours nor the loop's, nor in another finding."""
        if action.owner == OURS or _belongs_to_loop(action):
            return False
        is_checkpoint = (
            action.owner.endswith("Checkpoint") or action.action == "save_checkpoint"
        )
        return not (is_checkpoint and has_checkpoint_finding)

    seconds_by_owner: defaultdict[str, float] = defaultdict(float)
    longest_action: dict[str, str] = {}  # by owner
    for action in costs.actions(belongs_to_program):
        # Gaps and actions that the program has named have no owner: each stands for itself.
        owner = action.owner or action.name
        seconds_by_owner[owner] += _action_s(action, costs.contended)
        # the longest action comes first
        longest_action.setdefault(owner, action.name)

    # The measured steps show how long ``other`` is, the few steps timed by action how it divides.
    if costs.contended:
        # each action is timed in its fastest step: other programs lengthen all alike
        all_actions = costs.actions(lambda action: action.owner != OURS)
        timed_s = sum(_action_s(action, contended=True) for action in all_actions)
        largest_scale = math.inf
    else:  # some actions run every few steps, and were timed more often than they happen
        timed_s = sum(seconds_by_owner.values())
        largest_scale = 1.0
    scale = 1.0
    if timed_s > 0.0:
        scale = min(costs.mean_s("other", clock="host_time") / timed_s, largest_scale)

    most_s = max(seconds_by_owner.values(), default=0.0)
    for owner, seconds in seconds_by_owner.items():
        is_logging = owner.endswith(_LOGGER_ENDINGS) or owner == LIGHTNING
        name: FindingName = "logging" if is_logging else "owner"
        fields: dict[str, Any] = {}
        # Which owner a line belongs to is not known: the longest line is that of the costliest owner.
        if not is_logging and seconds == most_s:
            fields = costs.main_line("other", seconds) or costs.main_outer_call()
            if fields:
                fields["what"] = fields["owner"]
        fields["phase"] = "other"
        fields["owner"] = longest_action[owner]
        yield costs.finding(name, seconds * scale, **fields)


def _action_s(action: OwnedTime, contended: bool) -> float:
    """Return the seconds of ``action``: on a busy machine those of its fastest step, if known."""
    if contended and action.least_s is not None:
        return action.least_s
    return action.seconds


def _belongs_to_loop(action: OwnedTime) -> bool:
    """Return whether ``action`` is Lightning's own, and not the logging that the program requested."""
    return action.owner == LIGHTNING and action.action != "logged metrics"


def find_slow_python(costs: StepCosts) -> Iterator[Finding]:
    """Find functions of the program that sleep, compute outside of torch, or call torch too often."""
    # With a device, it can matter only if the device is idle for a tenth of the step.
    if costs.on_device and costs.term_s("gaps") < 0.1 * costs.step_s:
        return
    for rows in costs.rows_of_functions(WORKING_PHASES):
        is_anomaly_detection = any(row.what == _TRACEBACK for row in rows)
        if costs.settings.anomalies and is_anomaly_detection:
            # it notes the stack of each operator, and has a finding of its own
            continue
        yield _python_finding(costs, rows)


def _python_finding(costs: StepCosts, rows: Sequence[PythonTime]) -> Finding:
    """Return the finding about the function that has ``rows``, which differ in what takes the time.

    It sleeps if most of its time is that of C functions, and its thread slept for half of that.
    """
    longest = max(rows, key=_outside_torch_s)
    phase = longest.phase
    phase_s = costs.mean_s(phase)
    function = _time_of_function(costs, phase, rows)
    most_s = function.most_s * (1.0 + costs.tolerance)

    mostly_waits = function.waits_s > 0.5 * function.seconds
    use = costs.record.thread_use.get(phase)
    sleeps = mostly_waits and use is not None and use.asleep_s >= 0.5 * function.waits_s
    name: FindingName = "python"
    if sleeps:
        name = "sleep"
    elif longest.what == LIGHTNING:
        name = "logging"
    return costs.finding(
        name,
        min(function.seconds, phase_s),
        high_s=min(most_s, phase_s),
        may=costs.contended
        and mostly_waits
        and not sleeps,  # the time of a C function may include other programs
        phase=phase,
        owner=longest.function,
        file=longest.file,
        line=longest.line,
        what=longest.what,
        facts={"calls": float(longest.calls)},
    )


class _FunctionTime(NamedTuple):
    """What a function of the program takes of a mean step, in seconds."""

    seconds: float  # outside of torch
    most_s: float  # the most that it may be, with its calls of torch where they are there for it
    waits_s: float  # part of it: in C functions, which may wait


def _time_of_function(
    costs: StepCosts, phase: str, rows: Sequence[PythonTime]
) -> _FunctionTime:
    """Return the time of the function of ``rows`` in ``phase``, outside of torch."""
    waits_s = 0.0
    computes_s = 0.0
    python_s = 0.0
    all_s = 0.0
    for row in rows:
        all_s += row.seconds
        if _may_wait(row):
            waits_s += row.seconds
        elif row.what == _PYTHON:
            python_s += row.seconds
        else:
            computes_s += _outside_torch_s(row)

    python_limit_s = _python_limit_s(costs, phase)
    most_s = min(all_s, python_limit_s)
    if phase == "forward":
        # the function's calls of torch may be the model's own
        most_computing_s = computes_s + python_s
        most_s = waits_s + min(most_computing_s, _outside_operators_s(costs, phase))
    computes_s += min(python_s, python_limit_s)
    if costs.contended:
        slowdown = costs.slowdown_in(phase)
        computes_s *= slowdown
        most_s = waits_s + (most_s - waits_s) * slowdown

    seconds = waits_s + computes_s
    without_operators_s = _gap_of_function_s(costs, phase, rows)
    if not costs.contended:
        # contention stretches gaps
        seconds = max(seconds, without_operators_s)
    most_s = max(most_s, without_operators_s)
    return _FunctionTime(seconds, most_s, waits_s)


def _gap_of_function_s(
    costs: StepCosts, phase: str, rows: Sequence[PythonTime]
) -> float:
    """Return the time of the function of ``rows`` by the untraced steps: its share of the phase without operators.

    Only if it has nearly all of the Python that was followed in its phase; else 0. Calls are followed only up to a
    number, and the cost of following them is not known to the nanosecond: untraced steps show it.
    """
    gap_s = costs.gap_s(phase)
    followed_s = 0.0
    for row in costs.record.python_times:
        if row.phase == phase:
            followed_s += row.seconds
    if math.isinf(gap_s) or followed_s <= 0.0:
        return 0.0
    share = sum(_outside_torch_s(row) for row in rows) / followed_s
    if share < _MAIN_SHARE:
        return 0.0
    return share * gap_s


def _python_limit_s(costs: StepCosts, phase: str) -> float:
    """Return the most that a program's own Python may take of ``phase``.

    In forward no operator ran meanwhile: a line such as ``x * y`` may be the model's own. The operators of a function
    that runs in another phase, such as a hook or an optimizer, are there for that function; products of the optimizer
    have a finding of their own.
    """
    if phase == "forward":
        return costs.gap_s(phase)
    limit_s = costs.mean_s(phase)
    if phase == "optimizer":
        limit_s -= costs.term_s("optimizer_products")
    return max(limit_s, 0.0)


def _outside_operators_s(costs: StepCosts, phase: str) -> float:
    """Return the seconds of ``phase`` beside the least that its operators need, by the waterfall."""
    operators_s = 0.0
    if costs.record.waterfall is not None:
        for term in costs.record.waterfall.terms:
            if term.name in ("ideal", "bandwidth"):
                operators_s += term.phases.get(phase, 0.0)
    return max(costs.mean_s(phase) - operators_s, 0.0)


def _may_wait(row: PythonTime) -> bool:
    """Return whether ``row`` is a C function, such as ``time.sleep``: it may wait, and its CPU time shows little."""
    return "." in row.what


def _outside_torch_s(row: PythonTime) -> float:
    """Return the seconds outside of torch and libraries; calls of torch that are too short count as outside."""
    if row.what == "library":
        return 0.0
    if row.what == "torch":
        has_many_short_calls = (
            row.calls >= _MANY_CALLS and row.seconds / row.calls < _SMALL_CALL_S
        )
        return row.seconds if has_many_short_calls else 0.0
    return row.seconds


def find_sleeping_phases(costs: StepCosts) -> Iterator[Finding]:
    """Find phases in which the thread sleeps and no line of the program is known as the cause."""
    has_several_ranks = len(costs.record.rank_step_s) > 1
    if costs.on_device or has_several_ranks:
        # the thread then waits for the device, or for other ranks
        return
    phases_with_a_line = {row.phase for row in costs.record.python_times}
    for phase, use in costs.record.thread_use.items():
        if phase not in WORKING_PHASES or phase in phases_with_a_line or not use.wall_s:
            continue
        # An operator's threads wait for each other, and longer if other programs use the cores.
        asleep_s = costs.mean_s(phase) * use.asleep_s / use.wall_s
        yield costs.finding("sleep", asleep_s, may=True, phase=phase)


def find_pattern(costs: StepCosts) -> Iterator[Finding]:
    """Find that every n-th step takes longer, in a part without another finding."""
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
        counted_s = (mean.gc_s or 0.0) + (mean.compile_s or 0.0)
        if counted_s >= EXPLAINED * steady.pattern_s:
            # garbage or compilation, which has a finding of its own
            return
    yield costs.finding(
        "pattern",
        steady.pattern_s,
        phase=pattern.part,
        facts={"every": float(pattern.every)},
    )


def find_odd_steps(costs: StepCosts) -> Iterator[Finding]:
    """Find steps far above the others whose cause has no other finding, and is not another program."""
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
        may=len(unexplained) < _LASTING_COUNT,  # a few need not come again
        phase=worst.part,
        what=worst.cause,
        facts={
            "steps": float(len(unexplained)),
            "step": float(worst.step),
            "seconds": worst.step_s,
        },
    )


def _excess_s(odd: OddStep) -> float:
    return odd.step_s - odd.step_s / odd.ratio


def _has_part_finding(costs: StepCosts, part: str | None) -> bool:
    """Return whether another finding is about what varies in ``part``."""
    if part in ("data", "transfer"):
        return True
    if part != "other":
        return False
    findings = [*find_costly_owners(costs), *find_costs_between_steps(costs)]
    return any(finding.share >= WORTH for finding in findings)


def find_garbage_and_compilation(costs: StepCosts) -> Iterator[Finding]:
    """Find collections of garbage and compilations, by the counters of the mean step."""
    mean = costs.record.mean_counters
    if mean is None:
        return
    if mean.gc_s:
        # What the program collects itself is found with the line that does so.
        explicit_s = sum(
            row.seconds for row in costs.record.python_times if row.what == "gc.collect"
        )
        profiler_s = mean.gc_own_s or 0.0
        yield costs.finding("garbage", max(mean.gc_s - profiler_s - explicit_s, 0.0))
    if mean.compile_s:
        yield costs.finding("compilation", mean.compile_s, owner=mean.compiled)


def find_diagnostics(costs: StepCosts) -> Iterator[Finding]:
    """Find checks for errors, and a profiler of the Trainer, that are switched on and cost time."""
    if costs.settings.anomalies:
        compute_s = sum(costs.mean_s(phase) for phase in _MODEL_PHASES)
        yield costs.finding("anomalies", compute_s)
    if costs.settings.profiler is not None:
        yield costs.finding(
            "profiler", costs.step_s, may=True, owner=costs.settings.profiler
        )


def find_syncs(costs: StepCosts) -> Iterator[Finding]:
    """Find lines that make the host wait for the device, by the gaps that they leave."""
    waterfall = costs.record.waterfall
    syncs = costs.record.syncs
    if waterfall is None or not syncs:
        return
    waits_s = 0.0
    for term in waterfall.terms:
        if term.name != "gaps":
            continue
        for contributor in term.contributors:
            # any case: Sync and sync
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
    """Find the cost of a step that does not depend on the batch: k times the samples leave 1/k of it per sample."""
    fixed_s = sum(costs.regular_s(phase) for phase in _FIXED_PHASES)
    # the products of the optimizer have their own finding
    products_s = costs.term_s("optimizer_products")
    own_code_s = sum(finding.saves_s for finding in find_costly_optimizer_code(costs))
    fixed_s -= min(products_s + own_code_s, costs.regular_s("optimizer"))
    if not costs.contended:
        # contention stretches gaps, and all else that is known only as a mean
        python_s = sum(finding.saves_s for finding in find_slow_python(costs))
        fixed_s += max(costs.term_s("gaps") - python_s, 0.0)
        fixed_s += sum(action.seconds for action in costs.actions(_belongs_to_loop))
    if fixed_s < _LARGE_FIXED_SHARE * costs.step_s:
        return
    free_share = costs.settings.memory_free_share
    memory_is_full = free_share is not None and free_share < 0.1
    if memory_is_full:
        return

    samples = costs.settings.samples_per_batch
    growth = 2.0  # how many times the batch may be larger
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
    # One or two samples are few for any model with so much fixed cost.
    has_few_samples = samples is not None and samples <= _FEW_SAMPLES and growth > 2.0
    saves_s = min(fixed_s, costs.step_s) * (1.0 - 1.0 / growth)
    yield costs.finding("small_batch", saves_s, may=not has_few_samples, facts=facts)


def find_slow_optimizer(costs: StepCosts) -> Iterator[Finding]:
    """Find an optimizer whose step could be fused into few kernels, and slow clipping.

    The optimizer is found if it could be fused and is not, or if it updates one weight after another on a device. That
    many kernels are launched is a fact (``may`` is False) if the user requested it with ``foreach=False``. A fused
    optimizer still has to move its bytes: it saves what is beyond their time, or all of the optimizer's time if that of
    the bytes is unknown. On a busy machine the rate of the memory is not known well enough.

    Clipping is found if it takes twice the share of the step that makes a finding worth reporting.
    """
    by_weight = costs.settings.weight_by_weight
    could_be_fused = costs.settings.fused_optimizer is False
    has_kernels_by_weight = by_weight and costs.on_device
    if could_be_fused or has_kernels_by_weight:
        floor = costs.record.floors.get("optimizer")
        floor_s = 0.0
        if floor is not None and not costs.contended:
            floor_s = floor.seconds or 0.0
        saves_s = max(costs.regular_s("optimizer") - floor_s, 0.0)
        yield costs.finding("optimizer", saves_s, may=not by_weight, phase="optimizer")
    clip_s = costs.regular_s("clip")
    clips_slowly = clip_s >= 2 * WORTH * costs.whole_s
    if clips_slowly:
        yield costs.finding("clip", clip_s, may=True, phase="clip")


def find_optimizer_products(costs: StepCosts) -> Iterator[Finding]:
    """Find an optimizer that spends its time on matrix products of its own, as Muon, SOAP and Shampoo do."""
    floor = costs.record.floors.get("optimizer")
    if floor is None or not floor.flops:
        return
    # the products are most of such an optimizer
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
    """Find the function of the program's own optimizer that takes most of it, in torch's operators too.

    Matrix products of an optimizer have a finding of their own, with a remedy of their own.
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
    """Find gaps and memory traffic that fusing saves; nothing if neither is known, or contention had a part."""
    waterfall = costs.record.waterfall
    if costs.settings.compiled is not False or waterfall is None or costs.contended:
        return
    fused_s = 0.0
    for term in waterfall.terms:
        if term.name not in ("gaps", "bandwidth", "beyond_bandwidth"):
            continue
        if term.phases:
            fused_s += sum(term.phases.get(phase, 0.0) for phase in _MODEL_PHASES)
        else:
            fused_s += term.seconds
    explained_s = 0.0
    for finding in (*find_slow_python(costs), *find_sleeping_phases(costs)):
        if finding.phase in _MODEL_PHASES:
            explained_s += finding.saves_s
    for operators in costs.record.needless_operators:
        explained_s += _needless_s(costs, operators)
    yield costs.finding(
        "compile",
        max(fused_s - explained_s, 0.0),
        may=True,
        **_costliest_operator(costs),
    )


def _costliest_operator(costs: StepCosts) -> dict[str, Any]:
    """Return the fields of a finding for the costliest operator that can be fused, if it has a tenth of the step."""
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
    """Find matmuls in more bits than needed; on a busy machine only their time at the peak is certain.

    A step that factorizes matrices or solves systems in float64 may need its digits: it has no such finding.
    """
    settings = costs.settings
    products_s = _matmul_s(costs)
    is_double = settings.precision == "float64" or str(settings.precision).startswith(
        "64"
    )
    if is_double and costs.record.factorizing_operators:
        return
    if is_double:
        # Twice the bytes, and half the FLOP/s at best: in float32, computing takes at most half as long. Some
        # operators, such as convolutions of a CPU, have no fast version for float64 at all.
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


def _matmul_s(costs: StepCosts) -> float:
    """Return the seconds that matmuls take: by the waterfall, or else by the share of the ceiling that is reached."""
    if costs.record.waterfall is not None:
        if costs.contended:
            # Other programs lengthen products and lower the clock, so that only the ideal is surely this program's.
            return costs.term_s("ideal")
        return costs.term_s("ideal", "slow_products", "clock")
    use = costs.record.utilisation
    if use is None:
        return 0.0
    used_share = use.of_ceiling or use.hfu or 0.0
    # The share is of the step as it was measured: without the wait that prefetched batches hid.
    running_s = costs.step_s - costs.hidden_wait_s
    return used_share * running_s


def find_recomputation(costs: StepCosts) -> Iterator[Finding]:
    """Find recomputed activations for which there may be memory."""
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
    """Return the seconds of recomputation: at least forward's time times its share of forward's FLOPs.

    The waterfall's term holds its matmuls at their peak; the rest of what is recomputed is in other terms.
    """
    term_s = costs.term_s("recomputation")
    use = costs.record.utilisation
    if use is None or not use.flops.forward:
        return term_s
    repeated_share = min(use.flops.recomputation / use.flops.forward, 1.0)
    return max(term_s, repeated_share * costs.regular_s("forward", clock="time"))


def find_padding(costs: StepCosts) -> Iterator[Finding]:
    """Find batches that are wider than their longest sequence, and sequences of very different lengths in a batch.

    Ignored labels count as padding only at the end of a batch: elsewhere a loss may leave them out on purpose. What is
    padding within a batch is known only where the lengths of its sequences are.
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
    """Find what the waterfall shows as needless: work that is done twice, unused gradients, large broadcasts.

    It may be wanted: a second pass may draw other random numbers, and a table of all pairs may be meant.
    """
    waterfall = costs.record.waterfall
    if waterfall is None:
        return
    by_place: defaultdict[tuple[str, str | None], list[NeedlessWork]] = defaultdict(
        list
    )
    for work in waterfall.needless:
        by_place[work.kind, work.what].append(work)
    for (kind, what), works in by_place.items():
        longest = max(works, key=lambda work: work.seconds)
        passes = max(works, key=lambda work: work.phase == "forward").count
        yield costs.finding(
            cast(FindingName, kind),
            sum(work.seconds for work in works),
            may=True,
            phase=longest.phase,
            what=what,
            facts={"passes": passes},
        )


def find_needless_operators(costs: StepCosts) -> Iterator[Finding]:
    """Find operators that may be needless by how data flows through the step: a finding for each reason.

    They were timed in a step that is slowed down by that: what counts is their share of the operators of each phase.
    What the trace has shown as needless, with the module's name, is left out.
    """
    waterfall = costs.record.waterfall
    traced_kinds = (
        set() if waterfall is None else {work.kind for work in waterfall.needless}
    )
    for operators in costs.record.needless_operators:
        if not traced_kinds.isdisjoint(_TRACED_KINDS.get(operators.reason, ())):
            continue
        saves_s = _needless_s(costs, operators)
        is_double = operators.reason == "double"
        tolerance = _DOUBLE_TOLERANCE if is_double else _NEEDLESS_TOLERANCE
        shares = operators.phase_shares
        facts = {"share": operators.share, "operators": float(operators.count)}
        yield costs.finding(
            _FINDING_OF_REASON[operators.reason],
            saves_s,
            high_s=tolerance * saves_s,
            may=operators.reason not in _CERTAINLY_NEEDLESS,
            phase=max(shares, key=lambda phase: shares[phase] * costs.mean_s(phase)),
            owner=operators.function,
            file=operators.file,
            line=operators.line,
            what=operators.what,
            facts=facts,
        )


def _needless_s(costs: StepCosts, operators: NeedlessOperators) -> float:
    """Return the seconds of a mean step that ``operators`` take."""
    return sum(
        share * costs.mean_s(phase) for phase, share in operators.phase_shares.items()
    )


def find_communication(costs: StepCosts) -> Iterator[Finding]:
    """Find communication that overlaps with no work: by the ranks' figures, or else by the waterfall."""
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
