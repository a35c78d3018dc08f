"""Several ranks measure, and rank 0 writes the one record."""

import os
import pickle
import warnings
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch
from benchmarks.free_port import free_port
from ddp_run import COLLECTED_S, FLAG_S, KILLED_AT, SLOWER_S
from known_loop import TRUTH_S
from made_environment import made_step, made_telemetry
from scripts import SUPPORT
from warm import run_python, run_ranks

from lm_profiler.analysis.conclude import conclude, concluded_again
from lm_profiler.analysis.evidence import Evidence
from lm_profiler.analysis.steps.summaries import BatchCount
from lm_profiler.callbacks import gather
from lm_profiler.callbacks.gather import Exchange, merge, packed, unpacked
from lm_profiler.callbacks.instruments.instrument import Measured
from lm_profiler.record.entry import collect
from lm_profiler.record.quantities import PARTS, TIMED
from lm_profiler.record.run_record import RunRecord, Telemetry, read_run
from lm_profiler.record.steps import StepRow, StepTable, read_steps


def start_two_ranks(folder: Path, fails: str) -> CompletedProcess[str]:
    """By Lightning's own launcher."""
    environment = {**os.environ, "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    return run_python(str(SUPPORT / "ddp_run.py"), str(folder), fails, folder=folder, environment=environment)


def run_of(folder: Path) -> Path:
    [run_folder] = (folder / "logs" / "lm_profiler").iterdir()
    return run_folder


def record_of_two_ranks(folder: Path, fails: str) -> RunRecord:
    """What two ranks record that end well."""
    done = run_ranks("ddp_run.py", folder, str(folder), fails)
    assert done.returncode == 0, done.stderr
    return read_run(run_of(folder))


def test_two_ranks_make_one_record(tmp_path: Path) -> None:
    """Rank 1 takes longer in forward, and has 11 tokens in a batch in place of 10."""
    record, folder = record_of_two_ranks(tmp_path, ""), run_of(tmp_path)
    rows = read_steps(folder / "steps.csv")
    assert concluded_again(folder, record)[1] == []

    stages = ["warmup"] + ["measure"] * 5 + ["actions"] * 3 + ["memory"] + ["trace"] * 2
    for rank in (0, 1):
        rows_of_rank = [(row.step, row.stage) for row in rows if row.rank == rank]
        assert rows_of_rank == list(enumerate(stages, 1))
    assert record.status == "ok"
    assert record.environment.world_size == 2
    assert record.throughput.tokens_per_step == 10 + 11
    step_s = sum(TRUTH_S.values()) + FLAG_S
    assert record.rank_step_s == pytest.approx([step_s, step_s + SLOWER_S])
    owners = {action.name: action.seconds for action in record.other_by_owner.actions}
    assert owners == pytest.approx({"Lightning's SIGTERM flag": FLAG_S})
    files = {path.name for path in (folder / "trace").iterdir()}
    assert files == {
        "rank0.pt.trace.json.gz", "rank0.kernels.json", "rank1.pt.trace.json.gz", "rank1.kernels.json",
    }  # fmt: skip

    measured = [row for row in rows if row.stage == "measure"]
    for row in measured:
        truth_s = {**TRUTH_S, "forward": TRUTH_S["forward"] + row.rank * SLOWER_S, "other": FLAG_S}
        assert {part: row.time(part) for part in PARTS} == pytest.approx(truth_s)
    first_kept_step = 2 + record.steadiness.cut
    kept_s = [row.time("forward") for row in measured if row.step >= first_kept_step]
    assert record.time["forward"].n == len(kept_s) / 2
    assert record.time["forward"].mean == pytest.approx(sum(kept_s) / len(kept_s))


def test_a_slow_step_has_the_rank_that_it_was_slow_on(tmp_path: Path) -> None:
    record = record_of_two_ranks(tmp_path, "collects")
    (odd,) = record.odd_steps
    assert (odd.step, odd.part, odd.rank) == (5, "forward", 1)
    assert "garbage collection" in odd.cause
    # Means over the ranks, whose clocks are simulated apart.
    assert (odd.excess_s, odd.cause_s) == (pytest.approx(COLLECTED_S / 2), pytest.approx(COLLECTED_S / 2))
    counted = [(row.step, row.rank, pytest.approx(row.gc_s)) for row in record.step_counters]
    assert counted == [(None, 1, 0.0), (5, 1, COLLECTED_S)]


def test_a_rank_that_fails_leaves_what_every_rank_has(tmp_path: Path) -> None:
    done = start_two_ranks(tmp_path, "fails")  # ddp_run.py: rank 1 raises in forward of step 5
    assert done.returncode != 0
    assert "rank 1 gives up" in done.stderr
    folder = run_of(tmp_path)
    rows = read_steps(folder / "steps.rank1.csv")
    assert [(row.step, row.rank) for row in rows] == [(step, 1) for step in (1, 2, 3, 4)]
    failure = read_run(folder).failure
    assert (failure.rank, failure.phase, failure.step, failure.type) == (1, "forward", 5, "ValueError")


def test_a_killed_rank_loses_at_most_a_second_of_steps(tmp_path: Path) -> None:
    done = start_two_ranks(tmp_path, "killed")
    assert done.returncode != 0
    folder = run_of(tmp_path)
    step_s = sum(TRUTH_S.values()) + SLOWER_S  # on rank 1's clock, which stood still while it was killed
    left = read_steps(folder / "steps.rank1.csv")
    assert [(row.step, row.rank) for row in left] == [(step, 1) for step in range(1, len(left) + 1)]
    assert 0 <= (KILLED_AT - len(left)) * step_s <= 1.0
    (entry,) = collect([folder]).entries
    assert entry.record.status == "failed"
    failure = entry.record.failure
    assert (failure.rank, failure.type) == (1, "RankLost")
    assert "SIGKILL" in failure.message
    assert {(row.step, row.rank) for row in entry.rows} == {(row.step, rank) for row in left for rank in (0, 1)}
    assert entry.record.throughput.tokens_per_step == 10 + 11
    assert entry.record.rank_step_s == pytest.approx([step_s - SLOWER_S, step_s])


def test_a_rank_whose_instruments_fail_does_not_block_the_others(tmp_path: Path) -> None:
    record = record_of_two_ranks(tmp_path, "breaks")
    assert record.status == "ok"
    assert any(note.startswith("rank 1:") for note in record.notes)
    rows = read_steps(run_of(tmp_path) / "steps.csv")
    assert [row.step for row in rows if row.rank == 0] == list(range(1, 10))
    assert [row.step for row in rows if row.rank == 1] == [1, 2]


def measured(rank: int, forward_peak: int = 5) -> Measured:
    """One step, a peak of memory, and two notes: one that all ranks have, and one of this rank alone."""
    row = StepRow(1, "measure", None, tuple(float(rank) for _ in TIMED), rank=rank)
    return Measured(
        rows=[row],
        part_peaks={"forward": (forward_peak, None, None)},
        steps_planned={"measure": 1},
        between_steps_s=0.5 + rank,
        device_idle=None,
        recompilations=1,
        notes=["note of all", f"note of rank {rank}"],
    )


def exchanges(world: int, patience_s: float = 2.0) -> list[Exchange]:
    """One of each rank, over a store in this process."""
    store = torch.distributed.HashStore()
    ranks = [Exchange(store, rank, world, patience_s=patience_s) for rank in range(world)]
    for other in ranks[1:]:
        other._run = ranks[0]._run  # each rank counts in a process of its own
    return ranks


def test_merging_keeps_every_row_and_count_and_the_largest_peak() -> None:
    counts_0 = [BatchCount(step=1, batches=1, samples=4), BatchCount(step=3, batches=4, samples=None)]
    counts_1 = [BatchCount(step=1, batches=1, samples=2)]
    rank_0 = replace(measured(0, forward_peak=5), between_steps_s=0.5, batch_counts=[counts_0])
    rank_1 = replace(measured(1, forward_peak=7), between_steps_s=1.5, batch_counts=[counts_1])
    merged = merge({0: rank_0, 1: unpacked(packed(rank_1), 1)})
    assert [row.rank for row in merged.rows] == [0, 1]
    assert merged.part_peaks == {"forward": (7, None, None)}
    assert merged.between_steps_s == 0.5  # rank 0's
    assert merged.batch_counts == [counts_0, counts_1]


def test_merged_notes_name_their_ranks_unless_they_are_of_rank_0_alone() -> None:
    notes = {0: ["X", "only 0"], 1: ["X", "Y"], 2: ["Y", "only 2"], 3: ["X", "Y"]}
    merged = merge({rank: Measured(notes=notes[rank]) for rank in range(4)})
    assert merged.notes == ["ranks 0–1, 3: X", "only 0", "ranks 1–3: Y", "rank 2: only 2"]


def test_a_silent_rank_is_named() -> None:
    first, second, _ = exchanges(3)
    assert [row.rank for row in second.gather(measured(1)).rows] == [1]
    keys = first.store.num_keys()
    merged = first.gather(measured(0))
    assert first.store.num_keys() == keys - 1  # what was taken leaves the store
    assert [row.rank for row in merged.rows] == [0, 1]
    assert "rank 2" in merged.notes[-1]


class Intruder:
    """Unpickled, it makes a file: what another process could have this one do."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


def test_pickles_in_the_store_are_not_executed(tmp_path: Path) -> None:
    first, second = exchanges(2)
    code, trace = pickle.dumps(Intruder(tmp_path / "ran")), tmp_path / "ran"
    first.store.set(first.key("measured", 1), code)
    merged = first.gather(measured(0))
    second.store.set(second.key("folder", 0), code)
    with pytest.raises(ValueError, match="JSON"):
        second.from_rank_0("folder", str)
    assert not trace.exists()
    assert merged.ranks_heard == 1
    assert len(merged.notes) == len(measured(0).notes) + 1


@pytest.mark.parametrize(
    "change",
    [
        {"rows": StepTable.from_rows([StepRow(1, "measure", None, (0.0,) * len(TIMED), rank=2)])},
        {"ranks_heard": 7},
        {"steps_planned": {"measure": "many"}},
        {"recompilations": 0.5},
        {"notes": [3]},
    ],
)
def test_measurements_of_wrong_types_or_ranks_are_refused(change: dict[str, Any]) -> None:
    assert unpacked(packed(measured(1)), 1).part_peaks == measured(1).part_peaks
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of pydantic, that it writes what is no such thing
        content = packed(replace(measured(1), **change))
    with pytest.raises(ValueError, match=r"rank 1|valid"):
        unpacked(content, 1)


def test_too_large_measurements_are_refused() -> None:
    with pytest.raises(ValueError, match="bytes"):
        unpacked(b" " * (gather.MOST_BYTES + 1), 1)
    first, second = exchanges(2, patience_s=60.0)
    second.gather(replace(measured(1), notes=["x" * gather.MOST_BYTES]))  # which is reported at once
    merged = first.gather(measured(0))
    assert merged.ranks_heard == 1
    assert "rank 1" in merged.notes[-1]


def test_an_exchange_waits_for_half_of_the_groups_limit(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="imeout"):
        exchanges(2, patience_s=0.2)[1].from_rank_0("folder", str)
    where = {"init_method": (tmp_path / "group").as_uri(), "rank": 0, "world_size": 1}
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=10), **where)
    try:
        assert Exchange.of_process_group().patience_s == 5
    finally:
        torch.distributed.destroy_process_group()


def test_energy_is_the_sum_over_the_gpus_of_all_ranks() -> None:
    """Eight cards of 500 W, whose ranks make 1000 tokens in a step of 150 ms: 0.6 J a token."""
    ranks = []
    for rank in range(8):
        gpu = made_telemetry(duration_s=3.0, energy_j=1500.0, energy_source="counter", gpus=[f"GPU-{rank}"])
        rows = [made_step(step, {"forward": 0.15}, tokens=125, rank=rank) for step in range(1, 21)]
        ranks.append(replace(measured(rank), rows=rows, telemetry=gpu))
    merged = merge(dict(enumerate(ranks)))

    def energy(heard: int, telemetry: Telemetry | None) -> Telemetry | None:
        known = Evidence(rows=merged.rows, world_size=8, ranks_heard=heard, telemetry=telemetry)
        return conclude(known).telemetry

    found = energy(merged.ranks_heard, merged.telemetry)
    assert found.energy_per_token_j == pytest.approx(0.6)
    assert found.energy_per_step_j == pytest.approx(600)

    # Of a run that ended otherwise rank 0 knows its own card, and the steps of all.
    alone = energy(1, ranks[0].telemetry)
    assert (alone.energy_j, alone.energy_per_step_j, alone.energy_per_token_j) == (1500.0, None, None)
