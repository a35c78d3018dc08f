"""One of two ranks with sharded weights; started by test_step_flops.py. Arguments: rank, and a file to meet in."""

import os
import sys
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lm_profiler.measure.counts.flops import FlopCounter


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))


def print_counts(model: nn.Module) -> None:
    counter = FlopCounter()
    with counter:
        model(torch.ones(2, 8)).sum().backward()
    flops = counter.flops()
    print(flops.forward, flops.backward)


def main(rank: str, file: str) -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=int(rank), world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    print_counts(parallelize_module(layers(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()}))
    model = layers()
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    print_counts(model)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # meshes and sharded weights hold groups of Gloo's, whose threads abort a process once in a while


if __name__ == "__main__":
    main(*sys.argv[1:])
