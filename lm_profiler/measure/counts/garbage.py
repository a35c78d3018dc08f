"""Notes when Python collected garbage, and for how long: all its threads stand still meanwhile."""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple


class GarbageCollection(NamedTuple):
    """One garbage collection of ``generation`` 0, 1 or 2, on the clock of the ``GarbageLog``."""

    began_ns: int
    ended_ns: int
    generation: int


@dataclass(eq=False)
class GarbageLog:
    """The garbage collections between ``start`` and ``stop``.

    A signal handler may run inside a callback of the collector, and Python drops what is raised there: Ctrl-C would be
    lost. So the callback is a generator that keeps any exception in ``held``, which ``StepReader`` raises after the
    step.
    """

    clock: Callable[[], int]  # nanoseconds
    collections: list[GarbageCollection] = field(default_factory=list)
    held: BaseException | None = None
    _callback: Callable[[str, dict[str, int]], Any] | None = None

    def start(self) -> None:
        """Start listening, with an empty list."""
        self.stop()
        self.collections, self.held = [], None
        listening = self._listen()
        next(listening)
        # Python calls it with two arguments, and a generator's send takes one. max with a key sends one after the other
        # without a Python frame of its own, in which a signal handler could run.
        self._callback = partial(max, key=listening.send)
        gc.callbacks.append(self._callback)

    def stop(self) -> None:
        """Stop listening; calling it twice does no harm."""
        if self._callback in gc.callbacks:
            gc.callbacks.remove(self._callback)

    def _listen(self) -> Generator[bool, Any, None]:
        phase, now, began = "", 0, 0
        while True:
            try:
                while True:
                    told = yield True
                    if type(told) is str:
                        phase, now = told, self.clock()
                    elif phase == "start":
                        began = now
                    else:
                        self.collections.append(GarbageCollection(began, now, told["generation"]))
            except GeneratorExit:
                raise
            except BaseException as error:
                self.held = error
