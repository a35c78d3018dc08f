"""What rank 0 tells ranks that were started beside it, before there is a process group."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch import distributed
from warm import end, start

from benchmarks.free_port import free_port
from lm_profiler.cli import rendezvous as module
from lm_profiler.cli.main import main
from lm_profiler.cli.rendezvous import Rendezvous, Unheard
from lm_profiler.record.run import read_run

pytestmark = pytest.mark.usefixtures("no_rates", "no_preflight")


ROOT = Path(__file__).resolve().parents[2]
TOO_LARGE = """
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

class Toy(BoringModel):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(2**45))
"""


def meet(rank: int, port: int, others: int = 1, limit_s: float = 60.0) -> Rendezvous:
    return Rendezvous("127.0.0.1", port, rank, others, limit_s)


@pytest.fixture(autouse=True)
def deaf(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Who would hear no SIGTERM any more."""
    ranks = list[int]()
    monkeypatch.setattr(module, "_ignore_termination", lambda: ranks.append(1))
    return ranks


@pytest.mark.parametrize("refused", [True, False])
def test_all_ranks_hear_what_the_first_says_and_then_have_its_store(refused: bool, deaf: list[int]) -> None:
    port = free_port()
    first = meet(0, port, others=2)
    with ThreadPoolExecutor() as threads:
        heard = [threads.submit(meet(rank, port, others=2).is_refused) for rank in (1, 2)]
        first.open()
        assert not any(each.done() for each in heard)
        first.tell(refused)
        if refused:
            assert first._store.check(["heard"])
        assert [each.result() for each in heard] == [refused] * 2
        assert len(deaf) == 3 * refused

        def joined(rank: int) -> bytes:
            """As torch sets up a process group."""
            limit = timedelta(seconds=60)
            given: dict[str, Any] = {"is_master": rank == 0, "timeout": limit, "multi_tenant": True}
            store = distributed.TCPStore("127.0.0.1", port, 2, **given)
            store.set(f"came {rank}", b"")
            store.wait([f"came {1 - rank}"])
            return bytes(store.get("came 0"))

        assert [*threads.map(joined, (0, 1))] == [b"", b""]


def test_a_late_rank_of_lightnings_own_hears_at_once() -> None:
    port = free_port()
    first = meet(0, port, others=0)
    first.open()
    first.tell(False)
    assert not meet(1, port).is_refused()


def test_nobody_waits_for_a_first_rank_that_is_gone_or_never_came(tmp_path: Path) -> None:
    port = free_port()
    with pytest.raises(Unheard, match=r"rank 0 at 127\.0\.0\.1:\d+ did not say in 0:00:00.2"):
        meet(1, port, limit_s=0.2).is_refused()
    import_it = "from lm_profiler.cli.rendezvous import Rendezvous"
    code = f"{import_it}; first = Rendezvous('127.0.0.1', {port}, 0, 1); first.open(); input()"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    kept = os.open(pipe, os.O_RDWR)
    first = start("-c", code, out=tmp_path / "said", reads=pipe, environment={**os.environ, "PYTHONPATH": str(ROOT)})
    with ThreadPoolExecutor() as threads:
        second = meet(1, port)
        heard = threads.submit(second.is_refused)
        while second._store is None:
            time.sleep(0.01)
        assert first.pid is not None
        os.kill(first.pid, signal.SIGKILL)
        with pytest.raises(Unheard, match="or is gone"):
            heard.result()
    end(first)
    os.close(kept)


def test_where_the_first_cannot_make_its_folder_the_others_end_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    port = free_port()
    pod = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_RANK": 0, "NODE_RANK": 0}
    for name, value in pod.items():
        monkeypatch.setenv(name, str(value))
    (tmp_path / "file").touch()
    options = ["--trainer.accelerator=cpu", "--trainer.strategy=ddp", "--trainer.num_nodes=2"]
    with ThreadPoolExecutor() as threads:
        heard = threads.submit(meet(1, port).is_refused)
        assert main(["fit", "--config=demo", f"--log_dir={tmp_path}/file", *options]) == 2
        assert heard.result()
    assert "log_dir:" in capsys.readouterr().err


def test_ranks_started_from_outside_all_end_with_a_refusal_that_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("toy.py").write_text(TOO_LARGE)
    slurm = {"SLURM_NTASKS": 2, "SLURM_NTASKS_PER_NODE": 2, "SLURM_NNODES": 1, "SLURM_NODELIST": "localhost"}
    shared = {**slurm, "SLURM_JOB_ID": 1234, "SLURM_JOB_NAME": "train", "MASTER_PORT": free_port(), "SLURM_NODEID": 0}
    call = ["fit", "--model=toy.Toy", "--data=null", "--name=toy", "--trainer.accelerator=cpu", "--check_memory=true"]
    ranks = []
    for rank in (0, 1):
        own = {**shared, "SLURM_PROCID": rank, "SLURM_LOCALID": rank, "PYTHONPATH": ROOT, "OMP_NUM_THREADS": 1}
        environment = {**os.environ, **{name: str(value) for name, value in own.items()}}
        # Of float64 nothing narrower is tried, which would take a second.
        options = ["--trainer.strategy=ddp", "--trainer.devices=2", "--trainer.precision=64-true"]
        program = ["-m", "lm_profiler", *call, *options]
        ranks.append(start(*program, out=tmp_path / f"said{rank}", environment=environment))
    assert [end(rank) for rank in ranks] == [2, 2]
    said = [(tmp_path / f"said{rank}").read_text() for rank in (0, 1)]
    assert said[0].startswith("lm_profiler: memory:")
    assert said[0].count("\n") == 2
    assert said[1] == ""
    record = read_run(Path("logs/toy/version_0"))
    assert record.status == "refused"
    assert record.planned is not None
    assert record.planned.peak is not None
