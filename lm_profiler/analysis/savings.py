"""What takes time that could be saved: a function per finding, from a run's record to findings, the likeliest first.

Each has the most time that it could save per step. What contention cannot fake (an owner, a sleep, an empty queue,
validation, checkpoints) is reported on a busy machine too; what it distorts is then reported with "may", or left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

from lm_profiler.analysis.remedies.catalogue import likely_share
from lm_profiler.record.parts import WORKING_PHASES
from lm_profiler.record.quantities import PARTS
from lm_profiler.record.run_record import (
    LIGHTNING,
    OURS,
    Finding,
    FindingName,
    OwnedTime,
    PythonTime,
    RunRecord,
    Settings,
)

WORTH = 0.05  # the least share of the step that a finding must save to be reported

# factors for a remedy that must be tried, as a fact of equal size ranks first; and for one on a busy machine
_UNTRIED, _DOUBTED = 0.75, 0.5
_FIXED = ("zero_grad", "clip", "optimizer")
_MUCH_FIXED = 0.2  # share of the step: every step has some fixed cost
_FEW_SAMPLES, _USUAL_BATCH = 2, 8  # samples in a batch; and the size that it may at least reach, if memory allows
_SMALL_CALL_S = 50e-6  # a shorter call of torch costs more to make than to execute
_MANY_CALLS = 200
_LOGGERS = ("Logger", "Monitor")


@dataclass(frozen=True)
class Known:
    """A run's record, with values that many findings need."""

    record: RunRecord

    @cached_property
    def settings(self) -> Settings:
        return self.record.settings or Settings()

    @cached_property
    def step_s(self) -> float:
        """The mean step; on a busy machine the sum of its parts at their fastest."""
        return sum(self.mean_s(part) for part in PARTS) if self.contended else self.mean_s("step")

    @cached_property
    def whole_s(self) -> float:
        """The mean step with its share of the time between steps."""
        return self.step_s + self.each_s(self.record.between_steps_s or 0.0)

    @cached_property
    def scale(self) -> float:
        """The factor for times known only as a mean on a busy machine: fastest steps over the mean."""
        step = self.record.time.get("step")
        return self.step_s / step.mean if self.contended and step is not None and step.mean else 1.0

    @property
    def contended(self) -> bool:
        return self.record.contended

    @property
    def on_device(self) -> bool:
        """Whether work is queued to a device with its own clock."""
        return self.record.environment is not None and self.record.environment.device_type != "cpu"

    def mean_s(self, part: str, clock: str = "time") -> float:
        """Return the mean seconds of ``part``; on a busy machine the 5th percentile, free of contention."""
        time = getattr(self.record, clock).get(part)
        return 0.0 if time is None else (time.p5 if self.contended else time.mean) or 0.0

    def host_s(self, part: str) -> float:
        return self.mean_s(part, "host_time")

    def each_s(self, seconds: float) -> float:
        """Return a measured step's share of ``seconds`` that passed between steps."""
        return self.scale * seconds / max(self.record.steps.get("measure", 0), 1)

    def term_s(self, *names: str) -> float:
        """Return the seconds of these terms of the waterfall; 0 where there is none."""
        fall = self.record.waterfall
        return 0.0 if fall is None else self.scale * sum(term.seconds for term in fall.terms if term.name in names)

    def actions(self, mine: Callable[[OwnedTime], bool]) -> list[OwnedTime]:
        """Return the owned actions of ``other`` for which ``mine`` holds."""
        owned = self.record.other_by_owner
        return [] if owned is None else [of for of in owned.actions if mine(of)]

    def line(self, phase: str, seconds: float) -> dict[str, Any]:
        """Return the line of the program that took most of ``seconds`` of a phase, if one did."""
        rows = [row for row in self.record.python_times if row.phase == phase]
        longest = max(rows, key=lambda row: row.seconds, default=None)
        if longest is None or longest.seconds < 0.5 * seconds:
            return {}
        return {"owner": longest.function, "file": longest.file, "line": longest.line, "what": longest.what}

    def finding(self, name: FindingName, saves_s: float, may: bool = False, **more: Any) -> Finding:
        saves_s = min(saves_s, self.whole_s)  # on a busy machine a part's mean may exceed the fastest steps
        share = saves_s / self.whole_s if self.whole_s > 0.0 else 0.0
        return Finding.model_validate({"name": name, "saves_s": saves_s, "share": share, "may": may, **more})


