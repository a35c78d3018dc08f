"""A thread that ends this process where its main thread cannot: stuck in a collective, it hears no signal.

``signal.set_wakeup_fd`` writes from within the C handler, whatever the main thread does. A run's own way out comes
first; what is left after a while is told by ``RunContext.last_words``, and the process ends at once.
"""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from subprocess import Popen
from typing import Any, NamedTuple

from lm_profiler.callbacks.outcome.rank_status import how_it_ended
from lm_profiler.cli.run_context import RunContext
from lm_profiler.lightning_names import OBSERVED, OBSERVER
from lm_profiler.record.calls import FAILED

_LOOK_S = 0.5

_GRACE_S = 5.0
"""The main thread has so long to notice a signal; one that came between two of its calls it notices at once."""

_LEAVING_S = 30.0
"""Then it has so long for the record, the logger and the user's own hooks."""

_FOLLOW_S = 1.5
"""It has so long to notice that another rank has ended: no step has ended for a while by then."""

_ASKED = (signal.SIGTERM, signal.SIGINT)


class Why(NamedTuple):
    """What has happened that this process cannot outlive, and how long its main thread has to notice."""

    text: str
    grace_s: float
    signal: int = 0
    lost: int = 0
    """Which of the ranks that this process started has ended, from 1."""


@dataclass(eq=False)
class Watchdog:
    """Watches over the process of one call.

    Args:
        context: its run.
        children: the ranks that it started.
        leave: ends the process with an exit code.
        clock: in seconds.
    """

    context: RunContext
    children: Callable[[], Sequence[Popen[Any]]]
    leave: Callable[[int], object] = os._exit
    clock: Callable[[], float] = time.monotonic
    over: threading.Event = field(default_factory=threading.Event)
    _parent: int = field(default_factory=os.getppid)
    _why: Why | None = None
    _signal: int = 0
    _since: float = 0.0

    def look(self, signals: bytes = b"") -> bool:
        """See what has happened, ``signals`` among it; whether this process has to be ended."""
        asked = next((number for number in signals if number in _ASKED), 0)
        self._signal = self._signal or asked
        # A signal goes before what else has happened: who stopped the run is told, and not what followed.
        if self._why is None or (asked and not self._why.signal):
            why = self._happened()
            if why is not None:
                self._why, self._since = why, self.clock()
        if self._why is None:
            return False
        return self.clock() - self._since > (_LEAVING_S if self._is_leaving else self._why.grace_s)

    @property
    def _is_leaving(self) -> bool:
        return self.context.profiler is not None and self.context.profiler.is_leaving

    def _happened(self) -> Why | None:
        if self._signal:
            return Why(signal.Signals(self._signal).name, _GRACE_S, self._signal)
        profiler = self.context.profiler
        if profiler is not None and profiler.ends_well:  # which may take long, and asks nothing of the other ranks
            return None
        if profiler is not None and profiler.others_are_over:
            return Why("another rank had ended", _FOLLOW_S)
        # A first rank may outlive its shell; the others have nobody left to report to.
        if int(os.environ.get("LOCAL_RANK", 0)) > 0 and os.getppid() != self._parent:
            return Why("the process that started this rank is gone", _GRACE_S)
        if children := self.children():
            _call_off_observer()
        codes = {n: child.poll() for n, child in enumerate(children, 1)}
        return next((Why(how_it_ended(code), _GRACE_S, lost=n) for n, code in codes.items() if code), None)

    def end(self) -> None:
        """Keep what there is, and end this process with its children."""
        assert self._why is not None
        code = FAILED
        with suppress(BaseException):  # whatever fails here, the process must end
            code = self.context.last_words(self._why.text, self._why.signal, self._why.lost)
        children: list[Any] = [*self.children(), *multiprocessing.active_children()]
        for child in children:
            with suppress(Exception):
                child.kill()
        self.leave(code)

    def watch(self, wakeup: socket.socket) -> None:
        """Look at every signal, and twice a second where other ranks matter, until ``over``."""
        while not self.over.is_set():
            signals = wakeup.recv(64) if select.select([wakeup], [], [], self._patience_s())[0] else b""
            if not self.over.is_set() and self.look(signals):
                self.end()
                return

    def _patience_s(self) -> float | None:
        """A run of one process waits for signals alone, and nothing wakes this thread in its steps."""
        profiler = self.context.profiler
        return None if self._why is None and profiler is not None and profiler.runs_alone else _LOOK_S


def _call_off_observer() -> None:
    """Lightning's observer of the ranks that it started kills this process, too, once it sees one of them fail."""
    observer = OBSERVER.find_or(())
    for thread in threading.enumerate():
        if isinstance(thread, observer):
            setattr(thread, OBSERVED.name, [])


_WAKING = threading.Event()


def _sleep_in_child() -> None:
    """A forked process would write its signals to ours."""
    if _WAKING.is_set():
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_sleep_in_child)


@contextmanager
def watched(watchdog: Watchdog) -> Iterator[None]:
    """Have ``watchdog`` watch over this process within. Does nothing in another thread than the main one."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    _WAKING.set()
    thread = threading.Thread(target=watchdog.watch, args=(ours,), name="lm_profiler-watchdog", daemon=True)
    thread.start()
    try:
        yield
    finally:
        watchdog.over.set()
        _WAKING.clear()
        signal.set_wakeup_fd(before)
        with suppress(OSError):
            theirs.send(b"\0")
        thread.join()
        ours.close()
        theirs.close()
