"""Rehearses a step that another process has pickled, to count its work."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import repeat
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer

from lm_profiler.callbacks.instruments.sent_step import (
    SentOptimizer,
    SentStep,
    shape_of,
)
from lm_profiler.callbacks.instruments.work import StepWork
from lm_profiler.measure.copies.module_copies import ModuleCopy
from lm_profiler.measure.counts import registered
from lm_profiler.measure.counts.traffic import StepTraffic
from lm_profiler.measure.counts.uncountable import UncountableError
from lm_profiler.measure.fake.flex import imitate_flex_attention
from lm_profiler.measure.fake.values import LINES_GIVEN_A_FAKE_FLOAT
from lm_profiler.measure.fake.world import FakeWorld, prepare
from lm_profiler.rehearse.loop import Rehearsal, SilentLogger, StepObservers, reason_of
from lm_profiler.rehearse.strategies import CPU, REPLACED_PRECISIONS, FakeDevice
from lm_profiler.torch_names import tree_leaves

# Precisions with which the rehearsal's Trainer runs, besides those in ``REPLACED_PRECISIONS``. With any other, only the
# dtypes of weights and batch matter.
_REHEARSED_PRECISIONS = ("bf16-mixed", "bf16-true", "16-true", "64-true")

# the most batches of a step that are rehearsed; the work of more batches is in proportion
_MAX_BATCHES = 4

# hooks that set a module up, which are not called, because the module was set up before it was pickled
_SET_UP_HOOKS = (
    "setup",
    "teardown",
    "prepare_data",
    "configure_model",
    "configure_callbacks",
)


def count(pickled_step: bytes) -> StepWork | str:
    """Return the work of the step on one rank, or a sentence on why it is unknown.

    Call this in a separate process, because ``prepare`` replaces code of torch.
    """
    imitate_flex_attention()  # before unpickling, which imports modules of the program
    step: SentStep = pickle.loads(pickled_step)
    registered.operator_formulas.update(step.operator_formulas)
    registered.function_formulas.update(step.function_formulas)
    prepare(gpu=None)
    if not step.on_cpu:
        # Otherwise torch's unfused attention would compute half precision in float32.
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        work = _rehearse(step)
    except UncountableError as error:
        return str(error)
    except Exception as error:
        return f"the step fails on a copy without data: {reason_of(error)}"
    if LINES_GIVEN_A_FAKE_FLOAT:
        first_line = next(iter(LINES_GIVEN_A_FAKE_FLOAT))
        return f"the step may depend on the value of a tensor, which a copy without data does not have ({first_line})"
    return work


def _rehearse(step: SentStep) -> StepWork:
    """Run the step on a copy of its module without data, and return its work; raise the error of the step."""
    world = _Shapes(gpu=None)
    with world.inside():
        make_fake = ModuleCopy(partial(shape_of, device=CPU), CPU)
        originals = (step.module, step.batch, step.optimizers)
        module, batch, optimizers = make_fake(originals)
    if not _is_lightning_module(module):
        module = _CalledModel(module)
        optimizers = _as_one_optimizer(optimizers)
    _disable_hooks(
        module, [_MotionlessOptimizer(optimizer) for optimizer in optimizers]
    )

    dtypes: dict[str, str] = {}
    if step.precision in REPLACED_PRECISIONS:
        # The run's float16 is rehearsed as bfloat16.
        dtypes["bfloat16"] = "float16"
    rehearsal = _StepCounter(
        world=world, batch_factor=max(step.batches / _MAX_BATCHES, 1.0), dtypes=dtypes
    )
    trainer = _make_trainer(step, rehearsal, batch)
    batches = repeat(None)  # an endless loader; its batches stand for the pickled one
    try:
        if step.verb == "fit":
            trainer.fit(module, train_dataloaders=batches)
        elif step.verb == "predict":
            trainer.predict(module, dataloaders=batches, return_predictions=False)
        else:
            getattr(trainer, step.verb)(module, dataloaders=batches)
    except Exception as error:
        if isinstance(rehearsal.first_error, Exception):
            raise rehearsal.first_error from None
        raise error from None
    if rehearsal.step_work is None:
        raise UncountableError(
            "the rehearsal on a copy without data did not complete a step"
        )
    return rehearsal.step_work


def _packages_of(module: nn.Module) -> set[str]:
    """Return the packages of the class of ``module``, and of those that it is derived from."""
    return {kind.__module__.partition(".")[0] for kind in type(module).__mro__}


def _is_lightning_module(module: nn.Module) -> bool:
    """Return whether ``module`` is a LightningModule of one of Lightning's two packages."""
    names = {kind.__name__ for kind in type(module).__mro__}
    return "LightningModule" in names and bool(
        _packages_of(module) & {"lightning", "pytorch_lightning"}
    )


