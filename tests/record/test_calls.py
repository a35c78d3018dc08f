"""Configs that come with the package are named without folder and suffix; whatever is a file stays a file."""

from pathlib import Path

import pytest
import yaml
from refused import printed_refusal
from stored_texts import assert_stored

from lm_profiler.cli.main import main
from lm_profiler.record.calls import config_file, shipped_configs

CONFIGS = Path(__file__).resolve().parents[2] / "lm_profiler" / "configs"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("below", ["", "sweeps"])
def test_every_config_of_the_tree_has_its_name(below: str) -> None:
    files = sorted((CONFIGS / below).glob("*.yaml"))
    assert list(shipped_configs(below)) == sorted(file.name[: -len(".yaml")] for file in files)
    for file in files:
        meant = Path(config_file(file.name[: -len(".yaml")], below))
        assert meant.read_bytes() == file.read_bytes()


def test_a_file_precedes_a_shipped_config() -> None:
    Path("demo").write_text("model: {size: small}\n", encoding="utf-8")
    assert config_file("demo") == "demo"
    assert config_file("configs/demo.yaml") == "configs/demo.yaml"
    for file in (CONFIGS / "sweeps").glob("*.yaml"):
        assert yaml.safe_load(file.read_text(encoding="utf-8"))["config"] in shipped_configs()


@pytest.mark.parametrize("verb", [["fit", "--config=dmeo"], ["sweep", "--config", "dmeo", "--repeats", "2"]])
def test_a_misspelt_name_is_answered_with_the_nearest(verb: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(verb) == 2
    printed = capsys.readouterr().err
    assert "given dmeo" in printed
    assert "demo?" in printed


def test_a_misspelt_name_is_answered_with_the_shipped_ones(capsys: pytest.CaptureFixture[str]) -> None:
    message = printed_refusal(["fit", "--config=quite-another"], capsys)
    assert ", ".join(shipped_configs()) in message
    assert_stored("record/refused: no such config", {"--config=quite-another": message})
    assert main(["fit", "--config=my/own.yaml"]) == 2
    assert "shipped" not in capsys.readouterr().err
    assert main(["sweep", "quite-another"]) == 2
    message = capsys.readouterr().err
    assert all(name in message for name in ("attention", "context_lengths", "demo", "sizes"))
