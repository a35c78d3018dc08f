"""Where a run's files go."""

from __future__ import annotations

import tempfile
from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lm_profiler.record.files import claim_run_dir


def snapshot_file(folder: Path, rank: int) -> Path:
    """Of the allocator of one rank."""
    return folder / ("memory_snapshot.pickle" if rank == 0 else f"memory_snapshot.rank{rank}.pickle")


def run_folder(trainer: Trainer, name: str) -> Path:
    """The folder of this run, made by rank 0 and known to all: the logger's, or a new one under default_root_dir.

    A folder that holds a record already belongs to another run.
    """
    logger = next((x for x in trainer.loggers if isinstance(x, (TensorBoardLogger, CSVLogger))), None)
    folder: Path | None = None
    if trainer.is_global_zero:
        if logger is None:
            folder = claim_run_dir(Path(trainer.default_root_dir) / name)
        else:
            folder = Path(logger.log_dir)
            folder.mkdir(parents=True, exist_ok=True)
            if (folder / "run.json").exists():
                folder = claim_run_dir(folder.parent)
    return Path(str(trainer.strategy.broadcast(str(folder))))


def second_place(name: str) -> Path:
    """Where the files of a run go whose folder cannot be written to any more.

    Raises:
        OSError: there is no other place either.
    """
    return claim_run_dir(Path(tempfile.gettempdir()) / "lm_profiler" / name)
