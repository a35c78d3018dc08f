"""The files of a run: where they are, and what is reported about ranks that left none."""

from pathlib import Path

import pytest
from made_environment import made_step

from lm_profiler.analysis.conclude import conclude
from lm_profiler.analysis.evidence import Evidence
from lm_profiler.callbacks.run_files import make_temporary_folder, with_rows_left_behind
from lm_profiler.record.steps import StepRow, append_steps, begin_rows, rank_file


def test_the_second_folder_belongs_to_this_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user has made the folder that could be guessed, and a link in it to a file of ours."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    precious, guessed = tmp_path / "precious", tmp_path / "lm_profiler" / "group" / "fit"
    precious.mkdir()
    (precious / "run.json").write_text("mine")
    guessed.mkdir(parents=True)
    (guessed / "version_0").symlink_to(precious)
    messages: list[str] = []
    places = [make_temporary_folder(name, messages.append) for name in ("group/fit", "group/fit", "x" * 300)]
    assert len(set(places)) == 3
    for place in places:
        assert place.parent == tmp_path
        assert place.stat().st_mode & 0o777 == 0o700
        assert [*place.iterdir()] == []
        assert str(place) in " ".join(messages)
    assert [path.name for path in guessed.iterdir()] == ["version_0"]
    assert (precious / "run.json").read_text() == "mine"


def rows(rank: int, step_s: float) -> list[StepRow]:
    return [made_step(step, {"forward": step_s}, tokens=8, rank=rank) for step in range(1, 7)]


def test_steps_in_the_file_of_a_silent_rank_count(tmp_path: Path) -> None:
    """Rank 2 left none either: a sum over two of three ranks is no total."""
    begin_rows(tmp_path, 1)
    append_steps(rank_file(tmp_path, 1), rows(1, 0.3))
    known = Evidence(rows=rows(0, 0.1), steps_planned={"measure": 6}, world_size=3)
    record = conclude(with_rows_left_behind(known, tmp_path))
    assert record.rank_step_s == [0.1, 0.3]
    assert record.time["step"].median == pytest.approx(0.2)
    assert record.throughput.tokens_per_s is None
