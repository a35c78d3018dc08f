"""How right is the plan? The rehearsed step's peak beside that of the same step on real tensors.

    python -m benchmarks.plan [--gpu] [--sizes small xl] [--layers 2]

Truth on the CPU is every allocation that torch's profiler tells, from before the module is built; on a GPU, the most
that torch's allocator had given out. Each step is run in a process of its own. Aim: 5 %.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from torch.profiler import ProfilerActivity, profile

from benchmarks.others.habits import keep
from lm_profiler.analysis.plan.planned import Planned
from lm_profiler.cli.call import Call
from lm_profiler.cli.rehearse import (
    STEP_OPTIONS,
    gpu_of,
    start_rehearsal,
    wait_for_plan,
)
from lm_profiler.cli.surroundings import quiet, quiet_libraries
from lm_profiler.cli.trainer_cli import ProfilerCLI
from lm_profiler.models.config import PRESETS
from lm_profiler.record.quantities import bytes_text
from lm_profiler.training import LanguageModel

AIM = 0.05
PRECISIONS = ("32-true", "bf16-mixed", "bf16-true")
ONLY_ON_A_GPU = ("16-mixed",)
BATCH, CONTEXT = 2, 128
STEPS = 8
"""Of modules whose steps may differ."""

_BEGUN = "training begins"

# `rehearsed`
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))


@dataclass
class Begun(Callback):
    """Says when training begins and how much the module holds then."""

    held: int = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        with torch.profiler.record_function(_BEGUN):
            tensors = {
                id(tensor): tensor
                for tensor in (*pl_module.parameters(), *pl_module.buffers())
            }
            self.held = sum(
                tensor.untyped_storage().nbytes() for tensor in tensors.values()
            )


def fit(cli: ProfilerCLI, gpu: bool, *callbacks: Callback) -> None:
    """From nothing on: the first step makes what lasts, and the second has the peak, unless steps differ."""
    given = vars(cli.config[cli.verb].trainer)
    off = ("enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    steps = (
        2
        if issubclass(cli._classes.get("model", LanguageModel), LanguageModel)
        else STEPS
    )
    folder = tempfile.mkdtemp()
    trainer = cli.trainer = Trainer(
        accelerator="gpu" if gpu else "cpu",
        devices=1,
        precision=given["precision"] or "32-true",
        limit_train_batches=steps * (given["accumulate_grad_batches"] or 1),
        max_epochs=1,
        logger=TensorBoardLogger(folder) if steps == STEPS else False,
        default_root_dir=folder,
        limit_val_batches=0,
        callbacks=list(callbacks),
        **dict.fromkeys(off, False),  # type: ignore[arg-type]
        **{name: given[name] for name in STEP_OPTIONS if given[name] is not None},
    )
    data = cli.build("data")
    trainer.fit(cli.build("model"), datamodule=data)


def real_peak(call: Sequence[str], gpu: bool) -> int | str:
    """Most bytes that tensors held at one time, or why that is unknown."""
    quiet_libraries()
    warnings.simplefilter("ignore")
    try:
        with quiet():
            cli = ProfilerCLI(Call(["fit", *call]))
            return _allocated(cli) if gpu else _told_by_the_profiler(cli)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _allocated(cli: ProfilerCLI) -> int:
    fit(cli, gpu=True)
    return torch.cuda.max_memory_allocated()


def _told_by_the_profiler(cli: ProfilerCLI) -> int:
    """Without what is there when training begins and is not the module's: data sets, which no device would hold."""
    begun = Begun()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        fit(cli, False, begun)
    events = sorted(
        profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns()
    )
    held = most = others = 0
    for event in events:
        if event.name() == _BEGUN:
            others, most = held - begun.held, 0
        elif event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most - others


def ours(
    sizes: Sequence[str], layers: int | None, gpu: bool
) -> Iterator[tuple[str, list[str]]]:
    """Presets × precision × attention × checkpointing, as options of ``fit``."""
    precisions = (*PRECISIONS, *(ONLY_ON_A_GPU if gpu else ()))
    for size, precision, attention, again in itertools.product(
        sizes, precisions, ("sdpa", "math"), (False, True)
    ):
        given = {
            "model.size": size,
            "model.attention": attention,
            "trainer.precision": precision,
        }
        given |= {
            "model.activation_checkpointing": str(again).lower(),
            "data.batch_size": str(BATCH),
        }
        given |= {"data.context_length": str(CONTEXT)}
        if layers is not None:
            given["model.num_layers"] = str(layers)
        name = f"{size}, {precision}, {attention}" + (
            ", checkpointing" if again else ""
        )
        yield name, [f"--{key}={value}" for key, value in given.items()]


