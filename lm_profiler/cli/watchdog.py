"""A thread that ends this process where the main thread, stuck in a collective, handles no signal.

``signal.set_wakeup_fd`` writes to a socket from the C handler, whatever the main thread does. The main thread may end
the run first; after a grace period ``RunContext.last_words`` writes the record, and the process ends at once.
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

_LOOK_S = 0.5  # seconds between two checks of the other ranks

_GRACE_S = 5.0  # seconds that the main thread has to handle a signal; outside of a blocking call it does so at once

_LEAVING_S = 30.0  # seconds that it then has for the record, the logger and the user's hooks

_FOLLOW_S = 1.5  # seconds that it has once another rank has ended; it has finished no step for a while by then

_ASKED = (signal.SIGTERM, signal.SIGINT)


class Why(NamedTuple):
    """Why this process has to end, and how long its main thread has to notice."""

    text: str
    grace_s: float
    signal: int = 0
    lost: int = 0  # the number, from 1, of a rank that this process started and that has ended; 0 for none


@dataclass(eq=False)
class Watchdog:
    """Decides when the process of one call has to be ended."""

    context: RunContext  # the run of the call
    children: Callable[[], Sequence[Popen[Any]]]  # returns the ranks that the process started
    leave: Callable[[int], object] = os._exit  # ends the process with an exit code
    clock: Callable[[], float] = time.monotonic  # returns the time in seconds
    over: threading.Event = field(default_factory=threading.Event)
    _parent: int = field(default_factory=os.getppid)
    _why: Why | None = None
    _signal: int = 0
    _since: float = 0.0

    def look(self, signals: bytes = b"") -> bool:
        """Check signals, parent and ranks; return whether this process has to be ended now."""
        asked = next((number for number in signals if number in _ASKED), 0)
        self._signal = self._signal or asked
        # A signal replaces any other reason: the record tells who stopped the run, not what followed from it.
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
        if profiler is not None and profiler.ends_well:  # its last work may take long, but needs no other rank
            return None
        if profiler is not None and profiler.others_are_over:
            return Why("another rank had ended", _FOLLOW_S)
        # Rank 0 may outlive its shell (nohup); the other ranks end with the process that started them.
        if int(os.environ.get("LOCAL_RANK", 0)) > 0 and os.getppid() != self._parent:
            return Why("the process that started this rank is gone", _GRACE_S)
        if children := self.children():
            _call_off_observer()
        codes = {n: child.poll() for n, child in enumerate(children, 1)}
        return next((Why(how_it_ended(code), _GRACE_S, lost=n) for n, code in codes.items() if code), None)

    def end(self) -> None:
        """Write the record, and end this process with its children."""
        assert self._why is not None
        code = FAILED
        with suppress(BaseException):  # whatever fails here, the process must end
            code = self.context.last_words(self._why.text, self._why.signal, self._why.lost)
        # os._exit runs no cleanup, so children would be left behind.
        children: list[Any] = [*self.children(), *multiprocessing.active_children()]
        for child in children:
            with suppress(Exception):
                child.kill()
        self.leave(code)

    def watch(self, wakeup: socket.socket) -> None:
        """Check at every signal, and twice a second where other ranks matter, until ``over``."""
        while not self.over.is_set():
            signals = wakeup.recv(64) if select.select([wakeup], [], [], self._patience_s())[0] else b""
            if not self.over.is_set() and self.look(signals):
                self.end()
                return

    def _patience_s(self) -> float | None:
        """Seconds until the next check; None for a run of one process, whose steps nothing disturbs but a signal."""
        profiler = self.context.profiler
        return None if self._why is None and profiler is not None and profiler.runs_alone else _LOOK_S


def _call_off_observer() -> None:
    """Stop Lightning's observer of its ranks, which kills this process once one of them fails."""
    observer = OBSERVER.find_or(())
    for thread in threading.enumerate():
        if isinstance(thread, observer):
            setattr(thread, OBSERVED.name, [])


_WAKING = threading.Event()


def _sleep_in_child() -> None:
    """Stop a forked child from writing its signals to our socket."""
    if _WAKING.is_set():
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_sleep_in_child)


@contextmanager
def watched(watchdog: Watchdog) -> Iterator[None]:
    """Run ``watchdog`` in a thread within the context; only the main thread can set that up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)  # set_wakeup_fd requires it: a signal handler must not wait
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
            theirs.send(b"\0")  # wakes the thread from select, so that it sees that it is over
        thread.join()
        ours.close()
        theirs.close()
