"""How much memory a GPU has, by the names of the table of peaks: as its product's name or datasheet says."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from lm_profiler.analysis.hardware.peak_table import ROWS

_KNOWN: dict[str, tuple[int, tuple[int, int]]] = {
    "NVIDIA GB200": (186, (10, 0)),
    "NVIDIA B200": (180, (10, 0)),
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": (96, (12, 0)),
    "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition": (96, (12, 0)),
    "NVIDIA GeForce RTX 5090": (32, (12, 0)),
    "NVIDIA H100 80GB HBM3": (80, (9, 0)),
    "NVIDIA H100 PCIe": (80, (9, 0)),
    "NVIDIA H100 NVL": (94, (9, 0)),
    "NVIDIA H200": (141, (9, 0)),
    "NVIDIA H200 NVL": (141, (9, 0)),
    "NVIDIA GH200 480GB": (96, (9, 0)),
    "NVIDIA GH200 120GB": (96, (9, 0)),
    "NVIDIA GH200 144G HBM3e": (144, (9, 0)),
    "NVIDIA L4": (24, (8, 9)),
    "NVIDIA L40": (48, (8, 9)),
    "NVIDIA L40S": (48, (8, 9)),
    "NVIDIA RTX 6000 Ada Generation": (48, (8, 9)),
    "NVIDIA GeForce RTX 4090": (24, (8, 9)),
    "NVIDIA GeForce RTX 4090 Laptop GPU": (16, (8, 9)),
    "NVIDIA A100-SXM4-40GB": (40, (8, 0)),
    "NVIDIA A100-PCIE-40GB": (40, (8, 0)),
    "NVIDIA A100-SXM4-80GB": (80, (8, 0)),
    "NVIDIA A100 80GB PCIe": (80, (8, 0)),
    "NVIDIA A30": (24, (8, 0)),
    "NVIDIA A40": (48, (8, 6)),
    "NVIDIA A10": (24, (8, 6)),
    "NVIDIA A10G": (24, (8, 6)),
    "NVIDIA RTX A6000": (48, (8, 6)),
    "NVIDIA GeForce RTX 3090": (24, (8, 6)),
    "NVIDIA GeForce RTX 3090 Ti": (24, (8, 6)),
    "Tesla T4": (16, (7, 5)),
    "Tesla V100-SXM2-16GB": (16, (7, 0)),
    "Tesla V100-SXM2-32GB": (32, (7, 0)),
    "Tesla V100-PCIE-16GB": (16, (7, 0)),
    "Tesla V100-PCIE-32GB": (32, (7, 0)),
    "Tesla V100S-PCIE-32GB": (32, (7, 0)),
}
"""GB, and the compute capability (NVIDIA's page "CUDA GPU Compute Capability")."""

ANY_GPU = (9, 0)
"""The compute capability that is planned for where it is unknown: no GPU gives its libraries larger workspaces."""

_NEAR = 0.7
"""As alike as this is a word that was perhaps meant."""


@dataclass(frozen=True)
class Capacity:
    """Of the GPU whose driver calls it ``name``: bytes, of which it leaves a run some per cent less.

    ``is_free``: they are what this machine has left now, and not all that there is. ``gpu``: its compute capability;
    None is the CPU.
    """

    name: str
    bytes: int
    is_free: bool = False
    gpu: tuple[int, int] | None = None


class UnknownDevice(ValueError):
    """No GPU of the table is called so; ``near`` are names that were perhaps meant."""

    def __init__(self, given: str, near: list[str]) -> None:
        super().__init__(given)
        self.near = near


def capacity(given: str) -> Capacity:
    """Of the first GPU of the table in whose name all words of ``given`` occur: ``H100``, ``a100 80gb``.

    Raises:
        UnknownDevice: there is none.
    """
    names = [name for row in ROWS for name in row.names if name in _KNOWN]
    wanted = _words(given)
    for name in sorted(names, key=lambda name: _words(name) != wanted):  # the whole name goes before all others
        if wanted and wanted <= _words(name):
            gb, gpu = _KNOWN[name]
            return Capacity(name, gb << 30, gpu=gpu)
    near = sorted((name for name in names if _alike(given, name) >= _NEAR), key=lambda name: -_alike(given, name))
    raise UnknownDevice(given, near[:3])


def _alike(given: str, name: str) -> float:
    return max(difflib.SequenceMatcher(None, given.casefold(), word).ratio() for word in _words(name))


def _words(name: str) -> set[str]:
    return {*re.split(r"[\s_-]+", name.casefold().strip())} - {"", "nvidia"}
