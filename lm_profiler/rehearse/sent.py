"""Counts the work of a step that another process sent, by rehearsing it."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import repeat
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch.optim import Optimizer

from lm_profiler.callbacks.instruments.sent_step import SentOptimizer, SentStep, shape_of
from lm_profiler.callbacks.instruments.work import StepWork
from lm_profiler.measure.copies.module_copies import ModuleCopy
from lm_profiler.measure.counts.flops import UncountableError
from lm_profiler.measure.counts.traffic import StepTraffic
from lm_profiler.measure.fake.values import TAKEN_FOR_ONE
from lm_profiler.measure.fake.world import FakeWorld, prepare
from lm_profiler.rehearse.loop import Look, Rehearsal, SilentLogger, reason_of
from lm_profiler.rehearse.strategies import AS_WIDE, CPU, FakeDevice

# precisions that are rehearsed as such; with others the dtypes of weights and batch decide everything
_SAME = ("bf16-mixed", "bf16-true", "16-true", "64-true")

_BATCHES = 4  # most batches of one step to rehearse: the work of more is in proportion

# Hooks that set a module up: it was set up before it was sent.
_NOT_A_STEP = ("setup", "teardown", "prepare_data", "configure_model", "configure_callbacks")


def count(pickled_step: bytes) -> StepWork | str:
    """Return the work of the step on one rank, or why it is unknown. Only for a separate process (``prepare``)."""
    sent: SentStep = pickle.loads(pickled_step)
    prepare(None)
    if not sent.on_cpu:  # otherwise torch's unfused attention would compute half precision in float32
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        counted = _rehearsed(sent)
    except UncountableError as error:
        return str(error)
    except Exception as error:
        return f"on a copy without data the step fails: {reason_of(error)}"
    if TAKEN_FOR_ONE:
        return f"on a copy without data its work may depend on a value ({next(iter(TAKEN_FOR_ONE))})"
    return counted


def _rehearsed(sent: SentStep) -> StepWork:
    world = _Shapes(None)
    with world.inside():
        fake = ModuleCopy(partial(shape_of, device=CPU), CPU)
        module, batch, optimizers = fake((sent.module, sent.batch, sent.optimizers))
    _keep_to_the_step(module, [_Motionless(each) for each in optimizers])
    named = {"bfloat16": "float16"} if sent.precision in AS_WIDE else {}  # the run's dtype by the one rehearsed instead
    counting = _Counting(world=world, times=max(sent.batches / _BATCHES, 1.0), named=named)
    trainer = _trainer(sent, counting, batch)
    # A loader whose endless batches stand for the sent one.
    given = {"train_dataloaders" if sent.verb == "fit" else "dataloaders": repeat(None)}
    kept = {"return_predictions": False} if sent.verb == "predict" else {}
    try:
        getattr(trainer, sent.verb)(module, **given, **kept)
    except Exception as error:
        first = counting.failed
        raise (first if isinstance(first, Exception) else error) from None
    if counting.seen is None:
        raise UncountableError("on a copy without data no step ends")
    return counting.seen


def _trainer(sent: SentStep, counting: Rehearsal, batch: Any) -> Any:
    """Return a Trainer of the Lightning package that the module is derived from."""
    names = {kind.__module__.partition(".")[0] for kind in type(sent.module).__mro__}
    lightning = import_module("pytorch_lightning" if "pytorch_lightning" in names else "lightning.pytorch")
    strategy = type("SentStrategy", (_SentBatches, lightning.strategies.SingleDeviceStrategy), {})
    precision: Any = AS_WIDE.get(sent.precision, sent.precision if sent.precision in _SAME else "32-true")
    off = ("enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy=strategy(counting.world, batch),
        precision=precision,
        max_epochs=1,
        accumulate_grad_batches=min(sent.batches, _BATCHES),
        logger=SilentLogger(),
        limit_val_batches=0 if sent.verb == "fit" else None,
        inference_mode=False,
        callbacks=[counting],
        **dict.fromkeys(off, False),
    )
    vars(trainer.precision_plugin)["convert_module"] = lambda module: module  # it was converted before it was sent
    return trainer


class _Shapes(FakeWorld):
    """Fake tensors whose bytes are not counted, so that kernels of unknown memory (``Uncounted``) do no harm."""

    @contextmanager
    def inside(self) -> Iterator[None]:
        with self.mode:
            yield


class _SentBatches(FakeDevice):
    """Gives the step the sent batch, which is already on the device."""

    def __init__(self, world: FakeWorld, batch: Any) -> None:
        super().__init__(device=CPU)  # type: ignore[call-arg]
        self.world, self._batch = world, batch

    def batch_to_device(self, batch: Any, device: Any = None, dataloader_idx: int = 0) -> Any:
        return self._batch


def _keep_to_the_step(module: LightningModule, optimizers: list[Optimizer]) -> None:
    """Have ``module`` use ``optimizers``, and disable its hooks outside of steps."""
    hooks = [name for name in dir(LightningModule) if name.startswith("on_") and "_model_" not in name]
    vars(module).update(dict.fromkeys((*hooks, *_NOT_A_STEP), _nothing))
    vars(module)["configure_optimizers"] = lambda: optimizers or None


def _nothing(*_: Any, **__: Any) -> None:
    pass


class _Motionless(Optimizer):
    """An optimizer with the sent groups and states, whose step does no arithmetic."""

    calls_closure_first = True  # as torch's own optimizers do

    def __init__(self, sent: SentOptimizer) -> None:
        super().__init__(sent.groups, {})
        parameters = [each for group in sent.groups for each in group["params"]]
        self.state.update(zip(parameters, sent.states, strict=True))

    def step(self, closure: Callable[[], Any] | None = None, **_: Any) -> Any:
        return None if closure is None else closure()


@dataclass(eq=False, kw_only=True)
class _Counting(Rehearsal):
    times: float  # batches of the step over the rehearsed ones
    named: Mapping[str, str]  # the run's dtypes, by those rehearsed instead
    seen: StepWork | None = None

    def _steps(self) -> Iterator[None]:
        look = Look(self)
        yield
        look.end()
        self.seen = self._of_the_run(look.work())

    def _of_the_run(self, work: StepWork) -> StepWork:
        """Return ``work`` of all batches of the step, in the run's own dtypes."""
        assert work.traffic is not None
        times, by_dtype = self.times, dict[str, dict[str, int]]()
        for kind, each in work.by_dtype.items():
            by_dtype[kind] = {self.named.get(of, of): round(n * times) for of, n in each.items()}
        moved = dict(work.traffic.by_phase)
        moved |= {of: round(moved[of] * times) for of in ("forward", "backward") if moved.get(of) is not None}  # type: ignore[operator]
        read = work.traffic.forward_read
        traffic = StepTraffic(moved, None if read is None else round(read * times))
        return StepWork(work.flops.times(times), by_dtype, traffic)
