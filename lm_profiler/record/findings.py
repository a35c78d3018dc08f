"""The results of a run: why it died, the error of its precision, what binds it, and its waterfall."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from lm_profiler.record.figure import figure
from lm_profiler.record.files import Newer, Part
from lm_profiler.record.parts import PARTS


class OutOfMemory(Part):
    """The figures of an out-of-memory error, in bytes, precise to two decimals; None if it does not report one."""

    requested: int | None = figure(
        "requested", "GiB", "asked for, as the error reports", "oom_requested_bytes"
    )
    free: int | None = figure(
        "free", "GiB", "free on the device, as the error reports", "oom_free_bytes"
    )
    total: int | None = figure(
        "total", "GiB", "the device's memory, as the error reports", "oom_total_bytes"
    )
    allocated: int | None = figure(
        "allocated",
        "GiB",
        "in use by tensors, as the error reports",
        "oom_allocated_bytes",
    )
    fragmented: int | None = figure(
        "fragmented",
        "GiB",
        "reserved but not in use, as the error reports",
        "oom_fragmented_bytes",
    )
    allowed: int | None = figure(
        "allowed", "GiB", "a limit set below the device's memory", "oom_allowed_bytes"
    )


class Failure(Part):
    """Where and why a run died."""

    phase: str  # a phase, ``other``, ``setup`` before the first step, or ``instruments`` where only the profiler failed
    step: int | None = figure(
        "failed at step", "count", "the step in which the run died", "failed_step"
    )
    type: str
    message: str
    out_of_memory: OutOfMemory | None = None
    # options for a run that was refused or ran out of memory; as planned, each alternative is enough by itself
    remedies: tuple[str, ...] = ()
    rank: int | None = figure(
        "failed on rank",
        "count",
        "whose failure ended the others",
        "failed_rank",
        default=None,
    )
    host: str | None = figure(
        "failed on host", "text", "that rank's machine", "failed_host", default=None
    )

    @property
    def where(self) -> str:
        """The place in words: ``backward of step 5 on rank 1 (its host)``; the phase alone if no more is known."""
        place = self.phase
        if self.step is not None:
            place += f" of step {self.step}"
        if self.rank is not None:
            place += f" on rank {self.rank}"
            if self.host:
                place += f" ({self.host})"
        return place


class NumericsKind(Part):
    """The dtypes of all modules of one class; ``gradient_error`` is None without gradients, or with infinite ones."""

    kind: str = figure("class", "text", "class of the modules")
    modules: int = figure("modules", "count", "how many there are")
    parameters: list[str] = figure(
        "parameters", "text", "dtypes of their own parameters"
    )
    outputs: list[str] = figure("outputs", "text", "dtypes of their outputs")
    gradients: list[str] = figure("gradients", "text", "dtypes of their gradients")
    gradient_error: float | None = figure(
        "gradients off by", "error", "norm of the difference to float32 / its norm"
    )


class NumericsFacts(Part):
    """The first batch's step in the run's precision and in float32, with the trained weights, in eval mode.

    Errors are Euclidean norms; None: not finite, or nothing to compare. The output is the first floating-point tensor
    of the last module that returns one: a language model's logits. Gradients are taken before clipping.
    """

    loss: float | None = figure(
        "loss", "loss", "loss of the first batch, in the run's precision", "audit_loss"
    )
    loss_dtype: str | None = figure(
        "dtype of the loss", "text", "dtype in which the step returns it", default=None
    )
    reference_loss: float | None = figure(
        "loss in float32", "loss", "of the same batch", "audit_float32_loss"
    )
    output_error: float | None = figure(
        "output off by", "error", "norm of the difference to float32 / its norm"
    )
    gradient_error: float | None = figure(
        "gradients off by", "error", "norm of the difference to float32 / its norm"
    )
    kinds: list[NumericsKind]
    losses: list[float | None] = figure(
        "loss",
        "loss",
        "of each of the first steps",
        "numerics_losses",
        default_factory=list,
    )
    gradient_norms: list[float | None] = figure(
        "norm of the gradients",
        "loss",
        "in each of the first steps",
        "numerics_gradient_norms",
        default_factory=list,
    )


# What can bind a run. ``straggler``: most ranks wait for one rank, for one host's ranks, or for ranks in turns.
Bound = Literal[
    "straggler",
    "input",
    "between steps",
    "host",
    "program code",
    "compute",
    "memory bandwidth",
    "communication",
]


class Verdict(Part):
    """What binds the run, and the evidence for it."""

    bound_by: Annotated[Bound | None, Newer]  # None: the evidence shows no bottleneck
    share: float | None = figure(
        "share of the bottleneck", "%", "share of the step that the bottleneck takes", "bound_share",
        interval=("share_low", "share_high"),
    )  # fmt: skip
    share_low: float | None = None
    share_high: float | None = None
    # what else may bind it, if the interval of the share contains the threshold
    or_bound_by: Annotated[Bound | None, Newer] = None
    because: str | None = None  # the name of the sentence with the evidence
    # the figures of that sentence
    facts: dict[str, float] = Field(default_factory=dict)
    # Version 0.2 wrote these two; `RunRecord.findings` took their place, and old records are still read.
    evidence: str = ""
    advice: str = ""
    # false if the steps are too few or differ too much, or if something else used the machine
    certain: bool = True


# What takes time that could be saved. ``analysis.savings`` decides when; ``analysis.remedies`` says what to do.
FindingName = Literal[
    "ranks", "input", "transfer", "validation", "checkpoint", "epoch", "worker_start", "reload", "owner", "logging",
    "sleep", "python", "pattern", "odd_steps", "garbage", "compilation", "anomalies", "profiler", "sync", "small_batch",
    "optimizer", "groups", "optimizer_products", "clip", "compile", "double", "precision", "tf32", "recomputation",
    "communication", "repeated_forward", "repeated_backward", "unused_gradients", "broadcast", "padding",
    "unused", "repeated", "constant", "zeros", "ignored", "growing", "order", "unused_rows",
    "some_double", "figures", "scores", "looped", "gathered", "copied", "side_work",
]  # fmt: skip


class Finding(Part):
    """Something that takes time that could be saved, and the code that it is in."""

    name: Annotated[FindingName, Newer] = figure(
        "finding", "text", "cause of time that could be saved"
    )
    saves_s: float = figure(
        "could save",
        "ms",
        "of a step and the time after it",
        interval=("low_s", "high_s"),
    )
    share: float = figure("share", "%", "share of the step")
    low_s: float | None = figure(
        "from",
        "ms",
        "lower end of the 95 % interval of the possible saving",
        default=None,
    )
    high_s: float | None = figure(
        "to",
        "ms",
        "upper end of that interval: the most that it could save",
        default=None,
    )
    may: bool = False  # whether a change helps is not known without trying it
    phase: str | None = figure("phase", "text", "where in the step", default=None)
    owner: str | None = figure("owner", "text", "whose code", default=None)
    file: str | None = figure("file", "text", "of that code", default=None)
    line: int | None = figure("line", "count", "its number", default=None)
    what: str | None = figure("what", "text", "kind of activity", default=None)
    facts: dict[str, float] = Field(default_factory=dict)  # the figures of its sentence


# the terms in the order of the waterfall; ``record.quantities.TERMS`` says what each means
TermName = Literal[
    "ideal", "clock", "slow_products", "recomputation", "optimizer_products", "bandwidth", "beyond_bandwidth",
    "communication", "waiting", "gaps", "input", "unexplained",
]  # fmt: skip


class Contributor(Part):
    """A part of a term's time, with phrases in ``detail`` separated by "; ". None means unknown, or none."""

    module: str | None = figure(
        "module", "text", "path, with * for the indices of equal layers"
    )
    what: str = figure("what", "text", "operator or kernel, or a description")
    count: float = figure("times", "count", "how often in a step")
    seconds: float = figure("time", "ms", "of one step")
    detail: str | None = figure(
        "detail", "text", "reason why it took so long, if known", default=None
    )


