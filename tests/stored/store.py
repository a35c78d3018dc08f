"""Keeps what a version writes, for later ones to read: ``python tests/stored/store.py VERSION``, before its release.

Three runs and a sweep, of seconds each; large files and the name of the home folder are left out.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
KEPT = (
    "run.json",
    "steps.csv",
    "config.yaml",
    "*.kernels.json",
    "sweep.json",
    "outcome.json",
    "ended.json",
    "tiny.yaml",
)


def profiler(*arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen((sys.executable, "-m", "lm_profiler", *arguments, "--log_dir=logs"))


def main(version: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name in ("tiny.yaml", "fails.yaml", "fails.py"):
            shutil.copy(HERE / name, folder)
        os.chdir(folder)
        profiler("fit", "--config=tiny.yaml", "--name=tiny", "--numerics.audit=true").wait()
        profiler("fit", "--config=fails.yaml", "--name=fails").wait()
        shorter = ("--grid.data.context_length=8,16", "--trace.steps=0", "--memory.steps=0")
        profiler("sweep", "--config=tiny.yaml", "--name=two", *shorter).wait()
        waits = profiler("fit", "--config=fails.yaml", "--name=killed", "--model.waits=true")
        rows = Path("logs/killed/version_0/steps.csv")
        while not (rows.exists() and rows.read_text().count("measure") >= 3):
            time.sleep(0.1)
        waits.kill()
        waits.wait()
        for path in sorted(file for name in KEPT for file in Path("logs").rglob(name)):
            to = HERE / version / path.relative_to("logs")
            to.parent.mkdir(parents=True, exist_ok=True)
            to.write_text(path.read_text().replace(str(Path.home()), "~"))


if __name__ == "__main__":
    main(*sys.argv[1:])
