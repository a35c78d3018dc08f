"""Libraries' chatter, kept out of a run's output. What the user's own code warns of, stays."""

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
    "torch.multiprocessing.spawn": logging.ERROR,  # says which ranks it ends where one has failed
    "lightning.pytorch.profilers": logging.INFO,  # the report of a profiler that the user asked for
}
_ADVICE = (
    r"GPU available but not used",
    r"`LightningModule\.configure_optimizers` returned `None`",  # our `optimizer: none` asks for it
)


def quiet_libraries() -> None:
    """Libraries' chatter on stderr; read once, when torch is loaded."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


@contextmanager
def quiet() -> Iterator[None]:
    """No tips, no advice on a Trainer that is ours, no deprecations of Lightning's own calls.

    Not everything that comes from Lightning's modules: a user's ``warn(..., stacklevel=2)`` in a hook does, too.
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
