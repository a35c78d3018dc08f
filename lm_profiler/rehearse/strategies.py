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
from lm_profiler.torch_names import DISPATCH_MODE, FAKE_GROUP, NO_MODES, WHOLE_SHAPES, WORLD, tree_leaves
from lm_profiler.training.data_parallel import FlatDDP, WrappedDDP
from lm_profiler.usage_error import UsageError

CPU = torch.device("cpu")

# precisions that Lightning refuses on the CPU (float16 needs a gradient scaler), and what is rehearsed instead
AS_WIDE = {"16-mixed": "bf16-mixed", "16": "bf16-mixed"}

SHARDED = (DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy)  # strategies that split the module over devices


@dataclass(frozen=True)
class Size:
    """The factors by which a batch's rows and columns are multiplied; columns only where they are a context."""

    batch: float = 1.0
    context: float = 1.0

    def __call__(self, shape: Sequence[int]) -> Sequence[int]:
        factors = (self.batch, self.context, *[1.0] * len(shape))
        return [n and max(round(n * factor), 1) for n, factor in zip(shape, factors, strict=False)]


class FakeDevice:
    """A mixin that gives the device of a strategy fake tensors."""

    world: FakeWorld
    reduces = has_buckets = False  # whether DDP reduces all gradients, and whether its buckets hold them a second time
    ranks = 1  # the number of ranks; this is rank 0
    size = Size()
    rows = 1  # rehearsed rows for each row of a real batch
    samples: int | None = None  # samples in a batch of the run; None where that is unknown
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

    def batch_to_device(self, batch: Any, device: Any = None, dataloader_idx: int = 0) -> Any:
        """Return a fake batch of the rehearsed size."""
        made, whole = Samples(combined=False)(batch), replace(self.size, batch=self.size.batch * self.rows)
        self.samples = None if made is None else made * self.rows
        rehearsed = self.world.faked(batch, whole)
        self.batch_bytes = bytes_of_batch(rehearsed)
        return rehearsed


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

    copies = False  # whether all gradients are copied into one tensor after backward

    def __init__(self, world: FakeWorld, ranks: int) -> None:
        super().__init__(world)
        self.ranks = self.world_size = ranks

    def post_backward(self, closure_loss: Tensor) -> None:
        """Hold the copy of all gradients that ``flat_ddp`` sends, as long as it does."""
        if self.copies and self.lightning_module is not None:
            gradients = [each.grad for each in self.lightning_module.parameters() if each.grad is not None]
            torch.cat([each.flatten() for each in gradients])

    def setup_environment(self) -> None:
        """Join the fake group, for modules that ask who is there, and for ``ZeroRedundancyOptimizer``."""
        _join(self.world, self.ranks)
        super().setup_environment()


class FakeRank(FakeDevice):
    """A mixin for strategies that split the module: their own code shards and gathers fake tensors."""

    def setup_environment(self) -> None:
        """Join the fake group, which the strategy then takes for its own."""
        _join(self.world, self.ranks)
        super().setup_environment()  # type: ignore[misc]

    def setup(self, trainer: Trainer) -> None:
        """Shard the module, and make the optimizers, among fake tensors."""
        plugin = trainer.precision_plugin
        if isinstance(plugin, FSDPPrecision) and plugin.precision.endswith("mixed"):  # it names CUDA's autocast
            vars(plugin)["forward_context"] = partial(torch.autocast, CPU.type, torch.bfloat16)
        with self.world.inside():
            super().setup(trainer)  # type: ignore[misc]

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return obj  # rank 0 is the one that sends

    def barrier(self, name: str | None = None) -> None:
        pass  # no other rank exists


def _join(world: FakeWorld, ranks: int) -> None:
    """Make this process rank 0 of ``ranks``. Only for a separate process: it replaces code of torch."""
    from torch.distributed.fsdp import FullyShardedDataParallel  # takes half a second, needed only here

    FAKE_GROUP.find()  # this import registers the backend
    store = dist.HashStore()  # type: ignore[attr-defined]  # documented, but not exported
    dist.init_process_group("fake", store=store, rank=0, world_size=ranks)
    world.live.follow_resizes()
    _hide_whole_shapes()
    construct = FullyShardedDataParallel.__init__

    def on_cpu(wrapper: Any, *args: Any, **kwargs: Any) -> None:
        construct(wrapper, *args, **{**kwargs, "device_id": CPU})

    # It refuses modules on a CPU unless an argument says that they stay there.
    setattr(FullyShardedDataParallel, construct.__name__, on_cpu)


