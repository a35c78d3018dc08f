"""Compiles the simulated GPU for the PyTorch that is installed: what it calls and we have not is made a stub."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

HERE = Path(__file__).parent
SOURCES = (
    *(
        "kernels",
        "copies",
        "memory",
        "streams",
        "events",
        "graphs",
        "devices",
        "errors",
    ),
    *(
        "driver",
        "management",
        "libraries",
        "cudnn",
        "collectives",
        "activity",
        "compiler",
    ),
)
CALLED = re.compile(r"(__cuda|cuda[A-Z]|cublas|cupti|nccl|cu[A-Z])\w+")
_MISSING = """#include <stdio.h>
static int missing(const char *name, int *told) {
  if (!(*told)++) fprintf(stderr, "simulated GPU: %s is not there\\n", name);
  return 801;  // cudaErrorNotSupported, CUDA_ERROR_NOT_SUPPORTED
}
"""


def symbols(files: list[Path], *kind: str) -> set[str]:
    """The functions that ``files`` call (``--undefined-only``) or have (``--defined-only``)."""
    told = subprocess.run(
        ["nm", *kind, *map(str, files)], check=True, capture_output=True, text=True
    ).stdout
    names = (
        line.split()[-1].split("@")[0]
        for line in told.splitlines()
        if line.strip() and not line.endswith(":")
    )
    return {name for name in names if CALLED.fullmatch(name)}


def stubs(names: Iterable[str]) -> str:
    """C functions that say once that they are not there: CUDA's own fail, those of libraries compute nothing."""
    return _MISSING + "".join(map(_stub, sorted(names)))


def _stub(name: str) -> str:
    returned = "0 * " if name.startswith(("cublas", "nccl", "cupti")) else ""
    return f'int {name}() {{ static int told; return {returned}missing("{name}", &told); }}\n'


def build(into: Path) -> list[Path]:
    """The libraries to preload, compiled under ``into`` where they are older than their source.

    Their folder is the one for ``LD_LIBRARY_PATH``: who asks for the driver or NVML by name finds the same library.

    Raises:
        OSError: there is no C++ compiler.
        subprocess.CalledProcessError: CUDA's headers are not installed.
    """
    libraries = [into / name for name in ("libcuda.so.1", "libnvrtc.so.13")]
    newest = max(file.stat().st_mtime for file in HERE.iterdir() if file.is_file())
    if all(
        library.exists() and library.stat().st_mtime > newest for library in libraries
    ):
        return libraries
    into.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=into) as folder:
        # a library that runs is replaced, never written to
        for made in _compiled(Path(folder)):
            made.replace(into / made.name)
    return libraries


def _compiled(folder: Path) -> list[Path]:
    site = Path(torch.__file__).parent
    nvidia = site.parent / "nvidia"
    headers = [
        nvidia / "cu13/include",
        nvidia / "cu13/include/cccl",
        nvidia / "cudnn/include",
        nvidia / "nccl/include",
    ]
    compiled = [
        "g++",
        "-std=c++17",
        "-O2",
        "-fPIC",
        "-fvisibility=hidden",
        "-c",
        *(f"-I{header}" for header in headers),
    ]
    objects = {name: folder / f"{name}.o" for name in SOURCES}
    for name, made in objects.items():
        subprocess.run(
            [*compiled, str(HERE / f"{name}.cpp"), "-o", str(made)], check=True
        )
    compiler = objects.pop("compiler")
    called = symbols(sorted((site / "lib").glob("lib*.so")), "-D", "--undefined-only")
    source = folder / "stubs.c"
    source.write_text(
        stubs(called - symbols([*objects.values()], "--defined-only")), "utf-8"
    )
    subprocess.run(
        ["gcc", "-w", "-fPIC", "-c", str(source), "-o", str(folder / "stubs.o")],
        check=True,
    )
    libraries = {
        "libcuda.so.1": [*objects.values(), folder / "stubs.o"],
        "libnvrtc.so.13": [compiler],
    }
    for name, parts in libraries.items():
        linked = [
            "g++",
            "-shared",
            f"-Wl,-soname,{name}",
            *map(str, parts),
            "-ldl",
            "-lpthread",
        ]
        subprocess.run([*linked, "-o", str(folder / name)], check=True)
    management = folder / "libnvidia-ml.so.1"
    management.symlink_to("libcuda.so.1")
    return [management, *(folder / name for name in libraries)]
