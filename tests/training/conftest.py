"""A Trainer that runs a few steps on the CPU and writes nothing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from known_loop import trainer_with
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.precision import MixedPrecision

THIRD_PARTY_WARNINGS = (
    "ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning",  # Lightning's, on torch 2.13
    "ignore:The '.*_dataloader' does not have many workers",  # Lightning's advice, without a switch
    "ignore:.LightningModule.configure_optimizers. returned .None.",  # what `optimizer: none` asks for
)
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            for warning in THIRD_PARTY_WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(warning))


TINY: dict[str, Any] = {"d_model": 16, "d_ff": 24, "num_layers": 2, "num_heads": 2, "vocab_size": 50}
"""Overrides that make a preset small enough for a test."""


@pytest.fixture
def tiny() -> dict[str, Any]:
    return dict(TINY)


@pytest.fixture(autouse=True)
def rates_stay_unknown(no_rates: None) -> None:
    """To read the machine's own takes half a second a run."""


@pytest.fixture
def make_trainer(tmp_path: Path) -> Callable[..., Trainer]:
    def make(steps: int = 3, **options: Any) -> Trainer:
        limits = {f"limit_{verb}_batches": steps for verb in ("val", "test", "predict")}
        if options.get("precision") == "16-mixed":
            # By name, Lightning would turn it into bf16-mixed on the CPU, which torch no longer needs.
            options["precision"] = None
            options["plugins"] = [MixedPrecision("16-mixed", device="cpu")]
        return trainer_with(options.pop("callbacks", ()), tmp_path, **{"max_steps": steps, **limits, **options})

    return make
