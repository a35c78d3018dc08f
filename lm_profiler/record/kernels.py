"""The file ``trace/rank<n>.kernels.json``: the time of a trace by phase and kind, and its largest kernels."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import Field, model_validator

from lm_profiler.record.run_record import Newer, Part, read_part

# The kind of a kernel or an operator, derived from its name. ``matmul`` includes convolutions. ``attention`` is only
# fused attention, and ``softmax`` one outside of it. ``copies`` are copies within the device, casts, fills, gathers and
# scatters; ``host_copies`` are copies from and to the host. ``waiting`` is a kernel that only lets time pass.
Kind = Literal[
    "matmul", "attention", "softmax", "normalization", "elementwise", "reduction", "copies", "host_copies",
    "communication", "waiting", "other",
]  # fmt: skip

_TRACE, _KERNELS = ".pt.trace.json.gz", ".kernels.json"


class KindTime(Part):
    """The calls and the time of one kind in a phase; concurrent kernels count in full."""

    count: int
    total_s: float


class PhaseKernels(Part):
    """The time of one phase. The sum of ``busy_s`` and ``idle_s`` over all phases is the window."""

    busy_s: float
    idle_s: float
    # by how much the sum of ``kinds`` exceeds ``busy_s``, because several streams or threads work at the same time
    overlap_s: float
    kinds: dict[Annotated[Kind, Newer], KindTime]


class KernelRow(Part):
    """All calls of one kernel by one operator of one kind of module in one phase. None means unknown, or none."""

    phase: str
    kind: Annotated[Kind, Newer]
    name: str
    # the operator that launched the kernel, or called this operator
    operator: str | None
    # the path of the module that the forward or backward pass belongs to, with ``*`` for the indices of equal layers
    module: str | None
    module_type: str | None  # the class of that module
    count: int
    total_s: float


class Rest(Part):
    """The sums of the smallest rows, which are not listed."""

    rows: int
    count: int
    total_s: float


class KernelSum(NamedTuple):
    """All calls of the kernels of one name."""

    name: str
    total_s: float
    calls: int


class KernelTable(Part):
    """The time of the traced steps. All seconds are sums over these ``steps``."""

    schema_version: Literal[1] = 1
    # ``kernels`` of a device belong to the phase in which the host launched them, and idle time to the phase whose
    # kernel ends it. ``operators`` of PyTorch on the host, if there is no device, count without those that they call;
    # idle time is then that outside of operators (Python and the loop).
    source: Annotated[Literal["kernels", "operators"], Newer]
    steps: int = Field(gt=0)
    # from the beginning of the first traced step to the end of the last one, including its work on the device
    window_s: float = Field(gt=0)
    phases: dict[str, PhaseKernels]
    rows: list[KernelRow]  # the rows with the most time first
    rest: Rest
    # the share of the window in which only kernels limited by the memory bandwidth ran (elementwise, normalization,
    # reduction, softmax, copies within the device); None without a device
    memory_bound_share: float | None
    # the share of the window in which only communication ran; None without a device
    communication_share: float | None

    @model_validator(mode="after")
    def _check_phases(self) -> KernelTable:
        """Raise ValueError if a row belongs to a phase that the table does not have, or that has no time."""
        for row in self.rows:
            # A phase may have 0 s busy and idle, if all its kernels ran at the same time as kernels of other phases.
            phase = self.phases.get(row.phase)
            phase_s = 0.0
            if phase is not None:
                phase_s = phase.busy_s + phase.idle_s + phase.overlap_s
            has_time_for_row = phase_s > 0 or not row.total_s
            if phase is None or not has_time_for_row:
                raise ValueError(
                    f"phases: expected an entry with time for {row.phase!r}, which has rows"
                )
        return self

    def _parts(self, phases: Collection[str] | None) -> list[PhaseKernels]:
        """Return the entries of ``phases``; None stands for all phases."""
        return [
            part
            for name, part in self.phases.items()
            if phases is None or name in phases
        ]

    def phases_s(self, phases: Collection[str] | None = None) -> float:
        """Return the seconds of ``phases`` (None: of all), including idle time."""
        return sum(part.busy_s + part.idle_s for part in self._parts(phases))

    def kind_s(self, kind: Kind, phases: Collection[str] | None = None) -> float:
        """Return the seconds of a kind of kernel in ``phases`` (None: in all)."""
        parts = self._parts(phases)
        return sum(part.kinds[kind].total_s for part in parts if kind in part.kinds)

    def by_name(
        self,
        phases: Collection[str] | None = None,
        kinds_left_out: Collection[str] = (),
    ) -> list[KernelSum]:
        """Return the sums of the rows of ``phases`` (None: of all) by the name of the kernel, the largest first."""
        sums: dict[str, KernelSum] = {}
        for row in self.rows:
            is_in_phases = phases is None or row.phase in phases
            if not is_in_phases or row.kind in kinds_left_out:
                continue
            _, total_s, calls = sums.get(row.name, KernelSum(row.name, 0.0, 0))
            sums[row.name] = KernelSum(
                row.name, total_s + row.total_s, calls + row.count
            )
        return sorted(sums.values(), key=lambda kernel: -kernel.total_s)


def kernels_file(trace: Path) -> Path:
    """Return the path of the kernel table next to ``trace``."""
    return trace.with_name(trace.name.removesuffix(_TRACE) + _KERNELS)


def kernel_files(folder: Path) -> list[Path]:
    """Return the kernel tables of the run in ``folder``, one per rank, rank 0's first."""
    # Shorter names first: rank 2 before rank 10.
    return sorted(
        (folder / "trace").glob(f"[!.]*{_KERNELS}"),
        key=lambda file: (len(file.name), file.name),
    )


def read_kernels(path: Path) -> KernelTable:
    return read_part(path, KernelTable, "a table of kernels")
