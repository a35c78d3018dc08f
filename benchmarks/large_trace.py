"""Makes a trace of any size from a smaller one, and measures what `why` needs to read it.

    python -m benchmarks.large_trace tests/analysis/trace/traces/tracelens_h100_qwen1.5_0.5b.json.gz --gib 4
    python -m benchmarks.large_trace SOURCE --gib 4 --packed     compressed, as torch writes it

The events of the source are repeated as they stand in its file, each time later, with other numbers of launches and
steps. `why` reads the file in a process of its own: printed are its wall time, its largest resident memory as the
kernel reports it, and the first lines of its answer.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import resource
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, cast

_EVENTS_BEGIN = re.compile(rb'"traceEvents"\s*:\s*\[')
# what each repetition needs anew: moments, the numbers of launches and of links, and those of steps
_NUMBERS = re.compile(rb'("ts": |"correlation": |"id": |ProfilerStep#)(\d+(?:\.\d+)?)')
_MOMENT = b'"ts": '
_GAP_US = 1000.0


class Repeated:
    """The events of a trace, to be written any number of times."""

    def __init__(self, source: Path) -> None:
        content = source.read_bytes()
        if content[:2] == b"\x1f\x8b":
            content = gzip.decompress(content)
        begin = _EVENTS_BEGIN.search(content)
        if begin is None:
            raise SystemExit(f"{source}: no traceEvents")
        text = content.decode("utf-8", "replace")
        _, end = json.JSONDecoder(strict=False).raw_decode(
            text, len(content[: begin.end()].decode()) - 1
        )
        end = len(text[: end - 1].encode())
        self.before = content[: begin.end()]
        self.after = content[end:]
        self._pieces = _NUMBERS.split(content[begin.end() : end].strip())
        starts = [
            float(number)
            for name, number in self._numbers()
            if name == _MOMENT and float(number)
        ]
        self.length_us = max(starts) - min(starts) + _GAP_US
        self._launches = 1 + max(
            int(float(number)) for name, number in self._numbers() if name != _MOMENT
        )

    def _numbers(self) -> list[tuple[bytes, bytes]]:
        return list(zip(self._pieces[1::3], self._pieces[2::3], strict=True))

    def events(self, repetition: int) -> bytes:
        """The events, later by the length of the trace times ``repetition``."""
        pieces = list(self._pieces)
        for index in range(1, len(pieces), 3):
            number = pieces[index + 1]
            if pieces[index] == _MOMENT:
                moved = float(number) + repetition * self.length_us
                pieces[index + 1] = b"%.3f" % moved
            else:
                pieces[index + 1] = b"%d" % (
                    int(float(number)) + repetition * self._launches
                )
        return b"".join(pieces)


def write_trace(source: Path, path: Path, gib: float, packed: bool) -> int:
    """Write the trace and return the number of repetitions; ``gib`` is its size before it is packed."""
    repeated = Repeated(source)
    with ExitStack() as files:
        output: BinaryIO = files.enter_context(path.open("wb"))
        if packed:
            output = cast(
                BinaryIO,
                files.enter_context(
                    gzip.GzipFile(fileobj=output, mode="wb", compresslevel=1)
                ),
            )
        size = output.write(repeated.before)
        repetition = 0
        while size < gib * 2**30:
            if repetition:
                size += output.write(b",\n")
            size += output.write(repeated.events(repetition))
            repetition += 1
        output.write(repeated.after)
    return repetition


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path)
    parser.add_argument("--gib", type=float, default=4.0)
    parser.add_argument("--packed", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "large.json.gz" if options.packed else "large.json")
        repetitions = write_trace(options.source, path, options.gib, options.packed)
        print(
            f"{repetitions} times {options.source.name}, {path.stat().st_size / 2**30:.2f} GiB on disk"
        )
        began_s = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "lm_profiler", "why", str(path)],
            capture_output=True,
            text=True,
            check=False,
        )
        took_s = time.monotonic() - began_s
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = usage.ru_utime + usage.ru_stime
    print(
        f"exit code {done.returncode}, {took_s:.0f} s, of which {cpu_s:.0f} s on a CPU"
    )
    print(f"{usage.ru_maxrss * 1024 / 1e6:.0f} MB resident at most")
    print("\n".join((done.stdout or done.stderr).splitlines()[:8]))


if __name__ == "__main__":
    main()
