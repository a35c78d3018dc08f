"""The signals that end a call early. Imports no torch: it watches over that import."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn


class Terminated(KeyboardInterrupt):
    """SIGTERM, raised where the signal found the program: it ends a run as Ctrl-C does."""


@contextmanager
def signals_as_exceptions() -> Iterator[None]:
    """SIGTERM raises as SIGINT does; afterwards both are handled as before."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)}
    signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _terminate(signum: int, frame: FrameType | None) -> NoReturn:
    # A DataLoader's workers may have got the signal, too: that they end is then no error.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    raise Terminated(signal.Signals(signum).name)
