"""Writes the files of a run, and finds the folder for them, apart from the user's checkpoints and logs."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from lm_profiler.analysis.conclude import RunSteps, conclude
from lm_profiler.analysis.evidence import Evidence, write_evidence
from lm_profiler.analysis.steps.summaries import ideal_step_s, scalars
from lm_profiler.callbacks.outcome.gather import Exchange
from lm_profiler.measure.boundary import Guard, try_or_note
from lm_profiler.record.entry import Entry
from lm_profiler.record.files import claim_run_dir
from lm_profiler.record.run import RunRecord
from lm_profiler.record.steps import rank_files, with_rows_left, write_rows
from lm_profiler.record.text import ranks_text
from lm_profiler.tensorboard.summary import scalars_summary, write_events, write_hparams


def write_run(folder: Path, evidence: Evidence, rows: bool = True, last: bool = False) -> tuple[Evidence, RunRecord]:
    """Conclude from ``evidence`` and write run.json into ``folder``; returns the evidence as written, and the record.

    Called with what is there when the loop ends, so that no error or signal in what follows can lose it, and once more
    with everything.

    Args:
        folder: the run's.
        evidence: what the run left.
        rows: whether to write its rows too.
        last: whether this is the last call: then the evidence itself and TensorBoard's files are written too.

    Raises:
        OSError: the folder cannot be written to.
    """
    if rows:
        notes = write_rows(folder, evidence.rows, all_ended=evidence.failure is None)
        evidence = replace(evidence, notes=[*evidence.notes, *notes])
    record = conclude(evidence)
    if last:
        notes = list(record.notes)  # run.json comes last, with a note on each of these files that could not be written
        try_or_note("evidence", lambda: write_evidence(folder, evidence), notes)
        try_or_note("scalars in TensorBoard", lambda: _write_scalars(folder, evidence, record), notes)
        try_or_note("HPARAMS in TensorBoard", lambda: write_hparams(Entry(folder, record)), notes)
        record = record.model_copy(update={"notes": notes})
    record.write(folder / "run.json")
    return evidence, record


def with_rows_left_behind(evidence: Evidence, folder: Path) -> Evidence:
    """Return ``evidence`` with the steps that ranks left in ``folder`` and could not send.

    A failed run is left as it is: its ranks may still be writing, so their steps are read once they have ended.
    """
    if evidence.failure is not None or evidence.ranks_heard >= evidence.world_size:
        return evidence
    notes = list(evidence.notes)
    rows = try_or_note("steps that ranks left", lambda: with_rows_left(evidence.rows, folder), notes)
    return replace(evidence, rows=evidence.rows if rows is None else rows, notes=notes)


def _write_scalars(folder: Path, evidence: Evidence, record: RunRecord) -> None:
    if steps := RunSteps(evidence).steps:
        ideal_s = ideal_step_s(record)
        write_events(folder, ((row.step, scalars_summary(scalars(row, ideal_s))) for row in steps))


def snapshot_file(folder: Path, rank: int) -> Path:
    """Return the path of the allocator's snapshot of ``rank``."""
    return folder / ("memory_snapshot.pickle" if rank == 0 else f"memory_snapshot.rank{rank}.pickle")


def run_folder(parent: Path, claimed: Path | None, exchange: Exchange, tell: Callable[[str], object]) -> Path:
    """Return the folder of this run on every rank: the ``claimed`` one, or one that rank 0 makes below ``parent``.

    A claimed folder that already holds a record belongs to another run. Where no folder can be made there, the second
    place is taken.

    Raises:
        OSError: the second place cannot be made either.
        RuntimeError: rank 0 has no folder.
    """

    def claim() -> str:
        first = Guard("the run's folder", tell, outcome="cannot be made").run(_first_place, parent, claimed)
        return str((second_place(parent.name, tell) if first is None else first).absolute())

    return Path(exchange.of_first("folder", claim))


def _first_place(parent: Path, claimed: Path | None) -> Path:
    return claim_run_dir(parent) if claimed is None or (claimed / "run.json").exists() else claimed


def second_place(name: str, tell: Callable[[str], object]) -> Path:
    """Make and return a temporary folder for a run whose own folder cannot be written to; ``tell`` gets its path.

    Its name is random and only its owner may enter it: in a shared temporary folder, others could have made a folder of
    a known name before us, or put a link there.

    Raises:
        OSError: it cannot be made either.
    """
    folder = Path(tempfile.mkdtemp(prefix=f"lm_profiler-{Path(name).name[:50]}-"))
    tell(f"the run's files are in {folder}")
    return folder


def without_steps(ranks: Iterable[int], folder: Path, host_of: Callable[[int], str | None]) -> list[str]:
    """Return a note for each host of ``ranks`` whose steps are unknown: they had none, or their files are not here."""
    here, groups = rank_files(folder), defaultdict[tuple[bool, str | None], list[int]](list)
    for rank in ranks:
        groups[rank in here, host_of(rank)].append(rank)
    return [
        f"no steps of {ranks_text(group)}" + (f" ({host})" if host else "")
        + ("" if seen else f": what they left is not to be seen from here, but in {folder} on their own host")
        for (seen, host), group in groups.items()
    ]  # fmt: skip
