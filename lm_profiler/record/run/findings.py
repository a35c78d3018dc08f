"""What came of a run: why it died, how far off its precision is, what binds it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from lm_profiler.record.run.part import Newer, Part


class OutOfMemory(Part):
    """What an out-of-memory error says, in bytes; None where it does not.

    torch prints sizes with two decimals, so 20.00 MiB is exact to 5 KiB and 79.15 GiB to 5 MiB. ``fragmented`` is
    reserved by the allocator and not in use; ``allowed`` a limit that somebody set below ``total``.
    """

    requested: int | None
    free: int | None
    total: int | None
    allocated: int | None
    fragmented: int | None
    allowed: int | None


class Failure(Part):
    """Where and why a run died. ``phase`` is a phase, ``other``, or ``setup`` before the first step.

    In ``instruments`` it is the profiler that failed: training itself went on. ``remedies`` of a run that was refused
    or ran out of memory are options to add, each alternative enough by itself, as planned. ``rank`` and ``host`` are
    whose failure it was, of several ranks: the one that the others' ends followed from. None in a run of one process.
    """

    phase: str
    step: int | None
    type: str
    message: str
    out_of_memory: OutOfMemory | None = None
    remedies: tuple[str, ...] = ()
    rank: int | None = None
    host: str | None = None

    @property
    def where(self) -> str:
        """``backward of step 5 on rank 1 (its host)``; the phase alone where no more is known."""
        host = f" ({self.host})" if self.host else ""
        rank = f" on rank {self.rank}{host}" if self.rank is not None else ""
        return self.phase + (f" of step {self.step}" if self.step is not None else "") + rank


class NumericsKind(Part):
    """All modules of one class: the dtypes of their own parameters, of their outputs, and of their gradients.

    ``gradient_error`` is None where there are no gradients, or they are not finite.
    """

    kind: str
    modules: int
    parameters: list[str]
    outputs: list[str]
    gradients: list[str]
    gradient_error: float | None


class NumericsFacts(Part):
    """The first batch's step in the run's precision beside one in float32, with the trained weights, in eval mode.

    Errors are the Euclidean norm of the difference over that of the float32 result; None where it is not finite, or
    there is nothing to compare. ``output_error`` is of the first floating-point tensor, of one dimension or more, that
    the last module to do so returned in the forward pass: the logits of a language model. ``losses`` are of the first
    steps of training, each the mean over its batches (None: not finite); empty where none were asked for.
    ``gradient_norms`` are of the same steps, over all gradients that an optimizer gets, before they are clipped.
    """

    loss: float | None
    reference_loss: float | None
    output_error: float | None
    gradient_error: float | None
    kinds: list[NumericsKind]
    losses: list[float | None] = Field(default_factory=list)
    gradient_norms: list[float | None] = Field(default_factory=list)


Bound = Literal["straggler", "input", "host", "compute", "memory bandwidth", "communication"]
"""``straggler``: most ranks wait for one, for those of one host, or for another one each step."""


class Verdict(Part):
    """What binds the run (None: nothing that the evidence shows), and its share of the step with its 95 % interval.

    Where the interval holds the share from which it binds, ``or_bound_by`` is what else may. Not ``certain``: the steps
    are too few or differ too much, or something else used the machine. ``evidence`` and ``advice`` are those of version
    0.2, in whose place ``RunRecord.findings`` stand.
    """

    bound_by: Annotated[Bound | None, Newer]
    share: float | None
    share_low: float | None = None
    share_high: float | None = None
    or_bound_by: Annotated[Bound | None, Newer] = None
    because: str | None = None
    """What one sees it by, the name of a sentence."""
    facts: dict[str, float] = Field(default_factory=dict)
    """The figures of that sentence."""
    evidence: str = ""
    advice: str = ""
    certain: bool = True


FindingName = Literal[
    "ranks",
    "input",
    "transfer",
    "validation",
    "checkpoint",
    "epoch",
    "owner",
    "logging",
    "sleep",
    "python",
    "pattern",
    "garbage",
    "compilation",
    "anomalies",
    "profiler",
    "sync",
    "small_batch",
    "optimizer",
    "clip",
    "compile",
    "double",
    "precision",
    "tf32",
    "recomputation",
    "communication",
]
"""What takes time that could be saved: ``analysis.findings`` has when it is said, ``analysis.remedies`` what to do."""


class Finding(Part):
    """Something that takes time which could be saved, and by whom or where.

    ``saves_s`` is the most that a step could be shorter by, what lies between steps counted with them, in its 95 %
    interval from ``low_s`` to ``high_s`` where that is known. ``may``: whether doing something about it helps is to be
    tried. ``owner`` is a class and hook, or a function at ``file`` and ``line``, which spends its time in ``what``.
    ``facts`` are the figures of its sentence.
    """

    name: Annotated[FindingName, Newer]
    saves_s: float
    share: float
    low_s: float | None = None
    high_s: float | None = None
    may: bool = False
    phase: str | None = None
    owner: str | None = None
    file: str | None = None
    line: int | None = None
    what: str | None = None
    facts: dict[str, float] = Field(default_factory=dict)
