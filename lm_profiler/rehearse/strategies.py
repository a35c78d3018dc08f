"""The strategies of a rehearsal: one device, or rank 0 of several, with fake tensors.

Rank 0 stands in torch's fake process group, whose collectives move nothing; ``LinkBytes`` counts what they would send.
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
    """The factors by which a batch's rows and columns are multiplied; columns only if they are a context."""

    batch: float = 1.0
    context: float = 1.0

    def __call__(self, shape: Sequence[int]) -> Sequence[int]:
        """Return the resized ``shape``; an empty dimension stays empty, and no other becomes so."""
        resized = list(shape)
        for dimension, factor in enumerate((self.batch, self.context)[: len(shape)]):
            length = shape[dimension]
            if length:
                resized[dimension] = max(round(length * factor), 1)
        return resized


class FakeDevice:
    """A mixin for a strategy, on whose device all tensors are fake."""

    world: FakeWorld
    reduces = False  # whether DDP reduces all gradients
    has_buckets = False  # whether DDP's buckets hold the gradients a second time
    ranks = 1  # the number of ranks; this is rank 0
    size = Size()
    rows = 1  # rehearsed rows for each row of a real batch
    samples: int | None = None  # samples in a batch of the run; None if that is unknown
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
    """One of DDP's devices: it holds the whole module, and needs nothing from the others."""

    # whether all gradients are copied into one tensor after backward
    copies_gradients = False

    def __init__(self, world: FakeWorld, ranks: int) -> None:
        super().__init__(world)
        self.ranks = ranks
        self.world_size = ranks

    def post_backward(self, closure_loss: Tensor) -> None:
        """Hold the copy of all gradients that ``flat_ddp`` sends, as long as it does."""
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
    """A mixin for strategies that split the module: their own code shards and gathers fake tensors."""

    def setup_environment(self) -> None:
        """Join the fake group, which the strategy then takes for its own."""
        _join_fake_group(self.world, self.ranks)
        super().setup_environment()  # type: ignore[misc]

    def setup(self, trainer: Trainer) -> None:
        """Shard the module and make the optimizers, on fake tensors."""
        plugin = trainer.precision_plugin
        uses_cuda_autocast = isinstance(
            plugin, FSDPPrecision
        ) and plugin.precision.endswith("mixed")
        if uses_cuda_autocast:
            vars(plugin)["forward_context"] = partial(
                torch.autocast, CPU.type, torch.bfloat16
            )
        with self.world.inside():
            super().setup(trainer)  # type: ignore[misc]

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return obj  # rank 0 is the one that sends

    def barrier(self, name: str | None = None) -> None:
        pass  # no other rank exists


_OFFLOADED = "FSDP keeps its weights and the optimizer's states on the host (cpu_offload), which is not planned"


def _refuse_offload(*_: object, **__: object) -> None:
    """Replace the constructor of FSDP2's ``CPUOffloadPolicy``."""
    raise Uncounted(_OFFLOADED)


def _join_fake_group(world: FakeWorld, ranks: int) -> None:
    """Make this process rank 0 of ``ranks``. Only for a separate process: it replaces code of torch."""
    # takes half a second, needed only here
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

    # It refuses modules on a CPU unless an argument says that they stay there.
    setattr(FullyShardedDataParallel, construct.__name__, construct_on_cpu)


