"""The signals that end a call early. Imports no torch: it watches over that import."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any, NoReturn


class Terminated(KeyboardInterrupt):
    """SIGTERM, raised where the signal found the program: it ends a run as Ctrl-C does."""


@contextmanager
def handled(handlers: Mapping[int, Callable[[int, FrameType | None], Any]]) -> Iterator[None]:
    """Give signals these ``handlers`` within, then the former ones again. Does nothing outside of the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)}
    for number, handler in handlers.items():
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, was in before.items():
            signal.signal(number, was)


def interrupting(stop: Callable[[], None]) -> AbstractContextManager[None]:
    """Have the first Ctrl-C (or SIGTERM) within ask to ``stop``; the second is an exception like any other."""

    def interrupt(*_: object) -> None:
        stop()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    return handled({signal.SIGINT: interrupt, signal.SIGTERM: interrupt})


def terminate(signum: int, frame: FrameType | None) -> NoReturn:
    """Raise ``Terminated``."""
    # A DataLoader's workers may have got the signal, too: that they end is then no error.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    raise Terminated(signal.Signals(signum).name)
