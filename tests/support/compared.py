"""Runs made by hand for tests of comparisons: their step times are given, everything else is the same in each."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from made_environment import made_contention, made_environment, made_run, made_step

from lm_profiler.record.entry import Entry, collect
from lm_profiler.record.quantities import TIMES
from lm_profiler.record.run_record import MemoryFacts, MemoryReading, ModelFacts, RunRecord, StepCounters, Throughput
from lm_profiler.record.steps import StepRow, StepTable, write_steps

ENVIRONMENT = made_environment(
    versions={"torch": "2.13.0"}, cpu="EPYC", device_type="cuda", device_name="NVIDIA H100", driver="550",
    flags={"cudnn_benchmark": False}, git_commit="abc",
)  # fmt: skip
MODEL = ModelFacts(
    class_path="LanguageModel", parameters=1000, parameters_without_embedding=None, trainable_parameters=1000,
    bytes=4000, precision="32-true", optimizers=["AdamW"], accumulate_grad_batches=1,
)  # fmt: skip
CONFIG = {"name": "a", "seed_everything": 0, "model": {"class_path": "LM", "init_args": {"attention": "sdpa"}}}

TEN_MS = [0.0100, 0.0101, 0.0099, 0.0102, 0.0098, 0.0100, 0.0101, 0.0099, 0.0100]


def rows_of_parts(parts_s: dict[str, Sequence[float]], warmup_s: Sequence[float] = (), **options: Any) -> list[StepRow]:
    """A row for each place of the lists in ``parts_s``; before them warm-up steps, all of them ``forward``."""
    found = [made_step(step, {"forward": s}, "warmup", **options) for step, s in enumerate(warmup_s, 1)]
    for values in zip(*parts_s.values(), strict=True):
        found.append(made_step(len(found) + 1, dict(zip(parts_s, values, strict=True)), **options))
    return found


def record_like(**changes: Any) -> RunRecord:
    values: dict[str, Any] = {
        "name": "a",
        "config": CONFIG,
        "environment": ENVIRONMENT,
        "model": MODEL,
        "memory": MemoryFacts(measured=MemoryReading(allocated_peak=2**30, resident_peak=2**29), parts={}),
        "throughput": Throughput(tokens_per_step=512, tokens_per_s=None, samples_per_step=4),
    }
    return made_run(**{**values, **changes})


def entry_of_rows(folder: Path | str, measured: Sequence[StepRow], **changes: Any) -> Entry:
    """A run that is on no disk."""
    found = Entry(Path(folder), record_like(steps=counts_by_stage(measured), **changes))
    found.__dict__["rows"] = StepTable.from_rows(measured)  # where the cached property would keep what it read
    return found


def entry_of_steps(folder: str, step_s: Sequence[float], **changes: Any) -> Entry:
    """Steps of 40 % forward, 50 % backward, 10 % other."""
    shares = {"forward": 0.4, "backward": 0.5, "other": 0.1}
    return entry_of_rows(
        folder, rows_of_parts({part: [share * s for s in step_s] for part, share in shares.items()}), **changes
    )


def write_run(folder: Path, measured: Sequence[StepRow], **changes: Any) -> Path:
    """The same as a folder on the disk."""
    folder.mkdir(parents=True)
    write_steps(folder / "steps.csv", measured)
    record_like(steps=counts_by_stage(measured), **changes).write(folder / "run.json")
    return folder


def rows_near_10_ms(scale: float = 1.0) -> list[StepRow]:
    """Steps of nothing but forward, which take ``scale`` times ten milliseconds."""
    return rows_of_parts({"forward": [scale * seconds for seconds in TEN_MS]})


def written_run_of_10_ms(folder: Path, scale: float) -> Entry:
    """A run of such steps on the disk, whose record has their mean."""
    step = {"n": 9, "mean": scale * fmean(TEN_MS), "mean_low": scale * min(TEN_MS), "mean_high": scale * max(TEN_MS)}
    time = {part: step if part == "step" else {"n": 0} for part in TIMES}
    return collect([write_run(folder, rows_near_10_ms(scale), time=time)]).entries[0]


def counts_by_stage(steps: Sequence[StepRow]) -> dict[str, int]:
    """How many steps each stage finished."""
    return dict(Counter(row.stage for row in steps))


def busy_entry(
    folder: str, work_s: Sequence[float], missed: float, asleep_s: float = 0.0, stretch: float = 1.0, **changes: Any
) -> Entry:
    """Return a run whose thread computes ``work_s`` in each step, and gets that CPU time only with waits in between.

    Others take the share ``missed`` of the CPU time that it needs. ``stretch`` is what their use of the caches does to
    its CPU time.
    """
    ran_s = [stretch * seconds for seconds in work_s]
    walls_s = [seconds / (1.0 - missed) + asleep_s for seconds in ran_s]
    wall, ran = fmean(walls_s), fmean(ran_s)
    counters = StepCounters(rank=0, wall_s=wall, cpu_wait_s=wall - ran - asleep_s, asleep_s=asleep_s, cpu_s=ran)
    contention = made_contention(missed, wall_s=2.0, others_s=10.0, waited_s=1.0)
    return entry_of_steps(folder, walls_s, mean_counters=counters, contention=contention, **changes)
