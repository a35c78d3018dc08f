"""The conclusions on a run in words: what binds it, whether it was steady, and which steps were odd."""

from __future__ import annotations

from collections import defaultdict

from lm_profiler.analysis.hardware.roofline import contention_lines
from lm_profiler.analysis.remedies.catalogue import remedy_of
from lm_profiler.record.quantities import counted, duration_text
from lm_profiler.record.run_record import Finding, OddStep, RunRecord, Steadiness, Telemetry, Verdict, worst_first

_ODD_SHOWN = 3

# below this share of the highest SM clock a GPU's figures say more about its cooling than about the program
_SLOW_CLOCK = 0.75

# The evidence for what binds a run, by the verdict's name; ``{share}`` has its interval, the others are facts.
_BECAUSE = {
    "straggler": "mending the slow ranks would save {share} of the step",
    "input": "{share} of the step goes to the batch (waiting for it {data:.0%}, copying it {transfer:.0%})",
    "communication": "{share} of the step is communication without overlapping computation",
    "host": "launching kernels takes as long as running them",
    "memory bandwidth": "{share} of the step is spent in kernels that wait for memory",
    "compute": "{share} of the step is work, from forward to optimizer (optimizer {optimizer:.0%})",
    "outside": "{outside:.0%} of the step lies outside every phase (callbacks, logging, the loop itself)",
    "program code: sleep": "{share} of the step passes without computing (sleep, I/O or a lock)",
    "program code: python": "{share} of the step is Python of the program, not the work of torch",
    "program code: owner": "{share} of the step is code that runs beside the phases",
    "program code: logging": "{share} of the step is logging",
    "program code: garbage": "{share} of the step is Python's garbage collection",
    "program code: compilation": "{share} of the step is compilation",
    "program code: pattern": "{share} of the step is what every n-th step takes longer than the others",
    "between steps: validation": "{share} of the time is validation",
    "between steps: checkpoint": "{share} of the time is saving checkpoints",
    "between steps: epoch": "{share} of the time is the end and the beginning of epochs",
    "between steps: reload": "{share} of the time is making the loader anew at each epoch",
    "between steps: worker_start": "{share} of the time is the start of the loader's workers at each epoch",
    "small operators": "a step reaches {reached} of what the machine can; its time may go to small operators or memory",
    "shared": "{working:.0%} of the step is work, from forward to optimizer; how well it uses the machine cannot be "
    "told while others use it",
    "unknown": "{working:.0%} of the step is work, from forward to optimizer; utilisation is unknown",
}


def verdict_lines(record: RunRecord) -> list[str]:
    """Return a line on what binds the run and whether it was steady, and a line on what to do next."""
    verdict, steadiness = record.verdict, record.steadiness
    if verdict is None:
        return []
    said = [_bound(verdict)]
    if steadiness is not None:
        said = [_words(steadiness), *contention_lines(record.contention), *said]
        if steadiness.recompilations:
            said.append(f"{counted(steadiness.recompilations, 'recompilation')} while measuring")
    return [f"verdict: {'; '.join([*said, *_clock(record.telemetry)])}", f"next: {next_text(record)}"]


def _bound(verdict: Verdict) -> str:
    bound = "no bottleneck found"
    if verdict.bound_by is not None:
        may = "" if verdict.certain or verdict.or_bound_by is not None or verdict.because is None else "may be "
        bound = f"{may}bound by {verdict.bound_by}" + (f" or {verdict.or_bound_by}" if verdict.or_bound_by else "")
    if verdict.because is None:  # a record of version 0.2
        return f"{bound if verdict.certain else 'bottleneck unknown'}: {verdict.evidence}"
    share = "" if verdict.share is None else f"{verdict.share:.0%}"
    if verdict.share_low is not None and verdict.share_high is not None:
        share += f" [{verdict.share_low * 100:.0f}, {verdict.share_high * 100:.0f}]"
    facts = verdict.facts
    known = facts | {"share": share, "reached": percent(facts.get("utilisation", 0.0))}
    text = _BECAUSE.get(verdict.because, verdict.because).format_map(defaultdict(float, known))
    if verdict.because == "compute" and "utilisation" in facts:
        text += f", at {facts['utilisation']:.0%} of what the machine can reach"
    if "run_s" in facts:
        text += f": of the {duration_text(facts['run_s'])} of this run, {duration_text(facts['seconds'])}"
    if verdict.because == "host" and "marks" in facts:
        text = f"at {facts['marks']:.0%} of the phase boundaries the device had already run out of work"
    if verdict.because == "host" and "idle" in facts:
        text += f", and it was idle for {facts['idle']:.0%} of the traced steps"
    return f"{bound}: {text}"


