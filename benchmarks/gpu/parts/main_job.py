"""The main job as the README has it: its table, trace, kernels, pictures, page, and TensorBoard in a Chromium."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.gpu.findings import Findings
from benchmarks.gpu.place import Place
from lm_profiler.record.kernels import kernel_files, read_kernels
from lm_profiler.record.quantities import PARTS
from lm_profiler.record.run import RunRecord

CONFIG = "xl_bf16"
"""As in the README, warm-up and all."""
PICTURES = ("phases", "steps", "memory", "waterfall")
_TINY_TRACED = ("--memory.steps=1", "--trace.steps=1")
_TAB = "#lm_profiler&p.lm_profiler.view="
_VIEWS = {**{view.lower(): _TAB + view for view in ("Run", "Why", "Kernels")}, "scalars": "#timeseries"}


def run(place: Place, findings: Findings) -> None:
    options = place.sized("--config", CONFIG)
    record = place.fit(CONFIG, *options, *(_TINY_TRACED if place.on_cpu else ()))
    if record is None or record.status != "ok":
        findings.aim("main job", "ok", "no record" if record is None else record.status, False)
        return
    folder = place.newest(CONFIG)
    printed = (place.folder / f"{CONFIG}.txt").read_text("utf-8").strip()
    findings.text("The table at the run's end", f"```console\n{printed}\n```\n")
    tell(record, findings)
    sources = [read_kernels(table).source for table in kernel_files(folder)]
    met = bool(sources) and (place.on_cpu or sources == ["kernels"])
    findings.aim("the trace has the device's kernels", "yes", ", ".join(sources) or "no table of kernels", met)
    place.call("report", str(folder), "--kernels", f"--output={place.folder / 'kernels.md'}", output="report.txt")
    for picture in PICTURES:
        place.picture(folder, picture)
    if not place.on_cpu:
        screenshots(place, findings)


def tell(record: RunRecord, findings: Findings) -> None:
    """The run's main figures."""
    step, use, speed = record.time["step"], record.utilisation, record.throughput
    findings.add(
        words=record.words,
        verdict=None if record.verdict is None else record.verdict.model_dump(),
        step_s=step.median,
        step_host_s=record.host_time["step"].median,
        mfu=None if use is None else use.mfu,
        tokens_per_s=None if speed is None else speed.tokens_per_s,
        notes=record.notes,
    )
    off_s = sum(record.time[part].mean or 0.0 for part in PARTS) - (step.mean or 0.0)
    findings.aim("parts less the step", "1 µs at most", f"{off_s * 1e6:.3f} µs", abs(off_s) <= 1e-6)


def screenshots(place: Place, findings: Findings) -> None:
    """TensorBoard's views of the run, where there is a Chromium."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        findings.note("No Chromium here, so no screenshots of TensorBoard.")
        return
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(place.folder / CONFIG), "--port", "0"]
    said = place.folder / "tensorboard.txt"
    with (
        said.open("w") as file,
        subprocess.Popen([*command, "--host", "127.0.0.1"], stderr=file, stdout=file) as process,
    ):
        try:
            if (address := _address(said, process, place)) is None:
                findings.note("TensorBoard did not start in time.")
                return
            for name, view in _VIEWS.items():
                picture = f"--screenshot={(place.folder / f'tensorboard_{name}.png').resolve()}"
                headless = ("--headless", "--no-sandbox", "--window-size=1280,800", "--virtual-time-budget=10000")
                subprocess.run(
                    [chromium, *headless, picture, address + view], timeout=max(place.left_s, 1), check=False
                )
        finally:
            process.terminate()


def _address(said: Path, process: subprocess.Popen[bytes], place: Place) -> str | None:
    while place.left_s > 0 and process.poll() is None:
        if found := re.search(r"http://127\.0\.0\.1:\d+/", said.read_text("utf-8")):
            return found[0]
        time.sleep(0.1)
    return None
