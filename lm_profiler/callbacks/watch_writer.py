"""The thread of a watched run that works beside training: reads the tape, calls the analysis and writes files."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread, get_ident
from typing import Any, NamedTuple

import numpy as np
import torch

from lm_profiler.analysis.watch import ledger as terms
from lm_profiler.analysis.watch.ledger import Ledger, NamedSpan
from lm_profiler.analysis.watch.rank_reports import RankReports
from lm_profiler.analysis.watch.watched_run import OwnWork, TracedStep, WatchedRun
from lm_profiler.callbacks.exports import RunMetrics
from lm_profiler.callbacks.instruments.profiling_options import WatchOptions
from lm_profiler.callbacks.instruments.tracer import Tracer
from lm_profiler.callbacks.live import CountedBatches, LiveRows
from lm_profiler.callbacks.trackers import window_figures
from lm_profiler.callbacks.watch_output import WatchOutput
from lm_profiler.callbacks.watch_traces import TraceRequests
from lm_profiler.measure.boundary import try_or_note
from lm_profiler.measure.clocks.tape import ChunkReader, TimedSteps
from lm_profiler.measure.clocks.timeline import Timeline
from lm_profiler.measure.collective_calls import flight_recorder, oldest_pending_call
from lm_profiler.measure.counts.recompiles import TimedCompilation
from lm_profiler.measure.counts.step_reader import (
    GarbageCollection,
    ReadGpu,
    Reading,
    TimedReading,
    step_counters,
)
from lm_profiler.measure.device.ceilings import usable_bytes
from lm_profiler.measure.user_code import package_of
from lm_profiler.record import watch_files as files
from lm_profiler.record.counter_table import CounterTable
from lm_profiler.record.parts import PARTS, TIMED
from lm_profiler.record.run_record import RecordError
from lm_profiler.record.watch_files import (
    STEPS,
    WAITING_PHASES,
    WatchEvent,
    WatchWindow,
    process_name,
)

# how often the reports of the other ranks are read
_COMPARE_RANKS_NS = 30 * 1_000_000_000
_WAKE_UP_S = 1.0  # how long the thread sleeps if nothing is handed over
_PAUSE_S = 5.0  # if this thread wakes up this much late, the process did not run
# Training is stalled if nothing begins or ends for a minute and for twenty times the usual step.
_STALL_S = 60.0
_STALL_STEPS = 20.0
# If a stall ended by itself, as in a slow validation, the next one in the same place must take this many times longer.
_STALL_REPEATS = 3.0
_MOST_UNSENT = 20  # rows that wait for the trackers; up to two come per second
_END_S = 30.0  # how long the end of training waits for this thread


class HandOver(NamedTuple):
    """The data that training hands over between two steps, about once per second."""

    now_ns: int
    marks: Sequence[Any] = ()  # the marks, as ``Timeline.take_marks`` returns them
    # steps since the last hand-over that are in no figure, because they were traced
    skipped_steps: int = 0
    spans: Sequence[NamedSpan] = ()
    readings: Sequence[Reading] = ()
    collections: Sequence[GarbageCollection] = ()
    compilations: Sequence[TimedCompilation] | None = ()
    held_bytes: int | None = None
    peak_bytes: int | None = None
    global_step: int = 0
    traced: Tracer | None = None  # a tracer that has finished a trace
    traced_steps: Sequence[TracedStep] = ()  # the traced steps
    # the contents of the steps' batches; None if they are not counted
    counted: CountedBatches | None = None


class RunningSpan(NamedTuple):
    """A named span that has begun and not ended."""

    begin_ns: int
    name: str


@dataclass(eq=False, slots=True)
class TrainingPosition:
    """What training does now. The thread of the watch reads it, besides the marks, while training passes nothing on."""

    # the named spans that run, the innermost last
    spans: list[RunningSpan] = field(default_factory=list)
    # when something without a mark last ended, such as a batch of validation
    alive_ns: int = 0
    thread: int = field(default_factory=get_ident)  # the thread that trains


@dataclass(eq=False)
class WatchWriter:
    """Reads and writes in its own thread. Training calls ``put``, and traces the steps of ``traces``."""

    folder: Path  # the folder of the run
    rank: int
    world_size: int
    timeline: Timeline  # its marks show where training stands when no step ends
    run: WatchedRun  # concludes from the marks
    ledger: Ledger  # divides the time of the fit into terms
    options: WatchOptions  # whether traces may be taken
    report: Callable[[str], object]  # gets a note of a problem
    device: torch.device  # the device on which steps run
    place: TrainingPosition = field(default_factory=TrainingPosition)
    resumed_at: int = 0  # the Trainer's count of steps when fit began
    metrics: RunMetrics | None = None  # the metrics for monitoring
    publish: Callable[[], object] | None = None  # writes the metrics' file
    gpu: ReadGpu | None = None  # reads clock and throttle reasons of the rank's GPU
    cpu_clock: Callable[[], float] = time.process_time  # the process's CPU seconds
    thread_clock: Callable[[], float] = time.thread_time  # the calling thread's
    error: str | None = None  # the type of the error that ended the fit
    traces: TraceRequests = field(init=False)
    output: WatchOutput = field(init=False)
    # the figures for loggers while training runs; None without loggers
    live_rows: LiveRows | None = None
    # figures that training has not sent to the trackers yet, each set with its global_step
    unsent: deque[tuple[Mapping[str, float], int]] = field(
        default_factory=partial(deque, maxlen=_MOST_UNSENT)
    )
    _queue: SimpleQueue[HandOver | None] = field(default_factory=SimpleQueue)
    _thread: Thread | None = None
    _newest: HandOver = HandOver(now_ns=0)  # noqa: RUF009 - a tuple
    # readings of counters of steps that are not timed yet
    _early_readings: list[Reading] = field(default_factory=list)
    # the last reading of a timed step; empty before the first
    _last_raw: list[TimedReading] = field(default_factory=list)
    _ranks: RankReports = field(default_factory=RankReports)
    _compared_ns: int = 0  # when the ranks' reports were last read
    # steps that a resumed run does again, because they came after the checkpoint; None if unknown
    _repeated_steps: int | None = None
    # the place at which training stalls now; empty if it does not stall
    _stalled_place: str = ""
    # seconds of stalls in phases in which ranks wait, which the comparison of ranks has not seen yet
    _stalled_waiting_s: float = 0.0
    # the ledger's term in which each pause was, and the seconds of the pause
    _pauses: list[tuple[str, float]] = field(default_factory=list)
    # the longest stall that has ended, by its place
    _longest_stall_s: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._reader = ChunkReader(self.timeline.stream)
        self.guard = self.timeline.guard
        self.clock = self.timeline.clock
        self.traces = TraceRequests(self.folder, self.rank, self.options, self.report)
        self.output = WatchOutput(self.folder, self.rank, self.report)
        self._process = process_name()

    def start(self) -> None:
        """Start the thread, which handles each hand-over until ``end`` stops it."""
        self._newest = HandOver(self.clock())
        self._compared_ns = self._newest.now_ns
        self._repeated_steps = files.steps_repeated(self.folder, self.resumed_at)
        self._thread = Thread(
            target=self.guard.run,
            args=(self._run_loop,),
            name="lm_profiler watch",
            daemon=True,
        )
        self._thread.start()

    def put(self, hand_over: HandOver) -> None:
        self._queue.put(hand_over)

    def stop(self) -> None:
        self._queue.put(None)

    def end(self, last: HandOver) -> None:
        """Wait for the thread, then write what is left and the last status.

        If the thread hangs or has failed, write nothing.
        """
        self.put(last)
        self.stop()
        if self._thread is not None:
            self._thread.join(timeout=_END_S)
            if self._thread.is_alive():  # it may still write
                return
        if self.guard.is_disabled:
            return
        # a first time, for the case that one of the following calls fails
        self._write_status(last.now_ns)
        self._add_events(self.run.finish())
        self._compare_ranks(last.now_ns, last=True)
        self.ledger.close(last.now_ns)
        self._keep_window_figures(self.output.end_window())
        self._end_live_row()
        self.output.write_lines()
        now_ns = self.clock()
        self.ledger.add_until(now_ns, terms.INSTRUMENTS)
        self._write_status(now_ns, has_ended=True)

    def _run_loop(self) -> None:
        """Handle what training hands over, until None comes; also check for stalls, requests and slow ranks."""
        while True:
            asleep_since_ns = self.clock()
            cpu_s = self.cpu_clock()
            hand_over: HandOver | None = None
            with suppress(Empty):
                hand_over = self._queue.get(timeout=_WAKE_UP_S)
                if hand_over is None:
                    return
            self._check_for_pause(asleep_since_ns, cpu_s)
            if hand_over is None:
                self._check_for_stall()
            else:
                began_ns, began_cpu_s = self.clock(), self.thread_clock()
                self.take(hand_over)
                cpu_s = self.thread_clock() - began_cpu_s
                self.run.add_own_work(OwnWork(began_ns, self.clock(), cpu_s))
            self.traces.read_request()
            now_ns = self.clock()
            if now_ns - self._compared_ns >= _COMPARE_RANKS_NS:
                self._compare_ranks(now_ns)

    def take(self, hand_over: HandOver) -> None:
        """Add what the training thread passed on to the figures, conclude from it, and write the files."""
        # Traced steps come before the others of a hand-over, and are skipped: no figure includes them.
        first_traced_step = self.run.steps + 1
        if hand_over.skipped_steps:
            self.run.skip(hand_over.skipped_steps)
        timed = self._reader.read(hand_over.marks)
        first_step = self.run.steps + 1
        self.ledger.add(timed.begin_ns, timed.end_ns, timed.host_s, hand_over.spans)
        counters = self._counters_of_steps(first_step, timed, hand_over)
        self._move_known_causes(counters)
        events = self._conclude(timed, counters, hand_over, first_traced_step)
        if self.metrics is not None:
            self.metrics.add(timed, hand_over.held_bytes, hand_over.counted)
        if self._stalled_place:
            self._end_stall(timed, hand_over.now_ns)
        for event in self._add_events(events):
            self.traces.consider(event, hand_over.now_ns)
        if hand_over.traced is not None:
            self._keep_trace(hand_over.traced)
        # the marks are read, and take memory
        self._newest = hand_over._replace(marks=())
        self._keep_steps(first_step, timed, hand_over)
        self._add_to_live_row(timed, hand_over)
        # Writing the status takes 0.3 ms of this thread, so once per hand-over is affordable.
        self._write_status(hand_over.now_ns)
        self.output.write_lines()

    def _move_known_causes(self, counters: CounterTable) -> None:
        """In the ledger, move the time of compilations and of pauses from the parts of steps to terms of their own."""
        compile_s = counters.total("compile_s")
        self.ledger.move(compile_s, terms.COMPILING, terms.COMPILED_IN)
        for paused_term, paused_s in self._pauses:
            self.ledger.move(paused_s, terms.PAUSED, [paused_term])
        self._pauses.clear()

    def _conclude(
        self,
        timed: TimedSteps,
        counters: CounterTable,
        hand_over: HandOver,
        first_traced_step: int,
    ) -> list[WatchEvent]:
        """Return the events that the analysis finds in the steps, outside of the steps, and in memory.

        Take from the ledger the longest durations that it has collected for this.
        """
        instants_ns = np.column_stack([timed.begin_ns, timed.end_ns])
        spans = [span for span in hand_over.spans if span.what != terms.INSTRUMENTS]
        events = self.run.add(instants_ns, timed.seconds, counters, spans)
        events += self.run.judge_traced(first_traced_step, hand_over.traced_steps)
        at_s = self._seconds_since_1970(hand_over.now_ns)
        for term, seconds in self.ledger.longest.items():
            events += self.run.add_durations(term, seconds, at_s)
        self.ledger.longest.clear()
        if hand_over.held_bytes is not None:
            events += self.run.add_held_bytes(
                at_s, hand_over.held_bytes, partial(usable_bytes, self.device)
            )
        return events

    def _add_events(self, events: Sequence[WatchEvent]) -> list[WatchEvent]:
        """Complete events and have them written; return the complete ones.

        Each event gets this rank, and the trace that was written for an earlier line about the same event.
        """
        complete = []
        for event in events:
            changes = {"rank": self.rank, "trace": self.traces.file_of(event)}
            complete.append(event.model_copy(update=changes))
        self.output.add_events(complete)
        return complete

    def _seconds_since_1970(self, ns: int) -> float:
        return self.run.epoch_s + ns * 1e-9

    def _counters_of_steps(
        self, first_step: int, timed: TimedSteps, hand_over: HandOver
    ) -> CounterTable:
        """Return the counters of the ``timed`` steps, of which ``first_step`` is the first.

        Readings of later steps wait until these are timed, too. The last reading is kept, because the next one is
        compared with it.
        """
        self._early_readings += hand_over.readings
        end_step = first_step + len(timed.begin_ns)
        begin_ns = timed.begin_ns.tolist()
        end_ns = timed.end_ns.tolist()
        raw = self._last_raw
        for reading in self._early_readings:
            if first_step <= reading.step < end_step:
                index = reading.step - first_step
                raw.append(
                    TimedReading(
                        reading.step,
                        began_ns=begin_ns[index],
                        ended_ns=end_ns[index],
                        usage=reading.usage,
                        thread=reading.thread,
                        allocator=reading.allocator,
                    )
                )
        self._early_readings = [
            reading for reading in self._early_readings if reading.step >= end_step
        ]
        self._last_raw = raw[-1:]
        return step_counters(
            raw, hand_over.collections, hand_over.compilations, self.rank, self.gpu
        )

    def _keep_trace(self, tracer: Tracer) -> None:
        """Finish a trace, and write the event that caused it again, with the name of the trace."""
        cause = self.traces.finish(tracer)
        if cause is not None:
            self._add_events([cause])

    def _keep_steps(
        self, first_step: int, timed: TimedSteps, hand_over: HandOver
    ) -> None:
        """Write the steps as rows, and add them to a window, which is written when it has a thousand steps."""
        if len(timed.begin_ns) == 0:
            return
        self.output.add_steps(first_step, timed.begin_ns, timed.seconds)
        window = self.output.add_to_window(
            first_step=first_step,
            began_s=self._seconds_since_1970(int(timed.begin_ns[0])),
            seconds=timed.seconds,
            held_bytes=hand_over.held_bytes,
            peak_bytes=hand_over.peak_bytes,
        )
        self._keep_window_figures(window)

    def _keep_window_figures(self, window: WatchWindow | None) -> None:
        """Keep the figures of a complete window for the training thread, which sends them to the trackers."""
        if window is not None:
            self.unsent.append((window_figures(window), self._newest.global_step))

    def _add_to_live_row(self, timed: TimedSteps, hand_over: HandOver) -> None:
        """Add what the training thread passed on to the row of live figures, and write the row if it is due."""
        if self.live_rows is None:
            return
        sums = self.live_rows.sums
        sums.add_steps(timed)
        sums.add_batches(hand_over.counted)
        sums.add_memory(hand_over.held_bytes, hand_over.peak_bytes)
        if self.live_rows.is_due(hand_over.now_ns):
            self._end_live_row()

    def _end_live_row(self) -> None:
        """End the row of figures for trackers, and keep it for the training thread, which sends it."""
        if self.live_rows is None:
            return
        figures = self.live_rows.end_row(self._newest.now_ns)
        if figures:
            self.unsent.append((figures, self._newest.global_step))

    # -- pauses and stalls

    def _place_name(self) -> str:
        """Return the name of what training does now; of nested spans and parts, the innermost."""
        # a copy, since training changes the list
        innermost_span = self.place.spans[-1:]
        if innermost_span:
            return innermost_span[0].name
        reading = self.timeline.read_without_change()
        part = reading.stack[-1]
        is_outside = part >= len(PARTS)
        if is_outside:
            return terms.VALIDATION
        if not reading.is_step_running:
            return terms.EPOCH_TURN
        return PARTS[part]

    def _check_for_pause(self, asleep_since_ns: int, cpu_s: float) -> None:
        """If the whole process was stopped, for example by SIGSTOP or because the machine slept, report this.

        Args:
            asleep_since_ns: when this thread fell asleep; it should have been woken after a second.
            cpu_s: the CPU time that the process had used then.
        """
        now_ns = self.clock()
        late_s = (now_ns - asleep_since_ns) * 1e-9 - _WAKE_UP_S
        used_s = self.cpu_clock() - cpu_s
        # Otherwise only this thread did not run.
        process_was_idle = used_s <= late_s / 2
        if late_s < _PAUSE_S or not process_was_idle:
            return
        place = self._place_name()
        term = f"{STEPS}{place}" if place in PARTS else place
        self._pauses.append((term, late_s))
        self.place.alive_ns = now_ns  # so that the pause does not also count as a stall
        self._report_stall(place, late_s, "the process was stopped")

    def _check_for_stall(self) -> None:
        """Write the status; report a stall if nothing has begun or ended in training for much longer than usual."""
        now_ns = self.clock()
        self._write_status(now_ns)
        quiet_s = (now_ns - self._last_sign_of_life_ns()) * 1e-9
        place = self._place_name()
        usual_step_s = self.run.step_s or 0.0
        earlier_stall_s = self._longest_stall_s.get(place, 0.0)
        least_s = max(
            _STALL_S, _STALL_STEPS * usual_step_s, _STALL_REPEATS * earlier_stall_s
        )
        if self._stalled_place or quiet_s < least_s:
            return
        self._stalled_place = place
        possible_causes = (self._running_line(), self._pending_collective())
        causes = [cause for cause in possible_causes if cause]
        self._report_stall(place, quiet_s, ", ".join(causes) or None)

    def _last_sign_of_life_ns(self) -> int:
        """Return when training last handed something over, took a mark, or began or ended a span."""
        signs_ns = [self._newest.now_ns, self.timeline.last_ns, self.place.alive_ns]
        for innermost_span in self.place.spans[-1:]:  # a copy, as in _place_name
            signs_ns.append(innermost_span.begin_ns)
        return max(signs_ns)

    def _pending_collective(self) -> str | None:
        """Return the oldest collective call that has not ended, if torch's flight recorder knows of one."""
        if self.world_size == 1:
            return None
        dump = flight_recorder(self.device.type)
        if dump is None:
            return None
        return try_or_note("flight recorder", lambda: oldest_pending_call(dump()), [])

    def _report_stall(self, place: str, seconds: float, cause: str | None) -> None:
        """Write the event that this rank has been in ``place`` for ``seconds``, far longer than usual."""
        event = WatchEvent(
            at_s=self._seconds_since_1970(self.clock()),
            rank=self.rank,
            step=self.run.steps + 1,
            kind="stall",
            part=place,
            now=seconds,
            cause=cause,
        )
        self.output.add_events([event])
        self.output.write_lines()

    def _running_line(self) -> str | None:
        """Return the line of the program that runs, and the function that it waits in; None if no line is found."""
        innermost = sys._current_frames().get(self.place.thread)
        frame = innermost
        while frame is not None and package_of(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is None or innermost is None:
            return None
        line = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        if frame is innermost:
            return line
        return f"{line}, in {innermost.f_code.co_name}"

    def _end_stall(self, timed: TimedSteps, now_ns: int) -> None:
        """Note how long the stall took; if it was in a step, move its time in the ledger."""
        stall_s = (now_ns - self._newest.now_ns) * 1e-9
        self._longest_stall_s[self._stalled_place] = stall_s
        was_in_step = self._stalled_place in PARTS
        if was_in_step and len(timed.host_s) > 0:
            self._book_stall(timed)
        self._stalled_place = ""

    def _book_stall(self, timed: TimedSteps) -> None:
        """In the ledger, move what the stalled step took beyond a usual one from its longest part to stalled time."""
        step_s = timed.host_s[:, -1]
        stalled_step = int(step_s.argmax())
        part_s = timed.host_s[stalled_step, :-1]
        longest_part = int(part_s.argmax())
        usual_step_s = self.run.step_s or 0.0
        excess_s = max(float(part_s[longest_part]) - usual_step_s, 0.0)

        phase = PARTS[longest_part]
        self.ledger.seconds[terms.STALLED] += excess_s
        self.ledger.seconds[f"{STEPS}{phase}"] -= excess_s
        if phase in WAITING_PHASES:
            self._stalled_waiting_s += excess_s

    # -- the other ranks, and the status

    def _compare_ranks(self, now_ns: int, last: bool = False) -> None:
        """On rank 0, read the ranks' reports, and report which rank is late or silent. Skip unreadable reports."""
        self._compared_ns = now_ns
        if self.rank > 0 or self.world_size == 1:
            return
        reports = {}
        for rank in files.watched_ranks(self.folder):
            with suppress(RecordError, OSError):
                reports[rank] = files.read_status(self.folder, rank)
        self.output.add_events(
            self._ranks.judge(self._seconds_since_1970(now_ns), reports, last)
        )
        # The seconds that rank 0 waited in a stalled step are in the stalled time already.
        booked_s = min(self._stalled_waiting_s, self._ranks.waited_s)
        self._stalled_waiting_s -= booked_s
        waited_s = self._ranks.waited_s - booked_s
        waiting_terms = [f"{STEPS}{phase}" for phase in WAITING_PHASES]
        self.ledger.move(waited_s, terms.WAITING, waiting_terms)
        self._ranks.waited_s = 0.0
        self.output.write_lines()

    def _write_status(self, now_ns: int, has_ended: bool = False) -> None:
        """Write the status file, which shows how far the run has come and where its time went, and publish metrics."""
        ledger = self.ledger.terms(now_ns)
        if has_ended:
            phase = ""
            wall_s = (now_ns - self.ledger.began_ns) * 1e-9
        else:
            phase = self._place_name()
            # The time of the running step is in no term yet, so it would count as unexplained.
            ledger.pop(terms.UNEXPLAINED)
            wall_s = sum(ledger.values())
        status = files.WatchStatus(
            rank=self.rank,
            world_size=self.world_size,
            process=self._process,
            began_s=self._seconds_since_1970(self.ledger.began_ns),
            written_s=self._seconds_since_1970(now_ns),
            ended=has_ended,
            error=self.error,
            steps=self.run.steps,
            phase=phase,
            ledger=ledger,
            wall_s=wall_s,
            window=self.output.window,
            held_bytes=self._newest.held_bytes,
            traces=self.options.traces,
            timed=self.output.timed_steps,
            seconds=dict(zip(TIMED, self.output.seconds.tolist(), strict=True)),
            silent=self._ranks.silent,
            global_step=self._newest.global_step,
            resumed_at=self.resumed_at,
            repeated=self._repeated_steps,
        )
        self.output.write_status(status)
        if self.publish is not None:
            self.output.try_to_write(self.publish)
