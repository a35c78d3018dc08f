"""Where a run's files go: a folder of its own, apart from the user's checkpoints and logger."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

from lm_profiler.callbacks.outcome.gather import Exchange
from lm_profiler.measure.boundary import Guard
from lm_profiler.record.files import claim_run_dir
from lm_profiler.record.step_files import rank_files
from lm_profiler.record.text import ranks_text


def snapshot_file(folder: Path, rank: int) -> Path:
    """Of the allocator of one rank."""
    return folder / ("memory_snapshot.pickle" if rank == 0 else f"memory_snapshot.rank{rank}.pickle")


def run_folder(parent: Path, claimed: Path | None, exchange: Exchange, tell: Callable[[str], object]) -> Path:
    """The folder of this run, known to all ranks: the ``claimed`` one, or one that rank 0 makes below ``parent``.

    A folder that holds a record already belongs to another run. Where none can be made it is the second place.

    Raises:
        OSError: nor can the second place be made.
        RuntimeError: rank 0 has none.
    """

    def claim() -> str:
        first = Guard("the run's folder", tell, outcome="cannot be made").run(_first_place, parent, claimed)
        return str((second_place(parent.name, tell) if first is None else first).absolute())

    return Path(exchange.of_first("folder", claim))


def _first_place(parent: Path, claimed: Path | None) -> Path:
    return claim_run_dir(parent) if claimed is None or (claimed / "run.json").exists() else claimed


def second_place(name: str, tell: Callable[[str], object]) -> Path:
    """Where the files of a run go whose folder cannot be written to any more: a new folder for its owner alone.

    Its name cannot be guessed, so ``tell`` is told it: in a folder that others may write to, they could own one with a
    known name, or lay links in its place.

    Raises:
        OSError: there is no other place either.
    """
    folder = Path(tempfile.mkdtemp(prefix=f"lm_profiler-{Path(name).name[:50]}-"))
    tell(f"the run's files are in {folder}")
    return folder


def without_steps(ranks: Iterable[int], folder: Path, host_of: Callable[[int], str | None]) -> list[str]:
    """A note for each host of ``ranks``, whose steps are not known: they had none, or their files are not here."""
    here, groups = rank_files(folder), defaultdict[tuple[bool, str | None], list[int]](list)
    for rank in ranks:
        groups[rank in here, host_of(rank)].append(rank)
    return [
        f"no steps of {ranks_text(group)}" + (f" ({host})" if host else "")
        + ("" if seen else f": what they left is not to be seen from here, but in {folder} on their own host")
        for (seen, host), group in groups.items()
    ]  # fmt: skip
