"""The examples run as they stand, and their records hold what can be worked out by hand."""

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def mm(rows: int, inputs: int, outputs: int) -> int:
    return 2 * rows * inputs * outputs


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs one example in a folder of its own; gives the record that it wrote there."""

    def record(name: str) -> Any:
        monkeypatch.chdir(tmp_path)
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        assert f"logs/{name}/version_0" in capsys.readouterr().out
        content = json.loads(Path("logs", name, "version_0", "run.json").read_text(encoding="utf-8"))
        assert (content["status"], content["notes"]) == ("ok", [])
        return content

    return record


def test_every_example_is_tested() -> None:
    names = {file.stem for file in EXAMPLES.glob("*.py")}
    assert names == {"plain_module", "hugging_face", "gan"}
    readme = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert all(f"({file.name})" in readme for file in EXAMPLES.iterdir() if file.suffix in (".py", ".txt"))


def test_plain_module(run: Any) -> None:
    record = run("plain_module")
    first, second = mm(64, 784, 256), mm(64, 256, 10)
    assert record["model"]["parameters"] == 784 * 256 + 256 + 256 * 10 + 10
    assert record["steps"] == {"warmup": 5, "measure": 20, "actions": 4, "memory": 1, "trace": 3}
    assert record["throughput"]["samples_per_step"] == 64
    flops = record["utilisation"]["flops"]
    assert (flops["forward"], flops["backward"]) == (first + second, first + 2 * second)


def test_hugging_face(run: Any) -> None:
    record = run("hugging_face")
    assert record["throughput"]["tokens_per_step"] == 4 * 128
    linear = 2 * (4 * 128 * 128 + 3 * 128 * 352) + 128 * 256  # two layers and the head
    norms, embedding = (2 * 2 + 1) * 128, 256 * 128
    assert record["model"]["parameters"] == linear + norms + embedding
    attention = 2 * 2 * 4 * mm(128, 128, 128)  # two layers, scores and values, a batch of 4
    flops = record["utilisation"]["flops"]
    products = mm(4 * 128, 1, linear) + attention
    # transformers 5.0 has the angles of its rotary embedding from a product, too; later versions multiply elementwise.
    assert flops["forward"] - products in (0, mm(16, 1, 128))
    assert flops["backward"] == 2 * products


def test_gan(run: Any) -> None:
    record = run("gan")
    assert record["model"]["optimizers"] == ["Adam", "Adam"]
    assert all(record["time"][phase]["median"] > 0 for phase in ("forward", "zero_grad", "backward", "optimizer"))
    hidden_g, out_g, hidden_d, out_d = mm(256, 8, 128), mm(256, 128, 2), mm(256, 2, 128), mm(256, 128, 1)
    flops = record["utilisation"]["flops"]
    assert flops["forward"] == hidden_g + out_g + 3 * (hidden_d + out_d)
    # The discriminator's turn: two passes back to its first layer's weight. The generator's: through both networks.
    assert flops["backward"] == 2 * (hidden_d + 2 * out_d) + 2 * (hidden_d + out_d) + hidden_g + 2 * out_g
