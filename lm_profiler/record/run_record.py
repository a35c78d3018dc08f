"""``run.json``, the record of one run: times of its steps, the code that takes them, and all other parts."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

# ruff: noqa: F403, F405  # all classes of a record can be imported from here, without a list kept by hand
from lm_profiler.record import machine
from lm_profiler.record.figure import Figure, Place, figure, within
from lm_profiler.record.files import *
from lm_profiler.record.findings import *
from lm_profiler.record.machine import *
from lm_profiler.record.parts import PARTS, PHASES, STAGES, WORDS, missing_parts
from lm_profiler.record.rank_facts import *


class TimeSummary(Part):
    """Statistics of one part over the measured steps, in seconds; None if there are too few steps.

    The 95 % interval of the mean allows for autocorrelated steps; records of version 0.2 have none.
    """

    n: int
    mean: float | None = None
    mean_low: float | None = None
    mean_high: float | None = None
    std: float | None = None
    cv: float | None = None
    median: float | None = None
    p5: float | None = None
    p95: float | None = None
    min: float | None = None
    max: float | None = None


class Throughput(Part):
    """Throughput of all ranks together, at the mean step. Tokens are None if it is unknown how many a batch has."""

    tokens_per_s: float | None = figure(
        "tokens/s",
        "tokens/s",
        "tokens per step on all ranks, divided by the duration of the step (in an evaluation, on the slowest rank)",
        goes_by_step=True,
        place=Place.HEADLINE,
        run_tag="tokens_per_s",
        tag="throughput/tokens_per_s",
    )
    tokens_per_step: int | None = figure(
        "tokens/step", "count", "mean number of tokens per step, all ranks together"
    )
    samples_per_s: float | None = figure(
        "samples/s",
        "samples/s",
        "samples per step on all ranks, divided by the duration of the step",
        goes_by_step=True,
        default=None,
    )
    samples_per_step: int | None = figure(
        "samples/step",
        "count",
        "mean number of samples (rows of batches) per step, all ranks together",
        default=None,
    )
    useful_tokens_per_s: float | None = figure(
        "useful tokens/s",
        "tokens/s",
        "tokens without padding per step on all ranks, divided by the duration of the step",
        goes_by_step=True,
        place=Place.TABLE,
        run_tag="useful_tokens_per_s",
        default=None,
    )
    useful_tokens_per_step: int | None = figure(
        "useful tokens/step",
        "count",
        "mean number of tokens without padding per step, all ranks together",
        default=None,
    )
    occupancy: float | None = figure(
        "occupancy",
        "%",
        "share of the tokens in the batches that is not padding",
        default=None,
    )
    unused_share: float | None = figure(
        "unused positions",
        "%",
        "share of the tokens in the batches that lies beyond the longest sequence of the batch",
        default=None,
    )
    squared_lengths_per_step: int | None = figure(
        "squared lengths/step",
        "count",
        "sum of the squared lengths of the sequences of a step, without padding; the work of attention is "
        "proportional to it",
        default=None,
    )


class StepLevel(Part):
    """A stretch of measured steps at one level, by the numbers that the run gave them."""

    first: int = figure("from step", "count", "first step of the level")
    last: int = figure("to step", "count", "last step of the level")
    seconds: float = figure(
        "level", "ms", "mean duration of the regular steps of the level"
    )
    # the part that makes up most of the change from the level before; ``all parts`` if all have changed by the same
    # ratio; None for the first level, or if several parts have changed differently
    change_in: str | None = None


class StepPattern(Part):
    """A pattern that repeats after ``every`` steps; the steps at the positions ``slow``, counted from 1, are slower."""

    every: int = figure(
        "period of the pattern",
        "count",
        "number of steps after which the pattern of slow steps repeats",
        "pattern_every",
    )
    slow: list[int] = figure(
        "slow step",
        "count",
        "position of a slow step within the pattern, counted from 1",
        "pattern_slow",
    )
    extra: float = figure(
        "slower by",
        "%",
        "how much longer the slowest steps of the pattern take than the regular steps",
    )
    part: str | None = None  # the part of the step that differs most
    # whether the steps at ``slow`` are those with fewer samples, such as the last of an epoch
    short_batch: bool = False


class StepKind(Part):
    """A kind of steps that is rarer than the others and has no order, such as steps with long batches."""

    share: float = figure(
        "share of the steps",
        "%",
        "share of the measured steps that belong to this rarer kind",
        "kind_share",
    )
    ratio: float = figure(
        "ratio",
        "x",
        "mean duration of the steps of this kind, divided by that of regular steps",
        "kind_ratio",
    )


class Steadiness(Part):
    """The course of the measured steps, by the numbers that the run gave them, and the steps that its figures use.

    The mean step is ``level_s + pattern_s + odd_s``, over the longest level, or with a trend, all but ``cut`` steps.
    """

    # ``noisy``: the level is not known to 5 %; ``slowing``: later steps are slower; ``unsettled``: the level changes
    # in other ways; None: too few steps
    word: Annotated[Literal["noisy", "steady", "slowing", "unsettled"] | None, Newer]
    # another such word that is certain although the level is noisy
    also: Annotated[Literal["slowing", "unsettled"] | None, Newer] = None
    level_s: float | None = figure(
        "level", "ms", "mean duration of the regular steps: those that are neither odd nor the slow steps of a pattern",
        interval=("level_low_s", "level_high_s"), default=None,
    )  # fmt: skip
    level_low_s: float | None = None
    level_high_s: float | None = None
    known_to: float | None = figure(
        "level known to",
        "%",
        "half the width of the level's 95 % interval, as a share of the level",
        default=None,
    )
    pattern_s: float | None = figure(
        "pattern",
        "ms",
        "time that the slow steps of a pattern add to the mean step",
        default=None,
    )
    odd_s: float | None = figure(
        "cost of odd steps",
        "ms",
        "time that odd steps add to the mean step",
        default=None,
    )
    pattern: StepPattern | None = None
    rise: float | None = figure(
        "rise",
        "%",
        "how much longer the last measured steps take than the first ones, by the fitted trend",
        default=None,
    )
    # the kinds of steps besides the most frequent one
    kinds: list[StepKind] = Field(default_factory=list)
    first: int | None = figure(
        "first step used",
        "count",
        "first of the steps from which the run's figures are computed",
        default=None,
    )
    last: int | None = figure(
        "last step used",
        "count",
        "last of the steps from which the run's figures are computed",
        default=None,
    )
    # The number of the first measured step. Records before 0.3 have none, and are given one when they are read.
    first_step: int | None = None
    took_s: float | None = figure(
        "measured time",
        "s",
        "total duration of the steps from which the run's figures are computed",
        default=None,
    )
    levels: list[StepLevel] = Field(default_factory=list)
    lag1: float | None = figure(
        "lag-1", "number", "autocorrelation of the durations of consecutive steps"
    )
    cut: int = figure(
        "steps left out",
        "count",
        "measured steps that the figures leave out, because step times had not reached their level yet",
    )
    bias_of_mean: float | None = figure(
        "bias of the mean",
        "%",
        "how much the mean step would change if the steps left out were included",
    )
    recompilations: int = figure(
        "recompilations",
        "count",
        "how often torch.compile compiled again during the measured steps",
        default=0,
    )
    # None also if sizes explain less than half of the variation
    explained_by_sizes: float | None = figure(
        "explained by batch sizes",
        "%",
        "share of the variation of the step times that the sizes of the batches explain",
        default=None,
    )
    # Version 0.2 wrote these two; old records are still read.
    drift: float | None = None
    evidence: str = ""

    @property
    def words(self) -> list[str]:
        """``word`` and ``also``, without those that are None."""
        return [word for word in (self.word, self.also) if word is not None]


NO_CPU = "waiting for a CPU"  # a cause of slow steps that other programs bring about


class OddStep(Part):
    """A measured step whose duration is far from what the others predict. ``cause`` is None if it was faster."""

    step: int = figure(
        "step",
        "count",
        "number of a step whose duration is far from what the other steps predict",
    )
    step_s: float = figure("time", "ms", "duration of the step")
    ratio: float = figure(
        "ratio",
        "x",
        "duration of the step, divided by the duration that the other steps predict",
    )
    part: str = figure(
        "part", "text", "part of the step that differs most from its usual duration"
    )
    excess_s: float = figure(
        "excess",
        "ms",
        "difference between the duration of that part and its usual duration",
    )
    cause: str | None = figure(
        "cause",
        "text",
        "event that explains at least half of the additional time of the step",
        default=None,
    )
    cause_s: float | None = figure(
        "explained",
        "ms",
        "additional time of the step that the cause explains",
        default=None,
    )
    beside: str | None = figure(
        "unusual counters",
        "text",
        "counters that differ from those of the other steps, if they do not explain the additional time",
        default=None,
    )
    rank: int | None = figure(
        "rank", "count", "rank on which the cause was found", default=None
    )


def worst_first(odd: Iterable[OddStep]) -> list[OddStep]:
    """Sort ``odd``: first the slow steps, the slowest first; then the fast steps, the fastest first."""
    return sorted(odd, key=lambda step: (step.ratio < 1, -abs(step.ratio - 1)))


class StepCounters(Part):
    """The counters of one measured step of one rank, including the ``between_s`` before it. None means unknown."""

    step: int | None = figure(
        "step",
        "count",
        "number of the odd step; empty in the row with the medians of all steps",
        default=None,
    )
    rank: int = figure(
        "rank", "count", "rank on which the counters were read", default=0
    )
    wall_s: float | None = figure(
        "time", "ms", "duration of the step on the host's clock", default=None
    )
    between_s: float | None = figure(
        "before",
        "ms",
        "time between the end of the previous step and the beginning of this step",
        default=None,
    )
    gc_s: float | None = figure(
        "garbage",
        "ms",
        "time of Python's garbage collections in the step",
        default=None,
    )
    gc_own_s: float | None = figure(
        "own garbage",
        "ms",
        "time of the garbage collections in the step that this profiler caused",
        default=None,
    )
    gc_generation: int | None = figure(
        "generation",
        "count",
        "generation of the longest garbage collection in the step",
        default=None,
    )
    compile_s: float | None = figure(
        "compiling", "ms", "time of torch.compile in the step", default=None
    )
    compiled: str | None = figure(
        "compiled",
        "text",
        "function that torch.compile compiled in the step, and the reason for it",
        default=None,
    )
    checkpoint_s: float | None = figure(
        "checkpoint", "ms", "time of saving checkpoints in the step", default=None
    )
    cpu_wait_s: float | None = figure(
        "no CPU",
        "ms",
        "time for which the training thread was ready to run but had no CPU",
        default=None,
    )
    asleep_s: float | None = figure(
        "asleep",
        "ms",
        "time for which the training thread slept, or waited for something other than a CPU",
        default=None,
    )
    cpu_s: float | None = figure(
        "CPU",
        "ms",
        "CPU time of the process in the step, all threads together",
        default=None,
    )
    system_s: float | None = figure(
        "kernel",
        "ms",
        "CPU time that the process spent in the operating system's kernel in the step",
        default=None,
    )
    fault_s: float | None = figure(
        "faults",
        "ms",
        "upper bound of the time that page faults took in the step",
        default=None,
    )
    minor_faults: float | None = figure(
        "minor faults",
        "count",
        "page faults in the step that read nothing from a disk",
        default=None,
    )
    major_faults: float | None = figure(
        "major faults",
        "count",
        "page faults in the step that read from a disk",
        default=None,
    )
    voluntary_switches: float | None = figure(
        "switches",
        "count",
        "how often a thread of the process went to sleep, or waited, in the step",
        default=None,
    )
    involuntary_switches: float | None = figure(
        "involuntary",
        "count",
        "how often a thread lost its CPU in the step although it could have continued",
        default=None,
    )
    alloc_retries: float | None = figure(
        "retries",
        "count",
        "how often the allocator freed its cache in the step to get memory",
        default=None,
    )
    new_segments: float | None = figure(
        "segments",
        "count",
        "number of memory segments that the allocator requested from the driver in the step",
        default=None,
    )
    sm_clock_hz: float | None = figure(
        "SM clock",
        "MHz",
        "clock of the GPU's multiprocessors in the step",
        default=None,
    )
    throttled: list[str] | None = figure(
        "throttled",
        "text",
        "reasons why the GPU lowered its clock in the step",
        default=None,
    )


class LoaderFacts(Part):
    """Rank 0's loader; if fewer batches are ready at the end than before, the steps used up prefetched ones."""

    workers: int | None = figure(
        "workers of the loader",
        "count",
        "number of processes with which rank 0's DataLoader loads batches",
        "loader_workers",
    )
    ahead: int | None = figure(
        "batches prefetched at most",
        "count",
        "largest number of batches that the workers of the DataLoader load ahead of the loop",
        "loader_ahead",
    )
    ready_before: int | None = figure(
        "batches ready at first",
        "count",
        "batches that were loaded but not used yet when the measured steps began",
    )
    ready_after: int | None = figure(
        "batches ready at last",
        "count",
        "batches that were loaded but not used yet when the measured steps ended",
    )
    awake_share: float | None = figure(
        "workers awake",
        "%",
        "share of the time in which at least one worker of the DataLoader computed, or was ready to",
        default=None,
    )

    @property
    def used_up(self) -> int | None:
        """The number of batches prefetched before the measured steps and used up by them; None means unknown."""
        if self.ready_before is None or self.ready_after is None:
            return None
        return max(self.ready_before - self.ready_after, 0)


