"""Lists every private name of Lightning that the code uses, what it is for, and what happens without it.

Like ``torch_names``, this imports nothing. The profiler actions that count steps are checked when the first batch ends:
a run without them ends there, with one line and exit code 2.
"""

from __future__ import annotations

from typing import Any

from lm_profiler.torch_names import PrivateName

LIGHTNINGS = "2.6.6"  # versions of Lightning that have these names, as tests have seen


def _name(path: str, purpose: str, consequence: str) -> PrivateName:
    return PrivateName(
        path, purpose, consequence, versions=LIGHTNINGS, library="Lightning"
    )


# Profiler actions: the names that Lightning's loops pass to ``trainer.profiler``. They count steps.

FETCHED = _name(
    "action train_dataloader_next",
    "marks the request for a batch, which ends the step",
    "exit code 2",
)
STEPPED = _name(
    "action optimizer_step", "marks the end of the optimizer's step", "exit code 2"
)
EPOCH = _name(
    "action run_training_epoch",
    "marks the end of an epoch, and of the loop",
    "the end of the loop counts as the end of an epoch",
)

_NEXT = {
    "fit": "train_dataloader_next",
    "validate": "val_next",
    "test": "test_next",
    "predict": "predict_next",
}


def fetch_action(trainer: Any, verb: str) -> str:
    """Return the action with which the loop of ``verb`` asks for a batch: ``[…EpochLoop].train_dataloader_next``."""
    loop = getattr(trainer, f"{verb}_loop")
    if verb == "fit":
        loop = loop.epoch_loop
    return f"[{type(loop).__name__}].{_NEXT[verb]}"


# The loops.

FETCHER = _name(
    "FitLoop._data_fetcher",
    "finds the loader's iterator, which has the number of prefetched batches",
    "prefetched batches unknown",
)
COMBINED = _name(
    "CombinedLoader._iterator",
    "finds the iterator of each of several loaders",
    "prefetched batches unknown",
)
LOGGING = _name(
    "Trainer._logger_connector",
    "attributes time to logging",
    "time of logging is attributed to the loop",
)
SIGTERM_FLAG = _name(
    "_TrainingEpochLoop._broadcast_sigterm_tensor",
    "attributes time to the broadcast of SIGTERM",
    "time of the broadcast is attributed to the loop",
)
SIGNALS = _name(
    "Trainer._signal_connector",
    "keeps Lightning from broadcasting in a signal handler",
    "Lightning broadcasts there",
)
SIGTERM_HANDLER = _name(
    "_SignalConnector._sigterm_notifier_fn",
    "is the signal handler that broadcasts",
    "Lightning broadcasts there",
)
COMPILED_STEPS = _name(
    "LightningModule._compiler_ctx",
    "recognizes steps that Lightning compiled",
    "compiled steps count as eager steps",
)

# Classes that are recognized by their names.

TUNER_EXIT = _name(
    "_TunerExitException",
    "recognizes the end of a Tuner's trial, which is not a run",
    "the trial is recorded as a failed run",
)

# Ranks that Lightning starts.

LAUNCHER = _name(
    "lightning.pytorch.strategies.launchers._MultiProcessingLauncher",
    "recognizes ranks that Lightning forks or spawns; our launcher reports how they end",
    "Lightning's own launcher reports them",
)
OBSERVER = _name(
    "lightning.fabric.strategies.launchers.subprocess_script._ChildProcessObserver",
    "keeps Lightning from killing this process before the record is written",
    "Lightning may kill this process first",
)
START_METHOD = _name(
    "_MultiProcessingLauncher._start_method",
    "recognizes forked ranks",
    "Lightning's own launcher reports them",
)
RUNS_RANK = _name(
    "_MultiProcessingLauncher._wrapping_function",
    "is the function that a rank runs",
    "Lightning's own launcher reports them",
)
LAUNCHED_BY = _name(
    "Strategy._launcher",
    "is replaced by our launcher",
    "Lightning's own launcher reports them",
)
OBSERVED = _name(
    "_ChildProcessObserver._child_processes",
    "is the list of processes whose death makes Lightning kill this process",
    "Lightning may kill this process first",
)

DATA_PARALLEL_SIZE = _name(
    "ModelParallelStrategy._data_parallel_size",
    "fsdp2: divides the data among all processes",
    "Lightning refuses fsdp2",
)

# The command line. Without this name ``fit`` refuses to run, because it would train while it reads its options.

RUN_VERB = _name(
    "LightningCLI._run_subcommand",
    "keeps Lightning from running while options are read",
    "exit code 2",
)
