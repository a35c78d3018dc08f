"""Equal contents are equal, others are not; what cannot be read without the program's code is unknown."""

import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lm_profiler.measure.contents import content_of

SPARSE = torch.tensor([[0.0, 2.0], [3.0, 0.0]]).to_sparse()
PAIRS: list[tuple[Any, Any, bool]] = [
    (torch.arange(6.0), torch.arange(6.0), True),
    (torch.arange(6.0), torch.arange(6.0).reshape(2, 3), False),
    (torch.arange(6), torch.arange(6.0), False),
    (torch.arange(6.0), torch.arange(6.0).flip(0), False),
    (torch.arange(6.0).reshape(2, 3).T, torch.arange(6.0).reshape(2, 3).T.contiguous(), True),
    (torch.arange(6.0)[1:4], torch.arange(1.0, 4.0), True),
    (torch.ones(1).expand(4), torch.ones(4), True),
    (torch.ones(4, dtype=torch.bfloat16), torch.ones(4, dtype=torch.bfloat16), True),
    (nn.Parameter(torch.ones(4)), torch.ones(4), True),
    (torch.empty(0), torch.empty(0), True),
    (SPARSE, SPARSE.clone(), True),
    (SPARSE, (2 * SPARSE).coalesce(), False),
    (np.arange(6).reshape(2, 3).T, np.arange(6).reshape(2, 3).T.copy(), True),
    (np.arange(6), np.arange(6)[::-1], False),
    (np.float32(1.0), np.float64(1.0), False),
    ("ab", "ab", True),
    ("ab", b"ab", False),
    (["ab", "c"], ["a", "bc"], False),
    ((1, 2), [1, 2], False),
    ((1, True), (1, 1), False),
    ({"a": [torch.ones(2)]}, {"a": [torch.ones(2)]}, True),
    ({"a": 1}, {"a": 2}, False),
    (10**5000, 10**5000, True),
    (0.0, -0.0, False),
]


@pytest.mark.parametrize("first, second, are_equal", PAIRS, ids=range(len(PAIRS)))
def test_contents_are_equal_if_the_values_are(first: Any, second: Any, are_equal: bool) -> None:
    contents = content_of(first), content_of(second)
    assert None not in contents
    assert (contents[0] == contents[1]) == are_equal


class RefusingClass(type):
    def __eq__(self, other: object) -> bool:
        pytest.fail("code of the program was called")

    __hash__ = type.__hash__


class Refusing(metaclass=RefusingClass):
    def refuse(self, *_: object) -> Any:
        pytest.fail("code of the program was called")

    __eq__ = __len__ = __iter__ = __repr__ = refuse
    __hash__ = refuse


class RefusingNumber(np.float64):
    __repr__ = Refusing.refuse


class OwnTensor(Tensor):
    pass


class TupleWithAttributes(tuple[int, ...]):
    pass


def nested_tensor() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is a prototype
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


def quantized_tensor() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated
        return torch.quantize_per_tensor(torch.ones(20), 0.1, 0, torch.qint8)


def record_of_numpy() -> Any:
    return np.array([(Refusing(),)], dtype=[("field", object)])[0]


def images() -> Iterator[int]:
    yield 1


UNKNOWN: list[Callable[[], Any]] = [
    Refusing,
    lambda: [Refusing()],
    lambda: type("OwnList", (list,), {"__iter__": Refusing.refuse})([1]),
    lambda: torch.ones(2).as_subclass(OwnTensor),
    lambda: torch.ones(2, device="meta"),
    lambda: torch.empty(40 << 20, dtype=torch.uint8),  # more than is read
    lambda: [torch.empty(20 << 20, dtype=torch.uint8)] * 2,
    lambda: torch.ones(1).expand(40 << 20),
    lambda: np.array([Refusing()], dtype=object),
    lambda: list(range(50_000)),
    lambda: [[[[[[1]]]]]],
    lambda: RefusingNumber(1.0),
    lambda: TupleWithAttributes((1, 2)),
    nested_tensor,
    quantized_tensor,
    record_of_numpy,
    images,
]


@pytest.mark.parametrize("make", UNKNOWN)
def test_what_cannot_be_read_is_unknown(make: Callable[[], Any]) -> None:
    assert content_of(make()) is None


def test_a_transformed_tensor_is_unknown() -> None:
    contents = []

    def doubled(row: Tensor) -> Tensor:
        contents.append(content_of(row))
        return 2 * row

    torch.func.vmap(doubled)(torch.ones(3, 2))
    assert contents == [None]


class Counted(TorchDispatchMode):
    calls = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return function(*args, **(kwargs or {}))


class CountedFunctions(TorchFunctionMode):
    calls = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [Counted(), CountedFunctions()])
def test_modes_of_the_program_do_not_see_the_reading(mode: Any) -> None:
    values = [torch.ones(3, 2).T, nn.Parameter(torch.ones(2)), SPARSE]
    with mode:
        assert content_of(values) is not None
    assert mode.calls == 0


def test_the_image_that_is_read_is_small_open_and_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []

    class Image:
        def __init__(self, mode: str = "L", size: tuple[int, int] = (4, 5), is_closed: bool = False) -> None:
            self.mode = mode
            self.size = size
            self.is_closed = is_closed

        def getbands(self) -> str:
            return self.mode

        def tobytes(self) -> bytes:
            reads.append(self.mode)
            if self.is_closed:
                raise ValueError
            return bytes(range(20))

    class ImageOfFile(Image):
        pass

    monkeypatch.setitem(sys.modules, "PIL.Image", type("Module", (), {"Image": Image}))
    content = content_of(Image())
    assert content is not None
    assert content.elements == 20
    assert content_of(ImageOfFile()) is None
    assert content_of(Image(is_closed=True)) is None
    assert reads == ["L", "L"]
    assert content_of(Image("P")) is None  # its bytes are not its colours
    assert content_of(Image(size=(8_000, 8_000))) is None
    assert reads == ["L", "L"]
