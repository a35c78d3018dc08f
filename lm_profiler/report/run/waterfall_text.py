"""The waterfall in words: why a step takes as long as it does, what could be saved, or why that is unknown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lm_profiler.record.quantities import PARTS, TIMES, term_title
from lm_profiler.record.run import Contributor, RunRecord, Term, Waterfall
from lm_profiler.record.text import shortened
from lm_profiler.report.tables.table import digits_of, ms_text

# the share of the step below which terms are summed up on the terminal, and are not named as places to save
_SMALL = 0.01
_NOTHING = 1e-3  # the share of a term below which what no phase is known of is rounding
_MOST_NAMED = 2
# The share of the step that may be unexplained. Beyond it any term may be longer than the trace shows: no ceilings.
_UNSURE = 0.1


@dataclass(frozen=True)
class Rung:
    """A term as it is drawn: it begins ``start_s`` after the step begins, where the term before it ends.

    ``text`` is its time in ms, rounded so that all of them add up to the step's own text.
    """

    term: Term
    start_s: float
    text: str
    title: str

    @property
    def signed_text(self) -> str:
        """The text with its sign; the ideal, which begins at 0, has none."""
        return self.text if self.term.name == "ideal" or self.text.startswith("-") else f"+{self.text}"

    @property
    def pieces(self) -> dict[str, float]:
        """Its seconds by phase, in the order of a step; those of no known phase have an empty name."""
        known = {part: seconds for part in PARTS if (seconds := self.term.phases.get(part))}
        rest = self.term.seconds - sum(known.values())
        return known | ({"": rest} if abs(rest) > _NOTHING * abs(self.term.seconds) else {})


def rungs(fall: Waterfall) -> list[Rung]:
    """Return the terms whose text is not 0, in the record's order, and always the ideal and the unexplained."""
    texts = term_texts(fall)
    drawn, start_s = [], 0.0
    for term in fall.terms:
        text = texts[term.name]
        if not _is_nought(text) or term.name in ("ideal", "unexplained"):
            drawn.append(Rung(term, start_s, text, title_in(fall, term.name)))
        start_s += term.seconds
    return drawn


def not_drawn(fall: Waterfall) -> str:
    """Return a sentence on the terms that have no bar; empty where all have one."""
    drawn = {rung.term.name for rung in rungs(fall)}
    without = [term.name for term in fall.terms if term.name not in drawn]
    nothing = [title_in(fall, name) for name in without if name not in fall.untold]
    unknown = [title_in(fall, name) for name in without if name in fall.untold]
    told = {"No time in": nothing, "Unknown, and part of the next term": unknown}
    return " ".join(f"{words}: {', '.join(titles)}." for words, titles in told.items() if titles)


def _is_nought(text: str) -> bool:
    return not text.strip("-0.,")


def title_in(fall: Waterfall, name: str) -> str:
    """Return the title of a term in this waterfall."""
    # Without a known bandwidth the two terms of memory-bound kernels are one.
    unknown = name == "beyond_bandwidth" and fall.bandwidth_bytes_per_s is None
    return "memory-bound" if unknown else term_title(name)


def of_the_step(record: RunRecord) -> dict[str, float]:
    """Return the seconds of each phase in the step that the terms add up to; empty where they are unknown."""
    fall = record.waterfall
    if fall is not None and fall.step_phases:
        return {part: seconds for part in PARTS if (seconds := fall.step_phases.get(part))}
    # Records of earlier versions have only the shares of the mean step.
    step_s = fall.step_s if fall is not None else 0.0
    return {part: share * step_s for part in PARTS if (share := record.shares.get(part))}


def step_text(fall: Waterfall) -> str:
    """Return the step in ms with its interval, to four digits, as ``report`` shows it everywhere."""
    return TIMES["step"].rounded(fall.step_s, *interval_of(fall))


def interval_of(fall: Waterfall) -> tuple[float, float] | tuple[()]:
    """Return the 95 % interval of the step; empty where there is none."""
    return () if fall.ci_low is None or fall.ci_high is None else (fall.ci_low, fall.ci_high)


def term_texts(fall: Waterfall) -> dict[str, str]:
    """Return the time of each term in ms, by its name, rounded so that all of them add up to the step's text."""
    texts = _adding_up([term.seconds for term in fall.terms], fall.step_s)
    return dict(zip((term.name for term in fall.terms), texts, strict=True))


def _adding_up(seconds: Sequence[float], total_s: float) -> list[str]:
    # The largest-remainder method: round all down, then give the missing units to those that lost most.
    digits = digits_of(total_s)
    units = [value * TIMES["step"].scale * 10**digits for value in seconds]
    whole = [math.floor(unit) for unit in units]
    missing = round(total_s * TIMES["step"].scale * 10**digits) - sum(whole)
    if not 0 <= missing <= len(units):  # a foreign record, whose terms do not add up
        return [ms_text(value, digits) for value in seconds]
    for at in sorted(range(len(units)), key=lambda at: whole[at] - units[at])[:missing]:
        whole[at] += 1
    return [f"{unit / 10**digits:,.{digits}f}" for unit in whole]


