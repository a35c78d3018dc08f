"""What an entry of the catalogue consists of, and what it is asked about."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lm_profiler.analysis.improve.trials import Candidate
from lm_profiler.analysis.plan.planned import Planned
from lm_profiler.record.entry import Entry
from lm_profiler.record.run import Bound, Finding, RunRecord, Settings

ORDER = "rounding: sums are taken in another order"
PER_BATCH = "what is computed over a batch, such as batch norm"
TF32 = "rounding: factors of float32 products have 11 bits"
BFLOAT16 = "rounding: activations and products are in bfloat16"
FLOAT16 = "rounding: activations and products are in float16"
WEIGHTS = "rounding: weights are in bfloat16, too"
BY_WORKERS = "the batches, where workers share an iterable data set"
WITHOUT_CLIPPING = "training itself: gradients are not clipped"
OTHER_BATCH = "training itself: the global batch is another one"
OTHER_OPTIMIZER = "training itself: the optimizer is another one"
OTHER_CONTEXT = "training itself: the context is another one"
UNKNOWN = "an option that was asked for: what else it changes is not known"

# a plan's words for each effect on training that it offers, the least effect first
EFFECTS = {
    None: "",
    ORDER: "rounding",
    PER_BATCH: "statistics over a batch",
    BFLOAT16: "rounding",
    WEIGHTS: "rounding (also of weights)",
    OTHER_BATCH: "the samples of a step",
    OTHER_OPTIMIZER: "the optimizer",
    OTHER_CONTEXT: "the context",
}


@dataclass(frozen=True)
class Hardware:
    """The machine's facilities. None is unknown: then the runs themselves will tell."""

    half_precision: str | None  # the mixed precision that it multiplies faster than float32; "" for none
    tf32: bool | None  # whether it multiplies float32 as TF32
    compiles: str  # why torch.compile cannot work here; "" where it can
    cores: int  # that the run may use
    has_device: bool  # whether batches are copied to a device


@dataclass(frozen=True)
class FirstRun:
    """The run that is to become faster: what it was set to, and what its step consists of."""

    entry: Entry
    record: RunRecord

    def option(self, path: str) -> Any:
        """The value of an option; None also where the run has no such option."""
        return self.entry.option(path)

    def has(self, path: str) -> bool:
        """Return whether the run's parser knows the option ``path``."""
        head, _, name = path.rpartition(".")
        section: Any = (self.record.config or {}).get(head)
        section = section.get("init_args", section) if isinstance(section, Mapping) else {}
        return isinstance(section, Mapping) and name in section

    def first_known(self, *paths: str) -> str | None:
        """The first of some options that the run's parser knows: a module's own before what torch offers any module."""
        return next((path for path in paths if self.has(path)), None)

    def phases_s(self, *names: str) -> float | None:
        """Mean seconds of a step that these phases take: no remedy saves more than what it touches."""
        means = [self.record.time[name].mean for name in names if name in self.record.time]
        return sum(mean for mean in means if mean is not None) if means else None

    def terms_s(self, *names: str) -> float | None:
        """Seconds that these terms of the waterfall could save at most; None without a waterfall."""
        waterfall = self.record.waterfall
        if waterfall is None:
            return None
        return sum(term.at_most_s or 0.0 for term in waterfall.terms if term.name in names)


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
        """The remedy's possible effect on training, in short; empty for nothing."""
        return EFFECTS.get(self.may_change, self.may_change or "")


def faster(options: Mapping[str, str], group: str, ceiling_s: float | None, may_change: str | None = None) -> Candidate:
    """A candidate that is called as its options."""
    return Candidate(name_of(options), options, group, ceiling_s, may_change)


def smaller(options: Mapping[str, Any], may_change: str | None = None, is_known: bool = False) -> Smaller:
    """A candidate of a plan that is called as its options."""
    text = {name: str(value) for name, value in options.items()}
    return Smaller(name_of(text), text, next(iter(text)), None, may_change, is_known)


def name_of(options: Mapping[str, str]) -> str:
    """Return the name of a candidate with these options."""
    return " + ".join(f"{option}={text}" for option, text in options.items())


# candidates that a run leaves open, each with why it cannot work on this hardware ("" where it can)
Faster = Callable[[FirstRun, Hardware], Iterator[tuple[Candidate, str]]]


def switch(name: str, when: Callable[[Any], bool], to: str, phases: tuple[str, ...], may_change: str | None) -> Faster:
    """One option that is set to ``to`` where its value is as ``when`` says, and saves at most what ``phases`` take."""

    def candidates(run: FirstRun, hardware: Hardware) -> Iterator[tuple[Candidate, str]]:
        if when(run.option(name)):
            yield faster({name: to}, name, run.phases_s(*phases), may_change), ""

    return candidates


@dataclass(frozen=True)
class Remedy:
    """Something to do about a step that takes too long or needs too much."""

    name: str  # that of the finding that it answers, or its own where no finding is about it
    say: str | Callable[[Finding, Settings], str] = ""  # the sentence of such a finding
    # how much of what is possible it usually saves, to rank findings by: ceilings of what fuses or halves are loose
    likely: float = 1.0
    # what a run is bound by for which it goes before other remedies whose ceilings are no lower
    against: tuple[Bound, ...] = ()
    # the candidates of `improve`: options, the ceiling of what they save, and what they may change
    faster: Faster | None = None
    # the candidates of `plan` where a run does not fit, given the largest context that does, if known
    smaller: Callable[[Planned, int | None], Iterator[Smaller]] | None = None
