"""The allocator's history and counters, and the cause of an out-of-memory error."""

import pickle
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from lm_profiler.measure.memory.history import (
    MemoryHistory,
    allocator_facts,
    facts_of,
    graph_pool_bytes,
    memory_history_of,
    oom_cause,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
KIB, MIB, GIB = 2**10, 2**20, 2**30

# Messages as users of torch 2.4 to 2.9 have reported them.
_CUDA = (
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.15 GiB of which 13.56 MiB is "
    "free. Process 123 has 79.13 GiB memory in use. Of the allocated memory 78.02 GiB is allocated by PyTorch, and "
    "512.45 MiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for Memory "
    "Management  (https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
)
_GRAPHS = (
    "CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total capacity of 47.53 GiB of which 896.00 KiB is "
    "free. Including non-PyTorch memory, this process has 47.51 GiB memory in use. 40.00 GiB allowed; Of the allocated "
    "memory 47.00 GiB is allocated by PyTorch, with 46.22 GiB allocated in private pools (e.g., CUDA Graphs), and "
    "149.10 MiB is reserved by PyTorch but unallocated."
)
_NOTHING_FREE = (
    "HIP out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 4.00 GiB of which 0 bytes is free. "
    "Of the allocated memory 0 bytes is allocated by PyTorch, and 0 bytes is reserved by PyTorch but unallocated."
)
_ASYNC = (
    "Allocation on device 5 would exceed allowed memory. (out of memory)\n"
    "Currently allocated     : 54.14 GiB\nRequested               : 686.41 MiB\n"
    "Device limit            : 79.35 GiB\nFree (according to CUDA): 27.19 MiB\n"
    "PyTorch limit (set by user-supplied memory fraction)\n                        : 17179869184.00 GiB"
)
_MPS = (
    "MPS backend out of memory (MPS allocated: 9.57 GiB, other allocations: 17.35 GiB, max allowed: 27.20 GiB). "
    "Tried to allocate 292.50 MiB on private pool. Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to disable upper limit."
)


@pytest.mark.parametrize(
    "message, expected",
    [
        (_CUDA, (20 * MIB, 13.56 * MIB, 79.15 * GIB, 78.02 * GIB, 512.45 * MIB, None)),
        (_GRAPHS, (2 * MIB, 896 * KIB, 47.53 * GIB, 47 * GIB, 149.1 * MIB, 40 * GIB)),
        (_NOTHING_FREE, (2 * GIB, 0, 4 * GIB, 0, 0, None)),
        (_ASYNC, (686.41 * MIB, 27.19 * MIB, 79.35 * GIB, 54.14 * GIB, None, None)),
        (_MPS, (292.5 * MIB, None, None, 9.57 * GIB, None, 27.2 * GIB)),
        ("CUDA error: out of memory", (None, None, None, None, None, None)),
    ],
)
def test_each_allocators_message_is_read(message: str, expected: tuple[float | None, ...]) -> None:
    cause = oom_cause(torch.OutOfMemoryError(message), CUDA)
    names = ("requested", "free", "total", "allocated", "fragmented", "allowed")
    assert cause.model_dump() == {
        name: None if value is None else round(value) for name, value in zip(names, expected, strict=True)
    }


def test_real_errors_name_the_requested_bytes() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50, dtype=torch.uint8)
    cause = oom_cause(caught.value, CPU)
    assert cause.requested == 2**50
    assert 0 < cause.free <= cause.total < 2**50
    assert cause.fragmented is None
    cause = oom_cause(MemoryError("Unable to allocate 29.1 TiB for an array with shape (4000000000000,)"), CPU)
    assert cause.requested == round(29.1 * 2**40)


@pytest.mark.parametrize(
    "message",
    [
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    ],
)
def test_a_library_that_got_no_memory_ran_out_of_it(message: str) -> None:
    cause = oom_cause(RuntimeError(message), CUDA)
    assert cause.requested is None


@pytest.mark.parametrize("error", [RuntimeError("shape mismatch"), ValueError("out of memory"), KeyError("x")])
def test_other_errors_have_no_such_cause(error: Exception) -> None:
    assert oom_cause(error, CUDA) is None


class Recording:
    """Stands for torch's two functions."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def record(self, **options: Any) -> None:
        self.calls.append(options)

    def snapshot(self) -> object:
        return {"segments": [], "device_traces": [[]]}


def test_a_history_is_recorded(tmp_path: Path) -> None:
    torchs = Recording()
    history = MemoryHistory(torchs.record, torchs.snapshot, max_entries=7)
    history.stop()  # nothing runs yet: torch is not asked
    history.start()
    history.dump(tmp_path / "memory_snapshot.pickle")
    history.stop()
    history.stop()
    assert torchs.calls == [
        {"enabled": "all", "context": "all", "stacks": "python", "max_entries": 7},
        {"enabled": None},
    ]
    assert [file.name for file in tmp_path.iterdir()] == ["memory_snapshot.pickle"]
    assert pickle.loads((tmp_path / "memory_snapshot.pickle").read_bytes()) == torchs.snapshot()


def test_a_dump_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "memory_snapshot.pickle"
    path.write_bytes(b"before")
    history = MemoryHistory(Recording().record, lambda: lambda: None)  # a lambda cannot be pickled
    with pytest.raises((pickle.PicklingError, AttributeError)):
        history.dump(path)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    assert path.read_bytes() == b"before"


def test_figures_that_an_allocator_lacks_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = {"allocated_bytes.all.peak": 70, "reserved_bytes.all.peak": 100, "active_bytes.all.peak": 70}
    nought = dict.fromkeys(("requested_bytes.all.peak", "inactive_split_bytes.all.peak", "num_alloc_retries"), 0)
    facts = facts_of({**counted, **nought, "num_ooms": 0}, 120)
    assert (facts.allocated_peak, facts.active_peak, facts.fragmentation) == (70, 70, 30)
    unknown = (facts.requested_peak, facts.inactive_split_peak, facts.alloc_retries, facts.ooms)
    assert set(unknown) == {None}
    refuses = RuntimeError("Calling snapshot with backend:cudaMallocAsync is not meaningful")
    monkeypatch.setattr(torch.cuda, "memory_snapshot", mock.Mock(side_effect=refuses))
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    assert graph_pool_bytes(CUDA) is None
    assert memory_history_of(CPU) is None
    assert allocator_facts(CPU) is None


@pytest.mark.gpu
def test_a_gpu_keeps_a_history_with_python_stacks(tmp_path: Path) -> None:
    history = memory_history_of(CUDA)
    history.start()
    held = torch.empty(64 * MIB, dtype=torch.uint8, device=CUDA)
    history.dump(tmp_path / "snapshot.pickle")
    history.stop()
    snapshot = pickle.loads((tmp_path / "snapshot.pickle").read_bytes())
    frames = [frame for trace in snapshot["device_traces"][0] for frame in trace["frames"]]
    assert any(frame["filename"] == __file__ for frame in frames)
    facts = allocator_facts(CUDA)
    assert held.nbytes <= facts.requested_peak <= facts.allocated_peak <= facts.driver_used


@pytest.mark.gpu
def test_a_gpus_real_error_is_read() -> None:
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(2**45, dtype=torch.uint8, device=CUDA)
    cause = oom_cause(caught.value, CUDA)
    assert cause.requested == 2**45
    total = torch.cuda.get_device_properties(CUDA).total_memory
    assert cause.total == pytest.approx(total, rel=1e-3)
    assert cause.free is not None
    assert cause.fragmented is not None
