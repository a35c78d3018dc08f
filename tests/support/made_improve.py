"""A search whose figures can be checked by hand: 168 ms, of which bf16 saves 48 and compiling 22.9 more."""

from pathlib import Path
from typing import Any

from lm_profiler.record.improve_record import IMPROVE_FILE, Final, ImproveRecord, Numerics, Tried


def made_tried(name: str, a_ms: float | None, saved_ms: float | None, verdict: Any, **more: Any) -> Tried:
    """One whose interval reaches 1.5 ms to either side."""
    known: dict[str, Any] = {"name": name, "options": dict([name.split("=")]), "verdict": verdict}
    if a_ms is not None and saved_ms is not None:
        seconds = {
            "a_s": a_ms,
            "b_s": a_ms - saved_ms,
            "saved_s": saved_ms,
            "low_s": saved_ms - 1.5,
            "high_s": saved_ms + 1.5,
        }
        known |= {"pairs": 3, **{field: ms / 1e3 for field, ms in seconds.items()}}
    return Tried.model_validate(known | more)


BF16 = made_tried(
    "trainer.precision=bf16-mixed",
    168.0,
    48.0,
    "FASTER",
    accepted=True,
    ceiling_s=0.0612,
    may_change="rounding: products have 8 bits of precision",
    a_bytes=3 * 2**29,
    b_bytes=2**30,
    numerics=Numerics(loss=0.00042, gradients=0.0123, within=True),
)
COMPILED = made_tried(
    "model.compile=true", 120.1, 22.9, "FASTER", accepted=True, numerics=Numerics(loss=0.0, gradients=0.0, within=True)
)
TRIED = [
    BF16,
    made_tried("trainer.precision=bf16-true", 120.0, 9.0, "NUMERICS", why="gradients 8.1 % off, at most 5 %",
          numerics=Numerics(loss=0.02, gradients=0.081, within=False)),
    COMPILED,
    made_tried("data.num_workers=4", 97.2, -0.3, "SAME", a_bytes=2**30, b_bytes=2**30),
    made_tried("model.fused=true", None, None, "REFUSED", why="needs a GPU"),
]  # fmt: skip


def made_improve(**options: Any) -> ImproveRecord:
    """Of ``TRIED``, with a final comparison: 1.73 times as fast."""
    facts: dict[str, Any] = {
        "name": "small_improve",
        "command": "python -m lm_profiler improve --config small_bf16 --budget 10m",
        "started": "2026-01-02T03:04:05+00:00",
        "budget_s": 600.0,
        "elapsed_s": 570.0,
        "ended": "done",
        "first_s": 0.1685,
        "options": {**BF16.options, **COMPILED.options},
        "tried": TRIED,
        "final": Final(pairs=4, first_s=0.168, final_s=0.0971, ratio=1.73, low=1.69, high=1.77),
        "runs": 31,
    }
    return ImproveRecord(**{**facts, **options})


def nothing_helped() -> ImproveRecord:
    """One that ended within its budget, and kept nothing."""
    return made_improve(tried=TRIED[3:], final=None, options={})


def made_search(folder: Path, record: ImproveRecord) -> None:
    """Write the record as ``improve`` leaves it in its ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    record.write(folder / IMPROVE_FILE)
