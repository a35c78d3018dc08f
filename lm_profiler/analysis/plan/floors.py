"""The floor of a planned step: what the device's datasheet allows at best, phase by phase."""

from __future__ import annotations

from dataclasses import dataclass

from lm_profiler.analysis.hardware.rates import matmul_dtype, rates_of
from lm_profiler.analysis.hardware.roofline import floor_of
from lm_profiler.analysis.plan.planned import Planned
from lm_profiler.record.run import Floor, Rates


@dataclass(frozen=True)
class PlannedFloors:
    """By phase, with the rates that they rest on."""

    by_phase: dict[str, Floor]
    rates: Rates

    @property
    def seconds(self) -> float | None:
        """Of the step: the sum of the floors that are known; None where none is. Phases follow one another."""
        known = [floor.seconds for floor in self.by_phase.values() if floor.seconds is not None]
        return sum(known) if any(known) else None

    @property
    def unknown(self) -> list[str]:
        """Phases whose floor is not in the step's."""
        return [phase for phase, floor in self.by_phase.items() if floor.seconds is None]


def planned_floors(planned: Planned, device: str) -> PlannedFloors:
    """Of ``planned`` on the GPU of that name; where the table of peaks does not know it, no floor is known."""
    dtypes = {dtype for work in planned.work.values() for dtype in work.flops or {}}
    rates = rates_of(device, dict.fromkeys(sorted(dtypes)), None, matmul_dtype("32", planned.float32))
    return PlannedFloors({phase: floor_of(work, rates, None) for phase, work in planned.work.items()}, rates)
