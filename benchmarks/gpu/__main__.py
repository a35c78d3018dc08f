"""All that must be seen on a GPU, in one command of under 8 minutes.

    python -m benchmarks.gpu [--parts 1,2,5] [--time_limit SECONDS] [--output FOLDER] [--dry_run] [--on_cpu]

Each part has its own time limit, and one that fails does not stop the rest. What a part found is written as it is
found. Started again with the same folder, it goes on with the parts that have not ended well.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from benchmarks.gpu.registry import chosen
from benchmarks.gpu.runner import run_parts
from lm_profiler.cli.endings import handled, terminate
from lm_profiler.record.calls import FAILED, INTERRUPTED, OK, WRONG_CALL
from lm_profiler.report.tables.formats import markdown
from lm_profiler.report.tables.table import text_table


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--parts",
        default="",
        help="by number or name, with commas between; all if not given",
    )
    parser.add_argument(
        "--time_limit",
        type=float,
        help="seconds of each part, instead of its own limit",
    )
    parser.add_argument(
        "--output",
        type=Path,
        help="folder of the results; if not given, logs/gpu or logs/gpu_on_cpu",
    )
    parser.add_argument(
        "--dry_run", action="store_true", help="list the parts and their limits"
    )
    parser.add_argument(
        "--on_cpu", action="store_true", help="the same code on the CPU with tiny sizes"
    )
    options = parser.parse_args()
    try:
        parts = chosen(
            [word.strip() for word in options.parts.split(",") if word.strip()]
        )
    except ValueError as error:
        print(error, file=sys.stderr)
        return WRONG_CALL
    if options.dry_run:
        rows = [
            [str(p.number), p.name, p.question, f"{p.limit(options.time_limit):g}"]
            for p in parts
        ]
        print(
            markdown(
                text_table(("", "part", "what it answers", "limit (s)"), rows, left=3)
            ),
            end="",
        )
        return OK
    folder = options.output or Path("logs", "gpu_on_cpu" if options.on_cpu else "gpu")
    try:
        with handled({signal.SIGTERM: terminate}):
            whole = run_parts(parts, folder, options.on_cpu, options.time_limit)
    except KeyboardInterrupt:
        return INTERRUPTED
    print(
        f"written to {folder}: README.md, gpu.json"
        + ("" if whole else "; the same command goes on with the rest")
    )
    return OK if whole else FAILED


if __name__ == "__main__":
    sys.exit(main())