# what has changed, if the times of all parts of the step have changed by the same ratio
ALL_PARTS = "all parts"

LIGHTNING = "Lightning"  # the owner of Lightning's own work in its loops

OURS = "lm_profiler"  # the owner of the cost of the profiler's own instruments

# First words of the names of gaps between phases, which are the actions of a loop without a Trainer. Version 0.3.0 had
# ``AFTER`` for the gap at the end of a step, which later versions name by the phase before it and "the next step".
BEFORE, BETWEEN, AFTER = "before", "between", "after"


class OwnedTime(Part):
    """One action in ``other``; the time of an action inside another one counts only for the inner one.

    The owner is a class, ``Lightning``, ``lm_profiler``, or empty: for an action that the user has named, and for a gap
    between two phases of a loop without a Trainer.
    """

    owner: str = figure(
        "owner", "text", "class whose code ran, Lightning or lm_profiler"
    )
    action: str = figure(
        "action", "text", "hook or method that ran, or a word for a group of them"
    )
    seconds: float = figure(
        "time",
        "ms",
        "time of the action in the mean step, without other actions inside it",
    )
    calls: float = figure(
        "calls", "number", "number of calls of the action in the mean step"
    )
    in_steps: int = figure(
        "in steps",
        "count",
        "number of steps, of those in which actions were timed, in which this action took time",
    )
    least_s: float | None = figure(
        "at least",
        "ms",
        "lower bound of the time of the action per step, from its fastest step",
        default=None,
    )

    @property
    def name(self) -> str:
        """The action with its owner: ``LearningRateMonitor.on_train_batch_start``, ``Lightning's loop``."""
        if not self.owner:
            return self.action
        if self.owner in (LIGHTNING, OURS):
            return f"{self.owner}'s {self.action}"
        return f"{self.owner}.{self.action}"


