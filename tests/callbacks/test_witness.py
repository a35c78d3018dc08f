"""What two real ranks say of their collectives, under DDP and with sharded weights on the CPU."""

from __future__ import annotations

import os
import pickle
from typing import Any

import numpy as np
import pytest
from ranks_witnessed import STEPS
from scripts import SUPPORT
from warm import run

from lm_profiler.analysis.ranks.rank_timeline import RankTimeline
from lm_profiler.analysis.ranks.ranks_summary import ranks_of
from lm_profiler.record.parts import PARTS

RING = 40
"""Calls that torch's flight recorder holds: it comes round while steps are measured."""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("witness")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_FR_BUFFER_SIZE": str(RING)}
    done = run(str(SUPPORT / "ranks_witnessed.py"), str(folder), environment=environment)
    assert done.returncode == 0, done.stderr
    return pickle.loads((folder / "timelines.pkl").read_bytes())


@pytest.fixture(params=["DDP", "FSDP2"])
def ranks(said: Any, request: pytest.FixtureRequest) -> list[RankTimeline]:
    return list(said[request.param]["timelines"])


def test_each_rank_says_when_it_came_to_every_collective_though_the_ring_came_round(ranks: list[RankTimeline]) -> None:
    assert [each.rank for each in ranks] == [0, 1]
    first, second = ranks
    assert first.collectives == second.collectives
    assert (
        len(first.collectives) > 48 - 10
    )  # more than the ring holds, all told: warm-up and what is set up come before
    numbers = [call.number for call in first.collectives]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    for each in ranks:
        assert each.steps.tolist() == list(range(3, 3 + STEPS))
        assert (np.diff(each.arrivals_ns) > 0).all()
        assert ((each.arrivals_ns[1:] >= each.host_ns[0]) & (each.arrivals_ns[1:] <= each.host_ns[-1])).all()


def test_nobody_goes_on_before_the_last_rank_has_come(ranks: list[RankTimeline]) -> None:
    """Whatever the machine does meanwhile: on clocks that are one, effects come after their causes."""
    came = np.stack([each.arrivals_ns for each in ranks])
    waited_for = [":all_reduce" in call.name for call in ranks[0].collectives]
    last = came.max(axis=0)
    held = [k for k in np.flatnonzero(waited_for).tolist() if k + 1 < len(waited_for) and not waited_for[k + 1]]
    assert len(held) >= STEPS - 1
    for k in held:
        assert (came[:, k + 1] > last[k]).all()


def test_collectives_are_called_in_the_parts_that_need_them(ranks: list[RankTimeline]) -> None:
    each = ranks[0]
    parts: dict[str, set[str]] = {}
    for call, at in zip(each.collectives[1:], each.arrivals_ns[1:], strict=True):
        part = each.codes[np.searchsorted(each.host_ns, at, "right") - 1]
        parts.setdefault(call.name, set()).add([*PARTS, "outside"][part])
    assert parts["gloo:all_reduce"] == {"backward"}
    assert parts.get("gloo:all_gather", {"forward"}) <= {"forward", "backward"}


def test_own_work_and_waiting_of_real_ranks_make_up_their_steps(said: Any, ranks: list[RankTimeline]) -> None:
    of = ranks_of(ranks, 2, overlap=ranks[0] is said["DDP"]["timelines"][0])
    assert of is not None
    assert of.steps == STEPS
    for each, times in zip(ranks, of.by_rank, strict=True):
        step_ns = each.host_ns[each.first[1:] - 1] - each.host_ns[each.first[:-1]]
        assert times.all_own_s + times.all_waiting_s == pytest.approx(step_ns.mean() * 1e-9)
    assert 0.0 < of.waiting_share < 1.0


def test_nothing_is_noted(said: Any) -> None:
    assert all(said[way]["notes"] == [] for way in said)
