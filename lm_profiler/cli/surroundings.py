"""Check what surrounds a call: closed streams, variables that must be numbers, a checkpoint. Imports no torch."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from lm_profiler.cli.call import Call
from lm_profiler.measure.boundary import say
from lm_profiler.usage_error import UsageError

# the variables that Lightning reads as numbers, some of them while it is imported
_RANKS = (
    *("LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "RANK", "WORLD_SIZE", "MASTER_PORT"),
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "JSM_NAMESPACE_RANK"),
)

_CHECKPOINT_WORDS = ("best", "last", "hpc")  # the values of ``ckpt_path`` that Lightning resolves itself

# the first bytes of a file of torch.save; pickle is the format of torch before 1.6
_ZIP, _PICKLE = b"PK\x03\x04", b"\x80"


def open_standard_streams() -> None:
    """Open substitutes for closed standard streams (``report >&-``), and print unencodable characters as ``?``.

    Otherwise the next file that is opened gets the closed stream's number, and output is printed into that file.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # open() takes the lowest free number: this
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", encoding="utf-8", closefd=False))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if getattr(stream, "errors", None) == "strict" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def all_printed() -> bool:
    """Whether all output was written; a reader such as ``head`` that closes the pipe is no error."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        mute()
    except OSError as error:
        mute()
        say(f"stdout: {error.strerror}")
        return False
    except ValueError:  # the caller closed it
        pass
    return True


def mute() -> None:
    """Send stdout to /dev/null, so that the interpreter's last flush cannot fail."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def check_text(arguments: Sequence[str]) -> None:
    """Raise UsageError for an argument that is not UTF-8, which no record can hold."""
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError:
            shown = argument.encode(errors="surrogateescape").decode(errors="replace")[:100]
            raise UsageError(f"expected arguments of UTF-8 text, given {shown!r}") from None


def check_surroundings(call: Call) -> None:
    """Raise UsageError for errors that would otherwise appear after seconds of imports, or as a traceback."""
    for name in _RANKS:
        given = os.environ.get(name, "0")
        if re.fullmatch(r"\s*-?[0-9]{1,9}\s*", given) is None:
            raise UsageError(f"{name}: expected a number in this variable, given {given[:100]!r}; unset it")
    _check_checkpoint(call.says("ckpt_path"))


def _check_checkpoint(path: object) -> None:
    """Raise UsageError for a checkpoint that does not exist, or that torch did not write."""
    if path is None or str(path) in _CHECKPOINT_WORDS or str(path).startswith("registry") or "://" in str(path):
        return
    try:
        with Path(str(path)).open("rb") as file:
            begin = file.read(len(_ZIP))
    except IsADirectoryError:  # a sharded checkpoint is a folder
        return
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"ckpt_path: expected a checkpoint, given {str(path)[:200]} ({why})") from None
    if not begin.startswith((_ZIP, _PICKLE)):
        raise UsageError(f"ckpt_path: expected a checkpoint, given {path}, which torch.save did not write")
