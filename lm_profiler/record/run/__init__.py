"""The record of one run: its parts by subject, and ``run.json``, which is validated when it is read.

May use pydantic. Never ``quantities``, which say how these are shown, and never a file that is not ours.
"""

from lm_profiler.record.files import RecordError
from lm_profiler.record.run.findings import (
    Bound,
    Failure,
    Finding,
    FindingName,
    NumericsFacts,
    NumericsKind,
    OutOfMemory,
    Verdict,
)
from lm_profiler.record.run.machine import (
    SHARED,
    Contention,
    Environment,
    FlopRate,
    Flops,
    GpuSharing,
    ModelFacts,
    Rates,
    Settings,
    Sync,
    Telemetry,
    Utilisation,
)
from lm_profiler.record.run.memory_facts import (
    MOMENTS,
    AllocatorReading,
    Floor,
    MemoryCauses,
    MemoryFacts,
    MemoryLevels,
    MemoryReading,
    PlannedMemory,
)
from lm_profiler.record.run.part import SCHEMA_VERSION, Newer, Part, json_of, read_as
from lm_profiler.record.run.ranks import (
    RANK_PARTS,
    CollectiveFigures,
    FindingKind,
    RankDoubt,
    RankFinding,
    Ranks,
    RankSpread,
    RankTimes,
    SlowRank,
)
from lm_profiler.record.run.record import (
    RANK_LOST,
    RankEnd,
    RunRecord,
    Status,
    Verb,
    end_file,
    first_end,
    how_it_ended,
    read_ends,
    read_run,
)
from lm_profiler.record.run.timing import (
    LIGHTNING,
    OURS,
    BetweenSteps,
    LoaderFacts,
    OddStep,
    OtherByOwner,
    OwnedTime,
    PythonTime,
    Steadiness,
    StepCounters,
    StepLevel,
    StepPattern,
    ThreadUse,
    Throughput,
    TimeSummary,
    worst_first,
)
from lm_profiler.record.run.waterfall import (
    Contributor,
    PlaceName,
    PlaceSlack,
    Saving,
    Slack,
    Term,
    TermName,
    Waterfall,
)

__all__ = [
    "LIGHTNING", "MOMENTS", "OURS", "RANK_LOST", "RANK_PARTS", "SCHEMA_VERSION", "SHARED", "AllocatorReading",
    "BetweenSteps", "Bound", "CollectiveFigures", "Contention", "Contributor", "Environment",
    "Failure", "Finding", "FindingKind", "FindingName", "Floor", "FlopRate", "Flops", "GpuSharing", "LoaderFacts",
    "MemoryCauses", "MemoryFacts", "MemoryLevels", "MemoryReading", "ModelFacts", "Newer", "NumericsFacts",
    "NumericsKind", "OddStep", "OtherByOwner", "OutOfMemory", "OwnedTime", "Part", "PlaceName", "PlaceSlack",
    "PlannedMemory", "PythonTime", "RankDoubt", "RankEnd", "RankFinding", "RankSpread", "RankTimes", "Ranks",
    "Rates", "RecordError", "RunRecord", "Saving", "Settings", "Slack", "SlowRank", "Status", "Steadiness",
    "StepCounters", "StepLevel", "StepPattern", "Sync", "Telemetry", "Term", "TermName", "ThreadUse", "Throughput",
    "TimeSummary", "Utilisation", "Verb", "Verdict", "Waterfall", "end_file", "first_end", "how_it_ended",
    "json_of", "read_as", "read_ends", "read_run", "worst_first",
]  # fmt: skip
