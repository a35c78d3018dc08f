"""Lists every private name of torch that the code uses, what it is for, and what happens without it.

Nothing here imports torch: a name is looked up when it is first needed. If this version of torch lacks a name,
``NameMissing`` is raised, and a ``Guard`` disables the one instrument that needs it, with a note ("... left out: this
torch has no ..."). Neither the training loop nor an import depends on any of these names.

Operators of ATen (``torch.ops.aten._foreach_add_``) are not listed: they are data, and formulas of operators that this
torch lacks are left out.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from functools import cache
from typing import Any

TORCHS = "2.11 to 2.15"  # versions of torch that have these names, as tests have seen


class NameMissing(RuntimeError):
    pass


@dataclass(frozen=True)
class PrivateName:
    path: str  # an attribute of a module, as ``torch.cuda._sleep``, or of an object, as ``DataLoader._iterator``
    purpose: str  # what the name is used for
    consequence: str  # what happens in a version that lacks it
    versions: str = TORCHS  # the versions that have the name
    library: str = "torch"

    def find(self) -> Any:
        """Return the module, or the module's attribute, of this name; raises NameMissing if there is none."""
        try:
            return _find(self.path)
        except AttributeError:
            raise self.missing() from None

    def find_or(self, otherwise: Any) -> Any:
        """Return what ``find`` returns, or ``otherwise`` if there is nothing of this name."""
        try:
            return self.find()
        except NameMissing:
            return otherwise

    def get(self, thing: Any) -> Any:
        """Return this attribute of ``thing``; raise NameMissing if ``thing`` does not have it."""
        try:
            return look_up(thing, self.name, self.path)
        except AttributeError:
            raise self.missing() from None

    def get_or(self, thing: Any, otherwise: Any = None) -> Any:
        """Return this attribute of ``thing``, or ``otherwise`` if ``thing`` does not have it."""
        try:
            return self.get(thing)
        except NameMissing:
            return otherwise

    def loaded(self) -> Any:
        """Return the module of this name if the process has imported it already; else None."""
        return sys.modules.get(self.path)

    def as_base(self, class_name: str = "") -> Any:
        """Return the class, or the one called ``class_name`` of the module, as a base class.

        Where it is missing, its constructor raises NameMissing, so that a module with a derived class can be imported.
        """
        base = self.find_or(None)
        if class_name:
            base = getattr(base, class_name, None)
        if base is None:
            base = type(class_name or self.name, (), {"__init__": self._refuse})
        return base

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    def missing(self) -> NameMissing:
        return NameMissing(f"this {self.library} has no {self.path}")

    def _refuse(self, *_: Any, **__: Any) -> None:
        raise self.missing()


def look_up(thing: Any, name: str, path: str) -> Any:
    """Return the attribute ``name`` of ``thing``. All look-ups go through here, so that tests can hide a ``path``."""
    return getattr(thing, name)


@cache
def _find(path: str) -> Any:
    """Return the attribute at a dotted path, importing modules on the way; raises AttributeError."""
    module_path, *parts = path.split(".")
    try:
        value: Any = importlib.import_module(module_path)
        for part in parts:
            module_path += f".{part}"
            try:
                value = look_up(value, part, path)
            except AttributeError:  # a module that nobody has imported yet
                importlib.import_module(module_path)
                value = look_up(value, part, path)
    except ImportError:
        raise AttributeError(path) from None
    return value


# Counting FLOPs and traffic. Without one of these: FLOPs, MFU and traffic are unknown.

_DISPATCH = "torch.utils._python_dispatch"
DISPATCH_MODE = PrivateName(
    f"{_DISPATCH}.TorchDispatchMode",
    "observes each operator",
    "FLOPs and plans unknown",
)
MODE_STACK = PrivateName(
    f"{_DISPATCH}._get_current_dispatch_mode_stack",
    "shows whether the FLOP counter can be left",
    "FLOPs unknown",
)
GRAPH_TASK = PrivateName(
    "torch._C._current_graph_task_id",
    "recognizes a backward pass",
    "FLOPs and causes unknown",
)

INNERMOST_HOOKS = PrivateName(
    "torch._C._autograd._top_saved_tensors_default_hooks",
    "lets the program's hooks for saved tensors come before ours",
    "causes unknown",
)

OPERATOR_SCHEMA = PrivateName(
    "OpOverload._schema",
    "shows which arguments an operator changes",
    "needless work unknown",
)

# Trees of tensors.

TREE_LEAVES = PrivateName(
    "torch.utils._pytree.tree_leaves",
    "lists all tensors of a batch or a call",
    "FLOPs, samples unknown",
)
TREE_MAP = PrivateName(
    "torch.utils._pytree.tree_map",
    "replaces the tensors of a batch by others",
    "no audit; plans unknown",
)

# Memory.

RECORD_HISTORY = PrivateName(
    "torch.cuda.memory._record_memory_history",
    "begins the recording of memory.history",
    "no history",
)
HISTORY = PrivateName(
    "torch.cuda.memory._snapshot", "returns the recorded memory.history", "no history"
)

# Compilation.

DYNAMO = PrivateName(
    "torch._dynamo.utils",
    "counts compilations, with their time and reason",
    "no compilation is reported",
)
COMPILED_CALL = PrivateName(
    "Module._compiled_call_impl",
    "recognizes a compiled module",
    "FLOPs and plans unknown",
)

