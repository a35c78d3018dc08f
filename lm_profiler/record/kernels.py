"""``trace/rank<n>.kernels.json``: where a trace's time went, by phase and kind, and its largest rows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from lm_profiler.record.run import Newer, Part, read_as

Kind = Literal[
    "matmul",
    "attention",
    "softmax",
    "normalization",
    "elementwise",
    "reduction",
    "copies",
    "host_copies",
    "communication",
    "other",
]
"""What a kernel or an operator does, by its name: where it belongs is said by the module.

``matmul`` includes convolutions, ``attention`` is fused attention only, ``softmax`` is one outside of it, ``copies``
are those within the device, casts, fills, gathers and scatters, ``host_copies`` those from and to the host.
"""

_TRACE, _KERNELS = ".pt.trace.json.gz", ".kernels.json"


class KindTime(Part):
    """How often a kind ran in a phase, and for how long; what runs at the same time counts in full."""

    count: int
    total_s: float


class PhaseKernels(Part):
    """One phase. ``busy_s`` and ``idle_s`` of all phases add up to the window.

    ``overlap_s`` is what the totals of ``kinds`` have beyond ``busy_s``: kernels of several streams, or operators of
    several threads, that ran at the same time.
    """

    busy_s: float
    idle_s: float
    overlap_s: float
    kinds: dict[Annotated[Kind, Newer], KindTime]


class KernelRow(Part):
    """All that ran under one name, for one operator of one kind of module, in one phase.

    ``operator`` launched it (of an operator: called it). ``module`` is the path of the module whose forward pass this
    is, or of whose this is the backward pass, with ``*`` for indices, so that equal layers are one; ``module_type`` its
    class. None is unknown, or none.
    """

    phase: str
    kind: Annotated[Kind, Newer]
    name: str
    operator: str | None
    module: str | None
    module_type: str | None
    count: int
    total_s: float


class Rest(Part):
    """The rows that were left out, the smallest: how many, and what they add up to."""

    rows: int
    count: int
    total_s: float


class KernelTable(Part):
    """Where the time of the traced steps went. Times in seconds, over all ``steps``: divide by them for one step's.

    ``source`` says of what: ``kernels`` are what ran on the device, phases being those whose host code launched it,
    with idle time between kernels in the phase of the work that ended it; ``operators`` are PyTorch's on the host,
    their children taken out, for lack of a device, and idle is what no operator covers: Python and the loop.
    ``window_s`` lasts from the first traced step's beginning to the end of the last one and of its work.

    ``memory_bound_share`` is the share of the window in which kernels ran that move bytes rather than compute
    (elementwise, normalization, reduction, softmax, copies within the device) and no other kernel;
    ``communication_share`` the same of communication. None without a device.
    """

    schema_version: Literal[1] = 1
    source: Annotated[Literal["kernels", "operators"], Newer]
    steps: int = Field(gt=0)
    window_s: float = Field(gt=0)
    phases: dict[str, PhaseKernels]
    rows: list[KernelRow]
    """The largest first."""
    rest: Rest
    memory_bound_share: float | None
    communication_share: float | None

    @model_validator(mode="after")
    def _whole(self) -> KernelTable:
        """A row's time is a part of its phase's, or what is read is damaged. All of it may have run beside others'."""
        for row in self.rows:
            phase = self.phases.get(row.phase)
            if phase is None or (row.total_s and not phase.busy_s + phase.idle_s + phase.overlap_s > 0):
                raise ValueError(f"rows: expected phases that took time, given {row.phase!r}")
        return self


def kernels_file(trace: Path) -> Path:
    """Where the table of ``trace`` lies: beside it."""
    return trace.with_name(trace.name.removesuffix(_TRACE) + _KERNELS)


def kernel_files(folder: Path) -> list[Path]:
    """The tables of the run in ``folder``, one a rank, rank 0's first."""
    return sorted((folder / "trace").glob(f"[!.]*{_KERNELS}"), key=lambda file: (len(file.name), file.name))


def read_kernels(path: Path) -> KernelTable:
    """Read the table in ``path``.

    Raises:
        RecordError: there is none, or it is damaged or of another version.
    """
    return read_as(path, KernelTable, "a table of kernels")
