"""The work of steps that a program compiles by itself is that of the same steps without a compiler."""

import importlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import warm
from scripts import SUPPORT
from sent_steps import CompiledPart

from lm_profiler.callbacks.instruments.sent_step import without_data
from lm_profiler.callbacks.instruments.work import StepWork, count_elsewhere
from lm_profiler.callbacks.trainer_loop import TrainerLoop
from lm_profiler.external_loops import VARIABLE
from lm_profiler.record.run_record import read_run

ROWS, WIDTH, LAYERS = 16, 32, 3
LAYER = 2 * ROWS * WIDTH * WIDTH


@pytest.mark.parametrize("way", ["submodule", "loss"])
def test_a_script_that_compiles_counts_as_on_paper(way: str, tmp_path: Path) -> None:
    """``run`` sets the variable, and becomes the program: ``test_run.py``."""
    request = {"options": {"warmup_steps": 2, "measure_steps": 3, "trace_steps": 1, "action_steps": 0}}
    environment = {**os.environ, VARIABLE: json.dumps(request)}
    done = warm.run_python(str(SUPPORT / "compiled_ways.py"), way, folder=tmp_path, environment=environment)
    assert done.returncode == 0, done.stderr
    record = read_run(tmp_path / "logs" / "lm_profiler" / "version_0")
    assert record.utilisation is not None, record.notes
    flops = record.utilisation.flops
    # The first layer needs no gradient of its input.
    assert (flops.forward, flops.backward, flops.recomputation) == (LAYERS * LAYER, (2 * LAYERS - 1) * LAYER, 0)


def test_a_module_with_a_compiled_part_counts_as_on_paper(tmp_path: Path) -> None:
    module: Any = CompiledPart()
    trainer: Any = importlib.import_module("lightning.pytorch").Trainer(
        default_root_dir=tmp_path, accelerator="cpu", logger=False
    )
    trainer.strategy.connect(module)
    trainer.strategy._lightning_module = module
    trainer.strategy.optimizers = [module.configure_optimizers()]
    work: StepWork = count_elsewhere(TrainerLoop(trainer), "fit", without_data(next(iter(module.train_dataloader()))))
    assert (work.flops.forward, work.flops.backward, work.flops.recomputation) == module.paper(1)
