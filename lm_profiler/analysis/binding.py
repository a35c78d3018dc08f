"""Finds the bottleneck of a run: the first cause that its figures support, with its share of the step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lm_profiler.analysis.savings.step_costs import StepCosts
from lm_profiler.analysis.steps.statistics import FEWEST_VALUES
from lm_profiler.analysis.steps.step_model import StepModel
from lm_profiler.record.kernels import KernelTable
from lm_profiler.record.parts import (
    BETWEEN_STEPS,
    INPUT_PHASES,
    PHASES,
    WORKING_PHASES,
)
from lm_profiler.record.run_record import (
    EPOCH,
    Bound,
    OutsideSteps,
    TimeSummary,
    Verdict,
)
from lm_profiler.record.steps import StepRow

# A cause counts as the bottleneck if its share of the step is at least this.
INPUT = 1 / 3
COMMUNICATION = 0.20  # share of exposed communication
MEMORY = 0.50  # share of kernels limited by the memory bandwidth
REMAINDER = 0.30  # share of the program's own code, of the time between steps, or of the time outside all phases
# share that fixing a straggler saves; smaller than for other causes, because all ranks gain
STRAGGLER = 0.10
_HOST = 0.50  # share of the marks at which the device had already finished its work
_IDLE = 0.30  # share of the traced steps in which the device was idle
# A device that reaches this share of its peak computes, and does not wait.
_LEAST_UTILISATION_OF_DEVICE = 0.40
# The same on the CPU, which also has the overhead of calling operators. Below it, overhead or memory may be the limit.
_LEAST_UTILISATION_OF_CPU = 0.10
_KEEPS_UP = 0.98  # if host time is at least this share of device time, launching may be the limit
# findings about the program's own code
_CODE_FINDINGS = (
    "slow_call",
    "threads",
    "sleep",
    "python",
    "owner",
    "logging",
    "garbage",
    "compilation",
    "pattern",
)
_LOADER_FINDINGS = ("worker_start", "reload")
_BETWEEN_STEPS_FINDINGS = ("validation", "checkpoint", "epoch", *_LOADER_FINDINGS)


@dataclass(frozen=True)
class RunFacts(StepCosts):
    """Facts about a run from its record, its steps and its trace."""

    # the measured steps, each a mean over the ranks, with times of the device
    rows: Sequence[StepRow]
    model: StepModel  # the model of the times of these steps
    # share of the marks between phases at which the device had already finished its work
    device_idle: float | None = None
    # the kernel table of the trace; None without a trace
    kernels: KernelTable | None = None

    def share(self, *parts: str) -> float:
        """Return the share of the mean step that ``parts`` take."""
        return sum(self.mean_s(part) for part in parts) / self.step_s

    def interval(self, share: float, parts: Sequence[str]) -> tuple[float, float]:
        """Return the 95 % interval of the ``share`` of the step that ``parts`` take; 0 to 1 if it is unknown."""
        # (steps,) each
        steps_s = np.array([row.time("step") for row in self.rows])
        parts_s = np.zeros(len(self.rows))
        for part in parts:
            parts_s += [row.time(part) for row in self.rows]
        # The uncertainty of a ratio of means is that of the mean of parts - share x step, divided by the mean step.
        # The mean step is added, because the model only gives intervals of positive times.
        distances_s = parts_s - share * steps_s
        mean_step_s = steps_s.mean()
        interval = self.model.interval_of(distances_s + mean_step_s)
        half_width = 1.0
        if interval is not None:
            half_width_s = (interval.high - interval.low) / 2.0
            half_width = half_width_s / float(mean_step_s)
        return max(share - half_width, 0.0), min(share + half_width, 1.0)

    @property
    def utilisation(self) -> float | None:
        """The share of the machine's measured peak that a step reaches, or else of the peak of its datasheet.

        None if it is unknown, or if it is a low lower bound, because not all FLOPs were counted.
        """
        use = self.record.utilisation
        if use is None:
            return None
        share = use.hfu if use.of_ceiling is None else use.of_ceiling
        if share is None:
            return None
        is_low = share < _LEAST_UTILISATION_OF_DEVICE
        if is_low and use.flops.uncounted:
            return None
        return share

    @property
    def idle_share(self) -> float | None:
        """The share of the traced steps in which the device was idle; None without a trace of a device."""
        kernels = self.kernels
        if kernels is None or kernels.source != "kernels" or not kernels.window_s:
            return None
        idle_s = sum(phase.idle_s for phase in kernels.phases.values())
        return idle_s / kernels.window_s


_Check = Callable[[RunFacts], Verdict | None]


def binding(run: RunFacts) -> Verdict | None:
    """Return the bottleneck of the run; None if no step was measured.

    The order of the checks matters. While ranks wait for a straggler, no other figure means anything. A device that
    waits for data or for the host shows nothing about its arithmetic. And one that communicates or waits for memory
    would not profit from more FLOP/s.
    """
    if not run.rows or run.step_s <= 0.0:
        return None
    verdict = _first_verdict(
        run,
        (
            _check_straggler,
            _check_largest_cost,
            _check_input,
            _check_communication,
            _check_program_code,
            _check_host,
            _check_memory,
            _check_compute,
        ),
    )
    if verdict is None:
        verdict = _verdict_without_bottleneck(run)
    return _with_certainty(verdict, run)


def _first_verdict(run: RunFacts, checks: Sequence[_Check]) -> Verdict | None:
    """Return the verdict of the first check that has one; None if none has."""
    for check in checks:
        verdict = check(run)
        if verdict is not None:
            return verdict
    return None


def _with_certainty(verdict: Verdict, run: RunFacts) -> Verdict:
    """Return ``verdict`` with ``certain`` set: False if there are few steps, an alternative, or distorted rates."""
    has_few_steps = run.model.end - run.model.begin < FEWEST_VALUES
    has_alternative = verdict.or_bound_by is not None
    is_noisy = (
        run.record.steadiness is not None and run.record.steadiness.word == "noisy"
    )
    # These verdicts compare the time of a step with what the machine can do at best.
    compares_rates = verdict.bound_by in ("compute", "memory bandwidth", "host", None)
    is_distorted = compares_rates and (run.contended or is_noisy)
    is_certain = not (has_few_steps or has_alternative or is_distorted)
    return verdict.model_copy(update={"certain": is_certain})


def _check_straggler(run: RunFacts) -> Verdict | None:
    """Check whether the ranks wait for a straggler."""
    ranks = run.record.ranks
    if ranks is None or not ranks.finding.saves_s or not ranks.step_s:
        return None
    whole_s = ranks.step_s
    because = "straggler"
    if ranks.finding.phase == BETWEEN_STEPS:
        whole_s = run.whole_s
        because = "straggler between steps"
    share = ranks.finding.saves_s / whole_s
    if share < STRAGGLER:
        return None
    low_s = ranks.finding.low_s
    high_s = ranks.finding.high_s
    return Verdict(
        bound_by="straggler",
        share=share,
        share_low=None if low_s is None else low_s / whole_s,
        share_high=None if high_s is None else high_s / whole_s,
        because=because,
    )


def _check_largest_cost(run: RunFacts) -> Verdict | None:
    """Check the time between steps, and the program's own code if it takes longer than the wait for batches.

    They are checked early so that the verdict agrees with the first finding.
    """
    between_steps = _check_between_steps(run)
    if between_steps is not None:
        return between_steps
    code = _check_program_code(run)
    if code is None or code.share is None or code.share <= run.share(*INPUT_PHASES):
        return None
    return code


def _check_between_steps(run: RunFacts) -> Verdict | None:
    """Check the time between steps, if the first finding is about it."""
    findings = run.record.findings
    if not findings:
        return None
    costliest = findings[0]
    if costliest.name not in _BETWEEN_STEPS_FINDINGS or costliest.share < REMAINDER:
        return None
    facts = {}
    if costliest.name != EPOCH:
        # The time of an epoch boundary is not stated, because its share also includes part of a step.
        facts = _facts_of_activity(run.record.outside, costliest.name)
    bound_by: Bound = "between steps"
    if costliest.name in _LOADER_FINDINGS:
        bound_by = "input"
    because = f"between steps: {costliest.name}"
    return Verdict(
        bound_by=bound_by, share=costliest.share, because=because, facts=facts
    )


def _facts_of_activity(outside: Sequence[OutsideSteps], name: str) -> dict[str, float]:
    """Return how often the activity ``name`` was seen, how long it takes each time, and after how many steps it comes.

    Empty if the activity is unknown.
    """
    activities = [activity for activity in outside if activity.what == name]
    times = sum(activity.times for activity in activities)
    per_step_s = sum(activity.per_step_s for activity in activities)
    if not times or not per_step_s:
        return {}
    each_s = sum(activity.seconds for activity in activities) / times
    return {"times": float(times), "each_s": each_s, "every": each_s / per_step_s}


def _check_input(run: RunFacts) -> Verdict | None:
    """Check the wait for batches and their transfer.

    If the interval of their share contains the threshold, the next cause is reported as an alternative.
    """
    share = run.share(*INPUT_PHASES)
    low, high = run.interval(share, INPUT_PHASES)
    if high < INPUT:
        return None
    facts = {"data": run.share("data"), "transfer": run.share("transfer")}
    verdict = Verdict(
        bound_by="input",
        share=share,
        share_low=low,
        share_high=high,
        because="input",
        facts=facts,
    )
    if low >= INPUT:
        return verdict

    next_verdict = _first_verdict(
        run, (_check_program_code, _check_host, _check_memory, _check_compute)
    )
    next_cause: Bound | None = "compute"
    if next_verdict is not None:
        next_cause = next_verdict.bound_by
    if share >= INPUT:
        return verdict.model_copy(update={"or_bound_by": next_cause})
    return verdict.model_copy(update={"bound_by": next_cause, "or_bound_by": "input"})


def _check_communication(run: RunFacts) -> Verdict | None:
    """Check exposed communication, by the figures of the ranks (without waiting), or else by the trace of rank 0."""
    ranks = run.record.ranks
    share = None
    if ranks is not None and ranks.exposed_s and ranks.step_s > 0.0:
        share = sum(ranks.exposed_s.values()) / ranks.step_s
    elif run.kernels is not None:
        share = run.kernels.communication_share
    if share is None or share < COMMUNICATION:
        return None
    return Verdict(bound_by="communication", share=share, because="communication")


def _check_program_code(run: RunFacts) -> Verdict | None:
    """Check the program's own code that sleeps, computes in Python or logs, by the findings that are certain."""
    # the first finding, with the largest likely saving, is also the one with the advice
    for finding in run.record.findings:
        is_about_code = finding.name in _CODE_FINDINGS
        if is_about_code and not finding.may and finding.share >= REMAINDER:
            share = finding.share
            if finding.name == "owner" and finding.phase == "other":
                # The sentence is about all code outside the phases, of which the finding may name a part.
                share = run.share("other")
            return Verdict(
                bound_by="program code",
                share=share,
                because=f"program code: {finding.name}",
            )
    return None