PRINTING = "printing of tensors"  # the kind of code that makes the text of a tensor
# the kind of code that sends data to other processes or threads, or waits for theirs
EXCHANGE = "exchange with other processes"


# How the forward pass of a module is called outside of all phases: without a call of the module, which would be marked,
# although an optimizer trains it; of a constant module that no optimizer trains; of such a module whose weights get
# gradients all the same; of one through which gradients pass to a trained module, as in a perceptual loss, and whose
# weights get none, or get them all the same; of one whose weights follow those of a trained module, such as a target
# network; or without gradients, of a module that is trained, as in reinforcement learning.
ForwardKind = Literal[
    "unmarked",
    "untrained",
    "unfrozen",
    "passing",
    "passing_unfrozen",
    "following",
    "acting",
]
# kinds of calls that each step needs
NEEDED_FORWARDS: tuple[ForwardKind, ...] = ("passing", "passing_unfrozen", "following")


class PythonTime(Part):
    """A line of the program and its own time in one step, without operators that torch's own modules call."""

    phase: str = figure("phase", "text", "phase of the step in which the line ran")
    file: str = figure("file", "text", "file of the program that contains the line")
    line: int = figure("line", "count", "number of the line in its file")
    function: str = figure("function", "text", "function that contains the line")
    what: str = figure(
        "what",
        "text",
        "kind of code: python, torch, library, printing of tensors, exchange with other processes, a package, or a C "
        "function",
    )
    seconds: float = figure(
        "time",
        "ms",
        "time of the line in one step, without the program's functions that it calls",
    )
    calls: int = figure("calls", "count", "how often the line was entered in that step")
    # None for other functions, and if unknown
    forward: Annotated[ForwardKind | None, Newer] = None

    @property
    def is_c_function(self) -> bool:
        """Whether ``what`` is a C function, such as ``time.sleep``, or an exchange, which may wait without the CPU."""
        return "." in self.what or self.what == EXCHANGE


