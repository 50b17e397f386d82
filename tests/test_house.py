"""The plan of the house, read from the imports: no arrow points up, none goes in a circle, and no room is too large.

README and docs/architecture.md draw what is checked here.
"""

import ast
from collections import Counter
from functools import cache
from pathlib import Path

import moetool
from moetool.representations import Representation, representations

PACKAGE = Path(moetool.__file__).parent
ROOT = ""  # files beside the rooms

# From the ground up. A room imports from those below it, and from no other room of its own floor.
FLOORS: tuple[frozenset[str], ...] = (
    frozenset({"errors", "version"}),
    frozenset({"quiet", "compiled"}),
    frozenset({"numerics", "architectures"}),
    frozenset({"representations"}),
    frozenset({"format", "kernels"}),
    frozenset({"checkpoint"}),
    frozenset({"runtime"}),
    frozenset({"calibration", "serving"}),
    frozenset({"costs"}),
    frozenset({"job", "training"}),
    frozenset({"convert", "bases", "reduce"}),
    frozenset({"compress", "upcycle", "moefy", "tune", "measure"}),
    frozenset({"export"}),
    frozenset({"repair"}),
    frozenset({"stages", "demo", "talk"}),
    frozenset({"compare", "report"}),
    frozenset({"cli"}),
    frozenset({"__main__", ROOT}),
)
LARGEST = 0.15  # share of the package's lines that a room may hold
# Names by which the files of a directory say the same thing each of itself.
CONTRACTS = {"DENSE", "TARGET", "KIND", "FORMAT"}


def floor(room: str) -> int:
    return next(level for level, rooms in enumerate(FLOORS) if room in rooms)


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else ROOT


@cache
def modules() -> dict[str, Path]:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def trees() -> dict[str, ast.Module]:
    """Every module of the package, parsed."""
    return {module: ast.parse(path.read_text()) for module, path in modules().items()}


@cache
def imports() -> dict[str, set[str]]:
    """Every module of the package, and those of it that it imports anywhere, `TYPE_CHECKING` blocks included."""
    found: dict[str, set[str]] = {}
    for module, tree in trees().items():
        found[module] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found[module] |= {alias.name for alias in node.names if alias.name in modules()}
            elif isinstance(node, ast.ImportFrom) and node.module in modules():
                names = {f"{node.module}.{alias.name}" for alias in node.names}
                found[module] |= {name if name in modules() else str(node.module) for name in names}
    return found


def test_every_room_has_a_floor() -> None:
    assert {room(module) for module in modules()} == frozenset().union(*FLOORS)


def test_no_arrow_points_up_or_aside() -> None:
    wrong = {
        f"{module} imports {other}"
        for module, others in imports().items()
        for other in others
        if room(module) != room(other) and floor(room(module)) <= floor(room(other))
    }
    assert not wrong


def test_no_circles() -> None:
    """Taking away, again and again, what imports nothing that is left, takes away everything."""
    left = dict(imports())
    while free := [module for module, others in left.items() if not others & left.keys()]:
        for module in free:
            del left[module]
    assert not left


def test_no_room_is_too_large() -> None:
    lines: Counter[str] = Counter()
    for module, path in modules().items():
        lines[room(module)] += len(path.read_text().splitlines())
    largest, size = lines.most_common(1)[0]
    assert size <= LARGEST * lines.total(), f"{largest} holds {size / lines.total():.1%} of the package"


def test_no_room_asks_which_representation_it_has() -> None:
    """A representation says what it takes: outside its room nothing asks for one of them, or for a run-time form."""
    forms = {member for form in representations().values() for member in form.__mro__}
    names = {form.__name__ for form in forms if issubclass(form, Representation)}
    for module, tree in trees().items():
        if room(module) == "representations":
            defined = (node for node in tree.body if isinstance(node, ast.ClassDef))
            names |= {node.name for node in defined if node.name.endswith("Weight") and node.name != "Weight"}
    asked = {
        f"{module}:{node.lineno}"
        for module, tree in trees().items()
        if room(module) != "representations"
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance"
        if names & {part.id for part in ast.walk(node.args[1]) if isinstance(part, ast.Name)}
    }
    assert {"Quantized", "LowRank", "MixedRows", "QuantizedWeight"} <= names
    assert not asked


def test_classes_and_constants_have_names_of_their_own() -> None:
    """Type aliases, type variables and options included: a name says what it is wherever one meets it."""
    places: dict[str, list[str]] = {}
    for module, tree in trees().items():
        for name in public_names(tree):
            places.setdefault(name, []).append(module)
    assert not {name: found for name, found in places.items() if len(found) > 1 and name not in CONTRACTS}


def public_names(tree: ast.Module) -> set[str]:
    """Of the classes and variables that a file defines at its outermost level."""
    names = set()
    for node in tree.body:
        targets: list[ast.expr] = []
        if isinstance(node, ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign):
            targets = [node.target]
        names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return {name for name in names if not name.startswith("_")}
