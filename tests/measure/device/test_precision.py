"""torch's two switches of float32 products: what is read, and what is put back."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lm_profiler.analysis.hardware.roofline import matmul_dtype
from lm_profiler.measure.device.environment import environment, exact_float32, float32_matmul_precision

BACKENDS: Any = torch.backends


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    with exact_float32():
        torch.set_float32_matmul_precision("highest")
        yield
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize("word", ["highest", "high", "medium"])
def test_the_older_switch_is_read_in_its_own_words(word: str) -> None:
    torch.set_float32_matmul_precision(word)
    assert float32_matmul_precision() == float32_matmul_precision("cpu") == word


@pytest.mark.parametrize("word, read", [("tf32", "high"), ("ieee", "highest"), ("none", "highest")])
def test_the_newer_switch_is_read_where_the_older_refuses(word: str, read: str) -> None:
    BACKENDS.cuda.matmul.fp32_precision = word
    assert float32_matmul_precision("cuda") == read
    assert float32_matmul_precision("cpu") == "highest"
    assert environment(torch.device("cpu"), 1).flags["float32_matmul_precision"] == "highest"
    assert matmul_dtype("32-true", float32_matmul_precision()) == ("tf32" if word == "tf32" else "float32")


def test_each_device_has_its_own_switch_which_is_put_back() -> None:
    BACKENDS.mkldnn.matmul.fp32_precision = "bf16"
    assert (float32_matmul_precision("cuda"), float32_matmul_precision("cpu")) == ("highest", "medium")
    BACKENDS.cuda.matmul.fp32_precision = "tf32"
    BACKENDS.mkldnn.matmul.fp32_precision = "bf16"
    with exact_float32():
        assert (float32_matmul_precision("cuda"), float32_matmul_precision("cpu")) == ("highest", "highest")
    assert BACKENDS.cuda.matmul.fp32_precision == "tf32"
    assert BACKENDS.mkldnn.matmul.fp32_precision == "bf16"
    assert matmul_dtype("32-true", "unknown") is None
    assert matmul_dtype("bf16-mixed", "unknown") == "bfloat16"
