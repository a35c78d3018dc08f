"""A run is never changed by being planned: what a module does beside its steps happens as often as without us."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import side_effects
from lightning.pytorch import Trainer

import lm_profiler.cli.verbs.trainer  # noqa: F401 - so that what it plans by can be replaced
from lm_profiler.cli import preflight
from lm_profiler.cli.call import Call
from lm_profiler.cli.main import main
from lm_profiler.cli.rehearse import Unplanned
from lm_profiler.cli.trainer_cli import ProfilerCLI

pytestmark = pytest.mark.usefixtures("no_rates")


OFF = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
TIMED = (f"--stages.measure_steps={side_effects.STEPS - 1}", "--stages.warmup_steps=1", "--trainer.accelerator=cpu")
ALONE = ("--memory.steps=0", "--trace.steps=0", "--actions.steps=0", "--trainer.logger=false")
THEIRS = ("--model=side_effects.NotesAll", "--data=null")


def test_side_effects_of_a_module_happen_once(tmp_path: Path) -> None:
    def without_us() -> None:
        trainer = Trainer(accelerator="cpu", max_steps=side_effects.STEPS, limit_val_batches=0, **OFF)
        trainer.fit(side_effects.NotesAll())

    def with_us() -> None:
        assert main(["fit", *THEIRS, *TIMED, *ALONE, f"--log_dir={tmp_path / 'logs'}"]) == 0

    once = side_effects.lines_of(tmp_path / "without", without_us)
    assert side_effects.lines_of(tmp_path / "with", with_us) == once


@pytest.fixture
def own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(side_effects.VARIABLE, str(tmp_path / "notes"))


@pytest.mark.usefixtures("own_file")
@pytest.mark.parametrize("options, rehearsals", [([], 0), (["--check_memory=true"], 1), (["--check_memory=false"], 0)])
@pytest.mark.parametrize("module", [["--model.size=small"], list(THEIRS)], ids=["ours", "theirs"])
def test_a_run_is_rehearsed_only_on_request(
    module: list[str], options: list[str], rehearsals: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    def answer(*given: Any, **named: Any) -> Any:
        calls.append(given)
        return SimpleNamespace(answer=lambda: Unplanned("not rehearsed"))

    monkeypatch.setattr(preflight, "start_rehearsal", answer)
    cli = ProfilerCLI(Call(["fit", *module, *options, "--trainer.accelerator=cpu", f"--log_dir={tmp_path}"]))
    cli.begin()
    preflight.plan_ahead(cli)
    assert len(calls) == rehearsals
