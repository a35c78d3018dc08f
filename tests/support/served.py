"""Asks the plugin inside TensorBoard's own application, without a browser."""

import gzip
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tensorboard.plugins.base_plugin import TBContext
from werkzeug.test import Client, TestResponse

from lm_profiler.tensorboard.tab.plugin import LMProfilerPlugin

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # of a copy of html5lib that TensorBoard carries
    from tensorboard.backend.application import TensorBoardWSGI

Get = Callable[..., TestResponse]


def get_from(logdir: str, flags: Any = None) -> Get:
    """Asks the plugin over the log folder ``logdir``, or over those that ``flags`` name."""
    client = Client(TensorBoardWSGI([LMProfilerPlugin(TBContext(logdir=logdir, flags=flags))]))

    def get(route: str, buffered: bool = True, **arguments: str) -> TestResponse:
        return client.get(f"/data/plugin/lm_profiler/{route}", query_string=arguments, buffered=buffered)

    return get


def write_trace(run: Path, name: str = "rank0.pt.trace.json.gz", content: bytes = b"{}") -> bytes:
    """Write a trace into the run's folder; its compressed bytes."""
    path = run / "trace" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(packed := gzip.compress(content))
    return packed