class Term(Part):
    """One term of the waterfall; in records of version 0.2, ``unexplained`` may be negative.

    No ends: one step was traced. No ceiling: nothing could be saved. ``phases`` add up to it; empty is unknown.
    """

    name: Annotated[TermName, Newer] = figure("term", "text", "a step of the waterfall")
    seconds: float = figure("time", "ms", "time that it adds to the step")
    low_s: float | None = figure(
        "from", "ms", "smallest value from a single traced step", default=None
    )
    high_s: float | None = figure(
        "to", "ms", "largest value from a single traced step", default=None
    )
    at_most_s: float | None = figure(
        "could save at most", "ms", "ceiling of a saving, never a gain", default=None
    )
    phases: dict[str, float] = figure(
        "{key}", "ms", "of which in {key}", keys=PARTS, default_factory=dict
    )
    contributors: list[Contributor] = Field(default_factory=list)


# Work of a step that may be needless: a module's pass on inputs that it had before, a backward pass that runs twice,
# the backward pass of weights that no optimizer updates, operators on the large result of a broadcast.
NeedlessKind = Literal[
    "repeated_forward", "repeated_backward", "unused_gradients", "broadcast"
]


class NeedlessWork(Part):
    """Work of a step that may be needless."""

    kind: Annotated[NeedlessKind, Newer] = figure("kind", "text", "why it may be")
    phase: str = figure("phase", "text", "where in the step")
    what: str | None = figure(
        "what", "text", "module, or operator and shapes, if it is about one"
    )
    count: float = figure("times", "count", "passes, or operators, of a step")
    seconds: float = figure("time", "ms", "of a step")


