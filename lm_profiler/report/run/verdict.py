"""The conclusions about a run as text: what limits it, whether it was steady, and which steps were odd."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from lm_profiler.analysis.hardware.roofline import contention_lines
from lm_profiler.analysis.remedies.catalogue import remedy_of
from lm_profiler.record.figure import digits_of, is_zero_text, ms_text
from lm_profiler.record.quantities import count_text, duration_text
from lm_profiler.record.run_record import (
    ALL_PARTS,
    Finding,
    OddStep,
    RunRecord,
    Steadiness,
    StepLevel,
    Telemetry,
    Verdict,
    worst_first,
)

_ODD_SHOWN = 3
# times the mean step: a longer time includes time between steps
_LONGER_THAN_STEP = 1.02
# a shorter window of measured steps gets a line on what it cannot show
_LONG_WINDOW_S = 60.0
_NUMBER_WORDS = {2: "two", 3: "three", 4: "four", 5: "five"}

# below this share of the highest SM clock, a GPU's cooling or power limit shapes the figures more than the program
_SLOW_CLOCK = 0.75

# below this share of what the machine can reach, a run without findings has a cause that is not known
_GOOD_UTILISATION = 0.5
# the least share of the step of a module that is named as the place to look at
_WORTH_A_LOOK = 0.1
# terms of the waterfall whose contributors are operators or kernels
_TERMS_OF_OPERATORS = ("ideal", "slow_products", "bandwidth", "beyond_bandwidth")

# verdict → the evidence for it. ``{share}`` is a share with its interval, the other fields are facts of the verdict.
_EVIDENCE = {
    "straggler": "fixing the slow ranks would save {share} of the step",
    "straggler between steps": "fixing the slow ranks would save {share} of the time (between steps)",
    "input": "{share} of the step is spent on the batch (waiting for it {data:.0%}, copying it {transfer:.0%})",
    "communication": "{share} of the step is communication that does not overlap with computation",
    "host": "launching the kernels takes as long as running them",
    "memory bandwidth": "{share} of the step is spent in kernels that wait for memory",
    "compute": "{share} of the step is computation, from forward to optimizer (optimizer {optimizer:.0%})",
    "outside": "{outside:.0%} of the step lies outside every phase (callbacks, logging, the loop itself)",
    "model outside": "{outside:.0%} of the step lies outside every phase, most of it in the model, whose forward pass "
    "is called without a mark",
    "program code: sleep": "{share} of the step is spent waiting without computing (sleep, I/O or a lock)",
    "program code: threads": "{share} of the step is spent waiting for Python's lock, which another thread holds",
    "program code: python": "{share} of the step is spent in the program's own Python code, outside of torch",
    "program code: slow_call": "{share} of the step is spent in calls of libraries that are slow in a known way",
    "program code: owner": "{share} of the step is spent in code outside the phases",
    "program code: logging": "{share} of the step is spent on logging",
    "program code: garbage": "{share} of the step is spent on Python's garbage collection",
    "program code: compilation": "{share} of the step is spent on compilation",
    "program code: pattern": "{share} of the mean step is the additional time of every n-th step",
    "between steps: validation": "{share} of the time is spent on validation",
    "between steps: checkpoint": "{share} of the time is spent on saving checkpoints",
    "between steps: epoch": "{share} of the time is spent at epoch boundaries",
    "between steps: reload": "{share} of the time is spent on creating a new loader for each epoch",
    "between steps: worker_start": "{share} of the time is spent on starting the loader's workers for each epoch",
    "small operators": "a step reaches {reached} of what the machine can reach; small operators or memory may "
    "limit the speed",
    "shared": "{working:.0%} of the step is computation, from forward to optimizer; utilisation is unknown "
    "because other programs use the machine",
    "unknown": "{working:.0%} of the step is computation, from forward to optimizer; utilisation is unknown",
}


def verdict_lines(record: RunRecord) -> list[str]:
    """Return the line ``verdict:``, on steadiness and what limits the run, and the line ``next:``."""
    verdict = record.verdict
    if verdict is None:
        return []
    phrases = []
    steadiness = record.steadiness
    if steadiness is not None:
        phrases.append(_steadiness_text(steadiness))
        phrases += contention_lines(record.contention)
    phrases.append(_binding_text(verdict))
    if steadiness is not None and steadiness.recompilations:
        recompilations = count_text(steadiness.recompilations, "recompilation")
        phrases.append(f"{recompilations} while measuring")
    phrases += _clock_phrases(record.telemetry)
    return [f"verdict: {'; '.join(phrases)}", f"next: {next_text(record)}"]


def _binding_text(verdict: Verdict) -> str:
    """Return what limits the run, with the evidence: the verdict's facts in the sentence for its reason."""
    bound = _binding_words(verdict)
    if verdict.because is None:  # a record of version 0.2
        if not verdict.certain:
            bound = "bottleneck unknown"
        return f"{bound}: {verdict.evidence}"
    share = "" if verdict.share is None else f"{verdict.share:.0%}"
    if verdict.share_low is not None and verdict.share_high is not None:
        share += f" [{verdict.share_low * 100:.0f}, {verdict.share_high * 100:.0f}]"
    facts = verdict.facts
    texts = facts | {"share": share, "reached": percent(facts.get("utilisation", 0.0))}
    template = _EVIDENCE.get(verdict.because, verdict.because)
    text = template.format_map(defaultdict(float, texts))  # a missing fact counts as 0
    if verdict.because == "compute" and "utilisation" in facts:
        text += f", at {facts['utilisation']:.0%} of what the machine can reach"
    if "each_s" in facts:
        text += f": {_activity_text(facts)}"
    if "run_s" in facts:  # an older record
        text += f": {duration_text(facts['seconds'])} of the {duration_text(facts['run_s'])} that this run took"
    if verdict.because == "host" and "marks" in facts:
        text = f"at {facts['marks']:.0%} of the phase boundaries the device had already run out of work"
    if verdict.because == "host" and "idle" in facts:
        text += f", and it was idle for {facts['idle']:.0%} of the traced steps"
    return f"{bound}: {text}"


