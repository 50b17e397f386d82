"""Recognition of code of transformers by its source, and classes in front of those that a kernel may stand for."""

import ast
import inspect
import textwrap
from collections.abc import Callable
from functools import cache
from itertools import repeat
from operator import attrgetter, contains
from typing import Any

from torch import nn

_HOOKS, _PRE_HOOKS, _ATTRIBUTES = map(attrgetter, ("_forward_hooks", "_forward_pre_hooks", "__dict__"))
# Passed on, and without effect where masks know of windows, and caches are of the dynamic kind.
_UNUSED = {"sliding_window", "position_ids", "use_cache", "kwargs"}


def says(function: Callable[..., Any] | None, expected: str) -> bool:
    """Whether a function is the `expected` one, but for decorators, types, defaults, and arguments without effect."""
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(function))) if function is not None else ""
        return _plain(source) == _plain(expected)
    except (OSError, TypeError, SyntaxError, IndexError):
        return False


def _plain(source: str) -> str:
    found = ast.parse(source.replace("past_key_values", "cache")).body[0]  # its name before and since 5.24
    if not isinstance(found, ast.FunctionDef):  # a class, or a lambda in some statement
        return ""
    found.decorator_list, found.returns, found.args.defaults = [], None, []
    found.args.args = sorted((own for own in found.args.args if own.arg not in _UNUSED), key=lambda own: own.arg)
    if ast.get_docstring(found) is not None:
        found.body = found.body[1:]
    for place, statement in enumerate(found.body):
        if isinstance(statement, ast.AnnAssign) and statement.value is not None:
            found.body[place] = ast.copy_location(ast.Assign([statement.target], statement.value), statement)
    for node in ast.walk(found):
        if isinstance(node, ast.arg):
            node.annotation = None
        if isinstance(node, ast.Call):
            kept = [keyword for keyword in node.keywords if keyword.arg not in _UNUSED]
            node.keywords = sorted(kept, key=lambda keyword: keyword.arg or "")
    return ast.unparse(found)


class InFront(nn.Module):
    """In front of a class of transformers: does some of what that does by kernels, and leaves it the rest.

    Attributes:
        made: what was found out about tensors that may be replaced, not copied and not saved.
    """

    made: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "made"}

    def __reduce_ex__(self, _: Any) -> Any:
        front, behind = type(self).__bases__
        return _empty, (front, behind), self.__getstate__()


@cache
def in_front_of(behind: Any, front: Any) -> Any:
    """The class `front` before a class of transformers, by whose name it goes."""
    names = {"__module__": behind.__module__, "__qualname__": behind.__qualname__}
    return type(behind.__name__, (front, behind), names)


def _empty(front: Any, behind: Any) -> nn.Module:
    made = in_front_of(behind, front)
    empty: nn.Module = made.__new__(made)
    return empty


def is_watched(*modules: Any) -> bool:
    """Whether somebody wants to see what goes through these modules, or do it himself, so that none may be left out."""
    hooks = any(map(_HOOKS, modules)) or any(map(_PRE_HOOKS, modules))  # by `map`: every token asks
    return hooks or any(map(contains, map(_ATTRIBUTES, modules), repeat("forward")))
