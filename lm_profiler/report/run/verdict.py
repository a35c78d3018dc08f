"""What is concluded of a run, in words: what binds it, whether it was steady, and which steps were odd."""

from __future__ import annotations

from lm_profiler.analysis.hardware.contention import contention_lines
from lm_profiler.record.quantities import counted, duration_text
from lm_profiler.record.run import OddStep, RunRecord, Steadiness, Telemetry, worst_first

_ODD_SHOWN = 3

_SLOW_CLOCK = 0.75
"""Under this share of the highest SM clock a GPU's figures say more about its cooling than about the program."""


def verdict_lines(record: RunRecord) -> list[str]:
    """What binds the run and whether it was steady, in one line; what to try, in another."""
    verdict, steadiness = record.verdict, record.steadiness
    if verdict is None:
        return []
    bound = f"bound by {verdict.bound_by}" if verdict.bound_by is not None else "no bottleneck found"
    said = [f"{bound if verdict.certain else 'bottleneck unknown'}: {verdict.evidence}"]
    if steadiness is not None:
        said = [_words(steadiness), *contention_lines(record.contention), *said]
        if steadiness.cut:
            bias = steadiness.bias_of_mean
            shift = "" if bias is None else f", which would have shifted the mean by {bias:+.1%}"
            said.append(f"left out {counted(steadiness.cut, 'more warm-up step')}{shift}")
        if steadiness.recompilations:
            said.append(f"{counted(steadiness.recompilations, 'recompilation')} while measuring")
    return [f"verdict: {'; '.join([*said, *_clock(record.telemetry)])}", f"next: {verdict.advice}"]


def _words(steadiness: Steadiness) -> str:
    """What may be said of the run's steps, the gravest first."""
    if steadiness.word is None:
        return "too few steps to tell whether it is steady"
    text = ", ".join(steadiness.words)
    if steadiness.word != "noisy":
        return text
    if (share := steadiness.known_to) is None:
        return f"{text}: too few steps to know the median"
    known = f"{share:.1%}" if share < 0.1 else f"{share:.0%}"  # just above the limit it must not read as the limit
    return f"{text}: the median step is only known to within ±{known}"


def odd_lines(record: RunRecord) -> list[str]:
    """A line for each of the three worst steps, and how many more there are."""
    several = len(record.rank_step_s) > 1
    told = [f"odd: {odd_text(odd, several)}" for odd in worst_first(record.odd_steps)[:_ODD_SHOWN]]
    more = len(record.odd_steps) - _ODD_SHOWN
    return [*told, f"odd: and {counted(more, 'more step')}"] if more > 0 else told


def odd_text(odd: OddStep, ranks: bool = False) -> str:
    """What the step took, where, and why; of several ``ranks`` the one that the cause is of."""
    excess = f"{'+' if odd.excess_s > 0 else '-'}{duration_text(abs(odd.excess_s))}"
    ratio = f"{odd.ratio:,.0f}" if odd.ratio >= 10 else f"{odd.ratio:.2g}"
    text = f"step {odd.step}: {duration_text(odd.step_s)}, {ratio} x the median, {excess} in {odd.part}"
    on = f" on rank {odd.rank}" if ranks else ""
    if odd.cause is not None and odd.cause_s is not None:
        return f"{text}: {odd.cause}{on}, {duration_text(odd.cause_s)}"
    if odd.beside is None:
        return text
    return f"{text}: no cause seen" + (f" ({odd.beside}{on})" if odd.beside else "")


def _clock(telemetry: Telemetry | None) -> list[str]:
    """A slow or throttled GPU makes every figure above slow: that is part of the verdict."""
    if telemetry is None:
        return []
    reasons = f" ({', '.join(telemetry.throttle_reasons)})" if telemetry.throttle_reasons else ""
    several = len(telemetry.gpus) > 1
    if telemetry.clock_share is not None and (telemetry.clock_share < _SLOW_CLOCK or reasons):
        return [f"the {'slowest ' * several}GPU ran at {telemetry.clock_share:.0%} of its highest clock{reasons}"]
    return [f"{'a' if several else 'the'} GPU was throttled{reasons}"] if reasons else []
