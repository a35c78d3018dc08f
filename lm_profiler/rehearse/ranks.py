"""Rank 0 of a run on several devices: its strategy, in torch's fake process group, whose collectives move nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.plugins.precision import FSDPPrecision
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
    StrategyRegistry,
)

from lm_profiler.measure.fake.world import FakeWorld
from lm_profiler.rehearse.one_device import CPU, FakeDevice, FakeStrategy
from lm_profiler.torch_names import FAKE_GROUP, NO_MODES, NO_SCRIPTS, WHOLE_SHAPES
from lm_profiler.training.data_parallel import WrappedDDP
from lm_profiler.usage_error import UsageError

SHARDED = (DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy)  # strategies that split the module over devices


class CannotSplit(Exception):
    """Raised for a strategy that splits the module in a way that cannot be rehearsed."""


class RankZero(LightningEnvironment):
    """The surroundings of a rank 0 that nobody has to start, whatever this process's environment says."""

    creates_processes_externally = True

    def global_rank(self) -> int:
        return 0

    local_rank = node_rank = global_rank


class FakeReplica(FakeStrategy):
    """One of DDP's devices: it holds the whole module, and what others send it is nowhere needed."""

    def __init__(self, world: FakeWorld, ranks: int) -> None:
        super().__init__(world)
        self.ranks = self.world_size = ranks

    def setup_environment(self) -> None:
        """Join the fake group, for modules that ask who is there, and for ``ZeroRedundancyOptimizer``."""
        join(self.world, self.ranks)
        super().setup_environment()


class FakeRank(FakeDevice):
    """A mixin for strategies that split the module: their own code shards and gathers fake tensors."""

    def setup_environment(self) -> None:
        """Join the fake group, which the strategy then takes for its own."""
        join(self.world, self.ranks)
        super().setup_environment()  # type: ignore[misc]

    def setup(self, trainer: Trainer) -> None:
        """Shard the module, and make the optimizers, among fake tensors."""
        plugin = trainer.precision_plugin
        if isinstance(plugin, FSDPPrecision) and plugin.precision.endswith("mixed"):  # it names CUDA's autocast
            vars(plugin)["forward_context"] = partial(torch.autocast, CPU.type, torch.bfloat16)
        with self.world.inside():
            super().setup(trainer)  # type: ignore[misc]

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return ``obj``: rank 0 is the one that sends."""
        return obj

    def barrier(self, name: str | None = None) -> None:
        """Do nothing: nobody else comes."""


def join(world: FakeWorld, ranks: int) -> None:
    """Make this process rank 0 of ``ranks``. Only for a process of its own: it replaces code of torch."""
    from torch.distributed.fsdp import FullyShardedDataParallel  # half a second, for this alone

    NO_SCRIPTS.find_or(bool)()  # torch.distributed.optim has some, which do not compile with what is replaced here
    FAKE_GROUP.find()  # this import registers the backend
    store = dist.HashStore()  # type: ignore[attr-defined]  # documented, but not exported
    dist.init_process_group("fake", store=store, rank=0, world_size=ranks)
    world.live.follow_resizes()
    _hide_whole_shapes()
    construct = FullyShardedDataParallel.__init__

    def on_cpu(wrapper: Any, *args: Any, **kwargs: Any) -> None:
        construct(wrapper, *args, **{**kwargs, "device_id": CPU})

    # It refuses modules on a CPU unless it is told that they stay there.
    setattr(FullyShardedDataParallel, construct.__name__, on_cpu)


def _hide_whole_shapes() -> None:
    """Have DTensors ask for the shape of all shards together out of sight: they make fake tensors of it to ask.

    Torch does so once for each operator and shape in a run, but each time where tensors are fake.
    """
    ask = WHOLE_SHAPES.find_or(None)
    if ask is None:
        return

    def unseen(*args: Any) -> Any:
        with NO_MODES.find()():
            return ask(*args)

    setattr(ask.__globals__["ShardingPropagator"], WHOLE_SHAPES.name, unseen)


def fake_strategy(given: Mapping[str, Any], make: Callable[[], Any], world: FakeWorld, trains: bool) -> Strategy:
    """Return the strategy that the Trainer's options name, with fake tensors.

    Args:
        given: the options.
        make: returns the strategy that they describe, or its name.
        world: the fake tensors.
        trains: whether gradients are made.

    Raises:
        CannotSplit: The strategy splits the module, and cannot be rehearsed.
        UsageError: It splits the module over nobody knows how many devices.
    """
    kind, options = _named(given)
    if issubclass(kind, SHARDED):
        return _rank_of(kind, make(), given, world)
    if not issubclass(kind, DDPStrategy):
        return FakeStrategy(world)
    strategy = FakeReplica(world, devices_in(given))
    strategy.reduces = trains
    # With ``gradient_as_bucket_view`` the buckets are the gradients. One of WrappedDDP's ways copies them, too, but
    # after backward, where activations are gone.
    strategy.has_buckets = trains and kind is not WrappedDDP and not options.get("gradient_as_bucket_view")
    return strategy


def _rank_of(kind: type[Strategy], made: Any, given: Mapping[str, Any], world: FakeWorld) -> Strategy:
    """Turn a strategy that was ``made``, or is named so, into a fake one of its own class."""
    if issubclass(kind, DeepSpeedStrategy):
        raise CannotSplit(f"{kind.__name__} splits the module by an engine of its own, which takes no fake tensors")
    if str(given.get("devices")) in ("auto", "-1", "None"):
        expected = f"the number of devices over which {kind.__name__} splits the module"
        raise UsageError(f"trainer.devices: expected {expected}, given {given.get('devices')}")
    made = StrategyRegistry.get(made) if isinstance(made, str) else made
    fake = type(kind.__name__, (FakeRank, type(made)), {})
    strategy: Any = object.__new__(fake)
    vars(strategy).update(vars(made), world=world, ranks=devices_in(given))
    strategy.cluster_environment = RankZero()
    strategy.parallel_devices = [CPU] * (strategy.ranks // int(given.get("num_nodes") or 1))
    return strategy  # type: ignore[no-any-return]


def _named(given: Mapping[str, Any]) -> tuple[type[Strategy], Mapping[str, Any]]:
    """Return the class of the strategy, and its options, as LightningCLI reads them."""
    strategy: Any = given.get("strategy") or "auto"
    if not isinstance(strategy, str):
        module, _, name = strategy["class_path"].rpartition(".")
        options = {**dict(strategy.get("init_args") or {}), **dict(strategy.get("dict_kwargs") or {})}
        return getattr(import_module(module), name), options
    if strategy in StrategyRegistry:
        return StrategyRegistry[strategy]["strategy"], StrategyRegistry[strategy]["init_params"]
    return (DDPStrategy if strategy == "auto" and devices_in(given) > 1 else SingleDeviceStrategy), {}


def devices_in(given: Mapping[str, Any]) -> int:
    """Return the number of devices of all nodes; "auto", which depends on the run's machine, counts as one."""
    devices = given.get("devices")
    if isinstance(devices, str) and not devices.isdecimal():
        devices = devices.split(",") if "," in devices else 1
    several = len(devices) if isinstance(devices, (list, tuple)) else max(int(devices or 1), 1)
    return several * int(given.get("num_nodes") or 1)
