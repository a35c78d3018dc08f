"""Who worked, who waited and for whom, of a run with several ranks. Seconds are of one step, means over the steps."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from lm_profiler.record.parts import PARTS
from lm_profiler.record.run.part import Newer, Part

RANK_PARTS = (*PARTS, "between steps")
"""Where a rank can be slow: a part of the step, or what it does between steps (validation, checkpoints)."""

FindingKind = Literal["straggler", "several", "host", "turns", "equal", "unsure"]
"""``straggler``: the others wait for one rank; ``several``: for ranks that are slow together, in the same phase or in
different ones between two meetings; ``host``: for those of one host; ``turns``: for another one each step; ``equal``:
nobody waits long for anybody; ``unsure``: they wait, and the steps do not say for whom."""


class RankSpread(Part):
    """A phase's seconds a step over all ranks; ``slowest`` is the rank that ``largest_s`` is of."""

    least_s: float
    median_s: float
    largest_s: float
    slowest: int


class RankTimes(Part):
    """One rank's own work and waiting, by phase (and ``other``). Together they are its mean step.

    ``own_by_column_s`` is its own work in each column of ``Ranks.columns``.
    """

    rank: int
    host: str
    own_s: dict[str, float]
    waiting_s: dict[str, float]
    own_by_column_s: list[float] = Field(default_factory=list)

    @property
    def all_own_s(self) -> float:
        """Own work of all phases."""
        return sum(self.own_s.values())

    @property
    def all_waiting_s(self) -> float:
        """Waiting in all phases."""
        return sum(self.waiting_s.values())


RankDoubt = Literal["few steps", "chance", "shared machine"]
"""Why nobody is named though ranks wait: it takes more steps to be sure; one rank was slow in some steps, perhaps by
chance; other programs used the machine, and may have made it late."""


class SlowRank(Part):
    """A rank that takes ``excess_s`` of the mean step longer in ``phase`` (one of ``RANK_PARTS``) than those that are
    not slow there, in its 95 % interval from ``low_s`` to ``high_s`` (None: unknown).

    ``certain`` says that neither chance nor, on a shared machine, other programs explain it. It was slow from
    ``first_step`` to ``last_step``, which are those of the run where it was slow throughout.
    """

    rank: int
    host: str
    phase: str
    excess_s: float
    low_s: float | None
    high_s: float | None
    certain: bool
    first_step: int
    last_step: int


class RankFinding(Part):
    """For whom the others wait, and what mending it would save.

    ``slow`` has each rank and phase that has to be mended (the 64 slowest), of ``slow_ranks`` ranks; of ``unsure``
    what may have to be, if ``doubt`` were not. ``rank``, ``host`` and ``phase`` are theirs where all have the same; of
    ``turns`` the phase in which they are uneven. ``excess_s`` is how much longer a slow rank takes in the mean.
    ``saves_s`` is what a step would be shorter if all of them took what the others take, by replaying the steps from
    collective to collective, in its 95 % interval from ``low_s`` to ``high_s``; of ``turns``, if every rank took the
    median in ``phase``. ``last_in`` of the ``steps`` they were those that the others waited for longest;
    ``others_wait_s`` is how long they wait for them in the mean.
    """

    kind: Annotated[FindingKind, Newer]
    rank: int | None = None
    host: str | None = None
    phase: str | None = None
    excess_s: float | None = None
    saves_s: float | None = None
    low_s: float | None = None
    high_s: float | None = None
    last_in: int | None = None
    others_wait_s: float | None = None
    slow: list[SlowRank] = Field(default_factory=list)
    slow_ranks: int | None = None
    steps: int | None = None
    doubt: Annotated[RankDoubt, Newer] | None = None


class ClockAlignment(Part):
    """How the ranks' clocks were brought together. ``method`` in words; None of a figure: not measured.

    ``uncertainty_s`` is by how much two ranks' clocks may still differ at the most; ``drift`` the fastest of them, in
    seconds a second.
    """

    method: str
    uncertainty_s: float | None = None
    drift: float | None = None


class Ranks(Part):
    """The ranks of a run, from when each came to the collectives of its steps.

    ``hosts`` has those of the ``world`` ranks that said so, ``by_rank`` every one of them up to 64, else rank 0, the
    8 with most own work and the 8 with least. ``columns`` are the first steps of the heat map's columns, each the mean
    of the steps up to the next. ``step_s`` is the mean step; ``waiting_share`` how much of it the mean rank waits.
    ``exposed_s`` is what of the collectives no compute hides, by phase, as ``exposed_source`` says (empty: unknown).
    ``witness`` says what the waiting is known from, ``steps`` of how many steps: those that the run's other figures are
    of. The finding is of all that were measured.
    """

    world: int
    hosts: dict[str, list[int]]
    steps: int
    step_s: float
    own: dict[str, RankSpread]
    waiting: dict[str, RankSpread]
    waiting_share: float
    by_rank: list[RankTimes]
    columns: list[int] = Field(default_factory=list)
    finding: RankFinding
    exposed_s: dict[str, float] = Field(default_factory=dict)
    exposed_source: str | None = None
    witness: str
    clocks: ClockAlignment
    notes: list[str] = Field(default_factory=list)

    @property
    def heard(self) -> int:
        """How many of the ranks said when they came."""
        return sum(map(len, self.hosts.values()))