class OuterCall(Part):
    """A function of the program that is called outside of all phases, or to make a batch, in one followed step."""

    outer_function: str = figure(
        "called",
        "text",
        "function of the program that is called outside of all phases, or to make a batch",
    )
    file: str = figure("file", "text", "file of the program that contains the call")
    line: int = figure("line", "count", "number of the line with the call")
    seconds: float = figure(
        "time, callees included",
        "ms",
        "time of the call with everything that it calls, in one step",
    )
    # None for other functions, and if unknown
    forward: Annotated[ForwardKind | None, Newer] = None
    # Of a loop of the program's own, the line that makes the call. ``outer_function`` is empty for the time that this
    # line spends in code of libraries, and ``line`` is then ``loop_line``. None if it is unknown.
    loop_file: str | None = figure(
        "file of the loop",
        "text",
        "file of the program's own loop that makes the call",
        default=None,
    )
    loop_line: int | None = figure(
        "line of the loop",
        "count",
        "number of the line of the program's own loop that makes the call",
        default=None,
    )
    exchange_s: float = figure(
        "exchange",
        "ms",
        "part of the time in which it exchanges data with other processes",
        default=0.0,
    )


class RepeatedResult(Part):
    """A function of the program that computed a result again: from the same arguments, in one followed step."""

    phase: str = figure("phase", "text", "phase of the step in which the function ran")
    function: str = figure(
        "function", "text", "function that returns the same result again"
    )
    file: str = figure("file", "text", "file that contains the function")
    line: int = figure("line", "count", "number of the function's first line")
    calls: int = figure("calls", "count", "how often the step calls the function")
    repeats: int = figure(
        "repeats",
        "count",
        "calls of the step with the arguments and the result of an earlier one",
    )
    seconds: float = figure(
        "time of the repeats",
        "ms",
        "time of these calls in one step, with everything that they call",
    )
    has_gradients: bool = False  # whether autograd records the result


