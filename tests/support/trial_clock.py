"""A clock for operators that are repeated."""

from collections.abc import Callable, Iterator


def clock_of(*seconds: float) -> Callable[[], int]:
    """Return a clock by which one repetition after another takes so many ``seconds``."""

    def instants_ns() -> Iterator[int]:
        for duration_s in seconds:
            yield 0
            yield round(duration_s * 1e9)

    return instants_ns().__next__
