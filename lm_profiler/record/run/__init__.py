"""The record of one run: its parts by subject, and ``run.json``, which is validated when it is read.

May use pydantic. Never ``quantities``, which say how these are shown, and never a file that is not ours.
"""

from lm_profiler.record.reading import RecordError
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
from lm_profiler.record.run.floors import Floor
from lm_profiler.record.run.loader import LoaderFacts
from lm_profiler.record.run.machine_use import SHARED, Contention, Flops, GpuSharing, Sync, Telemetry, Utilisation
from lm_profiler.record.run.memory_facts import AllocatorReading, MemoryCauses, MemoryFacts, MemoryLevels, MemoryReading
from lm_profiler.record.run.owners import LIGHTNING, OURS, BetweenSteps, OtherByOwner, OwnedTime, PythonTime, ThreadUse
from lm_profiler.record.run.part import SCHEMA_VERSION, Newer, Part, json_of, read_as
from lm_profiler.record.run.planned import PlannedMemory
from lm_profiler.record.run.rank_ends import RankEnd, cause_of, end_file
from lm_profiler.record.run.ranks import (
    RANK_PARTS,
    ClockAlignment,
    FindingKind,
    RankDoubt,
    RankFinding,
    Ranks,
    RankSpread,
    RankTimes,
    SlowRank,
)
from lm_profiler.record.run.rates import FlopRate, Rates
from lm_profiler.record.run.record import RunRecord, Status, Verb, read_run
from lm_profiler.record.run.setting import Environment, ModelFacts, Settings
from lm_profiler.record.run.slack import PlaceName, PlaceSlack, Saving, Slack
from lm_profiler.record.run.slow_steps import OddStep, StepCounters, worst_first
from lm_profiler.record.run.step_times import Steadiness, StepLevel, StepPattern, Throughput, TimeSummary
from lm_profiler.record.run.waterfall import Contributor, Term, TermName, Waterfall

__all__ = [
    "LIGHTNING", "OURS", "RANK_PARTS", "SCHEMA_VERSION", "SHARED", "AllocatorReading", "BetweenSteps", "Bound",
    "ClockAlignment", "Contention", "Contributor", "Environment", "Failure", "Finding", "FindingKind", "FindingName",
    "Floor", "FlopRate", "Flops", "GpuSharing", "LoaderFacts", "MemoryCauses", "MemoryFacts", "MemoryLevels",
    "MemoryReading", "ModelFacts", "Newer", "NumericsFacts", "NumericsKind", "OddStep", "OtherByOwner", "OutOfMemory",
    "OwnedTime", "Part", "PlaceName", "PlaceSlack", "PlannedMemory", "PythonTime", "RankDoubt", "RankEnd",
    "RankFinding", "RankSpread", "RankTimes", "Ranks", "Rates", "RecordError", "RunRecord", "Saving", "Settings",
    "Slack", "SlowRank", "Status", "Steadiness", "StepCounters", "StepLevel", "StepPattern", "Sync", "Telemetry",
    "Term", "TermName", "ThreadUse", "Throughput", "TimeSummary", "Utilisation", "Verb", "Verdict", "Waterfall",
    "cause_of", "end_file", "json_of", "read_as", "read_run", "worst_first",
]  # fmt: skip
