"""The sums of ``numerics``, against the figures that are known for them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from refused import assert_refused_as_stored

from lm_profiler.cli.main import main
from lm_profiler.cli.verbs.selftest import sums

pytestmark = pytest.mark.usefixtures("no_preflight")


def test_a_thousand_additions_of_0_01_in_several_dtypes() -> None:
    assert [f"{value:.4f}" for _, value, _ in sums()] == ["10.0001", "9.9531", "4.0000", "10.0021", "10.0021"]
    total = torch.zeros((), dtype=torch.bfloat16)
    for _ in range(1000):
        total += torch.tensor(0.01, dtype=torch.bfloat16)
    assert [value for how, value, _ in sums() if how.startswith("bfloat16")] == [total.item()]


def test_the_sums_are_printed_with_their_errors(capsys: Any) -> None:
    """In float16 9.9531 of 10, which is 0.469 % too little."""
    assert main(["numerics"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 7
    assert lines[3].split()[:5] == ["float16", "+=", "float16", "9.9531", "-0.469%"]


def test_the_sums_are_printed_or_written_in_other_formats(capsys: Any, tmp_path: Path) -> None:
    assert main(["numerics", "--format", "latex"]) == 0
    assert r"\toprule" in capsys.readouterr().out
    assert main(["numerics", "--output", str(tmp_path / "sums.typ")]) == 0
    written = " ".join((tmp_path / "sums.typ").read_text().split())
    assert '"bfloat16 += bfloat16" , "4.0000"' in written
    assert_refused_as_stored("cli/refused: formats", [["numerics", "--format", "csv"]], capsys)


def test_the_help_names_the_audit(capsys: Any) -> None:
    assert main(["numerics", "--help"]) == 0
    assert "fit --numerics.audit=true" in capsys.readouterr().out
    assert main(["numerics", "0.1"]) == 2
    assert "'0.1'" in capsys.readouterr().err
