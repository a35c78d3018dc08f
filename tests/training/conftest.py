"""A Trainer that runs a few steps on the CPU and writes nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
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


@pytest.fixture
def make_trainer(tmp_path: Path) -> Callable[..., Trainer]:
    def make(steps: int = 3, **options: Any) -> Trainer:
        defaults: dict[str, Any] = {
            "accelerator": "cpu",
            "devices": 1,
            "max_steps": steps,
            "max_epochs": -1,
            "limit_val_batches": steps,
            "limit_test_batches": steps,
            "limit_predict_batches": steps,
            "num_sanity_val_steps": 0,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": tmp_path,
        }
        if options.get("precision") == "16-mixed":
            # By name, Lightning would turn it into bf16-mixed on the CPU, which torch no longer needs.
            options["precision"] = None
            options["plugins"] = [MixedPrecision("16-mixed", device="cpu")]
        return Trainer(**{**defaults, **options})

    return make
