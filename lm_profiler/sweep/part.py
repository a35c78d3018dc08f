"""Which cells of a sweep are this process's own, where a job array or the like runs the same call many times."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from lm_profiler.usage_error import UsageError

Item = TypeVar("Item")

_OF_KUBERNETES = "JOB_COMPLETION_INDEX"
"""An Indexed Job's pod, from 0 on; how many there are it is not told."""


@dataclass(frozen=True)
class SweepPart:
    """The ``number``-th of ``count`` parts, from 1 on."""

    number: int
    count: int

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def of(self, cells: Sequence[Item]) -> list[Item]:
        """Every ``count``-th of all cells, in their order: the same ones whatever has run by now."""
        return list(cells[self.number - 1 :: self.count])


def part_of(given: str | None, environment: Mapping[str, str]) -> SweepPart | None:
    """The part that ``given`` names, ``2/8``, or the scheduler: of ``/8`` its index, or all of it; None for the whole.

    A scheduler's index is that of a task of SLURM's job array, or of a pod of a Kubernetes Indexed Job.

    Raises:
        UsageError: it names none, or the scheduler does not say enough.
    """
    array = _of_slurm(environment)
    if given is None:
        if array is None and _OF_KUBERNETES in environment:
            raise UsageError(f"part: expected how many pods there are with {_OF_KUBERNETES}, given none; say --part /8")
        return array
    size = re.fullmatch(r"(\d*)/(\d+)", given.strip())
    if size is None:
        raise UsageError(f"part: expected a part such as 1/8, given {given[:100]!r}")
    count = int(size[2])
    if size[1]:
        number = int(size[1])
    elif array is not None:
        number = array.number
    elif environment.get(_OF_KUBERNETES, "").isdecimal():
        number = int(environment[_OF_KUBERNETES]) + 1
    else:
        raise UsageError(f"part: expected a number, as in 1{given.strip()}, outside of a job array, given {given!r}")
    if not 1 <= number <= count:
        raise UsageError(f"part: expected one from 1/{count} to {count}/{count}, given {number}/{count}")
    return SweepPart(number, count)


def _of_slurm(environment: Mapping[str, str]) -> SweepPart | None:
    names = ("ID", "MIN", "STEP", "COUNT")
    values = [environment.get(f"SLURM_ARRAY_TASK_{name}", "1" if name == "STEP" else "") for name in names]
    if not all(value.isdecimal() for value in values):
        return None
    task, first, step, count = map(int, values)
    return SweepPart((task - first) // max(step, 1) + 1, count)
