"""The strategies of a rehearsal with fake tensors: one device, or rank 0 of several.

Rank 0 is in torch's fake process group, whose collectives move nothing; ``LinkBytes`` counts what they would send.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
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
from torch import Tensor

from lm_profiler.callbacks.instruments.work import bytes_of_batch
from lm_profiler.callbacks.marks.batches import Samples
from lm_profiler.measure.clocks.tape import OUTSIDE
from lm_profiler.measure.clocks.timeline import Timeline
from lm_profiler.measure.fake.live import Uncounted
from lm_profiler.measure.fake.world import FakeWorld
from lm_profiler.record.parts import PARTS
from lm_profiler.torch_names import (
    DISPATCH_MODE,
    FAKE_GROUP,
    NO_MODES,
    WHOLE_SHAPES,
    WORLD,
    tree_leaves,
)
from lm_profiler.training.data_parallel import FlatDDP, WrappedDDP
from lm_profiler.usage_error import UsageError

CPU = torch.device("cpu")

# precisions that Lightning refuses on the CPU (float16 needs a gradient scaler), and what is rehearsed instead
REPLACED_PRECISIONS = {"16-mixed": "bf16-mixed", "16": "bf16-mixed"}

# strategies that split the module over devices
SHARDED = (DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy)


@dataclass(frozen=True)
class Size:
    """The factors by which the first two dimensions of a batch's tensors are multiplied."""

    batch: float = 1.0
    context: float = 1.0

    def __call__(self, shape: Sequence[int]) -> Sequence[int]:
        """Return the resized ``shape``; an empty dimension stays empty, and no other dimension becomes empty."""
        resized = list(shape)
        factors = (self.batch, self.context)
        for dimension, (length, factor) in enumerate(zip(shape, factors, strict=False)):
            if length > 0:
                resized[dimension] = max(round(length * factor), 1)
        return resized


class FakeDevice:
    """A mixin that makes all tensors on a strategy's device fake."""

    world: FakeWorld
    reduces = False  # whether DDP reduces all gradients
    has_buckets = False  # whether DDP's buckets hold the gradients a second time
    ranks = 1  # the number of ranks; this is rank 0
    size = Size()
    rows = 1  # how many rows are rehearsed for each row of a real batch
    samples: int | None = None  # samples in a batch of the run; None if unknown
    batch_bytes = 0  # bytes of the last batch

    def model_to_device(self) -> None:
        pass  # fake tensors stay where they are

    def tensor_init_context(self, empty_init: bool | None = None) -> Any:
        """Make modules fake that are built under the strategy, as in ``configure_model``."""
        stack = ExitStack()
        stack.enter_context(super().tensor_init_context(empty_init))  # type: ignore[misc]
        stack.enter_context(self.world.inside())
        return stack

    def teardown(self) -> None:
        pass  # nothing was moved

    def batch_to_device(
        self, batch: Any, device: Any = None, dataloader_idx: int = 0
    ) -> Any:
        """Return a fake batch of the rehearsed size."""
        count_samples = Samples(combined=False)
        samples = count_samples(batch)
        # Each row of a real batch stands for this many rows of the rehearsed one.
        if samples is not None:
            samples *= self.rows
        self.samples = samples
        size = replace(self.size, batch=self.size.batch * self.rows)
        fake_batch = self.world.fake_copy(batch, size)
        self.batch_bytes = bytes_of_batch(fake_batch)
        return fake_batch


class FakeStrategy(FakeDevice, SingleDeviceStrategy):
    def __init__(self, world: FakeWorld) -> None:
        super().__init__(device=CPU)
        self.world = world


class RankZero(LightningEnvironment):
    """The environment of a rank 0 that needs no launcher, whatever this process's variables are."""

    creates_processes_externally = True

    def global_rank(self) -> int:
        return 0

    local_rank = node_rank = global_rank


