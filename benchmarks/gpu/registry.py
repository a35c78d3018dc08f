"""The parts, the most telling first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """A module of ``benchmarks.gpu.parts``; ``limit_s`` seconds after its start it is killed, with all it started."""

    number: int
    name: str
    limit_s: float
    question: str

    def limit(self, other_s: float | None) -> float:
        """``other_s``, where it is given, is the limit of each part but the machine's description."""
        return self.limit_s if other_s is None or self.number == 0 else other_s


MACHINE = Part(0, "machine", 30, "What is measured on?")
PARTS = (
    MACHINE,
    Part(1, "tests", 65, "Do the tests pass that need a CUDA device?"),
    Part(
        2,
        "main_job",
        50,
        "What does the main job show: xl under bf16-mixed, with its trace and its kernels?",
    ),
    Part(
        3,
        "overhead",
        35,
        "What do the instruments cost, with an event at every mark? Aim: 0.3 % of small's step",
    ),
    Part(
        4,
        "known_answers",
        25,
        "Are phases right where kernels of known length run? Aim: 1 % or 20 µs",
    ),
    Part(
        5,
        "mfu",
        60,
        "What share of the peak do the sizes reach, in which precision, compiled or not?",
    ),
    Part(
        6,
        "rivals",
        20,
        "How fast is our model beside Hugging Face's Llama and code like nanoGPT's?",
    ),
    Part(
        7,
        "memory",
        45,
        "Is planned memory what is measured? How much of the step is explained?",
    ),
    Part(
        8, "attention", 25, "What does attention alone take, by length, width and kind?"
    ),
    Part(
        9,
        "equal_runs",
        35,
        "How far do equal runs differ, and is any of them called faster?",
    ),
    Part(
        10,
        "faults",
        45,
        "What is left of a run that runs out of memory, fails an assertion, is killed, or refused?",
    ),
    Part(
        11,
        "ranks",
        30,
        "Do two processes on one GPU (DDP) and sharded weights (FSDP) give a whole record?",
    ),
)


UNFINISHED = 75
"""The exit code of a part that has more to do than there was time for (sysexits.h, EX_TEMPFAIL)."""


def chosen(words: Sequence[str]) -> list[Part]:
    """Parts by number or name, in their order; all where none is named. The machine's description always.

    Raises:
        ValueError: there is no such part.
    """
    known = {key: part for part in PARTS for key in (str(part.number), part.name)}
    if unknown := [word for word in words if word not in known]:
        raise ValueError(
            f"parts: expected some of {', '.join(part.name for part in PARTS)}, given {unknown[0]!r}"
        )
    wanted = {known[word] for word in words} or set(PARTS)
    return [part for part in PARTS if part in wanted or part is MACHINE]
