"""Decides when steps of a watched run are traced: on request, or because of an event if the budget allows."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from lm_profiler.callbacks.instruments.profiling_options import WatchOptions
from lm_profiler.callbacks.instruments.tracer import Tracer
from lm_profiler.record import watch_files as files
from lm_profiler.record.files import read_part
from lm_profiler.record.run_record import RecordError
from lm_profiler.record.watch_files import WatchEvent

_DAY_NS = 86_400 * 1_000_000_000
_STEPS_OF_EVENT = 2  # steps of a trace that is taken because of an event
# the budget of automatic traces
_MOST_PER_DAY = 8
_LEAST_PAUSE_NS = 600 * 1_000_000_000  # between two automatic traces
_MOST_BYTES = 20 * 2**20  # of all automatic traces together

# identifies an event, which may be written several times: its kind, step and time
_EventKey = tuple[str, int, float]


@dataclass(eq=False)
class TraceRequests:
    """Decides how many steps training traces next, and keeps which event caused each trace."""

    folder: Path  # the folder of the run
    rank: int
    options: WatchOptions  # whether traces may be taken
    report: Callable[[str], object]  # gets a note of a problem
    steps: int = 0  # the number of steps that training should trace next
    # the event that causes the next trace; None if a user requested it
    _cause: WatchEvent | None = None
    # when the automatic traces of the last day were requested
    _automatic_ns: deque[int] = field(default_factory=deque)
    _automatic_bytes: int = 0  # the bytes of all automatic traces
    # the file name of the trace that each event caused
    _files: dict[_EventKey, str] = field(default_factory=dict)

    def take(self) -> int:
        """Return how many steps to trace next, and reset the request."""
        steps = self.steps
        self.steps = 0
        return steps

    def file_of(self, event: WatchEvent) -> str | None:
        """Return the name of the trace that an earlier line of ``event`` caused."""
        return self._files.get(_event_key(event))

    def consider(self, event: WatchEvent, now_ns: int) -> None:
        """Request a trace after a change of level or a repeated slow step, if the budget allows."""
        is_new_level = event.kind == "level" and not event.withdrawn
        is_repeated = event.kind == "slow step" and event.times > 1
        was_traced = _event_key(event) in self._files
        if was_traced or not (is_new_level or is_repeated):
            return
        is_another_requested = self.steps > 0
        if not self.options.traces or is_another_requested:
            return
        if self._budget_allows(now_ns):
            self._automatic_ns.append(now_ns)
            self._cause = event
            self.steps = _STEPS_OF_EVENT

    def _budget_allows(self, now_ns: int) -> bool:
        """Return whether another automatic trace may be taken now."""
        requested_ns = self._automatic_ns
        while requested_ns and now_ns - requested_ns[0] > _DAY_NS:
            requested_ns.popleft()
        if len(requested_ns) >= _MOST_PER_DAY:
            return False
        if self._automatic_bytes >= _MOST_BYTES:
            return False
        return not requested_ns or now_ns - requested_ns[-1] >= _LEAST_PAUSE_NS

    def read_request(self) -> None:
        """Read the file with which a user requests a trace, if there is one."""
        path = files.request_file(self.folder, self.rank)
        if not path.exists():
            return
        with suppress(OSError):
            request = None
            try:
                request = read_part(path, files.TraceRequest, "a request for a trace")
            except RecordError as error:
                # The verb `trace` replaces the file as a whole, so this is not a file that is still being written.
                self.report(str(error))
            path.unlink(missing_ok=True)
            if self.options.traces and request is not None:
                self._cause = None  # a user asked, so no event caused this trace
                self.steps = min(max(request.steps, 1), files.MOST_TRACED)

    def finish(self, tracer: Tracer) -> WatchEvent | None:
        """Make the table of a finished trace; return the event that caused it, with the trace's name."""
        cause = self._cause
        self._cause = None
        if not tracer.path.exists():
            return None
        tracer.guard.run(lambda: tracer.kernels(tracer.work([])))
        if cause is None:
            return None
        self._automatic_bytes += tracer.path.stat().st_size
        self._files[_event_key(cause)] = tracer.path.name
        return cause


def _event_key(event: WatchEvent) -> _EventKey:
    return event.kind, event.step, event.at_s
