"""Calls of libraries that are slow in a known way, each with its remedy.

``python -m benchmarks.slow_calls`` times an example of each call and of its remedy.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Argument:
    """A condition on an argument of a call."""

    name: str
    position: int | None = None  # None if it is always passed by its name
    # The constant that the argument must be. None means any value but a constant None.
    value: bool | int | None = None
    # the class that the argument must be an instance of, and the class of the items if it is a list; any if empty
    kind: str = ""
    kind_of_items: str = ""


@dataclass(frozen=True)
class SlowCall:
    """A call that is slow in a known way."""

    name: str  # as it is shown
    # The functions that are meant. A method has the name of its class; special methods, such as ``__getitem__``, stand
    # for the syntax that calls them.
    functions: tuple[str, ...]
    remedy: str
    argument: Argument | None = None
    is_sliced: bool = False  # whether only a part of the result is used
    grows: bool = False  # whether the result replaces an argument
    shifts: bool = False  # whether it copies an attribute to insert little at one end
    # whether the object whose method it is must have one dimension, and many elements
    is_of_vector: bool = False
    # whether it calls functions of the program, whose time is then its own
    calls_program: bool = False
    # whether most of its time is that of Python code, which runs slower while it is followed
    is_python: bool = False
    # whether it runs Python code of torch, which elsewhere in its line may be the model
    runs_torch: bool = False


_LEGACY_RANDOM = ("numpy.random", "numpy.random.RandomState")
_ALL_RANDOM = (*_LEGACY_RANDOM, "numpy.random.Generator")

SLOW_CALLS: tuple[SlowCall, ...] = (
    SlowCall(
        "NumPy's choice with p",
        tuple(f"{owner}.choice" for owner in _ALL_RANDOM),
        "it checks and sums all probabilities in each call. Keep their cumulative sum and draw with "
        "np.searchsorted(cumulative, rng.random(n)), or draw for many steps at once.",
        Argument("p", 3),
    ),
    SlowCall(
        "NumPy's choice with replace=False",
        tuple(f"{owner}.choice" for owner in _LEGACY_RANDOM),
        "it permutes all items in each call. The method choice of np.random.default_rng() only draws what is needed.",
        Argument("replace", 2, value=False),
    ),
    SlowCall(
        "a part of a permutation",
        ("torch.randperm", *(f"{owner}.permutation" for owner in _ALL_RANDOM)),
        "it permutes all items to use a few. Draw random indices (torch.randint), or "
        "np.random.default_rng().choice(n, k, replace=False) if none may come twice.",
        is_sliced=True,
    ),
    SlowCall(
        "random.sample of a deque",
        ("random.sample",),
        "a deque walks to each element. Keep the elements in a list or in arrays, and overwrite the oldest one.",
        Argument("population", 0, kind="collections.deque"),
    ),
    SlowCall(
        "random.choices with weights",
        ("random.choices",),
        "it sums all weights in each call. Keep their sums (itertools.accumulate) and pass cum_weights=.",
        Argument("weights", 1),
    ),
    SlowCall(
        "an index into a deque",
        ("collections.deque.__getitem__",),
        "a deque walks to the element. Keep the elements in a list or in arrays, and overwrite the oldest one.",
    ),
    SlowCall(
        "list.pop(0)",
        ("builtins.list.pop",),
        "it moves all other elements. Use popleft() of a collections.deque, or an index that advances.",
        Argument("index", 0, value=0),
    ),
    SlowCall(
        "list.insert(0, …)",
        ("builtins.list.insert",),
        "it moves all other elements. Use appendleft() of a collections.deque.",
        Argument("index", 0, value=0),
    ),
    SlowCall(
        "list.index",
        ("builtins.list.index",),
        "it compares one element after another. Look positions up in a dict that is made once.",
    ),
    SlowCall(
        "an array that grows",
        tuple(f"numpy.{name}" for name in ("append", "concatenate", "hstack", "vstack")),
        "each call copies what is already there. Collect the pieces in a list and join them once, or write into an "
        "array that is long enough.",
        grows=True,
    ),
    SlowCall(
        "a buffer that is shifted",
        ("torch.cat", "torch.concat", "torch.concatenate", "numpy.concatenate", "numpy.hstack", "numpy.vstack"),
        "it copies the whole buffer to insert a few rows. Write them into the buffer in place, over the oldest ones "
        "(buffer[position : position + n] = rows), and let the position go round.",
        shifts=True,
    ),
    SlowCall(
        "np.vectorize",
        ("numpy.vectorize.__call__",),
        "it calls a Python function for each element. Compute with whole arrays.",
        calls_program=True,
        is_python=True,
    ),
    SlowCall(
        "np.apply_along_axis",
        ("numpy.apply_along_axis",),
        "it calls a Python function for each row. Compute with whole arrays, such as x.mean(axis=1).",
        calls_program=True,
        is_python=True,
    ),
    SlowCall(
        "a tensor made of a list of arrays",
        ("torch.tensor", "torch.as_tensor", "torch.FloatTensor", "torch.LongTensor"),
        "it reads the arrays element by element. Use torch.from_numpy(np.stack(arrays)).",
        Argument("data", 0, kind="builtins.list", kind_of_items="numpy.ndarray"),
    ),
    SlowCall(
        "a loop over the elements of a tensor",
        ("torch.Tensor.__iter__",),
        "each element becomes a tensor. Compute with the whole tensor, or loop over x.tolist().",
        is_of_vector=True,
        runs_torch=True,
    ),
    SlowCall(
        "the inverse of a matrix",
        ("torch.inverse", "torch.linalg.inv", "torch.Tensor.inverse", "numpy.linalg.inv"),
        "if the inverse is only multiplied, solve(A, b) of the same linalg module is faster and more accurate.",
    ),
    SlowCall(
        "a part of a sorted order",
        ("torch.argsort", "torch.Tensor.argsort", "numpy.argsort", "numpy.ndarray.argsort"),
        "it sorts all elements to use a few. Use topk of torch, or np.argpartition.",
        is_sliced=True,
    ),
    SlowCall(
        "torch.multinomial with replacement",
        ("torch.multinomial", "torch.Tensor.multinomial"),
        "it sums all probabilities in each call. If they stay the same, keep their cumulative sum and draw with "
        "torch.searchsorted(cumulative, torch.rand(n)).",
        Argument("replacement", 2, value=True),
    ),
    SlowCall(
        "DataFrame.iterrows",
        ("pandas.DataFrame.iterrows",),
        "it makes a Series of each row. Convert the columns to arrays or tensors once, before training.",
        is_python=True,
    ),
    SlowCall(
        "DataFrame.apply with axis=1",
        ("pandas.DataFrame.apply",),
        "it makes a Series of each row and calls a Python function. Compute with whole columns.",
        Argument("axis", 1, value=1),
        calls_program=True,
        is_python=True,
    ),
    SlowCall(
        "rows of a DataFrame by iloc or loc",
        ("pandas.DataFrame.iloc", "pandas.DataFrame.loc", "pandas.Series.iloc", "pandas.Series.loc"),
        "each access takes microseconds and may make a Series. Convert the columns to arrays or tensors once, before "
        "training.",
        is_python=True,
    ),
    SlowCall(
        "json.loads",
        ("json.loads",),
        "parse the texts once, before training, and keep the numbers in arrays (np.save, np.load with mmap_mode).",
    ),
    SlowCall(
        "pickle.loads",
        ("pickle.loads", "pickle.load"),
        "it makes all objects again. Keep the numbers in arrays, which np.load reads with mmap_mode='r'.",
    ),
    SlowCall(
        "np.load of a compressed file",
        ("numpy.lib.npyio.NpzFile.__getitem__",),
        "it decompresses the array at each access. Store it by np.save, and read it by np.load with mmap_mode='r'.",
    ),
    SlowCall(
        "copy.deepcopy",
        ("copy.deepcopy",),
        "it copies object by object. Copy tensors by clone(); update a copy of a model that is made once by "
        "torch._foreach_copy_ or load_state_dict.",
        is_python=True,
        runs_torch=True,
    ),
    SlowCall(
        "datetime.strptime",
        ("datetime.datetime.strptime", "time.strptime"),
        "it interprets the format in each call. Use datetime.fromisoformat, or convert the times before training.",
    ),
    SlowCall(
        "multivariate_normal",
        tuple(f"{owner}.multivariate_normal" for owner in _ALL_RANDOM),
        "it factorizes the covariance in each call. Keep its factor L (np.linalg.cholesky), and draw mean + "
        "rng.standard_normal((n, d)) @ L.T.",
    ),
    SlowCall(
        "Pillow's resize",
        ("PIL.Image.Image.resize",),
        "pass reducing_gap=2.0, call draft() before a JPEG is decoded, or store smaller images.",
    ),
    SlowCall(
        "one row of an HDF5 file at a time",
        ("h5py.Dataset.__getitem__",),
        "each access takes some 100 us. Read the rows of a batch by one slice, or the whole dataset if it fits.",
    ),
)  # fmt: skip

SLOW_CALL_BY_NAME = {call.name: call for call in SLOW_CALLS}
