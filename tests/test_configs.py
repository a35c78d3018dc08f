"""Every file below configs/ is read by the real parser, and the small ones run."""

from pathlib import Path
from typing import Any

import pytest

from lm_profiler.cli.call import Call
from lm_profiler.cli.main import main
from lm_profiler.cli.options import OptionsReader, read_config
from lm_profiler.cli.surroundings import quiet
from lm_profiler.cli.trainer_cli import ProfilerCLI
from lm_profiler.models.config import PRESETS
from lm_profiler.record.run_record import MemoryLevels, read_run
from lm_profiler.record.sweep_files import Cell
from lm_profiler.sweep.sweep_plan import SweepRequest, plan_of

pytestmark = pytest.mark.usefixtures("no_rates")


CONFIGS = Path(__file__).parents[1] / "lm_profiler" / "configs"
FILES = sorted(CONFIGS.glob("*.yaml"))
PRECISIONS = {"fp32": "32-true", "bf16": "bf16-mixed"}
REFERENCE = [f"{size}_{precision}" for size in PRESETS if "/" not in size for precision in PRECISIONS]


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, no_weights: None) -> Any:
    """Reads a config and builds everything but the weights; nothing runs."""
    monkeypatch.setattr("lightning.pytorch.Trainer.fit", lambda *args, **kwargs: None)

    def read(file: Path) -> ProfilerCLI:
        with quiet():
            cli = ProfilerCLI(Call(["fit", f"--config={file}", f"--log_dir={tmp_path}", "--check_memory=false"]))
            cli.begin()
            cli.run_verb()
        return cli

    return read


def test_every_preset_and_precision_has_a_config() -> None:
    assert {"attention", "demo", "forward_only", *REFERENCE} <= {file.stem for file in FILES}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_config_is_what_its_name_promises(file: Path, read: Any) -> None:
    cli = read(file)
    assert cli.context.launch.name == file.stem
    if file.stem not in REFERENCE:
        return
    size, _, precision = file.stem.rpartition("_")
    assert cli.model.config == PRESETS[size]
    assert cli.model.optimizer_name == "adamw"
    assert cli.trainer.precision == PRECISIONS[precision]
    assert (cli.datamodule.batch_size, cli.datamodule.context_length) == (4, 512)
    assert (cli.config_init.fit.stages.warmup_steps, cli.config_init.fit.stages.measure_steps) == (5, 40)


SHORT = ["--data.context_length=32", "--data.batch_size=1", "--stages.warmup_steps=1"]
SHORTER = [*SHORT, "--stages.measure_steps=1", "--trace.steps=0", "--memory.steps=0"]


@pytest.mark.usefixtures("no_preflight")
@pytest.mark.parametrize("verb,name", [("fit", "small_bf16"), ("validate", "forward_only"), ("fit", "forward_only")])
def test_the_small_ones_run(verb: str, name: str, tmp_path: Path) -> None:
    sizes = {"d_model": 64, "d_ff": 128, "num_heads": 4, "num_layers": 2, "vocab_size": 256}
    small = [f"--model.{option}={size}" for option, size in sizes.items()]
    assert main([verb, f"--config={CONFIGS / name}.yaml", f"--log_dir={tmp_path}", *SHORTER, *small]) == 0
    record = read_run(tmp_path / name / "version_0")
    assert record.status == "ok"
    assert [(part.name, part.phase) for part in record.code_parts] == [("loss", "forward")]
    assert record.steps["measure"] == 1
    timed = {part for part, time in record.time.items() if time.max}
    assert ("backward" in timed) == (verb == "fit")
    assert ("AdamW" in record.model.optimizers) == (name != "forward_only")


@pytest.mark.usefixtures("no_preflight")
def test_the_demo_traces_and_clips(tmp_path: Path) -> None:
    config = f"--config={CONFIGS / 'demo.yaml'}"
    assert main(["fit", config, f"--log_dir={tmp_path}", *SHORT, "--stages.measure_steps=2"]) == 0
    folder = tmp_path / "demo" / "version_0"
    assert (folder / "trace" / "rank0.pt.trace.json.gz").stat().st_size > 0
    assert read_run(folder).time["clip"].max


@pytest.mark.usefixtures("no_preflight")
def test_memory_of_attention_alone(tmp_path: Path) -> None:
    config = f"--config={CONFIGS / 'attention.yaml'}"
    smaller = ["--model.attention=math", "--data.context_length=64", "--stages.measure_steps=1", "--trace.steps=0"]
    assert main(["fit", config, f"--log_dir={tmp_path}", *smaller]) == 0
    record = read_run(tmp_path / "attention" / "version_0")
    batch, context, width = 8, 64, 64
    tensor_bytes = 4 * batch * context * width
    kept = tensor_bytes + context**2 + 4 * batch * context**2  # the scaled queries, the mask, the softmax
    assert record.memory.held == MemoryLevels(
        start=3 * tensor_bytes, forward=3 * tensor_bytes + kept, backward=6 * tensor_bytes, source="counted"
    )
    assert (record.throughput.tokens_per_step, record.throughput.samples_per_step) == (batch * context, batch)
    assert record.utilisation.flops.forward == 4 * batch * context**2 * width
    assert not record.notes


def test_attention_that_would_take_the_machine_down_is_refused(
    tmp_path: Path, capsys: Any, set_free_memory: Any
) -> None:
    set_free_memory(64 << 30)
    config = f"--config={CONFIGS / 'attention.yaml'}"
    longer = ["--model.attention=math", "--data.context_length=1000000", "--check_memory=true"]
    assert main(["fit", config, f"--log_dir={tmp_path}", *longer]) == 2
    assert read_run(tmp_path / "attention" / "version_0").status == "refused"
    assert "--model.attention=sdpa" in capsys.readouterr().err


def cells_of(*arguments: str) -> list[Cell]:
    """Of the sweep that these ask for, as a dry run shows them."""
    request = OptionsReader("sweep", SweepRequest).read([*arguments, "--dry_run"])
    return plan_of(request, {path: read_config(path)[1] for path in request.configs}).cells


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("sweeps/*.yaml")), ids=lambda file: file.stem)
def test_every_option_of_a_sweep_is_one_of_its_cells(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(CONFIGS.parent)
    assert file.read_text(encoding="utf-8").startswith("# ")
    cells = cells_of(str(file), f"--log_dir={tmp_path}")
    assert len(cells) > 1
    for cell in (cells[0], cells[-1]):
        ProfilerCLI(Call(cell.arguments)).context.discard()


def test_the_attention_sweep_is_contexts_by_widths_both_ways_compiled_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(CONFIGS.parent)
    cells = [cell.overrides for cell in cells_of("configs/sweeps/attention.yaml")]
    assert len({tuple(cell.items()) for cell in cells}) == len(cells) == 4 * 5 * 2 * 2
    assert {cell["model.d_model"] for cell in cells} == {"16", "32", "64", "128"}