def _activity_text(facts: Mapping[str, float]) -> str:
    """Return how long an activity between steps takes and how often it comes: ``390 ms each, about every 26 steps``."""
    text = duration_text(facts["each_s"])
    if facts["times"] == 1:
        return f"{text}, seen once"
    if facts["every"] < 1.0:
        return f"{text} each, {1.0 / facts['every']:.2g} times per step"
    return f"{text} each, about every {count_text(round(facts['every']), 'step')}"


def _binding_words(verdict: Verdict) -> str:
    """Return "bound by …", with "may be" if a single cause is not certain."""
    if verdict.bound_by is None:
        return "no bottleneck found"
    words = f"bound by {verdict.bound_by}"
    if verdict.or_bound_by:
        return f"{words} or {verdict.or_bound_by}"
    is_uncertain = not verdict.certain and verdict.because is not None
    if is_uncertain:
        return f"may be {words}"
    return words


def percent(share: float) -> str:
    return "less than 1%" if share < 0.01 else f"{share:.0%}"


def next_text(record: RunRecord) -> str:
    """Return what to do next, with what it would save at most."""
    if record.findings:
        return _advice_text(record.findings[0], record)
    if record.verdict is not None and record.verdict.advice:  # of version 0.2
        return record.verdict.advice
    return _text_without_findings(record)


def _text_without_findings(record: RunRecord) -> str:
    """Return what is known if no finding is worth reporting: how much of the machine's reachable rate the run uses.

    The verdict has the utilisation only if it is known and other programs did not lower it.
    """
    utilisation = None
    if record.verdict is not None:
        utilisation = record.verdict.facts.get("utilisation")
    if utilisation is None or utilisation >= _GOOD_UTILISATION:
        return "Nothing stands out: no known single change would save 5% of the step."
    text = (
        "No known cause was found, although the run uses only "
        f"{utilisation:.0%} of what the machine can reach."
    )
    return f"{text}{_costliest_module_text(record)}"


