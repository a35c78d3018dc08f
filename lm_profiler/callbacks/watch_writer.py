"""Writes what a watched run leaves, in a thread beside training: reads the tape, calls the analysis, keeps files."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread, get_ident
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from lm_profiler.analysis.watch import ledger as terms
from lm_profiler.analysis.watch.ledger import Ledger, NamedSpan
from lm_profiler.analysis.watch.rank_reports import RankReports
from lm_profiler.analysis.watch.watched_run import TracedStep, WatchedRun
from lm_profiler.callbacks.exports import RunMetrics
from lm_profiler.callbacks.instruments.profiling_options import WatchOptions
from lm_profiler.callbacks.instruments.tracer import Tracer
from lm_profiler.measure.boundary import said, try_or_note
from lm_profiler.measure.clocks.tape import ChunkReader, TimedSteps
from lm_profiler.measure.clocks.timeline import Timeline
from lm_profiler.measure.collective_calls import flight_recorder, pending
from lm_profiler.measure.counts.recompiles import TimedCompilation
from lm_profiler.measure.counts.step_reader import GarbageCollection, Raw, ReadGpu, Reading, step_counters
from lm_profiler.measure.device.ceilings import usable_bytes
from lm_profiler.measure.user_code import package_of
from lm_profiler.record import watch_files as files
from lm_profiler.record.files import Part, read_part
from lm_profiler.record.parts import PARTS, TIMED
from lm_profiler.record.run_record import RecordError, StepCounters
from lm_profiler.record.watch_files import EVENTS, STEPS, WAITING_PHASES, WINDOWS, WatchEvent, WatchWindow, process_name

_WINDOW = 1000  # the fewest steps of a window
_LAST_BYTES = 16 * 2**20  # size of the last steps in full: 160,000 to 320,000 of them
_MOST_LINES = 10_000  # lines that wait in memory while the disk is full
_RANKS_S = 30.0  # between two looks at the other ranks' reports
_PAUSE_S = 5.0  # if this thread wakes up this much late, the process did not run
_STALL_S, _STALL_STEPS = 60.0, 20.0  # a step is stalled after a minute, and after twenty times the usual step
_DAY_S = 86_400.0


class Handed(NamedTuple):
    """What training hands over between two steps, about once a second."""

    now_ns: int
    marks: Sequence[Any] = ()
    passed_over: int = 0  # steps since the last hand-over that no figure includes, because they were traced
    spans: Sequence[NamedSpan] = ()
    readings: Sequence[Reading] = ()
    collections: Sequence[GarbageCollection] = ()
    compilations: Sequence[TimedCompilation] | None = ()
    held_bytes: int | None = None
    peak_bytes: int | None = None
    global_step: int = 0
    traced: Tracer | None = None  # a tracer that has finished a trace
    traced_steps: Sequence[TracedStep] = ()  # its steps


@dataclass(eq=False, slots=True)
class TrainingPosition:
    """Where training stands beside the marks: read by the watch's thread when nothing is handed over."""

    within: list[tuple[int, str]] = field(default_factory=list)  # the named spans that run, the innermost last
    alive_ns: int = 0  # when a span without a mark last ended, such as a batch of validation
    thread: int = field(default_factory=get_ident)  # the one that trains


