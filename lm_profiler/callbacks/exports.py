"""Publishes the metrics of a watched run: for Prometheus, or in a file for node_exporter."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from lm_profiler.callbacks.instruments.profiling_options import ExportOptions
from lm_profiler.callbacks.live import (
    CountedBatches,
    LiveSums,
    StageFigures,
    live_figures,
)
from lm_profiler.measure.clocks.tape import TimedSteps
from lm_profiler.record.parts import PARTS
from lm_profiler.record.watch_files import rank_file_name

if TYPE_CHECKING:
    from prometheus_client.core import Metric

# the upper edges of the histogram's buckets: four per decade, from 1 ms to 100 s
_EDGES_S = 1e-3 * 10.0 ** (np.arange(21) / 4)


# by the name of a figure in ``live_figures``: the name and the help text of its gauge
_GAUGES = {
    "tokens_per_second": (
        "lm_profiler_tokens_per_second",
        "Tokens per second on this rank in the last steps.",
    ),
    "useful_tokens_per_second": (
        "lm_profiler_useful_tokens_per_second",
        "Tokens per second without padding, on this rank in the last steps.",
    ),
    "samples_per_second": (
        "lm_profiler_samples_per_second",
        "Samples per second on this rank in the last steps.",
    ),
    "mfu": ("lm_profiler_mfu_ratio", "Model FLOPs utilization of the last steps."),
    "data_share": (
        "lm_profiler_data_share_ratio",
        "Share of the time of the last steps spent waiting for data.",
    ),
}


@dataclass(eq=False)
class RunMetrics:
    """Sums over the steps of a watched run, to which the watch's thread adds: a collector of ``prometheus_client``."""

    # the labels of every metric: ``rank``, ``host`` and ``run``
    labels: Mapping[str, str]
    stages: StageFigures = field(default_factory=StageFigures)
    epoch_s: float = 0.0  # the time of day, in seconds since 1970, at which the clock of the steps is 0
    _lock: Lock = field(default_factory=Lock)
    # how many steps are in each bucket of the histogram; the last bucket has no upper edge
    _counts: NDArray[np.int64] = field(
        default_factory=lambda: np.zeros(len(_EDGES_S) + 1, np.int64)
    )
    # the seconds of each part over all steps, and last those of the steps
    _sums_s: NDArray[np.float64] = field(
        default_factory=lambda: np.zeros(len(PARTS) + 1)
    )
    _last_ns: int | None = None  # when the last step ended
    # the tokens of all steps; None if those of some are unknown
    _tokens: int | None = 0
    _recent_figures: Mapping[str, float] = field(default_factory=dict)
    # the bytes by their name: ``held`` and ``peak``
    _memory_bytes: dict[str, int] = field(default_factory=dict)

    def add(
        self,
        steps: TimedSteps,
        held_bytes: int | None,
        counted: CountedBatches | None = None,
    ) -> None:
        """Add timed steps, the bytes held after them, and the contents of their batches."""
        seconds = np.nan_to_num(steps.seconds)
        recent = LiveSums()
        recent.add_steps(steps)
        recent.add_batches(counted)
        with self._lock:
            if held_bytes is not None:
                peak_bytes = max(held_bytes, self._memory_bytes.get("peak", 0))
                self._memory_bytes = {"held": held_bytes, "peak": peak_bytes}
            if len(seconds) > 0:
                step_s = seconds[:, -1]  # the columns are the parts, the step last
                buckets = np.searchsorted(_EDGES_S, step_s)
                self._counts += np.bincount(buckets, minlength=len(self._counts))
                self._sums_s += seconds.sum(axis=0)
                self._last_ns = int(steps.end_ns[-1])
                self._recent_figures = live_figures(recent, self.stages)
            self._add_tokens(counted)

    def _add_tokens(self, counted: CountedBatches | None) -> None:
        """Add the tokens of the counted batches; if those of a batch are unknown, the sum is unknown from then on."""
        if counted is None:
            self._tokens = None
        elif counted.tokens is None:
            # Without steps there was no batch whose tokens are unknown.
            if counted.steps > 0:
                self._tokens = None
        elif self._tokens is not None:
            self._tokens += counted.tokens

    def collect(self) -> list[Metric]:
        """Return the metrics; ``prometheus_client`` calls this for each request, in a thread of its own."""
        with self._lock:
            return list(self._metrics())

    def _metrics(self) -> Iterator[Metric]:
        """Yield all metrics; the caller holds the lock."""
        yield self._step_metric()
        yield self._phase_metric()
        if self._tokens is not None:
            yield self._token_metric(self._tokens)
        yield self._memory_metric()
        for figure, (name, meaning) in _GAUGES.items():
            yield self._gauge(name, meaning, self._recent_figures.get(figure))
        last_s: float | None = None
        if self._last_ns is not None:
            last_s = self.epoch_s + self._last_ns * 1e-9
        name = "lm_profiler_last_step_timestamp_seconds"
        yield self._gauge(name, "Unix time at which the last step ended.", last_s)

    @property
    def _label_values(self) -> list[str]:
        return list(self.labels.values())

    def _step_metric(self) -> Metric:
        """Return the histogram of the durations of steps."""
        from prometheus_client.core import HistogramMetricFamily

        edges = [f"{edge:.4g}" for edge in _EDGES_S]
        counts_up_to_edge = np.cumsum(self._counts).tolist()
        buckets = list(zip([*edges, "+Inf"], counts_up_to_edge, strict=True))
        metric = HistogramMetricFamily(
            "lm_profiler_step_seconds",
            "Duration of a training step.",
            labels=list(self.labels),
        )
        metric.add_metric(self._label_values, buckets, float(self._sums_s[-1]))
        return metric

    def _phase_metric(self) -> Metric:
        """Return the summed seconds and the number of steps, for each phase."""
        from prometheus_client.metrics_core import SummaryMetricFamily

        metric = SummaryMetricFamily(
            "lm_profiler_phase_seconds",
            "Duration of a phase of a training step.",
            labels=[*self.labels, "phase"],
        )
        steps = int(self._counts.sum())
        for part, seconds in zip(PARTS, self._sums_s.tolist(), strict=False):
            metric.add_metric([*self._label_values, part], steps, seconds)
        return metric

    def _token_metric(self, tokens: float) -> Metric:
        """Return the counter of tokens that were trained on."""
        from prometheus_client.core import CounterMetricFamily

        metric = CounterMetricFamily(
            "lm_profiler_tokens",
            "Number of tokens in all batches so far.",
            labels=list(self.labels),
        )
        metric.add_metric(self._label_values, tokens)
        return metric

    def _memory_metric(self) -> Metric:
        """Return the gauges of the bytes in use between steps: now, and the highest so far."""
        from prometheus_client.core import GaugeMetricFamily

        metric = GaugeMetricFamily(
            "lm_profiler_memory_bytes",
            "Memory in use between two steps: current value and peak.",
            labels=[*self.labels, "kind"],
        )
        for kind, kind_bytes in self._memory_bytes.items():
            metric.add_metric([*self._label_values, kind], kind_bytes)
        return metric

    def _gauge(self, name: str, meaning: str, value: float | None) -> Metric:
        """Return a metric with one value, or without a value if it is unknown."""
        from prometheus_client.core import GaugeMetricFamily

        metric = GaugeMetricFamily(name, meaning, labels=list(self.labels))
        if value is not None:
            metric.add_metric(self._label_values, value)
        return metric


