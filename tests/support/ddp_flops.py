"""Two processes whose step talks to the other one; started by test_flops_of_any_module.py. Argument: a folder."""

from __future__ import annotations

import hashlib
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from known_loop import instruments, trainer_with
from lightning.pytorch import seed_everything
from torch import Tensor
from zoo import Accumulating, mm


class Talking(Accumulating):
    """Rank 1 has twice the rows. A rank that ran the step once more, alone, would wait for ever."""

    def loss(self, batch: Tensor) -> Tensor:
        batch = batch.repeat(1 + self.global_rank, 1)
        mean = batch.mean(0)
        dist.all_reduce(mean)
        loss = super().loss(batch - mean / 2)
        self.log("loss", loss, sync_dist=True)
        return loss


def main(folder: str) -> None:
    warnings.simplefilter("ignore")
    weights = []
    for profiler in (instruments(1, 2, memory=1, stop_when_done=False), None):
        seed_everything(1, verbose=False)
        module = Talking()
        options: dict[str, Any] = {"strategy": "ddp", "devices": 2, "use_distributed_sampler": False, "max_steps": 14}
        trainer_with([profiler] if profiler else [], Path(folder), **options).fit(module)
        weights.append([p.detach().clone() for p in module.parameters()])
        if profiler is not None and module.global_rank == 0:
            assert profiler.record is not None
            assert profiler.record.utilisation is not None, profiler.record.notes
            flops = profiler.record.utilisation.flops
            rows = 6 * (1 + 2)
            assert (flops.forward, flops.backward) == (mm(rows), mm(rows)), flops
    assert all(map(torch.equal, *weights))
    dist.destroy_process_group()
    print("same", hashlib.sha256(weights[0][0].numpy().tobytes()).hexdigest())


if __name__ == "__main__":
    main(*sys.argv[1:])
