"""Chooses the folder of a run, and writes the run's files."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from lm_profiler.analysis.conclude import RunSteps, conclude
from lm_profiler.analysis.evidence import Evidence, write_evidence
from lm_profiler.analysis.steps.summaries import ideal_step_s, scalars
from lm_profiler.callbacks.gather import Exchange
from lm_profiler.measure.boundary import Guard, error_text, try_or_note
from lm_profiler.record.files import claim_run_dir
from lm_profiler.record.run_record import RunRecord
from lm_profiler.record.steps import join_rank_files, write_rows
from lm_profiler.tensorboard.summary import scalars_summary, write_events


@dataclass(eq=False)
class RunFiles:
    """Writes the files of one run; into a temporary folder if the run's own folder cannot be made or written to."""

    name: str  # the name of the run
    report: Callable[[str], object]  # gets a note of a problem
    folder: Path | None = None  # the folder of the run; None before it is known
    record: RunRecord | None = None  # the record that was last written there

    def folder_or_new(self) -> Path:
        """Return the run's folder; if there is none, make one in the temporary folder."""
        if self.folder is None:
            self.folder = make_temporary_folder(self.name, self.report)
        return self.folder

    def write_record(self, evidence: Evidence) -> Evidence:
        """Write the rows and run.json; return the evidence as written."""
        try:
            return self._write(self.folder_or_new(), evidence)
        except OSError as error:
            return self._write_elsewhere(error, evidence)

    def write_all_files(self, evidence: Evidence, rows_are_new: bool) -> None:
        """Write run.json once more, the evidence and TensorBoard's scalars, and the rows if they are new."""
        try:
            written = evidence
            if rows_are_new:
                written = write_all_rows(self.folder_or_new(), evidence)
            self.record = write_run(self.folder_or_new(), written)
        except OSError as error:
            written = self._write_elsewhere(error, evidence)
            self.record = write_run(self.folder_or_new(), written)

    def _write(self, folder: Path, evidence: Evidence) -> Evidence:
        """Write the rows, and then the record, which is concluded from the written rows."""
        written = write_all_rows(folder, evidence)
        record = conclude(written)
        record.write(folder / "run.json")
        self.record = record
        return written

    def _write_elsewhere(self, error: OSError, evidence: Evidence) -> Evidence:
        """Write the rows and run.json into a temporary folder, which becomes the run's folder."""
        problem = f"{self.folder} cannot be written to: {error_text(error)}"
        self.report(problem)
        folder = make_temporary_folder(self.name, self.report)
        notes = [*evidence.notes, f"the record is in {folder}: {problem}"]
        written = self._write(folder, replace(evidence, notes=notes))
        self.folder = folder
        return written


def write_all_rows(folder: Path, evidence: Evidence) -> Evidence:
    """Write the rows of all ranks; return ``evidence`` with notes on problems."""
    notes = write_rows(folder, evidence.rows, all_ended=evidence.failure is None)
    return replace(evidence, notes=[*evidence.notes, *notes])


def write_run(folder: Path, evidence: Evidence) -> RunRecord:
    """Conclude from ``evidence``, and write it, TensorBoard's scalars and run.json into ``folder``; return the record.

    run.json comes last, with a note on each of the other files that could not be written.
    """
    record = conclude(evidence)
    notes = list(record.notes)
    try_or_note("evidence", lambda: write_evidence(folder, evidence), notes)
    try_or_note(
        "scalars in TensorBoard",
        lambda: _write_scalars(folder, evidence, record),
        notes,
    )
    record = record.model_copy(update={"notes": notes})
    record.write(folder / "run.json")
    return record


def _write_scalars(folder: Path, evidence: Evidence, record: RunRecord) -> None:
    """Write the scalars of each step for TensorBoard."""
    steps = RunSteps(evidence).steps
    if not steps:
        return
    ideal_s = ideal_step_s(record)
    write_events(
        folder, ((row.step, scalars_summary(scalars(row, ideal_s))) for row in steps)
    )


def with_rows_left_behind(evidence: Evidence, folder: Path) -> Evidence:
    """Return ``evidence`` with the steps of ranks that could not send them but left a file in ``folder``."""
    if evidence.ranks_heard >= evidence.world_size:
        return evidence
    notes = list(evidence.notes)
    rows = try_or_note(
        "steps that ranks left", lambda: join_rank_files(evidence.rows, folder), notes
    )
    if rows is None:
        return replace(evidence, notes=notes)
    return replace(evidence, rows=rows, notes=notes)


def snapshot_file(folder: Path, rank: int) -> Path:
    """Return the path of the allocator's snapshot of ``rank``."""
    if rank == 0:
        return folder / "memory_snapshot.pickle"
    return folder / f"memory_snapshot.rank{rank}.pickle"


def run_folder(
    parent: Path,
    claimed: Path | None,
    exchange: Exchange,
    report: Callable[[str], object],
) -> Path:
    """Return the folder of this run on every rank: the ``claimed`` one, or one that rank 0 makes below ``parent``.

    A claimed folder that already has a record belongs to another run. If no folder can be made, return a temporary one.
    """

    def folder_of_rank_0() -> str:
        """Return the claimed folder, else a new one, else a temporary one."""
        if claimed is not None and not (claimed / "run.json").exists():
            return str(claimed.absolute())
        making = Guard("the run's folder", report, outcome="cannot be made")
        folder = making.run(claim_run_dir, parent)
        if folder is None:
            folder = make_temporary_folder(parent.name, report)
        return str(folder.absolute())

    return Path(exchange.from_rank_0("folder", folder_of_rank_0))


def make_temporary_folder(name: str, report: Callable[[str], object]) -> Path:
    """Make and return a temporary folder for a run whose own folder cannot be written to; ``report`` gets its path."""
    # With a random name, and only for its owner: another user could have put a link at a known path.
    short_name = Path(name).name[:50]
    folder = Path(tempfile.mkdtemp(prefix=f"lm_profiler-{short_name}-"))
    report(f"the run's files are in {folder}")
    return folder
