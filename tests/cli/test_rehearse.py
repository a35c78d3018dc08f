"""Rehearsed steps against real ones, whose every allocation torch's profiler records."""

import gc
import json
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import rehearsed
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers.logger import DummyLogger

from lm_profiler.analysis.plan.planned import Planned
from lm_profiler.analysis.remedies.catalogue import remedies
from lm_profiler.cli.rehearse import Unplanned, start_rehearsal, wait_for_plan
from lm_profiler.record.run_record import read_run
from lm_profiler.training import FakeTokens, LanguageModel

SMALL = {"d_model": 64, "d_ff": 256, "num_layers": 3, "num_heads": 4, "vocab_size": 500}

BATCH, CONTEXT, ACCUMULATED = 4, 64, 3
GPU_TOLERANCE = 0.02


def options(precision: str, **model: Any) -> list[str]:
    given = {f"model.{key}": value for key, value in (SMALL | model).items()}
    given |= {"trainer.precision": precision, "data.batch_size": BATCH, "data.context_length": CONTEXT}
    given |= {"trainer.accumulate_grad_batches": ACCUMULATED}
    return [f"--{key}={str(value).lower()}" for key, value in given.items()]


def real_peak(folder: Path, make: Callable[[], LightningModule], data: FakeTokens | None = None, **options: Any) -> int:
    """Most bytes that CPU tensors held at one time in two steps, from nothing on."""
    from torch.profiler import ProfilerActivity, profile

    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        default_root_dir=folder,
        **({"logger": False, "max_steps": 2} | options),
        **dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False),
    )
    gc.collect()  # what an earlier test left would be freed amid this run, and taken off what it holds
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            trainer.fit(make(), datamodule=data)
    profiler.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    held = most = 0
    for event in sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["ts"]):
        held += event["args"]["Bytes"]
        most = max(most, held)
    return most


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_gpu_gives_out_what_was_planned(tmp_path: Path, precision: str) -> None:
    """In a process of its own: cuBLAS may have its workspaces here already."""
    call = ["fit", *options(precision)]
    planned = wait_for_plan(start_rehearsal(call, torch.cuda.get_device_capability(), fresh=True))
    steps = ("--stages.warmup_steps=2", "--stages.measure_steps=3", "--memory.steps=1", "--trace.steps=0")
    stages = (*steps, "--actions.steps=0", "--check_memory=false", f"--log_dir={tmp_path}")
    subprocess.run([sys.executable, "-m", "lm_profiler", *call, *stages], check=True, capture_output=True)
    (found,) = tmp_path.rglob("run.json")
    memory = read_run(found.parent).memory
    assert memory.measured.allocated_peak == pytest.approx(planned.peak, rel=GPU_TOLERANCE)
    assert memory.measured.reserved_peak == pytest.approx(planned.reserved, rel=0.05)
    for phase, peak in planned.peaks.items():
        assert memory.parts[phase].allocated_peak == pytest.approx(peak, rel=GPU_TOLERANCE), phase


def test_a_rehearsed_step_has_the_memory_and_work_of_a_real_one(tmp_path: Path) -> None:
    precision, model = "bf16-mixed", {"attention": "math", "activation_checkpointing": True}
    planned = wait_for_plan(start_rehearsal(["fit", *options(precision, **model)], gpu=None, fresh=True))
    on_a_gpu = wait_for_plan(start_rehearsal(["fit", *options(precision, **model)], gpu=(9, 0), fresh=True))
    assert isinstance(on_a_gpu, Planned)  # recomputed as it was
    run = {"precision": precision, "accumulate_grad_batches": ACCUMULATED}
    real = real_peak(tmp_path, lambda: LanguageModel(**SMALL, **model), FakeTokens(BATCH, CONTEXT), **run)
    assert planned.peak == pytest.approx(real, rel=0.01)

    d, d_ff, layers, vocab = SMALL["d_model"], SMALL["d_ff"], SMALL["num_layers"], SMALL["vocab_size"]
    layer = 2 * BATCH * CONTEXT * (4 * d * d + 3 * d * d_ff) + 4 * BATCH * CONTEXT**2 * d
    forward = layers * layer + 2 * BATCH * CONTEXT * d * vocab
    work = planned.work
    assert sum(work["forward"].flops.values()) == ACCUMULATED * forward
    # Recomputed is what backward needs: not the product that a layer ends with.
    again = layers * (layer - 2 * BATCH * CONTEXT * d * d_ff)
    assert sum(work["backward"].flops.values()) == ACCUMULATED * (2 * forward + again)
    assert set(work["backward"].flops) <= {"bfloat16", "float32"}
    # AdamW reads the gradient, reads and writes a weight and two states of its size, and counts steps of each tensor.
    weights, tensors = LanguageModel(**SMALL).config.num_parameters(), layers * 9 + 3
    assert work["optimizer"].bytes == 28 * weights + 8 * tensors

    # The options of the call decide what else would be tried.
    ways = ["--model.attention=sdpa", "--trainer.precision=bf16-true", "--model.optimizer=sgd"]
    assert [" ".join(way.words) for way in remedies(planned)] == ways