# Why operators of a step may be needless; each reason is the name of its finding.
NeedlessReason = Literal[
    "unused",  # nothing reads their results
    "repeated",  # the step has computed the same before
    "constant",  # each step computes the same
    "zeros",  # products in which nearly all elements of a factor are zero
    "ignored",  # computed for positions whose gradient is zero
    "broadcast",  # small tensors are broadcast to a large one
    "growing",  # a loop copies all that it has joined so far, to add a piece
    "order",  # a product of three matrices whose other order takes fewer multiplications
    "unused_rows",  # all rows of a table get a gradient, although few were looked up
    "some_double",  # computed in float64, in a model of float32
    "figures",  # only Python reads the results
    "scores",  # attention stores its scores
    "looped",  # one call on whole tensors could replace those of a loop
    "gathered",  # a layer is applied to copies of the same rows
    "copied",  # they only copy a tensor
    "side_work",  # a costly place of the program runs no layers
]


class NeedlessOperators(Part):
    """Operators of one step that may be needless for one reason, with the program's line to look at."""

    reason: Annotated[NeedlessReason, Newer] = figure(
        "reason", "text", "why they may be needless"
    )
    count: int = figure("operators", "count", "how many there are")
    what: str = figure("what", "text", "operator with most of their time")
    share: float = figure(
        "needless", "%", "share of each of them that is needless, at most"
    )
    # of the time that the operators of each phase take
    phase_shares: dict[str, float] = figure(
        "of {key}", "%", "of the operators in {key}", "{key}_share",
        keys=PARTS, default_factory=dict,
    )  # fmt: skip
    file: str | None = figure("file", "text", "of the program", default=None)
    line: int | None = figure("line", "count", "its number", default=None)
    function: str | None = figure(
        "function", "text", "the function that contains it", default=None
    )


class Waterfall(Part):
    """The mean measured (untraced) step as a sum of terms, from rank 0's trace; rates are for one device."""

    step_s: float = figure(
        "step taken apart",
        "ms",
        "mean step, sum of the terms",
        interval=("ci_low", "ci_high"),
    )
    ci_low: float | None
    ci_high: float | None
    step_phases: dict[str, float] = figure(
        "of it in {key}",
        "ms",
        "of the mean step",
        "{key}_s",
        keys=PARTS,
        default_factory=dict,
    )
    source: Annotated[Literal["kernels", "operators"], Newer] = figure(
        "terms are of", "text", "kernels of the device, or operators"
    )
    peak_flops_per_s: float = figure(
        "peak", "TFLOP/s", "FLOP/s per device with which the ideal is computed"
    )
    peak_source: str = figure("source of the peak", "text", "where that peak is from")
    bandwidth_bytes_per_s: float | None = figure(
        "bandwidth", "GB/s", "bytes/s that a device can move"
    )
    bandwidth_source: str | None = figure(
        "source of the bandwidth", "text", "where it is from"
    )
    clock_share: float | None = figure(
        "clock held", "%", "SM clock / the clock that the stated peak assumes"
    )
    traced_steps: int | None = figure(
        "steps traced", "count", "traced steps from which the terms come", default=None
    )
    terms: list[Term]
    needless: list[NeedlessWork] = Field(default_factory=list)
    notes: list[str] = Field(default_factory=list)
    # whether FLOPs are missing from the ideal: it is then a lower bound, and slow products are an upper one
    ideal_is_lower_bound: bool = False

    @property
    def merged_terms(self) -> set[str]:
        """The terms that are part of the next term, because the clock or the bandwidth is unknown."""
        rates = {"clock": self.clock_share, "bandwidth": self.bandwidth_bytes_per_s}
        return {name for name, rate in rates.items() if rate is None}
