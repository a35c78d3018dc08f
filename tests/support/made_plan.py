"""Plays the part of a rehearsal by a formula."""

from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

from made_timeline import made_timeline

from lm_profiler.analysis.hardware.roofline import Work
from lm_profiler.analysis.plan.planned import Planned
from lm_profiler.cli.rehearse import Unplanned

GIB = 1 << 30


@dataclass
class Formula:
    """Of a model of 10 GiB and 4 GiB a sample, half of it in bfloat16; with accumulation, gradients of 3 GiB more."""

    rehearsals: list[Any] = field(default_factory=list)
    refused: Unplanned | None = None  # the answer to everything, where it is given

    def start_rehearsal(
        self, call: list[str], gpu: tuple[int, int] | None, maximized: str, device_bytes: int, limit_s: float
    ) -> Any:
        self.rehearsals.append((call[1:], gpu, maximized))
        return SimpleNamespace(answer=partial(self._answer, call, maximized), end=lambda: None)

    def _answer(self, call: list[str], what: str) -> Planned | Unplanned:
        if self.refused is not None:
            return self.refused
        given = dict(word[2:].split("=") for word in call[1:])
        batch, times = (
            int(given.get(f"{name}", n)) for name, n in (("data.batch_size", 8), ("trainer.accumulate_grad_batches", 1))
        )
        low = given.get("trainer.precision") == "bf16-mixed"
        peak = lambda n: (10 + 3 * (times > 1)) * GIB + n * (2 if low else 4) * GIB  # noqa: E731
        largest = {"batch": 2, "context": 0}.get(what)
        settings = {"data.batch_size": batch, "trainer.precision": given.get("trainer.precision", "32-true")}
        work = {"forward": Work({"bfloat16" if low else "float32": 10**12}, 10**9)}
        return Planned(
            *({"forward": peak(batch)}, {}, batch, None, largest),
            work=work,
            float32="highest",
            settings=settings,
            timeline=made_timeline(),
        )
