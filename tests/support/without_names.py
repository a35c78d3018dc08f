"""``without_names.py PATH,PATH... ARGUMENTS``: lm_profiler where torch and Lightning lack these private names.

What code looks up is hidden where it looks. Lightning's action of fetching is renamed in Lightning's own functions.
"""

import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import Any

from lightning.pytorch.loops import training_epoch_loop

from lm_profiler import lightning_names, torch_names
from lm_profiler.callbacks.instruments import work
from lm_profiler.measure.counts.uncountable import UncountableError

FETCHED = ".train_dataloader_next"  # as it stands in the names of Lightning's action


@contextmanager
def hidden(paths: Collection[str]) -> Iterator[None]:
    """This process is without the names of what is looked up."""
    look_up, apart = torch_names.look_up, work.count_elsewhere

    def look(thing: Any, name: str, path: str) -> Any:
        if path in paths:
            raise AttributeError(name)
        return look_up(thing, name, path)

    torch_names.look_up, work.count_elsewhere = look, _not_apart
    torch_names._find.cache_clear()
    try:
        yield
    finally:
        torch_names.look_up, work.count_elsewhere = look_up, apart
        torch_names._find.cache_clear()


def rename_fetching() -> None:
    """From here on Lightning calls its action of fetching otherwise."""
    renamed = [function for function in _functions(training_epoch_loop) if _rename(function, FETCHED)]
    assert renamed, f"Lightning has no {FETCHED}"


def _not_apart(*_: Any) -> Any:
    raise UncountableError("the other process would lack the name, too")


def _functions(module: Any) -> Iterator[FunctionType]:
    for thing in list(vars(module).values()):
        if getattr(thing, "__module__", None) == module.__name__:
            within = vars(thing).values() if isinstance(thing, type) else [thing]
            yield from (member for member in within if isinstance(member, FunctionType))


def _rename(function: FunctionType, text: str) -> bool:
    code: CodeType = function.__code__
    consts = tuple(
        constant.replace(text, text[:3] + "other")
        if isinstance(constant, str) and constant != function.__doc__
        else constant
        for constant in code.co_consts
    )
    function.__code__ = code.replace(co_consts=consts)
    return consts != code.co_consts


if __name__ == "__main__":
    from lm_profiler.cli.main import main

    paths = set(sys.argv.pop(1).split(","))
    if lightning_names.FETCHED.path in paths:
        rename_fetching()
    with hidden(paths):
        sys.exit(main())
