"""Writes what a watched run leaves, in a thread beside training: reads the tape, asks the arithmetic, keeps files."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lm_profiler.analysis.watch.ledger import INSTRUMENTS, STALLED, WAITING, Ledger, NamedSpan
from lm_profiler.analysis.watch.rank_reports import WAITED_IN, RankReports
from lm_profiler.analysis.watch.watched_run import WatchedRun
from lm_profiler.callbacks.metrics import RunMetrics
from lm_profiler.callbacks.watch_options import WatchOptions
from lm_profiler.measure.boundary import Guard, said
from lm_profiler.measure.clocks.steps import ChunkReader, TimedSteps
from lm_profiler.measure.clocks.timeline import Timeline
from lm_profiler.measure.counts.recompiles import TimedCompilation
from lm_profiler.measure.counts.step_reader import Beside, GarbageCollection, Raw, Reading, step_counters
from lm_profiler.record.parts import PARTS, TIMED
from lm_profiler.record.run import RecordError, StepCounters
from lm_profiler.record.run.part import Part, read_as
from lm_profiler.record.watch_files import (
    EVENTS,
    LAST_STEPS,
    ROW,
    STATUS,
    STEPS,
    WINDOWS,
    Sketch,
    TraceRequest,
    WatchEvent,
    WatchStatus,
    WatchWindow,
    append_last_steps,
    append_lines,
    of_rank,
    ranks_watched,
    read_status,
    request_file,
    steps_repeated,
)

_WINDOW = 1000  # steps
_LAST_BYTES = 16 * 2**20  # of the last steps in full: 160,000 to 320,000 of them
_STATUS_S = 10.0
_RANKS_S = 30.0  # between two looks at the other ranks' reports
_STALL_S, _STALL_STEPS = 60.0, 20.0  # a step is stalled after a minute, and after twenty times the usual step
_DAY_S = 86_400.0


class Handed(NamedTuple):
    """What training hands over between two steps, about once a second."""

    now_ns: int
    marks: Sequence[Any] = ()
    passed_over: int = 0  # steps since the last time that are in no figure, because they were traced
    spans: Sequence[NamedSpan] = ()
    turns_ns: Sequence[int] = ()
    left_ns: Sequence[int] = ()
    readings: Sequence[Reading] = ()
    collections: Sequence[GarbageCollection] = ()
    compilations: Sequence[TimedCompilation] | None = ()
    held_bytes: int | None = None
    global_step: int = 0
    # makes the table of a trace that was taken, and returns the trace's path
    traced: Callable[[], Path | None] | None = None


@dataclass(eq=False)
class WatchWriter:
    """Reads and writes in a thread of its own; ``put`` is what training calls.

    Args:
        folder: the run's.
        rank, world_size: this process's.
        timeline: its marks tell where training stands when no step ends.
        reader: reads the marks that are handed over.
        run: what concludes from them.
        ledger: where the time goes.
        options: how many traces may be taken.
        tell: reports a problem.
        resumed_at: the Trainer's count of steps when fit began.
        free_bytes: asks how much memory is left.
        metrics: what monitoring is told; ``publish`` writes their file.
        part: guards the thread.

    ``asked`` is how many steps training shall trace next; 0 for none.
    """

    folder: Path
    rank: int
    world_size: int
    timeline: Timeline
    reader: ChunkReader
    run: WatchedRun
    ledger: Ledger
    options: WatchOptions
    tell: Callable[[str], object]
    free_bytes: Callable[[], int | None]
    part: Guard
    clock: Callable[[], int] = time.perf_counter_ns
    resumed_at: int = 0
    metrics: RunMetrics | None = None
    publish: Callable[[], object] | None = None
    asked: int = 0
    _global_step: int = 0
    _repeated: int | None = None
    _queue: SimpleQueue[Handed | None] = field(default_factory=SimpleQueue)
    _thread: Thread | None = None
    _window: list[tuple[NDArray[np.int64], NDArray[np.float64]]] = field(default_factory=list)
    _in_window: int = 0
    _held: list[int] = field(default_factory=list)
    _held_last: int | None = None
    _unread: list[Reading] = field(default_factory=list)
    _last_raw: Raw | None = None
    _waiting: deque[tuple[str, Part]] = field(default_factory=lambda: deque(maxlen=10_000))
    _handed_ns: int = 0
    _written_ns: int = 0
    _looked_ns: int = 0
    _reports: RankReports = field(default_factory=RankReports)
    _timed: int = 0
    _seconds: NDArray[np.float64] = field(default_factory=lambda: np.zeros(len(TIMED)))
    _stalled: bool = False
    _why: WatchEvent | None = None
    # when each trace that nobody asked for was taken (ns), and its bytes; those of a day
    _traces: deque[tuple[int, int]] = field(default_factory=deque)
    _bytes: int = 0
    _told: bool = False

    def start(self) -> None:
        """Begin to write."""
        self._handed_ns = self._looked_ns = self.clock()
        self._repeated = steps_repeated(self.folder, self.resumed_at)
        self._thread = Thread(target=self.part.run, args=(self._loop,), name="lm_profiler watch", daemon=True)
        self._thread.start()

    def put(self, handed: Handed) -> None:
        """Hand over what passed since the last call."""
        self._queue.put(handed)

    def end(self, last: Handed) -> None:
        """Write what is left, and the last status."""
        self._queue.put(last)
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join(timeout=30.0)
        if not self.part.out and not (self._thread is not None and self._thread.is_alive()):
            self._status(last.now_ns)
            self._look_at_ranks(last.now_ns, last=True)
            self.ledger.close(last.now_ns)
            self._close_window()
            self.ledger.until(now_ns := self.clock(), INSTRUMENTS)
            self._status(now_ns, ended=True)

    def stop(self) -> None:
        """End the thread without another word."""
        self._queue.put(None)

    def _loop(self) -> None:
        while True:
            try:
                handed = self._queue.get(timeout=1.0)
            except Empty:
                self._look_for_stall()
            else:
                if handed is None:
                    return
                self.take(handed)
            self._look_for_request()
            if (now_ns := self.clock()) - self._looked_ns >= _RANKS_S * 1e9:
                self._look_at_ranks(now_ns)

    def take(self, handed: Handed) -> None:
        """Read what was handed over, and write what it says."""
        self._global_step = handed.global_step
        if handed.passed_over:
            self.run.skip(handed.passed_over)
        timed = self.reader.read(handed.marks)
        ns = np.column_stack([timed.begin_ns, timed.end_ns])
        first = self.run.steps + 1
        self.ledger.add(*timed[:3], handed.spans, handed.turns_ns, handed.left_ns)
        others = [span for span in handed.spans if span.what != INSTRUMENTS]
        events = self.run.add(ns, timed.seconds, self._counters(first, timed, handed), others)
        for what, seconds in self.ledger.longest.items():
            events += self.run.outside(what, seconds, self._at_s(handed.now_ns))
        self.ledger.longest.clear()
        if self.metrics is not None:
            self.metrics.add(timed, handed.held_bytes)
        if handed.held_bytes is not None:
            self._held.append(handed.held_bytes)
            self._held_last = handed.held_bytes
            events += self.run.held(self._at_s(handed.now_ns), handed.held_bytes, self.free_bytes)
        if self._stalled:
            self._book_stall(timed)
        for event in events:
            self._tell(event, handed.now_ns)
        if handed.traced is not None:
            self._keep_trace(handed.traced, handed.now_ns)
        self._keep(first, ns, timed.seconds)
        self._handed_ns, self._stalled = handed.now_ns, False
        if handed.now_ns - self._written_ns >= _STATUS_S * 1e9:
            self._status(handed.now_ns)
        self._flush()

    def _at_s(self, ns: int) -> float:
        return self.run.epoch_s + ns * 1e-9

    def _counters(self, first: int, timed: TimedSteps, handed: Handed) -> list[StepCounters]:
        """Return the counters of the steps that are timed by now, each since the reading before it."""
        self._unread += handed.readings
        last = first + len(timed.begin_ns)
        raw = [] if self._last_raw is None else [self._last_raw]
        for step, *rest in (each for each in self._unread if each[0] < last):
            if step >= first:
                at = step - first
                raw.append((step, int(timed.begin_ns[at]), int(timed.end_ns[at]), *rest))
        self._unread = [each for each in self._unread if each[0] >= last]
        self._last_raw = raw[-1] if raw else None
        return step_counters(raw, Beside(handed.collections, handed.compilations), self.rank) if len(raw) > 1 else []

    def _tell(self, event: WatchEvent, now_ns: int) -> None:
        self._waiting.append((EVENTS, event.model_copy(update={"rank": self.rank})))
        if event.kind == "level" or (event.kind == "slow step" and self.run.repeats(event)):
            while self._traces and now_ns - self._traces[0][0] > _DAY_S * 1e9:
                self._traces.popleft()
            last_ns = self._traces[-1][0] if self._traces else None
            rested = last_ns is None or now_ns - last_ns >= self.options.cooldown_s * 1e9
            few = len(self._traces) < self.options.traces_per_day and self._bytes < self.options.trace_mib * 2**20
            if self.options.traces and rested and few and not self.asked:
                self._traces.append((now_ns, 0))
                self._why, self.asked = event, 2

    def _keep_trace(self, traced: Callable[[], Path | None], now_ns: int) -> None:
        """Have the table of a trace made; where an event was its cause, tell that event again with the trace."""
        path, why = traced(), self._why
        self._why = None
        if path is None:
            return
        if why is not None:
            self._bytes += path.stat().st_size
            told = {"rank": self.rank, "trace": path.name, "times": 1}
            self._waiting.append((EVENTS, why.model_copy(update=told)))

    def _look_for_stall(self) -> None:
        """Tell where training stands if no step has ended for long."""
        now_ns = self.clock()
        quiet_s = (now_ns - self._handed_ns) * 1e-9
        if now_ns - self._written_ns >= _STATUS_S * 1e9:
            self._status(now_ns)
        usual_s = self.run.levels.level_s or 0.0
        if self._stalled or quiet_s < max(_STALL_S, _STALL_STEPS * usual_s):
            return
        part = self.timeline.peek().stack[-1]
        if part >= len(PARTS):
            return  # outside of steps: validation may take long
        self._stalled = True
        event = WatchEvent(
            at_s=self._at_s(now_ns),
            rank=self.rank,
            step=self.run.steps + 1,
            kind="stall",
            part=PARTS[part],
            now=quiet_s,
        )
        self._waiting.append((EVENTS, event))
        self._flush()

    def _book_stall(self, timed: TimedSteps) -> None:
        """Book what a stalled step took beyond the usual as that."""
        if not len(timed.host_s):
            return
        at = int(timed.host_s[:, -1].argmax())
        part = int(timed.host_s[at, :-1].argmax())
        excess_s = max(float(timed.host_s[at, part]) - (self.run.levels.level_s or 0.0), 0.0)
        self.ledger.seconds[STALLED] += excess_s
        self.ledger.seconds[f"{STEPS}{PARTS[part]}"] -= excess_s

    def _look_at_ranks(self, now_ns: int, last: bool = False) -> None:
        """On rank 0, read the ranks' reports: who is late, who is silent. One that cannot be read is passed over."""
        self._looked_ns = now_ns
        if self.rank or self.world_size < 2:
            return
        reports = {}
        for rank in ranks_watched(self.folder):
            with suppress(RecordError, OSError):
                reports[rank] = read_status(self.folder, rank)
        events = self._reports.look(self._at_s(now_ns), reports, last)
        self._waiting.extend((EVENTS, event) for event in events)
        self.ledger.move(self._reports.waited_s, WAITING, WAITED_IN)
        self._reports.waited_s = 0.0
        self._flush()

    def _look_for_request(self) -> None:
        """Take a request for a trace from the run's folder."""
        path = request_file(self.folder, self.rank)
        if not path.exists():
            return
        with suppress(OSError):
            try:
                request = read_as(path, TraceRequest, "a request for a trace")
            except RecordError as error:
                self.tell(str(error))  # `trace` replaces the file as a whole, so this is not half of one
                request = None
            path.unlink(missing_ok=True)
            if self.options.traces and request is not None:
                self._why, self.asked = None, max(request.steps, 1)

    def _keep(self, first: int, ns: NDArray[np.int64], seconds: NDArray[np.float64]) -> None:
        """Write the steps as rows, and each thousand as a window."""
        rows = np.empty(len(ns), ROW)
        rows["step"], rows["begin_ns"], rows["seconds"] = np.arange(first, first + len(ns)), ns[:, 0], seconds
        self._timed += len(ns)
        self._seconds += np.nan_to_num(seconds).sum(axis=0)
        path = self.folder / of_rank(LAST_STEPS, self.rank)
        self._write(lambda: append_last_steps(path, rows, _LAST_BYTES))
        while len(ns):
            room = _WINDOW - self._in_window
            self._window.append((ns[:room], seconds[:room]))
            self._in_window += len(ns[:room])
            ns, seconds = ns[room:], seconds[room:]
            if self._in_window == _WINDOW:
                self._close_window(behind=len(ns))

    def _open_window(self, behind: int = 0) -> WatchWindow | None:
        """Return the window that is not complete; ``behind`` are steps that came after it."""
        if not self._in_window:
            return None
        seconds = np.concatenate([each for _, each in self._window])
        sketches = {part: Sketch.of(seconds[:, at]) for at, part in enumerate(TIMED) if seconds[:, at].any()}
        return WatchWindow(
            first_step=self.run.steps - behind - self._in_window + 1,
            steps=self._in_window,
            began_s=self._at_s(int(self._window[0][0][0, 0])),
            seconds=sketches,
            held_bytes=min(self._held, default=None),
            peak_bytes=max(self._held, default=None),
        )

    def _close_window(self, behind: int = 0) -> None:
        if (window := self._open_window(behind)) is not None:
            self._waiting.append((WINDOWS, window))
        self._window, self._in_window, self._held = [], 0, []
        self._flush()

    def _status(self, now_ns: int, ended: bool = False) -> None:
        self._written_ns = now_ns
        part = self.timeline.peek().stack[-1]
        terms = self.ledger.terms(now_ns)
        if not ended:  # the step that runs is in no term yet
            terms.pop("unexplained")
        status = WatchStatus(
            rank=self.rank,
            world_size=self.world_size,
            began_s=self._at_s(self.ledger.began_ns),
            written_s=self._at_s(now_ns),
            ended=ended,
            steps=self.run.steps,
            phase="" if ended else PARTS[part] if part < len(PARTS) else "outside of steps",
            ledger=terms,
            wall_s=(now_ns - self.ledger.began_ns) * 1e-9 if ended else sum(terms.values()),
            window=self._open_window(),
            held_bytes=self._held_last,
            traces=self.options.traces,
            timed=self._timed,
            seconds=dict(zip(TIMED, self._seconds.tolist(), strict=True)),
            silent=self._reports.silent,
            global_step=self._global_step,
            resumed_at=self.resumed_at,
            repeated=self._repeated,
        )
        self._write(lambda: status.write(self.folder / of_rank(STATUS, self.rank)))
        if self.publish is not None:
            self._write(self.publish)

    def _flush(self) -> None:
        """Write the lines that wait, as far as the disk takes them."""
        for name in (EVENTS, WINDOWS):
            parts = [part for of, part in self._waiting if of == name]
            path = self.folder / of_rank(name, self.rank)
            if parts and self._write(lambda: append_lines(path, parts)):  # noqa: B023 - called at once
                kept = [each for each in self._waiting if each[0] != name]
                self._waiting.clear()
                self._waiting.extend(kept)

    def _write(self, write: Callable[[], object]) -> bool:
        """Return whether ``write`` could: a full disk may have room again, so it is told once and tried again."""
        try:
            write()
        except OSError as error:
            if not self._told:
                self._told = True
                self.tell(f"what is watched cannot be written, and is kept as far as memory allows: {said(error)}")
            return False
        return True