def rehearsed_plan(kind: type[LightningModule], *more: str) -> Planned | Unplanned:
    call = ["fit", f"--model=rehearsed.{kind.__name__}", "--data=null", "--trainer.max_steps=2", *more]
    return wait_for_plan(start_rehearsal(call, gpu=None, fresh=True))


@pytest.mark.parametrize("kind", [rehearsed.Everything, rehearsed.Tells, rehearsed.SaysFloat])
def test_a_rehearsed_module_holds_what_a_real_one_does(kind: type[LightningModule], tmp_path: Path) -> None:
    planned = rehearsed_plan(kind)
    logger = DummyLogger()
    assert planned.peak == pytest.approx(real_peak(tmp_path, kind, logger=logger, max_steps=4), rel=0.01)
    assert (len({*planned.steps}) > 1) == (kind is rehearsed.Tells)
    (line,) = planned.taken_for_one or [""]
    assert line.startswith("rehearsed.py, line ") == (kind is rehearsed.SaysFloat)


def test_frozen_and_shared_weights_are_planned(tmp_path: Path) -> None:
    planned = rehearsed_plan(rehearsed.Plain, "--trainer.callbacks+=rehearsed.Freezes")
    real_bytes = real_peak(tmp_path, rehearsed.Plain, callbacks=[rehearsed.Freezes()])
    assert planned.peak == pytest.approx(real_bytes, rel=0.01)
    causes = planned.causes["optimizer"]
    assert causes.gradients == 4 * rehearsed.IDS * rehearsed.WIDTH  # of the head alone
    assert causes.parameters == 2 * causes.gradients
    # By as much a real one's peak grows: 17,106,816 bytes for a module of 4,276,704 weights, on one rank with gloo.
    alone, one_of_many = rehearsed_plan(rehearsed.Plain), rehearsed_plan(rehearsed.Plain, "--trainer.strategy=ddp")
    assert one_of_many.buckets == one_of_many.peak - alone.peak == 2 * 4 * rehearsed.IDS * rehearsed.WIDTH


def test_growing_steps_have_no_plan() -> None:
    planned = rehearsed_plan(rehearsed.KeepsAll)
    assert planned.growth == 4 * rehearsed.WIDTH
    assert planned.peak == planned.steps[-1]


def test_attention_alone_is_planned() -> None:
    planned = wait_for_plan(start_rehearsal(["fit", "--config=attention"], gpu=None, fresh=True))
    assert planned.causes["forward"].parameters == 3 * 4 * 8 * 1024 * 64  # Q, K and V


@pytest.mark.parametrize(
    "kind, reason",
    [
        (rehearsed.DecidesByValue, r"depends on the values.* \(rehearsed.py, line \d+\)"),
        (rehearsed.Recurrent, r"LSTM kernel keeps for backward.* \(rehearsed.py, line \d+\)"),
        (rehearsed.SaysCuda, r"Error: .*\bcuda\b.* \(rehearsed.py, line \d+\)"),
        (rehearsed.LacksAFile, r"FileNotFoundError: .*nowhere.ckpt.* \(rehearsed.py, line \d+\)"),
        (rehearsed.Exits, "exit code 3"),
        (rehearsed.HasNoBatches, r"^OSError: no memory to share \(rehearsed.py, line \d+\)$"),
        (rehearsed.SparseBatches, "^a batch holds a tensor of torch.sparse_coo"),
    ],
    ids=lambda given: getattr(given, "__name__", ""),
)
def test_a_missing_plan_has_a_reason(kind: Any, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    unplanned = rehearsed_plan(kind)
    assert re.search(reason, unplanned.reason)
    assert not [*tmp_path.iterdir()]


def test_a_rehearsal_ends_before_the_files_of_a_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert isinstance(rehearsed_plan(rehearsed.WritesAtTheEnd), Planned)
    assert not [*tmp_path.iterdir()]
