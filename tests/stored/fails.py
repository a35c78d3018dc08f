"""A module whose seventh step raises, or is waited for."""

import time
from typing import Any

from lightning.pytorch.demos.boring_classes import BoringModel


class Fails(BoringModel):
    def __init__(self, waits: bool = False) -> None:
        super().__init__()
        self.waits = waits

    def training_step(self, batch: Any, i: int) -> Any:
        if self.waits:
            time.sleep(0.4 if i < 6 else 600)
        elif i == 6:
            raise ValueError("the seventh batch has no target")
        return super().training_step(batch, i)
