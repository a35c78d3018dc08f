"""What is raised, for a stored text."""

from collections.abc import Callable

import pytest


def refusal(error: type[BaseException], call: Callable[[], object]) -> str:
    """Return the message of the error of this type that ``call`` raises."""
    with pytest.raises(error) as raised:
        call()
    return str(raised.value)
