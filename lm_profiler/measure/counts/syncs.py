"""Finds the lines of the user's code at which the host waits for the device.

torch's debug mode warns at each of them; that costs time, so it is on only in a stage that is not timed. It does not
cover ``torch.cuda.synchronize``, waiting for events, ``torch.distributed`` and ``torch.sparse``. A wait inside a
backward pass is found at the line that started the backward.
"""

from __future__ import annotations

import linecache
import sys
import warnings
from collections import Counter
from contextlib import ExitStack
from typing import Any

import torch

from lm_profiler.measure.user_code import user_line
from lm_profiler.record.run_record import Sync

_TEXT = "called a synchronizing CUDA operation"  # c10/cuda/CUDAFunctions.cpp, warn_or_error_on_sync
_PROTOTYPE = "Synchronization debug mode is a prototype feature"
_WARN = 1  # torch.cuda.set_sync_debug_mode("warn")


class SyncDetector:
    """Collects the lines that synchronize between ``begin`` and ``end``.

    Args:
        cuda: has ``get_sync_debug_mode`` and ``set_sync_debug_mode``, as ``torch.cuda`` does.
    """

    def __init__(self, cuda: Any = torch.cuda) -> None:
        self._cuda = cuda
        # how often each line waited, by file, line and function
        self._counts: Counter[tuple[str, int, str]] = Counter()
        self._undo: ExitStack | None = None  # None unless it is collecting
        # ``warnings.showwarning`` before ``begin``
        self._show_others: Any = None

    def begin(self) -> None:
        """Start collecting. Other warnings are shown as before."""
        if self._undo is not None:
            return
        with ExitStack() as undo:
            undo.enter_context(warnings.catch_warnings())
            self._show_others = warnings.showwarning
            warnings.filterwarnings("ignore", message=_PROTOTYPE)
            warnings.filterwarnings("always", message=_TEXT)
            warnings.showwarning = self._show  # type: ignore[assignment]  # passes further arguments on
            before = self._cuda.get_sync_debug_mode()
            self._cuda.set_sync_debug_mode(_WARN)
            undo.callback(self._cuda.set_sync_debug_mode, before)
            self._undo = undo.pop_all()

    def end(self) -> list[Sync]:
        """Restore torch's mode and the warning filters; return what was found, most frequent first."""
        undo, self._undo = self._undo, None
        if undo is not None:
            undo.close()
        return [
            Sync(
                file=file,
                line=line,
                function=function,
                count=count,
                call=linecache.getline(file, line).strip(),
            )
            for (file, line, function), count in self._counts.most_common()
        ]

    def _show(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        *rest: Any,
    ) -> None:
        """Count a warning by torch that the host waits for the device, by the user's line; show other warnings."""
        if not str(message).startswith(_TEXT):
            self._show_others(message, category, filename, lineno, *rest)
            return
        line = user_line(sys._getframe(1), frameworks=True)
        self._counts[line or (filename, lineno, "")] += 1


def sync_detector_of(device: torch.device) -> SyncDetector | None:
    """Return a detector for ``device``; None if torch has no debug mode (only CUDA has one)."""
    has_debug_mode = device.type == "cuda" and torch.cuda.is_available()
    return SyncDetector() if has_debug_mode else None