class _CalledModel(LightningModule):
    """A model whose step is a single call of the model. A batch holds the call's positional and named arguments."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        args, kwargs = batch
        return _loss_of(self.model(*args, **kwargs))


def _loss_of(output: Any) -> Tensor:
    """Return a loss of the output of a model: its ``loss``, or else the sum of its scalars, or of all its tensors.

    The choice does not change the FLOPs, because no loss multiplies matrices.
    """
    if isinstance(getattr(output, "loss", None), Tensor):
        loss: Tensor = output.loss
        return loss
    tensors: list[Tensor] = []
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            tensors.append(leaf)
    scalars = [tensor for tensor in tensors if tensor.ndim == 0]
    sums = [tensor.sum() for tensor in scalars or tensors]
    if not sums:
        raise UncountableError("the model returns nothing that depends on its weights")
    return torch.stack(sums).sum()


def _as_one_optimizer(optimizers: Sequence[SentOptimizer]) -> list[SentOptimizer]:
    """Return one optimizer for all, because Lightning steps only one by itself; empty if there are no weights."""
    groups: list[dict[str, Any]] = []
    states: list[list[Tensor]] = []
    for optimizer in optimizers:
        groups += optimizer.groups
        states += optimizer.states
    if not groups:
        return []
    return [SentOptimizer(groups, states)]


def _make_trainer(step: SentStep, rehearsal: Rehearsal, batch: Any) -> Any:
    """Return a Trainer that runs the sent ``step`` on ``batch``, with the callback ``rehearsal``, and writes nothing.

    Its class is from the package of the module's base class, because each package refuses modules of the other.
    """
    package = "lightning.pytorch"
    if "pytorch_lightning" in _packages_of(step.module):
        package = "pytorch_lightning"
    lightning = import_module(package)
    # a strategy that replaces the loader's batches by ``batch``
    strategy_class = type(
        "SentStrategy", (_SentBatches, lightning.strategies.SingleDeviceStrategy), {}
    )
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy=strategy_class(rehearsal.world, batch),
        precision=_rehearsed_precision(step.precision),
        max_epochs=1,
        accumulate_grad_batches=min(step.batches, _MAX_BATCHES),
        logger=SilentLogger(),
        limit_val_batches=0 if step.verb == "fit" else None,
        inference_mode=False,
        callbacks=[rehearsal],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    # The module was converted before it was pickled, so the plugin must not convert it again.
    vars(trainer.precision_plugin)["convert_module"] = _unchanged
    return trainer


def _rehearsed_precision(precision: str) -> str:
    """Return the precision of the rehearsal's Trainer; "32-true" leaves the tensors' dtypes as they are."""
    if precision in REPLACED_PRECISIONS:
        return REPLACED_PRECISIONS[precision]
    if precision in _REHEARSED_PRECISIONS:
        return precision
    return "32-true"


def _unchanged(module: LightningModule) -> LightningModule:
    return module


class _Shapes(FakeWorld):
    """Makes fake tensors without counting their bytes, so that kernels of unknown memory raise no ``Uncounted``."""

    @contextmanager
    def inside(self) -> Iterator[None]:
        with self.mode:
            yield


class _SentBatches(FakeDevice):
    """A strategy that replaces each batch by the pickled one, which is already on the device."""

    def __init__(self, world: FakeWorld, batch: Any) -> None:
        super().__init__(device=CPU)  # type: ignore[call-arg]
        self.world = world
        self._batch = batch

    def batch_to_device(
        self, batch: Any, device: Any = None, dataloader_idx: int = 0
    ) -> Any:
        return self._batch


def _disable_hooks(module: LightningModule, optimizers: list[Optimizer]) -> None:
    """Disable the ``on_…`` and set-up hooks of ``module``, and have it return ``optimizers``.

    Hooks such as ``on_validation_model_eval`` stay, because they prepare the module for its steps.
    """
    for name in dir(LightningModule):
        prepares_module = "_model_" in name
        if name.startswith("on_") and not prepares_module:
            vars(module)[name] = _do_nothing
    for name in _SET_UP_HOOKS:
        vars(module)[name] = _do_nothing
    vars(module)["configure_optimizers"] = lambda: optimizers or None


def _do_nothing(*_: Any, **__: Any) -> None:
    pass


class _MotionlessOptimizer(Optimizer):
    """An optimizer with the pickled groups and states, whose step computes nothing."""

    calls_closure_first = True  # like torch's own optimizers

    def __init__(self, sent: SentOptimizer) -> None:
        super().__init__(sent.groups, {})
        parameters = []
        for group in sent.groups:
            parameters += group["params"]
        self.state.update(zip(parameters, sent.states, strict=True))

    def step(self, closure: Callable[[], Any] | None = None, **_: Any) -> Any:
        if closure is None:
            return None
        return closure()


@dataclass(eq=False, kw_only=True)
class _StepCounter(Rehearsal):
    """A rehearsal that counts the work of one step."""

    batch_factor: float  # batches of the step divided by rehearsed batches
    # a dtype that was rehearsed to the run's dtype, if they differ
    dtypes: Mapping[str, str]
    # the work of the whole step; None until it has ended
    step_work: StepWork | None = None

    def _steps(self) -> Iterator[None]:
        """Yield before the only step, and count its work when it has ended."""
        observers = StepObservers(self)
        yield
        observers.end()
        self.step_work = self._work_of_run(observers.work())

    def _work_of_run(self, rehearsed: StepWork) -> StepWork:
        """Return the work of all batches of the step, in the run's own dtypes."""
        flops_by_dtype = {}
        for kind, flops in rehearsed.by_dtype.items():
            flops_by_dtype[kind] = self._flops_of_run(flops)
        traffic = rehearsed.traffic
        assert traffic is not None
        bytes_by_phase = dict(traffic.by_phase)
        for phase in ("forward", "backward"):
            if phase in bytes_by_phase:
                bytes_by_phase[phase] = self._scaled(bytes_by_phase[phase])
        return StepWork(
            flops=rehearsed.flops.times(self.batch_factor),
            by_dtype=flops_by_dtype,
            traffic=StepTraffic(bytes_by_phase, self._scaled(traffic.forward_read)),
        )

    def _flops_of_run(self, flops: Mapping[str, int]) -> dict[str, int]:
        """Return the FLOPs by dtype for all batches of the step, in the run's own dtypes."""
        scaled = {}
        for dtype, count in flops.items():
            dtype_of_run = self.dtypes.get(dtype, dtype)
            scaled[dtype_of_run] = round(count * self.batch_factor)
        return scaled

    def _scaled(self, count: int | None) -> int | None:
        if count is None:
            return None
        return round(count * self.batch_factor)
