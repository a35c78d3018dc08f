"""A fit that is watched: the ledger, the files, traces on demand, and a training that is as without."""

import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import psutil
import pytest
import torch
from faults import Manual, Tiny, assert_same_weights, called_places, fault_at, train_tiny
from known_loop import make_profiler, trainer_with
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from raised import refusal
from scripts import SUPPORT
from stored_texts import assert_stored
from torch.utils.data import DataLoader
from warm import exit_code_of, run_python, start_python

from lm_profiler.callbacks import TrainingProfiler, watching
from lm_profiler.cli.main import main
from lm_profiler.measure.counts.recompiles import compilations
from lm_profiler.measure.counts.step_reader import disjoint
from lm_profiler.record.calls import WRONG_CALL
from lm_profiler.record.parts import TIMED
from lm_profiler.record.quantities import count_text
from lm_profiler.record.watch_files import (
    STATUS,
    TraceRequest,
    WatchStatus,
    read_events,
    read_last_steps,
    read_status,
    read_windows,
    request_file,
)
from lm_profiler.report.run.watch_tables import watch_tables
from lm_profiler.usage_error import UsageError

pytestmark = pytest.mark.usefixtures("no_rates", "hands_over_often")
STEPS = 60


def watcher(measure_steps: int = 3) -> TrainingProfiler:
    return make_profiler(warmup=1, measure=measure_steps, watch=True)


def run_folder() -> Path:
    return max(Path("logs").glob("*/version_*"), key=lambda path: path.stat().st_mtime)


def status_between(began_s: float, took_s: float) -> WatchStatus:
    """The last status, whose ledger adds up to what the fit took from outside."""
    status = read_status(run_folder())
    assert status.ended
    assert sum(status.ledger.values()) == pytest.approx(status.wall_s, abs=1e-4)
    # An idle machine loses 1 ms here, a busy one more: test_ledger_of_fits holds it to 1 % on a clock of its own.
    assert abs(status.ledger.get("unexplained", 0.0)) <= 0.1 * status.wall_s
    assert status.wall_s <= took_s
    assert began_s <= status.began_s + 1e-3
    return status


def test_compilation_is_a_term_of_its_own() -> None:
    class Compiled(Tiny):
        def __init__(self) -> None:
            super().__init__()
            self.squares = torch.compile(lambda batch: batch.square().mean(), backend="eager")

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            self.squares(batch[: 2 if self.steps < 20 else 1])  # compiled once more
            return super().training_step(batch, batch_idx)

    module = Compiled()
    began_s, began = time.time(), time.perf_counter()
    train_tiny(Path(), [watcher()], lambda: module, max_steps=STEPS)
    status = status_between(began_s, time.perf_counter() - began)
    first, again = (compilation.ended_s - compilation.began_s for compilation in disjoint(compilations(began_s) or ()))
    assert status.ledger["compiling"] == pytest.approx(first + again, rel=0.01)
    assert status.ledger["first step"] > 0.0


def test_files_of_a_plain_run() -> None:
    train_tiny(Path(), [watcher()], max_steps=STEPS)
    status = read_status(run_folder())
    assert status.steps == STEPS
    assert status.goodput == pytest.approx(
        sum(seconds for term, seconds in status.ledger.items() if term.startswith("step: ")) / status.wall_s
    )
    assert read_last_steps(run_folder())["step"].tolist() == list(range(5, STEPS + 1))
    (window,) = read_windows(run_folder())
    assert (window.first_step, window.steps) == (5, STEPS - 4)
    phases_s = sum(sketch.sum for part, sketch in window.seconds.items() if part != "step")
    assert window.seconds["step"].sum == pytest.approx(phases_s)
    assert not (run_folder() / "events.jsonl").exists() or read_events(run_folder())