class LargeResult(Part):
    """A function that returns more than the samples of the batch need, which are made of its results."""

    function: str = figure(
        "function", "text", "function whose results are larger than the samples"
    )
    file: str = figure("file", "text", "file that contains the function")
    line: int = figure("line", "count", "number of the function's first line")
    seconds: float = figure(
        "time, callees included",
        "ms",
        "time of the function in one step, with everything that it calls",
    )
    shape: str = figure("shape", "text", "shape of a result of the function")
    used_shape: str = figure("shape of a sample", "text", "shape of a sample")
    used_share: float = figure(
        "used", "%", "size of the samples, as a share of that of the results"
    )


class CodePart(Part):
    """Code that the program marks as a part of its own (``lm_profiler.part``), in the measured steps of rank 0."""

    name: str = figure(
        "part", "text", "name that the program gives to the part of its code"
    )
    phase: str = figure("phase", "text", "phase of the step in which the part runs")
    seconds: float = figure("time", "ms", "mean time of the part in a measured step")
    calls: float = figure(
        "calls", "count", "mean number of times that the part runs in a step"
    )


class BetweenSteps(Part):
    """Time between measured steps; a checkpoint saved within a step counts here and in that step's ``other``."""

    what: str = figure(
        "activity between steps",
        "text",
        "activity between measured steps, such as validation",
    )
    seconds: float = figure(
        "time", "ms", "total time of the activity between measured steps"
    )
    times: int = figure(
        "times", "count", "how often the activity took place between measured steps"
    )


# Activities outside the phases. Hooks are activities too, and are named after their class.
VALIDATION, EPOCH, CHECKPOINT = "validation", "epoch", "checkpoint"
FIRST_BATCH = "first batch"  # the additional time of an epoch's first batch; it is part of that step's data
FIRST_STEP = "first step"  # the additional time of the rest of an epoch's first step; it is part of that step too
TRAIN_DATALOADER = "train_dataloader"


class OutsideSteps(Part):
    """Time outside the phases, from the first step of the run to the last, in all stages."""

    what: str = figure(
        "activity outside phases",
        "text",
        "activity outside the phases of a step, in all stages of the run",
    )
    seconds: float = figure(
        "time",
        "ms",
        "total time of the activity; its time in later stages is estimated from the warm-up and measured steps",
    )
    times: int = figure("times", "count", "how often the activity took place")
    per_step_s: float = figure(
        "per step",
        "ms",
        "time of the activity per step, if it continues at the same rate",
    )
    in_step: bool = False  # whether the step's time includes it
    owner: str | None = figure(
        "owner", "text", "class and hook whose code took the time", default=None
    )
    # the line of the program in which most of the time was spent, and its function; None if unknown
    file: str | None = figure(
        "file",
        "text",
        "file of the line in which most of the time was spent",
        default=None,
    )
    line: int | None = figure(
        "line",
        "count",
        "number of the line in which most of the time was spent",
        default=None,
    )
    function: str | None = figure(
        "function",
        "text",
        "function of the line in which most of the time was spent",
        default=None,
    )
    caller: str | None = figure(
        "called in",
        "text",
        "line of the training loop that calls the activity",
        default=None,
    )


ASLEEP = Figure(
    "asleep",
    "ms",
    "time for which the training thread slept, or waited for something other than a CPU",
)


