"""The conclusions on a run in words: what binds it, whether it was steady, and which steps were odd."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from lm_profiler.analysis.hardware.roofline import contention_lines
from lm_profiler.analysis.remedies.catalogue import remedy_of
from lm_profiler.record.quantities import counted, duration_text
from lm_profiler.record.run import Finding, OddStep, RunRecord, Steadiness, StepLevel, Telemetry, Verdict, worst_first

_ODD_SHOWN = 3

# the share of the highest SM clock below which a GPU's figures say more about its cooling than about the program
_SLOW_CLOCK = 0.75


def verdict_lines(record: RunRecord) -> list[str]:
    """Return a line on what binds the run and whether it was steady, and a line on what to do next."""
    verdict, steadiness = record.verdict, record.steadiness
    if verdict is None:
        return []
    said = [bound_text(verdict)]
    if steadiness is not None:
        said = [_words(steadiness), *contention_lines(record.contention), *said]
        if steadiness.recompilations:
            said.append(f"{counted(steadiness.recompilations, 'recompilation')} while measuring")
    return [f"verdict: {'; '.join([*said, *_clock(record.telemetry)])}", f"next: {next_text(record)}"]


def bound_text(verdict: Verdict) -> str:
    """Return what binds the run and how one sees it."""
    if verdict.because is None:  # of version 0.2
        bound = f"bound by {verdict.bound_by}" if verdict.bound_by is not None else "no bottleneck found"
        return f"{bound if verdict.certain else 'bottleneck unknown'}: {verdict.evidence}"
    bound = "no bottleneck found"
    if verdict.bound_by is not None:
        may = "" if verdict.certain or verdict.or_bound_by is not None else "may be "
        bound = f"{may}bound by {verdict.bound_by}" + (f" or {verdict.or_bound_by}" if verdict.or_bound_by else "")
    return f"{bound}: {_because(verdict)}"


def _because(verdict: Verdict) -> str:
    # All sentences are formed, most of them with facts that this verdict does not have.
    facts = defaultdict(float, verdict.facts)
    share = "" if verdict.share is None else f"{verdict.share:.0%}"
    if verdict.share_low is not None and verdict.share_high is not None:
        share += f" [{verdict.share_low * 100:.0f}, {verdict.share_high * 100:.0f}]"
    texts = {
        "straggler": f"mending the slow ranks would save {share} of the step",
        "input": f"{share} of the step goes to the batch (waiting for it {facts['data']:.0%}, "
        f"copying it {facts['transfer']:.0%})",
        "communication": f"{share} of the step is communication without overlapping computation",
        "host": _launching(verdict.facts),
        "memory bandwidth": f"{share} of the step is spent in kernels that wait for memory",
        "compute": f"{share} of the step is forward, backward and optimizer (optimizer {facts['optimizer']:.0%})"
        + (f", at {facts['utilisation']:.0%} of what the machine can reach" if "utilisation" in facts else ""),
        "outside": f"{facts['outside']:.0%} of the step lies outside every phase (callbacks, logging, the loop itself)",
        "small operators": f"{percent(facts['utilisation'])} of what the machine can reach, so the time goes to small "
        "operators or memory, not to arithmetic",
        "shared": f"{facts['working']:.0%} of the step is forward, backward and optimizer; how well they use the "
        "machine cannot be told while others use it",
        "unknown": f"{facts['working']:.0%} of the step is forward, backward and optimizer; utilisation is unknown",
    }
    return texts.get(verdict.because or "", verdict.because or "")


def percent(share: float) -> str:
    """Return a share in whole per cent."""
    return "less than 1%" if share < 0.01 else f"{share:.0%}"


def _launching(facts: Mapping[str, float]) -> str:
    idle = f", and it was idle for {facts['idle']:.0%} of the traced steps" if "idle" in facts else ""
    if "marks" in facts:
        return f"at {facts['marks']:.0%} of the phase boundaries the device had already run out of work{idle}"
    host, device = (f"{facts.get(name, 0.0) * 1e3:.1f} ms" for name in ("host_s", "device_s"))
    return f"launching kernels takes as long ({host} a step) as running them ({device}){idle}"


def next_text(record: RunRecord) -> str:
    """Return what to do next, with what it would save at most."""
    if not record.findings:
        if record.verdict is not None and record.verdict.advice:  # of version 0.2
            return record.verdict.advice
        return "Nothing stands out: no single change is known that would save 5% of the step."
    return finding_text(record.findings[0], record)


def findings_lines(record: RunRecord) -> list[str]:
    """Return a line for each finding but the first: what else could be done, and what it could save."""
    return [f"also: {finding_text(finding, record)}" for finding in record.findings[1:]]


def finding_text(finding: Finding, record: RunRecord) -> str:
    """Return what to do about ``finding``, and what that could save."""
    could = "could save" if finding.may else "saves"
    text = remedy_of(finding, record)
    return f"{text} It {could} at most {duration_text(finding.saves_s)} ({finding.share:.0%}) of a step."


def step_lines(record: RunRecord) -> list[str]:
    """Return a line on the course of the measured steps and one on what their mean consists of, where there is news."""
    of = record.steadiness
    if of is None or of.first is None or of.level_s is None:
        return [f"steps: {of.evidence}"] if of is not None and of.evidence else []
    said = [*_course(of), *_warmed(of)]
    return [f"steps: {'; '.join(said)}"] * bool(said) + [_parts(of)] * (of.pattern is not None or bool(of.odd_s))


def _course(of: Steadiness) -> list[str]:
    if of.rise:
        return [f"the level {'rises' if of.rise > 0 else 'falls'} by {abs(of.rise):.1%} over the run"]
    if len(of.levels) < 2:
        return []
    first, *later = of.levels
    told, before = [f"{_steps(first)} take {duration_text(first.seconds)}"], first
    for level in later:
        told.append(f"{_steps(level)} {duration_text(level.seconds)} ({level.seconds / before.seconds - 1.0:+.1%})")
        before = level
    return [*told, f"figures are of steps {of.first} to {of.last}"]


def _steps(level: StepLevel) -> str:
    return f"steps {level.first} to {level.last}"


def _warmed(of: Steadiness) -> list[str]:
    if not of.cut:
        return []
    shift = "" if of.bias_of_mean is None else f", which would shift the mean by {of.bias_of_mean:+.1%}"
    return [f"{counted(of.cut, 'more warm-up step')} left out{shift}"]


def _parts(of: Steadiness) -> str:
    parts = [(of.level_s or 0.0, "level")]
    if (pattern := of.pattern) is not None:
        which = ordinal(pattern.every) if len(pattern.slow) == 1 else f"{len(pattern.slow)} of {pattern.every}"
        parts.append((of.pattern_s or 0.0, f"every {which} step ({pattern.extra:+.0%})"))
    if of.odd_s:
        parts.append((of.odd_s, "odd steps"))
    total = sum(seconds for seconds, _ in parts)
    return f"step: {total * 1e3:.4g} ms = {' + '.join(f'{seconds * 1e3:.4g} {name}' for seconds, name in parts)}"


def ordinal(number: int) -> str:
    """Return ``number`` as an ordinal: ``2nd``, ``5th``."""
    ends = {1: "st", 2: "nd", 3: "rd"}
    return f"{number}{'th' if number % 100 in (11, 12, 13) else ends.get(number % 10, 'th')}"


def _words(steadiness: Steadiness) -> str:
    if steadiness.word is None:
        return "too few steps to tell whether it is steady"
    text = ", ".join(steadiness.words)
    if steadiness.word != "noisy":
        return text
    if (share := steadiness.known_to) is None:
        return f"{text}: too few steps to know the level"
    if share > 1.0:
        return f"{text}: the steps differ too much to know the level"
    known = f"{share:.1%}" if share < 0.1 else f"{share:.0%}"  # just above the limit it must not read as the limit
    return f"{text}: the level is only known to within ±{known}"


def odd_lines(record: RunRecord) -> list[str]:
    """Return a line for each of the three worst steps, and how many more there are."""
    several = len(record.rank_step_s) > 1
    told = [f"odd: {odd_text(odd, several)}" for odd in worst_first(record.odd_steps)[:_ODD_SHOWN]]
    more = len(record.odd_steps) - _ODD_SHOWN
    return [*told, f"odd: and {counted(more, 'more step')}"] if more > 0 else told


def odd_text(odd: OddStep, ranks: bool = False) -> str:
    """Return how long the step took, where and why; with ``ranks`` also the rank that the cause is of."""
    excess = f"{'+' if odd.excess_s > 0 else '-'}{duration_text(abs(odd.excess_s))}"
    ratio = f"{odd.ratio:,.0f}" if odd.ratio >= 10 else f"{odd.ratio:.2g}"
    text = f"step {odd.step}: {duration_text(odd.step_s)}, {ratio} x what others take, {excess} in {odd.part}"
    on = f" on rank {odd.rank}" if ranks else ""
    if odd.cause is not None and odd.cause_s is not None:
        return f"{text}: {odd.cause}{on}, {duration_text(odd.cause_s)}"
    if odd.beside is None:
        return text
    return f"{text}: no cause seen" + (f" ({odd.beside}{on})" if odd.beside else "")


def _clock(telemetry: Telemetry | None) -> list[str]:
    if telemetry is None:
        return []
    reasons = f" ({', '.join(telemetry.throttle_reasons)})" if telemetry.throttle_reasons else ""
    several = len(telemetry.gpus) > 1
    if telemetry.clock_share is not None and (telemetry.clock_share < _SLOW_CLOCK or reasons):
        return [f"the {'slowest ' * several}GPU ran at {telemetry.clock_share:.0%} of its highest clock{reasons}"]
    return [f"{'a' if several else 'the'} GPU was throttled{reasons}"] if reasons else []
