"""Why a step takes as long as it does: floors, the waterfall and what it leaves unexplained, eager and compiled.

    python -m benchmarks.why [--config small_fp32] [OPTIONS OF fit]

Each run is a process of its own, on this machine's CPU, with the steps of the config. Prints Markdown: the floor of
each phase and how many times that it took; the waterfall, a term a row; and of which modules its largest terms are.
Whatever follows goes to `fit`, such as --model.d_model=64 for a quick try.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from lm_profiler.measure.device.environment import device_name
from lm_profiler.record.quantities import PARTS, term_title
from lm_profiler.record.run_record import RunRecord, read_run
from lm_profiler.report.tables.formats import markdown
from lm_profiler.report.tables.table import text_table

_NAMED = 3
"""Terms whose contributors are printed, and contributors of each."""


def profiled(name: str, config: str, options: list[str], folder: str) -> RunRecord:
    """The record of one run of `fit`."""
    call = [sys.executable, "-m", "lm_profiler", "fit", "--config", config, *options]
    where = [f"--log_dir={folder}", f"--name={name}", "--trainer.accelerator=cpu"]
    done = subprocess.run([*call, *where], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    return read_run(Path(folder, name, "version_0"))


def floors(runs: dict[str, RunRecord]) -> str:
    """A phase a row: its median, its floor and how many times that it took."""
    rows = []
    for part in PARTS:
        if not any(part in run.floors for run in runs.values()):
            continue
        row = [part]
        for run in runs.values():
            floor, median = run.floors.get(part), run.time[part].median
            times = None if floor is None else floor.times
            bound = None if floor is None else floor.bound
            row += [
                _ms(median),
                _ms(None if floor is None else floor.seconds),
                bound or "unknown",
                _times(times),
            ]
        rows.append(row)
    columns = [
        f"{name}: {figure}"
        for name in runs
        for figure in ("took (ms)", "floor (ms)", "bound", "times")
    ]
    return markdown(text_table(["phase", *columns], rows))


def waterfalls(runs: dict[str, RunRecord]) -> str:
    """A term a row, in milliseconds and as a share of the step."""
    falls = {
        name: run.waterfall for name, run in runs.items() if run.waterfall is not None
    }
    rows = []
    for at, term in enumerate(next(iter(falls.values())).terms if falls else ()):
        row = [term_title(term.name)]
        for fall in falls.values():
            told = fall.terms[at].name not in fall.merged_terms
            seconds = fall.terms[at].seconds
            row += (
                [_ms(seconds), f"{seconds / fall.step_s:.1%}"]
                if told
                else ["unknown", ""]
            )
        rows.append(row)
    rows.append(
        [
            "step",
            *(text for fall in falls.values() for text in (_ms(fall.step_s), "100.0%")),
        ]
    )
    return markdown(
        text_table(
            ["term", *(f"{name}{what}" for name in falls for what in (" (ms)", ""))],
            rows,
        )
    )


def largest(run: RunRecord) -> list[str]:
    """Of what the largest terms consist, a line each."""
    if run.waterfall is None:
        return [f"no waterfall: {'; '.join(run.notes)}"]
    terms = sorted(run.waterfall.terms, key=lambda term: -(term.at_most_s or 0.0))
    lines = []
    for term in terms[:_NAMED]:
        parts = [
            f"{part.module or part.what} {_ms(part.seconds)} ms"
            for part in term.contributors[:_NAMED]
        ]
        lines.append(
            f"- {term_title(term.name)}, at most {_ms(term.at_most_s)} ms could be saved: {', '.join(parts)}"
        )
    return lines + [f"- note: {note}" for note in run.waterfall.notes]


def _ms(seconds: float | None) -> str:
    return "unknown" if seconds is None else f"{seconds * 1e3:.1f}"


def _times(times: float | None) -> str:
    return "unknown" if times is None else f"{times:.1f}"


def main() -> None:
    """Run both, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default="small_fp32", help="of fit")
    known, options = parser.parse_known_args()
    cpu = device_name(torch.device("cpu"))
    print(
        f"{cpu}, {platform.platform()}, Python {platform.python_version()}, torch {torch.__version__}; {known.config}\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        kinds = {"eager": [], "compiled": ["--model.compile=true"]}
        runs = {
            name: profiled(name, known.config, [*options, *more], folder)
            for name, more in kinds.items()
        }
    print(floors(runs), waterfalls(runs), sep="\n\n")
    for name, run in runs.items():
        print(f"\n{name}:\n", *largest(run), sep="\n")


if __name__ == "__main__":
    main()