@dataclass(eq=False)
class WatchWriter:
    """Reads and writes in its own thread. Training calls ``put``, and traces as many steps as ``asked``."""

    folder: Path  # the folder of the run
    rank: int
    world_size: int
    timeline: Timeline  # its marks tell where training stands when no step ends
    run: WatchedRun  # concludes from the marks
    ledger: Ledger  # where the time goes
    options: WatchOptions  # how many traces may be taken
    report: Callable[[str], object]  # gets a note of a problem
    device: torch.device  # where steps run
    place: TrainingPosition = field(default_factory=TrainingPosition)
    resumed_at: int = 0  # the Trainer's count of steps when fit began
    metrics: RunMetrics | None = None  # what monitoring gets
    publish: Callable[[], object] | None = None  # writes the metrics' file
    gpu: ReadGpu | None = None  # reads clock and throttle reasons of the rank's GPU
    cpu_clock: Callable[[], float] = time.process_time  # the process's CPU seconds
    asked: int = 0
    error: str | None = None  # the type of the error that ended the fit
    _queue: SimpleQueue[Handed | None] = field(default_factory=SimpleQueue)
    _thread: Thread | None = None
    _window: WatchWindow | None = None
    complete: deque[tuple[WatchWindow, int]] = field(default_factory=partial(deque, maxlen=9))  # with global_step
    _last: Handed = Handed(0)  # noqa: RUF009 - a tuple
    _unread: list[Reading] = field(default_factory=list)
    _last_raw: list[Raw] = field(default_factory=list)
    _lines: dict[str, list[Part]] = field(default_factory=lambda: {EVENTS: [], WINDOWS: []})
    _looked_ns: int = 0
    _ranks: RankReports = field(default_factory=RankReports)
    _repeated: int | None = None
    _timed: int = 0
    _seconds: NDArray[np.float64] = field(default_factory=lambda: np.zeros(len(TIMED)))
    _stalled: str = ""  # where
    _stalled_waiting_s: float = 0.0  # booked as stalled in phases in which ranks wait, and not compared with ranks yet
    _paused: list[tuple[str, float]] = field(default_factory=list)  # terms of the ledger that pauses were in
    _longest_s: dict[str, float] = field(default_factory=dict)  # longest stall that ended, by place
    _why: WatchEvent | None = None  # the event because of which the next trace is taken
    _traces_ns: deque[int] = field(default_factory=deque)  # when automatic traces of the last day were taken
    _trace_bytes: int = 0
    _traced_events: dict[tuple[str, int, float], str] = field(default_factory=dict)  # the trace that each one caused
    _full: bool = False  # whether a failed write was reported

    def __post_init__(self) -> None:
        self._reader = ChunkReader(self.timeline.stream)
        self.part, self.clock = self.timeline.part, self.timeline.clock
        self._process = process_name()

    def start(self) -> None:
        self._last = Handed(self.clock())
        self._looked_ns = self._last.now_ns
        self._repeated = files.steps_repeated(self.folder, self.resumed_at)
        self._thread = Thread(target=self.part.run, args=(self._loop,), name="lm_profiler watch", daemon=True)
        self._thread.start()

    def put(self, handed: Handed) -> None:
        self._queue.put(handed)

    def end(self, last: Handed) -> None:
        """Write the rest, and the last status."""
        self._queue.put(last)
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join(timeout=30.0)
        if not self.part.out and not (self._thread is not None and self._thread.is_alive()):
            self._status(last.now_ns)
            self._keep_events(self.run.finish())
            self._look_at_ranks(last.now_ns, last=True)
            self.ledger.close(last.now_ns)
            self._end_window()
            self._flush()
            self.ledger.until(now_ns := self.clock(), terms.INSTRUMENTS)
            self._status(now_ns, ended=True)

    def stop(self) -> None:
        self._queue.put(None)

    def _loop(self) -> None:
        while True:
            handed, asked_ns, cpu_s = None, self.clock(), self.cpu_clock()
            with suppress(Empty):
                handed = self._queue.get(timeout=1.0)
                if handed is None:
                    return
            self._look_for_pause(asked_ns, cpu_s)
            if handed is None:
                self._look_for_stall()
            else:
                self.take(handed)
            self._look_for_request()
            if (now_ns := self.clock()) - self._looked_ns >= _RANKS_S * 1e9:
                self._look_at_ranks(now_ns)

    def take(self, handed: Handed) -> None:
        """Read what was handed over, and write what it says."""
        first_traced_step = self.run.steps + 1
        if handed.passed_over:
            self.run.skip(handed.passed_over)
        at_s, held = self._at_s(handed.now_ns), handed.held_bytes
        timed = self._reader.read(handed.marks)
        ns = np.column_stack([timed.begin_ns, timed.end_ns])
        first = self.run.steps + 1
        self.ledger.add(*timed[:3], handed.spans)
        others = [span for span in handed.spans if span.ns and span.what != terms.INSTRUMENTS]
        counters = self._counters(first, timed, handed)
        self.ledger.move(sum(each.compile_s or 0.0 for each in counters), terms.COMPILING, terms.COMPILED_IN)
        while self._paused:
            where, paused_s = self._paused.pop()
            self.ledger.move(paused_s, terms.PAUSED, [where])
        events = self.run.add(ns, timed.seconds, counters, others)
        events += self.run.judge_traced(first_traced_step, handed.traced_steps)
        for what, seconds in self.ledger.longest.items():
            events += self.run.outside(what, seconds, at_s)
        self.ledger.longest.clear()
        if self.metrics is not None:
            self.metrics.add(timed, held)
        if held is not None:
            events += self.run.held(at_s, held, partial(usable_bytes, self.device))
        if self._stalled:
            self._longest_s[self._stalled] = (handed.now_ns - self._last.now_ns) * 1e-9
            if self._stalled in PARTS:
                self._book_stall(timed)
        for event in self._keep_events(events):
            self._ask_for_trace(event, handed.now_ns)
        if handed.traced is not None:
            self._keep_trace(handed.traced)
        self._last, self._stalled = handed._replace(marks=()), ""
        self._keep(first, ns, timed.seconds, handed)
        self._status(handed.now_ns)  # as often as rows: it takes 0.3 ms of this thread
        self._flush()

    def _keep_events(self, events: Sequence[WatchEvent]) -> list[WatchEvent]:
        """Keep events to be written, with this rank, and with the trace that an earlier line of them names."""
        kept = []
        for event in events:
            trace = self._traced_events.get((event.kind, event.step, event.at_s))
            kept.append(event.model_copy(update={"rank": self.rank, "trace": trace}))
        self._lines[EVENTS] += kept
        return kept

    def _at_s(self, ns: int) -> float:
        return self.run.epoch_s + ns * 1e-9

    def _file(self, name: str) -> Path:
        return self.folder / files.rank_file_name(name, self.rank)

    def _counters(self, first: int, timed: TimedSteps, handed: Handed) -> list[StepCounters]:
        """Return the counters of the steps that are timed by now, each since the reading before it."""
        self._unread += handed.readings
        end = first + len(timed.begin_ns)
        raw = self._last_raw
        for reading in self._unread:
            if first <= reading.step < end:
                index = reading.step - first
                begin_ns, end_ns = int(timed.begin_ns[index]), int(timed.end_ns[index])
                raw.append(Raw(reading.step, begin_ns, end_ns, reading.usage, reading.thread, reading.allocator))
        self._unread = [reading for reading in self._unread if reading.step >= end]
        self._last_raw = raw[-1:]
        return step_counters(raw, handed.collections, handed.compilations, self.rank, self.gpu)

    def _ask_for_trace(self, event: WatchEvent, now_ns: int) -> None:
        """Have the next steps traced after a change of level or a slow step that repeats, where the budget allows."""
        is_new_level = event.kind == "level" and not event.withdrawn
        is_repeated = event.kind == "slow step" and event.times > 1
        was_traced = (event.kind, event.step, event.at_s) in self._traced_events
        if was_traced or not (is_new_level or is_repeated):
            return
        options, taken_ns = self.options, self._traces_ns
        while taken_ns and now_ns - taken_ns[0] > _DAY_S * 1e9:
            taken_ns.popleft()
        rested = not taken_ns or now_ns - taken_ns[-1] >= options.cooldown_s * 1e9
        few = len(taken_ns) < options.traces_per_day and self._trace_bytes < options.trace_mib * 2**20
        if options.traces and rested and few and not self.asked:
            taken_ns.append(now_ns)
            self._why, self.asked = event, 2

    def _keep_trace(self, tracer: Tracer) -> None:
        """Make the table of a trace; where an event was its cause, write that event again with the trace."""
        path, why = tracer.path, self._why
        self._why = None
        if not path.exists():
            return
        tracer.part.run(lambda: tracer.kernels(tracer.work([])))
        if why is not None:
            self._trace_bytes += path.stat().st_size
            self._traced_events[why.kind, why.step, why.at_s] = path.name
            self._lines[EVENTS].append(why.model_copy(update={"rank": self.rank, "trace": path.name}))

    def _where(self) -> str:
        """Return the innermost name of what training does now."""
        if within := self.place.within[-1:]:
            return within[0][1]
        reading = self.timeline.peek()
        if (part := reading.stack[-1]) < len(PARTS):
            return PARTS[part] if reading.running else terms.EPOCH_TURN
        return terms.VALIDATION

    def _look_for_pause(self, asked_ns: int, cpu_s: float) -> None:
        """Report that the process as a whole was stopped, as by SIGSTOP or a machine that sleeps.

        This thread asked at ``asked_ns`` to be woken after a second, when the process had used ``cpu_s`` of CPU time.
        """
        now_ns = self.clock()
        seconds = (now_ns - asked_ns) * 1e-9 - 1.0
        if seconds < _PAUSE_S or self.cpu_clock() - cpu_s > seconds / 2:  # only this thread did not run
            return
        where = self._where()
        self._paused.append((f"{STEPS}{where}" if where in PARTS else where, seconds))
        self.place.alive_ns = now_ns  # no stall
        self._tell_stall(where, seconds, "the process was stopped")

    def _look_for_stall(self) -> None:
        """Report where training stands if nothing has begun or ended there for long."""
        now_ns, place = self.clock(), self.place
        self._status(now_ns)
        signs_ns = [self._last.now_ns, self.timeline.last_ns, place.alive_ns, *(at for at, _ in place.within[-1:])]
        quiet_s, where = (now_ns - max(signs_ns)) * 1e-9, self._where()
        # Where a stall ended by itself before, as in a slow validation, the next must take three times as long.
        least_s = (_STALL_S, _STALL_STEPS * (self.run.levels.level_s or 0.0), 3.0 * self._longest_s.get(where, 0.0))
        if self._stalled or quiet_s < max(least_s):
            return
        self._stalled = where
        dump = flight_recorder(self.device.type) if self.world_size > 1 else None
        waits = None if dump is None else try_or_note("flight recorder", lambda: pending(dump()), [])
        self._tell_stall(where, quiet_s, ", ".join(filter(None, (self._line(), waits))) or None)

    def _tell_stall(self, where: str, seconds: float, cause: str | None) -> None:
        stands = {"at_s": self._at_s(self.clock()), "kind": "stall", "part": where, "now": seconds, "cause": cause}
        self._lines[EVENTS].append(WatchEvent.model_validate({"rank": self.rank, "step": self.run.steps + 1, **stands}))
        self._flush()

    def _line(self) -> str | None:
        """Return the line of the program that runs, and the function that it waits in."""
        frame = innermost = sys._current_frames().get(self.place.thread)
        while frame is not None and package_of(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is None or innermost is None:
            return None
        waits = "" if frame is innermost else f", in {innermost.f_code.co_name}"
        return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}{waits}"

    def _book_stall(self, timed: TimedSteps) -> None:
        """Book what a stalled step took beyond the usual as a stall."""
        if not len(timed.host_s):
            return
        at = int(timed.host_s[:, -1].argmax())
        part = int(timed.host_s[at, :-1].argmax())
        excess_s = max(float(timed.host_s[at, part]) - (self.run.levels.level_s or 0.0), 0.0)
        self.ledger.seconds[terms.STALLED] += excess_s
        self.ledger.seconds[f"{STEPS}{PARTS[part]}"] -= excess_s
        if PARTS[part] in WAITING_PHASES:
            self._stalled_waiting_s += excess_s

    def _look_at_ranks(self, now_ns: int, last: bool = False) -> None:
        """On rank 0, read the ranks' reports: who is late, who is silent. An unreadable report is skipped."""
        self._looked_ns = now_ns
        if self.rank or self.world_size < 2:
            return
        reports = {}
        for rank in files.watched_ranks(self.folder):
            with suppress(RecordError, OSError):
                reports[rank] = files.read_status(self.folder, rank)
        self._lines[EVENTS] += self._ranks.look(self._at_s(now_ns), reports, last)
        # What rank 0 waited in a stalled step is booked as stalled already; each second is booked once.
        booked_s = min(self._stalled_waiting_s, self._ranks.waited_s)
        self._stalled_waiting_s -= booked_s
        waited_s = self._ranks.waited_s - booked_s
        self.ledger.move(waited_s, terms.WAITING, [f"{STEPS}{part}" for part in WAITING_PHASES])
        self._ranks.waited_s = 0.0
        self._flush()

    def _look_for_request(self) -> None:
        path = files.request_file(self.folder, self.rank)
        if not path.exists():
            return
        with suppress(OSError):
            request = None
            try:
                request = read_part(path, files.TraceRequest, "a request for a trace")
            except RecordError as error:
                self.report(str(error))  # `trace` replaces the file as a whole, so this is not a half-written one
            path.unlink(missing_ok=True)
            if self.options.traces and request is not None:
                self._why, self.asked = None, min(max(request.steps, 1), files.MOST_TRACED)

    def _keep(self, first: int, ns: NDArray[np.int64], seconds: NDArray[np.float64], handed: Handed) -> None:
        """Write the steps as rows, and each thousand or more of them as a window."""
        if not len(ns):
            return
        rows = np.empty(len(ns), files.STEP_ROW)
        rows["step"], rows["begin_ns"], rows["seconds"] = np.arange(first, first + len(ns)), ns[:, 0], seconds
        self._timed += len(ns)
        self._seconds += np.nan_to_num(seconds).sum(axis=0)
        self._write(partial(files.append_last_steps, self._file(files.LAST_STEPS), rows, _LAST_BYTES))
        sketches = {}
        for index, part in enumerate(TIMED):
            if seconds[:, index].any():
                sketches[part] = files.Sketch.from_seconds(seconds[:, index])
        window = WatchWindow(
            first_step=first,
            steps=len(ns),
            began_s=self._at_s(int(ns[0, 0])),
            seconds=sketches,
            held_bytes=handed.held_bytes,
            peak_bytes=handed.peak_bytes,
        )
        self._window = window if self._window is None else self._window.merge(window)
        if self._window.steps >= _WINDOW:
            self._end_window()

    def _end_window(self) -> None:
        window, self._window = self._window, None
        if window is not None:
            self._lines[WINDOWS].append(window)
            self.complete.append((window, self._last.global_step))

    def _status(self, now_ns: int, ended: bool = False) -> None:
        went = self.ledger.terms(now_ns)
        if not ended:  # the step that runs is in no term yet
            went.pop(terms.UNEXPLAINED)
        status = files.WatchStatus(
            rank=self.rank,
            world_size=self.world_size,
            process=self._process,
            began_s=self._at_s(self.ledger.began_ns),
            written_s=self._at_s(now_ns),
            ended=ended,
            error=self.error,
            steps=self.run.steps,
            phase="" if ended else self._where(),
            ledger=went,
            wall_s=(now_ns - self.ledger.began_ns) * 1e-9 if ended else sum(went.values()),
            window=self._window,
            held_bytes=self._last.held_bytes,
            traces=self.options.traces,
            timed=self._timed,
            seconds=dict(zip(TIMED, self._seconds.tolist(), strict=True)),
            silent=self._ranks.silent,
            global_step=self._last.global_step,
            resumed_at=self.resumed_at,
            repeated=self._repeated,
        )
        self._write(lambda: status.write(self._file(files.STATUS)))
        if self.publish is not None:
            self._write(self.publish)

    def _flush(self) -> None:
        """Write the lines that wait, as far as the disk takes them."""
        for name, lines in self._lines.items():
            if lines and self._write(partial(files.append_lines, self._file(name), lines)):
                lines.clear()
            del lines[:-_MOST_LINES]

    def _write(self, write: Callable[[], object]) -> bool:
        """Return whether ``write`` could: a full disk may have room again, so it is reported once and tried again."""
        try:
            write()
        except OSError as error:
            if not self._full:
                self._full = True
                self.report(f"watch files cannot be written, and are kept as far as memory allows: {said(error)}")
            return False
        return True
