"""What binds a run: the first cause that its figures support, with its share of the step and how sure that is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lm_profiler.analysis.savings import StepCosts
from lm_profiler.analysis.steps.statistics import FEWEST_VALUES
from lm_profiler.analysis.steps.step_model import StepModel
from lm_profiler.record.kernels import KernelTable
from lm_profiler.record.parts import INPUT_PHASES, PHASES, WORKING_PHASES
from lm_profiler.record.run_record import Bound, Verdict
from lm_profiler.record.steps import StepRow

# A cause binds the step from this share on: its remedy must then save more than the remedies of other causes.
INPUT, COMMUNICATION, MEMORY, OTHER = 1 / 3, 0.20, 0.50, 0.30
STRAGGLER = 0.10  # share of the step that mending a straggler saves: it helps all ranks, whatever else binds
_HOST = 0.50  # share of marks at which the device had finished
_IDLE = 0.30  # share of the traced steps in which the device was idle
_BUSY = 0.40  # share of the ceiling: a device that reaches it computes and does not wait
_WORKING = 0.10  # the same on the CPU, which also calls operators: below it, calls or memory may bind
_KEEPS_UP = 0.98  # host time over device time from which launching may set the pace
# findings about the program's own code, and about what passes between its steps
_CODE = ("sleep", "python", "owner", "logging", "garbage", "compilation", "pattern")
_LOADER = ("worker_start", "reload")
_BETWEEN = ("validation", "checkpoint", "epoch", *_LOADER)


@dataclass(frozen=True)
class RunFacts(StepCosts):
    """What a run's record, its steps and its trace show."""

    rows: Sequence[StepRow]  # the measured steps, each the mean over the ranks, with the device's time
    model: StepModel  # of these
    device_idle: float | None = None  # share of marks at which the device had finished when the next phase came
    kernels: KernelTable | None = None  # of its trace

    def share(self, *parts: str) -> float:
        return sum(self.mean_s(part) for part in parts) / self.step_s

    def interval(self, share: float, parts: Sequence[str]) -> tuple[float, float]:
        """Return the 95 % interval of the ``share`` that ``parts`` have: that of parts - share x step, over the step.

        A mean step is added to it, because the model's intervals are of times.
        """
        steps = np.array([row.time("step") for row in self.rows])
        off = np.array([sum(row.time(part) for part in parts) for row in self.rows]) - share * steps
        interval = self.model.interval_of(off + steps.mean())
        half = 1.0 if interval is None else (interval.high - interval.low) / 2.0 / float(steps.mean())
        return max(share - half, 0.0), min(share + half, 1.0)

    @property
    def utilisation(self) -> float | None:
        """The share of the machine's own ceiling that a step reaches, else of the datasheet's peak."""
        use = self.record.utilisation
        return None if use is None else use.hfu if use.of_ceiling is None else use.of_ceiling

    @property
    def idle_share(self) -> float | None:
        """The share of the traced steps in which the device had nothing to do; None where none was traced."""
        kernels = self.kernels
        if kernels is None or kernels.source != "kernels" or not kernels.window_s:
            return None
        return sum(phase.idle_s for phase in kernels.phases.values()) / kernels.window_s


def binding(seen: RunFacts) -> Verdict | None:
    """Return what binds the run; None where no step was measured.

    A device that waits for data or for the host says nothing about its arithmetic, and one that communicates or waits
    for memory does not profit from more FLOP/s. Ranks that wait for a straggler say nothing about themselves. So causes
    are checked in this order. On a busy machine, causes that it distorts are left out.
    """
    if not seen.rows or seen.step_s <= 0.0:
        return None
    for ask in (_straggler, _largest_cost, _input, _communication, _program, _host, _memory, _compute):
        verdict = ask(seen)
        if verdict is not None:
            return _certain(verdict, seen)
    return _certain(_nothing(seen), seen)


def _largest_cost(seen: RunFacts) -> Verdict | None:
    """Judge what passes between steps, and code of the program that takes longer than the wait for batches.

    So the verdict is about what the first finding proposes to change.
    """
    passed = _between(seen)
    if passed is not None:
        return passed
    code = _program(seen)
    if code is None or code.share is None or code.share <= seen.share(*INPUT_PHASES):
        return None
    return code


def _between(seen: RunFacts) -> Verdict | None:
    findings = seen.record.findings
    if not findings or findings[0].name not in _BETWEEN or findings[0].share < OTHER:
        return None
    longest = findings[0]
    facts = {}
    seconds = sum(passed.seconds for passed in seen.record.outside if passed.what == longest.name)
    if seconds and seen.record.stages_s:
        facts = {"seconds": seconds, "run_s": seen.record.stages_s}
    because = f"between steps: {longest.name}"
    bound_by: Bound = "input" if longest.name in _LOADER else "between steps"
    return Verdict(bound_by=bound_by, share=longest.share, because=because, facts=facts)


def _certain(verdict: Verdict, seen: RunFacts) -> Verdict:
    """Return ``verdict``, not certain if steps do not show it, or contention distorts what rates compare with."""
    distorted = verdict.bound_by in ("compute", "memory bandwidth", "host", None)
    few = seen.model.end - seen.model.first < FEWEST_VALUES
    noisy = seen.record.steadiness is not None and seen.record.steadiness.word == "noisy"
    open_ = verdict.or_bound_by is not None
    unsure = few or open_ or (distorted and (seen.contended or noisy))
    return verdict.model_copy(update={"certain": not unsure})


