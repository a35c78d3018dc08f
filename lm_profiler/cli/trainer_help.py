"""The text of ``fit --help``: the most used options. This module does not import torch, which takes seconds."""

from __future__ import annotations

from collections.abc import Sequence

# the text of --help; --help all prints every option with its type and default
FIRST_OPTIONS = """\
usage: lm_profiler {verb} [options]

The most used options. --help all prints all of them with types and defaults.

the run:
  --config                         YAML file of options, or a name such as demo
  --name                           name of the run
  --log_dir                        folder of all runs
  --verbose                        print all figures at the end
  --watch                          keep watching until training ends
  --check_memory                   refuse a run that cannot fit into memory
  --print_config                   print all settings, and run nothing

stages:
  --stages.warmup_steps            steps before the measured ones
  --stages.measure_steps           steps to measure (default: at least 40)
  --stages.until_ci                measure to this precision, such as 0.005
  --trace.steps                    steps that torch's profiler traces
  --memory.steps                   steps in which memory is measured
  --actions.steps                  steps in which each action is timed by name

model and data:
  --model                          class path of any LightningModule
  --model.size                     small, medium, large, xl, 2.7B, …
  --model.attention                sdpa, math or package.module:function
  --model.compile                  compile the built-in model
  --torch.compile                  compile any module with torch.compile
  --data                           class path of any LightningDataModule
  --data.batch_size                samples per batch
  --data.context_length            tokens per sample
  --data.num_workers               processes that load batches
  --loader.num_workers             processes that load batches, of any loader

trainer:
  --trainer.precision              32-true, bf16-mixed, bf16-true, …
  --trainer.accelerator            cpu, gpu, …
  --trainer.devices                number of devices, or their indices
  --trainer.strategy               ddp, fsdp, …
  --trainer.accumulate_grad_batches  batches per optimizer step
  --trainer.gradient_clip_val      clip the gradients to this norm
"""


def asks_for_first_options(arguments: Sequence[str]) -> bool:
    """Return whether a call asks for the most used options; ``--help all`` asks for all, which needs a parser."""
    for word, following in zip(arguments, [*arguments[1:], ""], strict=True):
        if word in ("-h", "--help"):
            return following != "all"
    return False