Look = Callable[[Known], Iterator[Finding]]


def findings_of(record: RunRecord) -> list[Finding]:
    """Return the findings worth reporting, ordered by likely saving."""
    known = Known(record)
    if known.whole_s <= 0.0:
        return []
    worth = [finding for look in LOOKS for finding in look(known) if finding.share >= WORTH]

    def likely_s(finding: Finding) -> float:
        untried = _DOUBTED if known.contended else _UNTRIED
        return finding.saves_s * likely_share(finding) * (untried if finding.may else 1.0)

    return sorted(worth, key=lambda finding: -likely_s(finding))


def _ranks(known: Known) -> Iterator[Finding]:
    of = known.record.ranks.finding if known.record.ranks is not None else None
    if of is not None and of.saves_s:
        yield known.finding("ranks", of.saves_s, low_s=of.low_s, high_s=of.high_s, phase=of.phase)


def _input(known: Known) -> Iterator[Finding]:
    """Find late batches. The loader sleeps or has an empty queue, which other programs cannot cause."""
    waited_s, data, loader = known.mean_s("data"), known.record.time.get("data"), known.record.loader
    if data is not None and waited_s:
        empty = loader is not None and bool(loader.workers) and not loader.ready_after
        use = known.record.thread_use.get("data")
        wall_s, asleep_s = (0.0, 0.0) if use is None else (use.wall_s, use.asleep_s)
        asleep = wall_s > 0.0 and asleep_s >= 0.5 * wall_s
        saves_s = max(waited_s, known.scale * min(asleep_s, data.mean or 0.0)) if empty or asleep else waited_s
        steady = known.record.steadiness
        now_and_then = (data.median or 0.0) < WORTH * known.step_s and (steady is None or steady.pattern is None)
        more = {"low_s": data.mean_low, "high_s": data.mean_high, "phase": "data", **known.line("data", saves_s)}
        yield known.finding("input", saves_s, now_and_then, **more)
    yield known.finding("transfer", known.mean_s("transfer"), phase="transfer")


def _between(known: Known) -> Iterator[Finding]:
    """Find validation, checkpoints and the turn of an epoch, whether or not they count in a step's time."""
    for of in known.record.between:
        if of.what in ("validation", "checkpoint", "epoch"):
            yield known.finding(cast(FindingName, of.what), known.each_s(of.seconds))


def _owners(known: Known) -> Iterator[Finding]:
    """Find owners of ``other``: callbacks, loggers, hooks of the module. Checkpoints are a separate finding."""
    checkpoints = any(of.what == "checkpoint" for of in known.record.between)

    def theirs(of: OwnedTime) -> bool:
        saves = checkpoints and (of.owner.endswith("Checkpoint") or of.action == "save_checkpoint")
        return of.owner != OURS and not _of_the_loop(of) and not saves

    by_owner: defaultdict[str, float] = defaultdict(float)
    longest: dict[str, str] = {}
    for of in known.actions(theirs):
        by_owner[of.owner] += of.least_s if known.contended and of.least_s is not None else of.seconds
        longest.setdefault(of.owner, of.name)
    theirs_s = sum(by_owner.values())
    # Some run every few steps: the measured steps show how long ``other`` is, the steps timed by action how it divides.
    scale = min(known.host_s("other") / theirs_s, 1.0) if theirs_s > 0.0 else 1.0
    for owner, seconds in by_owner.items():
        logs = owner.endswith(_LOGGERS) or owner == LIGHTNING
        where = {"phase": "other", **({} if logs else known.line("other", seconds)), "owner": longest[owner]}
        yield known.finding("logging" if logs else "owner", seconds * scale, **where)


def _of_the_loop(of: OwnedTime) -> bool:
    return of.owner == LIGHTNING and of.action != "logged metrics"


