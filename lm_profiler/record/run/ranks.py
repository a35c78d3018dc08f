"""Who worked, who waited and for whom, of a run with several ranks. Seconds are of one step, means over the steps."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from lm_profiler.record.run.part import Newer, Part

FindingKind = Literal["straggler", "several", "host", "turns", "equal", "unsure"]
"""``straggler``: the others wait for one rank; ``several``: for ranks that are slow in the same phase; ``host``: for
those of one host; ``turns``: for another one each step; ``equal``: nobody waits long for anybody; ``unsure``: they
wait, and the steps do not say for whom."""


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


class RankFinding(Part):
    """For whom the others wait, and what mending it would save.

    Of a ``straggler``: ``rank``, ``host`` and ``phase`` of it; of a ``host`` and of ``several`` ranks: ``host`` (None:
    they are of more than one) and ``phase``; of ``turns``: ``phase``, where one phase of all ranks is behind it.
    ``excess_s`` is how much longer that takes than the median of the other ranks. ``saves_s`` is what a step would be
    shorter if it took their median, by replaying the steps from collective to collective, in its 95 % interval from
    ``low_s`` to ``high_s``; of ``turns``, if every rank took the median in ``phase``. ``last_in`` of the steps it was
    the one that the others waited for longest; ``others_wait_s`` is how long they wait for it in the mean.
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
    evidence: str = ""


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
    ``witness`` says what the waiting is known from, ``steps`` of how many steps.
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
