"""Steps that are sent to be rehearsed: only the step runs, as Lightning's loop runs it, and what it needs decides."""

import io
import pickle
import re
import threading
from collections import UserDict, namedtuple
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import warm
from known_loop import trainer_with
from lightning.pytorch.core.optimizer import _MockOptimizer
from raised import refusal
from sent_steps import AsksForAFloat, DoesMore, Renamed
from stored_texts import assert_stored
from torch import nn
from zoo import Accumulating, Closures, Contrastive, Kind

from lm_profiler.callbacks.instruments.sent_step import Absent, SentStep, _StepPickler, shape_of, without_data
from lm_profiler.callbacks.instruments.work import StepWork, count_elsewhere
from lm_profiler.callbacks.trainer_loop import TrainerLoop
from lm_profiler.measure.copies.module_copies import UncopyableError
from lm_profiler.measure.counts.uncountable import UncountableError


def counted_work(module: Any, trainer: Any) -> StepWork:
    """What is counted on the first batch, as if ``trainer`` had trained ``module``."""
    trainer.strategy.connect(module)
    trainer.strategy._lightning_module = module
    trainer.strategy.optimizers = [module.configure_optimizers()]
    return count_elsewhere(TrainerLoop(trainer), "fit", without_data(next(iter(module.train_dataloader()))))


@pytest.mark.parametrize("kind", [Contrastive, Accumulating, DoesMore, Renamed], ids=lambda kind: kind.__name__)
def test_a_step_has_the_work_counted_on_paper(kind: type[Kind], tmp_path: Path) -> None:
    module, batches = kind(), 3 if kind is Accumulating else 1
    options = {"default_root_dir": tmp_path, "accelerator": "cpu", "logger": False, "accumulate_grad_batches": batches}
    name = "pytorch_lightning" if kind is Renamed else "lightning.pytorch"
    work = counted_work(module, import_module(name).Trainer(**options))
    assert (work.flops.forward, work.flops.backward, work.flops.recomputation) == module.paper(1)
    assert work.traffic.by_phase["optimizer"] == 3 * 4 * sum(p.numel() for p in module.parameters() if p.requires_grad)


def test_a_module_without_an_optimizer_has_the_same_passes(tmp_path: Path) -> None:
    """Attention alone learns nothing: Lightning has an optimizer without parameters for such a module."""
    module = Contrastive()
    trainer = trainer_with([], tmp_path)
    trainer.strategy.connect(module)
    trainer.strategy._lightning_module = module
    trainer.strategy.optimizers = [_MockOptimizer()]
    batch = without_data(next(iter(module.train_dataloader())))
    work = count_elsewhere(TrainerLoop(trainer), "fit", batch)
    assert (work.flops.forward, work.flops.backward, work.flops.recomputation) == module.paper(1)


def test_work_that_may_depend_on_a_value_is_unknown(tmp_path: Path) -> None:
    message = refusal(UncountableError, lambda: counted_work(AsksForAFloat(), trainer_with([], tmp_path)))
    assert_stored("rehearse/refused: value", {"a float": re.sub(r"line \d+", "line LINE", message)})


def test_uncountable_steps_are_refused_before_a_process_starts(tmp_path: Path) -> None:
    started = [*warm.STARTED]
    messages = {"LBFGS": refusal(UncountableError, lambda: counted_work(Closures(), trainer_with([], tmp_path)))}
    lazy = Contrastive()
    lazy.later = nn.LazyLinear(2)
    lazy.configure_optimizers = lambda: torch.optim.SGD([torch.zeros(1)], 0.1)
    messages["lazy"] = refusal(UncountableError, lambda: counted_work(lazy, trainer_with([], tmp_path)))
    assert_stored("rehearse/refused: step", messages)
    with pytest.raises(UncopyableError, match="not dense"):
        shape_of(torch.eye(2).to_sparse(), torch.device("cpu"))
    assert started == warm.STARTED


Pair = namedtuple("Pair", "x y")


@dataclass(frozen=True)
class Item:
    x: Any


ROW = torch.zeros(3)


@pytest.mark.parametrize("batch", [{"x": ROW}, [[ROW]], Item(ROW), Item(Pair(ROW, None)), UserDict(x={"y": ROW})])
def test_a_batch_of_any_kind_goes_without_its_data(batch: Any) -> None:
    sent = without_data(batch)
    assert type(sent) is type(batch)
    assert repr(sent).count("device='meta'") == 1
    assert "meta" not in repr(batch)


def test_objects_of_one_process_are_sent_as_stand_ins(tmp_path: Path) -> None:
    module = Contrastive()
    module.lock = threading.Lock()
    module.numbers = (number for number in range(3))
    trainer = trainer_with([], tmp_path)
    trainer.strategy.connect(module)
    trainer.strategy._lightning_module = module
    trainer.strategy.optimizers = [module.configure_optimizers()]
    batch = without_data(next(iter(module.train_dataloader())))
    sent: SentStep = pickle.loads(SentStep.from_loop(TrainerLoop(trainer), "fit", batch).pickled())
    lock: Any = sent.module.lock
    with lock:
        assert lock.acquire(timeout=1).name is lock
    assert isinstance(sent.module.numbers, Absent)
    with pytest.raises(TypeError, match="one process"):
        bool(lock)
    with pytest.raises(TypeError):
        list(sent.module.numbers)
    with pytest.raises(TypeError):
        lock + 1


@torch.library.custom_op("lm_profiler_tests::imported", mutates_args=(), schema="(Tensor x) -> Tensor")
def imported(x: Any) -> Any:
    return x.clone()


def test_operators_of_the_script_make_the_step_unknown() -> None:
    schema = "(Tensor x) -> Tensor"
    local = torch.library.custom_op("lm_profiler_tests::local", torch.clone, mutates_args=(), schema=schema)
    operators = [torch.ops.aten.mm, torch.ops.aten.mm.out, imported]
    stream = io.BytesIO()
    _StepPickler(stream).dump([*operators, local])
    sent = pickle.loads(stream.getvalue())
    assert all(there is here for there, here in zip(sent, operators, strict=False))
    with pytest.raises(UncountableError, match="the script itself defines lm_profiler_tests::local"):
        sent[-1](torch.ones(1))
