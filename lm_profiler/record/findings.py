"""The results of a run: why it died, the error of its precision, its bottleneck, and its waterfall."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from lm_profiler.record.figure import figure
from lm_profiler.record.files import Newer, Part
from lm_profiler.record.parts import PARTS


class OutOfMemory(Part):
    """The bytes that an out-of-memory error states, as precise as its two decimals; None if it does not state them."""

    requested: int | None = figure(
        "requested",
        "GiB",
        "bytes requested when memory ran out, according to the error message",
        "oom_requested_bytes",
    )
    free: int | None = figure(
        "free",
        "GiB",
        "memory of the device that was free, according to the error message",
        "oom_free_bytes",
    )
    total: int | None = figure(
        "total",
        "GiB",
        "total memory of the device, according to the error message",
        "oom_total_bytes",
    )
    allocated: int | None = figure(
        "allocated",
        "GiB",
        "memory that tensors used, according to the error message",
        "oom_allocated_bytes",
    )
    fragmented: int | None = figure(
        "fragmented",
        "GiB",
        "memory that the allocator had reserved but did not use, according to the error message",
        "oom_fragmented_bytes",
    )
    allowed: int | None = figure(
        "allowed",
        "GiB",
        "limit that was set for the process, below the memory of the device",
        "oom_allowed_bytes",
    )


class Failure(Part):
    """Where and why a run died."""

    phase: str  # a phase, ``other``, ``setup`` before the first step, or ``instruments`` where only the profiler failed
    step: int | None = figure(
        "failed at step",
        "count",
        "number of the step in which the run died",
        "failed_step",
    )
    type: str
    message: str
    out_of_memory: OutOfMemory | None = None
    # options for a run that was refused or ran out of memory; by the plan, each of them is enough
    remedies: tuple[str, ...] = ()
    rank: int | None = figure(
        "failed on rank",
        "count",
        "rank whose failure ended the other ranks too",
        "failed_rank",
        default=None,
    )
    host: str | None = figure(
        "failed on host",
        "text",
        "host of the rank that failed",
        "failed_host",
        default=None,
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
    """The dtypes of all modules of one class; ``gradient_error`` is None if gradients are missing or not finite."""

    kind: str = figure("class", "text", "class of the modules")
    modules: int = figure("modules", "count", "number of modules of the class")
    parameters: list[str] = figure(
        "parameters",
        "text",
        "dtypes of the parameters that belong directly to modules of the class",
    )
    outputs: list[str] = figure(
        "outputs", "text", "dtypes of the outputs of modules of the class"
    )
    gradients: list[str] = figure(
        "gradients", "text", "dtypes of the gradients of parameters of the class"
    )
    gradient_error: float | None = figure(
        "gradients off by",
        "error",
        "norm of the difference between the gradients and those in float32, divided by the norm in float32",
    )


class NumericsFacts(Part):
    """A step on the first batch in the run's precision and in float32, with the trained weights, in eval mode.

    Errors are Euclidean norms; None: not finite, or nothing to compare. The output is the first floating-point tensor
    of the last module that returns one: a language model's logits. Gradients are taken before clipping.
    """

    loss: float | None = figure(
        "loss", "loss", "loss of the first batch in the run's precision", "audit_loss"
    )
    loss_dtype: str | None = figure(
        "dtype of the loss",
        "text",
        "dtype of the loss that the step returns",
        default=None,
    )
    reference_loss: float | None = figure(
        "loss in float32",
        "loss",
        "loss of the first batch in float32",
        "audit_float32_loss",
    )
    output_error: float | None = figure(
        "output off by",
        "error",
        "norm of the difference between the model's output and that in float32, divided by the norm in float32",
    )
    gradient_error: float | None = figure(
        "gradients off by",
        "error",
        "norm of the difference between the gradients and those in float32, divided by the norm in float32",
    )
    kinds: list[NumericsKind]
    losses: list[float | None] = figure(
        "loss",
        "loss",
        "loss of each of the first steps",
        "numerics_losses",
        default_factory=list,
    )
    gradient_norms: list[float | None] = figure(
        "norm of the gradients",
        "loss",
        "norm of the gradients in each of the first steps",
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
    """The bottleneck of the run, and the evidence for it."""

    # None means that the evidence shows no bottleneck
    bound_by: Annotated[Bound | None, Newer]
    share: float | None = figure(
        "share of the bottleneck", "%", "share of the step that the bottleneck takes", "bound_share",
        interval=("share_low", "share_high"),
    )  # fmt: skip
    share_low: float | None = None
    share_high: float | None = None
    # another bottleneck that is possible, because the interval of the share contains the threshold
    or_bound_by: Annotated[Bound | None, Newer] = None
    because: str | None = None  # the name of the sentence with the evidence
    # the figures of that sentence
    facts: dict[str, float] = Field(default_factory=dict)
    # Version 0.2 wrote these two; `RunRecord.findings` took their place, and old records are still read.
    evidence: str = ""
    advice: str = ""
    # false if the steps are too few or differ too much, or if something else used the machine
    certain: bool = True


# Why operators of a step may be needless; each reason is the name of its finding.
NeedlessReason = Literal[
    "unused",  # nothing reads their results
    "cancelled",  # their results are multiplied by zero
    "repeated",  # the step has computed the same before
    "causal",  # attention reads a causal mask
    "constant",  # each step computes the same
    "summed",  # one layer could replace several, whose results are added
    "zeros",  # products in which nearly all elements of a factor are zero
    "ignored",  # computed for positions whose gradient is zero
    "ignored_at_last",  # the same, in the last of equal layers
    "broadcast",  # small tensors are broadcast to a large one
    "growing",  # a loop copies all that it has joined so far, to add a piece
    # slices, each of which gets a gradient as large as the whole tensor:
    "packed_equal",  # a recurrent layer takes them of packed sequences of one length
    "packed",  # the same of packed sequences of different lengths
    "sliced",  # a loop of the program takes them
    "order",  # a product of three matrices whose other order takes fewer multiplications
    "unused_rows",  # all rows of a table get a gradient, although few were looked up
    "small_parameters",  # many small parameters are stacked in each step
    "renormalized",  # an embedding with ``max_norm`` renormalizes its rows one by one
    "indexed",  # copies rows by ``x[index]``, which ``index_select`` does faster
    "transposed",  # the loss of transposed logits
    "double",  # computed in float64, as the whole model is
    "some_double",  # computed in float64, in a model of float32
    "narrow",  # computed in half precision, which takes longer than float32
    "channels_first",  # convolutions that the memory format channels_last makes faster
    "sparse_layout",  # products with a sparse matrix that the layout CSR makes faster
    "patches",  # convolutions on patches, which a linear layer makes faster
    "fourier",  # convolutions with long kernels, which FFT makes faster
    "figures",  # only Python reads the results
    "scores",  # attention stores its scores
    "cells",  # a recurrent cell is called for one element of a sequence after another
    "accumulated",  # one pass over all samples could replace those of micro-batches
    "looped",  # one call on whole tensors could replace those of a loop
    "gathered",  # a layer is applied to copies of the same rows
    "copied",  # they only copy a tensor
    "side_work",  # a costly place of the program runs no layers or losses
    "unfused",  # the same, between the layers of the model
]
PLACE_REASONS: tuple[NeedlessReason, ...] = ("side_work", "unfused")  # about a place
# reasons whose operators may have another reason, too
OVERLAPPING_REASONS: tuple[NeedlessReason, ...] = (
    *PLACE_REASONS,
    "double",
    "narrow",
    "channels_first",
)
# reasons that are about the whole model, and not about a line
MODEL_REASONS: tuple[NeedlessReason, ...] = ("double", "narrow", "channels_first")

# What takes time that could be saved. ``analysis.savings`` finds it; ``analysis.remedies`` says what to do.
FindingName = Literal[
    "ranks", "input", "transfer", "validation", "checkpoint", "epoch", "worker_start", "reload", "owner", "logging",
    "sleep", "python", "pattern", "odd_steps", "garbage", "compilation", "anomalies", "profiler", "sync", "small_batch",
    "optimizer", "groups", "optimizer_products", "clip", "compile", "precision", "tf32", "recomputation",
    "communication", "repeated_forward", "repeated_backward", "unused_gradients", "padding", "dispatch_mode", "threads",
    "slow_call", "same_result", "large_result", NeedlessReason,
]  # fmt: skip


class Finding(Part):
    """Something that takes time that could be saved, and the code that it is in."""

    name: Annotated[FindingName, Newer] = figure(
        "finding", "text", "cause of the time that could be saved"
    )
    saves_s: float = figure(
        "could save",
        "ms",
        "estimate of the time that could be saved per step, time between steps included",
        interval=("low_s", "high_s"),
    )
    share: float = figure(
        "share", "%", "time that could be saved, as a share of the step"
    )
    low_s: float | None = figure(
        "from",
        "ms",
        "lower end of the 95 % interval of the time that could be saved",
        default=None,
    )
    high_s: float | None = figure(
        "to",
        "ms",
        "upper end of the 95 % interval of the time that could be saved: the most that can be expected",
        default=None,
    )
    may: bool = False  # whether a change helps is not known without trying it
    phase: str | None = figure(
        "phase", "text", "phase of the step in which the time is spent", default=None
    )
    owner: str | None = figure(
        "owner",
        "text",
        "class or package whose code takes the time that could be saved",
        default=None,
    )
    file: str | None = figure(
        "file",
        "text",
        "file of the code that takes the time that could be saved",
        default=None,
    )
    line: int | None = figure(
        "line",
        "count",
        "number of the line that takes the time that could be saved",
        default=None,
    )
    what: str | None = figure(
        "what",
        "text",
        "kind of activity that takes the time that could be saved",
        default=None,
    )
    facts: dict[str, float] = Field(default_factory=dict)  # the figures of its sentence


# the terms in the order of the waterfall; ``record.quantities.TERMS`` says what each means
TermName = Literal[
    "ideal", "clock", "slow_products", "recomputation", "optimizer_products", "bandwidth", "beyond_bandwidth",
    "communication", "waiting", "gaps", "input", "unexplained",
]  # fmt: skip


class Contributor(Part):
    """A module, operator or kernel that contributes to a term's time. Phrases in ``detail`` are separated by "; ". None
    means unknown, or none."""

    module: str | None = figure(
        "module", "text", "path of the module, with * for the indices of equal layers"
    )
    what: str = figure(
        "what", "text", "operator or kernel that takes the time, or a description of it"
    )
    count: float = figure(
        "times", "count", "how often the operator or kernel runs in a step"
    )
    seconds: float = figure("time", "ms", "time of the operator or kernel in a step")
    detail: str | None = figure(
        "detail", "text", "reason for this time, if known", default=None
    )


class Term(Part):
    """One term of the waterfall; in records of version 0.2, ``unexplained`` may be negative.

    ``low_s`` and ``high_s`` are None if only one step was traced, ``at_most_s`` is None if nothing could be saved.
    ``phases`` add up to ``seconds``; if it is empty, they are unknown.
    """

    name: Annotated[TermName, Newer] = figure(
        "term", "text", "kind of time in the waterfall of the step"
    )
    seconds: float = figure("time", "ms", "time that the term adds to the mean step")
    low_s: float | None = figure(
        "from", "ms", "smallest time of the term in any traced step", default=None
    )
    high_s: float | None = figure(
        "to", "ms", "largest time of the term in any traced step", default=None
    )
    at_most_s: float | None = figure(
        "could save at most",
        "ms",
        "upper limit of the time that can be saved in the term; a real change may save much less",
        default=None,
    )
    phases: dict[str, float] = figure(
        "{key}", "ms", "time of the term within {key}", keys=PARTS, default_factory=dict
    )
    contributors: list[Contributor] = Field(default_factory=list)


# Work of a step that may be needless: a module's pass on inputs that it had before, a backward pass that runs twice,
# the backward pass of weights that no optimizer updates, operators on the large result of a broadcast.
NeedlessKind = Literal[
    "repeated_forward", "repeated_backward", "unused_gradients", "broadcast"
]


class NeedlessWork(Part):
    """Work of a step that may be needless."""

    kind: Annotated[NeedlessKind, Newer] = figure(
        "kind", "text", "reason why the work may be needless"
    )
    phase: str = figure("phase", "text", "phase of the step in which the work is done")
    what: str | None = figure(
        "what",
        "text",
        "module that does the work, or operator with its shapes; empty if there are several",
    )
    count: float = figure(
        "times", "count", "number of passes or operators in a step that may be needless"
    )
    seconds: float = figure("time", "ms", "time of the work in a step")


class NeedlessOperators(Part):
    """Operators of one step that may be needless for one reason, with the program's line to look at."""

    reason: Annotated[NeedlessReason, Newer] = figure(
        "reason", "text", "reason why the operators may be needless"
    )
    count: int = figure(
        "operators", "count", "number of operators that may be needless for this reason"
    )
    what: str = figure(
        "what", "text", "operator that takes most of the time of the needless operators"
    )
    share: float = figure(
        "needless",
        "%",
        "upper bound of the share of each operator's work that is needless",
    )
    # their share of the time that all operators of a phase take, by phase
    phase_shares: dict[str, float] = figure(
        "of {key}", "%", "share of the time of all operators in {key} that these operators take", "{key}_share",
        keys=PARTS, default_factory=dict,
    )  # fmt: skip
    file: str | None = figure(
        "file", "text", "file of the program that calls the operators", default=None
    )
    line: int | None = figure(
        "line", "count", "number of the line that calls the operators", default=None
    )
    function: str | None = figure(
        "function", "text", "function that contains the line", default=None
    )


