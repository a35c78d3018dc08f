"""Own work and waiting of the ranks of a run, and which ranks are slow. Seconds are means over the steps."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from lm_profiler.record.figure import Figure, Place, figure, within
from lm_profiler.record.files import Newer, Part
from lm_profiler.record.parts import BETWEEN_STEPS, PARTS

# where a rank can be slow: a part of the step, or between steps (validation, checkpoints)
RANK_PARTS = (*PARTS, BETWEEN_STEPS)

# Whom the others wait for. ``straggler``: one rank; ``several``: ranks that are slow together, in the same phase or in
# different ones between two collectives; ``host``: the ranks of one host; ``turns``: another rank each step; ``equal``:
# nobody waits long; ``unsure``: they wait, and the steps do not show for which.
FindingKind = Literal["straggler", "several", "host", "turns", "equal", "unsure"]


class RankSpread(Part):
    """The spread of a phase's seconds over all ranks."""

    least_s: float = figure("least (ms)", "ms", "shortest time of any rank")
    median_s: float = figure("median (ms)", "ms", "median over the ranks")
    largest_s: float = figure("most (ms)", "ms", "longest time of any rank")
    slowest: int = figure("rank", "count", "rank with the longest time")


class RankTimes(Part):
    """One rank's own work and waiting, by phase and ``other``. They add up to its mean step."""

    rank: int = figure("rank", "count", "number of the rank in the whole group")
    host: str = figure("host", "text", "host on which the rank runs")
    own_s: dict[str, float] = figure(
        "{key}",
        "ms",
        "time of the rank's own work in {key}, in the mean step",
        keys=PARTS,
    )
    waiting_s: dict[str, float] = figure(
        "waiting in {key}",
        "ms",
        "time in {key} for which the rank waits for other ranks, in the mean step",
        "{key}_waiting",
        keys=PARTS,
    )
    own_by_column_s: list[float] = figure(
        "own work",
        "ms",
        "time of the rank's own work per step, for the steps of each column of the heat map",
        "rank_own_s",
        default_factory=list,
    )

    @property
    def all_own_s(self) -> float:
        """The seconds of own work in all phases."""
        return sum(self.own_s.values())

    @property
    def all_waiting_s(self) -> float:
        """The seconds of waiting in all phases."""
        return sum(self.waiting_s.values())


# why no rank is named although ranks wait: there are too few steps; one rank was slow in some steps, perhaps
# by chance; or other programs used the machine and may have made it late
RankDoubt = Literal["few steps", "chance", "shared machine"]


class SlowRank(Part):
    """A rank that takes longer in ``phase`` (one of ``RANK_PARTS``) than the ranks that are not slow there."""

    rank: int = figure("rank", "count", "number of a rank that is slow in one phase")
    host: str = figure("host", "text", "host on which the slow rank runs")
    phase: str = figure("phase", "text", "phase in which the rank is slow")
    excess_s: float = figure(
        "longer by",
        "ms",
        "how much longer the phase takes on the slow rank than on ranks that are not slow, in the mean step",
    )
    low_s: float | None = figure(
        "longer by, low",
        "ms",
        "lower end of the 95 % interval of the additional time of the slow rank",
    )
    high_s: float | None = figure(
        "longer by, high",
        "ms",
        "upper end of the 95 % interval of the additional time of the slow rank",
    )
    certain: bool
    """Whether neither chance nor, on a shared machine, other programs explain it."""
    cause: str | None = figure(
        "cause",
        "text",
        "what the slow rank did in the additional time, according to its counters",
        default=None,
    )
    first_step: int = figure(
        "from step", "count", "first step in which the rank is slow"
    )
    last_step: int = figure("to step", "count", "last step in which the rank is slow")