class FakeReplica(FakeStrategy):
    """One of the devices of DDP: it holds the whole module, and needs no data from the others."""

    # whether all gradients are copied into one tensor after backward
    copies_gradients = False

    def __init__(self, world: FakeWorld, ranks: int) -> None:
        super().__init__(world)
        self.ranks = ranks
        self.world_size = ranks

    def post_backward(self, closure_loss: Tensor) -> None:
        """Allocate the copy of all gradients that ``flat_ddp`` sends, and free it, as ``flat_ddp`` does."""
        if not self.copies_gradients or self.lightning_module is None:
            return
        flat_gradients = []
        for parameter in self.lightning_module.parameters():
            if parameter.grad is not None:
                flat_gradients.append(parameter.grad.flatten())
        torch.cat(flat_gradients)

    def setup_environment(self) -> None:
        """Join the fake group, for modules that look up the ranks, and for ``ZeroRedundancyOptimizer``."""
        _join_fake_group(self.world, self.ranks)
        super().setup_environment()


class FakeRank(FakeDevice):
    """A mixin for strategies that split the module; their own code shards and gathers the fake tensors."""

    def setup_environment(self) -> None:
        """Join the fake group, which the strategy then uses as its own."""
        _join_fake_group(self.world, self.ranks)
        super().setup_environment()  # type: ignore[misc]

    def setup(self, trainer: Trainer) -> None:
        """Shard the module and make the optimizers, on fake tensors; replace CUDA's autocast by the CPU's."""
        plugin = trainer.precision_plugin
        if isinstance(plugin, FSDPPrecision) and plugin.precision.endswith("mixed"):
            _use_cpu_autocast(plugin)
        with self.world.inside():
            super().setup(trainer)  # type: ignore[misc]

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return obj  # rank 0 is the one that sends

    def barrier(self, name: str | None = None) -> None:
        pass  # no other rank exists


def _use_cpu_autocast(plugin: FSDPPrecision) -> None:
    """Make ``plugin`` autocast on the CPU, where fake tensors are; its own method enters CUDA's autocast."""
    autocast = partial(torch.autocast, CPU.type, torch.bfloat16)
    vars(plugin)["forward_context"] = autocast  # hides the method of the class


_OFFLOADED = "FSDP keeps its weights and the optimizer's states on the host (cpu_offload), which cannot be planned"


def _refuse_offload(*_: object, **__: object) -> None:
    """Stand in for the constructor of FSDP2's ``CPUOffloadPolicy``: refuse offloading."""
    raise Uncounted(_OFFLOADED)


def _join_fake_group(world: FakeWorld, ranks: int) -> None:
    """Make this process rank 0 of ``ranks``. It replaces code of torch, so it is only for a separate process."""
    # imported here, because the import takes half a second
    from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel

    if world.gpu is not None:
        CPUOffloadPolicy.__init__ = _refuse_offload  # type: ignore[method-assign]
    FAKE_GROUP.find()  # this import registers the backend
    store = dist.HashStore()  # type: ignore[attr-defined]  # documented, but not exported
    dist.init_process_group("fake", store=store, rank=0, world_size=ranks)
    world.live.follow_resizes()
    _hide_whole_shapes()
    construct = FullyShardedDataParallel.__init__

    def construct_on_cpu(wrapper: Any, *args: Any, **kwargs: Any) -> None:
        construct(wrapper, *args, **{**kwargs, "device_id": CPU})

    # FSDP refuses modules on a CPU unless this argument declares that they stay there.
    setattr(FullyShardedDataParallel, construct.__name__, construct_on_cpu)


def _hide_whole_shapes() -> None:
    """Make DTensor infer the shape of all shards together outside of our modes, which would count its fake tensors.

    torch infers a shape once per operator and shape in a real run, but every time if tensors are fake.
    """
    infer_shape = WHOLE_SHAPES.find_or(None)
    if infer_shape is None:
        return

    def infer_without_modes(*args: Any) -> Any:
        with NO_MODES.find()():
            return infer_shape(*args)

    setattr(
        infer_shape.__globals__["ShardingPropagator"],
        WHOLE_SHAPES.name,
        infer_without_modes,
    )


# the default ``bucket_cap_mb`` of torch.nn.parallel.DistributedDataParallel
_BUCKET_BYTES = 25 << 20


