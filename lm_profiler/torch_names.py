"""Lists every private name of torch that the code uses, what it is for, and what happens without it.

Nothing here imports torch: a name is looked up when it is first needed. Where this torch lacks a name, ``NameMissing``
is raised, and a ``Guard`` takes out the one instrument that needs it, with a note ("... left out: this torch has no
..."). Neither the training loop nor an import depends on any of these names.

Operators of ATen (``torch.ops.aten._foreach_add_``) are not listed: they are data, and formulas of operators that this
torch lacks are left out.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from functools import cache
from typing import Any

TORCHS = "2.10 to 2.15"  # versions of torch that have these names, as tests have seen


class NameMissing(RuntimeError):
    """Raised where the installed version of a library lacks a private name."""


@dataclass(frozen=True)
class PrivateName:
    """One private name of a library."""

    path: str  # an attribute of a module, as ``torch.cuda._sleep``, or of an object, as ``DataLoader._iterator``
    purpose: str  # what it is used for
    without: str  # what happens in a version that lacks it
    seen: str = TORCHS  # the versions that have it

    def find(self) -> Any:
        """Return the module's attribute.

        Raises:
            NameMissing: This version of the library lacks it.
        """
        return _find(self.path)

    def find_or(self, otherwise: Any) -> Any:
        """Return the module's attribute; ``otherwise`` where it is missing."""
        try:
            return self.find()
        except NameMissing:
            return otherwise

    def of(self, thing: Any) -> Any:
        """Return this attribute of ``thing``.

        Raises:
            NameMissing: ``thing`` lacks it.
        """
        try:
            return look_up(thing, self.name, self.path)
        except AttributeError:
            raise missing(self.path) from None

    def of_or(self, thing: Any, otherwise: Any = None) -> Any:
        """Return this attribute of ``thing``; ``otherwise`` where it is missing."""
        try:
            return self.of(thing)
        except NameMissing:
            return otherwise

    def loaded(self) -> Any:
        """Return the module of this name if the process has imported it already; else None."""
        return sys.modules.get(self.path)

    def as_base(self) -> Any:
        """Return the class as a base class; where it is missing, a class whose constructor raises ``NameMissing``.

        So a module with a derived class can be imported with any version.
        """
        return self.find_or(None) or type(self.name, (), {"__init__": _raising(self.path)})

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition(".")[2]


def look_up(thing: Any, name: str, path: str) -> Any:
    """Return the attribute ``name`` of ``thing``. All look-ups pass here, so that tests can hide a ``path``."""
    return getattr(thing, name)


def missing(path: str) -> NameMissing:
    """Return the error that says that the installed library has no ``path``."""
    return NameMissing(f"this {'Lightning' if path in _LIGHTNINGS else 'torch'} has no {path}")


_LIGHTNINGS: set[str] = set()  # paths of Lightning's names, which ``lightning_names`` adds


def lightnings(name: PrivateName) -> PrivateName:
    """Register ``name`` as Lightning's, and return it."""
    _LIGHTNINGS.add(name.path)
    return name


@cache
def _find(path: str) -> Any:
    """Return the attribute at a dotted path, importing modules on the way where attributes are missing."""
    at, *rest = path.split(".")
    try:
        value: Any = importlib.import_module(at)
    except ImportError:
        raise missing(path) from None
    for part in rest:
        at += f".{part}"
        try:
            value = look_up(value, part, path)
        except AttributeError:
            try:
                value = importlib.import_module(at)
            except ImportError:
                raise missing(path) from None
    return value


def _raising(path: str) -> Any:
    def init(self: Any, *_: Any, **__: Any) -> None:
        raise missing(path)

    return init


# Counting FLOPs and traffic. Without one of these: FLOPs, MFU and traffic are unknown.

