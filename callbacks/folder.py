"""Where a run's files go."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lm_profiler.measure.boundary import Part
from lm_profiler.record.files import claim_run_dir


def snapshot_file(folder: Path, rank: int) -> Path:
    """Of the allocator of one rank."""
    return folder / ("memory_snapshot.pickle" if rank == 0 else f"memory_snapshot.rank{rank}.pickle")


def run_folder(trainer: Trainer, name: str, tell: Callable[[str], object]) -> Path:
    """The folder of this run, made by rank 0 and known to all: the logger's, or a new one under default_root_dir.

    A folder that holds a record already belongs to another run. Where none can be made it is the second place.
    All ranks call it.

    Raises:
        OSError: nor can the second place be made.
    """
    folder: Path | None = None
    if trainer.is_global_zero:  # the other ranks wait: it may not fail before it has answered
        folder = Part("the run's folder", tell, outcome="cannot be made").run(_first_place, trainer, name)
        if folder is None:
            folder = Part("the second place", tell, outcome="cannot be made").run(second_place, name)
    answer = str(trainer.strategy.broadcast("" if folder is None else str(folder)))
    if not answer:
        raise OSError("there is no place for the run's files")
    return Path(answer)


def _first_place(trainer: Trainer, name: str) -> Path:
    logger = next((x for x in trainer.loggers if isinstance(x, (TensorBoardLogger, CSVLogger))), None)
    if logger is None:
        return claim_run_dir(Path(trainer.default_root_dir) / name)
    folder = Path(logger.log_dir)
    folder.mkdir(parents=True, exist_ok=True)
    return claim_run_dir(folder.parent) if (folder / "run.json").exists() else folder


def second_place(name: str) -> Path:
    """Where the files of a run go whose folder cannot be written to any more.

    Raises:
        OSError: there is no other place either.
    """
    return claim_run_dir(Path(tempfile.gettempdir()) / "lm_profiler" / name)