def buckets(module: torch.nn.Module) -> list[Tensor]:
    """Return tensors like the buckets in which DDP reduces gradients.

    A bucket has gradients of one dtype, and is full with the parameter that makes it 25 MiB or more. Ignored: DDP makes
    its first bucket smaller, and sparse gradients are in no bucket.
    """
    # by dtype: the number of elements of each bucket
    elements_by_dtype: dict[torch.dtype, list[int]] = {}
    for parameter in module.parameters():
        if not parameter.requires_grad:
            continue
        elements = elements_by_dtype.setdefault(parameter.dtype, [0])
        is_full = elements[-1] * parameter.itemsize >= _BUCKET_BYTES
        if is_full:
            elements.append(0)
        elements[-1] += parameter.numel()

    tensors = []
    for dtype, elements in elements_by_dtype.items():
        for count in elements:
            tensors.append(torch.empty(count, dtype=dtype))
    return tensors


# by a part of the collective's name: how many times each of n ranks in a ring sends (n-1)/n of all bytes
_RING_PASSES = {
    "reduce_scatter": 1,
    "allreduce": 2,
    "all_reduce": 2,
    "gather": 1,
    "alltoall": 1,
    "all_to_all": 1,
}

# collectives from or to one rank: their bytes pass each link once
_ROOTED = ("broadcast", "reduce_")


def ring_bytes(name: str, size_bytes: int, ranks: int) -> int:
    """Return the bytes that each of ``ranks`` sends in the collective ``name``; 0 for a barrier.

    ``size_bytes`` is the size of the whole tensor: after gathering, or before scattering. The factors are those of
    nccl-tests' "bus bandwidth" (doc/PERFORMANCE.md): no algorithm over point-to-point links sends less; only a
    reduction in the switch does.
    """
    for name_part, passes in _RING_PASSES.items():
        if name_part in name:
            return passes * size_bytes * (ranks - 1) // ranks
    is_rooted = any(name_part in name for name_part in _ROOTED)
    if is_rooted and ranks > 1:
        return size_bytes
    return 0


