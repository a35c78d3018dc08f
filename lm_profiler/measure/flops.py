from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class StepFlops:
    forward: int
    backward: int
    recomputation: int

    @property
    def model(self) -> int:
        return self.forward + self.backward

    @property
    def all(self) -> int:
        return self.model + self.recomputation


def count_flops(module: Any, step: Any, batch: Any, backward: bool = True) -> StepFlops | None:
    return None
