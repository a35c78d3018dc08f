"""What all tests share."""

import signal

import pytest
import torch


def pytest_configure() -> None:
    """A shell's background job is born deaf to Ctrl-C, and so would be the programs that the tests interrupt."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