DISPATCH_MODE = PrivateName(
    "torch.utils._python_dispatch.TorchDispatchMode",
    "the base class of whatever sees each operator that runs",
    "FLOPs unknown, and a run cannot be planned",
)
MODE_STACK = PrivateName(
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack",
    "tells whether the FLOP counter is the innermost mode, and may be left",
    "FLOPs unknown",
)
GRAPH_TASK = PrivateName(
    "torch._C._current_graph_task_id",
    "tells whether this thread is in a backward pass",
    "FLOPs and memory by cause unknown",
)
DISPATCH_KEY = PrivateName(
    "torch._C.DispatchKey", "names autocast among what torch's dispatcher does", "FLOPs of custom operators unknown"
)
EXCLUDED_KEYS = PrivateName(
    "torch._C._dispatch_tls_local_exclude_set",
    "tells whether autocast is on for the caller of a custom operator",
    "FLOPs of custom operators unknown",
)
INCLUDED_KEYS = PrivateName("torch._C._dispatch_tls_local_include_set", "as above", "FLOPs of custom operators unknown")
FORCED_KEYS = PrivateName(
    "torch._C._ForceDispatchKeyGuard",
    "runs a custom operator under its caller's autocast",
    "FLOPs of custom operators unknown",
)
SCHEMA = PrivateName(
    "OpOverload._schema",
    "an operator's name without its overload, and which arguments it writes to",
    "FLOPs and traffic unknown",
)

# Trees of tensors. Without them: plain tuples, lists and dictionaries are walked by our own code.

TREE_LEAVES = PrivateName(
    "torch.utils._pytree.tree_leaves", "all tensors of a batch or an operator's arguments", "plain containers only"
)
TREE_MAP = PrivateName("torch.utils._pytree.tree_map", "a batch with other tensors in it", "plain containers only")

# Memory.

NO_TORCH_FUNCTION = PrivateName(
    "torch._C.DisableTorchFunction",
    "keeps modes of the user's out of our questions about tensors",
    "such modes see them, which costs time",
)
SPARSE_INDICES = PrivateName("Tensor._indices", "what a sparse gradient stores", "memory by cause unknown")
SPARSE_VALUES = PrivateName("Tensor._values", "what a sparse gradient stores", "memory by cause unknown")
STORAGE = PrivateName(
    "UntypedStorage._cdata",
    "tells storages apart, also those that are gone",
    "traffic may miss weights",
)
RECORD_HISTORY = PrivateName(
    "torch.cuda.memory._record_memory_history", "memory.history: starts torch's own record", "no history"
)
HISTORY = PrivateName("torch.cuda.memory._snapshot", "memory.history: what is dumped", "no history")

# Compilation.

DYNAMO = PrivateName("torch._dynamo", "tells whether anything can be compiled at all", "read as: nothing is")
DYNAMO_METRICS = PrivateName(
    "torch._dynamo.utils", "how many graphs were compiled, when and why", "recompilations unknown"
)
COMPILED_CALL = PrivateName("Module._compiled_call_impl", "tells a compiled module", "FLOPs and plans unknown")

# The trace.

PROFILER_ENABLED = PrivateName(
    "torch.autograd.profiler._is_profiler_enabled",
    "tells whether the user's own profiler runs; two end the process",
    "no trace",
)
PREPARE_TRACE = PrivateName(
    "profile._prepare_trace", "gives way to a profiler that the user starts; two end the process", "no trace"
)

# The loader.

READY_TASKS = PrivateName("_MultiProcessingDataLoaderIter._task_info", "prefetched batches out of order", "unknown")
READY_RESULTS = PrivateName(
    "_MultiProcessingDataLoaderIter._worker_result_queue", "prefetched batches in the workers' queue", "unknown"
)
READY_PINNED = PrivateName("_MultiProcessingDataLoaderIter._data_queue", "prefetched and pinned batches", "unknown")

# Ranks.

DDP_FACTS = PrivateName("DistributedDataParallel._get_ddp_logging_data", "how many buckets DDP has", "arrivals unknown")
WORLD = PrivateName(
    "torch.distributed.distributed_c10d._world",
    "all process groups, and which backends are recorded through hooks",
    "arrivals and NCCL's durations unknown",
)
DEFAULT_STORE = PrivateName(
    "torch.distributed.distributed_c10d._get_default_store",
    "what ranks tell each other besides training's collectives",
    "each rank records alone",
)
TIME_COLLECTIVES = PrivateName(
    "ProcessGroup._enable_collectives_timing", "has NCCL time its collectives", "durations on the device unknown"
)
FLIGHT_RECORDER = PrivateName(
    "torch._C._distributed_c10d._dump_fr_trace", "when each rank called a collective", "arrivals unknown"
)
NCCL_RECORDER = PrivateName(
    "torch._C._distributed_c10d._dump_nccl_trace", "the same of NCCL", "arrivals unknown", "2.10 to 2.14"
)