def _check_host(run: RunFacts) -> Verdict | None:
    """Check whether the host launches work too slowly for the device.

    That the device has finished at most marks is not enough: it may have been busy until just before. It must also have
    been idle in the trace, or have a low utilisation.
    """
    idle_share = run.idle_share
    utilisation = run.utilisation
    if not run.on_device:  # the host itself computes
        return None
    if idle_share is None and utilisation is None:
        # waiting cannot be distinguished from working
        return None
    if idle_share is not None and idle_share < _IDLE:
        return None
    if utilisation is not None and utilisation >= _LEAST_UTILISATION_OF_DEVICE:
        return None

    # The host sets the pace if the device had mostly finished at the marks, or without these figures, if the host
    # takes about as long as the device.
    facts = {}
    if idle_share is not None:
        facts["idle"] = idle_share
    if run.device_idle is not None:
        facts["marks"] = run.device_idle
        host_sets_pace = run.device_idle >= _HOST
    else:
        device_s = _working_s(run.record.time)
        host_s = _working_s(run.record.host_time)
        facts["device_s"] = device_s
        facts["host_s"] = host_s
        host_sets_pace = device_s > 0.0 and host_s >= _KEEPS_UP * device_s
    if not host_sets_pace:
        return None
    return Verdict(bound_by="host", share=idle_share, because="host", facts=facts)


