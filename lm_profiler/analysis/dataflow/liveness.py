"""Finds which calls of a step are needed for training, which only for something else, and which for nothing.

This is live-variable analysis, with which compilers find dead code (Aho, Lam, Sethi & Ullman 2007, section 9.2.5),
applied to a recorded step instead of a program. The next step is assumed to do the same: what this step leaves behind
is needed if a needed call of this step reads such data from the step before.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from lm_profiler.record.operator_calls import StepCalls


@dataclass(frozen=True)
class Liveness:
    """The calls of a step, by their numbers, in three classes."""

    # the trained parameters depend on them, after this step or a later one
    needed: frozenset[int]
    # Training does not need them, but Python or unrecorded code may read what was computed from them.
    needed_only_elsewhere: frozenset[int]
    dead: frozenset[int]  # nothing reads what was computed from them


def liveness_of(step: StepCalls) -> Liveness | None:
    """Return the liveness of the calls of ``step``; None if it is unknown.

    It is unknown if unrecorded kernels may have read results, or if no trained parameter was updated.
    """
    if not step.is_complete:
        return None
    flow = _Dataflow(step)
    trained_writers = flow.last_writers_of(step.trained)
    if not trained_writers:
        return None
    needed = flow.with_sources(trained_writers)
    # A needed call may read a storage before this step writes it: its content is from the step before. So the calls
    # that write this storage for the next step are needed too.
    carried_storages: set[int] = set()
    while True:
        new_storages = flow.carried_storages_of(needed) - carried_storages
        if not new_storages:
            break
        carried_storages |= new_storages
        needed |= flow.with_sources(flow.last_writers_of(new_storages))

    # what Python reads, and what code may read whose calls were not recorded
    host_reads = [number for number, call in enumerate(step.calls) if call.is_host_read]
    kept_writers = flow.all_writers_of(step.kept)
    needed_elsewhere = flow.with_sources([*host_reads, *kept_writers])
    all_calls = set(range(len(step.calls)))
    return Liveness(
        needed=frozenset(needed),
        needed_only_elsewhere=frozenset(needed_elsewhere - needed),
        dead=frozenset(all_calls - needed - needed_elsewhere),
    )


class _Dataflow:
    """The dependencies between the calls of a step."""

    def __init__(self, step: StepCalls) -> None:
        self._step = step
        # for each call, the calls that wrote what it reads
        self._sources: list[set[int]] = []
        # for each call, the storages it reads that may still have data of the step before
        self._carried_storages: list[set[int]] = []
        # for each storage, the calls that wrote its content: during the loop so far, then at the end of the step
        self._writers: defaultdict[int, list[int]] = defaultdict(list)
        # the storages without any data of the step before
        overwritten: set[int] = set()
        for number, call in enumerate(step.calls):
            sources: set[int] = set()
            for storage in call.reads:
                sources.update(self._writers[storage])
            self._sources.append(sources)
            self._carried_storages.append(set(call.reads) - overwritten)
            for storage in call.writes:
                if storage in call.overwrites:
                    self._writers[storage].clear()
                    overwritten.add(storage)
                self._writers[storage].append(number)

    def last_writers_of(self, storages: Iterable[int]) -> list[int]:
        """Return the calls that wrote what ``storages`` hold at the end of the step."""
        writers: list[int] = []
        for storage in storages:
            writers += self._writers.get(storage, [])
        return writers

    def all_writers_of(self, storages: Iterable[int]) -> list[int]:
        """Return all calls that wrote to ``storages``, also what was overwritten later."""
        writers: list[int] = []
        for storage in storages:
            writers += self._step.writers.get(storage, [])
        return writers

    def with_sources(self, numbers: Iterable[int]) -> set[int]:
        """Return the calls ``numbers`` and all calls on whose results they depend, directly or not."""
        found = set(numbers)
        unvisited = list(found)
        while unvisited:
            for source in self._sources[unvisited.pop()]:
                if source not in found:
                    found.add(source)
                    unvisited.append(source)
        return found

    def carried_storages_of(self, numbers: Iterable[int]) -> set[int]:
        """Return the storages that the calls ``numbers`` read with data of the step before."""
        storages: set[int] = set()
        for number in numbers:
            storages |= self._carried_storages[number]
        return storages
