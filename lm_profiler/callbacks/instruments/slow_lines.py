"""Finds the lines of the program with a call of a library that is slow in a known way.

Python reports neither the calls of compiled functions, such as ``np.random.choice``, nor their arguments. So the source
of a line is read, and its names are looked up in the frame that runs it. No code of the program is called.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import linecache
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from types import (
    CodeType,
    FrameType,
    GetSetDescriptorType,
    MemberDescriptorType,
    ModuleType,
)
from typing import Any

import numpy as np
from torch import Tensor, nn

from lm_profiler.analysis.remedies.slow_calls import SLOW_CALLS, Argument, SlowCall
from lm_profiler.measure.contents import is_one_of, without_function_modes

# the value of an expression that cannot be read without calling code
_UNKNOWN = object()
_MANY_ELEMENTS = 64  # the fewest that make a loop over them slow
# what a class or module has for an attribute that only code of it can compute
_COMPUTED_ATTRIBUTES = (property, MemberDescriptorType, GetSetDescriptorType)


# the largest piece that is inserted into a buffer, as a share of the buffer
_MOST_INSERTED_SHARE = 0.1


@dataclass(frozen=True)
class _CallSite:
    """An expression of a line that calls a function, or that Python implements by the call of a special method."""

    function: ast.expr | None  # None for a special method
    receiver: ast.expr | None  # the object whose method it is; None for a plain name
    name: str  # of the function
    call: ast.Call | None = None
    is_sliced: bool = False
    grows: bool = False
    # the attribute that gets the result, if the call joins the attribute with others and one end is cut off
    shifted: ast.Attribute | None = None


class SlowLines:
    """The lines that have run and contain a slow call."""

    def __init__(self) -> None:
        # by the identity of a code and its line; None for a line without a slow call
        self._calls: dict[tuple[int, int], SlowCall | None] = {}
        self._codes: list[CodeType] = []  # whose identities must not be used again

    def call_of(self, frame: FrameType) -> SlowCall | None:
        """Return the slow call in the line that ``frame`` runs now; None without one."""
        # The hash of a code itself would read all of its instructions.
        line = (id(frame.f_code), frame.f_lineno or 0)
        try:
            return self._calls[line]
        except KeyError:
            found = _slow_call_of(frame)
            self._calls[line] = found
            self._codes.append(frame.f_code)
            return found


def _slow_call_of(frame: FrameType) -> SlowCall | None:
    for site in _sites_by_line(frame.f_code.co_filename).get(frame.f_lineno or 0, ()):
        for slow_call in _calls_by_function_name()[site.name]:
            if _is_met(slow_call, site, frame):
                return slow_call
    return None


@cache
def _calls_by_function_name() -> defaultdict[str, list[SlowCall]]:
    """Return the slow calls by the last part of the names of their functions."""
    calls: defaultdict[str, list[SlowCall]] = defaultdict(list)
    for call in SLOW_CALLS:
        for name in sorted({path.rpartition(".")[2] for path in call.functions}):
            calls[name].append(call)
    return calls


# a backslash and the character after it, which a string may contain
_ESCAPE = re.compile(r"\\.", re.DOTALL)

# -- reading the source ------------------------------------------------------------------------------------------------


@cache
def _sites_by_line(file: str) -> dict[int, list[_CallSite]]:
    """Return the calls in a file whose function has the name of a slow one, by their lines."""
    try:
        source = "".join(linecache.getlines(file))
        tree = ast.parse(_ESCAPE.sub(_without_invalid_escape, source))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {}
    names = set(_calls_by_function_name())
    sites: defaultdict[int, list[_CallSite]] = defaultdict(list)
    for parent in ast.walk(tree):
        for node in ast.iter_child_nodes(parent):
            for line, site in _sites_of(node, parent):
                if site.name in names:
                    sites[line].append(site)
    return dict(sites)


def _without_invalid_escape(escape: re.Match[str]) -> str:
    """Return a backslash and the character after it, without the backslash if Python might warn about this escape.

    To switch its warnings off would make Python repeat those that the program has already printed. What a text contains
    does not matter here, but a backslash before a line's end, a quote or a Unicode name does.
    """
    character = escape[0][1]
    return escape[0] if character in "\n\r'\"\\N" else f"_{character}"


def _sites_of(node: ast.AST, parent: ast.AST) -> Iterator[tuple[int, _CallSite]]:
    """Yield the calls that ``node`` makes itself, with the lines that Python may report while they run."""
    if isinstance(node, ast.Call):
        site = _site_of_call(node, parent)
        yield node.lineno, site
        last_line = node.func.end_lineno or node.lineno
        # from Python 3.12 on, the call of a method has the line of its name
        if last_line != node.lineno:
            yield last_line, site
        yield node.lineno, _CallSite(None, node.func, "__call__", node)
    elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
        # the first and the last element of a deque are not far
        is_end = ast.unparse(node.slice) in ("0", "-1")
        if not is_end:
            yield node.lineno, _CallSite(None, node.value, "__getitem__")
        if isinstance(node.value, ast.Attribute):
            # an attribute with an index, such as ``table.iloc[0]``
            yield node.lineno, _CallSite(None, node.value.value, node.value.attr)
    elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
        call = _shifting_call(node.targets[0], node.value)
        if call is not None:
            site = _site_of_call(call, node.value)
            yield call.lineno, replace(site, shifted=node.targets[0])
    elif isinstance(node, ast.For | ast.comprehension):
        yield node.iter.lineno, _CallSite(None, node.iter, "__iter__")


def _site_of_call(call: ast.Call, parent: ast.AST) -> _CallSite:
    is_sliced = isinstance(parent, ast.Subscript) and _has_slice(parent.slice)
    grows = isinstance(parent, ast.Assign) and _is_joined(parent.targets[0], call)
    if isinstance(call.func, ast.Attribute):
        return _CallSite(
            call.func, call.func.value, call.func.attr, call, is_sliced, grows
        )
    name = call.func.id if isinstance(call.func, ast.Name) else ""
    return _CallSite(call.func, None, name, call, is_sliced, grows)


def _has_slice(index: ast.expr) -> bool:
    indices = index.elts if isinstance(index, ast.Tuple) else [index]
    return any(isinstance(part, ast.Slice) for part in indices)


def _shifting_call(target: ast.Attribute, value: ast.expr) -> ast.Call | None:
    """Return the call in ``value`` that joins ``target`` with others, if a slice cuts off its result or ``target``."""
    call = _without_slice(value)
    if not isinstance(call, ast.Call):
        return None
    is_cut = call is not value
    for piece in _joined_pieces(call):
        whole = _without_slice(piece)
        is_target = ast.unparse(whole) == ast.unparse(target)
        if is_target and (is_cut or whole is not piece):
            return call
    return None


def _without_slice(expression: ast.expr) -> ast.expr:
    """Return ``x`` of an expression such as ``x[1:]``, and other expressions as they are."""
    if isinstance(expression, ast.Subscript) and _has_slice(expression.slice):
        return expression.value
    return expression


def _is_joined(target: ast.expr, call: ast.Call) -> bool:
    """Return whether ``target`` is what the call joins, or one of the elements of the list that it joins."""
    return ast.unparse(target) in [ast.unparse(piece) for piece in _joined_pieces(call)]


def _joined_pieces(call: ast.Call) -> list[ast.expr]:
    """Return the first argument of ``call``, or its elements if it is a list."""
    if not call.args:
        return []
    joined = call.args[0]
    if isinstance(joined, ast.List | ast.Tuple):
        return joined.elts
    return [joined]


# -- comparing a call with the table -----------------------------------------------------------------------------------


def _is_met(slow_call: SlowCall, site: _CallSite, frame: FrameType) -> bool:
    """Return whether ``site`` calls a function of ``slow_call``, and meets its conditions."""
    if slow_call.is_sliced and not site.is_sliced:
        return False
    if slow_call.grows and not site.grows:
        return False
    if slow_call.shifts and not _shifts_by_few(site, frame):
        return False
    if slow_call.is_of_vector and not _is_vector(_value_of(site.receiver, frame)):
        return False
    if not any(_calls(path, site, frame) for path in slow_call.functions):
        return False
    if slow_call.argument is None:
        return True
    return site.call is not None and _has_argument(site.call, slow_call.argument, frame)


def _shifts_by_few(site: _CallSite, frame: FrameType) -> bool:
    """Return whether ``site`` joins a large attribute with pieces that are small beside it.

    An attribute with gradients cannot be changed in place. The size of some pieces is unknown before the line has run.
    """
    if site.shifted is None or site.call is None:
        return False
    shifted = _value_of(site.shifted, frame)
    elements = _number_of_elements(shifted)
    if elements is None or _has_gradients(shifted):
        return False
    for piece in _joined_pieces(site.call):
        piece_elements = _number_of_elements(_value_of(piece, frame)) or 0
        is_other = ast.unparse(piece) != ast.unparse(site.shifted)
        if is_other and piece_elements > _MOST_INSERTED_SHARE * elements:
            return False
    return True


def _calls(path: str, site: _CallSite, frame: FrameType) -> bool:
    """Return whether ``site`` calls the function ``path``."""
    owner_path, _, name = path.rpartition(".")
    if name != site.name:
        return False
    owner = _object_at(owner_path)
    if site.receiver is not None and _is_instance(
        _value_of(site.receiver, frame), owner
    ):
        return True
    if site.function is None or owner is _UNKNOWN:
        return False
    target = _attribute_of(owner, name)
    return target is not _UNKNOWN and _value_of(site.function, frame) is target


def _has_argument(call: ast.Call, argument: Argument, frame: FrameType) -> bool:
    """Return whether ``call`` passes ``argument``."""
    expression = _argument_of(call, argument)
    if expression is None:
        return False
    if argument.kind:
        value = _value_of(expression, frame)
        return _is_of_kind(value, argument)
    constant = expression.value if isinstance(expression, ast.Constant) else _UNKNOWN
    if argument.value is None:
        return constant is not None
    return type(constant) is type(argument.value) and constant == argument.value


def _argument_of(call: ast.Call, argument: Argument) -> ast.expr | None:
    for keyword in call.keywords:
        if keyword.arg == argument.name:
            return keyword.value
    if argument.position is None or argument.position >= len(call.args):
        return None
    passed = call.args[: argument.position + 1]
    if any(isinstance(expression, ast.Starred) for expression in passed):
        return None
    return passed[-1]


def _is_of_kind(value: Any, argument: Argument) -> bool:
    """Return whether ``value``, and its first item if it is a list, are of the classes that ``argument`` names."""
    if not _is_instance(value, _object_at(argument.kind)):
        return False
    if not argument.kind_of_items:
        return True
    if type(value) is not list or not value:
        return False
    return _is_instance(value[0], _object_at(argument.kind_of_items))


def _is_instance(value: Any, kind: Any) -> bool:
    """Return whether the class of ``value`` is ``kind`` or inherits from it; isinstance may call code of the class."""
    return any(base is kind for base in type(value).__mro__)


# -- values, without calling code of the program -----------------------------------------------------------------------


def _object_at(path: str) -> Any:
    """Return the object with this full name if its module is loaded, and else ``_UNKNOWN``."""
    module_name = path
    while module_name and module_name not in sys.modules:
        module_name = module_name.rpartition(".")[0]
    value: Any = sys.modules.get(module_name, _UNKNOWN)
    for name in path[len(module_name) :].split("."):
        if name and value is not _UNKNOWN:
            value = _attribute_of(value, name)
    return value


def _is_vector(value: Any) -> bool:
    """Return whether ``value`` is a tensor of one dimension with many elements.

    A row of a larger one may be the input of a layer, and a loop over a few numbers may call a model for each.
    """
    if not is_one_of(type(value), (Tensor, nn.Parameter)):
        return False
    with without_function_modes():
        return bool(value.dim() == 1 and value.numel() >= _MANY_ELEMENTS)


def _number_of_elements(value: Any) -> int | None:
    """Return the number of elements of a tensor or array; None for other values."""
    if is_one_of(type(value), (Tensor, nn.Parameter)):
        with without_function_modes():
            return int(value.numel())
    if type(value) is np.ndarray:
        return int(value.size)
    return None


def _has_gradients(value: Any) -> bool:
    if type(value) is np.ndarray:
        return False
    with without_function_modes():
        return bool(value.requires_grad)


def _value_of(expression: ast.expr | None, frame: FrameType) -> Any:
    """Return the value of a name, or of attributes of one; ``_UNKNOWN`` for other expressions."""
    if isinstance(expression, ast.Name):
        for namespace in (frame.f_locals, frame.f_globals, vars(builtins)):
            if expression.id in namespace:
                return namespace[expression.id]
    if isinstance(expression, ast.Attribute):
        owner = _value_of(expression.value, frame)
        if owner is not _UNKNOWN:
            return _attribute_of(owner, expression.attr)
    return _UNKNOWN


def _attribute_of(owner: Any, name: str) -> Any:
    if issubclass(type(owner), ModuleType):
        return vars(owner).get(name, _UNKNOWN)
    value = inspect.getattr_static(owner, name, _UNKNOWN)
    return _UNKNOWN if isinstance(value, _COMPUTED_ATTRIBUTES) else value