OTHERS = (
    *("rehearsed.Plain", "rehearsed.Everything"),
    *(
        f"language.{name}"
        for name in (
            "NanoGPT",
            "VaryingLengths",
            "Checkpointed",
            "Offloads",
            "HalfCompiled",
            "LoRA",
        )
    ),
    *("language.TorchEncoder", "language.TorchAttention"),
    "language.AsksItsData --data=benchmarks.others.language.Nested",
    "language.NanoGPT --data=benchmarks.others.language.StreamData",
    *(
        f"language.HuggingFace --model.kind={kind}"
        for kind in ("gpt2", "llama", "bert", "t5", "bart", "mixtral")
    ),
    *(
        f"vision.{name}"
        for name in ("Timm", "HydraTemplate", "VAE", "GAN", "Diffusion", "SimCLR")
    ),
    *(
        f"habits.{name}"
        for name in (
            "NoneInTurns",
            "NoneAtFirst",
            "NoneInOtherTurns",
            "MoreNowAndThen",
            "LoadsItself",
        )
    ),
    *(
        f"habits.{name}"
        for name in (
            "Clips",
            "Best",
            "HardExamples",
            "FloatOfLoss",
            "Packed",
            "Masks",
            "Quantized",
        )
    ),
    *(f"habits.{name}" for name in ("Rollouts", "ActsByValue", "LayerDrop", "Keeps")),
)


def others() -> Iterator[tuple[str, list[str]]]:
    """Modules of other people, as they are written elsewhere."""
    for name in OTHERS:
        path, *more = name.split()
        module = path if path.startswith("rehearsed") else f"benchmarks.others.{path}"
        more += (
            [] if any(word.startswith("--data") for word in more) else ["--data=null"]
        )
        yield (
            name.split(" --data")[0],
            [f"--model={module}", *more, "--trainer.max_epochs=2"],
        )


def row(name: str, call: Sequence[str], gpu: bool) -> tuple[str, float | None]:
    """A line of the table, and by how much the plan is off."""
    found = wait_for_plan(
        start_rehearsal(
            ["fit", *call], gpu_of(torch.device("cuda:0" if gpu else "cpu"))
        )
    )
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        try:
            real = pool.submit(real_peak, call, gpu).result()
        except BrokenProcessPool as error:  # a library has ended the process
            real = str(error)
    planned = (
        bytes_text(found.peak)
        if isinstance(found, Planned)
        else f"cannot be planned: {found.reason}"
    )
    if isinstance(real, str) or not isinstance(found, Planned):
        return (
            f"| {name} | {planned} | {real if isinstance(real, str) else bytes_text(real)} | |",
            None,
        )
    off = found.peak / real - 1
    return f"| {name} | {planned} | {bytes_text(real)} | {off:+.2%} |", off


def main() -> None:
    """Print a table, row by row."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--gpu", action="store_true", help="against the allocator of a GPU"
    )
    parser.add_argument("--sizes", nargs="*", choices=PRESETS, default=["small", "xl"])
    parser.add_argument("--layers", type=int, help="in the place of the preset's")
    parser.add_argument(
        "--others",
        nargs="*",
        help="other people's modules alone: all, or those whose name has this",
    )
    options = parser.parse_args()
    keep()
    print("| run | planned peak | measured | planned - measured |\n|:--|--:|--:|--:|")
    offs = []
    asked = (
        []
        if options.others is not None
        else ours(options.sizes, options.layers, options.gpu)
    )
    theirs = [
        each
        for each in others()
        if not options.others or any(part in each[0] for part in options.others)
    ]
    for name, call in [*asked, *theirs]:
        text, off = row(name, call, options.gpu)
        print(text, flush=True)
        offs.append(off)
    known = [abs(off) for off in offs if off is not None]
    print(
        f"\n{len(known)} of {len(offs)} compared; off by {max(known):.2%} at most, aim {AIM:.0%}"
    )


if __name__ == "__main__":
    main()