class ThreadUse(Part):
    """How the training thread spent a phase of the mean step: it ran, was ready without a CPU, or slept."""

    wall_s: float
    ran_s: float = figure(
        "ran", "ms", "time for which the training thread ran on a CPU"
    )
    no_cpu_s: float = figure(
        "no CPU",
        "ms",
        "time for which the training thread was ready to run but had no CPU",
    )

    @property
    def asleep_s(self) -> Annotated[float, ASLEEP]:
        """The seconds in which the thread was neither running nor ready to run."""
        return max(self.wall_s - self.ran_s - self.no_cpu_s, 0.0)


class OtherThreads(Part):
    """The Python threads of the process besides the training thread, in steps after the measured ones."""

    ran_s: float = figure(
        "other threads",
        "ms",
        "CPU time of all Python threads besides the training thread, per step",
        "other_threads_ran_s",
    )
    lock_wait_s: float = figure(
        "wait for the lock",
        "ms",
        "mean time for which the training thread waits until it gets Python's global lock back from other threads",
    )
    busiest: str = figure(
        "busiest thread",
        "text",
        "name of the Python thread with the most CPU time besides the training thread",
        "busiest_thread",
    )
    # the line of the program in which the busiest thread was seen most often; None if it was never seen in any
    file: str | None = figure(
        "file of the busiest thread",
        "text",
        "file of the program in which the busiest thread was seen most often",
        "busiest_thread_file",
        default=None,
    )
    line: int | None = figure(
        "line of the busiest thread",
        "count",
        "number of the line in which the busiest thread was seen most often",
        "busiest_thread_line",
        default=None,
    )
    function: str | None = figure(
        "function of the busiest thread",
        "text",
        "function in which the busiest thread was seen most often",
        "busiest_thread_function",
        default=None,
    )


class OtherByOwner(Part):
    """The ``other`` of rank 0 by its owner, in steps after the measured ones, whose actions were timed one by one.

    The ``actions`` add up to ``seconds``, including the cost of timing them; ``measured_s`` excludes it.
    """

    steps: int = figure(
        "steps timed by action",
        "count",
        "number of steps in which every action outside the phases was timed",
        "owner_steps",
    )
    seconds: float = figure(
        "other, timed by action",
        "ms",
        "mean time outside the phases on the host's clock, in steps in which every action was timed",
        "owned_other_s",
    )
    measured_s: float | None = figure(
        "other of rank 0",
        "ms",
        "mean time outside the phases on the host's clock, in rank 0's measured steps",
        "rank_0_other_s",
        default=None,
    )
    actions: list[OwnedTime]


# -- the whole record --------------------------------------------------------------------------------------------------

_SHARED = {part: word for part, word in WORDS.items() if part != "step"}

# ``unfinished`` is the status of a run while it runs, and for ever if its process was killed
Status = Literal["ok", "oom", "failed", "interrupted", "refused", "unfinished"]

Verb = Literal["fit", "validate", "test", "predict"]

# what ran the steps: Lightning's Trainer or Fabric, the Trainer of transformers, accelerate, or a loop of one's own
LoopKind = Literal["Trainer", "Fabric", "transformers", "accelerate", "own"]