def _python(known: Known) -> Iterator[Finding]:
    """Find functions of the program that sleep, compute outside of torch, or call torch too often."""
    # With a device, it can matter only if the device is idle for a tenth of the step.
    if known.on_device and known.term_s("gaps") < 0.1 * known.step_s:
        return
    by_function: defaultdict[tuple[str, str, str], list[PythonTime]] = defaultdict(list)
    for row in known.record.python_times:
        if row.phase in WORKING_PHASES:
            by_function[row.phase, row.file, row.function].append(row)
    for (phase, file, function), rows in by_function.items():
        longest = max(rows, key=_outside_torch)
        seconds = min(sum(map(_outside_torch, rows)), known.mean_s(phase))
        waits_s = sum(row.seconds for row in rows if "." in row.what)
        use = known.record.thread_use.get(phase)
        sleeps = use is not None and waits_s > 0.5 * seconds and use.asleep_s >= 0.5 * waits_s
        name: FindingName = "sleep" if sleeps else "logging" if longest.what == LIGHTNING else "python"
        # The clock's time of a C function may include other programs.
        may = known.contended and not sleeps and waits_s > 0.5 * seconds
        place = {"phase": phase, "owner": function, "file": file, "line": longest.line, "what": longest.what}
        yield known.finding(name, seconds, may, facts={"calls": float(longest.calls)}, **place)


def _outside_torch(row: PythonTime) -> float:
    """Return the seconds outside of torch and libraries; calls of torch that are too short count as outside."""
    if row.what == "torch":
        return row.seconds if row.calls >= _MANY_CALLS and row.seconds / row.calls < _SMALL_CALL_S else 0.0
    return 0.0 if row.what == "library" else row.seconds


def _asleep(known: Known) -> Iterator[Finding]:
    """Find phases in which the thread sleeps and no line of the program is known as the cause."""
    told = {row.phase for row in known.record.python_times}
    for phase, use in known.record.thread_use.items():
        if known.on_device or phase not in WORKING_PHASES or phase in told or not use.wall_s:
            continue
        # An operator's threads wait for each other, and longer if other programs use the cores.
        yield known.finding("sleep", known.mean_s(phase) * use.asleep_s / use.wall_s, may=True, phase=phase)


def _pattern(known: Known) -> Iterator[Finding]:
    """Find that every n-th step takes longer, in a part without another finding."""
    steady = known.record.steadiness
    if steady is None or steady.pattern is None or not steady.pattern_s or steady.pattern_s < 0.0:
        return
    part = steady.pattern.part
    told = [*_owners(known), *_between(known)] if part == "other" else []
    if part in ("data", "transfer") or any(of.share >= WORTH for of in told):
        return
    facts = {"every": float(steady.pattern.every)}
    yield known.finding("pattern", known.scale * steady.pattern_s, phase=part, facts=facts)


def _counters(known: Known) -> Iterator[Finding]:
    mean = known.record.mean_counters
    if mean is not None and mean.gc_s:
        explicit_s = sum(row.seconds for row in known.record.python_times if row.what == "gc.collect")  # has an owner
        yield known.finding("garbage", max(known.scale * mean.gc_s - explicit_s, 0.0))
    if mean is not None and mean.compile_s:
        yield known.finding("compilation", known.scale * mean.compile_s, owner=mean.compiled)


def _checks(known: Known) -> Iterator[Finding]:
    """Find checks for errors that are switched on and cost time."""
    compute_s = sum(known.mean_s(part) for part in ("forward", "backward"))
    if known.settings.anomalies:
        yield known.finding("anomalies", compute_s)
    if known.settings.profiler is not None:
        yield known.finding("profiler", known.step_s, may=True, owner=known.settings.profiler)


def _sync(known: Known) -> Iterator[Finding]:
    """Find lines that make the host wait for the device, by the gaps that they leave."""
    fall, syncs = known.record.waterfall, known.record.syncs
    if fall is None or not syncs:
        return
    gaps = next((term for term in fall.terms if term.name == "gaps"), None)
    waits = [] if gaps is None else [of.seconds for of in gaps.contributors if "ync" in of.what or "cpy" in of.what]
    worst = max(syncs, key=lambda sync: sync.count)
    where: dict[str, Any] = {"file": worst.file, "line": worst.line, "what": worst.call or worst.function}
    yield known.finding("sync", sum(waits), **where)


