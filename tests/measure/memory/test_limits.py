"""What limits leave, read from files as the kernel writes them."""

import resource
from pathlib import Path

import psutil
import pytest

from lm_profiler.measure.memory.peaks import left_bytes

MB = 10**6
UNLIMITED = {1: "9223372036854771712", 2: "max"}


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY,) * 2)
    return tmp_path


def bytes_left(groups: Path) -> int | None:
    return left_bytes(groups / "mounted", groups / "own")


def write_group(above: Path, version: int, path: str, limit: str, used: int, of_files: int) -> None:
    folder = above / "mounted" / ("memory" if version == 1 else "") / path
    folder.mkdir(parents=True, exist_ok=True)
    names = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes"), 2: ("memory.max", "memory.current")}[version]
    for name, text in zip(names, (limit, used), strict=True):
        (folder / name).write_text(f"{text}\n")
    prefix = "total_" if version == 1 else ""
    stat = {"anon": used, f"{prefix}active_file": of_files // 2, f"{prefix}inactive_file": of_files - of_files // 2}
    (folder / "memory.stat").write_text("".join(f"{name} {count}\n" for name, count in stat.items()))


@pytest.mark.parametrize("version, own", [(1, "9:name=systemd:/\n4:cpu,memory:/{}\n0::/\n"), (2, "0::/{}\n")])
def test_the_smallest_limit_of_all_groups_counts(groups: Path, version: int, own: str) -> None:
    (groups / "own").write_text(own.format("slurm/job_7/step_0"))
    write_group(groups, version, "slurm/job_7/step_0", UNLIMITED[version], 10 * MB, 0)
    write_group(groups, version, "slurm/job_7", str(1000 * MB), 900 * MB, 600 * MB)
    write_group(groups, version, "slurm", str(4000 * MB), 900 * MB, 0)
    assert bytes_left(groups) == 700 * MB


def test_a_container_has_its_own_group_as_root(groups: Path) -> None:
    assert bytes_left(groups) is None
    (groups / "own").write_text("0::/\n")
    assert bytes_left(groups) is None
    (groups / "own").write_text("0::/docker/4711\n")
    write_group(groups, 2, "", str(1000 * MB), 1200 * MB, 0)
    assert bytes_left(groups) == 0


def test_addresses_are_limited_too(groups: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = psutil.Process().memory_info().vms
    monkeypatch.setattr(resource, "getrlimit", lambda which: (taken + 500 * MB, resource.RLIM_INFINITY))
    assert bytes_left(groups) == pytest.approx(500 * MB, rel=0.1)