class RankFinding(Part):
    """The ranks for which the others wait, and the time that fixing them would save.

    ``rank``, ``host`` and ``phase`` are known if all slow ranks share them; for ``turns``, ``phase`` is where the
    ranks are uneven. ``saves_s`` comes from replaying the steps from collective to collective with the slow ranks as
    fast as the others, or for ``turns`` with every rank at the median of ``phase``.
    """

    kind: Annotated[FindingKind, Newer] = figure(
        "who waits for whom",
        "text",
        "which ranks make the others wait: straggler, several, host, turns, equal or unsure",
        "waiting_for",
    )
    rank: int | None = figure(
        "slow rank",
        "count",
        "rank for which the other ranks wait",
        "slow_rank",
        default=None,
    )
    host: str | None = figure(
        "slow host",
        "text",
        "host of the slow rank, or the host whose ranks make the others wait",
        "slow_host",
        default=None,
    )
    phase: str | None = figure(
        "slow phase",
        "text",
        "phase that takes longer on the slow ranks",
        "slow_phase",
        default=None,
    )
    cause: str | None = figure(
        "cause",
        "text",
        "what the slow ranks did in the additional time, according to their counters",
        "slow_rank_cause",
        default=None,
    )
    excess_s: float | None = figure(
        "longer by",
        "ms",
        "how much longer the slow phase takes on the slow ranks than on the other ranks",
        "slow_by_s",
        default=None,
    )
    saves_s: float | None = figure(
        "fixing it saves", "ms",
        "time saved per step if the slow phase took as long on the slow ranks as on the others",
        "mending_saves_s", interval=("low_s", "high_s"), default=None,
    )  # fmt: skip
    low_s: float | None = figure(
        "fixing saves, low",
        "ms",
        "lower end of the 95 % interval of the time that fixing the slow ranks saves per step",
        "mending_saves_low_s",
        default=None,
    )
    high_s: float | None = figure(
        "fixing saves, high",
        "ms",
        "upper end of the 95 % interval of the time that fixing the slow ranks saves per step",
        "mending_saves_high_s",
        default=None,
    )
    last_in: int | None = figure(
        "most waiting in",
        "count",
        "number of steps in which the slow ranks caused more waiting than any other rank",
        "slow_in_steps",
        default=None,
    )
    others_wait_s: float | None = figure(
        "others wait",
        "ms",
        "mean time per step for which the other ranks wait for the slow ranks",
        default=None,
    )
    slow: list[SlowRank] = Field(default_factory=list)
    """At most 64 pairs of a slow rank and a phase, the slowest first; if the kind is ``unsure``, possible ones."""
    slow_ranks: int | None = figure(
        "slow ranks", "count", "number of ranks for which the others wait", default=None
    )
    steps: int | None = figure(
        "steps judged",
        "count",
        "number of measured steps in which it is known which ranks wait for which",
        "ranks_judged_steps",
        default=None,
    )
    doubt: Annotated[RankDoubt, Newer] | None = figure(
        "why no rank is named",
        "text",
        "why no rank is called slow although ranks wait: few steps, chance, or a shared machine",
        "ranks_doubt",
        default=None,
    )


_BY_PHASE = "Own work and waiting by phase"
WAITING = Figure(
    "waiting",
    "ms",
    "mean time per step for which a rank waits for other ranks",
    place=Place.TABLE,
    run_tag="waiting_ms",
)
OWN_WORK = Figure(
    "own work",
    "ms",
    "mean time per step for which a rank works, without its waiting for other ranks",
)
RANKS_HEARD = Figure(
    "ranks that reported",
    "count",
    "number of ranks whose waiting is known",
    "ranks_heard",
)
HOSTS = Figure("hosts", "count", "number of hosts on which the ranks ran", "hosts")


def _spread_by_phase(name: str, words: str) -> Any:
    """Return a field that holds a ``RankSpread`` for each phase."""
    return within(
        group=_BY_PHASE, keys=PARTS, name=f"{{key}}_{name}_{{name}}", title=f"{{key}}: {words}, {{title}}",
        meaning=f"time of {words} in {{key}} in the mean step: {{meaning}}", place=Place.ASKED,
    )  # fmt: skip