def _small_batch(known: Known) -> Iterator[Finding]:
    """Find the cost of a step that does not depend on the batch: k times the samples leave 1/k of it per sample."""
    fixed_s = sum(known.host_s(part) for part in _FIXED)
    if not known.contended:  # contention stretches gaps, and all else that is known only as a mean
        fixed_s += max(known.term_s("gaps") - sum(finding.saves_s for finding in _python(known)), 0.0)
        fixed_s += sum(of.seconds for of in known.actions(_of_the_loop))
    free, samples = known.settings.memory_free_share, known.settings.samples_per_batch
    if fixed_s < _MUCH_FIXED * known.step_s or (free is not None and free < 0.1):
        return
    times = 2.0 if not samples else max(_USUAL_BATCH / samples, 2.0)
    if free is not None:
        times = max(min(times, 1.0 / (1.0 - free)), 2.0)
    counts = {name: getattr(known.settings, name) for name in ("tokens_per_batch", "samples_per_batch")}
    facts = {name: float(count) for name, count in counts.items() if count is not None}
    # One or two samples are few for any model with so much fixed cost.
    few = samples is not None and samples <= _FEW_SAMPLES and times > 2.0
    saves_s = min(fixed_s, known.step_s) * (1.0 - 1.0 / times)
    yield known.finding("small_batch", saves_s, may=not few, facts=facts)


def _optimizer(known: Known) -> Iterator[Finding]:
    """Find an optimizer with many kernels; it is a fact if the user asked for them (``foreach=False``).

    A fused one still has to move its bytes. On a busy machine, its rate is not known well enough.
    """
    by_weight, floor = known.settings.weight_by_weight, known.record.floors.get("optimizer")
    least_s = 0.0 if floor is None or known.contended else floor.seconds or 0.0
    if known.settings.fused_optimizer is False or (by_weight and known.on_device):
        saves_s = max(known.host_s("optimizer") - least_s, 0.0)
        yield known.finding("optimizer", saves_s, may=not by_weight, phase="optimizer")
    if known.host_s("clip") >= 2 * WORTH * known.whole_s:
        yield known.finding("clip", known.host_s("clip"), may=True, phase="clip")


def _compile(known: Known) -> Iterator[Finding]:
    """Find gaps and memory traffic that fusing saves; nothing if neither is known, or contention had a part."""
    fall = known.record.waterfall
    if known.settings.compiled is False and fall is not None and not known.contended:
        fused_s = sum(
            sum(term.phases.get(part, 0.0) for part in ("forward", "backward")) if term.phases else term.seconds
            for term in fall.terms
            if term.name in ("gaps", "bandwidth", "beyond_bandwidth")
        )
        told_s = sum(finding.saves_s for finding in (*_python(known), *_asleep(known)))
        yield known.finding("compile", max(fused_s - told_s, 0.0), may=True)


def _precision(known: Known) -> Iterator[Finding]:
    """Find matmuls in more bits than needed; on a busy machine only their time at the peak is certain."""
    settings, use = known.settings, known.record.utilisation
    products_s = known.term_s("ideal", *(() if known.contended else ("slow_products", "clock")))
    if known.record.waterfall is None and use is not None:
        products_s = (use.of_ceiling or use.hfu or 0.0) * known.step_s
    if settings.precision == "float64" or str(settings.precision).startswith("64"):
        # Twice the bytes, and half the FLOP/s at best: in float32, computing takes at most half as long.
        yield known.finding("double", products_s or sum(map(known.mean_s, WORKING_PHASES)) / 2.0)
    elif settings.full_precision and settings.half_precision:
        yield known.finding("precision", products_s, may=True, what=settings.half_precision)
    if settings.full_precision and settings.tf32 is False and known.on_device:
        yield known.finding("tf32", products_s, may=True)


def _recomputation(known: Known) -> Iterator[Finding]:
    free = known.settings.memory_free_share
    if known.settings.checkpointing and (free is None or free >= 0.3):
        yield known.finding("recomputation", known.term_s("recomputation"), may=free is None)


def _communication(known: Known) -> Iterator[Finding]:
    exposed_s = known.scale * sum(known.record.ranks.exposed_s.values()) if known.record.ranks is not None else 0.0
    yield known.finding("communication", exposed_s or known.term_s("communication"), may=True)


LOOKS: Sequence[Look] = (
    *(_ranks, _input, _between, _owners, _python, _asleep, _pattern, _counters, _checks, _sync, _small_batch),
    *(_optimizer, _compile, _precision, _recomputation, _communication),
)
