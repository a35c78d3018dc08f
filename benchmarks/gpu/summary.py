"""All parts together: ``gpu.json`` for programs, ``README.md`` for people."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.gpu.findings import PAGE, read_findings
from lm_profiler.record.files import write_whole
from lm_profiler.report.tables.formats import markdown
from lm_profiler.report.tables.table import text_table

STATUS_FILE = "part.json"
_MET = {True: "yes", False: "NO", None: "cannot be told"}


def write_summary(folder: Path, on_cpu: bool) -> None:
    """Of the parts that have ended so far, in ``folder``."""
    parts = [_read(path.parent) for path in sorted(folder.glob(f"*/{STATUS_FILE}"))]
    machine: dict[str, Any] = next(
        (part["figures"] for part in parts if part["name"] == "machine"), {}
    )
    told = {"on_cpu": on_cpu, "machine": machine, "parts": parts}
    write_whole(folder / "gpu.json", json.dumps(told, indent=1) + "\n")
    write_whole(folder / "README.md", _page(folder, on_cpu, machine, parts))


def _read(place: Path) -> dict[str, Any]:
    return {
        **json.loads((place / STATUS_FILE).read_text("utf-8")),
        **read_findings(place),
        "folder": place.name,
    }


def _page(
    folder: Path, on_cpu: bool, machine: dict[str, Any], parts: list[dict[str, Any]]
) -> str:
    versions = ", ".join(
        f"{name} {version}" for name, version in machine.get("versions", {}).items()
    )
    platform, driver, commit = (
        machine.get(key) or "unknown" for key in ("platform", "driver", "git_commit")
    )
    texts = [
        f"# {machine.get('device_name', 'unknown machine')}\n",
        f"platform {platform}, driver {driver}, {versions or 'versions unknown'}, commit {commit}\n",
    ]
    if on_cpu:
        texts.append(
            "Tiny sizes on the CPU, to try the command: these figures say nothing about anything.\n"
        )
    rows = [
        [str(part["number"]), part["name"], _how(part), f"{part['duration_s']:.0f}"]
        for part in parts
    ]
    texts.append(markdown(text_table(("", "part", "ended", "seconds"), rows, left=3)))
    aims = [
        [part["name"], aim["what"], aim["aim"], aim["found"], _MET[aim["met"]]]
        for part in parts
        for aim in part["aims"]
    ]
    if aims:
        texts.append(
            markdown(text_table(("part", "", "aim", "found", "met"), aims, left=2))
        )
    for part in parts:
        page = folder / part["folder"] / PAGE
        text = page.read_text("utf-8") if page.exists() else ""
        left_out = "".join(
            f"\nRemoved, because it is large: {name}\n" for name in part["left_out"]
        )
        texts.append(
            f"## {part['number']}. {part['name']}\n\n{part['question']}\n\n{text}{left_out}"
        )
    return "\n".join(texts)


def _how(part: dict[str, Any]) -> str:
    return "done" if part["status"] == "done" else str(part["how"])
