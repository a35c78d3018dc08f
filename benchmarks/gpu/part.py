"""One part in this process: ``python -m benchmarks.gpu.part NAME FOLDER LIMIT_S (gpu|cpu)``, for the runner."""

from __future__ import annotations

import logging
import sys
import warnings
from importlib import import_module
from pathlib import Path

from benchmarks.gpu.findings import Findings
from benchmarks.gpu.place import Place
from lm_profiler.cli.quiet import quiet_libraries


def main(name: str, folder: str, limit_s: str, accelerator: str) -> None:
    quiet_libraries()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    place = Place(Path(folder), accelerator == "cpu", float(limit_s))
    import_module(f"benchmarks.gpu.parts.{name}").run(place, Findings(place.folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