class RunRecord(Part):
    """The whole record of one run, in seconds and bytes."""

    schema_version: Literal[1] = 1
    name: str
    status: Annotated[Status, Newer]
    failure: Failure | None = within(group="How it ended")
    verb: Annotated[Verb, Newer]
    # what ran the steps; before 0.3 there was only the Trainer
    loop: Annotated[LoopKind, Newer] = "Trainer"
    # whether the rest of training, after the measured steps, was to be watched
    is_watched: bool = False
    started: str
    duration_s: float = figure(
        "whole run", "s", "duration of the whole run, from its start to its end"
    )
    command: str
    # options of the command line besides the config file, by name without the dashes
    overrides: dict[str, str] = Field(default_factory=dict)
    config: dict[str, Any] | None
    environment: machine.Environment | None = within(group="Machine", default=None)
    model: machine.ModelFacts | None = within(group="Model", default=None)
    # the load of each layer with experts that reports it
    experts: list[machine.ExpertLoad] = Field(default_factory=list)
    steps: dict[str, int] = figure(
        "{word} steps",
        "count",
        "number of steps in the {word} stage",
        "steps_{key}",
        keys=STAGES,
        default_factory=dict,
    )
    steps_planned: dict[str, int] = figure(
        "{word} steps planned",
        "count",
        "number of steps planned for the {word} stage",
        "steps_planned_{key}",
        keys=STAGES,
        default_factory=dict,
    )
    first_step_s: float | None = figure(
        "first step",
        "ms",
        "duration of the run's first step, compilation included",
        default=None,
    )
    warmup_compile_s: float | None = figure(
        "compiling in warm-up",
        "ms",
        "time of torch.compile in the warm-up steps of rank 0",
        place=Place.ASKED,
        default=None,
    )
    # None if there was no such check, for example for the built-in attention
    autotuning_check_s: float | None = figure(
        "autotuning in the check",
        "ms",
        "how much longer the first call of your own attention took than the second, in the check before the run, "
        "without the time of torch.compile",
        place=Place.ASKED,
        default=None,
    )
    between_steps_s: float | None = figure(
        "between steps",
        "ms",
        "time in the measured stage outside of all steps, such as validation and the ends of epochs",
        default=None,
    )
    # the activities that took the time between steps, the longest first
    between: list[BetweenSteps] = Field(default_factory=list)
    # the activities outside the phases in all stages, validation between later steps included, the longest first
    outside: list[OutsideSteps] = Field(default_factory=list)
    stages_s: float | None = figure(
        "all stages",
        "s",
        "time from the beginning of the run's first step to the end of its last step",
        default=None,
    )
    # None if the measured steps used up no prefetched batches, or if that is unknown
    lasting_step_s: float | None = figure(
        "step in the long run",
        "ms",
        "duration of a step in the long run, when no prefetched batches are left",
        default=None,
    )
    # times by part, ``step`` and ``forward_backward`` (all of them or none), on the device's stream, or on the host's
    # clock without a device
    time: dict[str, TimeSummary] = Field(default_factory=dict)
    host_time: dict[str, TimeSummary] = Field(default_factory=dict)
    shares: dict[str, float] = figure(
        "{word} share", "%", "share of the mean step that {word} takes", "{key}_share", keys=_SHARED, place=Place.ASKED,
        group="Shares of the typical step", default_factory=dict,
    )  # fmt: skip
    # code that the program marks as parts of their own
    code_parts: list[CodePart] = Field(default_factory=list)
    odd_steps: list[OddStep] = Field(default_factory=list)
    # first the median counters, then those of each odd step on the rank that it names; empty if no step is odd
    step_counters: list[StepCounters] = Field(default_factory=list)
    # the median step of each rank; other summaries are of each step's mean over the ranks
    rank_step_s: list[float] = figure(
        "median step",
        "ms",
        "median duration of a step on each rank",
        default_factory=list,
    )
    # None for verbs other than fit
    loader: LoaderFacts | None = within(group="Steps", default=None)
    # None if nothing was planned: ``--check_memory=false``, the user's own module or Trainer
    planned: machine.PlannedMemory | None = within(group="Planned memory", default=None)
    memory: machine.MemoryFacts | None = within(group="Memory", default=None)
    throughput: Throughput | None = within(group="Throughput", default=None)
    steadiness: Steadiness | None = within(group="Steadiness", default=None)
    utilisation: machine.Utilisation | None = within(
        group="Use of the hardware", default=None
    )
    # the rates of the device with which the figures are compared
    rates: machine.Rates | None = within(group="Use of the hardware", default=None)
    # the least time on rank 0's device of each phase that occurred in a step of the memory stage
    floors: dict[str, machine.Floor] = within(
        group="Floors", keys=PHASES[1:], name="{key}_{name}", title="{key}: {title}", place=Place.ASKED,
        default_factory=dict,
    )  # fmt: skip
    telemetry: machine.Telemetry | None = within(group="GPU", default=None)
    contention: machine.Contention | None = within(
        group="What else used the machine", default=None
    )
    # None if there is no device to wait for, or if waits were not searched for
    syncs: list[machine.Sync] | None = None
    # None if no step was timed action by action
    other_by_owner: OtherByOwner | None = within(
        group="Other, by its owner", default=None
    )
    # what rank 0's training thread did in each phase of those steps; empty if the system does not report it
    thread_use: dict[str, ThreadUse] = within(
        group="Use of the CPU", keys=PARTS, name="{key}_{name}", title="{key} {title} (ms)",
        meaning="in {key}: {meaning}", place=Place.ASKED, default_factory=dict,
    )  # fmt: skip
    # None if other Python threads of rank 0 hardly computed in those steps, or if the system does not report it
    other_threads: OtherThreads | None = within(
        group="Counters of the mean step", place=Place.ASKED, default=None
    )
    # the program's lines with most of the time outside of torch, in one step of rank 0
    python_times: list[PythonTime] = Field(default_factory=list)
    # the same for a batch that a worker of rank 0's loader loads
    worker_times: list[PythonTime] = Field(default_factory=list)
    # the program's functions that are called outside of all phases in that step; times include everything that they
    # call
    outer_calls: list[OuterCall] = Field(default_factory=list)
    # the same of the functions that make a batch in the training thread, such as a chain of generators
    data_calls: list[OuterCall] = Field(default_factory=list)
    # the lines of that step with a call of a library that is slow in a known way; ``what`` names the call, and the time
    # is that of the whole line
    slow_calls: list[PythonTime] = Field(default_factory=list)
    # the program's functions that return more than the samples of the batch need
    large_results: list[LargeResult] = Field(default_factory=list)
    # the program's functions that compute a result again in that step
    repeated_results: list[RepeatedResult] = Field(default_factory=list)
    # operators of the memory stage that factorize matrices or solve systems, for which float32 may have too few digits
    factorizing_operators: list[str] = Field(default_factory=list)
    # the shares of the operators of forward and backward that torch.compile does not fuse
    uncompiled_shares: dict[str, float] = Field(default_factory=dict)
    # the operators of the memory stage's last step that may be needless, by reason
    needless_operators: list[NeedlessOperators] = Field(default_factory=list)
    # None if the precision was not audited
    numerics: NumericsFacts | None = within(group="Numerics", default=None)
    settings: machine.Settings | None = None
    # the mean of each counter over the measured steps of rank 0
    mean_counters: StepCounters | None = within(
        group="Counters of the mean step", name="mean_{name}", title="{title}, on average", place=Place.ASKED,
        instead={"step": None, "rank": None}, default=None,
    )  # fmt: skip
    # causes of time that could be saved, the most likely saving first
    findings: list[Finding] = Field(default_factory=list)
    verdict: Verdict | None = within(group="How it ended", default=None)
    # None if no peak is known, or no step was traced
    waterfall: Waterfall | None = within(
        group="Waterfall", name="waterfall_{name}", default=None
    )
    # None for a single rank, or if it is unknown which ranks waited for which; ``notes`` give the reason
    ranks: Ranks | None = within(group="Ranks", default=None)
    # what a reader must know before using the figures; shown under the table
    notes: list[str] = Field(default_factory=list)
    # further notes on floors and terms
    details: list[str] = Field(default_factory=list)

    @property
    def words(self) -> list[str]:
        """The words for the measured steps, the most serious first; none if the steps are too few."""
        shared = ["shared"] if self.contended else []
        return ([] if self.steadiness is None else self.steadiness.words) + shared

    @property
    def contended(self) -> bool:
        """Whether other programs used the machine: times are then upper bounds, and utilisation means nothing."""
        return self.contention is not None and self.contention.is_shared

    @property
    def stretch(self) -> slice:
        """The measured steps that figures use, by index."""
        steadiness = self.steadiness
        if steadiness is None:
            return slice(0, None)
        if steadiness.first is None:
            return slice(steadiness.cut, None)
        first_step = steadiness.first_step or 1
        end = None if steadiness.last is None else steadiness.last - first_step + 1
        return slice(steadiness.first - first_step, end)

    @model_validator(mode="before")
    @classmethod
    def _number_steps_as_the_run_does(cls, content: Any) -> Any:
        """Renumber the levels of a record before 0.3, which counts measured steps from 1."""
        steadiness: Any = None
        if isinstance(content, dict):
            steadiness = content.get("steadiness")
        has_levels = (
            isinstance(steadiness, dict) and steadiness.get("first") is not None
        )
        if not has_levels or "first_step" in steadiness:
            return content
        warmup_steps = content.get("steps", {}).get("warmup", 0)
        renumbered = _renumbered(steadiness, offset=warmup_steps)
        renumbered["first_step"] = warmup_steps + 1
        renumbered["levels"] = [
            _renumbered(level, offset=warmup_steps)
            for level in steadiness.get("levels", [])
        ]
        return {**content, "steadiness": renumbered}

    @field_validator("time", "host_time")
    @classmethod
    def _check_parts(cls, times: dict[str, TimeSummary]) -> dict[str, TimeSummary]:
        """Raise ValueError if a phase is missing that readers rely on."""
        # A run that died before its first measured step has no times at all; readers index the others by any part.
        if not times:
            return times
        missing = missing_parts(times)
        if missing:
            raise ValueError(f"has no {', '.join(missing)}")
        return times


def _renumbered(content: dict[str, Any], offset: int) -> dict[str, Any]:
    """Return a level, or the course, whose first and last steps have numbers larger by ``offset``."""
    renumbered = dict(content)
    for name in ("first", "last"):
        if content.get(name) is not None:
            renumbered[name] = content[name] + offset
    return renumbered


def read_run(folder: Path) -> RunRecord:
    return read_part(folder / "run.json", RunRecord, "a run record")