@pytest.mark.parametrize("quiet", [True, False])
def test_a_watched_run_ends_with_its_number_of_events(quiet: bool, capsys: pytest.CaptureFixture[str]) -> None:
    train_tiny(Path(), [make_profiler(warmup=1, measure=3, watch=True, quiet=quiet)], max_steps=STEPS)
    lines = [line for line in capsys.readouterr().err.splitlines() if "watched" in line]
    events = count_text(len(read_events(run_folder())), "event")
    line = f"lm_profiler: watched {STEPS} steps, {events}: lm_profiler watch {run_folder()}"
    assert lines == ([] if quiet else [line])


def test_a_sleep_in_a_place_without_a_name_is_unexplained(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = watching.Watching._step_ended

    def sleeping(self: watching.Watching) -> int:
        left = ours(self)
        if self.steps == 30:
            time.sleep(0.1)
        return left

    monkeypatch.setattr(watching.Watching, "_step_ended", sleeping)
    train_tiny(Path(), [watcher()], max_steps=STEPS)
    assert 0.095 <= read_status(run_folder()).ledger["unexplained"] <= 0.14


class Loaded(Tiny):
    """Each batch takes 20 ms to load."""

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        def slowly(samples: list[torch.Tensor]) -> torch.Tensor:
            time.sleep(0.02)
            return torch.stack(samples)

        return DataLoader(torch.randn(30, 4), batch_size=1, collate_fn=slowly)


@pytest.mark.parametrize("stages", [4, 30])  # steps: an epoch has thirty
def test_the_first_watched_step_has_its_batch(stages: int) -> None:
    train_tiny(Path(), [watcher(stages - 1)], Loaded, max_steps=40)
    rows = read_last_steps(run_folder())
    assert rows["step"].tolist() == list(range(stages + 1, 41))
    data_s = rows["seconds"][:, TIMED.index("data")]
    assert data_s.min() >= 0.02
    assert read_status(run_folder()).ledger["unexplained"] <= 0.02  # less than one batch that has no name


def test_the_peak_of_a_window_is_that_of_its_steps() -> None:
    allocates = {30: lambda: torch.ones(2**26)}  # 256 MiB, of which nothing is held at the step's end
    train_tiny(Path(), [watcher()], lambda: Tiny(allocates), max_steps=STEPS)
    window = read_windows(run_folder())[-1]
    assert window.peak_bytes - window.held_bytes >= 2**27


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux counts the pages of files apart")
def test_pages_of_a_mapped_file_are_not_held_but_a_tensor_is() -> None:
    """A step reads the first 128 MiB of torch's library through a map of its own, and a later one fills a tensor."""
    kept: list[Any] = []
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"

    def read_mapped_file() -> None:
        kept.append(np.memmap(library, mode="r", shape=2**27))
        kept[-1].max()

    def held_bytes(step: Callable[[], None]) -> int:
        train_tiny(Path(), [watcher()], lambda: Tiny({30: step}), max_steps=STEPS)
        return read_status(run_folder()).held_bytes or 0

    before = held_bytes(lambda: None)
    resident_before = psutil.Process().memory_info().rss
    after_map = held_bytes(read_mapped_file)
    assert psutil.Process().memory_info().rss - resident_before >= 2**26
    after_tensor = held_bytes(lambda: kept.append(torch.ones(2**25)))
    assert after_map - before < 2**25
    assert after_tensor - after_map >= 2**26


def test_a_resumed_training_counts_the_steps_that_it_repeats(tmp_path: Path) -> None:
    """It crashed after 37 steps, and goes on from the checkpoint of step 20 until step 60."""

    def fit(module: Tiny, **options: Any) -> WatchStatus:
        saving = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=20, save_top_k=-1)
        trainer_with([saving, watcher()], tmp_path, max_steps=60, enable_checkpointing=True).fit(module, **options)
        return read_status(run_folder())

    warnings.simplefilter("ignore")  # of the folder, which has a checkpoint by then
    with pytest.raises(RuntimeError, match="crashed"):
        fit(Tiny({37: Mock(side_effect=RuntimeError("crashed"))}))
    status = fit(Tiny(), ckpt_path=tmp_path / "step=20.ckpt")
    assert status.resumed_at == 20
    assert (status.steps, status.global_step) == (60 - 20, 60)
    assert status.repeated == 37 - 20
    assert "checkpoints" in status.ledger


