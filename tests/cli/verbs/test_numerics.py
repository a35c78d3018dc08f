"""The sums of ``numerics``, against the figures that are known for them."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from lm_profiler.cli.main import main
from lm_profiler.cli.verbs.selftest import sums

pytestmark = pytest.mark.usefixtures("no_preflight")


def test_a_thousand_additions_come_to_what_is_known() -> None:
    assert [f"{value:.4f}" for _, value, _ in sums()] == ["10.0001", "9.9531", "10.0021", "10.0021"]


def test_it_prints_each_with_its_error(capsys: Any) -> None:
    assert main(["numerics"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6
    assert lines[3].split()[:5] == ["float16", "+=", "float16", "9.9531", "-0.469%"]


def test_it_takes_no_arguments(capsys: Any) -> None:
    assert main(["numerics", "--help"]) == 0
    assert "fit --numerics.audit=true" in capsys.readouterr().out
    assert main(["numerics", "0.1"]) == 2
    assert "'0.1'" in capsys.readouterr().err


def test_nobody_waits_for_torch() -> None:
    code = "import sys; from lm_profiler.cli.main import main; main(['numerics']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0
