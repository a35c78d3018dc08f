"""The text of ``fit --help``: the most used options. This module imports no torch, which takes seconds."""

from __future__ import annotations

from collections.abc import Sequence

# the text of --help; --help all has every option with its type and default
FIRST_OPTIONS = """\
usage: lm_profiler {verb} [options]

The most used options. All options, with types and defaults: --help all

the run:
  --config                         file of options, or a name such as demo
  --name                           name of the run
  --log_dir                        folder of all runs
  --verbose                        print all figures at the end
  --watch                          keep measuring until training ends
  --check_memory                   refuse a run that cannot fit
  --print_config                   print all settings, and run nothing

stages:
  --stages.warmup_steps            steps before the measured ones
  --stages.measure_steps           steps to measure (default: 40 and 10 s)
  --stages.until_ci                or measure until the interval is this narrow
  --trace.steps                    steps that torch's profiler traces
  --memory.steps                   steps in which memory is measured
  --actions.steps                  steps in which each action is timed

model and data:
  --model                          class path of any LightningModule
  --model.size                     small, medium, large, xl, 2.7B, …
  --model.attention                sdpa, math or package.module:function
  --model.compile                  with torch.compile
  --torch.compile                  torch.compile for any module
  --data                           class path of any LightningDataModule
  --data.batch_size                samples per batch
  --data.context_length            tokens per sample
  --data.num_workers               processes that load batches
  --loader.num_workers             the same for any data

trainer:
  --trainer.precision              32-true, bf16-mixed, bf16-true, …
  --trainer.accelerator            cpu, gpu, …
  --trainer.devices                how many, or which
  --trainer.strategy               ddp, fsdp, …
  --trainer.accumulate_grad_batches  batches per optimizer step
  --trainer.gradient_clip_val      largest norm of the gradients
"""


def asks_for_first_options(arguments: Sequence[str]) -> bool:
    """Whether a call shows the most used options; ``--help all`` shows all of them, which takes a parser."""
    for word, following in zip(arguments, [*arguments[1:], ""], strict=True):
        if word in ("-h", "--help"):
            return following != "all"
    return False