def why_lines(record: RunRecord) -> list[str]:
    """Return the mean step as a sum in one line, and the places where most could be saved in another."""
    fall = record.waterfall
    if fall is not None and record.contended:
        return ["why: not told, because other programs lengthened what it is taken apart from"]
    if fall is None or not fall.terms:
        asked = fall is None and record.status == "ok" and record.steps_planned.get("trace")
        return [f"why: unknown: {_missing(record)}"] if asked else []
    (first, ideal), *others = _small_together(fall)
    terms = [f"{ideal} {first}"]
    terms += [f"{'-' if text.startswith('-') else '+'} {text.removeprefix('-')} {title}" for title, text in others]
    shown, bracket, interval = step_text(fall).partition(" [")
    return [f"why: {shown} ms{bracket}{interval} = {' '.join(terms)}", *_to_win(fall)]


def _small_together(fall: Waterfall) -> list[tuple[str, str]]:
    between = [rung for rung in rungs(fall) if rung.term.name not in ("ideal", "unexplained")]
    small = [rung for rung in between if rung.term.seconds < _SMALL * fall.step_s]
    ranked = sorted((r for r in between if len(small) < 2 or r not in small), key=lambda rung: -rung.term.seconds)
    told = [(rung.title, rung.text) for rung in ranked]
    if len(small) > 1:
        total = sum(float(rung.text.replace(",", "")) for rung in small)
        told.append(("smaller terms", f"{total:,.{digits_of(fall.step_s)}f}"))
    texts = term_texts(fall)
    ends = [[(term_title(name), texts[name])] if name in texts else [] for name in ("ideal", "unexplained")]
    return [*ends[0], *told, *ends[1]]


def ceiling_text(fall: Waterfall, term: Term) -> str:
    """Return the most ms that could be saved in ``term``; empty where nothing could, or too much is unexplained."""
    if not term.at_most_s or unsure(fall):
        return ""
    whole = math.isclose(term.at_most_s, term.seconds)  # then both are printed alike
    return term_texts(fall)[term.name] if whole else ms_text(term.at_most_s, digits_of(fall.step_s))


def unsure(fall: Waterfall) -> str:
    """Return why no ceiling is shown; empty where ceilings are shown."""
    rest = sum(term.seconds for term in fall.terms if term.name == "unexplained")
    if abs(rest) <= _UNSURE * fall.step_s:
        return ""
    if rest < 0:
        return f"unknown, as the traced steps took {-rest / fall.step_s:.0%} more than the measured"
    return f"unknown, as {rest / fall.step_s:.0%} of the step is unexplained"


def _to_win(fall: Waterfall) -> list[str]:
    if reason := unsure(fall):
        return [f"could save: {reason}"]
    ceilings = [(term.at_most_s, term) for term in fall.terms if term.at_most_s is not None]
    high = sorted((of for of in ceilings if of[0] >= _SMALL * fall.step_s), key=lambda of: -of[0])
    digits = digits_of(fall.step_s)
    places = []
    for _, term in high[:_MOST_NAMED]:
        largest = max(term.contributors, key=lambda of: of.seconds, default=None)
        told = "" if largest is None else f" ({_told(largest, digits)})"
        places.append(f"at most {ceiling_text(fall, term)} ms in {title_in(fall, term.name)}{told}")
    return [f"could save: {'; '.join(places)}"] if places else []


def _told(of: Contributor, digits: int) -> str:
    # Without a module it is often a call of the driver within an operator, whose own name is the news.
    name = shortened(of.module) if of.module else shortened(of.what, 72)
    told = f"{name} {ms_text(of.seconds, digits)} ms"
    return told if of.detail is None else f"{told}: {of.detail.partition('; ')[0]}"


def no_waterfall(record: RunRecord) -> str:
    """Return why the run has no waterfall, and what to do about it."""
    return "" if record.waterfall is not None else f"No waterfall: {_missing(record)}"


def _missing(record: RunRecord) -> str:
    if record.status != "ok":
        failed = record.failure
        why = f": {failed.type} in {failed.where}" if failed is not None else ""
        return f"the run ended before it could be taken apart ({record.status}{why})."
    if not record.steps.get("trace"):
        planned = record.steps_planned.get("trace")
        if planned and any(note.startswith("the loop ended in stage ") for note in record.notes):
            stages = sum(record.steps_planned.values())
            return f"the loop ended before the trace. Let it run for all stages: {stages} steps or more."
        return f"no step was traced{f', of {planned} planned' if planned else ''}. Run it again with --trace.steps=2."
    use = record.utilisation
    if use is None:
        return f"the FLOPs of a step are unknown{_why_no_flops(record)}"
    if use.dtype is None:
        return "the dtype of its matrix products is unknown."
    if use.peak_flops_per_s is None and use.ceiling_flops_per_s is None:
        noted = "; a note says why none was measured" if _noted(record, "ceiling") else ""
        return f"no peak is known for this device{noted}. Run it again with --peak_tflops, from its datasheet."
    if _noted(record, "trace", "waterfall", "rates"):
        return "a note of the run says why."
    return "an earlier version ran it, or its trace says too little. Run it again with --trace.steps=2."


def _why_no_flops(record: RunRecord) -> str:
    if _noted(record, "FLOPs", "utilisation"):
        return "; a note of the run says why."
    if not record.steps.get("memory"):
        return ": no step was looked at for them. Run it again with --memory.steps=1."
    return "."


def _noted(record: RunRecord, *subjects: str) -> bool:
    return any(note.startswith(f"{subject} unknown: ") for note in record.notes for subject in subjects)