def percent(share: float) -> str:
    return "less than 1%" if share < 0.01 else f"{share:.0%}"


def next_text(record: RunRecord) -> str:
    """Return what to do next, with what it would save at most."""
    if record.findings:
        return _what_to_do(record.findings[0], record)
    if record.verdict is not None and record.verdict.advice:  # of version 0.2
        return record.verdict.advice
    return "Nothing stands out: no single change is known that would save 5% of the step."


def findings_lines(record: RunRecord) -> list[str]:
    """Return a line for each finding but the first: what else could be done, and what it could save."""
    return [f"also: {_what_to_do(finding, record)}" for finding in record.findings[1:]]


def _what_to_do(finding: Finding, record: RunRecord) -> str:
    could = "could save" if finding.may else "saves"
    saves = f"It {could} at most {duration_text(finding.saves_s)} ({finding.share:.0%}) of a step."
    return f"{remedy_of(finding, record)} {saves}"


def step_lines(record: RunRecord) -> list[str]:
    """Return a line on the course of the measured steps and one on the parts of their mean, if there are any."""
    of = record.steadiness
    if of is None or of.first is None or of.level_s is None:
        return [f"steps: {of.evidence}"] if of is not None and of.evidence else []
    said = _course(of)
    if of.cut:
        shift = "" if of.bias_of_mean is None else f", which would shift the mean by {of.bias_of_mean:+.1%}"
        said.append(f"{counted(of.cut, 'more warm-up step')} left out{shift}")
    return [f"steps: {'; '.join(said)}"] * bool(said) + [_parts(of)] * bool(of.pattern_s or of.odd_s)


def _course(of: Steadiness) -> list[str]:
    """Return phrases on the trend or the levels, and on the steps that the figures use."""
    if of.rise:
        return [f"the level {'rises' if of.rise > 0 else 'falls'} by {abs(of.rise):.1%} over the run"]
    told = []
    for before, level in zip([None, *of.levels], of.levels, strict=False):
        change = " take" if before is None else f" ({level.seconds / before.seconds - 1.0:+.1%}):"
        told.append(f"steps {level.first} to {level.last}{change} {duration_text(level.seconds)}")
    return [*told, f"figures are of steps {of.first} to {of.last}"] if len(told) > 1 else []


def _parts(of: Steadiness) -> str:
    """Return the mean step as a sum: ``step: 119.6 ms = 117.4 level + 2.2 in 1 of 5 steps (+11 %)``."""
    parts = [(of.level_s or 0.0, "level")]
    if (pattern := of.pattern) is not None and of.pattern_s:
        which = f"{len(pattern.slow)} of {pattern.every} steps"
        if pattern.short_batch:
            which = "the last, shorter batch of each epoch"
        parts.append((of.pattern_s, f"in {which} ({pattern.extra:+.0%})"))
    if of.odd_s:
        parts.append((of.odd_s, "odd steps"))
    total = sum(seconds for seconds, _ in parts)
    terms = " ".join(f"{'+-'[seconds < 0]} {abs(seconds) * 1e3:.4g} {name}" for seconds, name in parts)
    return f"step: {total * 1e3:.4g} ms = {terms.removeprefix('+ ')}"


def _words(steadiness: Steadiness) -> str:
    if steadiness.word is None:
        return "too few steps to tell whether it is steady"
    text = ", ".join(steadiness.words)
    if steadiness.word != "noisy":
        return text
    if (share := steadiness.known_to) is None or share > 1.0:
        return f"{text}: too few steps, or too unlike ones, to know the level"
    known = f"{share:.1%}" if share < 0.1 else f"{share:.0%}"  # just above the limit it must not look like the limit
    return f"{text}: the level is only known to within ±{known}"


def odd_lines(record: RunRecord) -> list[str]:
    """Return a line for each of the three worst steps, and how many more there are."""
    several = len(record.rank_step_s) > 1
    told = [f"odd: {odd_text(odd, several)}" for odd in worst_first(record.odd_steps)[:_ODD_SHOWN]]
    more = len(record.odd_steps) - _ODD_SHOWN
    return [*told, f"odd: and {counted(more, 'more step')}"] if more > 0 else told


def odd_text(odd: OddStep, ranks: bool = False) -> str:
    """Return how long the step took, where and why; with ``ranks`` also the rank that has the cause."""
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