def _straggler(seen: RunFacts) -> Verdict | None:
    ranks = seen.record.ranks
    if ranks is None or not ranks.finding.saves_s or not ranks.step_s:
        return None
    share = ranks.finding.saves_s / ranks.step_s
    ends = [None if end is None else end / ranks.step_s for end in (ranks.finding.low_s, ranks.finding.high_s)]
    if share < STRAGGLER:
        return None
    return Verdict(bound_by="straggler", share=share, share_low=ends[0], share_high=ends[1], because="straggler")


def _input(seen: RunFacts) -> Verdict | None:
    """Judge the wait for batches: it binds from a third of the step on; near that, the next cause is reported too."""
    share = seen.share(*INPUT_PHASES)
    low, high = seen.interval(share, INPUT_PHASES)
    if high < INPUT:
        return None
    facts = {"data": seen.share("data"), "transfer": seen.share("transfer")}
    said = Verdict(bound_by="input", share=share, share_low=low, share_high=high, because="input", facts=facts)
    if low >= INPUT:
        return said
    other = next((verdict for ask in (_program, _host, _memory, _compute) if (verdict := ask(seen)) is not None), None)
    or_bound_by: Bound | None = "compute" if other is None else other.bound_by
    if share >= INPUT:
        return said.model_copy(update={"or_bound_by": or_bound_by})
    return said.model_copy(update={"bound_by": or_bound_by, "or_bound_by": "input"})


def _communication(seen: RunFacts) -> Verdict | None:
    """Judge exposed communication: from the ranks' figures, without their waiting, else from rank 0's trace."""
    ranks = seen.record.ranks
    share = None if seen.kernels is None else seen.kernels.communication_share
    if ranks is not None and ranks.exposed_s and ranks.step_s > 0.0:
        share = sum(ranks.exposed_s.values()) / ranks.step_s
    if share is None or share < COMMUNICATION:
        return None
    return Verdict(bound_by="communication", share=share, because="communication")


def _program(seen: RunFacts) -> Verdict | None:
    """Judge code of the program that sleeps, computes in Python or logs, by the findings that need no trial."""
    code = [finding for finding in seen.record.findings if finding.name in _CODE and not finding.may]
    binding_code = [finding for finding in code if finding.share >= OTHER]
    if not binding_code:
        return None
    longest = binding_code[0]  # the likeliest saving, which the advice is about too
    return Verdict(bound_by="program code", share=longest.share, because=f"program code: {longest.name}")


def _host(seen: RunFacts) -> Verdict | None:
    """Judge the host's launching.

    A device that has finished at a mark may have been busy all the way to it: it must be known to be idle, too.
    """
    idle, used = seen.idle_share, seen.utilisation
    if not seen.on_device or (idle is None and used is None):
        return None  # host and device are one, or waiting cannot be told from working
    if (idle is not None and idle < _IDLE) or (used is not None and used >= _BUSY):
        return None
    facts = {} if idle is None else {"idle": idle}
    if seen.device_idle is not None:
        facts["marks"] = seen.device_idle
        launches = seen.device_idle >= _HOST
    else:
        times = seen.record.time, seen.record.host_time
        facts["device_s"], facts["host_s"] = (
            sum(of[part].mean or 0.0 for part in WORKING_PHASES if part in of) for of in times
        )
        launches = facts["device_s"] > 0.0 and facts["host_s"] >= _KEEPS_UP * facts["device_s"]
    return Verdict(bound_by="host", share=idle, because="host", facts=facts) if launches else None


def _memory(seen: RunFacts) -> Verdict | None:
    share = None if seen.kernels is None else seen.kernels.memory_bound_share
    if share is None or share < MEMORY:
        return None
    return Verdict(bound_by="memory bandwidth", share=share, because="memory bandwidth")


def _compute(seen: RunFacts) -> Verdict | None:
    share, used = seen.share(*WORKING_PHASES), seen.utilisation
    if share < 1.0 - OTHER or used is None or used < (_BUSY if seen.on_device else _WORKING):
        return None  # busy, but with what? Low or unknown utilisation does not say
    low, high = seen.interval(share, WORKING_PHASES)
    facts = {"optimizer": seen.share("optimizer")}
    if not seen.contended:
        facts["utilisation"] = used
    return Verdict(bound_by="compute", share=share, share_low=low, share_high=high, because="compute", facts=facts)


def _nothing(seen: RunFacts) -> Verdict:
    """Return what stands out though nothing binds: time outside every phase, or how little of the machine is used."""
    outside, used = 1.0 - seen.share(*PHASES), seen.utilisation
    facts = {"working": seen.share(*WORKING_PHASES), "outside": outside}
    because = "outside" if outside >= OTHER else "shared" if seen.contended else "unknown"
    if because == "unknown" and used is not None:
        because, facts["utilisation"] = "small operators", used
    return Verdict(bound_by=None, share=None, because=because, facts=facts)