class LinkBytes(DISPATCH_MODE.as_base()):  # type: ignore[misc]  # a class that is looked up at run time
    """Counts the bytes that collectives send, in ``by_phase``, while the mode is entered."""

    def __init__(self, timeline: Timeline) -> None:
        super().__init__()
        self._timeline = timeline
        self.by_phase: Counter[str] = Counter()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # If this were true, torch would import its compiler, only to exclude this mode from it.
        return False

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operator ``func`` (torch calls this for each one), and count the bytes that a collective sends."""
        if any(hasattr(kind, "to_local") for kind in types):
            # DTensor splits the call, and its collectives arrive here one by one.
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        phase_code = self._timeline.stack[-1]
        is_collective = getattr(func, "namespace", "") in ("c10d", "_c10d_functional")
        is_within_step = phase_code < OUTSIDE
        if is_collective and is_within_step:
            values = [*args, result]
            size_bytes = max(_tensor_bytes(value) for value in values)
            ranks = _ranks_in_group(values)
            sent_bytes = ring_bytes(str(func), size_bytes, ranks)
            self.by_phase[PARTS[phase_code]] += sent_bytes
        return result


def _tensor_bytes(value: Any) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def _ranks_in_group(values: list[Any]) -> int:
    """Return the number of ranks in the process group of a collective, whose arguments and result are ``values``.

    One of the values is the group's name or torch's object for the group. Without either, all ranks take part.
    """
    groups_by_name = {}
    for group, name in WORLD.find().pg_names.items():
        groups_by_name[name] = group
    for value in values:
        if isinstance(value, str) and value in groups_by_name:
            return int(groups_by_name[value].size())
        # The reduction operator is a ScriptObject too, but the group comes first.
        if isinstance(value, torch.ScriptObject):
            return int(dist.ProcessGroup.unbox(value).size())
    return dist.get_world_size()


def fake_strategy(
    options: Mapping[str, Any], make: Callable[[], Any], world: FakeWorld, trains: bool
) -> Strategy:
    """Return a strategy with fake tensors for the one that the Trainer's ``options`` name.

    Args:
        options: the options of the Trainer.
        make: makes the strategy itself.
        world: makes the fake tensors.
        trains: whether the run trains, so that gradients are reduced.

    Raises:
        Uncounted: the strategy splits the module, and cannot be rehearsed.
        UsageError: the strategy splits the module over an unknown number of devices.
    """
    strategy_class, arguments = _strategy_in(options)
    if issubclass(strategy_class, SHARDED):
        return _fake_rank(strategy_class, make(), options, world)
    if not issubclass(strategy_class, DDPStrategy):
        return FakeStrategy(world)
    strategy = FakeReplica(world, devices_in(options))
    if not trains:
        return strategy
    strategy.reduces = True
    strategy.copies_gradients = str(arguments.get("wrapper")).endswith(
        f":{FlatDDP.__name__}"
    )
    # Gradients that are views of the buckets need no further memory.
    gradients_are_views = bool(arguments.get("gradient_as_bucket_view"))
    strategy.has_buckets = strategy_class is not WrappedDDP and not gradients_are_views
    return strategy


def _fake_rank(
    strategy_class: type[Strategy],
    strategy: Any,
    options: Mapping[str, Any],
    world: FakeWorld,
) -> Strategy:
    """Return a copy of ``strategy``, an object or a registered name, that runs as rank 0 on fake tensors.

    The class of the copy is derived from the strategy's own.
    """
    if issubclass(strategy_class, DeepSpeedStrategy):
        raise Uncounted(
            f"{strategy_class.__name__} splits the module with its own engine, which cannot work on tensors "
            "without data"
        )
    devices = options.get("devices")
    if str(devices) in ("auto", "-1", "None"):
        expected = f"the number of devices over which {strategy_class.__name__} splits the module"
        raise UsageError(f"trainer.devices: expected {expected}, given {devices}")
    if isinstance(strategy, str):
        strategy = StrategyRegistry.get(strategy)
    fake_class = type(strategy_class.__name__, (FakeRank, type(strategy)), {})
    # This option is FSDP's; other strategies offload by ``CPUOffloadPolicy``.
    offload = getattr(strategy, "cpu_offload", None)
    if world.gpu is not None and getattr(offload, "offload_params", False):
        raise Uncounted(_OFFLOADED)
    # made without its constructor, because it takes over the attributes of ``strategy``
    fake: Any = object.__new__(fake_class)
    vars(fake).update(vars(strategy), world=world, ranks=devices_in(options))
    fake.cluster_environment = RankZero()
    fake.parallel_devices = [CPU] * (fake.ranks // _nodes_in(options))
    return fake  # type: ignore[no-any-return]


def _strategy_in(
    options: Mapping[str, Any],
) -> tuple[type[Strategy], Mapping[str, Any]]:
    """Return the class of the strategy that the Trainer's ``options`` name, and its arguments."""
    strategy: Any = options.get("strategy") or "auto"
    if not isinstance(strategy, str):
        module, _, name = strategy["class_path"].rpartition(".")
        arguments = dict(strategy.get("init_args") or {})
        arguments.update(strategy.get("dict_kwargs") or {})
        return getattr(import_module(module), name), arguments
    if strategy in StrategyRegistry:
        entry = StrategyRegistry[strategy]
        return entry["strategy"], entry["init_params"]
    if strategy == "auto" and devices_in(options) > 1:
        return DDPStrategy, {}
    return SingleDeviceStrategy, {}


def devices_in(options: Mapping[str, Any]) -> int:
    """Return the number of devices of all nodes; "auto", which depends on the run's machine, counts as one."""
    return _devices_of_node(options.get("devices")) * _nodes_in(options)


def _devices_of_node(devices: Any) -> int:
    """Return the number of devices in the option ``devices``: a number, indices as a list or a text, or "auto"."""
    if isinstance(devices, (list, tuple)):
        return len(devices)
    if isinstance(devices, str) and not devices.isdecimal():
        return len(devices.split(","))
    return max(int(devices or 1), 1)


def _nodes_in(options: Mapping[str, Any]) -> int:
    return int(options.get("num_nodes") or 1)
