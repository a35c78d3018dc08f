"""Files are whole or not there; folders belong to one run."""

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lm_profiler.record.files import claim_run_dir, relative_to_cwd, write_whole


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    write_whole(path, "x,y\nµ,2\n")
    assert path.read_bytes() == "x,y\nµ,2\n".encode()
    write_whole(path, "new\n")
    assert path.read_text() == "new\n"
    write_whole(path, b"PAR1\xff\n")
    assert path.read_bytes() == b"PAR1\xff\n"
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(UnicodeEncodeError):
        write_whole(tmp_path / "run.json", "\ud800")
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(FileNotFoundError):
        write_whole(tmp_path / "missing" / "run.json", "x")


@pytest.mark.parametrize("fails_at", ["write_bytes", "replace"], ids=["write", "rename"])
def test_a_failure_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: str):
    path = tmp_path / "run.json"
    path.write_text("old")

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, fails_at, full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, "new")
    monkeypatch.undo()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_runs_get_the_next_free_number(tmp_path: Path) -> None:
    parent = tmp_path / "logs" / "name"
    assert [claim_run_dir(parent).name for _ in range(3)] == ["version_0", "version_1", "version_2"]
    (parent / "version_10").mkdir()
    for stranger in ("version_x", "version_", "version_99_old", "other"):
        (parent / stranger).mkdir()
    assert claim_run_dir(parent).name == "version_11"
    (tmp_path / "version_0").write_text("")
    assert claim_run_dir(tmp_path).name == "version_1"
    with ThreadPoolExecutor(8) as threads:
        claimed = list(threads.map(claim_run_dir, [tmp_path] * 64))
    assert len(set(claimed)) == 64
    assert all(folder.is_dir() for folder in claimed)


def test_writing_follows_links_and_pipes(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    target, link, dangling = tmp_path / "there" / "a.csv", tmp_path / "a.csv", tmp_path / "b.csv"
    target.write_text("old")
    link.symlink_to(target)
    dangling.symlink_to(tmp_path / "there" / "b.csv")
    write_whole(link, "new")
    write_whole(dangling, "first")
    assert link.is_symlink()
    assert dangling.is_symlink()
    assert target.read_text() == "new"
    assert (tmp_path / "there" / "b.csv").read_text() == "first"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as reader:
        read = reader.submit(pipe.read_bytes)
        write_whole(pipe, "x")
        assert read.result() == b"x"
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_path_below_the_current_folder_is_written_from_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert relative_to_cwd(tmp_path / "here" / "logs" / "a") == Path("logs/a")
    assert relative_to_cwd(tmp_path / "elsewhere") == tmp_path / "elsewhere"
    assert relative_to_cwd(Path("logs")) == Path("logs")
