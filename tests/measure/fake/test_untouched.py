"""A process that leaves files as they are."""

import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from lm_profiler.measure.fake.world import WouldChange, forbid_writing
from lm_profiler.processes.child import Child


def _in_there(do: Callable[[], object]) -> str:
    """What came of it in a process that leaves files as they are."""

    def find() -> str:
        forbid_writing()
        try:
            do()
        except Exception as error:
            return type(error).__name__
        return "done"

    return Child(find, 60.0).answer()


@pytest.mark.skipif(sys.platform != "linux", reason="asks copies of this process")
def test_files_stay_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("kept").write_text("1")
    changes: list[Callable[[], object]] = [
        lambda: Path("kept").write_text("2"),
        lambda: os.open("kept", os.O_WRONLY | os.O_APPEND),
        lambda: os.open("made", os.O_CREAT),
        Path("made").mkdir,
        lambda: Path("kept").chmod(0o777),
        lambda: os.utime("kept", (0, 0)),
        Path("kept").unlink,
        lambda: Path("kept").rename("moved"),
        lambda: Path("made").symlink_to("kept"),
        lambda: shutil.rmtree(tmp_path),
        lambda: torch.save({}, "kept"),
        lambda: torch.save({}, None),
    ]
    assert {_in_there(change) for change in changes} == {WouldChange.__name__}
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert Path("kept").read_text() == "1"


@pytest.mark.skipif(sys.platform != "linux", reason="asks copies of this process")
def test_harmless_writes_are_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))

    def do() -> None:
        assert Path(__file__).read_text()
        (tmp_path / "cache").mkdir()
        (tmp_path / "cache" / "file").write_text("1")
        (tmp_path / "cache").mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "inner").mkdir()
            Path(folder, "inner", "file").write_text("1")
        with tempfile.NamedTemporaryFile() as file:
            file.write(b"1")
        Path(os.devnull).write_text("1")
        assert len([*DataLoader(torch.zeros(4, 2), num_workers=2)]) == 4

    assert _in_there(do) == "done"
    assert (tmp_path / "cache" / "file").exists()
