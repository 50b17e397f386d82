"""Elements of a report's page before they are HTML, and the formatting of its numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moetool.report.charts import Chart


@dataclass(frozen=True, kw_only=True)
class PageTable:
    """A table whose first so many columns are `words`, and the others numbers."""

    title: str
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: int = 1


@dataclass(frozen=True, kw_only=True)
class CodeBlock:
    """A block of code with a title, such as a command line, that the reader may copy."""

    title: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Section:
    """One section of the page: title, text, tables and charts.

    Attributes:
        name: for links to it.
        title: its heading.
        lead: what to know before the rest.
        code, charts, tables: shown in this order.
        notes: below all of it.
    """

    name: str
    title: str
    lead: str = ""
    code: Sequence[CodeBlock] = ()
    charts: Sequence[Chart] = ()
    tables: Sequence[PageTable] = ()
    notes: Sequence[str] = ()


def count(number: int) -> str:
    """Format a count with three significant digits and a unit: 4217088 is `4.22 M`."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)


def plain(value: object) -> str:
    """Format an option's value for the page: yes and no, lists with commas, a dash for nothing."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ",".join(map(plain, value)) or "–"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {plain(inner)}" for name, inner in value.items()) or "–"
    if isinstance(value, int) and value >= 10_000:
        return f"{value:,}"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def number(value: float | None) -> str:
    """Format a number with four significant digits, or `None` as a dash."""
    return "–" if value is None else f"{value:.4g}"
