"""Replaces a method of a class for the length of a ``with`` block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced_method(owner: type, name: str, replacement: Any) -> Iterator[None]:
    """Replace the method ``name`` of ``owner`` by ``replacement`` within the context; then restore it.

    An inherited method is restored by deleting the replacement.
    """
    own_method = vars(owner).get(name)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        if own_method is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own_method)
