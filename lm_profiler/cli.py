"""The command line of the Trainer's verbs: LightningCLI with the instruments always in place."""

from __future__ import annotations

import logging
import os
import shlex
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
import yaml
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lm_profiler.callbacks import MemoryOptions, StageOptions, TraceOptions, TrainingProfiler
from lm_profiler.callbacks.recorder import Launch
from lm_profiler.measure.memory import available_bytes
from lm_profiler.record.files import claim_run_dir
from lm_profiler.record.run import Failure, RunRecord, Verb, write_run
from lm_profiler.training import FakeTokens, LanguageModel
from lm_profiler.training.footprint import refusal
from lm_profiler.usage import UsageError, explain

FAILED, WRONG_CALL, INTERRUPTED = 1, 2, 130
_SHARDED = ("fsdp", "deepspeed", "model_parallel")
_CONFIG_ERRORS = (ValueError, TypeError, MisconfigurationException)


class Terminated(KeyboardInterrupt):
    """SIGTERM, raised where the signal found the program."""


class Parser(LightningArgumentParser):
    """Says what is wrong in a line or two, without the page of usage around it."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        raise UsageError(explain(message, _keys(self.get_defaults(skip_validation=True).as_dict())))


def _keys(config: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in config.items():
        path = prefix if key == "init_args" else f"{prefix}.{key}" if prefix else key
        yield path
        if isinstance(value, Mapping):
            yield from _keys(value, path)


class ProfilerCLI(LightningCLI):
    """LightningCLI whose Trainer always carries the instruments; everything in it can be overridden.

    ``profiler`` is the instruments' callback once the Trainer exists.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        self.arguments = arguments
        super().__init__(
            LightningModule,
            LightningDataModule,
            save_config_callback=None,  # a Callback costs microseconds a step; the recorder saves the config
            trainer_defaults={
                "devices": 1,
                "max_epochs": -1,
                "num_sanity_val_steps": 0,
                "enable_checkpointing": False,
                "enable_progress_bar": False,
                "enable_model_summary": False,
            },
            seed_everything_default=0,
            parser_class=Parser,
            subclass_mode_model=True,
            subclass_mode_data=True,
            auto_configure_optimizers=False,
            args=list(arguments),
            run=True,
        )

    profiler: TrainingProfiler | None = None

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument(
            "--name", type=str | None, default=None, help="Name of the run; the config file's if not given."
        )
        parser.add_argument("--log_dir", type=str, default="logs", help="Folder of all runs.")
        parser.add_argument(
            "--check_memory",
            type=bool,
            default=True,
            help="Refuse a run whose weights and states cannot fit.",
        )
        parser.add_class_arguments(StageOptions, "stages")
        parser.add_class_arguments(MemoryOptions, "memory")
        parser.add_class_arguments(TraceOptions, "trace")
        parser.set_defaults(
            {
                "model": {"class_path": f"{LanguageModel.__module__}.LanguageModel"},
                "data": {"class_path": f"{FakeTokens.__module__}.FakeTokens"},
            }
        )

    def instantiate_classes(self) -> None:
        try:
            super().instantiate_classes()
        except _CONFIG_ERRORS as error:
            raise UsageError(_short(error)) from error

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        config = self._get(self.config_init, "trainer")
        launch = self._launch()
        folder = self._folder(launch)
        if folder is not None and self._get(self.config, "check_memory"):
            self._check_memory(launch, folder, config)
        if config["logger"] in (None, True):
            version = None if folder is None else int(folder.name.rpartition("_")[2])
            kwargs["logger"] = TensorBoardLogger(self._get(self.config, "log_dir"), launch.name, version)
        if self.subcommand == "fit" and config["limit_val_batches"] is None:
            kwargs["limit_val_batches"] = 0
        options = (self._get(self.config_init, key) for key in ("stages", "memory", "trace"))
        self.profiler = TrainingProfiler(*options, launch=launch)
        callbacks: list[Callback] = [*_listed(config["callbacks"]), self.profiler]
        return Trainer(**{**config, **kwargs, "callbacks": callbacks})

    def _launch(self) -> Launch:
        assert self.subcommand is not None
        text = self.parser.dump(self.config, skip_none=False, format="yaml", skip_link_targets=False)
        config = yaml.safe_load(text)[self.subcommand]
        files = self._get(self.config, "config") or []
        name = config["name"] or (Path(str(files[-1])).stem if files else "lm_profiler")
        return Launch(
            name=name,
            command=shlex.join(("python", "-m", "lm_profiler", *self.arguments)),
            config=config,
            config_yaml=yaml.safe_dump(config, sort_keys=False),
        )

    def _folder(self, launch: Launch) -> Path | None:
        """A folder of this run's own; None on the ranks that another process of this command line started."""
        if int(os.environ.get("LOCAL_RANK", 0)) > 0 or int(os.environ.get("NODE_RANK", 0)) > 0:
            return None
        parent = Path(self._get(self.config, "log_dir")) / launch.name
        try:
            return claim_run_dir(parent)
        except OSError as error:
            raise UsageError(
                f"--log_dir: expected a folder that can be written to, given {parent} ({error.strerror}); "
                "name another"
            ) from None

    def _check_memory(self, launch: Launch, folder: Path, trainer: Mapping[str, Any]) -> None:
        device = _device_type(trainer["accelerator"])
        available = available_bytes(device)
        sharded = any(name in str(trainer["strategy"]) for name in _SHARDED)
        if not isinstance(self.model, LanguageModel) or available is None or sharded:
            return
        copies = trainer["devices"] if device == "cpu" and isinstance(trainer["devices"], int) else 1
        training = self.subcommand == "fit"
        precision = trainer["precision"] or "32-true"
        reason = refusal(self.model.config, precision, self.model.optimizer_name, training, available, copies)
        if reason is not None:
            write_run(folder, _refused(launch, str(self.subcommand), reason))
            raise UsageError(reason)