def _hide_whole_shapes() -> None:
    """Have DTensors infer the shape of all shards unseen: they make fake tensors for that.

    Torch does so once per operator and shape in a run, but every time if tensors are fake.
    """
    ask = WHOLE_SHAPES.find_or(None)
    if ask is None:
        return

    def unseen(*args: Any) -> Any:
        with NO_MODES.find()():
            return ask(*args)

    setattr(ask.__globals__["ShardingPropagator"], WHOLE_SHAPES.name, unseen)


_BUCKET = 25 << 20  # bytes: the default ``bucket_cap_mb`` of torch.nn.parallel.DistributedDataParallel


def buckets(module: torch.nn.Module) -> list[Tensor]:
    """Return the buckets in which DDP reduces gradients: 25 MiB and the rest of the last parameter each, by dtype.

    Left out: DDP makes its first bucket smaller, and sparse gradients are in no bucket.
    """
    sizes: dict[torch.dtype, list[int]] = {}
    for parameter in module.parameters():
        if parameter.requires_grad:
            of = sizes.setdefault(parameter.dtype, [0])
            if of[-1] * parameter.itemsize >= _BUCKET:
                of.append(0)
            of[-1] += parameter.numel()
    return [torch.empty(size, dtype=dtype) for dtype, of in sizes.items() for size in of]


# how often a ring of n ranks passes (n-1)/n of all bytes on, by a part of the collective's name
_TURNS = {"reduce_scatter": 1, "allreduce": 2, "all_reduce": 2, "gather": 1, "alltoall": 1, "all_to_all": 1}

_FROM_ONE = ("broadcast", "reduce_")  # collectives whose bytes pass each link once


def ring_bytes(name: str, size_bytes: int, ranks: int) -> int:
    """Return the bytes that each of ``ranks`` sends in the collective ``name`` of ``size_bytes``; 0 for a barrier.

    The size is the gathered, or not yet scattered, one. The factors are those of nccl-tests' "bus bandwidth"
    (doc/PERFORMANCE.md): no algorithm over point-to-point links sends less, reduction in a switch aside.
    """
    turns = next((n for part, n in _TURNS.items() if part in name), None)
    if turns is not None:
        return turns * size_bytes * (ranks - 1) // ranks
    return size_bytes if ranks > 1 and any(part in name for part in _FROM_ONE) else 0


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
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(hasattr(kind, "to_local") for kind in types):
            return NotImplemented  # the DTensor takes the call apart, and its collectives come here one by one
        made = func(*args, **(kwargs or {}))
        code = self._timeline.stack[-1]
        if getattr(func, "namespace", "") in ("c10d", "_c10d_functional") and code < OUTSIDE:
            given = [*args, made]
            sizes = (sum(leaf.nbytes for leaf in tree_leaves(each) if isinstance(leaf, Tensor)) for each in given)
            self.by_phase[PARTS[code]] += ring_bytes(str(func), max(sizes), _ranks_among(given))
        return made


def _ranks_among(given: list[Any]) -> int:
    """Return the size of the process group among a collective's arguments: an object of C++, or a name."""
    groups = {name: group for group, name in WORLD.find().pg_names.items()}
    for each in given:
        if isinstance(each, str) and each in groups:
            return int(groups[each].size())
        if isinstance(each, torch.ScriptObject):  # the group precedes the reduction operator
            return int(dist.ProcessGroup.unbox(each).size())
    return dist.get_world_size()


def fake_strategy(given: Mapping[str, Any], make: Callable[[], Any], world: FakeWorld, trains: bool) -> Strategy:
    """Return the strategy that the Trainer's options ``given`` name, or ``make`` makes, with fake tensors.

    Raises:
        Uncounted: The strategy splits the module, and cannot be rehearsed.
        UsageError: It splits the module over an unknown number of devices.
    """
    kind, options = _named(given)
    if issubclass(kind, SHARDED):
        return _rank_of(kind, make(), given, world)
    if not issubclass(kind, DDPStrategy):
        return FakeStrategy(world)
    strategy = FakeReplica(world, devices_in(given))
    strategy.reduces = trains
    strategy.copies = trains and str(options.get("wrapper")).endswith(f":{FlatDDP.__name__}")
    # With ``gradient_as_bucket_view`` the buckets are the gradients.
    strategy.has_buckets = trains and kind is not WrappedDDP and not options.get("gradient_as_bucket_view")
    return strategy


def _rank_of(kind: type[Strategy], made: Any, given: Mapping[str, Any], world: FakeWorld) -> Strategy:
    """Turn a strategy that was ``made``, or named, into a fake one of its own class."""
    if issubclass(kind, DeepSpeedStrategy):
        raise Uncounted(f"{kind.__name__} splits the module by its own engine, which takes no fake tensors")
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
