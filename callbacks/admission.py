"""Decides which Trainer of a program is profiled, where Lightning adds the callback to each of them."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from lightning.pytorch import Trainer

from lm_profiler.callbacks.namespaces import verb_of
from lm_profiler.external_callbacks import CLAIMED
from lm_profiler.record.run import Verb

# the number of the Trainer that was admitted in this process, where its processes share no folder
_first: int | None = None


@dataclass(eq=False)
class Admission:
    """Admits one Trainer of the program, and only once."""

    number: int  # which Trainer of its process this is, from 1
    wanted: int | None  # the number of the Trainer to profile; None for the first that runs ``verb``
    verb: Verb  # what is profiled
    # A folder that the processes of this node share; None where the program was started by hand. The ranks agree in it
    # which Trainer is the first, because a rank that was spawned has seen no Trainer but its own.
    claims: Path | None
    _used: bool = field(default=False)

    def admits(self, trainer: Trainer) -> bool:
        """Return whether ``trainer``, which is about to run, is to be profiled by the added callback."""
        if trainer.barebones or self._used or verb_of(trainer) != self.verb or self.wanted not in (None, self.number):
            return False
        self._used = self._claim()
        profilers = [each for each in trainer.callbacks if each.state_key == "TrainingProfiler"]  # type: ignore[attr-defined]
        return self._used and all(each.admission is not None for each in profilers)  # the program's own goes first

    def _claim(self) -> bool:
        """Return whether no other Trainer of the program has been admitted."""
        global _first
        try:
            if self.claims is None or not self.claims.is_dir():
                raise FileNotFoundError
            claim = self.claims / CLAIMED
            with suppress(FileExistsError):
                claim.symlink_to(str(self.number))  # a link is made whole, or not at all
            return claim.readlink() == Path(str(self.number))
        except OSError:  # another node, or a program that was started by hand: each process for itself
            _first = _first or self.number
            return _first == self.number
