"""The parts of an entry of the catalogue, and the run that it applies to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lm_profiler.analysis.plan.planned import Planned
from lm_profiler.record.entry import Entry
from lm_profiler.record.run_record import Bound, Finding, RunRecord, Settings

# What a remedy may change in training. The part before a colon is the short form, for tables of a plan.
ORDER = "rounding: sums are computed in another order"
TF32 = "rounding: float32 products round their factors to 11 bits"
BFLOAT16 = "rounding: activations and products are in bfloat16"
FLOAT16 = "rounding: activations and products are in float16"
WEIGHTS = "rounding (also of weights): weights are in bfloat16 too"
PER_BATCH = "statistics over a batch: batch norm, for example"
BY_WORKERS = "the batches, where workers share an iterable data set"
OTHER_BATCH = "the samples of a step: the global batch changes"
OTHER_OPTIMIZER = "the optimizer"
OTHER_CONTEXT = "the context"
UNKNOWN = "an option of yours: its other effects are unknown"

# the effects of what a plan offers, the least first
LEAST_FIRST = (
    None,
    ORDER,
    PER_BATCH,
    BFLOAT16,
    WEIGHTS,
    OTHER_BATCH,
    OTHER_OPTIMIZER,
    OTHER_CONTEXT,
)


@dataclass(frozen=True)
class FirstRun:
    """The run that must become faster: its options, and the parts of its step."""

    entry: Entry
    record: RunRecord

    @property
    def has_device(self) -> bool:
        """Whether batches are copied to a device."""
        return (
            self.record.environment is not None
            and self.record.environment.device_type != "cpu"
        )

    @property
    def settings(self) -> Settings:
        return self.record.settings or Settings()

    def option(self, path: str) -> Any:
        """Return the value of the option ``path``, such as ``data.batch_size``; None if the run has none."""
        return self.entry.option(path)

    def first_existing(self, *paths: str) -> str | None:
        """Return the first of ``paths`` that the run's parser has: a module's own option, then the general one."""
        for path in paths:
            if self.has_option(path):
                return path
        return None

    def has_option(self, path: str) -> bool:
        """Return whether the run's parser has the option ``path``, whatever its value."""
        section_name, _, name = path.rpartition(".")
        section: Any = (self.record.config or {}).get(section_name)
        if isinstance(section, Mapping):
            section = section.get("init_args", section)
        return isinstance(section, Mapping) and name in section

    def phases_s(self, *names: str) -> float | None:
        """Return the mean seconds that these phases take: a remedy saves at most the phases that it changes."""
        summaries = []
        for name in names:
            if name in self.record.time:
                summaries.append(self.record.time[name])
        if not summaries:
            return None
        return sum(summary.mean for summary in summaries if summary.mean is not None)

    def terms_s(self, *names: str) -> float | None:
        """Return the seconds that these terms of the waterfall could save at most; None without a waterfall."""
        waterfall = self.record.waterfall
        if waterfall is None:
            return None
        return sum(
            term.at_most_s or 0.0 for term in waterfall.terms if term.name in names
        )


@dataclass(frozen=True)
class Candidate:
    """A change that may make the step faster."""

    name: str  # as the table shows it: ``bf16-mixed``, ``data.num_workers=4``
    # options added to the call: text as written on the command line, by option
    options: Mapping[str, str]
    group: str  # candidates of one group exclude each other (all values of one option)
    # most seconds of a step that it can save, if the first run shows it
    ceiling_s: float | None = None
    may_change: str | None = None  # what it may change in the results; None for nothing
    refused: str = ""  # why it is not tried; empty if it is tried


@dataclass(frozen=True)
class Smaller(Candidate):
    """Options with which a run needs less memory."""

    surely_fits: bool = False  # whether it is known to fit without being rehearsed

    @property
    def words(self) -> list[str]:
        """The options as arguments of a command."""
        return [f"--{name}={value}" for name, value in self.options.items()]

    @property
    def changes(self) -> str:
        """The possible effect on training, in short; empty for none."""
        return (self.may_change or "").partition(":")[0]


def faster_candidate(
    options: Mapping[str, str],
    group: str,
    ceiling_s: float | None,
    may_change: str | None = None,
    refused: str = "",
) -> Candidate:
    """Return a candidate of ``improve``, named after its options."""
    return Candidate(name_of(options), options, group, ceiling_s, may_change, refused)


def smaller(
    options: Mapping[str, Any], may_change: str | None = None, surely_fits: bool = False
) -> Smaller:
    """Return a setting of a plan, named after its options and grouped by the first of them."""
    texts = {option: str(value) for option, value in options.items()}
    group = next(iter(texts))
    return Smaller(
        name_of(texts), texts, group, may_change=may_change, surely_fits=surely_fits
    )


def name_of(options: Mapping[str, str]) -> str:
    return " + ".join(f"{option}={text}" for option, text in options.items())


# yields the candidates of `improve` that a run leaves open; those that cannot work on its machine have ``refused`` set
FindCandidates = Callable[[FirstRun], Iterator[Candidate]]

# yields the settings of `plan` for a run that does not fit, given the largest context that fits, if known
FindSmaller = Callable[[Planned, int | None], Iterator[Smaller]]


# a text, or what makes it of a finding
Sentence = str | Callable[[Finding, Settings], str]


@dataclass(frozen=True)
class Remedy:
    """Something to do about a step that takes too long or needs too much."""

    # the name of the finding that it answers, or its own name if there is none
    name: str
    # on what to do about such a finding
    sentence: Sentence = ""
    # the same for a loop that no Lightning Trainer runs, where the sentence names something that only a Trainer has
    plain_sentence: Sentence = ""
    # the share of its ceiling that it usually saves, to rank findings by: ceilings of fusing or halving are loose
    likely_share: float = 1.0
    # the same if the problem is a fact and not a possibility
    likely_share_of_fact: float | None = None
    # what binds the runs for which it goes before other remedies with ceilings that are not lower
    bounds: tuple[Bound, ...] = ()
    candidates: FindCandidates | None = None
    smaller_settings: FindSmaller | None = None
