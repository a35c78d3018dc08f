"""How much memory a GPU has, by the names of the table of peaks: as its product's name or datasheet says."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from lm_profiler.analysis.hardware.peak_table import ROWS

_GB: dict[str, int] = {
    "NVIDIA GB200": 186,
    "NVIDIA B200": 180,
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": 96,
    "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition": 96,
    "NVIDIA GeForce RTX 5090": 32,
    "NVIDIA H100 80GB HBM3": 80,
    "NVIDIA H100 PCIe": 80,
    "NVIDIA H100 NVL": 94,
    "NVIDIA H200": 141,
    "NVIDIA H200 NVL": 141,
    "NVIDIA GH200 480GB": 96,
    "NVIDIA GH200 120GB": 96,
    "NVIDIA GH200 144G HBM3e": 144,
    "NVIDIA L4": 24,
    "NVIDIA L40": 48,
    "NVIDIA L40S": 48,
    "NVIDIA RTX 6000 Ada Generation": 48,
    "NVIDIA GeForce RTX 4090": 24,
    "NVIDIA GeForce RTX 4090 Laptop GPU": 16,
    "NVIDIA A100-SXM4-40GB": 40,
    "NVIDIA A100-PCIE-40GB": 40,
    "NVIDIA A100-SXM4-80GB": 80,
    "NVIDIA A100 80GB PCIe": 80,
    "NVIDIA A30": 24,
    "NVIDIA A40": 48,
    "NVIDIA A10": 24,
    "NVIDIA A10G": 24,
    "NVIDIA RTX A6000": 48,
    "NVIDIA GeForce RTX 3090": 24,
    "NVIDIA GeForce RTX 3090 Ti": 24,
    "Tesla T4": 16,
    "Tesla V100-SXM2-16GB": 16,
    "Tesla V100-SXM2-32GB": 32,
    "Tesla V100-PCIE-16GB": 16,
    "Tesla V100-PCIE-32GB": 32,
    "Tesla V100S-PCIE-32GB": 32,
}


_NEAR = 0.7
"""As alike as this is a word that was perhaps meant."""


@dataclass(frozen=True)
class Capacity:
    """Of the GPU whose driver calls it ``name``: bytes, of which it leaves a run some per cent less.

    ``is_free``: they are what this machine has left now, and not all that there is.
    """

    name: str
    bytes: int
    is_free: bool = False


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
    names = [name for row in ROWS for name in row.names if name in _GB]
    wanted = _words(given)
    for name in sorted(names, key=lambda name: _words(name) != wanted):  # the whole name goes before all others
        if wanted and wanted <= _words(name):
            return Capacity(name, _GB[name] << 30)
    near = sorted((name for name in names if _alike(given, name) >= _NEAR), key=lambda name: -_alike(given, name))
    raise UnknownDevice(given, near[:3])


def _alike(given: str, name: str) -> float:
    return max(difflib.SequenceMatcher(None, given.casefold(), word).ratio() for word in _words(name))


def _words(name: str) -> set[str]:
    return {*re.split(r"[\s_-]+", name.casefold().strip())} - {"", "nvidia"}