def metrics_of(
    folder: Path, rank: int, stages: StageFigures, epoch_s: float
) -> RunMetrics:
    """Return the metrics of a run in ``folder``; ``stages`` has the figures that its stages measured."""
    labels = {
        "rank": str(rank),
        "host": platform.node(),
        "run": f"{folder.parent.name}/{folder.name}",
    }
    return RunMetrics(labels, stages, epoch_s)


def publish(
    metrics: RunMetrics,
    options: ExportOptions,
    rank: int,
    local_rank: int,
    undo: ExitStack,
) -> Callable[[], object] | None:
    """Publish ``metrics`` as ``options`` request, until ``undo`` is closed.

    Returns:
        A function that writes the file anew; None without a file.
    """
    if not options.monitoring:
        return None
    from prometheus_client import (
        CollectorRegistry,
        start_http_server,
        write_to_textfile,
    )

    registry = CollectorRegistry()
    registry.register(metrics)
    if options.prometheus is not None:
        host, port = options.address()
        server, thread = start_http_server(port + local_rank, host, registry)
        # Called in the opposite order: first the server stops, at last its thread ends.
        undo.callback(thread.join, timeout=5.0)
        undo.callback(server.server_close)
        undo.callback(server.shutdown)
    if options.textfile is None:
        return None
    path = Path(options.textfile).absolute()
    path = path.with_name(rank_file_name(path.name, rank))
    write = partial(write_to_textfile, str(path), registry)
    write()
    return write
