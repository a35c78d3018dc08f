"""The environment of a call: streams, environment variables, ports, logging of libraries. Does not import torch."""

from __future__ import annotations

import logging
import os
import re
import socket
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from lm_profiler.measure.boundary import print_message
from lm_profiler.usage_error import UsageError, expect

# variables that Lightning converts to numbers, some of them during its import
_RANKS = (
    *("LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "RANK", "WORLD_SIZE", "MASTER_PORT"),
    *(
        "SLURM_PROCID",
        "SLURM_LOCALID",
        "SLURM_NODEID",
        "SLURM_NTASKS",
        "JSM_NAMESPACE_RANK",
    ),
)
_LEVELS = {
    "lightning.pytorch": logging.ERROR,
    "lightning.fabric": logging.ERROR,
    "lightning_utilities": logging.ERROR,
    "torch.multiprocessing.spawn": logging.ERROR,  # logs a warning for each rank that it ends after one has failed
    "lightning.pytorch.profilers": logging.INFO,  # logs the report of a profiler that the user requested
}
_ADVICE = (
    r"GPU available but not used",
    r"`LightningModule\.configure_optimizers` returned `None`",  # intended with our `optimizer: none`
)


def replace_unprintable() -> None:
    """Make stdout and stderr print ``?`` for characters that their encoding does not have."""
    for stream in (sys.stdout, sys.stderr):
        raises_error = getattr(stream, "errors", None) == "strict"
        if raises_error and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def all_printed() -> bool:
    """Flush stdout and return whether all output was written; a reader that closes the pipe, like head, is no error."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        mute()
    except OSError as error:
        mute()
        print_message(f"stdout: {error.strerror}")
        return False
    except ValueError:  # The caller has closed stdout.
        pass
    return True


def mute() -> None:
    """Send stdout to /dev/null, so that the interpreter's last flush cannot fail."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def check_variables() -> None:
    """Raise UsageError for a variable that is not a number, because importing Lightning would then raise."""
    for name in _RANKS:
        value = os.environ.get(name, "0")
        if re.fullmatch(r"\s*-?[0-9]{1,9}\s*", value) is None:
            raise UsageError(
                f"{name}: expected a number in this environment variable, given {value[:100]!r}; unset it"
            )


def quiet_libraries() -> None:
    """Set the variables that silence torch's C++ logs on stderr. Torch reads them once, when it is imported."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


@contextmanager
def quiet() -> Iterator[None]:
    """Silence Lightning's tips, its advice on our Trainer, and deprecations in its own code.

    Other warnings are not silenced: a user's ``warn(..., stacklevel=2)`` in a hook is attributed to Lightning's module.
    """
    from lightning.fabric.utilities.warnings import PossibleUserWarning

    loggers = {logging.getLogger(name): level for name, level in _LEVELS.items()}
    former_levels = {logger: logger.level for logger in loggers}
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
            for logger, level in former_levels.items():
                logger.setLevel(level)


def check_port() -> int:
    """Return MASTER_PORT, or 0 if it is not set; raise UsageError if it is not a port, or is in use."""
    text = os.environ.get("MASTER_PORT", "0")
    is_port = text.isdecimal() and int(text) < 1 << 16
    expect(is_port, "MASTER_PORT", "a port", text)
    port = int(text)
    try:
        socket.create_server(("", port)).close()
    except OSError:
        raise UsageError(
            f"MASTER_PORT: expected a free port, given {text}, which is in use; unset it"
        ) from None
    return port


def warn_of_shared_cores(processes: int, cores: int, activity: str) -> None:
    """Print a line if more ``processes`` compute on the CPU than it has ``cores``."""
    if processes > cores:
        print_message(
            f"{processes} processes share {cores} cores: the time of {activity} includes waiting for a core"
        )
