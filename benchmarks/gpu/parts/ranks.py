"""Two processes on one device under DDP (gloo), and sharded weights (FSDP) of one process: is the record whole?"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from benchmarks.free_port import free_port
from benchmarks.gpu.findings import Findings, shown
from benchmarks.gpu.place import Place
from lm_profiler.cli.main import main
from lm_profiler.record.run_record import RunRecord

DDP = (
    "--trainer.num_nodes=2",  # one process each: NCCL and Lightning both refuse two of one node on one GPU
    "--trainer.devices=1",
    "--trainer.strategy.class_path=lightning.pytorch.strategies.DDPStrategy",
    "--trainer.strategy.init_args.process_group_backend=gloo",
)
FSDP = ("--trainer.devices=1", "--trainer.strategy=fsdp")
_WHOLE = ("--memory.steps=1", "--trace.steps=1")
"""All stages; few steps and layers, because gloo sends every gradient through the host."""
_SHORT = ("--stages.warmup_steps=2", "--stages.measure_steps=5", "--model.num_layers=2")
_HEADINGS = ("", "status", "ranks", "step (ms)", "step by rank (ms)", "notes")


def run(place: Place, findings: Findings) -> None:
    works = [rank(place, number, port) for port in [free_port()] for number in (0, 1)]
    codes = place.apart(*works, output="ddp.txt")
    rows = [row("two processes, DDP over gloo", tell(place, findings, "ddp", codes, 2))]
    if not place.on_cpu:
        code = place.call("fit", *call(place, "fsdp", *FSDP), output="fsdp.txt")
        rows.append(row("one process, FSDP", tell(place, findings, "fsdp", [code], 1)))
    findings.table("Runs of ranks", _HEADINGS, rows)


def call(place: Place, name: str, *options: str) -> list[str]:
    sized = place.sized(
        "--config=small_bf16", f"--log_dir={place.folder}", f"--name={name}"
    )
    return [*sized, *_WHOLE, *_SHORT, *options]


def rank(place: Place, number: int, port: int) -> Callable[[], int]:
    """One of the two processes."""

    def work() -> int:
        arguments = ["fit", *call(place, "ddp", *DDP)]
        # LOCAL_RANK tells Lightning that somebody else has started the processes.
        os.environ |= {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "NODE_RANK": str(number),
            "LOCAL_RANK": "0",
        }
        sys.argv = ["lm_profiler", *arguments]
        return main(arguments)

    return work


def tell(
    place: Place, findings: Findings, name: str, codes: list[int | None], ranks: int
) -> RunRecord | None:
    """Whether the record is whole."""
    record = place.last(name)
    whole = (
        record is not None
        and record.status == "ok"
        and len(record.rank_step_s) == ranks
    )
    found = f"exit codes {codes}, {'no record' if record is None else record.status}"
    findings.aim(
        f"{name}: ok, and each rank's step known",
        "yes",
        found,
        whole and codes == [0] * ranks,
    )
    return record


def row(title: str, record: RunRecord | None) -> list[str]:
    if record is None:
        return [title, "no record", "", "", "", ""]
    step = record.time["step"].median if record.time else None
    world = "" if record.environment is None else str(record.environment.world_size)
    each = ", ".join(shown(seconds, scale=1e3) for seconds in record.rank_step_s)
    return [
        title,
        record.status,
        world,
        shown(step, scale=1e3),
        each,
        "; ".join(record.notes),
    ]
