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
    "where a batch is asked for, and a step ends",
    "exit code 2",
)
STEPPED = _name("action optimizer_step", "where a step is done", "exit code 2")
EPOCH = _name(
    "action run_training_epoch",
    "where the loop is left",
    "the last epoch ends as any epoch does",
)

_NEXT = {
    "fit": "train_dataloader_next",
    "validate": "val_next",
    "test": "test_next",
    "predict": "predict_next",
}


def fetch_action(trainer: Any, verb: str) -> str:
    """Return the action with which the loop of ``verb`` asks for a batch: ``[…EpochLoop].train_dataloader_next``."""
    loop = (
        trainer.fit_loop.epoch_loop
        if verb == "fit"
        else getattr(trainer, f"{verb}_loop")
    )
    return f"[{type(loop).__name__}].{_NEXT[verb]}"


# The loops.

FETCHER = _name(
    "FitLoop._data_fetcher",
    "the loader's iterator, for prefetched batches",
    "prefetched batches unknown",
)
COMBINED = _name("CombinedLoader._iterator", "as above", "prefetched batches unknown")
LOGGING = _name(
    "Trainer._logger_connector", "names time spent on logging", "it is the loop's"
)
SIGTERM_FLAG = _name(
    "_TrainingEpochLoop._broadcast_sigterm_tensor",
    "names time of that broadcast",
    "it is the loop's",
)
SIGNALS = _name(
    "Trainer._signal_connector",
    "keeps Lightning from broadcasting in a signal's handler",
    "it broadcasts",
)
SIGTERM_HANDLER = _name(
    "_SignalConnector._sigterm_notifier_fn", "as above: that handler", "it broadcasts"
)
COMPILED_STEPS = _name(
    "LightningModule._compiler_ctx",
    "recognizes steps that Lightning compiled",
    "taken as eager",
)

# Classes that are recognized by their names.

TUNER_EXIT = _name(
    "_TunerExitException",
    "recognizes a Tuner's trial, which is no run",
    "it is recorded as a failure",
)

# Ranks that Lightning starts.

LAUNCHER = _name(
    "lightning.pytorch.strategies.launchers._MultiProcessingLauncher",
    "recognizes ranks that Lightning forks or spawns; our launcher reports how they end",
    "they end as Lightning has it",
)
OBSERVER = _name(
    "lightning.fabric.strategies.launchers.subprocess_script._ChildProcessObserver",
    "keeps it from killing this process before the record is written",
    "it may kill this process first",
)
START_METHOD = _name(
    "_MultiProcessingLauncher._start_method",
    "recognizes forked ranks",
    "they end as Lightning has it",
)
RUNS_RANK = _name(
    "_MultiProcessingLauncher._wrapping_function",
    "what a rank runs",
    "they end as Lightning has it",
)
LAUNCHED_BY = _name(
    "Strategy._launcher", "puts our launcher there", "they end as Lightning has it"
)
OBSERVED = _name(
    "_ChildProcessObserver._child_processes",
    "as above: whom it observes",
    "it may kill this process",
)

DATA_PARALLEL_SIZE = _name(
    "ModelParallelStrategy._data_parallel_size",
    "fsdp2: divides the data among all processes",
    "fsdp2 is refused by Lightning",
)

# The command line. Without this one ``fit`` refuses: it would train while it reads its options.

RUN_VERB = _name(
    "LightningCLI._run_subcommand",
    "keeps Lightning from running while options are read",
    "exit code 2",
)