def _hide_whole_shapes() -> None:
    """Have DTensors infer the shape of all shards outside of our modes: they make fake tensors for that.

    Torch does so once per operator and shape in a run, but every time if tensors are fake.
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
    """Return the buckets in which DDP reduces gradients: 25 MiB and the rest of the last parameter each, by dtype.

    Left out: DDP makes its first bucket smaller, and sparse gradients are in no bucket.
    """
    elements_by_dtype: dict[torch.dtype, list[int]] = {}  # of each bucket
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


# how often a ring of n ranks passes (n-1)/n of all bytes on, by a part of the collective's name
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
    """Return the bytes that each of ``ranks`` sends in the collective ``name`` of ``size_bytes``; 0 for a barrier.

    The size is the gathered, or not yet scattered, one. The factors are those of nccl-tests' "bus bandwidth"
    (doc/PERFORMANCE.md): no algorithm over point-to-point links sends less, reduction in a switch aside.
    """
    for name_part, passes in _RING_PASSES.items():
        if name_part in name:
            return passes * size_bytes * (ranks - 1) // ranks
    is_rooted = any(name_part in name for name_part in _ROOTED)
    if is_rooted and ranks > 1:
        return size_bytes
    return 0


class LinkBytes(DISPATCH_MODE.as_base()):  # type: ignore[misc]  # a class that is looked up at run time
    """Counts what collectives send, in ``by_phase``, as long as it is entered."""

    def __init__(self, timeline: Timeline) -> None:
        super().__init__()
        self._timeline = timeline
        self.by_phase: Counter[str] = Counter()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # so that torch does not import its compiler to keep it away

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if any(hasattr(kind, "to_local") for kind in types):
            return NotImplemented  # the DTensor takes the call apart, and its collectives come here one by one
        result = func(*args, **(kwargs or {}))
        phase_code = self._timeline.stack[-1]
        is_collective = getattr(func, "namespace", "") in ("c10d", "_c10d_functional")
        is_within_step = phase_code < OUTSIDE
        if is_collective and is_within_step:
            values = [*args, result]
            size_bytes = max(_tensor_bytes(value) for value in values)
            self.by_phase[PARTS[phase_code]] += ring_bytes(
                str(func), size_bytes, _ranks_in_group(values)
            )
        return result


def _tensor_bytes(value: Any) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def _ranks_in_group(values: list[Any]) -> int:
    """Return the size of the process group of a collective, whose arguments and result are ``values``.

    The group is one of them: its name, or torch's object for the group. Without either, all ranks take part.
    """
    groups_by_name = {}
    for group, name in WORLD.find().pg_names.items():
        groups_by_name[name] = group
    for value in values:
        if isinstance(value, str) and value in groups_by_name:
            return int(groups_by_name[value].size())
        # The reduction operator is such an object too, but the group precedes it.
        if isinstance(value, torch.ScriptObject):
            return int(dist.ProcessGroup.unbox(value).size())
    return dist.get_world_size()


def fake_strategy(
    options: Mapping[str, Any], make: Callable[[], Any], world: FakeWorld, trains: bool
) -> Strategy:
    """Return the strategy that the Trainer's ``options`` name, or ``make`` makes, with fake tensors.

    Raises:
        Uncounted: The strategy splits the module, and cannot be rehearsed.
        UsageError: It splits the module over an unknown number of devices.
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
    # of the buckets
    gradients_are_views = bool(arguments.get("gradient_as_bucket_view"))
    strategy.has_buckets = strategy_class is not WrappedDDP and not gradients_are_views
    return strategy


def _fake_rank(
    strategy_class: type[Strategy],
    strategy: Any,
    options: Mapping[str, Any],
    world: FakeWorld,
) -> Strategy:
    """Return a copy of ``strategy`` that runs as rank 0 on fake tensors; its class is derived from the strategy's own.

    ``strategy`` is the object or its registered name.
    """
    if issubclass(strategy_class, DeepSpeedStrategy):
        raise Uncounted(
            f"{strategy_class.__name__} splits the module by its own engine, which takes no fake tensors"
        )
    devices = options.get("devices")
    if str(devices) in ("auto", "-1", "None"):
        expected = f"the number of devices over which {strategy_class.__name__} splits the module"
        raise UsageError(f"trainer.devices: expected {expected}, given {devices}")
    if isinstance(strategy, str):
        strategy = StrategyRegistry.get(strategy)
    fake_class = type(strategy_class.__name__, (FakeRank, type(strategy)), {})
    # FSDP's own option; of other strategies by ``CPUOffloadPolicy``
    offload = getattr(strategy, "cpu_offload", None)
    if world.gpu is not None and getattr(offload, "offload_params", False):
        raise Uncounted(_OFFLOADED)
    # not constructed: it takes over the attributes of ``strategy``
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
    """Return how many the Trainer's option ``devices`` names: a number, a list or a text of indices, or "auto"."""
    if isinstance(devices, (list, tuple)):
        return len(devices)
    if isinstance(devices, str) and not devices.isdecimal():
        return len(devices.split(","))
    return max(int(devices or 1), 1)


def _nodes_in(options: Mapping[str, Any]) -> int:
    return int(options.get("num_nodes") or 1)
