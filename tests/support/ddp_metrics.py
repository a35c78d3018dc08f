"""Two processes train our model with its metrics; started by test_metrics.py. Argument: a folder.

Each writes what was logged after each step, and beside it its own tokens' negative log-probabilities, in float64.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch.distributed
from kept import Keeps
from lightning.pytorch import Trainer, seed_everything

from lm_profiler.training import FakeTokens, LanguageModel

TINY: dict[str, Any] = {"d_model": 16, "d_ff": 24, "num_layers": 2, "num_heads": 2, "vocab_size": 50}


def main(folder: str) -> None:
    warnings.simplefilter("ignore")
    seed_everything(1, verbose=False)
    keeps = Keeps()
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = Trainer(
        accelerator="cpu", strategy="ddp", devices=2, max_steps=4, callbacks=[keeps], **dict.fromkeys(off, False)
    )
    trainer.fit(LanguageModel(**TINY, lr=0.1, metrics=True), FakeTokens(batch_size=2, context_length=12))
    (Path(folder) / f"{trainer.global_rank}.json").write_text(json.dumps([keeps.logged, keeps.truth]))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
