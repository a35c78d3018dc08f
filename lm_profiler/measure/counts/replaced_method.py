"""Replaces a method of a class for the length of a ``with`` block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced_method(owner: type, name: str, replacement: Any) -> Iterator[None]:
    """Replace the method ``name`` of ``owner`` by ``replacement`` within the context; then restore it.

    An inherited method is restored by deleting the replacement. If the program has put another method there meanwhile,
    that one stays.
    """
    own_method = vars(owner).get(name)
    setattr(owner, name, replacement)
    placed_method = vars(owner)[name]  # Python makes ``__new__`` a static method
    try:
        yield
    finally:
        is_still_ours = vars(owner).get(name) is placed_method
        if is_still_ours and own_method is None:
            delattr(owner, name)
        elif is_still_ours:
            setattr(owner, name, own_method)
