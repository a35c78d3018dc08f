"""The parts of an entry of the catalogue, and the run that it applies to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lm_profiler.analysis.plan.planned import Planned
from lm_profiler.record.entry import Entry
from lm_profiler.record.run_record import Bound, Finding, RunRecord, Settings

# What a remedy may change in training. The part before a colon is the short form, for tables of a plan.
ORDER = "rounding: sums are taken in another order"
TF32 = "rounding: factors of float32 products have 11 bits"
BFLOAT16 = "rounding: activations and products are in bfloat16"
FLOAT16 = "rounding: activations and products are in float16"
WEIGHTS = "rounding (also of weights): weights are in bfloat16 too"
PER_BATCH = "statistics over a batch: what is computed over one, such as batch norm"
BY_WORKERS = "the batches, where workers share an iterable data set"
OTHER_BATCH = "the samples of a step: the global batch is another one"
OTHER_OPTIMIZER = "the optimizer"
OTHER_CONTEXT = "the context"
UNKNOWN = "an option that was asked for: what else it changes is not known"

# the effects of what a plan offers, the least first
LEAST_FIRST = (None, ORDER, PER_BATCH, BFLOAT16, WEIGHTS, OTHER_BATCH, OTHER_OPTIMIZER, OTHER_CONTEXT)


@dataclass(frozen=True)
class FirstRun:
    """The run that must become faster: its options, and the parts of its step."""

    entry: Entry
    record: RunRecord

    @property
    def has_device(self) -> bool:
        """Whether batches are copied to a device."""
        return self.record.environment is not None and self.record.environment.device_type != "cpu"

    @property
    def settings(self) -> Settings:
        return self.record.settings or Settings()

    def option(self, path: str) -> Any:
        return self.entry.option(path)

    def first_known(self, *paths: str) -> str | None:
        """Return the first of ``paths`` that the run's parser knows: a module's own option, then the general one."""
        return next(filter(self.has, paths), None)

    def has(self, path: str) -> bool:
        head, _, name = path.rpartition(".")
        section: Any = (self.record.config or {}).get(head)
        section = section.get("init_args", section) if isinstance(section, Mapping) else {}
        return isinstance(section, Mapping) and name in section

    def phases_s(self, *names: str) -> float | None:
        """Return the mean seconds that these phases take: a remedy saves at most the phases that it changes."""
        means = [self.record.time[name].mean for name in names if name in self.record.time]
        return sum(mean for mean in means if mean is not None) if means else None

    def terms_s(self, *names: str) -> float | None:
        """Return the seconds that these terms of the waterfall could save at most; None without a waterfall."""
        waterfall = self.record.waterfall
        if waterfall is None:
            return None
        return sum(term.at_most_s or 0.0 for term in waterfall.terms if term.name in names)


@dataclass(frozen=True)
class Candidate:
    """A change that may make the step faster."""

    name: str  # as the table shows it: ``bf16-mixed``, ``data.num_workers=4``
    options: Mapping[str, str]  # options added to the call: text as written on the command line, by option
    group: str  # candidates of one group exclude each other (all values of one option)
    ceiling_s: float | None = None  # most seconds of a step that it can save, if the first run shows it
    may_change: str | None = None  # what it may change in the results; None for nothing
    refused: str = ""  # why it is not tried; empty if it is tried


@dataclass(frozen=True)
class Smaller(Candidate):
    """Options with which a run needs less memory."""

    is_known: bool = False  # whether it is known to fit without being rehearsed

    @property
    def words(self) -> list[str]:
        """The options as arguments of a command."""
        return [f"--{name}={value}" for name, value in self.options.items()]

    @property
    def changes(self) -> str:
        """The possible effect on training, in short; empty for none."""
        return (self.may_change or "").partition(":")[0]


def faster(
    options: Mapping[str, str], group: str, ceiling_s: float | None, may_change: str | None = None, refused: str = ""
) -> Candidate:
    """Return a candidate named after its options."""
    return Candidate(name_of(options), options, group, ceiling_s, may_change, refused)


def smaller(options: Mapping[str, Any], may_change: str | None = None, is_known: bool = False) -> Smaller:
    """Return a candidate of a plan, named after its options."""
    text = {name: str(value) for name, value in options.items()}
    return Smaller(name_of(text), text, next(iter(text)), may_change=may_change, is_known=is_known)


def name_of(options: Mapping[str, str]) -> str:
    return " + ".join(f"{option}={text}" for option, text in options.items())


# the candidates of `improve` that a run leaves open; those that cannot work on its machine say so
Faster = Callable[[FirstRun], Iterator[Candidate]]


@dataclass(frozen=True)
class Remedy:
    """Something to do about a step that takes too long or needs too much."""

    name: str  # the name of the finding that it answers, or its own name if there is none
    say: str | Callable[[Finding, Settings], str] = ""  # the sentence of such a finding
    # the share of its ceiling that it usually saves, to rank findings by: ceilings of fusing or halving are loose
    likely: float = 1.0
    likely_seen: float | None = None  # the same if the problem is a fact and not a possibility
    # bounds of a run for which it goes before other remedies with ceilings that are not lower
    against: tuple[Bound, ...] = ()
    faster: Faster | None = None
    # the candidates of `plan` if a run does not fit, given the largest context that fits, if known
    smaller: Callable[[Planned, int | None], Iterator[Smaller]] | None = None
