"""The figures of a run in the user's own loggers, and what monitoring gets of a watched run."""

import json
import re
import socket
import time
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest
from faults import assert_same_weights, train_tiny
from known_loop import make_profiler
from lightning.pytorch import Callback, Trainer
from prometheus_client.parser import text_string_to_metric_families
from raised import refusal
from stored_texts import assert_stored

from lm_profiler.callbacks import ExportOptions, TrainingProfiler
from lm_profiler.callbacks.exports import RunMetrics
from lm_profiler.callbacks.live import CountedBatches, StageFigures
from lm_profiler.measure.clocks.tape import TimedSteps
from lm_profiler.record.watch_files import read_last_steps, read_status
from lm_profiler.usage_error import UsageError

pytestmark = pytest.mark.usefixtures("hands_over_often")
STEPS = 60


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def watcher(**export: Any) -> TrainingProfiler:
    return make_profiler(warmup=1, measure=3, watch=True, export=ExportOptions(**export))


def folder() -> Path:
    return max(Path("logs").glob("*/version_*"), key=lambda path: path.stat().st_mtime)


def samples_in(text: str) -> dict[tuple[str, ...], float]:
    """Return samples by name and labels."""
    return {
        (sample.name, *(sample.labels[name] for name in ("phase", "kind", "le") if name in sample.labels)): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


class Asking(Callback):
    """Asks for the metrics amid training, until there are some."""

    def __init__(self, port: int) -> None:
        self.port, self.scraped = port, ""

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step > STEPS // 2 and "timestamp_seconds{" not in self.scraped:
            with urlopen(f"http://127.0.0.1:{self.port}/metrics") as answer:
                self.scraped = answer.read().decode()
        time.sleep(0.002)


def test_published_sums_are_those_of_the_runs_own_files(port: int) -> None:
    plain, asking = train_tiny(Path(), [], max_steps=STEPS), Asking(port)
    before_s = time.time()
    module = train_tiny(Path(), [asking, watcher(prometheus=port, textfile="lm.prom")], max_steps=STEPS)
    assert_same_weights(plain, module)
    amid, last = samples_in(asking.scraped), samples_in(Path("lm.prom").read_text())
    rows = read_last_steps(folder())
    assert 0 < amid["lm_profiler_step_seconds_count",] <= last["lm_profiler_step_seconds_count",] == len(rows)
    assert last["lm_profiler_step_seconds_sum",] == pytest.approx(rows["seconds"][:, -1].sum(), rel=1e-4)
    forward = read_status(folder()).seconds["forward"]
    assert last["lm_profiler_phase_seconds_sum", "forward"] == pytest.approx(forward, rel=1e-4)
    within = [last["lm_profiler_step_seconds_bucket", f"{edge:.4g}"] for edge in (1e-3, 1e-2, 1e-1, 1.0)]
    assert within == [(rows["seconds"][:, -1] <= edge).sum() for edge in (1e-3, 1e-2, 1e-1, 1.0)]
    assert before_s < last["lm_profiler_last_step_timestamp_seconds",] < time.time()
    assert last["lm_profiler_memory_bytes", "peak"] >= last["lm_profiler_memory_bytes", "held"] > 0
    with pytest.raises(OSError, match="refused"):
        urlopen(f"http://127.0.0.1:{port}/metrics")  # the fit is over


def test_an_address_or_a_file_that_is_none_is_refused_before_the_run(port: int) -> None:
    for address in ("x", 0):
        with pytest.raises(UsageError, match=r"^export\.prometheus: expected .* given "):
            watcher(prometheus=address)
    with pytest.raises(UsageError, match="--watch=true"):
        TrainingProfiler(export=ExportOptions(textfile=Path("lm.prom")))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        with pytest.raises(UsageError, match=rf"^export\.prometheus: .* 127\.0\.0\.1:{port} \(Address already in use"):
            watcher(prometheus=port)
    files = ("no/lm.prom", ".")
    messages = {file: refusal(UsageError, lambda file=file: watcher(textfile=Path(file))) for file in files}
    assert_stored("callbacks/refused: a file for metrics", messages)


FAILED = {"port": "callbacks/notes: no port", "file": "callbacks/notes: no file"}


@pytest.mark.parametrize("of", FAILED)
def test_training_goes_on_if_nothing_can_be_published(of: str, port: int, capsys: pytest.CaptureFixture[str]):
    plain = train_tiny(Path(), [], max_steps=STEPS)
    Path("gone").mkdir()
    ours = watcher(prometheus=port) if of == "port" else watcher(textfile=Path("gone/lm.prom"))
    Path("gone").rmdir()
    with socket.socket() as taken:  # since then
        taken.bind(("127.0.0.1", port))
        taken.listen()
        assert_same_weights(plain, train_tiny(Path(), [ours], max_steps=STEPS))
    message = capsys.readouterr().err.partition(": '")[0]  # a file's name has the process and the thread in it
    assert_stored(FAILED[of], {"stderr": message})
    assert read_status(folder()).steps == STEPS


def test_the_dashboard_names_existing_metrics() -> None:
    docs = Path(__file__).parents[2] / "docs"
    metrics = RunMetrics({"rank": "0"}, StageFigures(mfu_seconds=1.0, tokens_per_step=1.0))
    step = TimedSteps(np.zeros(1, int), np.ones(1, int), np.ones((1, 9)), np.ones((1, 9)))
    metrics.add(step, held_bytes=1, counted=CountedBatches(steps=1, tokens=1, samples=1, useful_tokens=1))
    families = list(metrics.collect())
    known = {sample.name for family in families for sample in family.samples}
    dashboard, page = (docs / "grafana.json").read_text("utf-8"), (docs / "how-to/monitoring.md").read_text("utf-8")
    assert set(re.findall(r"\blm_profiler_\w+", dashboard)) <= known
    assert set(re.findall(r"\blm_profiler_\w+", page)) <= known | {family.name for family in families}
    queries = [target["expr"] for panel in json.loads(dashboard)["panels"] for target in panel["targets"]]
    assert all(query.count("(") == query.count(")") for query in queries)