def _costliest_module_text(record: RunRecord) -> str:
    """Return a sentence on the module in which the traced steps spent most time, or on an operator outside of modules.

    It is empty without a waterfall.
    """
    if record.waterfall is None:
        return ""
    # the seconds of each operator, by the module that calls it, or by the operator itself outside of modules
    seconds: defaultdict[str, defaultdict[str, float]] = defaultdict(
        lambda: defaultdict(float)
    )
    for term in record.waterfall.terms:
        if term.name in _TERMS_OF_OPERATORS:
            for contributor in term.contributors:
                operator = _operator_text(contributor.what)
                seconds[contributor.module or operator][operator] += contributor.seconds
    if not seconds:
        return ""
    totals_s = {caller: sum(times.values()) for caller, times in seconds.items()}
    costliest = max(totals_s, key=totals_s.__getitem__)
    share = totals_s[costliest] / record.waterfall.step_s
    if share < _WORTH_A_LOOK:
        return ""
    longest_operator = max(seconds[costliest], key=seconds[costliest].__getitem__)
    operator_text = ""
    if longest_operator != costliest:
        operator_text = f", mostly in {longest_operator}"
    return (
        f" Look first at {costliest}: it takes {share:.0%} of the step{operator_text}."
    )


def _operator_text(what: str) -> str:
    """Return an operator as text: ``optimizer: aten::_foreach_add_`` is "foreach_add_ in optimizer"."""
    phase, _, name = what.rpartition(": ")
    operator = name.replace("aten::", "").lstrip("_")
    return f"{operator} in {phase}" if phase else operator


def findings_lines(record: RunRecord) -> list[str]:
    """Return a line for each finding except the first: what else could be done, and what it could save."""
    return [f"also: {_advice_text(finding, record)}" for finding in record.findings[1:]]


def _advice_text(finding: Finding, record: RunRecord) -> str:
    """Return the sentence of a finding: what to do, and how much of a step it could save."""
    verb = "could save" if finding.may else "saves"
    most_s = finding.high_s
    if most_s is None:  # A record before 0.3 has no upper end.
        most_s = finding.saves_s
    share = finding.share
    if finding.saves_s > 0.0:
        share *= most_s / finding.saves_s
    saves = f"It {verb} at most {duration_text(most_s)} ({share:.0%}) of a step."
    if _includes_time_between(finding, record):
        saves = (
            f"It {verb} at most {share:.0%} of all time ({duration_text(most_s)} per step, "
            "including the time between steps)."
        )
    return f"{remedy_of(finding, record)} {saves}"


def _includes_time_between(finding: Finding, record: RunRecord) -> bool:
    """Return whether the finding's share is a share of all time, including time between steps such as validation."""
    step = record.time.get("step")
    if step is None or not step.mean or not finding.share:
        return False
    return finding.saves_s / finding.share > _LONGER_THAN_STEP * step.mean


def step_lines(record: RunRecord) -> list[str]:
    """Return lines on how the measured steps changed, on the terms of their mean, and on what they cannot show."""
    steadiness = record.steadiness
    if steadiness is None:
        return []
    if steadiness.first is None or steadiness.level_s is None:
        if not steadiness.evidence:
            return []
        return [f"steps: {steadiness.evidence}"]
    lines = []
    phrases = [*_course_phrases(steadiness), *_kind_phrases(steadiness)]
    if steadiness.cut:
        phrase = f"{count_text(steadiness.cut, 'more warm-up step')} left out"
        if steadiness.bias_of_mean is not None:
            phrase += f", which would shift the mean by {steadiness.bias_of_mean:+.1%}"
        phrases.append(phrase)
    if phrases:
        lines.append(f"steps: {'; '.join(phrases)}")
    lines += _mean_as_sum(steadiness)
    lines += _window_lines(steadiness, record)
    return lines


