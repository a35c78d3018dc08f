"""Keep the log messages and warnings of libraries out of a run's output; warnings of the user's own code stay."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_LEVELS = {
    "lightning.pytorch": logging.ERROR,
    "lightning.fabric": logging.ERROR,
    "lightning_utilities": logging.ERROR,
    "torch.multiprocessing.spawn": logging.ERROR,  # names the ranks that it ends where one has failed
    "lightning.pytorch.profilers": logging.INFO,  # the report of a profiler that the user asked for
}
_ADVICE = (
    r"GPU available but not used",
    r"`LightningModule\.configure_optimizers` returned `None`",  # our `optimizer: none` asks for it
)


def quiet_libraries() -> None:
    """Set the variables that silence torch's C++ logs on stderr. Torch reads them once, when it is imported."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


@contextmanager
def quiet() -> Iterator[None]:
    """Silence Lightning's tips, its advice on our own Trainer, and the deprecations of its own calls.

    Its other warnings stay: a user's ``warn(..., stacklevel=2)`` in a hook is attributed to Lightning's module too.
    """
    from lightning.fabric.utilities.warnings import PossibleUserWarning

    loggers = {logging.getLogger(name): level for name, level in _LEVELS.items()}
    before = {logger: logger.level for logger in loggers}
    with warnings.catch_warnings():
        for category in (PossibleUserWarning, DeprecationWarning, FutureWarning):
            warnings.filterwarnings("ignore", category=category, module=r"lightning\.")
        for message in _ADVICE:
            warnings.filterwarnings("ignore", message, category=UserWarning)
        try:
            for logger, level in loggers.items():
                logger.setLevel(level)
            yield
        finally:
            for logger, level in before.items():
                logger.setLevel(level)
