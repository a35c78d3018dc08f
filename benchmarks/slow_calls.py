"""Times each call of the table of slow calls, and its remedy: ``python -m benchmarks.slow_calls [WORD …]``.

Words choose the rows whose names contain them. A row whose package is not installed is left out.
"""

from __future__ import annotations

import collections
import copy
import datetime
import io
import itertools
import json
import pickle
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from lm_profiler.analysis.remedies.slow_calls import SLOW_CALLS

_LEAST_S = 0.05  # the least time of a measurement
_REPEATS = 5
_FOLDER = Path(tempfile.mkdtemp(prefix="slow_calls"))


class Example(NamedTuple):
    """A call of the table and what its remedy runs instead."""

    slow: Callable[[], object]
    remedy: Callable[[], object]


def numpy_choice_with_p() -> Example:
    """1,024 of 1,000,000 items."""
    p = np.random.default_rng(0).random(1_000_000)
    p /= p.sum()
    cumulative = p.cumsum()
    return Example(
        lambda: np.random.choice(len(p), 1024, p=p),
        lambda: np.searchsorted(cumulative, np.random.random(1024)),
    )


def numpy_choice_with_replace_false() -> Example:
    """1,024 of 1,000,000 items."""
    rng = np.random.default_rng(0)
    return Example(
        lambda: np.random.choice(1_000_000, 1024, replace=False),
        lambda: rng.choice(1_000_000, 1024, replace=False),
    )


def part_of_permutation() -> Example:
    """256 of 100,000 items."""
    return Example(
        lambda: torch.randperm(100_000)[:256], lambda: torch.randint(100_000, (256,))
    )


def sample_of_deque() -> Example:
    """256 of 100,000 transitions."""
    memory = collections.deque(range(100_000))
    as_list = list(memory)
    return Example(
        lambda: random.sample(memory, 256), lambda: random.sample(as_list, 256)
    )


def choices_with_weights() -> Example:
    """64 of 10,000 items."""
    weights = [random.random() for _ in range(10_000)]
    sums = list(itertools.accumulate(weights))
    items = range(len(weights))
    return Example(
        lambda: random.choices(items, weights, k=64),
        lambda: random.choices(items, cum_weights=sums, k=64),
    )


def index_into_deque() -> Example:
    """256 of 100,000 transitions."""
    memory = collections.deque(range(100_000))
    as_list = list(memory)
    places = [random.randrange(100_000) for _ in range(256)]
    return Example(
        lambda: [memory[place] for place in places],
        lambda: [as_list[place] for place in places],
    )


def pop_first() -> Example:
    """A list of 100,000 elements that stays as long as it is."""
    as_list = list(range(100_000))
    as_deque = collections.deque(as_list)

    def slow() -> None:
        as_list.pop(0)
        as_list.append(0)

    def remedy() -> None:
        as_deque.popleft()
        as_deque.append(0)

    return Example(slow, remedy)


def insert_first() -> Example:
    """A list of 100,000 elements that stays as long as it is."""
    as_list = list(range(100_000))
    as_deque = collections.deque(as_list)

    def slow() -> None:
        as_list.insert(0, 0)
        as_list.pop()

    def remedy() -> None:
        as_deque.appendleft(0)
        as_deque.pop()

    return Example(slow, remedy)


def index_of_list() -> Example:
    """100 words of a vocabulary of 10,000."""
    words = [f"word{number}" for number in range(10_000)]
    number_of = {word: number for number, word in enumerate(words)}
    text = random.choices(words, k=100)
    return Example(
        lambda: [words.index(word) for word in text],
        lambda: [number_of[word] for word in text],
    )


def growing_array() -> Example:
    """500 rows of 512 numbers."""
    rows = [np.random.random((1, 512)) for _ in range(500)]

    def slow() -> np.ndarray:
        joined = rows[0]
        for row in rows[1:]:
            joined = np.concatenate([joined, row])
        return joined

    return Example(slow, lambda: np.concatenate(rows))


def shifted_buffer() -> Example:
    """12 new rows of a queue of 65,536 rows of 128 numbers."""
    queue = torch.rand(65_536, 128)
    rows = torch.rand(12, 128)

    def remedy() -> None:
        queue[24:36] = rows

    return Example(lambda: torch.cat([rows, queue])[: len(queue)], remedy)


