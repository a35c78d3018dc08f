"""Publishes the metrics of a watched run: for Prometheus, or in a file for node_exporter."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lm_profiler.callbacks.instruments.profiling_options import ExportOptions
from lm_profiler.measure.clocks.tape import TimedSteps
from lm_profiler.record.parts import PARTS
from lm_profiler.record.quantities import QUANTITIES
from lm_profiler.record.run_record import RunRecord
from lm_profiler.record.steps import StepRow
from lm_profiler.record.watch_files import rank_file_name

if TYPE_CHECKING:
    from prometheus_client.core import Metric

# upper ends of the histogram's buckets: four a decade, from 1 ms to 100 s
_EDGES_S = 1e-3 * 10.0 ** (np.arange(21) / 4)


@dataclass(eq=False)
class RunMetrics:
    """The sums of a watched run, which the watch's thread adds to, as a collector of ``prometheus_client``."""

    labels: Mapping[str, str]  # of every metric: ``rank``, ``host`` and ``run``
    tokens_per_step: float | None = None  # of this rank; None: unknown, and so is their sum
    mfu_seconds: float | None = None  # the model FLOPs utilization of a step of one second; None is unknown
    epoch_s: float = 0.0  # seconds since 1970 at 0 of the clock of the steps
    _lock: Lock = field(default_factory=Lock)
    _counts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(len(_EDGES_S) + 1, np.int64))
    _sums_s: NDArray[np.float64] = field(default_factory=lambda: np.zeros(len(PARTS) + 1))
    _last_ns: int | None = None
    _mean_s: float | None = None
    _bytes: dict[str, int] = field(default_factory=dict)

    def add(self, steps: TimedSteps, held_bytes: int | None) -> None:
        seconds = np.nan_to_num(steps.seconds)
        with self._lock:
            if held_bytes is not None:
                self._bytes = {"held": held_bytes, "peak": max(held_bytes, self._bytes.get("peak", 0))}
            if len(seconds):
                at = np.searchsorted(_EDGES_S, seconds[:, -1])
                self._counts += np.bincount(at, minlength=len(self._counts))
                self._sums_s += seconds.sum(axis=0)
                self._last_ns, self._mean_s = int(steps.end_ns[-1]), float(seconds[:, -1].mean())

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics; ``prometheus_client`` calls this for each request."""
        from prometheus_client import core
        from prometheus_client.metrics_core import SummaryMetricFamily

        with self._lock:
            counts, sums_s, held = self._counts.copy(), self._sums_s.tolist(), dict(self._bytes)
            last_ns, mean_s = self._last_ns, self._mean_s
        names, values, steps = list(self.labels), list(self.labels.values()), int(counts.sum())
        edges = [*(f"{edge:.4g}" for edge in _EDGES_S), "+Inf"]
        step = core.HistogramMetricFamily("lm_profiler_step_seconds", "Duration of a training step.", labels=names)
        step.add_metric(values, list(zip(edges, np.cumsum(counts).tolist(), strict=True)), sums_s[-1])
        yield step
        meaning = "Duration of a phase of a training step."
        phase = SummaryMetricFamily("lm_profiler_phase_seconds", meaning, labels=[*names, "phase"])
        for part, seconds in zip(PARTS, sums_s, strict=False):
            phase.add_metric([*values, part], steps, seconds)
        yield phase
        if self.tokens_per_step is not None:
            tokens = core.CounterMetricFamily("lm_profiler_tokens", "Tokens that were trained on.", labels=names)
            tokens.add_metric(values, steps * self.tokens_per_step)
            yield tokens
        mfu = self.mfu_seconds / mean_s if self.mfu_seconds is not None and mean_s else None
        ended_s = None if last_ns is None else self.epoch_s + last_ns * 1e-9
        gauges: dict[tuple[str, ...], Mapping[Any, float | None]] = {
            ("lm_profiler_memory_bytes", "Memory in use between two steps, now and at most.", "kind"): held,
            ("lm_profiler_mfu_ratio", "Model FLOPs utilization of the last steps."): {(): mfu},
            ("lm_profiler_last_step_timestamp_seconds", "When the last step ended, since 1970."): {(): ended_s},
        }
        for (name, meaning, *kinds), known in gauges.items():
            gauge = core.GaugeMetricFamily(name, meaning, labels=[*names, *kinds])
            for kind, value in known.items():
                if value is not None:
                    gauge.add_metric([*values, *([kind] if kind else [])], value)
            yield gauge


def metrics_of(
    folder: Path, rank: int, rows: Sequence[StepRow], record: RunRecord | None, epoch_s: float
) -> RunMetrics:
    tokens = [row.tokens for row in rows if row.stage == "measure" and row.tokens is not None]
    mfu, step_s = (None if record is None else QUANTITIES[name].get(record) for name in ("mfu", "step_s"))
    return RunMetrics(
        {"rank": str(rank), "host": platform.node(), "run": f"{folder.parent.name}/{folder.name}"},
        sum(tokens) / len(tokens) if tokens else None,
        mfu * step_s if mfu and step_s else None,
        epoch_s,
    )


def publish(
    metrics: RunMetrics, options: ExportOptions, rank: int, local_rank: int, undo: ExitStack
) -> Callable[[], object] | None:
    """Publish ``metrics`` as ``options`` say until ``undo`` is closed; return what writes the file, if there is one."""
    write: Callable[[], object] | None = None
    if options.prometheus is not None or options.textfile is not None:
        from prometheus_client import CollectorRegistry, start_http_server, write_to_textfile

        registry = CollectorRegistry()
        registry.register(metrics)
        if options.prometheus is not None:
            host, port = options.address()
            server, thread = start_http_server(port + local_rank, host, registry)
            undo.callback(thread.join, 5.0)
            undo.callback(server.server_close)
            undo.callback(server.shutdown)
        if options.textfile is not None:
            path = Path(options.textfile).absolute()
            path = path.with_name(rank_file_name(path.name, rank))
            write = partial(write_to_textfile, str(path), registry)
            write()
    return write