def _refused(launch: Launch, verb: str, reason: str) -> RunRecord:
    return RunRecord.model_validate(
        {
            "name": launch.name,
            "status": "refused",
            "failure": Failure(phase="setup", step=None, type="Refused", message=reason),
            "verb": verb,
            "started": datetime.fromtimestamp(launch.started, timezone.utc).isoformat(timespec="seconds"),
            "duration_s": time.time() - launch.started,
            "command": launch.command,
            "config": launch.config,
        }
    )


def _device_type(accelerator: Any) -> str:
    if accelerator == "cpu" or not torch.accelerator.is_available():
        return "cpu"
    current = torch.accelerator.current_accelerator()
    return current.type if current is not None else "cpu"


def _listed(callbacks: Any) -> list[Callback]:
    if callbacks is None:
        return []
    return list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks]


def _short(error: BaseException) -> str:
    return "\n".join(str(error).strip().splitlines()[:2]) or type(error).__name__


def run(arguments: Sequence[str]) -> int:
    """Run a Trainer verb; returns the exit code."""
    _silence_lightning()
    previous = signal.signal(signal.SIGTERM, _terminate)
    cli = ProfilerCLI.__new__(ProfilerCLI)
    try:
        cli.__init__(arguments)  # type: ignore[misc]  # it runs the verb, and may end in an exception
    except UsageError as error:
        print(f"lm_profiler: {error}", file=sys.stderr)
        return WRONG_CALL
    except (KeyboardInterrupt, SystemExit) as error:
        return _ended(cli.profiler, error)
    except Exception as error:
        return _failed(cli.profiler, error)
    finally:
        signal.signal(signal.SIGTERM, previous)
    return 0


def _ended(profiler: TrainingProfiler | None, error: BaseException) -> int:
    record = profiler.record if profiler is not None else None
    if isinstance(error, KeyboardInterrupt) and record is None:
        print("lm_profiler: interrupted before the first step", file=sys.stderr)
        return INTERRUPTED
    if record is not None and record.status == "interrupted":
        return INTERRUPTED
    code = error.code if isinstance(error, SystemExit) else FAILED
    return code if isinstance(code, int) else 0 if code is None else FAILED


def _failed(profiler: TrainingProfiler | None, error: Exception) -> int:
    """The record says what happened already; the traceback goes beside it."""
    record = profiler.record if profiler is not None else None
    if profiler is None or record is None or record.failure is None:
        raise error
    if record.failure.phase == "setup" and isinstance(error, _CONFIG_ERRORS):
        return WRONG_CALL
    path = profiler.folder / "traceback.txt"
    path.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
    print(f"traceback in {path}", file=sys.stderr)
    return FAILED


def _terminate(signum: int, frame: FrameType | None) -> NoReturn:
    raise Terminated(signal.Signals(signum).name)


def _silence_lightning() -> None:
    """No tips, no advice on a user's Trainer and no deprecations: this Trainer is ours."""
    for name in ("lightning.pytorch", "lightning.fabric", "lightning_utilities"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"lightning\.")