def _course_phrases(steadiness: Steadiness) -> list[str]:
    """Return phrases on the trend or the levels of the steps, and on which steps the figures use."""
    if steadiness.rise:
        verb = "rises" if steadiness.rise > 0 else "falls"
        return [f"the step time {verb} by {abs(steadiness.rise):.1%} over the run"]
    if len(steadiness.levels) < 2:
        return []
    phrases = []
    before_s = None
    for level in steadiness.levels:
        steps = f"steps {level.first} to {level.last}"
        level_text = duration_text(level.seconds)
        if before_s is None:
            phrases.append(f"{steps} take {level_text}")
        else:
            change = level.seconds / before_s - 1.0
            phrases.append(f"{steps} ({change:+.1%}{_place_text(level)}): {level_text}")
        before_s = level.seconds
    return [*phrases, f"figures use steps {steadiness.first} to {steadiness.last}"]


def _place_text(level: StepLevel) -> str:
    """Return in which part of the step a level differs from the one before it."""
    if level.change_in is None:
        return ""
    if level.change_in == ALL_PARTS:
        return ", all phases alike: perhaps the machine"
    return f", in {level.change_in}"


def _kind_phrases(steadiness: Steadiness) -> list[str]:
    """Return a phrase on kinds of steps in random order: ``two kinds of steps in random order: 10% take x3``."""
    kinds = steadiness.kinds
    if not kinds:
        return []
    number = _NUMBER_WORDS.get(len(kinds) + 1, str(len(kinds) + 1))
    shares = ", ".join(f"{kind.share:.0%} take x{kind.ratio:.2g}" for kind in kinds)
    return [f"{number} kinds of steps in random order: {shares}"]


def _window_lines(steadiness: Steadiness, record: RunRecord) -> list[str]:
    """Return a line on what a short window cannot show; none if the window is long, or its length is unknown."""
    took_s = steadiness.took_s
    if took_s is None or took_s >= _LONG_WINDOW_S:
        return []
    length = f"{count_text(_steps_used(steadiness), 'step')} or {duration_text(took_s)}"
    line = f"not seen: events rarer than once in {length}"
    if record.is_watched:
        line += "; `lm_profiler watch` shows them"
    elif record.loop == "Trainer":
        line += "; --watch=true reports them"
    return [line]


def _steps_used(steadiness: Steadiness) -> int:
    return (steadiness.last or 0) - (steadiness.first or 1) + 1


def _mean_as_sum(steadiness: Steadiness) -> list[str]:
    """Return a line with the mean step as a sum: ``step: 119.6 ms = 117.4 level + 2.2 in 1 of 5 steps (+11 %)``.

    Terms that round to 0 are left out. There is no line if only the level is left.
    """
    level_s = steadiness.level_s or 0.0
    pattern_s = steadiness.pattern_s or 0.0
    odd_s = steadiness.odd_s or 0.0
    total_s = level_s + pattern_s + odd_s
    digits = digits_of(total_s)
    terms = []
    pattern = steadiness.pattern
    if pattern is not None and not is_zero_text(ms_text(pattern_s, digits)):
        steps = f"{len(pattern.slow)} of {pattern.every} steps"
        if pattern.short_batch:
            steps += " with fewer samples"
        terms.append(
            _signed_term(pattern_s, digits, f"in {steps} ({pattern.extra:+.0%})")
        )
    if total_s > 0.0 and not is_zero_text(ms_text(odd_s, digits)):
        name = f"odd steps ({odd_s / total_s:.0%} of the mean)"
        terms.append(_signed_term(odd_s, digits, name))
    if not terms:
        return []
    level = f"{ms_text(level_s, digits)} level"
    return [f"step: {ms_text(total_s, digits)} ms = {level} {' '.join(terms)}"]


def _signed_term(seconds: float, digits: int, name: str) -> str:
    sign = "-" if seconds < 0 else "+"
    return f"{sign} {ms_text(abs(seconds), digits)} {name}"


