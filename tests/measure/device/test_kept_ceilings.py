"""A ceiling is judged by only where this machine's readings agree, and keeping them never hurts a run."""

import json
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from lm_profiler.measure.device import ceilings as module
from lm_profiler.measure.device.ceilings import known_ceiling, known_copy_rate
from lm_profiler.record.process_spread import cache_folder

CPU = torch.device("cpu")


CLOCK = count(1e9, 1e6)
"""Each reading is so much later that the one before is not fresh."""


def found_ceiling(
    folder: Path | None,
    gflops: float,
    dtype: torch.dtype = torch.float32,
    now_s: float | None = None,
    device: torch.device = CPU,
) -> tuple[float | None, list[str]]:
    """Return the ceiling in GFLOP/s if a probe now finds ``gflops``, and the notes."""
    notes: list[str] = []
    clock = lambda: next(CLOCK) if now_s is None else now_s  # noqa: E731
    found = known_ceiling(device, dtype, notes.append, folder, lambda *_: gflops * 1e9, clock)
    return None if found is None else round(found / 1e9, 3), notes


def test_the_highest_of_readings_that_agree_is_the_ceiling(tmp_path: Path) -> None:
    assert found_ceiling(tmp_path, gflops=190) == (190, [])
    assert found_ceiling(tmp_path, gflops=198) == (198, [])
    assert found_ceiling(tmp_path, gflops=170) == (198, [])


def test_the_fastest_copy_is_kept_beside_the_ceiling(tmp_path: Path) -> None:
    def found_rate(gb_per_s: float) -> float | None:
        return known_copy_rate(CPU, tmp_path, lambda _: gb_per_s * 1e9, lambda: next(CLOCK))

    found_ceiling(tmp_path, gflops=198)
    assert found_rate(gb_per_s=16.0) == 16e9
    assert found_rate(gb_per_s=8.0) == 16e9
    assert found_rate(gb_per_s=32.0) == 32e9
    assert found_rate(gb_per_s=31.0) == 32e9
    assert found_ceiling(tmp_path, gflops=190) == (198, [])
    assert known_copy_rate(CPU, tmp_path, lambda _: None) is None


def test_nothing_is_read_again_soon_after_two_agreed(tmp_path: Path) -> None:
    """A reading of 100 GFLOP/s agrees with neither of those before, so it shows whether the probe ran."""
    assert found_ceiling(tmp_path, gflops=190, now_s=1000.0) == (190, [])
    assert found_ceiling(tmp_path, gflops=198, now_s=1001.0) == (198, [])  # one alone has agreed with none
    assert found_ceiling(tmp_path, gflops=100, now_s=1001.0 + module.FRESH_S - 1.0) == (198, [])
    assert found_ceiling(tmp_path, gflops=100, now_s=1001.0 + module.FRESH_S)[0] is None
    assert found_ceiling(tmp_path, gflops=100, now_s=999.0)[0] is None  # the clock was set back


def test_no_copy_is_timed_again_soon_after_two_agreed(tmp_path: Path) -> None:
    rates = iter([16e9, 8e9, 17e9])  # the third agrees with the first
    now_s = iter([0.0, 1.0, 2.0, 3.0, 4.0])
    found = [known_copy_rate(CPU, tmp_path, lambda _: next(rates), lambda: next(now_s)) for _ in range(5)]
    assert found == [16e9, 16e9, 17e9, 17e9, 17e9]


def test_a_first_reading_of_a_shared_machine_is_found_out_by_the_next(tmp_path: Path) -> None:
    assert found_ceiling(tmp_path, gflops=20) == (20, [])
    ceiling, (note,) = found_ceiling(tmp_path, gflops=198)
    assert ceiling is None
    assert "198 GFLOP/s" in note
    assert "20 GFLOP/s" in note
    assert found_ceiling(tmp_path, gflops=190) == (198, [])


@pytest.mark.parametrize("now", [0.005, 100.0, 157.0])
def test_a_reading_far_below_is_not_kept(now: float, tmp_path: Path) -> None:
    found_ceiling(tmp_path, 198)
    ceiling, (note,) = found_ceiling(tmp_path, now)
    assert ceiling is None
    assert note.startswith("ceiling unknown")
    assert f"{now:g} GFLOP/s" in note
    assert "198 GFLOP/s" in note
    assert str(tmp_path) in note
    assert found_ceiling(tmp_path, 195) == (198, [])


def test_each_configuration_has_its_own_ceiling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert found_ceiling(tmp_path, gflops=198) == (198, [])
    assert found_ceiling(tmp_path, gflops=20, dtype=torch.bfloat16) == (20, [])
    read_text = Path.read_text

    def text_of_another_cpu(path: Path, *args: Any, **options: Any) -> str:
        return "model name : another" if str(path) == "/proc/cpuinfo" else read_text(path, *args, **options)

    for owner, name, value in (
        (torch, "get_num_threads", lambda: 61),
        (torch, "__version__", "9.9"),
        (torch, "get_float32_matmul_precision", lambda: "another"),
        (Path, "read_text", text_of_another_cpu),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            assert found_ceiling(tmp_path, gflops=10) == (10, [])
    for name in ("Apple M1", "Apple M2"):
        monkeypatch.setattr(torch.backends.mps, "get_name", lambda name=name: name)
        assert found_ceiling(tmp_path, gflops=5, device=torch.device("mps")) == (5, [])
    assert found_ceiling(tmp_path, gflops=198) == (198, [])


def test_a_missing_reading_is_not_kept(tmp_path: Path):
    assert known_ceiling(CPU, torch.float32, pytest.fail, tmp_path, lambda *_: None) is None
    assert not list(tmp_path.iterdir())
    taken = tmp_path / "taken"
    taken.touch()
    assert found_ceiling(taken, 198) == (198, [])
    assert found_ceiling(taken, 20) == (20, [])
    assert found_ceiling(taken / "below", 20) == (20, [])
    too_long_a_name = "x" * 300  # the file cannot be read, as in a folder without search rights
    assert found_ceiling(tmp_path / too_long_a_name, 20) == (20, [])


def test_the_cache_is_in_the_users_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert cache_folder() == tmp_path / "cache" / "lm_profiler"
    assert found_ceiling(None, 198) == (198, [])
    assert len(list(cache_folder().iterdir())) == 1
    monkeypatch.setenv("HOME", str(tmp_path))
    for unset in ("", "relative/is/ignored"):
        monkeypatch.setenv("XDG_CACHE_HOME", unset)
        assert cache_folder() == tmp_path / ".cache" / "lm_profiler"


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "null", '{"flops_per_s": "fast"}', '{"flops_per_s": NaN}', '{"flops_per_s": -1}', "[" * 10**5),
        '{"flops_per_s": 1' + "0" * 400 + "}",
    ],
)
def test_a_damaged_file_is_as_none(text: str, tmp_path: Path) -> None:
    found_ceiling(tmp_path, 198)
    (file,) = tmp_path.iterdir()
    file.write_text(text)
    assert found_ceiling(tmp_path, 20) == (20, [])
    assert json.loads(file.read_text()) == {"flops_per_s": 20e9}
