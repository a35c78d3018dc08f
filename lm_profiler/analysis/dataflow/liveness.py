"""Divides the calls of a step by what becomes of their results: training needs them, something reads them, or nothing.

This is the analysis of live variables, as compilers make it to remove dead code (Aho, Lam, Sethi & Ullman 2007,
section 9.2.5), on a recorded step in place of a program. A step stands for those after it: what one leaves to the next
is needed if the next, doing the same, needs it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from lm_profiler.record.operator_calls import StepCalls


@dataclass(frozen=True)
class Liveness:
    """The numbers of the calls of a step."""

    needed: frozenset[int]  # the parameters after the step depend on them
    # training does not need them, but Python, or code that was not seen, may read what they lead to
    needed_only_elsewhere: frozenset[int]
    dead: frozenset[int]  # nothing reads what they lead to


def liveness_of(step: StepCalls) -> Liveness | None:
    """Return what becomes of the results of the calls of ``step``.

    None if that is unknown: something else read results, or no parameter was updated.
    """
    if not step.is_complete:
        return None
    flow = Dataflow(step)
    trained_writers = flow.last_writers_of(step.trained)
    if not trained_writers:
        return None
    needed = flow.with_sources(trained_writers)
    # What a needed call reads before this step writes it, the step before has left. So the calls are needed, too, that
    # leave it to the next step.
    carried_over: set[int] = set()  # storages
    while True:
        newly_found = flow.read_first_by(needed) - carried_over
        if not newly_found:
            break
        carried_over |= newly_found
        needed |= flow.with_sources(flow.last_writers_of(newly_found))

    read_by_host = [
        number for number, call in enumerate(step.calls) if call.is_host_read
    ]
    kept_writers = flow.all_writers_of(step.kept)
    read = flow.with_sources([*read_by_host, *kept_writers])
    numbers = set(range(len(step.calls)))
    return Liveness(
        needed=frozenset(needed),
        needed_only_elsewhere=frozenset(read - needed),
        dead=frozenset(numbers - needed - read),
    )


class Dataflow:
    """Which calls a call depends on."""

    def __init__(self, step: StepCalls) -> None:
        self._step = step
        self.sources: list[
            set[int]
        ] = []  # of each call: the calls that wrote what it reads
        # the calls that wrote what a storage holds
        self._writers: defaultdict[int, list[int]] = defaultdict(list)
        # the storages that a call reads, some of which may be as the step before has left it
        self._read_first: list[set[int]] = []
        overwritten: set[int] = set()
        for number, call in enumerate(step.calls):
            sources: set[int] = set()
            read_first: set[int] = set()
            for storage in call.reads:
                sources.update(self._writers[storage])
                if storage not in overwritten:
                    read_first.add(storage)
            self.sources.append(sources)
            self._read_first.append(read_first)
            for storage in call.writes:
                if storage in call.overwrites:
                    self._writers[storage].clear()
                    overwritten.add(storage)
                self._writers[storage].append(number)

    def last_writers_of(self, storages: Iterable[int]) -> list[int]:
        """Return the calls that wrote what ``storages`` hold when the step ends."""
        writers: list[int] = []
        for storage in storages:
            writers += self._writers.get(storage, [])
        return writers

    def all_writers_of(self, storages: Iterable[int]) -> list[int]:
        """Return the calls that wrote to ``storages`` at any time."""
        writers: list[int] = []
        for storage in storages:
            writers += self._step.writers.get(storage, [])
        return writers

    def with_sources(self, numbers: Iterable[int]) -> set[int]:
        """Return the calls and all that they depend on."""
        found = set(numbers)
        unvisited = list(found)
        while unvisited:
            for source in self.sources[unvisited.pop()]:
                if source not in found:
                    found.add(source)
                    unvisited.append(source)
        return found

    def read_first_by(self, numbers: Iterable[int]) -> set[int]:
        """Return the storages that one of the calls reads as the step before has left them."""
        storages: set[int] = set()
        for number in numbers:
            storages |= self._read_first[number]
        return storages
