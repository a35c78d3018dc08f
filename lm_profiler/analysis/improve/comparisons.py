"""What may be said of one comparison of a search: by the runs that it has, and by how it was come by."""

from __future__ import annotations

import math
from dataclasses import replace

from lm_profiler.analysis.compare.ratio import change
from lm_profiler.analysis.improve.decision import LOOKS, hopeless, repeated_interval
from lm_profiler.analysis.improve.trials import Compared
from lm_profiler.record.improve import TriedVerdict

FEWEST_PAIRS, MOST_PAIRS = LOOKS[0], LOOKS[-1]
"""Of runs in one proof."""

ENDED = "the budget ended it"
PASSED = "it did not look faster beside the others"
_UNLIKELY = "more pairs would hardly show it to be faster"


def judged(compared: Compared, most: int, spread: float) -> Compared:
    """With its interval and, once that decides or there is no more to be had, its verdict."""
    compared = failed(compared)
    if compared.verdict is not None or len(compared.a) != len(compared.b):
        return compared
    last = compared.candidate is None
    looks = (max(compared.pairs, FEWEST_PAIRS),) if last else LOOKS
    interval = repeated_interval(compared.ratios, compared.error, spread, looks)
    compared, word = replace(compared, interval=interval), change(interval)
    if word != "UNCLEAR" and not (last and compared.pairs < most):
        return replace(compared, verdict=word)
    if not last and hopeless(compared.ratios, spread):
        return replace(compared, verdict="UNDECIDED", why=_UNLIKELY)
    return replace(compared, verdict="UNDECIDED" if compared.pairs >= most else None)


def failed(compared: Compared) -> Compared:
    """With a verdict where the latest run of a side did not end well."""
    for side, runs in (("", compared.b), ("what it is compared with ", compared.a)):
        if runs and runs[-1].seconds is None:
            if runs[-1].cut:
                return replace(compared, verdict="UNDECIDED", why=ENDED)
            refused = runs[-1].refused
            verdict: TriedVerdict = "FAILED" if refused is None else "REFUSED"
            why = f"{side}{refused or runs[-1].failed or 'has no measured step'}"
            return replace(compared, verdict=verdict, why=why)
    return compared


def takes_place_of(new: Compared, old: Compared) -> bool:
    """Whether ``old`` is the same comparison, or no more than a look at the same candidate."""
    looked = old.verdict is None or old.why == PASSED
    return new.candidate == old.candidate and (looked or new.a_options == old.a_options)


def name_of(compared: Compared) -> str:
    return "" if compared.candidate is None else compared.candidate.name


def may_go_on(compared: Compared) -> bool:
    return compared.verdict == "UNDECIDED" and compared.why is None and compared.pairs < MOST_PAIRS


def ratio_of(compared: Compared) -> float:
    return compared.b_s / compared.a_s if compared.a_s and compared.b_s else math.inf


def passed_over(compared: Compared, spread: float) -> Compared:
    """What a screening says of one that does not look faster beside the others; only a proof may say FASTER."""
    interval = repeated_interval(compared.ratios, compared.error, spread)
    compared, word = replace(compared, interval=interval), change(interval)
    if word == "SLOWER" or word == "SAME":
        return replace(compared, verdict=word)
    return replace(compared, verdict="UNDECIDED", why=PASSED)
