"""Random programs: a call that nothing needs can be left out, and one that training needs cannot."""

import random
from collections.abc import Collection, Sequence

import pytest
from made_calls import made_call

from lm_profiler.analysis.dataflow.liveness import liveness_of
from lm_profiler.record.operator_calls import OperatorCall, StepCalls

STORAGES = range(12)
TRAINED, KEPT = frozenset({0, 1}), frozenset({2, 3})


def random_call(rng: random.Random) -> OperatorCall:
    """Return a call that reads some storages and writes one: all of it, a part of it, or none if Python reads."""
    reads = set(rng.sample(STORAGES, rng.randint(0, 2)))
    if rng.random() < 0.15:
        return made_call("read", (*reads,), writes=(), is_host_read=True)
    written = rng.choice(STORAGES)
    overwrites = frozenset({written} if rng.random() < 0.7 else ())
    return made_call("op", (*reads,), writes=(written,), overwrites=overwrites)


def run(calls: Sequence[OperatorCall], without: Collection[int] = (), steps: int = 3) -> dict[str, list[object]]:
    """Run the steps on contents that are the expressions of what made them; return what training and readers get.

    A storage holds a set, to which a call that writes only a part of it adds.
    """
    contents: dict[int, frozenset[object]] = {storage: frozenset({("first", storage)}) for storage in STORAGES}
    got: dict[str, list[object]] = {"trained": [], "read": []}
    for _ in range(steps):
        for number, call in enumerate(calls):
            if number in without:
                continue
            result = (number, tuple(hash(contents[storage]) for storage in sorted(call.reads)))
            if call.is_host_read:
                got["read"].append(result)
            for storage in call.writes:
                left = frozenset() if storage in call.overwrites else contents[storage]
                contents[storage] = left | {result}
                if storage in KEPT:
                    got["read"].append(result)
        got["trained"].append([contents[storage] for storage in sorted(TRAINED)])
    return got


@pytest.mark.parametrize("seed", range(60))
def test_leaving_calls_out_changes_what_their_liveness_predicts(seed: int) -> None:
    rng = random.Random(seed)
    calls = [random_call(rng) for _ in range(rng.randint(5, 25))]
    liveness = liveness_of(StepCalls(calls=calls, trained=TRAINED, kept=KEPT))
    if liveness is None:  # nothing is trained
        assert not any(TRAINED & set(call.writes) for call in calls)
        return
    assert liveness.needed | liveness.needed_only_elsewhere | liveness.dead == set(range(len(calls)))
    whole = run(calls)
    assert run(calls, without=liveness.dead | liveness.needed_only_elsewhere)["trained"] == whole["trained"]
    for number in liveness.needed:
        assert run(calls, without=[number])["trained"] != whole["trained"]