def _steadiness_text(steadiness: Steadiness) -> str:
    """Return whether the steps were steady, with their number and time: ``steady over 20 steps, 3.4 s``."""
    if steadiness.word is None:
        return "too few steps to know whether the step time is steady"
    text = ", ".join(steadiness.words)
    if steadiness.took_s is not None and steadiness.first is not None:
        text += f" over {count_text(_steps_used(steadiness), 'step')}, {duration_text(steadiness.took_s)}"
    explained_share = steadiness.explained_by_sizes
    if explained_share is not None and steadiness.word != "steady":
        text += f": the step time follows the batch size (which explains {explained_share:.0%} of its variation)"
    if steadiness.word != "noisy":
        return text
    share = steadiness.known_to
    if share is None or share > 1.0:
        separator = ":" if explained_share is None else ";"
        return f"{text}{separator} too few steps, or too much variation, to know the step time"
    # The level is noisy above 5 %, so 5.2 % must not be printed as 5 %.
    decimals = 1 if share < 0.1 else 0
    known_to = f"only known to within ±{share:.{decimals}%}"
    if explained_share is not None:
        return f"{text}, so the mean is {known_to}"
    return f"{text}: the step time is {known_to}"


def odd_lines(record: RunRecord) -> list[str]:
    """Return a line for each of the three worst steps, and how many more there are."""
    has_several_ranks = len(record.rank_step_s) > 1
    lines = []
    for odd in worst_first(record.odd_steps)[:_ODD_SHOWN]:
        lines.append(f"odd: {odd_text(odd, has_several_ranks)}")
    steps_left = len(record.odd_steps) - _ODD_SHOWN
    if steps_left > 0:
        lines.append(f"odd: and {count_text(steps_left, 'more step')}")
    return lines


def odd_text(odd: OddStep, has_several_ranks: bool = False) -> str:
    """Return how long the step took, in which phase and why; with several ranks, also the rank of the cause."""
    sign = "+" if odd.excess_s > 0 else "-"
    excess = f"{sign}{duration_text(abs(odd.excess_s))} in {odd.part}"
    ratio = f"{odd.ratio:,.0f}" if odd.ratio >= 10 else f"{odd.ratio:.2g}"
    step_time = duration_text(odd.step_s)
    text = f"step {odd.step}: {step_time}, {ratio} x the usual time, {excess}"
    return text + _cause_text(odd, has_several_ranks)


def _cause_text(odd: OddStep, has_several_ranks: bool) -> str:
    """Return the cause of an odd step after a colon, or that none was seen; empty if causes were not recorded."""
    rank = f" on rank {odd.rank}" if has_several_ranks else ""
    if odd.cause is not None and odd.cause_s is not None:
        return f": {odd.cause}{rank}, {duration_text(odd.cause_s)}"
    if odd.beside is None:
        return ""
    # ``beside`` names the counters with a notable excess that does not explain the step.
    if not odd.beside:
        return ": no cause seen"
    return f": no cause seen ({odd.beside}{rank})"


def _clock_phrases(telemetry: Telemetry | None) -> list[str]:
    """Return a phrase on a GPU whose clock was slow, or that was throttled."""
    if telemetry is None:
        return []
    has_several_gpus = len(telemetry.gpus) > 1
    is_throttled = bool(telemetry.throttle_reasons)
    reasons = ""
    if telemetry.throttle_reasons:
        reasons = f" ({', '.join(telemetry.throttle_reasons)})"
    share = telemetry.clock_share
    if share is not None and (share < _SLOW_CLOCK or is_throttled):
        gpu = "the slowest GPU" if has_several_gpus else "the GPU"
        return [f"{gpu} ran at {share:.0%} of its highest clock{reasons}"]
    if is_throttled:
        gpu = "a GPU" if has_several_gpus else "the GPU"
        return [f"{gpu} was throttled{reasons}"]
    return []