SPARSE_INDICES = PrivateName(
    "Tensor._indices",
    "reads the indices of a sparse tensor that may repeat",
    "the data flow of a step is unknown",
)
SPARSE_VALUES = PrivateName(
    "Tensor._values",
    "reads the elements of such a tensor",
    "the data flow of a step is unknown",
)

# The trace. Two profilers end the process.

PROFILER_ENABLED = PrivateName(
    "torch.autograd.profiler._is_profiler_enabled",
    "recognizes a profiler of the user",
    "no trace",
)
PREPARE_TRACE = PrivateName(
    "profile._prepare_trace", "stops our profiler if the user starts one", "no trace"
)
START_TRACE = PrivateName(
    "profile._start_trace",
    "keeps a profiler of the user from starting where ours cannot stop",
    "the process may crash there",
)
GRAPH_TASK_ID = PrivateName(
    "torch._C._current_graph_task_id",
    "recognizes a backward pass, in which no profiler can begin or end",
    "no trace",
)

# The loader.

ITERATED_DATASET = PrivateName(
    "_BaseDataLoaderIter._dataset",
    "shows which of several loaders a loop iterates over",
    "settings of that loader unknown",
)
NO_FUNCTION_MODES = PrivateName(
    "torch._C.DisableTorchFunction",
    "reads tensors without being observed by the program's own function modes",
    "those modes observe it",
)
WEIGHT_VERSION = PrivateName(
    "Parameter._version",
    "shows whether a tensor is changed in place between two calls that read it",
    "the second call counts as a repetition",
)
_FETCH = "torch.utils.data._utils.fetch"
MAP_FETCHER = PrivateName(
    f"{_FETCH}._MapDatasetFetcher",
    "follows the code of a worker while it loads a batch",
    "lines of workers unknown",
)
ITERABLE_FETCHER = PrivateName(
    f"{_FETCH}._IterableDatasetFetcher",
    "follows the code of a worker while it loads a batch",
    "lines of workers unknown",
)
READY = PrivateName(
    "_MultiProcessingDataLoaderIter._data_queue",
    "counts prefetched batches",
    "prefetched batches unknown",
)

# Ranks.

DDP_FACTS = PrivateName(
    "DistributedDataParallel._get_ddp_logging_data",
    "counts the buckets of DDP",
    "arrivals unknown",
)
_C10D = "torch.distributed.distributed_c10d"
WORLD = PrivateName(
    f"{_C10D}._world",
    "lists all process groups",
    "arrivals and NCCL's durations unknown",
)
DEFAULT_STORE = PrivateName(
    f"{_C10D}._get_default_store",
    "exchanges messages between ranks",
    "several ranks: no profile",
)
TIME_COLLECTIVES = PrivateName(
    "ProcessGroup._enable_collectives_timing",
    "makes NCCL time collectives",
    "durations unknown",
)
FLIGHT_RECORDER = PrivateName(
    "torch._C._distributed_c10d._dump_fr_trace",
    "reads when each collective was called",
    "arrivals unknown",
)
NCCL_RECORDER = PrivateName(
    "torch._C._distributed_c10d._dump_nccl_trace",
    "reads when each collective of NCCL was called",
    "arrivals unknown",
    "2.11 to 2.14",
)

# Planning: a separate process, in which code of torch is replaced. Without one of these: the plan is unknown.

FAKES = PrivateName(
    "torch._subclasses.fake_tensor",
    "makes tensors without data, and raises an error if code asks for their values",
    "plan unknown",
)
NO_MODES = PrivateName(
    f"{_DISPATCH}._disable_current_modes",
    "computes without being observed",
    "plan unknown",
)
BACKWARD_NODE = PrivateName(
    "torch._C._current_autograd_node",
    "identifies the node whose backward runs",
    "no line in backward",
)
NODE_NUMBER = PrivateName(
    "Node._sequence_nr", "connects an operator with its backward", "no line in backward"
)
NEXT_NODE_NUMBER = PrivateName(
    "torch.autograd._get_sequence_nr",
    "predicts the number of the next node",
    "no line in backward",
)
APPLY = PrivateName(
    "Module._apply",
    "moves a module to a device; torch's version fails on fake tensors",
    "plan unknown",
)
FAKE_GROUP = PrivateName(
    "torch.testing._internal.distributed.fake_pg.FakeStore",
    "makes a process group of one process",
    "plan of ranks unknown",
)
WHOLE_SHAPES = PrivateName(
    "torch.distributed.tensor._sharding_prop.ShardingPropagator._propagate_tensor_meta_non_cached",
    "computes the shape of a sharded tensor, on tensors that are never allocated",
    "a plan counts these tensors as allocated",
    "2.11 to 2.13",
)


def tree_leaves(tree: Any) -> list[Any]:
    return list(TREE_LEAVES.find()(tree))


def tree_map(change: Any, tree: Any) -> Any:
    return TREE_MAP.find()(change, tree)


# devices with fused optimizers since torch 2.8 (torch.utils._foreach_utils._get_fused_kernels_supported_devices)
FUSED_DEVICES = frozenset({"cpu", "cuda", "hpu", "mps", "xpu"})
