"""Sends what a run says to the loggers of the user's own Trainer: figures, and the page and the trace as artifacts."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lm_profiler.measure.boundary import said
from lm_profiler.record.calls import require
from lm_profiler.record.figure import Place
from lm_profiler.record.quantities import QUANTITIES
from lm_profiler.record.run import RunRecord
from lm_profiler.usage_error import UsageError, expect

# seconds that a tracker has to take the figures: one that cannot reach its server must not hold up training
_PATIENCE_S = 10.0


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Where the results go beside the run's own folder.

    Args:
        trackers: Log the run's figures to each logger of the Trainer, as lm_profiler/<name> in SI units, when the
            stages are over: TensorBoard, CSV, W&B, MLflow, Comet, Neptune or any other.
        prometheus: While a run is watched, serve its metrics at [HOST:]PORT, on 127.0.0.1 if no host is named; each
            process of a node takes the next port.
        textfile: While a run is watched, write its metrics to this file, for node_exporter's textfile collector.
        otlp: While a run is watched, send its metrics by OpenTelemetry's protocol, as OTEL_EXPORTER_OTLP_* say.
    """

    trackers: bool = False
    prometheus: int | str | None = None
    textfile: Path | None = None
    otlp: bool = False

    @property
    def monitoring(self) -> bool:
        """Whether a watched run publishes metrics."""
        return self.prometheus is not None or self.textfile is not None or self.otlp

    def address(self) -> tuple[str, int]:
        """Return the host and the port of ``prometheus``.

        Raises:
            UsageError: it is no address.
        """
        host, _, port = str(self.prometheus).rpartition(":")
        good = port.isascii() and port.isdigit() and 0 < int(port) < 2**16
        expect(good, "export.prometheus", "[HOST:]PORT, as 9464", self.prometheus)
        return host or "127.0.0.1", int(port)

    def checked(self, watched: bool) -> ExportOptions:
        """Return these options of a run that is ``watched`` or not.

        Raises:
            UsageError: there is nothing to publish, or nowhere to.
            MissingExtra: a library that this needs is not installed.
        """
        if not self.monitoring:
            return self
        if not watched:
            raise UsageError("export: expected --watch=true with prometheus, textfile or otlp, given a run without it")
        if self.otlp:
            require("opentelemetry.exporter.otlp.proto.http", "export.otlp")
        if self.prometheus is not None or self.textfile is not None:
            require("prometheus_client", "export.prometheus")
        if self.textfile is not None and not self.textfile.absolute().parent.is_dir():
            raise UsageError(f"export.textfile: expected a file in a folder that is there, given {self.textfile}")
        if self.prometheus is not None:
            try:
                with socket.socket() as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server itself does
                    probe.bind(self.address())
            except OSError as error:
                at = f"{self.prometheus} ({error.strerror})"
                raise UsageError(f"export.prometheus: expected a port that is free, given {at}") from None
        return self


def figures(record: RunRecord) -> dict[str, float]:
    """Return the figures that files for programs have, by names that every tracker takes; unknown ones are left out."""
    known = {name: of.get(record) for name, of in QUANTITIES.items() if of.place <= Place.FILE and not of.is_text}
    return {
        f"lm_profiler/{name}": float(value)
        for name, value in known.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }


def send_figures(
    loggers: Sequence[Any],
    record: RunRecord,
    step: int,
    tell: Callable[[str], object],
    patience_s: float = _PATIENCE_S,
) -> None:
    """Log the figures of ``record`` to each of ``loggers`` as those of the Trainer's ``step``.

    What fails is told, and so is a logger that is not done after ``patience_s`` seconds: it may go on by itself.
    """
    values = figures(record)
    for logger in loggers:
        failed: list[BaseException] = []

        def log(logger: Any = logger, failed: list[BaseException] = failed) -> None:
            try:
                logger.log_metrics(values, step=step)
                logger.save()
            except BaseException as error:  # in a thread of its own nobody else would see it
                failed.append(error)

        # A thread, because only a thread can be left behind.
        thread = threading.Thread(target=log, name="lm_profiler-tracker", daemon=True)
        thread.start()
        thread.join(patience_s)
        name = type(logger).__name__
        if failed:
            tell(f"{name} did not take the figures: {said(failed[0])}")
        elif thread.is_alive():
            tell(f"{name} has not taken the figures within {patience_s:.0f} s; training goes on")
