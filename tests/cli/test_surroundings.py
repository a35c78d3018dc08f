"""What a call finds around it: streams, variables, a machine without what it asks for."""

import subprocess
import sys

import pytest

from lm_profiler.cli.main import main

pytestmark = pytest.mark.usefixtures("no_rates", "no_preflight")


PROGRAM = f"{sys.executable} -m lm_profiler"


@pytest.mark.parametrize(
    "name, given",
    [
        *[(name, "abc") for name in ("NODE_RANK", "LOCAL_RANK", "RANK", "WORLD_SIZE", "SLURM_PROCID")],
        *[("LOCAL_RANK", ""), ("LOCAL_RANK", "1" * 5000)],
    ],
)
def test_a_rank_is_a_number(name: str, given: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv(name, given)
    assert main(["fit"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"lm_profiler: {name}:")
    assert repr(given[:100]) in line


@pytest.mark.parametrize(
    "line,code,message",
    [
        (f"{PROGRAM} --help | true", 0, ""),
        (f"PYTHONUNBUFFERED= {PROGRAM} --help > /dev/full", 1, "No space left on device"),
        (f"PYTHONUNBUFFERED=1 {PROGRAM} --help > /dev/full", 1, "No space left on device"),
        (f"PYTHONIOENCODING=ascii {PROGRAM} report --help > /dev/null", 0, ""),
    ],
)
def test_closed_or_full_streams_cause_no_traceback(line: str, code: int, message: str) -> None:
    done = subprocess.run(["bash", "-o", "pipefail", "-c", line], capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == bool(message)
