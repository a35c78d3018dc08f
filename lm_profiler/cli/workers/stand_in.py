"""What of a run its rehearsal takes over, and how what was rehearsed becomes the run's again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    StrategyRegistry,
)

from lm_profiler.analysis.hardware.roofline import Work
from lm_profiler.callbacks.rehearsal import FakeStrategy
from lm_profiler.callbacks.silent import SilentLogger
from lm_profiler.cli.checks import check_trainer_options, trainer_error
from lm_profiler.cli.trainer_cli import OPTION_ERRORS, ProfilerCLI
from lm_profiler.measure.fake.world import FakeWorld
from lm_profiler.record.precision import full_name

KEPT = ("accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm", "detect_anomaly")
"""What of the Trainer's options a step on one device depends on, beside its precision."""

_BATCHES = 2
"""Of a step, at most: to those that follow gradients are nothing new, as they are to the second."""

_STEPS = 10_000
"""That a schedule is told of a run that ends with its stages. No rehearsal has as many."""

SHARDED = (DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy)

_AS_WIDE = {"16-mixed": "bf16-mixed", "16": "bf16-mixed"}
"""Lightning refuses float16 on the CPU, for its scaler of gradients."""


def rehearsal_trainer(cli: ProfilerCLI, world: FakeWorld) -> Trainer:
    """One that does of what the user's does what a step on one device depends on.

    Raises:
        UsageError: the options do not go together.
    """
    given = vars(cli.config[cli.verb].trainer)
    check_trainer_options({**given, "accelerator": "auto"}, cli.verb)
    precision = str(given["precision"] or "32-true")
    kept = {name: given[name] for name in KEPT if given[name] is not None}
    kept["accumulate_grad_batches"] = min(_accumulated(cli), _BATCHES)
    off = ("enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    try:
        return Trainer(
            accelerator="cpu",
            strategy=FakeStrategy(world, has_buckets=cli.verb == "fit" and has_buckets(given)),
            precision=_AS_WIDE.get(precision, precision),  # type: ignore[arg-type]
            max_epochs=given["max_epochs"],
            max_steps=_STEPS if given["max_epochs"] == given["max_steps"] == -1 else given["max_steps"],
            logger=False if given["logger"] is False else SilentLogger(),
            limit_val_batches=0 if cli.verb == "fit" else None,
            callbacks=[BeforeSteps(each, world) for each in _callbacks(cli)],
            **dict.fromkeys(off, False),  # type: ignore[arg-type]
            **kept,
        )
    except OPTION_ERRORS as error:
        raise trainer_error(error, given) from error


class BeforeSteps(Callback):
    """What ``callback`` does before the first step, as freezing a part of the module; it sees no step."""

    def __init__(self, callback: Callback, world: FakeWorld) -> None:
        self._callback, self._world = callback, world

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        with self._world.inside():
            self._callback.setup(trainer, pl_module, stage)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        with self._world.inside():
            self._callback.on_fit_start(trainer, pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        with self._world.inside():
            self._callback.on_train_start(trainer, pl_module)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        with self._world.inside():
            self._callback.on_train_epoch_start(trainer, pl_module)


def _callbacks(cli: ProfilerCLI) -> list[Callback]:
    """The user's own, and Lightning's that freeze; its others leave the module as it is."""
    config = cli.config.clone()
    for section, kept in ((config[cli.verb], "trainer"), (config[cli.verb].trainer, "callbacks")):
        for key in vars(section).keys() - {kept}:
            del section[key]
    made = cli.parser.instantiate(config)[cli.verb].trainer.callbacks or []
    return [
        each
        for each in (made if isinstance(made, list) else [made])
        if isinstance(each, BaseFinetuning) or not type(each).__module__.startswith("lightning.")
    ]


class SplitOverDevices(Exception):
    """The module is split over devices: what one of them holds is not what the module holds."""


def has_buckets(given: Mapping[str, Any]) -> bool:
    """Whether the strategy of the Trainer's options is DDP, whose buckets hold all gradients once more.

    With ``gradient_as_bucket_view`` they are the gradients.

    Raises:
        SplitOverDevices: it is one that splits the module.
    """
    strategy: Any = given.get("strategy") or "auto"
    options: Mapping[str, Any] = {}
    if not isinstance(strategy, str):
        options = {**dict(strategy.get("init_args") or {}), **dict(strategy.get("dict_kwargs") or {})}
        module, _, name = strategy["class_path"].rpartition(".")
        kind = getattr(import_module(module), name)
    elif strategy in StrategyRegistry:
        kind, options = StrategyRegistry[strategy]["strategy"], StrategyRegistry[strategy]["init_params"]
    else:
        kind = DDPStrategy if strategy == "auto" and _devices(given) > 1 else SingleDeviceStrategy
    if issubclass(kind, SHARDED):
        raise SplitOverDevices(f"the module is split over devices ({kind.__name__})")
    return issubclass(kind, DDPStrategy) and not options.get("gradient_as_bucket_view")


def _devices(given: Mapping[str, Any]) -> int:
    """Of all nodes; those that only the machine of the run knows count as one."""
    devices = given.get("devices")
    if isinstance(devices, str) and not devices.isdecimal():
        devices = devices.split(",") if "," in devices else 1
    several = len(devices) if isinstance(devices, (list, tuple)) else max(int(devices or 1), 1)
    return several * int(given.get("num_nodes") or 1)


def _accumulated(cli: ProfilerCLI) -> int:
    """Batches of a step."""
    return int(cli.config[cli.verb].trainer.accumulate_grad_batches or 1)


def as_asked(cli: ProfilerCLI, rehearsed: Mapping[str, Work], kept_otherwise: bool) -> dict[str, Work]:
    """The work of the run's phases from what was ``rehearsed``: of all batches of a step, in the run's own dtype.

    ``kept_otherwise``: what is kept for backward is the choice of a compiler, or of kernels that are not the CPU's.
    """
    narrow = "float16" if full_name(cli.config[cli.verb].trainer.precision) in _AS_WIDE else "bfloat16"
    times = max(_accumulated(cli) / _BATCHES, 1.0)

    def of_batches(work: Work) -> Work:
        flops = work.flops and {narrow if of == "bfloat16" else of: round(n * times) for of, n in work.flops.items()}
        moved = None if work.bytes is None or kept_otherwise else round(work.bytes * times)
        return replace(work, flops=flops, bytes=moved)

    return {of: of_batches(work) if of in ("forward", "backward") else work for of, work in rehearsed.items()}
