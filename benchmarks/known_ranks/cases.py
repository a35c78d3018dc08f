"""What is tried: delays of every kind on two and four ranks, and runs whose delays a seed chooses."""

from __future__ import annotations

import random
from collections.abc import Sequence

from benchmarks.known_ranks.loop import BASE_S, Delay
from benchmarks.known_ranks.trial import Case

PHASES = tuple(BASE_S)
SEEDS = 20
_SMALL_BUCKETS = {"bucket_mb": 0.01, "width": 128}


def one(rank: int, phase: str, **options: object) -> Case:
    """One slow phase of one rank."""
    name = "a hook" if phase == "other" else phase
    title = f"{name} of rank {rank} +50" + (
        ", small buckets" if "bucket_mb" in options else ""
    )
    if options.get("sharded"):
        title = f"FSDP2: {title}"
    return Case(
        title, [Delay(rank, phase, 50e-3)], told=("straggler", rank, phase), **options
    )  # type: ignore[arg-type]


def of_two() -> Sequence[Case]:
    """On two ranks."""
    return [
        Case("nothing"),
        *(one(1, phase) for phase in PHASES),
        one(0, "data"),
        one(0, "optimizer"),
        one(1, "backward", **_SMALL_BUCKETS),
        two_phases(0, 1),
        in_turns(),
        Case(
            "every fifth step of rank 1 +200",
            [Delay(1, "forward", 0.2, every=5)],
            told=("straggler", 1, "forward"),
            steps=60,  # of 20 steps 4 are late: with one chance in eight the same of two ranks by accident
        ),
        Case(
            "4 batches a step, forward of rank 1 +15 each",
            [Delay(1, "forward", 15e-3)],
            {phase: 0.3 * s for phase, s in BASE_S.items()},
            told=("straggler", 1, "forward"),
            accumulate=4,
            steps=8,
        ),
        Case("FSDP2: nothing", sharded=True),
        *(one(1, phase, sharded=True) for phase in PHASES),
    ]


def of_four() -> Sequence[Case]:
    """On four."""
    return [
        Case("nothing"),
        one(2, "forward"),
        one(2, "optimizer"),
        one(3, "other"),
        two_phases(1, 3),
        in_turns(),
    ]


def two_phases(first: int, other: int) -> Case:
    """One rank is late by the longer delay; the other's is hidden behind it, but where that one is mended."""
    return Case(
        f"forward of rank {first} +40, data of rank {other} +60",
        [Delay(first, "forward", 40e-3), Delay(other, "data", 60e-3)],
        told=("several", None, None),
    )


def in_turns() -> Case:
    """Another rank is late in each step."""
    return Case(
        "forward +50, each rank in turn",
        [Delay(None, "forward", 50e-3)],
        told=("turns", None, "forward"),
    )


def ranks_of(seed: int) -> int:
    """How many ranks the run of this seed has."""
    return 4 if seed % 2 else 2


def seeded(seed: int) -> Case:
    """Any lengths of phases, a delay of any rank in any phase, and sleeps that differ by 2 %."""
    chance = random.Random(seed)
    longest = {
        "data": 20e-3,
        "forward": 60e-3,
        "backward": 80e-3,
        "optimizer": 20e-3,
        "other": 8e-3,
    }
    base_s = {phase: chance.uniform(0.3, 1) * longest[phase] for phase in PHASES}
    rank, phase = chance.randrange(ranks_of(seed)), chance.choice(PHASES)
    delay = Delay(rank, phase, chance.uniform(40e-3, 100e-3))
    title = f"seed {seed}: {'a hook' if phase == 'other' else phase} of rank {rank} +{delay.seconds * 1e3:.0f}"
    return Case(
        title,
        [delay],
        base_s,
        told=("straggler", rank, phase),
        steps=20,
        noise=0.02,
        seed=seed,
    )
