"""The types of the catalogue of remedies: ``Remedy``, the candidates that it offers, and the run that it is for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lm_profiler.analysis.plan.planned import Planned
from lm_profiler.record.entry import Entry
from lm_profiler.record.run_record import Bound, Finding, RunRecord, Settings

# What a remedy may change in the results of training. The text before a colon is the short form, for tables of `plan`.
ORDER = "rounding: sums are computed in another order"
TF32 = "rounding: float32 products round their factors to 11 bits"
BFLOAT16 = "rounding: activations and products are in bfloat16"
FLOAT16 = "rounding: activations and products are in float16"
WEIGHTS = (
    "rounding (also of weights): weights, activations and products are in bfloat16"
)
PER_BATCH = "statistics over a batch: batch norm, for example"
BY_WORKERS = "the batches, if workers share an iterable data set"
OTHER_BATCH = "the samples of a step: the global batch changes"
OTHER_OPTIMIZER = "the optimizer"
OTHER_CONTEXT = "the context"
UNKNOWN = "an option of yours: its other effects are unknown"

# the effects of the settings that `plan` offers, from the smallest to the largest
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
    """The run that `improve` tries to make faster: its options and its record."""

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
        """Return the first of ``paths`` that is an option of the run; None if none of them is."""
        for path in paths:
            if self.has_option(path):
                return path
        return None

    def has_option(self, path: str) -> bool:
        """Return whether the run has the option ``path``, whatever its value."""
        section_name, _, name = path.rpartition(".")
        section: Any = (self.record.config or {}).get(section_name)
        if isinstance(section, Mapping):
            section = section.get("init_args", section)
        return isinstance(section, Mapping) and name in section

    def phases_s(self, *names: str) -> float | None:
        """Return the mean seconds that these phases take together; None if the run has none of them."""
        summaries = []
        for name in names:
            if name in self.record.time:
                summaries.append(self.record.time[name])
        if not summaries:
            return None
        return sum(summary.mean for summary in summaries if summary.mean is not None)

    def terms_s(self, *names: str) -> float | None:
        """Return the most seconds that these terms of the waterfall could save; None without a waterfall."""
        waterfall = self.record.waterfall
        if waterfall is None:
            return None
        return sum(
            term.at_most_s or 0.0 for term in waterfall.terms if term.name in names
        )


@dataclass(frozen=True)
class Candidate:
    """A change that may make the step faster."""

    name: str  # the name in tables, such as ``data.num_workers=4``
    # options added to the call, and their values as written on the command line
    options: Mapping[str, str]
    # a group of candidates, such as all values of one option; only one of a group can be accepted
    group: str
    # the most seconds that it can save in a step; None if the first run does not show that
    ceiling_s: float | None = None
    # what the change may alter in the results; None for nothing
    may_change: str | None = None
    refused: str = ""  # why it is not tried; empty if it is tried


@dataclass(frozen=True)
class MemoryCandidate(Candidate):
    """Options with which a run needs less memory, as `plan` offers them."""

    # whether it is known to fit, so that it need not be rehearsed
    surely_fits: bool = False

    @property
    def words(self) -> list[str]:
        """The options as arguments of a command."""
        return [f"--{name}={value}" for name, value in self.options.items()]

    @property
    def changes(self) -> str:
        """The short form of ``may_change``; empty for nothing."""
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


def memory_candidate(
    options: Mapping[str, Any], may_change: str | None = None, surely_fits: bool = False
) -> MemoryCandidate:
    """Return a setting for `plan` to offer, named after its options and grouped by the first of them."""
    texts = {option: str(value) for option, value in options.items()}
    first_option = next(iter(texts))
    return MemoryCandidate(
        name_of(texts),
        texts,
        group=first_option,
        may_change=may_change,
        surely_fits=surely_fits,
    )


def name_of(options: Mapping[str, str]) -> str:
    return " + ".join(f"{option}={text}" for option, text in options.items())


# Yields the changes that `improve` may try on a run. Those that cannot work on its machine have ``refused`` set.
FindCandidates = Callable[[FirstRun], Iterator[Candidate]]

# Yields settings that need less memory, for a run that does not fit; takes the largest context that fits, if known.
FindMemoryCandidates = Callable[[Planned, int | None], Iterator[MemoryCandidate]]


# a fixed text, or a function that writes it for a finding
Sentence = str | Callable[[Finding, Settings], str]


@dataclass(frozen=True)
class Remedy:
    """A remedy for a step that takes too long or needs too much memory."""

    # the name of the finding that it is for, or a name of its own if there is no such finding
    name: str
    # advice that is shown with the finding
    sentence: Sentence = ""
    # the advice for loops without a Lightning Trainer, if ``sentence`` mentions what only a Trainer has
    plain_sentence: Sentence = ""
    # the share of the possible saving that the remedy usually achieves; findings are ranked with it
    likely_share: float = 1.0
    # the same if the finding is certain (its ``may`` is False)
    likely_share_of_fact: float | None = None
    # In runs with one of these bottlenecks `improve` tries this remedy before the others.
    bounds: tuple[Bound, ...] = ()
    candidates: FindCandidates | None = None
    smaller_settings: FindMemoryCandidates | None = None
