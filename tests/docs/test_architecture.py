"""The picture and the table of docs/architecture.md, against the imports."""

import re
import runpy

from pages import ROOT, blocks

from moetool import stages

PAGE = "docs/architecture.md"
HOUSE = runpy.run_path(str(ROOT / "tests" / "test_house.py"))
ROOMS = {room for floor in HOUSE["FLOORS"] for room in floor} - {
    "errors",
    "version",
    "quiet",
    "__main__",
    HOUSE["ROOT"],
}


def drawn(arrow: str) -> set[tuple[str, str]]:
    """From which room to which an arrow of the picture goes."""
    [picture] = [block for block in blocks(PAGE) if block.language == "mermaid"]
    ends = [line.split(f" {arrow} ") for line in picture.lines if f" {arrow} " in line]
    return {
        (upper.strip(), lower.strip())
        for above, below in ends
        for upper in above.split("&")
        for lower in below.split("&")
    }


def imported() -> set[tuple[str, str]]:
    """Every room and those that it imports from."""
    room = HOUSE["room"]
    pairs = {(room(module), room(other)) for module, others in HOUSE["imports"]().items() for other in others}
    return {(upper, lower) for upper, lower in pairs if upper != lower and {upper, lower} <= ROOMS}


def test_the_table_has_every_room() -> None:
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    assert sorted(re.findall(r"^\| `(\w+)` \|", text, re.M)) == sorted(ROOMS)


def test_every_arrow_is_an_import() -> None:
    assert drawn("-->") <= imported()
    assert drawn("-.->") == {("stages", place.split(".")[0]) for place in stages.PLACES}


def test_every_import_follows_the_arrows() -> None:
    arrows = drawn("-->") | drawn("-.->")
    reached = set(arrows)
    while more := {(upper, lower) for upper, middle in reached for above, lower in arrows if middle == above} - reached:
        reached |= more
    assert imported() <= reached
