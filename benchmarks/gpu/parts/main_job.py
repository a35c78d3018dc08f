"""The main job as the README has it: its table, trace, kernels, pictures, page, and TensorBoard in a Chromium."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from benchmarks.gpu.findings import Findings
from benchmarks.gpu.place import Place, how_told
from lm_profiler.record.kernels import KernelTable, kernel_files, read_kernels
from lm_profiler.record.quantities import PARTS
from lm_profiler.record.run_record import RunRecord

CONFIG = "xl_bf16"
"""As in the README, warm-up and all."""
PICTURES = ("phases", "memory")
_TINY_TRACED = ("--memory.steps=1", "--trace.steps=1")
_OTHER = 0.05
_TAB = "#lm_profiler&p.lm_profiler.view="
_VIEWS = {
    **{view.lower(): _TAB + view for view in ("Run", "Why", "Kernels")},
    "scalars": "#timeseries",
}


def run(place: Place, findings: Findings) -> None:
    options = place.sized("--config", CONFIG)
    code, record = place.fit(CONFIG, *options, *(_TINY_TRACED if place.on_cpu else ()))
    found = f"{'no record' if record is None else record.status}, {how_told(code)}"
    findings.aim(
        "main job",
        "ok, exit code 0",
        found,
        record is not None and (record.status, code) == ("ok", 0),
    )
    if record is None or record.status != "ok":
        return
    folder = place.newest(CONFIG)
    printed = (place.folder / f"{CONFIG}.txt").read_text("utf-8").strip()
    findings.text("The table at the run's end", f"```console\n{printed}\n```\n")
    tell(record, findings)
    kernels(place, [read_kernels(table) for table in kernel_files(folder)], findings)
    place.call(
        "report",
        str(folder),
        "--kernels",
        f"--output={place.folder / 'kernels.md'}",
        output="report.txt",
    )
    for picture in PICTURES:
        place.picture(folder, picture)
    if not place.on_cpu:
        screenshots(place, findings)


def kernels(place: Place, tables: list[KernelTable], findings: Findings) -> None:
    """Whether the trace has them, and how many have a name that nobody knows."""
    sources = [table.source for table in tables]
    met = bool(sources) and (place.on_cpu or sources == ["kernels"])
    findings.aim(
        "the trace has the device's kernels",
        "yes",
        ", ".join(sources) or "no table of kernels",
        met,
    )
    for table in tables if met else ():
        kinds: Counter[str] = Counter()
        for phase in table.phases.values():
            kinds.update({kind: time.total_s for kind, time in phase.kinds.items()})
        share = kinds["other"] / max(kinds.total(), 1e-9)
        findings.add(kernel_s=dict(kinds))
        known = None if place.on_cpu else share <= _OTHER
        findings.aim(
            "kernels of kind `other`",
            f"{_OTHER:.0%} of their time at most",
            f"{share:.1%}",
            known,
        )


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
        planned=None if record.planned is None else record.planned.model_dump(),
        telemetry=None if record.telemetry is None else record.telemetry.model_dump(),
    )
    off_s = sum(record.time[part].mean or 0.0 for part in PARTS) - (step.mean or 0.0)
    findings.aim(
        "parts less the step",
        "1 µs at most",
        f"{off_s * 1e6:.3f} µs",
        abs(off_s) <= 1e-6,
    )


def screenshots(place: Place, findings: Findings) -> None:
    """TensorBoard's views of the run, where there is a Chromium."""
    chromium = (
        shutil.which("chromium")
        or shutil.which("chromium-browser")
        or shutil.which("google-chrome")
    )
    if chromium is None:
        findings.note("No Chromium here, so no screenshots of TensorBoard.")
        return
    command = [
        sys.executable,
        "-m",
        "tensorboard.main",
        "--logdir",
        str(place.folder / CONFIG),
        "--port",
        "0",
    ]
    said = place.folder / "tensorboard.txt"
    with (
        said.open("a") as file,
        subprocess.Popen(
            [*command, "--host", "127.0.0.1"], stderr=file, stdout=file
        ) as process,
    ):
        try:
            if (address := _address(said, process, place)) is None:
                findings.note("TensorBoard did not start in time.")
                return
            for name, view in _VIEWS.items():
                picture = f"--screenshot={(place.folder / f'tensorboard_{name}.png').resolve()}"
                headless = (
                    "--headless",
                    "--no-sandbox",
                    "--window-size=1280,800",
                    "--virtual-time-budget=10000",
                )
                called = [chromium, *headless, picture, address + view]
                subprocess.run(
                    called,
                    timeout=max(place.left_s, 1),
                    check=False,
                    stderr=file,
                    stdout=file,
                )
        finally:
            process.terminate()


def _address(said: Path, process: subprocess.Popen[bytes], place: Place) -> str | None:
    while place.left_s > 0 and process.poll() is None:
        if found := re.search(r"http://127\.0\.0\.1:\d+/", said.read_text("utf-8")):
            return found[0]
        time.sleep(0.1)
    return None