class Asking(Callback):
    """Asks for a trace after the tenth step."""

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 10:
            TraceRequest(steps=2).write(request_file(run_folder(), 0))
        if trainer.global_step > 10:
            time.sleep(0.04)


@pytest.mark.parametrize("make", [Tiny, Manual])
def test_watching_and_tracing_leave_the_weights_unchanged(make: type[Tiny]) -> None:
    plain = train_tiny(Path(), [], make, max_steps=STEPS)
    module = train_tiny(Path(), [Asking(), watcher()], make, max_steps=STEPS)
    assert_same_weights(plain, module)
    (_trace,) = (run_folder() / "trace").glob("rank0.step*.kernels.json")
    assert not request_file(run_folder(), 0).exists()
    assert read_status(run_folder()).steps == STEPS


class StallingWhileTraced(Asking):
    """Takes a second in a step that is traced."""

    stalled_step: int | None = None

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        super().on_train_batch_end(trainer)
        if torch.autograd._profiler_enabled() and self.stalled_step is None:
            self.stalled_step = trainer.global_step
            time.sleep(1.0)


def test_a_stall_in_a_step_that_the_watch_traces_is_reported() -> None:
    callback = StallingWhileTraced()
    train_tiny(Path(), [callback, watcher()], max_steps=STEPS)
    slow = [event for event in read_events(run_folder()) if event.kind == "slow step" and event.now > 0.9]
    assert [(event.step, event.cause) for event in slow] == [(callback.stalled_step, "callback: StallingWhileTraced")]


class Harming(Callback):
    """Takes the run's folder away, or puts a folder where its files are, amid training."""

    def __init__(self, how: str) -> None:
        self.how = how

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 20:
            here = run_folder()
            if self.how == "folder":
                here.rename(here.with_name("elsewhere"))
            for path in here.glob("*.bin") if self.how == "files" else ():
                path.unlink()
                path.mkdir()
        if trainer.global_step > 20:
            time.sleep(0.002)


@pytest.mark.parametrize("how", ["folder", "files"])
def test_unwritable_files_do_not_disturb_training(how: str, capsys: pytest.CaptureFixture[str]) -> None:
    plain = train_tiny(Path(), [], max_steps=STEPS)
    assert_same_weights(plain, train_tiny(Path(), [Harming(how), watcher()], max_steps=STEPS))
    assert capsys.readouterr().err.count("cannot be written") == 1


def test_a_fault_in_any_function_of_the_watch_harms_nothing() -> None:
    """In every third of those that a training of one or two hand-overs calls."""
    steps = 20
    plain = train_tiny(Path(), [], max_steps=steps)
    calls = called_places(lambda: train_tiny(Path(), [watcher()], max_steps=steps))
    of_the_watch = [place for place in calls if "callbacks/watch" in place[0].co_filename]
    assert len(of_the_watch) >= 10
    for place in of_the_watch[::3]:
        code, _ = place
        if code.co_name == "checked":
            continue
        with fault_at(place, RuntimeError("planted"), time=min(calls[place], 3)):
            module = train_tiny(Path(), [watcher()], max_steps=steps)
        assert module.steps == steps, place
        assert_same_weights(plain, module)