def vectorize() -> Example:
    """10,000 numbers."""
    values = np.random.random(10_000)
    clipped = np.vectorize(lambda value: min(max(value, 0.2), 0.8))
    return Example(lambda: clipped(values), lambda: values.clip(0.2, 0.8))


def apply_along_axis() -> Example:
    """1,000 rows of 64 numbers."""
    values = np.random.random((1000, 64))
    return Example(
        lambda: np.apply_along_axis(lambda row: row / row.sum(), 1, values),
        lambda: values / values.sum(axis=1, keepdims=True),
    )


def tensor_of_arrays() -> Example:
    """64 arrays of 1,024 numbers."""
    arrays = [np.random.random(1024).astype(np.float32) for _ in range(64)]
    return Example(
        lambda: torch.tensor(arrays), lambda: torch.from_numpy(np.stack(arrays))
    )


def loop_over_tensor() -> Example:
    """4,096 numbers."""
    values = torch.rand(4096)
    return Example(
        lambda: sum(float(value) for value in values), lambda: sum(values.tolist())
    )


def inverse() -> Example:
    """A system of 256 equations."""
    matrix = torch.rand(256, 256) + 256.0 * torch.eye(256)
    right = torch.rand(256, 1)
    return Example(
        lambda: torch.linalg.inv(matrix) @ right,
        lambda: torch.linalg.solve(matrix, right),
    )


def part_of_order() -> Example:
    """The largest 10 of 50,000 numbers."""
    values = torch.rand(50_000)
    return Example(
        lambda: values.argsort(descending=True)[:10], lambda: values.topk(10).indices
    )


def multinomial() -> Example:
    """1,024 of 1,000,000 items."""
    p = torch.rand(1_000_000)
    cumulative = (p / p.sum()).cumsum(0)
    return Example(
        lambda: torch.multinomial(p, 1024, replacement=True),
        lambda: torch.searchsorted(cumulative, torch.rand(1024)),
    )


def _table() -> object:
    import pandas

    return pandas.DataFrame(np.random.random((1000, 8)), columns=list("abcdefgh"))


def iterrows() -> Example:
    """1,000 rows of 8 columns."""
    table = _table()
    values = table.to_numpy()
    return Example(
        lambda: [torch.tensor(row.to_numpy()) for _, row in table.iterrows()],
        lambda: [torch.from_numpy(row) for row in values],
    )


def apply_by_row() -> Example:
    """1,000 rows of 8 columns."""
    table = _table()
    return Example(
        lambda: table.apply(lambda row: row["a"] * row["b"], axis=1),
        lambda: table["a"] * table["b"],
    )


def iloc() -> Example:
    """64 rows of 8 columns."""
    table = _table()
    values = table.to_numpy()
    return Example(
        lambda: [table.iloc[row].to_numpy() for row in range(64)],
        lambda: [values[row] for row in range(64)],
    )


def json_loads() -> Example:
    """64 samples of 512 numbers."""
    samples = [list(range(512)) for _ in range(64)]
    texts = [json.dumps(sample) for sample in samples]
    arrays = np.array(samples)
    return Example(
        lambda: [json.loads(text) for text in texts],
        lambda: [arrays[row] for row in range(64)],
    )


def pickle_loads() -> Example:
    """64 samples of 512 numbers."""
    samples = [list(range(512)) for _ in range(64)]
    texts = [pickle.dumps(sample) for sample in samples]
    arrays = np.array(samples)
    return Example(
        lambda: [pickle.loads(text) for text in texts],
        lambda: [arrays[row] for row in range(64)],
    )


def compressed() -> Example:
    """A sample of 100,000 numbers."""
    values = np.random.default_rng(0).integers(100, size=100_000)
    np.savez_compressed(_FOLDER / "compressed.npz", values=values)
    np.save(_FOLDER / "plain.npy", values)

    def slow() -> np.ndarray:
        file = np.load(_FOLDER / "compressed.npz")
        return file["values"][:1000].copy()

    def remedy() -> np.ndarray:
        return np.load(_FOLDER / "plain.npy", mmap_mode="r")[:1000].copy()

    return Example(slow, remedy)


def deepcopy_of_model() -> Example:
    """A model with 24 linear layers of 64 features."""
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(24)))
    kept = copy.deepcopy(model)
    source = [weight.detach() for weight in model.parameters()]
    target = [weight.detach() for weight in kept.parameters()]
    return Example(
        lambda: copy.deepcopy(model), lambda: torch._foreach_copy_(target, source)
    )


