"""Charts as values: what is shown, and the same in words for those who do not see it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

Values: TypeAlias = Sequence[float | None]

FEW = 12  # layers whose bars can be told apart
LONGEST = 26  # letters of a label


@dataclass(frozen=True, kw_only=True)
class Bars:
    """Bars beside each other for every label, one per series; lying ones for labels that are words.

    Attributes:
        title: of the chart.
        labels: of the groups.
        series: heights by name, `None` where there is nothing.
        label_axis, axis: what both axes show.
        log: heights on a logarithmic scale.
        lying: from left to right.
    """

    title: str
    labels: Sequence[str]
    series: Mapping[str, Values]
    label_axis: str
    axis: str
    log: bool = False
    lying: bool = False

    @property
    def words(self) -> str:
        """Caption for readers who cannot see the bars: axes and range of the values."""
        return f"{self.axis} by {self.label_axis}. {_ranges(self.series)}"


@dataclass(frozen=True, kw_only=True)
class Lines:
    """Lines over the same numbers, one per series; `log` as of `Bars`."""

    title: str
    at: Sequence[float]
    series: Mapping[str, Values]
    at_axis: str
    axis: str
    log: bool = False

    @property
    def words(self) -> str:
        """Caption for readers who cannot see the lines: axes and range of the values."""
        return f"{self.axis} by {self.at_axis}. {_ranges(self.series)}"


@dataclass(frozen=True, kw_only=True)
class Heat:
    """A table of numbers as colours.

    Attributes:
        title: of the chart.
        values: `[rows][columns]`, `None` where there is nothing.
        rows, columns: their names.
        row_axis, column_axis: what they are.
        axis: what the numbers are.
        least, most: of the scale; the numbers' own without them.
    """

    title: str
    values: Sequence[Values]
    rows: Sequence[str]
    columns: Sequence[str]
    row_axis: str
    column_axis: str
    axis: str
    least: float | None = None
    most: float | None = None

    @property
    def words(self) -> str:
        """Caption for readers who cannot see the heat map: its axes and range of the values."""
        every = [value for row in self.values for value in row]
        return f"{self.axis} by {self.row_axis} and {self.column_axis}. {_ranges({'Values': every})}"


Chart: TypeAlias = Bars | Lines | Heat


def elided(name: str) -> str:
    """The end of what is too long to stand beside a chart: of a path, what tells it from others."""
    return name if len(name) <= LONGEST else f"…{name[1 - LONGEST :]}"


def begun(name: str) -> str:
    """The beginning of what is too long to stand beside a chart: of a phase or a text, what tells it from others."""
    return name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…"


def by_layer(title: str, layers: Sequence[int], series: Mapping[str, Values], axis: str, *, log: bool = False) -> Chart:
    """Chart of values by layer: bars, or lines for models of many layers."""
    if len(layers) > FEW:
        return Lines(title=title, at=layers, series=series, at_axis="layer", axis=axis, log=log)
    labels = [str(layer) for layer in layers]
    return Bars(title=title, labels=labels, series=series, label_axis="layer", axis=axis, log=log)


def _ranges(series: Mapping[str, Values]) -> str:
    """`gate: 0.1 to 0.4; up: 0.2.`"""
    found = []
    for name, values in series.items():
        if there := [value for value in values if value is not None]:
            least, most = min(there), max(there)
            found.append(f"{name}: {least:.4g}" + ("" if least == most else f" to {most:.4g}"))
    return "; ".join(found) + "."
