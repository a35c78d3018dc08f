"""Handle the signals that end a call early. This module does not import torch, since that can be interrupted too."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any, NoReturn


class Terminated(KeyboardInterrupt):
    """SIGTERM as an exception, which ends a run as Ctrl-C does."""


@contextmanager
def handled(
    handlers: Mapping[int, Callable[[int, FrameType | None], Any]],
) -> Iterator[None]:
    """Install signal ``handlers`` within the context and restore the former ones; in the main thread only.

    The handlers of SIGINT and SIGCHLD are restored too, because ``interrupting`` and ``terminate`` change them.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    changed_signals = {*handlers, signal.SIGINT, signal.SIGCHLD}
    former_handlers = {number: signal.getsignal(number) for number in changed_signals}
    for number, handler in handlers.items():
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, former_handler in former_handlers.items():
            signal.signal(number, former_handler)


def interrupting(stop: Callable[[], None]) -> AbstractContextManager[None]:
    """Call ``stop`` at the first Ctrl-C or SIGTERM within the context; the second Ctrl-C raises KeyboardInterrupt."""

    def interrupt(*_: object) -> None:
        stop()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    return handled({signal.SIGINT: interrupt, signal.SIGTERM: interrupt})


def terminate(signum: int, frame: FrameType | None) -> NoReturn:
    """Raise ``Terminated``."""
    # The workers of a DataLoader may have received the signal too. Torch's handler of SIGCHLD would report their end as
    # an error.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    raise Terminated(signal.Signals(signum).name)