class Waterfall(Part):
    """The mean measured (untraced) step as a sum of terms, from rank 0's trace; rates are for one device."""

    step_s: float = figure(
        "step divided into terms",
        "ms",
        "mean duration of a measured step, which the terms of the waterfall add up to",
        interval=("ci_low", "ci_high"),
    )
    ci_low: float | None
    ci_high: float | None
    step_phases: dict[str, float] = figure(
        "of which {key}",
        "ms",
        "time of {key} in the mean step, which the waterfall divides into terms",
        "{key}_s",
        keys=PARTS,
        default_factory=dict,
    )
    source: Annotated[Literal["kernels", "operators"], Newer] = figure(
        "times of terms from",
        "text",
        "what the times of the terms come from: kernels of the device, or operators on the host",
    )
    peak_flops_per_s: float = figure(
        "peak",
        "TFLOP/s",
        "peak FLOP/s of one device, from which the ideal time is computed",
    )
    peak_source: str = figure(
        "source of the peak", "text", "where the figure for the peak comes from"
    )
    bandwidth_bytes_per_s: float | None = figure(
        "bandwidth",
        "GB/s",
        "memory bandwidth of one device, from which the time of memory traffic is computed",
    )
    bandwidth_source: str | None = figure(
        "source of the bandwidth",
        "text",
        "where the figure for the bandwidth comes from",
    )
    clock_share: float | None = figure(
        "clock / peak's clock",
        "%",
        "clock of the multiprocessors during the run, as a share of the clock for which the peak is stated",
    )
    traced_steps: int | None = figure(
        "steps traced",
        "count",
        "number of traced steps from which the terms are computed",
        default=None,
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
