"""One part in this process: ``python -m benchmarks.gpu.part NAME FOLDER LIMIT_S (gpu|cpu)``, for the runner."""

from __future__ import annotations

import logging
import sys
import warnings
from importlib import import_module
from pathlib import Path
from unittest import mock

from benchmarks.gpu.findings import Findings
from benchmarks.gpu.place import Place
from benchmarks.gpu.registry import UNFINISHED
from lm_profiler.callbacks import collect
from lm_profiler.cli.surroundings import quiet_libraries
from lm_profiler.record.calls import OK


def main(name: str, folder: str, limit_s: str, accelerator: str) -> int:
    quiet_libraries()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    place = Place(Path(folder), accelerator == "cpu", float(limit_s))
    if place.on_cpu and name != "memory":  # whose waterfall needs them
        _leave_rates_out()
    more = import_module(f"benchmarks.gpu.parts.{name}").run(
        place, Findings(place.folder)
    )
    return UNFINISHED if more else OK


def _leave_rates_out() -> None:
    """Seconds of products and copies after each run would be most of the time that tiny runs take."""
    nothing = {
        name: mock.Mock(return_value=None)
        for name in ("known_ceiling", "known_copy_rate")
    }
    mock.patch.multiple(collect, **nothing).start()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