class CollectiveFigures(Part):
    """The collectives of one name in rank 0's traced steps, waiting for other ranks included."""

    name: str = figure(
        "collective",
        "text",
        "kind of collective; with FSDP2, also the module whose parameters it gathers",
    )
    calls: float = figure(
        "calls",
        "number",
        "number of calls of the collective in a step",
        "collective_calls",
    )
    seconds: float = figure(
        "time (ms)",
        "ms",
        "time of all calls of the collective in a step, including waiting; some calls may overlap",
        "collective_s",
    )
    exposed_s: float = figure(
        "exposed (ms)",
        "ms",
        "time of the collective in a step during which no compute kernel runs on the same rank",
        "collective_exposed_s",
    )


class Ranks(Part):
    """The ranks of a run, judged by their arrivals at the collectives of its steps.

    The figures use the same steps as the run's other figures; the finding uses all measured steps.
    """

    world: int
    hosts: dict[str, list[int]]
    """The ranks that reported when they arrived at collectives, by host."""
    steps: int = figure(
        "steps of waiting",
        "count",
        "number of measured steps for which the ranks' waiting is known",
        "waiting_steps",
    )
    step_s: float = figure(
        "step of waiting",
        "ms",
        "mean duration of the steps for which waiting is known, over the ranks that reported it",
        "waiting_step_s",
    )
    own: dict[str, RankSpread] = _spread_by_phase("own", "own work")
    waiting: dict[str, RankSpread] = _spread_by_phase("waiting", "waiting")
    waiting_share: float = figure(
        "waiting share",
        "%",
        "share of the mean step for which a rank waits for others, on average over the ranks",
    )
    by_rank: list[RankTimes]
    """All ranks if there are at most 64; otherwise rank 0, and the 8 ranks with the most and the least own work."""
    columns: list[int] = figure(
        "first step",
        "count",
        "number of the first step in each column of the heat map",
        "ranks_column",
        default_factory=list,
    )
    finding: RankFinding
    exposed_s: dict[str, float] = figure(
        "{key}: exposed (ms)",
        "ms",
        "time of the collectives in {key} during which no compute kernel runs on the same rank",
        "{key}_exposed_s",
        keys=PARTS,
        group=_BY_PHASE,
        place=Place.ASKED,
        default_factory=dict,
    )
    exposed_source: str | None = figure(
        "exposed is known from",
        "text",
        "source of the figures for the exposed time of collectives",
        default=None,
    )
    communication_s: float | None = figure(
        "communication", "ms", "time of a traced step during which collectives run, including waiting",
        place=Place.TABLE, default=None,
    )  # fmt: skip
    communication_share: float | None = figure(
        "share of communication",
        "%",
        "share of the traced step during which collectives run",
        default=None,
    )
    exposed_communication_s: float | None = figure(
        "exposed communication",
        "ms",
        "time of a traced step during which collectives run and no compute kernel of the same rank does",
        place=Place.TABLE,
        default=None,
    )
    collectives: list[CollectiveFigures] = Field(default_factory=list)
    witness: str = figure(
        "waiting is known from",
        "text",
        "what shows when each rank arrived at a collective",
        "waiting_witness",
    )
    notes: list[str] = Field(default_factory=list)

    @property
    def heard(self) -> Annotated[int, RANKS_HEARD]:
        """The number of ranks that reported their arrivals."""
        return sum(map(len, self.hosts.values()))

    @property
    def waiting_s(self) -> Annotated[float, WAITING]:
        """The mean rank's waiting, in seconds of a step."""
        return self.waiting_share * self.step_s

    @property
    def own_work_s(self) -> Annotated[float, OWN_WORK]:
        """The mean rank's own work, in seconds of a step."""
        return (1 - self.waiting_share) * self.step_s

    @property
    def host_count(self) -> Annotated[int, HOSTS]:
        """The number of machines."""
        return len(self.hosts)
