"""Who worked, who waited and for whom, of a run with several ranks. Seconds are of one step, means over the steps."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from lm_profiler.record.figure import Figure, Place, figure, within
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

    least_s: float = figure("least (ms)", "ms", "of the rank with least")
    median_s: float = figure("median (ms)", "ms", "of the median rank")
    largest_s: float = figure("most (ms)", "ms", "of the rank with most")
    slowest: int = figure("rank", "count", "the rank with most")


class RankTimes(Part):
    """One rank's own work and waiting, by phase (and ``other``). Together they are its mean step.

    ``own_by_column_s`` is its own work in each column of ``Ranks.columns``.
    """

    rank: int = figure("rank", "count", "of the whole group")
    host: str = figure("host", "text", "its machine")
    own_s: dict[str, float] = figure("{key}", "ms", "own work in {key} in the mean step", keys=PARTS)
    waiting_s: dict[str, float] = figure(
        "waiting in {key}", "ms", "for other ranks, in the mean step", "{key}_waiting", keys=PARTS
    )
    own_by_column_s: list[float] = figure(
        "own work", "ms", "of the rank in each column", "rank_own_s", default_factory=list
    )

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

    rank: int = figure("rank", "count", "that is slow")
    host: str = figure("host", "text", "its machine")
    phase: str = figure("phase", "text", "in which it is slow")
    excess_s: float = figure("longer by", "ms", "how much longer that takes than on the others, in the mean step")
    low_s: float | None = figure("longer by, low", "ms", "an end of its 95 % interval")
    high_s: float | None = figure("longer by, high", "ms", "an end of its 95 % interval")
    certain: bool
    first_step: int = figure("from step", "count", "where it begins to be slow")
    last_step: int = figure("to step", "count", "where it ends to be slow")


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

    kind: Annotated[FindingKind, Newer] = figure(
        "who waits for whom", "text", "straggler, several, host, turns, equal or unsure", "waiting_for"
    )
    rank: int | None = figure("slow rank", "count", "the rank that the others wait for", "slow_rank", default=None)
    host: str | None = figure(
        "slow host", "text", "its host, or the host whose ranks the others wait for", "slow_host", default=None
    )
    phase: str | None = figure("slow phase", "text", "the phase that takes longer there", "slow_phase", default=None)
    excess_s: float | None = figure(
        "longer by", "ms", "how much longer that takes than the others", "slow_by_s", default=None
    )
    saves_s: float | None = figure(
        "mending it saves", "ms",
        "by how much a step would be shorter if that took what the others take, with its 95 % interval",
        "mending_saves_s", interval=("low_s", "high_s"), default=None,
    )  # fmt: skip
    low_s: float | None = figure(
        "mending saves, low", "ms", "an end of that interval", "mending_saves_low_s", default=None
    )
    high_s: float | None = figure(
        "mending saves, high", "ms", "an end of that interval", "mending_saves_high_s", default=None
    )
    last_in: int | None = figure(
        "last in", "count", "steps in which the others waited for it longest", "slow_in_steps", default=None
    )
    others_wait_s: float | None = figure(
        "others wait", "ms", "how long the other ranks wait for it in the mean step", default=None
    )
    slow: list[SlowRank] = Field(default_factory=list)
    slow_ranks: int | None = figure("slow ranks", "count", "how many ranks the others wait for", default=None)
    steps: int | None = figure(
        "steps judged", "count", "measured steps that say who waits for whom", "ranks_judged_steps", default=None
    )
    doubt: Annotated[RankDoubt, Newer] | None = figure(
        "why nobody is named", "text", "few steps, chance, or a shared machine", "ranks_doubt", default=None
    )


class ClockAlignment(Part):
    """How the ranks' clocks were brought together. ``method`` in words; None of a figure: not measured.

    ``uncertainty_s`` is by how much two ranks' clocks may still differ at the most; ``drift`` the fastest of them, in
    seconds a second.
    """

    method: str = figure("clocks", "text", "how the ranks' clocks were brought together", "clocks_method")
    uncertainty_s: float | None = figure(
        "clocks differ by", "ms", "at most, as far as is known", "clocks_uncertainty_s", default=None
    )
    drift: float | None = figure(
        "drift of clocks", "ppm", "of the fastest clock against rank 0's", "clocks_drift", default=None
    )


_BY_PHASE = "Own work and waiting by phase"
WAITING = Figure(
    "waiting", "ms", "how long the mean rank waits for others in a step", place=Place.TABLE, run_tag="waiting_ms"
)
OWN_WORK = Figure("own work", "ms", "how long the mean rank works itself in a step")
HEARD = Figure("ranks heard", "count", "ranks of which waiting is known", "ranks_heard")
HOSTS = Figure("hosts", "count", "machines that the ranks ran on", "hosts")


def _spreads(name: str, words: str) -> Any:
    """A field that holds by phase how ranks differ in it."""
    return within(
        group=_BY_PHASE, keys=PARTS, name=f"{{key}}_{name}_{{name}}", title=f"{{key}}: {words}, {{title}}",
        meaning=f"{words} in {{key}} in the mean step, {{meaning}}", place=Place.ASKED,
    )  # fmt: skip


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
    steps: int = figure("steps of waiting", "count", "measured steps of which waiting is known", "waiting_steps")
    step_s: float = figure("step of waiting", "ms", "mean of those steps, over the ranks heard", "waiting_step_s")
    own: dict[str, RankSpread] = _spreads("own", "own work")
    waiting: dict[str, RankSpread] = _spreads("waiting", "waiting")
    waiting_share: float = figure("waiting share", "%", "share of the mean step in which the mean rank waits")
    by_rank: list[RankTimes]
    columns: list[int] = figure(
        "first step", "count", "of each column of the heat map", "ranks_column", default_factory=list
    )
    finding: RankFinding
    exposed_s: dict[str, float] = figure(
        "{key}: exposed (ms)", "ms", "time of the collectives in {key} that no compute hides", "{key}_exposed_s",
        keys=PARTS, group=_BY_PHASE, place=Place.ASKED, default_factory=dict,
    )  # fmt: skip
    exposed_source: str | None = figure(
        "exposed is known from", "text", "what says which collectives compute does not hide", default=None
    )
    witness: str = figure("waiting is known from", "text", "what says when each rank came", "waiting_witness")
    clocks: ClockAlignment
    notes: list[str] = Field(default_factory=list)

    @property
    def heard(self) -> Annotated[int, HEARD]:
        """How many of the ranks said when they came."""
        return sum(map(len, self.hosts.values()))

    @property
    def waiting_s(self) -> Annotated[float, WAITING]:
        """What ``waiting_share`` is of ``step_s``."""
        return self.waiting_share * self.step_s

    @property
    def own_work_s(self) -> Annotated[float, OWN_WORK]:
        """What waiting leaves of ``step_s``."""
        return (1 - self.waiting_share) * self.step_s

    @property
    def host_count(self) -> Annotated[int, HOSTS]:
        """How many machines there are."""
        return len(self.hosts)
