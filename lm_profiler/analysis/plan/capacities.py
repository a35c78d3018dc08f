"""How much memory a GPU has, by the names of the table of peaks: as its driver reports it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass

from lm_profiler.analysis.hardware.peak_table import ROWS
from lm_profiler.usage_error import UsageError

# GiB, and the compute capability (NVIDIA's page "CUDA GPU Compute Capability"; AMD's as torch gives its gfx number).
# GiB are what the driver tells a process that there is (``cudaMemGetInfo``), which torch prints where memory runs out
# ("GPU 0 has a total capacity of 14.76 GiB"), as people quote it in public. Seen: B200 pytorch/ao#4002, H20
# Tencent-Hunyuan/Hunyuan3D-Part#9, MI355X ROCm/TheRock#2118, RTX 5090 Wan-Video/Wan2.1#465, RTX 6000 Ada
# DINGYANB/MTVCrafter#21, T4 Morizeyao/GPT2-Chinese#215, A30 google/RB-Modulation#5; GB200, GB300, B300, RTX PRO 6000,
# MI300X and MI325X in other public logs. The rest is remembered, and yet to be cited. Drivers differ by 0.2: the least
# is taken, rounded down. ``nvidia-smi`` shows up to 0.7 more (modal-labs/modal-client#2797): what the driver keeps for
# itself. On AMD's GPUs a run is planned with the kernels that torch would choose on the NVIDIA GPU of that number, a
# Hopper.
_KNOWN: dict[str, tuple[float, tuple[int, int]]] = {
    "NVIDIA GB300": (276.5, (10, 3)),
    "NVIDIA B300 SXM6 AC": (267.6, (10, 3)),
    "NVIDIA GB200": (184.3, (10, 0)),
    "NVIDIA B200": (178.3, (10, 0)),
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": (94.9, (12, 0)),
    "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition": (94.9, (12, 0)),
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": (94.9, (12, 0)),
    "NVIDIA GeForce RTX 5090": (31.3, (12, 0)),
    "NVIDIA GeForce RTX 5080": (15.4, (12, 0)),
    "NVIDIA GeForce RTX 5070 Ti": (15.4, (12, 0)),
    "NVIDIA GeForce RTX 5070": (11.4, (12, 0)),
    "NVIDIA H100 80GB HBM3": (79.1, (9, 0)),
    "NVIDIA H100 PCIe": (79.1, (9, 0)),
    "NVIDIA H100 NVL": (93.0, (9, 0)),
    "NVIDIA H800": (79.1, (9, 0)),
    "NVIDIA H20": (95.0, (9, 0)),
    "NVIDIA H200": (139.7, (9, 0)),
    "NVIDIA H200 NVL": (139.7, (9, 0)),
    "NVIDIA GH200 480GB": (94.5, (9, 0)),
    "NVIDIA GH200 120GB": (94.5, (9, 0)),
    "NVIDIA GH200 144G HBM3e": (134.1, (9, 0)),  # no report found: 144 * 10^9 bytes, the least that it can be
    "NVIDIA L4": (22.0, (8, 9)),
    "NVIDIA L40": (44.3, (8, 9)),
    "NVIDIA L40S": (44.3, (8, 9)),
    "NVIDIA RTX 6000 Ada Generation": (44.4, (8, 9)),  # with ECC; 47.5 without
    "NVIDIA GeForce RTX 4090": (23.5, (8, 9)),
    "NVIDIA GeForce RTX 4090 Laptop GPU": (15.6, (8, 9)),
    "NVIDIA GeForce RTX 4080": (15.6, (8, 9)),
    "NVIDIA GeForce RTX 4070 Ti": (11.6, (8, 9)),
    "NVIDIA A100-SXM4-40GB": (39.3, (8, 0)),
    "NVIDIA A100-PCIE-40GB": (39.3, (8, 0)),
    "NVIDIA A100-SXM4-80GB": (79.1, (8, 0)),
    "NVIDIA A100 80GB PCIe": (79.1, (8, 0)),
    "NVIDIA A30": (23.5, (8, 0)),
    "NVIDIA A40": (44.3, (8, 6)),
    "NVIDIA A10": (21.9, (8, 6)),
    "NVIDIA A10G": (21.9, (8, 6)),
    "NVIDIA RTX A6000": (47.4, (8, 6)),
    "NVIDIA GeForce RTX 3090": (23.5, (8, 6)),
    "NVIDIA GeForce RTX 3090 Ti": (23.5, (8, 6)),
    "NVIDIA GeForce RTX 3080": (9.7, (8, 6)),
    "NVIDIA GeForce RTX 3070": (7.7, (8, 6)),
    "NVIDIA GeForce RTX 2080 Ti": (10.7, (7, 5)),
    "Tesla T4": (14.7, (7, 5)),
    "Tesla V100-SXM2-16GB": (15.7, (7, 0)),
    "Tesla V100-SXM2-32GB": (31.7, (7, 0)),
    "Tesla V100-PCIE-16GB": (15.7, (7, 0)),
    "Tesla V100-PCIE-32GB": (31.7, (7, 0)),
    "Tesla V100S-PCIE-32GB": (31.7, (7, 0)),
    "AMD Instinct MI300X": (191.6, (9, 4)),
    "AMD Instinct MI325X": (255.6, (9, 4)),
    "AMD Instinct MI355X": (287.9, (9, 5)),
}

# the compute capability that is planned for where it is unknown: no GPU gives its libraries larger workspaces
ANY_GPU = (9, 0)

_NEAR = 0.7  # how alike two words must be (``difflib``'s ratio) for one to be proposed for the other

_SHOWN = 5  # names in a message

# words that people leave out; without them a name still means one product
_BRANDS = {"nvidia", "geforce", "rtx", "tesla", "amd", "instinct", "generation"}


@dataclass(frozen=True)
class Capacity:
    """The memory in bytes of the GPU that its driver calls ``name``; a run gets some per cent less.

    ``is_free``: they are what this machine has left now, and not all that there is. ``gpu``: its compute capability;
    None is the CPU.
    """

    name: str
    bytes: int
    is_free: bool = False
    gpu: tuple[int, int] | None = None


def capacity(given: str) -> Capacity:
    """The GPU of the table that is called ``given``, with or without its brand, or else in whose name alone all words
    of ``given`` occur: ``4090``, ``a100 80gb``.

    Raises:
        UsageError: none is, or several are that differ in memory or speed; it names them.
    """
    wanted = _words(given)
    rows = {name: row for row in ROWS for name in row.names if name in _KNOWN}
    named = [name for name in rows if _words(name) - _BRANDS == wanted - _BRANDS]
    meant = named or [name for name in rows if wanted - _BRANDS and wanted <= _words(name)]
    if len({(_KNOWN[name], rows[name].tf32, rows[name].bfloat16, rows[name].float16) for name in meant}) > 1:
        raise UsageError(f"device: expected one GPU, given {given[:100]!r}, which may be {_listed(meant)}")
    if meant:
        gib, gpu = _KNOWN[meant[0]]
        return Capacity(meant[0], int(gib * (1 << 30)), gpu=gpu)
    near = sorted((name for name in rows if _alike(given, name) >= _NEAR), key=lambda name: -_alike(given, name))
    hint = f"did you mean {', '.join(near[:3])}?" if near else "or say --memory 80GiB"
    raise UsageError(f"device: expected a GPU such as A100 80GB, given {given[:100]!r}; {hint}")


def _listed(names: list[str]) -> str:
    shown = [*names[:_SHOWN], *([f"{len(names) - _SHOWN} others"] if len(names) > _SHOWN else [])]
    return f"{', '.join(shown[:-1])} or {shown[-1]}"


def _alike(given: str, name: str) -> float:
    return max(difflib.SequenceMatcher(None, given.casefold(), word).ratio() for word in _words(name))


def _words(name: str) -> set[str]:
    return {*re.split(r"[\s_-]+", name.casefold().strip())} - {"", "nvidia"}


_MOST = 12  # sizes that are tried


def largest_that_fits(begin: int, needed: int, room: float) -> Generator[int, int, int]:
    """Asks what other sizes than ``begin``, which needs ``needed`` bytes, need; returns the largest within ``room``.

    What a step needs is a convex function of its batch, and of its context: the most of several sums, each of which
    grows in proportion, or as a square. So a line through two sizes that fit meets ``room`` too late, and one through a
    size that fits and one that does not, too early: from both sides the search closes in. 0 where not even 1 fits.
    """
    known = {begin: needed}
    for turn in range(_MOST):
        fitting = sorted(n for n, bytes_ in known.items() if bytes_ <= room)
        low = fitting[-1] if fitting else 0
        high = min((n for n, bytes_ in known.items() if bytes_ > room), default=None)
        if high is not None and high - low <= 1:
            return low
        n = _next(known, fitting, high, room, from_above=bool(turn % 2))
        known[n] = yield n
    return max((n for n, bytes_ in known.items() if bytes_ <= room), default=0)


def _next(known: Mapping[int, int], fitting: Sequence[int], high: int | None, room: float, from_above: bool) -> int:
    """The next size to try: above all of ``fitting``, and below ``high``."""
    if not fitting:
        assert high is not None
        above = sorted(known)[:2]
        near = _meets(known, above[0], above[1], room) if len(above) > 1 else int(high * room / known[high])
        return max(min(near if from_above else near * 3 // 4, high // 2), 1)
    low = fitting[-1]
    through_two = _meets(known, fitting[-2], low, room) if len(fitting) > 1 else 2 * low
    if high is None:
        return max(min(through_two, 64 * low), low + 1)
    n = through_two if from_above else _meets(known, low, high, room)
    return min(max(n, low + 1), high - 1)


def _meets(known: Mapping[int, int], a: int, b: int, room: float) -> int:
    """Return where the line through sizes ``a`` and ``b`` meets ``room``, rounded down."""
    rise = known[b] - known[a]
    return int(a + (room - known[a]) * (b - a) / rise) if rise else 64 * b
