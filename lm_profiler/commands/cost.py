"""What the instruments cost: the same module under ``Trainer(barebones=True)`` and with them, turn by turn.

A program of its own, started by ``selftest``: ``python -m lm_profiler.commands.cost <options of fit>`` prints JSON,
the seconds of each step, bare and instrumented. Both are timed by the same stamps, taken where a batch is asked for.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from lightning.pytorch import Trainer

from lm_profiler.callbacks import MemoryOptions, StageOptions, TraceOptions, TrainingProfiler
from lm_profiler.cli.quiet import quiet
from lm_profiler.cli.trainer_verbs import ProfilerCLI

_ROUNDS = 3
_SHARED = ("accelerator", "strategy", "devices", "precision", "accumulate_grad_batches", "gradient_clip_val")


class Stamped:
    """A loader that notes when each batch is asked for."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self.asked_ns: list[int] = []

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._loader)
        while True:
            self.asked_ns.append(time.perf_counter_ns())
            try:
                yield next(batches)
            except StopIteration:
                return


def main(arguments: Sequence[str]) -> None:
    """Print the seconds of each step, bare and instrumented, for the options of ``fit`` in ``arguments``."""
    with quiet():
        cli = ProfilerCLI(["fit", *arguments])
        cli.attempt.discard()
        config, stages = cli.config.fit.trainer, StageOptions(**vars(cli.config.fit.stages))
        times: dict[str, list[float]] = {"bare": [], "instrumented": []}
        for _round in range(_ROUNDS):
            for kind, seconds in times.items():
                seconds += _steps(kind, vars(config), stages, cli.build("model"), cli.build("data"))
    print(json.dumps(times))


def _steps(kind: str, config: dict[str, Any], stages: StageOptions, model: Any, datamodule: Any) -> list[float]:
    count = stages.warmup_steps + stages.planned_steps + 1
    shared = {key: config[key] for key in _SHARED}
    if kind == "bare":
        trainer = Trainer(**shared, barebones=True, max_steps=count, max_epochs=-1, limit_val_batches=0)
    else:
        instruments = TrainingProfiler(
            StageOptions(warmup_steps=0, measure_steps=count), MemoryOptions(steps=0), TraceOptions(steps=0), quiet=True
        )
        trainer = Trainer(
            **shared, callbacks=[instruments], max_epochs=-1, limit_val_batches=0, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=config["default_root_dir"],
        )  # fmt: skip
    loader = _loader(model, datamodule, trainer)
    trainer.fit(model, loader)
    asked = loader.asked_ns[stages.warmup_steps * trainer.accumulate_grad_batches :: trainer.accumulate_grad_batches]
    return [(b - a) * 1e-9 for a, b in pairwise(asked)]


def _loader(model: Any, datamodule: Any, trainer: Trainer) -> Stamped:
    source = datamodule if datamodule is not None else model
    if datamodule is not None:
        # What attaching it to the Trainer would do: FakeTokens asks the module for its vocabulary.
        trainer.strategy.connect(model)
        datamodule.trainer = trainer
        datamodule.prepare_data()
        datamodule.setup("fit")
    return Stamped(source.train_dataloader())


if __name__ == "__main__":
    main(sys.argv[1:])
