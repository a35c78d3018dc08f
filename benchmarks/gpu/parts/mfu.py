"""MFU and memory of the five sizes, in three precisions, compiled or not, with either attention, as three sweeps.

What is asked for most comes first, and what is compiled last: it takes longest. Cells that the time does not suffice
for are missing, and run when the command is given again with more time (``--parts=mfu --time_limit=1200``).
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.gpu.findings import Findings, shown
from benchmarks.gpu.place import Place, missing
from lm_profiler.record.entry import Entry

PRECISIONS = {
    "fp32": "{trainer.precision: 32-true, torch.float32_matmul_precision: highest}",
    "TF32": "{trainer.precision: 32-true, torch.float32_matmul_precision: high}",
    "bf16": "{trainer.precision: bf16-mixed, torch.float32_matmul_precision: highest}",
}
SIZES = ("small", "medium", "large", "xl", "2.7B")
SWEEPS = {
    "eager_bf16": ("eager", ("bf16",)),
    "eager_float32": ("eager", ("fp32", "TF32")),
    "compiled": ("compiled", ("bf16", "fp32", "TF32")),
}
_SHORT = (
    *(
        "--stages.warmup_steps=3",
        "--stages.measure_steps=6",
        "--memory.steps=1",
        "--trace.steps=0",
    ),
    "--check_memory=false",  # planning takes as long as running
)
_HEADINGS = (
    "size",
    "precision",
    "attention",
    "",
    "status",
    "step (ms)",
    "tokens/s",
    "MFU",
    "peak allocated (GiB)",
)


def run(place: Place, findings: Findings) -> bool:
    rows: list[list[str]] = []
    figures = []
    more = False
    for name, (how, precisions) in SWEEPS.items():
        if place.on_cpu and name != "eager_bf16":
            continue  # they would take longer than everything else
        entries = cells(place, name, how, precisions)
        more = more or not entries or missing(entries)
        for entry in entries:
            rows.append(row(entry, how))
            figures.append(dict(zip(_HEADINGS, rows[-1], strict=True)))
        findings.table("Sizes", _HEADINGS, sorted(rows, key=_order), left=5)
        findings.add(cells=figures)
    for picture in ("mfu", "memory"):
        place.picture(place.folder, picture)
    best = max(
        (entry[7] for entry in rows if entry[7].endswith("%")),
        key=lambda text: float(text[:-1]),
        default=None,
    )
    findings.add(best_mfu=best)
    return more


def cells(place: Place, name: str, how: str, precisions: Sequence[str]) -> list[Entry]:
    """The sweep's, whatever became of them."""
    sizes = SIZES[:1] if place.on_cpu else SIZES
    sets = ", ".join(PRECISIONS[precision] for precision in precisions)
    grid = [
        f"--grid.model.size={','.join(sizes)}",
        f"--grid.model.attention={'sdpa' if place.on_cpu else 'sdpa,math'}",
    ]
    compiled = f"--model.compile={str(how == 'compiled').lower()}"
    options = place.sized("--config=small_bf16", compiled, *_SHORT)
    return place.sweep(name, *options, *grid, f"--list=[{sets}]", "--timeout_s=300")


def row(entry: Entry, how: str) -> list[str]:
    """Of one cell, for people."""
    tf32 = entry.overrides.get("torch.float32_matmul_precision") == "high"
    half = entry.overrides.get("trainer.precision") == "bf16-mixed"
    words = [
        entry.overrides.get("model.size", ""),
        "bf16" if half else "TF32" if tf32 else "fp32",
        entry.overrides.get("model.attention", ""),
        how,
        entry.status,
    ]
    record = entry.record
    if record is None or not record.time:
        return [*words, "", "", "", ""]
    speed, use, memory = record.throughput, record.utilisation, record.memory
    peak = None if memory is None else memory.measured.allocated_peak
    return [
        *words,
        shown(record.time["step"].median, scale=1e3),
        shown(None if speed is None else speed.tokens_per_s),
        "unknown" if use is None or use.mfu is None else f"{use.mfu:.1%}",
        shown(peak, scale=2**-30, digits=3),
    ]


def _order(row: Sequence[str]) -> tuple[int, Sequence[str]]:
    return SIZES.index(row[0]) if row[0] in SIZES else len(SIZES), row[1:4]
