"""The tests marked ``gpu``, with pytest's report."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.gpu.findings import Findings
from benchmarks.gpu.place import Place

ROOT = Path(__file__).resolve().parents[3]
_ON_CPU = "tests/measure/clocks"


def run(place: Place, findings: Findings) -> None:
    # Only files that have such tests: to import all others takes longer than these need.
    below = ROOT / _ON_CPU if place.on_cpu else ROOT / "tests"
    files = sorted(
        str(path)
        for path in below.rglob("test_*.py")
        if "pytest.mark.gpu" in path.read_text("utf-8")
    )
    report = place.folder / "pytest.xml"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "gpu",
        "--continue-on-collection-errors",
        "--durations=5",
    ]
    # Each test is told as it ends, so that one that hangs can be named. Of all plugins that may be installed here only
    # the one that pyproject.toml has options of.
    line = [
        *command,
        "-v",
        "-p",
        "pytest_timeout",
        f"--junitxml={report.resolve()}",
        *files,
    ]
    alone = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    try:
        subprocess.run(
            line, cwd=ROOT, check=False, timeout=max(place.left_s, 1.0), env=alone
        )
        tell(report, findings, place.on_cpu)
    except subprocess.TimeoutExpired:
        findings.aim(
            "tests marked gpu",
            "none fails",
            "not over in time; output.txt says how far it came",
            False,
        )


def tell(report: Path, findings: Findings, on_cpu: bool) -> None:
    """What pytest's report says."""
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    words = ("failure", "error", "skipped")
    ends = {
        word: [case for case in cases if case.find(word) is not None] for word in words
    }
    failed = [*ends["failure"], *ends["error"]]
    rows = [
        [_name(case), word, _reason(case, word)]
        for word, group in ends.items()
        for case in group
    ]
    if rows:
        findings.table("Not passed", ("test", "how", "reason"), rows, left=3)
    passed = len(cases) - len(failed) - len(ends["skipped"])
    findings.add(
        tests=len(cases),
        passed=passed,
        failed=len(failed),
        skipped=len(ends["skipped"]),
    )
    told = f"{passed} passed, {len(failed)} failed, {len(ends['skipped'])} skipped"
    findings.aim(
        "tests marked gpu",
        "none fails",
        told,
        None if on_cpu else not failed and passed > 0,
    )


def _name(case: ElementTree.Element) -> str:
    return f"{case.get('classname', '')}::{case.get('name', '')}"


def _reason(case: ElementTree.Element, word: str) -> str:
    told = case.find(word)
    text = "" if told is None else (told.get("message") or told.text or "")
    return text.strip().partition("\n")[0][:200]