# CUDA.

NVML_INDEX = PrivateName(
    "torch.cuda._get_nvml_device_index", "a GPU's number in the driver, without CUDA", "planned as for any GPU"
)
BAD_FORK = PrivateName(
    "torch.cuda._is_in_bad_fork", "tells a forked process that cannot use CUDA", "a plan takes a fresh process"
)

# Planning: a process of its own, in which code of torch is replaced. Without one of these: the plan is unknown.

ENGINE = PrivateName(
    "torch.autograd._engine_run_backward", "recomputes as a GPU would", "a plan computes as the CPU does"
)
FAKE_MODE = PrivateName("torch._subclasses.fake_tensor.FakeTensorMode", "tensors without data", "plan unknown")
FAKE_TENSOR = PrivateName("torch._subclasses.fake_tensor.FakeTensor", "tensors without data", "plan unknown")
ASKED_VALUE = PrivateName(
    "torch._subclasses.fake_tensor.DataDependentOutputException", "a step asks for a value", "plan unknown"
)
ASKED_SHAPE = PrivateName(
    "torch._subclasses.fake_tensor.DynamicOutputShapeException", "a step asks for a size", "plan unknown"
)
NO_MODES = PrivateName(
    "torch.utils._python_dispatch._disable_current_modes", "computes unseen, and small values for real", "plan unknown"
)
BACKWARD_NODE = PrivateName(
    "torch._C._current_autograd_node", "whose backward runs now", "allocations of backward have no module"
)
NODE_NUMBER = PrivateName("Node._sequence_nr", "joins an operator and its backward", "as above")
NEXT_NODE_NUMBER = PrivateName("torch.autograd._get_sequence_nr", "the number of a node to come", "as above")
APPLY = PrivateName("Module._apply", "moves a module; torch's own fails for fake tensors", "plan unknown")
FAKE_GROUP = PrivateName(
    "torch.testing._internal.distributed.fake_pg.FakeStore", "a process group of one", "plan of several ranks unknown"
)
WHOLE_SHAPES = PrivateName(
    "torch.distributed.tensor._sharding_prop.ShardingPropagator._propagate_tensor_meta_non_cached",
    "tells the shape of all shards together, of tensors that nobody holds",
    "a plan counts them as held",
    "2.11 to 2.13",
)
NO_SCRIPTS = PrivateName("torch.jit._state.disable", "runs scripts as Python", "plan of ZeRO's optimizer unknown")
FOREACH_TYPES = PrivateName(
    "torch.utils._foreach_utils._foreach_supported_types", "has optimizers take fake tensors together", "plan unknown"
)
FOREACH_DEVICES = PrivateName(
    "torch.utils._foreach_utils._get_foreach_kernels_supported_devices", "as above", "plan unknown"
)


def storage_key(storage: Any) -> int:
    """Return an identity of the storage, also after it is gone.

    ``id`` is the fallback: torch keeps a storage's Python object as long as the storage lives.
    """
    key: int = STORAGE.of_or(storage, id(storage))
    return key


def tree_leaves(tree: Any) -> list[Any]:
    """Return the leaves of ``tree`` (nested containers) in order."""
    leaves = TREE_LEAVES.find_or(None)
    if leaves is not None:
        return list(leaves(tree))
    value: list[Any] = []
    _map_plain(value.append, tree)
    return value


def tree_map(change: Any, tree: Any) -> Any:
    """Return ``tree`` with ``change`` applied to each leaf."""
    return TREE_MAP.find_or(_map_plain)(change, tree)


def _map_plain(change: Any, tree: Any) -> Any:
    """Map over dicts, lists and tuples, where torch's own function is missing."""
    if isinstance(tree, dict):
        return {key: _map_plain(change, value) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(_map_plain(change, value) for value in tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(_map_plain(change, value) for value in tree)
    return change(tree)


# devices with fused optimizers since torch 2.8 (torch.utils._foreach_utils._get_fused_kernels_supported_devices)
FUSED_DEVICES = frozenset({"cpu", "cuda", "hpu", "mps", "xpu"})
