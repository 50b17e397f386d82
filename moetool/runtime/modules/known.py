"""Recognition of code of transformers by its source: what a kernel may stand for."""

import ast
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

_UNUSED = {"sliding_window", "position_ids", "use_cache"}  # passed on, and without effect where masks know of windows


def says(function: Callable[..., Any] | None, expected: str) -> bool:
    """Whether a function is the `expected` one, but for decorators, types, defaults, and arguments without effect."""
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(function))) if function is not None else ""
        return _plain(source) == _plain(expected)
    except (OSError, TypeError, SyntaxError, IndexError):
        return False


def _plain(source: str) -> str:
    found = ast.parse(source).body[0]
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