def _working_s(times: Mapping[str, TimeSummary]) -> float:
    """Return the mean seconds of the phases that compute."""
    return sum(times[phase].mean or 0.0 for phase in WORKING_PHASES if phase in times)


def _check_memory(run: RunFacts) -> Verdict | None:
    """Check whether kernels limited by the memory bandwidth take most of the step."""
    if run.kernels is None:
        return None
    share = run.kernels.memory_bound_share
    if share is None or share < MEMORY:
        return None
    return Verdict(bound_by="memory bandwidth", share=share, because="memory bandwidth")


def _check_compute(run: RunFacts) -> Verdict | None:
    """Check whether computing takes most of the step, at a rate that shows that arithmetic is the limit."""
    share = run.share(*WORKING_PHASES)
    utilisation = run.utilisation
    least_utilisation = (
        _LEAST_UTILISATION_OF_DEVICE if run.on_device else _LEAST_UTILISATION_OF_CPU
    )
    if share < 1.0 - REMAINDER:
        # too much of the step is in other phases, or outside all phases
        return None
    if utilisation is None or utilisation < least_utilisation:
        # the phases may be busy with something else than arithmetic
        return None
    low, high = run.interval(share, WORKING_PHASES)
    # the sentence of the verdict also states the optimizer's share
    facts = {"optimizer": run.share("optimizer")}
    if not run.contended:
        # On a shared machine the sentence omits the utilisation, because other programs lower it.
        facts["utilisation"] = utilisation
    return Verdict(
        bound_by="compute",
        share=share,
        share_low=low,
        share_high=high,
        because="compute",
        facts=facts,
    )


def _verdict_without_bottleneck(run: RunFacts) -> Verdict:
    """Return the verdict for a run without a bottleneck; it states what is conspicuous, such as a low utilisation."""
    outside_share = 1.0 - run.share(*PHASES)
    utilisation = run.utilisation
    facts = {"working": run.share(*WORKING_PHASES), "outside": outside_share}
    if outside_share >= REMAINDER:
        because = "model outside" if run.calls_model_unmarked else "outside"
    elif run.contended:
        because = "shared"
    elif utilisation is not None:
        because = "small operators"
        facts["utilisation"] = utilisation
    else:
        because = "unknown"
    return Verdict(bound_by=None, share=None, because=because, facts=facts)