def strptime() -> Example:
    """64 times."""
    texts = ["2024-05-01T12:30:00"] * 64
    return Example(
        lambda: [
            datetime.datetime.strptime(text, "%Y-%m-%dT%H:%M:%S") for text in texts
        ],
        lambda: [datetime.datetime.fromisoformat(text) for text in texts],
    )


def multivariate_normal() -> Example:
    """256 vectors of 64 numbers."""
    covariance = np.cov(np.random.random((64, 200)))
    factor = np.linalg.cholesky(covariance)
    rng = np.random.default_rng(0)
    mean = np.zeros(64)
    return Example(
        lambda: rng.multivariate_normal(mean, covariance, 256),
        lambda: mean + rng.standard_normal((256, 64)) @ factor.T,
    )


def resize() -> Example:
    """A JPEG of 1,600 x 1,200 pixels, to 128 x 96."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(np.random.randint(0, 255, (1200, 1600, 3), dtype=np.uint8)).save(
        file, "JPEG"
    )

    def slow() -> object:
        return Image.open(file).resize((128, 96), Image.Resampling.BICUBIC)

    def remedy() -> object:
        image = Image.open(file)
        image.draft("RGB", (256, 192))
        return image.resize((128, 96), Image.Resampling.BICUBIC)

    return Example(slow, remedy)


def hdf5_rows() -> Example:
    """64 rows of 128 numbers."""
    import h5py

    rows = h5py.File(_FOLDER / "rows.h5", "w").create_dataset(
        "rows", data=np.random.random((10_000, 128))
    )
    return Example(
        lambda: np.stack([rows[row] for row in range(64)]),
        lambda: rows[:64],
    )


# by the names of the table
EXAMPLES: dict[str, Callable[[], Example]] = {
    "NumPy's choice with p": numpy_choice_with_p,
    "NumPy's choice with replace=False": numpy_choice_with_replace_false,
    "a part of a permutation": part_of_permutation,
    "random.sample of a deque": sample_of_deque,
    "random.choices with weights": choices_with_weights,
    "an index into a deque": index_into_deque,
    "list.pop(0)": pop_first,
    "list.insert(0, …)": insert_first,
    "list.index": index_of_list,
    "an array that grows": growing_array,
    "a buffer that is shifted": shifted_buffer,
    "np.vectorize": vectorize,
    "np.apply_along_axis": apply_along_axis,
    "a tensor made of a list of arrays": tensor_of_arrays,
    "a loop over the elements of a tensor": loop_over_tensor,
    "the inverse of a matrix": inverse,
    "a part of a sorted order": part_of_order,
    "torch.multinomial with replacement": multinomial,
    "DataFrame.iterrows": iterrows,
    "DataFrame.apply with axis=1": apply_by_row,
    "rows of a DataFrame by iloc or loc": iloc,
    "json.loads": json_loads,
    "pickle.loads": pickle_loads,
    "np.load of a compressed file": compressed,
    "copy.deepcopy": deepcopy_of_model,
    "datetime.strptime": strptime,
    "multivariate_normal": multivariate_normal,
    "Pillow's resize": resize,
    "one row of an HDF5 file at a time": hdf5_rows,
}


def main(words: list[str]) -> None:
    torch.set_num_threads(1)
    for slow_call in SLOW_CALLS:
        name = slow_call.name
        if words and not any(word in name for word in words):
            continue
        try:
            example = EXAMPLES[name]()
        except ImportError as error:
            print(f"{name:38} left out: {error}")
            continue
        slow_s = []
        remedy_s = []
        for _ in range(_REPEATS):
            slow_s.append(_seconds(example.slow))
            remedy_s.append(_seconds(example.remedy))
        slow_us = min(slow_s) * 1e6
        remedy_us = min(remedy_s) * 1e6
        print(
            f"{name:38} {slow_us:10,.1f} us, remedy {remedy_us:8,.1f} us: {slow_us / remedy_us:7,.1f} x",
            flush=True,
        )


def _seconds(call: Callable[[], object]) -> float:
    """Return the mean seconds of ``call``."""
    calls = 0
    begin_s = time.perf_counter()
    while True:
        call()
        calls += 1
        seconds = time.perf_counter() - begin_s
        if seconds >= _LEAST_S:
            return seconds / calls


if __name__ == "__main__":
    main(sys.argv[1:])