def test_a_killed_training_loses_a_second_of_its_rows_at_most(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    process = start_python(str(SUPPORT / "watched_killed.py"), str(tmp_path), out=tmp_path / "out")
    deadline = time.monotonic() + 60.0
    runs: list[Path] = []
    while not runs or len(read_last_steps(runs[0])) < 300:
        assert time.monotonic() < deadline
        time.sleep(0.05)
        runs = list(tmp_path.glob("*/version_0"))
    (run,) = runs
    killed_ns = time.perf_counter_ns()
    process.kill()
    assert exit_code_of(process) == -signal.SIGKILL
    last = read_last_steps(run)[-1]
    assert killed_ns - last["begin_ns"] <= 1.5e9  # a second, and what a busy machine takes to write
    assert last["step"] - read_status(run).steps <= 500  # of two hand-overs, in steps of 4 ms
    for verb in ("watch", "trace"):
        assert main([verb, str(run)]) == WRONG_CALL
        assert "was killed" in capsys.readouterr().err


@pytest.mark.parametrize("error", [RuntimeError("theirs"), KeyboardInterrupt()])
def test_a_training_that_fails_leaves_its_ledger(error: BaseException) -> None:
    began_s, began = time.time(), time.perf_counter()
    with pytest.raises((RuntimeError, KeyboardInterrupt, SystemExit)):
        train_tiny(Path(), [watcher()], lambda: Tiny({30: Mock(side_effect=error)}), max_steps=STEPS)
    status = status_between(began_s, time.perf_counter() - began)
    assert (status.steps, status.error) == (30, type(error).__name__)
    assert f"failed with {type(error).__name__}" in watch_tables(run_folder())[0].above[0]


def test_fits_of_two_trainers_in_turns_are_watched_each_in_its_own_folder(tmp_path: Path) -> None:
    profiler = watcher()
    trainers = [trainer_with([profiler], tmp_path / name, max_steps=1) for name in ("first", "second")]
    modules = [Tiny(), Tiny()]
    for turn in (1, 2):
        for trainer, module in zip(trainers, modules, strict=True):
            trainer.fit_loop.epoch_loop.max_steps = 20 * turn
            trainer.fit(module)
    watched = sorted(Path("logs").glob("*/version_*"))
    assert [read_status(path).steps for path in watched] == [20, 20, 20, 20]


def test_wrong_options_of_a_profiler_are_refused() -> None:
    wrong = ({"watch": "yes"}, {"verb": "x"}, {"log_dir": "a\nb"}, {"verb": "validate", "watch": True})
    messages = {f"{of}": refusal(UsageError, lambda of=of: TrainingProfiler(**of)) for of in wrong}
    assert_stored("callbacks/refused: a profiler's options", messages)


def test_a_run_may_be_watched_without_measuring() -> None:
    train_tiny(Path(), [watcher(measure_steps=0)], max_steps=STEPS)
    assert read_status(run_folder()).steps == STEPS
    for warmup, watch in ((1, False), (0, True)):
        with pytest.raises(UsageError, match="measure_steps"):
            make_profiler(warmup, measure=0, watch=watch)


def test_a_late_rank_of_two_is_reported(tmp_path: Path) -> None:
    done = run_python(
        str(SUPPORT / "watched_ranks.py"), str(tmp_path), environment={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    (left,) = tmp_path.glob("*/version_0")
    status = read_status(left)
    late_s = status.timed * 0.02
    assert sum(status.ledger.values()) == pytest.approx(status.wall_s, abs=1e-4)
    assert status.wall_s == pytest.approx(float(done.stdout.split()[-1]), rel=0.01, abs=0.1)
    assert abs(status.ledger.get("unexplained", 0.0)) <= max(0.01 * status.wall_s, 0.03)
    # Rank 1 sleeps at least as long as it is told to; a busy machine delays both ranks further, in any part.
    assert status.ledger["waiting for ranks"] >= 0.5 * late_s
    late = [event for event in read_events(left) if event.kind == "rank late"]
    late_in_data = [event for event in late if (event.rank, event.part) == (1, "data")]
    assert late_in_data
    assert late_in_data[-1].cost_s is not None


def test_a_run_that_ends_within_its_stages_is_not_watched() -> None:
    train_tiny(Path(), [watcher()], max_steps=2)
    assert not (run_folder() / STATUS).exists()
